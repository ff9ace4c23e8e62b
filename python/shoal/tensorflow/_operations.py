"""The operations of libshoal_tensorflow.so in TensorFlow: starts and finishes as functions of tensors, and their gradients."""
from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import types
import warnings

import tensorflow as tf

import shoal
from shoal import _native

OLDEST = (2, 16)  # the first with Keras 3
NEWEST = (2, 21)  # the newest tested version
LIBRARY = "libshoal_tensorflow.so"
ERROR_BYTES = 1024


def check_version(version: str) -> None:
    """Raises ImportError if TensorFlow is too old or has another major version. Warns if it is newer than all tested versions:
    its C API is mostly stable, and load() names a function that is missing."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if numbers < OLDEST:
        raise ImportError(f"shoal.tensorflow needs TensorFlow {OLDEST[0]}.{OLDEST[1]} or newer, and this is {version}: "
                          f"pip install 'tensorflow>={OLDEST[0]}.{OLDEST[1]}'")
    if numbers[0] > NEWEST[0]:
        raise ImportError(f"shoal.tensorflow is for TensorFlow {NEWEST[0]}, and this is {version}: "
                          f"pip install 'tensorflow<{NEWEST[0] + 1}', or a newer Shoal")
    if numbers > NEWEST:
        warnings.warn(f"shoal.tensorflow was tried with TensorFlow {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}, and this is {version}. "
                      f"Should it fail: pip install 'tensorflow<={NEWEST[0]}.{NEWEST[1]}', or a newer Shoal", stacklevel=3)


@functools.lru_cache(maxsize=None)
def load() -> types.SimpleNamespace:
    """Returns the operations as Python functions, which TensorFlow generates, and the library's C functions. Raises ImportError
    with the reason if that fails."""
    check_version(tf.__version__)
    _native.load()  # the operations then find it loaded, wherever its file is
    path = shoal.library_path().parent / LIBRARY
    try:
        operations = tf.load_op_library(str(path))
        library = ctypes.CDLL(str(path))
    except (tf.errors.OpError, OSError) as error:
        raise ImportError(f"shoal.tensorflow: the operations cannot be loaded from {path}: {error}") from None
    library.shoal_tensorflow_problem.restype = ctypes.c_char_p
    problem = library.shoal_tensorflow_problem().decode()
    if problem:
        raise ImportError(f"shoal.tensorflow: TensorFlow {tf.__version__} does not accept the operations of {path}: {problem}")
    library.shoal_tensorflow_set_world.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32
    library.shoal_tensorflow_set_world.restype = ctypes.c_bool
    library.shoal_tensorflow_averager_create.argtypes = (
        ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
    library.shoal_tensorflow_averager_create.restype = ctypes.c_int64
    library.shoal_tensorflow_averager_reducer.argtypes = (ctypes.c_int64,)
    library.shoal_tensorflow_averager_reducer.restype = ctypes.c_void_p
    library.shoal_tensorflow_averager_free.argtypes = (ctypes.c_int64,)
    library.shoal_tensorflow_averager_free.restype = None
    _register_gradients()
    return types.SimpleNamespace(of=operations, library=library)


# ---- The order of collectives in a graph of a session, in which TensorFlow orders nothing -----------------------------------


_order = contextvars.ContextVar("shoal_order", default=None)  # the order that new collectives follow
ORDERS = "_shoal_orders"  # attribute of a graph: maps the name of a start to the order that it follows


@contextlib.contextmanager
def in_order():
    """Collectives made inside start one after the other, and then those of their gradients. It changes nothing outside of a
    session's graph, because starts follow the program's order there, and nothing inside another in_order()."""
    is_ordered = tf.executing_eagerly() or tf.compat.v1.executing_eagerly_outside_functions()
    with contextlib.nullcontext() if is_ordered or _order.get() else _following(_Order()):
        yield


@contextlib.contextmanager
def _following(order):
    token = _order.set(order)
    try:
        yield
    finally:
        _order.reset(token)


class _Order:
    """`last` is a result of the newest collective, for which the next start waits. Only starts wait: other operations that the
    program makes here, such as a shape for a gradient, must not pull collectives into a run that does not need them."""

    def __init__(self):
        self.last = []

    def start(self, operation, inputs):
        with tf.control_dependencies(self.last):
            started = operation(**inputs)
        graph = tf.compat.v1.get_default_graph()
        if not hasattr(graph, ORDERS):
            setattr(graph, ORDERS, {})
        getattr(graph, ORDERS)[started.handle.op.name] = self
        return started


def _order_of(op):
    """Returns the order of an operation. Returns None eagerly, and if nothing asked for an order."""
    return getattr(getattr(op, "graph", None), ORDERS, {}).get(getattr(op, "name", None))


# ---- Operations: when the function returns, the operation has started; in a graph, when its start has run ----------------


def finish(pending, handle, name=None):
    """Returns the results of a start. In a graph other operations run meanwhile; eagerly the call waits."""
    return load().of.shoal_finish(pending=pending, handle=handle, name=name)


def _collective(what, name, **inputs):
    """Makes a start and its finish, and returns a list of results. Errors of an eager call begin with the caller's name for it,
    because TensorFlow names kernels only in graphs."""
    operation, order = getattr(load().of, f"shoal_{what}_start"), _order.get()
    try:
        started = order.start(operation, {"name": name, **inputs}) if order else operation(name=name, **inputs)
        pending = started.pending if isinstance(started.pending, list) else [started.pending]
        results = finish(pending, started.handle, name and f"{name}_finish")
    except tf.errors.OpError as error:
        if name is None or not tf.executing_eagerly():
            raise
        raise type(error)(error.node_def, error.op, f'shoal: "{name}": {error.message}') from None
    if order:
        order.last = results[-1:]
    return results


def allreduce(tensors, operator: int, name=None, world=0):
    """Reduces a list of tensors of one type; returns a list of the same length."""
    return _collective("allreduce", name, inputs=tensors, operator=operator, world=world)


def broadcast(tensors, root: int, name=None, world=0):
    return _collective("broadcast", name, inputs=tensors, root=root, world=world)


def stack(tensor, size, name=None, world=0):
    """Stacks the tensors of all ranks, which have one shape, along a new first dimension."""
    result = _collective("allgather", name, input=tensor, rows=tf.zeros([0], tf.int64), world=world)[0]
    result.set_shape(tf.TensorShape([size]).concatenate(tensor.shape))
    return result


def allgather_rows(tensor, rows, name=None, world=0):
    """Joins the tensors of all ranks, which may differ in their first dimension. `rows` describes each rank: either by its number
    of rows, or by the rank and the first dimensions of its tensor, which are then compared."""
    return _rows_of(_collective("allgather", name, input=tensor, rows=rows, world=world)[0], tensor)


def reduce_scatter_rows(tensor, rows, operator: int, name=None, world=0):
    return _rows_of(_collective("reduce_scatter", name, input=tensor, rows=rows, operator=operator, world=world)[0], tensor)


def alltoall_rows(tensor, splits, received_splits, name=None, world=0):
    return _rows_of(_collective("alltoall", name, input=tensor, splits=splits, received_splits=received_splits, world=world)[0],
                    tensor)


def _rows_of(result, tensor):
    """Sets what is known of the shape of a result with an unknown number of rows."""
    if tensor.shape.rank is not None:
        result.set_shape(tf.TensorShape([None]).concatenate(tensor.shape[1:]))
    return result


def barrier(world=0):
    return load().of.shoal_barrier(world=world)


# ---- Gradients: of the sum of all ranks' losses ----------------------------------------------------------------------------


def _register_gradients():
    for name, function in (("ShoalFinish", _of_finish), ("ShoalAllreduceStart", _of_allreduce),
                           ("ShoalBroadcastStart", _of_broadcast), ("ShoalAllgatherStart", _of_allgather),
                           ("ShoalReduceScatterStart", _of_reduce_scatter), ("ShoalAlltoallStart", _of_alltoall)):
        try:
            tf.RegisterGradient(name)(_in_order_of_its_call(function))
        except KeyError:  # this module was imported again
            pass


def _in_order_of_its_call(gradient):
    """The collectives of a gradient start after those of its operation's call."""
    @functools.wraps(gradient)
    def ordered(op, *gradients):
        order = _order_of(op)
        with _following(order) if order else contextlib.nullcontext():
            return gradient(op, *gradients)
    return ordered


