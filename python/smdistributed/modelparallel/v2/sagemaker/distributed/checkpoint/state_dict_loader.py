"""Loads state dicts over torch.distributed.checkpoint."""
from __future__ import annotations

from torch.distributed import checkpoint

from smdistributed.modelparallel.exceptions import SMPConfigError
from torch.sagemaker.distributed.checkpoint.filesystem import DistributedFileSystemReader, failures_named


def load(state_dict, *, checkpoint_id=None, storage_reader=None, planner=None, process_group=None, check_keys_matched=True,
         coordinator_rank=0, **options):
    """Loads a checkpoint into the tensors of a state dict, in place. All ranks of process_group call it; their number may differ from
    that of the ranks that saved. checkpoint_id: a folder; storage_reader: in its place, a reader of torch.distributed.checkpoint.
    check_keys_matched, coordinator_rank and further options of the vendor's library have no effect."""
    if storage_reader is None and checkpoint_id is None:
        raise SMPConfigError("torch.sagemaker.distributed.checkpoint: pass checkpoint_id, a folder, or a storage_reader")
    with failures_named("loading"):
        checkpoint.load(state_dict, storage_reader=storage_reader or DistributedFileSystemReader(checkpoint_id), planner=planner,
                        process_group=process_group)
