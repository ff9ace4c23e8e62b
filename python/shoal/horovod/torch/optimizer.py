"""DistributedOptimizer: averages gradients over all ranks during the backward pass."""
from __future__ import annotations

import contextlib
import functools
import warnings
import weakref

import torch

from . import _operations
from ._gradient_memory import GradientMemory
from ._operations import Adasum, Average, Sum
from ._world import global_process_set, is_moved_by_shoal
from .compression import Compression

TWICE = ("Gradients were computed more than backward_passes_per_step times before call to step(). Increase "
         "backward_passes_per_step to accumulate gradients locally.")
NOT_SKIPPED = ("optimizer.step() called without optimizer.skip_synchronize() context after optimizer.synchronize(). This can cause "
               "training slowdown. You may want to consider using optimizer.skip_synchronize() context if you use "
               "optimizer.synchronize() in your code.")


class _Gradients:
    """The gradients of one optimizer, and which of them are being averaged. units: tuples of parameters whose gradients travel
    as one operation."""

    def __init__(self, names, units, options):
        self._names, self._options = names, options
        self._units = {parameter: unit for unit in units for parameter in unit}
        self._left = {}  # backward passes until a parameter's gradient is complete
        self._handles = {}  # unit: (function that waits, contexts of the compression), in the order in which they were posted
        self._memory = None  # made after the first step, which shows the order of gradients
        self.reset()
        self._nodes = [self._hook(parameter) for parameter in self._units]

    def reset(self):
        self._handles.clear()
        self._left = dict.fromkeys(self._units, self._options["passes"])

    def set_passes(self, passes):
        self._options["passes"] = passes
        self._left = dict.fromkeys(self._units, passes)

    def is_under_way(self):
        return bool(self._handles)

    def _hook(self, parameter):
        with torch.enable_grad():
            node = parameter.view_as(parameter).grad_fn.next_functions[0][0]
        gradients = weakref.ref(self)

        def accumulated(*_):
            alive = gradients()
            if alive is not None:
                alive._accumulated(parameter)
        node.register_hook(accumulated)
        return node

    def _add_new(self, groups):
        """Adds parameters that were unfrozen, or added, since the optimizer was wrapped."""
        for i, group in enumerate(groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and parameter not in self._units:
                    self._names.setdefault(parameter, f"allreduce.noname.{i}.{j}")
                    self._units[parameter] = (parameter,)
                    self._left[parameter] = self._options["passes"]
                    self._nodes.append(self._hook(parameter))

    def _accumulated(self, parameter):
        unit = self._units[parameter]
        if self._left[parameter] <= 0:
            raise AssertionError(TWICE)
        self._left[parameter] -= 1
        self._keep(parameter)
        if all(self._left[each] == 0 for each in unit):
            self._post(unit)

    def _keep(self, parameter):
        """Moves the parameter's gradient to the memory in which it will be averaged."""
        if self._memory:
            self._memory.take(parameter)

    def _post(self, unit):
        """Posts a unit. A gradient that this rank lacks is sent as zeros, because others may have it."""
        for parameter in unit:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                self._keep(parameter)
        is_sparse = [parameter.grad.is_sparse for parameter in unit]
        name, options = self._names[unit[0]], self._options
        if any(is_sparse) and not options["sparse_as_dense"]:
            if len(unit) > 1:
                raise NotImplementedError(f"shoal: the gradient of {name} is sparse and cannot be in a group: leave groups out, or "
                                          "pass sparse_as_dense=True")
            wait = _operations.sparse_allreduce_async(unit[0].grad, name, options["op"], options["process_set"])
            self._handles[unit] = (lambda: [wait()]), [None]
            return
        dense = [parameter.grad.to_dense() if sparse else parameter.grad for parameter, sparse in zip(unit, is_sparse)]
        compressed, contexts = zip(*(options["compression"].compress(each.contiguous()) for each in dense))
        factor = options["predivide"] if options["op"] == Average else 1.0
        handle = _operations.held_allreduce_async_(compressed, name, options["op"], 1 / factor, factor, options["process_set"])
        self._handles[unit] = functools.partial(_operations.synchronize, handle), contexts

    def synchronize(self, groups):
        """Waits for all averages. groups: the optimizer's current ones."""
        self._add_new(groups)
        for unit in sorted(set(self._units.values()) - set(self._handles), key=lambda unit: self._names[unit[0]]):
            self._post(unit)
        if not self._memory and self._options["has_memory"]:
            self._memory = GradientMemory([parameter for unit in self._handles for parameter in unit])
        handles, self._handles = self._handles, {}
        self._left = dict.fromkeys(self._units, self._options["passes"])
        for unit, (wait, contexts) in handles.items():
            for parameter, result, context in zip(unit, wait(), contexts):
                self._put(parameter.grad, result, context)

    def _put(self, gradient, result, context):
        if result.layout is not torch.strided:
            gradient.zero_().add_(result)
            return
        result = self._options["compression"].decompress(result, context)
        if gradient.is_sparse:
            gradient.zero_().add_(result.to_sparse(gradient.sparse_dim()))
        elif result.data_ptr() != gradient.data_ptr() or result.stride() != gradient.stride():
            gradient.copy_(result)


class _Distributed:
    """What is added to the wrapped optimizer's class."""

    def _shoal_begin(self, gradients, wrapped):
        self._shoal_gradients = gradients  # None if there is no other rank
        self._shoal_wrapped = weakref.ref(wrapped)
        self._shoal_is_synchronized, self._shoal_synchronizes = False, True

    def synchronize(self):
        """Waits until all gradients are averaged. step() inside skip_synchronize() then does not wait."""
        if self._shoal_gradients:
            self._shoal_gradients.synchronize(self.param_groups)
        self._shoal_is_synchronized = True

    @contextlib.contextmanager
    def skip_synchronize(self):
        self._shoal_synchronizes = False
        try:
            yield
        finally:
            self._shoal_synchronizes = True

    def set_backward_passes_per_step(self, passes):
        self.backward_passes_per_step = passes
        if self._shoal_gradients:
            self._shoal_gradients.set_passes(passes)

    def step(self, closure=None):
        if self._shoal_synchronizes:
            if self._shoal_is_synchronized:
                warnings.warn(NOT_SKIPPED, stacklevel=2)
            self.synchronize()
        self._shoal_is_synchronized = False
        wrapped = self._shoal_wrapped()
        if wrapped is not None:
            wrapped._opt_called = True  # a scheduler made for the wrapped optimizer checks this
        return self._shoal_base.step(self, closure)

    def zero_grad(self, *args, **kwargs):
        if self._shoal_gradients and self._shoal_gradients.is_under_way():
            raise AssertionError("optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                                 "optimizer.synchronize(). This is prohibited as it can cause a race condition.")
        return self._shoal_base.zero_grad(self, *args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        if self._shoal_gradients:
            self._shoal_gradients.reset()
        self._shoal_is_synchronized, self._shoal_synchronizes = False, True
        return self._shoal_base.load_state_dict(self, *args, **kwargs)


def _name_parameters(optimizer, named_parameters):
    """{parameter: name}"""
    groups = optimizer.param_groups
    if named_parameters is None:
        return {parameter: f"allreduce.noname.{i}.{j}" for i, group in enumerate(groups)
                for j, parameter in enumerate(group["params"])}
    pairs = list(named_parameters)
    if any(not isinstance(pair, tuple) for pair in pairs):
        raise ValueError("named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                         "model.named_parameters().")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(twice)}")
    named = {parameter: name for name, parameter in pairs}
    unnamed = [f"{i}.{j}" for i, group in enumerate(groups) for j, each in enumerate(group["params"]) if each not in named]
    if unnamed:
        raise ValueError("named_parameters was specified, but one or more model parameters were not named: those at group.index "
                         f"{', '.join(unnamed)} of the optimizer")
    return named


def _divide_into_units(parameters, groups):
    """Returns which gradients travel together. groups: None, a number of groups, or lists of parameters."""
    if groups is None:
        return [(parameter,) for parameter in parameters]
    if isinstance(groups, int):
        count = min(groups, len(parameters))
        length, longer = divmod(len(parameters), count)
        starts = [i * length + min(i, longer) for i in range(count + 1)]
        return [tuple(parameters[start:end]) for start, end in zip(starts, starts[1:])]
    here = set(parameters)
    units = [tuple(each for each in group if each in here) for group in groups]
    grouped = {each for unit in units for each in unit}
    return [unit for unit in units if unit] + [(each,) for each in parameters if each not in grouped]


def _check_groups(groups):
    if groups is None:
        return
    if not isinstance(groups, list):
        if not isinstance(groups, int) or groups <= 0:
            raise ValueError("groups should be a non-negative integer or a list of list of torch.Tensor.")
        return
    seen = set()
    for each in (each for group in groups for each in group):
        if not isinstance(each, torch.Tensor):
            raise ValueError("groups must consist of torch.Tensor.")
        if each in seen:
            raise ValueError("A parameter can only appear once in groups.")
        seen.add(each)


def DistributedOptimizer(optimizer, named_parameters=None, compression=Compression.none, backward_passes_per_step=1, op=Average,
                         gradient_predivide_factor=1.0, num_groups=0, groups=None, sparse_as_dense=False,
                         process_set=global_process_set):
    """Returns an optimizer of a subclass of the given one's class. Averaging a gradient begins when the backward pass has
    computed it backward_passes_per_step times; step() waits for all averages."""
    if op == Adasum:
        raise NotImplementedError("shoal: there is no Adasum: use op=hvd.Average, and scale the learning rate by hvd.size()")
    if op not in (Average, Sum):
        raise ValueError("shoal: DistributedOptimizer takes op=hvd.Average or hvd.Sum")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if num_groups != 0:
        warnings.warn("Parameter `num_groups` has been replaced by `groups` and will be removed in v0.23.0.", DeprecationWarning,
                      stacklevel=2)
        groups = num_groups if groups is None else groups
    if backward_passes_per_step < 1:
        raise ValueError("backward_passes_per_step must be > 0")
    _check_groups(groups)
    names = _name_parameters(optimizer, named_parameters)
    gradients = None
    if process_set.included() and process_set.size() > 1:
        parameters = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        options = {"compression": compression, "passes": backward_passes_per_step, "op": op, "process_set": process_set,
                   "predivide": gradient_predivide_factor, "sparse_as_dense": sparse_as_dense,
                   "has_memory": compression is Compression.none and is_moved_by_shoal(process_set)}
        gradients = _Gradients(names, _divide_into_units(parameters, groups), options)
    base = type(optimizer)
    added = {name: value for name, value in vars(_Distributed).items() if name not in ("__dict__", "__weakref__")}
    kind = type(base.__name__, (base,), {**added, "_shoal_base": base})
    wrapped = kind.__new__(kind)
    # Leaves out methods that a scheduler has replaced on the given optimizer: they call that one's step, which averages
    # nothing.
    wrapped.__dict__.update((name, value) for name, value in optimizer.__dict__.items() if name not in added)
    wrapped._parameter_names = names  # which programs read
    wrapped.backward_passes_per_step = backward_passes_per_step
    wrapped._shoal_begin(gradients, optimizer)
    return wrapped
