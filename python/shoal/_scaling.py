"""Batch sizes and learning rates (include/shoal/scaling.h) for the front ends: what a noise scale is, and the factor of a rate.
Needs no framework. The arithmetic is the library's."""
from __future__ import annotations

import ctypes
import dataclasses
import math

from . import _native

WINDOW = 100  # steps over which the noise scale is averaged
RULES = {"none": _native.SCALING_NONE, "linear": _native.SCALING_LINEAR, "sqrt": _native.SCALING_SQUARE_ROOT,
         "adascale": _native.SCALING_ADASCALE}
ADAPTIVE = ("ada", "rmsprop", "lamb", "lion")  # in the names of optimizers that divide by the size of gradients
TEXT_BYTES = 256


@dataclasses.dataclass(frozen=True)
class Noise:
    """The noise scale of gradients, in samples, after some steps: struct shoal_noise. str() is a sentence: what the batch is in
    units of the noise scale and what twice the batch would cost, or why the noise scale is not known.

    scale is NaN if nothing is known. error is its standard error, infinite if the gradient cannot be told from its noise; with a
    probability of 95 % scale is between low and high. squared is the gradient's squared norm without its noise, variance
    the trace of the covariance matrix of one sample's gradient. batch: samples of a step over all ranks. left_out: steps that
    could not be measured."""

    scale: float
    error: float
    low: float
    high: float
    squared: float
    squared_error: float
    variance: float
    variance_error: float
    batch: float
    steps: int
    left_out: int
    state: int

    @property
    def is_known(self):
        return self.state == _native.NOISE_KNOWN

    def of_batch(self, batch):
        """Returns this noise scale for another batch of that many samples."""
        return dataclasses.replace(self, batch=float(batch))

    def struct(self):
        return _native.Noise(**dataclasses.asdict(self))

    def __str__(self):
        text = ctypes.create_string_buffer(TEXT_BYTES)
        _native.load().noise_text(ctypes.byref(self.struct()), text, len(text))
        return text.value.decode()


def noise_of(struct):
    return Noise(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(Noise)})


def window_of(noise_scale):
    """Returns the window for noise_scale=, which is a number of steps, True or False."""
    window = WINDOW if noise_scale is True else float(noise_scale or 0)
    if window and not (1 <= window < math.inf):
        raise ValueError(f"shoal: noise_scale is {noise_scale!r}, but must be True, False, or a number of steps from 1 over which "
                         "the noise scale is averaged")
    return window


def save_average(average):
    """The fields of struct shoal_noise_average, for a checkpoint."""
    return {name: getattr(average, name) for name, _ in average._fields_ if name != "struct_bytes"}


def load_average(saved):
    """Returns the struct. Raises ValueError if its fields are not those of one."""
    average = _native.NoiseAverage()
    names = set(save_average(average))
    if set(saved) != names:
        raise ValueError(f"shoal: this is not a saved noise average: it has {', '.join(sorted(map(str, saved))) or 'nothing'}")
    for name in names:
        setattr(average, name, saved[name])
    error = ctypes.create_string_buffer(TEXT_BYTES)
    if _native.load().noise_check(ctypes.byref(average), error, len(error)) != _native.OK:
        raise ValueError(f"shoal: {error.value.decode()}")
    return average


def read_average(average):
    """Returns the Noise of struct shoal_noise_average."""
    noise = _native.Noise()
    _native.load().noise_read(ctypes.byref(average), ctypes.byref(noise))
    return noise_of(noise)


class NoiseAverage:
    """struct shoal_noise_average, for norms that a program has summed itself."""

    def __init__(self, window):
        self.struct = _native.NoiseAverage(window=window)

    def add(self, small_batch, small_squared, big_batch, big_squared):
        step = _native.NoiseStep(small_batch=small_batch, small_squared=small_squared, big_batch=big_batch, big_squared=big_squared)
        if _native.load().noise_add(ctypes.byref(self.struct), ctypes.byref(step)) != _native.OK:
            raise ValueError(f"shoal: batches of {small_batch} and {big_batch} samples: both must be above 0")

    def read(self):
        return read_average(self.struct)


def is_adaptive(optimizer):
    """Returns true if an optimizer of that class name divides by the size of gradients. The list is that of timm's
    train.py, with RMSprop and Lion."""
    return any(word in type(optimizer).__name__.lower() for word in ADAPTIVE)


class Scaling:
    """struct shoal_scaling: the factor for each step of a training that has another batch than its rate was tuned for."""

    def __init__(self, rule, old_batch, batch, warmup=0, is_adaptive=False):
        if rule is None:
            rule = "sqrt" if is_adaptive else "linear"
        if rule not in RULES:
            raise ValueError(f"shoal: the rule is {rule!r}, but must be one of {', '.join(RULES)}, or None for sqrt with Adam and its "
                             "like, and linear otherwise")
        self.rule, self.batch, self.noise, self.is_adaptive = rule, batch, None, is_adaptive
        self._struct = _native.Scaling(rule=RULES[rule], old_batch=old_batch, warmup=warmup, is_adaptive=int(is_adaptive))
        self.rate = self._call("scaling_look")

    @property
    def iterations(self):
        """Steps of the old batch that the training is worth so far."""
        return self._struct.iterations

    @property
    def steps(self):
        return self._struct.steps

    def count(self):
        """Counts the step for which `rate` was computed."""
        self._call("scaling_step")

    def look(self, batch, noise=None):
        """Computes `rate` for the next step. noise: a Noise, or None if it is not known yet."""
        before = self.batch, self.noise
        self.batch, self.noise = batch, noise
        try:
            self.rate = self._call("scaling_look")
        except ValueError:
            self.batch, self.noise = before
            raise

    def _call(self, name):
        rate, error = _native.ScalingRate(), ctypes.create_string_buffer(TEXT_BYTES)
        noise = self.noise.struct() if self.noise else _native.Noise()
        status = getattr(_native.load(), name)(ctypes.byref(self._struct), self.batch, ctypes.byref(noise), ctypes.byref(rate),
                                               error, len(error))
        if status != _native.OK:
            raise ValueError(f"shoal: {error.value.decode()}")
        return rate

    def state(self):
        return {"iterations": self._struct.iterations, "steps": self._struct.steps, "old_batch": self._struct.old_batch,
                "rule": self.rule, "batch": self.batch, "noise": dataclasses.asdict(self.noise) if self.noise else None}

    def load(self, state):
        """Restores the position. The rule and the old batch must be the same, because iterations count by them."""
        for name, own in (("rule", self.rule), ("old_batch", self._struct.old_batch)):
            if state[name] != own:
                raise ValueError(f"shoal: the saved {name} is {state[name]}, but this scheduler has {own}: make it with the saved one")
        self._struct.iterations, self._struct.steps = state["iterations"], state["steps"]
        self.look(self.batch, Noise(**state["noise"]) if state["noise"] else None)
