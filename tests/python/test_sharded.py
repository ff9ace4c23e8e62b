#!/usr/bin/env python3
"""shoal.torch.ShardedDataParallel: values equal those of torch's own optimizers on the whole model, a rank keeps its share in
memory, whatever the model does in its passes; and each misuse has its error."""
import copy
import ctypes
import gc
import io
import pathlib
import warnings
import weakref

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH = 24  # divisible by every number of ranks
MIB = 1 << 20
warnings.filterwarnings("ignore")


def sharded(module, optimizer, **options):
    import shoal.torch
    return shoal.torch.ShardedDataParallel(module, optimizer, **{"whole_bytes": 0, **options})


def replicated(module):
    import shoal.torch
    return shoal.torch.DistributedDataParallel(module)


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


# ---- Models ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Language(nn.Module):
    """Blocks between an embedding and a head that share their weight, a parameter of the module itself, and a buffer. `repeats`:
    with a checkpoint of this kind around each block."""

    def __init__(self, width=16, blocks=4, words=40, repeats=None):
        super().__init__()
        self.embedding, self.place = nn.Embedding(words, width), nn.Parameter(torch.randn(width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.9))
        self.repeats = repeats

    def forward(self, x):
        x = self.embedding(x) * self.scale + self.place
        for block in self.blocks:
            x = block(x) if self.repeats is None else checkpoint(block, x, **self.repeats)
        return self.head(self.norm(x))


