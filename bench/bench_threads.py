#!/usr/bin/env python3
"""Measures how much several threads of a rank help on this machine: SHOAL_THREADS=1 in turns with more, within a time.

  bench/bench_threads.py                      two ranks; 1 thread and as many as each rank has cores, less one
  bench/bench_threads.py --threads 1,3,7      these numbers of threads
  bench/bench_threads.py --limit 540          begin no round that would end later than this many seconds from now (540)
  bench/bench_threads.py --before /tmp/old    also an older checkout, which is built in its folder build: the first column

All-reduces of operands in ordinary memory, in memory from shoal_mem_alloc and, if there is a GPU, in its memory; and training
steps on the GPU (bench/torch_gpu.py) if SHOAL_TEST_PYTHON, or python3, has a torch that was built for CUDA. Small operations
are measured with them, because threads must not slow them down. Each round takes every number of threads in turn, so a machine
that is slow for a while slows all of them. Writes threads-NAME.{md,jsonl} into --out, and prints the tables.

Examples:
  bench/bench_threads.py
  bench/bench_threads.py --ranks 4 --threads 1,2,3 --sizes 64M --rounds 3 --out "$OUT"

Exit codes: 0 success, 1 a measurement failed, 2 invalid arguments.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Optional

TOP = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("SHOAL_BUILD", TOP / "build"))
sys.path.insert(0, str(TOP / "bench"))

from bench_gpu import python_with_cuda, table  # noqa: E402
from bench_report import size_text  # noqa: E402

SMALL = "8,4096"  # bytes


@dataclass(frozen=True)
class Way:
    """One column of the tables: a build, and a number of threads."""
    name: str
    threads: Optional[int]  # None: the build decides
    checkout: pathlib.Path
    build: pathlib.Path


def numbers(text):
    values = [int(word) for word in text.split(",")]
    if not values or min(values) < 1 or max(values) > 64:
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers from 1 to 64")
    return values


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=numbers)
    parser.add_argument("--before", type=pathlib.Path, metavar="CHECKOUT")
    parser.add_argument("--sizes", default="16M,64M,256M", help="of the all-reduces (16M,64M,256M)")
    parser.add_argument("--rounds", type=int, default=5, help="at most (5)")
    parser.add_argument("--limit", type=float, default=540, help="seconds (540)")
    parser.add_argument("--out", type=pathlib.Path, default=TOP / "docs/figures")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0)) // options.ranks
    options.threads = options.threads or sorted({1, max(1, cores - 1)})
    options.ways = [Way(f"{number} thread{'s' if number > 1 else ''}", number, TOP, BUILD) for number in options.threads]
    if options.before:
        options.ways.insert(0, Way("before", None, options.before.resolve(), options.before.resolve() / "build"))
    if options.ranks < 1 or options.rounds < 1:
        parser.error("--ranks and --rounds are 1 or more")
    return options


def has_gpu():
    return os.path.exists("/dev/nvidiactl")


def run(words, way):
    """Returns the JSON objects that a command prints, each with the name of its column and the number of threads."""
    path = ":".join(filter(None, [str(way.checkout / "python"), os.environ.get("PYTHONPATH")]))
    env = {name: value for name, value in os.environ.items() if name != "SHOAL_THREADS"}
    env.update({"PYTHONPATH": path, "SHOAL_LIBRARY": str(way.build / "libshoal.so")})
    if way.threads:
        env["SHOAL_THREADS"] = str(way.threads)
    done = subprocess.run([str(word) for word in [way.build / "shoal", *words]], stdout=subprocess.PIPE, text=True, env=env)
    if done.returncode:
        sys.exit(f"bench_threads: exit code {done.returncode} of {way.build}/shoal {' '.join(map(str, words))}")
    return [{"column": way.name, "threads": way.threads, **json.loads(line)} for line in done.stdout.splitlines() if line.startswith("{")]


def allreduce(ranks, memory, size, way):
    rows = run(["bench", "allreduce", "-n", ranks, "--memory", memory, "--min", size, "--max", size, "--seconds", 2,
                "--format", "json"], way)
    return [{"what": f"all-reduce, {memory}", **row} for row in rows if row["collective"] == "allreduce"]


def steps(ranks, python, way):
    rows = run(["run", "--no-prefix", "-n", ranks, python, way.checkout / "bench/torch_gpu.py"], way)
    return [{"what": f"{row['model']}, {row['way']}", **row} for row in rows if "step_ms" in row]


def measurements(options):
    """Returns functions that measure one thing for a column."""
    def sized(memory, size):
        return lambda way: allreduce(options.ranks, memory, size, way)
    memories = ["plain", "shared", *(["gpu"] if has_gpu() else [])]
    found = [sized("plain", size) for size in SMALL.split(",")]
    found += [sized(memory, size) for memory in memories for size in options.sizes.split(",")]
    python = python_with_cuda() if has_gpu() else None
    return found + ([lambda way: steps(options.ranks, python, way)] if python else [])


def measure(options):
    """Returns the rows of all rounds that fit into the limit, and the number of rounds."""
    begin_s, rows, longest_s = time.monotonic(), [], 0
    for number in range(options.rounds):
        round_s = time.monotonic()
        if number and round_s - begin_s + longest_s > options.limit:
            return rows, number
        for one in measurements(options):
            for way in options.ways:
                rows += [{"round": number, **row} for row in one(way)]
        longest_s = max(longest_s, time.monotonic() - round_s)
        print(f"bench_threads: round {number + 1} took {time.monotonic() - round_s:.0f} s", file=sys.stderr)
    return rows, options.rounds


def milliseconds(row):
    return row["step_ms"] if "step_ms" in row else row["median_us"] / 1e3


def lines_of(rows, ways):
    """Returns a line for each thing measured: the median of the rounds of each column, and the gain over the first."""
    times = {}
    for row in rows:
        key = row["what"], row.get("bytes", 0)
        times.setdefault(key, {}).setdefault(row["column"], []).append(milliseconds(row))
    out = []
    for (what, size), columns in times.items():
        middles = {way.name: median(columns[way.name]) for way in ways}
        cells = [f"{middles[name]:.4g} ({min(columns[name]):.4g} .. {max(columns[name]):.4g})" for name in middles]
        out.append([what, size_text(size) if size else "", *cells, f"{middles[ways[0].name] / min(middles.values()):.2f}"])
    return out


def main():
    options = arguments()
    rows, rounds = measure(options)
    cores = len(os.sched_getaffinity(0))
    name = f"threads-{options.ranks}"
    head = ["what", "size", *(f"{way.name}, ms" for way in options.ways), "gain"]
    lines = [f"# Threads of {options.ranks} ranks on {cores} cores", "",
             f"Medians of {rounds} rounds (least .. most), of the slowest rank, by `bench/bench_threads.py`. "
             f"Load of the machine at the end: {os.getloadavg()[0]:.1f}.", "", *table(head, lines_of(rows, options.ways))]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (options.out / f"{name}.md").write_text("\n".join([*lines, ""]))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
