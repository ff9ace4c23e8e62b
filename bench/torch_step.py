"""One rank of a training step replayed through PyTorch: the gradients of a profile (`shoal sim step --print-profile`) become
ready along a backward pass of the given length. During the pass the rank sleeps, as if a GPU computed, or with --busy
computes on its own core. A busy pass takes longer by the time that other threads of the rank use on that core.
bench/bench_step.py starts this.

    torch_step.py CONTESTANT PROFILE --backward MS [--steps N]       under any launcher that sets RANK, WORLD_SIZE and MASTER_*

CONTESTANT is gloo or shoal, both under torch's DistributedDataParallel, or shoal-ddp, Shoal's own subclass of it. PROFILE is
a file. Rank 0 prints a JSON object. A step begins when all ranks have met and ends when backward() returns; the slowest rank
counts. With shoal-ddp the object has the time of a comparison of all parameters (compare_parameters()), which by default runs in
every hundredth step.

A step begins with gradients that are zeros, so that the backward pass adds to them in place. --zero includes the time of
zero_grad(): `keep` zeroes the gradients in the step; `none` sets them to None, and the backward pass makes new ones.
"""
import argparse
import json
import os
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

WARMUPS = 3
COMPARISONS = 5


class Clock:
    """The time when the backward pass began, and how long the thread that runs it has computed."""

    def __init__(self, backward_s, is_busy):
        self.backward_s = backward_s
        self.is_busy = is_busy
        self.start = self.computed_s = 0.0

    def begin(self):
        self.start, self.computed_s = time.perf_counter(), 0.0

    def wait(self, share):
        if self.is_busy:
            self.compute(share * self.backward_s)
            return
        rest = self.start + share * self.backward_s - time.perf_counter()
        if rest > 0:
            time.sleep(rest)

    def compute(self, until_s):
        """Computes until this thread has used until_s seconds since the beginning of the pass; the time of hooks adds to
        that."""
        start = time.thread_time()
        while self.computed_s + time.thread_time() - start < until_s:
            pass
        self.computed_s = max(self.computed_s, until_s)


class Ready(torch.autograd.Function):
    """Does nothing in the forward pass; in the backward pass returns a gradient at its time."""

    @staticmethod
    def forward(context, value, weight, gradient, clock, share):
        context.gradient, context.clock, context.share = gradient, clock, share
        return value.clone()

    @staticmethod
    def backward(context, outer):
        """Drops the context's reference to the gradient: autograd copies a gradient that has another owner, and moves one
        that has none."""
        context.clock.wait(context.share)
        gradient, context.gradient = context.gradient, None
        return outer, gradient, None, None, None


class Replay(torch.nn.Module):
    """profile: in the order in which gradients become ready; parameters are registered in the model's order."""

    def __init__(self, profile, clock, rank, makes_new):
        super().__init__()
        self.clock, self.makes_new = clock, makes_new
        by_index = sorted(range(len(profile)), key=lambda at: profile[at]["index"])
        self.weights = torch.nn.ParameterList(torch.zeros(profile[at]["elements"]) for at in by_index)
        place = {at: number for number, at in enumerate(by_index)}
        generator = torch.Generator().manual_seed(rank)
        self.order = [(place[at], torch.rand(one["elements"], generator=generator), one["ready"])
                      for at, one in reversed(list(enumerate(profile)))]

    def forward(self, value):
        for number, gradient, share in self.order:
            value = Ready.apply(value, self.weights[number], gradient.clone() if self.makes_new else gradient, self.clock, share)
        return value


def wrapped(contestant, module):
    if contestant == "shoal-ddp":
        import shoal.torch
        return shoal.torch.DistributedDataParallel(module)
    return torch.nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)


def means_check(model, module):
    """Checks every average of the last step, by its sum."""
    for number, gradient, _ in module.order:
        expected = gradient.double().sum()
        dist.all_reduce(expected)
        expected /= dist.get_world_size()
        found = module.weights[number].grad.double().sum()
        if not torch.allclose(found, expected, rtol=1e-4):
            raise SystemExit(f"torch_step: rank {dist.get_rank()}: parameter {number}: {found} instead of {expected}")


def measure(options, module, model):
    value, took = torch.zeros(1, requires_grad=True), []
    for _ in range(WARMUPS + options.steps):
        if not options.zero:
            model.zero_grad(set_to_none=False)
        out = model(value)
        dist.barrier()
        start = time.perf_counter()
        if options.zero:
            model.zero_grad(set_to_none=options.zero == "none")
        module.clock.begin()
        out.sum().backward()
        took.append(time.perf_counter() - start)
    means_check(model, module)
    slowest = torch.tensor(took[WARMUPS:], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def comparison_ms(model):
    """Returns how long the ranks compare their parameters; None for torch's class."""
    if not hasattr(model, "compare_parameters"):
        return None
    took = []
    for _ in range(COMPARISONS):
        dist.barrier()
        start = time.perf_counter()
        model.compare_parameters()
        took.append(time.perf_counter() - start)
    return round(median(took) * 1e3, 3)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=("gloo", "shoal", "shoal-ddp"))
    parser.add_argument("profile", type=Path)
    parser.add_argument("--backward", type=float, required=True, help="milliseconds")
    parser.add_argument("--busy", action="store_true", help="compute instead of sleeping, each rank of a host on its own core")
    parser.add_argument("--zero", choices=("none", "keep"), help="also count zero_grad(): to None, or to zeros in place")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    if options.contestant != "gloo":
        import shoal.torch  # noqa: F401
    if options.busy:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(os.environ["LOCAL_RANK"]) % len(cores)]})
    dist.init_process_group("gloo" if options.contestant == "gloo" else "shoal")
    profile = [each for each in json.loads(options.profile.read_text()) if "elements" in each]  # without its facts
    module = Replay(profile, Clock(options.backward / 1e3, options.busy), dist.get_rank(),
                    options.zero == "none")
    model = wrapped(options.contestant, module)
    took = measure(options, module, model)
    compare_ms = comparison_ms(model)
    if dist.get_rank() == 0:
        print(json.dumps({"contestant": options.contestant, "backward_ms": options.backward, "busy": options.busy,
                          "zero": options.zero, "ranks": dist.get_world_size(), "compare_ms": compare_ms,
                          "step_ms": round(median(took) * 1e3, 3), "steps_ms": [round(one * 1e3, 3) for one in took]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
