#!/usr/bin/env python3
"""TensorFlow's MultiWorkerMirroredStrategy together with Shoal: addresses from the job, both in one loop, and refusals."""
import json
import os
import socket

import numpy as np
import tensorflow as tf

import forked
import shoal.tensorflow as shoal
from tap import expect, run_cases

STEPS, RATE = 4, 0.1


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=[16, 4]).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True)


def alone():
    """Returns losses and weights of one process that trains on all samples."""
    x, y = data()
    weights, losses = np.zeros([4, 1], np.float32), []
    for _ in range(STEPS):
        wrong = x @ weights - y
        losses.append(float((wrong ** 2).mean()))
        weights -= RATE * 2 * x.T @ wrong / len(x)
    return losses, weights


def trains_beside(rank):
    """The strategy averages gradients, Shoal the loss."""
    shoal.init()
    strategy = shoal.distribute.MultiWorkerMirroredStrategy()
    config = json.loads(os.environ["TF_CONFIG"])
    expect(config["task"] == {"type": "worker", "index": rank} and len(set(config["cluster"]["worker"])) == 2, config)
    expect(strategy.num_replicas_in_sync == 2, strategy.num_replicas_in_sync)
    x, y = (tf.constant(array[rank::2]) for array in data())
    with strategy.scope():
        weights = tf.Variable(tf.zeros([4, 1]))

    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ weights - y) ** 2)
        gradient = tape.gradient(loss, weights)
        gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradient)
        weights.assign_sub(RATE * gradient)
        return loss

    @tf.function
    def step():
        return strategy.run(replica)

    losses = [float(shoal.allreduce(step())) for _ in range(STEPS)]
    expected, wanted = alone()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(weights.numpy(), wanted, rtol=1e-5)


def comes_too_late(rank):
    shoal.init()
    shoal.allreduce(tf.ones([3]))
    try:
        shoal.distribute.MultiWorkerMirroredStrategy()
        raise AssertionError("a strategy was made after TensorFlow had begun")
    except RuntimeError as error:
        expect(f"rank {rank}" in str(error) and "right after shoal.tensorflow.init()" in str(error), error)


def keeps_the_launchers(rank):
    shoal.init()
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": rank}})
    expect(shoal.distribute.set_tf_config()["cluster"]["worker"] == ["a:1", "b:2"])
    for wrong, words in (({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}, "among 1 workers"),
                         ({"cluster": {}}, "names no cluster")):
        os.environ["TF_CONFIG"] = json.dumps(wrong)
        try:
            shoal.distribute.set_tf_config()
            raise AssertionError("a TF_CONFIG of another job was taken")
        except ValueError as error:
            expect(words in str(error) and f"rank {rank} of 2" in str(error), error)


def holds_its_port(rank):
    """Until TensorFlow listens there, which may be much later."""
    shoal.init()
    ports = [int(address.rpartition(":")[2]) for address in shoal.distribute.set_tf_config()["cluster"]["worker"]]
    expect(len(set(ports)) == 2, ports)
    with socket.socket() as other:
        try:
            other.bind(("127.0.0.1", ports[rank]))
            raise AssertionError("another program took the port")
        except OSError:
            pass
    with socket.create_server(("127.0.0.1", ports[rank])):  # which sets SO_REUSEADDR, as TensorFlow's server does
        pass


def case_of(body):
    def case():
        ranks = forked.Ranks(2, body)
        expect(ranks.codes == [0, 0], ranks.told())
    case.__name__ = body.__name__
    return case


if __name__ == "__main__":
    run_cases([case_of(body) for body in (trains_beside, comes_too_late, keeps_the_launchers, holds_its_port)])
