"""Outer steps (include/shoal/outer.h): each rank trains by itself, and every `every` steps the ranks synchronize their
parameters.

    outer = shoal.torch.DiLoCo(model, every=100, fragments=4, delay=5)     # or shoal.torch.LocalSGD(model, every=16)
    for x, y in batches_of_this_rank:
        optimizer.zero_grad(); loss(model(x), y).backward(); optimizer.step()       # no DistributedDataParallel around the model
        outer.step()
    outer.finish()                                                         # all ranks hold the same parameters

docs/outer.md explains the arguments, and what is exchanged when.
"""
from __future__ import annotations

import ctypes
import datetime
import numbers
import os
import typing

import torch
import torch.distributed as dist

from .. import _native
from .._native import OK
from . import _communicator, _gradients
from ._communicator import BackendError, timed_out
from ._parameters import Parameters

STATE = "shoal outer steps"  # the key of the state's bytes
CHANGED = "change the module before outer steps are made of it, or make new ones on all ranks"


class OuterSteps:
    """The base of LocalSGD and DiLoCo. model: a module, or an iterable of pairs of name and parameter. Frozen parameters do not
    change. Neither do buffers, such as the statistics of batch norm: each rank keeps its own. The constructor is a collective
    call."""

    def __init__(self, model, every: int, *, lr: float, momentum: float, nesterov: bool, fragments: int = 1, delay: int = 0,
                 fragment_of: typing.Mapping[str, int] | None = None, mixing: float = 0.0, compression: str = "none",
                 shares_start: bool = True, timeout: datetime.timedelta | None = None,
                 process_group: dist.ProcessGroup | None = None):
        self._watched = Parameters(model if isinstance(model, torch.nn.Module) else list(model), (), CHANGED)
        names, self._parameters = self._watched.names, self._watched.tensors
        _check_parameters(names, self._parameters)
        if compression not in _gradients.COMPRESSIONS:
            raise ValueError(f"shoal: compression is \"{compression}\", but must be one of {', '.join(_gradients.COMPRESSIONS)}")
        _check_numbers(every=every, fragments=fragments, delay=delay)
        self._owner, self._library, self._address = os.getpid(), _native.load(), None
        group = process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError("shoal: there is no default group yet: call torch.distributed.init_process_group before")
        timeout = timeout or _communicator.timeouts.get(f"torch.{group.group_name}")
        self._communicator = _gradients.Communicator(dist.distributed_c10d._get_process_group_store(group), group.rank(),
                                                     group.size(), timeout, "outer")
        self._context, address = self._communicator.context, ctypes.c_void_p()
        entries = (_native.Parameter * len(names))(*(
            (parameter.numel() * _gradients.TYPES[parameter.dtype][1], _gradients.TYPES[parameter.dtype][0], name.encode())
            for name, parameter in zip(names, self._parameters)))
        options = _native.OuterOptions(
            every=every, fragments=fragments, delay=delay, fragment_of=_division(names, fragment_of), lr=lr, momentum=momentum,
            nesterov=nesterov, mixing=mixing, compression=_gradients.COMPRESSIONS[compression], shares_start=shares_start,
            timeout_ms=_communicator.milliseconds(timeout))
        self._check(self._library.outer_create(self._context, self._communicator.address, entries, len(names), self._memory(),
                                               ctypes.byref(options), ctypes.byref(address)))
        self._address = address.value
        if shares_start:
            self._written()

    def __del__(self, is_own=_communicator.is_own):
        if getattr(self, "_address", None) and is_own(self._owner):
            self._library.outer_free(self._address)

    def step(self) -> None:
        """Call this after each step of the optimizer. Most calls only count. A call that begins or applies an exchange reads or
        writes parameters."""
        if not self._library.outer_is_due(self._address):
            self._check(self._library.outer_step(self._address, None, None))
            return
        result = _native.OuterResult()
        self._check(self._library.outer_step(self._address, self._memory(), ctypes.byref(result)))
        if result.applied >= 0:
            self._written()

    def finish(self) -> None:
        """Brings all ranks to the same parameters. Call it at the end of training, before an evaluation, or before a checkpoint
        that one rank saves for all. A collective call."""
        self._check(self._library.outer_finish(self._address, self._memory()))
        self._written()

    def state_dict(self) -> dict:
        """Returns the state, which is the same on all ranks. Also save the parameters and the optimizer's state: each rank's
        own, or rank 0's directly after finish()."""
        state = torch.empty(self._library.outer_state_bytes(self._address), dtype=torch.uint8)
        self._check(self._library.outer_export(self._address, state.data_ptr(), state.numel()))
        return {STATE: state}

    def load_state_dict(self, state: dict) -> None:
        """Restores state_dict(). A collective call, with the same state on all ranks. Load the model's parameters
        separately."""
        if STATE not in state:
            raise ValueError(f"shoal: this is not a state_dict of {type(self).__name__}: it has no \"{STATE}\"")
        found = state[STATE].detach().to("cpu", torch.uint8).contiguous()
        self._check(self._library.outer_import(self._address, found.data_ptr(), found.numel()))

    def stats(self) -> dict:
        """Returns totals of this rank since construction: steps, exchanges, sent_bytes, network_bytes, waited_us,
        computed_us."""
        stats = _native.OuterTotals()
        self._check(self._library.outer_stats(self._address, ctypes.byref(stats)))
        return {name: getattr(stats, name) for name, _ in stats._fields_ if name != "struct_bytes"}

    def _memory(self):
        """Returns the current addresses of the parameters: a program may have replaced them, or their storage."""
        self._watched.look()
        for parameter in self._parameters:
            _check_storage(parameter)
        return (ctypes.c_void_p * len(self._parameters))(*(parameter.data_ptr() for parameter in self._parameters))

    def _written(self):
        """Marks the parameters as changed. A backward pass of an earlier forward pass would use the wrong values: torch then
        raises an error."""
        for parameter in self._parameters:
            torch.autograd.graph.increment_version(parameter)

    def _check(self, status):
        if status == OK:
            return
        failure, error = _native.Failure(), None
        if self._address and self._library.outer_failure(self._address, ctypes.byref(failure)) == OK and failure.text:
            error = failure.text.decode(errors="replace")
        raise BackendError(f"shoal: {timed_out(status)}{error or _native.error_of(status, self._context)}")


