#!/usr/bin/env python3
"""Tensor parallelism in smdistributed.modelparallel.torch: losses, gradients and states equal those of one process, alone and with
pipelines and replicas, with batches of each rank's own and with common ones; each misuse has its error."""
import copy
import logging
import os
import shutil
import tempfile
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
WIDTH, WORDS, HEADS = 8, 12, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.norm_attention, self.norm_feed = HEADS, nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        shape = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(*shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        x = x + self.mix(nn.functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(shape))
        return x + self.feed(self.norm_feed(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def seeded(make, seed=1):
    torch.manual_seed(seed)
    return make()


def batch_of(step, replica, rows=4):
    torch.manual_seed(100 * step + replica)
    words = torch.randint(WORDS, (rows, 6))
    return words[:, :-1], words[:, 1:]


def loss_of(result, targets):
    return nn.functional.cross_entropy(result.flatten(0, 1), targets.flatten())


def started(world, tensor=2, partitions=1, microbatches=2, **more):
    import smdistributed.modelparallel.torch as smp
    smp.init({"pipeline_parallel_degree": partitions, "microbatches": microbatches, "tensor_parallel_degree": tensor, "ddp": True, **more})
    return smp


def fails(function, kind, *words):
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error), words)
        return
    expect(False, "no error with", words)


def same(mine, wanted, what, tolerance=2e-5):
    torch.testing.assert_close(mine, wanted, atol=tolerance, rtol=tolerance, msg=lambda text: f"{what}: {text}")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def made(smp, seed=1):
    """Returns a model and an optimizer, which is made before the model is wrapped."""
    with smp.tensor_parallelism(enabled=True, fused_softmax=True):
        plain = seeded(Gpt, seed)
    optimizer = sgd(plain)
    return smp.DistributedModel(plain), smp.DistributedOptimizer(optimizer)


def step_of(smp):
    @smp.step
    def train_step(model, inputs, targets):
        result = model(inputs)
        loss = loss_of(result, targets)
        model.backward(loss)
        return result, loss
    return train_step


def trained(smp, model, optimizer, steps=range(3), one=None):
    """Trains `model` with smp and a plain model in this process, and compares them after each step. The plain model gets the
    batches of all replicas. Returns it with its optimizer; `one` continues with an earlier result."""
    one = one or (lambda plain: (plain, sgd(plain)))(seeded(Gpt))
    is_common = smp.state.cfg.prescaled_batch
    count, own = (smp.rdp_size(), smp.rdp_rank()) if is_common else (smp.dp_size(), smp.dp_rank())
    train_step = step_of(smp)
    for number in steps:
        batches = [batch_of(number, replica) for replica in range(count)]
        one[1].zero_grad()
        wanted = [loss_of(one[0](inputs), targets) for inputs, targets in batches]
        (sum(wanted) / count).backward()
        norm = nn.utils.clip_grad_norm_(one[0].parameters(), 0.7)
        one[1].step()
        optimizer.zero_grad()
        result, losses = train_step(model, *batches[own])
        expect(tuple(result.concat().shape) == (4, 5, WORDS), result.concat().shape)
        same(losses.reduce_mean(), wanted[own].detach(), f"loss of step {number}")
        same(model.clip_grad_norm_(0.7), norm, f"norm of step {number}", 1e-4)
        optimizer.step()
        state = model.state_dict()
        for name, value in one[0].state_dict().items():
            same(state[name], value, f"{name} after step {number}", 1e-4)
    return one


# ---- Training --------------------------------------------------------------------------------------------------------------


def batches_of_each_rank(world):
    smp = started(world)
    expect((smp.tp_size(), smp.rdp_size(), smp.dp_size(), smp.mp_size()) == (2, world.size // 2, world.size, 2))
    trained(smp, *made(smp))


def common_batches(world):
    smp = started(world, prescaled_batch=True)
    trained(smp, *made(smp))


def common_batches_that_differ_are_sent(world):
    smp = started(world, prescaled_batch=True)
    model, optimizer = made(smp)
    _, losses = step_of(smp)(model, *batch_of(0, smp.dp_rank()))
    expect(len(set(smp.allgather(losses.reduce_mean().item()))) == 1, "losses differ")


def with_pipelines(world):
    for options in ({"prescaled_batch": True}, {"placement_strategy": "spread"}):
        smp = started(world, partitions=2, **options)
        expect((smp.pp_size(), smp.tp_size(), smp.rdp_size()) == (2, 2, world.size // 4))
        trained(smp, *made(smp))


def states_of_optimizers_are_divided(world):
    """shard_optimizer_state with tensor parallelism: replicas of a part divide its states."""
    smp = started(world, microbatches=1, shard_optimizer_state=True, prescaled_batch=True)
    model, optimizer = made(smp)
    one = seeded(Gpt)
    other = sgd(one)
    for number in range(2):
        batches = [batch_of(number, replica) for replica in range(smp.rdp_size())]
        other.zero_grad()
        (sum(loss_of(one(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
        other.step()
        optimizer.zero_grad()
        step_of(smp)(model, *batches[smp.rdp_rank()])
        optimizer.step()
    state = model.state_dict()
    for name, value in one.state_dict().items():
        same(state[name], value, name, 1e-4)
    folders = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folders)
    try:
        divided_states_resume(world, smp, model, optimizer, folders[0])
    finally:
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(folders[0])


def divided_states_resume(world, smp, model, optimizer, folder):
    """A partial checkpoint of divided states is of one degree of tensor parallelism."""
    smp.save_checkpoint(folder, "a", True, model, optimizer, {"step": 2})
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    smp.barrier()
    model, optimizer = made(smp, 5)
    expect(smp.resume_from_checkpoint(folder) == {"step": 2})
    state = model.state_dict()
    for name, value in saved.items():
        same(state[name], value, name, 0)
    smp = started(world, 1, microbatches=1, shard_optimizer_state=True)
    model, optimizer = made(smp)
    fails(lambda: smp.resume_from_checkpoint(folder), RuntimeError, "of tensor_parallel_degree 2, and this job of 1")


def losses_are_scaled(world):
    """A gradient that is not finite in one part of a parameter skips the step of all parts."""
    smp = started(world)
    model, optimizer = made(smp)
    scaler = smp.amp.GradScaler(init_scale=8.0, growth_interval=10)

    @smp.step
    def train_step(model, inputs, targets):
        model.backward(scaler.scale(loss_of(model(inputs), targets)))
    train_step(model, *batch_of(0, smp.dp_rank()))
    former = [each.detach().clone() for each in model.parameters()]
    if smp.tp_rank() == 0:
        next(each for each in model.parameters() if model.is_distributed_parameter(each)).grad.fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    expect(scaler.get_scale() == 4.0, scaler.get_scale())
    expect(all(torch.equal(each, value) for each, value in zip(model.parameters(), former)))


# ---- What is divided -------------------------------------------------------------------------------------------------------


def norms_are_those_of_whole_parameters(world):
    """LAMB scales by norms of parameters and clips by the norm of the model, NovoGrad divides by norms of gradients: with parts,
    partitions and shares of states they train as in one process."""
    from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedNovoGrad
    kinds = [lambda each: FusedLAMB(each, lr=0.02, weight_decay=0.1, max_grad_norm=0.3), lambda each: FusedNovoGrad(each, lr=0.01),
             lambda each: FusedLAMB(each, lr=0.02, weight_decay=0.0), lambda each: FusedNovoGrad(each, lr=0.01, norm_type=0, weight_decay=0.1)]
    for partitions, is_divided in {(1, False), (max(1, world.size // 4), world.size > 2)}:
        for kind in kinds:
            smp = started(world, partitions=partitions, shard_optimizer_state=is_divided)
            with smp.tensor_parallelism():
                plain = seeded(Gpt)
            inner = kind(plain.parameters())
            model, optimizer, one = smp.DistributedModel(plain), smp.DistributedOptimizer(inner), seeded(Gpt)
            wanted, train_step = kind(one.parameters()), step_of(smp)
            for number in range(3):
                batches = [batch_of(number, replica) for replica in range(smp.dp_size())]
                wanted.zero_grad()
                (sum(loss_of(one(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
                wanted.step()
                optimizer.zero_grad()
                train_step(model, *batches[smp.dp_rank()])
                optimizer.step()
            for name, value in model.state_dict().items():
                same(value, one.state_dict()[name], f"{partitions} partitions, divided {is_divided}, {type(inner).__name__}: {name}", 1e-4)


class Masters:
    """A wrapper as scripts for 16 bits have: the optimizer steps copies of the parameters, in another type. outer: the one whose
    step() is called, and which has the groups."""

    def __init__(self, optimizer, outer=None):
        self.optimizer, self._outer, self._pairs = optimizer, outer or optimizer, []
        self.param_groups = self._outer.param_groups

    def init_master_params(self):
        for group in self.param_groups:
            copies = [each.detach().double().requires_grad_() for each in group["params"]]
            self._pairs += zip(group["params"], copies)
            group["params"] = copies

    def step(self):
        for parameter, copy_of_it in self._pairs:
            copy_of_it.grad = None if parameter.grad is None else parameter.grad.double()
        self._outer.step()
        with torch.no_grad():
            for parameter, copy_of_it in self._pairs:
                parameter.copy_(copy_of_it)


def norms_of_master_copies_are_those_of_their_parameters(world):
    """A wrapper for 16 bits is around smp's optimizer, or inside of it: an optimizer that steps copies knows parts and ties."""
    from smdistributed.modelparallel.torch.optimizers import FusedLAMB, FusedNovoGrad
    kinds = [lambda each: FusedLAMB(each, lr=0.02, weight_decay=0.1, max_grad_norm=0.3), lambda each: FusedNovoGrad(each, lr=0.01)]
    ways = [(1, False, True), (1, False, False)] if world.size == 2 else [(world.size // 4, True, False)]
    for partitions, is_divided, is_inside in ways:
        for kind in kinds:
            smp = started(world, partitions=partitions, shard_optimizer_state=is_divided)
            with smp.tensor_parallelism():
                plain = seeded(Gpt)
            model, one = smp.DistributedModel(plain), seeded(Gpt)
            inner, wanted, train_step = kind(model.parameters()), kind(one.parameters()), step_of(smp)
            if is_inside:
                wrapper = Masters(inner)
                wrapper.init_master_params()
                stepped = optimizer = smp.DistributedOptimizer(wrapper)
            else:
                optimizer = smp.DistributedOptimizer(inner)
                stepped = Masters(inner, optimizer)
            for number in range(3):
                batches = [batch_of(number, replica) for replica in range(smp.dp_size())]
                wanted.zero_grad()
                (sum(loss_of(one(inputs), targets) for inputs, targets in batches) / len(batches)).backward()
                wanted.step()
                model.zero_grad()
                train_step(model, *batches[smp.dp_rank()])
                if not number and not is_inside:
                    stepped.init_master_params()  # the first step has divided the model
                stepped.step()
            for name, value in model.state_dict().items():
                same(value, one.state_dict()[name], f"{partitions} partitions, divided {is_divided}, {type(inner).__name__}: {name}", 1e-4)


def copies_of_no_parameter_are_refused(world):
    from smdistributed.modelparallel.torch.optimizers import FusedLAMB
    smp = started(world)
    with smp.tensor_parallelism():
        plain = seeded(Gpt)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(FusedLAMB(model.parameters()))
    step_of(smp)(model, *batch_of(0, smp.dp_rank()))
    optimizer.param_groups[0]["params"] = [torch.cat([each.detach().flatten() for each in model.parameters()]).requires_grad_()]
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    fails(optimizer.step, RuntimeError, "that is not the model's", "put each master copy in the place of its parameter")


def modules_that_are_named_are_divided(world):
    from smdistributed.modelparallel.torch.utils import get_distribution_axis
    smp = started(world)
    plain = seeded(Gpt)
    smp.set_tensor_parallelism(plain.blocks[1])
    smp.set_tensor_parallelism(plain.blocks[2].feed, True)
    smp.set_tensor_parallelism(plain.blocks[1].feed, False)
    model = smp.DistributedModel(plain)
    parts = {name for name, each in model.named_parameters() if model.is_distributed_parameter(each)}
    expect(parts == {"blocks.1.query_key_value.weight", "blocks.1.query_key_value.bias", "blocks.1.mix.weight", "blocks.2.feed.0.weight",
                     "blocks.2.feed.0.bias", "blocks.2.feed.2.weight"}, parts)
    expect({name for name, _ in model.scaled_batch_reducer_named_parameters()} == parts)
    expect({name for name, _ in model.default_reducer_named_parameters()} == {name for name, _ in model.named_parameters()} - parts)
    expect([get_distribution_axis(plain.get_parameter(name)) for name in ("blocks.1.mix.weight", "blocks.2.feed.0.weight", "norm.weight")] ==
           [1, 0, None])
    trained(smp, model, smp.DistributedOptimizer(sgd(model)), range(1))


def models_are_made_without_memory(world):
    smp = started(world, delayed_parameter_initialization=True)
    torch.manual_seed(3)
    with smp.model_creation(tensor_parallelism=True, dtype=torch.float32, attention_in_fp32=True):
        plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    expect(plain[0].weight.is_meta)
    torch.manual_seed(3)
    model = smp.DistributedModel(plain)
    expect(tuple(plain[0].weight.shape) == (8, 8) and not plain[0].weight.is_meta)
    wanted = seeded(lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)), 3).state_dict()
    for name, value in model.state_dict().items():
        same(value, wanted[name], name, 0)


def the_vendors_layers(world):
    smp = started(world)
    model = smp.DistributedModel(nn.Sequential(smp.nn.DistributedEmbedding(8, 4), smp.nn.DistributedLinear(4, 6), smp.nn.DistributedLinear(6, 4)))
    shapes = [tuple(each.shape) for each in model.parameters()]
    expect(shapes == [(4, 4), (3, 4), (3,), (4, 3), (4,)], shapes)
    fails(lambda: smp.nn.DistributedTransformerLayer(num_attention_heads=2), NotImplementedError, "smp.nn.DistributedTransformerLayer", "smp.tensor_parallelism()")
    smp.tp_register_with_module(Block, smp.nn.DistributedTransformerLayer)
    expect(smp.tp_register(Block)(Gpt) is Gpt)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------------


def checkpoints_resume(world):
    folders = [tempfile.mkdtemp() if world.rank == 0 else None]
    dist.broadcast_object_list(folders)
    try:
        for partitions in {1, world.size // 2}:
            smp = started(world, partitions=partitions)
            model, optimizer = made(smp)
            one = trained(smp, model, optimizer, range(2))
            for partial in (True, False):
                smp.save_checkpoint(folders[0], "a", partial, model, optimizer, {"step": 2})
            smp.barrier()
            if world.rank == 0:
                whole = torch.load(os.path.join(folders[0], "a"))
                expect(whole.keys() == one[0].state_dict().keys() and whole["head.weight"].shape == (WORDS, WIDTH), whole.keys())
                sgd(seeded(Gpt)).load_state_dict(torch.load(os.path.join(folders[0], "optimizer_a")))
            kept = [{name: value.clone() for name, value in one[0].state_dict().items()}, copy.deepcopy(one[1].state_dict())]
            for partial in (True, False):
                for is_late in (False, True):
                    again = seeded(Gpt), None
                    again = again[0], sgd(again[0])
                    again[0].load_state_dict(kept[0])
                    again[1].load_state_dict(copy.deepcopy(kept[1]))
                    model, optimizer = made(smp, 5)
                    if is_late:
                        step_of(smp)(model, *batch_of(7, 0))
                        optimizer.step()
                    expect(smp.resume_from_checkpoint(folders[0], partial=partial) == {"step": 2})
                    trained(smp, model, optimizer, range(2, 3), again)
        smp = started(world, 1, 1)
        model, optimizer = smp.DistributedModel(seeded(Gpt)), None
        fails(lambda: smp.resume_from_checkpoint(folders[0], "a", load_optimizer=False), RuntimeError, "partial checkpoint a")
        expect(smp.resume_from_checkpoint(folders[0], "a", partial=False, load_optimizer=False) == {"step": 2})
        smp = started(world)
        model, optimizer = made(smp)
        fails(lambda: model.load_state_dict({"head.weight": torch.zeros(2, 2)}), RuntimeError, "head.weight", "[2, 2]", f"[{WORDS}, {WIDTH}]")
    finally:
        dist.barrier()
        if world.rank == 0:
            shutil.rmtree(folders[0])


# ---- Bad input -------------------------------------------------------------------------------------------------------------


def wrong_parameters_are_refused(world):
    import smdistributed.modelparallel.torch as smp
    for given, kind, *words in (
            ({"tensor_parallel_degree": 2}, ValueError, "needs \"ddp\": true"), ({"tensor_parallel_degree": 0}, ValueError, "positive integer"),
            ({"tensor_parallel_degree": 3, "ddp": True}, ValueError, f"{world.size} ranks", "tensor degree 3"),
            ({"tensor_parallel_degree": 2, "ddp": True, "sharded_data_parallel_degree": 2}, NotImplementedError, "without tensor parallelism")):
        fails(lambda given=given: smp.init({"partitions": 1, **given}), kind, *words)
    smp = started(world)
    fails(lambda: smp.DistributedModel(seeded(Gpt)), RuntimeError, "no module is named", "smp.set_tensor_parallelism(module)")
    fails(lambda: smp.set_tensor_parallelism("blocks"), RuntimeError, "not str")
    fails(lambda: smp.tensor_parallelism(fused_softmx=True).__enter__(), RuntimeError, "unknown setting fused_softmx")
    with smp.tensor_parallelism():
        odd = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 4))
    fails(lambda: smp.DistributedModel(odd), ValueError, "0 has 7 features", "2, does not divide")
    model, _ = made(smp)
    fails(lambda: model(torch.ones(2, 3, requires_grad=True)), NotImplementedError, "requires a gradient", "prescaled_batch")
    fails(lambda: model(object()), NotImplementedError, "an object of the type object", "prescaled_batch")


CASES = [
    Case("batches of each rank", batches_of_each_rank, (2, 4)),
    Case("common batches", common_batches, (2, 4)),
    Case("common batches that differ are sent", common_batches_that_differ_are_sent, (2,)),
    Case("with pipelines", with_pipelines, (4, 8)),
    Case("states of optimizers are divided", states_of_optimizers_are_divided, (4,)),
    Case("norms are those of whole parameters", norms_are_those_of_whole_parameters, (2, 4, 8)),
    Case("norms of master copies are those of their parameters", norms_of_master_copies_are_those_of_their_parameters, (2, 4, 8)),
    Case("copies of no parameter are refused", copies_of_no_parameter_are_refused, (2,)),
    Case("losses are scaled", losses_are_scaled, (2,)),
    Case("modules that are named are divided", modules_that_are_named_are_divided, (2,)),
    Case("models are made without memory", models_are_made_without_memory, (2,)),
    Case("the vendor's layers", the_vendors_layers, (2,)),
    Case("checkpoints resume", checkpoints_resume, (4,)),
    Case("wrong parameters are refused", wrong_parameters_are_refused, (2,)),
]

if __name__ == "__main__":
    ranks.run(CASES)
