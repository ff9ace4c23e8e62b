"""Batch normalization over the batches of all workers."""
from __future__ import annotations

import keras
import tensorflow as tf

from shoal import _native

from .. import _operations


@keras.saving.register_keras_serializable(package="shoal")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """keras.layers.BatchNormalization whose mean and variance in training are those of all ranks' batches together, which may
    differ in length. It needs one all-reduce in the forward pass and one in the backward pass. Every rank has to call it the
    same number of times. Sums are added in float64. world: the number of a communicator; 0 is the one of all ranks."""

    def __init__(self, axis=-1, world=0, **options):
        super().__init__(axis=axis, **options)
        self._world = world
        self.supports_jit = False  # XLA does not know Shoal's operations

    def _moments(self, inputs, mask):
        wide = tf.cast(inputs, tf.float64)
        axes = [axis for axis in range(len(inputs.shape)) if axis != self.axis % len(inputs.shape)]
        weights = tf.ones_like(wide) if mask is None else tf.cast(tf.expand_dims(mask, -1), tf.float64) * tf.ones_like(wide)
        sums = tf.stack([tf.reduce_sum(term, axes) for term in (wide * weights, wide * wide * weights, weights)])
        sums = _operations.allreduce([sums], _native.SUM, world=self._world)[0]
        sums.set_shape([3, inputs.shape[self.axis]])
        total, squares, count = tf.unstack(tf.cast(sums, tf.float64))
        count = tf.maximum(count, 1.0)  # 1 if no rank has a sample
        mean = total / count
        variance = tf.maximum(squares / count - mean * mean, 0.0)
        return tf.cast(mean, inputs.dtype), tf.cast(variance, inputs.dtype)
