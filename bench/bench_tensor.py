#!/usr/bin/env python3
"""Trains one GPT by tensor parallelism: divided by shoal.torch.tensor_parallel, and by torch's parallelize_module with DTensor
parameters, over Shoal and over Gloo.

  shoal run -n 2 build/torch/bin/python3 bench/bench_tensor.py
  shoal run -n 2 build/torch/bin/python3 bench/bench_tensor.py --layers 1 --width 128 --rounds 2     a try

A step is a forward pass, a backward pass and a step of AdamW. Losses and the whole weights of all three are compared after the first
step. Then they take turns, step by step, so that other work on the machine meets all of them. Rank 0 prints a line of JSON: for each,
the median of steps per second with the least and the most, the ratio of the median times to Shoal's, the median CPU time of the
thread that trains, in milliseconds a step, and the bytes of parameters, gradients and states of AdamW on this rank, beside those
that tensor.memory_of() predicts. Needs `make build/torch`."""
import argparse
import copy
import json
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("SHOAL_LIBRARY", str(ROOT / "build/libshoal.so"))
sys.path.insert(0, str(ROOT / "python"))
import shoal.torch  # noqa: E402

WARMUPS, WORDS, HEAD = 3, 256, 64


def parse_options():
    parser = argparse.ArgumentParser(description="compares tensor parallelism in PyTorch", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="blocks of the model")
    parser.add_argument("--width", type=int, default=256, metavar="N", help="width of a block, 64 for each head")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="sequences of a step")
    parser.add_argument("--context", type=int, default=128, metavar="N", help="words of a sequence")
    parser.add_argument("--rounds", type=int, default=20, metavar="N", help="measured steps of each")
    return parser.parse_args()


class Block(nn.Module):
    """Written so that torch's plan needs no change of the code: numbers of heads follow from the values."""

    def __init__(self, width):
        super().__init__()
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.mix = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x):
        heads = (layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.mix(scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = x + self.attend(self.norm_attention(x))
        return x + self.down(gelu(self.up(self.norm_feed(x))))


class Gpt(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, options.width), nn.Embedding(options.context, options.width)
        self.blocks = nn.ModuleList(Block(options.width) for _ in range(options.layers))
        self.norm, self.head = nn.LayerNorm(options.width), nn.Linear(options.width, WORDS, bias=False)
        with torch.no_grad():
            self.tokens.weight.mul_(0.02)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def torchs(model, group):
    """Divides a model as torch does, by the same plan as Shoal's: parameters are DTensors."""
    plan = {"blocks.*.query": ColwiseParallel(), "blocks.*.key": ColwiseParallel(), "blocks.*.value": ColwiseParallel(),
            "blocks.*.mix": RowwiseParallel(), "blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(),
            "tokens": RowwiseParallel(input_layouts=Replicate()), "head": ColwiseParallel(output_layouts=Replicate())}
    return parallelize_module(model, DeviceMesh.from_group(group, "cpu"), plan)


class Run:
    """One way to train."""

    def __init__(self, model):
        self.model, self.optimizer, self.times, self.cpu_times = model, torch.optim.AdamW(model.parameters(), lr=1e-3), [], []

    def step(self, inputs, targets):
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def time(self, batch):
        """Notes the seconds of a step, from the time at which all ranks begin to that at which the last one ends."""
        dist.barrier()
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        self.step(*batch)
        self.cpu_times.append(time.thread_time() - cpu_begin)
        dist.barrier()
        self.times.append(time.perf_counter() - begin)

    def bytes(self):
        """Returns the bytes that this rank has of parameters, gradients and states."""
        states = [each for values in self.optimizer.state.values() for each in values.values() if each.dim()]
        every = [*self.model.parameters(), *(each.grad for each in self.model.parameters()), *states]
        own = (each.to_local() if isinstance(each, DTensor) else each for each in every)
        return sum(each.numel() * each.element_size() for each in own)

    def weights(self):
        if any(isinstance(each, DTensor) for each in self.model.parameters()):
            return {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in self.model.state_dict().items()}
        return shoal.torch.tensor.full_state_dict(self.model, to=None)


def compare(runs, batch):
    """Stops the program if losses or weights differ after a step."""
    losses = {name: run.step(*batch) for name, run in runs.items()}
    own = runs["shoal"].weights()
    for name, run in runs.items():
        torch.testing.assert_close(losses[name], losses["shoal"], msg=lambda text, name=name: f"{name}: {text}")
        for key, weight in run.weights().items():  # AdamW's first step is the sign of a gradient
            torch.testing.assert_close(weight, own[key], atol=2.5e-3, rtol=0, msg=lambda text, name=name, key=key: f"{name}: {key}: {text}")


def main():
    options = parse_options()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("shoal", init_method="shoal://")
    torch.manual_seed(1)
    model = Gpt(options)
    predicted = shoal.torch.tensor.memory_of(model, dist.get_world_size())
    runs = {"shoal": Run(shoal.torch.tensor_parallel(copy.deepcopy(model))),
            "torch over shoal": Run(torchs(copy.deepcopy(model), dist.group.WORLD)),
            "torch over gloo": Run(torchs(copy.deepcopy(model), dist.new_group(backend="gloo")))}
    batch = torch.randint(WORDS, (2, options.batch, options.context)).unbind()
    compare(runs, batch)
    for number in range(WARMUPS + options.rounds):
        for run in runs.values():
            run.time(batch)
    for run in runs.values():
        del run.times[:WARMUPS], run.cpu_times[:WARMUPS]
    if dist.get_rank() == 0:
        own = statistics.median(runs["shoal"].times)
        print(json.dumps({**vars(options), "ranks": dist.get_world_size(), "predicted_bytes": 4 * predicted["bytes"],
                          "whole_bytes": 4 * predicted["whole_bytes"], "ways": {name: {
                              "steps_per_s": [round(1 / each, 2) for each in (statistics.median(run.times), max(run.times), min(run.times))],
                              "ratio": round(statistics.median(run.times) / own, 3), "cpu_ms": round(statistics.median(run.cpu_times) * 1e3, 1), "bytes": run.bytes()} for name, run in runs.items()}}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
