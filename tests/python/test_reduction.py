#!/usr/bin/env python3
"""shoal.torch.DistributedDataParallel(model, optimizer=...): parameters, schedules, clipping, loss scales and checkpoints equal
those of torch's own optimizers, and each misuse has its error."""
import copy
import io
import pickle
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn

BATCH = 24  # divisible by every number of ranks
warnings.filterwarnings("ignore")


def ours(module, **options):
    import shoal.torch
    return shoal.torch.DistributedDataParallel(module, **options)


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


def plain(dtype=torch.float32):
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)


class Shared(nn.Module):
    """One weight is used at both ends; a scalar, an empty parameter, a weight in channels_last, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.second.weight = self.first.weight
        self.scalar, self.empty = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
        self.convolution = nn.Conv2d(3, 12, 2).to(memory_format=torch.channels_last)
        self.first.bias.requires_grad_(False)

    def forward(self, x):
        seen = self.convolution(x.view(-1, 3, 2, 2)).flatten(1)
        return self.last(self.second(torch.tanh(self.first(x) + seen))) * self.scalar + self.empty.sum()


def batch(world, step=0, dtype=torch.float32):
    torch.manual_seed(1000 + step)
    x, y = torch.randn(BATCH, 12), torch.randn(BATCH, 4)
    return tuple(tensor.chunk(world.size)[world.rank].to(dtype) for tensor in (x, y))


def loss_of(model, x, y):
    return (model(x).float() - y.float()).square().mean()


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "SGD, momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD, nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.8, nesterov=True, maximize=True),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.02),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.1),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01), fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1),
}


def decoupled(parameters):
    return torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True)


def pair(make_model, make_optimizer, **options):
    """Two modules with one start: ours runs the optimizer in the reduction, the other on each rank."""
    mine, theirs = seeded(make_model), seeded(make_model)
    own, other = make_optimizer(mine.parameters()), make_optimizer(theirs.parameters())
    return ours(mine, optimizer=own, **options), own, ours(theirs), other


def step_of(model, optimizer, world, step, dtype=torch.float32):
    optimizer.zero_grad()
    loss = loss_of(model, *batch(world, step, dtype))
    loss.backward()
    optimizer.step()
    return loss.item()


def close(one, other, tolerance, what=""):
    gap = max(((a.detach().cpu().float() - b.detach().cpu().float()).abs().max().item() for a, b in zip(one, other) if a.numel()), default=0)
    expect(gap <= tolerance, what, "differs by", gap)


def same_on_all_ranks(model, world):
    for name, parameter in model.named_parameters():
        others = [torch.empty_like(parameter) for _ in range(world.size)]
        dist.all_gather(others, parameter.detach().contiguous())
        expect(all(torch.equal(each, others[0]) for each in others), name, "differs between ranks")


def optimizer_case(name, make, models=(plain, Shared)):
    def body(world):
        for make_model in models:
            model, own, theirs, other = pair(make_model, make)
            for step in range(5):
                mine, wanted = step_of(model, own, world, step), step_of(theirs, other, world, step)
                expect(abs(mine - wanted) < 1e-5 * (1 + abs(wanted)), step, mine, wanted)
            close(model.parameters(), theirs.parameters(), 2e-6 if "maximize" not in name else 1e-4, name)
            same_on_all_ranks(model, world)
            expect(model.module[0].weight.grad is None if make_model is plain else True, "a gradient is left")
    return Case(f"as torch's: {name}", body, sizes=(1, 2, 3))


def half_precision(world):
    """The master keeps what a parameter of 16 bits rounds off, so it follows float32 more closely than torch's does."""
    for dtype, slack in ((torch.bfloat16, 2e-2), (torch.float16, 3e-3)):
        model, own, exact, other = pair(lambda: plain(dtype), lambda parameters: torch.optim.SGD(parameters, lr=1e-4))
        exact = ours(seeded(plain))
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), exact.parameters()):
                theirs.copy_(mine)
        other = torch.optim.SGD(exact.parameters(), lr=1e-4)
        start = [parameter.detach().clone() for parameter in exact.parameters()]
        for step in range(40):
            step_of(model, own, world, step, dtype)
            step_of(exact, other, world, step)
        own.consolidate_state_dict()
        if world.rank == 0:
            masters = [entry["master"] for entry in own.state_dict()["state"].values()]
            moved = sum((end - begin).abs().sum().cpu() for begin, end in zip(start, exact.parameters()))
            gap = sum((master - end.cpu()).abs().sum() for master, end in zip(masters, exact.parameters()))
            expect(gap < 0.2 * moved, "the masters do not follow float32:", gap, moved)
            close([master.to(dtype) for master in masters], model.parameters(), 0, "rounded masters")
        close(model.parameters(), exact.parameters(), slack)


