"""Tensor parallelism of version 1: which modules the program asks to divide, the samples that ranks exchange, and whole states.

The ranks of a TP group have parts of the same modules, so they compute on the same samples. With "prescaled_batch": true the program
gives all of them the same batch. Without it each has a batch of its own, as in data parallelism, and the model joins them:

    batch of each tp_rank   [b, ...]  forward()  [tp b, ...]  computed by all  [tp b, ...]  own samples  [b, ...]

Gradients are then those of the mean of the ranks' losses, which is what data parallelism would compute."""
from __future__ import annotations

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from shoal.torch import _divided, _graph
from smdistributed.modelparallel.exceptions import SMPError, SMPUnsupportedError
from smdistributed.modelparallel.torch._state import log, state

MARK = "_smp_tensor_parallelism"
SETTINGS = ("attention_in_fp32", "query_key_layer_scaling", "fused_softmax", "fused_bias_gelu", "fused_dropout", "distribute_embedding",
            "use_alibi", "fp32_residual_addition", "flash_attention", "zero_init", "lm_head", "_prescaled_batch")
_stack = []  # of tensor_parallelism() contexts


# ---- What the program asks for ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tensor_parallelism(enabled=True, **tensor_parallel_config):
    """Modules that are made inside are divided among the ranks of the TP group; the innermost context counts. The settings are for the
    vendor's own layers and have no effect: modules compute as they are."""
    state.require()
    _check_settings(tensor_parallel_config)
    plain = nn.Module.__init__

    def marked(module, *args, **kwargs):
        object.__setattr__(module, MARK, _stack[-1])
        plain(module, *args, **kwargs)
    _stack.append(bool(enabled))
    nn.Module.__init__ = marked
    try:
        yield
    finally:
        nn.Module.__init__ = plain
        _stack.pop()


def set_tensor_parallelism(module, enabled=True, **tensor_parallel_config):
    """Asks to divide a module and all modules in it, or not to. Call it before smp.DistributedModel()."""
    state.require()
    _check_settings(tensor_parallel_config)
    if not isinstance(module, nn.Module):
        raise SMPError(f"smp.set_tensor_parallelism: pass a module, not {type(module).__name__}")
    for each in module.modules():
        object.__setattr__(each, MARK, bool(enabled))


def _check_settings(given):
    unknown = [name for name in given if name not in SETTINGS]
    if unknown:
        raise SMPError(f"smp.tensor_parallelism: unknown setting {unknown[0]}: it is none of {', '.join(SETTINGS)}")


def tp_register_with_module(module_cls, distributed_cls, init_hook=None, forward_hook=None, return_hook=None):
    """Has no effect: a module is divided as it is, and needs no other class."""
    state.require()
    log(f"tp_register_with_module: {module_cls.__name__} is divided as it is; {getattr(distributed_cls, '__name__', distributed_cls)} is not used")


def tp_register(module_cls, init_hook=None, forward_hook=None, return_hook=None):
    """Has no effect, as a decorator: a module is divided as it is."""
    def decorate(distributed_cls):
        tp_register_with_module(module_cls, distributed_cls)
        return distributed_cls
    return decorate


# ---- Dividing --------------------------------------------------------------------------------------------------------------


def is_on():
    return state.cfg.tensor_parallel_degree > 1


def shares_batch():
    """Returns true if all ranks of a model have the same batch because of tensor parallelism."""
    return is_on() and state.cfg.prescaled_batch


def divide(model, init):
    """Divides the modules that the program has named."""
    import shoal.torch
    if not is_on():
        return
    marked = {name for name, module in model.named_modules() if getattr(module, MARK, False)}
    if not marked:
        raise SMPError(f"smp.DistributedModel: tensor_parallel_degree is {state.cfg.tensor_parallel_degree}, but no module is named for it: make the "
                       "model in smp.tensor_parallelism() or smp.model_creation(tensor_parallelism=True), or call "
                       "smp.set_tensor_parallelism(module)")
    shoal.torch.tensor_parallel(model, state.group("TP_GROUP"), within=marked.__contains__, init=init)


def part_of(parameter):
    """Returns the Part of a parameter that tensor parallelism has divided, or None."""
    model = state.model and state.model()
    return _divided.parts_of(model)[0].get(id(parameter)) if model is not None else None


