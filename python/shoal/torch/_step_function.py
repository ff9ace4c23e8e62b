"""Passes of a pipeline in which a program's function computes the loss, as in scripts for smdistributed.modelparallel:

    def step(model, inputs, targets):      on each rank, for each microbatch
        inputs = inputs / 255                  all stages
        result = model(inputs)                 a stage runs here; the function ends here on all ranks but the last stage's
        loss = cross_entropy(result, targets)  the last stage
        model.backward(loss)                   notes where the backward pass begins, which the schedule runs later
        return loss

So settings around the model's call, such as torch.autocast, hold on each stage."""
from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from . import _stages


class Reached(BaseException):
    """Ends the function at the model's call. Not an Exception, so that the function's own handlers let it pass."""

    def __init__(self, model=None, arguments=None):
        super().__init__("the step function ends here on this rank")
        self.model, self.arguments = model, arguments


class FunctionPass(_stages.Pass):
    """A step, or an evaluation. call(microbatch) runs the function, which calls run_model() once and, in a step, backward().
    returned: by microbatch, what the function has returned, on the rank of the last stage. factor: of each loss."""

    def __init__(self, pipeline, call, is_training, has_gradients, factor):
        loss = True if has_gradients else None  # only whether there is one
        super().__init__(pipeline._stages, None, loss, is_training, pipeline._executor, pipeline._sums.complete, pipeline._ties.begin_sum,
                         pipeline._takes_objects)
        self._recorded, self._call, self._factor = pipeline._splits[True].recorded, call, factor
        self._stage = self._received = self._outputs = self._sent = None  # the action that runs has these
        self._loss_of_call = None
        self.returned, self.has_backward = {}, False

    def _forward(self, stage, place, received, outputs):
        self._stage, self._received, self._outputs, self._sent, self._loss_of_call = stage, received, outputs, None, None
        try:
            returned = self._call(place[1])
            self._require_call()
            self.returned[place[1]] = self._own(returned)
        except Reached:
            pass
        if self._loss is not None:
            self._kept[place] = _stages.Kept(received, self._sent, self._loss_of_call)

    def _require_call(self):
        if self._sent is None:
            raise RuntimeError("shoal: the step function has not called the model: call it once for each microbatch")

    def _own(self, returned):
        """Returns values that stay after the pass: without a graph, and not in the memory of messages."""
        addresses = {each.address for each in self._received}

        def own(value):
            if not isinstance(value, torch.Tensor):
                return value
            is_borrowed = value.layout is torch.strided and value.untyped_storage().data_ptr() in addresses
            return value.detach().clone() if is_borrowed else value.detach()
        return pytree.tree_map(own, returned)

    def run_model(self, args, kwargs):
        """Runs the stage. Returns the model's result on the last stage; on others it ends the function."""
        if self._stage is None or self._sent is not None:
            raise RuntimeError("shoal: the step function may call the model once for each microbatch: join the inputs of two calls, or "
                               "call the model in two step functions")
        inputs = self._inputs(args, kwargs)
        values, result = self._stage.forward(self._is_training, inputs, self._received)
        self._sent = self._send_all(values, self._outputs, self._stage.ways_out)
        if not self._stage.is_last:
            raise Reached()
        return result

    def _inputs(self, args, kwargs):
        if self._stage.number > 0 and not self._recorded.objects:
            return ()
        leaves, form = pytree.tree_flatten((args, kwargs))
        if form != self._recorded.form or self._recorded.constants_in(leaves) != self._recorded.constants:
            raise ValueError("shoal: the model was divided for other arguments: call it in every step with arguments of the same form, "
                             "and with the same values for numbers, words and the like")
        return self._recorded.inputs_in(leaves) if self._stage.number == 0 else self._recorded.objects_in(leaves)

    def backward(self, loss):
        """Notes a loss, or adds to the one that the function has noted. loss: a tensor of one element."""
        if self._loss is None:
            raise RuntimeError("shoal: backward() in an evaluation: call the step function outside of torch.no_grad()")
        if self._sent is None:
            raise RuntimeError("shoal: backward() before the model's call")
        loss = loss.reshape(()) * self._factor
        self._loss_of_call = loss if self._loss_of_call is None else self._loss_of_call + loss
        self.has_backward = True