def schedules_and_groups(world):
    def make(parameters):
        first, *rest = parameters
        return torch.optim.AdamW([{"params": [first], "lr": 0.05, "weight_decay": 0}, {"params": rest}], lr=0.01)
    model, own, theirs, other = pair(plain, make)
    plans = [torch.optim.lr_scheduler.OneCycleLR(each, 0.05, total_steps=8) for each in (own, other)]
    for step in range(6):
        for each, optimizer, plan in ((model, own, plans[0]), (theirs, other, plans[1])):
            step_of(each, optimizer, world, step)
            plan.step()
        if step == 3:
            for optimizer in (own, other):
                optimizer.param_groups[1]["weight_decay"] = 0.3
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def accumulates(world):
    """Backward passes inside no_sync() add to .grad; the one outside steps with the sum."""
    model, own, theirs, other = pair(plain, OPTIMIZERS["SGD, momentum"])
    for step in range(3):
        for each, optimizer in ((model, own), (theirs, other)):
            optimizer.zero_grad()
            with each.no_sync():
                loss_of(each, *batch(world, 2 * step)).backward()
            loss_of(each, *batch(world, 2 * step + 1)).backward()
            optimizer.step()
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def unused(world):
    """A parameter without a gradient is not stepped, nor its steps counted."""
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.never = nn.Linear(12, 4), nn.Linear(12, 4), nn.Linear(2, 2)
            self.is_left = True

        def forward(self, x):
            return self.left(x) if self.is_left else self.right(x)
    model, own, theirs, other = pair(Branches, OPTIMIZERS["AdamW"], find_unused_parameters=True)
    theirs = nn.parallel.DistributedDataParallel(theirs.module, find_unused_parameters=True)
    for step in range(6):
        model.module.is_left = theirs.module.is_left = step % 3 == 0
        step_of(model, own, world, step)
        step_of(theirs, other, world, step)
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def clips(world, **modes):
    model, own, theirs, other = pair(plain, OPTIMIZERS["SGD"], max_norm=0.3, **modes)
    expect(model.grad_norm() is None, "a norm before the first step")
    for step in range(4):
        step_of(model, own, world, step)
        other.zero_grad()
        loss_of(theirs, *batch(world, step)).backward()
        norm = nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        other.step()
        expect(abs(model.grad_norm() - norm) < 1e-4, model.grad_norm(), norm)
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def clips_early(world):
    clips(world, steps_early=True)
    clips(world, steps_early=True, is_atomic=True, degree=1)
    clips(world, degree="host")


def unequal_shards(world):
    """The last rank owns two thirds of the states, the first of three ranks none, and each rank gets the same parameters."""
    weights = [1.0, *range(2, world.size + 1)] if world.size < 3 else [0, 1, 2.0]
    model, own, theirs, other = pair(plain, OPTIMIZERS["AdamW"], shard_weights=weights)
    for step in range(4):
        step_of(model, own, world, step)
        step_of(theirs, other, world, step)
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")
    same_on_all_ranks(model, world)
    reducer = model._steps.reducer
    elements, bytes_here = sum(one.numel() for one in model.parameters()), reducer._library.reducer_optimizer_bytes(reducer.address)
    share = 8 * elements * weights[world.rank] / sum(weights)  # two states of float32
    expect(abs(bytes_here - share) <= 64 * 8, bytes_here, share)
    own.consolidate_state_dict(to=0)
    if world.rank == 0:
        expect(len(own.state_dict()["state"]) == len(list(model.parameters())), "a state is missing")


