"""Selects a rank's share of a data set."""
from __future__ import annotations

import ctypes

import tensorflow as tf

from shoal import _native

from . import _world

TAILS = {"pad": _native.TAIL_PAD, "drop": _native.TAIL_DROP, "keep": _native.TAIL_KEEP}
BLOCK = 4096  # indices that are computed at once
ERROR_BYTES = 256


def shard(dataset: tf.data.Dataset, tail: str = "drop") -> tf.data.Dataset:
    """Returns this rank's elements: every size-th, starting from its rank. All ranks must make the same number of steps. So
    tail="drop" leaves out the last elements if they cannot be divided evenly. With "pad", ranks that would have one less repeat
    elements from the beginning. With "keep", the first ranks have one more, for an evaluation. Call it before batch, and after
    a shuffle whose seed is the same on all ranks."""
    _check_tail(tail)
    size, rank = _world.size(), _world.rank()
    shares = dataset.shard(size, rank)
    count = int(dataset.cardinality())
    if tail == "keep" or count == tf.data.INFINITE_CARDINALITY:
        return shares
    if count == tf.data.UNKNOWN_CARDINALITY:
        raise ValueError("shoal: the length of the data set is not known, so it cannot be divided evenly: set it with "
                         "dataset.apply(tf.data.experimental.assert_cardinality(n)), or take tail=\"keep\" and .take(steps)")
    if tail == "drop":
        return shares.take(count // size)
    return dataset.concatenate(dataset.repeat().take(-count % size)).shard(size, rank)


def sharded_indices(samples: int, epoch: int = 0, seed: int = 0, shuffle: bool = True, tail: str = "pad") -> tf.data.Dataset:
    """Returns the indices of this rank's samples in an epoch, in an order that depends on seed and epoch and is the same on all
    ranks (include/shoal/data.h). A step's global batch is a contiguous range of that order, for any number of ranks. Uses no
    memory."""
    _check_tail(tail)
    library, count, error = _native.load(), ctypes.c_uint64(), ctypes.create_string_buffer(ERROR_BYTES)
    sampling = _native.Sampling(samples=samples, seed=seed, epoch=epoch, rank=_world.rank(), ranks=_world.size(),
                                shuffles=int(shuffle), tail=TAILS[tail])

    def check(status):
        if status != _native.OK:
            raise ValueError(f"shoal: {error.value.decode()}")

    check(library.sampling_count(ctypes.byref(sampling), ctypes.byref(count), error, ERROR_BYTES))

    def blocks():
        for first in range(0, count.value, BLOCK):
            indices = (ctypes.c_uint64 * min(BLOCK, count.value - first))()
            check(library.sampling_indices(ctypes.byref(sampling), first, len(indices), indices, error, ERROR_BYTES))
            yield list(indices)

    found = tf.data.Dataset.from_generator(blocks, output_signature=tf.TensorSpec([None], tf.int64)).unbatch()
    return found.apply(tf.data.experimental.assert_cardinality(count.value))


def _check_tail(tail):
    if tail not in TAILS:
        raise ValueError(f"shoal: tail is {tail!r}, and must be one of {', '.join(TAILS)}")
