#!/usr/bin/env python3
"""Measures how fast one core steps parameters: shoal_optimizer_update compared with torch's fused optimizers and DeepSpeed's
CPUAdam and CPUAdagrad, on the same number of float32 parameters.

  bench/bench_update.py                         64 MiB of parameters in one tensor, seven rounds
  bench/bench_update.py --mib 16 --rounds 3     a try

Needs `make build/torch/deepspeed`. One process with one thread on one core; nothing else runs. Each round measures all
contestants of a rule once, in rotated order, after one step that is not measured. All must end at the same parameters, within
rounding. Prints the median time of a step in milliseconds, and its ratio to Shoal's in the same round (median, least and most
of the rounds). --json FILE also writes the rounds.
"""
import argparse
import ctypes
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build/torch/bin/python3"
RATE, DECAY = 1e-3, 0.01


def fill(tensor, seed):
    import torch
    return tensor.copy_(torch.linspace(-1, 1, tensor.numel()) * seed)


class Shoal:
    """Steps with the engine's function, whose arrays are torch's."""

    def __init__(self, rule, count, states, **settings):
        import torch
        from shoal import _native
        self.native, self.library, self.step_number = _native, _native.load(), 0
        self.parameter, self.gradient = torch.empty(count), torch.empty(count)
        self.states = [torch.zeros(count) for _ in range(states)]
        self.rule = rule
        self.group = _native.OptimizerGroup(rate=RATE, decay=DECAY, **settings)
        self.range = _native.OptimizerRange(type=_native.FLOAT32, count=count, gradient=self.gradient.data_ptr(),
                                            parameter=self.parameter.data_ptr())
        for name, state in zip(("first", "second"), self.states):
            setattr(self.range, name, state.data_ptr())

    def step(self):
        self.step_number += 1
        status = self.library.optimizer_update(self.rule, ctypes.byref(self.group), self.step_number, 1.0, ctypes.byref(self.range))
        assert status == self.native.OK, status


class Framework:
    """Steps with a torch.optim.Optimizer."""

    def __init__(self, make, count):
        import torch
        self.parameter = torch.nn.Parameter(torch.empty(count))
        self.gradient = self.parameter.grad = torch.empty(count)
        self.optimizer = make([self.parameter])

    def step(self):
        self.optimizer.step()


def contestants_of(rule, count):
    """Returns functions that make the contestants."""
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from shoal import _native
    common = dict(lr=RATE, weight_decay=DECAY)
    moments = dict(beta1=0.9, beta2=0.999, epsilon=1e-8)
    return {
        "adamw": {"shoal": lambda: Shoal(_native.ADAMW, count, 2, **moments),
                  "torch, fused": lambda: Framework(lambda p: torch.optim.AdamW(p, fused=True, **common), count),
                  "DeepSpeed": lambda: Framework(lambda p: DeepSpeedCPUAdam(p, adamw_mode=True, **common), count)},
        "adam": {"shoal": lambda: Shoal(_native.ADAM, count, 2, **moments),
                 "torch, fused": lambda: Framework(lambda p: torch.optim.Adam(p, fused=True, **common), count),
                 "DeepSpeed": lambda: Framework(lambda p: DeepSpeedCPUAdam(p, adamw_mode=False, **common), count)},
        "sgd": {"shoal": lambda: Shoal(_native.SGD, count, 1, beta1=0.9),
                "torch, fused": lambda: Framework(lambda p: torch.optim.SGD(p, momentum=0.9, fused=True, **common), count)},
        "adagrad": {"shoal": lambda: Shoal(_native.ADAGRAD, count, 1, epsilon=1e-10),
                    "torch, fused": lambda: Framework(lambda p: torch.optim.Adagrad(p, fused=True, **common), count),
                    "DeepSpeed": lambda: Framework(lambda p: DeepSpeedCPUAdagrad(p, eps=1e-10, **common), count)},
    }[rule]


def measure(rule, count, rounds):
    """Returns the times of each contestant in milliseconds, round by round."""
    import torch
    all_of = {name: make() for name, make in contestants_of(rule, count).items()}
    names, times = list(all_of), {name: [] for name in all_of}
    with torch.no_grad():
        for each in all_of.values():
            fill(each.parameter, 1.0)
            fill(each.gradient, 0.5)
            each.step()
        for number in range(rounds):
            for name in names[number % len(names):] + names[:number % len(names)]:
                began = time.perf_counter()
                all_of[name].step()
                times[name].append(1e3 * (time.perf_counter() - began))
        wanted = all_of["shoal"].parameter
        for name, each in all_of.items():
            gap = (each.parameter - wanted).abs().max().item()
            if not gap < 1e-5:
                sys.exit(f"{rule}: {name} ends {gap} from Shoal")
    return times


def print_table(rows):
    print(f"{'rule':8} {'':14} {'ms':>8}   of Shoal's time [least - most]")
    for rule, times in rows.items():
        for name, values in times.items():
            ratios = [value / own for value, own in zip(values, times["shoal"])]
            print(f"{rule:8} {name:14} {statistics.median(values):8.2f}   {statistics.median(ratios):.2f} "
                  f"[{min(ratios):.2f} - {max(ratios):.2f}]")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=64, help="size of the parameters (64)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help="file for the times of all rounds")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.rank:
        if not (ROOT / "build/torch/bin/python3").exists():
            sys.exit("bench_update.py: run `make build/torch/deepspeed` before")
        words = [word for word in sys.argv[1:]] + ["--rank"]
        os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")
        os.execv(PYTHON, [str(PYTHON), __file__, *words])
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.path.insert(0, str(ROOT / "python"))
    os.environ.setdefault("SHOAL_LIBRARY", str(ROOT / "build/libshoal.so"))
    import torch
    torch.set_num_threads(1)
    rows = {rule: measure(rule, options.mib * 2**20 // 4, options.rounds) for rule in ("adamw", "adam", "sgd", "adagrad")}
    print_table(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"mib": options.mib, "times_ms": rows}) + "\n")


if __name__ == "__main__":
    main()
