"""Parameters that stages on several ranks use. Each of these ranks has a copy; they begin with equal values, and after each step
their gradients are summed."""
from __future__ import annotations

import torch
import torch.distributed as dist

from .. import _native
from .._native import OK
from . import _gradients, _split
from ._communicator import BackendError, timed_out


def ties_of(model, splits, schedule):
    """Returns (names, ranks) for each parameter of several ranks, the same list on all ranks."""
    names, ranks = {}, {}
    for stage in range(schedule.stages):
        for name, parameter in _split.parts(splits, [stage], model).named_parameters():
            ranks.setdefault(id(parameter), set()).add(schedule.rank_of(stage))
            names.setdefault(id(parameter), set()).add(name)
    return [(sorted(names[key]), sorted(ranks[key])) for key in names if len(ranks[key]) > 1]


class Ties:
    """The tied parameters of this rank. Making it is a collective call. parameters: this rank's, by name."""

    def __init__(self, ties, parameters, store, rank, timeout):
        self._library, self._ties, self._former, self._elsewhere = _native.load(), [], {}, set()
        communicators = {}
        for names, ranks in ties:
            if rank not in ranks:
                continue
            if tuple(ranks) not in communicators:
                own = dist.PrefixStore("shoal tied " + " ".join(map(str, ranks)), store)
                communicators[tuple(ranks)] = _gradients.Communicator(own, ranks.index(rank), len(ranks), timeout, "tied")
            parameter = next(parameters[name] for name in names if name in parameters)
            self._ties.append((names[0], parameter, communicators[tuple(ranks)]))
            if ranks[0] != rank:
                self._elsewhere.add(id(parameter))
        self.communicators = list(communicators.values())

    def share_first(self):
        """Copies the values of the first rank of each tie to its other ranks."""
        for _, parameter, communicator in self._ties:
            values = parameter.detach().contiguous()
            size = values.numel() * values.element_size()
            self._check(communicator, self._library.broadcast(communicator.address, values.data_ptr(), values.data_ptr(), size,
                                                              _native.UINT8, 0, None))
            parameter.detach().copy_(values)

    def counted_once(self, parameters):
        """Returns those of this rank's parameters that no lower rank has."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def begin(self):
        """Puts gradients of former steps aside, which are sums already."""
        self._former = {}
        for name, parameter, _ in self._trained():
            self._former[name], parameter.grad = parameter.grad, None

    def sum(self):
        """Sums the gradients of a step."""
        for name, parameter, communicator in self._trained():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            if gradient.layout is not torch.strided:
                raise TypeError(f"shoal: the gradient of the tied parameter {name} is a tensor of {gradient.layout}, but must be dense")
            gradient = gradient.detach().contiguous()
            kind, each = _gradients.TYPES[gradient.dtype]
            self._check(communicator, self._library.allreduce(communicator.address, gradient.data_ptr(), gradient.data_ptr(),
                                                              gradient.numel() * each, kind, _native.SUM, None))
            former = self._former.pop(name)
            parameter.grad = gradient if former is None else former.add_(gradient)

    def _trained(self):
        return [tie for tie in self._ties if tie[1].requires_grad]

    def restore(self):
        """Drops the gradients of a step that has failed."""
        for name, parameter, _ in self._ties:
            if name in self._former:
                parameter.grad = self._former.pop(name)

    @staticmethod
    def _check(communicator, status):
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, comm=communicator.address)}")
