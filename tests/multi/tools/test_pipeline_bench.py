#!/usr/bin/env python3
"""`shoal bench pipeline` as a user sees it. (test_pipeline tests what it measures.)"""
import atexit
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

from tap import call, expect, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-pipeline-"))
atexit.register(shutil.rmtree, ROOT, ignore_errors=True)
RUNS_MAX = 20
RANK_FIELDS = ["record", "rank", "host", "step_us", "computed_us", "waited_us", "sending_us", "bubble", "bytes_sent",
               "bytes_received", "cpu_s", "errors"]


def measured(*words, ranks=2, steps=2, launcher=()):
    given = () if launcher else ("-n", ranks)
    code, out, err = call(*launcher, SHOAL, "bench", "pipeline", *given, "--steps", steps, "--format", "json", *words, timeout=120)
    expect(code == 0, words, code, out, err)
    rows = [json.loads(line) for line in out.splitlines()]
    expect([row["record"] for row in rows] == ["rank"] * ranks + ["pipeline"], rows)
    expect([row["rank"] for row in rows[:-1]] == list(range(ranks)) and not any(row["errors"] for row in rows), rows)
    return rows[:-1], rows[-1]


def refused(*words, about):
    code, out, err = call(SHOAL, "bench", "pipeline", *words)
    told = [line for line in err.splitlines() if line.startswith("shoal bench pipeline: ")]
    expect(code == 2 and not out and len(told) == 1 and about in told[0], words, code, out, err)


def every_rank_reports_its_step():
    ranks, step = measured("--microbatches", "5", "--forward", "3ms", "--input-grad", "2ms", "--weight-grad", "1ms", "--bytes", "64K", ranks=3)
    for row in ranks:
        expect(list(row) == RANK_FIELDS and row["host"] == 0, row)
        neighbors = 1 if row["rank"] in (0, 2) else 2
        expect(row["bytes_sent"] == row["bytes_received"] == 5 * 65536 * neighbors, row)
        expect(row["computed_us"] >= 5 * 6e3 and row["cpu_s"] > 0, row)
        expect(row["computed_us"] + row["waited_us"] + row["sending_us"] <= row["step_us"], row)
        expect(abs(row["bubble"] - (1 - row["computed_us"] / step["step_us"])) < 1e-4, row, step)
    expect((step["schedule"], step["ranks"], step["hosts"], step["stages"], step["microbatches"]) == ("1f1b", 3, 1, 3, 5), step)
    expect(step["ideal_us"] == (5 + 2) * 6e3 and step["step_p90_us"] >= step["step_us"] >= step["ideal_us"], step)
    expect(abs(step["over_ideal"] - step["step_us"] / step["ideal_us"]) < 1e-4, step)
    expect(abs(step["bubble"] - sum(row["bubble"] for row in ranks) / 3) < 1e-4 and abs(step["ideal_bubble"] - 2 / 7) < 1e-4, step)
    expect(step["bytes_sent"] == sum(row["bytes_sent"] for row in ranks) and step["message_bytes"] == 65536, step)


