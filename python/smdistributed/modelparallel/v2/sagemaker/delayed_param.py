"""Parameters that get values when FSDP divides them, so that no rank ever has the whole model."""
from __future__ import annotations

import contextlib

import torch

from smdistributed.modelparallel.exceptions import SMPError
from torch.sagemaker._tensor import Divided
from torch.sagemaker.logger import get_logger
from torch.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device


class DelayedParamIniter:
    """Gives values to a model on the device "meta".

    model: an nn.Module. init_method_using_config: called with each module that has parameters or buffers of its own, which must give
    values to them; by default the model's `_init_weights`, as models of transformers have it, or the module's `reset_parameters`.
    All ranks must have the same random seed, so that they draw the same values. verbose: logs each module."""

    def __init__(self, model, init_method_using_config=None, verbose=False):
        self._model, self._init, self._verbose = model, init_method_using_config, verbose
        self._counted = {}  # the number of elements that have got values, by id of the module
        self._modules = []  # keeps these ids valid

    def get_param_init_fn(self):
        """Returns the function for FSDP's param_init_fn."""
        return self._initialize

    def get_post_param_init_fn(self):
        """Returns the function for post_param_init_fn, which ties weights again."""
        return self._tie

    def count_num_params(self, module, *args):
        """Counts the parameters of a module as initialized, or those given."""
        if id(module) not in self._counted:
            self._modules.append(module)
        self._counted[id(module)] = sum(parameter.numel() for parameter in args or module.parameters(recurse=False))

    @contextlib.contextmanager
    def validate_params_and_buffers_inited(self, enabled=True):
        """Checks at its end that every parameter and buffer has a value. Raises AssertionError if one has none."""
        wanted = sum(parameter.numel() for parameter in self._model.parameters() if parameter.is_meta)
        yield
        if not enabled:
            return
        for kind, named in (("parameter", self._model.named_parameters()), ("buffer", self._model.named_buffers())):
            for name, tensor in named:
                if tensor.is_meta:
                    raise AssertionError(f"DelayedParamIniter: the {kind} {name} is still on the device meta: param_init_fn has not seen "
                                         "its module")
        found = sum(self._counted.values())
        if found < wanted:
            raise AssertionError(f"DelayedParamIniter: {found} elements of {wanted} have got values")

    @torch.no_grad()
    def _initialize(self, module):
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        fresh = [parameter for parameter in module.parameters(recurse=False) if parameter.is_meta]
        has_meta = fresh or any(buffer is not None and buffer.is_meta for buffer in module.buffers(recurse=False))
        if has_meta:
            self._give_values(module, device)
            self.count_num_params(module, *fresh)
            if self._verbose:
                get_logger().info("DelayedParamIniter: %s has got values", type(module).__name__)
        move_buffers_to_device(module, device)

    def _give_values(self, module, device):
        if self._init is not None:
            self._init(module)
        elif isinstance(module, Divided):
            whole = module.whole(device)
            self._init_by_default(whole)
            empty_module_params(module, device)
            module.take(whole)
        else:
            empty_module_params(module, device)
            self._init_by_default(module)

    def _init_by_default(self, module):
        initialize = getattr(self._model, "_init_weights", None)
        if initialize is not None:
            initialize(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            raise SMPError(f"DelayedParamIniter: {type(module).__name__} has no reset_parameters(): pass init_method_using_config")

    def _tie(self, module):
        if hasattr(self._model, "tie_weights"):
            self._model.tie_weights()
