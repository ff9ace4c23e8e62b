"""Contexts in which a model is made."""
from __future__ import annotations

import contextlib

import torch

from smdistributed.modelparallel.torch._state import log, state


@contextlib.contextmanager
def delay_param_initialization(enabled=True):
    """Parameters that are made inside have no memory until the model is partitioned. They get values by the module's
    reset_parameters(), or by the model's _init_weights(module), on the rank that keeps them."""
    with torch.device("meta") if enabled else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def model_creation(tensor_parallelism=False, dtype=None, **tensor_parallel_config):
    """Makes a model, with parameters of a type; with delayed_parameter_initialization they have no memory yet. The settings of tensor
    parallelism have no effect, as it is not served."""
    state.require()
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype or former)
    try:
        with delay_param_initialization(state.cfg.delayed_parameter_initialization), _tensor_parallelism(tensor_parallelism):
            yield
    finally:
        torch.set_default_dtype(former)


@contextlib.contextmanager
def _tensor_parallelism(enabled):
    if enabled:
        log("tensor_parallelism has no effect, because tensor_parallel_degree is 1")
    yield


def tensor_parallelism(enabled=True, **tensor_parallel_config):
    """Has no effect, as the degree of tensor parallelism is 1."""
    return _tensor_parallelism(enabled)


def set_tensor_parallelism(module, enabled=True, **tensor_parallel_config):
    """Has no effect, as the degree of tensor parallelism is 1."""
    with _tensor_parallelism(enabled):
        pass


def tp_register(distributed_class, init_hook=None, forward_hook=None, return_hook=None):
    """Decorates a class whose tensor-parallel form is another one. Has no effect, as the degree of tensor parallelism is 1."""
    return lambda original: original


def tp_register_with_module(module_class, distributed_class, init_hook=None, forward_hook=None, return_hook=None):
    """Has no effect, as the degree of tensor parallelism is 1."""