def _of_finish(op, *gradients):
    """The pending tensors are the results."""
    return [*gradients, None]


def _world_of(op):
    return op.get_attr("world")


def _size_of(world):
    from . import _world
    return _world.size_of(world)


def _of_allreduce(op, *gradients):
    operator = op.get_attr("operator")
    if operator not in (_native.SUM, _native.AVG):
        raise NotImplementedError("shoal: an all-reduce has a gradient with ReduceOp.SUM and ReduceOp.AVERAGE only")
    return allreduce(list(gradients[:-1]), operator, world=_world_of(op))


def _of_broadcast(op, *gradients):
    from . import _world
    sums = allreduce(list(gradients[:-1]), _native.SUM, world=_world_of(op))
    if _world.rank_of(_world_of(op)) == op.get_attr("root"):
        return sums
    return [tf.zeros_like(one) for one in sums]


def _of_allgather(op, gradient, _):
    world, rows = _world_of(op), op.inputs[1]
    if rows.shape.num_elements() == 0:  # stacked
        one_each = tf.ones([_size_of(world)], tf.int64)
        return [tf.squeeze(reduce_scatter_rows(gradient, one_each, _native.SUM, world=world), 0), None]
    if rows.shape.rank == 2:
        rows = rows[:, 1]
    return [reduce_scatter_rows(gradient, rows, _native.SUM, world=world), None]


def _of_reduce_scatter(op, gradient, _):
    operator, world = op.get_attr("operator"), _world_of(op)
    if operator not in (_native.SUM, _native.AVG):
        raise NotImplementedError("shoal: a reduce-scatter has a gradient with ReduceOp.SUM and ReduceOp.AVERAGE only")
    gathered = allgather_rows(gradient, op.inputs[1], world=world)
    return [gathered / _size_of(world) if operator == _native.AVG else gathered, None]


def _of_alltoall(op, gradient, _):
    return [alltoall_rows(gradient, op.inputs[2], op.inputs[1], world=_world_of(op)), None, None]
