"""Contexts in which a model is made."""
from __future__ import annotations

import contextlib

import torch

from smdistributed.modelparallel.torch import _tensor
from smdistributed.modelparallel.torch._state import state


@contextlib.contextmanager
def delay_param_initialization(enabled=True):
    """Parameters that are made inside this context have no memory until the model is partitioned. Then the rank that keeps them
    sets their values, by the module's reset_parameters() or by the model's _init_weights(module)."""
    with torch.device("meta") if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def model_creation(tensor_parallelism=False, dtype=None, **tensor_parallel_config):
    """Makes a model, with parameters of a type; with delayed_parameter_initialization they have no memory yet. tensor_parallelism: its
    modules are divided among the ranks of the TP group, as in smp.tensor_parallelism()."""
    state.require()
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype or former)
    try:
        with delay_param_initialization(state.cfg.delayed_parameter_initialization), \
                _tensor.tensor_parallelism(tensor_parallelism, **tensor_parallel_config):
            yield
    finally:
        torch.set_default_dtype(former)
