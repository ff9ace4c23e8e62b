#!/usr/bin/env python3
"""shoal.torch.Pipeline: losses and gradients equal those of one process, whatever the schedule, the split and the microbatches;
and each misuse has its error on every rank."""
import copy
import gc
import os
import shutil
import tempfile
import warnings
import weakref
from unittest import mock

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
    return size if kind in ("gpipe", "1f1b", "zb-h1", "zb-h2") else 2 * size  # also of torch's schedules


def pipelined(world, model, batch, loss, kind="1f1b", microbatches=4, **options):
    import shoal.torch
    from shoal.torch import _graph, _stages
    example = batch(0)[0]
    if "cuts" not in options:
        units = _graph.record(model, _stages.arguments_of(example), _graph.unit_chooser(model)).units
        options["cuts"] = even_cuts(units, stages_of(kind, len(options.get("replicate") or [0] * world.size)))
    return shoal.torch.Pipeline(model, example, microbatches=microbatches, schedule=kind, loss=loss, **options)


class Pair:
    """A pipeline and one process with the same first values."""

    def __init__(self, world, name, kind="1f1b", microbatches=4, make=None, **options):
        maker, self.batch, self.loss = MODELS[name]
        self.whole = seeded(make or maker)
        self.pipeline = pipelined(world, copy.deepcopy(self.whole), self.batch, self.loss, kind, microbatches, **options)
        self.own = torch.optim.SGD(self.pipeline.parameter_groups(), lr=0.05, momentum=0.9)
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


def fails(function, kind, *words):
    """Checks that a call raises an error of a kind whose text has these words."""
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error), words)
        return error
    expect(False, "no error with", words)


def microbatches_of(world):
    return 6 if world.size == 3 else 4  # interleaved takes turns of as many microbatches as ranks


def equals_one_process(world, name, kind, microbatches=None):
    pair = Pair(world, name, kind, microbatches or microbatches_of(world))
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
    for kind in ("1f1b", "zb-h1", "v-half"):
        equals_one_process(world, "residual", kind)


def recomputed_stages_equal_one_process(world):
    for kind in ("gpipe", "1f1b", "interleaved", "zb-h1", "v-zb"):
        for name in ("gpt", "skips") if kind in ("1f1b", "zb-h1") else ("mlp",):
            for recompute in (True, [0]):
                pair = Pair(world, name, kind, microbatches_of(world), recompute=recompute)
                expect(pair.pipeline.schedule.recomputed_stages() == ([0] if recompute == [0] else list(range(pair.pipeline.schedule.stages))))
                for number, rows in enumerate((16, 3, 16)):  # some microbatches without samples
                    pair.step(number, rows)
                inputs, _ = pair.batch(0)
                pair.pipeline.forward(inputs)
                pair.step(3)


class Noisy(nn.Module):
    """Random numbers, and statistics that each forward pass changes."""

    def __init__(self, width=12):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3)) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def recomputation_changes_nothing(world):
    """The same random numbers, statistics that count each microbatch once, and the same gradients to the last bit."""
    for kind in ("1f1b", "zb-h1"):
        results = []
        for recompute in (False, True):
            pipeline = pipelined(world, seeded(Noisy), plain_batch, squares, kind, recompute=recompute)
            for step in range(3):
                torch.manual_seed(step)
                loss = pipeline.step(*plain_batch(step))
            draw = torch.rand(3)  # the generator continues at the same place
            results.append((loss, draw, pipeline.state_dict(), [parameter.grad for parameter in pipeline.parameters()]))
        (loss, draw, state, gradients), again = results
        expect(torch.equal(loss, again[0]) and torch.equal(draw, again[1]), results)
        expect(all(torch.equal(value, again[2][name]) for name, value in state.items()), state, again[2])
        expect(all(torch.equal(one, other) for one, other in zip(gradients, again[3])))


class Watched(nn.Linear):
    """Counts its results that are alive. Its square keeps each of them for the backward pass."""
    alive, most = [], 0

    def forward(self, x):
        made = super().forward(x)
        Watched.alive = [each for each in Watched.alive if each() is not None] + [weakref.ref(made)]
        Watched.most = max(Watched.most, len(Watched.alive))
        return made * made


def recomputed_stages_keep_only_their_inputs(world):
    found = []
    for recompute in (False, True):
        Watched.alive, Watched.most = [], 0
        pipeline = pipelined(world, nn.Sequential(*(Watched(12, 12) for _ in range(2 * world.size))), plain_batch, squares, "gpipe", 8,
                             recompute=recompute)
        pipeline.step(*plain_batch(0))
        found.append(Watched.most)
    expect(found[0] == 2 * 8 and found[1] <= 4, found)


def stages_are_recomputed_if_memory_is_short(world):
    """Each layer keeps what it gets, and the first stage of two microbatches."""
    def make(**options):
        return pipelined(world, nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(8))),
                         lambda step: (torch.zeros(256, 64), torch.zeros(256, 64)), squares, cuts=None, units={nn.Sequential},
                         partition={"latency_us": 0, "state_ratio": 0}, **options)

    # Memory depends on the borders, and these on times: here all units take as long, on a busy machine too.
    from shoal.torch import _profile
    with mock.patch.object(_profile._ClockMeter, "clocked", lambda self, call: (100.0, call())):
        expect(make(recompute="auto").schedule.recomputed_stages() == [])
        needed = max(memory.total_bytes for memory in make()._partition.memory)
        fails(lambda: make(memory=needed * 2 // 3), ValueError, "are short", "It would fit if activations", "are recomputed")
        pipeline = make(memory=needed * 2 // 3, recompute="auto")
    stages = pipeline.schedule.recomputed_stages()
    expect(stages and ", recomputed; " in pipeline.explain() and "R" in pipeline.schedule.text(), pipeline.explain())
    expect(max(memory.total_bytes for memory in pipeline._partition.memory) <= needed * 2 // 3)
    expect("R" not in pipeline.to_torch()[1])
    inputs = torch.randn(16, 64)
    pipeline.step(inputs, inputs)
    given = make(kind=pipeline.schedule.text(), microbatches=pipeline.microbatches)  # a text has its own R
    expect(given.schedule.recomputed_stages() == stages, given.schedule.text())
    given.step(inputs, inputs)
    expect(make(recompute=True).schedule.recomputed_stages() == [0, 1])
    expect(make(recompute=[1]).schedule.recomputed_stages() == [1])


class DoublesInPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(2.0))


def wrong_recomputation_is_refused(world):
    def make(**options):
        return pipelined(world, plain(), plain_batch, squares, **options)

    fails(lambda: make(recompute="some"), TypeError, "recompute must be True", "'some'")
    fails(lambda: make(recompute=3), TypeError, "recompute must be True")
    fails(lambda: make(recompute=[2]), ValueError, "recompute has 2", "the stages are 0 to 1")
    fails(lambda: make(recompute=[0.5]), ValueError, "recompute has 0.5")
    fails(lambda: make(recompute="auto"), ValueError, "leave out cuts")
    fails(lambda: make(cuts=None, kind="auto", recompute=[0]), ValueError, "does not know yet")
    model = nn.Sequential(DoublesInPlace(12, 12), nn.Linear(12, 12))
    fails(lambda: pipelined(world, model, plain_batch, squares, cuts=["1"], recompute=True).step(*plain_batch(0)), RuntimeError,
          "stage 0 changes its inputs in place")


def any_number_of_samples_is_divided(world):
    """As equally as possible; some microbatches may be without samples. In the next step the batch has another size."""
    for kind in ("1f1b", "v-half", "gpipe"):
        for name in ("gpt", "skips"):
            pair = Pair(world, name, kind, 4)
            for number, rows in enumerate((16, 7, 3, 1, 33)):
                pair.step(number, rows)


def microbatches_may_have_any_shape(world):
    pair = Pair(world, "gpt", "zb-h1", 3)
    lengths = [(2, 5), (1, 9), (4, 2)]
    for number in range(2):
        words = [torch.randint(40, (rows, length + 1)) for rows, length in lengths]
        total = sum(rows for rows, _ in lengths)
        loss = sum(words_loss(pair.whole(each[:, :-1]), each[:, 1:]) * len(each) / total for each in words)
        loss.backward()
        mine = pair.pipeline.step([each[:, :-1] for each in words], [each[:, 1:] for each in words])
        torch.testing.assert_close(mine, loss.detach())
        wanted = dict(pair.whole.named_parameters(remove_duplicate=False))
        for each, parameter in pair.pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[each].grad)


def an_evaluation_returns_the_result(world):
    """In training and evaluation mode, for any number of samples."""
    for name in MODELS:
        pair = Pair(world, name, "1f1b")
        for mode in (True, False):
            pair.pipeline.train(mode)
            pair.whole.train(mode)
            for rows in (16, 5, 1):
                inputs, _ = pair.batch(0, rows)
                mine = pair.pipeline.forward(inputs)
                with torch.no_grad():
                    wanted = pair.whole(*inputs) if isinstance(inputs, tuple) else pair.whole(inputs)
                expect((mine is not None) == (world.rank == world.size - 1))
                if mine is not None and name != "skips":  # whose result depends on the number of samples
                    torch.testing.assert_close(mine, wanted)
        pair.pipeline.train()
        pair.step(1)


def modes_differ(world):
    """A forward pass that goes other ways in evaluation."""

    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            first = self.one(x)
            return self.three(torch.tanh(first + self.two(first)) if self.training else first)

    model = seeded(Moody)
    pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares, cuts=["two", "three"][:world.size - 1])
    inputs, targets = plain_batch(0)
    for mode in (True, False, True):
        pipeline.train(mode)
        model.train(mode)
        torch.testing.assert_close(pipeline.step(inputs, targets), squares(model(inputs), targets).detach())
        mine = pipeline(inputs)
        if mine is not None:
            torch.testing.assert_close(mine, model(inputs).detach())


def gradients_add_up(world):
    """Those of several steps before the optimizer's, also of tied parameters; and with clipping and a scheduler of rates."""
    pair = Pair(world, "gpt", "1f1b")
    rates = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (pair.own, pair.other)]
    for number in range(3):
        for each in range(3):
            pair.gradients(10 * number + each)
        norm = torch.nn.utils.clip_grad_norm_(pair.whole.parameters(), 0.5)
        torch.testing.assert_close(pair.pipeline.clip_grad_norm_(0.5), norm)
        pair.own.step(), pair.other.step()
        [rate.step() for rate in rates]
        pair.own.zero_grad(set_to_none=False), pair.other.zero_grad(set_to_none=False)


