"""Callbacks for model.fit on several ranks."""
from __future__ import annotations

from shoal._keras import callbacks
from shoal._keras.callbacks import LearningRateScheduleCallback  # noqa: F401

from . import _job as job


class _Job:
    """The functions by which callbacks communicate."""

    rank, size, mean = staticmethod(job.rank), staticmethod(job.size), staticmethod(job.mean)
    broadcast_variables = staticmethod(job.broadcast_variables)
    allgather_object = staticmethod(job.allgather_object)
    mismatch = RuntimeError


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
