"""One rank of a training with the calls of the vendor's example for TensorFlow. The example uses Keras 2: run it with
tf_keras and TF_USE_LEGACY_KERAS=1. SM_MODEL_DIR is the folder for the model."""
import os

import numpy as np
import tensorflow as tf

import smdistributed.dataparallel.tensorflow as sdp

STEPS, BATCH, CLASSES = 25, 16, 10


def load_data(path):
    """Replaces the download: pictures in which the number of a bright row is the class."""
    labels = np.arange(20 * CLASSES) % CLASSES
    images = np.random.default_rng(0).integers(0, 50, [len(labels), 28, 28]).astype(np.uint8)
    images[np.arange(len(labels)), 2 * labels + 4] = 255
    return (images, labels), (images, labels)


tf.keras.datasets.mnist.load_data = load_data

sdp.init()
tf.random.set_seed(sdp.rank())  # ranks start with different weights
(images, labels), _ = tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % sdp.rank())
samples = tf.data.Dataset.from_tensor_slices((tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64)))
layers = tf.keras.layers
model = tf.keras.Sequential([  # the first batch builds it
    layers.Conv2D(4, [3, 3], activation="relu"), layers.MaxPooling2D(pool_size=(2, 2)), layers.Flatten(), layers.Dropout(0.25),
    layers.Dense(CLASSES, activation="softmax")])
loss_of, optimizer = tf.losses.SparseCategoricalCrossentropy(), tf.optimizers.Adam(0.005 * sdp.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def step(images, labels, is_first):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = sdp.DistributedGradientTape(tape)
    optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    if is_first:
        sdp.broadcast_variables(model.variables, root_rank=0)
        sdp.broadcast_variables(optimizer.variables(), root_rank=0)
    return sdp.oob_allreduce(loss)


losses = [float(step(*batch, number == 0)) for number, batch in enumerate(samples.repeat().shuffle(1000).batch(BATCH).take(STEPS))]
assert losses[-1] < losses[0] / 2, losses

state = tf.concat([tf.reshape(tf.cast(one, tf.float32), [-1]) for one in [*model.variables, *optimizer.variables()]], 0)
tf.debugging.assert_equal(sdp.broadcast(state, root_rank=0), state, "ranks have drifted apart")
if sdp.rank() == 0:
    folder = os.path.join(os.environ["SM_MODEL_DIR"], "1")
    model.save(folder)
    checkpoint.save(os.path.join(os.environ["SM_MODEL_DIR"], "checkpoint"))
    few = tf.cast(images[:CLASSES, ..., tf.newaxis] / 255.0, tf.float32)
    np.testing.assert_allclose(tf.keras.models.load_model(folder)(few), model(few), rtol=1e-5)
print("trained", STEPS, "steps")
