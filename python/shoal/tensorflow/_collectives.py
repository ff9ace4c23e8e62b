"""Collectives on tensors: eagerly, inside tf.function, and under a GradientTape. `world` is the number of a communicator
(_world.add_world); 0 is the one of all ranks."""
from __future__ import annotations

import enum

import tensorflow as tf

from shoal import _native

from . import _operations, _world

SHAPE_NUMBERS = 9  # the rank and the first dimensions of a tensor, which ranks compare before they gather


class ReduceOp(enum.IntEnum):
    """The operators of reductions."""

    AVERAGE = _native.AVG
    SUM = _native.SUM
    MIN = _native.MIN
    MAX = _native.MAX
    PRODUCT = _native.PROD


class Compression:
    """How tensors travel. none: unchanged. fp16, bf16, int8: float32 gradients travel in this format between hosts, and keep
    their precision inside a host. allreduce casts its tensor before and back after (fp16 and bf16 only)."""
    none, fp16, bf16, int8 = "none", "fp16", "bf16", "int8"


_CASTS = {"fp16": tf.float16, "bf16": tf.bfloat16}


def allreduce(tensor, op: ReduceOp = ReduceOp.AVERAGE, compression: str = Compression.none, name: str | None = None):
    """Reduces the tensors of all ranks, which must have the same shape, and returns the result on every rank. IndexedSlices are
    gathered; they support SUM and AVERAGE only."""
    _world.current()
    if isinstance(tensor, tf.IndexedSlices):
        return allreduce_slices(tensor, op, name)
    tensor = tf.convert_to_tensor(tensor)
    narrow = _cast_of(tensor, compression)
    result = _operations.allreduce([tf.cast(tensor, narrow)], int(op), name)[0]
    return tf.cast(result, tensor.dtype)


def oob_allreduce(tensor, compression: str = Compression.none, op: ReduceOp = ReduceOp.AVERAGE):
    """allreduce, under the name that scripts for SageMaker's library use for losses and metrics."""
    return allreduce(tensor, op, compression)


def grouped_allreduce(tensors, op: ReduceOp = ReduceOp.AVERAGE, compression: str = Compression.none, name: str | None = None):
    """Reduces a list of tensors, in one operation for each type."""
    _world.current()
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    cast = [tf.cast(tensor, _cast_of(tensor, compression)) for tensor in tensors]
    results = [None] * len(tensors)
    for indices in _by_type(cast):
        group = _operations.allreduce([cast[i] for i in indices], int(op), name)
        for i, result in zip(indices, group):
            results[i] = tf.cast(result, tensors[i].dtype)
    return results


def broadcast(tensor, root_rank: int = 0, name: str | None = None):
    """Returns root_rank's tensor on every rank."""
    _check_root(root_rank)
    return _operations.broadcast([tf.convert_to_tensor(tensor)], root_rank, name)[0]


def allgather(tensor, name: str | None = None, world: int = 0):
    """Concatenates the tensors of all ranks along the first dimension, in which they may differ."""
    tensor = _with_rows(tensor)
    return _operations.allgather_rows(tensor, _gathered_shapes(tensor, name, world), name, world)


def reducescatter(tensor, op: ReduceOp = ReduceOp.SUM, name: str | None = None, world: int = 0):
    """Returns this rank's rows of the reduced tensor. If rows cannot be divided evenly, the first ranks have one more."""
    size = _world.size_of(world)
    tensor = _with_rows(tensor)
    rows = tf.shape(tensor, tf.int64)[0]
    shares = rows // size + tf.cast(tf.range(size, dtype=tf.int64) < rows % size, tf.int64)
    return _operations.reduce_scatter_rows(tensor, shares, int(op), name, world)


def alltoall(tensor, splits=None, name: str | None = None, world: int = 0):
    """Sends rows to every rank: the first splits[0] to rank 0, and so on; without splits, the same number to each. Returns the
    rows from all ranks in the order of ranks; with splits, returns (rows, number of rows from each rank)."""
    size = _world.size_of(world)
    tensor = _with_rows(tensor)
    if splits is None:
        if tensor.shape[0] is not None and tensor.shape[0] % size:
            raise ValueError(f"shoal: {tensor.shape[0]} rows cannot be divided evenly among {size} ranks: pass splits")
        sent = tf.fill([size], tf.shape(tensor, tf.int64)[0] // size)
    else:
        sent = tf.cast(tf.convert_to_tensor(splits), tf.int64)
    ones = tf.ones([size], tf.int64)
    received = _operations.alltoall_rows(sent, ones, ones, name and f"{name}_splits", world)
    received.set_shape([size])
    result = _operations.alltoall_rows(tensor, sent, received, name, world)
    return result if splits is None else (result, received)


def barrier() -> None:
    """Waits for all ranks."""
    _world.current()
    return _operations.barrier()


def _cast_of(tensor, compression):
    if compression not in ("none", *_CASTS):
        raise ValueError(f"shoal: a tensor cannot be compressed as {compression!r}: only none, fp16 and bf16 are possible; int8 "
                         "is for gradients")
    return _CASTS[compression] if compression != "none" and tensor.dtype in (tf.float32, tf.float64) else tensor.dtype


def allreduce_slices(slices, op, name=None, world=0):
    """Concatenates the tf.IndexedSlices of all ranks."""
    if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
        raise NotImplementedError("shoal: tf.IndexedSlices can be summed and averaged only: tf.convert_to_tensor makes them "
                                  "dense")
    values, indices = gather_slices(slices, name, world)
    if op == ReduceOp.AVERAGE:
        values = values / tf.cast(_world.size_of(world), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def gather_slices(slices, name=None, world=0):
    """Returns (values, indices) of all ranks."""
    values = tf.convert_to_tensor(slices.values)
    with _operations.in_order():
        shapes = _gathered_shapes(values, name, world)
        return (_operations.allgather_rows(values, shapes, name and f"{name}_values", world),
                _operations.allgather_rows(slices.indices, shapes[:, 1], name and f"{name}_indices", world))


def _by_type(tensors):
    """Returns lists of the indices of tensors of one type."""
    groups = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(i)
    return groups.values()


def _check_root(root_rank):
    if not 0 <= root_rank < _world.size():
        raise ValueError(f"shoal: root_rank is {root_rank}, but ranks are 0 to {_world.size() - 1}")


def _with_rows(tensor):
    _world.current()
    tensor = tf.convert_to_tensor(tensor)
    return tf.reshape(tensor, [1]) if tensor.shape.rank == 0 else tensor


def _gathered_shapes(tensor, name, world=0):
    """Returns the ranks and dimensions of the tensors on all ranks, as rows of numbers. The all-gather refuses tensors that
    differ in more than the first dimension."""
    rank, shape = tf.rank(tensor), tf.shape(tensor, tf.int64)
    shape = shape[:SHAPE_NUMBERS - 1]
    own = tf.concat([[tf.cast(rank, tf.int64)], shape, tf.zeros([SHAPE_NUMBERS - 1 - tf.size(shape)], tf.int64)], 0)
    own.set_shape([SHAPE_NUMBERS])
    return _operations.stack(own, _world.size_of(world), name and f"{name}_shapes", world)