class Odd(nn.Module):
    """A module that is called twice; parameters that are frozen, a scalar, empty, in channels_last; and of two types."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(12, 12), nn.Linear(12, 4)
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.convolution = nn.Conv2d(3, 12, 2).to(memory_format=torch.channels_last)
        self.wide = nn.Linear(12, 12).to(torch.float64)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        seen = self.convolution(x.view(-1, 3, 2, 2)).flatten(1)
        x = self.first(torch.tanh(self.first(x)) + seen)
        return self.last(self.wide(x.double()).float()) * self.scalar + self.empty.sum()


def plain():
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def language_batch(world, step):
    torch.manual_seed(1000 + step)
    words = torch.randint(40, (BATCH, 7))
    return words.chunk(world.size)[world.rank]


def language_loss(model, world, step):
    words = language_batch(world, step)
    return nn.functional.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())


def plain_batch(world, step, dtype=torch.float32):
    torch.manual_seed(1000 + step)
    x, y = torch.randn(BATCH, 12), torch.randn(BATCH, 4)
    return tuple(tensor.chunk(world.size)[world.rank].to(dtype) for tensor in (x, y))


def plain_loss(model, world, step, dtype=torch.float32):
    x, y = plain_batch(world, step, dtype)
    return (model(x).float() - y.float()).square().mean()


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.02),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
}


# ---- Comparisons -----------------------------------------------------------------------------------------------------------


class Pair:
    """Two modules with one start: one is sharded, the other one whole on each rank."""

    def __init__(self, world, make_model, make_optimizer=OPTIMIZERS["AdamW"], loss=plain_loss, **options):
        self.world, self.loss = world, loss
        mine, theirs = seeded(make_model), seeded(make_model)
        self.own, self.other = make_optimizer(mine.parameters()), make_optimizer(theirs.parameters())
        self.model, self.theirs = sharded(mine, self.own, **options), replicated(theirs)

    def step(self, number, *words):
        for model, optimizer in ((self.model, self.own), (self.theirs, self.other)):
            optimizer.zero_grad()
            loss = self.loss(model, self.world, number, *words)
            loss.backward()
            optimizer.step()
        return loss.item()

    def check(self, what="", tolerance=3e-6):
        state = self.model.full_state_dict()
        if self.world.rank:
            expect(state == {}, "a rank has a state that it did not ask for")
            return
        wanted = self.theirs.module.state_dict()
        expect(list(state) == list(wanted), list(state))
        close(state.values(), wanted.values(), tolerance, what)

    def run(self, steps=4, tolerance=3e-6):
        for step in range(steps):
            self.step(step)
            self.check(f"step {step}", tolerance)


def close(one, other, tolerance, what=""):
    gap = max(((a.detach().float() - b.detach().float()).abs().max().item() for a, b in zip(one, other) if a.numel()), default=0)
    expect(gap <= tolerance, what, "differs by", gap)


def message_of(kind, call, *words):
    try:
        call()
    except kind as error:
        text = str(error)
        expect(text.startswith("shoal: ") and all(word in text for word in words), text)
        return
    raise AssertionError(f"no {kind.__name__} with {words}")


# ---- As torch's ------------------------------------------------------------------------------------------------------------


def optimizer_case(name, make):
    def body(world):
        Pair(world, Language, make, language_loss).run()
        Pair(world, plain, make).run()
    return Case(f"as torch's: {name}", body, sizes=(1, 2, 3))


def odd_models(world):
    for whole_bytes in (0, 400, 1 << 30):
        Pair(world, Odd, whole_bytes=whole_bytes).run()


def units(world):
    """However a model is divided, it computes the same, with as few live units as possible."""
    for chosen, count in ((None, 7), ({Block}, 7), ([nn.Linear, nn.Embedding], 15), (nn.Module, 15), (lambda one: isinstance(one, Language), 1)):
        pair = Pair(world, Language, OPTIMIZERS["SGD"], language_loss, units=chosen)
        found = len(pair.model._flow.units)
        expect(found == count, found, "units instead of", count)
        pair.run(2)
    pair = Pair(world, Language, loss=language_loss, units={Language, Block}, live_units=2)
    pair.run(2)


def repeats(world):
    """Checkpoints repeat forward passes within the backward pass."""
    for kind in ({"use_reentrant": False}, {"use_reentrant": False, "early_stop": False}, {"use_reentrant": True}):
        kind = {key: value for key, value in kind.items() if key != "early_stop" or torch.__version__ >= "2.8"}
        Pair(world, lambda: Language(repeats=kind), loss=language_loss).run(3)


class Nested(nn.Module):
    """A checkpoint around several blocks, with other checkpoints in it."""

    def __init__(self):
        super().__init__()
        self.inner = Language(repeats={"use_reentrant": False})

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


def repeats_nested(world):
    pair = Pair(world, Nested, loss=language_loss, live_units=8)
    pair.run(3)
    small = Pair(world, Nested, loss=language_loss, live_units=2)
    message_of(RuntimeError, lambda: small.step(0), "live_units", "checkpoint fewer")


def half_precision(world):
    """The master keeps what a parameter of 16 bits rounds off, so it follows float32 more closely than torch's does."""
    for dtype, slack in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        mine, exact = seeded(plain).to(dtype), seeded(plain)
        exact.load_state_dict(mine.state_dict())
        own, other = (torch.optim.SGD(each.parameters(), lr=1e-2) for each in (mine, exact))
        mine, exact = sharded(mine, own), replicated(exact)
        for step in range(20):
            for model, optimizer, kind in ((mine, own, dtype), (exact, other, torch.float32)):
                optimizer.zero_grad()
                plain_loss(model, world, step, kind).backward()
                optimizer.step()
        state = mine.full_state_dict()
        own.consolidate_state_dict()
        if world.rank == 0:
            expect(all(value.dtype is dtype for value in state.values()), "types")
            close(state.values(), exact.parameters(), slack, dtype)
            masters = [entry["master"] for entry in own.state_dict()["state"].values()]
            close([master.to(dtype) for master in masters], state.values(), 0, "rounded masters")


