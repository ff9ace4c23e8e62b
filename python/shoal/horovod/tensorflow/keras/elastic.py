"""Elastic training based on restarts (shoal.horovod._common.elastic)."""
from __future__ import annotations

import keras

from ..elastic import TensorFlowKerasState, run  # noqa: F401


class KerasState(TensorFlowKerasState):
    pass


class CommitStateCallback(keras.callbacks.Callback):
    """Commits the state every batches_per_commit batches, and at the end of each epoch."""

    def __init__(self, state, batches_per_commit=1):
        super().__init__()
        self._state, self._per_commit, self._left = state, batches_per_commit, batches_per_commit

    def on_train_batch_end(self, batch, logs=None):
        self._left -= 1
        if self._left == 0:
            self._left = self._per_commit
            self._state.commit()

    def on_epoch_end(self, epoch, logs=None):
        self._state.commit()


class UpdateEpochStateCallback(keras.callbacks.Callback):
    """Sets state.epoch to the epoch at which training continues. Put it before CommitStateCallback."""

    def __init__(self, state):
        super().__init__()
        self._state = state

    def on_epoch_end(self, epoch, logs=None):
        self._state.epoch = epoch + 1


class UpdateBatchStateCallback(keras.callbacks.Callback):
    """Sets state.batch to the number of finished batches of the epoch."""

    def __init__(self, state):
        super().__init__()
        self._state = state

    def on_train_batch_end(self, batch, logs=None):
        self._state.batch = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        self._state.batch = 0
