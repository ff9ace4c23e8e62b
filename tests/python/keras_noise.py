"""Cases of both Keras front ends: NoiseScaleCallback and ScaledLearningRate. `shoal` is shoal.torch.keras or shoal.tensorflow.keras."""
import contextlib
import io
import math

import keras
import numpy as np

from shoal import _scaling

BATCH, STEPS = 4, 12  # samples of a rank


def data_of(rank):
    random = np.random.default_rng(50 + rank)
    x = random.normal(size=[BATCH * STEPS, 5]).astype(np.float32)
    return x, (x.sum(1, keepdims=True) + random.normal(size=[BATCH * STEPS, 1])).astype(np.float32)


def model_of():
    """A linear model, whose gradients are one line of numpy."""
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.layers.Input([5]), keras.layers.Dense(1, use_bias=False)])


def fit(model, optimizer, rank, callbacks, epochs=1):
    x, y = data_of(rank)
    model.compile(optimizer=optimizer, loss="mse")
    return model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks)


def wanted_of(weights, size, window):
    """The noise scale that `size` ranks measure with these weights."""
    average = _scaling.NoiseAverage(window)
    for step in range(STEPS):
        gradients = []
        for rank in range(size):
            x, y = (each[step * BATCH:(step + 1) * BATCH].astype(np.float64) for each in data_of(rank))
            gradients.append(2 / BATCH * x.T @ (x @ weights - y))
        average.add(BATCH, sum(float((each ** 2).sum()) for each in gradients) / size, BATCH * size,
                    float((np.mean(gradients, axis=0) ** 2).sum()))
    return average.read()


def check_noise(noise, wanted, tolerance=1e-3):
    for name in ("squared", "variance", "batch", "steps"):
        np.testing.assert_allclose(getattr(noise, name), getattr(wanted, name), rtol=tolerance)


def noise_is_measured(shoal, rank, size):
    """With a rate of 0 the weights stay, so every rank knows all gradients."""
    model, said = model_of(), io.StringIO()
    callback = shoal.callbacks.NoiseScaleCallback(BATCH)
    with contextlib.redirect_stdout(said):
        history = fit(model, shoal.DistributedOptimizer(keras.optimizers.SGD(0.0), noise_scale=30), rank, [callback]).history
    weights = np.asarray(model.get_weights()[0], np.float64)
    check_noise(callback.noise, wanted_of(weights, size, 30))
    assert ("Epoch 1: " in said.getvalue() and str(callback.noise) in said.getvalue()) == (rank == 0), said.getvalue()
    if callback.noise.is_known:
        np.testing.assert_allclose(history["noise_scale"], [callback.noise.scale])


def a_loss_scale_is_divided_out(shoal, rank, size):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = model_of()
        callback = shoal.callbacks.NoiseScaleCallback(BATCH, verbose=0)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=256, dynamic_growth_steps=3)
        fit(model, shoal.DistributedOptimizer(optimizer, noise_scale=30), rank, [callback])
        assert float(keras.ops.convert_to_numpy(model.optimizer.dynamic_scale)) > 256
        weights = np.asarray(model.get_weights()[0], np.float64)
    finally:
        keras.config.set_dtype_policy("float32")
    check_noise(callback.noise, wanted_of(weights, size, 30), 0.03)


def rates_of(shoal, optimizer, rank, callback, epochs=1, model=None):
    """Trains, and returns the rate of each step."""
    rates = []
    watch = keras.callbacks.LambdaCallback(on_train_batch_begin=lambda batch, logs: rates.append(
        float(keras.ops.convert_to_numpy(watch.model.optimizer.learning_rate))))
    fit(model or model_of(), optimizer, rank, [callback, watch], epochs)
    return rates


def rates_follow_the_rules(shoal, rank, size):
    """The global batch is four times the old one."""
    old = BATCH * size / 4
    scaled = shoal.callbacks.ScaledLearningRate
    plain = shoal.DistributedOptimizer(keras.optimizers.SGD(1.0))
    np.testing.assert_allclose(rates_of(shoal, plain, rank, scaled(0.01, old, BATCH)), [0.04] * STEPS, rtol=1e-6)
    adam = shoal.DistributedOptimizer(keras.optimizers.Adam(1.0))
    np.testing.assert_allclose(rates_of(shoal, adam, rank, scaled(0.01, old, BATCH)), [0.02] * STEPS, rtol=1e-6)
    callback = scaled(lambda step: 0.01 / (1 + step), old, BATCH, "linear", warmup=10, total=30)
    rates = rates_of(shoal, shoal.DistributedOptimizer(keras.optimizers.SGD(1.0)), rank, callback, epochs=2)
    factors = [1, 2.2, 3.4, 4, 4, 4, 4, 4]  # it ends after 8 steps, which are worth 32
    np.testing.assert_allclose(rates, [0.01 / (1 + 4 * step) * factor for step, factor in enumerate(factors)], rtol=1e-6)
    accumulated = shoal.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2))
    callback = scaled(0.01, old, BATCH, "linear")
    np.testing.assert_allclose(rates_of(shoal, accumulated, rank, callback), [0.08] * STEPS, rtol=1e-6)
    assert callback.iterations == 8 * STEPS / 2, callback.iterations


def adascale_follows_the_noise_and_resumes(shoal, rank, size):
    def optimizer():
        return shoal.DistributedOptimizer(keras.optimizers.SGD(0.0), noise_scale=30)

    def callback():
        return shoal.callbacks.ScaledLearningRate(1e-4, BATCH, BATCH, "adascale")
    whole, first, second = callback(), callback(), callback()
    model = model_of()
    wanted = rates_of(shoal, optimizer(), rank, whole, epochs=2, model=model)
    gain = size * (whole.noise.scale + BATCH) / (whole.noise.scale + BATCH * size) if math.isfinite(whole.noise.scale) else size
    assert wanted[0] == np.float32(1e-4) and 1 <= gain <= size and wanted[-1] > 1e-4, (wanted, gain)
    model = model_of()
    rates = rates_of(shoal, optimizer(), rank, first, model=model)
    second.load_state(first.state())
    rates += rates_of(shoal, optimizer(), rank, second, model=model)
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(second.iterations, whole.iterations, rtol=1e-9)


def misuse_is_told(shoal, rank, size):
    for callback in (shoal.callbacks.NoiseScaleCallback(BATCH), shoal.callbacks.ScaledLearningRate(0.1, 8, BATCH, "adascale")):
        try:
            fit(model_of(), shoal.DistributedOptimizer(keras.optimizers.SGD(0.0)), rank, [callback])
        except ValueError as error:
            assert "noise_scale=True" in str(error), error
        else:
            raise AssertionError("no error")
    try:
        fit(model_of(), shoal.DistributedOptimizer(keras.optimizers.SGD(0.0)), rank, [shoal.callbacks.ScaledLearningRate(0.1, 0, BATCH)])
    except ValueError as error:
        assert "old_batch is 0" in str(error), error
    else:
        raise AssertionError("no error")


CASES = (noise_is_measured, a_loss_scale_is_divided_out, rates_follow_the_rules, adascale_follows_the_noise_and_resumes, misuse_is_told)
