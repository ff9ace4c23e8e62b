"""The first values of a sharded module, one of its modules after the other: values that are there, or, on the device meta, values
that a function sets. So a model may be larger than the memory of a rank."""
from __future__ import annotations

import torch
from torch import nn

from . import ddp


def placeholders_of(forms):
    """Returns tensors on the CPU of the same forms. They share memory that nobody reads or writes, and which so takes no pages."""
    largest = max((form.numel() * form.element_size() for form in forms), default=0)
    memory = torch.empty(max(largest, 1), dtype=torch.uint8)
    placeholders = []
    for form in forms:
        strides = torch.empty_like(form, device="meta").stride()
        flat = memory[:form.numel() * form.element_size()].view(form.dtype)
        placeholders.append(flat.as_strided(form.shape, strides))
    return placeholders


def leave_meta(module, optimizer):
    """Replaces the module's parameters on the device meta, also in the optimizer. Returns the new ones by their ids; those that
    require a gradient are placeholders."""
    found = {id(each): each for each in module.parameters() if each.device.type == "meta"}
    trained = [each for each in found.values() if each.requires_grad]
    new = {id(each): nn.Parameter(placeholder) for each, placeholder in zip(trained, placeholders_of(trained))}
    for key, each in found.items():
        new.setdefault(key, nn.Parameter(torch.empty_like(each, device="cpu"), requires_grad=False))
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            owner._parameters[name] = new.get(id(parameter), parameter)
    for group in optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    return {id(parameter): parameter for parameter in new.values()}


def set_values(module, new, init, group, take):
    """Passes each parameter that requires a gradient to take(parameter), once it has its value, and then frees the value.

    new: what leave_meta() has returned; their modules are passed to init(module), or their reset_parameters() is called. group: a
    process group whose rank 0 sends its values and buffers to the others; None if these are equal."""
    done = set()
    for owner in module.modules():
        own = [each for each in owner._parameters.values() if each is not None and id(each) not in done]
        done.update(map(id, own))
        if any(id(each) in new for each in own) or any(each is not None and each.is_meta for each in owner._buffers.values()):
            _initialize(module, owner, own, new, init)
        buffers = [each for each in owner._buffers.values() if each is not None]
        if group and (own or buffers):
            values = [each.detach() for each in (*own, *buffers)]
            torch.distributed._broadcast_coalesced(group, values, ddp.BROADCAST_BYTES, 0)
        trained = [each for each in own if each.requires_grad]
        for parameter, placeholder in zip(trained, placeholders_of(trained)):
            take(parameter)
            parameter.data = placeholder


def _initialize(module, owner, own, new, init):
    for each in own:
        if id(each) in new and each.requires_grad:
            each.data = torch.empty_like(each, device="cpu", requires_grad=False)
    for name, buffer in owner._buffers.items():
        if buffer is not None and buffer.is_meta:
            owner._buffers[name] = torch.empty_like(buffer, device="cpu")
    if init is None and not hasattr(owner, "reset_parameters"):
        name = next(name for name, each in module.named_modules() if each is owner)
        raise ValueError(f"shoal: module {name or 'itself'} ({type(owner).__name__}) is on the device meta and has no "
                         "reset_parameters(): pass init=, a function that sets the parameters and buffers that a module owns itself")
    with torch.no_grad():
        init(owner) if init else owner.reset_parameters()
