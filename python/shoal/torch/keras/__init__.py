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
import dataclasses

import keras
import torch
import torch.distributed as dist

from shoal import _native, _scaling
from shoal._keras.optimizer import wrap

from ._job import allgather_object, broadcast_variables, init, rank, size  # noqa: F401

if keras.backend.backend() != "torch":
    raise ImportError(f"shoal.torch.keras: Keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=torch before it is imported; "
                      "shoal.tensorflow.keras is for TensorFlow")

from . import callbacks  # noqa: E402,F401


class _Averages:
    """Averages all gradients of one type in one all-reduce. With noise_scale= it also sums squared norms, in a pass over the
    gradients and one over the averages."""

    def __init__(self, noise_scale=False):
        self.noise_window = _scaling.window_of(noise_scale)
        self._average = _scaling.NoiseAverage(self.noise_window or _scaling.WINDOW)
        self._batch = 1.0, 1.0

    @torch.no_grad()
    def average(self, gradients, variables):
        results = list(gradients)
        if size() == 1:
            return results
        with _named(variables):
            used = _used(results, variables)
            own = _squared(results, used) if self.noise_window else None
            for same in _by_type(used, variables):
                for i, average in zip(same, _averages_of([results[i] for i in same])):
                    results[i] = average
            if own is not None:
                self._measure(own, _squared(results, used))
        return results

    def _measure(self, own, averaged):
        samples, scale = self._batch
        sums = torch.tensor([own, 1 / samples], dtype=torch.float64)
        dist.all_reduce(sums)
        small = size() / float(sums[1])
        self._average.add(small, float(sums[0]) / size() * scale ** 2, size() * small, averaged * scale ** 2)

    # ---- The noise scale: with noise_scale=, between steps ----

    def set_batch(self, samples, gradient_scale=1.0):
        """This rank's gradients are means over that many samples, and are to be multiplied by gradient_scale."""
        self._batch = float(samples), float(gradient_scale)

    def noise(self):
        noise = self._average.read()
        return dataclasses.replace(noise, state=_native.NOISE_ONE_BATCH) if size() == 1 else noise

    def noise_state(self):
        return _scaling.save_average(self._average.struct)

    def load_noise_state(self, state):
        self._average.struct = _scaling.load_average(state)


def _squared(gradients, used):
    return sum(float(gradients[i].double().square().sum()) for i in used)


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


def DistributedOptimizer(optimizer, noise_scale=False):
    """Returns the optimizer, which now averages gradients over all ranks before it applies them. A saved model contains the
    plain optimizer. Under the policy mixed_float16 it is wrapped in a LossScaleOptimizer, so that all ranks skip the same
    steps. noise_scale: True measures how noisy gradients are, for callbacks.NoiseScaleCallback and callbacks.ScaledLearningRate;
    a number is that of the steps over which it is averaged."""
    return wrap(optimizer, _Averages(noise_scale))
