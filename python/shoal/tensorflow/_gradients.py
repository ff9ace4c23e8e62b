"""Averages the gradients of lists of variables with the gradient engine (include/shoal/gradients.h)."""
from __future__ import annotations

import ctypes
import dataclasses
import itertools
import math
import re
import weakref

import tensorflow as tf

from shoal import _native, _scaling

from . import _collectives, _operations, _world
from ._collectives import Compression, ReduceOp

_TYPES = {tf.float32: _native.FLOAT32, tf.float64: _native.FLOAT64, tf.float16: _native.FLOAT16, tf.bfloat16: _native.BFLOAT16}
_COMPRESSIONS = {"none": _native.COMPRESS_NONE, "fp16": _native.COMPRESS_FLOAT16, "bf16": _native.COMPRESS_BFLOAT16,
                 "int8": _native.COMPRESS_INT8}
BUFFER_MIB = 25

_numbers = itertools.count()
_averagers = {}  # by their variables, types and settings


class Settings:
    """How gradients are averaged, and among which ranks (_world.add_world). The constructor checks the values, so that an error
    appears at the line that sets them."""

    def __init__(self, op=ReduceOp.AVERAGE, compression=Compression.none, sparse_as_dense=False, buffer_mib=BUFFER_MIB, world=0,
                 noise_scale=False):
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise ValueError(f"shoal: gradients can be averaged or summed (ReduceOp.AVERAGE, ReduceOp.SUM), and op is {op!r}")
        if compression not in _COMPRESSIONS:
            raise ValueError(f"shoal: compression is {compression!r}, and must be one of Compression."
                             f"{', Compression.'.join(_COMPRESSIONS)}")
        if not buffer_mib > 0:
            raise ValueError(f"shoal: buffers of {buffer_mib} MiB cannot hold gradients")
        self.op, self.compression, self.sparse_as_dense = ReduceOp(op), compression, bool(sparse_as_dense)
        self.buffer_bytes, self.world = int(buffer_mib * (1 << 20)), world
        self.noise_window = _scaling.window_of(noise_scale)
        self._averager = None  # the newest one that was made with these settings
        self._batch, self._saved = (1.0, 1.0), None

    def average(self, gradients, variables):
        return average(gradients, variables, self)

    def key(self):
        return int(self.op), self.compression, self.buffer_bytes, self.world, id(self) if self.noise_window else 0

    # ---- The noise scale: with noise_scale=, between steps ----

    def set_batch(self, samples, gradient_scale=1.0):
        """This rank's gradients are means over that many samples, and are to be multiplied by gradient_scale."""
        self._batch = float(samples), float(gradient_scale)
        if self._averager:
            self._call("reducer_set_batch", *self._batch)

    def noise(self):
        noise = _scaling.read_average(self._noise_average())
        alone = _world.size_of(self.world) == 1
        return dataclasses.replace(noise, state=_native.NOISE_ONE_BATCH) if alone else noise

    def noise_state(self):
        return _scaling.save_average(self._noise_average())

    def _noise_average(self):
        """The first step makes the averager; until then the averages are those that were restored, if any."""
        average = self._saved or _native.NoiseAverage(window=self.noise_window)
        if self._averager:
            self._call("reducer_noise_average", ctypes.byref(average))
        return average

    def load_noise_state(self, state):
        self._saved = _scaling.load_average(state)
        if self._averager:
            self._call("reducer_set_noise_average", ctypes.byref(self._saved))

    def take(self, averager):
        """The averager is the one of the model's gradients from now on."""
        if not self.noise_window or averager is self._averager:
            return
        self._averager = averager
        self._call("reducer_set_batch", *self._batch)
        if self._saved:
            self._call("reducer_set_noise_average", ctypes.byref(self._saved))

    def _call(self, name, *arguments):
        reducer = _operations.load().library.shoal_tensorflow_averager_reducer(self._averager.number)
        status = getattr(_native.load(), name)(reducer, *arguments) if reducer else _native.ERR_STATE
        if status != _native.OK:
            raise _world.error_of(status, f"shoal: the noise scale of gradients: {_native.load().status_text(status).decode()}")


def average(gradients, variables, settings):
    """Returns the gradients of all ranks, averaged or summed. All ranks call it with the same variables in the same order. A
    gradient that is None on every rank stays None; one that is None only on some ranks is an error on every rank."""
    gradients, variables = list(gradients), list(variables)
    if len(gradients) != len(variables):
        raise ValueError(f"shoal: {len(gradients)} gradients were given for {len(variables)} variables")
    if _world.size_of(settings.world) == 1:
        return gradients
    if settings.sparse_as_dense:
        gradients = [tf.convert_to_tensor(one) if isinstance(one, tf.IndexedSlices) else one for one in gradients]
    is_sparse = [isinstance(one, tf.IndexedSlices) for one in gradients]
    results = list(gradients)
    dense = [i for i, sparse in enumerate(is_sparse) if not sparse]
    if dense:
        averager = _averager_of([variables[i] for i in dense], [gradients[i] for i in dense], settings)
        settings.take(averager)
        for i, result in zip(dense, averager([gradients[i] for i in dense])):
            results[i] = result
    for i, sparse in enumerate(is_sparse):
        if sparse:
            results[i] = _collectives.allreduce_slices(gradients[i], settings.op, _node_name(name_of(variables[i])), settings.world)
    return results


