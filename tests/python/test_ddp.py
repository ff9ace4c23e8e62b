#!/usr/bin/env python3
"""shoal.torch.DistributedDataParallel: its gradients equal those of torch's own class over the same group, and of one
process with the whole batch. Also each error, and saving, copying and inspecting it like torch's class."""
import copy
import gc
import inspect
import io
import math
import os
import time
import warnings
import weakref

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch._inductor.compile_fx  # noqa: F401: else each rank that compiles a model imports it, in two seconds
import torch.distributed as dist
from ranks import Case, Skip, expect
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

BATCH = 24  # divisible by every number of ranks and of micro-batches
warnings.filterwarnings("ignore")
warnings.filterwarnings("error", message=".*is not the same on all ranks")  # only the cases below expect it


def ours(module, **options):
    import shoal.torch
    return shoal.torch.DistributedDataParallel(module, **options)


# ---- Models ----


def plain(dtype=torch.float32):
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


class Shared(nn.Module):
    """One weight is used at both ends."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.last(self.second(torch.tanh(self.first(x))))


def frozen():
    model = plain()
    model[2].requires_grad_(False)
    return model


class Mixed(nn.Module):
    """Parameters of three types, including a scalar and an empty one."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 8).double()
        self.third, self.scale = nn.Linear(8, 4).bfloat16(), nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)).double())
        return self.third(x.bfloat16()).float() * self.scale + self.empty.sum()


class Convolutions(nn.Module):
    """Weights in channels_last; their gradients have the same strides."""

    def __init__(self):
        super().__init__()
        self.convolution, self.last = nn.Conv2d(3, 5, 2), nn.Linear(5, 4)
        self.to(memory_format=torch.channels_last)

    def forward(self, x):
        x = x.view(-1, 3, 2, 2).contiguous(memory_format=torch.channels_last)
        return self.last(self.convolution(x).flatten(1))


class Checkpointed(nn.Module):
    """The backward pass computes each layer again."""

    def __init__(self, is_reentrant):
        super().__init__()
        self.layers, self.is_reentrant = nn.ModuleList([nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)]), is_reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.is_reentrant))
        return x


class TwiceCheckpointed(nn.Module):
    """A layer is in two segments, so its gradients arrive in two parts."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=True))
        return self.last(x)


class Branches(nn.Module):
    """One of two branches is used; the other has no gradient then. A third one is never used."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.never = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(2, 2)

    def forward(self, x, is_left=True):
        return (self.left if is_left else self.right)(x)


class Headed(nn.Module):
    """A loss may skip the head."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(12, 4), nn.Linear(4, 4)

    def forward(self, x, has_head=True):
        return self.head(self.body(x)) if has_head else self.body(x)


def seeded(make):
    torch.manual_seed(1)
    return make()


MODELS = {
    "plain": plain, "shared": Shared, "frozen": frozen, "mixed": Mixed, "channels_last": Convolutions,
    "checkpointed": lambda: Checkpointed(False), "checkpointed reentrant": lambda: Checkpointed(True),
    "float16": lambda: plain(torch.float16), "float64": lambda: plain(torch.float64),
}


# ---- Steps ----


def batch(step=0):
    generator = torch.Generator().manual_seed(2 + step)
    return tuple(torch.randn(BATCH, width, generator=generator, device="cpu").to(torch.empty(0).device) for width in (12, 4))


def share(world, tensor):
    """Returns this rank's part of a batch."""
    return tensor.chunk(world.size)[world.rank]


def loss_of(model, x, y, *more):
    dtype = next(model.parameters()).dtype
    return (model(x.to(dtype), *more) - y.to(dtype)).square().mean()  # mse_loss lacks float16 in torch 2.4


def close(mine, theirs, tolerance, *told):
    worst = (mine.double() - theirs.double()).abs().max().item() if mine.numel() else 0.0
    expect(mine.shape == theirs.shape and worst <= tolerance, *told, f"differs by {worst}, of which {tolerance} is allowed")


def compare(model, other, tolerance=1e-5):
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        close(mine.detach(), theirs.detach(), tolerance, name)
        expect((mine.grad is None) == (theirs.grad is None), name, mine.grad, theirs.grad)
        if mine.grad is not None:
            close(mine.grad, theirs.grad, tolerance, name + ".grad")


def train(world, model, steps=3, to_none=True, **optimizing):
    is_narrow = any(each.dtype is torch.float16 for each in model.parameters())  # AdamW's epsilon is 0 in float16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if is_narrow else torch.optim.AdamW(model.parameters(), lr=0.01,
                                                                                               **optimizing)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=to_none)
        loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
        optimizer.step()


def tolerance_of(model):
    return max({torch.float16: 3e-3, torch.bfloat16: 2e-2}.get(each.dtype, 1e-5) for each in model.parameters())


def model_case(name, make):
    def body(world):
        """Compares with one process that has the whole batch, and with torch's class. An average of two ranks has the same
        bits as torch's."""
        model = ours(seeded(make))
        theirs = nn.parallel.DistributedDataParallel(seeded(make), static_graph="reentrant" in name)
        alone = seeded(make)
        x, y = batch()
        loss_of(alone, x, y).backward()
        for each in (model, theirs):
            loss_of(each, share(world, x), share(world, y)).backward()
        compare(model.module, alone, tolerance_of(alone))
        compare(model.module, theirs.module, 0 if world.size < 3 else tolerance_of(alone))
        for each in (model, theirs):
            train(world, each)
        compare(model.module, theirs.module, 0 if world.size < 3 else 20 * tolerance_of(alone))
    return Case(f"as torch's: {name}", body, sizes=(1, 2, 3))


def form_case(name, options, to_none=True, **optimizing):
    def body(world):
        model, theirs = ours(seeded(plain), **options), nn.parallel.DistributedDataParallel(seeded(plain))
        for each in (model, theirs):
            train(world, each, to_none=to_none, **optimizing)
        compare(model.module, theirs.module, 1e-6)
    return Case(f"form: {name}", body, sizes=(1, 2, 3))


FORMS = (
    ("zero_grad(set_to_none=False)", {}, False, {}),
    ("many buffers", {"bucket_cap_mb": 0.0005}, True, {}),
    ("find_unused_parameters", {"find_unused_parameters": True}, True, {}),
    ("find_unused_parameters, gradients kept", {"find_unused_parameters": True}, False, {}),
    ("static_graph", {"static_graph": True}, True, {}),
    ("gradient_as_bucket_view", {"gradient_as_bucket_view": True}, True, {}),
    ("compression on one host", {"compression": "int8"}, True, {}),
    ("fused optimizer", {}, True, {"fused": True}),
    ("foreach optimizer", {}, True, {"foreach": True}),
    ("foreach optimizer, gradients kept", {}, False, {"foreach": True}),
)


