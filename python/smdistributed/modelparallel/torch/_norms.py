"""The norms that an optimizer of smp.optimizers needs, of parameters and gradients that are on several ranks.

    tensor parallelism     a rank has a part of a parameter: squares are summed over TP_GROUP
    partitions             a rank has some of the parameters, and a tied one counts once: summed over PP_GROUP
    shard_optimizer_state  a rank steps some of the parameters: summed over RDP_GROUP

So a step has the result of one process."""
from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.torch import _divided
from smdistributed.modelparallel.torch._state import state


class JobNorms:
    """Norms over the ranks of the job. All of them call each method. has_shares: replicas step different parameters."""

    def __init__(self, model, has_shares):
        self._model = model
        self._parts, self._team = _divided.parts_of(model)
        self._groups = [state.group("PP_GROUP")] if state.cfg.pipeline_parallel_degree > 1 else []
        if has_shares:
            self._groups.append(state.group("RDP_GROUP"))

    def is_part(self, parameter):
        """Returns true if this rank has a part of a parameter."""
        return id(parameter) in self._parts

    def of_gradients(self, parameters):
        """Returns the norm of all gradients. parameters: those that this rank steps."""
        squares = _divided.power(self._model.counted_once(parameters), 2, self._parts, self._team).reshape(1)
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sqrt().item()

    def of_whole(self, parameters, norms, is_largest=False):
        """Returns norms of whole parameters. norms: those of this rank's parts, a tensor with a row for each parameter."""
        rows = [number for number, parameter in enumerate(parameters) if self.is_part(parameter)]
        if not rows:
            return norms
        own = norms[rows] if is_largest else norms[rows] ** 2
        dist.all_reduce(own, dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM, group=self._team.group)
        found = norms.clone()
        found[rows] = own if is_largest else own.sqrt()
        return found


class OwnNorms:
    """Norms in a process that has all parameters. The methods are those of JobNorms."""

    def is_part(self, parameter):
        return False

    def of_gradients(self, parameters):
        norms = [each.grad.float().norm() for each in parameters]
        return torch.stack(norms).norm().item() if norms else 0.0

    def of_whole(self, parameters, norms, is_largest=False):
        return norms
