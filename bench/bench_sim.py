#!/usr/bin/env python3
"""Records what `shoal sim` predicts: a table, a plot and all numbers at docs/figures/sim-NAME.{md,svg,jsonl}.

  bench/bench_sim.py              every suite; the largest takes some minutes
  bench/bench_sim.py allreduce    only that suite
  bench/bench_sim.py measured     measurements over emulated hosts (bench/bench.py 'hosts-*') and the predictions for them;
                          exit code 1 if they differ by more than 15 %

Predictions are the same on every machine: a figure changes only if an algorithm, a default or the model changes.
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
sys.path[:0] = [str(TOP / "tests/hosts"), str(TOP / "bench")]

import bench_report  # noqa: E402
import bench_sim_plot  # noqa: E402
import cluster as emulated  # noqa: E402

HOSTS = ["--hosts", "1-256", "--ranks-per-host", "8", "--bytes", "100M,1G"]

# For GPUs. docs/figures/predictions.md names the sources of the numbers.
PCIE = ["--hosts", "1", "--ranks-per-host", "8", "--bytes", "1M-1G", "--factor", "4", "--pcie", "gen4", "--memory", "24GB/s",
        "--host-memory", "300GB/s"]
P4D = ["--hosts", "2-64", "--ranks-per-host", "8", "--bytes", "25M,256M", "--rate", "400gbit", "--pcie", "gen3", "--pcie-switch",
       "gen3", "--switch-gpus", "2", "--switch-adapters", "--memory", "24GB/s", "--host-memory", "210GB/s"]

STEP = ["--profile", "resnet50,bert-large,gpt2", "--backward", "120,400,250", "--rate", "100gbit", "--memory", "20GB/s"]

# name -> (title, words of the command)
SUITES = {
    "allreduce": ("All-reduce on 1 to 256 hosts of 8 ranks, 25 Gbit/s, ordinary memory", ["allreduce", *HOSTS]),
    "gpu-pcie": ("All-reduce of 8 GPUs of one host, PCIe 4, no NVLink", ["allreduce", *PCIE]),
    "gpu-pcie-peers": ("All-reduce of 8 GPUs of one host that sum among themselves over PCIe 4",
                       ["allreduce", *PCIE, "--nvlink", "24GB/s"]),
    "gpu-p4d": ("All-reduce on 2 to 64 hosts like p4d, of 8 GPUs with NVLink", ["allreduce", *P4D, "--nvlink", "gen3"]),
    "gpu-p4d-staged": ("All-reduce on 2 to 64 hosts like p4d, whole operands through host memory", ["allreduce", *P4D]),
    "step": ("Training steps on 1 to 256 hosts of 8 ranks, float32", ["step", *STEP]),
}


def size_text(size):
    return f"{size >> 30} GiB" if size % (1 << 30) == 0 else f"{size >> 20} MiB"


def time_text(us):
    return f"{us / 1e6:.3f} s" if us >= 1e6 else f"{us / 1e3:.1f} ms"


def shares_of(row):
    return ["sending", "working", "messaging", "waiting", *(["copying"] if row["pcie_gb_s"] else [])]


def row_text(row):
    share = f"{100 * row['share_of_bound']:.0f}%" if row["bound_us"] else ""
    cells = [row["hosts"], size_text(row["bytes"]), time_text(row["time_us"]),
             *(f"{row[name]:.3f}" for name in ("algbw_gb_s", "busbw_gb_s")), share,
             *(f"{100 * row[name]:.0f}%" for name in shares_of(row)),
             f"{row['chunks_simulated']} of {row['chunks']}", row["algorithm"]]
    return "| " + " | ".join(map(str, cells)) + " |"


def model_text(row):
    stack = f"bytes go through a core at {row['stack_gb_s']:g} GB/s" if row["stack_gb_s"] else "bytes cost no CPU time"
    return (f"The model: a network of {row['rate_gbit_s']:g} Gbit/s each way per host, latency {row['latency_us']:g} us, "
            f"{row['message_us']:g} us CPU time per message and side, {stack};\nmemory {row['memory_gb_s']:g} GB/s read and "
            f"written per rank, a signal {row['signal_us']:g} us, {row['cores']} cores per host. Not measured: see "
            "`shoal sim --explain-model`.")


def gpus_text(row):
    """Returns the model's description of GPUs; empty if operands are not on GPUs."""
    if not row["pcie_gb_s"]:
        return ""
    below = f"{row['switch_gpus']:g} GPUs{' and their adapters' if row['switch_adapters'] else ''}"
    switch = f"; switches {row['switch_gb_s']:g} GB/s each way for {below}" if row["switch_gb_s"] else ""
    nvlink = f"; NVLink {row['nvlink_gb_s']:g} GB/s each way" if row["nvlink_gb_s"] else ""
    return (f"\n\nOperands on GPUs: PCIe {row['pcie_gb_s']:g} GB/s each way{switch}{nvlink};\nunits of {row['unit_bytes'] >> 10} "
            f"KiB, {row['copy_us']:g} us before a copy; memory of a host {row['host_memory_gb_s']:g} GB/s. Predictions: no GPU "
            "was measured.")


