"""torch.optim's optimizers, run by an engine in C in which each rank steps its shard.

    optimizer = torch.optim.AdamW(model.parameters())
    model = shoal.torch.DistributedDataParallel(model, optimizer=optimizer)     # or ShardedDataParallel

The optimizer stays the program's object. Its settings are read from its param_groups before each step, so that schedulers work
as before; its class becomes a subclass whose step() leaves the work to the engine.

    Translation     settings, states and checkpoints; for both engines
    Reduction       include/shoal/gradients.h, section 10: the step is part of the backward pass. Parameters on the CPU become views
                    of the reducer's memory. Those on a GPU stay where they are: their gradients are stepped on the CPU, and the
                    new values are copied to them.
    sharded.py      include/shoal/shards.h: parameters are sharded as well
"""
from __future__ import annotations

import ctypes
import os

import torch

from .. import _native

FIRST, SECOND, MASTER = _native.STATE_FIRST, _native.STATE_SECOND, _native.STATE_MASTER
HALVES = (torch.float16, torch.bfloat16)
MASTER_KEY = "master"  # in state_dict(), the float32 value of a 16-bit parameter


class _Stepped:
    """What the engine steps, as an optimizer. `_reduction` is the Translation."""

    @torch.optim.Optimizer.profile_hook_step
    def step(self, closure=None):
        """Runs the closure, if there is one. Then the parameters are stepped, unless its backward pass has done that."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._reduction.step()
        return loss
    step.hooked = True  # else torch wraps it once more when a state is loaded

    def zero_grad(self, set_to_none=True):
        self._reduction.drop()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group):
        if getattr(self, "_reduction", None) is not None:
            raise RuntimeError(f"shoal: parameters cannot be added to an optimizer that runs {self._reduction.WHERE}: add them before the "
                               "module is wrapped")
        super().add_param_group(param_group)

    def consolidate_state_dict(self, to=0):
        """Collects the states from all ranks for state_dict() on rank `to`. All ranks call it between steps."""
        self._reduction.collect(to)

    def state_dict(self):
        """The whole state in torch's form. Call consolidate_state_dict() on all ranks before, and this on rank `to`."""
        self._reduction.put_collected()
        try:
            return super().state_dict()
        finally:
            self.state.clear()

    def load_state_dict(self, state_dict):
        """Takes over a whole state, saved here or by torch's optimizer, on any number of ranks. All ranks call it, after the
        module's load_state_dict()."""
        super().load_state_dict({**state_dict, "state": {}})  # torch would round states to the parameters' type
        self._reduction.take_states(state_dict["state"])

    def __getstate__(self):
        raise TypeError("shoal: an optimizer that runs on the shards of a module cannot be copied or pickled: save its state_dict()")


class SGD(_Stepped, torch.optim.SGD):
    pass


class Adam(_Stepped, torch.optim.Adam):
    pass


class AdamW(_Stepped, torch.optim.AdamW):
    pass


class Adagrad(_Stepped, torch.optim.Adagrad):
    pass


SERVED = {torch.optim.SGD: SGD, torch.optim.Adam: Adam, torch.optim.AdamW: AdamW, torch.optim.Adagrad: Adagrad}
STATES = {SGD: ["momentum_buffer"], Adam: ["exp_avg", "exp_avg_sq"], AdamW: ["exp_avg", "exp_avg_sq"], Adagrad: ["sum"]}
REFUSED = {"amsgrad": "amsgrad=True needs a third state", "differentiable": "differentiable=True needs torch's own step"}


def _settings(group, rule):
    """A group's settings for the engine. Numbers may be tensors."""
    chosen = {"rate": group["lr"], "decay": group["weight_decay"], "maximizes": int(group["maximize"])}
    if rule == _native.SGD:
        chosen.update(beta1=group["momentum"], dampening=group["dampening"], is_nesterov=int(group["nesterov"]))
    else:
        chosen["epsilon"] = group["eps"]
    if rule == _native.ADAGRAD:
        chosen.update(rate_decay=group["lr_decay"], initial=group["initial_accumulator_value"])
    if "betas" in group:
        chosen["beta1"], chosen["beta2"] = group["betas"]
    return {name: value if isinstance(value, int) else float(value) for name, value in chosen.items()}


def _rule(optimizer):
    if type(optimizer) is torch.optim.Adam and any(group.get("decoupled_weight_decay") for group in optimizer.param_groups):
        return _native.ADAMW
    return {torch.optim.SGD: _native.SGD, torch.optim.Adam: _native.ADAM, torch.optim.AdamW: _native.ADAMW,
            torch.optim.Adagrad: _native.ADAGRAD}[type(optimizer)]


