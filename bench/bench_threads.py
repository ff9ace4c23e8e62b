#!/usr/bin/env python3
"""Measures how much several threads of a rank help on this machine, in ten minutes, and compares it with what was asked.

  bench/bench_threads.py                      two ranks; 1 thread and as many as each rank has cores, less one
  bench/bench_threads.py --threads 1,3,7      these numbers of threads; the last one is compared with what was asked
  bench/bench_threads.py --before /tmp/old    also an older checkout, which is built in its folder build: the first column
  bench/bench_threads.py --limit 540          end after this many seconds at most (540)
  bench/bench_threads.py --stand-in --shrink 256   without a GPU: over the stand-in for CUDA's driver, a 256th of the sizes

The measurements are those of bench/bench_gpu.py and bench/bench.py. In the order of their importance:

  all-reduces of 16 and 256 MiB whose operands are on the GPU;
  training steps of GPT-2 and ResNet-50 and the same steps alone (bench/torch_gpu.py), if SHOAL_TEST_PYTHON, or python3, has a
    torch that was built for CUDA, and torchvision; otherwise `shoal bench step` replays them;
  all-reduces in ordinary memory, 64 MiB first; with a rank on each of several emulated hosts, over TCP; small ones, because
    threads must not slow them down; and in shared memory;
  copies of the GPU.

A round takes every build and number of threads in turn, so a machine that is slow for a while slows all of them. A measurement
that needs a GPU, or more time than there is, is left out, and the table has the reason. If one fails, the others continue, and
the exit code is 1. Writes threads-NAME.md (the tables), .json (each figure that was asked for) and .jsonl (all measurements)
into --out after each measurement, and prints the tables at the end.

Examples:
  bench/bench_threads.py --before /tmp/old --out "$OUT"
  bench/bench_threads.py --ranks 4 --threads 1,2,3 --sizes 64M --rounds 3
  bench/bench_threads.py --stand-in --shrink 256 --rounds 1 --out /tmp/proof

Exit codes: 0 success, 1 a measurement failed, 2 invalid arguments.
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Callable, Optional

TOP = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("SHOAL_BUILD", TOP / "build"))
sys.path.insert(0, str(TOP / "bench"))

import bench  # noqa: E402
import bench_gpu  # noqa: E402
from bench_report import size_text  # noqa: E402

M = 1 << 20
SMALL = (8, 4096)
OURS, ALONE, BETWEEN = "Shoal's class", "alone", "all-reduce, a host for each rank"
# A step alone on an H100, in milliseconds (docs/figures/one-gpu.md), which is replayed if torch cannot use the GPU.
ALONE_MS = {"gpt2": 50.9, "resnet50": 41.3}
TITLES = {"gpt2": "GPT-2", "resnet50": "ResNet-50"}


@dataclass(frozen=True)
class Way:
    """One column of the tables: a build, and a number of threads."""
    name: str
    threads: Optional[int]  # None: the build decides
    checkout: pathlib.Path
    build: pathlib.Path

    def settings(self):
        return {"SHOAL_THREADS": str(self.threads) if self.threads else None}


@dataclass(frozen=True)
class Asked:
    """A figure that was asked for. `of` is the thing whose time it is, or whose time divides that of `what`: the same thing in
    the older build, if it is the same name."""
    text: str
    what: str
    size: int  # bytes; 0: of no operand
    limit: float
    was: float  # when it was asked for; 0: unknown
    of: str = ""

    def is_gain(self):
        return self.of == self.what

    def unit(self):
        return "times as fast as before" if self.is_gain() else "times the step alone" if self.of else "ms"


def step_name(model, way):
    return f"{TITLES[model]}, {way}"


ASKED = [
    Asked("all-reduce of 16 MiB on the GPU", "all-reduce, gpu", 16 * M, 1.5, 3.33),
    Asked("all-reduce of 256 MiB on the GPU", "all-reduce, gpu", 256 * M, 18, 50.6),
    Asked("a step of GPT-2", step_name("gpt2", OURS), 0, 1.4, 2.6, step_name("gpt2", ALONE)),
    Asked("a step of ResNet-50", step_name("resnet50", OURS), 0, 1.05, 1.14, step_name("resnet50", ALONE)),
    Asked("all-reduce of 64 MiB in ordinary memory", "all-reduce, plain", 64 * M, 3, 0, "all-reduce, plain"),
]


# ---- Arguments -------------------------------------------------------------------------------------------------------------

def numbers(text):
    values = [int(word) for word in text.split(",")]
    if not values or min(values) < 1 or max(values) > 64:
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers from 1 to 64")
    return values


def positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return int(text)


def ways_of(options):
    cores = len(os.sched_getaffinity(0)) // options.ranks
    threads = options.threads or sorted({1, max(1, cores - 1)})
    older = options.before and options.before.resolve()
    return [*([Way("before", None, older, older / "build")] if older else []),
            *(Way(f"{number} thread{'s' if number > 1 else ''}", number, TOP, BUILD) for number in threads)]


def arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--threads", type=numbers)
    parser.add_argument("--before", type=pathlib.Path, metavar="CHECKOUT")
    parser.add_argument("--sizes", type=bench.sizes_parse, default="64M,16M,256M", help="of all-reduces in host memory (64M,16M,256M)")
    parser.add_argument("--rounds", type=positive, default=5, help="at most (5)")
    parser.add_argument("--limit", type=float, default=540, help="seconds (540)")
    parser.add_argument("--stand-in", action="store_true", help="the GPU is the stand-in of the tests, whose times mean nothing")
    parser.add_argument("--shrink", type=positive, default=1, metavar="N", help="all operands have an Nth of their sizes (1)")
    parser.add_argument("--out", type=pathlib.Path, default=TOP / "docs/figures")
    options = parser.parse_args(words)
    options.ways = ways_of(options)
    for way in options.ways:
        if not os.access(way.build / "shoal", os.X_OK):
            parser.error(f"there is no {way.build}/shoal: build it first")
    return options


# ---- Measurements ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Measurement:
    """`run` measures one column within a number of seconds, and returns rows with `what` and either `median_us` or `step_ms`."""
    names: tuple  # the `what` of its rows
    run: Callable[[Way, float], list]
    guess_s: float  # for one column, before it has been measured
    is_once: bool = False  # in the first column of the first round only


def on_gpu(options):
    least, most = (asked.size // options.shrink for asked in ASKED[:2])

    def run(way, limit_s):
        rows = bench_gpu.of_shoal(options.ranks, sizes=(least, most, most // least, 20), build=way.build, limit_s=limit_s, **way.settings())
        return [{"what": "all-reduce, gpu", **row} for row in rows]
    return Measurement(("all-reduce, gpu",), run, 8)


def trained_steps(options, python, model):
    def run(way, limit_s):
        rows = bench_gpu.of_torch(options.ranks, python, "--rounds", 3, "--way", ALONE, "--way", OURS, model, checkout=way.checkout,
                                  build=way.build, limit_s=limit_s, **way.settings())
        return [{"what": step_name(model, row["way"]), **row} for row in rows]
    return Measurement((step_name(model, OURS), step_name(model, ALONE)), run, 40)


def profile_text(model, shrink):
    """Returns the profile of a model whose tensors have a part of their elements, in the form of a file."""
    printed = bench_gpu.output_of([str(BUILD / "shoal"), "sim", "step", "--profile", model, "--print-profile"], os.environ, 60)
    return json.dumps([{**tensor, "elements": max(1, tensor["elements"] // shrink)} for tensor in json.loads(printed)])


def replayed_steps(options, model):
    """A step is a third forward pass, two thirds backward pass."""
    alone_ms, steps = ALONE_MS[model], 10 if options.shrink == 1 else 1
    backward_ms = alone_ms * 2 / 3

    def run(way, limit_s):
        with tempfile.NamedTemporaryFile("w", suffix=".json") as profile:
            profile.write(profile_text(model, options.shrink))
            profile.flush()
            rows = bench_gpu.rows_of(way.build / "shoal", "bench", "step", "-n", options.ranks, "--memory", "gpu", "--profile", profile.name,
                                     "--backward", f"{backward_ms:.3f}", "--steps", steps, "--format", "json", limit_s=limit_s, **way.settings())
        (row,) = (row for row in rows if row["record"] == "step")
        del row["bytes"]  # those of the model
        return [{**row, "what": step_name(model, OURS), "step_ms": alone_ms - backward_ms + row["step_us"] / 1e3, "is_replayed": True},
                {"what": step_name(model, ALONE), "step_ms": alone_ms, "is_replayed": True}]
    return Measurement((step_name(model, OURS), step_name(model, ALONE)), run, 15)


def in_host_memory(options, memory, size):
    suite = bench.SUITES[memory]

    def run(way, limit_s):
        environment = {**bench.clean_environment(), **way.settings()}
        environment = {name: value for name, value in environment.items() if value is not None}
        shoal = bench.Shoal(way.build / "shoal", environment, limit_s)
        return [{"what": f"all-reduce, {memory}", **shoal.measure(suite, options.ranks, size, suite.shoal)}]
    return Measurement((f"all-reduce, {memory}",), run, suite.seconds + 2)


def between_hosts(options, size):
    """Each rank is alone on an emulated host of this machine."""
    script = 'export SHOAL_HOST_ID=host-$RANK; exec "$@"'

    def run(way, limit_s):
        words = ["bench", "allreduce", "--min", size, "--max", size, "--inputs", "warm", "--seconds", 2, "--format", "json"]
        rows = bench_gpu.rows_of(way.build / "shoal", "run", "--no-prefix", "-n", options.ranks, "sh", "-c", script, "sh", way.build / "shoal",
                                 *words, limit_s=limit_s, **way.settings())
        return [{"what": BETWEEN, **row} for row in rows]
    return Measurement((BETWEEN,), run, 6)


def copies(options):
    def run(way, limit_s):
        return [{"what": "copies of the GPU", **row} for row in bench_gpu.rows_of(way.build / "bench/gpu_copies", limit_s=limit_s)]
    return Measurement(("copies of the GPU",), run, 30, True)


def why_no_gpu(options):
    if options.stand_in:
        return None if (BUILD / "tests/unit/libcuda.so.1").exists() else f"the stand-in is not in {BUILD}/tests/unit"
    return None if os.path.exists("/dev/nvidiactl") else "there is no GPU (/dev/nvidiactl)"


def steps_of(options, model, python):
    """Steps through PyTorch if it has the model and can use the GPU."""
    if python and (model != "resnet50" or bench_gpu.can_run(python, "import torchvision")):
        return trained_steps(options, python, model)
    return replayed_steps(options, model)


def measurements(options, reasons):
    """Returns what can be measured, the most important first. Adds to the reasons why other things cannot."""
    why = why_no_gpu(options)
    python = None if why or options.stand_in else bench_gpu.python_with_cuda()
    gpu = [on_gpu(options), *(steps_of(options, model, python) for model in TITLES), copies(options)]
    for measurement in gpu if why else []:
        reasons.update(dict.fromkeys(measurement.names, why))
    host = [in_host_memory(options, memory, size // options.shrink) for memory in ("plain", "shared") for size in options.sizes]
    small = [in_host_memory(options, "plain", size) for size in SMALL]
    largest, *others = host
    return [*([] if why else gpu[:-1]), largest, between_hosts(options, options.sizes[0] // options.shrink), *small, *others, *([] if why else gpu[-1:])]


# ---- Rounds ----------------------------------------------------------------------------------------------------------------

class Clock:
    """The time that is left, and how long each measurement took."""

    def __init__(self, limit_s, now=time.monotonic):
        self.now, self.end_s, self.taken_s = now, now() + limit_s, {}

    def left_s(self):
        return self.end_s - self.now()

    def has_time_for(self, key, guess_s):
        return self.taken_s.get(key, guess_s) <= self.left_s()

    def run(self, key, measure):
        """Runs a function of the seconds that are left, and notes how long it took if that is the longest."""
        begin_s = self.now()
        result = measure(max(1.0, self.left_s()))
        self.taken_s[key] = max(self.taken_s.get(key, 0), self.now() - begin_s)
        return result


class Session:
    """All that was measured, and why something was not."""

    def __init__(self, options):
        self.options, self.clock, self.reasons, self.failures, self.rows, self.rounds = options, Clock(options.limit), {}, [], [], 0
        self.measurements = measurements(options, self.reasons)

    def measure(self, at, measurement, way, number):
        """Measures one column. Returns True if it has been measured."""
        if not self.clock.has_time_for((at, way), measurement.guess_s):
            self.note(measurement, "no time was left")
            return False
        try:
            rows = self.clock.run((at, way), lambda left_s: measurement.run(way, left_s))
        except SystemExit as failure:
            self.failures.append((measurement, way))
            self.note(measurement, f"{way.name}: {failure}")
            print(f"bench_threads: {failure}", file=sys.stderr)
            return False
        self.rows += [{"round": number, "column": way.name, "threads": way.threads, **row} for row in rows]
        return True

    def note(self, measurement, why):
        for name in measurement.names:
            self.reasons.setdefault(name, why)

    def round(self, number):
        """Returns True if anything was measured. The columns take turns at being first."""
        did = False
        for at, measurement in enumerate(self.measurements):
            turn = number % len(self.options.ways)
            ways = self.options.ways[turn:] + self.options.ways[:turn]
            if measurement.is_once:
                ways = [] if number else self.options.ways[-1:]
            for way in ways:
                if (measurement, way) not in self.failures:
                    did |= self.measure(at, measurement, way, number)
            record(self)
        return did

    def run(self):
        for number in range(self.options.rounds):
            begin_s = time.monotonic()
            if not self.round(number):
                return
            self.rounds = number + 1
            print(f"bench_threads: round {number + 1} took {time.monotonic() - begin_s:.0f} s", file=sys.stderr)


# ---- What was asked --------------------------------------------------------------------------------------------------------

def milliseconds(row):
    return row["step_ms"] if "step_ms" in row else row["median_us"] / 1e3


def times_of(rows, column, what, size):
    """Returns the times of a column by round: medians, if a round has several."""
    times = {}
    for row in rows:
        if row["column"] == column and row["what"] == what and row.get("bytes", 0) * (size > 0) == size:
            times.setdefault(row["round"], []).append(milliseconds(row))
    return {number: median(each) for number, each in times.items()}


def values_of(rows, options, asked):
    """Returns the figure of each round that has it."""
    size, judged = asked.size // options.shrink, options.ways[-1].name
    times = times_of(rows, judged, asked.what, size)
    if not asked.of:
        return list(times.values())
    column = options.ways[0].name if asked.is_gain() else judged
    others = times_of(rows, column, asked.of, size)
    both = sorted(times.keys() & others.keys())
    return [others[number] / times[number] if asked.is_gain() else times[number] / others[number] for number in both]


def why_missing(options, reasons, asked):
    if asked.is_gain() and not options.before:
        return "no older build: --before names its checkout"
    return reasons.get(asked.what, "nothing measured it")


def judge(rows, options, reasons, asked):
    """Returns the object of one figure that was asked for."""
    is_comparable = not asked.is_gain() or options.before
    values = values_of(rows, options, asked) if is_comparable else []
    is_replayed = any(row.get("is_replayed") for row in rows if row["what"] == asked.what)
    one = {"text": asked.text, "unit": asked.unit(), "at_least" if asked.is_gain() else "at_most": asked.limit, "was": asked.was or None,
           "value": median(values) if values else None, "rounds": len(values), "is_replayed": is_replayed}
    if not values:
        return {**one, "why": why_missing(options, reasons, asked)}
    met = one["value"] >= asked.limit if asked.is_gain() else one["value"] <= asked.limit
    is_proof = options.stand_in or options.shrink > 1
    return {**one, "least": min(values), "most": max(values), "met": None if is_proof or is_replayed else met}


# ---- Tables ----------------------------------------------------------------------------------------------------------------

def number_text(value):
    return f"{value:.4g}"


def asked_cells(one):
    limit = f"at least {one['at_least']:g}" if "at_least" in one else f"at most {one['at_most']:g}"
    value = f"{number_text(one['value'])} ({number_text(one['least'])} .. {number_text(one['most'])})" if one["rounds"] else ""
    met = f"not measured: {one['why']}" if not one["rounds"] else {True: "met", False: "missed", None: "not judged"}[one["met"]]
    return [one["text"] + (", replayed" if one["is_replayed"] else ""), f"{limit} {one['unit']}", f"{one['was']:g}" if one["was"] else "",
            value, str(one["rounds"]), met]


def cell_of(times):
    return f"{number_text(median(times))} ({number_text(min(times))} .. {number_text(max(times))})" if times else ""


def lines_of(rows, ways):
    """Returns a line for each thing measured: the median of the rounds of each column, and the gain of the fastest over the
    first."""
    out = []
    for what, size in dict.fromkeys((row["what"], row.get("bytes", 0)) for row in rows if "median_us" in row or "step_ms" in row):
        columns = {way.name: list(times_of(rows, way.name, what, size).values()) for way in ways}
        middles = [median(times) for times in columns.values() if times]
        first = columns[ways[0].name]
        out.append([what, size_text(size) if size else "", *map(cell_of, columns.values()), f"{median(first) / min(middles):.2f}" if first else ""])
    return out


def copied_lines(rows):
    cells = [[size_text(row["unit_bytes"]), *(f"{row[way]:.1f}" for way in ("from_gb_s", "to_gb_s", "both_gb_s"))]
             for row in rows if "unit_bytes" in row and "from_gb_s" in row]
    head = ["copies of the GPU", "from it, GB/s", "to it", "both ways at once"]
    return ["", *bench_gpu.table(head, cells)] if cells else []


def notes_of(options, rows):
    notes = []
    if any(row.get("is_replayed") for row in rows):
        notes.append("Steps are replayed by `shoal bench step`, without PyTorch: they are not judged.")
    if options.stand_in:
        notes.append("The GPU is the stand-in of the tests: this proves the script, and its times mean nothing.")
    if options.shrink > 1:
        notes.append(f"All operands have 1/{options.shrink} of their sizes: this proves the script, and nothing is judged.")
    return notes


def page(session, asked):
    options, cores = session.options, len(os.sched_getaffinity(0))
    head = ["what", "size", *(f"{way.name}, ms" for way in options.ways), "gain"]
    others = sorted(f"- {name}: {why}" for name, why in session.reasons.items())
    return [f"# Threads of {options.ranks} ranks on {cores} cores", "",
            f"Medians of {session.rounds} whole rounds (least .. most), of the slowest rank, by `bench/bench_threads.py`. "
            f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.", *notes_of(options, session.rows), "",
            *bench_gpu.table(["asked", "limit", "was", f"{options.ways[-1].name}", "rounds", ""], [asked_cells(one) for one in asked]), "",
            *bench_gpu.table(head, lines_of(session.rows, options.ways)), *copied_lines(session.rows),
            *(["", "Left out, in some round at least:", "", *others] if others else [])]


def record(session):
    """Writes all that is known so far. Returns the lines of the page."""
    options = session.options
    asked = [judge(session.rows, options, session.reasons, one) for one in ASKED]
    lines = page(session, asked)
    whole = {"machine": bench.machine(), "ranks": options.ranks, "columns": [way.name for way in options.ways], "rounds": session.rounds,
             "stand_in": options.stand_in, "shrink": options.shrink, "asked": asked, "left_out": session.reasons}
    options.out.mkdir(parents=True, exist_ok=True)
    start = options.out / f"threads-{options.ranks}"
    start.with_suffix(".jsonl").write_text("".join(json.dumps(row) + "\n" for row in session.rows))
    start.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
    start.with_suffix(".md").write_text("\n".join([*lines, ""]))
    return lines


def main():
    options = arguments()
    if options.stand_in:
        path = ":".join(filter(None, [str(BUILD / "tests/unit"), os.environ.get("LD_LIBRARY_PATH")]))
        os.environ.update({"LD_LIBRARY_PATH": path, "MOCK_CUDA": os.environ.get("MOCK_CUDA", "devices=1")})
    session = Session(options)
    session.run()
    print("\n".join(record(session)))
    return 1 if session.failures else 0


if __name__ == "__main__":
    sys.exit(main())
