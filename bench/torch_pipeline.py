#!/usr/bin/env python3
"""Runs the same stages with the same schedule by shoal.torch.Pipeline and by torch.distributed.pipelining, over Shoal and over Gloo.

  shoal run -n 4 build/torch/bin/python3 bench/torch_pipeline.py --schedule 1f1b
  shoal run -n 2 build/torch/bin/python3 bench/torch_pipeline.py --schedule zb-h1 --layers 4 --width 64    a try

The model is a chain of blocks of two linear layers, cut into equal stages. Gradients of all three are compared first. Then they
take turns, step by step, so that other work on the machine meets all of them. Rank 0 prints a line of JSON: for each, the median and
the shortest time of a step in milliseconds, the ratios of the medians to Shoal's, and the least processor time of its process for
an action in microseconds, which a busy machine changes little. handover_us is the median time from the end of an action of Shoal's
pipeline to the begin of one on another rank that waited for its message. Needs `make build/torch`."""
import argparse
import copy
import json
import os
import re
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("SHOAL_LIBRARY", str(ROOT / "build/libshoal.so"))
sys.path.insert(0, str(ROOT / "python"))
import shoal.torch  # noqa: E402

WARMUPS = 2
WAITED_US = 200  # shorter waits are those of messages that were there before


def parse_options():
    parser = argparse.ArgumentParser(description="compares pipelines in PyTorch", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedule", default="1f1b", metavar="NAME", help="one of Shoal's schedules")
    parser.add_argument("--layers", type=int, default=16, metavar="N", help="blocks of the model")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="width of a block")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="samples of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8, metavar="N")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="measured steps of each")
    return parser.parse_args()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def shoals(options, model, loss):
    """Returns a pipeline of Shoal with equal stages."""
    ranks = dist.get_world_size()
    stages = ranks if options.schedule in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2 * ranks
    cuts = [str(options.layers * stage // stages) for stage in range(1, stages)]
    return shoal.torch.Pipeline(model, torch.zeros(options.rows, options.width), microbatches=options.microbatches,
                                schedule=options.schedule, loss=loss, cuts=cuts)


def torchs(pipeline, loss, group):
    """Returns a step of torch's runtime with copies of a pipeline's stages, and their parameters."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    modules, text = pipeline.to_torch()
    modules = {number: copy.deepcopy(module) for number, module in modules.items()}
    last = pipeline.schedule.stages - 1
    stages = [PipelineStage(module, number, last + 1, torch.device("cpu"), group=group) for number, module in modules.items()]
    runtime = _PipelineScheduleRuntime(stages, pipeline.microbatches, loss_fn=loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(text)
        file.flush()
        runtime._load_csv(file.name, format="compute_only")

    def step(inputs, targets):
        runtime.step(*([inputs] if 0 in modules else []), **({"target": targets} if last in modules else {}))
    return step, {name: parameter for module in modules.values() for name, parameter in module.named_parameters()}


def timed(step, parameters, batch):
    """Returns the milliseconds of a step, from the time at which all ranks begin to that at which the last one ends, and its
    processor time on this rank in microseconds."""
    for parameter in parameters.values():
        parameter.grad = None
    dist.barrier()
    begin, cpu = time.perf_counter(), time.process_time()
    step(*batch)
    cpu = time.process_time() - cpu
    dist.barrier()
    return (time.perf_counter() - begin) * 1e3, cpu * 1e6


def handovers(pipeline):
    """Returns the microseconds from the end of each action to the begin of one on another rank that waited for its message."""
    own, every = pipeline.times(), [None] * dist.get_world_size()
    dist.all_gather_object(every, [(name, waited, own["begin_ns"] / 1e3 + begin, own["begin_ns"] / 1e3 + end)
                                   for name, waited, begin, end in own["actions"]])
    ends = {name.replace("I", "B"): (rank, end) for rank, actions in enumerate(every) for name, _, _, end in actions}
    found = []
    for rank, actions in enumerate(every):
        for name, waited, begin, _ in actions:
            stage, letter, microbatch = re.fullmatch(r"(\d+)(\w)(\d+)", name).groups()
            source = f"{int(stage) + (-1 if letter == 'F' else 1)}{letter.replace('I', 'B')}{microbatch}"
            if letter in "FBI" and waited > WAITED_US and source in ends and ends[source][0] != rank:
                found.append(begin - ends[source][1])
    return found


def compare(runs):
    """Stops the program if gradients differ."""
    _, own = runs["shoal"]
    for name, (_, parameters) in runs.items():
        for key, parameter in parameters.items():
            torch.testing.assert_close(parameter.grad, own[key].grad, msg=lambda text, name=name, key=key: f"{name}: {key}: {text}")


def main():
    options = parse_options()
    warnings.filterwarnings("ignore")
    dist.init_process_group("shoal", init_method="shoal://")
    torch.manual_seed(1)
    model, loss = nn.Sequential(*(Block(options.width) for _ in range(options.layers))), nn.functional.mse_loss
    pipeline = shoals(options, model, loss)
    runs = {"shoal": (pipeline.step, dict(pipeline.named_parameters())),
            "torch over shoal": torchs(pipeline, loss, dist.group.WORLD),
            "torch over gloo": torchs(pipeline, loss, dist.new_group(backend="gloo"))}
    batch = torch.randn(2, options.rows * options.microbatches, options.width).unbind()
    times, costs, waits = {name: [] for name in runs}, {name: [] for name in runs}, []
    actions = pipeline.schedule.text().splitlines()[dist.get_rank()].count(",") + 1
    for number in range(WARMUPS + options.rounds):
        for name, (step, parameters) in runs.items():
            took, cpu = timed(step, parameters, batch)
            times[name] += [took] if number >= WARMUPS else []
            costs[name].append(cpu / actions)
            waits += handovers(pipeline) if name == "shoal" and number >= WARMUPS else []
        if number == 0:
            compare(runs)
    if dist.get_rank() == 0:
        median = {name: statistics.median(each) for name, each in times.items()}
        print(json.dumps({**vars(options), "ranks": dist.get_world_size(), "median_ms": {name: round(each, 3) for name, each in median.items()},
                          "best_ms": {name: round(min(each), 3) for name, each in times.items()},
                          "handover_us": round(statistics.median(waits), 1) if waits else None, "cpu_us": {name: round(min(each), 1) for name, each in costs.items()},
                          "ratio": {name: round(each / median["shoal"], 3) for name, each in median.items()}}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
