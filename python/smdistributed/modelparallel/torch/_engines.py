"""The engines that run the passes of a DistributedModel: Whole or Sharded, if a rank runs the whole model, or Staged, a pipeline.
They call a function for each microbatch, inside which the program calls the model and model.backward()."""
from __future__ import annotations

import contextlib
import inspect
import os

import torch

from shoal import _native
from shoal.torch import _own_part, ddp, pipeline, sharded
from shoal.torch._step_function import FunctionPass, Reached
from smdistributed.modelparallel.exceptions import SMPError, SMPUnsupportedError
from smdistributed.modelparallel.torch import _messages, _partition, _tensor
from smdistributed.modelparallel.torch._state import log, state


def initializer(model):
    """Returns the function that gives values to modules on the device meta, or None for reset_parameters()."""
    return getattr(model, "_init_weights", None)


def scalar_of(tensors, grad_tensors):
    """Returns the tensor of one element whose backward pass is that of torch.autograd.backward(tensors, grad_tensors)."""
    tensors = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
    wrong = [type(each).__name__ for each in tensors if not isinstance(each, torch.Tensor)]
    if wrong or not tensors:
        raise SMPError(f"model.backward: pass a loss that is a tensor, or a list of tensors, not {wrong[0] if wrong else 'an empty list'}")
    gradients = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(tensors))
    if len(tensors) != len(gradients):
        raise SMPError(f"model.backward: {len(tensors)} tensors and {len(gradients)} gradients: pass one for each")
    total = 0
    for tensor, gradient in zip(tensors, gradients):
        if gradient is None and tensor.numel() != 1:
            raise SMPError(f"model.backward: a tensor of the shape {list(tensor.shape)} needs its gradient: pass grad_tensors, or a loss of "
                           "one element")
        total = total + (tensor.sum() if gradient is None else (tensor * gradient.detach()).sum())
    return total


# ---- The whole model on each rank ------------------------------------------------------------------------------------------


class Whole:
    """The model as it is, or in Shoal's DistributedDataParallel."""

    def __init__(self, module, factor, options):
        self.module, self._factor, self._options = module, factor, options
        self._replicated, self._passes = None, 0
        every = [*module.parameters(), *module.buffers()]
        if any(each.is_meta for each in every):
            _own_part.keep(module, module, initializer(module))
        if state.placement.sizes["D"] > 1 and not state.divides():
            self._replicate(None)

    def _replicate(self, optimizer):
        options = self._options
        self._replicated = ddp.DistributedDataParallel(
            self.module, process_group=state.group("RDP_GROUP"), bucket_cap_mb=options["bucket_cap_mb"],
            broadcast_buffers=options["broadcast_buffers"], find_unused_parameters=True, optimizer=optimizer)

    def prepare(self, optimizer):
        """Call it before the first step. optimizer: the program's, or None."""
        if state.divides() and self._replicated is None:
            if optimizer is None:
                raise SMPError("smp.step: shard_optimizer_state needs the optimizer: make optimizer = smp.DistributedOptimizer(optimizer) "
                               "before the first step")
            if self._options["backward_passes_per_step"] > 1:
                raise SMPUnsupportedError("smp.step: backward_passes_per_step with shard_optimizer_state and one microbatch: set microbatches "
                                          "instead, or leave shard_optimizer_state out")
            log("shard_optimizer_state: each rank steps its share of the parameters at the end of the backward pass, so gradients "
                "cannot be changed or clipped after it")
            self._replicate(optimizer)

    def run(self, call, count, is_training):
        """Runs a step. Returns the function's results, by microbatch."""
        self._passes += torch.is_grad_enabled()
        is_summed = self._passes % self._options["backward_passes_per_step"] == 0
        with state.running_as(self):
            return [self._call(call, number, is_summed and number == count - 1) for number in range(count)]

    def _call(self, call, number, is_summed):
        skips = self._replicated is not None and not is_summed and torch.is_grad_enabled()
        with self._replicated.no_sync() if skips else contextlib.nullcontext():
            return call(number)

    def forward(self, args, kwargs):
        is_replicated = self._replicated is not None and torch.is_grad_enabled() and state.running is not None
        return (self._replicated if is_replicated else self.module)(*args, **kwargs)

    def backward(self, tensors, grad_tensors):
        (scalar_of(tensors, grad_tensors) * self._factor).backward()

    def clip(self, max_norm, norm_type):
        if state.divides():
            raise SMPUnsupportedError("smp: model.clip_grad_norm_() with shard_optimizer_state, which has stepped the parameters already: "
                                      "leave one of them out")
        if _tensor.is_on():
            return _tensor.clip(self.module, max_norm, norm_type)
        return torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def join(self, *args, **kwargs):
        return contextlib.nullcontext() if self._replicated is None else self._replicated.join(*args, **kwargs)

    def parts(self):
        """Returns the module that has this rank's parameters, under the model's names."""
        return self.module

    def counted_once(self, parameters):
        """Returns the parameters that no lower rank of the pipeline has."""
        return parameters

    def state_dict(self, *args, **kwargs):
        return _tensor.whole_state(self.module, *args, **kwargs)

    def load_state_dict(self, values, strict):
        return self.module.load_state_dict(values, strict)

    def wrapper(self):
        """Returns what saves and loads checkpoints of divided states."""
        return self._replicated


