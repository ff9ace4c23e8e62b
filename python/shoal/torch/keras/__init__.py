"""model.fit on several workers, with Keras 3 on its torch backend.

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    import shoal.torch.keras as shoal
    shoal.init()
    model.compile(optimizer=shoal.DistributedOptimizer(keras.optimizers.Adam(1e-3 * shoal.size())), loss=...)
    model.fit(..., callbacks=[shoal.callbacks.BroadcastGlobalVariablesCallback(0), shoal.callbacks.MetricAverageCallback()])
"""
from __future__ import annotations

import contextlib

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
    """Averages all gradients of one type in one all-reduce."""

    @torch.no_grad()
    def average(self, gradients, variables):
        results = list(gradients)
        if size() == 1:
            return results
        with _named(variables):
            for same in _by_type(_used(results, variables), variables):
                for i, average in zip(same, _averages_of([results[i] for i in same])):
                    results[i] = average
        return results


@contextlib.contextmanager
def _named(variables):
    """Adds the gradients' names to the error of a failed collective, because one all-reduce carries many variables."""
    try:
        yield
    except dist.DistBackendError as error:
        more = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
        raise type(error)(f"gradients of {variables[0].path}{more}: {error}") from error


def _used(gradients, variables):
    """Returns the indices of the gradients that exist on every rank. The others are None on every rank, or it raises an
    error."""
    holders = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.int32)
    dist.all_reduce(holders)
    for i, count in enumerate(holders.tolist()):
        if 0 < count < size():
            missing = [rank for rank, is_missing in enumerate(allgather_object(gradients[i] is None)) if is_missing]
            raise RuntimeError(f"shoal: the gradient of {variables[i].path} is None on rank{'s' * (len(missing) > 1)} "
                               f"{', '.join(map(str, missing))} alone: every rank's loss must use the same variables")
    return [i for i, gradient in enumerate(gradients) if gradient is not None]


def _by_type(indices, variables):
    types = {}
    for i in indices:
        types.setdefault(variables[i].value.dtype, []).append(i)
    return types.values()


def _averages_of(gradients):
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    dist.all_reduce(flat)
    flat /= size()
    averages = flat.split([gradient.numel() for gradient in gradients])
    return [average.view(gradient.shape) for average, gradient in zip(averages, gradients)]


def DistributedOptimizer(optimizer):
    """Returns the optimizer, which now averages gradients over all ranks before it applies them. A saved model contains the
    plain optimizer. Under the policy mixed_float16 it is wrapped in a LossScaleOptimizer, so that all ranks skip the same
    steps."""
    return wrap(optimizer, _Averages())
