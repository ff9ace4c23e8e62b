#!/usr/bin/env python3
"""`shoal trace`: exact sums and events from invented recorder files, refusals, and recorder files of real jobs."""
import json
import os
import random
import subprocess
import tempfile
import time

from tap import call, expect, free_port, run_cases

SHOAL = os.environ["SHOAL_COMMAND"]
RUNS_MAX = 10  # tries for a job during which the machine must not stall
EXAMPLES = os.environ["SHOAL_EXAMPLES"]
TICKS = 10**13  # of the clock when the invented jobs begin
UNIX_US = 1767225600000000  # 2026-01-01 00:00:00


def record(rank=0, posted=0, arrived=None, done=None, **more):
    """Returns one line's object. Times are in microseconds since the job began; a tick is half a nanosecond."""
    def ticks(us):
        return None if us is None else TICKS + round(us * 2000)
    fields = {
        "comm": "world", "comm_id": "00000000000000aa", "rank": rank, "size": 2, "world_rank": rank, "host": "node", "pid": 100 + rank,
        "record": 0, "sequence": 1, "kind": "all-reduce", "algorithm": "direct", "count": 1024, "type": "FLOAT32", "op": "SUM",
        "root": 0, "tag": 7, "status": "SHOAL_OK", "posted_us": 0.0, "arrived_us": None, "done_us": None, "last_rank": -1,
        "late_us": 0.0, "step": -1, "peer": -1, "clock": "boot-1", "ns_per_tick": 0.5, "posted_ticks": ticks(posted),
        "arrived_ticks": ticks(arrived), "done_ticks": ticks(done), "unix_us": UNIX_US + round(posted)}
    fields.update(more)
    return fields


def text_of(records):
    return "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in records)


class Folder:
    """A temporary folder with files of lines. trace() runs the command in it."""

    def __init__(self):
        self.held = tempfile.TemporaryDirectory(prefix="shoal-trace-")
        self.path = self.held.name

    def write(self, name, content):
        with open(os.path.join(self.path, name), "wb") as file:
            file.write(content if isinstance(content, bytes) else (content if isinstance(content, str) else text_of(content)).encode())
        return name

    def trace(self, *words):
        return call(SHOAL, "trace", *words, cwd=self.path)

    def sums(self, *words):
        code, out, err = self.trace("--json", *words)
        expect(code == 0, code, out, err)
        return json.loads(out), err

    def events(self, name="shoal-trace.json"):
        with open(os.path.join(self.path, name), encoding="utf-8") as file:
            return json.load(file)["traceEvents"]


def sums_of(records):
    folder = Folder()
    folder.write("flight", records)
    return folder.sums("flight")[0], folder.events()


def refused(folder, *words, about, code=2):
    got, out, err = folder.trace(*words)
    expect(got == code, f"exit code {got}", out, err)
    expect(out == "" and err.startswith("shoal trace: ") and err.count("\n") == 1 and about in err, about, out, err)


def spans(events, name=None):
    return [e for e in events if e["ph"] in "XB" and (name is None or e["name"] == name)]


# Rank 1 is 10 us late for operation 1 and 30 us late for 2; rank 0 is 4 us late for 3.
LATE = [record(0, 0, 10, 12), record(1, 10, 10, 12),
        record(0, 20, 50, 51, sequence=2, record=1), record(1, 50, 50, 54, sequence=2, record=1),
        record(0, 64, 64, 65, sequence=3, record=2, kind="barrier", count=0),
        record(1, 60, 64, 65, sequence=3, record=2, kind="barrier", count=0)]


def late_ranks_are_blamed_exactly():
    sums, _ = sums_of(LATE)
    expect(sums["records"] == 6 and sums["operations"] == 3 and sums["duplicates"] == 0 and sums["span_us"] == 65, sums)
    expect(sums["begin_unix_us"] == UNIX_US, sums)
    expect(sums["ranks"] == [
        {"communicator": None, "rank": 1, "host": "node", "pid": 101, "operations": 3, "last_in": 2, "late_median_us": 10,
         "late_p99_us": 30, "late_worst_us": 30, "others_waited_us": 40},
        {"communicator": None, "rank": 0, "host": "node", "pid": 100, "operations": 3, "last_in": 1, "late_median_us": 4,
         "late_p99_us": 4, "late_worst_us": 4, "others_waited_us": 4}], sums["ranks"])
    expect([(w["sequence"], w["late_us"], w["last_rank"], w["at_us"]) for w in sums["worst"]] ==
           [(2, 30, 1, 20), (1, 10, 1, 0), (3, 4, 0, 60)], sums["worst"])


def percentiles_are_of_all_operations():
    sums, _ = sums_of([record(r, 1000 * i + r * i, 1000 * i + i, 1000 * i + i, sequence=i, record=i - 1)
                       for r in (0, 1) for i in range(1, 201)])
    worst = sums["ranks"][0]
    expect([worst[key] for key in ("last_in", "late_median_us", "late_p99_us", "late_worst_us", "others_waited_us")] ==
           [200, 100, 198, 200, 20100], worst)


def kinds_are_summed_exactly():
    sums, _ = sums_of(LATE)
    (comm,) = sums["communicators"]
    expect(comm["name"] == "world" and comm["ranks"] == comm["ranks_with_lines"] == 2 and comm["span_us"] == 65, comm)
    # The all-reduces took 12, 2, 31 and 4 us, including 10 and 30 of waiting; the barriers took 1 and 5, including 4.
    expect(comm["kinds"] == [
        {"kind": "all-reduce", "operations": 2, "bytes": 8192, "median_us": 4, "p99_us": 31, "waiting": 0.8163},
        {"kind": "barrier", "operations": 1, "bytes": 0, "median_us": 1, "p99_us": 5, "waiting": 0.6667}], comm)


