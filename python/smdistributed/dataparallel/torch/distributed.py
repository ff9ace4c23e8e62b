"""The API before SMDDP 1.4, over torch.distributed with the back-end "smddp". Deprecated; new scripts import torch_smddp.

Calls accept the arguments of that time. Calls that SMDDP refused, for example with groups other than group.WORLD, may work
here.
"""
import os
import warnings

import torch.distributed as dist

from smdistributed.dataparallel import _environment
from smdistributed.dataparallel.exceptions import SMDDPError
from smdistributed.dataparallel.torch import torch_smddp  # noqa: F401  registers "smddp", completes the environment

warnings.warn("smdistributed.dataparallel.torch.distributed and .parallel are deprecated since 1.4.0: "
              "import smdistributed.dataparallel.torch.torch_smddp, call "
              "torch.distributed.init_process_group(backend=\"smddp\"), and use torch.distributed and "
              "torch.nn.parallel.DistributedDataParallel", FutureWarning, stacklevel=2)


class ReduceOp:
    AVERAGE = dist.ReduceOp.AVG
    SUM = dist.ReduceOp.SUM
    MIN = dist.ReduceOp.MIN
    MAX = dist.ReduceOp.MAX


class group:
    WORLD = None  # torch.distributed interprets it as all ranks


def is_available():
    """Returns true if this process is a rank of a job. A script can check it to run alone, without the library."""
    return dist.is_available() and _environment.started_as_job()


def init_process_group(*args, **kwargs):
    """Joins the job. Call it first. Its arguments are ignored, because the launcher's variables contain this process's rank."""
    if not is_available():
        raise SMDDPError("this process is not a rank of a job: RANK and WORLD_SIZE are not set; start it with "
                         "`shoal run -n 2 python3 ...`, torchrun or mpirun")
    dist.init_process_group("smddp")


def is_initialized():
    return dist.is_initialized()


def get_world_size(group=group.WORLD):
    return dist.get_world_size(group)


def get_rank(group=group.WORLD):
    """Returns the rank in the group, not on the host."""
    return dist.get_rank(group)


def get_local_rank():
    """Returns the rank on this host."""
    if "SMDATAPARALLEL_LOCAL_RANK" not in os.environ:
        raise SMDDPError("the launcher does not set which rank of its host this is; set LOCAL_RANK on each")
    return int(os.environ["SMDATAPARALLEL_LOCAL_RANK"])


def all_reduce(tensor, op=ReduceOp.SUM, group=group.WORLD, async_op=False):
    """Reduces the tensor in place, with the same bits on all ranks. Returns a handle to wait() on with async_op, else None; so
    do all functions below."""
    return dist.all_reduce(tensor, op, group, async_op)


def reduce(tensor, dst=0, op=ReduceOp.SUM, group=group.WORLD, async_op=False):
    return dist.reduce(tensor, dst, op, group, async_op)


def broadcast(tensor, src=0, group=group.WORLD, async_op=False):
    return dist.broadcast(tensor, src, group, async_op)


def all_gather(tensor_list, tensor, group=group.WORLD, async_op=False):
    return dist.all_gather(tensor_list, tensor, group, async_op)


def all_to_all_single(output_t, input_t, output_split_sizes=None, input_split_sizes=None, group=group.WORLD, async_op=False):
    return dist.all_to_all_single(output_t, input_t, output_split_sizes, input_split_sizes, group, async_op)


def barrier(group=group.WORLD, async_op=False):
    return dist.barrier(group, async_op)
