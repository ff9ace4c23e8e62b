"""The job to which this process belongs, and its process sets."""
from __future__ import annotations

import os
import socket

import torch.distributed as dist

import shoal.torch  # registers the back-end

from .._common import job
from .._common.controller import Controller
from .._common.job import (  # noqa: F401
    NOT_INITIALIZED, ccl_built, cuda_built, ddl_built, gloo_built, gloo_enabled, mpi_built, mpi_enabled, nccl_built, rocm_built,
    start_timeline, stop_timeline)

_sets = {}  # process sets in use, by id
_controllers, _groups = {}, {}  # of the sets that contain this rank, by id
_next_id = 1
_place = None  # (local rank, local size, cross rank, cross size, is homogeneous), after init()


class ProcessSet(job.ProcessSet):
    @staticmethod
    def _own_rank():
        return rank()


global_process_set = ProcessSet([])


def init(comm=None, process_sets=None):
    """Joins the job for which the launcher started this process, or a job of one rank without a launcher. A second call does
    nothing. comm: None, or all ranks. process_sets: a list of sets to add."""
    global _place, _next_id
    if _place is not None:
        return
    if process_sets == "dynamic":
        process_sets = None
    if not dist.is_initialized():
        _begin()
    job.check_all_ranks(comm, dist.get_world_size())
    _place = _find_place()
    _next_id = 1
    global_process_set.ranks = list(range(dist.get_world_size()))
    _start(global_process_set, 0)
    for each in process_sets or ():
        add_process_set(each)


def _begin():
    job.adopt_launcher()
    dist.init_process_group("shoal")


def _find_place():
    """Computes _place. All ranks call it."""
    host = os.environ.get("SHOAL_HOST_ID") or socket.gethostname()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    own = dist.get_rank()
    local_ranks = [hosts[:rank].count(each) for rank, each in enumerate(hosts)]
    alike = [rank for rank, local in enumerate(local_ranks) if local == local_ranks[own]]
    counts = {hosts.count(each) for each in hosts}
    return local_ranks[own], hosts.count(host), alike.index(own), len(alike), len(counts) == 1


def _start(process_set, number):
    """Makes a set's group. All ranks of the job call it."""
    from ._executor import Executor
    process_set.process_set_id, _sets[number] = number, process_set
    group = dist.new_group(process_set.ranks)
    if dist.get_rank() in process_set.ranks:
        _groups[number] = group
        executor = Executor(group, process_set.ranks)
        _controllers[number] = Controller(process_set.ranks.index(dist.get_rank()), len(process_set.ranks), executor)


def shutdown():
    """Leaves the job. All ranks call it. init() may be called again."""
    global _place
    if _place is None:
        return
    _stop(sorted(_sets, reverse=True))
    _place = None


def _stop(numbers):
    """Ends these sets; their ranks call it. It posts the end in all sets before it waits in one of them, because the rank for
    which it waits may itself wait in another set for a request that this rank no longer posts."""
    controllers = [_controllers.pop(number) for number in numbers if number in _controllers]
    for controller in controllers:
        controller.post_end()
    for controller in controllers:
        controller.end()
    for number in numbers:
        if number in _groups:
            dist.destroy_process_group(_groups.pop(number))
        _sets.pop(number)._invalidate()


def add_process_set(process_set):
    """Adds a process set, or a list of ranks. All ranks of the job call it with the same set. Returns the set, which now has an
    id."""
    global _next_id
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _check()
    job.check_new(process_set, _sets, size())
    _meet(f"add {process_set.ranks}")
    _start(process_set, _next_id)
    _next_id += 1
    return process_set


def remove_process_set(process_set):
    """Removes a process set. All ranks of the job call it. Returns true if the set existed."""
    _check()
    if process_set is global_process_set or _sets.get(process_set.process_set_id) is not process_set:
        return False
    _meet(f"remove {process_set.process_set_id}")
    _stop([process_set.process_set_id])
    return True


def _meet(what):
    """Waits until all ranks of the job do the same."""
    from .._common.controller import BARRIER, Request
    controller = _controllers[0]
    controller.post(Request(BARRIER, controller.name_of(BARRIER, None), must_agree=[what])).wait()


def _check():
    if _place is None:
        raise ValueError(NOT_INITIALIZED)


def controller_of(process_set):
    _check()
    job.check_member(process_set, _sets, rank())
    return _controllers[process_set.process_set_id]


def is_moved_by_shoal(process_set):
    """Returns true if Shoal moves the tensors of a set that contains this rank, instead of another back-end that the program
    chose."""
    return shoal.torch._serves_cpu(_groups[process_set.process_set_id])


def is_initialized():
    return _place is not None


def rank():
    _check()
    return dist.get_rank()


def size():
    _check()
    return dist.get_world_size()


def local_rank():
    """Returns this process's rank on its host."""
    _check()
    return _place[0]


def local_size():
    _check()
    return _place[1]


def cross_rank():
    """Returns this process's index among the processes with the same local rank on all hosts."""
    _check()
    return _place[2]


def cross_size():
    _check()
    return _place[3]


def is_homogeneous():
    """Returns true if all hosts have the same number of ranks."""
    _check()
    return _place[4]


def mpi_threads_supported():
    _check()
    return False