def replicas_and_sums_run():
    """Stage 0 is on two ranks, each with half of a message of 101 bytes; the trace has all ranks' actions."""
    path, trace = ROOT / "replicas.csv", ROOT / "replicas.json"
    path.write_text("x2,0F0,0F1,0B0,0B1,0S0,0T0,0U0\n1F0,1B0,1F1,1B1,1S0,1T0,1U0\n")
    ranks, step = measured("--read", path, "--forward", "2ms", "--bytes", "101", "--trace", trace, ranks=3)
    expect([row["bytes_sent"] for row in ranks] == [100, 102, 202], ranks)
    expect(step["ideal_us"] == 1e3 + 2 * 6e3 + 2e3 and ranks[0]["computed_us"] >= 6e3 and ranks[2]["computed_us"] >= 12e3, step, ranks)
    names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    expect(names.count("0F0") == names.count("0S0") == names.count("0U0") == 2 and names.count("1T0") == 1, names)
    path.write_text("x3,0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    refused("-n", 3, "--read", path, about="the schedule is of 2 ranks with 4 replicas in all, but the communicator has 3")


def every_schedule_runs():
    stages = {"interleaved": 4, "breadth-first": 4, "v-min": 4, "v-half": 4, "v-zb": 4}
    for kind in ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb"):
        _, step = measured("--schedule", kind, "--forward", "300us", "--bytes", "9", steps=1)
        expect((step["schedule"], step["stages"], step["microbatches"]) == (kind, stages.get(kind, 2), 4), step)
    _, step = measured("--schedule", "interleaved", "--stages-per-rank", "3", "--forward", "6us", "--weight-grad", "0us", steps=1)
    expect(step["stages"] == 6 and abs(step["ideal_us"] - (4 * 12 + 4)) < 1e-6, step)


def messages_of_any_size_and_memory_are_checked():
    for size in ("0", "1", "15", "16", "4097", "3M"):
        for memory in ("shared", "plain"):
            _, step = measured("--forward", "200us", "--bytes", size, "--memory", memory, "--ahead", "1", steps=1)
            expect(step["memory"] == memory, step)


def one_rank_has_no_bubble_but_its_overhead():
    (rank,), step = measured("--forward", "10ms", ranks=1)
    expect(step["ideal_bubble"] == 0 and step["ideal_us"] == 2 * 30e3 and rank["bytes_sent"] == 0 and step["bubble"] < 0.3, rank, step)


def stages_are_recomputed():
    """Each pays its forward pass once more, and reads its messages once more; sent they are once."""
    words = ("--microbatches", "4", "--forward", "1ms", "--bytes", "4K")
    (plain, *_), before = measured(*words)
    (again, *_), step = measured(*words, "--recompute")
    expect((before["ideal_us"], step["ideal_us"]) == (5 * 3e3, 5 * 4e3 - 1e3) and step["step_us"] >= step["ideal_us"], before, step)
    expect(again["bytes_sent"] == plain["bytes_sent"] and again["computed_us"] >= 16e3, plain, again)


def schedules_are_read():
    path = ROOT / "schedule.csv"
    path.write_text("0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1B1\n")
    _, step = measured("--read", path, "--forward", "1ms")
    expect(step["schedule"] == "read" and step["microbatches"] == 2, step)
    path.write_text("0F0,0B0\n1F0\n")
    refused("-n", "2", "--read", path, about="schedule.csv: ")
    path.write_text("0F0,0B0\n1F0,1B0\n2F0,2B0\n")
    refused("-n", "2", "--read", path, about="3 ranks, but the communicator has 2")
    refused("-n", "2", "--read", ROOT / "none.csv", about="No such file")


def launchers_start_the_ranks():
    _, step = measured("--forward", "1ms", ranks=3, launcher=(SHOAL, "run", "-n", "3", "--no-prefix"))
    expect(step["ranks"] == 3 and step["microbatches"] == 6, step)


def tables_compare_with_the_schedule():
    code, out, err = call(SHOAL, "bench", "pipeline", "--forward", "2ms", "--steps", "1", "--bytes", "1M")
    lines = out.splitlines()
    expect(code == 0 and max(map(len, lines)) <= 128, out, err)
    expect(re.match(r"# shoal [\d.]+, 1f1b: 2 stages, 4 microbatches, messages of 1 MiB in shared memory, 2 ranks on 1 host$", lines[0]), out)
    expect(re.match(r" rank  host +step +computed +waited +sending +bubble % +sent +received +cpu$", lines[2]), out)
    expect(re.search(r"^ideal     30\.00 ms: the step took [\d.]+ times as long$", out, re.M), out)
    expect(re.search(r"^bubble    [\d.]+ %, ideal 20\.00 %$", out, re.M), out)


def waits_of(events, rank):
    return [event for event in events if event["ph"] == "X" and event["pid"] == rank + 1 and event["tid"] == 2]


def the_last_step_is_traced():
    path = ROOT / "trace.json"
    for _ in range(RUNS_MAX):  # a rank that the machine has delayed may wait for no message; then another run decides
        measured("--forward", "2ms", "--microbatches", "3", "--schedule", "zb-h1", "--trace", path)
        events = json.loads(path.read_text())["traceEvents"]
        if waits_of(events, 0) and waits_of(events, 1):
            break
    for rank in (0, 1):
        names = [event["args"]["name"] for event in events if event["ph"] == "M" and event["pid"] == rank + 1]
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == rank + 1 and event["tid"] == 1]
        expect(names == [f"rank {rank}, host 0"] and len(spans) == 9 and waits_of(events, rank), rank, names, spans)
        expect(sorted(span["name"] for span in spans) == sorted(f"{rank}{kind}{m}" for kind in "FIW" for m in range(3)), spans)
        expect(all(span["dur"] >= 2000 for span in spans), spans)
        expect(all(a["ts"] + a["dur"] <= b["ts"] for a, b in zip(spans, spans[1:])), spans)
    code, out, err = call(SHOAL, "bench", "pipeline", "--forward", "1ms", "--steps", "1", "--trace", ROOT / "none/trace.json")
    expect(code == 1 and "cannot write" in err and "ideal" in out, code, out, err)


