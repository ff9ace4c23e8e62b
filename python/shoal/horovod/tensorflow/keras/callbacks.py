"""Callbacks for model.fit, with Horovod's arguments."""
from __future__ import annotations

import keras

from shoal.tensorflow.keras import callbacks as shoal_callbacks

from .._world import global_process_set, rank


def _refuse_sets(process_set):
    if process_set is not global_process_set:
        raise ValueError(f"shoal: this callback is for all ranks, not for {process_set}")


class BroadcastGlobalVariablesCallback(shoal_callbacks.BroadcastGlobalVariablesCallback):
    """Leaves local_variables unchanged on each rank. The optimizer's variables for them are broadcast nevertheless."""

    def __init__(self, root_rank, device='', local_variables=None):
        super().__init__(root_rank)
        self._local = list(local_variables or ())

    def _shared(self, variables):
        return [each for each in variables if not any(each is local for local in self._local)]


class MetricAverageCallback(shoal_callbacks.MetricAverageCallback):
    def __init__(self, device='', process_set=global_process_set):
        _refuse_sets(process_set)
        super().__init__()


class LearningRateScheduleCallback(shoal_callbacks.LearningRateScheduleCallback):
    """Accepts momentum_correction, which has no effect: Keras 3 compiles an optimizer's momentum in."""

    def __init__(self, initial_lr, multiplier, start_epoch=0, end_epoch=None, staircase=True, momentum_correction=True,
                 steps_per_epoch=None):
        super().__init__(initial_lr, multiplier, start_epoch, end_epoch, staircase, steps_per_epoch)


class LearningRateWarmupCallback(shoal_callbacks.LearningRateWarmupCallback):
    def __init__(self, initial_lr, warmup_epochs=5, momentum_correction=True, steps_per_epoch=None, verbose=0):
        super().__init__(initial_lr, warmup_epochs, steps_per_epoch, verbose)


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):
    """Keeps only the best model, which rank 0 writes."""

    def __init__(self, filepath="best_model.keras", monitor='val_loss', verbose=0, mode='auto', save_freq='epoch', **options):
        super().__init__(filepath, monitor=monitor, verbose=verbose, save_best_only=True, save_weights_only=False, mode=mode,
                         save_freq=save_freq, **options)

    def _save_model(self, *args, **options):
        if rank() == 0:
            super()._save_model(*args, **options)
