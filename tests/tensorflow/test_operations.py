#!/usr/bin/env python3
"""Operations of shoal.tensorflow on 2 and 3 ranks: results, shapes, gradients, eagerly and inside tf.function."""
import numpy as np
import tensorflow as tf

import forked
import shoal.tensorflow as shoal
from shoal.tensorflow import ReduceOp
from tap import run_cases

REDUCED = [tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.uint8, tf.int32, tf.int64]


def same(got, wanted):
    got, wanted = np.asarray(got), np.asarray(wanted)
    assert got.shape == wanted.shape and (got == wanted).all(), (got, wanted)


def numbers(rank, shape, dtype=tf.float32):
    """Of a rank: small whole numbers, whose sums are exact in every type."""
    count = int(np.prod(shape))
    return tf.cast(tf.reshape(tf.range(count) % 5 + rank, shape), dtype)


def eager_and_graph(function):
    """Calls it both ways."""
    yield function()
    yield tf.function(function)()


def allreduce_sums_every_type(rank):
    size = shoal.size()
    for dtype in REDUCED:
        wanted = sum(numbers(r, [7, 3], tf.int32) for r in range(size)).numpy()
        for got in eager_and_graph(lambda: shoal.allreduce(numbers(rank, [7, 3], dtype), ReduceOp.SUM)):
            assert got.dtype == dtype and got.shape == [7, 3]
            same(tf.cast(got, tf.int32), wanted)


run_cases([case for size in (2, 3) for case in forked.Cases(size, [
    allreduce_sums_every_type,
], shoal.init, shoal.shutdown).report()])
