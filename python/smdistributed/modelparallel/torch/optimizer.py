"""smp.DistributedOptimizer: an optimizer whose parameters are those of this rank's partition."""
from __future__ import annotations

import torch

from smdistributed.modelparallel.exceptions import SMPError
from smdistributed.modelparallel.torch import _messages, _norms, _shares, _tensor
from smdistributed.modelparallel.torch._state import log, state
from smdistributed.modelparallel.torch.model import PARTIAL
from smdistributed.modelparallel.torch.optimizers import _Optimizer


def _clip(max_norm, norm_type=2):
    return state.model().clip_grad_norm_(max_norm, norm_type)


_OF_16_BITS = {"clip_master_grads": _clip, "overflow": False, "loss_scale": 1.0, "update_master_grads": lambda: None}


class DistributedOptimizer(torch.optim.Optimizer):
    """Wraps an optimizer, made before or after the model is wrapped. When the model is partitioned, it drops the parameters of
    other ranks. Attributes that it does not have are those of the optimizer. static_loss_scale, dynamic_loss_scale and
    dynamic_loss_args have no effect: bfloat16 needs no loss scale. Scripts for fp16 call clip_master_grads(max_norm), which clips by
    the norm of the whole model, and read overflow and loss_scale."""

    def __init__(self, optimizer, static_loss_scale=1.0, dynamic_loss_scale=False, dynamic_loss_args=None, **more):
        state.require()
        if isinstance(optimizer, DistributedOptimizer) or not hasattr(optimizer, "step"):
            raise SMPError(f"smp.DistributedOptimizer: pass an optimizer that is not wrapped yet, not {type(optimizer).__name__}")
        self.inner = optimizer
        self._shares = None  # see _divide
        self._order = None  # for each group: the names of the whole model's parameters
        self._names = []  # for each group: the names of this rank's. Wrappers for 16 bits put other tensors in their places
        model = state.model and state.model()
        if model is not None and model.partitioned and model.pp_size > 1:
            self._names = [self._names_in(group, model) for group in optimizer.param_groups]
            self._order = [self._merged(names, model.names) for names in self._names]
        state.optimizers.clear()  # a script has one
        state.optimizers.add(self)

    @staticmethod
    def _names_in(group, model):
        own = {id(each): name for name, each in model.own_parameters().items()}
        if any(id(each) not in own for each in group["params"]):
            raise SMPError("smp.DistributedOptimizer: the optimizer has parameters of other partitions: wrap it before the first step, or "
                           "make it of model.parameters()")
        return [own[id(each)] for each in group["params"]]

    @staticmethod
    def _merged(names, order):
        every = set().union(*_messages.allgather(names, _messages.CommGroup.PP_GROUP))
        return [name for name in order if name in every]

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        if name in _OF_16_BITS and not hasattr(self.inner, name):
            return _OF_16_BITS[name]
        return getattr(self.inner, name)

    def __repr__(self):
        return f"DistributedOptimizer({self.inner!r})"

    # torch's class has these as attributes of its own; schedulers change the dicts in param_groups.

    @property
    def param_groups(self):
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.inner.param_groups = groups

    @property
    def state(self):
        return self.inner.state

    @state.setter
    def state(self, values):
        self.inner.state = values

    @property
    def defaults(self):
        return self.inner.defaults

    def step(self, *args, **kwargs):
        shares = self._divide()
        self._set_norms(shares is not None)
        return shares.step(self.inner.step, *args, **kwargs) if shares else self.inner.step(*args, **kwargs)

    def _set_norms(self, has_shares):
        """Lets an optimizer of smp.optimizers use the norms of the job."""
        optimizer = self._of_norms()
        if optimizer is None or not self._is_complete():
            return
        if "norms" not in vars(optimizer):
            optimizer.norms = _norms.JobNorms(state.model(), has_shares)
        optimizer.norms.follow(optimizer.param_groups, optimizer.made_of)

    def _of_norms(self):
        """Returns the optimizer of smp.optimizers that is wrapped here, also one that a wrapper for 16 bits has as its `optimizer`, or
        None."""
        found = self.inner
        while found is not None and not isinstance(found, _Optimizer):
            found = getattr(found, "optimizer", None)
        return found

    def _divide(self):
        """Returns the shares of the replicas, or None if each of them steps all parameters. They are made when the model has
        been partitioned."""
        if (self._shares is None or not self._shares.are_complete()) and state.divides_step() and self._is_complete():
            if not hasattr(self.inner, "param_groups"):
                raise SMPError(f"smp.DistributedOptimizer: {type(self.inner).__name__} has no param_groups, which shard_optimizer_state "
                               "divides: leave shard_optimizer_state out")
            self._shares = _shares.Shares(self.inner, state.group("RDP_GROUP"), _tensor.sizes_of_whole())
            self._shares.drop_others()
        return self._shares

    def _is_complete(self):
        """Returns true if the optimizer has the parameters of this rank's partition only."""
        return state.cfg.pipeline_parallel_degree == 1 or self._order is not None

    def zero_grad(self, *args, **kwargs):
        return self.inner.zero_grad(*args, **kwargs)

    def add_param_group(self, param_group):
        if self._order is not None:
            raise SMPError("smp: parameters cannot be added to an optimizer of a partitioned model: add them before the first step")
        if self._shares is not None:
            raise SMPError("smp: parameters cannot be added to an optimizer whose states shard_optimizer_state has divided: add them before "
                           "the first step")
        self.inner.add_param_group(param_group)

    # ---- Partitions ----

    def keep(self, own):
        """Drops the parameters of other partitions. own: this rank's parameters, by their names in the whole model."""
        if self._order is not None or not hasattr(self.inner, "param_groups"):
            return
        names = state.model().names_by_id
        self._order, moved, optimizer = [], {}, self._of_norms()
        if optimizer is not None:
            optimizer.made_of = [self._kept(group["params"], originals, own, names)
                                 for group, originals in zip(optimizer.param_groups, optimizer.made_of)]
        for group in self.inner.param_groups:
            known = [names[id(each)] for each in group["params"] if id(each) in names]
            if len(known) < len(group["params"]):
                log("the optimizer has parameters that are not the model's; these stay on every rank")
            others = [each for each in group["params"] if id(each) not in names]
            moved.update({id(each): own[names[id(each)]] for each in group["params"] if names.get(id(each)) in own})
            self._order.append(known)
            self._names.append([name for name in known if name in own])
            group["params"] = [own[name] for name in self._names[-1]] + others
        kept = {moved.get(id(each), each): values for each, values in self.inner.state.items()
                if id(each) in moved or id(each) not in names}
        self.inner.state.clear()
        self.inner.state.update(kept)
        self._divide()

    @staticmethod
    def _kept(parameters, originals, own, names):
        """Returns `originals` in the order in which keep() leaves `parameters`: those of the model, then others. None: another
        rank's."""
        known = [own[names[id(each)]] for each in parameters if names.get(id(each)) in own]
        others = [original for each, original in zip(parameters, originals) if id(each) not in names]
        return known + [own.get(names[id(each)]) if id(each) in names else each for each in others]

    def _numbers_of_whole(self):
        """Returns for each group the numbers of its parameters in the whole model's optimizer."""
        sizes = [len(order) for order in self._order or (group["params"] for group in self.inner.param_groups)]
        return [list(range(sum(sizes[:place]), sum(sizes[:place + 1]))) for place in range(len(sizes))]

    def _numbers(self):
        """Returns for each of this rank's parameters, in the order of groups, its number in the whole model's optimizer."""
        found = []
        for group, names, order, numbers in zip(self.inner.param_groups, self._names, self._order, self._numbers_of_whole()):
            if len(names) != len(group["params"]):
                raise SMPError(f"smp: the optimizer has {len(group['params']) - len(names)} parameters that are not the model's, so its state "
                               "cannot be numbered as that of one process: step them with an optimizer of their own")
            places = dict(zip(order, numbers))
            found += [places[name] for name in names]
        return found

    def local_state_dict(self, gather_if_shard=True):
        """Returns the state of this rank's parameters. Numbers of parameters are those of the whole model's optimizer. With
        shard_optimizer_state all replicas call it, and their states are joined; gather_if_shard=False: only this rank's
        share, without a call of the others."""
        found = self._joined(self.inner.state_dict()) if gather_if_shard else self.inner.state_dict()
        if self._order is not None:
            numbers = self._numbers()
            found = {**found, "state": {numbers[key]: values for key, values in found["state"].items()},
                     "param_groups": [{**group, "params": [numbers[key] for key in group["params"]]} for group in found["param_groups"]]}
        return {**found, PARTIAL: True}

    def _joined(self, own):
        """Returns the state with those of the other replicas' shares."""
        if self._divide() is None:
            return own
        parts = _messages.allgather(own["state"], _messages.CommGroup.RDP_GROUP)
        return {**own, "state": {number: values for part in parts for number, values in part.items()}}

    def save_optimizer_backcompat(self, gather_if_shard=True):
        """Another name for local_state_dict(), which scripts use since version 1.10."""
        return self.local_state_dict(gather_if_shard)

    def load_optimizer_backcompat(self, state_dict, gather_if_shard=True):
        """Another name for load_state_dict()."""
        return self.load_state_dict(state_dict)

    def state_dict(self):
        """Returns the state of the whole model's optimizer, as one process has it. All ranks of a pipeline call it, and with
        shard_optimizer_state all ranks."""
        if self._order is None and not _tensor.is_on():
            return self._joined(self.inner.state_dict())
        own = self.local_state_dict()
        own["state"] = _tensor.whole_values(own["state"], self._by_number())
        return {key: value for key, value in own.items() if key != PARTIAL} if self._order is None else self._gathered(own)

    def _by_number(self):
        """Returns this rank's parameters by their numbers in the whole model's optimizer."""
        own = [each for group in self.inner.param_groups for each in group["params"]]
        return dict(zip(range(len(own)) if self._order is None else self._numbers(), own))

    def _gathered(self, own):
        parts = _messages.allgather(own, _messages.CommGroup.PP_GROUP)
        groups = [{**group, "params": numbers} for group, numbers in zip(parts[0]["param_groups"], self._numbers_of_whole())]
        values = {number: each for part in parts for number, each in part["state"].items()}
        return {**{key: value for key, value in parts[0].items() if key != PARTIAL},
                "state": {number: values[number] for number in sorted(values)}, "param_groups": groups}

    def load_state_dict(self, state_dict):
        """Loads the state of the whole model's optimizer, or of partitions: then all ranks of a pipeline call it, each with one
        partition's."""
        given = dict(state_dict)
        is_partial = given.pop(PARTIAL, False)
        if is_partial and state.cfg.pipeline_parallel_degree > 1:
            given = self._gathered(given)
        if _tensor.is_on() and not is_partial:
            own = self._by_number()
            given["state"] = _tensor.own_values({key: values for key, values in given["state"].items() if key in own}, own)
        if self._order is None:
            self.inner.load_state_dict(given)
        else:
            self._load_own(given)
        if self._divide():
            self._shares.drop_others()

    def _load_own(self, given):
        numbers = self._numbers()
        for place, (group, own) in enumerate(zip(given["param_groups"], self._numbers_of_whole())):
            if list(group["params"]) != own:
                raise SMPError(f"smp: the state is of another optimizer: group {place} has {len(group['params'])} parameters there, and "
                               f"{len(own)} here")
        places = {number: place for place, number in enumerate(numbers)}
        values = {places[number]: each for number, each in given["state"].items() if number in places}
        groups = [{**group, "params": [places[number] for number in group["params"] if number in places]}
                  for group in given["param_groups"]]
        self.inner.load_state_dict({**given, "state": values, "param_groups": groups})
