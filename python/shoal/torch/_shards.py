"""Sharded parameters (include/shoal/shards.h) for tensors: the units of a module, and their memory as tensors."""
import ctypes
import os

import torch

from .. import _native
from .._native import OK
from . import _gradients
from ._communicator import UINT32_MAX, BackendError, is_own, timed_out

NO_UNIT = UINT32_MAX  # SHOAL_SHARDS_NONE


# ---- Units -----------------------------------------------------------------------------------------------------------------


class Unit:
    """Parameters of one type that are gathered together. indices: their numbers in the module."""

    def __init__(self, number):
        self.number, self.indices = number, []


class Units:
    """Divides the parameters of a module into units.

    all          the units
    of           for each parameter, its unit
    used_by      pairs of a module and the units that its forward pass needs

    chosen: what ShardedDataParallel documents as `units`. A parameter belongs to the innermost chosen module around the module that
    owns it, or else to its owner alone. A parameter of several owners belongs to the first of them; the others use its unit.
    A module uses the units of the parameters that it owns itself, and a chosen one also those of all modules in it that have no
    other chosen module around them. So units are live if a program calls only parts of a chosen module, as of a ModuleList."""

    def __init__(self, module, parameters, chosen=None):
        self._numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._is_chosen = _chooser(module, chosen)
        self.all, self.of, self.used_by = [], [None] * len(parameters), []
        self._parameters, self._by_owner, self._used = parameters, {}, {}
        self._walk(module, None)
        self.used_by = [(owner, list(units)) for owner, units in self._used.values()]

    def _walk(self, module, around):
        if self._is_chosen(module) or (around is None and isinstance(module, torch.nn.MultiheadAttention)):
            around = module  # attention reads the parameters of its output layer without calling that
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) in self._numbers:
                unit = self._assign(self._numbers[id(parameter)], around or module)
                for user in (module, around or module):
                    self._used.setdefault(id(user), (user, {}))[1][unit] = True
        for child in module._modules.values():
            if child is not None:
                self._walk(child, around)

    def _assign(self, index, owner):
        if self.of[index] is None:
            kind = id(owner), self._parameters[index].dtype
            if kind not in self._by_owner:
                self._by_owner[kind] = Unit(len(self.all))
                self.all.append(self._by_owner[kind])
            self.of[index] = self._by_owner[kind]
            self.of[index].indices.append(index)
        return self.of[index]


def _chooser(module, chosen):
    """Returns a function that returns true for modules whose parameters shall be one unit."""
    if chosen is None:
        lists = [each for each in module.modules() if isinstance(each, (torch.nn.ModuleList, torch.nn.Sequential))]
        groups = [[id(each) for each in one if any(True for _ in each.parameters())] for one in lists]
        members = set(max(groups, key=len, default=()))
        return lambda each: id(each) in members
    if callable(chosen) and not isinstance(chosen, type):
        return chosen
    kinds = (chosen,) if isinstance(chosen, type) else tuple(chosen)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, torch.nn.Module) for kind in kinds):
        raise TypeError("shoal: units must be a set of classes of modules, such as {Block}, or a function that returns true for a "
                        f"module whose parameters are one unit; it is {chosen!r}")
    return lambda each: isinstance(each, kinds)


# ---- The engine ------------------------------------------------------------------------------------------------------------


class _Handle:
    """Owns the shards. Each tensor in their memory holds it, because a program may keep one longer than the module."""

    def __init__(self, library, address):
        self._owner, self._library, self._address = os.getpid(), library, address

    def __del__(self, is_own=is_own):
        if is_own(self._owner):
            self._library.shards_free(self._address)


class Shards:
    """struct shoal_shards. Making it is a collective call."""

    def __init__(self, communicator, names, parameters, units, **options):
        self._library, self._context, self.address = _native.load(), communicator.context, None
        self._memory, address = _gradients._HostMemory(), ctypes.c_void_p()
        self._counts = [parameter.numel() * _gradients.TYPES[parameter.dtype][1] for parameter in parameters]
        entries = (_native.Parameter * len(parameters))(*(
            (count, _gradients.TYPES[parameter.dtype][0], name.encode())
            for count, parameter, name in zip(self._counts, parameters, names)))
        unit_of = (ctypes.c_uint32 * len(parameters))(*(unit.number for unit in units.of))
        chosen = _native.ShardsOptions(unit_of=unit_of, **options)
        self.check(self._library.shards_create(self._context, communicator.address, entries, len(parameters), ctypes.byref(chosen),
                                               ctypes.byref(address)))
        self.address = address.value
        self._handle = _Handle(self._library, self.address)

    def gather(self, unit, following):
        """Makes a unit live, then begins to gather the one with the number `following`."""
        self.check(self._library.shards_gather(self.address, unit.number, following))

    def release(self, unit):
        self.check(self._library.shards_release(self.address, unit.number))

    def address_of(self, index):
        """The address of a parameter of a live unit, or None."""
        return self._library.shards_parameter(self.address, index)

    def bytes_at(self, address, count):
        """A tensor of bytes in the memory of a live unit, which stays allocated as long as the tensor."""
        return self._memory.bytes_at(address, count, self._handle) if count else torch.empty(0, dtype=torch.uint8)

    def ready(self, index, gradient):
        """Copies a gradient, whose elements have the order of the parameter's in memory."""
        self.check(self._library.shards_ready(self.address, index, gradient.data_ptr(), self._counts[index]))

    def drop(self):
        """Drops the gradients that are ready."""
        self.check(self._library.shards_drop(self.address))

    def step(self):
        """Steps this rank's shards. Returns struct shoal_shards_result."""
        result = _native.ShardsResult()
        self.check(self._library.shards_step(self.address, ctypes.byref(result)))
        return result

    def memory(self):
        """Returns bytes on this rank by their use: struct shoal_shards_bytes."""
        used = _native.ShardsBytes()
        self.check(self._library.shards_memory(self.address, ctypes.byref(used)))
        return used

    def check(self, status):
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, self._context)}")
