"""model.fit on several workers, with Keras 3 on its torch backend.

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import shoal.torch.keras as shoal
    shoal.init()
    model.compile(optimizer=shoal.DistributedOptimizer(keras.optimizers.Adam(1e-3 * shoal.size())), loss=...)
    model.fit(..., callbacks=[shoal.callbacks.BroadcastGlobalVariablesCallback(0), shoal.callbacks.MetricAverageCallback()])
"""
from __future__ import annotations

import keras
import torch
import torch.distributed as dist

from shoal._keras.optimizer import wrap

from ._job import allgather_object, broadcast_variables, init, rank, size  # noqa: F401

if keras.backend.backend() != "torch":
    raise ImportError(f"shoal.torch.keras: Keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=torch before it is imported; "
                      "shoal.tensorflow.keras is for TensorFlow")

from . import callbacks  # noqa: E402,F401


class _Averages:
    """All gradients of one type as one all-reduce. Behind them goes a number for each variable, 1 where this rank has a gradient."""

    @torch.no_grad()
    def average(self, gradients, variables):
        results, types = list(gradients), {}
        if size() == 1:
            return results
        for i, variable in enumerate(variables):
            types.setdefault(variable.value.dtype, []).append(i)
        for same in types.values():
            averages = self._averages_of([results[i] for i in same], [variables[i] for i in same])
            for i, average in zip(same, averages):
                results[i] = average
        return results

    def _averages_of(self, gradients, variables):
        values = [variable.value for variable in variables]
        parts = [torch.zeros_like(value) if one is None else one for one, value in zip(gradients, values)]
        marks = torch.tensor([0.0 if one is None else 1.0 for one in gradients], dtype=values[0].dtype)
        flat = torch.cat([part.reshape(-1) for part in parts] + [marks])
        dist.all_reduce(flat)
        flat /= size()
        *averages, marks = flat.split([part.numel() for part in parts] + [len(parts)])
        for variable, mark in zip(variables, marks.tolist()):
            if 0.0 < mark < 0.99:
                raise RuntimeError(f"shoal: the gradient of {variable.path} is None on some ranks and not on others: every rank's loss "
                                   "must use the same variables")
        return [average.view(part.shape) if mark else None for average, part, mark in zip(averages, parts, marks.tolist())]


def DistributedOptimizer(optimizer):
    """The optimizer, which from now on averages gradients over all ranks before it applies them; saved models have it as the plain
    one. Under the policy mixed_float16 it is wrapped in a LossScaleOptimizer, so that all ranks skip the same steps."""
    return wrap(optimizer, _Averages())