def name_of(variable):
    return getattr(variable, "path", None) or variable.name


def name_on_all_ranks(index, variable):
    """Returns a name that ranks can compare. Keras numbers its names in each process separately: the numbers differ on a rank
    that made another model before."""
    return f"variable {index}, {re.sub(r'_[0-9]+(?=/|$)', '', name_of(variable))}"


def _node_name(name):
    """Converts a name to one that a node of a graph may have."""
    return "shoal_" + re.sub(r"[^A-Za-z0-9_.\-]", "_", name.split(":")[0])


def _number_of(variable):
    """Returns a number that is unique to the variable, unlike its address, which may be used again."""
    number = getattr(variable, "_shoal_number", None)
    if number is None:
        number = variable._shoal_number = next(_numbers)
    return number


def _type_of(variable, gradient):
    dtype = tf.as_dtype(variable.dtype if gradient is None else gradient.dtype)
    if dtype not in _TYPES:
        raise TypeError(f"shoal: the gradient of {name_of(variable)} is of {dtype.name}, but gradients of float32, float64, "
                        "float16 and bfloat16 can be averaged")
    return _TYPES[dtype]


def _averager_of(variables, gradients, settings):
    types = tuple(_type_of(*pair) for pair in zip(variables, gradients))
    key = tuple(map(_number_of, variables)), types, settings.key()
    if key not in _averagers:
        gone = [old for old, averager in _averagers.items() if averager.world == settings.world and averager.is_orphan()]
        _averagers[key] = _Averager(variables, types, settings)
        for old in gone:  # only now: all ranks of the world have come here, past the last step of these
            _averagers.pop(old).free()
    return _averagers[key]


class _Averager:
    """struct averager of operations/averager.h. All ranks make it together."""

    def __init__(self, variables, types, settings):
        self.names, self.world = [name_of(variable) for variable in variables], settings.world
        # A graph may outlive the tensor that was passed here, but not its variables.
        self._variables = [weakref.ref(variable) for variable in variables if hasattr(variable, "assign")]
        parameters = (_native.Parameter * len(variables))(*(
            (math.prod(map(int, variable.shape)), kind, name_on_all_ranks(i, variable).encode())
            for i, (variable, kind) in enumerate(zip(variables, types))))
        options = _native.ReducerOptions(name=b"gradients", op=int(settings.op), buffer_bytes=settings.buffer_bytes,
                                         compression=_COMPRESSIONS[settings.compression], noise_window=settings.noise_window,
                                         timeout_ms=_world.world_at(self.world).limit_ms)
        error = ctypes.create_string_buffer(_operations.ERROR_BYTES)
        self.number = _operations.load().library.shoal_tensorflow_averager_create(
            self.world, ctypes.byref(parameters), len(variables), ctypes.byref(options), error, len(error))
        if self.number < 0:
            raise _world.error_of(-self.number, error.value.decode(errors="replace"))
        self._compiled = tf.function(self._average, autograph=False)

    def __call__(self, gradients):
        return self._compiled(gradients) if tf.executing_eagerly() else self._average(gradients)

    def _average(self, gradients):
        """Starts gradients from the last variable to the first, in the order of a backward pass, because each start waits for
        the one before it. Finishes wait for all starts: TensorFlow raises an error only when all begun operations are done, so
        a finish that waits for gradients which the error prevents would delay the error."""
        marks = sum(gradient is not None for gradient in gradients)
        if marks == 0:
            _operations.load().of.shoal_gradients_none(reducer=self.number, world=self.world)
            return gradients
        started = [None] * len(gradients)
        for i in reversed(range(len(gradients))):
            if gradients[i] is not None:
                started[i] = _operations.load().of.shoal_gradient_start(
                    input=gradients[i], reducer=self.number, index=i, marks=marks, world=self.world, name=_node_name(self.names[i]))
        with tf.control_dependencies([tf.group(*[one.handle for one in started if one])]):
            return [one and _operations.finish([one.pending], one.handle)[0] for one in started]

    def is_orphan(self):
        """Returns true if one of its variables is gone, so that its list cannot be averaged again."""
        return any(variable() is None for variable in self._variables)

    def free(self):
        _operations.load().library.shoal_tensorflow_averager_free(self.number)


def _free_those_of(world):
    for key in [key for key, averager in _averagers.items() if averager.world == world]:
        _averagers.pop(key).free()


_world.on_end(_free_those_of)
