"""Sums of a stage's gradients over the ranks that have the stage, through the gradient engine. The sum of a stage begins after
its last gradient, with an action of the schedule (SUM_REPLICAS), while other stages still compute.

    rank 0 of a pipeline   .. B2 B3 |ready(stage 0)|           finish
    rank 1                 .. B3 |ready(stage 1)|  ......      finish      other stages compute, the engine sums

Replicas of a stage have parts of one batch, and their gradients are added. Replicas of a pipeline have batches of their own, and
their gradients are averaged."""
from __future__ import annotations

import ctypes

from .. import _native
from .._native import OK
from . import _communicator, _gradients


def broadcast(communicator, tensors):
    """Copies the first rank's values to the others."""
    for tensor in tensors:
        values = tensor.detach().contiguous()
        size = values.numel() * values.element_size()
        status = _native.load().broadcast(communicator.address, values.data_ptr(), values.data_ptr(), size, _native.UINT8, 0, None)
        if status != OK:
            raise _communicator.BackendError(f"shoal: {_communicator.timed_out(status)}{_native.error_of(status, comm=communicator.address)}")
        tensor.detach().copy_(values)


class StageSums:
    """The gradients of this rank's stages. Making it is a collective call of the ranks that have the same stages; the first one's
    values are copied to the others. op: SUM or AVG. apart: parameters, by their ids, that are summed elsewhere."""

    def __init__(self, communicator, module, stages, op, apart=()):
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad and id(parameter) not in apart]
        self._parameters = [parameter for _, parameter in named]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._numbers_of = {stage.number: [numbers[id(each)] for each in stage.parameters if id(each) in numbers] for stage in stages}
        self._communicator = communicator
        broadcast(communicator, [*module.parameters(), *module.buffers()])
        self._former, self._left, self._reducer = [], [], None
        if named:
            self._reducer = _gradients.Reducer(communicator, [name for name, _ in named], self._parameters, op=op)

    def begin(self):
        """Puts gradients of former steps aside, which are sums already."""
        if self._reducer is None:
            return
        self._former = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._left = [0] * len(self._parameters)
        for numbers in self._numbers_of.values():
            for number in numbers:
                self._left[number] += 1
        self._reducer.begin()

    def complete(self, stage):
        """The gradients of a stage are complete. Begins the sums of those that no other stage of this rank uses."""
        for number in self._numbers_of[stage]:
            self._left[number] -= 1
            if not self._left[number]:
                self._reducer.ready(number, self._reducer.place(number, self._parameters[number].grad))

    def finish(self):
        """Waits for the sums, and adds them to the gradients of former steps."""
        if self._reducer is None:
            return
        self._reducer.finish()
        for number, (parameter, former) in enumerate(zip(self._parameters, self._former)):
            result = self._reducer.views[number]
            parameter.grad = result.clone() if former is None else former.add_(result)

    def fail(self, text):
        """Ends the waits of the other ranks, for gradients and for results (_replicas.py)."""
        if self._reducer is not None:
            self._reducer.fail(_native.ERR_ABORTED, text)
        _native.load().comm_fail(self._communicator.address, ctypes.byref(_communicator.cause_of(text)))


class NoSums:
    """In place of StageSums, for a pipeline without replicas."""

    def begin(self):
        pass

    def complete(self, stage):
        pass

    def finish(self):
        pass

    def fail(self, text):
        pass
