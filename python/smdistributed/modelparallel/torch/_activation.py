"""Activation checkpointing: modules whose activations are computed again in the backward pass."""
from __future__ import annotations

import torch.utils.checkpoint
from torch import nn

from smdistributed.modelparallel.exceptions import SMPConfigError

MARK = "_smp_checkpointed"


def checkpoint(function, *args, preserve_rng_state=True, **kwargs):
    """Calls the function or module; its activations are computed again in the backward pass."""
    return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def checkpoint_sequential(function, input, strategy="each", preserve_rng_state=True, pack_args_as_tuple=False):
    """Calls the modules of an nn.Sequential one after the other, each group of them checkpointed. strategy: "each", "contiguous" (one
    group) or "group_N" (N modules in a group). pack_args_as_tuple: a tuple goes from module to module as one argument."""
    modules = list(function)
    for group in _groups(modules, strategy):
        def run(*args, group=group):
            given = args if len(args) > 1 or pack_args_as_tuple else args[0]
            for module in group:
                given = module(*given) if isinstance(given, tuple) and not pack_args_as_tuple else module(given)
            return given
        input = checkpoint(run, *(input if isinstance(input, tuple) else (input,)), preserve_rng_state=preserve_rng_state)
    return input


def _groups(modules, strategy):
    if strategy == "each":
        size = 1
    elif strategy == "contiguous":
        size = max(1, len(modules))
    elif isinstance(strategy, str) and strategy.startswith("group_") and strategy[6:].isdigit() and int(strategy[6:]):
        size = int(strategy[6:])
    else:
        raise SMPConfigError(f"smp: strategy is {strategy!r}, but must be \"each\", \"contiguous\" or \"group_N\" with a number N")
    return [modules[begin:begin + size] for begin in range(0, len(modules), size)]


def set_activation_checkpointing(module, preserve_rng_state=True, strategy="each", pack_args_as_tuple=False):
    """Checkpoints a module, or the modules of an nn.Sequential or nn.ModuleList. With several partitions each module is checkpointed
    for itself, whatever the strategy, because a group may be on several ranks."""
    _groups([], strategy)
    for each in module if isinstance(module, (nn.Sequential, nn.ModuleList)) else [module]:
        if not getattr(each, MARK, False):
            object.__setattr__(each, MARK, True)
            _wrap(each, preserve_rng_state)


def _wrap(module, preserve_rng_state):
    plain = module.forward

    def forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return plain(*args, **kwargs)
        return checkpoint(plain, *args, preserve_rng_state=preserve_rng_state, **kwargs)
    module.forward = forward
