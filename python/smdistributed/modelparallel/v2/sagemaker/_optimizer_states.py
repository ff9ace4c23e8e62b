"""torch's load_sharded_optimizer_state_dict with the vendor's argument process_group. Without it, PyTorch divides states among all ranks
of the job, and FSDP then refuses them if it divides among fewer. Scripts import the function before tsm.init, so it is replaced when
torch.sagemaker is imported."""
from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint import optimizer
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.fsdp._shard_utils import _create_chunk_sharded_tensor

_load = optimizer.load_sharded_optimizer_state_dict


@functools.wraps(_load)
def load_sharded_optimizer_state_dict(model_state_dict, optimizer_key, storage_reader, planner=None, process_group=None):
    if process_group is None:
        return _load(model_state_dict, optimizer_key, storage_reader, planner)
    metadata = storage_reader.read_metadata()
    states = {key: _empty(stored, process_group) for key, stored in metadata.state_dict_metadata.items()
              if metadata.planner_data[key][0] == optimizer_key}
    checkpoint.load(states, storage_reader=storage_reader, planner=planner, process_group=process_group)
    return unflatten_state_dict(states, metadata.planner_data)


def _empty(stored, group):
    """Returns an empty value to load a stored one into. Each rank of the group has a part of a tensor, or all of it if it has one
    element."""
    if isinstance(stored, BytesStorageMetadata):
        return "<bytes_io>"
    whole = torch.empty(stored.size, dtype=stored.properties.dtype)
    if stored.size.numel() == 1:
        return whole
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 1
    return _create_chunk_sharded_tensor(whole, dist.get_rank(group), dist.get_world_size(group), devices, group)


def install():
    """Replaces PyTorch's function in its modules."""
    optimizer.load_sharded_optimizer_state_dict = checkpoint.load_sharded_optimizer_state_dict = load_sharded_optimizer_state_dict