def a_norm_may_be_of_any_kind(world):
    pair = Pair(world, "gpt", "1f1b")
    pair.gradients(0)
    for kind in (1.0, 3.0, float("inf")):
        norm = torch.nn.utils.clip_grad_norm_(pair.whole.parameters(), 1e9, kind)
        torch.testing.assert_close(pair.pipeline.clip_grad_norm_(1e9, kind), norm)


def plain_torch_works_inside(world):
    """Checkpointed blocks, autocast, and dropout, which has no equal in one process."""
    for kind in ("1f1b", "zb-h1"):
        pair = Pair(world, "gpt", kind, make=lambda: Gpt(repeats=True))
        pair.step(0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = pair.pipeline.step(*gpt_batch(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            wanted = words_loss(pair.whole(gpt_batch(1)[0]), gpt_batch(1)[1])
        torch.testing.assert_close(loss, wanted.detach(), rtol=0.01, atol=0.01)
    layers = [layer for _ in range(8) for layer in (nn.Linear(12, 12), nn.Dropout(0.5))]
    pipeline = pipelined(world, nn.Sequential(*layers), plain_batch, squares, "zb-h1")
    inputs, targets = plain_batch(0)
    losses = {round(pipeline.step(inputs, targets).item(), 6) for _ in range(4)}
    expect(len(losses) > 1, losses)


def cuts_may_name_modules(world):
    """A module names its first unit."""
    for cut in ("layer2", "layer2.0"):
        pair = Pair(world, "residual", cuts=[cut])
        names = list(pair.pipeline.state_dict())
        expect(names and all(name.startswith(("layer2.", "head.")) == (world.rank == 1) for name in names), names)
        pair.step(0)
    model = seeded(Residual)
    fails(lambda: pipelined(world, model, image_batch, words_loss, cuts=["layer2.1.norm"]), ValueError, "'layer2.1.norm'",
          "inside the unit layer2.1")
    fails(lambda: pipelined(world, model, image_batch, words_loss, cuts=["layer"]), ValueError, "'layer', which is not a unit")


def a_rank_may_have_no_parameters(world):
    """Its optimizer is made, steps, and is saved and loaded like those of other ranks."""
    whole = seeded(lambda: nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Softsign()))
    pipeline = pipelined(world, copy.deepcopy(whole), plain_batch, squares, cuts=["1"])
    mine, other = (torch.optim.AdamW(each, lr=0.1) for each in (pipeline.parameter_groups(), whole.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(mine, 0.5)
    for step in range(2):
        inputs, targets = plain_batch(step)
        mine.zero_grad()
        other.zero_grad()
        squares(whole(inputs), targets).backward()
        pipeline.step(inputs, targets)
        pipeline.clip_grad_norm_(1e9)
        mine.step()
        other.step()
    scheduler.step()
    expect((list(pipeline.named_parameters()) == [] and pipeline.state_dict() == {}) == (world.rank == 1))
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter, dict(whole.named_parameters())[name])
    mine.load_state_dict(mine.state_dict())


def frozen_parts_stay(world):
    def half():
        model = plain()
        for layer in list(model)[:8]:
            layer.requires_grad_(False)
        return model

    def tied():
        model = Gpt()
        model.words.requires_grad_(False)
        return model

    for make, batch, loss_of, kind in ((half, plain_batch, squares, "1f1b"), (half, plain_batch, squares, "zb-h1"),
                                       (half, plain_batch, squares, "v-zb"), (tied, gpt_batch, words_loss, "zb-h1")):
        model = seeded(make)
        pipeline = pipelined(world, copy.deepcopy(model), batch, loss_of, kind)
        inputs, targets = batch(0)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        torch.testing.assert_close(pipeline.step(inputs, targets), loss.detach())
        wanted = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in pipeline.named_parameters():
            expect((parameter.grad is None) == (wanted[name].grad is None), name)
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, wanted[name].grad)


def a_rank_keeps_its_stages(world):
    """The names of all ranks are those of the model. What a rank does not keep moves to the device meta."""
    model = seeded(Gpt)
    whole = copy.deepcopy(model).state_dict()
    first = {name: weakref.ref(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    pipeline = pipelined(world, model, gpt_batch, words_loss)
    own = pipeline.state_dict()
    gc.collect()
    for name, parameter in first.items():
        expect((parameter() is not None) == any(each is parameter() for each in pipeline.parameters()), name)
    names = [None] * world.size
    dist.all_gather_object(names, sorted(own))
    expect(set().union(*names) == set(whole), names)
    for name, value in own.items():
        torch.testing.assert_close(value, whole[name])
    kept = {id(each) for each in pipeline.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        expect(parameter.is_meta == (id(parameter) not in kept), name)
    expect(world.size == 1 or any(parameter.is_meta for parameter in model.parameters()))


def meta_models_get_values(world):
    """By reset_parameters(), or by init; tied parameters are equal on all ranks."""
    with torch.device("meta"):
        model = Gpt()

    def init(owner):
        for parameter in owner._parameters.values():
            if parameter is not None:
                parameter.fill_(0.5) if parameter.dim() < 2 else nn.init.normal_(parameter, std=0.1)
        for buffer in owner._buffers.values():
            buffer.fill_(0.9)

    torch.manual_seed(world.rank)
    pipeline = pipelined(world, model, gpt_batch, words_loss, "zb-h1", init=init)
    expect(not any(each.is_meta for each in (*pipeline.parameters(), *pipeline.module.buffers())))
    kept = {id(each) for each in pipeline.parameters()}
    expect(all(each.is_meta for each in model.parameters() if id(each) not in kept))
    words = [dict(pipeline.named_parameters()).get("words.weight" if world.rank == 0 else "head.weight")]
    gathered = [None] * world.size
    dist.all_gather_object(gathered, words[0].detach() if words[0] is not None else None)
    torch.testing.assert_close(gathered[0], gathered[-1])
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        losses.append(pipeline.step(*gpt_batch(0)).item())
        optimizer.step()
    expect(losses[-1] < losses[0] - 0.2, losses)
    with torch.device("meta"):
        other = plain()
    pipelined(world, other, plain_batch, squares).step(*plain_batch(0))
    with torch.device("meta"):
        other = Gpt()
    if world.size == 1:
        fails(lambda: pipelined(world, other, gpt_batch, words_loss), ValueError, "Gpt", "reset_parameters", "init=")


def only_first_and_last_need_the_batch(world):
    pair = Pair(world, "gpt", "1f1b")
    inputs, targets = gpt_batch(0)
    wanted = words_loss(pair.whole(inputs), targets).detach()
    mine = pair.pipeline.step(inputs if world.rank == 0 else None, targets if world.rank == world.size - 1 else None)
    torch.testing.assert_close(mine, wanted)


# ---- Parts -----------------------------------------------------------------------------------------------------------------


def backward_passes_have_two_halves(_):
    """Together they have all gradients: of parameters that several operations share, without inputs, and of leaves as roots."""
    from shoal.torch import _backward

    class Shares(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.gain = nn.Linear(5, 5), nn.Linear(5, 5), nn.Parameter(torch.randn(5))

        def forward(self, x, y):
            shared = self.a(torch.tanh(self.b(self.a(x) * self.gain))) + y
            return shared, *(self.b(y) * self.gain.exp()).split(2, 1), self.gain.sum(), x

    for uses_inputs in (True, False):
        whole = seeded(Shares)
        halved = copy.deepcopy(whole)
        given = [[torch.randn(3, 5, generator=torch.Generator().manual_seed(number)).requires_grad_(uses_inputs) for number in range(3)]
                 for _ in range(2)]
        roots = [[root for root in module(*each[:2]) if root.requires_grad] for module, each in zip((whole, halved), given)]
        gradients = [torch.randn_like(root) for root in roots[0]]
        torch.autograd.backward(roots[0], gradients)
        found, rest = _backward.input_gradients(roots[1], gradients, given[1] if uses_inputs else [])
        expect(all(parameter.grad is None for parameter in halved.parameters()))
        rest()
        for mine, theirs in zip(halved.parameters(), whole.parameters()):
            torch.testing.assert_close(mine.grad, theirs.grad)
        for gradient, tensor in zip(found, given[0]):
            expect((gradient is None) == (tensor.grad is None))
            if gradient is not None:
                torch.testing.assert_close(gradient, tensor.grad)


def values_are_the_same_behind_a_message(_):
    from shoal.torch import _parcels
    for value in ([], [None, True, 3, 2.5, "x", torch.Size([2, 0]), (1, [2, {"a": torch.arange(3)}])], [torch.float16, torch.device("cpu")],
                  [torch.empty(0, 3), torch.tensor(7), torch.ones(3, 2).t(), torch.tensor([True]), torch.ones(2, dtype=torch.complex64).conj()],
                  [torch.full((number % 3, 2), number, dtype=torch.int16) for number in range(200)], [float("inf")]):
        message = _parcels.Message(value)
        memory = torch.empty(max(1, message.bytes), dtype=torch.uint8)
        message.write(memory)
        expect(len(message.note) <= 1024, len(message.note))
        received = _parcels.Received(message.note, memory.data_ptr(), message.bytes).value
        expect(type(received) is list and len(received) == len(value), received)
        for mine, theirs in zip(torch.utils._pytree.tree_leaves(received), torch.utils._pytree.tree_leaves(value)):
            torch.testing.assert_close(mine, theirs) if isinstance(theirs, torch.Tensor) else expect(mine == theirs, mine, theirs)
    for value in ([{1: 2}], [object()], [torch.ones(2, 2).to_sparse()]):
        fails(lambda value=value: _parcels.Message(value), TypeError, "cannot be handed from one stage to the next")


class Shift(nn.Module):
    """The gradient of its parameter is a view of the gradient of its result."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.randn(12))

    def forward(self, x):
        return x + self.shift.view(1, 12)


def gradients_are_not_in_messages(world):
    def make():
        return nn.Sequential(*(layer for _ in range(world.size) for layer in (nn.Linear(12, 12), Shift())))

    for kind in ("1f1b", "zb-h1"):
        model = seeded(make)
        pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares, kind, cuts=[str(2 * stage) for stage in range(1, world.size)])
        for number in range(3):
            inputs, targets = plain_batch(number, 4)
            squares(model(inputs), targets).backward()
            pipeline.step(inputs, targets)
        wanted = dict(model.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad)


class Twice(nn.Module):
    """A parameter of two units, whose gradient in the first one is a view of the gradient of its result."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.second = Shift(), nn.Linear(12, 12), Shift()
        self.second.shift = self.first.shift

    def forward(self, x):
        return self.second(self.middle(self.first(x)))


def sums_are_not_in_messages(world):
    """Gradients of former steps are put aside, so those of a tie begin in each step."""
    model = seeded(Twice)
    for kind in ("1f1b", "zb-h1"):
        whole = copy.deepcopy(model)
        pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares, kind, cuts=["middle"])
        for number in range(3):
            inputs, targets = plain_batch(number, 4)
            squares(whole(inputs), targets).backward()
            pipeline.step(inputs, targets)
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def averages_are_not_in_messages(world):
    """Like that, of replicas."""
    pipeline_group, replica_group, replica = grid(world)
    for kind in ("1f1b", "zb-h1"):
        model = seeded(lambda: nn.Sequential(nn.Linear(12, 12), Shift(), nn.Linear(12, 12), Shift()))
        pipeline = pipelined(Row(), copy.deepcopy(model), plain_batch, squares, kind, cuts=["2"], process_group=pipeline_group,
                             replicas=replica_group)
        for number in range(3):
            for each in range(2):
                inputs, targets = plain_batch(2 * number + each, 4)
                (squares(model(inputs), targets) / 2).backward()
                if each == replica:
                    pipeline.step(inputs, targets)
        wanted = dict(model.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")


def times_name_the_actions(world):
    pair = Pair(world, "gpt", "zb-h1")
    pair.step(0)
    times, lines = pair.pipeline.times(), pair.pipeline.schedule.text().splitlines()
    expect([name for name, *_ in times["actions"]] == lines[world.rank].split(","), times["actions"], lines)
    expect(all(0 <= begin <= end <= times["step_us"] and waited >= 0 for _, waited, begin, end in times["actions"]), times)
    expect(any("T0" in line for line in lines) == (world.size > 1), lines)  # the head's weight is that of the words


def a_pipeline_frees_what_it_has(world):
    pair = Pair(world, "skips", "zb-h1")
    pair.step(0)
    pair.pipeline.forward(skips_batch(0)[0])
    expect(not pair.pipeline._executor._held)
    gone = [weakref.ref(each) for each in (pair.pipeline, pair.pipeline._executor, *pair.pipeline.parameters())]
    dist.barrier()
    del pair
    gc.collect()
    expect(all(each() is None for each in gone), [type(each()) for each in gone])


def a_pipeline_is_freed_at_once(world):
    """Also after a step that fails, as soon as the program has left the exception: a collection of cycles may come much later."""
    inputs, targets = plain_batch(0)
    for columns in (12, 5):
        pipeline = pipelined(world, seeded(plain), plain_batch, squares)
        gone = [weakref.ref(each) for each in (pipeline, pipeline._executor, *pipeline.parameters())]
        gc.collect()
        gc.disable()
        try:
            if columns == 12:
                pipeline.step(inputs, targets)
            else:
                fails(lambda: pipeline.step(inputs[:, :5], targets), RuntimeError, "stage 0 failed")
            dist.barrier()
            del pipeline
            expect(all(each() is None for each in gone), columns, [type(each()) for each in gone])
        finally:
            gc.enable()


# ---- Replicas --------------------------------------------------------------------------------------------------------------


def grid(world):
    """Returns the group of this rank's pipeline, that of its stage's replicas, and the number of its pipeline: two of each."""
    rows, columns = [dist.new_group(each) for each in ([0, 1], [2, 3])], [dist.new_group(each) for each in ([0, 2], [1, 3])]
    return rows[world.rank // 2], columns[world.rank % 2], world.rank // 2


class Row:
    """One of two pipelines."""
    size = 2


def replicas_average(world):
    """Gradients are those of one process with the batches of both pipelines, also added up over steps; values begin equal."""
    for name, kind in (("gpt", "1f1b"), ("gpt", "v-half"), ("residual", "zb-h1")):
        pipeline_group, replica_group, replica = grid(world)
        maker, batch, loss = MODELS[name]
        whole, own = seeded(maker), seeded(maker, 1 + replica)
        pipeline = pipelined(Row(), own, batch, loss, kind, process_group=pipeline_group, replicas=replica_group)
        for number in range(3):
            mine = None
            for each in range(2):
                inputs, targets = batch(2 * number + each)
                (loss(whole(inputs), targets) / 2).backward()
                mine = pipeline.step(inputs, targets) if each == replica else mine
            wanted = dict(whole.named_parameters(remove_duplicate=False))
            for each, parameter in pipeline.named_parameters():
                torch.testing.assert_close(parameter.grad, wanted[each].grad, msg=lambda text, each=each: f"{each}: {text}")


class Scaled:
    """A pipeline and one process, each with a scaler. In a step that is spoiled, the gradient of one parameter is infinite."""

    def __init__(self, pipeline, whole, spoiled):
        self.pipeline, self.whole, self.is_spoiled, self.skips = pipeline, whole, False, 0
        self.scalers = [pipeline._scaler, torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)]
        self.optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (pipeline, whole)]
        for each in (pipeline, whole):
            for name, parameter in each.named_parameters():
                if name == spoiled:
                    parameter.register_hook(lambda gradient: gradient * float("inf") if self.is_spoiled else gradient)

    def step(self, batches, mine, loss):
        """batches: one for each pipeline. mine: the number of this one."""
        for each in self.optimizers:
            each.zero_grad()
        whole = [loss(self.whole(inputs), targets) for inputs, targets in batches]
        self.scalers[1].scale(sum(whole) / len(whole)).backward()
        torch.testing.assert_close(self.pipeline.step(*batches[mine]), whole[mine].detach())
        norms = []
        for scaler, optimizer in zip(self.scalers, self.optimizers):
            scaler.unscale_(optimizer)
            norms.append(self.pipeline.clip_grad_norm_(0.5) if not norms else nn.utils.clip_grad_norm_(self.whole.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
        if not self.is_spoiled:
            torch.testing.assert_close(*norms)
        expect(self.scalers[0].get_scale() == self.scalers[1].get_scale(), [each.get_scale() for each in self.scalers])
        wanted = dict(self.whole.named_parameters(remove_duplicate=False))
        for name, parameter in self.pipeline.named_parameters():
            torch.testing.assert_close(parameter.detach(), wanted[name].detach(), msg=lambda text: f"{name}: {text}")

    def steps(self, batches_of, mine, loss):
        for number in range(6):
            self.is_spoiled = number in (1, 4)
            before = self.scalers[0].get_scale()
            self.step(batches_of(number), mine, loss)
            self.skips += self.scalers[0].get_scale() < before
        expect(self.skips == 2, self.skips)


def grad_scalers_skip_together(world):
    """A gradient that is infinite on one rank skips the step on all, as in one process."""
    lists = [None, *(replica_lists(3)[:2] if world.size == 3 else [])]
    for replicate in lists:
        for kind, spoiled in (("1f1b", "0.weight"), ("zb-h1", "14.bias"), ("1f1b", "14.weight")):
            whole, scaler = seeded(plain), torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
            pipeline = pipelined(world, copy.deepcopy(whole), plain_batch, squares, kind, grad_scaler=scaler, replicate=replicate)
            Scaled(pipeline, whole, spoiled).steps(lambda number: [plain_batch(number, 13)], 0, squares)


def grad_scalers_of_replicas_skip_together(world):
    pipeline_group, replica_group, replica = grid(world)
    whole, scaler = seeded(plain), torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=2)
    pipeline = pipelined(Row(), copy.deepcopy(whole), plain_batch, squares, process_group=pipeline_group, replicas=replica_group,
                         grad_scaler=scaler)
    Scaled(pipeline, whole, "14.weight").steps(lambda number: [plain_batch(2 * number), plain_batch(2 * number + 1)], replica, squares)


def wrong_grad_scalers_are_refused(world):
    fails(lambda: pipelined(world, plain(), plain_batch, squares, grad_scaler=2.0), TypeError, "must be a torch.amp.GradScaler, not float")
    model = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
    scaler = torch.amp.GradScaler("cpu")
    fails(lambda: pipelined(world, model, plain_batch, squares, cuts=["1"], grad_scaler=scaler), ValueError, "rank 1 has none")
    switched_off = torch.amp.GradScaler("cpu", enabled=False)
    pipelined(world, nn.Sequential(nn.Linear(12, 12), nn.Tanh()), plain_batch, squares, cuts=["1"], grad_scaler=switched_off).step(*plain_batch(0))


def replicas_shard_optimizer_states(world):
    """torch's ZeroRedundancyOptimizer over the ranks that have the same stages."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    pipeline_group, replica_group, replica = grid(world)
    whole = seeded(Gpt)
    pipeline = pipelined(Row(), copy.deepcopy(whole), gpt_batch, words_loss, process_group=pipeline_group, replicas=replica_group)
    own = ZeroRedundancyOptimizer([*pipeline.parameters()], torch.optim.AdamW, process_group=replica_group, lr=0.01)
    other = torch.optim.AdamW(whole.parameters(), lr=0.01)
    for number in range(3):
        own.zero_grad()
        other.zero_grad()
        for each in range(2):
            inputs, targets = gpt_batch(2 * number + each)
            (words_loss(whole(inputs), targets) / 2).backward()
        pipeline.step(*gpt_batch(2 * number + replica))
        torch.testing.assert_close(pipeline.clip_grad_norm_(0.5), nn.utils.clip_grad_norm_(whole.parameters(), 0.5))
        own.step()
        other.step()
        wanted = dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.detach(), wanted[name].detach(), msg=lambda text: f"{name}: {text}")
    states = sum(len(state) > 0 for state in own.optim.state.values())
    expect(0 < states < len([*pipeline.parameters()]), states)


def wrappers_and_pipelines_exclude_each_other(world):
    import shoal.torch

    def sharded(model):
        return shoal.torch.ShardedDataParallel(model, torch.optim.AdamW(model.parameters()))

    pipeline = pipelined(world, plain(), plain_batch, squares)
    for wrapper, name in ((shoal.torch.DistributedDataParallel, "DistributedDataParallel"), (sharded, "ShardedDataParallel")):
        fails(lambda: wrapper(pipeline.module), NotImplementedError, f"{name} of the stages of a pipeline", "Pipeline(replicas=)")
        wrapped = wrapper(plain())
        fails(lambda: shoal.torch.Pipeline(wrapped, plain_batch(0)[0], loss=squares), NotImplementedError, f"the model is wrapped in {name}")
        inner = nn.Sequential(nn.Linear(12, 12), wrapped)
        fails(lambda: shoal.torch.Pipeline(inner, plain_batch(0)[0], loss=squares), NotImplementedError, f"1 is wrapped in {name}")
    pipeline.step(*plain_batch(0))


def a_failure_reaches_the_other_pipelines(world):
    import shoal.torch._communicator as communicator
    pipeline_group, replica_group, replica = grid(world)
    units = [nn.Linear(12, 12) for _ in range(4)]
    units[2] = planted = Raises("backward")
    pipeline = pipelined(Row(), nn.Sequential(*units), plain_batch, squares, process_group=pipeline_group, replicas=replica_group)
    planted.number, planted.counts = 1 if replica == 0 else None, {}
    fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, "stage 1", "microbatch 1", "planted in the backward pass")


# ---- Stages that the library chooses ---------------------------------------------------------------------------------------


# ---- Stages on several ranks -----------------------------------------------------------------------------------------------


def replica_lists(size):
    return {1: [[1]], 2: [[2]], 3: [[1, 2], [2, 1], [3]], 4: [[1, 3], [3, 1], [1, 2, 1], [2, 2]]}[size]


def replicated_stages_equal_one_process(world):
    for name in ("mlp", "skips") if world.size == 4 else MODELS:
        for replicate in replica_lists(world.size):
            for kind in ("v-half",) if name == "mlp" else ("1f1b",) if name == "gpt" else ("zb-h1",):
                pair = Pair(world, name, kind, 6, replicate=replicate)
                for number in range(3):
                    pair.step(number, rows=(16, 13, 3)[number])  # at last a microbatch has fewer samples than replicas, or none


def replicated_stages_sum_and_evaluate(world):
    """Norms, gradients of several steps, evaluations, recomputation, and a batch given as microbatches."""
    for replicate in replica_lists(world.size):
        pair = Pair(world, "gpt", "1f1b", 4, replicate=replicate, recompute=True)
        pair.gradients(0)
        pair.gradients(1)
        norm = pair.pipeline.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(pair.whole.parameters(), 0.1))
        wanted = dict(pair.whole.named_parameters(remove_duplicate=False))
        for name, parameter in pair.pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")
        for rows in (16, 5, 1):
            inputs, _ = pair.batch(0, rows)
            mine = pair.pipeline.forward(inputs)
            expect((mine is not None) == (world.rank >= world.size - replicate[-1]))
            if mine is not None:
                with torch.no_grad():
                    torch.testing.assert_close(mine, pair.whole(inputs))
        inputs, targets = pair.batch(2)
        parts = list(zip(inputs.split((1, 2, 3, 10)), targets.split((1, 2, 3, 10))))
        torch.testing.assert_close(pair.pipeline.step([one for one, _ in parts], [other for _, other in parts]), pair.loss(pair.whole(inputs), targets).detach())


def steps_return_outputs(world):
    """The results of all microbatches in their order, without a graph, on the ranks on which forward() returns them."""
    for name, kind, recompute in (("mlp", "interleaved", False), ("gpt", "1f1b", True), ("residual", "zb-h1", [0]), ("gpt", "v-half", False)):
        pair = Pair(world, name, kind, microbatches_of(world), recompute=recompute)
        for number, rows in enumerate((16, 5, 1)):
            compare_outputs(pair, number, rows)
            pair.step(number, rows)


def replicated_steps_return_outputs(world):
    for replicate in replica_lists(world.size):
        pair = Pair(world, "gpt", "1f1b", 4, replicate=replicate, recompute=True)
        for number, rows in enumerate((16, 5, 1)):
            expect((compare_outputs(pair, number, rows) is not None) == (world.rank >= world.size - replicate[-1]))


def compare_outputs(pair, number, rows):
    """Compares a step with one process. Returns this rank's outputs."""
    inputs, targets = pair.batch(number, rows)
    pair.own.zero_grad()
    pair.other.zero_grad()
    result = pair.whole(inputs)
    loss = pair.loss(result, targets)
    loss.backward()
    mine, outputs = pair.pipeline.step(inputs, targets, outputs=True)
    torch.testing.assert_close(mine, loss.detach())
    expect((outputs is None) == (pair.pipeline.forward(inputs) is None))
    if outputs is not None:
        expect(not outputs.requires_grad and outputs.grad_fn is None)
        torch.testing.assert_close(outputs, result.detach())
    wanted = dict(pair.whole.named_parameters(remove_duplicate=False))
    for name, parameter in pair.pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text: f"{name}: {text}")
    return outputs


class Summary(nn.Module):
    """Returns a value of each sample, means over samples, and what is the same for all. A mean also goes from stage to stage."""

    class Means(nn.Module):
        def forward(self, x, stem):
            return {"result": x, "mean": x.mean(), "stem": stem, "scale": torch.tensor(3), "word": "same"}

    class Stem(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.square().mean().detach()

    def __init__(self):
        super().__init__()
        self.stem, self.body, self.means = self.Stem(12, 12), nn.Linear(12, 12), self.Means()

    def forward(self, x):
        x, mean = self.stem(x)
        return self.means(self.body(x), mean)


def means_of_replicas_are_joined(world):
    """By the samples of each replica, whose shares are uneven."""
    import shoal.torch
    whole = seeded(Summary)
    for replicate in ([1, 2], [2, 1]):
        pipeline = shoal.torch.Pipeline(copy.deepcopy(whole), plain_batch(0)[0], cuts=["body"], replicate=replicate, units={nn.Linear, Summary.Means},
                                        loss=lambda result, target: squares(result["result"], target))
        for rows in (7, 3, 2, 1):
            inputs, targets = plain_batch(rows, rows)
            with torch.no_grad():
                wanted = whole(inputs)
            wanted = {name: value if value.dim() else value.reshape(1) for name, value in wanted.items() if name != "word"}
            for mine in (pipeline.forward(inputs), pipeline.step(inputs, targets, outputs=True)[1]):
                expect((mine is not None) == (world.rank >= replicate[0]))
                if mine is not None:
                    expect(mine.pop("word") == "same")
                    torch.testing.assert_close(mine, wanted)


def values_of_replicas_that_differ_are_refused(world):
    import shoal.torch
    import shoal.torch._communicator as communicator

    class Places(nn.Linear):
        def forward(self, x):
            return super().forward(x), x.sum(1).argmax()

    class First(nn.Module):
        def forward(self, both):
            return both[0]

    def make(model, cut):
        return shoal.torch.Pipeline(model, plain_batch(0)[0], cuts=[cut], replicate=[2, 1] if cut == "2" else [1, 2], loss=squares)
    inputs = torch.zeros(6, 12)
    inputs[4] = inputs[1] = 1.0  # the second of each replica, and then the third
    pipeline = make(nn.Sequential(nn.Identity(), Places(12, 12), First()), "2")
    pipeline.step(inputs, inputs)
    inputs[5] = 2.0
    fails(lambda: pipeline.step(inputs, inputs), communicator.BackendError, "differs between the replicas", "torch.int64")
    pipeline = make(nn.Sequential(nn.Identity(), Places(12, 12)), "1")
    if world.rank:
        fails(lambda: pipeline.forward(inputs), RuntimeError, "differs between the replicas", "such as 1 and 2", "leave out replicate=")
    else:
        try:
            expect(pipeline.forward(inputs) is None)
        except communicator.BackendError:
            pass  # the others have failed before this rank's end


class Apart(nn.Module):
    """A stage behind the first needs no value of another one."""

    class Table(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(1, width))

        def forward(self):
            return self.rows * 2

    class Head(nn.Linear):
        def forward(self, x, table):
            return super().forward(x + table)

    def __init__(self, width=12):
        super().__init__()
        self.stem, self.table, self.head = nn.Linear(width, width), self.Table(width), self.Head(width, width)

    def forward(self, x):
        return self.head(self.stem(x), self.table())


def stages_without_inputs_have_replicas(world):
    import shoal.torch
    whole = seeded(Apart)
    for replicate in ([1, 1, 1],) if world.size == 3 else ([1, 2, 1], [2, 1, 1], [1, 1, 2]):
        for kind in ("1f1b", "zb-h1"):
            pipeline = shoal.torch.Pipeline(copy.deepcopy(whole), plain_batch(0)[0], microbatches=4, schedule=kind, cuts=["table", "head"],
                                            replicate=replicate, loss=squares)
            for rows in (16, 7, 2):
                inputs, targets = plain_batch(rows, rows)
                whole.zero_grad()
                pipeline.module.zero_grad()
                result = whole(inputs)
                loss = squares(result, targets)
                loss.backward()
                mine, outputs = pipeline.step(inputs, targets, outputs=True)
                torch.testing.assert_close(mine, loss.detach())
                expect((outputs is not None) == (world.rank >= world.size - replicate[-1]))
                if outputs is not None:
                    torch.testing.assert_close(outputs, result.detach())
                wanted = dict(whole.named_parameters())
                for name, parameter in pipeline.named_parameters():
                    torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text: f"{name}: {text}")


class Averaged(nn.Module):
    """Values without samples go from stage to stage: a table, and a mean over the samples that is a part of the loss."""

    class Table(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.rows = nn.Parameter(torch.randn(1, width))

        def forward(self, x):
            return x + self.rows, self.rows * 2, x.square().mean(), {"shape": x.shape, "count": 2 * x.shape[0]}

    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, x, table, mean, sizes):
            expect(sizes["shape"] == x.shape and sizes["count"] == 2 * len(x), sizes)
            return self.linear(x) + table + mean

    def __init__(self, width=12):
        super().__init__()
        self.stem, self.table, self.body, self.head = nn.Linear(width, width), self.Table(width), nn.Linear(width, width), self.Head(width)

    def forward(self, x):
        x, table, mean, sizes = self.table(self.stem(x))
        return self.head(torch.tanh(self.body(x)), table, mean, sizes)


def values_without_samples_are_shared(world):
    """The loss is linear in the mean, so that it does not matter that each replica has a mean of its own."""
    import shoal.torch
    whole = seeded(Averaged)
    for replicate in ([1, 2], [2, 1]):
        pipeline = shoal.torch.Pipeline(copy.deepcopy(whole), plain_batch(0)[0], microbatches=1, cuts=["body"], replicate=replicate,
                                        loss=lambda result, target: (result * target).mean(), units={nn.Linear, Averaged.Table, Averaged.Head})
        torch.manual_seed(7)
        inputs, targets = torch.randn(14, 12), torch.ones(14, 12)
        whole.zero_grad()
        loss = (whole(inputs) * targets).mean()
        loss.backward()
        torch.testing.assert_close(pipeline.step(inputs, targets), loss.detach())
        wanted = dict(whole.named_parameters())
        for name, parameter in pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[name].grad, msg=lambda text, name=name: f"{name}: {text}")


class Repeated(nn.Module):
    def __init__(self, repeats):
        super().__init__()
        self.linear, self.repeats = nn.Linear(64, 64), repeats

    def forward(self, x):
        for _ in range(self.repeats):
            x = torch.tanh(self.linear(x))
        return x


def replicas_are_found(world):
    """A unit that takes nearly all of the time cannot be divided, so it gets several ranks."""
    import shoal.torch
    torch.manual_seed(3)
    whole = nn.Sequential(Repeated(5), Repeated(400), Repeated(5))
    pipeline = shoal.torch.Pipeline(copy.deepcopy(whole), torch.randn(48, 64), microbatches=4, loss=squares, replicate="auto")
    expect(pipeline.schedule.size == world.size and max(pipeline.schedule.replicas()) > 1, pipeline.schedule.text())
    expect("ranks 0 to" in pipeline.explain() or "to 2" in pipeline.explain(), pipeline.explain())
    inputs, targets = torch.randn(2, 192, 64).unbind()
    dist.broadcast(inputs, 0)
    dist.broadcast(targets, 0)
    loss = squares(whole(inputs), targets)
    loss.backward()
    torch.testing.assert_close(pipeline.step(inputs, targets), loss.detach())
    wanted = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-6)


def an_exception_names_its_replica(world):
    class Breaks(nn.Module):
        def forward(self, x):
            if world.rank == 2:
                raise ValueError("the cat sat on the keyboard")
            return x

    model = nn.Sequential(nn.Linear(12, 12), Breaks(), nn.Linear(12, 12))
    import shoal.torch
    is_whole, Breaks.forward = Breaks.forward, lambda self, x: x
    pipeline = shoal.torch.Pipeline(model, plain_batch(0)[0], microbatches=4, loss=squares, cuts=["1"], replicate=[1, 2])
    Breaks.forward = is_whole
    fails(lambda: pipeline.step(*plain_batch(0)), Exception, "rank 2: forward of microbatch 0 on stage 1, replica 1 failed: ValueError: the cat")


def wrong_replicas_are_refused(world):
    class Sorted(nn.Module):
        def forward(self, x):
            return x[:1 + len(x) // 2]

    def make(model=None, example=None, **options):
        import shoal.torch
        example = plain_batch(0)[0] if example is None else example
        shoal.torch.Pipeline(model or plain(), example, microbatches=2, loss=squares, **options)

    fails(lambda: make(cuts=["4"], replicate=[1, 1]), ValueError, "2 ranks in all ([1, 1]), but the process group has 3")
    fails(lambda: make(cuts=["4"], replicate=[3, 0]), ValueError, "a list of numbers from 1 on")
    fails(lambda: make(cuts=["4"], replicate="some"), ValueError, "replicate must be \"auto\"")
    fails(lambda: make(cuts=["4"], replicate="auto"), ValueError, "leave out cuts")
    fails(lambda: make(replicate="auto", schedule="0F0,0F1,0B0,0B1"), ValueError, "choose a schedule by its word")
    fails(lambda: make(replicate="auto", recompute=[0]), ValueError, "recompute has numbers of stages")
    fails(lambda: make(replicas=dist.group.WORLD, replicate=[1, 2], cuts=["4"]), ValueError, "leave out replicas=")
    fails(lambda: make(cuts=["4", "8"], replicate=[1, 2]), ValueError, "3 stages")
    fails(lambda: make(nn.Sequential(nn.Linear(12, 12), Sorted(), nn.Linear(12, 12)), cuts=["2"], replicate=[1, 2]), ValueError,
          "not in proportion to the number of samples")
    fails(lambda: make(Skips(), (torch.randn(4, 12), torch.randn(3, 12)), cuts=["body.2"], replicate=[1, 2]), (ValueError, RuntimeError))
    pair = Pair(world, "mlp", replicate=[2, 1])
    text = pair.pipeline.schedule.text()
    expect("x2" in text, text)
    fails(lambda: make(cuts=["8"], schedule=text), ValueError, "several replicas (x2)", "pass replicate=[2, 1]")
    fails(lambda: make(cuts=["8"], schedule=text, replicate=[1, 2]), ValueError, "has the replicas [2, 1]", "replicate is [1, 2]")
    Pair(world, "mlp", text, replicate=[2, 1], cuts=["8"]).step(0)
    fails(pair.pipeline.to_torch, NotImplementedError, "no stage on several ranks")
    pair.step(0)


def checkpoints_load_with_other_replicas(world):
    """Saved with replicas, and loaded with others, without any, and by one process."""
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    folder, by_name = [tempfile.mkdtemp(prefix="shoal-pipeline-") if world.rank == 0 else None], StateDictOptions(flatten_optimizer_state_dict=True)
    dist.broadcast_object_list(folder)
    pair = Pair(world, "gpt", replicate=[2, 1])
    pair.step(0)
    weights, states = get_state_dict(pair.pipeline.module, pair.own, options=by_name)
    checkpoints.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    for options in ({"replicate": [1, 2]}, {"replicate": [3]}, {}):
        other = Pair(world, "gpt", make=lambda: seeded(Gpt, 9), **options)
        weights, states = get_state_dict(other.pipeline.module, other.own, options=by_name)
        state = {"model": weights, "optimizer": states}
        checkpoints.load(state, checkpoint_id=folder[0])
        set_state_dict(other.pipeline.module, other.own, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=by_name)
        other.whole, other.other = copy.deepcopy(pair.whole), None
        other.other = torch.optim.SGD(other.whole.parameters(), lr=0.05, momentum=0.9)
        other.other.load_state_dict(pair.other.state_dict())
        other.step(1)
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder[0])


def stages_are_found(world):
    """Any model and schedule; the choice is the same on all ranks, and explained."""
    for name, kind in (("mlp", "1f1b"), ("gpt", "auto"), ("skips", "zb-h1"), ("residual", "v-half"), ("gpt", "interleaved"), ("mlp", "v-zb")):
        pair = Pair(world, name, kind, 2 * world.size, cuts=None)
        texts = [None] * world.size
        dist.all_gather_object(texts, pair.pipeline.explain())
        expect(len(set(texts)) == 1, *texts)
        words = KINDS if kind == "auto" else [kind]
        expect(pair.pipeline.schedule.stages == 1 or any(f"schedule: {word}, {2 * world.size} microb" in texts[0] for word in words), texts[0])
        expect("stage 0 on rank 0" in texts[0] and ("predicted step" in texts[0] or pair.pipeline.schedule.stages == 1), texts[0])
        for number in range(2):
            pair.step(number)


class Slow(nn.Linear):
    def forward(self, x):
        for _ in range(40):
            x = torch.tanh(super().forward(x))
        return x


def slow_units_get_stages_of_their_own(world):
    """Measured, and on the device meta counted."""
    def make():
        return nn.Sequential(*(nn.Linear(12, 12) for _ in range(6)), Slow(12, 12))

    for meta in (False, True):
        with torch.device("meta" if meta else "cpu"):
            model = make()
        pipeline = pipelined(world, model, plain_batch, squares, cuts=None, partition={"latency_us": 0})
        if world.rank == world.size - 1:
            expect(list(pipeline.state_dict()) == ["6.weight", "6.bias"], list(pipeline.state_dict()))
        pipeline.step(*plain_batch(0))


def memory_limits_are_kept(world):
    """The model has 16 layers of 16 KiB; a rank keeps four times its parameters, with Adam's states."""
    def make():
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(15)), Slow(64, 64, bias=False))

    def batch(step, rows=4):
        return torch.zeros(rows, 64), torch.zeros(rows, 64)

    pipeline = pipelined(world, make(), batch, squares, cuts=None, memory=16 * 64 * 1024 * 3 // 4)
    held = sum(parameter.numel() * 4 for parameter in pipeline.parameters())
    expect(held <= 12 * 64 * 64 * 4, held)
    fails(lambda: pipelined(world, make(), batch, squares, cuts=None, memory=100000), ValueError, "no partition was found that fits", "97.7 KiB")
    fails(lambda: pipelined(world, make(), batch, squares, cuts=None, partition={"slots": -1, "memory_weight": 7.0}), ValueError)


def measuring_changes_nothing(world):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.Dropout(0.3)) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model, batch = seeded(Normed), plain_batch(0)
    before, draw = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    pipeline = pipelined(world, model, lambda step: batch, squares, cuts=None)
    expect(torch.equal(torch.get_rng_state(), draw))
    for name, value in pipeline.state_dict().items():
        expect(torch.equal(value, before[name]), name)
    expect(all(parameter.grad is None for parameter in pipeline.parameters()))


def models_that_cannot_be_divided_are_refused(world):
    import shoal.torch

    def make(model, **options):
        return shoal.torch.Pipeline(model, torch.zeros(4, 12), microbatches=4, loss=squares, **options)

    fails(lambda: make(nn.Sequential(nn.Linear(12, 12))), ValueError, "1 units (0)", "needs 2 stages")

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x) if x.max() < 1e9 else x
            return x

    fails(lambda: make(nn.Sequential(Inner())), ValueError, "1 units (0)", "0 is one unit, because it cannot be recorded", "test_pipeline.py:",
          "decides by the values of a tensor")
    fails(lambda: make(plain(), stages=3), ValueError, "stages is 3", "has 2")

    class Reads(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum() > -1e9 else x

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(12, 12), Reads(12, 12), nn.Linear(12, 12))
    fails(lambda: make(model), RuntimeError, "cannot be measured on rank 0", "pass cuts=, names among 0, 1, 2")


