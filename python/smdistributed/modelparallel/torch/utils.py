"""Functions that scripts import."""
from smdistributed.modelparallel.torch import _tensor
from smdistributed.modelparallel.torch._state import pp_rank, rank


def get_distribution_axis(parameter):
    """Returns the dimension along which tensor parallelism has divided a parameter, or None."""
    part = _tensor.part_of(parameter)
    return None if part is None else part.dim


def rmsg(text):
    """Returns a message that begins with this rank."""
    return f"[{rank()}, pp_rank {pp_rank()}] {text}"
