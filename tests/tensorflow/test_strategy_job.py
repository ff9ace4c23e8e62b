#!/usr/bin/env python3
"""A job on two hosts whose `distribution` key starts TensorFlow's MultiWorkerMirroredStrategy. Shoal works in the same loop."""
import pathlib
import re
import sys

import tensorflow  # noqa: F401
import warm

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "job"))
from jobs import Jobs, Machines, where  # noqa: E402
from shoal.job import processes  # noqa: E402
from tap import expect, run_cases  # noqa: E402

PYTHON = warm.start()
MIRRORED = {"multi_worker_mirrored_strategy": {"enabled": True}}
STEPS, RATE = 4, 0.1
# Both workers know the whole batch and train on one half each. Shoal averages the losses, the strategy the gradients.
SCRIPT = f"""
    import json, os
    given = os.environ["TF_CONFIG"]
    import numpy as np
    import tensorflow as tf
    import shoal.tensorflow as shoal

    shoal.init()
    strategy = shoal.distribute.MultiWorkerMirroredStrategy()
    assert os.environ["TF_CONFIG"] == given  # the job's, kept
    rank, x = shoal.rank(), np.random.default_rng(3).normal(size=[16, 4]).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    mine, wanted = tf.constant(x[rank::2]), tf.constant(y[rank::2])
    with strategy.scope():
        weights = tf.Variable(tf.zeros([4, 1]))

    def replica():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((mine @ weights - wanted) ** 2)
        gradient = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, tape.gradient(loss, weights))
        weights.assign_sub({RATE} * gradient)
        return loss

    losses = [float(shoal.allreduce(tf.function(lambda: strategy.run(replica))())) for _ in range({STEPS})]
    alone, expected = np.zeros([4, 1], np.float32), []
    for _ in range({STEPS}):
        expected.append(float(((x @ alone - y) ** 2).mean()))
        alone -= {RATE} * 2 * x.T @ (x @ alone - y) / len(x)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(weights.numpy(), alone, rtol=1e-5)
    print("trained as one:", rank, "of", shoal.size(), "on host", shoal.cross_rank(), "of", shoal.cross_size(), flush=True)
"""


def told_by(text):
    return sorted(re.findall(r"trained as one: (\d of \d on host \d of \d)", text))


def a_job_of_two_hosts_trains_as_one_process():
    with Jobs(PYTHON) as jobs:
        jobs.run(SCRIPT, instance_count=2, distribution=MIRRORED, framework="tensorflow")
        expect(told_by(jobs.out) == ["0 of 2 on host 0 of 2", "1 of 2 on host 1 of 2"], jobs.out, jobs.err)


def machines_that_know_nothing_of_each_other_do_too():
    with Jobs(PYTHON) as jobs:
        place = where(shared=False, port=processes.free_port())
        document = jobs.document(SCRIPT, instance_count=2, distribution=MIRRORED, framework="tensorflow", where=place)
        done = Machines(jobs, document, 2, of_machine=lambda index: {
            "SHOAL_JOBS": str(jobs.jobs / str(index)), "SHOAL_SECRET": "known to both", "SHOAL_HOST_ID": str(index)}).wait()
        expect([code for code, _, _ in done] == [0, 0], done)
        expect([told_by(out) for _, out, _ in done] == [["0 of 2 on host 0 of 2"], ["1 of 2 on host 1 of 2"]], done)


if __name__ == "__main__":
    run_cases([a_job_of_two_hosts_trains_as_one_process, machines_that_know_nothing_of_each_other_do_too])