def begins_as_rank_0(world):
    """All ranks begin with rank 0's parameters and buffers."""
    torch.manual_seed(world.rank)
    module = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
    with torch.no_grad():
        module[1].running_mean.fill_(world.rank + 5.0)
    model = ours(module)
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8))
    for mine, theirs in zip(model.module.parameters(), expected.parameters()):
        expect(torch.equal(mine, theirs), "not rank 0's")
    expect(module[1].running_mean.eq(5).all(), module[1].running_mean)
    x, _ = batch()
    model(share(world, x)).sum().backward()  # each rank has its own means now
    model(share(world, x))  # copies rank 0's means, then adds this rank's part
    model.eval()
    model(share(world, x))
    means = [torch.empty(8) for _ in range(world.size)]
    dist.all_gather(means, module[1].running_mean)
    expect(all(torch.equal(mean, means[0]) for mean in means), means)


def no_sync(world):
    model = ours(seeded(plain))
    for round in range(3):  # the views move after the first one
        model.zero_grad(set_to_none=round == 1)
        x, y = (share(world, tensor).chunk(2) for tensor in batch(round))
        with model.no_sync():
            (loss_of(model, x[0], y[0]) / 2).backward()
        local = model.module[0].weight.grad.clone()
        others = [torch.empty_like(local) for _ in range(world.size)]
        dist.all_gather(others, local)
        expect(world.size == 1 or not torch.equal(others[0], others[1]), "no_sync averaged")
        (loss_of(model, x[1], y[1]) / 2).backward()
        alone = seeded(plain)
        loss_of(alone, *batch(round)).backward()
        compare(model.module, alone)


def no_sync_between(world):
    """A backward pass averages if its own forward pass was outside no_sync(), whatever ran since."""
    for is_local_first in (False, True):
        model = ours(seeded(plain))
        x, y = (share(world, tensor).chunk(2) for tensor in batch())
        synced = loss_of(model, x[0], y[0])
        with model.no_sync():
            local = loss_of(model, x[1], y[1])
        alone, own = seeded(plain), seeded(plain)
        parts = [tuple(tensor.chunk(world.size)[rank].chunk(2) for tensor in batch()) for rank in range(world.size)]
        sum(loss_of(alone, *(halves[0] for halves in part)) / world.size for part in parts).backward()
        for loss in (local, synced) if is_local_first else (synced, local):
            loss.backward()
            if loss is synced and not is_local_first:
                compare(model.module, alone)
        if is_local_first:
            sum(loss_of(alone, *(halves[1] for halves in part)) / world.size for part in parts).backward()
            compare(model.module, alone)
        else:
            loss_of(own, x[1], y[1]).backward()
            for mine, average, added in zip(*(each.parameters() for each in (model.module, alone, own))):
                close(mine.grad, average.grad + added.grad, 1e-5, "the pass inside no_sync() averaged")


class Listed(nn.Module):
    """A model whose output is a list."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x):
        return [self.first(x), self.second(x)]


def no_sync_of_lists(world):
    """Each output records its forward pass."""
    model, alone = ours(seeded(Listed)), seeded(Listed)
    x, _ = batch()
    synced = model(share(world, x))
    with model.no_sync():
        local = model(share(world, x))
    sum(each.square().mean() for each in synced).backward()
    sum(each.square().mean() for each in alone(x)).backward()
    compare(model.module, alone)
    model.zero_grad()
    sum(each.square().mean() for each in local).backward()
    message_of(RuntimeError, sum(model.module(x)).sum().backward, "model.module(x)")


def no_sync_with_more(world):
    """One loss of outputs from inside and outside no_sync() is averaged. A penalty adds a gradient for a parameter that the
    forward pass has not used, before the backward pass reaches its outputs."""
    for is_synced_first in (False, True):
        model, alone = ours(seeded(plain)), seeded(plain)
        x, y = (share(world, tensor) for tensor in batch())
        if is_synced_first:
            loss = loss_of(model, x, y)
        with model.no_sync():
            other = loss_of(model, x * 2, y)
        if not is_synced_first:
            loss = loss_of(model, x, y)
        (loss + other).backward()
        (loss_of(alone, *batch()) + loss_of(alone, batch()[0] * 2, batch()[1])).backward()
        compare(model.module, alone)
    model, own = ours(seeded(Branches), find_unused_parameters=True), seeded(Branches)
    with model.no_sync():
        outputs = loss_of(model, x, y)
    (outputs + model.module.never.weight.square().sum()).backward()
    (loss_of(own, x, y) + own.never.weight.square().sum()).backward()
    compare(model.module, own)


def adds_to_averages(world):
    """Without zero_grad the gradients of a second step are added to the average, as in torch's class."""
    model, theirs = ours(seeded(plain)), nn.parallel.DistributedDataParallel(seeded(plain))
    for each in (model, theirs):
        for step in range(3):
            loss_of(each, *(share(world, tensor) for tensor in batch(step))).backward()
    compare(model.module, theirs.module, 1e-6)


def keeps_gradients(world):
    """A gradient that the program keeps stays readable after the buffers are made anew and after the module is freed."""
    model = ours(seeded(plain))
    loss_of(model, *(share(world, tensor) for tensor in batch())).backward()
    kept = [parameter.grad for parameter in model.parameters()]
    values = [gradient.clone() for gradient in kept]
    for step in range(1, 4):
        model.zero_grad()
        loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
    later = [parameter.grad for parameter in model.parameters()]
    expected = [gradient.clone() for gradient in later]
    dist.barrier()
    del model
    for gradient, value in zip(kept + later, values + expected):
        expect(torch.equal(gradient, value), "changed")


def frees_gradients(world):
    """The temporary gradient of one parameter is freed before the next parameter's gradient is accumulated."""
    model = ours(seeded(plain))
    made, alive = [], []

    def look(parameter):
        alive.append(sum(not storage.expired() for storage in made))
        made.append(StorageWeakRef(parameter.grad.untyped_storage()))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(look)
    for step in range(3):
        model.zero_grad()
        made.clear()
        loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
    expect(len(alive) == 18 and max(alive) <= 1, "gradients alive beside the one that became ready:", alive)


def backward_of(world, model, step, to_none):
    model.zero_grad(set_to_none=to_none)
    loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()


def copies_of(world, model, to_none=True):
    """Returns how often a step copies a gradient: by torch's operators on tensors with the shapes of parameters, and by
    Shoal's engine."""
    shapes = {tuple(each.shape) for each in model.parameters()}
    elements = sum(each.numel() for each in model.parameters())
    for step in range(2):  # the buffers are made anew after the first one
        backward_of(world, model, step, to_none)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        backward_of(world, model, 2, to_none)
    copied = [tuple(each.input_shapes[0]) for each in seen.events() if each.name in ("aten::copy_", "aten::mul")]
    by_torch = sum(math.prod(shape) for shape in copied if shape in shapes)
    by_engine = model._get_ddp_logging_data().get("copied_bytes", 0) / 4
    return by_torch / elements, by_engine / elements


