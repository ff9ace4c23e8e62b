"""PyTorch's FullyShardedDataParallel with the degrees of a job. tsm.init wraps the constructor of the class, because scripts have
imported the class by then. The wrapper changes four arguments:

  sharding_strategy, process_group   those of hybrid_shard_degree, unless the script passes a group or a mesh
  post_param_init_fn                 the vendor's own argument: called with each module after param_init_fn
  device_id                          the CPU, if there is no GPU
  sync_module_states                 also with values on the CPU, which PyTorch refuses, because NCCL cannot broadcast them

It mends one fault: on the CPU a whole state dict with offload_to_cpu reads memory that FSDP has freed, because it takes the parameter
for a copy on another device. With tensor parallelism a whole state dict has whole parameters."""
from __future__ import annotations

import contextlib
import functools
import inspect

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType, _init_utils
from torch.distributed.fsdp._flat_param import FlatParamHandle

from smdistributed.modelparallel.exceptions import SMPConfigError

HYBRID = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
# What a hybrid strategy is if there is one replica.
WHOLE = {ShardingStrategy.HYBRID_SHARD: ShardingStrategy.FULL_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2: ShardingStrategy.SHARD_GRAD_OP}
_constructor, _to_cpu = FullyShardedDataParallel.__init__, FlatParamHandle.to_cpu


def install(state):
    """Wraps the constructor. state: the job's."""
    @functools.wraps(_constructor)
    def construct(self, *args, post_param_init_fn=None, **kwargs):
        given = inspect.signature(_constructor).bind(self, *args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        given.pop("self")
        with _values_on_cpu():
            _constructor(self, **_changed(state, given, post_param_init_fn))
        if state.tensor_parallel_degree > 1:
            _make_whole(self)
    FullyShardedDataParallel.__init__, FlatParamHandle.to_cpu = construct, _stay_on_cpu


def remove():
    """Undoes install()."""
    FullyShardedDataParallel.__init__, FlatParamHandle.to_cpu = _constructor, _to_cpu


@functools.wraps(_to_cpu)
def _stay_on_cpu(self):
    return contextlib.nullcontext() if self.flat_param.device.type == "cpu" else _to_cpu(self)


def _changed(state, given, post_param_init_fn):
    """Returns the arguments of a constructor, by name. FSDP constructs the units inside with those of the whole."""
    if given.get("process_group") is None and given.get("device_mesh") is None:
        given = {**given, **_groups(state, given.get("sharding_strategy"))}
    if post_param_init_fn is not None:
        if given.get("param_init_fn") is None:
            raise SMPConfigError("FSDP: post_param_init_fn is called after param_init_fn: pass both, of one DelayedParamIniter")
        given["param_init_fn"] = _one_after_the_other(given["param_init_fn"], post_param_init_fn)
    if not _has_accelerator():
        given["device_id"] = torch.device("cpu")
    if state.tensor_parallel_degree > 1:
        given["use_orig_params"] = True  # gradients of divided and of whole parameters count differently in a norm
    return given


def _has_accelerator():
    return torch.cuda.is_available() or (hasattr(torch, "accelerator") and torch.accelerator.is_available())


def _groups(state, strategy):
    """Returns the arguments of FSDP for hybrid_shard_degree."""
    from torch.sagemaker.state_handler import ranks_of_a_host
    if state.falls_back:
        if strategy not in HYBRID:
            return {}
        degree = ranks_of_a_host()
    else:
        degree = state.hybrid_shard_degree or state.world_size // state.tensor_parallel_degree
        strategy = strategy if strategy in HYBRID else ShardingStrategy.HYBRID_SHARD
    shards, replicas = state.shard_and_replica_groups(degree)
    if shards is None:
        return {"sharding_strategy": ShardingStrategy.NO_SHARD, "process_group": replicas or _alone()}
    if replicas is None:
        return {"sharding_strategy": WHOLE[strategy], "process_group": shards}
    return {"sharding_strategy": strategy, "process_group": (shards, replicas)}


def _alone():
    """Returns a process group of this rank."""
    return torch.distributed.new_group([torch.distributed.get_rank()], use_local_synchronization=True)


def _one_after_the_other(first, second):
    def initialize(module):
        first(module)
        second(module)
    return initialize


@contextlib.contextmanager
def _values_on_cpu():
    """Inside, PyTorch does not check that the values for sync_module_states are on a GPU."""
    check = "_check_module_states_for_sync_module_states"
    former = getattr(_init_utils, check, None)
    if former is None or _has_accelerator():
        yield
        return
    setattr(_init_utils, check, lambda states: None)
    try:
        yield
    finally:
        setattr(_init_utils, check, former)


def _make_whole(model):
    """Lets a whole state dict of FSDP have whole parameters instead of those of one tensor-parallel rank."""
    from torch.sagemaker import _tensor

    def gather(module, state_dict, prefix, local_metadata):
        if FullyShardedDataParallel.get_state_dict_type(module).state_dict_type == StateDictType.FULL_STATE_DICT:
            _tensor.gather_parameters(module, state_dict, prefix)
    model._register_state_dict_hook(gather)
