"""Scaling of the losses of a pipeline by a torch.amp.GradScaler. Each rank has a scaler, and only the gradients of its own stages. So
that all of them skip the same steps and change the scale alike, an infinite gradient of one rank is made one of all ranks."""
from __future__ import annotations

import math

import torch
import torch.distributed as dist


def scaler_of(given):
    """Returns the scaler that a program passes, or None if it is switched off."""
    if given is not None and not isinstance(given, torch.amp.GradScaler):
        raise TypeError(f"shoal: grad_scaler must be a torch.amp.GradScaler, not {type(given).__name__}")
    return given if given is not None and given.is_enabled() else None


def scale_of(scaler):
    """Returns the factor of the loss. The scaler has it from then on, also on ranks that compute no loss."""
    return 1.0 if scaler is None else scaler.scale(torch.ones(())).item()


def has_infinite(parameters, team):
    """Returns true if a gradient has an infinity or a NaN; with tensor parallelism, on one rank of the team."""
    found = torch.tensor([0.0 if all(torch.isfinite(values).all() for values in _gradients_of(parameters)) else 1.0])
    if team is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=team.group)
    return bool(found.item())


def make_infinite(parameters):
    """Writes an infinity into a gradient, which the scaler finds."""
    values = next((values for values in _gradients_of(parameters) if values.numel()), None)
    if values is not None:
        values[(0,) * values.dim()] = math.inf


def _gradients_of(parameters):
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return [gradient._values() if gradient.is_sparse else gradient for gradient in gradients]
