#!/usr/bin/env python3
"""DistributedDataParallel(noise_scale=True) measures the noise scale of all ranks' gradients with every other option, and ScaledLR
sets the rates of the rules, follows other schedules, and resumes."""
import copy
import math
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn

warnings.filterwarnings("ignore")
STEPS = 12


def ours(module, **options):
    import shoal.torch
    return shoal.torch.DistributedDataParallel(module, **{"noise_scale": 20, **options})


def scaled(*words, **options):
    import shoal.torch
    return shoal.torch.ScaledLR(*words, **options)


def model_of(seed=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(rank, step, samples):
    torch.manual_seed(100 * step + rank)
    return torch.randn(samples, 6, dtype=torch.float64), torch.randn(samples, 3, dtype=torch.float64)


def loss_of(model, pair):
    return (model(pair[0]) - pair[1]).square().mean()


def samples_of(rank, step):
    return 2 + rank + step % 2


def gradient_of(model, pairs):
    """The sum of the gradients of some batches, as one vector."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for pair in pairs:
        loss_of(twin, pair).backward()
    return torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])


class Reference:
    """Measures the noise scale from the gradients of all ranks, on one."""

    def __init__(self, window=20):
        from shoal import _scaling
        self.average = _scaling.NoiseAverage(window)

    def add(self, gradients, samples):
        count = len(gradients)
        small = count / sum(1 / each for each in samples)
        mean = torch.stack(gradients).mean(0)
        self.average.add(small, float(sum(each.square().sum() for each in gradients)) / count, count * small, float(mean.square().sum()))


def check(noise, reference):
    wanted = reference.average.read()
    for name in ("scale", "error", "low", "high", "squared", "variance", "batch", "steps"):
        got, value = getattr(noise, name), getattr(wanted, name)
        expect(got == value or math.isnan(got) and math.isnan(value) or abs(got - value) <= 1e-7 * abs(value), name, got, value)
    return wanted


def the_noise_is_that_of_all_ranks_norms(world):
    for locals_, options in ((0, {}), (2, {}), (0, {"find_unused_parameters": True}), (0, {"static_graph": True})):
        module = ours(model_of(), **options)
        reference = Reference()
        for step in range(STEPS):
            passes = range(locals_ + 1)
            pairs = [[batch(rank, step + 50 * each, samples_of(rank, step)) for each in passes] for rank in range(world.size)]
            reference.add([gradient_of(module.module, own) for own in pairs], [samples_of(rank, step) * len(passes) for rank in range(world.size)])
            with module.no_sync():
                for pair in pairs[world.rank][:-1]:
                    loss_of(module, pair).backward()
            loss_of(module, pairs[world.rank][-1]).backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter -= 0.1 * parameter.grad
            module.zero_grad()
            check(module.noise_scale(), reference)
        expect(module.noise_scale().steps == STEPS, module.noise_scale())


def a_loss_scale_is_divided_out(world):
    """With the optimizer in the reduction and without it. The scaler finds an infinity in the first steps and halves the scale."""
    for has_optimizer in (False, True):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 20, growth_interval=3)
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        module = ours(model, grad_scaler=scaler, optimizer=optimizer if has_optimizer else None)
        reference = Reference()
        for step in range(STEPS):
            pairs = [batch(rank, step, 4) for rank in range(world.size)]
            spoiled = step in (0, 5)
            if not spoiled:
                reference.add([gradient_of(module.module, [pair]) for pair in pairs], [4] * world.size)
            loss = loss_of(module, pairs[world.rank])
            scaler.scale(loss * (math.inf if spoiled else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            check(module.noise_scale(), reference)
        expect(module.noise_scale().left_out == 2, module.noise_scale())


def ranks_that_have_joined_do_not_count(world):
    for by_initial in (True, False):
        module = ours(model_of())
        reference = Reference()
        own = 10 - 2 * world.rank
        with module.join(divide_by_initial_world_size=by_initial):
            for step in range(own):
                active = [rank for rank in range(world.size) if step < 10 - 2 * rank]
                pairs = [batch(rank, step, 3 + rank) for rank in active]
                reference.add([gradient_of(module.module, [pair]) for pair in pairs], [3 + rank for rank in active])
                loss_of(module, batch(world.rank, step, 3 + world.rank)).backward()
                check(module.noise_scale(), reference)
                module.zero_grad()  # parameters stay, so that each rank knows all gradients


def one_rank_says_why(world):
    module = ours(model_of())
    for step in range(3):
        loss_of(module, batch(0, step, 4)).backward()
    noise = module.noise_scale()
    expect(math.isnan(noise.scale) and noise.left_out == 3 and "two ranks" in str(noise) and not noise.is_known, noise)


def the_sentence_is_printed(world):
    import dataclasses
    module = ours(model_of(), noise_scale=True)
    expect("not known yet" in str(module.noise_scale()), module.noise_scale())
    for step in range(STEPS):
        loss_of(module, batch(world.rank, step, 4)).backward()
    noise = dataclasses.replace(module.noise_scale(), state=0, scale=1000.0, error=52.0).of_batch(300)
    expect(str(noise) == "your global batch is 0.3 times the noise scale (1000 samples, error 52): doubling it should cost 23 % more "
           "samples and save 38 % of the steps", noise)


def raises(kind, words, function):
    try:
        function()
    except kind as error:
        expect(words in str(error), error)
    else:
        expect(False, f"no {kind.__name__} with {words}")


def misuse_is_told(world):
    import shoal.torch
    model = model_of()
    plain = shoal.torch.DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (plain.noise_scale, plain.noise_state_dict, lambda: plain.load_noise_state_dict({})):
        raises(RuntimeError, "noise_scale=True", call)
    raises(ValueError, "number of steps", lambda: ours(model_of(), noise_scale=0.5))
    raises(ValueError, "one of none, linear", lambda: scaled(optimizer, "cubic", old_batch=8, batch=16))
    raises(ValueError, "pass model=", lambda: scaled(optimizer, "adascale", old_batch=8, batch=16))
    raises(RuntimeError, "noise_scale=True", lambda: scaled(optimizer, "adascale", old_batch=8, batch=16, model=plain))
    raises(ValueError, "old_batch is 0", lambda: scaled(optimizer, "linear", old_batch=0, batch=16))
    raises(ValueError, "warmup is -1", lambda: scaled(optimizer, "linear", old_batch=8, batch=16, warmup=-1))
    other = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model_of().parameters(), lr=0.1), 5)
    raises(ValueError, "another optimizer", lambda: scaled(optimizer, "linear", old_batch=8, batch=16, schedule=other))
    module = ours(model_of())
    raises(ValueError, "not a saved noise average", lambda: module.load_noise_state_dict({"weight": 1}))
    raises(ValueError, "negative", lambda: module.load_noise_state_dict({**module.noise_state_dict(), "weight": -1.0}))
    scheduler = scaled(optimizer, "linear", old_batch=8, batch=16)
    raises(ValueError, "the saved old_batch is 8.0",
           lambda: scaled(optimizer, "linear", old_batch=4, batch=16).load_state_dict(scheduler.state_dict()))


# ---- Rates ----


def near(one, other):
    return abs(one - other) <= 1e-12 * abs(other)


def rules_set_the_rates(world):
    for name, rule, factor in (("SGD", None, 4), ("AdamW", None, 2), ("SGD", "sqrt", 2), ("Adam", "linear", 4), ("SGD", "none", 1)):
        model = model_of()
        optimizer = getattr(torch.optim, name)([{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}], lr=0.1)
        scheduler = scaled(optimizer, rule, old_batch=16, batch=64)
        for step in range(3):
            expect(all(near(one, other * factor) for one, other in zip(scheduler.get_last_lr(), (0.1, 0.5))), scheduler.get_last_lr())
            expect(scheduler.iterations == 4 * step and scheduler.gain == 4, scheduler.iterations)
            optimizer.step()
            scheduler.step()
    scheduler.batch = 32
    scheduler.step()
    expect(scheduler.gain == 2 and scheduler.iterations == 16, scheduler.iterations)
    other = scaled(optimizer, None, old_batch=16, batch=128)  # as on more ranks
    other.load_state_dict(scaled(optimizer, None, old_batch=16, batch=64).state_dict())
    other.step()
    expect(other.batch == 128 and other.gain == 8, other.gain)


def moments_are_scaled(world):
    import shoal.torch
    optimizer = torch.optim.AdamW(model_of().parameters(), eps=1e-6)
    shoal.torch.scale_moments(optimizer, 4)
    group = optimizer.param_groups[0]
    expect(near(group["betas"][0], 0.6) and near(group["betas"][1], 0.996) and near(group["eps"], 5e-7), group)
    adam = torch.optim.Adam(model_of().parameters())
    raises(ValueError, "up to 10 times the batch, not 11 times", lambda: shoal.torch.scale_moments(adam, 11))
    raises(ValueError, "cannot be 0 times", lambda: shoal.torch.scale_moments(adam, 0))
    expect(adam.param_groups[0]["betas"] == (0.9, 0.999), adam.param_groups)
    raises(ValueError, "SGD has no betas", lambda: shoal.torch.scale_moments(torch.optim.SGD(model_of().parameters(), lr=1), 2))


def a_warmup_rises_from_the_old_rate(world):
    optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
    scheduler = scaled(optimizer, "linear", old_batch=16, batch=64, warmup=10)
    for factor in (1, 2.2, 3.4, 4, 4):
        expect(near(optimizer.param_groups[0]["lr"], 0.1 * factor), optimizer.param_groups, factor)
        optimizer.step()
        scheduler.step()


def other_schedules_are_followed(world):
    """Both kinds count steps of the old batch. The cosine computes each rate from the one before."""
    for kind in ("function", "StepLR", "CosineAnnealingLR"):
        optimizer = torch.optim.SGD(model_of().parameters(), lr=0.1)
        twin = torch.optim.SGD(model_of().parameters(), lr=0.1)
        makes = {"StepLR": lambda one: torch.optim.lr_scheduler.StepLR(one, 5, 0.5),
                 "CosineAnnealingLR": lambda one: torch.optim.lr_scheduler.CosineAnnealingLR(one, 40),
                 "function": lambda one: torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step))}
        reference = makes[kind](twin)
        schedule = makes[kind](optimizer) if kind != "function" else lambda step: 1 / (1 + step)
        scheduler = scaled(optimizer, "linear", old_batch=16, batch=48, schedule=schedule)
        for _ in range(8):
            expect(near(optimizer.param_groups[0]["lr"], 3 * twin.param_groups[0]["lr"]), kind, optimizer.param_groups, twin.param_groups)
            optimizer.step()
            scheduler.step()
            for _ in range(3):
                twin.step()
                reference.step()


def trained(world, module, optimizer, scheduler, steps):
    rates = []
    for step in steps:
        loss_of(module, batch(world.rank, step, 4)).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def adascale(world, rule="adascale", make=torch.optim.SGD, **options):
    model = model_of()
    optimizer = make(model.parameters(), lr=0.01)
    module = ours(model, optimizer=optimizer if options.pop("in_reduction", False) else None)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return module, optimizer, scaled(optimizer, rule, old_batch=4, batch=4 * world.size, model=module, schedule=schedule, **options)


def adascale_follows_the_noise(world):
    for make in (torch.optim.SGD, torch.optim.Adam):
        module, optimizer, scheduler = adascale(world, make=make)
        iterations = 0.0
        for step in range(20):
            gain = scheduler.gain
            noise = module.noise_scale()
            if noise.steps < 8:
                expect(gain == 1, gain)
            else:
                wanted = world.size * (noise.scale + 4) / (noise.scale + 4 * world.size) if math.isfinite(noise.scale) else world.size
                expect(near(gain, wanted) and 1 <= gain <= world.size, gain, wanted, noise)
            factor = gain if make is torch.optim.SGD else math.sqrt(gain)
            expect(near(optimizer.param_groups[0]["lr"], 0.01 * 0.99 ** int(iterations) * factor), optimizer.param_groups, factor)
            iterations += gain
            trained(world, module, optimizer, scheduler, [step])
            expect(near(scheduler.iterations, iterations), scheduler.iterations, iterations)


def training_resumes(world):
    """A training that is saved and restored has the rates and parameters of one that continues."""
    for in_reduction in (False, True):
        module, optimizer, scheduler = adascale(world, in_reduction=in_reduction)
        trained(world, module, optimizer, scheduler, range(15))
        if in_reduction:
            optimizer.consolidate_state_dict()
        saved = copy.deepcopy([module.state_dict(), scheduler.state_dict()])
        groups = copy.deepcopy(optimizer.state_dict()) if world.rank == 0 or not in_reduction else None
        box = [groups]
        dist.broadcast_object_list(box, 0)
        wanted = trained(world, module, optimizer, scheduler, range(15, 25))
        other, its_optimizer, its_scheduler = adascale(world, in_reduction=in_reduction)
        other.load_state_dict(saved[0])
        its_optimizer.load_state_dict(box[0])
        its_scheduler.load_state_dict(saved[1])
        expect(trained(world, other, its_optimizer, its_scheduler, range(15, 25)) == wanted, wanted)
        for one, theirs in zip(module.parameters(), other.parameters()):
            expect(torch.equal(one, theirs), "parameters differ")


CASES = [Case(body.__name__, body, sizes=(2, 3)) for body in (the_noise_is_that_of_all_ranks_norms, a_loss_scale_is_divided_out,
                                                             ranks_that_have_joined_do_not_count)]
CASES += [Case(body.__name__, body, sizes=(2,)) for body in (the_sentence_is_printed, misuse_is_told, adascale_follows_the_noise,
                                                            training_resumes)]
CASES += [Case(body.__name__, body, sizes=(1,)) for body in (one_rank_says_why, rules_set_the_rates, moments_are_scaled, a_warmup_rises_from_the_old_rate,
                                                            other_schedules_are_followed)]

if __name__ == "__main__":
    ranks.run(CASES)
