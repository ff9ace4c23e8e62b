#!/usr/bin/env python3
"""Keras 3 on its torch back-end (shoal.torch.keras): fit on two ranks has the losses and weights of one process on the
whole batch."""
import importlib.util
import os
import sys
import warnings

import ranks
import torch.distributed as dist
from ranks import Case, expect

if not importlib.util.find_spec("keras"):
    print("1..0 # SKIP this Python has no Keras: `make test-all` installs it")
    sys.exit(0)
os.environ["KERAS_BACKEND"] = "torch"
import keras  # noqa: E402  before ranks are forked: it takes seconds
import numpy as np  # noqa: E402

import keras_noise  # noqa: E402

SAMPLES, BATCH, EPOCHS = 32, 8, 3  # BATCH is the sum over all ranks


def begun():
    import shoal.torch.keras as shoal
    shoal.init()
    return shoal


def data():
    random = np.random.default_rng(3)
    x = random.normal(size=[SAMPLES, 6]).astype(np.float32)
    return x, np.tanh(x.sum(1, keepdims=True)).astype(np.float32)


def share(array, world):
    """Returns this rank's samples, chosen so that the ranks' n-th batches together are the n-th batch of one process."""
    blocks = array.reshape([-1, world.size, BATCH // world.size, *array.shape[1:]])
    return blocks[:, world.rank].reshape([-1, *array.shape[1:]])


def model_of(seed, unused=False):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input([6])
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    if unused:  # the gradient is None on every rank
        model.extra = model.add_weight(shape=[2], name="extra")
    return model


def fit(model, optimizer, x, y, batch, callbacks=()):
    model.compile(optimizer=optimizer, loss="mse")
    return model.fit(x, y, batch_size=batch, epochs=EPOCHS, shuffle=False, verbose=0, callbacks=list(callbacks)).history["loss"]


def fit_equals_one_process(world):
    shoal, (x, y) = begun(), data()
    for optimizer in (lambda: keras.optimizers.Adam(0.01), lambda: keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5),
                      lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)):
        alone, ours = model_of(1), model_of(1 + world.rank, unused=True)
        wanted = fit(alone, optimizer(), x, y, BATCH)
        got = fit(ours, shoal.DistributedOptimizer(optimizer()), share(x, world), share(y, world), BATCH // world.size, [
            shoal.callbacks.BroadcastGlobalVariablesCallback(0), shoal.callbacks.MetricAverageCallback()])
        expect(dist.get_backend() == "shoal", dist.get_backend())
        expect(np.allclose(got, wanted, rtol=1e-4, atol=1e-5) and got[-1] < got[0], got, wanted)
        used = [variable for variable in ours.trainable_variables if variable is not ours.extra]
        for one, other in zip(used, alone.trainable_variables):
            expect(np.allclose(one.numpy(), other.numpy(), rtol=1e-4, atol=1e-5), one.path)


def raises(kind, function, *words):
    try:
        function()
    except kind as error:
        expect(all(word in str(error) for word in words), str(error))
        return
    raise AssertionError(f"no {kind.__name__}")


def faults(world):
    """Every rank reports them, and later calls work."""
    import torch
    shoal = begun()
    raises(TypeError, lambda: shoal.DistributedOptimizer("adam"), "optimizer of Keras 3")
    optimizer = shoal.DistributedOptimizer(keras.optimizers.SGD(0.1))
    raises(ValueError, lambda: shoal.DistributedOptimizer(optimizer), "twice")
    variables = [keras.Variable(np.ones(2), name="here"), keras.Variable(np.ones(3), name="sometimes")]
    gradients = [torch.ones(2), torch.ones(3) if world.rank else None]
    raises(RuntimeError, lambda: optimizer.apply(gradients, variables), "sometimes is None on rank 0 alone")
    other = keras.Variable(np.ones(2 + world.rank), name="other")
    raises(ValueError, lambda: shoal.broadcast_variables([other]), "other", "(2,) on rank 0")
    logs = {f"loss{world.rank}": 1.0}
    raises(RuntimeError, lambda: shoal.callbacks.MetricAverageCallback().on_epoch_end(0, logs), "metrics differ", "loss1")
    expect(shoal.allgather_object(world.rank) == [0, 1], "work goes on")
    warm = shoal.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=1, steps_per_epoch=4)
    expect(warm.multiplier(1.0) == 1.0, warm.multiplier(1.0))