def _check(optimizer, where, remedy):
    """Refuses an optimizer that the engines do not have. The error contains `where` and `remedy`."""
    if isinstance(optimizer, _Stepped):
        raise ValueError("shoal: this optimizer already steps the parameters of another module: make one for each module")
    if type(optimizer) not in SERVED:
        served = ", ".join(each.__name__ for each in SERVED)
        raise TypeError(f"shoal: optimizer={type(optimizer).__name__} cannot run {where}, which has torch.optim's {served}: "
                        f"use one of these, or {remedy}")
    for option, why in REFUSED.items():
        if any(group.get(option) for group in optimizer.param_groups):
            raise ValueError(f"shoal: the optimizer cannot run {where}: {why}: leave that option out, or {remedy}")
    if len({bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}) > 1:
        raise ValueError(f"shoal: the optimizer cannot run {where}: decoupled_weight_decay differs between its groups")
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values() if state):
        raise ValueError("shoal: the optimizer has made steps already: give a new one, and load its state_dict() afterwards")


def _groups_of(optimizer, names, parameters):
    """Returns the number of each parameter's group."""
    found = {id(parameter): number for number, group in enumerate(optimizer.param_groups) for parameter in group["params"]}
    missing = [name for name, parameter in zip(names, parameters) if id(parameter) not in found]
    if missing:
        raise ValueError(f"shoal: the optimizer does not step parameter {missing[0]} ({len(missing)} in all), which the module "
                         "trains: give all parameters to the optimizer, or freeze these with requires_grad_(False)")
    own = {id(parameter) for parameter in parameters}
    others = [parameter for group in optimizer.param_groups for parameter in group["params"]
              if id(parameter) not in own and parameter.requires_grad]
    if others:
        raise ValueError(f"shoal: the optimizer also steps {len(others)} parameters that this module does not train, the first one "
                         f"of shape {list(others[0].shape)}: give them an optimizer of their own")
    return [found[id(parameter)] for parameter in parameters]


def weights_of(weights, team):
    """Returns the weights for the engine, one for each rank of a team, or None."""
    if weights is None:
        return None
    weights = [float(weight) for weight in weights]
    if len(weights) != team:
        raise ValueError(f"shoal: shard_weights has {len(weights)} numbers, but {team} ranks share one copy of the optimizer's states: "
                         "give one number for each of them")
    return (ctypes.c_double * team)(*weights)