def schedules_and_groups(world):
    def make(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.05, "weight_decay": 0}, {"params": rest}], lr=0.01)
    pair = Pair(world, plain, make)
    plans = [torch.optim.lr_scheduler.OneCycleLR(each, 0.05, total_steps=8) for each in (pair.own, pair.other)]
    for step in range(5):
        pair.step(step)
        for plan in plans:
            plan.step()
        if step == 3:
            for optimizer in (pair.own, pair.other):
                optimizer.param_groups[1]["weight_decay"] = 0.3
        pair.check(f"step {step}")


def late_rates(world):
    """A rate that a program sets between backward() and step() applies to that step."""
    pair = Pair(world, plain, OPTIMIZERS["SGD"])
    for step in range(3):
        for model, optimizer in ((pair.model, pair.own), (pair.theirs, pair.other)):
            optimizer.zero_grad()
            plain_loss(model, world, step).backward()
            optimizer.param_groups[0]["lr"] = 0.3 / (1 + step)
            optimizer.step()
        pair.check(f"step {step}")


def clips(world):
    pair = Pair(world, plain, OPTIMIZERS["SGD"], max_norm=0.3)
    expect(pair.model.grad_norm() is None, "a norm before the first step")
    for step in range(4):
        plain_loss(pair.model, world, step).backward()
        pair.own.step()
        pair.other.zero_grad()
        plain_loss(pair.theirs, world, step).backward()
        norm = nn.utils.clip_grad_norm_(pair.theirs.parameters(), 0.3)
        pair.other.step()
        expect(abs(pair.model.grad_norm() - norm) < 1e-4, pair.model.grad_norm(), norm)
        pair.check(f"step {step}")


def scales(world):
    """A loss scale that overflows on one rank: all ranks skip the step, and their scales stay equal."""
    scaler, alone = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    pair = Pair(world, plain, OPTIMIZERS["SGD"], grad_scaler=scaler)
    for step in range(6):
        for model, optimizer, scale in ((pair.model, pair.own, scaler), (pair.theirs, pair.other, alone)):
            optimizer.zero_grad()
            x, y = plain_batch(world, step)
            if step == 2 and world.rank == world.size - 1:
                x = x * float("inf")
            scale.scale((model(x) - y).square().mean()).backward()
            if step % 2:
                scale.unscale_(optimizer)
            scale.step(optimizer)
            scale.update()
        expect(scaler.get_scale() == alone.get_scale(), step, scaler.get_scale(), alone.get_scale())
        pair.check(f"step {step}")


def closures_and_hooks(world):
    pair = Pair(world, plain)
    seen = []
    pair.own.register_step_post_hook(lambda *_: seen.append(1))
    for step in range(3):
        def closure(model=pair.model, optimizer=pair.own):
            optimizer.zero_grad()
            loss = plain_loss(model, world, step)
            loss.backward()
            return loss
        mine, wanted = pair.own.step(closure), pair.other.step(lambda: closure(pair.theirs, pair.other))
        expect(abs(mine.item() - wanted.item()) < 1e-5, mine, wanted)
        pair.check(f"step {step}")
    expect(len(seen) == 3 and isinstance(pair.own, torch.optim.AdamW), seen, type(pair.own))


# ---- Passes ----------------------------------------------------------------------------------------------------------------


def passes_without_steps(world):
    """Forward passes that no backward pass follows, in training and in evaluation, and several before one backward pass."""
    def two_losses(model):
        return language_loss(model, world, 20 + step) + language_loss(model, world, 30 + step)
    pair = Pair(world, Language, loss=language_loss)
    for step in range(3):
        pair.step(step)
        pair.model.eval()
        with torch.no_grad():
            mine, theirs = (model(language_batch(world, 9)) for model in (pair.model, pair.theirs))
        expect(torch.allclose(mine, theirs, atol=1e-5), "an evaluation differs")
        pair.model.train()
        language_loss(pair.model, world, 7).item()
        pair.other.zero_grad()
        with pair.theirs.no_sync():  # averaged below: DistributedDataParallel refuses two forward passes
            two_losses(pair.theirs).backward()
        for parameter in pair.theirs.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)
        pair.other.step()
        two_losses(pair.model).backward()
        pair.own.step()
        pair.check(f"step {step}")