class LocalSGD(OuterSteps):
    """Averages the ranks' parameters every `every` steps (Stich, arXiv 1805.09767)."""

    def __init__(self, model, every: int, **options):
        super().__init__(model, every, lr=1.0, momentum=0.0, nesterov=False, **options)


class DiLoCo(OuterSteps):
    """Every `every` steps, makes a step of SGD with Nesterov momentum along the mean of the ranks' changes (Douillard et al.,
    arXiv 2311.08105). With fragments and a delay, this is its streaming form (arXiv 2501.18512). lr and momentum apply to the
    outer steps."""

    def __init__(self, model, every: int, *, lr: float = 0.7, momentum: float = 0.9, nesterov: bool = True, **options):
        super().__init__(model, every, lr=lr, momentum=momentum, nesterov=nesterov, **options)


def _check_numbers(**given):
    for name, value in given.items():
        if not isinstance(value, numbers.Integral) or not 0 <= value <= _communicator.UINT32_MAX:
            raise ValueError(f"shoal: {name} is {value!r}, but must be a whole number of at least 0")


def _check_parameters(names, parameters):
    for name, parameter in zip(names, parameters):
        if parameter.dtype not in _gradients.TYPES:
            raise TypeError(f"shoal: parameter {name} is of type {parameter.dtype}; outer steps serve "
                            f"{', '.join(str(each).removeprefix('torch.') for each in _gradients.TYPES)}")
        if parameter.device.type != "cpu":
            raise ValueError(f"shoal: parameter {name} is on {parameter.device}, but outer steps serve parameters on the CPU: "
                             "move the module there")
    if not names:
        raise RuntimeError("shoal: the module has no parameter that requires a gradient: outer steps are not needed")


def _check_storage(parameter):
    """Raises ValueError unless the elements fill their storage without holes, in any order, as in torch's own layouts."""
    if parameter.stride() != torch.empty_like(parameter, device="meta").stride() or parameter.device.type != "cpu":
        raise ValueError(f"shoal: a parameter of shape {tuple(parameter.shape)} and strides {parameter.stride()} on "
                         f"{parameter.device} has holes or is not on the CPU: call .contiguous() on it when it is made")


def _division(names, fragment_of):
    """Returns an array of the fragment of each parameter. A name that is not in the mapping is an error: the module has
    changed."""
    if fragment_of is None:
        return None
    missing = [name for name in names if name not in fragment_of]
    if missing:
        raise ValueError(f"shoal: fragment_of has no entry for {', '.join(missing[:4])}")
    return (ctypes.c_uint32 * len(names))(*(fragment_of[name] for name in names))
