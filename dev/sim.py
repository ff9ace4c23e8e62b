#!/usr/bin/env python3
"""What `shoal sim` predicts, on record: a table, a plot and all numbers at docs/figures/sim-NAME.{md,svg,json}.

  dev/sim.py              every suite; the largest takes some minutes
  dev/sim.py allreduce    only that one
  dev/sim.py measured     what was measured over emulated hosts (dev/bench.py 'hosts-*') beside what is predicted for them;
                          exit code 1 where they are more than 15 % apart

Predictions are the same on every machine: a figure changes when an algorithm, a default or the model does.
"""
import json
import pathlib
import re
import statistics
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


# ---- Beside what was measured ----------------------------------------------------------------------------------------------

APART = 0.15
MESSAGE_US = 8  # of CPU time, each side: what the kernel's TCP takes here, as perf shows


def predict(collective, layout, size, rate_gbit_s, latency_us):
    hosts, ranks = layout.split("x")
    words = [collective, "--hosts", hosts, "--ranks-per-host", ranks, "--bytes", size, "--rate", f"{rate_gbit_s:.4f}gbit",
             "--latency", f"{latency_us:.3f}us", "--message-us", MESSAGE_US, "--format", "json"]
    told = subprocess.run([SHOAL, "sim", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(told)["time_us"]


def find_latency(collective, layout, point, rate_gbit_s):
    """With which the smallest size takes what was measured. The time of a few messages is linear in it."""
    low, high = (predict(collective, layout, point["bytes"], rate_gbit_s, latency) for latency in (0, 100))
    return max(0, 100 * (point["times_us"]["shoal"] - low) / (high - low))


def compare_suite(record):
    """Rows of one suite: the rate is what iperf3 said before each round, the latency what the smallest size says."""
    layout = re.search("hosts-([^-]*)", record["suite"]).group(1)
    collective = record["shoal_command"].split("shoal bench ")[1].split()[0]
    rate = 8 * statistics.median(point["wire"]["one_gb_s"] for point in record["points"])
    latency = find_latency(collective, layout, record["summary"][0], rate)
    for point in record["summary"]:
        measured, predicted = point["times_us"]["shoal"], predict(collective, layout, point["bytes"], rate, latency)
        yield {"suite": record["suite"], "bytes": point["bytes"], "rate_gbit_s": rate, "latency_us": latency,
               "measured_us": measured, "predicted_us": predicted, "ratio": predicted / measured}


def compare():
    records = [json.loads(path.read_text()) for path in sorted(FIGURES.glob("bench-hosts-*.json"))]
    rows = [row for record in records if "unshaped" not in record["suite"] for row in compare_suite(record)]
    if not rows:
        sys.exit("dev/sim.py: docs/figures has no bench-hosts-*.json: run `make bench-hosts`")
    lines = ["# What `shoal sim` predicts beside what was measured", "", "`dev/sim.py measured`, from `make bench-hosts`", "",
             "The rate is what one iperf3 stream reaches between two of the hosts; the latency is chosen so that the smallest size",
             f"is right; a message costs {MESSAGE_US} us of CPU time on each side. All else is the model's default.", "",
             "| suite | bytes | measured us | predicted us | predicted / measured | latency us | Gbit/s |", "|---" * 7 + "|"]
    for row in rows:
        lines.append(f"| {row['suite']} | {row['bytes']} | {row['measured_us']:.1f} | {row['predicted_us']:.1f} | "
                     f"{row['ratio']:.2f} | {row['latency_us']:.1f} | {row['rate_gbit_s']:.3f} |")
    (FIGURES / "sim-measured.md").write_text("\n".join(lines) + "\n")
    (FIGURES / "sim-measured.json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines[8:]))
    return int(any(abs(row["ratio"] - 1) > APART for row in rows))


def main():
    if sys.argv[1:] == ["measured"]:
        return compare()
    names = sys.argv[1:] or list(SUITES)
    if "--help" in names or not set(names) <= set(SUITES):
        print(__doc__)
        return 0 if "--help" in names else 2
    if not SHOAL.exists():
        sys.exit("dev/sim.py: build/shoal is not there: run `make build`")
    return max(record(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
