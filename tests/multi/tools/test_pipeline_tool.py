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


def replicas_divide_the_work():
    words = ("--stages", "2", "--microbatches", "4", "--schedule", "gpipe", "--transfer", "6ms")
    path, plot, trace = (ROOT / name for name in ("r.csv", "r.svg", "r.json"))
    (row,) = rows(*words, "--replicas", "3,1", "--csv", path)
    # F of stage 0 takes 1/3 ms, a transfer as long as the larger share of the two: all of it. Then 4 F and 4 B of stage 1.
    expect(abs(row["step_us"] - (1000 / 3 + 6000 + 4 * 1000 + 4 * 2000 + 6000 + 2000 / 3)) < 0.01, row)
    expect(path.read_text() == "x3,0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3,0S0\n1F0,1F1,1F2,1F3,1B0,1B1,1B2,1B3,1S0\n", path.read_text())
    (read,) = rows("--read", path, "--transfer", "6ms", "--sum-replicas", "9ms", "--plot", plot, "--trace", trace)
    expect(abs(read["step_us"] - row["step_us"] - 9000) < 0.01, read, row)
    expect(">rank 0 x3<" in plot.read_text() and ">rank 1<" in plot.read_text() and '"rank 0 x3"' in trace.read_text(), plot.read_text())
    expect("replica sum" in plot.read_text() and "0S0: " in plot.read_text() and "1S0: " not in plot.read_text(), "the drawing")
    sums = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "0S0"]
    expect(len(sums) == 1 and sums[0]["tid"] == 2 and abs(sums[0]["dur"] - 9000) < 0.01, sums)
    refused(*words, "--replicas", "3", about='--replicas must be 2 numbers from 1 to 65536, not "3"')
    refused(*words, "--replicas", "3,0", about="--replicas must be 2 numbers")
    refused(*words, "--replicas", "1,1,1", about="--replicas must be 2 numbers")


def hosts_decide_transfers():
    """Messages within a host are copied once, those between hosts take what the model charges; each cut has its own."""
    megabyte, words = 1 << 20, ("--stages", "4", "--microbatches", "1", "--schedule", "gpipe", "--bytes", "1M")
    within, between = 0.2 + 2 * megabyte / 5e3, 2 * 2 + 30 + (megabyte + 64) * 8e-3 / 25
    compute = 4 * 3000
    for hosts, cuts in ((("--hosts", "1"), 0), ((), 0), (("--hosts", "2"), 1), (("--ranks-per-host", "2"), 1), (("--hosts", "4"), 3),
                        (("--ranks-per-host", "1"), 3), (("--ranks-per-host", "3"), 1), (("--hosts", "3", "--ranks-per-host", "2"), 1)):
        (row,) = rows(*words, *hosts)
        expect(abs(row["step_us"] - compute - 2 * (cuts * between + (3 - cuts) * within)) < 0.01, hosts, row)
        expect(abs(row["within_host_us"] - within) < 1e-3 and abs(row["between_hosts_us"] - between) < 1e-3, row)
    expect((row["hosts"], row["ranks_per_host"], row["bytes"]) == (3, 2, megabyte), row)
    (row,) = rows(*words, "--hosts", "4", "--rate", "100gbit", "--latency", "7us", "--message-us", "3", "--stack", "4GB/s", "--header", "0")
    expect(abs(row["between_hosts_us"] - (2 * (3 + megabyte / 4e3) + 7 + megabyte * 8e-3 / 100)) < 1e-3, row)
    expect(abs(row["step_us"] - compute - 6 * row["between_hosts_us"]) < 0.01, row)
    (row,) = rows(*words, "--memory", "20GB/s", "--signal-us", "1")
    expect(abs(row["step_us"] - compute - 6 * (1 + 2 * megabyte / 20e3)) < 0.01, row)
    # Stages of one rank hand over nothing, and each rank has a host of its own, so all transfers are equal.
    words_v = ("--stages", "2", "--microbatches", "5", "--schedule", "v-zb")
    (row,), (equal,) = rows(*words_v, "--bytes", "1M", "--ranks-per-host", "1"), rows(*words_v, "--transfer", f"{between}us")
    expect(abs(row["transfer_us"] - between) < 1e-3 and abs(row["step_us"] - equal["step_us"]) < 0.01, row, equal)
    table = sim(*words, "--hosts", "2").splitlines()
    expect(table[2].startswith("# 2 hosts of 2 ranks; ms for 1 MiB: 0.41963 within a host, 0.369565 between hosts"), table)
    lines = list(csv.DictReader(io.StringIO(sim(*words, "--hosts", "2", "--format", "csv"))))
    expect(lines[0]["hosts"] == "2" and abs(float(lines[0]["between_hosts_us"]) - between) < 1e-3, lines)


