"""Which parameters of a model are parts, because tensor parallelism has divided their modules (tensor.py), and the norm of gradients
of which some are those of parts. This module needs nothing of torch.distributed.tensor."""
from __future__ import annotations

import math

import torch
import torch.distributed as dist

KEY = "_shoal"  # the attribute by which a divided module has its Divided (_tensor_layers.py)


def parts_of(model):
    """Returns the Part of each parameter of which a rank has a part, by its id, and the team, or None if no module is divided."""
    found, team = {}, None
    for module in model.modules():
        divided = getattr(module, KEY, None)
        if divided is not None:
            team = divided.team
            found.update({id(module.get_parameter(name)): part for name, part in divided.parts.items()})
    return found, team


def refuse_max_norm(model, max_norm):
    """The norm that an optimizer in the reduction clips by is that of the ranks with the same part."""
    if max_norm is not None and parts_of(model)[1] is not None:
        raise NotImplementedError("shoal: max_norm is not served for a model of tensor parallelism, whose norm is that of all parts: leave it "
                                  "out, or use DistributedDataParallel without optimizer= and shoal.torch.tensor.clip_grad_norm_()")


def power(parameters, norm_type, parts, team):
    """Returns the sum of the powers of all elements of gradients, or the largest one with an infinite norm_type, as a float64
    scalar. Gradients of parts are summed over the team, others counted once. All its ranks call it. parts, team: as parts_of() has
    returned them."""
    same = _power([each.grad for each in parameters if id(each) not in parts], norm_type)
    if team is None:
        return same
    own = _power([each.grad for each in parameters if id(each) in parts], norm_type)
    dist.all_reduce(own, dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=team.group)
    return torch.maximum(own, same) if norm_type == math.inf else own + same


def _power(gradients, norm_type):
    device = gradients[0].device if gradients else "cpu"
    norms = [torch.linalg.vector_norm(each.abs() if each.is_complex() else each, norm_type,
                                      dtype=torch.promote_types(each.abs().dtype, torch.float32)).double() for each in gradients]
    norm = torch.linalg.vector_norm(torch.stack([torch.zeros((), dtype=torch.float64, device=device), *norms]), norm_type)
    return norm if norm_type == math.inf else norm ** norm_type