class Translation:
    """A torch optimizer that an engine in C runs for one module: its settings, and its states for checkpoints. A subclass names the
    engine's calls."""
    WHERE = REMEDY = CALLS = READ = WRITE = ""

    def __init__(self, optimizer, names, parameters, rank, max_norm=None, grad_scaler=None):
        _check(optimizer, self.WHERE, self.REMEDY)
        self.optimizer, self._rule, self._rank = optimizer, _rule(optimizer), rank
        self._names, self._parameters, self._scaler = names, parameters, grad_scaler
        self._group_of = (ctypes.c_uint32 * len(parameters))(*_groups_of(optimizer, names, parameters))
        self._settings = self._read_settings()
        self._max_norm, self._library = max_norm, _native.load()
        self._collected, self._result, self._scale = None, None, 1.0
        numbers = {id(parameter): number for number, parameter in enumerate(
            parameter for group in optimizer.param_groups for parameter in group["params"])}
        self._numbers = [numbers[id(parameter)] for parameter in parameters]  # in the optimizer
        self._forms = [torch.empty_like(parameter, device="meta", requires_grad=False) for parameter in parameters]
        self._marker = min((one for one in parameters if one.numel()), key=torch.Tensor.numel, default=None)

    def _read_settings(self):
        return [_settings(group, self._rule) for group in self.optimizer.param_groups]

    def options(self, **modes):
        """Options of the engine. The caller keeps this object at least until the engine is made."""
        groups = (_native.OptimizerGroup * len(self._settings))(*(_native.OptimizerGroup(**each) for each in self._settings))
        self._given = _native.Optimizer(rule=self._rule, groups=groups, group_count=len(groups), group_of=self._group_of, **modes)
        chosen = {"optimizer": ctypes.pointer(self._given), "checks_finite": int(self._scaler is not None)}
        if self._max_norm is not None:
            chosen["max_norm"] = float(self._max_norm)
        return chosen

    def _take_over(self, engine):
        """engine: an object with an address and check(). The optimizer gets its new class."""
        self._engine = engine
        self.optimizer.__class__ = SERVED[type(self.optimizer)]
        self.optimizer.state.clear()
        self.optimizer._reduction = self
        if "step" in vars(self.optimizer):  # a scheduler has put torch's own step there, to see whether it is called
            self.optimizer.step = _counted_step(self.optimizer)

    def _call(self, name, *arguments):
        self._engine.check(getattr(self._library, self.CALLS + name)(self._engine.address, *arguments))

    def _steps(self, index):
        return getattr(self._library, self.CALLS + "parameter_steps")(self._engine.address, index)

    def _pass_settings(self):
        """Passes on changes of param_groups, and the loss scale."""
        for number, (before, now) in enumerate(zip(self._settings, self._read_settings())):
            if before != now:
                self._call("set_group", number, ctypes.byref(_native.OptimizerGroup(**now)))
                self._settings[number] = now
        if self._scaler is not None and self._scaler.get_scale() != self._scale:
            self._scale = self._scaler.get_scale()
            self._call("set_gradient_scale", 1 / self._scale)

    def norm(self):
        """The norm of the averages in the last step, before clipping; None if max_norm was not given."""
        return None if self._max_norm is None or self._result is None else self._result.squared ** 0.5

    # ---- Checkpoints ----

    @property
    def names(self):
        return self._names

    @property
    def forms(self):
        """Tensors on the device meta, with the parameters' types, shapes and strides."""
        return self._forms

    @property
    def numbers(self):
        """Each parameter's number in the optimizer."""
        return self._numbers

    def save(self, folder, options):
        """A sharded checkpoint (include/shoal/checkpoints.h)."""
        self.settle()
        self._call("save", os.fsencode(folder), ctypes.byref(options))

    def load(self, folder, options):
        self.settle()
        self._call("load", os.fsencode(folder), ctypes.byref(options), None)
        self.loaded()

    def settle(self):
        """Takes over values that the program has written."""

    def loaded(self):
        """The engine has written parameters and states."""
        self._collected = None

    def _states_of(self, index):
        """Pairs of a state's name in torch's form, and its number."""
        group = self._settings[self._group_of[index]]
        has_momentum = self._rule != _native.SGD or group["beta1"] != 0
        named = [(name, FIRST + i) for i, name in enumerate(STATES[type(self.optimizer)])] if has_momentum else []
        return named + [(MASTER_KEY, MASTER)] * (self._parameters[index].dtype in HALVES)

    def _empty(self, index):
        """A tensor for a whole state of a parameter, whose elements have the order of the parameter's in memory."""
        form = self._forms[index]
        return torch.empty_like(form, dtype=torch.float32 if form.dtype in HALVES else form.dtype, device="cpu")

    def collect(self, to):
        """Each rank receives one state after the other; only rank `to` keeps them."""
        states = {}
        for index in range(len(self._parameters)):
            entry = {"step": torch.tensor(float(self._steps(index)))}
            for name, number in self._states_of(index):
                entry[name] = self._empty(index)
                if entry[name].numel():
                    self._call(self.READ, index, number, entry[name].data_ptr())
            if self._rank == to:
                states[index] = entry
        self._collected = states

    def put_collected(self):
        if not self._collected:
            where = "" if self._collected is None else ", and state_dict() on the rank that it names (to=0)"
            raise RuntimeError("shoal: each rank has only its shard of the optimizer's states: call "
                               f"optimizer.consolidate_state_dict() on all ranks before{where}")
        for index, entry in self._collected.items():
            if self._rule == _native.SGD:
                entry = {name: value for name, value in entry.items() if name != "step"}
            if self._steps(index):
                self.optimizer.state[self._parameters[index]] = dict(entry)
        self._collected = None

    def take_states(self, states):
        """states: for each parameter's number in the optimizer, its entry in torch's form."""
        self._check_shapes(states)
        for index, parameter in enumerate(self._parameters):
            entry = states.get(self._numbers[index], {})
            for name, number in self._states_of(index):
                if parameter.numel() and (entry.get(name) is not None or name != MASTER_KEY):
                    values = self._empty(index).copy_(self._first_value(index) if entry.get(name) is None else entry[name])
                    self._call(self.WRITE, index, number, values.data_ptr())
            self._call("set_parameter_steps", index, _steps_of(entry))
        self._collected = None

    def _first_value(self, index):
        """The value of a state before the first step."""
        return torch.tensor(self._settings[self._group_of[index]].get("initial", 0.0))

    def _check_shapes(self, states):
        for index, parameter in enumerate(self._parameters):
            entry = states.get(self._numbers[index], {})
            for name, _ in self._states_of(index):
                if entry.get(name) is not None and entry[name].shape != parameter.shape:
                    raise ValueError(f"shoal: the state {name} of parameter {self._names[index]} has the shape "
                                     f"{list(entry[name].shape)}, the parameter {list(parameter.shape)}: the state_dict is of another "
                                     "model")