class Fault(Exception):
    pass


def fail(*_):
    raise Fault


def modules_of_torch(world):
    """Attention, which reads a parameter of a module that it does not call; encoders, whose evaluation takes another way; recurrent
    and parametrized modules; and evaluation in inference mode before training."""
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.MultiheadAttention(12, 2, batch_first=True)
            self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, 0.0, batch_first=True), 3)
            self.recurrent, self.last = nn.LSTM(12, 12, batch_first=True), nn.utils.parametrizations.weight_norm(nn.Linear(12, 4))

        def forward(self, x):
            x = x[:, None, :].expand(-1, 3, -1)
            x, _ = self.first(x, x, x)
            x, _ = self.recurrent(self.encoder(x))
            return self.last(x[:, -1])
    pair = Pair(world, Mixed, OPTIMIZERS["SGD"])
    for step in range(3):
        for manager in (torch.inference_mode, torch.no_grad):
            x, _ = plain_batch(world, 9)
            seen = []
            for model in (pair.model, pair.theirs.module):
                model.eval()
                with manager():
                    seen.append(model(x).clone())
                model.train()
            expect(torch.allclose(*seen, atol=1e-5), "an evaluation differs")
        pair.step(step)
        pair.check(f"step {step}")


def mixed_precision(world):
    """torch.autocast keeps casts of parameters within its context."""
    def loss(model, world, step):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return language_loss(model, world, step)
    Pair(world, Language, OPTIMIZERS["SGD"], loss).run(3, 2e-4)


def exceptions(world):
    """After an exception in a forward or backward pass, which all ranks have, the next step runs as if nothing had happened."""
    pair = Pair(world, Language, loss=language_loss, live_units=2)
    pair.step(0)
    for place in (pair.model.module.blocks[2], pair.model.module.blocks[2].up):
        handle = place.register_forward_pre_hook(fail)
        try:
            language_loss(pair.model, world, 1).backward()
        except Fault:
            pass
        handle.remove()
        expect(not pair.model._flow._live, "units are live after an exception")
        pair.step(2)
        pair.check("after an exception")


def left_out(world):
    """zero_grad() drops gradients if no step was made for a batch, or an exception has ended the backward pass."""
    pair = Pair(world, Language, loss=language_loss)
    for step in range(3):
        pair.step(step)
        language_loss(pair.model, world, 10 + step).backward()
        (pair.own if step % 2 else pair.model).zero_grad()
        handle = pair.model.module.blocks[1].up.bias.register_hook(fail)
        try:
            language_loss(pair.model, world, 20 + step).backward()
            raise AssertionError("no exception")
        except Fault:
            pass
        handle.remove()
        pair.own.zero_grad()
        pair.check(f"step {step}")


def interleaves(world):
    """Gradients of several units come in turns: sums need memory for two units only."""
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.towers = nn.ModuleList(nn.Sequential(*(nn.Linear(12, 12) for _ in range(4))) for _ in range(5))
            self.last = nn.Linear(12, 4)

        def forward(self, x):
            states = [x] * len(self.towers)
            for floor in range(4):
                states = [torch.tanh(tower[floor](state)) for tower, state in zip(self.towers, states)]
            return self.last(sum(states))
    pair = Pair(world, Towers, units={nn.Sequential})
    pair.run()


def unused(world):
    """A unit without gradients is not stepped; one that is used in part is an error that names the parameter."""
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.is_left = nn.Linear(12, 4), nn.Linear(12, 4), True

        def forward(self, x):
            return self.left(x) if self.is_left else self.right(x)
    pair = Pair(world, Branches)
    pair.theirs = nn.parallel.DistributedDataParallel(pair.theirs.module, find_unused_parameters=True)
    for step in range(5):
        pair.model.module.is_left = pair.theirs.module.is_left = step % 3 == 0
        pair.step(step)
        pair.check(f"step {step}")
    pair = Pair(world, Branches, units=lambda one: isinstance(one, Branches))
    plain_loss(pair.model, world, 0).backward()
    message_of(RuntimeError, pair.own.step, "right.weight has no gradient", "units=")


