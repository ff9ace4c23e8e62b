#!/usr/bin/env python3
"""shoal.tensorflow.profile: what it measures of small Keras models, that it leaves them as they were, and that the tools read its
files. Also what a job sees of the waits of tf.data."""
import os
import subprocess
import sys
import tempfile
import warnings

import tensorflow as tf
from profiles import refusals_of, tools_read_the_file_of
from tap import expect, run_cases
from tensorflow import keras

import shoal.tensorflow

BATCH, INPUTS, HIDDEN, OUTPUTS = 6, 130, 40, 3


def small():
    return keras.Sequential([keras.layers.Input((INPUTS,)), keras.layers.Dense(HIDDEN, activation="relu", name="first"),
                             keras.layers.Dense(OUTPUTS, name="last")])


def example():
    return tf.random.normal((BATCH, INPUTS))


refused = refusals_of(shoal.tensorflow.profile)


def gradients_are_in_the_order_of_the_backward_pass():
    profile = shoal.tensorflow.profile(small(), example())
    expect((profile.name, profile.batch, profile.batch_norms) == ("Sequential", BATCH, 0), profile)
    expect(profile.forward_ms > 0 and profile.backward_ms > 0, profile)
    expect([(each.name.split("/", 1)[1], each.index, each.elements) for each in profile.gradients] ==
           [("last/bias", 3, OUTPUTS), ("last/kernel", 2, HIDDEN * OUTPUTS), ("first/bias", 1, HIDDEN), ("first/kernel", 0, INPUTS * HIDDEN)], profile)
    shares = [each.ready for each in profile.gradients]
    expect(0 < shares[0] == shares[1] < shares[2] == shares[3] == 1, shares)  # nothing marks the gradient of the example


def activations_are_what_the_backward_pass_reads():
    """A dense layer reads its input again, and relu its output, which the next layer reads as well."""
    profile = shoal.tensorflow.profile(small(), example())
    expect(profile.activation_bytes == 4 * (INPUTS + HIDDEN), profile)
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
    try:
        model = small()
    finally:
        keras.mixed_precision.set_global_policy("float32")
    half = shoal.tensorflow.profile(model, example())
    expect(profile.activation_bytes <= half.activation_bytes <= 2.2 * profile.activation_bytes, half)  # and what is cast


def nested_models_and_batch_norm():
    block = keras.Sequential([keras.layers.Conv2D(8, 3, padding="same", use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()])
    images = keras.layers.Input((16, 16, 3))
    model = keras.Model(images, keras.layers.Conv2D(2, 1)(block(images)))
    profile = shoal.tensorflow.profile(model, tf.random.normal((4, 16, 16, 3)), loss=lambda output: tf.reduce_sum(output ** 2))
    expect(profile.batch_norms == 1 and profile.name == "Functional", profile)
    expect(4 * 256 * (3 + 2 * 8) <= profile.activation_bytes <= 4 * 256 * (3 + 4 * 8 + 2 * 2), profile)
    names = [each.name for each in profile.gradients]
    expect(len(names) == 5 and "conv2d" in names[0] and "gamma" in names[3] + names[2] and "kernel" in names[4], names)


def the_model_is_left_as_it_was():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)])
    before = [variable.numpy().copy() for variable in model.variables]
    calls = [layer.call for layer in model.layers]
    shoal.tensorflow.profile(model, tf.random.normal((8, 4)), steps=2)
    expect(all((was == variable.numpy()).all() for was, variable in zip(before, model.variables)), "variables")
    expect([layer.call for layer in model.layers] == calls and not any("call" in vars(layer) for layer in model.layers), "methods")


def a_failed_step_also_leaves_the_model():
    model = small()

    def fails(output):
        if failing:
            raise RuntimeError("in the loss")
        failing.append(1)
        return tf.reduce_mean(output)
    failing = []
    refused(RuntimeError, "in the loss", model, example(), fails)
    expect(not any("call" in vars(layer) for layer in model.layers), "methods")


