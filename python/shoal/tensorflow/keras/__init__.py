"""model.fit on several workers, with Keras 3 on TensorFlow.

    import shoal.tensorflow.keras as shoal
    shoal.init()
    model.compile(optimizer=shoal.DistributedOptimizer(keras.optimizers.Adam(1e-3 * shoal.size())), loss=...)
    model.fit(..., callbacks=[shoal.callbacks.BroadcastGlobalVariablesCallback(0), shoal.callbacks.MetricAverageCallback()])
"""
from __future__ import annotations

import keras

from .. import _gradients
from .._collectives import Compression, ReduceOp, allgather, allreduce, broadcast  # noqa: F401
from .._world import init, is_initialized, local_rank, local_size, rank, shutdown, size  # noqa: F401
from ..variables import broadcast_object, broadcast_variables  # noqa: F401

if keras.backend.backend() != "tensorflow":
    raise ImportError(f"shoal.tensorflow.keras: Keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=tensorflow before "
                      "it is imported")

from . import callbacks  # noqa: E402,F401


class _Distributed:
    """Averages gradients before all that an optimizer does with them: unscaling, clipping, accumulation."""

    _shoal = None  # what averages: _gradients.Settings

    def apply(self, grads, trainable_variables=None):
        grads = list(grads)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        trainable = [not getattr(variable, "overwrite_with_gradient", False) for variable in variables]
        if len(grads) == len(variables):
            chosen = [i for i, is_one in enumerate(trainable) if is_one]
            averages = self._shoal.average([grads[i] for i in chosen], [variables[i] for i in chosen])
            for i, gradient in zip(chosen, averages):
                grads[i] = gradient
        return super().apply(grads, trainable_variables)


def DistributedOptimizer(optimizer, compression=Compression.none, sparse_as_dense=False, op=ReduceOp.AVERAGE,
                         buffer_mib=_gradients.BUFFER_MIB):
    """The optimizer, which from now on averages gradients over all ranks before it applies them; saved models have it as the
    plain one. Under the policy mixed_float16 it is wrapped in a LossScaleOptimizer, as model.compile would do: all ranks then
    find the same gradients finite, and skip the same steps."""
    return wrap(optimizer, _gradients.Settings(op, compression, sparse_as_dense, buffer_mib))


def wrap(optimizer, settings):
    """Makes the optimizer average by settings.average(gradients, variables)."""
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"shoal: DistributedOptimizer takes an optimizer of Keras 3, and was given a "
                        f"{type(optimizer).__name__}; keras.optimizers.get() makes one of a name")
    if isinstance(optimizer, _Distributed):
        raise ValueError("shoal: this optimizer averages gradients already: DistributedOptimizer was called on it twice")
    scales = keras.optimizers.LossScaleOptimizer
    if keras.config.dtype_policy().name == "mixed_float16" and not isinstance(optimizer, scales):
        optimizer = scales(optimizer)
    plain = type(optimizer)
    # With the name and module of the plain class, so that a saved model is restored as that.
    optimizer.__class__ = type(plain.__name__, (_Distributed, plain), {"__module__": plain.__module__, "_shoal": settings})
    return optimizer