# ---- Checkpoints -----------------------------------------------------------------------------------------------------------


def checkpoints_load_with_other_stages(world):
    """torch.distributed.checkpoint: saved with as many stages as ranks, loaded with two on each, and by one process."""
    import torch.distributed.checkpoint as checkpoints
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
    folder, by_name = [tempfile.mkdtemp(prefix="shoal-pipeline-") if world.rank == 0 else None], StateDictOptions(flatten_optimizer_state_dict=True)
    dist.broadcast_object_list(folder)
    pair = Pair(world, "gpt")
    pair.step(0)
    weights, states = get_state_dict(pair.pipeline.module, pair.own, options=by_name)
    checkpoints.save({"model": weights, "optimizer": states}, checkpoint_id=folder[0])
    other = Pair(world, "gpt", "v-half", make=lambda: seeded(Gpt, 9))
    weights, states = get_state_dict(other.pipeline.module, other.own, options=by_name)
    state = {"model": weights, "optimizer": states}
    checkpoints.load(state, checkpoint_id=folder[0])
    set_state_dict(other.pipeline.module, other.own, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=by_name)
    other.whole, other.other = pair.whole, pair.other
    other.step(1)
    whole = {name: torch.empty_like(value) for name, value in pair.whole.state_dict().items()}
    checkpoints.load({"model": whole}, checkpoint_id=folder[0], no_dist=True)
    for name, value in pair.pipeline.state_dict().items():
        torch.testing.assert_close(whole[name], value)
    torch.testing.assert_close(whole["head.weight"], whole["words.weight"])
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder[0])


