"""Parameters that stages on several ranks use. Each of these ranks has a copy; they begin with equal values, and their gradients are
summed. An action of the schedule begins each sum (SUM_TIED); the ranks continue to compute meanwhile."""
from __future__ import annotations

import ctypes

import torch
import torch.distributed as dist

from .. import _native
from .._native import OK
from . import _gradients, _split, _stage_sums
from ._communicator import BackendError, timed_out


def ties_of(model, splits, schedule):
    """Returns (names, stages) for each parameter of several ranks of the schedule, the same list on all ranks."""
    names, stages_of = {}, {}
    for stage in range(schedule.stages):
        for name, parameter in _split.parts(splits, [stage], model).named_parameters():
            stages_of.setdefault(id(parameter), []).append(stage)
            names.setdefault(id(parameter), set()).add(name)
    return [(sorted(names[key]), stages) for key, stages in stages_of.items() if len({schedule.rank_of(stage) for stage in stages}) > 1]


class Ties:
    """The tied parameters of this rank, with the numbers of their ties. Making it is a collective call. parameters: this rank's, by
    name."""

    def __init__(self, ties, schedule, parameters, store, member, timeout):
        self._library, self._ties, self._former, self._elsewhere = _native.load(), {}, {}, set()
        self._requests = []  # sums under way: (tie, request, gradient)
        communicators = {}
        for number, (names, stages) in enumerate(ties):
            members = schedule.members_of(stages)
            if member not in members:
                continue
            if members not in communicators:
                own = dist.PrefixStore("shoal tied " + " ".join(map(str, members)), store)
                communicators[members] = _gradients.Communicator(own, members.index(member), len(members), timeout, "tied")
            parameter = next(parameters[name] for name in names if name in parameters)
            self._ties[number] = (names[0], parameter, communicators[members])
            if members[0] != member:
                self._elsewhere.add(id(parameter))
        self.communicators = list(communicators.values())

    def ids(self):
        """Returns the ids of the tied parameters of this rank."""
        return {id(parameter) for _, parameter, _ in self._ties.values()}

    def share_first(self):
        """Copies the values of the first rank of each tie to its other ranks."""
        for _, parameter, communicator in self._ties.values():
            _stage_sums.broadcast(communicator, [parameter])

    def counted_once(self, parameters):
        """Returns those of this rank's parameters that no lower rank has."""
        return [parameter for parameter in parameters if id(parameter) not in self._elsewhere]

    def begin(self):
        """Puts gradients of former steps aside, which are sums already."""
        self._former = {}
        for number, (_, parameter, _) in self._trained().items():
            self._former[number], parameter.grad = parameter.grad, None

    def begin_sum(self, number):
        """The gradients of this rank are complete: begins their sum."""
        if number not in self._trained():
            return
        name, parameter, communicator = self._ties[number]
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if gradient.layout is not torch.strided:
            raise TypeError(f"shoal: the gradient of the tied parameter {name} is a tensor of {gradient.layout}, but must be dense")
        gradient, request = gradient.detach().contiguous(), ctypes.c_void_p()
        kind, each = _gradients.TYPES[gradient.dtype]
        self._check(communicator, self._library.allreduce_post(communicator.address, gradient.data_ptr(), gradient.data_ptr(),
                                                               gradient.numel() * each, kind, _native.SUM, None, ctypes.byref(request)))
        self._requests.append((number, request, gradient))

    def begin_sums(self):
        """Begins all sums, in the same order on all ranks."""
        for number in self._trained():
            self.begin_sum(number)

    def finish(self):
        """Waits for the sums, and adds them to the gradients of former steps."""
        while self._requests:
            number, request, gradient = self._requests[0]
            status = self._library.request_wait(request, _gradients.FOREVER)  # it has a deadline of its own
            self._library.request_free(request)
            del self._requests[0]
            self._check(self._ties[number][2], status)
            former, parameter = self._former.pop(number), self._ties[number][1]
            parameter.grad = gradient if former is None else former.add_(gradient)

    def _trained(self):
        return {number: tie for number, tie in self._ties.items() if tie[1].requires_grad}

    def restore(self):
        """Drops the gradients of a step that has failed, and whose communicators have."""
        for _, request, _ in self._requests:
            self._library.request_wait(request, _gradients.FOREVER)
            self._library.request_free(request)
        self._requests = []
        for number, former in self._former.items():
            self._ties[number][1].grad = former
        self._former = {}

    @staticmethod
    def _check(communicator, status):
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, comm=communicator.address)}")
