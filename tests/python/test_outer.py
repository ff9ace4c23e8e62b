#!/usr/bin/env python3
"""shoal.torch.LocalSGD and DiLoCo: compared with a model of all ranks in one process, in which torch.optim.SGD makes the
outer steps; saved and resumed; each error. tests/multi/data/test_outer.c tests the algorithm itself."""
import copy
import os
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn
from torch.nn.functional import mse_loss

warnings.filterwarnings("ignore")


class Mixed(nn.Module):
    """Parameters of two types, one in channels_last, one empty, one frozen, one shared."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 5, 2), nn.Linear(5, 4).double()
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.frozen, self.again = nn.Parameter(torch.ones(3), requires_grad=False), self.last
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.convolution(x).flatten(1).double()).float() + self.empty.sum()


def model_of(kind=Mixed):
    torch.manual_seed(3)
    return kind()


def trainer_of(model):
    return torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05, momentum=0.5)


def train(model, optimizer, rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x, y = torch.randn(6, 12, generator=generator), torch.randn(6, 4, generator=generator)
    optimizer.zero_grad()
    mse_loss(model(x), y).backward()
    optimizer.step()


def trained(model):
    return [each for each in model.parameters() if each.requires_grad]


def same(ones, others, tolerance=0):
    return all(torch.allclose(one, other, rtol=tolerance, atol=tolerance) for one, other in zip(ones, others))


class Reference:
    """All ranks in one process, with an exchange of all parameters every few steps."""

    def __init__(self, size, every, outer):
        self.models = [model_of() for _ in range(size)]
        self.optimizers = [trainer_of(model) for model in self.models]
        self.anchors = [each.detach().clone().requires_grad_() for each in trained(self.models[0])]
        self.outer, self.every, self.steps = outer(self.anchors), every, 0

    def step(self):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers)):
            train(model, optimizer, rank, self.steps)
        self.steps += 1
        if self.steps % self.every == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self):
        for anchor, *each in zip(self.anchors, *map(trained, self.models)):
            anchor.grad = sum(anchor - theta for theta in each) / len(each)
        self.outer.step()
        for anchor, *each in zip(self.anchors, *map(trained, self.models)):
            for theta in each:
                theta.copy_(anchor)


def make(kind, model, **options):
    import shoal.torch
    return getattr(shoal.torch, kind)(model, **options)


def message_of(kind, function, *words):
    try:
        function()
    except kind as error:
        for word in words:
            expect(word in str(error), repr(word), "is not in", str(error))
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


def compared(world, kind, outer, **options):
    reference, model = Reference(world.size, 3, outer), model_of()
    if world.rank:
        with torch.no_grad():
            trained(model)[0].add_(1)  # rank 0's are used
    steps, optimizer = make(kind, model, every=3, **options), trainer_of(model)
    for step in range(8):
        train(model, optimizer, world.rank, step)
        steps.step()
        reference.step()
        expect(same(trained(model), trained(reference.models[world.rank]), 1e-5), "step", step)
    reference.exchange()
    steps.finish()
    expect(same(trained(model), reference.anchors, 1e-5), "after finish")
    told = steps.stats()
    expect(told["steps"] == 8 and told["exchanges"] == 3 and (told["sent_bytes"] > 0) == (world.size > 1), told)
    expect(torch.equal(model.frozen, torch.ones(3)), "a frozen parameter was changed")


def local_sgd(world):
    compared(world, "LocalSGD", lambda anchors: torch.optim.SGD(anchors, lr=1))


def diloco(world):
    compared(world, "DiLoCo", lambda anchors: torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True))


def without_nesterov(world):
    compared(world, "DiLoCo", lambda anchors: torch.optim.SGD(anchors, lr=0.5, momentum=0.8), lr=0.5, momentum=0.8,
             nesterov=False)


def resumed(world):
    """In the middle of exchanges, as if it had never ended."""
    options = {"every": 6, "fragments": 3, "delay": 3, "mixing": 0.25, "fragment_of": {
        "convolution.weight": 0, "convolution.bias": 1, "last.weight": 2, "last.bias": 2, "empty": 0}}
    model = model_of()
    steps, optimizer = make("DiLoCo", model, **options), trainer_of(model)
    for step in range(9):
        train(model, optimizer, world.rank, step)
        steps.step()
    saved = [{key: value.clone() for key, value in model.state_dict().items()}, steps.state_dict()]
    kept = copy.deepcopy(optimizer.state_dict())
    other = model_of()
    resumed_steps, resumed_optimizer = make("DiLoCo", other, **options), trainer_of(other)
    other.load_state_dict(saved[0])
    resumed_optimizer.load_state_dict(kept)
    resumed_steps.load_state_dict(saved[1])
    for step in range(9, 20):
        train(model, optimizer, world.rank, step)
        steps.step()
        train(other, resumed_optimizer, world.rank, step)
        resumed_steps.step()
        expect(same(trained(model), trained(other)), "step", step)
    message_of(ValueError, lambda: steps.load_state_dict({}), "state_dict of DiLoCo")
    steps.finish()
    resumed_steps.finish()
    expect(same(trained(model), trained(other)), "after finish")
    message_of(RuntimeError, lambda: make("DiLoCo", other, every=5).load_state_dict(steps.state_dict()), "another schedule")


def tells_autograd(world):
    """A backward pass fails if its parameters were written since the forward pass."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    steps = make("LocalSGD", model, every=1)
    loss = model(torch.randn(2, 3)).sum()
    steps.step()
    message_of(RuntimeError, loss.backward, "modified by an inplace operation")


