"""The job that this process is a rank of, and its process sets."""
from __future__ import annotations

import os
import socket

import torch.distributed as dist

import shoal.torch  # noqa: F401  registers the back-end

from .._common.controller import Controller

# What Horovod's launcher, and Open MPI's, tell a rank.
_VARIABLES = (("RANK", ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")), ("WORLD_SIZE", ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")),
              ("LOCAL_RANK", ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")))
NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

_sets = {}  # process sets in use, by id
_controllers, _groups = {}, {}  # of those that this rank is in, by id
_next_id = 1
_place = None  # (local rank, local size, cross rank, cross size, whether hosts have as many ranks), after init()


class ProcessSet:
    """Some ranks of the job, which call operations by themselves. Give it to init() or to add_process_set()."""

    process_set_id = None
    ranks = None

    def __init__(self, ranks):
        try:
            ranks = sorted(ranks)
        except TypeError:
            ranks = [None]
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks")
        self.ranks = ranks

    def _invalidate(self):
        self.process_set_id = None

    def size(self):
        """How many ranks it has; None before it is added, as below."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self):
        """Of this process in the set; operations take ranks of the job all the same."""
        if self.process_set_id is None:
            return None
        if rank() not in self.ranks:
            raise ValueError(f"shoal: rank {rank()} is not in process set {self.process_set_id}, of ranks {self.ranks}")
        return self.ranks.index(rank())

    def included(self):
        """Whether this process is in it."""
        return None if self.ranks is None else rank() in self.ranks

    def __str__(self):
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set = ProcessSet([])


def init(comm=None, process_sets=None):
    """Joins the job that the launcher started this process for; alone, where none did. Again it does nothing. comm: None, or all
    ranks; process_sets: a list of sets to add."""
    global _place, _next_id
    if _place is not None:
        return
    if process_sets == "dynamic":
        process_sets = None
    if not dist.is_initialized():
        _begin()
    if comm is not None and sorted(comm) != list(range(dist.get_world_size())):
        raise ValueError(f"shoal: init(comm={comm}) names some ranks only: give process_sets=[hvd.ProcessSet({comm})] instead")
    _place = _find_place()
    _next_id = 1
    global_process_set.ranks = list(range(dist.get_world_size()))
    _start(global_process_set, 0)
    for each in process_sets or ():
        add_process_set(each)


def _begin():
    for name, others in _VARIABLES:
        for other in others:
            if name not in os.environ and other in os.environ:
                os.environ[name] = os.environ[other]
    dist.init_process_group("shoal")


def _find_place():
    """All ranks."""
    host = os.environ.get("SHOAL_HOST_ID") or socket.gethostname()
    hosts = [None] * dist.get_world_size()
    dist.all_gather_object(hosts, host)
    own = dist.get_rank()
    local_ranks = [hosts[:rank].count(each) for rank, each in enumerate(hosts)]
    alike = [rank for rank, local in enumerate(local_ranks) if local == local_ranks[own]]
    counts = {hosts.count(each) for each in hosts}
    return local_ranks[own], hosts.count(host), alike.index(own), len(alike), len(counts) == 1


def _start(process_set, number):
    """All ranks of the job."""
    from ._executor import Executor
    process_set.process_set_id, _sets[number] = number, process_set
    group = dist.new_group(process_set.ranks)
    if dist.get_rank() in process_set.ranks:
        _groups[number] = group
        executor = Executor(group, process_set.ranks)
        _controllers[number] = Controller(process_set.ranks.index(dist.get_rank()), len(process_set.ranks), executor)


def shutdown():
    """Ends it on all ranks, which all call this. init() may be called again."""
    global _place
    if _place is None:
        return
    for number in sorted(_sets, reverse=True):
        _stop(number)
    _place = None


def _stop(number):
    """The ranks of the set."""
    process_set = _sets.pop(number)
    controller, group = _controllers.pop(number, None), _groups.pop(number, None)
    if controller:
        controller.end()
        dist.destroy_process_group(group)
    process_set._invalidate()


def add_process_set(process_set):
    """All ranks of the job, with the same set. Returns it; it has an id then. A list of ranks will do."""
    global _next_id
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _check()
    if process_set.process_set_id is not None and process_set.process_set_id in _sets:
        raise ValueError(f"A process set can only be added once: {process_set}")
    if any(process_set.ranks == each.ranks for each in _sets.values()):
        raise ValueError(f"A process set with the same ranks already exists: {process_set.ranks}")
    if not process_set.ranks or process_set.ranks[0] < 0 or process_set.ranks[-1] >= size() \
            or len(set(process_set.ranks)) < len(process_set.ranks):
        raise ValueError(f"shoal: a process set must name different ranks of 0 to {size() - 1}: {process_set.ranks}")
    _meet(f"add {process_set.ranks}")
    _start(process_set, _next_id)
    _next_id += 1
    return process_set


def remove_process_set(process_set):
    """All ranks of the job. Returns whether there was such a set."""
    _check()
    if process_set is global_process_set or _sets.get(process_set.process_set_id) is not process_set:
        return False
    _meet(f"remove {process_set.process_set_id}")
    _stop(process_set.process_set_id)
    return True


def _meet(what):
    """A wait for all ranks of the job that do the same."""
    from .._common.controller import BARRIER, Request
    controller = _controllers[0]
    controller.post(Request(BARRIER, controller.name_of(BARRIER, None), must_agree=[what])).wait()


def _check():
    if _place is None:
        raise ValueError(NOT_INITIALIZED)


def controller_of(process_set):
    _check()
    number = process_set.process_set_id
    if _sets.get(number) is None:
        raise ValueError(f"shoal: {process_set} is not registered: give it to hvd.init() or hvd.add_process_set() first")
    if number not in _controllers:
        raise ValueError(f"shoal: rank {rank()} is not in process set {number}, of ranks {process_set.ranks}")
    return _controllers[number]


def is_initialized():
    return _place is not None


def rank():
    _check()
    return dist.get_rank()


def size():
    _check()
    return dist.get_world_size()


def local_rank():
    """Of this process among those of its host."""
    _check()
    return _place[0]


def local_size():
    _check()
    return _place[1]


def cross_rank():
    """Of this process among those of other hosts that have its local rank."""
    _check()
    return _place[2]


def cross_size():
    _check()
    return _place[3]


def is_homogeneous():
    """Whether all hosts have as many ranks."""
    _check()
    return _place[4]


def gloo_enabled():
    return False


def mpi_enabled():
    return False


def mpi_built():
    return False


def gloo_built():
    return False


def nccl_built():
    """As a number, of a version; so Horovod has it."""
    return 0


def ddl_built():
    return False


def ccl_built():
    return False


def cuda_built():
    return False


def rocm_built():
    return False


def mpi_threads_supported():
    _check()
    return False


def start_timeline(file_name, mark_cycles=False):
    raise NotImplementedError("shoal: there is no timeline of Horovod's: SHOAL_TRACE and `shoal trace` show the operations")


def stop_timeline():
    start_timeline(None)


