"""Copies the state of one rank to all ranks, and compares it."""
from __future__ import annotations

import functools
import pickle

import tensorflow as tf

from shoal import _replicas

from . import _collectives, _gradients, _operations, _world


def broadcast_variables(variables, root_rank: int = 0) -> None:
    """Sets each variable to root_rank's value. Variables are matched by their index in the list. If shapes or types differ,
    every rank raises an error that names the first variable that differs. It also works inside tf.function, but without this
    comparison."""
    _collectives._check_root(root_rank)
    variables = list(variables)
    if tf.executing_eagerly():
        _compare(variables)
    assign_broadcasts(variables, root_rank)


def assign_broadcasts(variables, root_rank: int, name: str | None = "shoal_broadcast_variables", world: int = 0) -> list:
    """Returns operations that assign root_rank's value to each variable. Types follow one after the other, because graphs of
    TensorFlow 1 have no order of their own."""
    values, received, assigned = [tf.convert_to_tensor(variable) for variable in variables], [], list(variables)
    for indices in _collectives._by_type(values):
        with tf.control_dependencies(received):
            received = _operations.broadcast([values[i] for i in indices], root_rank, name, world)
        for i, value in zip(indices, received):
            assigned[i] = variables[i].assign(value)
    return assigned


def compare_variables(variables) -> None:
    """Checks that variables are the same on all ranks, by hashes. All ranks call it with the same variables, outside of
    tf.function. FailedPreconditionError names the first that differs, and the ranks that differ from the majority."""
    variables = list(variables)
    different = _replicas.difference(allgather_object, [_gradients.name_of(each) for each in variables],
                                     [each.numpy() for each in variables], "now")
    if different:
        raise tf.errors.FailedPreconditionError(None, None, different)


def broadcast_object(value, root_rank: int = 0):
    """Returns root_rank's value on every rank, through pickle. Eager only."""
    _collectives._check_root(root_rank)
    return share_object(value, _world.rank() == root_rank, functools.partial(_collectives.broadcast, root_rank=root_rank))


def allgather_object(value):
    """Returns a list of the values of all ranks, through pickle. Eager only."""
    return gather_objects(value, _collectives.allgather)


def share_object(value, is_root, broadcast):
    """Returns the root's object. `broadcast` broadcasts a tensor of the root."""
    data = _dump(value) if is_root else tf.zeros([0], tf.uint8)
    length = broadcast(tf.size(data, tf.int64))
    received = broadcast(data if is_root else tf.zeros([length], tf.uint8))
    return value if is_root else _load(received)


def gather_objects(value, allgather):
    """Returns the objects of all ranks. `allgather` gathers the ranks' tensors, which may have different lengths."""
    data = _dump(value)
    lengths = allgather(tf.size(data, tf.int64)[None])
    return [_load(part) for part in tf.split(allgather(data), lengths)]


def _dump(value):
    try:
        import cloudpickle
        data = cloudpickle.dumps(value)
    except ImportError:  # functions and classes of the script itself then cannot be sent
        data = pickle.dumps(value)
    return tf.io.decode_raw(data, tf.uint8)


def _load(data):
    return pickle.loads(data.numpy().tobytes())


def _form(variable):
    return f"{tf.as_dtype(variable.dtype).name} {tuple(variable.shape)}"


def _compare(variables):
    forms = allgather_object([(_gradients.name_of(variable), _form(variable)) for variable in variables])
    for rank, theirs in enumerate(forms):
        for i, (first, other) in enumerate(zip(forms[0], theirs)):
            if first[1] != other[1]:
                raise tf.errors.InvalidArgumentError(None, None, (
                    f"shoal: variable {i} differs: {first[0]} of {first[1]} on rank 0, {other[0]} of {other[1]} on rank "
                    f"{rank}: build the same model on every rank"))
        if len(theirs) != len(forms[0]):
            raise tf.errors.InvalidArgumentError(None, None, (
                f"shoal: rank 0 broadcasts {len(forms[0])} variables and rank {rank} {len(theirs)}: build the same model on "
                "every rank"))
