"""The job, through torch.distributed's default group, and operations that make values equal on all ranks."""
from __future__ import annotations

import torch
import torch.distributed as dist

import shoal.torch  # noqa: F401  registers the back-end


def init() -> None:
    """Makes torch.distributed's default group, with the back-end "shoal", if there is none yet."""
    if not dist.is_initialized():
        dist.init_process_group("shoal")


def _check():
    if not dist.is_initialized():
        raise RuntimeError("shoal.torch.keras is not initialized: call init(), or torch.distributed.init_process_group(\"shoal\"), first")


def rank() -> int:
    """Returns this process's rank in the default group."""
    _check()
    return dist.get_rank()


def size() -> int:
    """Returns the number of ranks in the default group."""
    _check()
    return dist.get_world_size()


def allgather_object(value) -> list:
    """Returns the values of all ranks, by rank. A value is any object that pickle can store."""
    every = [None] * size()
    dist.all_gather_object(every, value)
    return every


def mean(numbers) -> list:
    """Returns the mean of each number over all ranks."""
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return (sums / size()).tolist()


@torch.no_grad()
def broadcast_variables(variables, root_rank: int = 0) -> None:
    """Sets each variable to root_rank's value. Variables are matched by their index in the list."""
    variables = list(variables)
    forms = allgather_object([(variable.path, f"{variable.dtype} {tuple(variable.shape)}") for variable in variables])
    for other, theirs in enumerate(forms):
        for i, (first, one) in enumerate(zip(forms[0], theirs)):
            if first[1] != one[1]:
                raise ValueError(f"shoal: variable {i} differs: {first[0]} of {first[1]} on rank 0, {one[0]} of {one[1]} on rank {other}: "
                                 "build the same model on every rank")
        if len(theirs) != len(forms[0]):
            raise ValueError(f"shoal: rank 0 broadcasts {len(forms[0])} variables and rank {other} {len(theirs)}: build the same model on "
                             "every rank")
    for variable in variables:
        value = variable.value.detach().clone()
        dist.broadcast(value, root_rank)
        variable.assign(value)