def replicas_on_several_hosts_send_their_shares():
    """Three replicas and one: the larger share is the whole microbatch. Two and two: halves, each within its own pair."""
    words, within = ("--microbatches", "1", "--schedule", "gpipe", "--bytes", "1M"), lambda size: 0.2 + 2 * size / 5e3
    between = lambda size: 34 + (size + 64) * 8e-3 / 25  # noqa: E731
    for replicas, hosts, transfer in (("3,1", "1", within(1 << 20)), ("3,1", "2", between(1 << 20)), ("2,2", "1", within(1 << 19)),
                                      ("2,2", "2", between(1 << 19))):
        (row,) = rows("--stages", "2", *words, "--replicas", replicas, "--hosts", hosts)
        compute = sum(3000 / int(each) for each in replicas.split(","))
        expect(abs(row["step_us"] - compute - 2 * transfer) < 0.01, replicas, hosts, row)


def wrong_hosts_are_refused():
    refused("--hosts", "2", about="are for --bytes")
    refused("--rate", "10gbit", about="are for --bytes")
    refused("--bytes", "1M", "--transfer", "1us", about="--transfer and --bytes both")
    refused("--bytes", "0", about="bytes above 0")
    refused("--bytes", "1M", "--hosts", "0", about="--hosts takes")
    refused("--bytes", "1M", "--hosts", "two", about="--hosts takes")
    refused("--bytes", "1M", "--memory", "0GB/s", about="above 0")
    refused("--stages", "5", "--schedule", "gpipe", "--bytes", "1M", "--hosts", "2", "--ranks-per-host", "2",
            about="room for 4 ranks, but the schedule has 5")
    refused("--stages", "2", "--schedule", "gpipe", "--bytes", "1M", "--replicas", "3,1", "--hosts", "3", "--ranks-per-host", "1",
            about="room for 3 ranks, but the schedule has 4")


def sums_run_beside_actions():
    """Of two stages on each rank, one is summed while the other one is computed; an update follows its sums."""
    words = ("--stages", "2", "--microbatches", "2", "--schedule", "interleaved", "--forward", "2ms")
    path = ROOT / "sums.csv"
    (plain,) = rows(*words)
    (row,) = rows(*words, "--replicas", "2,2", "--sum-replicas", "0ms")
    expect(abs(row["step_us"] * 2 - plain["step_us"]) < 0.01, row, plain)
    (row,) = rows(*words, "--tie", "--sum-tied", "3ms", "--update", "2ms", "--csv", path)
    # Rank 0 comes to the sum of the tie at the end. Each rank waits for it with the second of its updates, of 1 ms each.
    expect(abs(row["step_us"] - plain["step_us"] - 3000 - 1000) < 0.01, row, plain)
    expect(path.read_text() == "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1,0T0,2U0,0U0\n1F0,1F1,3F0,3B0,3F1,3B1,3T0,1B0,1B1,1U0,3U0\n", path.read_text())
    refused("--stages", "1", "--tie", "--schedule", "1f1b", about="--tie needs a first and a last stage")


def standard_input_is_read():
    done = subprocess.run([SHOAL, "sim", "pipeline", "--read", "-"], input="0F0,0B0\n1F0,1B0\n", capture_output=True, text=True, timeout=60)
    expect(done.returncode == 0 and "standard input" in done.stdout and not done.stderr, done)


def faults_of_a_file_are_named():
    for text, about in (("0F0,0B0\n1F0", "1B0 is missing on rank 1"), ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "wait for each other for ever"),
                        ("0F0,3F0,3B0,0B0,3T1,0T0\n1F0,2F0,2B0,1B0,2T0,1T1", "rank 0 waits with 3T1 for T1 of rank 1"),
                        ("0F0,0B0,0T0\n1F0,1B0", "T0 is missing: only rank 0"), ("0F0,0Q0", "line 1, cell 2"), ("", "no action")):
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
           replicas_divide_the_work, hosts_decide_transfers, replicas_on_several_hosts_send_their_shares, wrong_hosts_are_refused,
           sums_run_beside_actions, standard_input_is_read, faults_of_a_file_are_named, wrong_words_are_refused])
