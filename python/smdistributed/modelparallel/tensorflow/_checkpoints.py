"""Checkpoints: each rank of the first replica saves the variables of its partition, in a folder of its own.

    folder/mp_rank_0/ckpt-1.index, .data-...   of tf.train.Checkpoint
    folder/mp_rank_0/ckpt-1.partitions         the partition of each layer, in the order of their calls: {"model": [0, 0, 1]}

The automatic division follows measured times, so a later job could divide the model differently. It does not: it reads the division
of the latest checkpoint."""
from __future__ import annotations

import contextlib
import json
import os
import pathlib

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.tensorflow._model import DistributedModel
from smdistributed.modelparallel.tensorflow._state import dp_rank, mp_rank, mp_size

ENDING = ".partitions"


class CheckpointManager:
    """tf.train.CheckpointManager of this rank's partition, at directory/mp_rank_0, mp_rank_1, ... All ranks make it, save and
    restore; save() does nothing on other replicas than the first one. Make it before the first step: a model that is not divided yet
    will be divided as in the latest checkpoint of the directory."""

    def __init__(self, checkpoint, directory, max_to_keep=None, checkpoint_name="ckpt"):
        self._checkpoint, self._directory = checkpoint, directory
        self._manager = tf.train.CheckpointManager(checkpoint, os.path.join(directory, f"mp_rank_{mp_rank()}"), max_to_keep,
                                                   checkpoint_name=checkpoint_name)
        for division, places in self._divisions(self.latest_checkpoint):
            division.prefer(places)

    @property
    def latest_checkpoint(self):
        return tf.train.latest_checkpoint(self._manager.directory)  # another replica may have saved it

    @property
    def checkpoints(self):
        return self._manager.checkpoints

    def save(self, checkpoint_number=None, check_interval=True, options=None):
        if dp_rank() > 0:
            return None
        path = self._manager.save(checkpoint_number, check_interval, options)
        if path:
            self._save_divisions(path)
        return path

    def restore(self, save_path=None):
        """Restores a checkpoint, by default this rank's latest one. Variables that do not exist yet get their values when they are
        made."""
        self._check_parts()
        path = save_path or self.latest_checkpoint
        for division, places in self._divisions(path):
            division.follow(places, path)
        return self._checkpoint.restore(path)

    def _models(self):
        """Returns the divided models of the checkpoint, by their names in it."""
        return {name: each for name, each in vars(self._checkpoint).items() if isinstance(each, DistributedModel)}

    def _save_divisions(self, path):
        places = {name: model._smp_division.places for name, model in self._models().items()}
        with open(f"{path}.writing", "w") as file:
            json.dump({name: each for name, each in places.items() if each}, file)
        os.replace(f"{path}.writing", path + ENDING)
        for old in pathlib.Path(self._manager.directory).glob("*" + ENDING):
            if not old.with_suffix(".index").exists():  # the manager has dropped the checkpoint
                old.unlink()

    def _divisions(self, path):
        """Yields (the division of a model, that of a checkpoint). None for checkpoints that were saved without it."""
        with contextlib.suppress(FileNotFoundError), open(f"{path}{ENDING}") as file:
            saved, models = json.load(file), self._models()
            yield from ((models[name]._smp_division, places) for name, places in saved.items() if name in models)

    def _check_parts(self):
        found = [name for name in os.listdir(self._directory) if name.startswith("mp_rank_")]
        if len(found) != mp_size():
            raise SMPError(f"smp.CheckpointManager: {self._directory} has {len(found)} partitions, and this job {mp_size()}: restore with the "
                           "number of partitions with which it was saved")
