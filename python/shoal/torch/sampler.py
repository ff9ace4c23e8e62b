"""Selects the samples that a rank trains on (include/shoal/data.h), for torch's DataLoader.

    sampler = shoal.torch.DistributedSampler(dataset, seed=1)
    loader = torch.utils.data.DataLoader(dataset, batch_size=shoal.torch.divide_batch(256).per_rank, sampler=sampler)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader): ...           # sampler.state_dict(taken=(step + 1) * batch_size) resumes after it
"""
from __future__ import annotations

import ctypes
import numbers
import operator
import typing

import torch.distributed as dist
import torch.utils.data.distributed as torchs

from .. import _native
from .._native import OK

TAILS = {"pad": _native.TAIL_PAD, "drop": _native.TAIL_DROP, "keep": _native.TAIL_KEEP}
BLOCK = 4096  # indices that the library returns in one call
ERROR_BYTES = 512


class Batch(typing.NamedTuple):
    """A divided global batch, in samples: those of each rank, those of all ranks, and the rest for the next batch."""

    per_rank: int
    all_ranks: int
    left: int


def divide_batch(wanted: int, ranks: int | None = None) -> Batch:
    """Divides a wanted global batch. Returns the samples of each rank, those of all ranks, and the rest, which is smaller than
    the number of ranks and goes into the next batch. ranks: None means those of the default group. Raises ValueError if a rank
    would get nothing."""
    batch = _native.Batch()
    _call("batch_divide", _number("the global batch", wanted), 1, _world(ranks, dist.get_world_size), ctypes.byref(batch))
    return Batch(batch.per_rank, batch.all_ranks, batch.left)


class DistributedSampler(torchs.DistributedSampler):
    """A subclass of torch.utils.data.DistributedSampler with its arguments. The order differs from torch's, and is the same in
    every version of torch. dataset: an object with a length, or a number. tail: what happens to the samples that remain after
    an equal division: "pad" repeats samples, "drop" leaves them out, and "keep" gives the first ranks one more, for an
    evaluation. With None, drop_last selects one of the first two."""

    def __init__(self, dataset, num_replicas: int | None = None, rank: int | None = None, shuffle: bool = True, seed: int = 0,
                 drop_last: bool = False, *, tail: str | None = None):
        tail = tail or ("drop" if drop_last else "pad")
        if tail not in TAILS:
            raise ValueError(f"shoal: tail is \"{tail}\", but must be one of {', '.join(TAILS)}")
        self.dataset, self.shuffle, self.seed, self.tail = dataset, shuffle, _number("seed", seed), tail
        self.num_replicas, self.rank = _world(num_replicas, dist.get_world_size), _world(rank, dist.get_rank)
        self.epoch, self.drop_last, self.used = 0, tail == "drop", 0
        self._begun_at, self._taken = 0, 0
        len(self)  # raises an error if an argument is wrong

    @property
    def num_samples(self) -> int:
        return len(self)

    @property
    def total_size(self) -> int:
        return len(self) * self.num_replicas

    def __len__(self) -> int:
        """Returns the number of this rank's samples in the rest of the epoch."""
        count = ctypes.c_uint64()
        _call("sampling_count", ctypes.byref(self._sampling()), ctypes.byref(count))
        return count.value

    def __iter__(self):
        sampling, count = self._sampling(), len(self)
        self._begun_at, self._taken = self.used, 0
        block = (ctypes.c_uint64 * BLOCK)()
        for first in range(0, count, BLOCK):
            length = min(BLOCK, count - first)
            _call("sampling_indices", ctypes.byref(sampling), first, length, block)
            for index in block[:length]:
                self._taken += 1
                yield index
        self.used = 0  # in the epoch that follows

    def set_epoch(self, epoch: int) -> None:
        """Starts another epoch at its first sample. The epoch of a loaded state continues from its position."""
        epoch = _number("epoch", epoch)
        if epoch != self.epoch:
            self.epoch, self.used = epoch, 0

    def state_dict(self, taken: int | None = None) -> dict:
        """Returns the position in the epoch, which is the same on all ranks. taken: the samples that this rank has trained on
        since the iteration began. None means all that were handed out, which is more if a DataLoader's workers load ahead."""
        taken = self._taken if taken is None else _number("taken", taken)
        used = min(self._begun_at + taken * self.num_replicas, self._length())
        return {"epoch": self.epoch, "seed": self.seed, "samples": self._length(), "used": used}

    def load_state_dict(self, state: dict) -> None:
        """Makes the next iteration continue from that position, with any number of ranks. Which samples are repeated or left
        out at the end depends on the current number of ranks."""
        if state["samples"] != self._length():
            raise ValueError(f"shoal: the state is of a data set of {state['samples']} samples, this one has {self._length()}")
        self.epoch, self.seed = _number("epoch", state["epoch"]), _number("seed", state["seed"])
        self.used = self._begun_at = _number("used", state["used"])
        self._taken = 0

    def _length(self):
        return _number("dataset", self.dataset) if isinstance(self.dataset, numbers.Integral) else len(self.dataset)

    def _sampling(self):
        return _native.Sampling(samples=self._length(), used=self.used, seed=self.seed, epoch=self.epoch, rank=self.rank,
                                ranks=self.num_replicas, shuffles=int(self.shuffle), tail=TAILS[self.tail])


def _world(given, of_group):
    if given is not None:
        return operator.index(given)
    if not dist.is_initialized():
        raise RuntimeError("shoal: without a default group the rank and the number of ranks must be given")
    return of_group()


def _number(name, value):
    """Converts a whole number of any type, such as NumPy's, to Python's."""
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number < 2**64:
        raise ValueError(f"shoal: {name} is {value!r}, but must be a whole number from 0 to 2**64 - 1")
    return number


def _call(function, *arguments):
    error = ctypes.create_string_buffer(ERROR_BYTES)
    if getattr(_native.load(), function)(*arguments, error, ERROR_BYTES) != OK:
        raise ValueError(f"shoal: {error.value.decode(errors='replace')}")
