"""Compares eager calls: each rank sends the others a description of its next call. So calls that differ fail before any data
have moved, training may continue, and ranks that have joined can take part. Inside tf.function nothing is sent: there the
operations themselves detect a difference, which breaks the communicator."""
from __future__ import annotations

import json

import tensorflow as tf

from shoal.tensorflow import _world as worlds

from .._common import controller as kinds
from .._common.controller import Told

BLOCK_BYTES = 512  # of each rank's block in the first all-gather; longer descriptions need a second one
LENGTH_BYTES = 4
GRADIENTS = "gradients"  # gradients of a list of variables follow, through the gradient engine unless a rank has joined


def agree(kind, tensors, world, must_agree=(), splits=()):
    """Raises FailedPreconditionError on every rank if ranks differ. Returns true if a rank has joined."""
    if not tf.executing_eagerly():
        return False
    forms = [[tensor.dtype.name, tensor.shape.as_list() or [1] * (kind == kinds.ALLGATHER)] for tensor in tensors]
    told = exchange([kind, kind, forms, list(must_agree), list(splits)], world)
    joined = joined_of(told)
    fault = fault_among(told, joined)
    if fault:
        raise tf.errors.FailedPreconditionError(None, None, f"shoal: {fault}")
    return bool(joined)


def joined_of(told):
    return {rank for rank, one in enumerate(told) if one.kind == kinds.JOIN}


def fault_among(told, joined):
    """Returns why ranks cannot do this together, or ""."""
    active = {rank: one for rank, one in enumerate(told) if rank not in joined}
    is_notice = all(one.kind == GRADIENTS for one in active.values())  # an all-reduce follows
    return kinds.fault_of(active, set() if is_notice else joined)


def exchange(fields, world):
    """Returns the descriptions of all ranks."""
    text = json.dumps(fields).encode()
    room = BLOCK_BYTES - LENGTH_BYTES
    blocks = _gather(len(text).to_bytes(LENGTH_BYTES, "little") + text[:room].ljust(room, b" "), world)
    lengths = [int.from_bytes(block[:LENGTH_BYTES], "little") for block in blocks]
    texts = [block[LENGTH_BYTES:] for block in blocks]
    if max(lengths) > room:
        texts = _gather(text.ljust(max(lengths), b" "), world)
    return [Told(json.loads(one)) for one in texts]


def _gather(block, world):
    return worlds.world_at(world).gather(block, "ranks could not agree")