def aliases(world):
    """Views of parameters that a graph keeps, also detached ones, have the right values in the backward pass."""
    class Views(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12, bias=False) for _ in range(5))
            self.last = nn.Linear(12, 4)

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return self.last(x)

    def twist(layer, inputs, output):
        (x,) = inputs
        weight = layer.weight
        return output + x @ weight[:, ::2].repeat(1, 2) * weight.detach().T.mean() + x * weight.data.diagonal() + weight[3:4].square()
    pair = Pair(world, Views, OPTIMIZERS["SGD"], live_units=2)
    for model in (pair.model, pair.theirs):
        for layer in model.module.layers:
            layer.register_forward_hook(twist, prepend=True)
    pair.run()


def aliases_repeated(world):
    """A detached view of a parameter is needed after the last gradient of its unit, in a forward pass that a checkpoint repeats,
    and meanwhile other units are gathered."""
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.inner = nn.Parameter(torch.randn(12, 12) / 4), nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

        def forward(self, x):
            x = torch.tanh(x @ self.weight.detach().T)
            for inner in self.inner:
                x = checkpoint(inner, x, use_reentrant=False)
            return torch.tanh(x @ self.weight)

    class Views(nn.Module):
        def __init__(self, kind):
            super().__init__()
            self.layers, self.last, self.kind = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(12, 4), kind

        def forward(self, x):
            x = x.requires_grad_()
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=self.kind)
            return self.last(x)
    for kind in (False, True):
        Pair(world, lambda: Views(kind), OPTIMIZERS["SGD"], units=nn.Linear, live_units=2).run()


def in_place(world):
    """A saved tensor that is changed in place is refused, as torch's own graphs do."""
    pair = Pair(world, plain)
    x = pair.model.module[1](torch.zeros(3, 16, requires_grad=True))  # a module without parameters
    x.sum().backward()

    class Spoiled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(12, 4)

        def forward(self, x):
            seen = torch.tanh(self.inner(x))
            return seen.mul_(2)
    model = Spoiled()
    model = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    message_of(RuntimeError, lambda: plain_loss(model, world, 0).backward(), "modified by an inplace operation")


# ---- Memory ----------------------------------------------------------------------------------------------------------------


