"""Memory in which the gradients of an optimizer lie from step to step, one after the other in the order in which they are averaged.

The other ranks of the host map it, so an average of neighbours is one operation that copies nothing. A gradient that the backward
pass made is freed once it is copied into its place: its memory serves the next gradient, and costs the kernel no new page.

    backward pass     .grad -> place of this parameter, which becomes .grad
    all-reduce        [ d | c | b ] as one vector, in place
    step              reads .grad
"""
from __future__ import annotations

import torch

import shoal.torch


class GradientMemory:
    """Places for the gradients of parameters that have one now, in the order given. A parameter that is not contiguous, or whose
    gradient is sparse, has no place. One thread."""

    def __init__(self, parameters):
        self._places = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [each for each in parameters if each.dtype is dtype and each.is_contiguous() and not each.grad.is_sparse]
            block = _block(sum(each.numel() for each in alike), dtype)
            for each, part in zip(alike, block.split([each.numel() for each in alike])):
                self._places[each] = part.view(each.shape)

    def take(self, parameter):
        """Moves its gradient to its place. A gradient that is sparse, is to be differentiated or has another form than the parameter
        had at first stays where it is."""
        place, gradient = self._places.get(parameter), parameter.grad
        if place is None or gradient is place or gradient.is_sparse or gradient.requires_grad:
            return
        if gradient.dtype is place.dtype and gradient.shape == place.shape:
            place.copy_(gradient)
            parameter.grad = place


def _block(elements, dtype):
    """Plain memory where the host has no more that ranks can share: averages are copied then. An error here would leave the other
    ranks alone with the averages that are on their way."""
    try:
        return shoal.torch.empty(elements, dtype=dtype)
    except (RuntimeError, MemoryError):  # which of them depends on the shim and on torch; the library has told why
        return torch.empty(elements, dtype=dtype, device="cpu")
