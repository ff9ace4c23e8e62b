#!/usr/bin/env python3
"""Keras's model.fit on 2 ranks, and the names of SageMaker's library: a script like the vendor's trains as one process does."""
import importlib.util
import os
import pathlib
import sys
import tempfile
import warnings

import tensorflow as tf
import warm

PYTHON = warm.start()  # it has not imported Keras, because one script uses Keras 2

import keras  # noqa: E402
import numpy as np  # noqa: E402

import forked  # noqa: E402
import shoal.tensorflow as plain_shoal  # noqa: E402
import shoal.tensorflow.keras as shoal  # noqa: E402
from tap import Skip, call, expect, run_cases  # noqa: E402

# The vendor's package is smdistributed/, which a checkout has in python/.
sys.path.insert(0, str(forked.TOP / "python"))
sys.path.insert(0, str(forked.TOP / "tests/python"))
import keras_noise  # noqa: E402
import smdistributed.dataparallel.tensorflow as sdp  # noqa: E402
import smdistributed.dataparallel.tensorflow.keras as sdp_keras  # noqa: E402

tf.get_logger().setLevel("ERROR")
SAMPLES, BATCH, EPOCHS = 64, 16, 3  # BATCH: of all ranks together


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=[SAMPLES, 8]).astype(np.float32)
    return x, (x[:, :1] * 2 - x[:, 1:2] > 0).astype(np.float32)


def model_of(seed=5, dtype=None):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.layers.Input([8]), keras.layers.Dense(16, activation="tanh", dtype=dtype),
                             keras.layers.Dense(1, dtype=dtype)])


def share(array):
    """Returns this rank's samples, chosen so that the ranks' n-th batches together are the n-th batch of one process."""
    per_rank = BATCH // shoal.size()
    blocks = array.reshape([-1, shoal.size(), per_rank, *array.shape[1:]])
    return blocks[:, shoal.rank()].reshape([-1, *array.shape[1:]])


def weights_of(model):
    return [np.asarray(weight) for weight in model.get_weights()]


def fit(model, optimizer, x, y, batch, callbacks=(), epochs=EPOCHS, **options):
    model.compile(optimizer=optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True), **options)
    return model.fit(x, y, batch_size=batch, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))


def close(got, wanted, tolerance=1e-4):
    for one, other in zip(got, wanted):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def alone(make_model, optimizer, x, y):
    """Returns the weights of one process that trains alone."""
    weights = None
    if shoal.rank() == 0:
        model = make_model()
        fit(model, optimizer, x, y, BATCH)
        weights = weights_of(model)
    return plain_shoal.broadcast_object(weights)


def optimizers():
    return keras.optimizers.SGD(0.3, momentum=0.9), keras.optimizers.SGD(0.3, global_clipnorm=0.1)


