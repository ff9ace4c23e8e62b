#!/usr/bin/env python3
"""Measures how training steps scale over emulated hosts (tests/hosts/cluster.py) next to what the simulator predicts: `shoal bench
scaling` for each profile and rate, on 1, 2 and 4 hosts of one rank, with a backward pass as long as the wire on four hosts.

Each line of docs/figures/scaling-hosts.jsonl is one number of workers of one run. The hosts share this machine's cores: if other
programs run, steps take longer than predicted. `--goal` ends with 1 if a predicted step is off by more than 15 % (the median of
the runs).
"""
import argparse
import json
import os
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/hosts"))

import cluster as emulated  # noqa: E402

BYTES = {"resnet50": 102228128, "gpt2": 497759232, "bert-large": 1344904432}
LIMIT_S, GOAL = 1200, 0.15


def backward_ms(profile, rate, hosts):
    return round(2 * (hosts - 1) / hosts * BYTES[profile] * 8e-6 / rate)


def measure(options, profile, rate):
    """Returns the lines of one run."""
    command = [str(options.shoal), "bench", "scaling", "--profile", profile, "--backward", str(backward_ms(profile, rate, options.hosts)),
               "--rounds", str(options.rounds), "--steps", str(options.steps), "--one-machine", "--cores", str(os.cpu_count()),
               "--timeout", "300", "--format", "json"]
    print(f"# {rate} Gbit/s: {' '.join(command[1:])}", file=sys.stderr, flush=True)
    with emulated.Cluster(options.hosts, f"{rate}gbit") as cluster:
        with emulated.Job(cluster, emulated.Layout(f"{options.hosts}x1"), command, {}).start() as job:
            if not job.wait(LIMIT_S, emulated.GRACE_S) or job.failed():
                sys.exit(f"bench_scaling: failed: {' '.join(command)}\n{job.told()}")
            lines = [json.loads(line) for line in job.ranks[0].output().splitlines() if line.startswith("{")]
    return [{"profile": profile, "link_gbit_s": rate, "rate_gbit_s": lines[-1]["rate_gbit_s"], "backward_us": lines[-1]["backward_us"],
             **point} for point in lines[:-1]]


def table(rows):
    """Prints medians over the runs, and returns the largest difference between prediction and measurement."""
    worst = 0
    print("| profile | link, Gbit/s | measured rate | hosts | step, ms | 10 % to 90 % | efficiency | predicted, ms | off |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    runs = {}
    for row in rows:
        runs.setdefault((row["profile"], row["link_gbit_s"], row["hosts"]), []).append(row)
    for (profile, link, hosts), same in runs.items():
        def middle(name, scale=1):
            return statistics.median(row[name] for row in same) / scale
        worst = max(worst, abs(middle("off")))
        print(f"| {profile} | {link:g} | {middle('rate_gbit_s'):.2f} | {hosts} | {middle('step_us', 1e3):.0f} | "
              f"{middle('step_p10_us', 1e3):.0f} to {middle('step_p90_us', 1e3):.0f} | {100 * middle('efficiency'):.0f} % | "
              f"{middle('predicted_us', 1e3):.0f} | {100 * middle('off'):+.0f} % |")
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", type=Path, default=ROOT / "build/shoal")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/scaling-hosts.jsonl")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1.0], help="Gbit/s of each link")
    parser.add_argument("--profiles", nargs="+", choices=sorted(BYTES), default=["resnet50", "gpt2"])
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--goal", action="store_true", help="end with 1 if a prediction is off by more than 15 %%")
    parser.add_argument("--table", action="store_true", help="print the table of the file, and measure nothing")
    options = parser.parse_args()
    rows = []
    if options.table:
        rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    else:
        emulated.require()
        for run in range(options.runs):
            for profile in options.profiles:
                for rate in options.rates:
                    new = [{"run": run, **row} for row in measure(options, profile, rate)]
                    rows += new
                    with options.out.open("a") as file:
                        file.writelines(json.dumps(row) + "\n" for row in new)
    return int(table(rows) > GOAL and options.goal)


if __name__ == "__main__":
    sys.exit(main())
