#!/usr/bin/env python3
"""torch.sagemaker: scripts for version 2 of SageMaker's model-parallel library. Models of transformers train as in the published
scripts; losses, norms and states equal those of one process for every degree, and each misuse has its error."""
import contextlib
import copy
import functools
import json
import logging
import os
import pathlib
import tempfile
import warnings

import ranks
import torch
import torch._dynamo  # noqa: F401: else each rank's first optimizer imports it, in two seconds
import torch.distributed as dist
from ranks import Case, expect
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import FullStateDictConfig, ShardedOptimStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

try:
    import accelerate
    import transformers
except ImportError:
    print("1..0 # SKIP no transformers: run it with build/trainers/bin/python3")
    raise SystemExit(0) from None

warnings.filterwarnings("ignore")
WORDS, LENGTH = 96, 16
SECONDS_MAX = 300  # for cases that train many models
HYBRID = ShardingStrategy.HYBRID_SHARD


def started(**parameters):
    """Begins a job and returns the package."""
    import torch.sagemaker as tsm
    tsm.state.reset()
    tsm.init(parameters)
    return tsm


def fails(function, kind, *words):
    """Checks that a call raises an error of a kind whose text has these words."""
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error), words)
        return error
    expect(False, "no error with", words)


def same(mine, wanted, what="", tolerance=1e-5):
    torch.testing.assert_close(mine, wanted, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


# ---- Models and batches ----------------------------------------------------------------------------------------------------


def llama(**more):
    return transformers.LlamaConfig(**{**dict(
        vocab_size=WORDS, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, use_cache=False, tie_word_embeddings=False, attn_implementation="sdpa"), **more})


def neox(**more):
    return transformers.GPTNeoXConfig(**{**dict(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, max_position_embeddings=64,
        use_cache=False, attention_dropout=0.0, hidden_dropout=0.0, use_parallel_residual=True, tie_word_embeddings=False,
        attn_implementation="sdpa"), **more})


def made(config, seed=1):
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))


def batch(step, replica, rows=2):
    torch.manual_seed(100 * step + replica)
    return torch.randint(WORDS, (rows, LENGTH))


def wrapped(model, strategy=HYBRID, **more):
    """Wraps a transformed model as the published scripts do."""
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={TransformerLayer})
    return FSDP(model, auto_wrap_policy=policy, sharding_strategy=strategy, use_orig_params=more.pop("use_orig_params", True),
                forward_prefetch=True, limit_all_gathers=True, **more)


def adam(model):
    # With the usual eps, Adam makes a whole step of a gradient that is zero except for rounding.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, eps=1e-4)


def part_of(tsm, ids):
    """Returns this rank's part of a batch, as the published scripts divide it: two of twice as many pieces."""
    size, rank = tsm.state.cp_size, tsm.state.cp_rank
    pieces = ids.chunk(2 * size, 1)
    return ids if size == 1 else torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], 1)


def replica_of(tsm):
    """Returns which batch this rank trains on, and how many there are."""
    together = tsm.state.tensor_parallel_degree * tsm.state.context_parallel_degree
    return dist.get_rank() // together, dist.get_world_size() // together


def mean(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class OneProcess:
    """One process that trains on the batches of all replicas."""

    def __init__(self, model):
        self.model, self.optimizer = model, adam(model)

    def step(self, batches, max_norm=1.0):
        self.optimizer.zero_grad()
        loss = sum(self.model(input_ids=ids, labels=ids)["loss"] for ids in batches) / len(batches)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self.optimizer.step()
        return loss.detach(), norm


def trains_like_one(tsm, model, one, steps=3, max_norm=1.0, tolerance=1e-4):
    """Trains both and compares losses and norms. Returns the optimizer."""
    from torch.sagemaker.grad_norm import clip_grad_norm_
    optimizer, (mine, count) = adam(model), replica_of(tsm)
    for step in range(steps):
        batches = [batch(step, replica) for replica in range(count)]
        optimizer.zero_grad(set_to_none=True)
        ids = part_of(tsm, batches[mine])
        loss = model(input_ids=ids, attention_mask=None, labels=ids)["loss"]
        loss.backward()
        norm = clip_grad_norm_(model, max_norm)
        optimizer.step()
        wanted_loss, wanted_norm = one.step(batches, max_norm)
        same(mean(loss), wanted_loss, f"loss of step {step}", tolerance)
        same(norm.reshape(()), wanted_norm, f"norm of step {step}", tolerance)
    return optimizer


def whole_state(model):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=False)):
        return model.state_dict()


def has_values_of(model, one, tolerance=1e-4):
    found = whole_state(model)
    wanted = one.model.state_dict() if isinstance(one, OneProcess) else one
    expect(found.keys() == wanted.keys(), sorted(found.keys() ^ wanted.keys()))
    for name, value in wanted.items():
        same(found[name], value, name, tolerance)


# ---- Training --------------------------------------------------------------------------------------------------------------


def degrees_of(size):
    return [degree for degree in range(size + 1) if degree == 0 or size % degree == 0]


def models_train_with_each_degree(world):
    for config in (llama(), neox()):
        for degree in degrees_of(world.size):
            tsm = started(hybrid_shard_degree=degree)
            one, model = OneProcess(made(config)), wrapped(tsm.transform(made(config)))
            shards = degree or world.size
            expect(model.process_group.size() == (world.size if shards == 1 else shards), degree, model.process_group.size())
            trains_like_one(tsm, model, one)
            has_values_of(model, one)