def scales(world):
    """A loss scale that overflows on one rank: all ranks skip the step, and their scales stay equal."""
    scaler, alone = (torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2))
    model = seeded(plain)
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    model, theirs = ours(model, optimizer=own, grad_scaler=scaler), ours(seeded(plain))
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(6):
        for each, optimizer, scale in ((model, own, scaler), (theirs, other, alone)):
            optimizer.zero_grad()
            x, y = batch(world, step)
            if step == 2 and world.rank == world.size - 1:
                x = x * float("inf")
            scale.scale(loss_of(each, x, y)).backward()
            scale.step(optimizer)
            scale.update()
        expect(scaler.get_scale() == alone.get_scale(), step, scaler.get_scale(), alone.get_scale())
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")
    same_on_all_ranks(model, world)


def resumes(world):
    """A state goes to torch's own optimizer and back, and to a module with other buffers, which continues with the same bits."""
    for name in ("SGD, momentum", "AdamW", "Adagrad"):
        model, own, theirs, other = pair(plain, OPTIMIZERS[name])
        for step in range(3):
            step_of(model, own, world, step)
            step_of(theirs, other, world, step)
        own.consolidate_state_dict(to=world.size - 1)
        saved = [None]
        if world.rank == world.size - 1:
            whole = io.BytesIO()
            torch.save((own.state_dict(), model.module.state_dict()), whole)
            saved = [whole.getvalue()]
        else:
            message_of(RuntimeError, own.state_dict, "consolidate_state_dict")
        dist.broadcast_object_list(saved, world.size - 1)
        state, values = torch.load(io.BytesIO(saved[0]))
        for index, entry in other.state_dict()["state"].items():
            for key, wanted in entry.items():
                close([state["state"][index][key]], [wanted], 1e-6, f"{name}: {key}")

        again = seeded(plain, 2)
        again_own = OPTIMIZERS[name](again.parameters())
        again = ours(again, optimizer=again_own, bucket_cap_mb=0.0005)
        again.module.load_state_dict(values)
        again_own.load_state_dict(state)
        other.load_state_dict(state)
        theirs.module.load_state_dict(values)
        for step in range(3, 6):
            for each, optimizer in ((model, own), (again, again_own), (theirs, other)):
                step_of(each, optimizer, world, step)
        close(again.parameters(), model.parameters(), 0, f"{name}: continued")
        close(theirs.parameters(), model.parameters(), 2e-6, f"{name}: continued by torch's")


def resumes_half_precision(world):
    """Masters are saved, so nothing is rounded twice. Without them, they begin at the parameters' values."""
    def make():
        model = seeded(lambda: plain(torch.bfloat16))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return ours(model, optimizer=optimizer), optimizer
    (model, own), (again, again_own) = make(), make()
    for step in range(4):
        step_of(model, own, world, step, torch.bfloat16)
    own.consolidate_state_dict()
    saved = [own.state_dict() if world.rank == 0 else None]
    dist.broadcast_object_list(saved, 0)
    again.module.load_state_dict(model.module.state_dict())
    again_own.load_state_dict(saved[0])
    for step in range(4, 8):
        step_of(model, own, world, step, torch.bfloat16)
        step_of(again, again_own, world, step, torch.bfloat16)
    close(model.parameters(), again.parameters(), 0, "continued")


