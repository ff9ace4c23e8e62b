#!/usr/bin/env python3
"""bench/bench_threads.py: what it measures, judges and leaves out. The figures themselves do not matter here."""
import argparse
import contextlib
import io
import json
import os
import pathlib
import re
import sys
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[3]
BUILD = pathlib.Path(os.environ["SHOAL_COMMAND"]).resolve().parent
os.environ["SHOAL_BUILD"] = str(BUILD)
sys.path.insert(0, str(TOP / "bench"))

import bench_threads  # noqa: E402

PROGRAM = TOP / "bench/bench_threads.py"
STAND_IN = BUILD / "tests/unit/libcuda.so.1"


def run(*words, folder, code=0, env=None):
    """Returns the tables, the object of the goals, and the rows of all measurements."""
    told, out, err = call(PROGRAM, *words, "--out", folder, timeout=280, env={**os.environ, **(env or {})})
    expect(told == code, told, out, err)
    start = pathlib.Path(folder) / "threads-2"
    table = start.with_suffix(".md").read_text()
    expect(table in out + "\n", out)
    return table, json.loads(start.with_suffix(".json").read_text()), [json.loads(line) for line in start.with_suffix(".jsonl").read_text().splitlines()]


@contextlib.contextmanager
def older(folder):
    """An older checkout, whose build is this one."""
    old = pathlib.Path(folder) / "old"
    old.mkdir()
    (old / "build").symlink_to(BUILD)
    (old / "python").symlink_to(TOP / "python")
    yield old


# ---- Arguments -------------------------------------------------------------------------------------------------------------

def arguments_become_columns():
    with tempfile.TemporaryDirectory() as folder, older(folder) as old:
        options = bench_threads.arguments(["--threads", "1,3", "--before", str(old), "--sizes", "64K,1M", "--limit", "9.5"])
        expect([(way.name, way.threads, way.build) for way in options.ways] ==
               [("before", None, old / "build"), ("1 thread", 1, BUILD), ("3 threads", 3, BUILD)], options.ways)
    expect(options.sizes == [64 << 10, 1 << 20] and options.limit == 9.5 and options.ranks == 2, options)
    usual = bench_threads.arguments([])
    cores = len(os.sched_getaffinity(0)) // 2
    expect([way.threads for way in usual.ways] == sorted({1, max(1, cores - 1)}) and usual.sizes[0] == 64 << 20, usual)


def wrong_arguments_are_refused():
    for words in (("--threads", "0"), ("--threads", "1,65"), ("--threads", "x"), ("--threads", ""), ("--ranks", "0"), ("--rounds", "0"),
                  ("--rounds", "1.5"), ("--shrink", "0"), ("--sizes", "x"), ("--limit", "soon"), ("--before", "/nonexistent"), ("more",)):
        code, out, err = call(PROGRAM, *words)
        expect(code == 2 and not out and len(err.splitlines()[-1]) > 20, words, code, out, err)
    code, out, err = call(PROGRAM, "--before", "/nonexistent")
    expect("there is no /nonexistent/build/shoal: build it first" in err, err)


def help_has_examples_and_exit_codes():
    code, out, err = call(PROGRAM, "--help")
    expect(code == 0 and "Examples:" in out and "Exit codes:" in out, out, err)


# ---- Judging, with invented figures ----------------------------------------------------------------------------------------

def options_of(**others):
    ways = [bench_threads.Way("before", None, TOP, BUILD), bench_threads.Way("1 thread", 1, TOP, BUILD), bench_threads.Way("7 threads", 7, TOP, BUILD)]
    return argparse.Namespace(**{"ways": ways, "before": TOP, "shrink": 1, "stand_in": False, "ranks": 2, **others})


def times(what, column, *each, size=0, **more):
    """One row for each round. None: the round lacks it."""
    bytes_of = {"bytes": size} if size else {}
    return [{"round": number, "column": column, "what": what, "step_ms": ms, **bytes_of, **more} for number, ms in enumerate(each) if ms]