def strategies_keep_their_meaning(world):
    """Degree 0 leaves them as they are; others make them hybrid, unless they are."""
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2):
        for degree, wanted in ((0, strategy), (2, HYBRID), (world.size, ShardingStrategy.FULL_SHARD), (1, ShardingStrategy.NO_SHARD)):
            tsm = started(hybrid_shard_degree=degree)
            if strategy == ShardingStrategy._HYBRID_SHARD_ZERO2 and degree in (0, 2, world.size):
                wanted = strategy if degree == 2 else ShardingStrategy.SHARD_GRAD_OP  # this host is the whole world
            one, model = OneProcess(made(llama())), wrapped(tsm.transform(made(llama())), strategy)
            expect(model.sharding_strategy == wanted, strategy, degree, model.sharding_strategy)
            trains_like_one(tsm, model, one, 2)


def hybrid_groups_are_those_of_a_host(world):
    """With degree 0, as PyTorch's own HYBRID_SHARD has the GPUs of a host. Checkpoints then follow them."""
    former = os.environ["LOCAL_WORLD_SIZE"]
    try:
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        tsm = started()
        expect([tsm.state.ranker.get_rep_rank(rank) for rank in range(4)] == [0, 0, 0, 0])
        one, model = OneProcess(made(llama())), wrapped(tsm.transform(made(llama())))
        expect(model.process_group.size() == 2 and model.sharding_strategy == HYBRID)
        expect([tsm.state.ranker.get_rep_rank(rank) for rank in range(4)] == [0, 0, 1, 1])
        expect(tsm.state.ranker.get_rep_groups() == [[0, 2], [1, 3]])
        trains_like_one(tsm, model, one, 2)
        group = dist.new_group([world.rank // 2 * 2, world.rank // 2 * 2 + 1], use_local_synchronization=True)
        model = wrapped(tsm.transform(made(llama())), ShardingStrategy.FULL_SHARD, process_group=group)  # the script's own choice
        expect(model.process_group is group and model.sharding_strategy == ShardingStrategy.FULL_SHARD)
        os.environ["LOCAL_WORLD_SIZE"] = "3"
        fails(lambda: wrapped(tsm.transform(made(llama()))), ValueError, "the 3 ranks of each host", "set hybrid_shard_degree")
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = former


def tensor_parallel_models_train(world):
    special = llama(tie_word_embeddings=True), llama(attention_bias=True, mlp_bias=True)
    for config in (llama(), neox(), *special):
        for degree in [0] if config in special else degrees_of(world.size // 2):
            tsm = started(hybrid_shard_degree=degree, tensor_parallel_degree=2)
            one, model = OneProcess(made(config)), tsm.transform(made(config))
            held = sum(parameter.numel() for parameter in model.parameters())
            expect(held < 0.75 * sum(parameter.numel() for parameter in one.model.parameters()), held)
            model = wrapped(model)
            trains_like_one(tsm, model, one)
            has_values_of(model, one)


def context_parallel_models_train(world):
    """Also with activation checkpoints, which exchange keys again, and with other degrees."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.sagemaker.tensor_parallel.transformer import TransformerLayer
    others = [dict(context_parallel_degree=world.size)] + [dict(context_parallel_degree=2, hybrid_shard_degree=2),
                                                           dict(context_parallel_degree=2, tensor_parallel_degree=2)][:world.size - 2]
    for config in (llama(), neox()):
        for comm in ("p2p", "all_gather"):
            for degrees in others:
                tsm = started(**degrees)
                one, model = OneProcess(made(config)), wrapped(tsm.transform(made(config), cp_comm_type=comm))
                if comm == "p2p":
                    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, TransformerLayer))
                trains_like_one(tsm, model, one)
                has_values_of(model, one)


def models_train_in_16_bits(world):
    """As FSDP's MixedPrecision has it: losses are near those of float32, and go down as these do."""
    kind = torch.bfloat16
    policy = torch.distributed.fsdp.MixedPrecision(param_dtype=kind, reduce_dtype=kind, buffer_dtype=torch.float32)
    for degrees in ({"hybrid_shard_degree": 2}, {"tensor_parallel_degree": 2}, {"context_parallel_degree": 2}):
        for comm in ("p2p", "all_gather")[:2 if "context_parallel_degree" in degrees else 1]:
            tsm = started(**degrees)
            one, model = OneProcess(made(llama())), wrapped(tsm.transform(made(llama()), cp_comm_type=comm), mixed_precision=policy)
            trains_like_one(tsm, model, one, tolerance=0.05)
            expect(all(parameter.dtype == torch.float32 for parameter in model.parameters()))


# ---- Attention -------------------------------------------------------------------------------------------------------------


def plain_attention(query, key, value, scale):
    """Attention by its formula, on one process."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ key.transpose(-1, -2) * scale
    return scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf")).softmax(-1) @ value


def rings_attend_like_one(world):
    """With odd sizes, fewer heads of keys, and the formulas for devices without a kernel of torch's for the CPU."""
    from torch.sagemaker import _ring
    tsm = started(context_parallel_degree=world.size)
    group, pieces = tsm.state.cp_process_group or dist.group.WORLD, _ring.positions(world.rank, world.size, 6, "cpu")
    on_cpu = _ring._forward, _ring._backward
    for heads, of_keys in ((3, 3), (6, 2), (1, 1)):
        torch.manual_seed(heads)
        whole = [torch.randn(2, count, 6 * world.size, 5, requires_grad=True) for count in (heads, of_keys, of_keys)]
        gradient = torch.randn(2, heads, 6 * world.size, 5)
        wanted = plain_attention(*whole, 0.3)
        wanted.backward(gradient)
        for attend, parts in ((_ring.attend_in_ring, on_cpu), (_ring.attend_at_once, on_cpu),
                              (_ring.attend_in_ring, (_ring.forward_by_formula, _ring.backward_by_formula))):
            _ring._forward, _ring._backward = parts
            own = [each.detach()[:, :, pieces].requires_grad_() for each in whole]
            out = attend(*own, 0.3, group)
            out.backward(gradient[:, :, pieces])
            same(out, wanted[:, :, pieces].detach(), attend.__name__)
            for mine, other in zip(own, whole):
                same(mine.grad, other.grad[:, :, pieces], attend.__name__)
    _ring._forward, _ring._backward = on_cpu


def attention_modules_attend(world):
    from torch.sagemaker.nn.attn import FlashGroupedQueryAttention, FlashSelfAttention
    tsm = started()
    torch.manual_seed(1)
    query, key, value = (torch.randn(2, 4, 5, 8) for _ in range(3))
    wanted = plain_attention(query, key, value, 8 ** -0.5)
    same(FlashSelfAttention()((query, key, value), causal=True), wanted)
    same(FlashSelfAttention()(torch.cat([query, key, value], 1), causal=True), wanted)
    other = [each.transpose(1, 2) for each in (query, key, value)]
    same(FlashSelfAttention()(torch.cat(other, 2), causal=True, layout="b s h d"), wanted)
    same(FlashSelfAttention(scale=0.5)((query, key, value), causal=True), plain_attention(query, key, value, 0.5))
    grouped = FlashGroupedQueryAttention()(other[0], torch.cat([each[:, :, :2] for each in other[1:]], 2), causal=True)
    same(grouped, plain_attention(query, key[:, :2], value[:, :2], 8 ** -0.5))
    expect(FlashSelfAttention()((query, key, value), cast_dtype=torch.bfloat16).dtype == torch.bfloat16)
    fails(lambda: FlashSelfAttention(use_alibi=True), NotImplementedError, "use_alibi", "sdpa")
    fails(lambda: FlashSelfAttention()((query, key, value), attn_mask=query), NotImplementedError, "attn_mask")
    fails(lambda: FlashSelfAttention()((query, key, value), layout="s b h d"), ValueError, "layout", "b h s d")
    fails(lambda: FlashSelfAttention()(query[:, :2]), ValueError, "2 heads", "multiple of 3")
    if world.size > 1:
        tsm = started(context_parallel_degree=world.size)
        fails(lambda: FlashSelfAttention()((query, key, value)), NotImplementedError, "causal")
    tsm.state.reset()


# ---- Values that come late -------------------------------------------------------------------------------------------------


def values_come_when_the_model_is_wrapped(world):
    """They are the same with each degree, and drawn as the model draws them."""
    from torch.sagemaker.delayed_param import DelayedParamIniter
    found = []
    for config in (llama(initializer_range=0.5), neox(tie_word_embeddings=True)):
        for degrees in ({"hybrid_shard_degree": 0}, {"hybrid_shard_degree": 1}, {"tensor_parallel_degree": world.size}):
            tsm = started(**degrees)
            with accelerate.init_empty_weights() if "hybrid_shard_degree" in degrees else torch.device("meta"):
                model = tsm.transform(made(config))
            initer = DelayedParamIniter(model)
            torch.manual_seed(7)
            with initer.validate_params_and_buffers_inited():
                model = wrapped(model, param_init_fn=initer.get_param_init_fn(), post_param_init_fn=initer.get_post_param_init_fn())
            found.append(whole_state(model))
            has_values_of(model, found[0], 1e-7)
            weight = found[0][next(name for name in found[0] if "embed" in name)]
            expect(abs(weight.std() - config.initializer_range) < 0.1 * config.initializer_range, weight.std())
            one = OneProcess(made(config))
            one.model.load_state_dict(found[0])
            trains_like_one(tsm, model, one, 2)
        found.clear()


def values_come_from_the_programs_function(world):
    from torch.sagemaker.delayed_param import DelayedParamIniter
    from torch.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device
    seen = []

    def initialize(module):
        seen.append(type(module).__name__)
        empty_module_params(module, torch.device("cpu"))
        for parameter in module.parameters(recurse=False):
            parameter.data.fill_(0.25)
        move_buffers_to_device(module, torch.device("cpu"))
    tsm = started(hybrid_shard_degree=world.size)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    initer = DelayedParamIniter(plain, initialize, verbose=True)
    with initer.validate_params_and_buffers_inited():
        model = FSDP(plain, param_init_fn=initer.get_param_init_fn())
    expect(seen == ["Linear", "BatchNorm1d"] and all((value == 0.25).all() for name, value in whole_state(model).items()
                                                     if "running" not in name and "num" not in name), seen)
    with torch.device("meta"):
        plain = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    initer = DelayedParamIniter(plain)
    fails(lambda: left_out(initer, plain), AssertionError, "parameter 1.weight", "meta")

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3, device="meta"))
    fails(lambda: DelayedParamIniter(Own()).get_param_init_fn()(Own()), RuntimeError, "Own", "init_method_using_config")
    fails(lambda: FSDP(made(llama()), post_param_init_fn=initer.get_post_param_init_fn()), ValueError, "post_param_init_fn")
    tsm.state.reset()


def left_out(initer, plain):
    with initer.validate_params_and_buffers_inited():
        initer.get_param_init_fn()(plain[0])


def values_come_from_rank_0(world):
    """As in fine-tuning: other ranks have none, or others."""
    from torch.sagemaker.delayed_param import DelayedParamIniter
    for degrees in ({}, {"hybrid_shard_degree": 1}, {"tensor_parallel_degree": 2}):
        for is_delayed in (True, False):
            tsm = started(**degrees)
            one = OneProcess(made(llama(), seed=3))
            with accelerate.init_empty_weights() if is_delayed and world.rank else contextlib.nullcontext():
                model = made(llama(), seed=3 + world.rank)
            model = tsm.transform(model, load_state_dict_from_rank0=True)
            initer = DelayedParamIniter(model) if is_delayed and world.rank else None
            model = wrapped(model, sync_module_states=True, param_init_fn=initer and initer.get_param_init_fn())
            has_values_of(model, one, 1e-7)
            trains_like_one(tsm, model, one, 2)
    tsm = started()
    with accelerate.init_empty_weights():
        model = made(llama())
    if world.rank == 0:
        fails(lambda: tsm.transform(model, load_state_dict_from_rank0=True), ValueError, "rank 0", "meta")


# ---- Norms -----------------------------------------------------------------------------------------------------------------


def norms_count_each_parameter_once(world):
    """Of other orders, of models that other modules wrap, of models after fully_shard, and of plain ones."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper
    from torch.distributed.fsdp import fully_shard
    from torch.sagemaker.grad_norm import clip_grad_norm_
    ids = batch(0, 0)
    for order in (2.0, 1.0, float("inf")):
        one = made(llama())
        one(input_ids=ids, labels=ids)["loss"].backward()
        wanted = nn.utils.clip_grad_norm_(one.parameters(), 0.1, order)
        for kind in ("fsdp", "wrapped", "tensor", "fully_shard", "plain"):
            tsm = started(tensor_parallel_degree=2 if kind == "tensor" else 1)
            model = tsm.transform(made(llama()))
            if kind == "fully_shard":
                fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (world.size,)))
            elif kind != "plain":
                model = wrapped(model)
            model(input_ids=ids, labels=ids)["loss"].backward()
            norm = clip_grad_norm_(offload_wrapper(model) if kind == "wrapped" else model, 0.1, order)
            same(norm.reshape(()), wanted, f"{kind} {order}", 1e-4)
            again = clip_grad_norm_(model, 1e9, order)
            same(again.reshape(()), torch.tensor(0.1), f"{kind} {order} after clipping", 1e-3)


# ---- Checkpoints -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def common_folder(world):
    """A folder that all ranks see."""
    name = [tempfile.mkdtemp(prefix="shoal-tsm-") if world.rank == 0 else None]
    dist.broadcast_object_list(name)
    yield pathlib.Path(name[0])
    dist.barrier()
    if world.rank == 0:
        import shutil
        shutil.rmtree(name[0])


def sharded_states(model, optimizer):
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer), "total_steps": 3}


def save_sharded(tsm, model, optimizer, folder, method, queue):
    """As the published scripts do: one replica saves, each tensor-parallel rank to its own folder."""
    from torch.sagemaker.distributed.checkpoint import state_dict_saver
    from torch.sagemaker.utils.process_group_utils import get_global_ranks
    folder = folder / f"tp{tsm.state.tp_size}-{tsm.state.tp_rank}"
    coordinator = min(get_global_ranks(model.process_group))
    states = sharded_states(model, optimizer)
    if tsm.state.ranker.get_rep_rank(dist.get_rank()) == 0:
        if method == "sharded":
            checkpoint.save_state_dict(state_dict=states, storage_writer=checkpoint.FileSystemWriter(folder),
                                       planner=checkpoint.DefaultSavePlanner(), process_group=model.process_group,
                                       coordinator_rank=coordinator)
        elif method == "save":
            state_dict_saver.save(states, checkpoint_id=folder, process_group=model.process_group, coordinator_rank=coordinator)
        else:
            state_dict_saver.async_save(states, checkpoint_id=str(folder), process_group=model.process_group,
                                        coordinator_rank=coordinator, queue=queue)


def load_sharded(tsm, model, optimizer, folder, method):
    from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    folder = folder / f"tp{tsm.state.tp_size}-{tsm.state.tp_rank}"
    reader = DistributedFileSystemReader(folder)
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT,
                              optim_state_dict_config=ShardedOptimStateDictConfig(offload_to_cpu=True)):
        states = {"model": model.state_dict(), "total_steps": 0}
        (checkpoint.load_state_dict if method == "sharded" else load)(
            state_dict=states, storage_reader=reader, process_group=model.process_group, planner=checkpoint.DefaultLoadPlanner())
        model.load_state_dict(states["model"])
        found = checkpoint.optimizer.load_sharded_optimizer_state_dict(model_state_dict=states["model"], optimizer_key="optimizer", storage_reader=reader,
                                                  process_group=model.process_group)
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=found["optimizer"]))
    expect(states["total_steps"] == 3, states["total_steps"])


def checkpoints_load_with_other_degrees(world):
    """Training continues as in one process: parameters and the optimizer's states are loaded."""
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
    tensor = 2 if world.size == 4 else 1
    for method, saved, loaded in (("sharded", world.size // tensor, 2), ("save", 2, world.size // tensor), ("async", 2, 0)):
        with common_folder(world) as folder:
            tsm, queue = started(hybrid_shard_degree=saved, tensor_parallel_degree=tensor), AsyncCallsQueue()
            one, model = OneProcess(made(llama())), wrapped(tsm.transform(made(llama())))
            optimizer = trains_like_one(tsm, model, one, 2)
            save_sharded(tsm, model, optimizer, folder, method, queue)
            after = copy.deepcopy(one)
            after.optimizer = adam(after.model)
            after.optimizer.load_state_dict(copy.deepcopy(one.optimizer.state_dict()))
            continues_like_one(tsm, model, optimizer, one)  # an asynchronous save has a copy
            queue.maybe_finalize_async_calls(blocking=True, process_group=model.process_group)
            expect(queue.get_num_unfinalized_calls() == 0)
            dist.barrier()
            tsm = started(hybrid_shard_degree=loaded, tensor_parallel_degree=tensor)
            model = wrapped(tsm.transform(made(llama(), seed=5)))
            optimizer = adam(model)
            load_sharded(tsm, model, optimizer, folder, method)
            has_values_of(model, after)
            continues_like_one(tsm, model, optimizer, after)


def continues_like_one(tsm, model, optimizer, one):
    from torch.sagemaker.grad_norm import clip_grad_norm_
    mine, count = replica_of(tsm)
    batches = [batch(9, replica) for replica in range(count)]
    optimizer.zero_grad()
    loss = model(input_ids=batches[mine], labels=batches[mine])["loss"]
    loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    same(mean(loss), one.step(batches)[0], "loss after loading", 1e-4)
    has_values_of(model, one)


def local_checkpoints_load(world):
    """Each rank's own values, saved once for all replicas, and loaded in place."""
    from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
    from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import async_save
    from torch.sagemaker.distributed.checkpoint.state_dict_utils import SMStateDictType, init_optim_state, sm_state_dict_type

    def states(model, optimizer):
        with sm_state_dict_type(model, SMStateDictType.SM_LOCAL_STATE_DICT):
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with common_folder(world) as root:
        tsm, queue = started(hybrid_shard_degree=2), AsyncCallsQueue()
        one, model = OneProcess(made(llama())), wrapped(tsm.transform(made(llama())))
        optimizer = trains_like_one(tsm, model, one, 2)
        folder, groups = root / f"fsdp{model.rank}", tsm.state.ranker.get_rep_groups()
        expect(len(groups) == 2 and all(len(group) == world.size // 2 for group in groups), groups)
        group = [dist.new_group(group) for group in groups][[world.rank in group for group in groups].index(True)]
        async_save(states(model, optimizer), checkpoint_id=folder, process_group=group, queue=queue)
        expect(queue.maybe_finalize_async_calls(blocking=True) == [0])
        dist.barrier()
        tsm = started(hybrid_shard_degree=2)
        model = wrapped(tsm.transform(made(llama(), seed=5)))
        optimizer = adam(model)
        before = whole_state(model)
        init_optim_state(optimizer, skip_empty_param=True)
        has_values_of(model, before, 0)
        load(state_dict=states(model, optimizer), storage_reader=DistributedFileSystemReader(folder), process_group=group)
        has_values_of(model, one)
        continues_like_one(tsm, model, optimizer, one)


def saves_that_fail_are_reported(world):
    from torch.sagemaker.distributed.checkpoint import state_dict_saver
    from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader
    from torch.sagemaker.distributed.checkpoint.state_dict_loader import load
    started()
    with common_folder(world) as folder:
        (folder / "file").write_text("no folder")
        state_dict_saver.async_save({"x": torch.ones(3)}, checkpoint_id=folder / "file" / "inside")
        fails(lambda: state_dict_saver.maybe_finalize_async_calls(blocking=True), RuntimeError, "a save failed on rank 0",
              "NotADirectoryError", "file")
        expect(state_dict_saver.maybe_finalize_async_calls(blocking=True) == [])
        fails(lambda: state_dict_saver.save({}), ValueError, "checkpoint_id")
        fails(lambda: state_dict_saver.save({}, checkpoint_id="s3://bucket/x"), NotImplementedError, "S3", "checkpoint_s3_uri")
        fails(lambda: load({}), ValueError, "checkpoint_id")
        fails(lambda: DistributedFileSystemReader("s3://bucket/x"), NotImplementedError, "S3")
        fails(lambda: load({"x": torch.ones(3)}, checkpoint_id=folder / "none"), RuntimeError, "loading failed on rank 0",
              "No such file", "none")


def folders_are_limited(world):
    from torch.sagemaker.checkpoint.utils import SORT_BY_LAST_INT, limit_num_subdirs
    with tempfile.TemporaryDirectory() as root:
        for name in ("llama-9steps", "llama-100steps", "llama-20steps", "other", "llama-3steps"):
            (pathlib.Path(root) / name).mkdir()
        (pathlib.Path(root) / "llama-1steps").write_text("a file")
        words = dict(sort_fn=SORT_BY_LAST_INT, regex=r"^.*\d+steps$")
        expect(limit_num_subdirs(f"{root}/llama-100steps", 2, log=False, **words) == [])
        expect(limit_num_subdirs(f"{root}/llama-100steps", 9, log=True, **words) == [])
        expect(limit_num_subdirs(f"{root}/llama-100steps", 2, log=True, **words) == ["llama-3steps", "llama-9steps"])
        expect(sorted(os.listdir(root)) == ["llama-100steps", "llama-1steps", "llama-20steps", "other"], os.listdir(root))
        expect(limit_num_subdirs(f"{root}/llama-100steps", 0, log=True, **words) == [])
        expect(limit_num_subdirs(f"{root}/llama-100steps/tp2-1", 1, log=True, **words) == ["llama-20steps"])
        expect(limit_num_subdirs(f"{root}/none/llama-1steps", 1, log=True, **words) == [])
        os.utime(f"{root}/llama-100steps", (1, 1))
        expect(limit_num_subdirs(f"{root}/other", 1) == ["llama-100steps"], os.listdir(root))
    expect(SORT_BY_LAST_INT("a/tp2/none") == -1 and SORT_BY_LAST_INT("a12/b7steps") == 7)


# ---- The state, and what is wrong ------------------------------------------------------------------------------------------


def ranks_follow_the_degrees(world):
    tsm = started(hybrid_shard_degree=2, tensor_parallel_degree=2, context_parallel_degree=2)
    state, ranker = tsm.state, tsm.state.ranker
    from torch.sagemaker._ranks import Ranker
    from torch.sagemaker.utils.process_group_utils import get_global_ranks
    expect((state.rank, state.world_size, state.tp_size, state.cp_size, state.ep_size) == (world.rank, 4, 2, 2, 1))
    expect((state.tp_rank, state.cp_rank, state.ep_rank, state.rep_rank) == (world.rank % 2, world.rank // 2, 0, 0))
    expect(get_global_ranks(state.tp_process_group) == [world.rank // 2 * 2, world.rank // 2 * 2 + 1])
    expect(get_global_ranks(state.cp_process_group) == [world.rank % 2, world.rank % 2 + 2])
    expect(get_global_ranks(state.rep_rank_process_group) == get_global_ranks(state.world_process_group) == [0, 1, 2, 3])
    expect(ranker.get_rep_groups() == [[0], [1], [2], [3]], ranker.get_rep_groups())
    larger = Ranker(16, 4, 2, 2)
    expect(larger.get_rep_groups()[:2] == [[0, 8], [1, 9]] and larger.get_tp_groups()[:2] == [[0, 1], [2, 3]])
    expect(larger.get_shard_groups()[:2] == [[0, 2, 4, 6], [1, 3, 5, 7]] and larger.get_cp_groups()[:3] == [[0, 2], [1, 3], [4, 6]])
    expect([larger.get_rep_rank(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1])
    expect(larger.get_rep_rank_groups() == [list(range(8)), list(range(8, 16))])
    tsm = started()
    expect(tsm.state.tp_process_group is tsm.state.cp_process_group is tsm.state.rep_rank_process_group is None)
    expect(tsm.state.hybrid_shard_degree == 0)
    expect(tsm.is_initialized())
    tsm.state.reset()
    expect(not tsm.is_initialized())


def parameters_come_from_the_job(world):
    import torch.sagemaker as tsm
    from smdistributed.modelparallel.exceptions import SMPError
    values = {"hybrid_shard_degree": 2, "tensor_parallel_degree": 1, "sm_activation_offloading": True, "activation_loading_horizon": 3}
    for source in ("environment", "file", "dict"):
        tsm.state.reset()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values, file)
            file.flush()
            os.environ["SM_HP_MP_PARAMETERS"] = json.dumps(values if source == "environment" else {"hybrid_shard_degree": 1})
            tsm.init({"environment": None, "file": file.name, "dict": values}[source])
        expect(tsm.state.hybrid_shard_degree == 2 and tsm.state.sm_activation_offloading is False, source)
    tsm.state.reset()
    tsm.state.tensor_parallel_degree = 1  # as the published scripts do before tsm.init, without the vendor's layers
    tsm.state.context_parallel_degree = 1
    os.environ["SM_HP_MP_PARAMETERS"] = json.dumps({"tensor_parallel_degree": 2, "context_parallel_degree": 2})
    tsm.init()
    expect((tsm.state.tensor_parallel_degree, tsm.state.cp_size) == (1, 1))
    fails(lambda: setattr(tsm.state, "tensor_parallel_degree", 2), SMPError, "since tsm.init")
    del os.environ["SM_HP_MP_PARAMETERS"]


def wrong_parameters_are_refused(world):
    import torch.sagemaker as tsm
    for config, kind, words in (
            ({"hybrid_shard_degre": 2}, ValueError, ("hybrid_shard_degre", "did you mean hybrid_shard_degree")),
            ({"zzz": 2}, ValueError, ("unknown parameter zzz",)),
            ({"partitions": 2}, NotImplementedError, ("partitions is of version 1", "smdistributed.modelparallel.torch")),
            ({"pipeline_parallel_degree": 2}, NotImplementedError, ("of version 1",)), ({"ddp": True}, NotImplementedError, ("version 1",)),
            ({"microbatches": 4}, NotImplementedError, ("of version 1",)),
            ({"expert_parallel_degree": 2}, NotImplementedError, ("expert_parallel_degree 2", "hybrid_shard_degree")),
            ({"tensor_parallel_degree": "2"}, ValueError, ("tensor_parallel_degree must be a number", '"2"')),
            ({"tensor_parallel_degree": True}, ValueError, ("must be a number",)),
            ({"hybrid_shard_degree": 2.0}, ValueError, ("must be a number without fraction",)),
            ({"sm_activation_offloading": 1}, ValueError, ("must be true or false",)),
            ({"tensor_parallel_degree": 0}, ValueError, ("must be at least 1",)),
            ({"hybrid_shard_degree": -1}, ValueError, ("must be at least 0",)),
            ({"activation_loading_horizon": 0}, ValueError, ("must be at least 1",)),
            ({"tensor_parallel_degree": 3}, ValueError, ("4 processes", "groups of 3")),
            ({"hybrid_shard_degree": 3}, ValueError, ("hybrid_shard_degree 3 must divide 4",)),
            ({"hybrid_shard_degree": 4, "tensor_parallel_degree": 2}, ValueError, ("hybrid_shard_degree 4 must divide 2",)),
            ({"context_parallel_degree": 4, "hybrid_shard_degree": 2}, ValueError, ("context_parallel_degree 4", "which is 2")),
            ({"context_parallel_degree": 3}, ValueError, ("context_parallel_degree 3 must divide",)),
            (7, ValueError, ("a dict or the path",)), ("/no/such.json", ValueError, ("/no/such.json", "No such file"))):
        tsm.state.reset()
        fails(lambda config=config: tsm.init(config), kind, "tsm.init", *words)
        expect(not tsm.is_initialized(), config)
    for text, words in (("{", "is not JSON"), ("[1]", "a JSON object")):
        os.environ["SM_HP_MP_PARAMETERS"] = text
        fails(tsm.init, ValueError, "SM_HP_MP_PARAMETERS", words)
    del os.environ["SM_HP_MP_PARAMETERS"]


def what_is_not_served_is_refused(world):
    import torch.sagemaker as tsm
    from torch.sagemaker.moe.moe_config import MoEConfig
    from torch.sagemaker.moe.moe_layer import MoELayer
    from torch.sagemaker.nn.huggingface.llama_flashattn import LlamaFlashAttention
    tsm.state.reset()
    for call in (lambda: tsm.transform(nn.Linear(1, 1)), lambda: tsm.state.tp_rank, lambda: tsm.state.tp_process_group):
        fails(call, RuntimeError, "call tsm.init() first")
    tsm = started()
    fails(lambda: tsm.transform(made(llama()), config={}), NotImplementedError, "mixtures of experts")
    fails(lambda: tsm.transform(made(llama()), cp_comm_type="ring"), ValueError, "p2p or all_gather", "'ring'")
    fails(MoEConfig, NotImplementedError, "mixtures of experts", "hybrid_shard_degree")
    fails(MoELayer, NotImplementedError, "mixtures of experts")
    fails(lambda: LlamaFlashAttention(llama()), NotImplementedError, "sdpa")
    fails(lambda: tsm.state.get_rng_state_tracker, NotImplementedError, "Transformer Engine")
    plain = nn.Sequential(nn.Linear(3, 4))
    tsm = started(tensor_parallel_degree=2)
    fails(lambda: tsm.transform(plain), NotImplementedError, "Sequential has no tp_plan", "colwise")
    fails(lambda: tsm.transform(made(llama(num_attention_heads=3, num_key_value_heads=3, hidden_size=48))), ValueError,
          "num_attention_heads, which is 3")
    fails(lambda: tsm.transform(made(llama(num_key_value_heads=1))), ValueError, "num_key_value_heads, which is 1")
    fails(lambda: tsm.transform(made(llama(intermediate_size=45))), ValueError, "the outputs of model.layers.0.mlp.gate_proj", "45")
    with torch.device("meta") if world.rank else contextlib.nullcontext():
        half = made(llama())
    fails(lambda: tsm.transform(half), ValueError, "on 1 of 2 tensor-parallel ranks", "load_state_dict_from_rank0=True")
    plain._tp_plan = {"0": "moe_experts"}
    fails(lambda: tsm.transform(plain), NotImplementedError, "the plan of 0 is moe_experts")
    tsm = started(context_parallel_degree=2)
    fails(lambda: tsm.transform(plain), NotImplementedError, "context_parallel_degree is 2", "Sequential")
    model = tsm.transform(made(llama()))
    ids = batch(0, 0)
    fails(lambda: model(input_ids=ids[:, :7]), ValueError, "7 tokens", "a multiple of 4")
    fails(lambda: model(input_ids=ids, attention_mask=torch.zeros_like(ids)), NotImplementedError, "attention_mask")
    model(input_ids=ids, attention_mask=torch.ones_like(ids))
    model = tsm.transform(made(llama(attention_dropout=0.1)))
    fails(lambda: model(input_ids=ids), NotImplementedError, "attention_dropout to 0.0")


def plans_of_plain_models_divide_them(world):
    """A module of torch's own with a plan: a layer that gathers its outputs, and one with a bias that is added once."""
    class Net(nn.Module):
        tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"}

        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(5, 6), "down": nn.Linear(6, 5)}) for _ in range(2))
            self.head = nn.Linear(5, 8)

        def forward(self, x):
            for layer in self.layers:
                x = x + layer["down"](torch.tanh(layer["up"](x)))
            return self.head(x)
    torch.manual_seed(4)
    one = Net()
    tsm = started(tensor_parallel_degree=2)
    torch.manual_seed(4 + world.rank)  # the first rank's values count
    model = tsm.transform(Net())
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(6))
    mine, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, wanted = model(mine), one(other)
    same(found, wanted.detach())
    found.square().sum().backward()
    wanted.square().sum().backward()
    same(mine.grad, other.grad)
    same(model.layers[0]["up"].weight.grad, one.layers[0]["up"].weight.grad.chunk(2)[world.rank])
    same(model.layers[1]["down"].weight.grad, one.layers[1]["down"].weight.grad.chunk(2, 1)[world.rank])
    same(model.layers[1]["down"].bias.grad, one.layers[1]["down"].bias.grad)
    model.load_state_dict({name: value + 1 for name, value in one.state_dict().items()})
    same(model.head.weight.detach(), one.head.weight.detach().chunk(2)[world.rank] + 1)
    same(model.layers[0]["down"].weight.detach(), one.layers[0]["down"].weight.detach().chunk(2, 1)[world.rank] + 1)
    expect("row" in repr(model) and f"{world.rank} of 2" in repr(model), repr(model))


def names_that_scripts_import_exist(world):
    import torch.sagemaker as tsm
    from torch.sagemaker import state, transform  # noqa: F401
    from torch.sagemaker.distributed.checkpoint.state_dict_saver import PyTorchDistSaveShardedStrategy, async_save  # noqa: F401
    from torch.sagemaker.logger import get_logger
    from torch.sagemaker.state_handler import state as other
    from torch.sagemaker.tensor_parallel.transformer import TETransformerLayer, TransformerLayer
    from torch.sagemaker.utils import utils
    expect(tsm.__name__ == "torch.sagemaker" and state is other is tsm.state and TETransformerLayer is TransformerLayer)
    expect(get_logger() is get_logger() and get_logger().name == "torch.sagemaker")
    lines = []
    get_logger().addHandler(type("Lines", (logging.Handler,), {"emit": lambda self, record: lines.append(record.getMessage())})())
    get_logger().setLevel(logging.INFO)
    for condition, rank in ((True, 0), (True, 1), (False, 0)):
        with utils.timeit(condition, "a block", rank):
            pass
    expect(len(lines) == 1 and lines[0].startswith("a block: "), lines)
    model = started().transform(made(llama()))
    expect([isinstance(layer, TransformerLayer) for layer in (model.model.layers[0], model.lm_head)] == [True, False])


CASES = [
    Case("models train with each degree", models_train_with_each_degree, (1, 2, 4), timeout_s=SECONDS_MAX),
    Case("strategies keep their meaning", strategies_keep_their_meaning, (4,), timeout_s=SECONDS_MAX),
    Case("hybrid groups are those of a host", hybrid_groups_are_those_of_a_host, (4,), timeout_s=SECONDS_MAX),
    Case("tensor parallel models train", tensor_parallel_models_train, (2, 4), timeout_s=SECONDS_MAX),
    Case("context parallel models train", context_parallel_models_train, (2, 4), timeout_s=SECONDS_MAX),
    Case("models train in 16 bits", models_train_in_16_bits, (2,)),
    Case("rings attend like one", rings_attend_like_one, (1, 2, 3, 4)),
    Case("attention modules attend", attention_modules_attend, (1, 2)),
    Case("values come when the model is wrapped", values_come_when_the_model_is_wrapped, (2,)),
    Case("values come from the program's function", values_come_from_the_programs_function, (2,)),
    Case("values come from rank 0", values_come_from_rank_0, (2, 4), timeout_s=SECONDS_MAX),
    Case("norms count each parameter once", norms_count_each_parameter_once, (2,)),
    Case("checkpoints load with other degrees", checkpoints_load_with_other_degrees, (2, 4), timeout_s=SECONDS_MAX),
    Case("local checkpoints load", local_checkpoints_load, (2, 4), timeout_s=SECONDS_MAX),
    Case("saves that fail are reported", saves_that_fail_are_reported, (2,)),
    Case("folders are limited", folders_are_limited, (1,)),
    Case("ranks follow the degrees", ranks_follow_the_degrees, (4,)),
    Case("parameters come from the job", parameters_come_from_the_job, (2,)),
    Case("wrong parameters are refused", wrong_parameters_are_refused, (4,)),
    Case("what is not served is refused", what_is_not_served_is_refused, (2,)),
    Case("plans of plain models divide them", plans_of_plain_models_divide_them, (2,)),
    Case("names that scripts import exist", names_that_scripts_import_exist, (1,)),
]

ranks.run(CASES)