def a_state_of_the_whole_model_is_loaded(world):
    pair, model = Pair(world, "gpt"), seeded(Gpt, 5)
    pair.pipeline.load_state_dict(model.state_dict())
    for name, value in pair.pipeline.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name])
    fails(lambda: pair.pipeline.load_state_dict({}), RuntimeError, "Missing key")


# ---- torch's pipelines -----------------------------------------------------------------------------------------------------


def torchs_stage(number, module, stages):
    from torch.distributed.pipelining import PipelineStage
    return PipelineStage(module, number, stages, torch.device("cpu"))


def torch_runs_the_stages_and_the_schedule(world):
    """torch's runtime has the same losses and gradients, with its own messages over the group."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
    for name, kind in (("mlp", "1f1b"), ("residual", "zb-h1"), ("mlp", "interleaved"), ("residual", "v-zb"), ("mlp", "v-half")):
        pair = Pair(world, name, kind)
        modules, text = pair.pipeline.to_torch()
        stages = [torchs_stage(number, module, pair.pipeline.schedule.stages) for number, module in modules.items()]
        runtime = _PipelineScheduleRuntime(stages, pair.pipeline.microbatches, loss_fn=pair.loss)
        with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
            file.write(text)
            file.flush()
            runtime._load_csv(file.name, format="compute_only")
        inputs, targets = pair.batch(0)
        losses = []
        runtime.step(*([inputs] if 0 in modules else []),
                     **({"target": targets, "losses": losses} if pair.pipeline.schedule.stages - 1 in modules else {}))
        loss = pair.loss(pair.whole(inputs), targets)
        loss.backward()
        if losses:
            torch.testing.assert_close(torch.stack(losses).mean(), loss)
        wanted = dict(pair.whole.named_parameters())
        for each, parameter in pair.pipeline.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted[each].grad)


def skips_go_through_torchs_stages(world):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(8))

        def forward(self, x):
            first = y = self.layers[0](x)
            for layer in self.layers[1:]:
                y = torch.tanh(layer(y))
            return y * first + x

    model = seeded(Around)
    pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares)
    modules, _ = pipeline.to_torch()
    values, (inputs, targets) = None, plain_batch(0)
    for stage in range(world.size):
        got = [None if stage not in modules else modules[stage](*([inputs] if stage == 0 else values))]
        dist.broadcast_object_list(got, pipeline.schedule.rank_of(stage))
        values = got[0] if isinstance(got[0], tuple) else got
    torch.testing.assert_close(values[0], model(inputs))
    pipeline = pipelined(world, Skips(), skips_batch, squares, cuts=["body.1", "body.3"][:world.size - 1])
    fails(pipeline.to_torch, NotImplementedError, "not a tensor", "cut at another unit")


def torch_loads_every_schedule(world):
    """Its runtime reads what is printed, adds messages, and simulates it to its end."""
    from unittest import mock

    from shoal.torch._schedules import Schedule
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute
    from torch.distributed.pipelining.stage import PipelineStage
    for kind in KINDS:
        for count in (2, 3, 4):
            schedule = Schedule.make(kind, count, 4 * count)
            stage = mock.create_autospec(PipelineStage, instance=True)
            stage.group_rank, stage.group_size, stage.num_stages, stage.submod = 0, count, schedule.stages, None
            runtime = _PipelineScheduleRuntime([stage], schedule.microbatches)
            with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
                file.write(schedule.text())
                file.flush()
                runtime._load_csv(file.name, format="compute_only")
            order = {rank: [action for action in actions if not any(word in str(action) for word in ("SHARD", "REDUCE_GRAD"))]
                     for rank, actions in runtime.pipeline_order_with_comms.items()}
            _simulate_comms_compute(order, schedule.rank_of, schedule.stages)
            expect(Schedule.read(schedule.text()).text() == schedule.text(), kind, count)


def torchs_schedules_are_read(world):
    """And run. torch prints 1F1B for its plots only, and there the last rank has microbatches 1 to m."""
    from shoal.torch._schedules import Schedule
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
    for name in ("GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        for count, microbatches in ((2, 4), (3, 6), (4, 8)):
            for options in ({}, {"with_comms": True})[:1 if name in ("GPipe", "DualPipeV") else 2]:
                text = printed(get_schedule_ops(name, count, microbatches, **options))
                schedule = Schedule.read(text)
                expect((schedule.ranks, schedule.microbatches) == (count, microbatches), name)
    for name in ("Interleaved1F1B", "ZBVZeroBubble", "DualPipeV"):
        equals_one_process(world, "mlp", printed(get_schedule_ops(name, world.size, microbatches_of(world))))
    text = printed(get_schedule_ops("1F1B", 4, 8))
    if "3F0" not in text:
        fails(lambda: Schedule.read(text), ValueError, "rank 3", "3B0 comes before 3F0")
    else:
        expect(Schedule.read(text).ranks == 4)


def printed(rows):
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows) + "\n"


# ---- What a record must not lose ----------------------------------------------------------------------------------------


class Around(nn.Module):
    """Three units, and code around them."""

    def __init__(self, code):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(12, 12) for _ in range(3))
        self._code = code

    def forward(self, x):
        return self.three(self._code(self.two, self.one(x)))


def out_of_an_addition(two, x):
    y = torch.zeros(x.shape)
    torch.add(x.detach(), 1.0, out=y)
    return two(x * y)


def masked(two, x):
    mask = x > 0
    mask &= x > 0.5
    return two(x * mask)


def frozen(two, x):
    with torch.no_grad():
        return two(x)


def scaled_by_a_hook(two, x):
    y = two(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x):
        return scaled_by_a_hook(self.inner, x)


def around_equals_one_process(world):
    for code in (out_of_an_addition, masked):
        for cuts in (["two"], ["three"]):
            pair = Pair(world, "mlp", make=lambda code=code: Around(code), cuts=cuts[:world.size - 1])
            for number in range(2):
                pair.step(number)
    for kind in ("1f1b", "zb-h1"):
        pair = Pair(world, "mlp", kind, make=lambda: nn.Sequential(nn.Linear(12, 12), Hooked(), nn.Linear(12, 12)),
                    units=lambda module: isinstance(module, (nn.Linear, Hooked)), cuts=["1"][:world.size - 1])
        for number in range(2):
            pair.step(number)


def what_a_record_would_lose_is_refused(world):
    fails(lambda: Pair(world, "mlp", make=lambda: Around(frozen), cuts=["two"]), RuntimeError, "no_grad()", "module of its own")

    def hooked():
        model = plain()
        model.register_forward_hook(lambda module, given, result: result * 2)
        return model
    fails(lambda: Pair(world, "mlp", make=hooked), NotImplementedError, "forward hooks", "module around it")


def modes_and_samples_are_those_of_the_model(world):
    pair = Pair(world, "mlp", make=lambda: plain().eval())
    expect(not pair.pipeline.module.training)
    pair.pipeline.train()
    inputs, targets = pair.batch(0, 8)
    fails(lambda: pair.pipeline.step(inputs, targets[:4]), ValueError, "8 samples in its inputs", "4 in its targets")


def results_outlive_a_pipeline(world):
    """A metric of the loss keeps results that are views of what the last stage received."""
    kept = []

    def loss(result, target):
        kept.append((result, result.detach().clone()))
        return squares(result, target.flatten(1))
    pipeline = pipelined(world, nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Flatten()), plain_batch, loss, cuts=["2"])
    for number in range(3):
        pipeline.step(*plain_batch(number, 16))
    del pipeline
    gc.collect()
    expect(len(kept) == (12 if world.rank == 1 else 0) and all(torch.equal(*each) for each in kept))


# ---- Errors ----------------------------------------------------------------------------------------------------------------


class Raises(nn.Module):
    """Raises an exception in the microbatch with this number, in its forward or its backward pass."""

    class In(torch.autograd.Function):
        @staticmethod
        def forward(context, x, owner):
            context.owner = owner
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            context.owner.count("backward")
            return gradient, None

    def __init__(self, when, error=None):
        super().__init__()
        self.when, self.number, self.counts, self.error = when, None, {}, error
        self.linear = nn.Linear(12, 12)

    def count(self, when):
        self.counts[when] = self.counts.get(when, 0) + 1
        if when == self.when and self.counts[when] - 1 == self.number:
            raise self.error or FloatingPointError(f"planted in the {when} pass")

    def forward(self, x):
        self.count("forward")
        return self.In.apply(self.linear(x), self)


class Untold(Exception):
    def __str__(self):
        raise LookupError("no text")


def exceptions_have_any_text(world):
    """A name of a file that is no UTF-8, and an exception that has no text. Ranks also learn that a model cannot be measured."""
    import shoal.torch
    import shoal.torch._communicator as communicator
    for error, word in ((ValueError("\udcff.txt"), "ValueError: ?.txt"), (Untold(), "Untold: it has no text")):
        units = [nn.Linear(12, 12) for _ in range(2 * world.size)]
        units[0] = planted = Raises("forward", error)
        pipeline = pipelined(world, nn.Sequential(*units), plain_batch, squares)
        planted.number, planted.counts = 1, {}
        fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, "stage 0", "microbatch 1", "rank 0", word)
        units[0] = planted = Raises("backward", error)
        planted.number = 0
        fails(lambda: shoal.torch.Pipeline(nn.Sequential(*units), plain_batch(0)[0], loss=squares), RuntimeError, "measured on rank 0", word)


def an_exception_names_its_place_on_all_ranks(world):
    import shoal.torch._communicator as communicator
    for when in ("forward", "backward"):
        for place in range(world.size):
            for kind in ("1f1b", "zb-h1"):
                units = [nn.Linear(12, 12) for _ in range(2 * world.size)]
                units[2 * place] = planted = Raises(when)
                pipeline = pipelined(world, nn.Sequential(*units), plain_batch, squares, kind)
                planted.number, planted.counts = 2, {}
                for _ in range(2):  # it stays broken
                    error = fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, f"stage {place}", "microbatch 2",
                                  f"rank {place}", "FloatingPointError", f"planted in the {when} pass")
                    if _ == 0 and world.rank == place:
                        expect(isinstance(error.__cause__, FloatingPointError), error.__cause__)


class Ends(nn.Linear):
    """Ends its process in its third call in training."""
    calls = None

    def forward(self, x):
        if self.calls is not None:
            self.calls += 1
            if self.calls == 3:
                os._exit(7)
        return super().forward(x)


def a_rank_that_dies_is_named(world):
    import shoal.torch._communicator as communicator
    units = [nn.Linear(12, 12) for _ in range(6)]
    units[2] = Ends(12, 12)
    pipeline = pipelined(world, nn.Sequential(*units), plain_batch, squares)
    units[2].calls = 0
    fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, "rank 1", "exited with code 7")


def batches_that_do_not_fit_are_refused(world):
    import shoal.torch._communicator as communicator
    inputs, targets = plain_batch(0)
    cases = [((list(inputs.tensor_split(3)), targets), "inputs has 3 microbatches", "for 4"),
             ((inputs, list(targets.tensor_split(5))), "targets has 5 microbatches"),
             ((None, targets), "first stage needs the batch's inputs"),
             (((inputs, inputs), targets), "other arguments"),
             ((inputs, (targets, targets[:3])), "targets cannot be divided", "[3, 16]"),
             ((inputs, targets[:, :5]), "RuntimeError")]
    for batch, *words in cases:
        pipeline = pipelined(world, plain(), plain_batch, squares)
        fails(lambda: pipeline.step(*batch), communicator.BackendError, *words)
    for loss, word in ((lambda result, target: result, "[4, 12]"), (lambda result, target: 1.0, "float")):
        pipeline = pipelined(world, plain(), plain_batch, loss)
        fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, "loss must return a tensor of one element", word)
    pipeline = pipelined(world, plain(), plain_batch, None)
    fails(lambda: pipeline.step(*plain_batch(0)), RuntimeError, "has no loss")


def a_graph_that_changes_is_refused(world):
    import shoal.torch._communicator as communicator

    class Changing(nn.Module):
        def __init__(self, asks):
            super().__init__()
            self.layers, self.asks = nn.ModuleList(nn.Linear(12, 12) for _ in range(4)), asks

        def forward(self, x):
            if self.asks == "a size" and x.shape[0] > 2:
                x = self.layers[0](x)
            if self.asks == "a length":
                for _ in range(len(x) // 4):
                    x = self.layers[1](x)
            return self.layers[3](self.layers[2](x))

    for asks in ("a size", "a length"):
        pipeline = pipelined(world, Changing(asks), lambda step: plain_batch(step, 4), squares)
        pipeline.step(*plain_batch(0, 16))
        fails(lambda: pipeline.step(*plain_batch(0, 8)), communicator.BackendError, "stage 0", "changes from step to step",
              "test_pipeline.py:", "for the example and is", "module of its own")


def code_around_units_asks_about_types_and_shapes(world):
    """As models of transformers before version 5 do: a module that is made in the forward pass, len(x.shape), torch.finfo of a type."""
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            x = nn.LayerNorm(12, elementwise_affine=False)(self.one(x))
            if len(x.shape) == 2:
                x = x + torch.full((1, 12), torch.finfo(x.dtype).eps * torch.iinfo(torch.int8).max)
            return nn.Tanh()(self.two(x.view(x.shape[0], -1)))
    torch.manual_seed(1)
    whole = Asks()
    pipeline = pipelined(world, copy.deepcopy(whole), plain_batch, squares, cuts=["two"])
    expect(pipeline.units == ["one", "two"], pipeline.units)
    inputs, targets = plain_batch(0)
    loss = squares(whole(inputs), targets)
    loss.backward()
    torch.testing.assert_close(pipeline.step(inputs, targets), loss.detach())
    wanted = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("value", torch.as_tensor([2.0]))

        def forward(self, x):
            return x * self.value

    class Makes(Asks):
        def forward(self, x):
            return self.two(Holds()(self.one(x)))
    fails(lambda: pipelined(world, Makes(), plain_batch, squares, cuts=["two"]), RuntimeError, "Makes cannot be recorded",
          "makes a module with values of its own, Holds")


def models_that_cannot_be_recorded_are_refused(world):
    class Values(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            x = self.one(x)
            return self.two(x) if x.sum() > 0 else x

    fails(lambda: pipelined(world, Values(), plain_batch, squares, cuts=[]), RuntimeError, "Values cannot be recorded", "test_pipeline.py:",
          "decides by the values of a tensor", "module of its own")

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(12, 13), nn.Linear(12, 12)

        def forward(self, x):
            return self.two(self.one(x))

    fails(lambda: pipelined(world, Broken(), plain_batch, squares, cuts=[]), RuntimeError, "Broken cannot be recorded", "13")


def values_that_cannot_be_sent_are_refused(world):
    import shoal.torch._communicator as communicator

    class Thing:
        def __init__(self, x):
            self.x = x

    class Makes(nn.Linear):
        def forward(self, x):
            return Thing(super().forward(x))

    class Uses(nn.Linear):
        def forward(self, thing):
            return super().forward(thing.x)

    pipeline = pipelined(world, nn.Sequential(Makes(12, 12), Uses(12, 12)), plain_batch, squares)
    fails(lambda: pipeline.step(*plain_batch(0)), communicator.BackendError, "type Thing cannot be handed", "cut at another unit")


def a_pipeline_of_objects_sends_them(world):
    """A class of pipelines that takes objects, by its own passes."""
    import shoal.torch

    class Objects(shoal.torch.Pipeline):
        _takes_objects = True

    whole = seeded(lambda: nn.Sequential(Packs(12, 12), Unpacks(12, 12)))
    pipeline = Objects(copy.deepcopy(whole), plain_batch(0)[0], microbatches=4, loss=squares, cuts=["1"])
    inputs, targets = plain_batch(0)
    result = whole(inputs)
    loss = squares(result, targets)
    loss.backward()
    torch.testing.assert_close(pipeline.step(inputs, targets), loss.detach())
    mine = pipeline.forward(inputs)
    expect((mine is None) == (world.rank == 0))
    if mine is not None:
        torch.testing.assert_close(mine, result.detach())
    wanted = dict(whole.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)


class Packed:
    def __init__(self, x):
        self.x = x


class Packs(nn.Linear):
    def forward(self, x):
        return Packed(super().forward(x))


class Unpacks(nn.Linear):
    def forward(self, packed):
        return super().forward(packed.x)


class Changes(nn.Module):
    """Changes a value of the first unit in place, behind the second one."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(12, 12) for _ in range(3))

    def forward(self, x):
        first = self.one(x)
        second = self.two(first.clone())
        first.add_(1.0)
        return self.three(second) * first