def judged(rows, which, **others):
    return bench_threads.judge(rows, options_of(**others), {}, bench_threads.ASKED[which])


def a_time_is_judged_by_its_median():
    size, name = 16 << 20, "all-reduce, gpu"
    rows = times(name, "1 thread", 9, 9, 9, size=size) + times(name, "7 threads", 1.2, 1.4, 4, size=size) + times(name, "7 threads", 20, size=size * 16)
    one = judged(rows, 0)
    expect((one["value"], one["least"], one["most"], one["rounds"], one["met"], one["unit"]) == (1.4, 1.2, 4, 3, True, "ms"), one)
    expect(judged(rows, 1)["met"] is False and judged(rows, 1)["at_most"] == 18, judged(rows, 1))
    expect(judged(rows, 0, shrink=2)["rounds"] == 0, "a shrunk operand has another size")
    expect(judged(rows, 0, stand_in=True)["met"] is None, "the stand-in is not judged")


def a_step_is_compared_with_the_step_alone_of_its_round():
    rows = times("GPT-2, Shoal's class", "7 threads", 70, None, 90) + times("GPT-2, alone", "7 threads", 50, 1, 60) + times("GPT-2, alone", "1 thread", 1, 1, 1)
    one = judged(rows, 2)
    expect((one["value"], one["rounds"], one["met"]) == ((70 / 50 + 90 / 60) / 2, 2, False), one)
    several = times("ResNet-50, Shoal's class", "7 threads", 42) + times("ResNet-50, Shoal's class", "7 threads", 41) + times("ResNet-50, alone", "7 threads", 41.5)
    expect(judged(several, 3)["value"] == 1 and judged(several, 3)["met"], judged(several, 3))  # medians within a round
    replayed = [{**row, "is_replayed": True} for row in rows]
    expect(judged(replayed, 2)["met"] is None and judged(replayed, 2)["is_replayed"], judged(replayed, 2))


def a_gain_needs_an_older_build():
    name, size = "all-reduce, plain", 64 << 20
    rows = times(name, "before", 30, 30, size=size) + times(name, "1 thread", 29, 29, size=size) + times(name, "7 threads", 10, 5, size=size)
    one = judged(rows, 4)
    expect((one["value"], one["at_least"], one["met"], one["unit"]) == (4.5, 3, True, "times as fast as before"), one)
    one = judged(rows, 4, before=None)
    expect(not one["rounds"] and "--before" in one["why"] and "met" not in one, one)


def a_reason_is_in_the_table():
    one = bench_threads.judge([], options_of(), {"all-reduce, gpu": "there is no GPU"}, bench_threads.ASKED[0])
    expect(bench_threads.asked_cells(one) == ["all-reduce of 16 MiB on the GPU", "at most 1.5 ms", "3.33", "", "0", "not measured: there is no GPU"], one)
    met = judged(times("all-reduce, gpu", "7 threads", 1, size=16 << 20), 0)
    expect(bench_threads.asked_cells(met)[3:] == ["1 (1 .. 1)", "1", "met"], met)


def a_column_may_lack_a_figure():
    ways = options_of().ways
    rows = times("GPT-2, alone", "7 threads", 50, 60) + times("x", "before", 9, size=8) + times("x", "1 thread", 3, size=8)
    expect(bench_threads.lines_of(rows, ways) == [["GPT-2, alone", "", "", "", "55 (50 .. 60)", ""], ["x", "8 B", "9 (9 .. 9)", "3 (3 .. 3)", "", "3.00"]],
           bench_threads.lines_of(rows, ways))


# ---- Steps -----------------------------------------------------------------------------------------------------------------