def are_in_steps(pid):
    """Returns true if each of the three ranks has completed an action of a step."""
    code, out, _ = call(SHOAL, "top", "--once", "--interval", "0.05", "--format", "json", pid)
    ranks = json.loads(out)["processes"] if code == 0 else []
    return len(ranks) == 3 and all(any(comm["is_track"] and comm["operations"] for comm in rank["communicators"]) for rank in ranks)


def a_killed_worker_is_named():
    process = subprocess.Popen([SHOAL, "bench", "pipeline", "-n", "3", "--forward", "30ms", "--steps", "1000"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 60
        while not are_in_steps(process.pid):
            expect(time.monotonic() < until, "the ranks have not come to their steps")
            time.sleep(0.05)
        children = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
        os.kill(int(children.read_text().split()[1]), signal.SIGKILL)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    expect(process.returncode == 128 + 9 and "rank 1 (process" in err and "was ended by signal 9" in err, process.returncode, err)
    told = [line for line in err.splitlines() if re.match(r"shoal bench: rank [02]: SHOAL_ERR_PEER_LOST: ", line)]
    expect(len(told) == 2 and all("rank 1 (process" in line for line in told), err)


def measurements_that_make_no_sense_are_refused():
    refused("--schedule", "1f2b", about="one of gpipe, 1f1b")
    refused("--forward", "5", about="a time such as 18.5ms")
    refused("--bytes", "-1", about="--bytes")
    refused("--steps", "0", about="--steps")
    refused("--ahead", "0", about="--ahead")
    refused("--activations", "0", about="a number above 0")
    refused("--ahead", "257", about="--ahead takes a number from 1 to 256")
    refused("--forward", "0us", about="a microbatch takes no time")
    refused("--memory", "gpu", about="one of shared, plain")
    refused("everything", about="'everything' is not an option")
    refused("-n", "3", "--schedule", "interleaved", "--microbatches", "4", about="interleaved: ")
    refused("-n", "2", "--schedule", "1f1b", "--stages-per-rank", "2", about="1f1b: ")


def help_teaches():
    code, out, err = call(SHOAL, "bench", "pipeline", "--help")
    expect(code == 0 and not err and max(map(len, out.splitlines())) <= 128, out)
    expect(all(word in out for word in ("Usage:", "Figures:", "Examples:", "Exit codes:", "--schedule", "--microbatches")), out)
    expect("shoal bench pipeline --help" in call(SHOAL, "bench", "--help")[1])
    expect(re.search(r"^ +shoal bench pipeline +\w", call(SHOAL, "--help")[1], re.M))
    expect(call(SHOAL, "help", "bench", "pipeline")[1] == out)


if __name__ == "__main__":
    run_cases([every_rank_reports_its_step, every_schedule_runs, replicas_and_sums_run, messages_of_any_size_and_memory_are_checked,
               one_rank_has_no_bubble_but_its_overhead, stages_are_recomputed, schedules_are_read, launchers_start_the_ranks, tables_compare_with_the_schedule, the_last_step_is_traced,
               a_killed_worker_is_named, measurements_that_make_no_sense_are_refused, help_teaches])
