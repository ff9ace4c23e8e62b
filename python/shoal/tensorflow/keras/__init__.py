"""model.fit on several workers, with Keras 3 on TensorFlow.

    import shoal.tensorflow.keras as shoal
    shoal.init()
    model.compile(optimizer=shoal.DistributedOptimizer(keras.optimizers.Adam(1e-3 * shoal.size())), loss=...)
    model.fit(..., callbacks=[shoal.callbacks.BroadcastGlobalVariablesCallback(0), shoal.callbacks.MetricAverageCallback()])
"""
from __future__ import annotations

import keras

from shoal._keras.optimizer import wrap

from .. import _gradients
from .._collectives import Compression, ReduceOp, allgather, allreduce, broadcast  # noqa: F401
from .._world import init, is_initialized, local_rank, local_size, rank, shutdown, size  # noqa: F401
from ..variables import broadcast_object, broadcast_variables  # noqa: F401

if keras.backend.backend() != "tensorflow":
    raise ImportError(f"shoal.tensorflow.keras: Keras runs on {keras.backend.backend()} here: set KERAS_BACKEND=tensorflow before "
                      "it is imported")

from . import callbacks  # noqa: E402,F401
from .normalization import SyncBatchNormalization  # noqa: E402,F401


def DistributedOptimizer(optimizer, compression=Compression.none, sparse_as_dense=False, op=ReduceOp.AVERAGE,
                         buffer_mib=_gradients.BUFFER_MIB, noise_scale=False):
    """Returns the optimizer, which now averages gradients over all ranks before it applies them. A saved model contains the
    plain optimizer. Under the policy mixed_float16 it is wrapped in a LossScaleOptimizer, as model.compile would do: all ranks
    then find the same gradients finite, and skip the same steps. noise_scale: True measures how noisy gradients are, for
    callbacks.NoiseScaleCallback and callbacks.ScaledLearningRate; a number is that of the steps over which it is averaged."""
    return wrap(optimizer, _gradients.Settings(op, compression, sparse_as_dense, buffer_mib, noise_scale=noise_scale))
