"""Checkpoints: each rank of the first replica saves the variables of its partition, in a folder of its own."""
from __future__ import annotations

import os

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.tensorflow._state import dp_rank, mp_rank, mp_size


class CheckpointManager:
    """tf.train.CheckpointManager of this rank's partition, at directory/mp_rank_0, mp_rank_1, ... All ranks make it, save and
    restore; save() does nothing on other replicas than the first one."""

    def __init__(self, checkpoint, directory, max_to_keep=None, checkpoint_name="ckpt"):
        self._checkpoint, self._directory = checkpoint, directory
        self._manager = tf.train.CheckpointManager(checkpoint, os.path.join(directory, f"mp_rank_{mp_rank()}"), max_to_keep,
                                                   checkpoint_name=checkpoint_name)

    @property
    def latest_checkpoint(self):
        return tf.train.latest_checkpoint(self._manager.directory)  # another replica may have saved it

    @property
    def checkpoints(self):
        return self._manager.checkpoints

    def save(self, checkpoint_number=None, check_interval=True, options=None):
        return self._manager.save(checkpoint_number, check_interval, options) if dp_rank() == 0 else None

    def restore(self, save_path=None):
        """Restores a checkpoint, by default this rank's latest one. Variables that do not exist yet get their values when they are
        made."""
        self._check_parts()
        return self._checkpoint.restore(save_path or self.latest_checkpoint)

    def _check_parts(self):
        found = [name for name in os.listdir(self._directory) if name.startswith("mp_rank_")]
        if len(found) != mp_size():
            raise SMPError(f"smp.CheckpointManager: {self._directory} has {len(found)} partitions, and this job {mp_size()}: restore with the "
                           "number of partitions with which it was saved")
