"""The names that scripts import from horovod.tensorflow.util."""
import tensorflow as tf


def _executing_eagerly():
    return tf.executing_eagerly()
