"""Saves state dicts over torch.distributed.checkpoint."""
from __future__ import annotations

import torch.distributed as dist
from torch.distributed import checkpoint

from smdistributed.modelparallel.exceptions import SMPConfigError
from torch.sagemaker.distributed.checkpoint.async_utils import AsyncCallsQueue
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemWriter, failures_named

DEFAULT_ASYNC_REQUEST_QUEUE = AsyncCallsQueue()
_groups = {}  # groups in which threads save, by their ranks


class PyTorchDistSaveShardedStrategy:
    """The only strategy: torch.distributed.checkpoint."""


def save(state_dict, *, checkpoint_id=None, storage_writer=None, planner=None, process_group=None, coordinator_rank=0, **options):
    """Saves a state dict. All ranks of process_group call it. checkpoint_id: a folder; storage_writer: in its place, a writer of
    torch.distributed.checkpoint. coordinator_rank and further options of the vendor's library are accepted and have no effect."""
    with failures_named("a save"):
        checkpoint.save(state_dict, storage_writer=_writer(checkpoint_id, storage_writer), planner=planner, process_group=process_group)


def async_save(state_dict, *, checkpoint_id=None, storage_writer=None, planner=None, process_group=None, coordinator_rank=0, queue=None,
               **options):
    """Copies a state dict, and saves the copy on a thread during training. See save for the arguments. queue: an
    AsyncCallsQueue, by default that of maybe_finalize_async_calls."""
    future = checkpoint.async_save(state_dict, storage_writer=_writer(checkpoint_id, storage_writer), planner=planner,
                                   process_group=_group_of_thread(process_group))
    (DEFAULT_ASYNC_REQUEST_QUEUE if queue is None else queue).schedule(future)


def maybe_finalize_async_calls(blocking=True, process_group=None):
    """Returns the indices of the saves without a queue that have ended. Raises the error of one that failed. blocking: waits for
    all."""
    return DEFAULT_ASYNC_REQUEST_QUEUE.maybe_finalize_async_calls(blocking, process_group)


def _writer(checkpoint_id, storage_writer):
    if storage_writer is None and checkpoint_id is None:
        raise SMPConfigError("torch.sagemaker.distributed.checkpoint: pass checkpoint_id, a folder, or a storage_writer")
    return storage_writer or DistributedFileSystemWriter(checkpoint_id)


def _group_of_thread(process_group):
    """Returns a group of the same ranks, so that a thread's operations do not mix with those of training."""
    ranks = tuple(dist.get_process_group_ranks(process_group))
    former, made = _groups.get(ranks, (None, None))
    if former is not dist.group.WORLD:  # a new job of this process
        made = dist.new_group(list(ranks), use_local_synchronization=True)
        _groups[ranks] = dist.group.WORLD, made
    return made