def wrong_arguments(world):
    model = model_of()
    message_of(ValueError, lambda: make("LocalSGD", model, every=1.5), "every is 1.5")
    message_of(ValueError, lambda: make("LocalSGD", model, every=2, compression="zip"), "zip", "none, fp16, bf16, int8")
    message_of(ValueError, lambda: make("DiLoCo", model, every=2, fragment_of={}), "no entry for empty, convolution.weight")
    message_of(RuntimeError, lambda: make("DiLoCo", model, every=2, fragments=3), "options->fragments")
    message_of(RuntimeError, lambda: make("DiLoCo", nn.Tanh(), every=2), "not needed")
    message_of(TypeError, lambda: make("DiLoCo", [("a", nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2)))], every=2), "float8_e5m2")
    holes = nn.Parameter(torch.zeros(4, 4)[:, :2])
    message_of(ValueError, lambda: make("LocalSGD", [("holes", holes)], every=2), "strides (4, 1)")


def different_models(world):
    message_of(RuntimeError, lambda: make("LocalSGD", nn.Linear(3 + world.rank, 2), every=2), "parameter 0 differs", "weight")
    model = model_of()
    with torch.no_grad():
        model.last.bias[0] = world.rank
    message_of(RuntimeError, lambda: make("LocalSGD", model, every=2, shares_start=False), "(last.bias) does not have the same values")


def changed_models(world):
    """Another tensor in a parameter's place is followed; what cannot be followed is named, and no memory behind a parameter is read."""
    def assign(model):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def freeze(model):
        model.convolution.requires_grad_(False)
        assign(model)

    def convert(model):
        model.convolution.bfloat16()

    def convert_frozen(model):
        model.convolution.requires_grad_(False).double()

    def unfreeze(model):
        model.frozen.requires_grad_(True)
    for change in (assign, freeze, convert, convert_frozen, unfreeze):
        model = model_of()
        steps = make("LocalSGD", model if change is not unfreeze else list(model.named_parameters()), every=1)
        change(model)
        with torch.no_grad():
            model.last.weight += world.rank
            model.convolution.weight += world.rank
        if change in (assign, freeze):
            steps.step()
            weights = [torch.empty(2, *each.shape, dtype=each.dtype) for each in (model.last.weight, model.convolution.weight)]
            for weight, each in zip(weights, (model.last.weight, model.convolution.weight)):
                dist.all_gather_into_tensor(weight, each.detach().contiguous())
                expect(torch.equal(*weight), "ranks differ")
            continue
        words = {convert: ("convolution.weight", "bfloat16 now"), convert_frozen: ("convolution.weight", "float64 now"),
                 unfreeze: ("parameter frozen", "requires a gradient")}[change]
        message_of(RuntimeError, steps.step, *words)
        message_of(RuntimeError, steps.finish, *words)


def different_steps(world):
    model = model_of()
    steps = make("LocalSGD", model, every=4, fragments=2)

    def run():
        for _ in range(5 - world.rank):
            steps.step()
        steps.finish()
    message_of(RuntimeError, run, "ranks are in different steps", "rank 1 called shoal_outer_finish after 4 steps")
    message_of(RuntimeError, steps.step, "ranks are in different steps")


def rank_ends(world):
    model = model_of()
    steps = make("DiLoCo", model, every=1, fragments=1)
    steps.step()
    ranks.meet(world)
    if world.rank == 1:
        os._exit(3)
    message_of(RuntimeError, steps.step, "fragment 0 of 1", "rank 1")


CASES = [Case(body.__name__, body, sizes=(1, 2, 3)) for body in (local_sgd, diloco)]
CASES += [Case(body.__name__, body, sizes=(1, 2)) for body in (without_nesterov, resumed, tells_autograd, wrong_arguments)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in (different_models, changed_models, different_steps)]
CASES += [Case("rank_ends", rank_ends, sizes=(2, 3), fresh=True, ends=(1,))]

if __name__ == "__main__":
    ranks.run(CASES)
