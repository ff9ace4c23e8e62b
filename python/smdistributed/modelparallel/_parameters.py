"""The parameters of a job. Each key has an effect, or causes one clear error, or one line of the log that tells why it has no
effect. This module does not import torch, so that a front-end for another framework can use it."""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError

VARIABLE = "SM_HP_MP_PARAMETERS"
PIPELINES = ("interleaved", "simple", "_only_forward")
STRATEGIES = {"cluster": "DPT", "spread": "TPD"}
OTHER_NAMES = {"partitions": "pipeline_parallel_degree"}
# Keys that are served, and their types.
SERVED = {
    "pipeline_parallel_degree": int, "microbatches": int, "active_microbatches": int, "pipeline": str, "placement_strategy": str,
    "auto_partition": bool, "default_partition": int, "memory_weight": float, "ddp": bool, "shard_optimizer_state": bool,
    "sharded_data_parallel_degree": int, "sdp_gradient_clipping": float, "delayed_parameter_initialization": bool, "fp16": bool,
    "bf16": bool, "tensor_parallel_degree": int, "optimize": str, "prescaled_batch": bool, "offload_activations": bool, "horovod": bool,
}
# Keys that have no meaning here, and why.
POINTLESS = {
    "optimize": "there is one form of tensor parallelism",
    "prescaled_batch": "it is for tensor parallelism, and tensor_parallel_degree is 1",
    "fp16_params": "parameters are of float32, and operations in bfloat16",
    "offload_activations": "activations are in the memory of the host already",
    "activation_loading_horizon": "activations are in the memory of the host already",
    "skip_tracing": "the model is measured on the CPU, unit by unit",
    "deterministic_server": "there is no server; every rank runs a fixed schedule",
    "static_mode": "there is no server; every rank runs a fixed schedule",
    "fast_mode": "stages always send directly to each other",
    "contiguous": "stages are contiguous always",
    "ddp_dist_backend": "gradients are summed by Shoal",
    "ddp_port": "ranks meet at the port of torch.distributed",
    "sdp_reduce_bucket_size": "it tunes the vendor's sharding", "sdp_param_persistence_threshold": "it tunes the vendor's sharding",
    "sdp_max_live_parameters": "it tunes the vendor's sharding", "sdp_hierarchical_allgather": "Shoal gathers by hosts always",
    "sdp_gradient_clipping": "it is for sharded_data_parallel_degree",
    "checkpoint_attentions": "it is for the vendor's own transformer layers: use smp.set_activation_checkpointing()",
    "_fp32_grad_accumulation": "gradients have the type of their parameters",
    "_match_weights": "it is for the vendor's own tests",
}
# Values for which a key of POINTLESS asks for nothing, besides None and false.
SILENT = {"optimize": "memory", "sdp_gradient_clipping": 1.0}
# Keys that are refused, unless they have the value for which they mean nothing: that value, and what to do.
REFUSED = {
    "load_partition": (False, "save and load the model instead, or mark stages with smp.partition()"),
    "partition_file": (None, "mark stages with smp.partition() or smp.set_partition()"),
}
VERSION_2 = ("hybrid_shard_degree", "sm_activation_offloading", "allow_empty_shards", "fsdp_cache_flush_warnings", "context_parallel_degree",
             "expert_parallel_degree", "random_seed")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a job, checked."""
    pipeline_parallel_degree: int = 1
    microbatches: int = 1
    active_microbatches: typing.Optional[int] = None  # the most that are on their way on a rank; None: partitions + 2
    pipeline: str = "interleaved"
    placement_strategy: str = "DPT"
    auto_partition: bool = True
    default_partition: int = 0
    memory_weight: typing.Optional[float] = None  # None: the shortest step decides
    ddp: bool = False
    shard_optimizer_state: bool = False
    sharded_data_parallel_degree: int = 1
    sdp_gradient_clipping: float = 1.0
    delayed_parameter_initialization: bool = False
    fp16: bool = False
    bf16: bool = False
    tensor_parallel_degree: int = 1
    prescaled_batch: bool = False  # the ranks of a TP group are given the same batch
    horovod: bool = False  # with TensorFlow: replicas
    # What scripts read, and is always the same here.
    optimize: str = "memory"
    offload_activations: bool = False

    @property
    def partitions(self):
        return self.pipeline_parallel_degree


def given(config=None):
    """Returns the parameters as a dict: the program's, in which those of the environment replace others, as a job sets them."""
    if config is not None and not isinstance(config, dict):
        raise SMPConfigError(f"smp.init: the configuration must be a dict, not {type(config).__name__}")
    set_by_job = _of_environment()
    if config is None and set_by_job is None:
        raise SMPConfigError(f"smp.init: there are no parameters: set {VARIABLE} to a JSON object such as "
                             "{\"pipeline_parallel_degree\": 2, \"microbatches\": 4}, or pass them as a dict")
    replaced = {OTHER_NAMES.get(key, key) for key in set_by_job or ()}
    own = {key: value for key, value in (config or {}).items() if OTHER_NAMES.get(key, key) not in replaced}
    return {**own, **(set_by_job or {})}


