#!/usr/bin/env python3
"""Measures the time from a failure anywhere to the end of `shoal run` on all emulated hosts. Shoal promises 5 s.

  bench_ends.py [--rounds N] [--quick]

Each case is a case of tests/hosts/test_run.py, which also checks every host's messages and that no process remains. The time
of a case begins at its failure or, if ranks blame a rank, when the first rank does.

Writes docs/figures/bench-ends.jsonl (see bench/bench_record.py)."""
import argparse
import os
import re
import subprocess
import sys
from statistics import median

import bench
import bench_hosts
import bench_record
from bench import ROOT

OUT = ROOT / "docs/figures/bench-ends.jsonl"
BUILD = ROOT / "build"
PROMISED_S = 5
LIMIT_S = 150
CASES = {
    "killed_worker_of_2x2": "2 hosts x 2, a worker is killed; the others compute with Shoal",
    "killed_worker_of_8x1": "8 hosts x 1, the same",
    "killed_worker_without_shoal": "3 hosts x 2, a worker is killed; the others know nothing of Shoal and ignore SIGTERM",
    "raising_worker": "2 hosts x 1, a worker exits with code 3; the other knows nothing of Shoal",
    "blamed_worker": "3 hosts x 2, the ranks blame one of them",
    "killed_agent_of_host_1": "3 hosts x 2, the `shoal run` of a host is killed",
    "cut_off_host": "3 hosts x 2, the cable of a host is cut; the workers ignore SIGTERM",
}


def seconds_of(case):
    environment = {**os.environ, "SHOAL_HOST_RANK": str(BUILD / "tests/hosts/host_rank"), "SHOAL_COMMAND": str(BUILD / "shoal")}
    done = subprocess.run([sys.executable, ROOT / "tests/hosts/test_run.py", case], env=environment, capture_output=True, text=True,
                          timeout=LIMIT_S)
    found = re.findall(r"^# ended after ([\d.]+) s$", done.stdout, re.M)
    if done.returncode or len(found) != 1:
        sys.exit(f"bench: {case} failed:\n{done.stdout}{done.stderr}")
    return float(found[0])


def summary_print(points):
    for text in CASES.values():
        values = [point["value"] for point in points if point["case"] == text]
        print(f"{median(values):6.2f} s ({min(values):.2f} .. {max(values):.2f})  {text}")
    print(f"the most: {max(point['value'] for point in points):.2f} s; promised: {PROMISED_S} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round, no record")
    options = parser.parse_args()
    if why := bench_hosts.why_impossible():
        sys.exit(f"bench: hosts cannot be emulated: {why}")
    points = []
    for number in range(1 if options.quick else options.rounds):
        for case, text in CASES.items():
            points.append({"round": number, "case": text, "state": "unknown", "value": seconds_of(case)})
            bench.say(f"  round {number + 1}: {points[-1]['value']:.2f} s: {text}")
    if not options.quick:
        bench_record.write(OUT, {"suite": "ends", "kind": "cases", "title": "Ending a job after a failure, seconds", "what":
                                 "workers on emulated hosts", "machine": bench.machine(), "command":
                                 f"bench/bench_ends.py --rounds {options.rounds}", "shoal_command": "shoal run", "points": points})
    summary_print(points)


if __name__ == "__main__":
    main()
