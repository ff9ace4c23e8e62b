"""The parameters of a job of version 2: what each key means here. A key has its meaning, one clear error, or one line of log if it
has no meaning on this library."""
from __future__ import annotations

import dataclasses
import difflib
import json
import os
import typing

from smdistributed.modelparallel import _parameters as version_1
from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError

VARIABLE = version_1.VARIABLE
KEYS = {
    "hybrid_shard_degree": int, "tensor_parallel_degree": int, "context_parallel_degree": int, "expert_parallel_degree": int,
    "sm_activation_offloading": bool, "activation_loading_horizon": int, "fsdp_cache_flush_warnings": bool, "allow_empty_shards": bool,
    "random_seed": int,
}
# Keys that have no meaning here, and why.
POINTLESS = {
    "activation_loading_horizon": "PyTorch's own offload_wrapper moves activations",
    "fsdp_cache_flush_warnings": "PyTorch reports its caches itself",
    "allow_empty_shards": "shards of PyTorch's FSDP may always be empty",
    "random_seed": "values of divided modules are those of the whole module, whatever the degree",
}
LEAST = {"hybrid_shard_degree": 0, "tensor_parallel_degree": 1, "context_parallel_degree": 1, "expert_parallel_degree": 1,
         "activation_loading_horizon": 1}


@dataclasses.dataclass(frozen=True)
class Parameters:
    """The parameters of a job, checked except against the number of its processes."""
    hybrid_shard_degree: int = 0  # 0: PyTorch's own, or as many as there are
    tensor_parallel_degree: int = 1
    context_parallel_degree: int = 1
    expert_parallel_degree: int = 1
    sm_activation_offloading: typing.Optional[bool] = None


def given(config=None):
    """Returns the parameters as a dict. config: a dict, the path of a JSON file, or None for those that the job has set."""
    if config is None:
        text, source = os.environ.get(VARIABLE, "{}"), VARIABLE
    elif isinstance(config, dict):
        return dict(config)
    elif isinstance(config, (str, os.PathLike)):
        source = str(config)
        try:
            with open(config) as file:
                text = file.read()
        except OSError as error:
            raise SMPConfigError(f"tsm.init: cannot read the configuration {source}: {error.strerror}") from None
    else:
        raise SMPConfigError(f"tsm.init: the configuration must be a dict or the path of a JSON file, not {type(config).__name__}")
    try:
        found = json.loads(text)
    except ValueError as error:
        raise SMPConfigError(f"tsm.init: {source} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise SMPConfigError(f"tsm.init: {source} must contain a JSON object, not {text.strip()[:60]}")
    return found


def read(found):
    """Returns (Parameters, lines for the log). Raises SMPConfigError or SMPUnsupportedError for the first mistake."""
    values, notes = {}, []
    for key, value in found.items():
        _check_name(key)
        if value is None:
            continue
        values[key] = _checked(key, value)
        if key in POINTLESS:
            notes.append(f"{key} has no effect: {POINTLESS[key]}")
    if values.get("expert_parallel_degree", 1) > 1:
        raise SMPUnsupportedError(f"tsm.init: expert_parallel_degree {values['expert_parallel_degree']} is not served: leave it out; "
                                  "hybrid_shard_degree divides the parameters of experts as well")
    fields = [field.name for field in dataclasses.fields(Parameters)]
    return Parameters(**{name: value for name, value in values.items() if name in fields}), notes


def _check_name(key):
    if key in KEYS:
        return
    first = {*version_1.SERVED, *version_1.POINTLESS, *version_1.REFUSED, *version_1.OTHER_NAMES}
    if key in first:
        raise SMPUnsupportedError(f"tsm.init: {key} is of version 1 of the vendor's library (smdistributed.modelparallel.torch), and this is "
                                  "version 2 (torch.sagemaker)")
    near = difflib.get_close_matches(str(key), KEYS, n=1, cutoff=0.6)
    raise SMPConfigError(f"tsm.init: unknown parameter {key}" + (f": did you mean {near[0]}?" if near else ""))


def _checked(key, value):
    kind = KEYS[key]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a number without fraction", bool: "true or false"}
        raise SMPConfigError(f"tsm.init: {key} must be {words[kind]}, not {json.dumps(value, default=str)}")
    if key in LEAST and value < LEAST[key]:
        raise SMPConfigError(f"tsm.init: {key} must be at least {LEAST[key]}, not {value}")
    return value
