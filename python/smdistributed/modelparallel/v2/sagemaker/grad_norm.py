"""The norm of gradients that ranks have divided among themselves."""
from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from torch.sagemaker import _tensor
from torch.sagemaker.state_handler import state


@torch.no_grad()
def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Scales the gradients of a model so that their norm is at most max_norm. Returns the norm before. All ranks call it.

    model: FSDP, a module in which an FSDP is (as offload_wrapper makes one), a module after fully_shard, or one that is not divided.
    Each parameter counts once, on whichever ranks it is."""
    outer = next((module for module in model.modules() if isinstance(module, FullyShardedDataParallel)), None)
    if state.tensor_parallel_degree == 1:
        if outer is not None:
            return outer.clip_grad_norm_(max_norm, norm_type)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm
    norm = _norm(model, outer, float(norm_type))
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(scale.to(parameter.grad.dtype))
    return norm


def _norm(model, outer, norm_type):
    """Returns the norm with tensor parallelism: divided parameters count on each tensor-parallel rank, whole ones on the first."""
    divided = {id(parameter) for parameter in _tensor.divided_parameters(model)}
    gradients = [parameter.grad for parameter in model.parameters()
                 if parameter.grad is not None and (id(parameter) in divided or state.tp_rank == 0)]
    norms = [torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float32) for gradient in gradients if gradient.numel()]
    device = next(model.parameters()).device
    local = torch.linalg.vector_norm(torch.stack(norms), norm_type) if norms else torch.zeros((), device=device)
    is_max = math.isinf(norm_type)
    total = local if is_max else local ** norm_type
    shards = outer.process_group if outer is not None and outer.sharding_strategy.name != "NO_SHARD" else None
    for group in (shards, state.tp_process_group):
        if group is not None:
            dist.all_reduce(total, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group)
    return total if is_max else total ** (1.0 / norm_type)
