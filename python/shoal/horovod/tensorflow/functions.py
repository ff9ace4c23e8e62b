"""Copies the state of one rank to all ranks."""
from __future__ import annotations

import functools

import tensorflow as tf

from shoal.tensorflow import variables as shoal_variables

from ._operations import allgather, broadcast, broadcast_
from ._world import global_process_set, rank


def broadcast_variables(variables, root_rank, process_set=global_process_set, inplace=False):
    """Sets each variable to root_rank's value. Variables are matched by their index in the list. In a graph it returns the
    tensors that assign."""
    if process_set is not global_process_set or not tf.executing_eagerly() or process_set.process_set_id:
        return broadcast_(variables, root_rank, process_set=process_set)
    rank()  # raises before init()
    return shoal_variables.broadcast_variables(variables, root_rank)


def broadcast_global_variables(root_rank):
    """Broadcasts all variables of a graph. Raises an error eagerly, because TensorFlow 2 has no list of all variables."""
    if tf.executing_eagerly():
        raise RuntimeError("hvd.broadcast_global_variables() does not support eager execution. Please use "
                           "`hvd.broadcast_variables(<model/optimizer variables>)` instead.")
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


def broadcast_object(obj, root_rank=0, session=None, name=None, process_set=global_process_set):
    """Returns root_rank's object on every rank, through pickle: ranks of a job trust each other. Eager only."""
    return shoal_variables.share_object(obj, rank() == root_rank,
                                        functools.partial(broadcast, root_rank=root_rank, process_set=process_set))


def broadcast_object_fn(root_rank=0, session=None, name=None, process_set=global_process_set):
    """Returns a function that broadcasts its argument, an object."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(obj, session=None, name=None, process_set=global_process_set):
    """Returns a list of the objects of all ranks. Eager only."""
    return shoal_variables.gather_objects(obj, functools.partial(allgather, process_set=process_set))
