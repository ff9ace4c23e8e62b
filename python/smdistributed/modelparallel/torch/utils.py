"""Functions that scripts import."""
from smdistributed.modelparallel.torch._state import pp_rank, rank


def get_distribution_axis(parameter):
    """Returns None: no parameter is divided by tensor parallelism."""
    return None


def rmsg(text):
    """Returns a message that begins with this rank."""
    return f"[{rank()}, pp_rank {pp_rank()}] {text}"
