"""smp.step, which runs a function once for each microbatch, inside a tf.function; and StepOutput, which it returns."""
from __future__ import annotations

import functools
import inspect

import tensorflow as tf

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPError
from smdistributed.modelparallel.tensorflow._model import microbatch
from smdistributed.modelparallel.tensorflow._state import state


class StepOutput:
    """A tensor that the step function has returned. outputs: its values, by microbatch."""

    def __init__(self, outputs):
        self.outputs = list(outputs)

    def reduce_sum(self):
        return tf.add_n(self.outputs)

    def reduce_mean(self):
        return self.reduce_sum() / tf.cast(len(self.outputs), self.outputs[0].dtype)

    def accumulate(self, method="variable", var=None):
        """Like reduce_mean(); the arguments have no effect."""
        return self.reduce_mean()

    def concat(self, axis=0):
        """Joins the values along an axis. Values without axes become a vector."""
        return tf.stack(self.outputs) if self.outputs[0].shape.rank == 0 else tf.concat(self.outputs, axis)

    merge = concat

    def stack(self, axis=0):
        return tf.stack(self.outputs, axis)

    def __repr__(self):
        return f"StepOutput({self.outputs!r})"


class _Step:
    """A function decorated with step()."""

    def __init__(self, function, non_split_inputs, input_split_axes, input_signature):
        functools.update_wrapper(self, function)
        self._function, self._signature = function, inspect.signature(function)
        self._whole, self._axes = set(non_split_inputs or ()), dict(input_split_axes or {})
        for name in {*self._whole, *self._axes} - set(self._signature.parameters):
            raise SMPConfigError(f"smp.step: {function.__name__}() has no argument {name}")
        self._error = None  # of this package, raised while the function is traced: autograph raises another one in its place
        self._traced = tf.function(self._run, input_signature=input_signature)

    def __call__(self, *args, **kwargs):
        state.require()
        self._error = None
        try:
            return _joined(self._traced(*args, **kwargs))
        except Exception:
            if self._error is None:
                raise
        raise self._error

    def _run(self, *args, **kwargs):
        try:
            return self._by_microbatch(args, kwargs)
        except SMPError as error:
            self._error = error
            raise

    def _by_microbatch(self, args, kwargs):
        """Returns what the function returns, by microbatch."""
        count = state.cfg.microbatches
        bound = self._signature.bind(*args, **kwargs)
        calls = [{} for _ in range(count)]
        for name, value in bound.arguments.items():
            for call, part in zip(calls, self._divided(name, value, count)):
                call[name] = part
        returned = []
        for number, call in enumerate(calls):
            with microbatch(number):
                part = inspect.BoundArguments(self._signature, call)
                returned.append(self._function(*part.args, **part.kwargs))
        return returned

    def _divided(self, name, value, count):
        """Returns an argument for each microbatch. Tensors are divided, also those in lists, tuples and dicts."""
        if name in self._whole:
            return [value] * count
        leaves = [self._divided_leaf(name, leaf, count) for leaf in tf.nest.flatten(value)]
        return [tf.nest.pack_sequence_as(value, [leaf[number] for leaf in leaves]) for number in range(count)]

    def _divided_leaf(self, name, leaf, count):
        if not tf.is_tensor(leaf) or leaf.shape.rank == 0:
            return [leaf] * count
        axis = self._axes.get(name, 0)
        rows = leaf.shape[axis]
        if rows is not None and rows % count:
            raise SMPConfigError(f"smp.step: the argument {name} has {rows} samples, which {count} microbatches do not divide: use "
                                 "drop_remainder=True in Dataset.batch()")
        return tf.split(leaf, count, axis)


def _joined(parts):
    """Returns what the step function returns, in the form of one call: tensors as StepOutputs, other values as lists."""
    first = parts[0]
    if first is None:
        return None
    columns = zip(*(tf.nest.flatten(each) for each in parts))
    leaves = [StepOutput(each) if tf.is_tensor(each[0]) else list(each) for each in columns]
    return tf.nest.pack_sequence_as(first, leaves)


def step(function=None, non_split_inputs=None, input_split_axes=None, input_signature=None):
    """Decorates a function that calls a smp.DistributedModel. It runs once for each microbatch: tensors among its arguments are divided
    along their first axis, or that of input_split_axes. Returned tensors become StepOutputs."""
    if function is None:
        return lambda given: step(given, non_split_inputs, input_split_axes, input_signature)
    return _Step(function, non_split_inputs, input_split_axes, input_signature)
