"""Averages of a stage's gradients over the replicas of a pipeline, through the gradient engine. The sum of a stage begins with its
last gradient, while other stages still compute.

    rank 0 of a pipeline   .. B2 B3 |ready(stage 0)|           finish
    rank 1                 .. B3 |ready(stage 1)|  ......      finish      other stages compute, the engine sums
"""
from __future__ import annotations

import torch.distributed as dist

from .. import _native
from . import _communicator, _gradients, ddp


class StageSums:
    """The gradients of this rank's stages. Making it is a collective call of the ranks that have the same stages; the first one's
    values are copied to the others."""

    def __init__(self, group, module, stages):
        self._group = ddp._group_of(group, None, "cpu")
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        self._parameters = [parameter for _, parameter in named]
        numbers = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._numbers_of = {stage.number: [numbers[id(each)] for each in stage.parameters if id(each) in numbers] for stage in stages}
        values = [each.detach() for each in (*module.parameters(), *module.buffers())]
        dist._broadcast_coalesced(self._group, values, ddp.BROADCAST_BYTES, 0)
        self._former, self._left, self._reducer = [], [], None
        if named:
            timeout = _communicator.timeouts.get(f"torch.{self._group.group_name}")
            store = dist.distributed_c10d._get_process_group_store(self._group)
            own = _gradients.Communicator(store, self._group.rank(), self._group.size(), timeout, "replicas")
            self._communicator, names = own, [name for name, _ in named]
            self._reducer = _gradients.Reducer(own, names, self._parameters)

    def begin(self):
        """Puts gradients of former steps aside, which are averages already."""
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
        """Waits for the averages, and adds them to the gradients of former steps."""
        if self._reducer is None:
            return
        self._reducer.finish()
        for number, (parameter, former) in enumerate(zip(self._parameters, self._former)):
            average = self._reducer.views[number]
            parameter.grad = average.clone() if former is None else former.add_(average)

    def fail(self, text):
        """Ends the wait of the other replicas."""
        if self._reducer is not None:
            self._reducer.fail(_native.ERR_ABORTED, text)


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