# ---- Shards of the model on each rank --------------------------------------------------------------------------------------


class Sharded:
    """The model in Shoal's ShardedDataParallel. A step has one backward pass, of the sum of the microbatches' losses."""

    def __init__(self, module, factor, options):
        if options["backward_passes_per_step"] > 1:
            raise SMPUnsupportedError("smp.DistributedModel: backward_passes_per_step with sharded_data_parallel_degree: each step has one "
                                      "backward pass; use more microbatches")
        self.module, self._factor, self._wrapper, self._losses = module, factor, None, []

    def prepare(self, optimizer):
        if optimizer is None:
            raise SMPError("smp.step: sharded_data_parallel_degree needs the optimizer: make optimizer = smp.DistributedOptimizer(optimizer) "
                           "before the first step")
        bound = state.cfg.sdp_gradient_clipping
        self._wrapper = sharded.ShardedDataParallel(self.module, optimizer, process_group=state.group("DP_GROUP"), max_norm=bound,
                                                    init=initializer(self.module))
        log(f"sharded_data_parallel_degree: the norm of gradients is clipped to sdp_gradient_clipping, {bound}")

    def run(self, call, count, is_training):
        self._losses = []
        try:
            with state.running_as(self):
                returned = [call(number) for number in range(count)]
            if self._losses:
                sum(self._losses).backward()
            return returned
        finally:
            self._losses = []

    def forward(self, args, kwargs):
        return (self._wrapper or self.module)(*args, **kwargs)

    def backward(self, tensors, grad_tensors):
        self._losses.append(scalar_of(tensors, grad_tensors) * self._factor)

    def clip(self, max_norm, norm_type):
        raise SMPUnsupportedError("smp: model.clip_grad_norm_() with sharded_data_parallel_degree: set sdp_gradient_clipping, to which the step "
                                  "clips")

    def join(self, *_, **__):
        raise SMPUnsupportedError("smp: model.join() with sharded_data_parallel_degree: give all ranks equally many batches")

    def parts(self):
        return self.module

    def state_dict(self, *args, **kwargs):
        return self._wrapper.full_state_dict() if self._wrapper else self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, values, strict):
        if self._wrapper is None:
            return self.module.load_state_dict(values, strict)
        return self._wrapper.load_full_state_dict(values, strict)

    def wrapper(self):
        return self._wrapper


# ---- A pipeline ------------------------------------------------------------------------------------------------------------


class _Pipeline(pipeline.Pipeline):
    """A pipeline whose replicas have the same stages. Each rank runs the step function, so each has the model's arguments."""
    _takes_objects = True

    def _text_of_first(self, text):
        if self.process_group.rank() == 0:  # the first replica's profile is that of all
            text = _messages.share(text, 0, state.group("DP_GROUP"))
        return super()._text_of_first(text)

    def from_last(self, value):
        """Returns the value of the last stage's rank on all ranks. It is sent over the pipeline's communicator: a rank that fails
        ends it, so that no other rank waits."""
        last, address = self.process_group.size() - 1, self._communicator.address

        def copy(data):
            self._check(_native.load().broadcast(address, data.data_ptr(), data.data_ptr(), data.numel(), _native.UINT8, last, None))

        def find_most(number):
            self._check(_native.load().allreduce(address, number.data_ptr(), number.data_ptr(), 1, _native.INT64, _native.MAX, None))
        return _messages.copied(value, self.process_group.rank() == last, copy, find_most)