def values_may_be_changed_in_place(world):
    """By a stage that is the last one to use them."""
    model = seeded(Changes)
    pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares, cuts=["two"])
    inputs, targets = plain_batch(0)
    squares(model(inputs), targets).backward()
    pipeline.step(inputs, targets)
    wanted = dict(model.named_parameters())
    for name, parameter in pipeline.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad)


class Doubles(nn.Linear):
    """A unit that changes its argument in place, in evaluation."""

    def forward(self, x):
        return super().forward(x if torch.is_grad_enabled() else x.mul_(2.0))


def messages_are_not_changed(world):
    """A value goes from stage 0 to both others, and the first of these changes it: its own copy."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two, self.three = nn.Linear(12, 12), Doubles(12, 12), nn.Linear(12, 12)

        def forward(self, x):
            first = self.one(x)
            return self.three(self.two(first)) * first

    model = seeded(Twice)
    pipeline = pipelined(world, copy.deepcopy(model), plain_batch, squares, cuts=["two", "three"])
    inputs, _ = plain_batch(0)
    for _ in range(2):
        mine = pipeline.forward(inputs)
    if mine is not None:
        with torch.no_grad():
            first = model.one(inputs)
            torch.testing.assert_close(mine, model.three(model.two(first.clone())) * first)


def values_changed_too_early_are_refused(world):
    fails(lambda: pipelined(world, Changes(), plain_batch, squares, cuts=["two", "three"]), ValueError, "in place", "add_",
          "a later stage uses it", "cut at another unit")


def wrong_arguments_are_refused(world):
    import shoal.torch

    def make(model=None, **options):
        return shoal.torch.Pipeline(model or plain(), plain_batch(0)[0], **{"microbatches": 4, "loss": squares, **options})

    fails(lambda: make(cuts=[3]), ValueError, "cuts has 3", "not a unit")
    fails(lambda: make(cuts=["9x"]), ValueError, "'9x'", "not a unit", "its units are 0, 1, 2")
    fails(lambda: make(cuts=["8", "4"]), ValueError, "in their order", "8")
    fails(lambda: make(cuts=["0"]), ValueError, "not the first unit (0)")
    fails(lambda: make(cuts=["1", "2", "3"]), ValueError, "make 4 stages", f"{world.size} ranks needs {world.size}")
    fails(lambda: make(schedule="2f2b"), ValueError, "2f2b", "1f1b")
    fails(lambda: make(schedule=1), TypeError, "schedule must be a word")
    fails(lambda: make(schedule="0F0,0B0\n"), ValueError, "1 ranks and 1 microbatches")
    fails(lambda: make(schedule="0F0,0F1\n"), ValueError, "the schedule: ")
    fails(lambda: make(schedule="interleaved", cuts=["1", "2"]), ValueError, "3 stages", "the same number")
    fails(lambda: make(microbatches=0), ValueError, "microbatches is 0")
    fails(lambda: make(model=print), TypeError, "nn.Module")
    fails(lambda: make(units=[3]), TypeError, "units must be")


def ranks_that_differ_are_refused(world):
    def make(layers=8, cuts=("3",), schedule="1f1b"):
        return pipelined(world, plain(layers), plain_batch, squares, schedule, cuts=list(cuts))

    last = world.rank == world.size - 1
    for options in ({"layers": 7}, {"cuts": ["4"]}, {"schedule": "gpipe"}):
        fails(lambda: make(**(options if last else {})), ValueError, f"rank {world.size - 1} has another model, other cuts or another "
              "schedule than rank 0", "stages begin at")
    make().step(*plain_batch(0))


CASES = [
    Case("mlp equals one process", mlp_equals_one_process),
    Case("gpt equals one process", gpt_equals_one_process),
    Case("skips equal one process", skips_equal_one_process),
    Case("residual equals one process", residual_equals_one_process),
    Case("recomputed stages equal one process", recomputed_stages_equal_one_process, (1, 2, 3)),
    Case("recomputation changes nothing", recomputation_changes_nothing, (1, 2)),
    Case("recomputed stages keep only their inputs", recomputed_stages_keep_only_their_inputs, (1, 2)),
    Case("stages are recomputed if memory is short", stages_are_recomputed_if_memory_is_short, (2,)),
    Case("wrong recomputation is refused", wrong_recomputation_is_refused, (2,)),
    Case("any number of samples is divided", any_number_of_samples_is_divided, (1, 2, 3)),
    Case("microbatches may have any shape", microbatches_may_have_any_shape, (1, 3)),
    Case("an evaluation returns the result", an_evaluation_returns_the_result, (1, 2, 3)),
    Case("modes differ", modes_differ, (1, 2, 3)),
    Case("gradients add up", gradients_add_up, (1, 2, 4)),
    Case("a norm may be of any kind", a_norm_may_be_of_any_kind, (1, 2)),
    Case("plain torch works inside", plain_torch_works_inside, (1, 2)),
    Case("cuts may name modules", cuts_may_name_modules, (2,)),
    Case("a rank may have no parameters", a_rank_may_have_no_parameters, (2,)),
    Case("frozen parts stay", frozen_parts_stay, (1, 2, 4)),
    Case("a rank keeps its stages", a_rank_keeps_its_stages),
    Case("meta models get values", meta_models_get_values, (1, 2, 3)),
    Case("only first and last need the batch", only_first_and_last_need_the_batch, (1, 3)),
    Case("backward passes have two halves", backward_passes_have_two_halves, (1,)),
    Case("values are the same behind a message", values_are_the_same_behind_a_message, (1,)),
    Case("gradients are not in messages", gradients_are_not_in_messages, (1, 2)),
    Case("sums are not in messages", sums_are_not_in_messages, (2,)),
    Case("averages are not in messages", averages_are_not_in_messages, (4,)),
    Case("times name the actions", times_name_the_actions, (1, 2)),
    Case("a pipeline frees what it has", a_pipeline_frees_what_it_has, (1, 2)),
    Case("a pipeline is freed at once", a_pipeline_is_freed_at_once, (1, 2)),
    Case("replicas average", replicas_average, (4,)),
    Case("grad scalers skip together", grad_scalers_skip_together, (1, 2, 3)),
    Case("grad scalers of replicas skip together", grad_scalers_of_replicas_skip_together, (4,)),
    Case("wrong grad scalers are refused", wrong_grad_scalers_are_refused, (2,)),
    Case("replicas shard optimizer states", replicas_shard_optimizer_states, (4,)),
    Case("wrappers and pipelines exclude each other", wrappers_and_pipelines_exclude_each_other, (2,)),
    Case("a failure reaches the other pipelines", a_failure_reaches_the_other_pipelines, (4,)),
    Case("replicated stages equal one process", replicated_stages_equal_one_process, (1, 2, 3, 4)),
    Case("replicated stages sum and evaluate", replicated_stages_sum_and_evaluate, (2, 3)),
    Case("steps return outputs", steps_return_outputs, (1, 2, 3)),
    Case("replicated steps return outputs", replicated_steps_return_outputs, (1, 2, 3)),
    Case("means of replicas are joined", means_of_replicas_are_joined, (3,)),
    Case("values of replicas that differ are refused", values_of_replicas_that_differ_are_refused, (3,)),
    Case("stages without inputs have replicas", stages_without_inputs_have_replicas, (3, 4)),
    Case("values without samples are shared", values_without_samples_are_shared, (3,)),
    Case("replicas are found", replicas_are_found, (3,)),
    Case("an exception names its replica", an_exception_names_its_replica, (3,)),
    Case("wrong replicas are refused", wrong_replicas_are_refused, (3,)),
    Case("checkpoints load with other replicas", checkpoints_load_with_other_replicas, (3,)),
    Case("stages are found", stages_are_found),
    Case("slow units get stages of their own", slow_units_get_stages_of_their_own, (2, 3)),
    Case("memory limits are kept", memory_limits_are_kept, (2,)),
    Case("measuring changes nothing", measuring_changes_nothing, (1, 2)),
    Case("models that cannot be divided are refused", models_that_cannot_be_divided_are_refused, (2,)),
    Case("around equals one process", around_equals_one_process, (1, 2)),
    Case("what a record would lose is refused", what_a_record_would_lose_is_refused, (2,)),
    Case("modes and samples are those of the model", modes_and_samples_are_those_of_the_model, (1, 2)),
    Case("results outlive a pipeline", results_outlive_a_pipeline, (2,)),
    Case("checkpoints load with other stages", checkpoints_load_with_other_stages, (1, 2, 3)),
    Case("a state of the whole model is loaded", a_state_of_the_whole_model_is_loaded, (1, 2)),
    Case("torch runs the stages and the schedule", torch_runs_the_stages_and_the_schedule, (1, 2, 4)),
    Case("skips go through torch's stages", skips_go_through_torchs_stages, (2, 3)),
    Case("torch loads every schedule", torch_loads_every_schedule, (1,)),
    Case("torch's schedules are read", torchs_schedules_are_read, (2, 3)),
    Case("an exception names its place on all ranks", an_exception_names_its_place_on_all_ranks, (1, 2, 3)),
    Case("exceptions have any text", exceptions_have_any_text, (2, 3)),
    Case("a rank that dies is named", a_rank_that_dies_is_named, (3,), fresh=True, ends=(1,)),
    Case("batches that do not fit are refused", batches_that_do_not_fit_are_refused, (1, 2)),
    Case("a graph that changes is refused", a_graph_that_changes_is_refused, (1, 2)),
    Case("code around units asks about types and shapes", code_around_units_asks_about_types_and_shapes, (2,)),
    Case("models that cannot be recorded are refused", models_that_cannot_be_recorded_are_refused, (1,)),
    Case("values that cannot be sent are refused", values_that_cannot_be_sent_are_refused, (2,)),
    Case("a pipeline of objects sends them", a_pipeline_of_objects_sends_them, (2,)),
    Case("values may be changed in place", values_may_be_changed_in_place, (2,)),
    Case("messages are not changed", messages_are_not_changed, (3,)),
    Case("values changed too early are refused", values_changed_too_early_are_refused, (3,)),
    Case("ranks that differ are refused", ranks_that_differ_are_refused, (2,)),
    Case("wrong arguments are refused", wrong_arguments_are_refused, (2,)),
]

if __name__ == "__main__":
    ranks.run(CASES)
