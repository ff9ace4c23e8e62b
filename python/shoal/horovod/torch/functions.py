"""Copies parameters, optimizer state and objects of one rank to all ranks."""
from __future__ import annotations

import io
import pickle

import torch

from ._operations import allgather, broadcast_, broadcast_async_, synchronize
from ._world import global_process_set, rank


def broadcast_parameters(params, root_rank):
    """Copies root_rank's values into the tensors of all ranks: a state_dict, or a list of tensors or of (name, tensor)."""
    if isinstance(params, dict):
        params = sorted(params.items())
    elif isinstance(params, list):
        params = [each if isinstance(each, tuple) else (None, each) for each in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}")
    handles = [(broadcast_async_(tensor, root_rank, name and f"parameters.{name}"), None, None)
               if tensor.is_contiguous() else _broadcast_copy(tensor, root_rank, name)
               for name, tensor in params if isinstance(tensor, torch.Tensor)]
    for handle, tensor, copy in handles:
        synchronize(handle)
        if tensor is not None:
            with torch.no_grad():
                tensor.copy_(copy)


def _broadcast_copy(tensor, root_rank, name):
    copy = tensor.detach().contiguous()
    return broadcast_async_(copy, root_rank, name and f"parameters.{name}"), tensor, copy


def broadcast_optimizer_state(optimizer, root_rank, model=None):
    """Copies root_rank's state and options into the optimizers of all ranks, whose own state need not exist yet."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state")
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank, "optimizer")
    if rank() != root_rank:
        base = getattr(optimizer, "_shoal_base", type(optimizer))
        base.load_state_dict(optimizer, state)


def _dump(value):
    stream = io.BytesIO()
    try:
        import cloudpickle
        cloudpickle.dump(value, stream)
    except ImportError:  # functions and classes of the script itself then cannot be sent
        pickle.dump(value, stream)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def broadcast_object(obj, root_rank=0, name=None, process_set=global_process_set):
    """Returns root_rank's object on every rank, through pickle: ranks of a job trust each other."""
    name = f"object.{name}" if name else None
    data = _dump(obj) if rank() == root_rank else None
    length = torch.tensor([data.numel() if data is not None else 0])
    broadcast_(length, root_rank, name and f"{name}.sz", process_set)
    if data is None:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, name and f"{name}.t", process_set)
    return obj if rank() == root_rank else pickle.loads(data.numpy().tobytes())


def allgather_object(obj, name=None, process_set=global_process_set):
    """Returns a list of the objects of all ranks."""
    data = _dump(obj)
    name = f"object.{name}" if name else None
    lengths = allgather(torch.tensor([data.numel()]), name and f"{name}.sz", process_set).tolist()
    parts = allgather(data, name and f"{name}.t", process_set).split(lengths)
    return [pickle.loads(part.numpy().tobytes()) for part in parts]


