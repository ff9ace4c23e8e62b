"""Functions for modules on the device meta."""
import torch
from torch import nn


@torch.no_grad()
def empty_module_params(module, device=None, recurse=False):
    """Gives memory to the parameters of a module that are on the device meta. Their values are undefined. Buffers on meta get memory
    as well; all others stay. device: the CPU by default. recurse: also for inner modules. Returns the module."""
    device = device or torch.device("cpu")
    for owner in module.modules() if recurse else [module]:
        for name, parameter in owner._parameters.items():
            if parameter is not None and parameter.is_meta:
                owner._parameters[name] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[name] = torch.empty_like(buffer, device=device)
    return module


@torch.no_grad()
def move_buffers_to_device(module, device, recurse=False):
    """Moves the buffers of a module, except those on the device meta. Returns the module."""
    for owner in module.modules() if recurse else [module]:
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)
    return module


def clean_name(name):
    """Returns the name of a parameter in the program's model, without the modules that FSDP and activation checkpoints put around it."""
    for wrapper in ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."):
        name = name.replace(wrapper, "")
    return name
