"""The job to which this process belongs, and its process sets: communicators of shoal.tensorflow."""
from __future__ import annotations

import tensorflow as tf

from shoal.tensorflow import _world as worlds
from shoal.tensorflow.variables import allgather_object

from .._common import job
from .._common.errors import HorovodInternalError
from .._common.job import (  # noqa: F401
    NOT_INITIALIZED, ccl_built, cuda_built, ddl_built, gloo_built, gloo_enabled, mpi_built, mpi_enabled, nccl_built, rocm_built,
    start_timeline, stop_timeline)

_sets = {}  # process sets in use, by id, which is the number of their communicator
_whole = 0  # the number of the communicator of all ranks; another one if init_over() has chosen one
_is_over = False  # init_over() has begun the job


class ProcessSet(job.ProcessSet):
    @staticmethod
    def _own_rank():
        return rank()


global_process_set = ProcessSet([])


def init(comm=None, process_sets=None):
    """Joins the job for which the launcher started this process, or a job of one rank without a launcher. A second call does
    nothing. comm: None, or all ranks. process_sets: a list of sets to add."""
    if is_initialized():
        return
    if not worlds.is_initialized():
        job.adopt_launcher()
        worlds.init()
    job.check_all_ranks(comm, worlds.size())
    global_process_set.ranks, global_process_set.process_set_id = list(range(worlds.size())), 0
    _sets[0] = global_process_set
    for each in process_sets if isinstance(process_sets, (list, tuple)) else ():
        add_process_set(each)


def init_over(world):
    """Begins like init(), for a job whose ranks are those of one communicator of shoal.tensorflow: each of its groups of replicas
    calls it. world: its number. Process sets cannot be added then."""
    global _whole, _is_over
    if is_initialized() and not _is_over:
        raise RuntimeError("shoal: hvd.init() was called before: leave it out, because the model-parallel library begins Horovod's job")
    _sets.clear()
    _whole, _is_over = world, True
    global_process_set.ranks, global_process_set.process_set_id = list(range(size_of_whole())), world
    _sets[world] = global_process_set


def size_of_whole():
    return worlds.size_of(_whole)


def shutdown():
    """Leaves the job. All ranks call it. init() may be called again."""
    if is_initialized():
        worlds.shutdown()


def _forget():
    global _whole, _is_over
    _whole, _is_over = 0, False
    for each in _sets.values():
        each._invalidate()
    _sets.clear()


worlds.on_shutdown(_forget)


def is_initialized():
    return bool(_sets)


def add_process_set(process_set):
    """Adds a process set, or a list of ranks. All ranks of the job call it with the same set. Returns the set, which now has an
    id."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if _is_over:
        raise NotImplementedError("shoal: process sets together with partitions of a model are not served: leave them out")
    job.check_new(process_set, _sets, size())
    _agree(f"add the process set {process_set.ranks}")
    number = worlds.add_world(process_set.ranks)
    process_set.process_set_id, _sets[number] = number, process_set
    return process_set


def remove_process_set(process_set):
    """Removes a process set. All ranks of the job call it. Returns true if the set existed."""
    _check()
    number = process_set.process_set_id
    if process_set is global_process_set or _sets.get(number) is not process_set:
        return False
    _agree(f"remove the process set {number}")
    worlds.remove_world(number)
    del _sets[number]
    process_set._invalidate()
    return True


def _agree(what):
    for other, theirs in enumerate(allgather_object(what)):
        if theirs != what:
            raise HorovodInternalError(f"shoal: rank {rank()} wants to {what}, and rank {other} to {theirs}: all ranks add and remove "
                                       "the same process sets in the same order")


def _check():
    if not is_initialized():
        raise ValueError(NOT_INITIALIZED)


def world_of(process_set):
    """Returns the number of the set's communicator, which contains this rank."""
    _check()
    job.check_member(process_set, _sets, rank(), lambda text: tf.errors.InvalidArgumentError(None, None, text))
    return process_set.process_set_id


def rank():
    _check()
    return worlds.rank_of(_whole)


def size():
    _check()
    return size_of_whole()


def local_rank():
    """Returns this process's rank on its host."""
    _check()
    return worlds.local_rank()


def local_size():
    _check()
    return worlds.local_size()


def cross_rank():
    """Returns the index of this process's host."""
    _check()
    return worlds.cross_rank()


def cross_size():
    """Returns the number of hosts of the job."""
    _check()
    return worlds.cross_size()


def is_homogeneous():
    """Returns true if all hosts have the same number of ranks. All ranks call it, eagerly."""
    return len(set(allgather_object(local_size()))) == 1


def mpi_threads_supported():
    _check()
    return False


# ---- These values as tensors ----


def rank_op(name=None):
    return tf.constant(rank(), name=name)


def size_op(process_set_id=0, name=None):
    _check()
    process_set_id = process_set_id or _whole
    if process_set_id not in _sets:
        raise ValueError(f"shoal: there is no process set {process_set_id}")
    return tf.constant(_sets[process_set_id].size(), name=name)


def local_rank_op(name=None):
    return tf.constant(local_rank(), name=name)


def local_size_op(name=None):
    return tf.constant(local_size(), name=name)


def process_set_included_op(process_set_id=0, name=None):
    """Returns 1 if this process is in the set, else 0."""
    _check()
    process_set_id = process_set_id or _whole
    if process_set_id not in _sets:
        raise ValueError(f"shoal: there is no process set {process_set_id}")
    return tf.constant(int(_sets[process_set_id].included()), name=name)
