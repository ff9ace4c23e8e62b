"""Memory that holds the gradients of an optimizer from step to step, one after the other in the order in which they are
averaged.

The other ranks of the host map it, so an average of neighbors is one operation that copies nothing. The backward pass makes a
gradient in other memory. That memory is freed once the gradient is copied; the next gradient reuses it, which costs the kernel
no new page.

    backward pass     .grad -> place of this parameter, which becomes .grad
    all-reduce        [ d | c | b ] as one vector, in place
    step              reads .grad
"""
from __future__ import annotations

import torch

import shoal.torch


class GradientMemory:
    """Places for the gradients of parameters that have one now, in the given order. A parameter has no place if it is not
    contiguous or its gradient is sparse. For one thread."""

    def __init__(self, parameters):
        self._places = {}
        for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
            alike = [each for each in parameters if each.dtype is dtype and each.is_contiguous() and not each.grad.is_sparse]
            block = _block(sum(each.numel() for each in alike), dtype)
            for each, part in zip(alike, block.split([each.numel() for each in alike])):
                self._places[each] = part.view(each.shape)

    def take(self, parameter):
        """Moves the parameter's gradient to its place. The gradient stays where it is if it is sparse, is to be differentiated,
        or differs in form from the parameter at the beginning."""
        place, gradient = self._places.get(parameter), parameter.grad
        if place is None or gradient is place or gradient.is_sparse or gradient.requires_grad:
            return
        if gradient.dtype is place.dtype and gradient.shape == place.shape:
            place.copy_(gradient)
            parameter.grad = place


def _block(elements, dtype):
    """Returns shared memory, or plain memory if the host has no more of it: averages are then copied. An error here would leave
    the other ranks waiting in averages that are in progress."""
    try:
        return shoal.torch.empty(elements, dtype=dtype)
    except (RuntimeError, MemoryError):  # the class depends on the shim and on torch; the library has logged the reason
        return torch.empty(elements, dtype=dtype, device="cpu")
