"""One rank of a training in TensorFlow that bench/bench_front_ends.py times:

    front_end_tensorflow.py CONTESTANT MODEL [--steps N]     under a launcher that sets RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT

CONTESTANT is shoal (shoal.tensorflow.DistributedGradientTape), strategy (MultiWorkerMirroredStrategy), or alone (shoal's
loop without averages: two independent trainings that step at the same time). Each has its own loop inside tf.function,
because Keras 3's fit refuses the strategy. MODEL is cnn (a Keras CNN of 1.2 million parameters), bert (layers as wide as
BERT-base's with as many words, 110 million parameters, 16 words at a time), or small, which has no model but one function
with 1 all-reduce of 64 B and one with 101, and measures the time of one more. Rank 0 prints a JSON object."""
import argparse
import json
import os
import time
from statistics import median

import keras
import tensorflow as tf

import shoal.tensorflow as shoal

WARMUPS = 3


def cnn():
    layers = keras.layers
    return keras.Sequential([layers.Input([28, 28, 1]), layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu"),
                             layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, activation="relu"), layers.Dense(10)])


class Block(keras.layers.Layer):
    """A layer of BERT, with as many heads of attention and as many columns."""

    def __init__(self, width, heads):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.first, self.second = keras.layers.Dense(4 * width, activation="gelu"), keras.layers.Dense(width)
        self.norms = [keras.layers.LayerNormalization() for _ in range(2)]

    def call(self, x):
        x = self.norms[0](x + self.attention(x, x))
        return self.norms[1](x + self.second(self.first(x)))


def bert(width=768, layers=12, heads=12, words=30522, length=16):
    inputs = keras.Input([length], dtype="int32")
    x = keras.layers.Embedding(words, width)(inputs)
    for _ in range(layers):
        x = Block(width, heads)(x)
    return keras.Model(inputs, keras.layers.Dense(10)(x[:, 0]))


def batch_of(model, rank):
    keras.utils.set_random_seed(rank)
    if model == "cnn":
        return tf.random.normal([32, 28, 28, 1]), tf.random.uniform([32], maxval=10, dtype=tf.int32)
    return tf.random.uniform([1, 16], maxval=30522, dtype=tf.int32), tf.random.uniform([1], maxval=10, dtype=tf.int32)


def loss_of(model, batch):
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], model(batch[0], training=True)))


def tape_step(model, optimizer, batch, averages):
    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch)
        tape = shoal.DistributedGradientTape(tape) if averages else tape
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss
    return step


def strategy_step(strategy, model, batch):
    """The strategy packs gradients and averages them in one call. The optimizer is inside the function that each replica
    runs."""
    rate = tf.constant(0.01)

    def replica():
        with tf.GradientTape() as tape:
            loss = loss_of(model, batch)
        variables = [one.value for one in model.trainable_variables]
        gradients = tape.gradient(loss, variables)
        gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for variable, gradient in zip(variables, gradients):
            if isinstance(gradient, tf.IndexedSlices):
                gradient = tf.convert_to_tensor(gradient)
            variable.assign_sub(rate * gradient)
        return loss

    @tf.function
    def step():
        return strategy.run(replica)
    return step


def step_of(options, rank):
    make = {"cnn": cnn, "bert": bert}[options.model]
    if options.contestant == "strategy":
        strategy = shoal.distribute.MultiWorkerMirroredStrategy()
        with strategy.scope():
            model = make()
        return strategy_step(strategy, model, batch_of(options.model, rank))
    model, batch, optimizer = make(), batch_of(options.model, rank), keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    return tape_step(model, optimizer, batch, averages=options.contestant == "shoal")


def timed(step, steps):
    """Returns the milliseconds of each step on its slowest rank."""
    took = []
    for _ in range(WARMUPS + steps):
        shoal.barrier()
        start = time.perf_counter()
        _ = step().numpy()
        took.append(time.perf_counter() - start)
    return (shoal.allreduce(tf.constant(took[WARMUPS:], tf.float64), shoal.ReduceOp.MAX).numpy() * 1e3).tolist()


def small_step(count):
    inputs = [tf.fill([16], float(number)) for number in range(count)]

    @tf.function
    def step():
        return tf.add_n([shoal.allreduce(one) for one in inputs])
    return step


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contestant", choices=("shoal", "strategy", "alone"))
    parser.add_argument("model", choices=("cnn", "bert", "small"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(len(os.sched_getaffinity(0)))
    shoal.init()
    if options.model == "small":
        one, many = (timed(small_step(count), 10 * options.steps) for count in (1, 101))
        found = {"one_ms": median(one), "more_us": (median(many) - median(one)) * 1e3 / 100}
    else:
        took = timed(step_of(options, shoal.rank()), options.steps)
        found = {"step_ms": round(median(took), 3), "steps_ms": [round(one, 3) for one in took]}
    if shoal.rank() == 0:
        print(json.dumps({"contestant": options.contestant, "model": options.model, **found}), flush=True)


if __name__ == "__main__":
    main()
