#!/usr/bin/env python3
"""shoal.torch.Pipeline: losses and gradients equal those of one process, whatever the schedule, the split and the microbatches;
and each misuse has its error on every rank."""
import copy
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn
from torch.utils.checkpoint import checkpoint

warnings.filterwarnings("ignore")
KINDS = ("gpipe", "1f1b", "interleaved", "breadth-first", "zb-h1", "zb-h2", "v-min", "v-half", "v-zb")


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


# ---- Models ----------------------------------------------------------------------------------------------------------------


def plain(layers=8, width=12):
    return nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())))


class Block(nn.Module):
    def __init__(self, width, repeats):
        super().__init__()
        self.norm, self.up, self.down, self.repeats = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width), repeats

    def inner(self, x):
        if x.shape[0] == 0:  # any Python in a unit
            return x
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.repeats else self.inner(x)


class Gpt(nn.Module):
    """A head that shares its weight with the embedding, a parameter and a buffer of the module itself, sizes of the input."""

    def __init__(self, width=16, blocks=6, words=40, context=32, repeats=False):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, repeats) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("scale", torch.tensor(0.9))

    def forward(self, words):
        count, length = words.shape
        if length > 32:
            raise ValueError("too long")
        x = (self.words(words) + self.places(torch.arange(length))) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x) * self.gain).view(count * length, -1)


class Skips(nn.Module):
    """Values of the first units are used by the last ones; two outputs of a unit; an output that is not used."""

    class Two(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return torch.tanh(self.one(x)), {"other": self.other(x), "count": x.shape[0]}

    def __init__(self, width=12):
        super().__init__()
        self.stem, self.two = nn.Linear(width, width), self.Two(width)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.last = nn.Linear(width, width)

    def forward(self, x, scale):
        first = self.stem(x)
        one, more = self.two(first)
        for number, layer in enumerate(self.body):
            one = torch.relu(layer(one)) + (first if number == 3 else more["other"])
        return self.last(one + x * scale) / more["count"] * x.shape[0]


class Residual(nn.Module):
    """Like a ResNet: blocks in Sequentials of Sequentials, with a way around."""

    class Block(nn.Module):
        def __init__(self, a, b):
            super().__init__()
            self.one, self.norm, self.two = nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(2, b), nn.Conv2d(b, b, 3, padding=1)
            self.around = nn.Sequential(nn.Conv2d(a, b, 1)) if a != b else None

        def forward(self, x):
            y = self.two(torch.relu_(self.norm(self.one(x))))
            y += x if self.around is None else self.around(x)
            return torch.relu_(y)

    def __init__(self):
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(self.Block(4, 4), self.Block(4, 4), self.Block(4, 4))
        self.layer2 = nn.Sequential(self.Block(4, 8), self.Block(8, 8), self.Block(8, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.act(self.stem(x))
        return self.head(self.layer2(self.layer1(x)).mean((2, 3)))


def squares(result, target):
    return (result.float() - target.float()).square().mean()


def words_loss(result, target):
    return nn.functional.cross_entropy(result.float(), target.flatten())


def plain_batch(step, rows=16):
    torch.manual_seed(1000 + step)
    return torch.randn(rows, 12), torch.randn(rows, 12)


def gpt_batch(step, rows=16):
    torch.manual_seed(1000 + step)
    words = torch.randint(40, (rows, 8))
    return words[:, :-1], words[:, 1:]


def skips_batch(step, rows=16):
    inputs, targets = plain_batch(step, rows)
    return (inputs, inputs.flip(0)), targets


def image_batch(step, rows=16):
    torch.manual_seed(1000 + step)
    return torch.randn(rows, 3, 6, 6), torch.randint(5, (rows,))


MODELS = {"mlp": (plain, plain_batch, squares), "gpt": (Gpt, gpt_batch, words_loss), "skips": (Skips, skips_batch, squares),
          "residual": (Residual, image_batch, words_loss)}


# ---- Comparisons -----------------------------------------------------------------------------------------------------------


def even_cuts(units, stages):
    return [units[len(units) * stage // stages] for stage in range(1, stages)]


def stages_of(kind, size):
    return size if kind in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2 * size


def pipelined(world, model, batch, loss, kind="1f1b", microbatches=4, **options):
    import shoal.torch
    from shoal.torch import _graph, _stages
    example = batch(0)[0]
    if "cuts" not in options:
        units = _graph.record(model, _stages.arguments_of(example), _graph.unit_chooser(model)).units
        options["cuts"] = even_cuts(units, stages_of(kind, world.size))
    return shoal.torch.Pipeline(model, example, microbatches=microbatches, schedule=kind, loss=loss, **options)


class Pair:
    """A pipeline and one process with the same first values."""

    def __init__(self, world, name, kind="1f1b", microbatches=4, make=None, **options):
        maker, self.batch, self.loss = MODELS[name]
        self.whole = seeded(make or maker)
        self.pipeline = pipelined(world, copy.deepcopy(self.whole), self.batch, self.loss, kind, microbatches, **options)
        self.own = torch.optim.SGD(self.pipeline.parameters(), lr=0.05, momentum=0.9)
        self.other = torch.optim.SGD(self.whole.parameters(), lr=0.05, momentum=0.9)

    def gradients(self, number, rows=16):
        inputs, targets = self.batch(number, rows)
        loss = self.loss(self.whole(*inputs) if isinstance(inputs, tuple) else self.whole(inputs), targets)
        loss.backward()
        mine = self.pipeline.step(inputs, targets)
        torch.testing.assert_close(mine, loss.detach())
        wanted = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, parameter in self.pipeline.named_parameters():
            expect(parameter.grad is not None, name)
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")

    def step(self, number, rows=16):
        self.own.zero_grad()
        self.other.zero_grad()
        self.gradients(number, rows)
        self.own.step()
        self.other.step()


def equals_one_process(world, name, kind, microbatches=4):
    pair = Pair(world, name, kind, microbatches)
    for number in range(3):
        pair.step(number)


def mlp_equals_one_process(world):
    for kind in KINDS:
        equals_one_process(world, "mlp", kind)


def gpt_equals_one_process(world):
    for kind in ("1f1b", "zb-h1") if world.size == 4 else KINDS:
        equals_one_process(world, "gpt", kind)


def skips_equal_one_process(world):
    for kind in ("1f1b", "zb-h2") if world.size == 4 else KINDS:
        equals_one_process(world, "skips", kind)


def residual_equals_one_process(world):
    for kind in ("1f1b", "zb-h1"):
        equals_one_process(world, "residual", kind)


CASES = [
    Case("mlp equals one process", mlp_equals_one_process),
    Case("gpt equals one process", gpt_equals_one_process),
    Case("skips equal one process", skips_equal_one_process),
    Case("residual equals one process", residual_equals_one_process),
]

if __name__ == "__main__":
    ranks.run(CASES)
