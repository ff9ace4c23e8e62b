"""The norms that an optimizer of smp.optimizers needs, of parameters and gradients that are on several ranks.

    tensor parallelism     a rank has a part of a parameter: squares are summed over TP_GROUP
    partitions             a rank has some of the parameters, and a tied one counts once: summed over PP_GROUP
    shard_optimizer_state  a rank steps some of the parameters: summed over RDP_GROUP

So a step has the result of one process.

A wrapper for 16 bits puts float32 copies, the masters, in the places of an optimizer's parameters. Which parameter is a part, and
which one is tied, is known of the model's own: follow() finds the one that a master is a copy of."""
from __future__ import annotations

import torch
import torch.distributed as dist

from shoal.torch import _divided
from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch._state import state


class JobNorms:
    """Norms over the ranks of the job. All of them call each method. has_shares: replicas step different parameters."""

    def __init__(self, model, has_shares):
        self._model = model
        self._parts, self._team = _divided.parts_of(model)
        self._own = {}  # the model's parameters by the ids of those that the optimizer steps
        self._groups = [state.group("PP_GROUP")] if state.cfg.pipeline_parallel_degree > 1 else []
        if has_shares:
            self._groups.append(state.group("RDP_GROUP"))

    def follow(self, groups, made_of):
        """Finds the model's parameters for those of an optimizer. Call it before a step, because wrappers replace parameters when
        they like. made_of: the one that optimizers have."""
        self._own = {id(each): each for each in self._model.parameters()}
        for group, originals in zip(groups, made_of):
            if len(group["params"]) == len(originals):
                self._own.update({id(each): original for each, original in zip(group["params"], originals)
                                  if original is not None and id(each) not in self._own})

    def _original(self, parameter):
        if id(parameter) not in self._own:
            raise SMPError(f"smp: the optimizer steps a tensor of shape {list(parameter.shape)} that is not the model's, and norms need the "
                           "parameter that it is a copy of: put each master copy in the place of its parameter in group[\"params\"]")
        return self._own[id(parameter)]

    def is_part(self, parameter):
        """Returns true if this rank has a part of a parameter, or of the one that it is a copy of."""
        return bool(self._parts) and id(self._original(parameter)) in self._parts

    def of_gradients(self, parameters):
        """Returns the norm of all gradients. parameters: those that this rank steps."""
        squares = _divided.power(self._counted_once(parameters), 2, set(map(id, filter(self.is_part, parameters))), self._team).reshape(1)
        for group in self._groups:
            dist.all_reduce(squares, group=group)
        return squares.sqrt().item()

    def _counted_once(self, parameters):
        if state.cfg.pipeline_parallel_degree == 1:
            return parameters
        counted = set(map(id, self._model.counted_once([self._original(each) for each in parameters])))
        return [each for each in parameters if id(self._original(each)) in counted]

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