def changes_parameters(world):
    """A program may write parameters between steps, of 16 bits as well."""
    for dtype in (torch.float32, torch.bfloat16):
        model = seeded(lambda: plain(dtype))
        own = torch.optim.SGD(model.parameters(), lr=0.0)
        model = ours(model, optimizer=own)
        step_of(model, own, world, 0, dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        step_of(model, own, world, 1, dtype)
        expect(all(parameter.eq(0.25).all() for parameter in model.parameters()), "a value is lost")


def moves_parameters(world):
    """Parameters that a program has put into other memory, or replaced, are stepped on as before."""
    for dtype in (torch.float32, torch.bfloat16):
        model = seeded(lambda: plain(dtype))
        own = torch.optim.SGD(model.parameters(), lr=0.0)
        model = ours(model, optimizer=own)
        step_of(model, own, world, 0, dtype)
        for parameter in model.parameters():
            parameter.data = torch.full_like(parameter, 0.25)
        step_of(model, own, world, 1, dtype)
        expect(all(parameter.eq(0.25).all() for parameter in model.parameters()), "a value of .data is lost")
        own.param_groups[0]["lr"] = 0.5
        step_of(model, own, world, 2, dtype)
        expect(all(parameter.ne(0.25).any() for parameter in model.parameters()), "a parameter is no longer stepped")
        same_on_all_ranks(model, world)


def replaces_parameters(world):
    model, own, theirs, other = pair(plain, OPTIMIZERS["AdamW"])
    step_of(model, own, world, 0)
    step_of(theirs, other, world, 0)
    values = {name: value.clone() for name, value in theirs.module.state_dict().items()}
    model.module.load_state_dict(values, assign=True)
    for step in range(1, 4):
        step_of(model, own, world, step)
        step_of(theirs, other, world, step)
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def loads_an_empty_state(world):
    """The state of an optimizer that has made no step sets the states to their beginning."""
    for name in ("AdamW", "Adagrad", "SGD, momentum"):
        model, own, theirs, other = pair(plain, OPTIMIZERS[name])
        for step in range(2):
            step_of(model, own, world, step)
        model.module.load_state_dict(theirs.module.state_dict())
        own.load_state_dict(OPTIMIZERS[name](seeded(plain).parameters()).state_dict())
        for step in range(2):
            step_of(model, own, world, step)
            step_of(theirs, other, world, step)
            close(model.parameters(), theirs.parameters(), 2e-6, f"{name}: step {step}")


def scheduled_before(world):
    """A scheduler that is made before the module is wrapped has put a step of its own into the optimizer."""
    model = seeded(plain)
    own = OPTIMIZERS["SGD"](model.parameters())
    plan = torch.optim.lr_scheduler.StepLR(own, 1, 0.5)
    model, theirs = ours(model, optimizer=own), ours(seeded(plain))
    other = OPTIMIZERS["SGD"](theirs.parameters())
    wanted = torch.optim.lr_scheduler.StepLR(other, 1, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            step_of(model, own, world, step)
            plan.step()
            step_of(theirs, other, world, step)
            wanted.step()
            close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def looks_between_steps(world):
    """A forward pass that no backward pass follows leaves the optimizer as it was."""
    model, own, theirs, other = pair(plain, OPTIMIZERS["AdamW"])
    for step in range(3):
        step_of(model, own, world, step)
        step_of(theirs, other, world, step)
        loss_of(model, *batch(world, 7)).item()
        own.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.01 / (step + 1)
        own.consolidate_state_dict()
        close(model.parameters(), theirs.parameters(), 2e-6, f"step {step}")


def keeps_old_values_apart(world):
    """A graph from before a step is refused, as after torch's own step."""
    model, own, _, _ = pair(plain, OPTIMIZERS["SGD"])
    old = (model.module[2].weight * model.module[0].weight.sum()).sum()
    step_of(model, own, world, 0)
    try:
        old.backward()
    except RuntimeError as error:
        expect("modified by an inplace operation" in str(error), error)
        return
    raise AssertionError("a graph of old values ran on new ones")


def closures_and_hooks(world):
    model, own, theirs, other = pair(plain, OPTIMIZERS["AdamW"])
    seen = []
    own.register_step_post_hook(lambda *_: seen.append(1))
    for step in range(3):
        def closure(each=model, optimizer=own):
            optimizer.zero_grad()
            loss = loss_of(each, *batch(world, step))
            loss.backward()
            return loss
        mine, wanted = own.step(closure), other.step(lambda: closure(theirs, other))
        expect(abs(mine.item() - wanted.item()) < 1e-5, mine, wanted)
    expect(len(seen) == 3, seen)
    expect(isinstance(own, torch.optim.AdamW), type(own))
    close(model.parameters(), theirs.parameters(), 2e-6)


# ---- Errors ----


def message_of(kind, call, *words):
    try:
        call()
    except kind as error:
        text = str(error)
        expect(text.startswith("shoal: ") and all(word in text for word in words), text)
        return
    raise AssertionError(f"no {kind.__name__} with {words}")


class Own(torch.optim.AdamW):
    """An optimizer of a program's own."""


def refuses(world):
    def wrap(optimizer, module, **options):
        return lambda: ours(module, optimizer=optimizer, **options)
    module = plain()
    message_of(TypeError, wrap(torch.optim.RMSprop(module.parameters()), module), "RMSprop", "SGD, Adam, AdamW, Adagrad")
    message_of(TypeError, wrap(Own(module.parameters()), module), "Own")
    message_of(ValueError, wrap(torch.optim.Adam(module.parameters(), amsgrad=True), module), "amsgrad")
    message_of(ValueError, wrap(torch.optim.SGD(module[0].parameters(), lr=1), module), "does not step parameter 2.weight", "4 in all")
    more = [*module.parameters(), nn.Parameter(torch.zeros(3))]
    message_of(ValueError, wrap(torch.optim.SGD(more, lr=1), module), "also steps 1 parameters", "[3]")
    stepped = torch.optim.AdamW(module.parameters())
    module(torch.zeros(1, 12)).sum().backward()
    stepped.step()
    module.zero_grad()
    message_of(ValueError, wrap(stepped, module), "has made steps already")
    stepped = torch.optim.Adagrad(module.parameters())
    module(torch.zeros(1, 12)).sum().backward()
    stepped.step()
    module.zero_grad()
    message_of(ValueError, wrap(stepped, module), "has made steps already")
    message_of(ValueError, lambda: ours(module, max_norm=1.0), "are for optimizer=")
    own = torch.optim.AdamW(module.parameters())
    message_of(ValueError, wrap(own, module, degree="all"), "degree is 'all'")
    message_of(ValueError, lambda: ours(module, shard_weights=[1]), "shard_weights are for optimizer=")
    message_of(ValueError, wrap(own, module, shard_weights=[1] * 5), "shard_weights has 5 numbers", f"{world.size} ranks")
    message_of(ValueError, wrap(own, module, shard_weights=[1] * 5, degree="host"), f"{world.size} ranks")
    message_of(Exception, wrap(own, module, shard_weights=[-1] * world.size), "weight 0 is -1")
    message_of(Exception, wrap(own, module, shard_weights=[0] * world.size), "must be above 0")
    message_of(Exception, wrap(own, module, degree=5), "does not divide")
    message_of(Exception, wrap(own, module, compression="int8"), "leave compression out")
    wrapped = ours(module, optimizer=own)
    message_of(ValueError, wrap(own, module), "of another module")
    message_of(RuntimeError, lambda: own.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), "cannot be added")
    message_of(RuntimeError, own.state_dict, "consolidate_state_dict() on all ranks before")
    message_of(TypeError, lambda: copy.deepcopy(own), "state_dict")
    message_of(TypeError, lambda: pickle.dumps(wrapped), "state_dict")
    message_of(RuntimeError, wrapped._set_static_graph, "static_graph=True")
    step_of(wrapped, own, world, 0)
    own.consolidate_state_dict()
    if world.rank == 0:
        state = own.state_dict()
        state["state"][0]["exp_avg"] = torch.zeros(5)
        message_of(ValueError, lambda: own.load_state_dict(state), "exp_avg of parameter 0.weight has the shape [5]")
    step_of(wrapped, own, world, 1)


def refuses_join(world):
    module = plain()
    model = ours(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))

    def run():
        with model.join():
            loss_of(model, *batch(world)).backward()
    message_of(NotImplementedError, run, "join() with optimizer=")


def different_settings(world):
    """Rates that differ are named before the first step."""
    module = plain()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1 * (1 + world.rank))
    message_of(Exception, lambda: ours(module, optimizer=optimizer), "rate of group 0 is 0.1 on rank 0, 0.2 on rank 1")


CASES = [optimizer_case(*row) for row in OPTIMIZERS.items()]
if "decoupled_weight_decay" in torch.optim.Adam.__init__.__code__.co_varnames:
    CASES.append(optimizer_case("Adam, decoupled_weight_decay", decoupled))
CASES += [Case(body.__name__, body, sizes=(1, 2, 3)) for body in (
    half_precision, schedules_and_groups, accumulates, unused, clips, clips_early, unequal_shards, resumes, resumes_half_precision, changes_parameters,
    closures_and_hooks, moves_parameters, replaces_parameters, loads_an_empty_state, scheduled_before, looks_between_steps,
    keeps_old_values_apart)]
CASES += [Case(body.__name__, body, sizes=(1, 2)) for body in (scales, refuses)]
CASES += [Case("refuses_join", refuses_join, sizes=(2,), fresh=True)]
CASES += [Case("different_settings", different_settings, sizes=(2,))]

if __name__ == "__main__":
    ranks.run(CASES)