def network_text(row):
    return (f"The model: a network of {row['rate_gbit_s']:g} Gbit/s each way per host, latency {row['latency_us']:g} us, "
            f"{row['message_us']:g} us CPU time per message and side;\nmemory {row['memory_gb_s']:g} GB/s read and written per "
            "rank. Not measured: see `shoal sim step --help` and `shoal sim --explain-model`.")


def step_text(row):
    cells = [row["profile"], row["ranks"], row["algorithm"], *(f"{row[name] / 1e3:.1f}" for name in ("backward_us", "step_us", "exposed_us")),
             *(f"{100 * row[name]:.1f}%" for name in ("efficiency", "bound_efficiency")), row["limit"]]
    return "| " + " | ".join(map(str, cells)) + " |"


def step_page(name, title, command, rows):
    head = ["model", "workers", "algorithm", "backward ms", "step ms", "exposed ms", "efficiency", "at bound", "limit"]
    return "\n".join([f"# {title}, predicted", "", f"`{command}`, by `bench/bench_sim.py {name}`", "", f"![efficiency](sim-{name}.svg)", "",
                      network_text(rows[0]), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|", *map(step_text, rows), ""])


def page(name, title, command, rows):
    if command.startswith("shoal sim step"):
        return step_page(name, title, command, rows)
    bound = "of the bound of wire and PCIe" if rows[0]["pcie_gb_s"] else "of the wire's bound"
    head = ["hosts", "size", "time", "algbw GB/s", "busbw GB/s", bound, *shares_of(rows[0]), "chunks simulated", "algorithm"]
    lines = [f"# {title}, predicted", "", f"`{command}`, by `bench/bench_sim.py {name}`", "", f"![times](sim-{name}.svg)", "",
             model_text(rows[0]) + gpus_text(rows[0]), "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join(lines + [row_text(row) for row in rows] + [
        "", "Shares are of the time: of the busiest adapter (sending), of the ranks (working, messaging, waiting), of the busiest way",
        "to GPUs (copying). Chunks that were not simulated are taken to follow each other as those that were.", ""])


def rows_write(name, rows):
    (FIGURES / f"sim-{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def record(name):
    title, words = SUITES[name]
    result = subprocess.run([SHOAL, "sim", *words, "--format", "json"], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        return result.returncode
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    rows_write(name, rows)
    (FIGURES / f"sim-{name}.svg").write_text(bench_sim_plot.plot(rows))
    (FIGURES / f"sim-{name}.md").write_text(page(name, title, " ".join(["shoal sim", *words]), rows))
    print(f"docs/figures/sim-{name}.md")
    return 0


# ---- Predictions and measurements ------------------------------------------------------------------------------------------
#
# The model's numbers do not come from the times that are compared. iperf3 measures the rate over a shaped link, and the bytes
# that a core moves over an unshaped one. The bucket and the cores follow from how the hosts are emulated. Only the CPU time of
# a message and the latency come from the smallest size. No number depends on the size.
#

APART = 0.15
LATENCY_MOST_US = 1000.0
NOTE = """The hosts are emulated on one machine, whose cores all ranks share; each link has a token bucket each way
(`tests/hosts/cluster.py`). The rate is what one iperf3 stream reaches between two of the hosts, the stack what it reaches
where links are not shaped. The smallest size says what CPU time a message takes on each side, in the suite that spends least,
and in each suite the latency, in which are sleeping, waking and ranks that leave the barrier before one another. Operations
follow each other, each after a barrier: where more goes out than comes into a bucket meanwhile, the next finds only what comes
in during the pause; where there is none the bucket is full. CPU time is that of all ranks, the time measured also that in which
they wait awake. All else is the model's default. `docs/figures/predictions.md` says what follows."""


def measured_of(record, size):
    """Returns the measurements of a size: one for each round."""
    return [point["results"]["shoal"] for point in record["points"] if point["bytes"] == size]


def cpu_us(answer):
    """Returns the CPU time of all ranks: computing, sending and receiving."""
    return answer["ranks"] * answer["time_us"] * (answer["working"] + answer["messaging"])


def bisect(most, is_below):
    """Returns the point between 0 and most at which is_below becomes false, to a hundredth."""
    low, high = 0.0, most
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if is_below(middle) else (low, middle)
    return low


class Model:
    """The model's numbers for the hosts of one suite."""

    def __init__(self, record, stack_gb_s):
        self.hosts, self.ranks = re.search("hosts-([^-]*)", record["suite"]).group(1).split("x")
        self.collective = record["shoal_command"].split("shoal bench ")[1].split()[0]
        self.smallest = record["summary"][0]["bytes"]
        self.measured = measured_of(record, self.smallest)
        self.rate_gbit_s = 8 * statistics.median(point["wire"]["one_gb_s"] for point in record["points"])
        self.words = ["--rate", f"{self.rate_gbit_s:.4f}gbit", "--burst", emulated.BURST_BYTES,
                      "--stack", f"{stack_gb_s:.4f}GB/s", "--cores", record["machine"]["cores"], "--one-machine"]
        self.message_us, self.latency_us = 0.0, 0.0

    def ask(self, collective, size, pause_us=0.0):
        words = [collective, "--hosts", self.hosts, "--ranks-per-host", self.ranks, "--bytes", size, "--message-us",
                 f"{self.message_us:.3f}", "--latency", f"{self.latency_us:.3f}", "--pause", f"{pause_us:.3f}", *self.words,
                 "--format", "json"]
        told = subprocess.run([SHOAL, "sim", *map(str, words)], stdout=subprocess.PIPE, text=True, check=True).stdout
        return json.loads(told)

    def message_most_us(self):
        """Returns the CPU time per message that accounts for all the CPU time of the smallest size. Busy waiting uses part
        of that time, so the true value may be lower."""
        without_us = cpu_us(self.ask(self.collective, self.smallest))
        self.message_us = 1.0
        with_us = cpu_us(self.ask(self.collective, self.smallest))
        return (statistics.median(of["cpu_us"] for of in self.measured) - without_us) / (with_us - without_us)

    def choose_latency(self):
        """Chooses the latency with which the smallest size takes as long as measured."""
        measured_us = statistics.median(of["median_us"] for of in self.measured)

        def is_short(latency_us):
            self.latency_us = latency_us
            return self.ask(self.collective, self.smallest)["time_us"] < measured_us

        self.latency_us = bisect(LATENCY_MOST_US, is_short)

    def predict(self, size):
        """Predicts one size. Operations are measured one after the other, each after a barrier. If an operation and its
        barrier send more than the bucket gains meanwhile, buckets do not begin full: either the bytes sent equal those
        gained, or the buckets are empty when the barrier begins."""
        barrier_us = self.ask("barrier", 0)["time_us"]

        def is_too_full(answer):
            return answer["sent_bytes"] > self.rate_gbit_s / 8e-3 * (answer["time_us"] + barrier_us)

        answer = self.ask(self.collective, size)
        if not is_too_full(answer):
            return answer
        filled_us = emulated.BURST_BYTES * 8e-3 / self.rate_gbit_s
        pause_us = bisect(filled_us, lambda pause_us: not is_too_full(self.ask(self.collective, size, pause_us)))
        return self.ask(self.collective, size, max(barrier_us, pause_us))


def compare_suite(record, model, message_us):
    model.message_us = message_us
    model.choose_latency()
    for point in record["summary"]:
        measured = measured_of(record, point["bytes"])
        times_us, answer = [of["median_us"] for of in measured], model.predict(point["bytes"])
        median_us = statistics.median(times_us)
        yield {"suite": record["suite"], "bytes": point["bytes"], "algorithm": answer["algorithm"], "measured_us": median_us,
               "measured_least_us": min(times_us), "measured_most_us": max(times_us), "predicted_us": answer["time_us"],
               "ratio": answer["time_us"] / median_us,
               "measured_cpu_us": statistics.median(of["cpu_us"] for of in measured), "predicted_cpu_us": cpu_us(answer),
               "latency_us": model.latency_us, "message_us": message_us,
               **{name: answer[name] for name in ("pause_us", "rate_gbit_s", "stack_gb_s", "burst_bytes", "cores")}}


def comparison_text(row):
    least, most = row["measured_least_us"], row["measured_most_us"]
    cells = [row["suite"], row["bytes"], row["algorithm"],
             f"{row['measured_us']:.1f}" + (f" ({least:.1f} .. {most:.1f})" if least < most else ""),
             f"{row['predicted_us']:.1f}", f"{row['ratio']:.2f}", f"{row['measured_cpu_us']:.0f}",
             f"{row['predicted_cpu_us']:.0f}", f"{row['latency_us']:.1f}", f"{row['pause_us']:.1f}" if row["pause_us"] else "",
             f"{row['rate_gbit_s']:.3f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def compare():
    suites = [path.stem.removeprefix("bench-") for path in sorted(FIGURES.glob("bench-hosts-*.jsonl"))]
    records = [bench_report.record_read(FIGURES, suite) for suite in suites]
    shaped = [record for record in records if "unshaped" not in record["suite"]]
    unshaped = [point["wire"]["one_gb_s"] for record in records if "unshaped" in record["suite"] for point in record["points"]]
    if not shaped or not unshaped:
        sys.exit("bench/bench_sim.py: docs/figures lacks some bench-hosts-*.jsonl: run `make bench-hosts`")
    models = [Model(record, statistics.median(unshaped)) for record in shaped]
    message_us = min(model.message_most_us() for model in models)
    rows = [row for record, model in zip(shaped, models) for row in compare_suite(record, model, message_us)]
    one = rows[0]
    head = ["suite", "bytes", "algorithm", "measured us (least .. most of rounds)", "predicted us", "predicted / measured",
            "CPU us measured", "predicted", "latency us", "pause us", "Gbit/s"]
    table = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *map(comparison_text, rows)]
    text = ["# What `shoal sim` predicts beside what was measured", "", "`bench/bench_sim.py measured`, from `make bench-hosts`", "",
            NOTE, "", f"CPU time of a message and side {message_us:.2f} us, stack {one['stack_gb_s']:.2f} GB/s, "
            f"burst {one['burst_bytes']} bytes, {one['cores']} cores.", ""]
    (FIGURES / "sim-measured.md").write_text("\n".join([*text, *table, ""]))
    rows_write("measured", rows)
    print("\n".join(table))
    return int(any(abs(row["ratio"] - 1) > APART for row in rows))


def main():
    if sys.argv[1:] == ["measured"]:
        return compare()
    names = sys.argv[1:] or list(SUITES)
    if "--help" in names or not set(names) <= set(SUITES):
        print(__doc__)
        return 0 if "--help" in names else 2
    if not SHOAL.exists():
        sys.exit("bench/bench_sim.py: build/shoal is not there: run `make build`")
    return max(record(name) for name in names)


if __name__ == "__main__":
    sys.exit(main())
