"""Elastic training based on restarts (shoal.horovod._common.elastic)."""
from __future__ import annotations

import random

import torch

from .._common import elastic
from .._common.elastic import run  # noqa: F401
from ._world import rank, size
from .functions import broadcast_object


class ObjectState(elastic.State):
    """A state of attributes, which are passed by name."""

    _rank = staticmethod(rank)
    _broadcast = staticmethod(broadcast_object)


class TorchState(ObjectState):
    """The model, the optimizer and other objects that have a state_dict, and attributes."""

    def __init__(self, model=None, optimizer=None, **values):
        given = {"model": model, "optimizer": optimizer, **values}
        parts = {name: value for name, value in given.items() if hasattr(value, "state_dict") and hasattr(value, "load_state_dict")}
        for name, value in parts.items():
            setattr(self, name, value)
        super().__init__({name: (value.state_dict, value.load_state_dict) for name, value in parts.items()},
                         **{name: value for name, value in values.items() if name not in parts})


class ElasticSampler(torch.utils.data.Sampler):
    """Divides the samples of an epoch over the ranks. Pass it to the state, and call record_batch after each batch: after a
    restart, training continues with the samples that the latest commit does not include. set_epoch begins an epoch."""

    def __init__(self, dataset, shuffle=True, seed=0):
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.set_epoch(0)

    def set_epoch(self, epoch):
        self.load_state_dict({"epoch": epoch, "processed_num": 0})

    def record_batch(self, batch_idx, batch_size):
        """Records that each rank has processed one more batch of batch_size samples."""
        self.processed_num += batch_size * size()

    def state_dict(self):
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state):
        self.epoch, self.processed_num = state["epoch"], state["processed_num"]
        self.reset()

    def reset(self):
        """Divides the samples that are left. Some are used twice if they cannot be divided evenly."""
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(int(self.seed + self.epoch)).shuffle(order)
        left = order[self.processed_num:]
        count = -(-len(left) // size())
        self._own = [left[(i * size() + rank()) % len(left)] for i in range(count)]

    def __iter__(self):
        return iter(self._own)

    def __len__(self):
        return len(self._own)
