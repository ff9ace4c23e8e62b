#!/usr/bin/env python3
"""Measures two builds of `shoal bench` in turns, so that a change of the code shows and a change of the machine does not.

    git worktree add /tmp/before COMMIT && make -C /tmp/before build
    bench/bench_before.py /tmp/before/build/shoal

Rows are the curves of bench/bench.py and a few of its cases. A round of a row runs one build after the other, and the builds
take turns at being first. Each run measures all sizes of the row. The ratio of a size in a round is the old time divided by
the new time: above 1, the new build is faster. A size is "slower" if its ratio is below 1 in every round, and "faster" if it
is above 1 in every round. With R rounds, pure chance makes one size in 2^R slower and one in 2^R faster. A round is repeated
if one build saw cores that share a cache and the other did not (see bench/bench.py). Rows whose options the older command
lacks are named and left out.

Writes build/before-after.jsonl, a line per build, row, round and size, and prints the table."""
import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import bench
from bench_report import exchange_state, size_text

TRIES = 4
BUILDS = ("before", "after")


@dataclass
class Row:
    """Sizes from the first to the last, each eight times the one before. options: of `shoal bench`."""
    name: str
    collective: str
    ranks: int
    options: list
    first: int = 8
    last: int = 16 << 20


def rows_of_curves():
    curves = [suite for suite in bench.SUITES.values() if suite.kind == "curve"]
    return [Row(suite.name, suite.collective, suite.ranks, [word for word in suite.shoal if word not in ("--probe", "memory")])
            for suite in curves]


def rows_of_cases():
    types = [Row(f"{name} {text}", "allreduce", 2, [*memory.options, "--type", name])
             for name in ("bfloat16", "float16") for text, memory in bench.SIXTEEN_MEMORIES]
    return [*types,
            Row("three ranks", "allreduce", 3, bench.PLAIN.options),
            Row("an odd length", "allreduce", 2, bench.PLAIN.options, 12345676, 12345676),
            Row("pointers 4 bytes off", "allreduce", 2, [*bench.PLAIN.options, "--offset", "4"], 4 << 10),
            Row("a peer 20 ms late", "allreduce", 2, ["--late", "20", "--iterations", "50"], 8, 8),
            Row("a barrier", "barrier", 2, [], 8, 8),
            Row("a barrier of four", "barrier", 4, [], 8, 8)]


def measure(program, row, seconds):
    """Returns one line per size."""
    span = ["--min", str(row.first), "--max", str(row.last)]
    pin = ["--pin"] if row.ranks > bench.CORES else []
    lines = bench.run([str(program), "bench", row.collective, "-n", str(row.ranks), *span, "--seconds", str(seconds),
                       "--format", "json", *pin, *row.options])
    return [line for line in lines if line["collective"] == row.collective]


def state_of(measured):
    seen = {exchange_state(line.get("exchange_ns")) for lines in measured.values() for line in lines}
    return seen.pop() if len(seen) == 1 else "mixed"


def round_run(row, programs, number, seconds):
    order = BUILDS if number % 2 == 0 else BUILDS[::-1]
    for _ in range(TRIES):
        measured = {build: measure(programs[build], row, seconds) for build in order}
        state = state_of(measured)
        if state in ("near", "far") or row.ranks > bench.CORES:
            break
    return [{"row": row.name, "round": number, "build": build, "state": state, "bytes": line["bytes"],
             "median_us": line["median_us"]} for build in BUILDS for line in measured[build]]


def ratios_of(lines):
    """Returns the rounds' ratios, by size."""
    times = {(line["round"], line["bytes"], line["build"]): line["median_us"] for line in lines}
    ratios = {}
    for (number, size, build), before in times.items():
        if build == "before" and (number, size, "after") in times:
            ratios.setdefault(size, []).append(before / times[number, size, "after"])
    return ratios


def verdict(ratios):
    return "slower" if max(ratios) < 1 else "faster" if min(ratios) > 1 else ""


def table(lines, names):
    """Returns one Markdown line per row: the median over sizes, then the sizes that every round found slower or faster."""
    told = ["| row | time before / after, median of its sizes | every round slower | every round faster |", "|---|---|---|---|"]
    for name in names:
        ratios = ratios_of([line for line in lines if line["row"] == name])
        if not ratios:
            continue
        marks = {"slower": [], "faster": [], "": []}
        for size, each in sorted(ratios.items()):
            marks[verdict(each)].append(f"{size_text(size)} {median(each):.2f} ({min(each):.2f} to {max(each):.2f})")
        middle = median(median(each) for each in ratios.values())
        told.append(f"| {name} | {middle:.2f} | {', '.join(marks['slower'])} | {', '.join(marks['faster'])} |")
    return "\n".join(told)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="the older `shoal`")
    parser.add_argument("--after", type=Path, default=bench.ROOT / "build/shoal", help="the newer one (build/shoal)")
    parser.add_argument("--rounds", type=bench.rounds_parse, default=5, metavar="N", help="rounds of each row (5)")
    parser.add_argument("--seconds", type=int, default=1, metavar="S", help="most time for one size (1)")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose names contain this text")
    parser.add_argument("--out", type=Path, default=bench.ROOT / "build/before-after.jsonl",
                        help="file to which lines are appended (build/before-after.jsonl)")
    parser.add_argument("--table", action="store_true", help="measure nothing; print the table of the recorded figures")
    options = parser.parse_args()
    if not options.table and options.before is None:
        parser.error("which build is the older one? its `shoal`, please")
    return options


def rows_measure(rows, options):
    programs = {"before": options.before.resolve(), "after": options.after.resolve()}
    left_out = set()
    for number in range(options.rounds):
        for at, row in enumerate(rows, 1):
            if row.name in left_out:
                continue
            try:
                lines = round_run(row, programs, number, options.seconds)
            except SystemExit as error:
                left_out.add(row.name)
                bench.say(f"{row.name} is left out: {error}")
                continue
            with options.out.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)
            middle = median(median(each) for each in ratios_of(lines).values())
            bench.say(f"round {number + 1} of {options.rounds}, row {at} of {len(rows)}: {row.name} {lines[0]['state']} {middle:.2f}")


def main():
    options = arguments()
    rows = [row for row in rows_of_curves() + rows_of_cases() if options.rows in row.name]
    if not options.table:
        rows_measure(rows, options)
    if not options.out.exists():
        bench.say("bench: there is no row that both builds can measure" if not options.table else f"bench: there is no {options.out}")
        return 2
    print(table([json.loads(line) for line in options.out.read_text().splitlines()], [row.name for row in rows]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