def _of_environment():
    """Returns the parameters that the environment has, or None."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SMPConfigError(f"smp.init: {VARIABLE} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SMPConfigError(f"smp.init: {VARIABLE} must be a JSON object, not {text}")
    return found


def read(found):
    """Returns (Parameters, lines for the log). Raises SMPConfigError or SMPUnsupportedError for the first mistake."""
    values, notes = {}, []
    for key, value in found.items():
        name = OTHER_NAMES.get(key, key)
        if name in values:
            raise SMPConfigError(f"smp.init: partitions and pipeline_parallel_degree are the same parameter: leave {key} out")
        _refuse(name, value)
        if name in SERVED:
            values[name] = _checked(key, value, SERVED[name])
        is_of_shards = name == "sdp_gradient_clipping" and found.get("sharded_data_parallel_degree") not in (None, 1)
        is_of_tensors = name == "prescaled_batch" and found.get("tensor_parallel_degree") not in (None, 1)
        if name in POINTLESS and not (is_of_shards or is_of_tensors) and value not in (None, False, SILENT.get(name)):
            notes.append(f"{key} has no effect: {POINTLESS[name]}")
    values = {name: value for name, value in values.items() if value is not None}
    _check(values)
    if values.get("fp16"):
        notes.append("fp16: on CPUs bfloat16 takes its place, which needs no loss scale")
    values["placement_strategy"] = STRATEGIES.get(values.get("placement_strategy", "cluster"), values.get("placement_strategy"))
    return Parameters(**values), notes


def _refuse(name, value):
    if name in VERSION_2:
        raise SMPUnsupportedError(f"smp.init: {name} is of version 2 of the vendor's library (torch.sagemaker), and this is version 1")
    if name in REFUSED and value != REFUSED[name][0]:
        raise SMPUnsupportedError(f"smp.init: {name}: {json.dumps(value)} is not served: {REFUSED[name][1]}")
    known = [*SERVED, *POINTLESS, *REFUSED, *OTHER_NAMES]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        raise SMPConfigError(f"smp.init: unknown parameter {name}" + (f": did you mean {near[0]}?" if near else ""))


def _checked(key, value, kind):
    if value is None:
        return None
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    words = {int: "a number without fraction", float: "a number", bool: "true or false", str: "text"}
    raise SMPConfigError(f"smp.init: {key} must be {words[kind]}, not {json.dumps(value, default=str)}")


def _check(values):
    """Raises an error for values that are out of range or contradict each other."""
    for name in ("pipeline_parallel_degree", "microbatches", "active_microbatches", "sharded_data_parallel_degree", "tensor_parallel_degree"):
        if values.get(name) is not None and values[name] < 1:
            raise SMPConfigError(f"smp.init: The number of {name} must be a positive integer, not {values[name]}")
    if values.get("pipeline_parallel_degree") is None:
        raise SMPConfigError("smp.init: pipeline_parallel_degree (or partitions) is missing: the number of stages of the model")
    _check_choice(values, "pipeline", PIPELINES)
    _check_choice(values, "optimize", ("memory", "speed"))
    strategy = values.get("placement_strategy", "cluster")
    if strategy not in STRATEGIES and sorted(strategy) != ["D", "P", "T"]:
        raise SMPConfigError(f"smp.init: placement_strategy is {strategy!r}, but must be cluster, spread, or the letters D, P and T in any "
                             "order")
    if values.get("memory_weight") is not None and not 0.0 <= values["memory_weight"] <= 1.0:
        raise SMPConfigError(f"smp.init: memory_weight must be between 0.0 and 1.0, not {values['memory_weight']}")
    degree, default = values["pipeline_parallel_degree"], values.get("default_partition")
    if values.get("auto_partition", True) is False and default is None:
        raise SMPConfigError("smp.init: default_partition must be supplied if auto_partition is set to False!")
    if default is not None and not 0 <= default < degree:
        raise SMPConfigError(f"smp.init: default_partition must be less than the number of partitions ({degree}), and it is {default}")
    if values.get("ddp") and values.get("horovod"):
        raise SMPConfigError("smp.init: ddp and horovod are both true: write ddp with PyTorch, horovod with TensorFlow")
    if values.get("fp16") and values.get("bf16"):
        raise SMPConfigError("smp.init: fp16 and bf16 are both true: choose one")
    _check_shards(values)


def _check_shards(values):
    is_sharded = values.get("sharded_data_parallel_degree", 1) > 1
    if values.get("tensor_parallel_degree", 1) > 1 and not values.get("ddp"):
        raise SMPConfigError("smp.init: tensor_parallel_degree needs \"ddp\": true: modules are divided among data-parallel ranks")
    if is_sharded and values.get("tensor_parallel_degree", 1) > 1:
        raise SMPUnsupportedError("smp.init: sharded_data_parallel_degree is served without tensor parallelism: set tensor_parallel_degree to 1")
    if is_sharded and values["pipeline_parallel_degree"] > 1:
        raise SMPUnsupportedError("smp.init: sharded_data_parallel_degree is not compatible with pipeline parallelism: set "
                                  "pipeline_parallel_degree to 1, or shard_optimizer_state in place of sharded_data_parallel_degree")
    if is_sharded and values.get("shard_optimizer_state"):
        raise SMPConfigError("smp.init: sharded_data_parallel_degree shards states as well: leave shard_optimizer_state out")
    if is_sharded and not values.get("ddp"):
        raise SMPConfigError("smp.init: sharded_data_parallel_degree needs \"ddp\": true: parameters are divided among the data-parallel "
                             "ranks")
    if values.get("shard_optimizer_state") and not values.get("ddp"):
        raise SMPConfigError("smp.init: shard_optimizer_state needs \"ddp\": true: states are divided among the data-parallel ranks")


def _check_choice(values, name, choices):
    if values.get(name) is not None and values[name] not in choices:
        raise SMPConfigError(f"smp.init: {name} must be a value in: {', '.join(choices)}; it is {values[name]!r}")