def _megabytes_without(pipeline):
    """Returns the memory of this process without the parameters of its stages: Python, torch, connections and the script's data."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return (resident - sum(each.numel() * each.element_size() for each in pipeline.parameters())) >> 20


class Staged:
    """A model in stages. They are made in the first step, when the arguments of the model's call are known."""

    def __init__(self, module, factor, options):
        self._module, self._factor, self._pipeline, self._signature = module, factor, None, inspect.signature(module.forward)
        if options["backward_passes_per_step"] > 1:
            log("backward_passes_per_step: gradients are averaged after each step, and add up until optimizer.zero_grad()")

    @property
    def is_partitioned(self):
        return self._pipeline is not None

    def _kwargs_of(self, args, kwargs):
        """Returns (args, kwargs) in which all arguments are positional, or all have names."""
        if not args or not kwargs:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        kinds = {self._signature.parameters[name].kind for name in bound.arguments}
        if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
            raise SMPUnsupportedError("smp: the model takes any arguments (*args, **kwargs): call it with positional arguments only, or "
                                      "with names only")
        return (), dict(bound.arguments)

    def partition(self, call):
        """Makes the stages. Runs `call`, the user's function, until it calls the model: that raises Reached, with the arguments
        of the model."""
        args, kwargs = self._kwargs_of(*self._arguments(call))
        cfg, ranks = state.cfg, state.cfg.pipeline_parallel_degree
        units, cuts = _partition.units_and_cuts(self._module, args, kwargs)
        options = None
        if cfg.memory_weight is not None:
            options = {"method": _native.PARTITION_TREE, "memory_weight": cfg.memory_weight}
        active = cfg.active_microbatches or ranks + 2
        is_replicated = state.placement.sizes["D"] > 1
        self._pipeline = _Pipeline(
            self._module, kwargs or tuple(args), microbatches=cfg.microbatches, cuts=cuts, units=units, partition=options,
            schedule=_partition.schedule_text(cfg.pipeline, ranks, cfg.microbatches, active), init=initializer(self._module),
            process_group=state.group("PP_GROUP"), replicas=state.group("RDP_GROUP") if is_replicated else None)
        for line in self._pipeline.explain().splitlines():
            log(line)
        log(f"the memory of a rank comes on top of what its process has without the model, now about {_megabytes_without(self._pipeline)} MiB "
            "on rank 0")

    def _arguments(self, call):
        state.is_tracing = True
        try:
            with state.running_as(self):
                call(0)
        except Reached as reached:
            return reached.arguments
        finally:
            state.is_tracing = False
        raise SMPError("smp.step: the step function has not called the model: call it once for each microbatch")

    def run(self, call, count, is_training):
        has_gradients = torch.is_grad_enabled() and state.cfg.pipeline != "_only_forward"
        done = FunctionPass(self._pipeline, call, is_training, has_gradients, self._factor)
        with state.running_as(done):
            self._pipeline._perform(done, has_gradients)
        returned = [done.returned.get(number) for number in range(count)]
        return self._pipeline.from_last(returned)

    def forward(self, args, kwargs):
        if state.is_tracing:
            raise Reached(arguments=(args, kwargs))
        if not isinstance(state.running, FunctionPass):
            raise SMPError("smp: the model's parts are on several ranks, so it can be called in a function decorated with @smp.step only")
        return state.running.run_model(*self._kwargs_of(args, kwargs))

    def backward(self, tensors, grad_tensors):
        if not isinstance(state.running, FunctionPass):
            raise SMPError("smp: model.backward() can be called in a function decorated with @smp.step only")
        if state.cfg.pipeline == "_only_forward":
            raise SMPError("smp: model.backward() with the pipeline _only_forward, which has no backward passes: use interleaved")
        state.running.backward(scalar_of(tensors, grad_tensors))

    def clip(self, max_norm, norm_type):
        if not self.is_partitioned:
            raise SMPError("smp: model.clip_grad_norm_() before the first step: there are no gradients yet")
        return self._pipeline.clip_grad_norm_(max_norm, norm_type)

    def join(self, *_, **__):
        raise SMPUnsupportedError("smp: model.join() is served with one partition: give all ranks equally many batches, as "
                                  "shoal.torch.DistributedSampler does")

    def parts(self):
        return self._pipeline.module if self.is_partitioned else self._module

    def counted_once(self, parameters):
        return self._pipeline._ties.counted_once(parameters)
