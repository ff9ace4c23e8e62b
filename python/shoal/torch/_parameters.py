"""The parameters of a module that ranks keep equal, and the changes that a program has made to them since.

A program may unfreeze a parameter, convert the module, replace a parameter by another tensor, or load a state_dict with
assign=True. look() detects this before each use: it accepts a replacement of the same form and refuses every other change."""
from __future__ import annotations

import operator

import torch


class Parameters:
    """The parameters that require a gradient, as lists of names and tensors, with each tensor once. model: a module, or a list
    of pairs of name and parameter. ignored: names to leave out. remedy: the end of an error's text."""

    def __init__(self, model, ignored, remedy):
        self._model, self._ignored, self._remedy = model, ignored, remedy
        found = {}
        for name, tensor in self._pairs():
            if tensor.requires_grad and name not in ignored and not any(tensor is other for other in found.values()):
                found[name] = tensor
        self.names, self.tensors = list(found), list(found.values())
        self._indices = {name: index for index, name in enumerate(self.names)}
        self._forms = [_form(tensor) for tensor in self.tensors]
        self._note(self._all())

    def look(self):
        """Updates `tensors` to the module's current ones, and returns the indices of those that were replaced. Raises a
        RuntimeError that names a parameter whose change is not supported."""
        now = self._all()
        if len(now) == len(self._seen) and all(map(operator.is_, now, self._seen)) and _states(now) == self._states:
            return []
        own, found = {id(tensor): index for index, tensor in enumerate(self.tensors)}, {}
        for name, tensor in self._pairs():
            index = own.get(id(tensor), self._indices.get(name))  # by tensor first: it may now be tied to another name
            if name in self._ignored or (index is None and not tensor.requires_grad):
                continue
            if index is None or found.setdefault(index, tensor) is not tensor:
                self._refuse(name, "requires a gradient now, which it did not at first")
            self._check(name, tensor, self._forms[index])
        changed = [index for index, tensor in found.items() if tensor is not self.tensors[index]]
        for index in changed:
            self.tensors[index] = found[index]
        self._note(now)
        return changed

    def _note(self, tensors):
        self._seen, self._states = tensors, _states(tensors)

    def _check(self, name, tensor, form):
        for what, is_now, was in zip(("type", "device", "shape"), _form(tensor), form):
            if is_now != was:
                self._refuse(name, f"has the {what} {is_now} now, and had {was} at first")
        if not tensor.is_leaf:
            self._refuse(name, "is the result of a computation now, which has no gradient of its own")

    def _refuse(self, name, what):
        raise RuntimeError(f"shoal: parameter {name} {what}: {self._remedy}")

    def _pairs(self):
        return self._model.named_parameters() if isinstance(self._model, torch.nn.Module) else self._model

    def _all(self):
        """Returns all parameters, including frozen ones, in a fixed order. It runs in every step, so it has to be fast."""
        if not isinstance(self._model, torch.nn.Module):
            return [tensor for _, tensor in self._model]
        tensors, modules, known = [], [self._model], set()
        while modules:
            module = modules.pop()
            if module is not None and module not in known:
                known.add(module)
                tensors += module._parameters.values()
                modules += module._modules.values()
        return tensors


def _form(tensor):
    return tensor.dtype, tensor.device, tuple(tensor.shape)


def _states(tensors):
    return [tensor is None or (tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape) for tensor in tensors]