def fit_equals_one_process(rank):
    x, y = data()
    for steps, one, other in zip((1, 2), optimizers(), optimizers()):
        wanted, ours = alone(model_of, one, x, y), model_of()
        optimizer = shoal.DistributedOptimizer(other)
        fit(ours, optimizer, share(x), share(y), BATCH // shoal.size(), steps_per_execution=steps)
        close(weights_of(ours), wanted)


def ranks_that_began_apart_are_made_equal_and_save_plain_models(rank):
    x, y = data()
    _ = [keras.layers.Dense(2) for _ in range(rank)]  # so that names differ between ranks
    ours = model_of(seed=rank)
    optimizer = shoal.DistributedOptimizer(keras.optimizers.Adam(0.02))
    fit(ours, optimizer, share(x), share(y), BATCH // shoal.size(), [shoal.callbacks.BroadcastGlobalVariablesCallback(0)])
    for theirs in plain_shoal.allgather_object(weights_of(ours)):
        for a, b in zip(weights_of(ours), theirs):
            np.testing.assert_array_equal(a, b)
    close(weights_of(ours), alone(lambda: model_of(seed=0), keras.optimizers.Adam(0.02), x, y))
    with tempfile.TemporaryDirectory() as folder:
        ours.save(os.path.join(folder, "model.keras"))
        loaded = keras.models.load_model(os.path.join(folder, "model.keras"))
    assert type(loaded.optimizer) is keras.optimizers.Adam
    close(weights_of(loaded), weights_of(ours), 0)


def metrics_are_averaged(rank):
    x, y = data()
    seen = []
    after = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"]))
    history = fit(model_of(), shoal.DistributedOptimizer(keras.optimizers.SGD(0.1)), share(x), share(y), BATCH // shoal.size(),
                  [shoal.callbacks.MetricAverageCallback(), after], metrics=["mae"]).history
    one = plain_shoal.broadcast_object(
        fit(model_of(), keras.optimizers.SGD(0.1), x, y, BATCH, metrics=["mae"]).history if rank == 0 else None)
    np.testing.assert_allclose(history["loss"], one["loss"], rtol=1e-4)
    np.testing.assert_allclose(history["mae"], one["mae"], rtol=1e-4)
    assert seen == history["loss"], (seen, history)


def the_learning_rate_warms_up(rank):
    x, y = data()
    rates = []
    warmup = shoal.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2)
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(
        float(keras.ops.convert_to_numpy(watch.model.optimizer.learning_rate))))
    optimizer = shoal.DistributedOptimizer(keras.optimizers.SGD(0.4))
    fit(model_of(), optimizer, share(x), share(y), BATCH // shoal.size(), [warmup, watch], 3)
    steps = SAMPLES // BATCH
    wanted = [0.2 * (1 + min(i / steps + 1 / steps, 2) / 2) for i in range(2 * steps)]
    np.testing.assert_allclose(rates[:2 * steps], wanted, rtol=1e-5)
    np.testing.assert_allclose(rates[2 * steps:], 0.4, rtol=1e-5)


def mixed_precision_scales_outside(rank):
    """A gradient that is not finite on one rank makes all ranks skip the step."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        x, y = data()
        ours = model_of()
        optimizer = shoal.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        first = share(x).copy()
        first[0] = np.inf if rank == 1 else first[0]
        fit(ours, optimizer, first, share(y), BATCH // shoal.size(), epochs=1)
        assert ours.optimizer is optimizer
        assert all(np.isfinite(one).all() for one in weights_of(ours))
        for theirs in plain_shoal.allgather_object([float(np.asarray(optimizer.dynamic_scale)), *weights_of(ours)]):
            close(theirs[1:], weights_of(ours), 0)
            assert theirs[0] == float(np.asarray(optimizer.dynamic_scale)) < 2.0**15, theirs[0]
    finally:
        keras.config.set_dtype_policy("float32")


def embeddings_train_sparsely(rank):
    x, y = np.arange(SAMPLES).reshape([-1, 1]) % 10, data()[1]

    def model():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Input([1]), keras.layers.Embedding(10, 4), keras.layers.Flatten(),
                                 keras.layers.Dense(1)])
    ours = model()
    fit(ours, shoal.DistributedOptimizer(keras.optimizers.SGD(0.5)), share(x), share(y), BATCH // shoal.size())
    close(weights_of(ours), alone(model, keras.optimizers.SGD(0.5), x, y))


def variables_that_come_apart_are_named(rank):
    """The last rank's model gets a value of its own after its second batch; the ranks compare in the fourth."""
    x, y = data()

    def part(batch, logs):
        if watch.model is model and rank == shoal.size() - 1 and batch == 1:
            model.trainable_variables[0].assign(model.trainable_variables[0] + 1)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=part)
    for wrap, names in ((shoal.DistributedOptimizer, ["kernel"]), (lambda optimizer: optimizer, [])):  # the latter averages nothing
        model = model_of(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, wrap(keras.optimizers.SGD(0.01)), share(x), share(y), BATCH // shoal.size(), [
                shoal.callbacks.BroadcastGlobalVariablesCallback(0, compare_every=4), watch])
        told = [str(each.message) for each in caught if "is not the same on all ranks" in str(each.message)]
        expect(len(told) == len(names) and all(all(word in text for word in (name, "after batch 4", "differ")) for text, name in zip(told, names)), told)
    plain_shoal.compare_variables(model_of(5).trainable_variables)
    try:
        plain_shoal.compare_variables([tf.Variable([1.0, float("nan")]), tf.Variable(float(rank), name="other")])
    except tf.errors.FailedPreconditionError as error:
        expect("other" in str(error) and "rank 1 differs from most" in str(error), error)
    else:
        raise AssertionError("no error")
    model, optimizer = model_of(5), shoal.DistributedOptimizer(keras.optimizers.SGD(0.01))
    strict = shoal.callbacks.BroadcastGlobalVariablesCallback(0, compare_every=4, compare_raises=True)
    try:
        fit(model, optimizer, share(x), share(y), BATCH // shoal.size(), [strict, watch])
    except tf.errors.FailedPreconditionError as error:
        expect("is not the same on all ranks" in str(error), error)
    else:
        raise AssertionError("no error")


def wrong_optimizers_are_told(rank):
    for wrong, error, words in (("sgd", TypeError, "keras.optimizers.get()"),
                                (shoal.DistributedOptimizer(keras.optimizers.SGD()), ValueError, "called on it twice")):
        try:
            shoal.DistributedOptimizer(wrong)
        except error as told:
            assert words in str(told), told
        else:
            raise AssertionError(wrong)


# ---- The vendor's names ----


def a_script_of_the_vendors_trains(rank):
    """Like the vendor's examples, but for Keras 3: a custom loop with a tape, and a broadcast after the first batch."""
    x, y = data()
    wanted, ours = alone(model_of, keras.optimizers.Adam(0.01), x, y), model_of(seed=rank)
    loss, optimizer = keras.losses.BinaryCrossentropy(from_logits=True), keras.optimizers.Adam(0.01)
    ours.set_weights(model_of().get_weights())

    @tf.function
    def training_step(images, labels, first_batch):
        with tf.GradientTape() as tape:
            value = loss(labels, ours(sdp.overlap(images), training=True))
        tape = sdp.DistributedGradientTape(tape)
        optimizer.apply_gradients(zip(tape.gradient(value, ours.trainable_variables), ours.trainable_variables))
        if first_batch:
            sdp.broadcast_variables(ours.variables, root_rank=0)
            sdp.broadcast_variables(optimizer.variables, root_rank=0)
        return sdp.oob_allreduce(value)
    dataset = tf.data.Dataset.from_tensor_slices((share(x), share(y))).batch(BATCH // sdp.size())
    for _ in range(EPOCHS):
        for batch, (images, labels) in enumerate(dataset):
            value = training_step(images, labels, batch == 0)
    assert len({float(one) for one in plain_shoal.allgather_object(float(value))}) == 1
    close(weights_of(ours), wanted)


def the_vendors_names_do_what_they_say(rank):
    assert (sdp.rank(), sdp.size(), sdp.local_rank(), sdp.local_size()) == (rank, 2, rank, 2) == (
        sdp_keras.rank(), sdp_keras.size(), sdp_keras.local_rank(), sdp_keras.local_size())
    for op, wanted in ((sdp.ReduceOp.AVERAGE, 0.5), (sdp.ReduceOp.SUM, 1.0), (sdp.ReduceOp.MIN, 0.0), (sdp.ReduceOp.MAX, 1.0)):
        got = sdp.allreduce(tf.constant([float(rank)]), param_index=0, num_params=1, compression=sdp.Compression.fp16, op=op)
        assert got.numpy().tolist() == [wanted] and got.dtype == tf.float32
    for compression, wanted in ((sdp.Compression.none, 1 + 2.0**-12), (sdp.Compression.fp16, 1.0)):  # float16 lacks the digits
        assert sdp.allreduce(tf.constant(1 + 2.0**-12), 0, 1, compression).numpy() == wanted
    assert sdp.broadcast(tf.constant(rank), root_rank=1).numpy() == 1
    assert sdp.DistributedOptimizer is sdp_keras.DistributedOptimizer
    optimizer = sdp.DistributedOptimizer(keras.optimizers.SGD(), bucket_cap_mb=1)
    assert optimizer._shoal.buffer_bytes == 1 << 20 and optimizer._shoal.sparse_as_dense
    for wrong, error, words in (
            (sdp.init, RuntimeError, "init() called more than once. smdistributed.dataparallel is already initialized."),
            (lambda: sdp.DistributedGradientTape(tf.GradientTape(), device_dense="/gpu:0"), ValueError, "not supported"),
            (lambda: sdp.DistributedGradientTape(tf.GradientTape(), op=sdp.ReduceOp.SUM), ValueError, "not supported"),
            (lambda: sdp.oob_allreduce(tf.ones([1]), op=sdp.ReduceOp.MIN), ValueError, "not supported"),
            (lambda: sdp.allreduce(tf.ones([1]), 3, 3), ValueError, "param_index is 3"),
            (lambda: sdp.DistributedOptimizer(keras.optimizers.SGD(), bucket_cap_mb=1e-5), ValueError, "multiple of 128"),
            (lambda: sdp.broadcast_global_variables(0), RuntimeError, "broadcast_variables(model.variables, root_rank)")):
        try:
            wrong()
        except error as told:
            assert words in str(told), told
        else:
            raise AssertionError(words)


def a_session_begins_with_the_variables_of_one_rank(rank):
    """In a graph of TensorFlow 1, which does not order operations by itself."""
    types = tf.float32, tf.int64, tf.float32, tf.float64, tf.int32, tf.bool, tf.float16
    with tf.Graph().as_default():
        variables = [tf.compat.v1.get_variable(f"of_a_session_{i}", initializer=tf.cast(tf.fill([i + 1], i * rank), dtype))
                     for i, dtype in enumerate(types)]
        with tf.compat.v1.train.MonitoredSession(hooks=[sdp.BroadcastGlobalVariablesHook(1)]) as session:
            for i, got in enumerate(session.run(variables)):
                assert got.tolist() == [i] * (i + 1) or got.dtype == bool and got.all(), (i, got)
    try:
        sdp.BroadcastGlobalVariablesHook(0, device="/gpu:0")
    except ValueError as told:
        assert "not supported" in str(told), told
    else:
        raise AssertionError("a device")


# ---- A worker that dies ----


def dies_in_fit(rank):
    shoal.init()
    x, y = data()

    def die(batch, logs):
        if rank == 1 and batch == 2:
            os._exit(9)
    fit(model_of(), shoal.DistributedOptimizer(keras.optimizers.SGD(0.1)), share(x), share(y), BATCH // shoal.size(),
        [keras.callbacks.LambdaCallback(on_train_batch_end=die)], epochs=1000)


def a_worker_that_dies_in_fit_is_named():
    told = forked.Ranks(2, dies_in_fit)
    expect(told.codes == [1, 9] and all(word in told.texts[0] for word in ("AbortedError", "shoal:", "dense", "rank 1")),
           told.told())


# ---- Separate programs ----

PRELUDE = """
import tensorflow as tf
model = tf.keras.Sequential([tf.keras.layers.Input([3]), tf.keras.layers.Dense(1)])
loss_fn = tf.keras.losses.MeanSquaredError()
dataset = tf.data.Dataset.from_tensor_slices((tf.random.normal([300, 3]), tf.random.normal([300, 1])))
"""
FINALE = """
weights = [weight.tolist() for weight in model.get_weights()]
assert all(theirs == weights for theirs in shoal.allgather_object(weights))
print("trained", number + 1, "steps")
"""


def the_manuals_loop_trains_under_shoal_run():
    """It ends as programs usually do, without shutdown()."""
    loop = (forked.TOP / "docs/tensorflow.md").read_text().split("```python\n")[1].split("```")[0]
    with tempfile.TemporaryDirectory() as folder:
        script = os.path.join(folder, "train.py")
        with open(script, "w") as file:
            file.write(PRELUDE + loop + FINALE)
        code, out, err = call(os.environ["SHOAL_COMMAND"], "run", "-n", "2", PYTHON, script, timeout=forked.TIMEOUT_S)
    expect(code == 0 and out.count("trained 3 steps") == 2, code, out, err)


def a_script_as_the_vendor_writes_it_trains():
    """An unchanged script for Keras 2."""
    if not importlib.util.find_spec("tf_keras"):
        raise Skip("this Python has no tf_keras: `make test-all` installs it")
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "SM_MODEL_DIR": folder}
        script = pathlib.Path(__file__).with_name("vendors_loop.py")
        code, out, err = call(os.environ["SHOAL_COMMAND"], "run", "-n", "2", PYTHON, script, timeout=forked.TIMEOUT_S,
                              env=environment)
    expect(code == 0 and out.count("trained 25 steps") == 2, code, out, err)


CASES = [fit_equals_one_process, ranks_that_began_apart_are_made_equal_and_save_plain_models, metrics_are_averaged,
         the_learning_rate_warms_up, variables_that_come_apart_are_named, mixed_precision_scales_outside, embeddings_train_sparsely, wrong_optimizers_are_told,
         a_script_of_the_vendors_trains, the_vendors_names_do_what_they_say, a_session_begins_with_the_variables_of_one_rank]


def of_noise(body):
    def run(rank):
        body(shoal, rank, shoal.size())
    run.__name__ = f"noise_{body.__name__}"
    return run


CASES += map(of_noise, keras_noise.CASES)
run_cases([*forked.Cases(2, CASES, sdp.init, sdp.shutdown).report(), a_worker_that_dies_in_fit_is_named,
           the_manuals_loop_trains_under_shoal_run, a_script_as_the_vendor_writes_it_trains])
