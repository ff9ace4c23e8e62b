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
from ranks import Case, Skip, expect
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
    return transformers.AutoModelForCausalLM.from_config(config)


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


def tensor_parallel_models_train(world):
    for config in (llama(), neox(), llama(tie_word_embeddings=True), llama(attention_bias=True, mlp_bias=True)):
        for degree in degrees_of(world.size // 2):
            tsm = started(hybrid_shard_degree=degree, tensor_parallel_degree=2)
            one, model = OneProcess(made(config)), tsm.transform(made(config))
            held = sum(parameter.numel() for parameter in model.parameters())
            expect(held < 0.75 * sum(parameter.numel() for parameter in one.model.parameters()), held)
            model = wrapped(model)
            trains_like_one(tsm, model, one)
            has_values_of(model, one)


CASES = [
    Case("models train with each degree", models_train_with_each_degree, (1, 2, 4)),
    Case("strategies keep their meaning", strategies_keep_their_meaning, (4,)),
    Case("tensor parallel models train", tensor_parallel_models_train, (2, 4)),
]

ranks.run(CASES)