def copies(world):
    """docs/figures/steps.md has these figures. torch's class divides by the number of ranks while it copies into a bucket."""
    if "batched_grad_copy" not in inspect.signature(nn.parallel.DistributedDataParallel).parameters:
        raise Skip("this torch is older than the one whose copies docs/figures/steps.md counts")
    def theirs(**options):
        return nn.parallel.DistributedDataParallel(seeded(plain), **options)
    for told, found, expected in (
            ("ours", copies_of(world, ours(seeded(plain))), (0, 1)),
            ("ours, kept", copies_of(world, ours(seeded(plain)), to_none=False), (0, 0)),
            ("torch's", copies_of(world, theirs()), (2, 0)),
            ("torch's, kept", copies_of(world, theirs(), to_none=False), (2, 0)),
            ("torch's, views", copies_of(world, theirs(gradient_as_bucket_view=True)), (1, 0)),
            ("torch's, views, kept", copies_of(world, theirs(gradient_as_bucket_view=True), to_none=False), (0, 0))):
        expect(found == expected, told, "copies by torch and by the engine:", found, "instead of", expected)


def unused(world):
    """If one rank uses a parameter, all get the average, with zeros from the others. If none does, nothing is written."""
    model = ours(seeded(Branches), find_unused_parameters=True)
    for step in range(3):
        model.zero_grad()
        x, y = batch(step)
        alone = seeded(Branches)
        parts = list(zip(x.chunk(world.size), y.chunk(world.size)))
        (sum(loss_of(alone, *part, rank % 2 == 0) for rank, part in enumerate(parts)) / world.size).backward()
        loss_of(model, *parts[world.rank], world.rank % 2 == 0).backward()
        compare(model.module, alone)
    for parameter in model.module.never.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.zero_grad()
    loss_of(model, *parts[world.rank]).backward()
    expect(model.module.never.weight.grad is None and model.module.right.weight.grad is None, "written to an unused one")


class Boxed(nn.Module):
    """Whose output is in an object that torch does not look into, alone or after one whose gradient nobody wants. A part is unused."""

    class Box:
        def __init__(self, y):
            self.y = y

    def __init__(self, kind=Branches, has_more=False, in_list=False):
        super().__init__()
        self.inner, self.more, self.in_list = kind(), nn.Linear(12, 2) if has_more else None, in_list

    def forward(self, x):
        box = self.Box(self.inner(x))
        return [self.more(x), box] if self.more else [x.long(), box] if self.in_list else box


class Unequal(nn.Module):
    """All that is used is in segments of a reentrant checkpoint."""

    def __init__(self):
        super().__init__()
        self.all, self.never = Checkpointed(True), nn.Linear(2, 2)

    def forward(self, x):
        return self.all(x)


def boxed_loss(model, x, y):
    output = model(x)
    return ((output[1] if isinstance(output, list) else output).y - y).square().mean()


def outputs_in_an_object(world):
    """The model's outputs are in an object, so the wrapper does not see where the backward pass begins. At its end the gradients
    are averages, or the step raises an error."""
    x, y = batch()
    for options in ({}, {"has_more": True}, {"in_list": True}, {"kind": Unequal}):
        make = lambda: Boxed(**options)  # noqa: B023
        model, alone = ours(seeded(make), find_unused_parameters=True), seeded(make)
        for step in range(2):
            for each, part in ((model, lambda tensor: share(world, tensor)), (alone, lambda tensor: tensor)):
                each.zero_grad()
                boxed_loss(each, part(x), part(y)).backward()
            compare(model.module, alone)
        if not options.get("has_more"):  # else a second backward pass could bring the others
            refused = ours(seeded(make))
            message_of(RuntimeError, boxed_loss(refused, share(world, x), share(world, y)).backward, "never.weight")


def changed_and_followed(world):
    """Whatever takes a parameter's place, or makes the node anew that adds up its gradient, is averaged."""
    def replace(model):
        model.module[2].weight = nn.Parameter(model.module[2].weight.detach().clone())

    def tie(model):
        model.module[2].bias = model.module[0].bias

    def assign(model):
        model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)

    def convert(model):
        model.double().float()

    def convert_a_part(model):
        model.module[2:].double().float()

    def convert_before(model):
        with model.no_sync():
            loss_of(model, x, y).backward()
        model.zero_grad()
        model.double().float()
    x, y = (share(world, tensor) for tensor in batch())
    for find_unused in (False, True):
        for change in (replace, assign, convert, convert_before, *((tie, convert_a_part) if find_unused else ())):
            model, alone = ours(seeded(plain), find_unused_parameters=find_unused), seeded(plain)
            if change is tie:
                alone[2].bias = alone[0].bias
            for step in range(3):
                if step == 1:
                    change(model)
                model.zero_grad()
                alone.zero_grad()
                loss_of(model, x, y).backward()
                loss_of(alone, *batch()).backward()
                if change is not tie or step:
                    compare(model.module, alone)
            model.compare_parameters()
    model = ours(seeded(plain))
    convert_a_part(model)
    message_of(RuntimeError, loss_of(model, x, y).backward, "2.weight")


def changed_and_refused(world):
    """The next step and compare_parameters() name the parameter on all ranks, also if only one of them made the change."""
    def unfreeze(model):
        model.module[2].requires_grad_(True)

    def convert(model):
        model.double()

    def add(model):
        model.module[1].more = nn.Linear(2, 2)

    def reshape(model):
        model.module[0].bias.data = torch.zeros(1)

    def compute(model):
        model.module[0]._parameters["weight"] = model.module[0].weight * 2
    x, y = (share(world, tensor) for tensor in batch())
    for is_everywhere in (True, False):
        for change, words in ((unfreeze, ("parameter 2.weight", "requires a gradient now")), (add, ("1.more.weight", "requires a gradient")),
                              (convert, ("parameter 0.weight", "torch.float64 now", "torch.float32")),
                              (reshape, ("parameter 0.bias", "(1,) now", "(16,)")),
                              (compute, ("parameter 0.weight", "result of a computation"))):
            model = ours(seeded(frozen), find_unused_parameters=is_everywhere)
            if is_everywhere or world.rank == world.size - 1:
                change(model)
            message_of(RuntimeError, lambda: loss_of(model, x, y).backward(), *words)  # noqa: B023
            message_of(RuntimeError, model.compare_parameters, words[0] if is_everywhere else "")
            dist.barrier()


def dropped_before_backward(world):
    """The outputs keep what averages."""
    module, alone = seeded(plain), seeded(plain)
    x, y = batch()
    loss = loss_of(ours(module), share(world, x), share(world, y))
    gc.collect()
    loss.backward()
    loss_of(alone, x, y).backward()
    compare(module, alone)


def several_models(world):
    models = [ours(seeded(plain)), ours(seeded(Shared))]
    for step in range(3):
        x, y = batch(step)
        for model in models:
            model.zero_grad()
        sum(loss_of(model, share(world, x), share(world, y)) for model in models).backward()
        for model, make in zip(models, (plain, Shared)):
            alone = seeded(make)
            loss_of(alone, x, y).backward()
            compare(model.module, alone)


