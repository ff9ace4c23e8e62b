"""Trainings that bench/torch_worker.py times: DistributedDataParallel with the gradients of real models, and the steps of
examples/torch/gpt, which shards its weights (FSDP2), on random bytes.

gpt2 and resnet50 have every parameter of GPT-2 small (124.4 million) and of ResNet-50 (25.6 million), in its shape and
order. Each parameter W has its own product, W times a few columns. So the gradients come one by one, last layer first, as in
the models, and the number of columns sets the time to compute them.
"""
import importlib.util
import math
import sys
import time
import unittest.mock
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

WARMUPS = 2


# ---- Shapes ----------------------------------------------------------------------------------------------------------------

def gpt2_shapes(width=768, layers=12, words=50257, positions=1024):
    """Returns the shapes in the order of the forward pass. The head is the embedding, whose gradient is complete only at the
    very end."""
    norm = [(width,), (width,)]
    block = [*norm, (3 * width, width), (3 * width,), (width, width), (width,),
             *norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(words, width), (positions, width), *block * layers, *norm]


def convolution_shapes(outputs, inputs, size):
    """Returns the shapes of a convolution and of the two vectors of its batch norm."""
    return [(outputs, inputs, size, size), (outputs,), (outputs,)]


def resnet50_shapes():
    shapes, inputs = convolution_shapes(64, 3, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += convolution_shapes(width, inputs, 1) + convolution_shapes(width, width, 3)
            shapes += convolution_shapes(4 * width, width, 1)
            shapes += convolution_shapes(4 * width, inputs, 1) if block == 0 else []
            inputs = 4 * width
    return [*shapes, (1000, inputs), (1000,)]


class Shaped(nn.Module):
    """columns: the work for each matrix; a forward and a backward pass of p parameters take 4 p columns operations."""

    def __init__(self, shapes, columns):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterList(torch.randn(shape, generator=generator) * 0.02 for shape in shapes)
        self.columns = columns

    def forward(self, batch):
        """batch: one row for each wanted column, as wide as the widest matrix."""
        loss = batch.new_zeros(())
        for weight in self.weights:
            matrix = weight.flatten(1) if weight.dim() > 1 else weight[:, None]
            loss = loss + (matrix @ batch[:matrix.shape[1]]).square().mean()
        return loss

    def batch_make(self, rank):
        widest = max(math.prod(weight.shape[1:]) for weight in self.weights)
        return torch.randn(widest, self.columns, generator=torch.Generator().manual_seed(rank))


# ---- DistributedDataParallel -----------------------------------------------------------------------------------------------

def slowest(seconds):
    joined = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(joined, op=dist.ReduceOp.MAX)
    return joined.tolist()


def step_timed(step, place):
    place.meet()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def gradient_sums(model):
    return torch.stack([weight.grad.double().sum() for weight in model.parameters()])


def gradients_check(model, step, step_alone):
    """Checks that the mean over ranks of the separate gradients equals the gradients of the common step."""
    step_alone()
    expected = gradient_sums(model)
    dist.all_reduce(expected)
    step()
    if not torch.allclose(gradient_sums(model), expected / dist.get_world_size(), rtol=1e-4, atol=1e-4):
        sys.exit(f"torch_training: rank {dist.get_rank()}: the gradients are not the mean of those of each rank")


def ddp_measure(shapes, columns, steps, place):
    """Takes steps with and without communication in turns. The communication that is not hidden is the median difference of
    neighbors."""
    module = Shaped(shapes, columns)
    model = nn.parallel.DistributedDataParallel(module, gradient_as_bucket_view=True)
    batch = module.batch_make(dist.get_rank())

    def step():
        model.zero_grad(set_to_none=False)
        model(batch).backward()

    def step_alone():
        with model.no_sync():
            step()

    step()  # makes the gradients, and their buckets in the order of the gradients
    step()
    gradients_check(model, step, step_alone)
    exchange_ns = place.exchange_ns()
    times = [(step_timed(step, place), step_timed(step_alone, place)) for _ in range(WARMUPS + steps)][WARMUPS:]
    together, alone = (slowest(column) for column in zip(*times))
    return {"parameters": sum(weight.numel() for weight in module.weights), "columns": columns, "steps": steps,
            "median_us": median(together) * 1e6, "alone_us": median(alone) * 1e6,
            "exposed_us": median(a - b for a, b in zip(together, alone)) * 1e6, "exchange_ns": exchange_ns}


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------------

def example_load():
    """Returns examples/torch/gpt/train.py as a module, and its default options."""
    path = Path(__file__).resolve().parent.parent / "examples/torch/gpt/train.py"
    spec = importlib.util.spec_from_file_location("gpt_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with unittest.mock.patch.object(sys, "argv", [str(path)]):
        return example, example.parse_options()


def fsdp_measure(steps, place):
    example, options = example_load()
    torch.manual_seed(options.seed)
    network = example.shard(example.Gpt(options))
    optimizer = torch.optim.AdamW(network.parameters(), lr=options.lr)
    text = torch.randint(example.TOKENS, (100000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    sequences, following = example.draw_batch(text, options, 1)
    losses = []

    def step():
        loss = nn.functional.cross_entropy(network(sequences).flatten(0, 1), following.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())

    exchange_ns = place.exchange_ns()
    times = slowest([step_timed(step, place) for _ in range(WARMUPS + steps)][WARMUPS:])
    if not losses[-1] < losses[0]:
        sys.exit(f"torch_training: the GPT does not learn one batch: its loss was {losses[0]:.3f} and is {losses[-1]:.3f}")
    return {"steps": steps, "median_us": median(times) * 1e6, "loss": losses[-1], "exchange_ns": exchange_ns}


# ---- Main ------------------------------------------------------------------------------------------------------------------

TRAININGS = {
    "gpt2": lambda steps, place: ddp_measure(gpt2_shapes(), 64, steps, place),
    "resnet50": lambda steps, place: ddp_measure(resnet50_shapes(), 256, steps, place),
    "tiny": lambda steps, place: ddp_measure(gpt2_shapes(64, 2, 512, 64), 8, steps, place),
    "gpt": lambda steps, place: fsdp_measure(steps, place),
}


def measure(model, steps, place):
    return {"model": model, "ranks": dist.get_world_size(), **TRAININGS[model](steps, place)}
