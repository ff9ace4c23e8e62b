#!/usr/bin/env python3
"""smdistributed.modelparallel.torch: scripts for SageMaker's model-parallel library. Losses, gradients and states equal those of one
process, with one partition and with several, with and without replicas; each misuse has its error."""
import contextlib
import copy
import json
import os
import pathlib
import shutil
import tempfile
import time
import warnings
from unittest import mock

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn

warnings.filterwarnings("ignore")
MICROBATCHES = 4


def started(world, partitions=None, microbatches=MICROBATCHES, **more):
    """Begins a job and returns the package."""
    import smdistributed.modelparallel.torch as smp
    partitions = partitions or min(2, world.size)
    smp.init({"pipeline_parallel_degree": partitions, "microbatches": microbatches, "ddp": world.size > partitions, **more})
    return smp


def fails(function, kind, *words):
    """Checks that a call raises an error of a kind whose text has these words."""
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error), words)
        return error
    expect(False, "no error with", words)


def fails_in_step(world, function, kind, *words):
    """Like fails(), for a step after a good one. A step that fails ends the pipeline's communicator at once: no rank may still be in
    the good step."""
    ranks.meet(world)
    return fails(function, kind, *words)


# ---- Models and batches ----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolutions, then layers, as in the vendor's example; two parts that are units."""

    class Front(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3)

        def forward(self, x):
            x = nn.functional.relu(self.conv2(nn.functional.relu(self.conv1(x))))
            return torch.flatten(nn.functional.max_pool2d(x, 2), 1)

    class Back(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(24, 16), nn.Linear(16, 5)

        def forward(self, x):
            return nn.functional.log_softmax(self.fc2(nn.functional.relu(self.fc1(x))), 1)

    def __init__(self):
        super().__init__()
        self.net1, self.net2 = self.Front(), self.Back()

    def forward(self, x):
        return self.net2(self.net1(x))


class Words(nn.Module):
    """A head that shares the embedding's weight, a buffer, a module that is never called, and an argument with a name."""

    def __init__(self, width=8, layers=4, words=11):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, input_ids, mask=None):
        x = self.embedding(input_ids) * self.scale
        if mask is not None:
            x = x * mask.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


def images(step, replica=0, rows=8):
    torch.manual_seed(100 * step + replica)
    return torch.randn(rows, 1, 8, 8), torch.randint(5, (rows,))


def sentences(step, replica=0, rows=8):
    torch.manual_seed(100 * step + replica)
    ids = torch.randint(11, (rows, 7))
    return ids[:, :-1], ids[:, 1:]


def words_loss(logits, targets):
    return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))


def same(mine, wanted, what=""):
    torch.testing.assert_close(mine, wanted, msg=lambda text: f"{what}: {text}")


class OneProcess:
    """One process that trains on the batches of all replicas."""

    def __init__(self, model, loss, optimizer):
        self.model, self._loss, self._optimizer = model, loss, optimizer

    def step(self, batches):
        self._optimizer.zero_grad()
        losses = [self._loss(self.model(inputs), targets) for inputs, targets in batches]
        (sum(losses) / len(losses)).backward()
        self._optimizer.step()
        return losses


def trained(smp, make, batch, loss_of, steps=3, optimizer_of=lambda each: torch.optim.AdamW(each, lr=0.01), seen=None):
    """Trains by smp and by one process, and compares losses, gradients and parameters in each step."""
    one = OneProcess(seeded(make), loss_of, None)
    one._optimizer = optimizer_of(one.model.parameters())
    plain = seeded(make)
    inner = optimizer_of(plain.parameters())
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(inner)

    @smp.step
    def train_step(model, inputs, targets):
        result = model(inputs)
        loss = loss_of(result, targets)
        model.backward(loss)
        return result, loss

    for number in range(steps):
        batches = [batch(number, replica) for replica in range(smp.dp_size())]
        wanted = one.step(batches)
        optimizer.zero_grad()
        result, losses = train_step(model, *batches[smp.dp_rank()])
        same(losses.reduce_mean(), wanted[smp.dp_rank()].detach(), "loss")
        expect(result.concat().shape[0] == 8 and len(losses.outputs) == smp.state.cfg.microbatches)
        own = dict(one.model.named_parameters(remove_duplicate=False))
        for name, parameter in model.local_named_parameters():
            if own[name].grad is not None:
                same(parameter.grad, own[name].grad, name)
        optimizer.step()
        for name, parameter in model.local_named_parameters():
            same(parameter.detach(), own[name].detach(), name)
        if seen:
            seen(model, optimizer)
    return model, optimizer, one


# ---- Training --------------------------------------------------------------------------------------------------------------


def images_train(world):
    for pipeline in ("interleaved", "simple"):
        smp = started(world, pipeline=pipeline)
        trained(smp, Net, images, nn.functional.nll_loss)


def words_train(world):
    for partitions in {1, world.size}:
        smp = started(world, partitions)
        trained(smp, Words, sentences, words_loss)


def replicas_of_pipelines_train(world):
    for strategy in ("cluster", "spread", "PDT"):
        smp = started(world, 2, placement_strategy=strategy)
        expect((smp.pp_size(), smp.dp_size()) == (2, 2))
        trained(smp, Words, sentences, words_loss)


def few_active_microbatches_train(world):
    for pipeline in ("interleaved", "simple"):
        for active in (1, 2, 3):
            smp = started(world, world.size, pipeline=pipeline, active_microbatches=active)
            trained(smp, Words, sentences, words_loss, steps=2)


def one_microbatch_trains(world):
    smp = started(world, world.size, microbatches=1)
    trained(smp, Words, sentences, words_loss)


def memory_decides_about_stages(world):
    for weight in (0.0, 0.5, 1):
        smp = started(world, world.size, memory_weight=weight, optimize="speed")
        trained(smp, Words, sentences, words_loss, steps=1)


def divided(smp, make=Net, seed=1, optimizer=torch.optim.AdamW):
    plain = seeded(make, seed)
    inner = optimizer(plain.parameters(), lr=0.01)
    return smp.DistributedModel(plain), smp.DistributedOptimizer(inner)