def two_forwards_one_backward(world):
    model, alone = ours(seeded(plain)), seeded(plain)
    x, y = batch()
    for each, part in ((model, lambda tensor: share(world, tensor)), (alone, lambda tensor: tensor)):
        (loss_of(each, part(x), part(y)) + each(part(x)).square().mean()).backward()
    compare(model.module, alone)
    with torch.no_grad():
        model(x)
    torch.autograd.grad(model(x).sum(), model.module[0].weight)  # torch.autograd.grad sets no .grad, so this is not a step
    model.zero_grad()
    loss_of(model, share(world, x), share(world, y)).backward()
    alone.zero_grad()
    loss_of(alone, x, y).backward()
    compare(model.module, alone)


def static_graph_with_segments(world):
    model, theirs = (kind(seeded(TwiceCheckpointed), static_graph=True) for kind in (ours, nn.parallel.DistributedDataParallel))
    for each in (model, theirs):
        train(world, each)
    compare(model.module, theirs.module, 1e-6)
    refused = ours(seeded(TwiceCheckpointed))
    x, y = (share(world, tensor) for tensor in batch())
    message_of(RuntimeError, loss_of(refused, x, y).backward, "layer", "twice")


def complex_gradients(world):
    for dtype, tolerance in ((torch.complex64, 1e-5), (torch.complex128, 1e-12)):
        make = lambda: nn.Sequential(nn.Linear(12, 7, dtype=dtype), nn.Linear(7, 4, dtype=dtype))  # noqa: B023
        model, alone = ours(seeded(make)), seeded(make)
        for step in range(3):
            x = batch(step)[0].to(dtype)
            for each, part in ((model, share(world, x)), (alone, x)):
                each.zero_grad()
                each(part).abs().square().mean().backward()
        for mine, theirs in zip(model.parameters(), alone.parameters()):
            close(torch.view_as_real(mine.grad), torch.view_as_real(theirs.grad), tolerance, dtype)


def hooks_of_others(world):
    """Changes by other hooks are averaged, whether the hooks existed before the wrapper or came later."""
    module, alone = seeded(plain), seeded(plain)

    def double(parameter):
        parameter.grad.mul_(2)
    module[0].weight.register_post_accumulate_grad_hook(double)
    model = ours(module)
    module[2].weight.register_post_accumulate_grad_hook(double)
    for step in range(3):
        model.zero_grad()
        alone.zero_grad()
        x, y = batch(step)
        loss_of(model, share(world, x), share(world, y)).backward()
        loss_of(alone, x, y).backward()
        for layer in (0, 2):
            alone[layer].weight.grad.mul_(2)
        compare(module, alone)


def join(world):
    """As with torch's class, ranks end one after another, the highest one last. All then hold its model."""
    def steps_of(each, **options):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        with each.join(**options):
            for step in range(1 + 2 * world.rank):
                optimizer.zero_grad(set_to_none=step != 1)
                if step == 2:
                    with each.no_sync():
                        loss_of(each, *(share(world, tensor) for tensor in batch(9))).backward()
                loss_of(each, *(share(world, tensor) for tensor in batch(step))).backward()
                optimizer.step()

    def with_statistics():
        return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))

    gloo = dist.new_group(backend="gloo")  # because torch's class cannot divide by the active ranks over the Python shim
    for make in (plain, with_statistics):
        for options in ({}, {"find_unused_parameters": True}):
            model = ours(seeded(make), **options)
            theirs = nn.parallel.DistributedDataParallel(seeded(make), process_group=gloo, **options)
            for each in (model, theirs):
                for by_all in (True, False):
                    steps_of(each, divide_by_initial_world_size=by_all)
                steps_of(each, enable=world.size > 1)
            for (name, mine), other in zip(model.module.state_dict().items(), theirs.module.state_dict().values()):
                close(mine, other, 1e-5, name)
                same = [torch.empty_like(mine) for _ in range(world.size)]
                dist.all_gather(same, mine)
                expect(all(torch.equal(each, same[0]) for each in same), name, "differs between ranks")


def join_throws(world):
    """All ranks get the error when the first one has no further batch."""
    model = ours(seeded(plain))

    def train_until_told():
        with model.join(throw_on_early_termination=True):
            for step in range(1 + world.rank):
                loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
    message_of(RuntimeError, train_until_told, "Rank 0 exhausted" if world.rank == 0 else "exhausted inputs")


def ignored(world):
    module = seeded(plain)
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["0.weight"])
    model = ours(module)
    x, y = (share(world, tensor) for tensor in batch())
    loss_of(model, x, y).backward()
    alone = seeded(plain)
    loss_of(alone, x, y).backward()
    close(module[0].weight.grad, alone[0].weight.grad, 0, "an ignored parameter was averaged")


def compiled(world):
    """The graph is split, so that not all gradients arrive at the end."""
    graphs = []

    def backend(graph, inputs):
        graphs.append(nn.parallel.DistributedDataParallel._active_ddp_module)
        return torch._dynamo.backends.debugging.aot_eager(graph, inputs)

    class Deep(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(600, 600) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch._dynamo.reset()
    model, eager = ours(seeded(Deep), bucket_cap_mb=1), ours(seeded(Deep))
    faster = torch.compile(model, backend=backend)
    x = torch.randn(2, 600, generator=torch.Generator().manual_seed(world.rank))
    for _ in range(3):
        for each in (faster, eager):
            each.zero_grad()
            each(x).square().mean().backward()
        compare(model.module, eager.module)
    expect(len(graphs) > 1 and all(each is model for each in graphs), "not divided at the module's buffers", len(graphs))


def made_and_dropped(world):
    """A freed module's memory is freed with it, whenever the ranks drop it."""
    module = seeded(plain)
    for _ in range(20):
        model = ours(module)
        for step in range(2):
            model.zero_grad()
            loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
        steps, memory = weakref.ref(model._steps), weakref.ref(model._steps.reducer._handle)
        model.zero_grad()
        del model
        expect(steps() is None and memory() is None, "kept by something")


# ---- Saved, copied, inspected ----


def saved_and_copied(world):
    model = ours(seeded(plain))
    expect(isinstance(model, nn.parallel.DistributedDataParallel), "programs test for torch's class")
    train(world, model)
    state = model.state_dict()
    expect(list(state) == ["module." + name for name in model.module.state_dict()], list(state))
    bare = seeded(plain)
    bare.load_state_dict(model.module.state_dict())
    other = ours(plain())
    other.load_state_dict(state)
    compare_values(other.module, bare)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        compare_values(copied.module, model.module)
        copied.zero_grad()
        model.zero_grad()
        x, y = batch(7)
        for each in (copied, model):
            loss_of(each, share(world, x), share(world, y)).backward()
        compare(copied.module, model.module, 1e-6)


def compare_values(one, other):
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters()):
        expect(torch.equal(mine, theirs), name)


