"""smp.DistributedModel: a model in one or several partitions, replicated by data parallelism."""
from __future__ import annotations

import collections
import weakref

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from smdistributed.modelparallel.exceptions import SMPError, SMPUnsupportedError
from smdistributed.modelparallel.torch import _engines, _messages, _tensor
from smdistributed.modelparallel.torch._state import log, pp_rank, state

PARTIAL = "_smp_is_partial"  # in the state of one partition


class DistributedModel(nn.Module):
    """A model whose partitions are on the ranks of a pipeline. In a function decorated with @smp.step it is called like the model,
    and backward() takes the place of the loss's backward().

    With fp16 or bf16 the model runs in bfloat16, and parameters, gradients and results are of float32.

    With several partitions the model is divided in the first step: until then each rank has all of it. `average_grads_across_microbatches`:
    gradients are those of the mean of the microbatches' losses, else of their sum. bucket_cap_mb and broadcast_buffers are for one
    partition. trace_device, trace_execution_times, trace_memory_usage, overlapping_allreduce and gradient_as_bucket_view
    have no effect: units are timed on the CPU, and sums begin as soon as gradients are complete."""

    def __init__(self, module, trace_device="gpu", trace_execution_times=False, trace_memory_usage=False, overlapping_allreduce=True,
                 backward_passes_per_step=1, average_grads_across_microbatches=True, bucket_cap_mb=25, broadcast_buffers=True,
                 gradient_as_bucket_view=False):
        state.require()
        _check(module, backward_passes_per_step)
        super().__init__()
        self._is_half = state.cfg.fp16 or state.cfg.bf16
        if self._is_half:
            module.float()  # the optimizer's values; operations are in 16 bits
        _tensor.divide(module, _engines.initializer(module))
        self.module, self.pp_size, self.training = module, state.cfg.pipeline_parallel_degree, module.training
        self._note_names()
        self._left = {}  # what no partition uses, on pp_rank 0
        self._hooks = {"partition": collections.OrderedDict(), "step": collections.OrderedDict()}
        factor = 1 / state.cfg.microbatches if average_grads_across_microbatches else 1.0
        options = {"bucket_cap_mb": bucket_cap_mb, "broadcast_buffers": broadcast_buffers,
                   "backward_passes_per_step": backward_passes_per_step}
        engine = _engines.Sharded if state.is_sharded() else _engines.Whole if self.pp_size == 1 else _engines.Staged
        object.__setattr__(self, "_engine", engine(module, factor, options))
        self.partitioned = self.pp_size == 1
        self._is_prepared = False
        if state.divides_step():
            log("shard_optimizer_state: each data-parallel rank keeps the states of its share, which it steps in optimizer.step()")
        self._job = state.cfg
        state.model = weakref.ref(self)
        state.optimizers.clear()  # those of a former model

    def is_of_job(self):
        """Returns false if smp.init() has begun anew since."""
        return self._job is state.cfg

    def _note_names(self):
        """Notes what the whole model has, of which a rank keeps a part."""
        self.names = [name for name, _ in self.module.named_parameters()]
        self.names_by_id = {id(each): name for name, each in self.module.named_parameters()}  # until the model is partitioned
        self._aliases, self._keys = _names_of_tied(self.module), list(self.module.state_dict())

    # ---- A step ----

    def forward(self, *args, **kwargs):
        samples = _tensor.Samples(args, kwargs)
        return samples.own(self._compute(*samples.joined()))

    def _compute(self, args, kwargs):
        if not self._is_half:
            return self._engine.forward(args, kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            result = self._engine.forward(args, kwargs)
        return tree_map(lambda each: each.float() if isinstance(each, torch.Tensor) and each.dtype is torch.bfloat16 else each, result)

    def backward(self, tensors, grad_tensors=None):
        """Takes the place of tensors.backward() or torch.autograd.backward(tensors, grad_tensors) in a step function."""
        self._engine.backward(tensors, grad_tensors)

    def run(self, call, count):
        """Runs a step function, call(microbatch), for each microbatch. Returns what it has returned, by microbatch, on all ranks
        of the pipeline."""
        self._prepare(call)
        return self._engine.run(call, count, self.training)

    def _prepare(self, call):
        if self._is_prepared:
            return
        if self.pp_size > 1:
            whole = dict(self.module.state_dict()) if pp_rank() == 0 else {}
            self._engine.partition(call)
            self.partitioned = True
            self._keep_left(whole)
            own = self.own_parameters()
            for optimizer in state.optimizers:
                optimizer.keep(own)
        else:
            self._engine.prepare(next(iter(state.optimizers)).inner if state.optimizers else None)
        self._is_prepared = True
        self._call_hooks("partition")

    def wrapper(self):
        """Returns what saves and loads checkpoints of states that ranks have divided, or None if they have not."""
        if not state.divides():
            return None
        self._prepare(None)
        return self._engine.wrapper()

    def _keep_left(self, whole):
        """Keeps the state of modules that the forward pass does not use."""
        used = set().union(*_messages.allgather(set(self._engine.parts().state_dict()), _messages.CommGroup.PP_GROUP))
        self._left = {name: value.detach() for name, value in whole.items() if name not in used}

    def stepped(self):
        """Is called after each step."""
        self._call_hooks("step", is_once=True)

    # ---- Hooks ----

    def register_post_partition_hook(self, hook):
        """hook(model, optimizer) runs once, when the model has been partitioned, before the first forward pass."""
        return self._register("partition", hook)

    def register_post_step_hook(self, hook):
        """hook(model, optimizer) runs once, after the next step."""
        return self._register("step", hook)

    def _register(self, kind, hook):
        handle = RemovableHandle(self._hooks[kind])
        self._hooks[kind][handle.id] = hook
        return handle

    def _call_hooks(self, kind, is_once=False):
        hooks = list(self._hooks[kind].values())
        if is_once:
            self._hooks[kind].clear()
        for hook in hooks:
            hook(self, next(iter(state.optimizers), None))

    # ---- This rank's part ----

    def get_module(self):
        """Returns the model itself."""
        return self.module

    def _parts(self):
        if not self.partitioned:
            raise SMPError("smp: the model is partitioned in the first step: ask for local parts after it, or in "
                           "register_post_partition_hook()")
        return self._engine.parts()

    def own_parameters(self):
        """Returns this rank's parameters by the names that the whole model has for them; tied ones once."""
        return {self._aliases.get(name, name): each for name, each in self._engine.parts().named_parameters(remove_duplicate=False)}

    def counted_once(self, parameters):
        """Returns those of this rank's parameters that count for it: a tied one counts on its first stage only."""
        return self._engine.counted_once(parameters)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """Yields the parameters of this rank, with the names in the model: all of them before the model is partitioned."""
        yield from self._engine.parts().named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        yield from self._engine.parts().named_buffers(prefix, recurse, remove_duplicate)

    def local_parameters(self, recurse=True):
        yield from self._parts().parameters(recurse)

    def local_named_parameters(self, prefix="", recurse=True):
        yield from self._parts().named_parameters(prefix, recurse)

    def local_buffers(self, recurse=True):
        yield from self._parts().buffers(recurse)

    def local_named_buffers(self, prefix="", recurse=True):
        yield from self._parts().named_buffers(prefix, recurse)

    def local_modules(self):
        yield from self._parts().modules()

    def local_named_modules(self):
        yield from self._parts().named_modules()

    def is_distributed_parameter(self, parameter):
        """Returns true if tensor parallelism has divided a parameter."""
        return _tensor.part_of(parameter) is not None

    is_scaled_batch_parameter = is_distributed_parameter

    def default_reducer_named_parameters(self):
        """Yields the parameters that are the same on all ranks of DP_GROUP."""
        yield from ((name, each) for name, each in self.local_named_parameters() if not self.is_distributed_parameter(each))

    def scaled_batch_reducer_named_parameters(self):
        """Yields the parameters of which each rank of TP_GROUP has a part: gradients are averaged over RDP_GROUP."""
        yield from ((name, each) for name, each in self.local_named_parameters() if self.is_distributed_parameter(each))

    # ---- States ----

    def local_state_dict(self):
        """Returns the state of this rank's partition."""
        if state.is_sharded():
            raise SMPUnsupportedError("smp: model.local_state_dict() with sharded_data_parallel_degree: call smp.save_checkpoint() or, for the "
                                      "whole state on rank 0, model.state_dict(), on all ranks")
        found = collections.OrderedDict(self._parts().state_dict())
        found.update(self._left)
        found[PARTIAL] = True
        return found

    def state_dict(self, *args, gather_to_rank0=False, **kwargs):
        """Returns the state of the whole model, as one process has it. All ranks of a pipeline call it. gather_to_rank0: only
        pp_rank 0 gets it, others an empty dict. With sharded_data_parallel_degree all ranks call it, and rank 0 gets it."""
        if self.pp_size == 1:
            return self._engine.state_dict(*args, **kwargs)
        if not self.partitioned:
            return _tensor.whole_state(self.module, *args, **kwargs)
        own = {**self.local_state_dict(), **_tensor.whole_state(self._parts())}
        found = {name: value for part in _messages.allgather(_on_cpu(own), _messages.CommGroup.PP_GROUP) for name, value in part.items()}
        if gather_to_rank0 and pp_rank() > 0:
            return collections.OrderedDict()
        return collections.OrderedDict((name, found[name]) for name in self._keys if name in found)

    def load_state_dict(self, state_dict, strict=True, same_partition_load=False):
        """Loads the state of the whole model, or of partitions: then all ranks of a pipeline call it, each with one partition's.
        same_partition_load: each rank has the state of its own partition."""
        given = dict(state_dict)
        is_partial = given.pop(PARTIAL, False) or same_partition_load
        if not is_partial and _tensor.is_on():
            given = _tensor.own_state(self._engine.parts(), given)
        if is_partial and not same_partition_load and self.pp_size > 1:
            parts = _messages.allgather(_on_cpu(given), _messages.CommGroup.PP_GROUP)
            given = {name: value for part in parts for name, value in part.items()}
        if self.pp_size == 1:
            return self._engine.load_state_dict(given, strict)
        if not self.partitioned:
            return self.module.load_state_dict(given, strict)
        return self._load_own(given, strict and not same_partition_load)

    def _load_own(self, given, strict):
        unexpected, missing = [name for name in given if name not in self._keys], [name for name in self._keys if name not in given]
        if strict and (unexpected or missing):
            raise SMPError(f"smp: the state is of another model: it has {', '.join(unexpected) or 'nothing'} besides, and lacks "
                           f"{', '.join(missing) or 'nothing'}")
        own = self._parts().state_dict()
        with torch.no_grad():
            for name, value in self._left.items():
                value.copy_(given.get(name, value))
        self._parts().load_state_dict({name: given.get(name, value) for name, value in own.items()})
        return nn.modules.module._IncompatibleKeys(missing, unexpected)

    # ---- Others ----

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Like torch.nn.utils.clip_grad_norm_ of the whole model, with gradients of all partitions; returns their norm. All ranks of
        a pipeline call it between the step and optimizer.step()."""
        return self._engine.clip(max_norm, norm_type)

    def join(self, *args, **kwargs):
        """Trains with numbers of batches that differ between ranks, with one partition. Its arguments are those of torch's
        DistributedDataParallel.join()."""
        return self._engine.join(*args, **kwargs)

    def no_sync(self):
        raise SMPUnsupportedError("smp: model.no_sync() is not served: pass backward_passes_per_step= to smp.DistributedModel")

    def register_comm_hook(self, state, callable):
        raise SMPUnsupportedError("smp: model.register_comm_hook() is not served: gradients are averaged by Shoal")

    def cpu(self):
        """Parts stay on their ranks, whose memory they are in already."""
        return self


def _check(module, backward_passes_per_step):
    if not isinstance(module, nn.Module) or isinstance(module, DistributedModel):
        raise SMPError(f"smp.DistributedModel: the model must be an nn.Module that is not wrapped yet, not {type(module).__name__}")
    if not isinstance(backward_passes_per_step, int) or backward_passes_per_step < 1:
        raise SMPError(f"smp.DistributedModel: backward_passes_per_step must be a number from 1 on, not {backward_passes_per_step!r}")


def _names_of_tied(module):
    """Returns the first name of each parameter that has several, by its other names."""
    first, found = {}, {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            found[name] = first[id(parameter)]
    return found


def _on_cpu(values):
    return {name: value.detach().cpu() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
