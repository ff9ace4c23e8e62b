"""smp.amp: the scaler of losses."""
from __future__ import annotations

import torch
import torch.distributed as dist

from smdistributed.modelparallel.exceptions import SMPUnsupportedError
from smdistributed.modelparallel.torch._state import state


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler whose step is skipped on all ranks of a model, which are those of its pipeline and its TP groups, if a
    gradient of one of them is not finite; with shard_optimizer_state, on all ranks."""

    def __init__(self, *args, device=None, **kwargs):
        super().__init__(device or _device(), *args, **kwargs)

    def _check_scale_growth_tracker(self, funcname):
        if self._scale is None:  # the loss is scaled on the last partition only
            self._lazy_init_scale_growth_tracker(torch.device(self._device))
        return super()._check_scale_growth_tracker(funcname)

    def _unscale_grads_(self, *args, **kwargs):
        if state.divides():
            raise SMPUnsupportedError("smp.amp.GradScaler with shard_optimizer_state or sharded_data_parallel_degree, with which gradients are "
                                      "summed and stepped in one piece of work: leave one of them out")
        found = super()._unscale_grads_(*args, **kwargs)
        total = torch.stack([torch.zeros(()), *(each.detach().cpu().reshape(()) for each in found.values())]).max()
        dist.all_reduce(total, dist.ReduceOp.MAX, group=state.group("WORLD" if state.divides_step() else "MP_GROUP"))
        return {each: total.to(each) for each in found or [self._scale.device]}


def _device():
    """Returns the type of the device on which the model is."""
    model = state.model and state.model()
    parameter = next(iter(model.parameters()), None) if model is not None else None
    return "cpu" if parameter is None or parameter.device.type == "meta" else parameter.device.type