def divided_step(smp, model, optimizer, one, number, bound=None):
    """One step of both."""
    batches = [images(number, replica) for replica in range(smp.dp_size())]
    one._optimizer.zero_grad()
    (sum(nn.functional.nll_loss(one.model(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
    if bound:
        nn.utils.clip_grad_norm_(one.model.parameters(), bound)
    one._optimizer.step()
    optimizer.zero_grad()
    loss = plain_step(smp, nn.functional.nll_loss)(model, *batches[smp.dp_rank()])
    optimizer.step()
    return loss


def whole_state(smp, model):
    """Returns model.state_dict(), which rank 0 alone may have, on all ranks."""
    return smp.allgather(dict(model.state_dict()))[0]


def parameters_and_states_are_sharded(world):
    for microbatches, bound in ((1, 1.0), (4, 0.1)):
        smp = started(world, 1, microbatches=microbatches, sharded_data_parallel_degree=world.size, sdp_gradient_clipping=bound)
        one = OneProcess(seeded(Net), nn.functional.nll_loss, None)
        one._optimizer = torch.optim.AdamW(one.model.parameters(), lr=0.01)
        model, optimizer = divided(smp)
        for number in range(3):
            divided_step(smp, model, optimizer, one, number, bound)
            for name, value in whole_state(smp, model).items():
                same(value, one.model.state_dict()[name].detach(), name)
        with torch.no_grad():
            inputs, _ = images(9)
            same(smp.step(lambda model, inputs: model(inputs))(model, inputs).concat(), one.model(inputs))
    for call in (model.local_state_dict, lambda: model.clip_grad_norm_(1.0), model.join, lambda: smp.amp.GradScaler().step(optimizer)):
        fails(call, NotImplementedError, "sharded_data_parallel_degree")
    fails(lambda: smp.DistributedModel(Net(), backward_passes_per_step=2), NotImplementedError, "one backward pass")
    fails(lambda: plain_step(smp, nn.functional.nll_loss)(smp.DistributedModel(Net()), *images(0)) if not smp.state.optimizers.clear() else 0,
          RuntimeError, "needs the optimizer")


def divided_states_resume(world):
    """From partial and full checkpoints; before the first step and after others."""
    for key, value, bound in (("shard_optimizer_state", True, None), ("sharded_data_parallel_degree", world.size, 1.0)):
        smp = started(world, 1, microbatches=1, **{key: value})
        with Folder(smp) as folder:
            one = OneProcess(seeded(Net), nn.functional.nll_loss, None)
            one._optimizer = torch.optim.AdamW(one.model.parameters(), lr=0.01)
            model, optimizer = divided(smp)
            for number in range(2):
                divided_step(smp, model, optimizer, one, number, bound)
            for partial in (True, False):
                smp.save_checkpoint(folder, "a", partial, model, optimizer, {"step": 2})
            smp.barrier()
            divided_step(smp, model, optimizer, one, 2, bound)
            wanted = {name: each.detach().clone() for name, each in one.model.state_dict().items()}
            for partial in (True, False):
                for is_late in (False, True):
                    model, optimizer = divided(smp, seed=5)
                    if is_late:
                        plain_step(smp, nn.functional.nll_loss)(model, *images(7))
                        optimizer.step()
                    expect(smp.resume_from_checkpoint(folder, partial=partial) == {"step": 2})
                    optimizer.zero_grad()
                    plain_step(smp, nn.functional.nll_loss)(model, *images(2, smp.dp_rank()))
                    optimizer.step()
                    for name, value_now in whole_state(smp, model).items():
                        same(value_now, wanted[name], f"{key} {partial} {is_late} {name}")
            smp = started(world, 1, microbatches=1)
            model, optimizer = divided(smp)
            fails(lambda: smp.resume_from_checkpoint(folder, "a"), RuntimeError, "ranks have divided the states")
            smp.save_checkpoint(folder, "b", True, model, optimizer)
            smp.barrier()
            smp = started(world, 1, microbatches=1, **{key: value})
            model, optimizer = divided(smp)
            fails(lambda: smp.resume_from_checkpoint(folder, "b"), RuntimeError, "has whole states, and this job divides them")


def states_of_optimizers_are_divided(world):
    smp = started(world, 1, microbatches=1, shard_optimizer_state=True)
    one = OneProcess(seeded(Net), nn.functional.nll_loss, None)
    one._optimizer = torch.optim.AdamW(one.model.parameters(), lr=0.01)
    model, optimizer = divided(smp)
    for number in range(3):
        divided_step(smp, model, optimizer, one, number)
        for (name, mine), (_, wanted) in zip(model.named_parameters(), one.model.named_parameters()):
            same(mine.detach(), wanted.detach(), name)
    scaler = smp.amp.GradScaler()
    fails(lambda: scaler.step(optimizer), NotImplementedError, "shard_optimizer_state")
    fails(lambda: model.clip_grad_norm_(1.0), NotImplementedError, "shard_optimizer_state")


def optimizers_that_cannot_be_divided_are_refused(world):
    smp = started(world, 1, microbatches=1, shard_optimizer_state=True)
    train = plain_step(smp, nn.functional.nll_loss)
    model = smp.DistributedModel(seeded(Net), backward_passes_per_step=2)
    fails(lambda: train(model, *images(0)), RuntimeError, "make optimizer = smp.DistributedOptimizer(optimizer)")
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    fails(lambda: train(model, *images(0)), NotImplementedError, "set microbatches instead")
    model = smp.DistributedModel(seeded(Net))
    optimizer = smp.DistributedOptimizer(torch.optim.RMSprop(model.parameters()))
    fails(lambda: train(model, *images(0)), (TypeError, ValueError, NotImplementedError), "RMSprop")
    expect(isinstance(optimizer, torch.optim.Optimizer))


def replicas_divide_states(world):
    """With several partitions, and with several microbatches of the whole model: each replica has its share of the states, and the
    program clips between the backward pass and the step."""
    for partitions in {1, max(1, world.size // 2)}:
        smp = started(world, partitions, shard_optimizer_state=True)
        one = OneProcess(seeded(Words), words_loss, None)
        one._optimizer = torch.optim.Adam(one.model.parameters(), lr=0.01)
        plain = seeded(Words)
        inner = torch.optim.Adam(plain.parameters(), lr=0.01)
        model, optimizer = smp.DistributedModel(plain), smp.DistributedOptimizer(inner)
        with Folder(smp) as folder:
            for number in range(4):
                if number == 2:
                    for partial in (True, False):
                        smp.save_checkpoint(folder, "a", partial, model, optimizer, {"step": 2})
                    smp.barrier()
                shared_step(smp, model, optimizer, one, number)
            expect_shares(smp, model, inner)
            wanted = one.model.state_dict()
            fails(lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), RuntimeError, "before the first step")
            for partial, is_divided in ((True, True), (False, True), (False, False), (True, False)):
                continues_from(started(world, partitions, shard_optimizer_state=is_divided), folder, partial, wanted)


def shared_step(smp, model, optimizer, one, number):
    """One step of both, with gradients clipped."""
    batches = [sentences(number, replica) for replica in range(smp.dp_size())]
    if one:
        one._optimizer.zero_grad()
        (sum(words_loss(one.model(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
        norm = nn.utils.clip_grad_norm_(one.model.parameters(), 0.5)
        one._optimizer.step()
    optimizer.zero_grad()
    expect(all(each.grad is None for each in model.local_parameters()) if model.partitioned else True)
    plain_step(smp, words_loss)(model, *batches[smp.dp_rank()])
    found = model.clip_grad_norm_(0.5)
    optimizer.step()
    if one:
        same(found, norm, "norm")
        wanted = dict(one.model.named_parameters(remove_duplicate=False))
        for name, parameter in model.local_named_parameters():
            same(parameter.detach(), wanted[name].detach(), name)


def expect_shares(smp, model, inner):
    """Each trained parameter has its state on one of the data-parallel ranks; elements are divided about equally."""
    names = {id(each): name for name, each in model.local_named_parameters()}
    own = {names[id(each)]: each.numel() for each in inner.state}
    every = smp.allgather(own, smp.DP_GROUP)
    trained = [name for name, each in model.local_named_parameters() if "unused" not in name]
    expect(sorted(name for each in every for name in each) == sorted(trained), every)
    sizes = [sum(each.values()) for each in every]
    largest = max(size for each in every for size in each.values())
    expect(max(sizes) - min(sizes) <= largest, sizes)
    parts = smp.allgather(sorted(inner.param_groups[0]["params"][0].shape), smp.DP_GROUP)
    expect(len(inner.param_groups[0]["params"]) >= len(trained) and parts.count(parts[0]) == len(parts))


def continues_from(smp, folder, partial, wanted):
    """Two more steps after a checkpoint lead to the values that the first run has reached."""
    plain = seeded(Words, seed=7)
    inner = torch.optim.Adam(plain.parameters(), lr=0.7)
    model, optimizer = smp.DistributedModel(plain), smp.DistributedOptimizer(inner)
    expect(smp.resume_from_checkpoint(folder, "a", partial=partial) == {"step": 2})
    for number in (2, 3):
        shared_step(smp, model, optimizer, None, number)
    for name, parameter in model.local_named_parameters():
        same(parameter.detach(), wanted[name], f"{partial} {name}")
    if smp.state.cfg.shard_optimizer_state:
        expect_shares(smp, model, inner)


def plain_step(smp, loss_of):
    @smp.step
    def train_step(model, inputs, targets):
        loss = loss_of(model(inputs), targets)
        model.backward(loss)
        return loss
    return train_step


def gradients_add_up(world):
    """Without zero_grad(), and with several backward passes for each step."""
    for options in ({}, {"backward_passes_per_step": 2}):
        smp = started(world)
        one, model = seeded(Words), smp.DistributedModel(seeded(Words), **options)
        train_step = plain_step(smp, words_loss)
        for number in range(2):
            batches = [sentences(number, replica) for replica in range(smp.dp_size())]
            (sum(words_loss(one(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
            train_step(model, *batches[smp.dp_rank()])
        wanted = dict(one.named_parameters(remove_duplicate=False))
        for name, parameter in model.local_named_parameters():
            if wanted[name].grad is not None:
                same(parameter.grad, wanted[name].grad, name)


def gradients_are_clipped(world):
    """By the norm of the whole model, in which tied parameters count once."""
    smp = started(world)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    if smp.pp_size() > 1:
        fails(lambda: model.clip_grad_norm_(1.0), RuntimeError, "before the first step")
    batches = [sentences(0, replica) for replica in range(smp.dp_size())]
    (sum(words_loss(one(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
    plain_step(smp, words_loss)(model, *batches[smp.dp_rank()])
    for bound in (0.05, 1.0):
        same(model.clip_grad_norm_(bound), nn.utils.clip_grad_norm_(one.parameters(), bound))
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        if wanted[name].grad is not None:
            same(parameter.grad, wanted[name].grad, name)


def sums_of_microbatches(world):
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words), average_grads_across_microbatches=False)
    inputs, targets = sentences(0)
    nn.functional.cross_entropy(one(inputs).reshape(-1, 11), targets.reshape(-1), reduction="sum").backward()

    @smp.step
    def train_step(inputs, targets):
        logits = model(inputs)
        model.backward(nn.functional.cross_entropy(logits.reshape(-1, 11), targets.reshape(-1), reduction="sum"))
    expect(train_step(inputs, targets) is None)
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        if wanted[name].grad is not None:
            same(parameter.grad, wanted[name].grad, name)


def backward_takes_gradients(world):
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    inputs, _ = sentences(0)
    weights = torch.randn(8, 6, 11)
    one(inputs).backward(weights)

    @smp.step()
    def train_step(inputs, weights):
        logits = model(inputs)
        model.backward(logits, weights)
        model.backward([logits], [weights * (smp.state.cfg.microbatches - 1)])
    if world.size == 1:  # a graph is used once
        return
    train_step(inputs, weights)
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        if wanted[name].grad is not None:
            torch.testing.assert_close(parameter.grad, wanted[name].grad, rtol=1e-4, atol=1e-4)


def arguments_have_names(world):
    """Arguments of the model may be positional or named; those that hold no tensor pass whole."""
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)
    mask = torch.rand(8, 6)
    loss = words_loss(one(inputs, mask=mask), targets)
    loss.backward()

    @smp.step
    def train_step(settings, batch, **rest):
        logits = model(batch["ids"], mask=rest["mask"])
        loss = words_loss(logits, batch["targets"])
        model.backward(loss)
        return {"loss": loss, "text": settings["name"], "sizes": (logits.shape[0], logits)}
    found = train_step({"name": "x"}, {"ids": inputs, "targets": targets}, mask=mask)
    same(found["loss"].average(), loss.detach())
    expect(found["text"] == ["x"] * MICROBATCHES and found["sizes"][0] == [2] * MICROBATCHES, found)
    same(found["sizes"][1].merge(), one(inputs, mask=mask).detach())
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        if wanted[name].grad is not None:
            same(parameter.grad, wanted[name].grad, name)


def settings_around_the_model_hold_everywhere(world):
    """torch.autocast in the step function is that of every stage."""
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)

    @smp.step
    def train_step(inputs, targets):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(inputs)
        loss = words_loss(logits.float(), targets)
        model.backward(loss)
        return logits
    kinds = {each.dtype for each in train_step(inputs, targets).outputs}
    with torch.autocast("cpu", torch.bfloat16):
        expect(kinds == {one(inputs).dtype} == {torch.bfloat16}, kinds)
    expect(all(parameter.grad.dtype is torch.float32 for parameter in model.local_parameters() if parameter.grad is not None))


def values_of_messages_stay(world):
    """What crosses to the last stage may be returned, although the memory of its message is used again."""
    smp = started(world, world.size, auto_partition=False, default_partition=0)

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.one(x)
            return self.two(x), x
    plain = seeded(Pair)
    smp.set_partition(plain.two, 1)
    one, model = seeded(Pair), smp.DistributedModel(plain)

    @smp.step
    def train_step(x):
        result, hidden = model(x)
        model.backward(result.sum() + hidden.sum())
        return hidden
    torch.manual_seed(2)
    batches = [torch.randn(8, 6) for _ in range(3)]
    found = [train_step(each) for each in batches]
    for each, output in zip(batches, found):
        same(output.concat(), one(each)[1].detach())
    with torch.no_grad():
        found = [smp.step(lambda x: model(x)[1])(each) for each in batches]
    for each, output in zip(batches, found):
        same(output.concat(), one(each)[1].detach())


def models_run_in_16_bits(world):
    """As autocast does; parameters made in float16 become float32."""
    for key in ("bf16", "fp16"):
        smp = started(world, world.size, **{key: True})
        one, plain = seeded(Words), seeded(Words)
        with smp.model_creation(dtype=torch.float16):
            expect(nn.Linear(2, 2).weight.dtype is torch.float16)
        model = smp.DistributedModel(plain.half())
        with torch.no_grad():
            for mine, theirs in zip(one.parameters(), plain.parameters()):
                mine.copy_(theirs)
        one.scale.copy_(plain.scale)
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()), static_loss_scale=None, dynamic_loss_scale=True,
                                             dynamic_loss_args={"scale_window": 1000})
        inputs, targets = sentences(0)
        with torch.autocast("cpu", torch.bfloat16):
            wanted = words_loss(one(inputs).float(), targets)
        wanted.backward()

        @smp.step
        def train_step(model, inputs, targets):
            logits = model(inputs)
            loss = words_loss(logits, targets)
            model.backward(loss)
            return loss, logits
        loss, logits = train_step(model, inputs, targets)
        expect({each.dtype for each in logits.outputs} == {torch.float32})
        torch.testing.assert_close(loss.reduce_mean(), wanted.detach(), rtol=1e-3, atol=1e-3)
        own = dict(one.named_parameters(remove_duplicate=False))
        for name, parameter in model.local_named_parameters():
            expect(parameter.dtype is torch.float32)
            if own[name].grad is not None:
                torch.testing.assert_close(parameter.grad, own[name].grad, rtol=0.05, atol=0.01)
        norm = optimizer.clip_master_grads(1e9)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(one.parameters(), 1e9), rtol=0.05, atol=0.01)
        expect(optimizer.overflow is False and optimizer.loss_scale == 1.0 and optimizer.update_master_grads() is None)
        optimizer.step()


def evaluations_return_numbers(world):
    """Without gradients, in both modes, between steps; numbers come as lists."""
    smp = started(world)
    model, optimizer, one = trained(smp, Net, images, nn.functional.nll_loss, steps=1)
    inputs, targets = images(9)

    @smp.step
    def test_step(model, inputs, targets):
        result = model(inputs)
        return nn.functional.nll_loss(result, targets, reduction="sum").item(), (result.argmax(1) == targets).sum().item()
    for mode in (model.eval, model.train):
        mode()
        with torch.no_grad():
            losses, correct = test_step(model, inputs, targets)
            wanted = one.model(inputs)
        expect(isinstance(losses, list) and len(losses) == MICROBATCHES)
        same(torch.tensor(sum(losses)), nn.functional.nll_loss(wanted, targets, reduction="sum"))
        expect(sum(correct) == (wanted.argmax(1) == targets).sum().item())


def batches_of_pp_rank_0_count(world):
    """Other ranks of the pipeline may read something else."""
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    train_step = plain_step(smp, words_loss)
    for number in range(2):
        losses = train_step(model, *sentences(number, smp.pp_rank()))
        inputs, targets = sentences(number, 0)
        same(losses.reduce_mean(), words_loss(one(inputs), targets).detach())
    train_step = plain_step(smp, words_loss)
    for number in range(2):  # only pp_rank 0 reads, as in the vendor's scripts
        batch = sentences(number) if smp.pp_rank() == 0 else (None, torch.zeros(8, 0))
        same(train_step(model, *batch).reduce_mean(), words_loss(one(sentences(number)[0]), sentences(number)[1]).detach())


# ---- Partitions ------------------------------------------------------------------------------------------------------------


def partitions_follow_marks(world):
    smp = started(world, 2, auto_partition=False, default_partition=0)

    class Marked(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(4, 4)
            with smp.partition(1):
                with smp.partition(0):
                    self.two = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
                self.three = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
            self.last = nn.Linear(4, 4)

        def forward(self, x):
            return self.last(self.three(self.two(self.one(x))))
    expected = {0: {"one", "two"}, 1: {"three", "last"}}
    model = smp.DistributedModel(Marked())
    fails(lambda: list(model.local_parameters()), RuntimeError, "partitioned in the first step")
    train_step = plain_step(smp, nn.functional.mse_loss)
    train_step(model, torch.randn(8, 4), torch.randn(8, 4))
    expect(model.partitioned and {name.split(".")[0] for name, _ in model.local_named_parameters()} == expected[smp.pp_rank()])

    smp = started(world, 2, auto_partition=False, default_partition=1)
    plain = Words()
    smp.set_partition(plain.embedding, 0)
    smp.set_partition(plain.layers[0], 0)
    model = smp.DistributedModel(plain)
    plain_step(smp, words_loss)(model, *sentences(0))
    names = {name for name, _ in model.local_named_parameters()}
    expect(("layers.0.0.weight" in names) == (smp.pp_rank() == 0) and ("layers.1.0.weight" in names) == (smp.pp_rank() == 1), names)


def graphs_stay_if_asked_for(world):
    """With one partition, and detach_outputs=False."""
    smp = started(world, 1, microbatches=2)
    model = smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)
    for detaches in (True, False):
        found = smp.step(lambda model, inputs: {"logits": (model(inputs),)}, detach_outputs=detaches)(model, inputs)
        expect(found["logits"][0].concat().requires_grad is not detaches)
        expect(not found["logits"][0].detach().concat().requires_grad)


def wrong_marks_are_refused(world):
    smp = started(world, 2, auto_partition=False, default_partition=0)
    fails(lambda: smp.set_partition(nn.Linear(1, 1), 2), ValueError, "less than the number of partitions, 2")
    train_step = plain_step(smp, words_loss)
    fails(lambda: train_step(smp.DistributedModel(Words()), *sentences(0)), ValueError, "nothing is in partition 1")
    plain = Words()
    smp.set_partition(plain.layers[0], 1)
    smp.set_partition(plain.layers[1], 0)
    fails(lambda: train_step(smp.DistributedModel(plain), *sentences(0)), ValueError, "layers.1.0 is marked for partition 0", "follow the order")


def models_with_few_parts_are_refused(world):
    smp = started(world, 2)

    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.only = nn.Linear(4, 4)

        def forward(self, x):
            return self.only(x)
    fails(lambda: plain_step(smp, nn.functional.mse_loss)(smp.DistributedModel(Single()), torch.randn(8, 4), torch.randn(8, 4)),
          RuntimeError, "the model has 1 parts (only)", "use fewer partitions")


def values_come_when_the_model_is_partitioned(world):
    for partitions in {1, world.size}:
        smp = started(world, partitions, delayed_parameter_initialization=True)
        with smp.model_creation(dtype=torch.float64):
            plain = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        expect(all(each.is_meta for each in plain.parameters()) and torch.get_default_dtype() is torch.float32)
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1) if partitions > 1 else None
        model = smp.DistributedModel(plain)
        optimizer = smp.DistributedOptimizer(optimizer or torch.optim.SGD(model.parameters(), lr=0.1))
        train_step = plain_step(smp, nn.functional.mse_loss)
        train_step(model, torch.randn(8, 6).double(), torch.randn(8, 6).double())
        before = [each.detach().clone() for each in model.local_parameters()]
        optimizer.step()
        expect(before and not any(torch.equal(each, now) for each, now in zip(before, model.local_parameters())))
        copies = smp.allgather([each.detach() for each in model.local_parameters()], smp.DP_GROUP)
        expect(all(torch.equal(mine, theirs) for other in copies for mine, theirs in zip(copies[0], other)))


def hooks_run(world):
    smp = started(world)
    seen = []
    model = smp.DistributedModel(seeded(Words))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    model.register_post_partition_hook(lambda *given: seen.append(("partition", given, model.partitioned)))
    model.register_post_partition_hook(lambda *given: seen.append("removed")).remove()
    model.register_post_step_hook(lambda *given: seen.append(("step", given)))
    train_step = plain_step(smp, words_loss)
    for number in range(2):
        train_step(model, *sentences(number))
    expect(seen == [("partition", (model, optimizer), True), ("step", (model, optimizer))], seen)


# ---- States ----------------------------------------------------------------------------------------------------------------


def states_equal_those_of_one_process(world):
    """Of model and optimizer, whole and in parts; loaded before and after the first step they continue equally."""
    smp = started(world)
    model, optimizer, one = trained(smp, Words, sentences, words_loss)
    mine, wanted = model.state_dict(), one.model.state_dict()
    expect(list(mine) == list(wanted))
    for name in wanted:
        same(mine[name], wanted[name], name)
    compare_optimizers(optimizer.state_dict(), one._optimizer.state_dict())
    part, part_of_optimizer = model.local_state_dict(), optimizer.local_state_dict()
    expect(part["_smp_is_partial"] and part_of_optimizer["_smp_is_partial"])
    gathered = model.state_dict(gather_to_rank0=True)
    expect(bool(gathered) == (smp.pp_rank() == 0 or smp.pp_size() == 1))
    saved = copy.deepcopy((mine, optimizer.state_dict())), copy.deepcopy((part, part_of_optimizer))
    for of_model, of_optimizer in saved:
        for when in ("before", "after"):
            continues_equally(smp, of_model, copy.deepcopy(of_optimizer), copy.deepcopy(one), when)


def compare_optimizers(mine, wanted):
    expect(mine["param_groups"] == wanted["param_groups"], mine["param_groups"], wanted["param_groups"])
    expect(mine["state"].keys() == wanted["state"].keys(), mine["state"].keys(), wanted["state"].keys())
    for number, values in wanted["state"].items():
        for key, value in values.items():
            same(mine["state"][number][key], value, f"{number} {key}")


def continues_equally(smp, of_model, of_optimizer, one, when):
    plain = seeded(Words, seed=2)
    inner = torch.optim.AdamW(plain.parameters(), lr=0.5)
    model, optimizer = smp.DistributedModel(plain), smp.DistributedOptimizer(inner)
    train_step = plain_step(smp, words_loss)
    if when == "after":
        train_step(model, *sentences(7))
        optimizer.step()
    model.load_state_dict(of_model)
    optimizer.load_state_dict(of_optimizer)
    batches = [sentences(8, replica) for replica in range(smp.dp_size())]
    one._optimizer.param_groups[0]["params"] = list(one.model.parameters())
    again = torch.optim.AdamW(one.model.parameters())
    again.load_state_dict(one._optimizer.state_dict())
    one._optimizer = again
    one.step(batches)
    optimizer.zero_grad()
    train_step(model, *batches[smp.dp_rank()])
    optimizer.step()
    wanted = dict(one.model.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        same(parameter.detach(), wanted[name].detach(), f"{when} {name}")


def states_of_other_models_are_refused(world):
    smp = started(world, 2)
    model, optimizer, _ = trained(smp, Words, sentences, words_loss, steps=1)
    whole = model.state_dict()
    fails(lambda: model.load_state_dict({**whole, "extra": torch.ones(1)}), RuntimeError, "it has extra besides, and lacks nothing")
    del whole["norm.bias"]
    fails(lambda: model.load_state_dict(whole), RuntimeError, "lacks norm.bias")
    expect(model.load_state_dict(whole, strict=False).missing_keys == ["norm.bias"])
    of_optimizer = optimizer.state_dict()
    of_optimizer["param_groups"][0]["params"] = of_optimizer["param_groups"][0]["params"][:-1]
    fails(lambda: optimizer.load_state_dict(of_optimizer), RuntimeError, "group 0 has 12 parameters there, and 13 here")


class Folder:
    """A folder that all ranks use."""

    def __init__(self, smp):
        self._smp, self.path = smp, smp.allgather(tempfile.mkdtemp() if smp.rank() == 0 else None)[0]

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        self._smp.barrier()
        if self._smp.rank() == 0:
            shutil.rmtree(self.path)


def files_are_saved_and_loaded(world):
    smp = started(world)
    with Folder(smp) as folder:
        values = {"rank": smp.mp_rank(), "tensor": torch.arange(3)}
        if smp.dp_rank() == 0:
            smp.save(values, f"{folder}/x.pt")
            smp.save(values, f"{folder}/whole.pt", partial=False)
        smp.barrier()
        found = smp.load(f"{folder}/x.pt")
        expect(found["rank"] == smp.mp_rank() and torch.equal(found["tensor"], values["tensor"]))
        expect(smp.load(f"{folder}/whole.pt", partial=False)["rank"] == 0)
        expect(sorted(os.listdir(folder)) == ["whole.pt", *(f"x.pt_{number}" for number in range(smp.mp_size()))])
        smp.barrier()
        if smp.rank() == 0:
            pathlib.Path(folder, f"x.pt_{smp.mp_size()}").touch()
        smp.barrier()
        fails(lambda: smp.load(f"{folder}/x.pt"), RuntimeError, f"are more than {smp.mp_size()} parts", f"this job has {smp.mp_size()} partitions")
        smp.save(world.rank, f"{folder}/own.pt", v3=True)
        expect(os.path.exists(f"{folder}/own.pt_{smp.pp_rank()}_0_{smp.dp_rank()}") and smp.load(f"{folder}/own.pt") == world.rank)
        fails(lambda: smp.load(f"{folder}/none.pt"), RuntimeError, "are 0 parts")
        fails(lambda: smp.save(values, 3), RuntimeError, "the name of a file")


def checkpoints_resume(world):
    """Partial and whole ones; before and after the first step; the newest by default; old ones are dropped."""
    smp = started(world)
    with Folder(smp) as folder:
        model, optimizer, one = trained(smp, Words, sentences, words_loss)
        with slow_writes(smp):
            for partial in (True, False):
                for tag in ("a", "b", "c"):
                    smp.save_checkpoint(folder, tag, partial, model, optimizer, {"step": tag, "values": [1, 2]},
                                        num_kept_partial_checkpoints=2 if partial else None)
                    kind = "partial" if partial else "full"
                    expect(json.loads(pathlib.Path(folder, "newest").read_text())[kind] == tag, "complete on each rank at once")
        partials = sorted(each for each in os.listdir(folder) if each.endswith("_partial"))
        expect(partials == ["b_partial", "c_partial"], partials)
        for partial in (True, False):
            for tag in (None, "b"):
                resumes(smp, folder, partial, tag, copy.deepcopy(one))
        model = smp.DistributedModel(seeded(Words))
        optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
        fails(lambda: smp.resume_from_checkpoint(folder, "a"), RuntimeError, "there is no partial checkpoint a")
        fails(lambda: smp.resume_from_checkpoint(f"{folder}/none"), RuntimeError, "there is no partial checkpoint at")
        fails(lambda: smp.resume_from_checkpoint(folder, "z", partial=False), RuntimeError, "the checkpoint z has no z at")
        fails(lambda: smp.save_checkpoint(folder, "a/b"), RuntimeError, "tag must be a name")
        smp.barrier()
        if smp.mp_size() > 1:
            if smp.rank() == 0:
                pathlib.Path(folder, "c_partial/parts.json").write_text(json.dumps({"pipeline_parallel_degree": 7}))
            smp.barrier()
            fails(lambda: smp.resume_from_checkpoint(folder), RuntimeError, "has 7 partitions, and this job 2")


@contextlib.contextmanager
def slow_writes(smp):
    """Inside, the files of rank 0 take their time, so that a rank that does not wait for them finds none."""
    plain, torch.save = torch.save, lambda *words, **more: (time.sleep(0.1 * (smp.rank() == 0)), plain(*words, **more))
    try:
        yield
    finally:
        torch.save = plain


def resumes(smp, folder, partial, tag, one):
    plain = seeded(Words, seed=3)
    inner = torch.optim.AdamW(plain.parameters(), lr=0.5)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(inner)
    expect(smp.resume_from_checkpoint(folder, tag, partial) == {"step": tag or "c", "values": [1, 2]})
    for name, value in model.state_dict().items():
        same(value, one.model.state_dict()[name], name)
    plain_step(smp, words_loss)(model, *sentences(8))
    compare_optimizers(optimizer.state_dict(), one._optimizer.state_dict())


# ---- Optimizers ------------------------------------------------------------------------------------------------------------


def optimizers_pass_on_what_they_lack(world):
    smp = started(world, world.size)
    model = smp.DistributedModel(seeded(Words))

    class Own(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            return 1, 2

        def clip_master_grads(self, bound):
            return bound * 2
    optimizer = smp.DistributedOptimizer(Own(model.parameters(), lr=0.5, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    expect(isinstance(optimizer, torch.optim.Optimizer) and optimizer.clip_master_grads(3) == 6)
    plain_step(smp, words_loss)(model, *sentences(0))
    expect(optimizer.step() == (1, 2))
    scheduler.step()
    expect(optimizer.param_groups[0]["lr"] == 0.25)
    expect(len(optimizer.param_groups[0]["params"]) == len(list(model.local_parameters())))
    fails(lambda: optimizer.no_such_thing, AttributeError, "no_such_thing")
    fails(lambda: smp.DistributedOptimizer(optimizer), RuntimeError, "not wrapped yet")


def vendors_optimizers_step(world):
    """FusedLAMB and FusedNovoGrad against their papers' formulas, in float64; with them a model in partitions trains as one process."""
    from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedNovoGrad
    torch.manual_seed(1)
    value, gradients = torch.randn(3, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    for decay in (0.0, 0.1):
        parameter = nn.Parameter(value.clone())
        optimizer = FusedLAMB([parameter], lr=0.1, weight_decay=decay, max_grad_norm=1.0)
        wanted, first, second = value.clone(), torch.zeros_like(value), torch.zeros_like(value)
        for number, gradient in enumerate(gradients, 1):
            parameter.grad = gradient.clone()
            optimizer.step()
            gradient = gradient / max(1.0, gradient.norm().item())
            first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient ** 2
            update = (first / (1 - 0.9 ** number)) / ((second / (1 - 0.999 ** number)).sqrt() + 1e-6) + decay * wanted
            wanted = wanted - 0.1 * (wanted.norm() / update.norm() if decay else 1.0) * update
            same(parameter.detach(), wanted, f"LAMB {decay} {number}")
        expect(optimizer.param_groups[0]["step"] == 2)
    failed_steps_leave_nothing(FusedLAMB)
    parameter = nn.Parameter(value.clone())
    optimizer = FusedNovoGrad([parameter], lr=0.1, betas=(0.9, 0.98), weight_decay=0.1)
    wanted, first, second = value.clone(), torch.zeros_like(value), None
    for number, gradient in enumerate(gradients, 1):
        parameter.grad = gradient.clone()
        optimizer.step()
        squared = gradient.norm() ** 2
        second = squared if second is None else 0.98 * second + 0.02 * squared
        first = 0.9 * first + 0.1 * gradient / (second.sqrt() / (1 - 0.98 ** number) ** 0.5 + 1e-8)
        wanted = wanted - 0.1 * (first / (1 - 0.9 ** number) + 0.1 * wanted)
        same(parameter.detach(), wanted, f"NovoGrad {number}")
    for bad in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"amsgrad": True}):
        fails(lambda bad=bad: FusedLAMB([parameter], **bad), ValueError, "smp: ")
        fails(lambda bad=bad: FusedNovoGrad([parameter], **bad), ValueError, "smp: ")
    fails(lambda: FusedNovoGrad([parameter], norm_type=1), ValueError, "norm_type must be 2 or 0")
    for is_divided in {False, world.size > 2}:
        smp = started(world, shard_optimizer_state=is_divided)
        for bound in (0.0, 0.1):
            trained(smp, Words, sentences, words_loss, optimizer_of=lambda each: FusedLAMB(each, lr=0.01, max_grad_norm=bound))
        trained(smp, Words, sentences, words_loss, optimizer_of=lambda each: FusedNovoGrad(each, lr=0.01))


def failed_steps_leave_nothing(made):
    """An optimizer's step after one that raised moves a parameter once, also if ranks divide the parameter."""
    class Parts:
        of_gradients = staticmethod(lambda parameters: 0.0)
        is_part = staticmethod(lambda parameter: True)
        of_whole = staticmethod(lambda parameters, norms: norms)
    moved = []
    for is_failing in (False, True):
        parameters = [nn.Parameter(torch.ones(4)) for _ in range(2)]
        optimizer = made(parameters, lr=0.1)
        optimizer.norms = Parts
        parameters[0].grad = torch.ones(4)
        if is_failing:
            parameters[1].grad = torch.ones(4)
            optimizer.state[parameters[1]] = {"exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
            fails(optimizer.step, RuntimeError, "size")
            parameters[1].grad = None
            optimizer.state.clear()
            optimizer.param_groups[0]["step"] = 0
        optimizer.step()
        moved.append(parameters[0].detach())
    same(moved[1], moved[0], "a step after one that failed")


def optimizers_may_be_made_after_the_first_step(world):
    smp = started(world, world.size)
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    former = torch.optim.AdamW(model.parameters())
    train_step = plain_step(smp, words_loss)
    train_step(model, *sentences(0))
    words_loss(one(sentences(0)[0]), sentences(0)[1]).backward()
    fails(lambda: smp.DistributedOptimizer(former), RuntimeError, "has parameters of other partitions")
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters()))
    wanted = torch.optim.AdamW(one.parameters())
    optimizer.step()
    wanted.step()
    mine, whole = optimizer.state_dict(), wanted.state_dict()
    used = whole["param_groups"][0]["params"][:len(mine["param_groups"][0]["params"])]  # the unused module has none on a stage
    expect(mine["param_groups"][0]["params"] == used and len(mine["state"]) == len(whole["state"]))
    optimizer.load_optimizer_backcompat(optimizer.save_optimizer_backcompat(gather_if_shard=False))
    compare_optimizers(optimizer.state_dict(), mine)
    optimizer.load_state_dict(mine)


def losses_are_scaled(world):
    """A gradient that is not finite on one rank skips the step of all, also if replicas divide the optimizer's states."""
    scales(started(world, world.size))
    if world.size == 2:
        scales(started(world, 1, shard_optimizer_state=True))


def scales(smp):
    model = smp.DistributedModel(seeded(Words))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = smp.amp.GradScaler(init_scale=8.0, growth_interval=1)
    one = seeded(Words)
    other = torch.optim.SGD(one.parameters(), lr=0.1)

    @smp.step
    def train_step(model, scaler, inputs, targets):
        loss = words_loss(model(inputs), targets)
        model.backward(scaler.scale(loss))
        return loss
    for number, is_broken in enumerate((False, True, False)):
        inputs, targets = sentences(number)
        optimizer.zero_grad()
        train_step(model, scaler, inputs, targets)
        if is_broken and smp.rank() == 0:
            next(parameter for parameter in model.local_parameters() if parameter.grad is not None).grad.fill_(float("inf"))
        if not is_broken:
            other.zero_grad()
            words_loss(one(inputs), targets).backward()
            other.step()
        scaler.step(optimizer)
        scaler.update()
    expect(scaler.get_scale() == 16.0, scaler.get_scale())
    wanted = dict(one.named_parameters(remove_duplicate=False))
    for name, parameter in model.local_named_parameters():
        same(parameter.detach(), wanted[name].detach(), name)


# ---- Activation checkpoints ------------------------------------------------------------------------------------------------


def activations_are_computed_again(world):
    import smdistributed.modelparallel.torch as package
    calls = []

    class Counting(nn.Tanh):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)
    for strategy in ("each", "contiguous", "group_2"):
        smp = started(world, world.size)
        plain = seeded(Words)
        for layer in plain.layers:
            layer[1] = Counting()
        smp.set_activation_checkpointing(plain.layers, strategy=strategy)
        one, model = seeded(Words), smp.DistributedModel(plain)
        train_step = plain_step(smp, words_loss)
        for number in range(2):
            calls.clear()
            inputs, targets = sentences(number)
            one.zero_grad()
            model.zero_grad()
            train_step(model, inputs, targets)
            words_loss(one(inputs), targets).backward()
        own = sum("layers" in name and name.endswith("weight") for name, _ in model.local_named_parameters())
        expect(len(calls) == 2 * MICROBATCHES * own, len(calls), own)
        wanted = dict(one.named_parameters(remove_duplicate=False))
        for name, parameter in model.local_named_parameters():
            if wanted[name].grad is not None:
                same(parameter.grad, wanted[name].grad, name)
        fails(lambda: smp.set_activation_checkpointing(nn.Linear(1, 1), strategy="some"), ValueError, "\"group_N\"")
    layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    x = torch.randn(2, 4, requires_grad=True)
    for strategy in ("each", "contiguous", "group_2"):
        same(package.checkpoint_sequential(layers, x, strategy), layers(x))
    same(package.checkpoint(layers, x), layers(x))


# ---- Ranks, groups and messages --------------------------------------------------------------------------------------------


def ranks_follow_the_strategy(world):
    """The tables of the vendor's documentation, for 8 processes."""
    from smdistributed.modelparallel._ranks import Placement

    def table(placement):
        return [tuple(placement.places(rank)[letter] for letter in "DPT") for rank in range(placement.size)]
    expect(table(Placement(8, 2, 2, "DPT")) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)])
    expect(table(Placement(8, 2, 2, "PTD")) == [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1), (0, 1, 0), (1, 1, 0), (0, 1, 1), (1, 1, 1)])
    cluster, spread = Placement(8, 2, strategy="DPT"), Placement(8, 2, strategy="TPD")
    expect(spread.groups("MP_GROUP") == [[0, 4], [1, 5], [2, 6], [3, 7]] and spread.groups("DP_GROUP") == [[0, 1, 2, 3], [4, 5, 6, 7]])
    expect(cluster.groups("MP_GROUP") == [[0, 1], [2, 3], [4, 5], [6, 7]] and cluster.groups("DP_GROUP") == [[0, 2, 4, 6], [1, 3, 5, 7]])
    both = Placement(8, 2, 2)
    expect(both.groups("MP_GROUP") == [[0, 1, 2, 3], [4, 5, 6, 7]] and both.groups("DP_GROUP") == [[0, 1, 4, 5], [2, 3, 6, 7]])
    expect(both.groups("RDP_GROUP") == [[0, 4], [1, 5], [2, 6], [3, 7]] and both.groups("TP_GROUP") == [[0, 1], [2, 3], [4, 5], [6, 7]])
    expect(both.groups("PP_GROUP") == [[0, 2], [1, 3], [4, 6], [5, 7]] and both.groups("WORLD") == [list(range(8))])
    fails(lambda: Placement(6, 2, 2), ValueError, "6 ranks cannot be divided into replicas of 4")


def groups_are_those_of_this_rank(world):
    import smdistributed.modelparallel.torch as package
    fails(lambda: package.init({"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 2}), NotImplementedError, "set it to 4")
    smp = started(world, 2)
    expect((smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (world.rank, 4, world.rank, 4))
    expect((smp.pp_rank(), smp.mp_rank(), smp.dp_rank(), smp.rdp_rank(), smp.tp_rank()) ==
           (world.rank % 2, world.rank % 2, world.rank // 2, world.rank // 2, 0))
    expect((smp.pp_size(), smp.mp_size(), smp.dp_size(), smp.rdp_size(), smp.tp_size()) == (2, 2, 2, 2, 1))
    expect(smp.get_mp_group() == [world.rank // 2 * 2, world.rank // 2 * 2 + 1] and smp.get_dp_group() == [world.rank % 2, world.rank % 2 + 2])
    total = torch.tensor([world.rank])
    dist.all_reduce(total, group=smp.get_dp_process_group())
    expect(total.item() == 2 * (world.rank % 2) + 2)
    expect(smp.get_world_process_group().size() == 4 and smp.get_tp_process_group().size() == 1)
    expect(smp.is_initialized() and not smp.is_tracing() and smp.state.cfg.microbatches == MICROBATCHES)


def objects_are_sent(world):
    smp = started(world, 2)
    mine = {"rank": world.rank, "tensor": torch.full((3,), world.rank)}
    for group, others in ((smp.WORLD, [0, 1, 2, 3]), (smp.CommGroup.MP_GROUP, smp.get_mp_group()), (smp.DP_GROUP, smp.get_dp_group()),
                          (smp.TP_GROUP, [world.rank]), (smp.PP_GROUP, smp.get_pp_group()), (smp.RDP_GROUP, smp.get_rdp_group())):
        expect([each["rank"] for each in smp.allgather(mine, group)] == others)
        smp.barrier(group)
    if smp.pp_rank() == 0:
        smp.broadcast(mine, smp.PP_GROUP)
        smp.send("to 1", 1, smp.RankType.MP_RANK)
    else:
        expect(smp.recv_from(0, smp.RankType.PP_RANK)["tensor"].tolist() == [world.rank - 1] * 3)
        expect(smp.recv_from(0, smp.MP_RANK) == "to 1")
    if world.rank == 0:
        smp.broadcast(["all"])
    else:
        expect(smp.recv_from(0, smp.RankType.WORLD_RANK) == ["all"])
    fails(lambda: smp.send(1, world.rank), RuntimeError, "is this process itself")
    fails(lambda: smp.recv_from(2, smp.RankType.PP_RANK), RuntimeError, "there is no rank 2 of the type PP_RANK: the group has 2")
    fails(lambda: smp.allgather(1, "dp"), TypeError, "CommGroup.DP_GROUP")


# ---- Parameters ------------------------------------------------------------------------------------------------------------


def parameters_come_from_the_environment(world):
    import smdistributed.modelparallel
    import smdistributed.modelparallel.torch as smp
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"partitions": 1, "microbatches": 3, "pipeline": "simple", "ddp": True})
    try:
        smp.init()
        expect((smp.pp_size(), smp.state.cfg.microbatches, smp.state.cfg.partitions) == (1, 3, 1))
        smp.init({"pipeline_parallel_degree": 7, "microbatches": 5, "active_microbatches": 2})
        expect((smp.pp_size(), smp.state.cfg.microbatches, smp.state.cfg.active_microbatches) == (1, 3, 2))
        os.environ["SM_HP_MP_PARAMETERS"] = "{"
        fails(smp.init, ValueError, "SM_HP_MP_PARAMETERS is not JSON")
        os.environ["SM_HP_MP_PARAMETERS"] = "[1]"
        fails(smp.init, ValueError, "must be a JSON object")
    finally:
        del os.environ["SM_HP_MP_PARAMETERS"]
    fails(smp.init, ValueError, "there are no parameters", "SM_HP_MP_PARAMETERS")
    fails(lambda: smp.init(3), ValueError, "must be a dict, not int")
    expect(tuple(map(int, smdistributed.modelparallel.__version__.split("."))) >= (1, 10))


def a_second_init_with_the_same_parameters_changes_nothing(world):
    smp = started(world, 2)
    model = smp.DistributedModel(seeded(Words))
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    step, groups = plain_step(smp, words_loss), [smp.get_world_process_group(), smp.get_pp_process_group(), smp.get_dp_process_group()]
    step(model, *sentences(0))
    optimizer.step()
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("a group is made")):
        started(world, 2)
    expect(groups == [smp.get_world_process_group(), smp.get_pp_process_group(), smp.get_dp_process_group()])
    step(model, *sentences(1))
    optimizer.step()
    expect(smp.state.model() is model and list(smp.state.optimizers) == [optimizer])


def a_second_init_with_other_parameters_begins_anew(world):
    """Groups of the same ranks are used again, but no model, and the ranks compare their batches again."""
    smp = started(world, 2)
    from smdistributed.modelparallel.exceptions import SMPError
    from smdistributed.modelparallel.torch import _messages
    former, step, group = smp.DistributedModel(seeded(Words)), plain_step(smp, words_loss), smp.get_pp_process_group()
    step(former, *sentences(0))
    started(world, 2, microbatches=2)
    expect(smp.state.cfg.microbatches == 2 and smp.get_pp_process_group() is group and not smp.state.model)
    fails(lambda: step(former, *sentences(0)), SMPError, "is from before smp.init() was called with other parameters: make it again")
    model = smp.DistributedModel(seeded(Words))
    fails(lambda: step(former, *sentences(0)), SMPError, "make it again")
    for count in (1, 0):  # of comparisons
        with mock.patch.object(_messages, "allgather", side_effect=_messages.allgather) as compared:
            step(model, *sentences(0))
        hashes = [call for call in compared.call_args_list if isinstance(call.args[0], str)]
        expect(len(hashes) == count, compared.call_args_list)


REFUSED = [
    ({}, ValueError, "pipeline_parallel_degree (or partitions) is missing"),
    ({"partitions": 1, "pipeline_parallel_degree": 1}, ValueError, "the same parameter: leave pipeline_parallel_degree out"),
    ({"partitions": 0}, ValueError, "positive integer"), ({"partitions": True}, ValueError, "a number without fraction, not true"),
    ({"partitions": 3}, ValueError, "2 ranks cannot be divided into replicas of 3"),
    ({"partitions": 1}, ValueError, "2 processes are 2 replicas of 1 partitions", "\"ddp\": true"),
    ({"partitions": 2, "microbatches": 0}, ValueError, "microbatches must be a positive integer"),
    ({"partitions": 2, "microbatches": 1.5}, ValueError, "microbatches must be a number without fraction, not 1.5"),
    ({"partitions": 2, "active_microbatches": -1}, ValueError, "active_microbatches must be a positive integer"),
    ({"partitions": 2, "pipeline": "zigzag"}, ValueError, "pipeline must be a value in: interleaved, simple, _only_forward"),
    ({"partitions": 2, "optimize": "cost"}, ValueError, "optimize must be a value in: memory, speed"),
    ({"partitions": 2, "placement_strategy": "DDT"}, ValueError, "cluster, spread, or the letters D, P and T"),
    ({"partitions": 2, "memory_weight": 1.5}, ValueError, "between 0.0 and 1.0, not 1.5"),
    ({"partitions": 2, "auto_partition": False}, ValueError, "default_partition must be supplied"),
    ({"partitions": 2, "default_partition": 2}, ValueError, "less than the number of partitions (2)"),
    ({"partitions": 2, "ddp": "yes"}, ValueError, "ddp must be true or false, not \"yes\""),
    ({"partitions": 2, "shard_optimizer_state": True}, ValueError, "needs \"ddp\": true"),
    ({"partitions": 2, "tensor_parallel_degree": 2}, ValueError, "needs \"ddp\": true"),
    ({"partitions": 2, "sharded_data_parallel_degree": 2}, NotImplementedError, "not compatible with pipeline parallelism"),
    ({"partitions": 1, "sharded_data_parallel_degree": 2}, ValueError, "needs \"ddp\": true"),
    ({"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 3}, ValueError, "cannot be divided into groups of 3 shards"),
    ({"partitions": 1, "ddp": True, "sharded_data_parallel_degree": 2, "shard_optimizer_state": True}, ValueError, "leave shard_optimizer_state out"),
    ({"partitions": 1, "sharded_data_parallel_degree": 0}, ValueError, "positive integer"),
    ({"partitions": 2, "fp16": True, "bf16": True}, ValueError, "choose one"), ({"partitions": 2, "fp16": 1}, ValueError, "true or false, not 1"),
    ({"partitions": 2, "horovod": True}, NotImplementedError, "is for TensorFlow", "\"ddp\": true"),
    ({"partitions": 2, "horovod": True, "ddp": True}, ValueError, "ddp and horovod are both true"),
    ({"partitions": 2, "partition_file": "x"}, NotImplementedError, "smp.partition()"),
    ({"partitions": 2, "load_partition": True}, NotImplementedError, "smp.partition()"),
    ({"partitions": 2, "hybrid_shard_degree": 2}, NotImplementedError, "of version 2"),
    ({"partitions": 2, "microbatchs": 2}, ValueError, "unknown parameter microbatchs: did you mean microbatches?"),
]


def wrong_parameters_are_refused(world):
    import smdistributed.modelparallel.torch as smp
    from smdistributed.modelparallel import _parameters
    for given, kind, *words in REFUSED:
        fails(lambda given=given: smp.init(given), kind, *words)
    for name in _parameters.VERSION_2:
        fails(lambda name=name: smp.init({"partitions": 2, name: 1}), NotImplementedError, f"{name} is of version 2 of the vendor's library")


def names_that_scripts_import_exist(world):
    from smdistributed.modelparallel.torch.nn import FusedLayerNorm
    from smdistributed.modelparallel.torch.nn.huggingface import gpt2, gptj
    from smdistributed.modelparallel.torch.state_mod import state
    from smdistributed.modelparallel.torch.utils import get_distribution_axis, rmsg
    smp = started(world)
    values = {"a": 1}
    expect(state is smp.state and issubclass(FusedLayerNorm, nn.LayerNorm) and isinstance(smp.model.DistributedModel, type))
    expect(get_distribution_axis(nn.Parameter(torch.ones(1))) is None and rmsg("x") == "[0, pp_rank 0] x")
    for translate in (gpt2.translate_hf_state_dict_to_smdistributed, gpt2.translate_state_dict_to_hf_gpt2,
                      gpt2.translate_hf_state_dict_to_smdistributed_gpt2, gptj.translate_hf_gptj_state_dict_to_smdistributed,
                      gptj.translate_state_dict_to_hf_gptj):
        expect(translate(values, max_seq_len=8) == values)
    for barrier in (smp.dp_barrier, smp.mp_barrier, smp.pp_barrier, smp.tp_barrier, smp.rdp_barrier):
        barrier()
    with smp.tensor_parallelism(enabled=True, fused_softmax=True), smp.delay_param_initialization(enabled=False):
        layer = nn.Linear(1, 1)
    smp.set_tensor_parallelism(layer, True)
    from smdistributed.modelparallel.torch.nn import DistributedTransformerLayer
    smp.tp_register_with_module(nn.Linear, DistributedTransformerLayer, *gpt2.get_hf_gpt2_transformer_layer_hooks())
    expect(smp.tp_register(DistributedTransformerLayer)(nn.Linear) is nn.Linear and not smp.state.module_manager.translate_functions)
    fails(DistributedTransformerLayer, NotImplementedError, "DistributedTransformerLayer is not served")
    expect(not layer.weight.is_meta)


def parameters_without_effect_are_named(world):
    from smdistributed.modelparallel import _parameters
    given = {"partitions": 2, **dict.fromkeys(_parameters.POINTLESS, True), "sdp_gradient_clipping": 2.0, "optimize": "speed", "tensor_parallel_degree": 1}
    cfg, notes = _parameters.read(given)
    expect(sorted(each.split(" has")[0] for each in notes) == sorted(_parameters.POINTLESS), notes)
    silent = {"partitions": 2, "optimize": "memory", "prescaled_batch": False, "static_mode": False, "offload_activations": False}
    expect(_parameters.read(silent)[1] == [])
    expect(_parameters.read({"partitions": 2, **dict.fromkeys(set(_parameters.SERVED) - {"pipeline_parallel_degree"})}) ==
           (_parameters.Parameters(pipeline_parallel_degree=2), []))
    expect("bfloat16 takes its place" in _parameters.read({"partitions": 2, "fp16": True})[1][0])
    expect(cfg.optimize == "speed" and cfg.placement_strategy == "DPT")


# ---- Misuse ----------------------------------------------------------------------------------------------------------------


def batches_that_do_not_fit_are_refused(world):
    smp = started(world)
    model = smp.DistributedModel(seeded(Words))
    train_step = plain_step(smp, words_loss)
    inputs, targets = sentences(0, rows=7)
    fails(lambda: train_step(model, inputs, targets), ValueError, "the argument inputs has 7 samples, which 4 microbatches do not divide")

    @smp.step(non_split_inputs=["mask"], input_split_axes={"columns": 1})
    def step(model, inputs, columns, mask, number):
        loss = words_loss(model(inputs), columns.t()) * number
        model.backward(loss)
        return mask, columns
    inputs, targets = sentences(0)
    mask, columns = step(model, inputs, targets.t(), torch.ones(7, 3), torch.tensor(2.0))
    expect(mask.outputs[0].shape == (7, 3) and columns.concat(dim=1).shape == (6, 8) and columns.stack().shape == (4, 6, 2))
    fails(lambda: step(model, inputs, torch.ones(3), mask, 1), ValueError, "the argument columns has a tensor of 1 dimensions", "input_split_axes")
    fails(lambda: smp.step(lambda x: x, non_split_inputs=["y"]), ValueError, "has no argument y")
    fails(lambda: smp.step(3), TypeError, "write @smp.step")


def own_types_are_sliced(world):
    smp = started(world, world.size)
    model = smp.DistributedModel(seeded(Words))

    class Pair:
        def __init__(self, *values):
            self.values = values

        def smp_slice(self, num_mb, mb, axis):
            return Pair(*(each.narrow(axis, mb * (each.shape[axis] // num_mb), each.shape[axis] // num_mb) for each in self.values))

    @smp.step
    def train_step(pair, listed):
        inputs, targets = pair.values
        loss = words_loss(model(inputs), targets)
        model.backward(loss)
        return loss, listed[0][0], {"one": listed[1]["x"]}
    inputs, targets = sentences(0)
    loss, first, named = train_step(Pair(inputs, targets), [(torch.arange(8),), {"x": torch.arange(4)}])
    same(loss.reduce_mean(), words_loss(seeded(Words)(inputs), targets).detach())
    expect(first.concat().tolist() == list(range(8)) and [each.tolist() for each in named["one"].outputs] == [[0], [1], [2], [3]])


class Boxes:
    """What a detector finds in an image: different numbers of boxes."""

    def __init__(self, values):
        self.values = values


class Images:
    def __init__(self, tensors, sizes):
        self.tensors, self.sizes = tensors, sizes

    def smp_slice(self, num_mb, mb, axis):
        rows = len(self.sizes) // num_mb
        return Images(self.tensors.narrow(axis, mb * rows, rows), self.sizes[mb * rows:(mb + 1) * rows])


class BoxesOfImages:
    def __init__(self, boxes):
        self.boxes = boxes

    def smp_slice(self, num_mb, mb, axis):
        rows = len(self.boxes) // num_mb
        return self.boxes[mb * rows:(mb + 1) * rows]


class Detector(nn.Module):
    """Its arguments are objects; a unit returns objects and a dict of losses, which the code around units unpacks."""

    class Proposals(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 1)

        def forward(self, images, x, boxes):
            if any(size != 8 for size in images.sizes):
                raise ValueError("another image")
            scores = self.fc(x).squeeze(1)
            losses = {"score": sum((score - each.values.sum()) ** 2 for score, each in zip(scores, boxes)) / len(boxes)}
            return [Boxes(each.values[each.values > 0.3] * score.sigmoid()) for score, each in zip(scores, boxes)], losses

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x, proposals, boxes):
            kept = torch.stack([each.values.sum() for each in proposals]).unsqueeze(1)
            return {"box": (self.fc(x) * kept).square().mean(), "count": (self.fc(x).sum() - sum(len(each.values) for each in boxes)) ** 2 / 9}

    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))
        self.proposals, self.heads = self.Proposals(), self.Heads()

    def forward(self, images, boxes=None):
        if not isinstance(images, Images):
            raise TypeError("pass Images")
        x = images.tensors
        for each in self.body:
            x = each(x)
        proposals, losses = self.proposals(images, x, boxes)
        found = {}
        found.update(self.heads(x, proposals, boxes))
        found.update(losses)
        return found


def detections(step, rows=8):
    made = torch.Generator().manual_seed(step)
    boxes = [Boxes(torch.rand(int(torch.randint(1, 5, (), generator=made)), generator=made)) for _ in range(rows)]
    return Images(torch.randn(rows, 6, generator=made), [8] * rows), boxes


def models_are_called_with_objects(world):
    """Objects that change from step to step: each rank has them, also if ranks read different batches at first."""
    for is_shared in (False, True):
        smp = started(world, world.size, microbatches=2)
        one, plain = seeded(Detector), seeded(Detector)
        wanted, inner = torch.optim.SGD(one.parameters(), lr=0.01), torch.optim.SGD(plain.parameters(), lr=0.01)
        model, optimizer = smp.DistributedModel(plain), smp.DistributedOptimizer(inner)

        @smp.step
        def train_step(model, images, boxes):
            losses = model(images, boxes)
            model.backward(sum(losses.values()))
            return losses
        for step in range(3):
            images, boxes = detections(step)
            wanted.zero_grad()
            parts = [one(images.smp_slice(2, half, 0), boxes[4 * half:4 * half + 4]) for half in range(2)]
            (sum(sum(each.values()) for each in parts) / 2).backward()
            wanted.step()
            optimizer.zero_grad()
            images, boxes = detections(step + (10 * smp.rank() if is_shared else 0))
            losses = train_step(model, images, BoxesOfImages(boxes))
            optimizer.step()
            for name, each in losses.items():
                same(each.reduce_mean(), sum(part[name] for part in parts).detach() / 2, name)
            for name, parameter in model.local_named_parameters():
                same(parameter.detach(), one.get_parameter(name).detach(), name)
    from shoal.torch import _parcels
    fails(lambda: _parcels.Message([lambda: 1], takes_objects=True), TypeError, "type function", "cannot be pickled", "cut at another unit")
    if world.size > 1:
        fails_in_step(world, lambda: train_step(model, detections(0)[0], BoxesOfImages(detections(0, rows=4)[1])), RuntimeError,
                      "for other arguments")


def steps_that_misuse_the_model_are_refused(world):
    smp = started(world, 2)
    model = smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)
    fails(lambda: model(inputs), RuntimeError, "decorated with @smp.step only")
    fails(lambda: model.backward(torch.ones(())), RuntimeError, "decorated with @smp.step only")
    fails(lambda: smp.step(lambda model, inputs: None)(model, inputs), RuntimeError, "has not called the model")
    train_step = plain_step(smp, words_loss)
    train_step(model, inputs, targets)
    with torch.no_grad():
        fails_in_step(world, lambda: train_step(model, inputs, targets), RuntimeError, "backward() in an evaluation")
    fails(lambda: model.no_sync(), NotImplementedError, "backward_passes_per_step")
    fails(lambda: model.join(), NotImplementedError, "one partition")
    fails(lambda: smp.DistributedModel(model), RuntimeError, "not wrapped yet")


def a_model_is_called_once(world):
    smp = started(world, 2)
    model = smp.DistributedModel(seeded(Words))

    @smp.step
    def twice(inputs):
        return model(inputs) + model(inputs)
    with torch.no_grad():
        fails(lambda: twice(sentences(0)[0]), Exception, "may call the model once")


class Untold(Exception):
    """Cannot be pickled, by an error that has no text."""

    def __reduce__(self):
        raise self

    def __str__(self):
        raise LookupError("no text")


class Local:
    """Can be unpickled by its sender only."""
    sender = None

    def __reduce__(self):
        return Local.made, (os.getpid(),)

    @staticmethod
    def made(sender):
        if os.getpid() != sender:
            raise ImportError(f"this is not process {sender}")
        return Local()


def values_that_a_rank_cannot_unpickle_fail_on_all(world):
    """Each rank gets an error at once, and messages work afterwards."""
    smp = started(world, world.size)
    from smdistributed.modelparallel.exceptions import SMPError
    from smdistributed.modelparallel.torch import _messages
    group = smp.get_mp_process_group()
    words = (["cannot be unpickled here: ImportError: this is not process"] if world.rank else
             ["cannot be sent to the other ranks", f"rank {world.size - 1} cannot unpickle it"])
    for _ in range(2):
        fails(lambda: _messages.share({"a": torch.ones(70001), "b": Local()}, 0, group), SMPError, *words)
        found = _messages.share({"a": torch.arange(3), "b": [world.rank]}, 0, group)
        expect(found["b"] == [0] and found["a"].tolist() == [0, 1, 2], found)


def values_that_are_no_tensors_are_refused(world):
    """A loss that is a number, and results that cannot be sent to the other ranks."""
    smp = started(world, world.size)
    model = smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)
    plain_step(smp, words_loss)(model, inputs, targets)
    for loss, word in ((3.0, "not float"), (None, "not NoneType"), ([], "not an empty list"), ([torch.ones(()), "x"], "not str")):
        @smp.step
        def train_step(model, inputs, targets, loss=loss):
            model(inputs)
            model.backward(loss)
        fails_in_step(world, lambda: train_step(model, inputs, targets), RuntimeError, "pass a loss that is a tensor, or a list of tensors", word)
        model = smp.DistributedModel(seeded(Words))  # the pipeline has ended
        plain_step(smp, words_loss)(model, inputs, targets)
    if world.size > 1:
        with torch.no_grad():
            step = smp.step(lambda model, inputs: (model(inputs).sum(), (each for each in "ab")))
            fails_in_step(world, lambda: step(model, inputs), RuntimeError, "a value cannot be sent to the other ranks", "generator")
            step = smp.step(lambda model, inputs: model(inputs).sum().reshape(1).to_sparse())
            fails_in_step(world, lambda: step(model, inputs), RuntimeError, "a value cannot be sent to the other ranks", "sparse")
            step = smp.step(lambda model, inputs: (model(inputs).sum(), Untold()))
            fails_in_step(world, lambda: step(model, inputs), RuntimeError, "a value cannot be sent to the other ranks", "it has no text")
            step = smp.step(lambda model, inputs: (model(inputs).sum(), Local()))
            fails_in_step(world, lambda: step(model, inputs), RuntimeError, "unpickle")
            step = smp.step(lambda model, inputs: torch.complex(model(inputs).sum(), torch.ones(())).conj())
            expect(step(model, inputs).outputs[0].imag.item() == -1.0)
    fails(lambda: model.register_comm_hook(None, None), NotImplementedError, "averaged by Shoal")


def errors_in_a_step_reach_all_ranks(world):
    smp = started(world, 2)
    model = smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)

    @smp.step
    def broken(inputs):
        model.backward(model(inputs))
    fails(lambda: broken(inputs), Exception, "needs its gradient")


def models_that_cannot_be_recorded_are_refused(world):
    smp = started(world, 2)

    class Decides(Words):
        def forward(self, input_ids, mask=None):
            return super().forward(input_ids) if input_ids.sum() > 0 else super().forward(input_ids + 1)
    fails(lambda: plain_step(smp, words_loss)(smp.DistributedModel(seeded(Decides)), *sentences(0)), RuntimeError, "cannot be recorded",
          "decides by the values of a tensor")


def a_rank_that_dies_is_named(world):
    smp = started(world, 2, auto_partition=False, default_partition=0)
    plain = seeded(Words)
    smp.set_partition(plain.layers[3], 1)

    class Ends(nn.Tanh):
        calls = -100

        def forward(self, x):
            self.calls += 1
            if self.calls == 3:
                os._exit(7)
            return super().forward(x)
    for layer in plain.layers:
        layer[1] = Ends()
    model = smp.DistributedModel(plain)
    train_step = plain_step(smp, words_loss)
    train_step(model, *sentences(0))
    plain.layers[3][1].calls = 0
    fails_in_step(world, lambda: train_step(model, *sentences(1)), Exception, "rank 1", "exited with code 7")


def replicas_may_have_uneven_batches(world):
    """With one partition, in model.join()."""
    for microbatches in (1, 2):
        smp = started(world, 1, microbatches=microbatches)
        one, model = seeded(Words), smp.DistributedModel(seeded(Words))
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        other = torch.optim.SGD(one.parameters(), lr=0.1)
        train_step, counts = plain_step(smp, words_loss), [3, 1]
        with model.join():
            for number in range(counts[smp.dp_rank()]):
                optimizer.zero_grad()
                train_step(model, *sentences(number, smp.dp_rank()))
                optimizer.step()
        for number in range(3):
            batches = [sentences(number, replica) for replica in range(2) if number < counts[replica]]
            other.zero_grad()
            (sum(words_loss(one(inputs), targets) for inputs, targets in batches) / 2).backward()
            other.step()
        if smp.dp_rank() == 0:
            for (name, mine), (_, wanted) in zip(model.named_parameters(), one.named_parameters()):
                same(mine.detach(), wanted.detach(), name)


def only_forward_passes(world):
    smp = started(world, 2, pipeline="_only_forward")
    one, model = seeded(Words), smp.DistributedModel(seeded(Words))
    inputs, targets = sentences(0)
    same(smp.step(lambda inputs: model(inputs))(inputs).concat(), one(inputs).detach())
    fails_in_step(world, lambda: plain_step(smp, words_loss)(model, inputs, targets), Exception, "_only_forward, which has no backward passes")


def calls_before_init_are_refused(world):
    import smdistributed.modelparallel.torch as smp
    smp.state.reset()
    expect((smp.rank(), smp.size(), smp.local_rank(), smp.local_size()) == (world.rank, world.size, world.rank, world.size))
    for call in (smp.dp_rank, lambda: smp.DistributedModel(nn.Linear(1, 1)), smp.step(lambda: None), lambda: smp.barrier(),
                 lambda: smp.save(1, "x")):
        fails(call, RuntimeError, "call smp.init() first")
    expect(not smp.is_initialized())
    former = {name: os.environ.pop(name) for name in ("RANK", "LOCAL_RANK") if name in os.environ}
    try:
        for call in (smp.rank, smp.local_rank):
            fails(call, RuntimeError, "call smp.init() first")
    finally:
        os.environ.update(former)


CASES = [
    Case("images train", images_train, (1, 2, 4)),
    Case("words train", words_train, (1, 2, 3)),
    Case("replicas of pipelines train", replicas_of_pipelines_train, (4,)),
    Case("few active microbatches train", few_active_microbatches_train, (2, 3)),
    Case("one microbatch trains", one_microbatch_trains, (1, 2)),
    Case("memory decides about stages", memory_decides_about_stages, (2,)),
    Case("states of optimizers are divided", states_of_optimizers_are_divided, (2,)),
    Case("parameters and states are sharded", parameters_and_states_are_sharded, (2, 3)),
    Case("divided states resume", divided_states_resume, (2,)),
    Case("optimizers that cannot be divided are refused", optimizers_that_cannot_be_divided_are_refused, (2,)),
    Case("replicas divide states", replicas_divide_states, (2, 3, 4)),
    Case("gradients add up", gradients_add_up, (1, 2, 4)),
    Case("gradients are clipped", gradients_are_clipped, (1, 2, 4)),
    Case("sums of microbatches", sums_of_microbatches, (1, 2)),
    Case("backward takes gradients", backward_takes_gradients, (2,)),
    Case("arguments have names", arguments_have_names, (1, 2)),
    Case("settings around the model hold everywhere", settings_around_the_model_hold_everywhere, (1, 2, 3)),
    Case("models run in 16 bits", models_run_in_16_bits, (1, 2)),
    Case("values of messages stay", values_of_messages_stay, (2,)),
    Case("evaluations return numbers", evaluations_return_numbers, (1, 2, 4)),
    Case("batches of pp_rank 0 count", batches_of_pp_rank_0_count, (2, 3)),
    Case("partitions follow marks", partitions_follow_marks, (2,)),
    Case("values come when the model is partitioned", values_come_when_the_model_is_partitioned, (1, 2)),
    Case("hooks run", hooks_run, (1, 2)),
    Case("states equal those of one process", states_equal_those_of_one_process, (1, 2, 4)),
    Case("files are saved and loaded", files_are_saved_and_loaded, (1, 2, 4)),
    Case("checkpoints resume", checkpoints_resume, (1, 2, 4)),
    Case("optimizers pass on what they lack", optimizers_pass_on_what_they_lack, (1, 2)),
    Case("vendor's optimizers step", vendors_optimizers_step, (1, 2, 4)),
    Case("optimizers may be made after the first step", optimizers_may_be_made_after_the_first_step, (2,)),
    Case("losses are scaled", losses_are_scaled, (1, 2, 3)),
    Case("activations are computed again", activations_are_computed_again, (1, 2)),
    Case("ranks follow the strategy", ranks_follow_the_strategy, (1,)),
    Case("groups are those of this rank", groups_are_those_of_this_rank, (4,)),
    Case("objects are sent", objects_are_sent, (4,)),
    Case("parameters come from the environment", parameters_come_from_the_environment, (1, 2)),
    Case("wrong parameters are refused", wrong_parameters_are_refused, (2,)),
    Case("names that scripts import exist", names_that_scripts_import_exist, (1,)),
    Case("parameters without effect are named", parameters_without_effect_are_named, (1,)),
    Case("batches that do not fit are refused", batches_that_do_not_fit_are_refused, (1, 2)),
    Case("own types are sliced", own_types_are_sliced, (1, 2)),
    Case("models are called with objects", models_are_called_with_objects, (1, 2, 3)),
    Case("graphs stay if asked for", graphs_stay_if_asked_for, (1,)),
    Case("wrong marks are refused", wrong_marks_are_refused, (2,)),
    Case("models with few parts are refused", models_with_few_parts_are_refused, (2,)),
    Case("states of other models are refused", states_of_other_models_are_refused, (2,)),
    Case("steps that misuse the model are refused", steps_that_misuse_the_model_are_refused, (2,)),
    Case("a model is called once", a_model_is_called_once, (2,)),
    Case("a second init with the same parameters changes nothing", a_second_init_with_the_same_parameters_changes_nothing, (2, 4)),
    Case("a second init with other parameters begins anew", a_second_init_with_other_parameters_begins_anew, (2, 4)),
    Case("values that a rank cannot unpickle fail on all", values_that_a_rank_cannot_unpickle_fail_on_all, (2, 3)),
    Case("values that are no tensors are refused", values_that_are_no_tensors_are_refused, (1, 2)),
    Case("errors in a step reach all ranks", errors_in_a_step_reach_all_ranks, (2,)),
    Case("models that cannot be recorded are refused", models_that_cannot_be_recorded_are_refused, (2,)),
    Case("a rank that dies is named", a_rank_that_dies_is_named, (2,), fresh=True, ends=(1,)),
    Case("replicas may have uneven batches", replicas_may_have_uneven_batches, (2,)),
    Case("only forward passes", only_forward_passes, (2,)),
    Case("calls before init are refused", calls_before_init_are_refused, (1,)),
]

ranks.run(CASES)