def resident():
    """Bytes of this process in memory, without those of files. A page that n processes map counts as 1 / n of a page. Pages of
    libraries would count for more when other programs that use PyTorch end."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))) << 10


def keeps_its_share(world):
    """A rank keeps 1 / ranks of values, gradients and states, and a few live units: by its resident memory. A shallow model goes
    first, so that what every model needs is there already."""
    class Wide(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(layers))

        def forward(self, x):
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            return x

    def trained(layers):
        model = Wide(layers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model = sharded(model, optimizer)
        for _ in range(3):
            model(torch.randn(4, 1024)).square().mean().backward()
            optimizer.step()
        return model
    shallow = trained(4)
    before = resident()
    model = trained(24)
    grown, unit = resident() - before, 1024 * 1024 * 4
    used, wanted = model.memory(), 4 * 24 * unit // world.size  # parameters, gradients, two states
    expect(abs(used["shard"] - wanted) <= 0.01 * wanted and used["live"] == 3 * unit and used["gradient"] == 2 * unit, used, wanted)
    expect(used["whole"] == 0 and shallow.memory()["live"] == used["live"], used)
    expect(grown <= 1.01 * wanted + 7 * unit, f"{grown / MIB:.1f} MiB more, a share has {wanted / MIB:.0f}")


def releases_memory(world):
    """Memory lives as long as the module, a graph or a parameter that uses it, and no longer."""
    kept, handles = [], []
    for _ in range(3):
        model = nn.Linear(512, 512)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = sharded(model, optimizer)
        loss = model(torch.randn(3, 512)).sum()
        kept.append((loss, model.module.weight))
        with torch.no_grad():
            model(torch.randn(3, 512))
        loss.backward(retain_graph=True)
        optimizer.step()
        handle = model._shards._handle
        del model, optimizer, loss
        handles.append(weakref.ref(handle))
        del handle
    gc.collect()
    expect(all(handle() for handle in handles), "memory was freed that a graph may use")
    kept.clear()
    gc.collect()
    expect(not any(handle() for handle in handles), "memory is left")


# ---- Checkpoints -----------------------------------------------------------------------------------------------------------


def resumes(world):
    """States go to torch's own optimizer and module and back, and to a module with other units, which continues with the same
    values."""
    for name in ("SGD, momentum", "AdamW", "Adagrad"):
        pair = Pair(world, Language, OPTIMIZERS[name], language_loss)
        for step in range(3):
            pair.step(step)
        last = world.size - 1
        pair.own.consolidate_state_dict(to=last)
        values = pair.model.full_state_dict(to=last)
        saved = [None]
        if world.rank == last:
            whole = io.BytesIO()
            torch.save((pair.own.state_dict(), values), whole)
            saved = [whole.getvalue()]
        else:
            message_of(RuntimeError, pair.own.state_dict, "consolidate_state_dict")
        dist.broadcast_object_list(saved, last)
        state, values = torch.load(io.BytesIO(saved[0]))
        for index, entry in pair.other.state_dict()["state"].items():
            for key, wanted in entry.items():
                close([state["state"][index][key]], [wanted], 1e-6, f"{name}: {key}")

        again = seeded(Language, 2)
        again_own = OPTIMIZERS[name](again.parameters())
        again = sharded(again, again_own, units=nn.Linear, whole_bytes=1000)
        again.load_full_state_dict(values)
        again_own.load_state_dict(state)
        pair.other.load_state_dict(state)
        pair.theirs.module.load_state_dict(values)
        for step in range(3, 5):
            pair.step(step)
            again_own.zero_grad()
            language_loss(again, world, step).backward()
            again_own.step()
        pair.check(f"{name}: continued by torch's")
        first, second = pair.model.full_state_dict(), again.full_state_dict()
        close(first.values(), second.values(), 2e-6, f"{name}: continued with other units")


def starts_equal(world):
    """Rank 0's values are those of all ranks, buffers and frozen parameters as well; or each rank's own, if they are equal."""
    for init_sync, seed in ((True, world.rank), (False, 5)):
        model = seeded(Odd, seed)
        model.register_buffer("mark", torch.tensor(float(seed)))
        wanted = {name: value.clone() for name, value in model.state_dict().items()}
        model = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1), init_sync=init_sync)
        state = model.full_state_dict()
        if world.rank == 0:
            close(state.values(), wanted.values(), 0, "values")
        expect(model.module.mark == (0 if init_sync else 5), model.module.mark)


def starts_on_meta(world):
    """A model on the device meta gets its values one module after the other: those that the whole model gets, or those of rank 0."""
    def init(module):
        for each in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            each.copy_(torch.linspace(0.9, 0.1, each.numel()).view(each.shape))
    mine, theirs = Pair.__new__(Pair), seeded(Language)
    with torch.no_grad():
        for module in theirs.modules():
            init(module)
    with torch.device("meta"):
        model = Language()
    model.norm.bias.requires_grad_(False)
    theirs.norm.bias.requires_grad_(False)
    mine.world, mine.loss, mine.theirs, mine.own = world, language_loss, replicated(theirs), OPTIMIZERS["SGD"](model.parameters())
    mine.model, mine.other = sharded(model, mine.own, init=init), OPTIMIZERS["SGD"](theirs.parameters())
    mine.check("at first", 0)
    mine.run()
    with torch.device("meta"):
        model = plain()
    torch.manual_seed(world.rank)
    model = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    state = model.full_state_dict()
    if world.rank == 0:
        close(state.values(), wanted.state_dict().values(), 0, "reset_parameters()")
    with torch.device("meta"):
        model = Language()
    message_of(ValueError, lambda: sharded(model, torch.optim.SGD(model.parameters(), lr=0.1)), "no reset_parameters(): pass init=")


# ---- Errors ----------------------------------------------------------------------------------------------------------------


def released(world):
    """A parameter whose unit is not live keeps its form. Its values are an error that names it, never others."""
    model = Language()
    model = sharded(model, torch.optim.SGD(model.parameters(), lr=0.1))
    weight = model.module.blocks[1].up.weight
    expect(weight.shape == (32, 16) and weight.numel() == 512 and weight.dtype is torch.float32 and weight.requires_grad, weight.shape)
    expect(weight.grad is None and isinstance(weight, nn.Parameter), type(weight))
    count, wanted = (sum(each.numel() for each in one.parameters()) for one in (model, Language()))
    expect(count == wanted, count, "instead of", wanted)
    for use in (lambda: weight.sum(), lambda: weight @ weight.T, lambda: weight.data, lambda: str(weight), lambda: weight.detach(),
                lambda: nn.init.ones_(weight), lambda: nn.functional.linear(torch.ones(2, 16), weight), lambda: torch.save(weight, io.BytesIO()),
                lambda: torch.cat([torch.ones(3, 16), weight])):
        message_of(RuntimeError, use, "blocks.1.up.weight", "not live")
    message_of(RuntimeError, lambda: model.module(torch.zeros(2, 3, dtype=torch.long)), "call the ShardedDataParallel itself")


def refuses(world):
    def wrap(optimizer, module, **options):
        return lambda: sharded(module, optimizer, **options)

    def sgd(module):
        return torch.optim.SGD(module.parameters(), lr=0.1)
    module = plain()
    message_of(TypeError, wrap(torch.optim.RMSprop(module.parameters()), module), "RMSprop", "SGD, Adam, AdamW, Adagrad", "fully_shard")
    message_of(ValueError, wrap(torch.optim.Adam(module.parameters(), amsgrad=True), module), "amsgrad")
    message_of(ValueError, wrap(torch.optim.SGD(module[0].parameters(), lr=1), module), "does not step parameter 2.weight")
    message_of(ValueError, wrap(sgd(module), module, live_units=1), "live_units is 1")
    message_of(TypeError, wrap(sgd(module), module, units=[3]), "units must be a set of classes")
    message_of(RuntimeError, wrap(sgd(module), nn.Tanh()), "any parameters")
    own = sgd(module)
    model = sharded(module, own)
    message_of(TypeError, wrap(sgd(module), module), "sharded already")
    message_of(RuntimeError, lambda: own.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), "cannot be added")
    message_of(RuntimeError, own.state_dict, "consolidate_state_dict() on all ranks before")
    message_of(RuntimeError, model.state_dict, "full_state_dict() or save_checkpoint() on all ranks")
    message_of(RuntimeError, lambda: model.load_state_dict({}), "load_full_state_dict()")
    message_of(TypeError, lambda: copy.deepcopy(model), "full_state_dict()")
    message_of(RuntimeError, lambda: model.to(torch.float64), "before it is wrapped")
    message_of(NotImplementedError, model.no_sync, "sum of the losses")
    state = plain().state_dict()
    message_of(ValueError, lambda: model.load_full_state_dict({**state, "other": torch.zeros(1)}), "['other']")
    message_of(ValueError, lambda: model.load_full_state_dict({**state, "0.bias": torch.zeros(3)}), "0.bias has the shape [3]")

    plain_loss(model, world, 0).backward()
    message_of(RuntimeError, lambda: plain_loss(model, world, 1).backward(), "second gradient", "the sum of all losses")
    own.zero_grad()
    loss = plain_loss(model, world, 2)
    old = plain_loss(model, world, 3)
    loss.backward()
    own.step()
    message_of(RuntimeError, old.backward, "before optimizer.step()")
    whole = plain()
    own = sgd(whole)
    whole = sharded(whole, own, whole_bytes=1 << 20)
    old = plain_loss(whole, world, 2)
    plain_loss(whole, world, 3).backward()
    own.step()
    message_of(RuntimeError, old.backward, "modified by an inplace operation")
    x = torch.randn(3, 12, requires_grad=True)
    message_of(NotImplementedError, lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True), "create_graph=True")
    module[2].weight = nn.Parameter(torch.zeros(16, 16))
    message_of(RuntimeError, lambda: model(x), "2.weight was replaced")


def differing(world):
    """What differs between ranks is named before the first step."""
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (1 + world.rank))
    message_of(Exception, lambda: sharded(module, optimizer), "optimizer's groups")
    module = plain()
    message_of(Exception, lambda: sharded(module, torch.optim.SGD(module.parameters(), lr=0.1), live_units=2 + world.rank),
               "live_units is 2 on rank 0, 3 on rank 1")


# ---- What a unit must not lose -------------------------------------------------------------------------------------------


class Conjugates(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))

    def forward(self, x):
        return (x.to(torch.complex64) @ self.weight.conj() @ self.weight.mH).abs() + (x @ self.weight.conj().imag)


def conjugates(world):
    import shoal.torch
    torch.manual_seed(3)
    theirs = nn.Sequential(nn.Linear(6, 6), Conjugates())
    mine = copy.deepcopy(theirs)
    own, other = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (mine, theirs))
    model = shoal.torch.ShardedDataParallel(mine, own, whole_bytes=0)
    for step in range(2):
        torch.manual_seed(step)
        x = torch.randn(4, 6)
        for each, optimizer in ((model, own), (theirs, other)):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    found = [model.full_state_dict(to=rank) for rank in range(world.size)][world.rank]
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(found[name], value)


def changes_in_place(world):
    import shoal.torch
    module = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 2))
    model = shoal.torch.ShardedDataParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), whole_bytes=0)
    message_of(RuntimeError, lambda: model(torch.arange(8)), "0.weight was changed in place", "max_norm")


def other_units(world):
    """Units of equal lengths on ranks that gather them in different orders: told, instead of mixed values."""
    import shoal.torch

    class Chosen(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x):
            return self.layers[world.rank % 2](x)
    module = Chosen()
    model = shoal.torch.ShardedDataParallel(module, torch.optim.SGD(module.parameters(), lr=0.1), whole_bytes=0)
    message_of(Exception, lambda: model(torch.ones(2, 4)), "MISMATCH")


CASES = [optimizer_case(*row) for row in OPTIMIZERS.items()]
CASES += [Case(body.__name__, body, sizes=(1, 2, 3)) for body in (
    odd_models, units, repeats, half_precision, schedules_and_groups, late_rates, clips, closures_and_hooks, passes_without_steps,
    modules_of_torch, mixed_precision, exceptions, left_out, interleaves, unused, aliases, aliases_repeated, resumes, starts_equal,
    starts_on_meta)]
CASES += [Case(body.__name__, body, sizes=(1, 2)) for body in (scales, in_place, released, refuses, releases_memory)]
CASES += [Case(body.__name__, body, sizes=(2,), fresh=True) for body in (repeats_nested, keeps_its_share)]
CASES += [Case("differing", differing, sizes=(2,)), Case("other_units", other_units, sizes=(2,), fresh=True)]
CASES += [Case(body.__name__, body, sizes=(1, 2)) for body in (conjugates, changes_in_place)]

if __name__ == "__main__":
    ranks.run(CASES)
