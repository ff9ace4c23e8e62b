"""The state of rank 0, or of another rank, on every rank."""
from __future__ import annotations

import pickle

import tensorflow as tf

from . import _collectives, _gradients, _operations, _world


def broadcast_variables(variables, root_rank: int = 0) -> None:
    """Gives each variable root_rank's value. They are matched by their place in the list; where shapes or types differ, every
    rank raises what names the first one that does. Inside tf.function too, where they are not compared before."""
    _collectives._check_root(root_rank)
    variables = list(variables)
    if tf.executing_eagerly():
        _compare(variables)
    assign_broadcasts(variables, root_rank)


def assign_broadcasts(variables, root_rank: int, name: str | None = "shoal_broadcast_variables", world: int = 0) -> list:
    """What assigns root_rank's value to each variable. Types go one after the other: graphs of TensorFlow 1 order nothing by
    themselves."""
    values, received, assigned = [tf.convert_to_tensor(variable) for variable in variables], [], list(variables)
    for indices in _collectives._by_type(values):
        with tf.control_dependencies(received):
            received = _operations.broadcast([values[i] for i in indices], root_rank, name, world)
        for i, value in zip(indices, received):
            assigned[i] = variables[i].assign(value)
    return assigned


def broadcast_object(value, root_rank: int = 0):
    """root_rank's value on every rank, through pickle. Eagerly only."""
    return allgather_object(value if _world.rank() == root_rank else None)[root_rank]


def allgather_object(value):
    """A list of the values of all ranks, through pickle. Eagerly only."""
    blob = tf.constant(list(pickle.dumps(value)), tf.uint8)
    lengths = _operations.stack(tf.size(blob, tf.int64), _world.size())
    blobs = tf.split(_operations.allgather_rows(blob, lengths), lengths)
    return [pickle.loads(bytes(one.numpy())) for one in blobs]


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