class Reduction(Translation):
    """Runs a torch optimizer in the reduction of one module's gradients."""
    WHERE, REMEDY = "in the reduction", "leave optimizer= out and call optimizer.step() on every rank"
    CALLS, READ, WRITE = "reducer_", "read_state", "write_state"

    def __init__(self, *words, weights=None, **modes):
        super().__init__(*words)
        self._modes = {**{name: int(value) for name, value in modes.items()}, "weights": weights}
        self._known, self._versions = list(self._parameters), None
        self._homes = [None] * len(self._parameters)  # the memory in which the reducer expects each parameter
        self._is_offloaded = self._parameters[0].device.type != "cpu"

    def options(self):
        return {**super().options(**self._modes), "has_thread": int(not self._is_offloaded)}

    def attach(self, reducer):
        """Moves parameters on the CPU to the reducer's memory. Values stay. The optimizer gets its new class."""
        self._take_over(reducer)
        for index, parameter in enumerate(self._parameters):
            if not self._is_offloaded:
                self._homes[index] = reducer.view_at(self._library.reducer_parameter(reducer.address, index), parameter)
            self._settle(index, parameter)

    def _take_back(self):
        """Handles parameters that the program has replaced or put into other memory. Returns true if there are any."""
        is_moved = False
        for index, parameter in enumerate(self._parameters):
            if parameter is not self._known[index]:
                for group in self.optimizer.param_groups:
                    group["params"] = [parameter if one is self._known[index] else one for one in group["params"]]
                self._known[index] = parameter
            if parameter.numel() and parameter.data_ptr() != self._homes[index].data_ptr():
                self._settle(index, parameter)
                is_moved = True
        return is_moved

    def _settle(self, index, parameter):
        """Moves the values of a parameter on the CPU into the reducer's memory. Names the memory of one on a GPU to the reducer,
        in which it must be without holes."""
        with torch.no_grad():
            if self._is_offloaded:
                dense = torch.empty_like(parameter, device="meta").stride()
                home = parameter.detach() if parameter.stride() == dense else torch.empty_like(parameter).copy_(parameter)
                if home.numel():
                    self._call("use_parameter", index, home.data_ptr())
                self._homes[index] = home
            else:
                self._homes[index].copy_(parameter.detach())
            if parameter.data_ptr() != self._homes[index].data_ptr():
                parameter.data = self._homes[index]

    # ---- A step ----

    def before_step(self):
        """Passes on changes by the program: settings, the loss scale, and values of parameters."""
        self._pass_settings()
        self.settle()

    def after_step(self, result):
        """Drops the gradients, which are not averages. A loss scaler gets one that shows whether the step was skipped."""
        self._result = result
        for parameter in self._parameters:
            parameter.grad = None
            torch.autograd.graph.increment_version(parameter)  # graphs that have kept the old values are refused
        self._versions = self._versions_now()
        if self._scaler is not None and self._marker is not None:
            value = float("nan") if result.is_skipped else 0.0
            self._marker.grad = torch.full_like(self._marker, value, requires_grad=False)

    def step(self):
        """Does nothing: the backward pass has stepped the parameters."""

    def drop(self):
        """Does nothing: after a backward pass no gradients are left."""

    # ---- Values ----

    def settle(self):
        if self._take_back() or self._versions_now() != self._versions:
            self._load_parameters()

    def loaded(self):
        super().loaded()
        for parameter in self._parameters:
            torch.autograd.graph.increment_version(parameter)
        self._versions = self._versions_now()

    def take_states(self, states):
        self._check_shapes(states)
        self._take_back()
        self._load_parameters()  # masters that no entry has
        super().take_states(states)

    def _load_parameters(self):
        self._call("load_parameters")
        self._versions = self._versions_now()

    def _versions_now(self):
        """Numbers that change when the program changes a parameter of which the reducer keeps a copy."""
        keeps_all = self._modes["steps_early"] or self._modes["is_atomic"] or self._is_offloaded
        return [parameter._version for parameter in self._parameters if keeps_all or parameter.dtype in HALVES]


def base_of(optimizer):
    """The name of torch's class of an optimizer that runs in the reduction."""
    return type(optimizer).__name__


def _counted_step(optimizer):
    """The optimizer's step, as torch.optim.lr_scheduler wraps it."""
    def step(*words, **options):
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *words, **options)
    step._wrapped_by_lr_sched = True
    return step


def _steps_of(entry):
    """How often a parameter was stepped. torch's SGD does not count: only its first step, without a momentum, differs."""
    if "step" in entry:
        return int(entry["step"])
    return 2 if entry.get("momentum_buffer") is not None else 0