def what_others_read(world):
    model = ours(seeded(plain))
    told = model._get_ddp_logging_data()
    expect(told["world_size"] == world.size and not told["can_set_static_graph"], told)
    expect(model.require_backward_grad_sync and not model.static_graph and model.device_ids is None, "attributes")
    expect(not model.reducer._rebuild_buckets(), "buckets are the engine's")
    x, y = (share(world, tensor) for tensor in batch())
    with model.no_sync():  # as Accelerate does if the last batch comes unexpectedly
        outputs = model(x)
    model.reducer.prepare_for_backward([outputs])
    nn.functional.mse_loss(outputs, y).backward()
    alone = seeded(plain)
    loss_of(alone, *batch()).backward()
    compare(model.module, alone)
    expect(model._get_ddp_logging_data()["iteration"] == 1, "steps")


def takes_torchs_arguments(world):
    """The constructor, each method that replaces torch's, and the attributes."""
    torchs, mine = nn.parallel.DistributedDataParallel, type(ours(plain()))
    replaced = [name for name in vars(mine) if callable(getattr(torchs, name, None)) and not name.startswith("__")]
    expect({"forward", "register_comm_hook"} <= set(replaced), replaced)
    for name in replaced:
        taken, expected = (list(inspect.signature(getattr(each, name)).parameters) for each in (mine, torchs))
        expect(taken == expected, name, taken, "instead of", expected)
    taken, expected = (inspect.signature(each.__init__).parameters for each in (mine, torchs))
    expect([name for name in taken if name in expected] == list(expected), list(taken), "instead of", list(expected))
    if "forward_sync_buffers" in expected:  # since torch 2.13, which has today's arguments and defaults
        expect(list(taken)[:len(expected)] == list(expected), list(taken), "instead of", list(expected))
        for name, parameter in expected.items():
            expect(taken[name].default == parameter.default, name, taken[name].default, "instead of", parameter.default)
    missing = [name for name in vars(torchs(plain())) if not name.startswith("_") and not hasattr(ours(plain()), name)]
    expect(not missing, "attributes that torch's class has:", missing)
    change_nothing = "check_reduction", "skip_all_reduce_unused_params", "batched_grad_copy", "lazy_bucket_allocation"
    options = {name: True for name in change_nothing if name in expected}
    model, theirs = (make(seeded(plain), **options) for make in (ours, torchs))
    for each in (model, theirs):
        train(world, each)
    compare(model.module, theirs.module, 1e-6)


# ---- Errors ----


def message_of(kinds, function, *words):
    try:
        function()
    except kinds as error:
        expect(all(word in str(error) for word in words), *words, "are not in:", error)
        return str(error)
    raise AssertionError(f"no error, where one says {words}")


def backwards_without_forward(world):
    model = ours(seeded(plain))
    x, y = (share(world, tensor) for tensor in batch())
    one, two = loss_of(model, x, y), loss_of(model, x, y)
    one.backward()
    message_of(RuntimeError, two.backward, "4.", "two forward passes", "no_sync()")
    message_of(RuntimeError, lambda: model.module(x).sum().backward(), "model.module(x)")
    with model.no_sync():
        losses = [loss_of(model, x, y) for _ in range(2)]
    for loss in losses:
        loss.backward()
    message_of(RuntimeError, lambda: model.module(x).sum().backward(), "model.module(x)")
    model.zero_grad()
    loss_of(model, x, y).backward()  # nothing is lost
    alone = seeded(plain)
    loss_of(alone, *batch()).backward()
    compare(model.module, alone)


def missing_gradient(world):
    """All ranks get the error in the same step, including those that are not at fault."""
    model = ours(seeded(Branches))
    x, y = (share(world, tensor) for tensor in batch())
    message_of(RuntimeError, loss_of(model, x, y).backward, "never.weight", "rank")
    lonely, model = world.size - 1, ours(seeded(Headed))
    message_of(RuntimeError, loss_of(model, x, y, world.rank != lonely).backward, "head.weight", f"rank {lonely}")


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("on purpose")


def broken_backward(world):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

        def forward(self, x):
            x = self.first(x)
            return self.second(Breaks.apply(x) if world.rank == 0 else x)

    model = ours(seeded(Model))
    x, y = (share(world, tensor) for tensor in batch())
    loss = loss_of(model, x, y)
    if world.rank == 0:
        message_of(ValueError, loss.backward, "on purpose")
    else:
        message_of(RuntimeError, loss.backward, "an exception ended the backward pass", "rank 0")
    message_of(RuntimeError, lambda: model(x), "an exception ended the backward pass")


def different_models(world):
    def make():
        return nn.Linear(12, 4 if world.rank == 0 else 5)
    if world.size > 1:
        message_of(RuntimeError, lambda: ours(make()), "weight", "48", "60")
        sizes = (12, 4) if world.rank == 0 else (4, 12)
        message_of(RuntimeError, lambda: ours(nn.Linear(*sizes, bias=False)), "weight", "[4, 12] on rank 0", "[12, 4] on rank 1")


def sparse_gradient(world):
    model = ours(nn.Embedding(4, 3, sparse=True))
    message_of((TypeError, RuntimeError), lambda: model(torch.tensor([1])).sum().backward(), "weight", "sparse")


def changed_static_graph(world):
    model = ours(seeded(Branches), static_graph=True)
    x, y = (share(world, tensor) for tensor in batch())
    loss_of(model, x, y, True).backward()
    message_of(RuntimeError, loss_of(model, x, y, False).backward, "static_graph=True", "times in this step")


def wrong_arguments(world):
    gloo = dist.new_group(backend="gloo")
    message_of(ValueError, lambda: ours(plain(), process_group=gloo), "gloo", 'init_process_group("shoal")')
    message_of(ValueError, lambda: ours(plain(), device_ids=[0]), "device_ids")
    message_of(ValueError, lambda: ours(plain(), compression="zip"), "zip", "none, fp16, bf16, int8")
    message_of(RuntimeError, lambda: ours(nn.Tanh()), "not needed")
    message_of(TypeError, lambda: ours(nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float8_e5m2))])), "float8_e5m2",
               "parameter 0")
    message_of(ValueError, lambda: ours(plain(), output_device=0), "output_device")
    for name, value in (("mixed_precision", object()), ("delay_all_reduce_named_params", [("0.weight", None)]),
                        ("param_to_hook_all_reduce", nn.Parameter(torch.zeros(2))), ("bucket_cap_mb_list", [1, 2])):
        message_of(NotImplementedError, lambda: ours(plain(), **{name: value}), name, "leave it out")
    model = ours(plain())
    message_of(NotImplementedError, lambda: model.register_comm_hook(None, print), "compression=")


# ---- Several hosts, and ranks that end ----


