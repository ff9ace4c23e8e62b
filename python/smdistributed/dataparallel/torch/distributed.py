"""The API before SMDDP 1.4, over torch.distributed with the back-end "smddp". Deprecated; new scripts import torch_smddp.

Calls take what they took then. What that library refused (other groups than group.WORLD, for one) torch.distributed may do.
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
    WORLD = None  # which torch.distributed takes for all ranks


def is_available():
    """Whether this process is a rank of a job, so that one script may also run alone, without the library."""
    return dist.is_available() and _environment.started_as_job()


def init_process_group(*args, **kwargs):
    """The first call. Its arguments are ignored: the launcher says who this rank is."""
    if not is_available():
        raise SMDDPError("this process is no rank of a job: RANK and WORLD_SIZE are not set; start it with "
                         "`shoal run -n 2 python3 ...`, torchrun or mpirun")
    dist.init_process_group("smddp")


def is_initialized():
    return dist.is_initialized()


def get_world_size(group=group.WORLD):
    return dist.get_world_size(group)


def get_rank(group=group.WORLD):
    """The rank among all of the group, not of the host."""
    return dist.get_rank(group)


def get_local_rank():
    """The rank among those of this host."""
    if "SMDATAPARALLEL_LOCAL_RANK" not in os.environ:
        raise SMDDPError("the launcher does not say which rank of its host this is; set LOCAL_RANK on each")
    return int(os.environ["SMDATAPARALLEL_LOCAL_RANK"])


def all_reduce(tensor, op=ReduceOp.SUM, group=group.WORLD, async_op=False):
    """In place; the same bits on all ranks. A handle to wait() on if async_op, else None; so do all below."""
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
