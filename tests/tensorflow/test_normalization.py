#!/usr/bin/env python3
"""SyncBatchNormalization on 2 ranks, compared with one process on the whole batch."""
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

import forked
import shoal.horovod.tensorflow as hvd
import shoal.tensorflow as plain_shoal
import shoal.tensorflow.keras as shoal
from tap import run_cases

COUNTS = (5, 3)  # samples of each rank


def close(got, wanted, tolerance):
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(wanted, np.float64), rtol=tolerance, atol=tolerance)


def halves(shape, dtype):
    whole = (3 + np.random.default_rng(1).normal(size=[sum(COUNTS), *shape])).astype(dtype)
    return whole, np.split(whole, [COUNTS[0]])[shoal.rank()]


def passed(layer, x, pattern, **options):
    """Returns the output, and the gradients of the sum of all ranks' losses for the input and the weights."""
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=True, **options)
        loss = tf.reduce_sum(tf.cast(y, tf.float64) * pattern)
    return y, tape.gradient(loss, [x, *layer.trainable_variables])


def compare(shape, axis, dtype, tolerance, mask=None, **options):
    whole, mine = halves(shape, dtype)
    pattern = np.random.default_rng(2).normal(size=whole.shape)
    own = slice(0, COUNTS[0]) if shoal.rank() == 0 else slice(COUNTS[0], None)
    plain = keras.layers.BatchNormalization(axis=axis, dtype=dtype, **options)
    synced = shoal.SyncBatchNormalization(axis=axis, dtype=dtype, **options)
    masks = [{}, {}] if mask is None else [{"mask": tf.constant(mask)}, {"mask": tf.constant(mask[own])}]
    for _ in range(2):
        y, (of_x, *of_weights) = passed(plain, whole, pattern, **masks[0])
        my_y, (of_mine, *of_mine_weights) = passed(synced, mine, pattern[own], **masks[1])
        close(my_y, np.asarray(y)[own], tolerance)
        close(of_mine, np.asarray(of_x)[own], tolerance)
        for one, other in zip(of_mine_weights, of_weights):
            close(plain_shoal.allreduce(one, plain_shoal.ReduceOp.SUM), other, tolerance * 10)
    for one, other in zip(synced.non_trainable_variables, plain.non_trainable_variables):
        close(one, other, tolerance)
    close(synced(whole, training=False), plain(whole, training=False), tolerance)


def outputs_and_gradients_are_those_of_one_process(rank):
    compare([4], -1, "float32", 2e-5)
    compare([3, 2, 4], -1, "float32", 2e-5)
    compare([4, 3, 2], 1, "float64", 1e-6, scale=False, momentum=0.5)
    compare([6, 4], -1, "float32", 2e-5, mask=np.arange(8 * 6).reshape(8, 6) % 5 > 0)
    compare([4], -1, "float16", 3e-2)


def fit_equals_one_process(rank):
    def model_of(norm):
        keras.utils.set_random_seed(5)
        return keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(6), norm(), keras.layers.ReLU(), keras.layers.Dense(1)])
    random = np.random.default_rng(3)
    x = random.normal(size=[32, 8]).astype(np.float32)
    y = x[:, :1] - 2 * x[:, 1:2]
    wanted, ours = model_of(keras.layers.BatchNormalization), model_of(shoal.SyncBatchNormalization)
    for model, optimizer, mine in ((wanted, keras.optimizers.SGD(0.1), slice(None)),
                                   (ours, shoal.DistributedOptimizer(keras.optimizers.SGD(0.1)), slice(rank, None, 2))):
        model.compile(optimizer=optimizer, loss="mse")
        model.fit(x[mine], y[mine], batch_size=len(x[mine]), epochs=4, shuffle=False, verbose=0)
    for one, other in zip(ours.get_weights(), wanted.get_weights()):
        close(one, other, 1e-4)
    with tempfile.TemporaryDirectory() as folder:
        ours.save(os.path.join(folder, "model.keras"))
        loaded = keras.models.load_model(os.path.join(folder, "model.keras"))
    close(loaded.predict(x, verbose=0), ours.predict(x, verbose=0), 0)


def horovods_layer_knows_process_sets(rank):
    hvd.init()
    alone = [hvd.add_process_set([one]) for one in range(2)][rank]
    _, mine = halves([4], np.float32)
    local = keras.layers.BatchNormalization()
    close(hvd.SyncBatchNormalization(process_set=alone)(mine, training=True), local(mine, training=True), 2e-5)
    of_all = hvd.SyncBatchNormalization()(mine, training=True)
    assert np.abs(np.asarray(of_all) - np.asarray(local(mine, training=True))).max() > 1e-3
    for fused in (True, None):
        try:
            hvd.SyncBatchNormalization(fused=fused)
        except ValueError as error:
            assert str(error) == "SyncBatchNormalization does not support fused=True."
        else:
            raise AssertionError("fused was taken")


run_cases(forked.Cases(2, [outputs_and_gradients_are_those_of_one_process, fit_equals_one_process, horovods_layer_knows_process_sets],
                       shoal.init, shoal.shutdown).report())