def variables_that_come_apart_are_named(world):
    """The last rank's model gets a value of its own after its second batch; the ranks compare in the fourth."""
    shoal, (x, y) = begun(), data()

    def part(batch, logs):
        if watch.model is model and world.rank == world.size - 1 and batch == 1:
            model.trainable_variables[0].assign(model.trainable_variables[0] + 1)
    watch = keras.callbacks.LambdaCallback(on_train_batch_end=part)
    for wrap, names in ((shoal.DistributedOptimizer, ["kernel"]), (lambda optimizer: optimizer, [])):  # the latter averages nothing
        model = model_of(5)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(model, wrap(keras.optimizers.SGD(0.01)), share(x, world), share(y, world), BATCH // world.size, [
                shoal.callbacks.BroadcastGlobalVariablesCallback(0, compare_every=4), watch])
        told = [str(each.message) for each in caught if "is not the same on all ranks" in str(each.message)]
        expect(len(told) == len(names) and all(all(word in text for word in (name, "after batch 4", "differ")) for text, name in zip(told, names)), told)
    model, optimizer = model_of(5), shoal.DistributedOptimizer(keras.optimizers.SGD(0.01))
    strict = shoal.callbacks.BroadcastGlobalVariablesCallback(0, compare_every=4, compare_raises=True)
    raises(RuntimeError, lambda: fit(model, optimizer, share(x, world), share(y, world), BATCH // world.size, [strict, watch]),
           "is not the same on all ranks", "compare_every=0")


def the_learning_rate_warms_up(world):
    shoal, (x, y), rates = begun(), data(), []
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(float(watch.model.optimizer.learning_rate)))
    fit(model_of(1), shoal.DistributedOptimizer(keras.optimizers.SGD(0.4)), share(x, world), share(y, world), BATCH // world.size,
        [shoal.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2), watch])
    steps = SAMPLES // BATCH
    rising = [0.2 * (1 + (i + 1) / steps / 2) for i in range(2 * steps)]
    expect(np.allclose(rates, rising + [0.4] * steps, rtol=1e-5), rates)


def narrow_types_train(world):
    """Gradients of mixed_float16 are scaled before they are averaged, so all ranks skip the same steps."""
    shoal, (x, y) = begun(), data()
    for policy in ("mixed_bfloat16", "mixed_float16"):
        keras.config.set_dtype_policy(policy)
        try:
            ours = model_of(1)
            optimizer = shoal.DistributedOptimizer(keras.optimizers.SGD(0.1))
            scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
            expect(scales == (policy == "mixed_float16"), type(optimizer))
            first = share(x, world).copy()
            first[0] = np.inf if scales and world.rank == 1 else first[0]
            fit(ours, optimizer, first, share(y, world), BATCH // world.size)
            state = [*ours.get_weights(), np.asarray(optimizer.dynamic_scale.numpy() if scales else 1.0)]
            expect(state[-1] < 2.0**15 and all(np.isfinite(one).all() for one in state), policy, state)
            for theirs in shoal.allgather_object(state):
                expect(all((one == other).all() for one, other in zip(theirs, state)), policy, theirs, state)
        finally:
            keras.config.set_dtype_policy("float32")


def dies_in_fit(world):
    shoal, (x, y) = begun(), data()

    def die(batch, logs):
        if world.rank == 1 and batch == 2:
            os._exit(3)
    optimizer, mortal = shoal.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.callbacks.LambdaCallback(on_train_batch_begin=die)
    raises(RuntimeError, lambda: fit(model_of(1), optimizer, share(x, world), share(y, world), BATCH // world.size, [mortal]), "rank 1",
           "kernel and 3 more")


CASES = [Case(body.__name__, body, sizes=(2,)) for body in (fit_equals_one_process, faults, the_learning_rate_warms_up, narrow_types_train,
                                                             variables_that_come_apart_are_named)]
CASES += [Case("dies_in_fit", dies_in_fit, sizes=(2,), fresh=True, ends=(1,))]

CASES += [Case(f"noise: {body.__name__}", lambda world, body=body: body(begun(), world.rank, world.size), sizes=(2,))
          for body in keras_noise.CASES]

if __name__ == "__main__":
    ranks.run(CASES)
