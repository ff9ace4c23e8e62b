"""Callbacks for model.fit on several ranks."""
from __future__ import annotations

import tensorflow as tf

from shoal._keras import callbacks
from shoal._keras.callbacks import LearningRateScheduleCallback  # noqa: F401

from .. import _collectives, _world, variables


class _Job:
    """The functions by which callbacks communicate."""

    rank, size = staticmethod(_world.rank), staticmethod(_world.size)
    broadcast_variables = staticmethod(variables.broadcast_variables)
    allgather_object = staticmethod(variables.allgather_object)

    @staticmethod
    def mean(numbers):
        return [float(each) for each in _collectives.allreduce(tf.constant(numbers, tf.float64)).numpy()]

    @staticmethod
    def mismatch(text):
        return tf.errors.FailedPreconditionError(None, None, text)


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback):
    _job = _Job


class MetricAverageCallback(callbacks.MetricAverageCallback):
    _job = _Job


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback):
    _job = _Job


class NoiseScaleCallback(callbacks.NoiseScaleCallback):
    _job = _Job


class ScaledLearningRate(callbacks.ScaledLearningRate):
    _job = _Job
