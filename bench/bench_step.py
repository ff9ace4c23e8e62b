#!/usr/bin/env python3
"""Measures training steps over emulated hosts (tests/hosts/cluster.py): `shoal bench step` of each profile, on hosts of one
rank whose links are shaped, compared with the bound that no engine beats (docs/figures/steps.md).

Suites:
  bound    steps in which the wire takes 0.9 of the backward pass: step over (bound + one buffer's own time), and how much of
           the wire is hidden
  tied     GPT-2 and BERT-large with the wire as long as the backward pass; optimizers run while buffers are still on the wire
  sharded  AdamW, with the wire 0.9 of the backward pass: each rank steps all parameters, or the optimizer runs in the reduction
           with one team and with teams of two; compared with what `shoal sim step` predicts
  int8     one tensor of 16 MiB or 64 MiB, all ready at once: the bandwidth of int8 over that of no compression
  torch    the same profiles through PyTorch (bench/torch_step.py): torch's DistributedDataParallel on Gloo and on Shoal, and
           Shoal's own subclass, in turns, over the shaped hosts with the wire as long as the backward pass
  torch-local  the same with two ranks of this machine and a backward pass as long as Gloo's step with nothing to hide behind,
           each rank sleeping (as if a GPU computed) or computing on its own core
  torch-zero   the same ranks with nothing to hide behind, including the time of zero_grad(): to None, and to zeros

Each line of docs/figures/step-hosts.jsonl is the result of one run, with the suite, the round and the rate. It is appended
as soon as the run ends, so an interrupted bench loses nothing. Rounds continue from the file's last: delete the lines that a
run is to replace. The CPU is free: ranks sleep until a gradient is ready. Hosts share this machine's cores: on two cores,
four hosts at 2 Gbit/s each way are near the most that the kernel carries.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/hosts"))

import cluster as emulated  # noqa: E402

BYTES = {"resnet50": 102228128, "gpt2": 497759232, "bert-large": 1344904432}
STEPS = {"resnet50": 8, "gpt2": 4, "bert-large": 3}
LIMIT_S = 900
MIB = 1 << 20
SUITES = ("bound", "tied", "sharded", "int8", "torch", "torch-local", "torch-zero")
# The emulated hosts share this machine's cores. One core copies, and steps parameters, at about these rates (shoal bench optimizer).
MODEL = ["--ranks-per-host", "1", "--one-machine", "--cores", str(os.cpu_count()), "--memory", "28GB/s", "--update", "30GB/s"]
CONTESTANTS = ["gloo", "shoal", "shoal-ddp"]
TORCH_PYTHON = ROOT / "build/torch/bin/python3"
ENVIRONMENT = {"GLOO_SOCKET_IFNAME": emulated.INTERFACE, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "python"),
               "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so")}


def wire_ms(size, rate_gbit, hosts):
    return 2 * (hosts - 1) / hosts * size * 8e-6 / rate_gbit


class Bench:
    def __init__(self, options):
        self.options = options
        self.rows = []

    def say(self, text):
        print(f"# {text}", file=sys.stderr, flush=True)

    def add(self, row):
        """Keeps a row for the table, and adds it to the file."""
        self.rows.append(row)
        with self.options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def run(self, suite, number, rate, words):
        """Performs one run and adds its row."""
        hosts = self.options.hosts
        command = [str(self.options.shoal), "bench", "step", "--format", "json", "--rate", f"{rate}gbit", "--timeout", "300",
                   *map(str, words)]
        self.say(f"round {number + 1}: {suite}, {rate} Gbit/s: {' '.join(command[5:])}")
        with emulated.Cluster(hosts, f"{rate}gbit") as cluster:
            with emulated.Job(cluster, emulated.Layout(f"{hosts}x1"), command, {}).start() as job:
                if not job.wait(LIMIT_S, emulated.GRACE_S) or job.failed():
                    sys.exit(f"bench_step: failed: {' '.join(command)}\n{job.told()}")
                told = [json.loads(line) for line in job.ranks[0].output().splitlines() if line.startswith("{")]
        self.add({"suite": suite, "round": number, **told[-1]})
        return told[-1]

    # ---- suites ----

    def bound(self, number):
        for rate in self.options.rates:
            for profile in self.options.profiles:
                backward = wire_ms(BYTES[profile], rate, self.options.hosts) / 0.9
                self.run("bound", number, rate, ["--profile", profile, "--backward", round(backward), "--steps", STEPS[profile]])

    def tied(self, number):
        for rate in self.options.rates:
            for profile in (name for name in self.options.profiles if name != "resnet50"):
                backward = round(wire_ms(BYTES[profile], rate, self.options.hosts))
                for optimizer in ("after", "buffers"):
                    self.run("tied", number, rate, ["--profile", profile, "--backward", backward, "--steps", STEPS[profile],
                                                    "--optimizer", "sgd", "--when", optimizer])

    def sharded(self, number):
        for rate in self.options.rates:
            for profile in self.options.profiles:
                backward = round(wire_ms(BYTES[profile], rate, self.options.hosts) / 0.9)
                for words in (["--when", "after"], ["--when", "buffers"], ["--shard", "all"], ["--shard", "2"]):
                    step = ["--profile", profile, "--backward", backward, "--optimizer", "adamw", *words]
                    self.run("sharded", number, rate, [*step, "--steps", STEPS[profile]])
                    self.rows[-1]["predicted_us"] = self.predict(rate, step)

    def predict(self, rate, words):
        """Returns the microseconds of the step that `shoal sim step` predicts."""
        told = subprocess.run([self.options.shoal, "sim", "step", "--hosts", str(self.options.hosts), "--rate", f"{rate}gbit", *MODEL,
                               *map(str, words), "--format", "json"], check=True, capture_output=True, text=True).stdout
        return json.loads(told)["step_us"]

    def int8(self, number):
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            for mib in (16, 64):
                profile = Path(folder, f"{mib}MiB.json")
                profile.write_text(json.dumps([{"name": "one", "elements": mib * MIB // 4, "ready": 1.0}]))
                for word in ("none", "int8"):
                    self.run("int8", number, 1, ["--profile", profile, "--backward", 0, "--steps", 20 * 16 // mib,
                                                 "--compress", word, "--views"])

    def torch_step(self, suite, number, scene, profile, backward, *words):
        """Measures the step of each contestant, in rotated order. scene: (rate, layout)."""
        rate, layout = scene
        found = {}
        turn = number % len(CONTESTANTS)
        for contestant in CONTESTANTS[turn:] + CONTESTANTS[:turn]:
            told = self.torch_run(contestant, rate, layout, profile, backward, *words)
            self.add({"suite": suite, "round": number, "profile": profile, "rate_gbit_s": rate, **told})
            found[contestant] = told["step_ms"]
        return found

    def torch_run(self, contestant, rate, layout, profile, backward, *words):
        self.say(f"{contestant}, {profile}, backward pass of {backward} ms, hosts {layout}, {rate or 'no'} Gbit/s")
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            file = Path(folder, "profile.json")
            file.write_text(subprocess.run([self.options.shoal, "sim", "step", "--profile", profile, "--print-profile"], check=True,
                                           capture_output=True, text=True).stdout)
            command = list(map(str, [TORCH_PYTHON, ROOT / "bench/torch_step.py", contestant, file, "--backward", backward,
                                     "--steps", STEPS[profile], *words]))
            parts = emulated.Layout(layout)
            with emulated.Cluster(len(parts.sizes), f"{rate}gbit" if rate else "") as cluster:
                with emulated.Job(cluster, parts, command, ENVIRONMENT).start() as job:
                    if not job.wait(LIMIT_S, emulated.GRACE_S) or job.failed():
                        sys.exit(f"bench_step: failed: {' '.join(command)}\n{job.told()}")
                    return next(json.loads(line) for line in job.ranks[0].output().splitlines() if line.startswith("{"))

    def torch(self, number):
        for profile in self.options.profiles:
            rate = self.options.rates[0]
            backward = round(wire_ms(BYTES[profile], rate, self.options.hosts))
            self.torch_step("torch", number, (rate, f"{self.options.hosts}x1"), profile, backward)

    def torch_local(self, number):
        for profile in self.options.profiles:
            backward = round(self.torch_step("torch-alone", number, (0, "1x2"), profile, 0)["gloo"])
            self.torch_step("torch-local", number, (0, "1x2"), profile, backward)
            self.torch_step("torch-local-busy", number, (0, "1x2"), profile, backward, "--busy")

    def torch_zero(self, number):
        for profile in self.options.profiles:
            for way in ("none", "keep"):
                self.torch_step(f"torch-zero-{way}", number, (0, "1x2"), profile, 0, "--zero", way)

    # ---- output ----

    def torch_table(self):
        """Prints each contestant's times divided by those of torch's on Shoal, round by round."""
        of = {}
        for row in self.rows:
            if row["suite"].startswith("torch"):
                of.setdefault((row["suite"], row["profile"]), {}).setdefault(row["round"], {})[row["contestant"]] = row
        for (suite, profile), rounds in of.items():
            text = []
            for name in CONTESTANTS:
                ratios = sorted(found[name]["step_ms"] / found["shoal"]["step_ms"] for found in rounds.values())
                middle = statistics.median(found[name]["step_ms"] for found in rounds.values())
                text.append(f"{name} {middle:.0f} ms, {statistics.median(ratios):.2f} ({ratios[0]:.2f} .. {ratios[-1]:.2f})")
            backward = statistics.median(found["shoal"]["backward_ms"] for found in rounds.values())
            print(f"{suite}, {profile}, backward pass {backward:.0f} ms: {'; '.join(text)}")

    def table(self):
        """Prints the medians of the rounds, and their spread."""
        self.torch_table()
        lines = [("suite", "profile", "Gbit/s", "", "backward ms", "bound ms", "step ms", "over bound", "hidden")]
        seen = {}
        for row in (row for row in self.rows if not row["suite"].startswith("torch")):
            word = row["compress"] if row["suite"] == "int8" else row["when"] if row["shard"] == "none" else f"shard {row['shard']}"
            seen.setdefault((row["suite"], row["profile"], row["rate_gbit_s"], word), []).append(row)
        for (suite, profile, rate, word), rows in seen.items():
            def middle(name, scale=1):
                return statistics.median(row[name] for row in rows) / scale

            def spread(name):
                values = sorted(row[name] for row in rows)
                return f"{values[0]:.3f} .. {values[-1]:.3f}" if len(values) > 1 else f"{values[0]:.3f}"
            lines.append((suite, profile, f"{rate:g}", word, f"{middle('asked_backward_us', 1e3):.0f}", f"{middle('bound_us', 1e3):.0f}",
                          f"{middle('step_us', 1e3):.0f}", spread("over_bound"), spread("hidden")))
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        for line in lines:
            print("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        for row in (row for row in self.rows if row["suite"] == "sharded"):
            way = row["when"] if row["shard"] == "none" else f"shard {row['shard']}"
            print(f"sharded, {row['profile']}, {row['rate_gbit_s']:g} Gbit/s, {way}: {row['step_us'] / 1e3:.0f} ms measured, "
                  f"{row['predicted_us'] / 1e3:.0f} predicted; optimizer {row['optimizer_us'] / 1e3:.1f} ms, "
                  f"{row['optimizer_bytes'] / MIB:.0f} MiB of states on a rank")
        for size in sorted({row["bytes"] for row in self.rows if row["suite"] == "int8"}):
            ratios = self.ratios(size)
            print(f"int8, {size // MIB} MiB: {statistics.median(ratios):.2f} times the bandwidth ({min(ratios):.2f} .. {max(ratios):.2f})")

    def ratios(self, size):
        of = {(row["round"], row["compress"]): row["step_us"] for row in self.rows if row["suite"] == "int8" and row["bytes"] == size}
        return [of[number, "none"] / of[number, "int8"] for number in sorted({number for number, _ in of})]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (all)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rates", type=lambda text: [float(word) if "." in word else int(word) for word in text.split(",")],
                        default=[1, 2], help="rates of the links, in Gbit/s (1,2)")
    parser.add_argument("--profiles", type=lambda text: text.split(","), default=list(BYTES), help="models (resnet50,gpt2,bert-large)")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/step-hosts.jsonl", help="file to which lines are appended")
    parser.add_argument("--shoal", type=Path, default=ROOT / "build/shoal")
    options = parser.parse_args()
    options.suites = options.suites or list(SUITES)
    for word in options.suites:
        if word not in SUITES:
            parser.error(f"no suite {word}: {', '.join(SUITES)}")
    return options


def next_round(path):
    """Returns the round after the last one in the file."""
    rows = path.read_text().splitlines() if path.exists() else []
    return 1 + max((json.loads(row)["round"] for row in rows), default=-1)


def main():
    options = arguments()
    emulated.require()
    bench = Bench(options)
    first = next_round(options.out)
    for number in range(first, first + options.rounds):
        for suite in options.suites:
            getattr(bench, suite.replace("-", "_"))(number)
    bench.table()


if __name__ == "__main__":
    main()
