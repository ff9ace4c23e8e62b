#!/usr/bin/env python3
"""Measures training steps through the front-ends on two ranks of this machine, each on its own core, in turns.

Suites:
  tensorflow   a Keras CNN and a BERT-base, in their own loop, with Shoal, with MultiWorkerMirroredStrategy, and
               alone, that is without averages: no way to average gradients beats the strategy by more than
               strategy / alone; and the time that one more all-reduce of 64 B adds inside one tf.function
  torch        one network through torch's DistributedDataParallel on Shoal, Shoal's own, Horovod's names, Accelerate and Lightning

Each line of docs/figures/front-ends.jsonl is the result of one run. `make test` makes build/tensorflow and build/trainers,
which this needs."""
import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 600
TENSORFLOW = ("shoal", "strategy", "alone")
TORCH = ("ddp", "shoal-ddp", "horovod", "accelerate", "lightning")


def exchange_ns(shoal):
    """Returns the time that a cache line takes now from one core to the other and back: the distance between cores changes."""
    told = subprocess.run([shoal, "bench", "allreduce", "-n", "2", "--max", "8", "--format", "json"], capture_output=True, text=True,
                          timeout=LIMIT_S).stdout
    found = [json.loads(line).get("exchange_ns") for line in told.splitlines() if line.startswith("{")]
    return next((one for one in found if one), None)


def in_turns(contestants, number):
    """Rotates the contestants, so that each round begins with another one."""
    turn = number % len(contestants)
    return contestants[turn:] + contestants[:turn]


class Bench:
    def __init__(self, options):
        self.options, self.rows = options, []

    def add(self, row):
        """Keeps a row for the table and appends it to the file at once, so that an interrupted run loses nothing."""
        self.rows.append(row)
        if self.options.output:
            with self.options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def run(self, suite, number, python, script, *words):
        print(f"# round {number + 1}: {suite}: {' '.join(words)}", file=sys.stderr, flush=True)
        environment = {"PYTHONPATH": str(ROOT / "python"), "SHOAL_LIBRARY": str(ROOT / "build/libshoal.so"), "OMP_NUM_THREADS": "1",
                       "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
        ended = subprocess.run([self.options.shoal, "run", "-n", "2", ROOT / f"build/{python}/bin/python3", ROOT / "bench" / script, *words],
                               env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        # `shoal run` prefixes each line with the rank.
        found = [json.loads(line[line.index("{"):]) for line in ended.stdout.splitlines() if '{"contestant"' in line]
        if ended.returncode or not found:
            sys.exit(f"bench_front_ends: {' '.join(words)} failed:\n{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}")
        self.add({"suite": suite, "round": number, "exchange_ns": exchange_ns(self.options.shoal), **found[0]})

    def tensorflow(self, number):
        for model in ("cnn", "bert"):
            for contestant in in_turns(TENSORFLOW, number):
                self.run("tensorflow", number, "tensorflow", "front_end_tensorflow.py", contestant, model)
        self.run("tensorflow", number, "tensorflow", "front_end_tensorflow.py", "shoal", "small")

    def torch(self, number):
        for contestant in in_turns(TORCH, number):
            self.run("torch", number, "trainers", "front_end_torch.py", contestant)

    def of(self, key, contestant, model=None):
        return {row["round"]: row[key] for row in self.rows if row["contestant"] == contestant and row.get("model") == model}

    def ratio(self, what, over, under):
        """Returns the median, minimum and maximum of the rounds' ratios."""
        found = sorted(over[number] / under[number] for number in over if number in under)
        if found:
            print(f"{what}: {median(found):.3f} ({found[0]:.3f} .. {found[-1]:.3f}), {median(over.values()):.1f} and "
                  f"{median(under.values()):.1f} ms")

    def table(self):
        for model in ("cnn", "bert"):
            for over, under in (("strategy", "shoal"), ("strategy", "alone"), ("shoal", "alone")):
                self.ratio(f"TensorFlow, {model}: {over} / {under}", self.of("step_ms", over, model), self.of("step_ms", under, model))
        more = sorted(self.of("more_us", "shoal", "small").values())
        if more:
            print(f"TensorFlow: each further all-reduce of 64 B in a tf.function: {median(more):.1f} us ({more[0]:.1f} .. {more[-1]:.1f})")
        for contestant, beside in (("horovod", "shoal-ddp"), ("accelerate", "ddp"), ("lightning", "ddp"), ("shoal-ddp", "ddp")):
            self.ratio(f"PyTorch: {contestant} / {beside}", self.of("step_ms", contestant), self.of("step_ms", beside))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="tensorflow, torch (both)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shoal", type=Path, default=ROOT / "build/shoal", help="the shoal command")
    parser.add_argument("--output", type=Path, help="file to which the results of each run are appended, as JSON lines")
    options = parser.parse_args()
    bench = Bench(options)
    for number in range(options.rounds):
        for suite in options.suites or ("tensorflow", "torch"):
            getattr(bench, suite)(number)
    bench.table()


if __name__ == "__main__":
    main()