def compression(world):
    """Between hosts: close to the average, but not equal to it. Replicas stay equal."""
    os.environ["SHOAL_HOST_ID"] = f"host-{world.rank}"
    dist.init_process_group(ranks.BACKEND, timeout=ranks.GROUP_TIMEOUT)
    alone = seeded(plain)
    loss_of(alone, *batch()).backward()
    for kind, most in (("fp16", 1e-3), ("bf16", 1e-2), ("int8", 5e-2)):  # blocks of 256 elements contain several small tensors
        model = ours(seeded(plain), compression=kind)
        loss_of(model, *(share(world, tensor) for tensor in batch())).backward()
        expect(model._get_ddp_logging_data()["comm_hook"] == kind, "told")
        mine, theirs = (torch.cat([each.grad.flatten() for each in one.parameters()]) for one in (model, alone))
        error = ((mine - theirs).norm() / theirs.norm()).item()
        expect(1e-6 < error < most, kind, "errs by", error)
        others = [torch.empty_like(mine) for _ in range(world.size)]
        dist.all_gather(others, mine)
        expect(all(torch.equal(other, others[0]) for other in others), kind, "differs between ranks")
    hooks_between_hosts(world)
    resumed(world)
    hooks_resumed(world)


def averages_of_float16(world):
    """The average of 40000 on all ranks is 40000, however many hosts there are, though the sum of one host is not a float16."""
    os.environ["SHOAL_HOST_ID"] = f"host-{world.rank // 2}"
    dist.init_process_group(ranks.BACKEND, timeout=ranks.GROUP_TIMEOUT)
    for count in (8, 100_000):
        tensor = torch.full((count,), 40000.0, dtype=torch.float16)
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
        expect(tensor.unique().tolist() == [40000.0], "AVG of", count, tensor)
    model = ours(nn.Linear(1000, 100, bias=False).half())
    model(torch.full((1, 1000), 40000.0, dtype=torch.float16)).sum().backward()
    expect(model.module.weight.grad.unique().tolist() == [40000.0], "gradients", model.module.weight.grad)


def several_steps(world, model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, *(share(world, tensor) for tensor in batch(step))).backward()
        optimizer.step()


def through_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resumed(world):
    """Training resumed from a checkpoint has the same bits as uninterrupted training; without int8's residuals it does not."""
    def make(options):
        model = ours(seeded(plain), **options)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for options in ({"compression": "int8"}, {"compression": "int8", "bucket_cap_mb": 0.0005}):
        model, optimizer = make(options)
        several_steps(world, model, optimizer, range(3))
        saved = through_file([model.state_dict(), optimizer.state_dict(), model.gradient_state_dict()])
        several_steps(world, model, optimizer, range(3, 6))
        for is_complete in (True, False):
            other, other_optimizer = make(options)
            other.load_state_dict(saved[0])
            other_optimizer.load_state_dict(saved[1])
            if is_complete:
                other.load_gradient_state_dict(saved[2])
            several_steps(world, other, other_optimizer, range(3, 6))
            same = all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters()))
            expect(same == is_complete, "resumed, other bits" if is_complete else "what int8 has cut off changes nothing")
    kept = saved[2]
    message_of(ValueError, lambda: other.load_gradient_state_dict({}), "not a gradient_state_dict")
    message_of(ValueError, lambda: ours(seeded(Shared)).load_gradient_state_dict(kept), "another model")
    message_of(RuntimeError, lambda: ours(seeded(plain), compression="bf16").load_gradient_state_dict(kept), "keeps none")
    loss = loss_of(other, *(share(world, tensor) for tensor in batch()))
    message_of(RuntimeError, lambda: other.load_gradient_state_dict(kept), "between steps")
    loss.backward()


def compares_parameters(world):
    """Replicas that differ are reported on all ranks, and can be repaired."""
    for make, name in ((plain, "2.weight"), (Convolutions, "convolution.weight")):
        model = ours(seeded(make))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        several_steps(world, model, optimizer, range(2))
        model.compare_parameters()
        changed = model.module.get_parameter(name)
        kept = changed.detach().clone()
        with torch.no_grad():
            changed[0, 0] += world.rank == 1
        message_of(RuntimeError, model.compare_parameters, name, "after step", "rank 1 differs from most")
        with torch.no_grad():
            changed.copy_(kept)
        model.compare_parameters()
        several_steps(world, model, optimizer, range(2, 3))


def warnings_in(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(each.message) for each in caught if "is not the same on all ranks" in str(each.message)]


def part_from(world, model, name):
    """The last rank's replica gets a value of its own."""
    with torch.no_grad():
        model.module.get_parameter(name).flatten()[0] += world.rank == world.size - 1


def replicas_that_come_apart_are_named(world):
    """A rank that differs is named in the first step or after compare_every steps, once; from then on it stays quiet."""
    last, optimizing = f"rank {world.size - 1} differs", {}
    for in_reduction in (False, True):
        module = seeded(plain)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if in_reduction:
            optimizing = {"optimizer": optimizer}
        model = ours(module, compare_every=3, **optimizing)
        expect(warnings_in(lambda: several_steps(world, model, optimizer, range(7))) == [], "replicas are the same")
        if in_reduction:
            continue  # its parameters are gathered from their owners in each step
        part_from(world, model, "2.weight")
        (told,) = warnings_in(lambda: several_steps(world, model, optimizer, range(7, 20)))
        expect(all(words in told for words in ("2.weight", "after step 8", last, "compare_every=0")), told)
    model, expected = ours(seeded(plain), compare_every=2, compare_raises=True), ("0.bias", "before the first step", last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    part_from(world, model, "0.bias")
    message_of(RuntimeError, lambda: several_steps(world, model, optimizer, range(1)), *expected)
    message_of(RuntimeError, lambda: several_steps(world, model, optimizer, range(1, 2)), "0.bias", "after step 1")
    several_steps(world, model, optimizer, range(2, 3))  # the module stays usable


def comparisons_leave_alone_what_differs_by_design(world):
    x, y = (share(world, tensor) for tensor in batch())
    model = ours(seeded(plain), compare_every=0)
    part_from(world, model, "2.weight")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expect(warnings_in(lambda: several_steps(world, model, optimizer, range(3))) == [], "compare_every=0")

    model = ours(seeded(plain), compare_every=1)
    kept = model.module.get_parameter("2.weight").detach().clone()
    with model.no_sync():  # steps that average nothing
        part_from(world, model, "2.weight")
        expect(warnings_in(lambda: loss_of(model, x, y).backward()) == [], "no_sync()")
    with torch.no_grad():
        model.module.get_parameter("2.weight").copy_(kept)
        model.module.get_parameter("2.bias").fill_(math.nan)  # equal by its bits
    expect(warnings_in(lambda: loss_of(model, x, y).backward()) == [], "NaN")

    model = ours(seeded(plain), compare_every=1)
    part_from(world, model, "2.weight")

    def uneven():
        with model.join():  # a rank that has joined keeps older parameters until the end
            for _ in range(1 + world.rank):
                loss_of(model, x, y).backward()
    expect(warnings_in(uneven) == [], "join()")
    for wrong in (-1, 1.5, True, "often"):
        message_of(ValueError, lambda: ours(seeded(plain), compare_every=wrong), "compare_every is", "a number of steps")


def hooks_resumed(world):
    """Like resumed(), but with a hook. DDP makes no new buckets after the first step with find_unused_parameters."""
    from shoal.torch import hooks
    models = []

    def make(state=None):
        models.append(hooks.State())
        if state:
            models[-1].load_state_dict(state)
        model = theirs_with("int8_hook", seeded(plain), models[-1], find_unused_parameters=True, bucket_cap_mb=0.0005)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = make()
    several_steps(world, model, optimizer, range(3))
    saved = through_file([model.state_dict(), optimizer.state_dict(), models[0].state_dict()])
    several_steps(world, model, optimizer, range(3, 6))
    for is_complete in (True, False):
        other, other_optimizer = make(saved[2] if is_complete else None)
        other.load_state_dict(saved[0])
        other_optimizer.load_state_dict(saved[1])
        several_steps(world, other, other_optimizer, range(3, 6))
        same = all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters()))
        expect(same == is_complete, "resumed, other bits" if is_complete else "what int8 has cut off changes nothing")
    message_of(ValueError, lambda: hooks.State().load_state_dict({}), "not a state_dict of hooks.State")


