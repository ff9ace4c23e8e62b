"""The part of a model that a rank keeps. It gets values if it is on the device meta; everything else is moved there."""
from __future__ import annotations

import torch
from torch import nn


class StageParts(nn.Module):
    """What a rank's stages have of a model, under the model's names. Its forward pass is the pipeline's."""


def refuse_stages(module, wrapper):
    """A wrapper that acts in its own forward pass has none in a pipeline."""
    if isinstance(module, StageParts):
        raise NotImplementedError(f"shoal: {wrapper} of the stages of a pipeline never runs their forward pass: average gradients with "
                                  "Pipeline(replicas=), and shard states with torch.distributed.optim.ZeroRedundancyOptimizer over the "
                                  "group of replicas")


def keep(model, own, init):
    """own: a module with the parameters and buffers that the rank keeps. Those on the device meta get values: by init(owner), a
    function that sets what a module owns itself, or by its reset_parameters()."""
    kept = {id(each) for each in (*own.parameters(), *own.buffers())}
    replaced = {}
    with torch.no_grad():
        for name, owner in model.named_modules():
            tensors = [*owner._parameters.items(), *owner._buffers.items()]
            is_new = False
            for key, tensor in tensors:
                if tensor is None or tensor.is_meta == (id(tensor) not in kept):
                    continue
                is_new |= tensor.is_meta and id(tensor) not in replaced
                if id(tensor) not in replaced:
                    replaced[id(tensor)] = _on(tensor, "cpu" if tensor.is_meta else "meta")
                setattr(owner, key, replaced[id(tensor)])
            if is_new:
                _initialize(name, owner, init)


def _on(tensor, device):
    moved = torch.empty_like(tensor, device=device, requires_grad=False)
    return nn.Parameter(moved, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved


def _initialize(name, owner, init):
    reset = init and (lambda: init(owner)) or getattr(owner, "reset_parameters", None) or getattr(owner, "_reset_parameters", None)
    if reset is None:
        raise ValueError(f"shoal: module {name or 'itself'} ({type(owner).__name__}) is on the device meta and has no "
                         "reset_parameters(): pass init=, a function that sets the parameters and buffers that a module owns itself")
    reset()
