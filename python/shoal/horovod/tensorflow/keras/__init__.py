"""Horovod's names for Keras 3 on TensorFlow, over Shoal.

    import shoal.horovod.tensorflow.keras as hvd        # instead of import horovod.tensorflow.keras as hvd
    hvd.init()
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3 * hvd.size())), loss=...)
    model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()])
"""
from __future__ import annotations

import keras
import tensorflow as tf

from shoal._keras.optimizer import wrap
from shoal.tensorflow.keras import normalization

from .. import _operations
from .. import (  # noqa: F401
    Adasum, Average, Compression, Max, Min, Product, ProcessSet, Sum, add_process_set, broadcast_global_variables, broadcast_object,
    ccl_built, cross_rank, cross_size, cuda_built, ddl_built, global_process_set, gloo_built, gloo_enabled, init, is_homogeneous,
    is_initialized, local_rank, local_size, mpi_built, mpi_enabled, mpi_threads_supported, nccl_built, rank, remove_process_set,
    rocm_built, shutdown, size, start_timeline, stop_timeline)
from .._world import world_of
from ..gradients import Settings
from . import callbacks, elastic  # noqa: F401


def DistributedOptimizer(optimizer, name=None, device_dense='', device_sparse='', compression=Compression.none, sparse_as_dense=False,
                         gradient_predivide_factor=1.0, op=Average, backward_passes_per_step=1, average_aggregated_gradients=False,
                         num_groups=0, groups=None, process_set=global_process_set, scale_local_gradients=True):
    """Returns the optimizer, which now averages gradients over all ranks before it applies them. With backward_passes_per_step
    it changes variables only every that many calls, by the sum of their gradients, or by the mean
    (average_aggregated_gradients)."""
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    factor = 1 if average_aggregated_gradients else backward_passes_per_step  # Keras's accumulation computes the mean
    settings = Settings(compression, sparse_as_dense, op, gradient_predivide_factor, process_set, scale_local_gradients, factor)
    wrapped = wrap(optimizer, settings)
    if backward_passes_per_step > 1:
        if wrapped.built:
            raise ValueError("shoal: backward_passes_per_step is for an optimizer that has not yet been used: wrap it before")
        wrapped.gradient_accumulation_steps = backward_passes_per_step
    return wrapped


def PartialDistributedOptimizer(optimizer, *args, local_layers=None, **options):
    """Like DistributedOptimizer, but keeps the gradients of local_layers on this rank."""
    wrapped = DistributedOptimizer(optimizer, *args, **options)
    for layer in local_layers or ():
        for variable in layer.trainable_weights:
            wrapped._shoal.add_local(variable)
    return wrapped


@keras.saving.register_keras_serializable(package="shoal.horovod")
class SyncBatchNormalization(normalization.SyncBatchNormalization):
    """Batch normalization over the batches of a process set's ranks, which all take part."""

    def __init__(self, fused=False, process_set=global_process_set, **options):
        if fused is None or fused:
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(world=0 if process_set is global_process_set and not process_set.process_set_id else world_of(process_set), **options)


def load_model(filepath, custom_optimizers=None, custom_objects=None, compression=Compression.none, legacy_opts=False):
    """Loads a saved model, and makes its optimizer a DistributedOptimizer."""
    names = {**{each.__name__: each for each in custom_optimizers or ()}, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=names)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)  # in place
    return model


# ---- Operations on values: arrays ----


def allreduce(value, name=None, average=None, prescale_factor=1.0, postscale_factor=1.0, op=None, compression=Compression.none):
    return _operations.allreduce(tf.convert_to_tensor(value), average, compression=compression, op=op, name=name,
                                 prescale_factor=prescale_factor, postscale_factor=postscale_factor).numpy()


def allgather(value, name=None):
    return _operations.allgather(tf.convert_to_tensor(value), name).numpy()


def broadcast(value, root_rank, name=None):
    return _operations.broadcast(tf.convert_to_tensor(value), root_rank, name).numpy()


def reducescatter(value, name=None, op=Average):
    return _operations.reducescatter(tf.convert_to_tensor(value), op=op, name=name).numpy()