def events_are_as_the_viewers_read_them():
    _, events = sums_of(LATE)
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"]
    expect(names == [(1, "rank 0 (node, 100)"), (2, "rank 1 (node, 101)")], names)
    tracks = [(e["pid"], e["tid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    expect(tracks == [(1, 1, "world"), (2, 2, "world")], tracks)
    (first, *_), waits = spans(events, "all-reduce 1024 float32 sum"), spans(events, "waiting for ranks")
    expect((first["ts"], first["dur"], first["pid"], first["tid"]) == (0, 12, 1, 1), first)
    expect(first["args"] == {"communicator": "world", "sequence": 1, "algorithm": "direct", "bytes": 4096, "status": "SHOAL_OK",
                             "tag": 7, "last_rank": 1, "late_us": 10}, first)
    expect([(e["ts"], e["dur"]) for e in waits] == [(0, 10), (20, 30), (60, 4)], waits)
    runs = spans(events, "running")
    expect([(e["ts"], e["dur"]) for e in runs] == [(10, 2), (50, 1), (64, 1), (10, 2), (50, 4), (64, 1)], runs)
    marks = [(e["ts"], e["pid"], e["s"], e["name"]) for e in events if e["ph"] == "i"]
    expect(marks == [(64, 1, "t", "came last, 4.0 us late"), (10, 2, "t", "came last, 10.0 us late"),
                     (50, 2, "t", "came last, 30.0 us late")], marks)


def check_nesting(events):
    """Events of one track nest; open ones come last."""
    open_until = {}
    for e in sorted(spans(events), key=lambda e: (e["ts"], -e.get("dur", 1e18))):
        stack = open_until.setdefault(e["tid"], [])
        end = e["ts"] + e["dur"] if e["ph"] == "X" else float("inf")
        while stack and stack[-1] <= e["ts"] + 1e-6:
            stack.pop()
        expect(not stack or end <= stack[-1] + 1e-6, "an event crosses the end of another of its track", e, stack)
        stack.append(end)


def overlapping_operations_get_tracks_of_their_own():
    _, events = sums_of([record(0, 0, 1, 30, size=1), record(0, 2, 3, 40, sequence=2, record=1, size=1),
                         record(0, 4, 5, 20, sequence=3, record=2, size=1), record(0, 30, 31, 35, sequence=4, record=3, size=1)])
    check_nesting(events)
    tracks = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    expect(tracks == ["world", "world (2)", "world (3)"], tracks)
    where = {e["args"]["sequence"]: e["tid"] for e in spans(events, "all-reduce 1024 float32 sum")}
    expect(where == {1: 1, 2: 2, 3: 3, 4: 1}, where)


def names_tell_type_operator_and_root():
    cases = [({"kind": "reduce", "op": "SCALED_SUM", "root": 1, "type": "BFLOAT16", "count": 3}, "reduce 3 bfloat16 scaled sum to 1", 6),
             ({"kind": "broadcast", "root": 1, "type": "FLOAT64", "count": 2}, "broadcast 2 float64 from 1", 16),
             ({"kind": "reduce-scatter", "type": "INT8", "op": "BITXOR", "count": 5}, "reduce-scatter 5 int8 bitxor", 5),
             ({"kind": "all-gather", "type": "UINT8", "count": 0}, "all-gather 0 uint8", 0),
             ({"kind": "gather", "root": 0, "type": "INT64", "count": 1}, "gather 1 int64 to 0", 8),
             ({"kind": "scatter", "root": 0, "type": "INT32", "count": 1}, "scatter 1 int32 from 0", 4),
             ({"kind": "all-to-all", "type": "FLOAT16", "count": 10**15}, "all-to-all 1000000000000000 float16", 2 * 10**15),
             ({"kind": "barrier", "count": 0}, "barrier", 0), ({"kind": "split", "count": 8}, "split 8 bytes", 8),
             ({"kind": "send", "root": 1, "count": 4}, "send 4 float32 to 1", 16),
             ({"kind": "receive", "root": 1, "count": 4}, "receive 4 float32 from 1", 16), ({"kind": "drain", "root": -1}, "drain", 0),
             ({"kind": "of-the-future", "count": 2}, "of-the-future 2 float32", 8)]
    _, events = sums_of([record(0, 10 * i, 10 * i + 1, 10 * i + 2, sequence=i + 1, record=i, size=1, **more)
                         for i, (more, _, _) in enumerate(cases)])
    got = [(e["name"], e["args"]["bytes"]) for e in spans(events) if "args" in e]
    expect(got == [(name, count) for _, name, count in cases], got)


def action(rank, kind, microbatch, posted, arrived, done, **more):
    """A span of a pipeline whose stages are ranks."""
    return record(rank, posted, arrived, done, **{**dict(
        comm="gpt actions", comm_id="00000000000000bb", kind=kind, algorithm="", count=rank, tag=microbatch, type="UINT8", root=-1,
        peer=1 - rank if arrived != posted else -1, step=1 - rank if arrived != posted else -1), **more})


# 1F1B of two microbatches. The second backward pass of stage 1 takes 20 us, the first one 18; each message takes 2 us.
STEP = [action(0, "forward", 0, 0, 0, 10, record=0), action(0, "forward", 1, 10, 10, 20, record=1),
        action(0, "backward", 0, 20, 42, 52, record=2), action(0, "backward", 1, 52, 72, 82, record=3),
        action(1, "forward", 0, 0, 12, 22, record=0), action(1, "backward", 0, 22, 22, 40, record=1),
        action(1, "forward", 1, 40, 40, 50, record=2), action(1, "backward", 1, 50, 50, 70, record=3),
        action(1, "hand over", 1, 70, None, 71, record=4, peer=0, step=0)]


def pipelines_are_measured_and_predicted_exactly():
    sums, _ = sums_of(STEP)
    (pipeline,) = sums["pipelines"]
    ranks = pipeline.pop("ranks")
    expect(pipeline == {"name": "gpt actions", "whole_steps": 1, "step": 1, "stages": 2, "microbatches": 2, "step_us": 82, "bubble": 0.4024,
                        "predicted_step_us": 78, "predicted_bubble": 0.3718}, pipeline)
    expect(ranks == [{"rank": 0, "computing": 0.4878, "waiting": 0.5122, "longest_wait_us": 22,
                      "longest_wait": "backward of stage 0, microbatch 0"},
                     {"rank": 1, "computing": 0.7073, "waiting": 0.1463, "longest_wait_us": 12,
                      "longest_wait": "forward of stage 1, microbatch 0"}], ranks)
    expect(sums["failed"] == [] and all(rank["operations"] == 0 for rank in sums["ranks"]), sums)
    folder = Folder()
    folder.write("flight", STEP)
    _, out, _ = folder.trace("flight")
    expect("Pipeline gpt actions: 2 ranks, 2 stages, 2 microbatches; 1 whole step, step 1 has the median length\n"
           "  measured:  step        0.082 ms, bubble  40.2 %\n"
           "  predicted: step        0.078 ms, bubble  37.2 % (mean times, no messages)\n" in out, out)
    expect("  0.022 ms: 0B0 for stage 1\n" in out, out)


def replicas_are_one_rank_of_the_schedule():
    """Ranks 0 and 1 have the same actions. An update is a part of the prediction, and a sum is not."""
    lines = [action(rank, kind, 0, begin, begin, end, size=3, count=rank // 2, record=number)
             for rank in range(3)
             for number, (kind, begin, end) in enumerate(
                 [("forward", 0, 5), ("backward", 25, 35), ("replica sum", 35, 36), ("update", 36, 38)] if rank < 2 else
                 [("forward", 5, 10), ("backward", 10, 25), ("replica sum", 25, 26), ("update", 26, 28)])]
    (pipeline,) = sums_of(lines)[0]["pipelines"]
    expect((pipeline["whole_steps"], pipeline["stages"], pipeline["step_us"], pipeline["predicted_step_us"]) == (1, 2, 38, 37), pipeline)
    expect([row["rank"] for row in pipeline["ranks"]] == [0, 1, 2], pipeline)
    _, events = sums_of(lines)
    names = {event["name"] for event in events if event["ph"] == "X"}
    expect("1S0" in str(events) and "0U0" in str(events), names)


def the_median_step_is_measured():
    """Not the first one, which is slow, and not a mean."""
    def after(step, slower):
        begin = step * 1000
        return [action(line["rank"], line["kind"], line["tag"], *(begin + slower * (t - TICKS) / 2000 if t else None for t in (
            line["posted_ticks"], line["arrived_ticks"], line["done_ticks"])), sequence=step, record=line["record"] + 10 * step)
            for line in STEP[:-1]]
    lines = after(3, 2)
    lines[4]["posted_ticks"] -= 1000  # rank 1 waits since before the step
    (pipeline,) = sums_of(after(1, 10) + lines + after(5, 1))[0]["pipelines"]
    expect(pipeline["ranks"][1]["longest_wait_us"] == 24 and pipeline["ranks"][1]["waiting"] == 0.1463, pipeline)
    expect((pipeline["whole_steps"], pipeline["step"], pipeline["step_us"], pipeline["predicted_step_us"], pipeline["bubble"]) ==
           (3, 3, 164, 156, 0.4024), pipeline)


def split_backward_passes_are_predicted_apart():
    lines = [action(0, "forward", 0, 0, 0, 10, size=1, record=0), action(0, "input gradient", 0, 10, 10, 15, size=1, record=1),
             action(0, "weight gradient", 0, 16, 16, 19, size=1, record=2)]
    (pipeline,) = sums_of(lines)[0]["pipelines"]
    expect((pipeline["step_us"], pipeline["predicted_step_us"], pipeline["predicted_bubble"]) == (19, 18, 0), pipeline)
    expect(pipeline["bubble"] == round(1 / 19, 4) and pipeline["ranks"][0]["longest_wait_us"] == 0, pipeline)


def steps_that_are_not_whole_do_not_count():
    def later(step, lines):
        return [dict(line, sequence=step, record=line["record"] + 100 * step) for line in lines]
    forward_only = [line for line in STEP if line["kind"] == "forward"]
    failed = [dict(line, status="SHOAL_ERR_TIMEOUT") if line["rank"] == 1 else line for line in STEP]
    open_end = [dict(line, done_ticks=None, status="SHOAL_PENDING") if line["tag"] else line for line in STEP]
    for lines in (forward_only, STEP[1:], STEP[:4], failed, open_end):
        folder = Folder()
        folder.write("flight", later(2, lines))
        (pipeline,) = folder.sums("flight")[0]["pipelines"]
        expect((pipeline["whole_steps"], pipeline["step_us"], pipeline["bubble"]) == (0, 0, 0), pipeline)
        expect("but no whole step with the actions of all ranks is in these files" in folder.trace("flight")[1], lines)
        (pipeline,) = sums_of(STEP + later(2, lines) + later(3, STEP))[0]["pipelines"]
        expect((pipeline["whole_steps"], pipeline["step_us"]) == (2, 82), pipeline)


def actions_are_drawn_as_schedules_write_them():
    _, events = sums_of(STEP)
    boxes = [(e["name"], e["pid"], e["ts"], e["dur"]) for e in spans(events) if "args" in e]
    expect(boxes[:4] == [("0F0", 1, 0, 10), ("0F1", 1, 10, 10), ("0B0", 1, 20, 32), ("0B1", 1, 52, 30)], boxes)
    expect(boxes[-1] == ("hand over of stage 1, microbatch 1", 2, 70, 1), boxes)
    (box,) = spans(events, "0B0")
    expect(box["args"] == {"stage": 0, "microbatch": 0, "step": 1, "status": "SHOAL_OK", "waited_for_rank": 1, "waited_for_stage": 1}, box)
    expect([(e["ts"], e["dur"]) for e in spans(events, "waiting for stage 1")] == [(20, 22), (52, 20)], events)
    expect(len(spans(events, "computing")) == 8, events)
    expect([e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["gpt actions"] * 2, events)
    check_nesting(events)


def operations_told_twice_count_once():
    open_line, done_line = record(0, 0, 10, None, status="SHOAL_PENDING"), record(0, 0, 10, 12)
    for lines in ([open_line, record(1, 10, 10, 12), done_line, done_line], [done_line, open_line, record(1, 10, 10, 12), open_line]):
        sums, events = sums_of(lines)
        expect((sums["records"], sums["duplicates"], sums["failed"]) == (2, 2, []), sums)
        expect(len(spans(events, "all-reduce 1024 float32 sum")) == 2, events)


def failed_and_open_operations_come_first():
    folder = Folder()
    lost = {"status": "SHOAL_ERR_PEER_LOST", "size": 4, "sequence": 9, "record": 0, "peer": 3}
    folder.write("flight", [record(0, 0, None, 2000000, **lost), record(1, 1, None, 1000001, **lost),
                            record(2, 5, 6, None, **dict(lost, status="SHOAL_PENDING", peer=-1))])
    sums, _ = folder.sums("flight")
    expect(sums["failed"] == [{"communicator": "world", "sequence": 9, "operation": "all-reduce 1024 float32 sum", "at_us": 0,
                               "statuses": [{"status": "SHOAL_ERR_PEER_LOST", "ranks": [0, 1]}, {"status": "SHOAL_PENDING", "ranks": [2]}],
                               "ranks_without_record": [3]}], sums["failed"])
    code, out, err = folder.trace("flight")
    expect(code == 0 and err == "", code, err)
    lines = out.splitlines()
    expect(lines[3:8] == ["FAILED OR UNDER WAY: 1 operation", "  0.000000 s  world number 9  all-reduce 1024 float32 sum",
                          "      SHOAL_ERR_PEER_LOST on ranks 0,1, after up to 2.000000 s, waiting for rank 3",
                          "      under way on rank 2", "      no record of it on rank 3"], out)
    events = folder.events()
    check_nesting(events)
    (opened,) = spans(events, "all-reduce 1024 float32 sum: under way")
    expect(opened["ph"] == "B" and "dur" not in opened, opened)
    expect([(e["ph"], e["ts"]) for e in spans(events, "running")] == [("B", 6)], events)
    failed = spans(events, "all-reduce 1024 float32 sum: SHOAL_ERR_PEER_LOST")
    expect([e["dur"] for e in failed] == [2000000, 1000000] and failed[0]["args"]["peer"] == 3, failed)


def different_calls_of_one_number_are_all_shown():
    mismatch = {"status": "SHOAL_ERR_MISMATCH", "size": 3, "count": 65536}
    folder = Folder()
    folder.write("flight", [record(0, 0, None, 9, **mismatch), record(1, 1, None, 9, **dict(mismatch, count=65535)),
                            record(2, 5, None, 9, **mismatch)])
    sums, _ = folder.sums("flight")
    (failed,) = sums["failed"]
    expect(failed["calls"] == [{"operation": "all-reduce 65536 float32 sum", "ranks": [0, 2]},
                               {"operation": "all-reduce 65535 float32 sum", "ranks": [1]}], failed)
    code, out, err = folder.trace("flight")
    expect(code == 0 and out.splitlines()[3:8] == [
        "FAILED OR UNDER WAY: 1 operation", "  0.000000 s  world number 1  different calls",
        "      called all-reduce 65536 float32 sum: rank 0,2", "      called all-reduce 65535 float32 sum: rank 1",
        "      SHOAL_ERR_MISMATCH on ranks 0-2, after up to 0.000009 s"], out, err)


def different_calls_that_returned_are_shown():
    """A root whose call sends inline data finishes at once, so only the next operation fails."""
    folder = Folder()
    folder.write("flight", [record(0, 0, 1, 2, kind="broadcast", count=1), record(1, 0, 1, 2, kind="barrier", count=0)])
    (failed,) = folder.sums("flight")[0]["failed"]
    expect([c["operation"] for c in failed["calls"]] == ["broadcast 1 float32 from 0", "barrier"], failed)
    folder.write("parts", [record(r, 0, 1, 2, kind="all-to-all", count=4 + r) for r in (0, 1)])
    expect(folder.sums("parts")[0]["failed"] == [], "parts may have different lengths")


def operations_that_wait_at_the_same_time_are_one_incident():
    """Rank 0 posts five all-reduces 10 us apart and a barrier; rank 1 comes to all of them 100 us after the first one.
    Later rank 1 is 20 us late for one more. Rank 0 has waited for 100 and 20 us."""
    folder, lines = Folder(), []
    for i in range(5):
        lines += [record(0, 10 * i, 100, 101, sequence=i + 1, record=i), record(1, 100, 100, 101, sequence=i + 1, record=i)]
    lines += [record(0, 50, 100, 101, sequence=6, record=5, kind="barrier", count=0),
              record(1, 100, 100, 101, sequence=6, record=5, kind="barrier", count=0),
              record(0, 200, 220, 221, sequence=7, record=6), record(1, 220, 220, 221, sequence=7, record=6)]
    folder.write("flight", lines)
    sums, _ = folder.sums("flight")
    blame = sums["ranks"][0]
    expect((blame["rank"], blame["last_in"], blame["others_waited_us"], blame["late_worst_us"]) == (1, 7, 120, 100), blame)
    expect([(w["sequence"], w["late_us"], w["operations"], w["last_rank"]) for w in sums["worst"]] == [(1, 100, 6, 1), (7, 20, 1, 1)],
           sums["worst"])
    _, out, _ = folder.trace("flight")
    expect(out.count("rank 1 (node, 101); 5 more waited then\n") == 1 and " 0.120\n" in out, out)


def ranks_that_wait_at_the_same_time_count_each():
    sums, _ = sums_of([record(r, 10 * (r == 2), 10, 11, size=3, sequence=s, record=s - 1) for r in range(3) for s in (1, 2)])
    expect(sums["ranks"][0]["rank"] == 2 and sums["ranks"][0]["others_waited_us"] == 20, sums["ranks"])


def missing_ranks_and_cut_histories_are_named():
    folder = Folder()
    folder.write("flight", [record(1, 0, 1, 2, size=7, record=4, sequence=5, last_rank=3, late_us=250.5),
                            record(1, 9, 10, 12, size=7, record=6, sequence=7, last_rank=3, late_us=0.5),
                            record(5, 0, 1, 2, size=7, sequence=1)])
    sums, _ = folder.sums("flight")
    expect(sums["absent"] == [{"communicator": "world", "ranks": [0]}, {"communicator": "world", "ranks": [2, 3, 4]},
                              {"communicator": "world", "ranks": [6]}], sums["absent"])
    expect(sums["cut"] == [{"communicator": "world", "rank": 1, "gone": 5, "operations": 7, "later": 0}], sums["cut"])
    # The files of other ranks blame a rank without a file. They cover at most 1 us of the 250 us of waiting.
    expect(sums["ranks"][0] == {"communicator": "world", "rank": 3, "host": None, "pid": None, "operations": 0, "last_in": 2,
                                "late_median_us": 0.5, "late_p99_us": 250.5, "late_worst_us": 250.5, "others_waited_us": 1.5}, sums)
    _, out, _ = folder.trace("flight")
    for line in ("  no lines of rank 0 of world: the file was not given, or the process ended before it could write",
                 "  no lines of ranks 2-4 of world: the file was not given, or the process ended before it could write",
                 "  rank 1 of world: 5 of its 7 operations are gone; a recorder keeps the last 1,024"):
        expect(line in out.splitlines(), line, out)
    (absent,) = [line.split() for line in out.splitlines() if line.startswith("  3 of world (no lines) ")]
    expect(absent[5:7] == ["2", "-"], absent)


def newest_operations_that_were_cut_off_are_named():
    """Rank 0 has lines of operations 2 and 3 only and was last in 3. In the other ranks' files it was last in 1, 4 and 5."""
    folder = Folder()
    others = [record(r, 10 * i + (i == 2 and r == 1), 10 * i + 1, 10 * i + 2, sequence=i, record=i - 1, size=3,
                     last_rank=1 if i == 2 else 0, late_us=1) for i in range(1, 6) for r in (1, 2)]
    folder.write("flight", others + [record(0, 20, 21, 22, sequence=2, record=1, size=3),
                                     record(0, 31, 31, 32, sequence=3, record=2, size=3),
                                     record(0, 33, 34, 35, sequence=99, record=3, size=3, kind="send", root=1)])
    sums, _ = folder.sums("flight")
    expect(sums["cut"] == [{"communicator": "world", "rank": 0, "gone": 1, "operations": 4, "later": 2}], sums["cut"])
    code, out, err = folder.trace("flight")
    lines = out.splitlines()
    expect(code == 0 and "Not in these files" in lines, out, err)
    expect("  rank 0 of world: 1 of its 4 operations are gone; a recorder keeps the last 1,024" in lines, out)
    newest = "its newest operations are cut off; the others saw it come last in 2 after its last line"
    expect(f"  rank 0 of world: {newest}" in lines, out)
    blames = {line.split()[0]: line.split()[3:5] for line in lines if line.startswith(("  0 (", "  1 (", "  2 ("))}
    expect(blames == {"0": ["4", "-"], "1": ["1", "5"], "2": ["0", "5"]}, out)


def files_are_told_without_a_hint_at_the_options():
    folder = Folder()
    folder.write("prose", "# Shoal\n")
    folder.write("bad", text_of(LATE[:1]) + "{}\n")
    for words, said in ((["nowhere"], "cannot open nowhere: No such file or directory"),
                        (["prose"], "prose:1: column 1: this is not a line of a flight recorder: those begin with '{'"),
                        (["bad"], 'bad:2: there is no "comm": this is not a line of this version\'s flight recorder')):
        code, out, err = folder.trace(*words)
        expect((code, out, err) == (2, "", f"shoal trace: {said}\n"), code, out, err)
    refused(folder, "--jason", "prose", about="(shoal trace --help explains)")


def processes_of_one_machine_share_its_clock_exactly():
    """Each process measures the clock's rate itself, with some error, which would grow to 100 ms within an hour."""
    hour = 3600e6
    sums, _ = sums_of([record(0, 0, 1, 2, size=3), record(1, 1, 1, 2, size=3, ns_per_tick=0.500014), record(2, 0.5, 1, 2, size=3),
                       record(0, hour, hour + 6, hour + 7, size=3, sequence=2, record=1),
                       record(1, hour + 6, hour + 6, hour + 7, size=3, sequence=2, record=1, ns_per_tick=0.500014),
                       record(2, hour + 2, hour + 6, hour + 7, size=3, sequence=2, record=1, ns_per_tick=0.499986)])
    expect([(w["late_us"], w["last_rank"]) for w in sums["worst"]] == [(6, 1), (1, 1)], sums["worst"])
    expect(sums["span_us"] == hour + 7, sums)


def clocks_of_several_machines_are_aligned_by_operations():
    lines = []
    for i in range(9):  # the other machine's clock has another offset and rate; it shows arrivals 2 us later, once 500
        lines.append(record(0, 100 * i, 100 * i + 20, 100 * i + 30, sequence=i + 1, record=i))
        arrived = 100 * i + 20 + (500 if i == 4 else 2)
        lines.append(record(1, 100 * i + 20, None, None, sequence=i + 1, record=i, host="other", clock="boot-2", ns_per_tick=0.25,
                            posted_ticks=77 + (100 * i + 20) * 4000, arrived_ticks=77 + arrived * 4000,
                            done_ticks=77 + (arrived + 600) * 4000, unix_us=UNIX_US + 10**12))
    sums, _ = sums_of(lines)
    expect(sums["clocks"] == [{"host": "node", "clock": "boot-1", "aligned_by": "reference", "shared_operations": 0},
                              {"host": "other", "clock": "boot-2", "aligned_by": "operations", "shared_operations": 9}], sums["clocks"])
    expect(sums["ranks"][0]["rank"] == 1 and sums["ranks"][0]["late_median_us"] == 18 == sums["ranks"][0]["late_worst_us"], sums["ranks"])
    folder = Folder()
    folder.write("flight", lines)
    _, out, _ = folder.trace("flight")
    expect("  other: by 9 operations it shared with the others\n" in out, out)


def clocks_that_share_nothing_are_aligned_by_the_wall():
    sums, events = sums_of([record(0, 0, 1, 2, size=1), record(0, 0, 1, 2, size=1, comm_id="bb", host="other", clock="boot-2", pid=9,
                                                               posted_ticks=500, arrived_ticks=501, done_ticks=502, unix_us=UNIX_US + 3000)])
    expect([c["aligned_by"] for c in sums["clocks"]] == ["reference", "wall clock"], sums["clocks"])
    expect([e["ts"] for e in spans(events, "all-reduce 1024 float32 sum")] == [0, 3000], events)


def communicators_of_one_name_are_told_apart():
    sums, events = sums_of([record(0, 5, 6, 7, size=1, comm="group", comm_id="bb"), record(0, 1, 2, 3, size=1, comm="group", comm_id="cc", record=0),
                            record(0, 0, 2, 3, size=1)])
    expect([(c["name"], c["id"][-2:]) for c in sums["communicators"]] == [("world", "aa"), ("group#1", "cc"), ("group#2", "bb")], sums)
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    expect(tracks == {"world", "group#1", "group#2"}, tracks)


def any_name_is_printed_as_it_is():
    sums, events = sums_of([record(0, 0, 1, 2, size=1, comm='a "b" \\ \u00e9 \U0001f41f\n', host="h\u001b[2J")])
    expect(sums["communicators"][0]["name"] == 'a "b" \\ \u00e9 \U0001f41f?' and sums["clocks"][0]["host"] == "h?[2J", sums)
    expect(any(e["args"]["name"] == 'a "b" \\ \u00e9 \U0001f41f?' for e in events if e["name"] == "thread_name"), events)


def files_stdin_and_options_mix():
    folder = Folder()
    folder.write("one", LATE[:3])
    folder.write("two", LATE[2:])
    code, out, err = call("sh", "-c", f"cat two | {SHOAL} trace one --json -o t.json - one", cwd=folder.path)
    expect(code == 0 and err == "" and json.loads(out)["records"] == 6 and json.loads(out)["duplicates"] == 4, code, out, err)
    expect(len(folder.events("t.json")) > 10 and not os.path.exists(os.path.join(folder.path, "shoal-trace.json")))
    code, out, err = folder.trace("-o", "-", "one", "two")
    expect(code == 0 and json.loads(out)["traceEvents"] == folder.events("t.json") and "Who was late" in err, code, out, err)


def a_line_cut_off_at_the_end_is_a_warning():
    folder, text = Folder(), text_of(LATE)
    folder.write("cut", text + text[:100])
    sums, err = folder.sums("cut")
    expect(sums["records"] == 6, sums)
    expect(err == "shoal trace: cut:7: the last line is cut off and left out; was its process killed while it wrote?\n", err)
    folder.write("whole", text[:-1])  # only the newline is missing
    sums, err = folder.sums("whole")
    expect(sums["records"] == 6 and err == "", sums, err)
    folder.write("zeros", text.encode() + bytes(50))  # a machine's crash leaves such zeros
    sums, err = folder.sums("zeros")
    expect(sums["records"] == 6 and "zeros:7: the last line is cut off" in err, sums, err)
    folder.write("only", text[:100])
    code, out, err = folder.trace("only")
    expect(code == 2 and out == "" and "there is no operation in only" in err, code, out, err)


def empty_input_is_an_error_and_an_empty_file_is_told():
    folder = Folder()
    folder.write("empty", "")
    folder.write("blank", "\n  \r\n\t\n")
    folder.write("good", LATE)
    refused(folder, "empty", about="there is no operation in empty\n")
    refused(folder, "blank", "empty", about="there is no operation in blank and the others\n")
    sums, err = folder.sums("empty", "good")
    expect(sums["records"] == 6 and err == "shoal trace: there is no operation in empty\n", sums, err)


GOOD = text_of([LATE[0]]).rstrip("\n")


def changed(**fields):
    return json.dumps({**LATE[0], **fields})


def without(name):
    return json.dumps({key: value for key, value in LATE[0].items() if key != name})


BAD_LINES = [
    ("hello", "column 1: this is not a line of a flight recorder"),
    ("0| " + GOOD, "column 1: this is not a line of a flight recorder: those begin with '{'"),
    ("[]", "column 1: this is not a line of"), ("{", "column 2: a name in quotes is missing"), ("{}", 'there is no "comm"'),
    ("{\"comm\" 1}", "column 9: a ':' is missing after a name"), ("{\"comm\":}", "column 9: a value is not a text"),
    ("{\"a\":1 \"b\":2}", "column 8: a ',' or '}' is missing"), ("{\"a\":1,}", "column 8: a name in quotes is missing"),
    ("{\"a\":{}}", "column 6: a value holds other values"), ("{\"a\":[1]}", "column 6: a value holds other values"),
    ("{\"a\":\"b", "column 8: a text has no end"), ("{\"a\":\"\tb\"}", "column 7: a text holds a control character"),
    ("{\"a\":\"\\x\"}", "an escape in a text makes no sense"), ("{\"a\":\"\\u12\"}", "an escape in a text makes no sense"),
    ("{\"a\":\"\\ud800\"}", "an escape in a text makes no sense"), ("{\"a\":\"\\udc00\"}", "an escape in a text makes no sense"),
    ("{\"a\":\"\\u0000\"}", "an escape in a text makes no sense"),
    (b"{\"a\":\"\xff\"}", "a text is not UTF-8"), (b"{\"a\":\"\xc3\"}", "a text is not UTF-8"), (b"{\"a\":\"\xed\xa0\x80\"}", "a text is not UTF-8"),
    ("{\"a\":01}", "a value is not a text, a number or null"), ("{\"a\":1.}", "a value is not a text, a number or null"),
    ("{\"a\":-}", "a value is not a text, a number or null"), ("{\"a\":1e}", "a value is not a text, a number or null"),
    ("{\"a\":NaN}", "a value is not a text, a number or null"), ("{\"a\":nul}", "a value is not a text, a number or null"),
    ("{\"a\":" + "1" * 64 + "}", "a number is too long"), (GOOD + "}", "more follows after the object's end"),
    (GOOD + GOOD, "more follows after the object's end"), (b"{\0}", "column 2: a zero byte"), ("x" * 20000, "a line is longer than 16383 bytes"),
    (GOOD[:-1] + ',"rank":0}', '"rank" is there twice'), (changed(rank="0"), '"rank" is not a number'), (changed(comm=1), '"comm" is not a text'),
    (changed(comm=None), '"comm" is not a text'), (changed(done_ticks="1"), '"done_ticks" is not a number'), (changed(rank=2), "rank 2 is out of range: there are 2 ranks"),
    (changed(rank=-1), '"rank" is -1, but may be a whole number from 0'), (changed(rank=0.5), '"rank" is 0.5, but may be a whole number'),
    (changed(size=0), '"size" is 0, but may be a whole number from 1'), (changed(size=2**40), '"size" is 1099511627776, but may be'),
    (changed(last_rank=2), "rank 2 is out of range: there are 2 ranks"), (changed(record=-1), '"record" is -1, but may be a whole number, not negative'),
    (changed(sequence=10**30), '"sequence" is 1000000000000000000000000000000, but may be'), (changed(count=2**63), '"count" is 9223372036854775808'),
    (changed(comm_id="xyz"), '"comm_id" is xyz, but may be 16 hexadecimal digits'), (changed(comm_id=""), '"comm_id" is , but may be'),
    (changed(comm_id="1" * 17), "but may be 16 hexadecimal digits"), (changed(comm="n" * 32), '"comm" is longer than 31 bytes'),
    (changed(type="FLOAT99"), '"type" is "FLOAT99", which this version does not know'), (changed(op="XOR"), '"op" is "XOR", which this version'),
    (changed(late_us=1e300), '"late_us" is 1e+300, but may be'), (changed(ns_per_tick=0), '"ns_per_tick" is 0, so it has no time'),
    (changed(ns_per_tick=-1), '"ns_per_tick" is -1, but may be 0'), (changed(posted_ticks=None), '"posted_ticks" is null or 0, so it has no time'),
    (changed(posted_ticks=2**64), '"posted_ticks" is 18446744073709551616, but may be'), (changed(unix_us=10**17), '"unix_us" is 100000000000000000'),
    (changed(done_ticks=2**64 - 1, record=9, sequence=9), "its time is more than three years from the first of its machine"),
    (changed(record=7, size=3), "communicator world has"), (changed(posted_ticks=TICKS + 1), "differ about one record"),
    ('{"error":"no memory for a copy of the flight recorder"}', "the recorder itself failed: no memory for a copy"),
] + [(without(name), f'there is no "{name}"') for name in LATE[0] if not name.endswith("_us") or name in ("late_us", "unix_us")]


def each_bad_line_is_refused_with_its_place():
    folder = Folder()
    for line, about in BAD_LINES:
        folder.write("bad", text_of(LATE[:2]).encode() + (line if isinstance(line, bytes) else line.encode()) + b"\n" + text_of(LATE[2:]).encode())
        code, out, err = folder.trace("bad")
        expect(code == 2 and out == "" and err.count("\n") == 1 and about in err and "bad:" in err, line[:200], about, code, out, err)
        place = "bad:3" if "about one record" not in about and "communicator world" not in about else "bad:"
        expect(err.startswith(f"shoal trace: {place}"), place, err)
    expect(not os.path.exists(os.path.join(folder.path, "shoal-trace.json")), "nothing is written")


def arguments_that_make_no_sense_are_refused():
    folder = Folder()
    folder.write("good", LATE)
    refused(folder, about="which files?")
    refused(folder, "nowhere", about="cannot open nowhere: No such file or directory")
    refused(folder, ".", about=". is a folder; name the files in it, as ./*")
    refused(folder, "-", "good", "-", about="the standard input is given 2 times")
    refused(folder, "--jsn", "good", about="did you mean --json?")
    refused(folder, "good", "-o", about="-o wants a value")
    refused(folder, "-o", "", "good", about="-o takes the name of a file")
    refused(folder, "good", "-o", "./good", about="-o ./good would overwrite good")
    refused(folder, "good", "-o", "no/such/folder", about="cannot write to no/such/folder: No such file or directory", code=1)
    refused(folder, "good", "-o", "/dev/full", about="cannot write to /dev/full: No space left on device", code=1)
    expect(json.loads(text_of(LATE[:1])) == json.loads(open(os.path.join(folder.path, "good"), encoding="utf-8").readline()), "unharmed")


def no_input_makes_it_fall():
    """On randomly damaged lines the tool succeeds or refuses with one line; it never crashes."""
    source, folder, text = random.Random(1), Folder(), text_of(LATE).encode()
    values = [b"null", b"-1", b"0", b"1e308", b"18446744073709551615", b"9223372036854775807", b'""', b"true", b"999999", b"{", b'"\\u']
    for _ in range(150):
        damaged = bytearray(text)
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(damaged))
            colon = damaged.find(b":", at)
            if source.random() < 0.5 and 0 <= colon:
                end = min(i for i in (damaged.find(b",", colon), damaged.find(b"}", colon)) if i >= 0)
                damaged[colon + 1:end] = source.choice(values)
            elif source.random() < 0.5:
                damaged[at] = source.randrange(256)
            else:
                del damaged[at:at + source.randint(1, 40)]
        folder.write("bad", bytes(damaged))
        code, out, err = folder.trace("bad", "--json")
        expect(code in (0, 2), code, bytes(damaged), err)
        if code:
            expect(out == "" and err.splitlines()[-1].startswith("shoal trace: "), bytes(damaged), err)
        else:
            expect(json.loads(out)["records"] > 0 and folder.events(), bytes(damaged), out)
            check_nesting(folder.events())


def many_ranks_are_read_quickly_and_shortened_for_people():
    folder = Folder()
    folder.write("flight", [record(r, 10 * i + r * 0.001, 10 * i + 1, 10 * i + 2, size=60, sequence=i + 1, record=i)
                            for r in range(60) for i in range(100)])
    sums, _ = folder.sums("flight")
    expect(len(sums["ranks"]) == 60 and sums["ranks"][0]["rank"] == 59 and sums["ranks"][0]["last_in"] == 100, sums["ranks"][0])
    # The 59 others wait 1, 2, ... 59 ns in each of 100 operations.
    expect(sums["ranks"][0]["others_waited_us"] == 177 and sums["ranks"][0]["late_worst_us"] == 0.059, sums["ranks"][0])
    expect(not any(e["ph"] == "i" for e in folder.events()), "less than a microsecond is not marked")
    code, out, _ = folder.trace("flight")
    expect(code == 0 and "  and 44 ranks that others waited less for (--json lists all)\n" in out, out)


def run_job(folder, *words, file="flight.%r", setting="SHOAL_TRACE_FILE"):
    env = {**os.environ, setting: os.path.join(folder.path, file)}
    code, out, err = call(SHOAL, *words, env=env)
    expect(code == 0, code, out, err)
    return sorted(name for name in os.listdir(folder.path) if name.startswith("flight"))


def a_real_job_is_traced():
    folder = Folder()
    files = run_job(folder, "run", "-n", "3", os.path.join(EXAMPLES, "03_groups"))
    expect(files == ["flight.0", "flight.1", "flight.2"], files)
    sums, err = folder.sums(*files)
    expect(err == "" and sums["failed"] == sums["absent"] == sums["cut"] == [] and sums["duplicates"] == 0, sums, err)
    expect(sorted(r["rank"] for r in sums["ranks"]) == [0, 1, 2] and len(sums["clocks"]) == 1, sums)
    expect(sorted((c["name"][:7], c["ranks"], c["ranks_with_lines"]) for c in sums["communicators"]) ==
           [("world", 3, 3), ("world.1", 1, 1), ("world.1", 2, 2)], sums["communicators"])
    kinds = {k["kind"]: k["operations"] for c in sums["communicators"] if c["name"] == "world" for k in c["kinds"]}
    expect(kinds == {"barrier": 1, "drain": 3, "split": 1, "receive": 3, "send": 3}, kinds)
    check_nesting(folder.events())


def ranks_may_share_one_file():
    folder = Folder()
    files = run_job(folder, "run", "-n", "4", os.path.join(EXAMPLES, "01_hello"), file="flight")
    sums, err = folder.sums(*files)
    expect(files == ["flight"] and err == "" and sums["communicators"][0]["ranks_with_lines"] == 4 and sums["absent"] == [], sums, err)


def a_rank_that_is_late_in_a_real_job_is_blamed():
    for _ in range(RUNS_MAX):  # a stall of the machine may delay the other rank more than this one; then another run decides
        folder = Folder()
        files = run_job(folder, "bench", "allreduce", "-n", "2", "--min", "8", "--max", "8", "--iterations", "10", "--late", "20")
        sums, _ = folder.sums(*files)
        worst = sums["ranks"][0]
        if worst["rank"] == sums["worst"][0]["last_world_rank"] == 1 and worst["last_in"] >= 10:
            break
    expect(worst["rank"] == 1 and worst["last_in"] >= 10 and worst["others_waited_us"] > 10 * 15e3, sums["ranks"])
    expect(sums["worst"][0]["last_world_rank"] == 1 and 15e3 < sums["worst"][0]["late_us"] < 5e6, sums["worst"])
    check_nesting(folder.events())


def wait_for_text(path, text):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if os.path.exists(path) and text in open(path, encoding="utf-8").read():
            return
        time.sleep(0.05)
    raise AssertionError(f"{text} did not appear in {path}")


def wait_for_operations(pid):
    """Waits until the process is in the middle of its operations."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        code, out, _ = call(SHOAL, "top", "--once", "--interval", "0.05", "--format", "json", pid)
        if code == 0 and any(comm["operations"] > 10 for process in json.loads(out)["processes"] for comm in process["communicators"]
                             if process["pid"] == pid):
            return
    raise AssertionError(f"process {pid} has not come to its operations")


def the_end_of_a_killed_job_is_traced():
    """Rank 1 is killed in the middle, so only rank 0's lines exist. They are written twice: at the failure and at the free."""
    folder = Folder()
    flight, log = (os.path.join(folder.path, name) for name in ("flight.%r", "log.%r"))
    port = free_port()
    env = {**os.environ, "SHOAL_TRACE_FILE": flight, "SHOAL_LOG": "info", "SHOAL_LOG_FILE": log, "SHOAL_JOB_ID": "traced",
           "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [subprocess.Popen([SHOAL, "bench", "allreduce", "--min", "8", "--max", "8", "--iterations", "2000", "--late", "20"],
                              env={**env, "RANK": str(rank)}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for rank in (0, 1)]
    try:
        wait_for_text(log.replace("%r", "0"), "communicator world")
        wait_for_operations(ranks[0].pid)
        ranks[1].kill()
        expect(ranks[0].wait(60) != 0)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    sums, _ = folder.sums("flight.0")
    (failed,) = sums["failed"]
    expect(failed["statuses"] == [{"status": "SHOAL_ERR_PEER_LOST", "ranks": [0]}] and failed["ranks_without_record"] == [1], failed)
    expect(sums["absent"] == [{"communicator": "world", "ranks": [1]}], sums["absent"])
    check_nesting(folder.events())


def help_teaches():
    code, out, err = call(SHOAL, "trace", "--help")
    expect(code == 0 and err == "", code, err)
    for word in ("rm -f flight.*", "SHOAL_TRACE_FILE=flight.%r shoal run", "shoal trace flight.*", "shoal top --dump",
                 "shoal_flight_print", "perfetto", "--json", "-o FILE"):
        expect(word in out, word, out)
    _, out, _ = call(SHOAL, "--help")
    expect("    shoal trace " in out, out)


run_cases([replicas_are_one_rank_of_the_schedule, late_ranks_are_blamed_exactly, percentiles_are_of_all_operations, kinds_are_summed_exactly, events_are_as_the_viewers_read_them,
           overlapping_operations_get_tracks_of_their_own, names_tell_type_operator_and_root,
           pipelines_are_measured_and_predicted_exactly, the_median_step_is_measured,
           split_backward_passes_are_predicted_apart,
           steps_that_are_not_whole_do_not_count, actions_are_drawn_as_schedules_write_them, operations_told_twice_count_once,
           failed_and_open_operations_come_first, different_calls_of_one_number_are_all_shown,
           different_calls_that_returned_are_shown, operations_that_wait_at_the_same_time_are_one_incident,
           ranks_that_wait_at_the_same_time_count_each, missing_ranks_and_cut_histories_are_named,
           newest_operations_that_were_cut_off_are_named, files_are_told_without_a_hint_at_the_options,
           processes_of_one_machine_share_its_clock_exactly, clocks_of_several_machines_are_aligned_by_operations,
           clocks_that_share_nothing_are_aligned_by_the_wall, communicators_of_one_name_are_told_apart, any_name_is_printed_as_it_is,
           files_stdin_and_options_mix, a_line_cut_off_at_the_end_is_a_warning, empty_input_is_an_error_and_an_empty_file_is_told,
           each_bad_line_is_refused_with_its_place, arguments_that_make_no_sense_are_refused, no_input_makes_it_fall,
           many_ranks_are_read_quickly_and_shortened_for_people, a_real_job_is_traced, ranks_may_share_one_file,
           a_rank_that_is_late_in_a_real_job_is_blamed, the_end_of_a_killed_job_is_traced, help_teaches])