def sizes_of_whole():
    """Returns a function that returns the number of elements of a whole parameter, of which this rank may have a part."""
    parts = _divided.parts_of(state.model())[0]

    def size(parameter):
        part = parts.get(id(parameter))
        return parameter.numel() if part is None else math.prod(part.whole_shape(parameter.shape))
    return size


# ---- Samples ---------------------------------------------------------------------------------------------------------------


class Samples:
    """The samples of one call of the model: joined() over the TP group, and own() ones of the result."""

    def __init__(self, args, kwargs):
        self._given, self._rows = (args, kwargs), None
        if is_on() and not state.cfg.prescaled_batch:
            leaves = pytree.tree_leaves((args, kwargs))
            wrong = next((each for each in leaves if not isinstance(each, (torch.Tensor, *_graph.CONSTANTS))), None)
            if wrong is not None:
                raise SMPUnsupportedError(f"smp: the model is called with an object of the type {type(wrong).__name__}, and the ranks of a TP group "
                                          "have batches of their own, which cannot be joined: set prescaled_batch and give all of them the same")
            self._rows = next((each.shape[0] for each in leaves if isinstance(each, torch.Tensor) and each.dim()), None)

    def joined(self):
        return self._given if self._rows is None else pytree.tree_map(self._join, self._given)

    def _join(self, value):
        if not self._is_of(value, self._rows):
            return value
        if value.requires_grad:
            raise SMPUnsupportedError("smp: an argument of the model requires a gradient, and the ranks of a TP group have batches of their "
                                      "own: compute it inside of the model, or set prescaled_batch and give all of them the same batch")
        return torch.cat(_gathered(value))

    def own(self, result):
        if self._rows is None:
            return result
        count = self._rows * state.cfg.tensor_parallel_degree
        return pytree.tree_map(lambda each: _Own.apply(each) if self._is_of(each, count) else each, result)

    @staticmethod
    def _is_of(value, rows):
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows


def _gathered(value):
    group = state.group("TP_GROUP")
    found = [torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(group.size())]
    dist.all_gather(found, value.contiguous(), group=group)
    return found


class _Own(torch.autograd.Function):
    """This rank's samples. The gradient of all samples is that of the mean of the ranks' losses."""

    @staticmethod
    def forward(ctx, value):
        group = state.group("TP_GROUP")
        return value.chunk(group.size())[group.rank()].clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.cat(_gathered(gradient)) / state.cfg.tensor_parallel_degree


# ---- Norms and whole states ----------------------------------------------------------------------------------------------------------


def clip(module, max_norm, norm_type):
    import shoal.torch
    return shoal.torch.tensor.clip_grad_norm_(module, max_norm, norm_type)


def whole_state(module, *args, **kwargs):
    """Returns a module's state with whole parameters. All ranks of the TP group call it."""
    import shoal.torch
    if _divided.parts_of(module)[1] is None:
        return module.state_dict(*args, **kwargs)
    return shoal.torch.tensor.full_state_dict(module, to=None)


def own_state(module, values):
    """Returns the part of a whole state that this rank keeps. Values that are not the module's stay as they are."""
    parts, own = _divided.parts_of(module)[0], dict(module.state_dict(keep_vars=True))
    found = {}
    for name, value in values.items():
        part = parts.get(id(own.get(name)))
        if part is not None and value.shape != part.whole_shape(own[name].shape):
            raise SMPError(f"smp: the state is of another model: {name} has the shape {list(value.shape)} there, and "
                           f"{list(part.whole_shape(own[name].shape))} here")
        found[name] = value if part is None else part.own(value)
    return found


def whole_values(states, parameters):
    """Returns optimizer states by numbers, with whole tensors. parameters: this rank's, by the same numbers."""
    return _changed(states, parameters, lambda part, value, shape: part.whole(value) if value.shape == shape else value)


def own_values(states, parameters):
    """Returns this rank's parts of optimizer states with whole tensors."""
    return _changed(states, parameters, lambda part, value, shape: part.own(value) if value.shape == part.whole_shape(shape) else value)


def _changed(states, parameters, change):
    parts = _divided.parts_of(state.model())[0] if is_on() else {}

    def changed(number, value):
        part = parts.get(id(parameters[number]))
        return value if part is None or not isinstance(value, torch.Tensor) else change(part, value, parameters[number].shape)
    return {number: {key: changed(number, value) for key, value in found.items()} for number, found in states.items()}
