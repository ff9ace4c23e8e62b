"""A GradientTape whose gradients are averages over all ranks."""
from __future__ import annotations

import tensorflow as tf

from . import _gradients
from ._collectives import Compression, ReduceOp


class DistributedGradientTape:
    """Wraps a tf.GradientTape, before or after it has recorded. gradient() returns averages; everything else is the tape's own.

        with tf.GradientTape() as tape:
            loss = ...
        gradients = DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
    """

    def __init__(self, gradtape, compression=Compression.none, sparse_as_dense=False, op=ReduceOp.AVERAGE,
                 buffer_mib=_gradients.BUFFER_MIB):
        self._tape = gradtape
        self._settings = _gradients.Settings(op, compression, sparse_as_dense, buffer_mib)

    def __enter__(self):
        self._tape.__enter__()
        return self

    def __exit__(self, *failure):
        return self._tape.__exit__(*failure)

    def __getattr__(self, name):
        if name == "_tape":  # a copy asks an object that is not filled yet
            raise AttributeError(name)
        return getattr(self._tape, name)

    def gradient(self, target, sources, output_gradients=None, unconnected_gradients=tf.UnconnectedGradients.NONE):
        """Like tf.GradientTape.gradient, but averaged. Every rank calls it, with the same sources in the same order."""
        gradients = self._tape.gradient(target, sources, output_gradients, unconnected_gradients)
        averages = self._settings.average(tf.nest.flatten(gradients), tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, averages)