def examples_have_several_forms():
    class Pair(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = keras.layers.Dense(1)

        def call(self, both):
            one, other = (both["one"], both["other"]) if isinstance(both, dict) else both
            return self.layer(one + other)
    x = tf.ones((5, 2))
    for both in ((x, x), [x, x], {"one": x, "other": x}):
        expect(shoal.tensorflow.profile(Pair(), both).batch == 5, both)
    profile = shoal.tensorflow.profile(Pair(), (x, x), batch=20, name="mine", loss=lambda output: 2 * tf.reduce_sum(output))
    expect((profile.batch, profile.name) == (20, "mine"), profile)


def frozen_layers_have_no_gradient():
    model = small()
    model.layers[1].trainable = False
    profile = shoal.tensorflow.profile(model, example())
    expect([each.name.split("/", 1)[1] for each in profile.gradients] == ["first/bias", "first/kernel"], profile)


def loops_are_named():
    model = keras.Sequential([keras.layers.Input((None, 4)), keras.layers.LSTM(3)])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        profile = shoal.tensorflow.profile(model, tf.random.normal((2, 5, 4)))
    expect(any("activations are underestimated" in str(one.message) for one in told), told)
    expect(len(profile.gradients) == 3, profile)


def tools_read_the_file():
    tools_read_the_file_of(shoal.tensorflow.profile(small(), example(), name="mine" + 200 * "é"), INPUTS + HIDDEN)


def wrong_arguments_are_refused():
    refused(ValueError, "no trainable variable", keras.Sequential([keras.layers.Input((2,)), keras.layers.ReLU()]), tf.zeros((3, 2)))
    refused(ValueError, "steps is 0", small(), example(), steps=0)
    refused(ValueError, "batch is 0", small(), example(), batch=0)
    refused(ValueError, "pass batch=", small(), tf.constant(1.0))
    refused(ValueError, "a tensor of one element", small(), example(), lambda output: output)
    refused(TypeError, "needs a Keras model, not Module", tf.Module(), example())
    refused(ValueError, "pass loss=", keras.Sequential([keras.layers.Input((INPUTS,)), keras.layers.Dense(2),
                                                        keras.layers.Lambda(lambda x: tf.argmax(x, 1))]), example())


WAITS = """
import os, pathlib, time
import tensorflow as tf
import shoal.tensorflow
from shoal import _input

def slow():
    for number in range(3):
        time.sleep(0.05)
        yield number

data = tf.data.Dataset.from_generator(slow, output_signature=tf.TensorSpec((), tf.int32))
assert sum(int(one) for one in data) == 3
path = os.environ["SHOAL_JOB_INPUT"].replace("%p", str(os.getpid()))
seconds, batches = _input.waited(path, time.monotonic())
assert seconds >= 0.1 and batches == 3, (seconds, batches)
iterator = iter(tf.data.Dataset.range(3))
assert int(tf.function(lambda: next(iterator))()) == 0
assert _input.waited(path, time.monotonic()).batches == 3  # the graph's own

import keras

def pairs():
    for number in range(6):
        time.sleep(0.05)
        yield [[float(number)]], [[1.0]]

shape = tf.TensorSpec((1, 1))
slow_pairs = tf.data.Dataset.from_generator(pairs, output_signature=(shape, shape))
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
plain = keras.models.clone_model(model)
plain.set_weights(model.get_weights())
plain.compile("sgd", "mse")
for number, data in enumerate((slow_pairs, slow_pairs.prefetch(2))):
    before = _input.waited(path, time.monotonic())
    model.fit(data, epochs=2, verbose=0)
    after = _input.waited(path, time.monotonic())
    assert after.batches - before.batches == 12, (before, after)
    assert after.seconds - before.seconds >= 0.1, (before, after)  # nothing hides the first batch of an epoch
    assert _input.waited(path, time.monotonic() + 60) == _input.waited(path, time.monotonic())  # no wait is left at the end of the data
for _ in range(4):  # the same batches in the same order
    for x, y in slow_pairs:
        plain.train_on_batch(x, y)
assert all((a == b).all() for a, b in zip(model.get_weights(), plain.get_weights())), (model.get_weights(), plain.get_weights())
before = _input.waited(path, time.monotonic())
ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1.0], [2.0, 3.0]]))
assert keras.Sequential([keras.layers.Lambda(lambda x: tf.reduce_sum(x, 1))]).predict(ragged, verbose=0).tolist() == [1.0, 5.0]
assert _input.waited(path, time.monotonic()).batches > before.batches
before = _input.waited(path, time.monotonic())
model.predict(tf.data.Dataset.from_tensors(tf.zeros((1, 1))).repeat(3), verbose=0)
assert _input.waited(path, time.monotonic()).batches - before.batches == 3  # each once
print("counted")
"""


def waits_of_tf_data_are_counted_in_a_job():
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", WAITS], env={**os.environ, "SHOAL_JOB_INPUT": f"{folder}/waits.%p"}, capture_output=True,
                              text=True, timeout=200)
        expect(done.returncode == 0 and "counted" in done.stdout, done.stdout, done.stderr[-2000:])


if __name__ == "__main__":
    run_cases([gradients_are_in_the_order_of_the_backward_pass, activations_are_what_the_backward_pass_reads, nested_models_and_batch_norm,
               the_model_is_left_as_it_was, a_failed_step_also_leaves_the_model, examples_have_several_forms, frozen_layers_have_no_gradient,
               loops_are_named, tools_read_the_file, wrong_arguments_are_refused, waits_of_tf_data_are_counted_in_a_job])
