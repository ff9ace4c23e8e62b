"""Callbacks for model.fit."""
from shoal.tensorflow.keras.callbacks import (  # noqa: F401
    BroadcastGlobalVariablesCallback, LearningRateScheduleCallback, LearningRateWarmupCallback, MetricAverageCallback)