def hooks_between_hosts(world):
    """Compared with torch's hook of that format if there is one, and within the error of the format. int8's residuals are
    added later, so the sum of many steps is far more exact."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    exact, half = (nn.parallel.DistributedDataParallel(seeded(plain)) for _ in range(2))
    half.register_comm_hook(None, default_hooks.fp16_compress_hook)
    models = {hook: theirs_with(hook, seeded(plain)) for hook in ("fp16_hook", "bf16_hook", "int8_hook")}
    sums, first = {}, {}
    for step in range(40):
        for name, model in {"exact": exact, "half": half, **models}.items():
            model.zero_grad()
            loss_of(model, *(share(world, tensor) for tensor in batch())).backward()
            gradient = torch.cat([each.grad.flatten() for each in model.parameters()])
            first.setdefault(name, gradient)
            sums[name] = sums.get(name, 0) + gradient.double()
    def error(values, than="exact"):
        return ((values[name] - values[than]).norm() / values[than].norm()).item()
    for name, most in (("fp16_hook", 1e-3), ("bf16_hook", 1e-2), ("int8_hook", 5e-2)):
        expect(1e-6 < error(first) < most, name, "errs by", error(first))
    name = "fp16_hook"
    expect(error(first, "half") < 1e-3, "torch's hook of fp16 and Shoal's differ by", error(first, "half"))
    name = "int8_hook"
    expect(error(sums) < error(first) / 5, "without feedback: one step errs by", error(first), "their sum by", error(sums))


def rank_ends(world):
    """A rank ends in the backward pass, and the others' backward() names it."""
    model = ours(seeded(plain))
    loss = loss_of(model, *(share(world, tensor) for tensor in batch()))
    if world.rank == 1:
        model.module[0].weight.register_hook(lambda _: os._exit(3))
    message_of(RuntimeError, loss.backward, "rank 1")


# ---- Hooks for torch's own class ----


def theirs_with(hook, module, state=None, **options):
    from shoal.torch import hooks
    model = nn.parallel.DistributedDataParallel(module, **options)
    state = state or hooks.State()
    model.register_comm_hook(state, getattr(hooks, hook))
    return model


def hooks_on_one_host(world):
    """Nothing is compressed on one host. Buckets are made anew after the first step."""
    for hook, make in (("fp16_hook", plain), ("bf16_hook", Mixed), ("int8_hook", plain)):
        for options in ({}, {"bucket_cap_mb": 0.0005, "find_unused_parameters": True}, {"gradient_as_bucket_view": True}):
            model = theirs_with(hook, seeded(make), **options)
            other = nn.parallel.DistributedDataParallel(seeded(make))
            for each in (model, other):
                train(world, each, steps=4)
            compare(model.module, other.module, 20 * tolerance_of(other))


def hooks_with_join(world):
    """Ranks without further batches take part with zeros."""
    model, other = theirs_with("int8_hook", seeded(plain)), nn.parallel.DistributedDataParallel(seeded(plain))
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        with each.join():
            for step in range(2 + world.rank):
                optimizer.zero_grad()
                loss_of(each, *(share(world, tensor) for tensor in batch(step))).backward()
                optimizer.step()
    compare_all = [torch.cat([each.detach().flatten() for each in one.module.parameters()]) for one in (model, other)]
    close(*compare_all, 1e-5, "join")


class Bucket:
    """The part of torch's GradBucket that a hook uses."""

    def __init__(self, tensor, index, count, parameters):
        self.index, self.is_last = (lambda: index), (lambda: index == count - 1)
        self.buffer, self.parameters = (lambda: tensor), (lambda: parameters)


def hooks_with_other_buckets(world):
    """Buckets change in the middle of the list, and so does their number. No bucket is averaged twice or left out."""
    from shoal.torch import hooks
    state, parameters = hooks.State(), [torch.zeros(1)]
    mean = sum(range(1, world.size + 1)) / world.size
    for counts in ((5, 70000, 3), (5, 70000, 3), (5, 9, 9), (5, 9), (5, 9, 9, 100000), (5, 9, 9, 100000), (1,)):
        tensors = [torch.full((count,), (index + 1.0) * (world.rank + 1)) for index, count in enumerate(counts)]
        futures = [hooks.int8_hook(state, Bucket(tensor, index, len(counts), parameters))
                   for index, tensor in enumerate(tensors)]
        for index, (future, tensor) in enumerate(zip(futures, tensors)):
            expect(future.done() and future.wait() is tensor, "a future of another tensor")
            close(tensor, torch.full_like(tensor, (index + 1) * mean), 1e-5, "bucket", index, "of", counts)


def hooks_wrong_use(world):
    from shoal.torch import hooks
    x, y = (share(world, tensor) for tensor in batch())
    model = theirs_with("int8_hook", seeded(plain), state=dist.group.WORLD)
    message_of(TypeError, loss_of(model, x, y).backward, "Group", "hooks.State(process_group)", "hooks.int8_hook")
    state = hooks.State()
    one, two = (theirs_with("fp16_hook", seeded(plain), state) for _ in range(2))
    loss_of(one, x, y).backward()
    message_of(RuntimeError, loss_of(two, x, y).backward, "given to two models")
    two = theirs_with("bf16_hook", seeded(plain), state)
    message_of(RuntimeError, loss_of(two, x, y).backward, "serves fp16_hook", "bf16_hook")
    message_of(TypeError, lambda: hooks.int8_hook(hooks.State(), Bucket(torch.zeros(2, dtype=torch.int64), 0, 1, [])), "int64")
    message_of(ValueError, lambda: hooks.int8_hook(hooks.State(), Bucket(torch.zeros(2, device="meta"), 0, 1, [])), "meta")
    message_of(RuntimeError, lambda: hooks.int8_hook(hooks.State(), Bucket(torch.zeros(2), 1, 2, [])), "bucket 1 came")


