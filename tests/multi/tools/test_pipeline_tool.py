#!/usr/bin/env python3
"""`shoal sim pipeline` as a user sees it. (test_schedule tests the schedules.)"""
import atexit
import csv
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree

from tap import call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
SVG = "{http://www.w3.org/2000/svg}"
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-pipeline-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
KINDS = ["gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb"]
# Table 9 of Qi et al., "Zero bubble pipeline parallelism", and bubble rates of its table 5.
PAPER = ("--stages", "8", "--microbatches", "24", "--forward", "18.522ms", "--input-grad", "18.086ms", "--weight-grad", "9.337ms",
         "--transfer", "0.601ms", "--kept-share", "0.366", "--shorten", "span")
RATES = {"1f1b": 24.31, "zb-h1": 15.85, "zb-h2": 4.33}


def sim(*words):
    code, out, err = call(SHOAL, "sim", "pipeline", *words, timeout=120)
    expect(code == 0 and not err, words, code, out, err)
    return out


def rows(*words):
    return [json.loads(line) for line in sim(*words, "--format", "json").splitlines()]


def refused(*words, about, code=2):
    got, out, err = call(SHOAL, "sim", "pipeline", *words, timeout=120)
    expect(got == code and not out and len(err.splitlines()) == 1 and about in err and err.startswith("shoal sim"), words, got, out, err)


def all_schedules_are_compared():
    table = sim("--stages", "4", "--microbatches", "8")
    expect([line.split()[0] for line in table.splitlines()[3:]] == KINDS, table)
    found = rows("--stages", "4", "--microbatches", "8")
    expect([row["schedule"] for row in found] == KINDS, found)
    for row in found:
        expect(row["microbatches"] == 8 and row["stages"] % 4 == 0 and row["step_us"] >= 8 * 3000 and row["slots"] >= 1, row)
        expect(abs(row["bubble"] - (1 - 24000 / row["step_us"])) < 1e-6, row)
    (best,) = rows("--stages", "4", "--microbatches", "8", "--schedule", "auto")
    expect(best["step_us"] == min(row["step_us"] for row in found), best)
    lines = list(csv.DictReader(io.StringIO(sim("--stages", "4", "--microbatches", "8", "--format", "csv"))))
    expect([line["schedule"] for line in lines] == KINDS and float(lines[1]["step_us"]) == found[1]["step_us"], lines)


def published_rates_are_met():
    for row in rows(*PAPER, "--schedule", "1f1b,zb-h1,zb-h2"):
        expect(100 * row["span_bubble"] < RATES[row["schedule"]] + 0.006, row)
        expect(abs(100 * row["span_bubble"] - RATES[row["schedule"]]) < 0.006, row)


def memory_limits_the_choice():
    few, many = (rows("--stages", "8", "--microbatches", "16", "--schedule", "auto", "--activations", n)[0] for n in ("4", "12"))
    expect(few["peak_activations"] <= 4 < many["peak_activations"] <= 12 and few["step_us"] > many["step_us"], few, many)
    code, out, err = call(SHOAL, "sim", "pipeline", "--stages", "4", "--microbatches", "6")  # some are impossible: said, and left out
    expect(code == 0 and "without interleaved: " in err and "6 is no multiple" in err and "breadth-first" in out, code, out, err)


def files_are_written_and_read():
    plot, trace, table = (ROOT / name for name in ("v.svg", "v.json", "v.csv"))
    (made,) = rows("--stages", "3", "--microbatches", "5", "--schedule", "v-half", "--plot", plot, "--trace", trace, "--csv", table)
    lines = table.read_text().splitlines()
    cells = [cell for line in lines for cell in line.split(",") if cell]
    expect(len(lines) == 3 and len(cells) == 3 * 6 * 5 and all(re.fullmatch(r"\d+[FBIW]\d+", cell) for cell in cells), lines)
    (read,) = rows("--read", table)
    expect(all(read[name] == made[name] for name in ("ranks", "stages", "microbatches", "step_us", "peak_activations", "slots")), read, made)
    expect(sim("--read", table, "--slots", made["slots"]).count("\n") == 4)
    shapes = list(xml.etree.ElementTree.parse(plot).getroot().iter(f"{SVG}title"))
    expect(len(shapes) == len(cells) and shapes[0].text.startswith("0F0: 0 to "), len(shapes))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    expect(sorted(event["name"] for event in events) == sorted(cells), len(events))
    expect(max(event["ts"] + event["dur"] for event in events) - made["step_us"] < 1e-2, made)


def stages_can_be_recomputed():
    """Forward passes are repeated while ranks wait, so the step of 1f1b grows by less than they take."""
    words = ("--stages", "4", "--microbatches", "8", "--forward", "1ms", "--schedule", "1f1b")
    (plain,), (again,) = rows(*words), rows(*words, "--recompute")
    expect((plain["step_us"], again["step_us"], plain["peak_activations"], again["peak_activations"]) == (33000, 41000, 4, 1), plain, again)
    path, plot = ROOT / "again.csv", ROOT / "again.svg"
    sim(*words, "--recompute", "--csv", path, "--plot", plot)
    expect(path.read_text().startswith("0F0,0F1,0F2,0F3,0R0,0B0,0F4,0R1,0B1") and ">recompute</text>" in plot.read_text(), path.read_text())
    (read,) = rows("--read", path, "--forward", "1ms")
    expect(read["step_us"] == 41000, read)
    sim(*words, "--csv", path)
    (read,) = rows("--read", path, "--forward", "1ms", "--recompute")
    expect(read["step_us"] == 41000, read)


def standard_input_is_read():
    done = subprocess.run([SHOAL, "sim", "pipeline", "--read", "-"], input="0F0,0B0\n1F0,1B0\n", capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0 and "standard input" in done.stdout and not done.stderr, done)


def faults_of_a_file_are_named():
    for text, about in (("0F0,0B0\n1F0", "1B0 is missing on rank 1"), ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "wait for each other for ever"),
                        ("0F0,0Q0", "line 1, cell 2"), ("", "no action")):
        path = ROOT / "wrong.csv"
        path.write_text(text)
        refused("--read", path, about=about, code=1)
    path.write_text("0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3")
    sim("--read", path, "--slots", "2")
    refused("--read", path, "--slots", "1", about="waits with 0F3 for a free slot of stage 1 on rank 1", code=1)
    refused("--read", ROOT / "none.csv", about="cannot read", code=1)


def wrong_words_are_refused():
    refused("--stages", "0", about="--stages takes a number from 1")
    refused("--forward", "fast", about="a time such as 18.5ms")
    refused("--schedule", "zb-h3", about="zb-h")
    refused("--kept-share", "2", about="from 0 to 1")
    refused("--activations", "-1", about="above 0")
    refused("--schedule", "all", "--plot", ROOT / "x.svg", about="choose one with --schedule")
    refused("--schedule", "1f1b", "--activations", "0.5", about="1f1b cannot do with 0.5 activations")
    refused("--stages", "4", "--microbatches", "6", "--schedule", "interleaved", about="6 is no multiple")
    refused("--forward", "0us", about="a microbatch takes no time")
    refused("step", about="'step' is not an option")
    out = sim("--help")
    expect("Usage: shoal sim pipeline" in out and "Exit codes" in out, out)


run_cases([all_schedules_are_compared, published_rates_are_met, memory_limits_the_choice, files_are_written_and_read, stages_can_be_recomputed,
           standard_input_is_read, faults_of_a_file_are_named, wrong_words_are_refused])