@contextlib.contextmanager
def replaced(**functions):
    """Replaces functions of bench_gpu."""
    before = {name: getattr(bench_threads.bench_gpu, name) for name in functions}
    try:
        for name, function in functions.items():
            setattr(bench_threads.bench_gpu, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(bench_threads.bench_gpu, name, function)


def steps_go_through_pytorch_if_it_has_the_model():
    asked, options = [], options_of()

    def of_torch(ranks, python, *words, checkout, build, limit_s, **settings):
        asked.append((ranks, python, words[-1], build, limit_s, settings))
        return [{"model": words[-1], "way": way, "round": number, "step_ms": 50 + number} for number in range(3) for way in words[3:-1:2]]

    with replaced(of_torch=of_torch, can_run=lambda python, text: python == "new" and "torchvision" in text):
        rows = bench_threads.steps_of(options, "resnet50", "new").run(options.ways[-1], 99)
        expect(asked == [(2, "new", "resnet50", BUILD, 99, {"SHOAL_THREADS": "7"})], asked)
        expect({row["what"] for row in rows} == {"ResNet-50, Shoal's class", "ResNet-50, alone"}, rows)
        rows = [{"column": "7 threads", **row, "round": 0} for row in rows]
        expect(judged(rows, 3)["value"] == 1 and not judged(rows, 3)["is_replayed"], judged(rows, 3))
        names = [bench_threads.steps_of(options, *words).run.__qualname__ for words in (("gpt2", "old"), ("resnet50", "old"), ("gpt2", None))]
    expect([name.split(".")[0] for name in names] == ["trained_steps", "replayed_steps", "replayed_steps"], names)


# ---- Time ------------------------------------------------------------------------------------------------------------------

class Played:
    """A session whose measurements take the given times."""

    def __init__(self, limit_s, *each_s, rounds=3, fails=()):
        self.seconds, self.asked = 0.0, []
        with tempfile.TemporaryDirectory() as folder:
            options = options_of(out=pathlib.Path(folder), rounds=rounds, limit=limit_s, sizes=[8], before=None)
            options.ways = options.ways[1:]
            session = bench_threads.Session(options)
            session.reasons.clear()
            session.clock = bench_threads.Clock(limit_s, lambda: self.seconds)
            session.measurements = [bench_threads.Measurement((f"thing {i}",), self.taking(i, took_s, fails), 10) for i, took_s in enumerate(each_s)]
            with contextlib.redirect_stderr(io.StringIO()):
                session.run()
            self.page = "\n".join(bench_threads.record(session))
        self.session = session

    def taking(self, which, took_s, fails):
        def measure(way, left_s):
            self.asked.append((which, way.threads, left_s))
            self.seconds += took_s
            if (which, way.threads) in fails:
                sys.exit("it broke")
            return [{"what": f"thing {which}", "step_ms": 1.0}]
        return measure


def rounds_end_within_the_limit():
    played = Played(100, 4, 10)  # a round takes 28 s
    expect(played.seconds == 84 and played.session.rounds == 3 and not played.session.reasons, played.asked)
    played = Played(35, 4, 10)  # in the second round only the short one fits, in one column
    expect(played.seconds == 32 and len(played.asked) == 5 and played.session.reasons == {"thing 0": "no time was left", "thing 1": "no time was left"},
           played.asked, played.session.reasons)
    expect([left_s for _, _, left_s in played.asked] == [35, 31, 27, 17, 7], played.asked)
    played = Played(9, 1, 1)  # a first guess of 10 s does not fit
    expect(not played.asked and "- thing 1: no time was left" in played.page, played.page)


def columns_take_turns_at_being_first():
    played = Played(1000, 1, rounds=3)
    expect([threads for _, threads, _ in played.asked] == [1, 7, 7, 1, 1, 7], played.asked)


def a_failure_ends_nothing_else():
    played = Played(1000, 1, 1, rounds=2, fails={(0, 7)})
    expect([(which, threads) for which, threads, _ in played.asked] == [(0, 1), (0, 7), (1, 1), (1, 7), (0, 1), (1, 7), (1, 1)], played.asked)
    expect(len(played.session.failures) == 1 and "- thing 0: 7 threads: it broke" in played.page, played.page)


# ---- On this machine -------------------------------------------------------------------------------------------------------

def threads_are_compared_in_turns():
    with tempfile.TemporaryDirectory() as folder, older(folder) as old:
        table, whole, rows = run("--sizes", "64K,1M", "--rounds", "2", "--threads", "3", "--before", old, folder=folder)
    cell = r"[\d.e-]+ \([\d.e-]+ .. [\d.e-]+\)"
    expect(len(re.findall(rf"^\| all-reduce, (?:plain|shared) \| [\d ]+ (?:B|KiB|MiB) \|(?: {cell} \|){{2}} [\d.]+ \|$", table, re.M)) == 6 and
           "| before, ms | 3 threads, ms | gain |" in table, table)
    expect(len(re.findall(rf"^\| all-reduce, a host for each rank \| 64 KiB \|(?: {cell} \|){{2}} [\d.]+ \|$", table, re.M)) == 1, table)
    expect({row["hosts"] for row in rows if row["what"] == bench_threads.BETWEEN} == {2}, rows)
    expect({row["threads"] for row in rows} == {None, 3} and {row["round"] for row in rows} == {0, 1} and
           all(row.get("errors", 0) == 0 for row in rows), rows)
    expect(whole["rounds"] == 2 and len(whole["asked"]) == len(bench_threads.ASKED), whole)
    if not os.path.exists("/dev/nvidiactl"):
        expect(table.count("not measured: there is no GPU (/dev/nvidiactl)") == 4, table)


def all_is_measured_over_the_stand_in():
    if not STAND_IN.exists() or not (BUILD / "bench/gpu_copies").exists():
        raise Skip("the stand-in for CUDA's driver, or the programs of bench, are not in this build")
    with tempfile.TemporaryDirectory() as folder, older(folder) as old:
        table, whole, rows = run("--stand-in", "--shrink", "1024", "--rounds", "1", "--threads", "2", "--before", old, folder=folder)
    expect([(one["rounds"], one["met"], one["value"] > 0) for one in whole["asked"]] == [(1, None, True)] * 5 and not whole["left_out"], whole)
    expect(table.count("| not judged |") == 5 and table.count(", replayed |") == 2 and "its times mean nothing" in table, table)
    expect("| copies of the GPU | from it, GB/s |" in table and {row["bytes"] for row in rows if row["what"] == "all-reduce, gpu"} == {16 << 10, 256 << 10}, table)


def a_device_that_is_missing_fails_its_lines_only():
    if not STAND_IN.exists():
        raise Skip("the stand-in for CUDA's driver was not built")
    with tempfile.TemporaryDirectory() as folder:
        table, whole, rows = run("--stand-in", "--shrink", "4096", "--rounds", "1", "--threads", "1", folder=folder, code=1, env={"MOCK_CUDA": "devices=0"})
    expect("1 thread: bench_gpu: exit code 1 of " in table and {row["what"] for row in rows} == {"all-reduce, plain", "all-reduce, shared", bench_threads.BETWEEN}, table)
    expect("no older build: --before names its checkout" in table, table)


if __name__ == "__main__":
    run_cases([arguments_become_columns, wrong_arguments_are_refused, help_has_examples_and_exit_codes, a_time_is_judged_by_its_median,
               a_step_is_compared_with_the_step_alone_of_its_round, a_gain_needs_an_older_build, a_reason_is_in_the_table, a_column_may_lack_a_figure,
               steps_go_through_pytorch_if_it_has_the_model,
               rounds_end_within_the_limit, columns_take_turns_at_being_first, a_failure_ends_nothing_else, threads_are_compared_in_turns,
               all_is_measured_over_the_stand_in, a_device_that_is_missing_fails_its_lines_only])
