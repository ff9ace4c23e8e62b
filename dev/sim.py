#!/usr/bin/env python3
"""What `shoal sim` predicts, on record: a table, a plot and all numbers at docs/figures/sim-NAME.{md,svg,json}.

  dev/sim.py              every suite; the largest takes some minutes
  dev/sim.py allreduce    only that one

Predictions are the same on every machine: a figure changes when an algorithm, a default or the model does.
"""
import json
import pathlib
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
FIGURES = TOP / "docs/figures"
SHOAL = TOP / "build/shoal"
HOSTS = ["--hosts", "1-256", "--ranks-per-host", "8", "--bytes", "100M,1G"]

# name -> (title, words of the command)
SUITES = {
    "allreduce": ("All-reduce on 1 to 256 hosts of 8 ranks, 25 Gbit/s, ordinary memory", ["allreduce", *HOSTS]),
}


def size_text(size):
    return f"{size >> 30} GiB" if size % (1 << 30) == 0 else f"{size >> 20} MiB"


def time_text(us):
    return f"{us / 1e6:.3f} s" if us >= 1e6 else f"{us / 1e3:.1f} ms"


def row_text(row):
    share = f"{100 * row['share_of_bound']:.0f}%" if row["bound_us"] else ""
    cells = [row["hosts"], size_text(row["bytes"]), time_text(row["time_us"]),
             *(f"{row[name]:.3f}" for name in ("algbw_gb_s", "busbw_gb_s")), share,
             *(f"{100 * row[name]:.0f}%" for name in ("sending", "working", "messaging", "waiting")),
             f"{row['pieces_simulated']} of {row['pieces']}", row["algorithm"]]
    return "| " + " | ".join(map(str, cells)) + " |"


def model_text(row):
    stack = f"bytes go through a core at {row['stack_gb_s']:g} GB/s" if row["stack_gb_s"] else "bytes cost no CPU time"
    return (f"The model: a network of {row['rate_gbit_s']:g} Gbit/s each way per host, latency {row['latency_us']:g} us, "
            f"{row['message_us']:g} us CPU time per message and side, {stack};\nmemory {row['memory_gb_s']:g} GB/s read and "
            f"written per rank, a signal {row['signal_us']:g} us, {row['cores']} cores per host. Not measured: see "
            "`shoal sim --explain-model`.")


def page(name, title, command, rows):
    head = ["hosts", "size", "time", "algbw GB/s", "busbw GB/s", "of the wire's bound", "sending", "working", "messaging",
            "waiting", "pieces simulated", "algorithm"]
    lines = [f"# {title}, predicted", "", f"`{command}`, by `dev/sim.py {name}`", "", f"![times](sim-{name}.svg)", "",
             model_text(rows[0]), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + [row_text(row) for row in rows] + [
        "", "Shares are of the time: of the busiest adapter (sending), of the ranks (working, messaging, waiting). Pieces that",
        "were not simulated are taken to follow each other as those that were.", ""])


def record(name):
    title, words = SUITES[name]
    plot = FIGURES / f"sim-{name}.svg"
    result = subprocess.run([SHOAL, "sim", *words, "--format", "json", "--plot", plot], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        return result.returncode
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    (FIGURES / f"sim-{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    (FIGURES / f"sim-{name}.md").write_text(page(name, title, " ".join(["shoal sim", *words]), rows))
    print(f"docs/figures/sim-{name}.md")
    return 0


def main():
    names = sys.argv[1:] or list(SUITES)
    if "--help" in names or not set(names) <= set(SUITES):
        print(__doc__)
        return 0 if "--help" in names else 2
    if not SHOAL.exists():
        sys.exit("dev/sim.py: build/shoal is not there: run `make build`")
    return max(record(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
