"""State dicts with the values that this rank has."""
from __future__ import annotations

import contextlib
import enum

import torch

from torch.sagemaker.utils.module_utils import clean_name


class SMStateDictType(enum.Enum):
    SM_LOCAL_STATE_DICT = enum.auto()


@contextlib.contextmanager
def sm_state_dict_type(model, state_dict_type=SMStateDictType.SM_LOCAL_STATE_DICT, *configs):
    """Inside, model.state_dict() returns the values that this rank has, without a copy: loading into them changes the model. Shards
    that are empty on this rank are left out."""
    def local_state_dict(*args, **kwargs):
        named = [*model.named_parameters(), *model.named_buffers()]
        return {clean_name(name): tensor.detach() for name, tensor in named if tensor.numel()}
    model.state_dict = local_state_dict
    try:
        yield
    finally:
        del model.state_dict


@torch.no_grad()
def init_optim_state(optimizer, skip_empty_param=False):
    """Gives an optimizer its states, as its first step would, so that values can be loaded into them. Parameters stay. Does nothing if
    it has states. skip_empty_param: parameters whose shard is empty on this rank get none, as in training."""
    if optimizer.state:
        return
    former = [(group, group["lr"]) for group in optimizer.param_groups]
    for group, rate in former:
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for parameter in group["params"]:
            is_left_out = not parameter.requires_grad or (skip_empty_param and not parameter.numel())
            parameter.grad = None if is_left_out else torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in former:
        group["lr"] = rate