def hooks_broken_backward(world):
    """The other ranks get the error at once, as with shoal.torch's class."""
    model = theirs_with("int8_hook", seeded(plain), bucket_cap_mb=0.0005)
    for step in range(3):
        loss = loss_of(model, *(share(world, tensor) for tensor in batch(step)))
        if step < 2:
            loss.backward()
    if world.rank == 0:
        def breaks(_):
            raise ValueError("on purpose")
        model.module[0].weight.register_hook(breaks)
        message_of(ValueError, loss_of(model, *(share(world, tensor) for tensor in batch())).backward, "on purpose")
    else:
        message_of(RuntimeError, loss.backward, "an exception ended the backward pass", "rank 0")


class BreaksAt(nn.Module):
    """Its backward pass breaks on one rank, before all gradients or after those of the last layer."""

    def __init__(self, at_output):
        super().__init__()
        self.at_output, self.is_breaking = at_output, False
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 4)

    def forward(self, x):
        hidden = self.first(x)
        if self.is_breaking and not self.at_output:
            hidden = Breaks.apply(hidden)
        outputs = self.second(hidden)
        return Breaks.apply(outputs) if self.is_breaking and self.at_output else outputs


BUCKETS = ({}, {"bucket_cap_mb": 0.0001, "find_unused_parameters": True})  # one in the first step, or several in each


def hooks_broken_at(world, step, at_output, options):
    """The backward pass of one step breaks on rank 0. The others learn it long before the deadline, even if a bucket is
    late or the buckets are new."""
    model = theirs_with("int8_hook", seeded(lambda: BreaksAt(at_output)), **options)
    x, y = (share(world, tensor) for tensor in batch())
    for _ in range(step):
        loss_of(model, x, y).backward()
    model.module.is_breaking = world.rank == 0
    loss, begin = loss_of(model, x, y), time.monotonic()
    if world.rank == 0:
        message_of(ValueError, loss.backward, "on purpose")
    else:
        message_of(RuntimeError, loss.backward, "an exception ended the backward pass", "rank 0")
    expect(time.monotonic() - begin < ranks.GROUP_TIMEOUT.total_seconds() / 2, "told late")


def hooks_broken_early(world):
    """In the first step, in the second, which may have new buckets, and in the third."""
    for step in range(3):
        for at_output in (True, False):
            for options in BUCKETS:
                hooks_broken_at(world, step, at_output, options)


def hooks_broken_otherwise(world):
    """Inside no_sync() only this rank is affected, and steps continue. After the last bucket torch's class refuses the next
    step."""
    model = theirs_with("int8_hook", seeded(plain))
    x, y = (share(world, tensor) for tensor in batch())

    def breaks(_):
        raise ValueError("on purpose")
    for _ in range(3):
        loss_of(model, x, y).backward()
        with model.no_sync():
            loss = loss_of(model, x, y)
        if world.rank == 0:
            handle = model.module[0].weight.register_hook(breaks)
            message_of(ValueError, loss.backward, "on purpose")
            handle.remove()
    x = x.clone().requires_grad_()
    loss = loss_of(model, x, y)
    if world.rank == 0:
        x.register_hook(breaks)
        message_of(ValueError, loss.backward, "on purpose")
        return

    def two_steps():
        loss.backward()
        loss_of(model, x, y).backward()
    begin = time.monotonic()
    message_of(RuntimeError, two_steps, "an exception ended the backward pass", "rank 0")
    expect(time.monotonic() - begin < ranks.GROUP_TIMEOUT.total_seconds() / 2, "told late")


def hooks_compiled(world):
    """The hook that finds the model, and the one that watches it, disturb nothing. If all of torch's class is compiled,
    Dynamo looks into the Python shim, which it cannot trace."""
    from shoal.torch import hooks
    for compiles_all in (True, False) if world.shim == "c++" else (False,):
        torch._dynamo.reset()
        inner = seeded(plain)
        state = hooks.State()
        model = nn.parallel.DistributedDataParallel(inner if compiles_all else torch.compile(inner, backend="aot_eager"))
        model.register_comm_hook(state, hooks.bf16_hook)
        other = nn.parallel.DistributedDataParallel(seeded(plain))
        faster = torch.compile(model, backend="aot_eager") if compiles_all else model
        watched = []
        state._backward_began, began = lambda: (watched.append(1), began()), state._backward_began
        for step in range(3):
            for each in (faster, other):
                each.zero_grad()
                loss_of(each, *(share(world, tensor) for tensor in batch(step))).backward()
        expect(len(watched) > 3, "the outputs of the model are not watched:", len(watched))
        close(*(torch.cat([each.grad.flatten() for each in one.parameters()]) for one in (inner, other)), 1e-5, "compiled")


CASES = [model_case(*row) for row in MODELS.items()]
CASES += [form_case(name, options, to_none, **optimizing) for name, options, to_none, optimizing in FORMS]
CASES += [Case(body.__name__, body, sizes=(1, 2)) for body in (
    begins_as_rank_0, no_sync, no_sync_between, no_sync_of_lists, no_sync_with_more, adds_to_averages, keeps_gradients,
    frees_gradients, unused, outputs_in_an_object, changed_and_followed, changed_and_refused,
    dropped_before_backward, several_models, two_forwards_one_backward, static_graph_with_segments, complex_gradients,
    hooks_of_others, ignored, made_and_dropped,
    saved_and_copied, what_others_read, takes_torchs_arguments, backwards_without_forward, missing_gradient, different_models, sparse_gradient,
    changed_static_graph, wrong_arguments, hooks_with_other_buckets, hooks_wrong_use)]
CASES += [Case(body.__name__, body, sizes=(2, 3)) for body in (hooks_on_one_host, hooks_with_join, hooks_broken_backward, hooks_broken_early,
                                                       hooks_broken_otherwise, join, join_throws)]
CASES += [Case(body.__name__, body, sizes=sizes, timeout_s=300) for body, sizes in ((compiled, (1, 2)), (hooks_compiled, (2, 3)))]
CASES += [Case("copies", copies, sizes=(2,))]
CASES += [Case("compares_parameters", compares_parameters, sizes=(3,))]
CASES += [Case(body.__name__, body, sizes=(2, 3, 4)) for body in (replicas_that_come_apart_are_named,
                                                                  comparisons_leave_alone_what_differs_by_design)]
CASES += [Case("broken_backward", broken_backward, sizes=(2, 3))]
CASES += [Case("compression", compression, sizes=(2,), init=False, fresh=True)]
CASES += [Case("averages_of_float16", averages_of_float16, sizes=(4,), init=False, fresh=True)]
CASES += [Case("rank_ends", rank_ends, sizes=(2, 3), fresh=True, ends=(1,))]

if __name__ == "__main__":
    ranks.run(CASES)
