"""What a front end knows of the job, for any framework: process sets, the launcher's variables, what was built in."""
from __future__ import annotations

import operator
import os

NOT_INITIALIZED = "Horovod has not been initialized; use hvd.init()."

# The variables that Horovod's launcher and Open MPI's set for a rank.
_VARIABLES = (("RANK", ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")), ("WORLD_SIZE", ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE")),
              ("LOCAL_RANK", ("HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")))


def adopt_launcher():
    """Sets the variables that Shoal reads, if another launcher has set only its own."""
    for name, others in _VARIABLES:
        for other in others:
            if name not in os.environ and other in os.environ:
                os.environ[name] = os.environ[other]


class ProcessSet:
    """Some ranks of the job, which call operations among themselves. Pass it to init() or add_process_set(). A front end's
    class defines this process's rank."""

    process_set_id = None
    ranks = None

    def __init__(self, ranks):
        try:
            self.ranks = sorted(map(operator.index, ranks))
        except TypeError:
            raise ValueError("ProcessSet should be initialized with a list of process ranks") from None

    @staticmethod
    def _own_rank():
        raise NotImplementedError

    def _invalidate(self):
        self.process_set_id = None

    def size(self):
        """The number of ranks; None before the set is added, like rank()."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self):
        """This process's rank in the set. Operations nevertheless use ranks of the job."""
        if self.process_set_id is None:
            return None
        own = self._own_rank()
        if own not in self.ranks:
            raise ValueError(f"shoal: rank {own} is not in process set {self.process_set_id}, of ranks {self.ranks}")
        return self.ranks.index(own)

    def included(self):
        """Returns true if this process is in the set."""
        return None if self.ranks is None else self._own_rank() in self.ranks

    def __str__(self):
        """Formats it like Horovod, whose sets may have an MPI communicator."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm=None)"


def check_new(process_set, sets, size):
    """Raises ValueError if the set cannot be added. sets: those in use, by id."""
    if process_set.process_set_id is not None and process_set.process_set_id in sets:
        raise ValueError(f"A process set can only be added once: {process_set}")
    if any(process_set.ranks == each.ranks for each in sets.values()):
        raise ValueError(f"A process set with the same ranks already exists: {process_set.ranks}")
    if not process_set.ranks or process_set.ranks[0] < 0 or process_set.ranks[-1] >= size \
            or len(set(process_set.ranks)) < len(process_set.ranks):
        raise ValueError(f"shoal: a process set must name different ranks of 0 to {size - 1}: {process_set.ranks}")


def check_member(process_set, sets, rank, error=ValueError):
    """Raises an error if operations of the set cannot be called: ValueError if it was not added, error(text) on a rank that is
    not in it."""
    number = process_set.process_set_id
    if sets.get(number) is not process_set:
        raise ValueError(f"shoal: {process_set} is not registered: pass it to hvd.init() or hvd.add_process_set() first")
    if rank not in process_set.ranks:
        raise error(f"shoal: rank {rank} is not in process set {number}, of ranks {process_set.ranks}")


def check_all_ranks(comm, size):
    """Checks the argument of init(comm=...): None, or all ranks."""
    if comm is not None and sorted(comm) != list(range(size)):
        raise ValueError(f"shoal: init(comm={comm}) names only some ranks: pass process_sets=[hvd.ProcessSet({comm})] instead")


# ---- What scripts ask before they choose a back-end ----


def _absent():
    return False


gloo_enabled = mpi_enabled = mpi_built = gloo_built = ddl_built = ccl_built = cuda_built = rocm_built = _absent


def nccl_built():
    """A version number, as in Horovod."""
    return 0


def start_timeline(file_name, mark_cycles=False):
    raise NotImplementedError("shoal: Horovod's timeline is not there: SHOAL_TRACE_FILE and `shoal trace` show the operations")


def stop_timeline():
    start_timeline(None)
