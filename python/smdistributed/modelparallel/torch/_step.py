"""smp.step: a function that runs once for each microbatch, and what it returns."""
from __future__ import annotations

import collections
import copy
import functools
import hashlib
import inspect

import torch

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError
from smdistributed.modelparallel.torch import _messages, _tensor
from smdistributed.modelparallel.torch._state import log, state


class StepOutput:
    """A tensor that the step function has returned. outputs: its values, by microbatch."""

    def __init__(self, outputs):
        self.outputs = list(outputs)

    def reduce_sum(self):
        return sum(self.outputs[1:], self.outputs[0])

    def reduce_mean(self):
        return self.reduce_sum() / len(self.outputs)

    average = accumulate = reduce_mean

    def detach(self):
        """Returns the values without a graph."""
        return StepOutput([each.detach() for each in self.outputs])

    def concat(self, dim=0):
        """Joins the values along the dimension of the batch. Values without dimensions become a vector."""
        return torch.stack(self.outputs) if self.outputs[0].dim() == 0 else torch.cat(self.outputs, dim)

    merge = concat

    def stack(self):
        return torch.stack(self.outputs)

    def __repr__(self):
        return f"StepOutput({self.outputs!r})"


def joined(returned, detaches=True):
    """Returns what the step function returns: tensors as StepOutputs, other values as lists, in the form of one call."""
    first = returned[0]
    if all(each is None for each in returned):
        return None
    if all(isinstance(each, torch.Tensor) for each in returned):
        return StepOutput([each.detach() if detaches else each for each in returned])
    if isinstance(first, dict) and all(isinstance(each, dict) and each.keys() == first.keys() for each in returned):
        return {key: joined([each[key] for each in returned], detaches) for key in first}
    if isinstance(first, (tuple, list)) and all(isinstance(each, type(first)) and len(each) == len(first) for each in returned):
        parts = [joined(list(values), detaches) for values in zip(*returned)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return list(returned)


# ---- Arguments -------------------------------------------------------------------------------------------------------------


def mapped(value, change):
    """Returns a value whose tensors, also in lists, tuples, dicts and sets, are replaced by what change(tensor) returns."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        made = {key: mapped(each, change) for key, each in value.items()}
        return made if type(value) is dict else _like(value, made)
    if isinstance(value, collections.UserDict):  # such as the batches of tokenizers
        return _like(value, {key: mapped(each, change) for key, each in value.items()})
    if isinstance(value, (list, tuple, set, frozenset)):
        parts = [mapped(each, change) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _like(value, items):
    made = copy.copy(value)
    for key, each in items.items():
        made[key] = each
    return made


def divided(value, name, count, axis):
    """Returns an argument for each microbatch."""
    if hasattr(value, "smp_slice"):
        return [value.smp_slice(count, number, axis) for number in range(count)]

    def part(number):
        return lambda tensor: _narrowed(tensor, name, count, axis, number)
    return [mapped(value, part(number)) for number in range(count)]


def _narrowed(tensor, name, count, axis, number):
    if tensor.dim() == 0:
        return tensor
    if not -tensor.dim() <= axis < tensor.dim():
        raise SMPConfigError(f"smp.step: the argument {name} has a tensor of {tensor.dim()} dimensions, and none is number {axis}: name "
                             "the dimension of the batch in input_split_axes, or the argument in non_split_inputs")
    rows = tensor.shape[axis]
    if rows % count:
        raise SMPConfigError(f"smp.step: the argument {name} has {rows} samples, which {count} microbatches do not divide: use a batch "
                             "size that is a multiple of microbatches (drop_last=True), or name the argument in non_split_inputs")
    return tensor.narrow(axis, number * (rows // count), rows // count)


# ---- The function ----------------------------------------------------------------------------------------------------------


def step(function=None, non_split_inputs=None, input_split_axes=None, detach_outputs=True):
    """Makes a function a step: its tensor arguments are divided along the first dimension, and it runs once for each microbatch.

    non_split_inputs: names of arguments that every call gets whole. input_split_axes: the dimension of the batch, by names of
    arguments. detach_outputs: tensors that it returns have no graph; with several partitions they never have one. All ranks of a
    pipeline get what it returns: tensors as StepOutputs, other values as lists."""
    if function is not None and not callable(function):
        raise TypeError("smp.step: write @smp.step, or @smp.step(non_split_inputs=[...])")
    if function is None:
        return functools.partial(step, non_split_inputs=non_split_inputs, input_split_axes=input_split_axes, detach_outputs=detach_outputs)
    return StepFunction(function, list(non_split_inputs or ()), dict(input_split_axes or {}), detach_outputs)


class StepFunction:
    """A step. See step()."""

    def __init__(self, function, whole, axes, detaches):
        functools.update_wrapper(self, function)
        self._function, self._whole, self._axes, self._detaches = function, whole, axes, detaches
        self._signature = inspect.signature(function)
        self._compared_in, self._is_shared = None, False  # the batches of a pipeline's ranks: in which job (state.cfg)
        self._check_names()

    def __get__(self, owner, kind=None):
        """A step may be a method."""
        return self if owner is None else functools.partial(self, owner)

    def _check_names(self):
        parameters = self._signature.parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        for name in (*self._whole, *self._axes):
            if name not in parameters and not takes_any:
                raise SMPConfigError(f"smp.step: {self.__name__}() has no argument {name}, which non_split_inputs or input_split_axes names")

    def __call__(self, *args, **kwargs):
        state.require()
        if state.running is not None:
            raise SMPError(f"smp.step: {self.__name__}() is called inside of another step: call it as a plain function there")
        bound = self._signature.bind(*args, **kwargs)
        model = self._model_in(bound)
        if model.pp_size > 1 or _tensor.shares_batch():
            self._share_batch(bound)
        calls = self._divide(bound, state.cfg.microbatches)
        returned = model.run(lambda number: self._function(*calls[number].args, **calls[number].kwargs), len(calls))
        found = joined(returned, self._detaches)
        model.stepped()
        return found

    def _model_in(self, bound):
        from smdistributed.modelparallel.torch.model import DistributedModel
        found = [each for value in bound.arguments.values() for each in (value if isinstance(value, tuple) else (value,))
                 if isinstance(each, DistributedModel)]
        model = found[0] if found else state.model and state.model()
        if model is None:
            raise SMPError(f"smp.step: there is no model for {self.__name__}(): make model = smp.DistributedModel(model) first")
        if not model.is_of_job():
            raise SMPError(f"smp.step: the model of {self.__name__}() is from before smp.init() was called with other parameters: make it again")
        return model

    def _divide(self, bound, count):
        """Returns the arguments of each microbatch."""
        columns = {}
        for name, value in bound.arguments.items():
            if self._signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                named = {key: self._parts(key, each, count) for key, each in value.items()}
                columns[name] = [{key: parts[number] for key, parts in named.items()} for number in range(count)]
            else:
                columns[name] = self._parts(name, value, count)
        return [inspect.BoundArguments(self._signature, {name: parts[number] for name, parts in columns.items()})
                for number in range(count)]

    def _parts(self, name, value, count):
        return [value] * count if name in self._whole else divided(value, name, count, self._axes.get(name, 0))

    # ---- The batch of a pipeline ----

    def _share_batch(self, bound):
        """The batch of pp_rank 0 counts. The ranks of a pipeline usually read the same batch, because they use the same seed and
        dp_rank: the first call compares. If it differs, pp_rank 0 sends its batch from then on. With prescaled_batch the same holds for
        all ranks of a model, and mp_rank 0."""
        kind = "MP_GROUP" if _tensor.shares_batch() else "PP_GROUP"
        if self._compared_in is not state.cfg:
            self._compared_in = state.cfg
            hashes = _messages.allgather(_hash_of(bound.arguments), _messages.CommGroup(kind))
            self._is_shared = len(set(hashes)) > 1
            if self._is_shared:
                first, reader = ("mp_rank", "rdp_rank") if kind == "MP_GROUP" else ("pp_rank", "dp_rank")
                log(f"the ranks of a {'model' if kind == 'MP_GROUP' else 'pipeline'} have different batches in {self.__name__}(); {first} 0 sends "
                    f"its own to the others in each step. Read the same batch on all of them, by smp.{reader}() and a common seed, to save this")
        if not self._is_shared:
            return
        given = {name: value for name, value in bound.arguments.items() if _is_of_batch(value)} if state.group(kind).rank() == 0 else None
        bound.arguments.update(_messages.share(given, 0, state.group(kind)))


def _is_of_batch(value):
    """Returns true for tensors, lists and dicts with tensors, and objects that divide themselves."""
    found = [value] if hasattr(value, "smp_slice") else []
    mapped(value, found.append)
    return bool(found)


def _hash_of(arguments):
    """Returns a hash of the batch. It covers tensors, and all that an object has which divides itself."""
    found, seen = hashlib.blake2b(digest_size=16), set()

    def add(tensor):
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        found.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")

    def add_all(value):
        if isinstance(value, torch.Tensor):
            return add(value)
        if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
            return found.update(repr(value).encode())
        if id(value) in seen:
            return None
        seen.add(id(value))
        found.update(type(value).__name__.encode())
        held = value.items() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else getattr(value, "__dict__", {}).items()
        for each in held:
            add_all(each)
        return None
    for value in arguments.values():
        if hasattr(value, "smp_slice"):
            add_all(value)
        else:
            mapped(value, add)
    return found.hexdigest()
