"""The meaning of each key of `distribution`: the hyperparameters that a container gets, and how the workers of a host are
started.

This module finds two kinds of mistakes. If the SageMaker Python SDK v2 refuses a setting, the text is the SDK's. Some settings
the SDK accepts although nobody can mean them: a misspelt key, a missing `enabled`, two strategies at once. These are refused in
our own words; with the SDK such a job silently trains undistributed, or with a strategy that the container chooses."""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import difflib
import json
import os
import pathlib
import shlex
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple, Union

from shoal.job.document import Job

KeyPath = Tuple[Union[str, int], ...]  # the keys and list indexes that lead to a value
Mistake = Tuple[KeyPath, str]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """One way to distribute."""

    settings: Dict[str, Tuple[type, ...]]  # the names of its settings, and their types
    runner: str
    frameworks: Tuple[str, ...] = ()  # with which it can be used; empty means all
    refusal: Optional[str] = None  # why Shoal does not serve it


_ENABLED = {"enabled": (bool,)}
_MPI_OPTIONS = {"custom_mpi_options": (str,)}

STRATEGIES: Dict[KeyPath, Strategy] = {
    ("smdistributed", "dataparallel"): Strategy({**_ENABLED, **_MPI_OPTIONS}, "shoal"),
    ("smdistributed", "modelparallel"): Strategy(
        {**_ENABLED, "parameters": (dict, str)}, "mpi"),  # or torchrun, if the other enabled strategy is torch_distributed
    ("pytorchddp",): Strategy({**_ENABLED, **_MPI_OPTIONS}, "shoal", ("pytorch",)),
    ("torch_distributed",): Strategy(_ENABLED, "torchrun", ("pytorch",)),
    ("mpi",): Strategy({**_ENABLED, "processes_per_host": (int,), **_MPI_OPTIONS}, "mpi"),
    ("parameter_server",): Strategy(_ENABLED, "tensorflow"),
    ("multi_worker_mirrored_strategy",): Strategy(_ENABLED, "tensorflow", ("tensorflow",)),
    ("pytorchxla",): Strategy(_ENABLED, "torchrun", ("pytorch",), refusal="pytorchxla is not served: it needs SageMaker's own "
                                                                          "training compiler; use torch_distributed"),
}
# Strategies that may be enabled together with modelparallel: they choose how its processes are started.
_MODELPARALLEL: KeyPath = ("smdistributed", "modelparallel")
_LAUNCHERS_OF_MODELPARALLEL = (("mpi",), ("torch_distributed",))
SMDISTRIBUTED_STRATEGIES = ["dataparallel", "modelparallel"]  # as the SDK prints them


LOG_LEVEL = 20  # logging.INFO, the SDK's default
# Hyperparameters that describe how a job is run; they are set when its name is known.
OF_THE_RUN = ("sagemaker_submit_directory", "sagemaker_program", "sagemaker_container_log_level", "sagemaker_job_name",
              "sagemaker_region")


@dataclasses.dataclass
class Launch:
    """How the workers of each host are started."""

    # "shoal": `shoal run` starts them. "torchrun": like "shoal", with the variables of torchrun. "mpi": like "shoal", with the
    # variables of Open MPI. "tensorflow": one process on each host, with TF_CONFIG. "plain": one process on each host that
    # knows no other.
    runner: str
    workers_per_host: int
    environment: Dict[str, str] = dataclasses.field(default_factory=dict)  # for every worker
    options: List[str] = dataclasses.field(default_factory=list)  # for `shoal run`
    tf_config: Optional[str] = None  # "parameter_server" or "multi_worker_mirrored_strategy": the argument of tf_config()
    notes: List[str] = dataclasses.field(default_factory=list)  # lines for the log: settings that have no meaning here


def names_like(word: str, known: Iterable[str]) -> str:
    """Returns a text such as `; did you mean "dataparallel"?`, or "" if no known name is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f'; did you mean "{near[0]}"?' if near else ""


def strategy_of(distribution: Dict[str, Any]) -> Optional[KeyPath]:
    """Returns the strategy that a distribution without mistakes enables."""
    found = [keys for keys in STRATEGIES if _is_enabled(_settings(distribution, keys))]
    beside = [keys for keys in found if keys not in _LAUNCHERS_OF_MODELPARALLEL]
    return (beside or found or [None])[0]


def launch_of(job: Job, host_gpus: int = 0) -> Launch:
    """Returns how the job's workers are started on a host with `host_gpus` GPUs. Raises ValueError for the first mistake in
    `distribution`."""
    for keys, text in mistakes(job):
        raise ValueError(f"{'.'.join(('distribution',) + keys)}: {text}")
    keys = strategy_of(job.distribution)
    if keys is None:
        # The SDK sets no number of workers without a strategy; a document that does asks for workers that know each other.
        return Launch("shoal" if job.workers_per_host else "plain", job.workers_per_host or 1)
    strategy = STRATEGIES[keys]
    if strategy.runner == "tensorflow":
        return Launch("tensorflow", 1, tf_config=keys[0])
    launch = Launch(strategy.runner, _workers_per_host(job, host_gpus))
    if keys == _MODELPARALLEL:
        keys = next(beside for beside in _LAUNCHERS_OF_MODELPARALLEL if _is_enabled(_settings(job.distribution, beside)))
        launch.runner = STRATEGIES[keys].runner
    _read_mpi_options(_settings(job.distribution, keys).get("custom_mpi_options", ""), launch)
    return launch


def _workers_per_host(job: Job, host_gpus: int) -> int:
    """Follows the vendor's containers: the number under `mpi` applies to every strategy, even if `mpi` itself is not
    enabled."""
    return job.workers_per_host or _settings(job.distribution, ("mpi",)).get("processes_per_host") or host_gpus or 1


# ------------------------------------------------------------ mistakes

def mistakes(job: Job) -> List[Mistake]:
    """Returns all mistakes in the `distribution` of a job whose other fields have the right types."""
    asked = Asked(job.distribution, job.framework, job.entry_point)
    found = all_mistakes(asked)
    keys = strategy_of(job.distribution)
    per_host = _settings(job.distribution, ("mpi",)).get("processes_per_host")
    if job.workers_per_host and per_host and per_host != job.workers_per_host:
        found.append((("mpi", "processes_per_host"), f"{per_host}, and workers_per_host is {job.workers_per_host}; give "
                      "one of them"))
    if keys and STRATEGIES[keys].runner == "tensorflow" and (job.workers_per_host or 1) > 1:
        found.append((keys,
                      f"starts one process on each host, and workers_per_host is {job.workers_per_host}; leave that out"))
    if keys and STRATEGIES[keys].refusal:
        found.append((keys, STRATEGIES[keys].refusal or ""))
    if keys == _MODELPARALLEL:
        found += _parameters_not_served(job.distribution, job.framework)
    return found


# Parameters of smdistributed.modelparallel. The package of that name (python/smdistributed) serves them, or names them in the log,
# except for those in _MP_REFUSED_OF_PYTORCH and _2; it also checks their values.
_MP_OF_BOTH = ("activation_loading_horizon", "tensor_parallel_degree")
_MP_VERSION_1 = (
    "active_microbatches", "auto_partition", "bf16", "checkpoint_attentions", "contiguous", "ddp", "ddp_dist_backend", "ddp_port",
    "default_partition", "delayed_parameter_initialization", "deterministic_server", "fast_mode", "fp16", "fp16_params", "horovod",
    "load_partition", "memory_weight", "microbatches", "offload_activations", "optimize", "partition_file", "partitions", "pipeline",
    "pipeline_parallel_degree", "placement_strategy", "prescaled_batch", "shard_optimizer_state", "sharded_data_parallel_degree",
    "sdp_gradient_clipping", "sdp_hierarchical_allgather", "sdp_max_live_parameters", "sdp_param_persistence_threshold",
    "sdp_reduce_bucket_size", "skip_tracing", "static_mode", "_fp32_grad_accumulation", "_match_weights")
_MP_VERSION_2 = ("allow_empty_shards", "context_parallel_degree", "expert_parallel_degree", "fsdp_cache_flush_warnings",
                 "hybrid_shard_degree", "random_seed", "sm_activation_offloading")
_MP_KNOWN = (*_MP_OF_BOTH, *_MP_VERSION_1, *_MP_VERSION_2)
# Those that are not served, with the value for which they mean nothing, and what to use instead.
_MP_REFUSED_OF_PYTORCH: Dict[str, Tuple[Any, str]] = {"horovod": (False, "\"ddp\": true trains replicas together")}
_MP_REFUSED_2: Dict[str, Tuple[Any, str]] = {
    "expert_parallel_degree": (1, "hybrid_shard_degree divides the parameters of experts as well")}


def _is_version_2(distribution: Dict[str, Any], parameters: Dict[str, Any]) -> bool:
    """Returns true for parameters of version 2 of the library, whose processes torchrun starts."""
    is_by_torchrun = _is_enabled(_settings(distribution, ("torch_distributed",)))
    return any(name in _MP_VERSION_2 for name in parameters) or (is_by_torchrun and not any(name in _MP_VERSION_1 for name in parameters))


def _parameters_not_served(distribution: Dict[str, Any], framework: Optional[str]) -> Iterator[Mistake]:
    try:
        parameters = mp_parameters(distribution) or {}
    except ValueError:
        return  # already reported
    is_2 = _is_version_2(distribution, parameters)
    refused = _MP_REFUSED_2 if is_2 else {} if framework == "tensorflow" else _MP_REFUSED_OF_PYTORCH
    for name, value in parameters.items():
        keys = _MODELPARALLEL + ("parameters", name)
        if name not in _MP_KNOWN:
            yield keys, f"unknown parameter{names_like(name, _MP_KNOWN)}"
        elif is_2 and name in _MP_VERSION_1:
            other = next(each for each in parameters if each in _MP_VERSION_2)
            yield keys, f"is of version 1 of the library, and {other} of version 2; give the parameters of one"
        elif name in refused and value != refused[name][0]:
            yield keys, f"{said(value)} is not served: leave it out, or write {said(refused[name][0])}; {refused[name][1]}"
        elif is_2 and framework == "tensorflow":
            yield keys, "is of version 2 of the library, which is for PyTorch only"


@dataclasses.dataclass
class Asked:
    """The values with which a distribution is checked."""

    distribution: Any
    framework: Optional[str]
    entry_point: Optional[str] = None


def all_mistakes(asked: Asked) -> List[Mistake]:
    """Returns what the SDK refuses, in its order, then what only we refuse. Reports one mistake for each place, the first that was
    found."""
    found: Dict[KeyPath, str] = {}
    for finder in (vendor_mistakes, own_mistakes):
        for keys, text in finder(asked):
            if not any(keys[:len(known)] == known for known in found):
                found[keys] = text
    return list(found.items())


def own_mistakes(asked: Asked) -> Iterator[Mistake]:
    if not isinstance(asked.distribution, dict):
        yield (), f"needs a table of strategies, not {said(asked.distribution)}"
        return
    for key, value in asked.distribution.items():
        if key == "smdistributed":
            yield from _mistakes_of_smdistributed(value, asked)
        elif key == "instance_groups":
            yield (key,), "groups of instances of several types are not served; leave it out: all hosts run the job"
        elif (key,) in STRATEGIES:
            yield from _mistakes_of_strategy((key,), value, asked)
        else:
            yield (str(key),), _unknown_strategy(str(key))
    yield from _mistakes_of_combination(asked.distribution)


def _unknown_strategy(key: str) -> str:
    if key in SMDISTRIBUTED_STRATEGIES:
        return f'unknown strategy; write "smdistributed": {{"{key}": ...}}'
    known = sorted({keys[0] for keys in STRATEGIES})
    return f"unknown strategy{names_like(key, known) or '; known: ' + ', '.join(known)}"


def _mistakes_of_smdistributed(value: Any, asked: Asked) -> Iterator[Mistake]:
    if isinstance(value, dict) and not value:
        yield ("smdistributed",), f"names no strategy; known: {', '.join(SMDISTRIBUTED_STRATEGIES)}"
    for name, settings in value.items() if isinstance(value, dict) else ():
        if ("smdistributed", name) in STRATEGIES:
            yield from _mistakes_of_strategy(("smdistributed", name), settings, asked)


def _mistakes_of_strategy(keys: KeyPath, settings: Any, asked: Asked) -> Iterator[Mistake]:
    strategy = STRATEGIES[keys]
    if not isinstance(settings, dict):
        yield keys, f'needs a table such as {{"enabled": true}}, not {said(settings)}'
        return
    if strategy.frameworks and asked.framework and asked.framework not in strategy.frameworks and settings.get("enabled"):
        yield keys, f"is for {' and '.join(strategy.frameworks)}, and this job's framework is {asked.framework}"
    for key, value in settings.items():
        if key not in strategy.settings:
            near = names_like(str(key), strategy.settings)
            yield keys + (str(key),), f"unknown setting{near or '; known: ' + ', '.join(strategy.settings)}"
        elif not isinstance(value, strategy.settings[key]) or (isinstance(value, bool) and bool not in strategy.settings[key]):
            yield keys + (key,), f"needs {_kinds(strategy.settings[key])}, not {said(value)}"
        else:
            yield from _mistakes_of_setting(keys + (key,), value)
    if "enabled" not in settings:
        yield keys, '"enabled" is missing, without which nothing is distributed; write "enabled": true, or false'


def _mistakes_of_setting(keys: KeyPath, value: Any) -> Iterator[Mistake]:
    if keys[-1] == "processes_per_host" and value < 1:
        yield keys, f"needs a positive number, not {value}"
    if keys[-1] == "custom_mpi_options":
        try:
            shlex.split(value)
        except ValueError as error:
            yield keys, f"cannot be read: {error}: {value!r}"


def _mistakes_of_combination(distribution: Dict[str, Any]) -> Iterator[Mistake]:
    """If two strategies are enabled, the SDK or the container silently chooses one."""
    enabled = [keys for keys in STRATEGIES if _is_enabled(_settings(distribution, keys))]
    modelparallel = _MODELPARALLEL
    others = [keys for keys in enabled if keys not in _LAUNCHERS_OF_MODELPARALLEL] if modelparallel in enabled else enabled
    launchers = [keys for keys in enabled if keys not in others]
    if modelparallel in enabled and not launchers:
        yield modelparallel, ('needs "mpi", or "torch_distributed" since its version 2, to be enabled as well: these start '
                              'its workers')
    for chosen in (others, launchers):
        if len(chosen) > 1:
            names = " and ".join(".".join(keys) for keys in chosen)
            yield chosen[-1], f"{names} are both enabled, and only one of them can start the workers; enable one"


def said(value: Any) -> str:
    """Returns a value for a message, shortened to 60 characters."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _kinds(kinds: Sequence[type]) -> str:
    names = {bool: "true or false", int: "a whole number", str: "text", dict: "a table"}
    return " or ".join(names[kind] for kind in kinds)


def _settings(distribution: Any, keys: KeyPath) -> Dict[str, Any]:
    """Returns the settings of a strategy; empty if it has none, or if a mistake is there."""
    for key in keys:
        distribution = distribution.get(key) if isinstance(distribution, dict) else None
    return distribution if isinstance(distribution, dict) else {}


def _is_enabled(settings: Dict[str, Any]) -> bool:
    return settings.get("enabled") is True


# ------------------------------------------------------------ what the SDK refuses

BOTH = "Cannot use both pytorchddp and smdistributed distribution options together."


def vendor_mistakes(asked: Asked) -> Iterator[Mistake]:
    """Yields what the SDK refuses, in its order and words. Leaves settings that would crash the SDK by their type to
    own_mistakes(). Versions and instance types are not checked: the SDK's lists are those of Amazon's containers, a job on
    one's own machines uses none of these, and a job on SageMaker is checked by the SDK that starts it."""
    chosen, is_pytorch = asked.distribution, asked.framework != "tensorflow"
    if not isinstance(chosen, dict):
        return
    if is_pytorch and "pytorchddp" in chosen and "smdistributed" in chosen:
        yield ("pytorchddp",), BOTH
    if isinstance(chosen.get("instance_groups"), (list, tuple, str)) and chosen["instance_groups"]:
        yield ("instance_groups",), "Instance groups not specified in the estimator !"  # our estimators cannot specify any
    yield from _vendor_smdistributed(asked)
    if is_pytorch:
        yield from _vendor_torchrun(asked)
    if asked.framework == "pytorch" and "pytorchxla" in chosen:
        yield ("pytorchxla",), (
            "Distributed training through PyTorch XLA is currently only supported when SageMaker Training Compiler is "
            "enabled. To learn more, see Enable SageMaker Training Compiler at "
            "https://docs.aws.amazon.com/sagemaker/latest/dg/training-compiler-enable.html.")
    yield from _vendor_modelparallel(chosen)
    yield from _vendor_mirrored(asked)


def _vendor_smdistributed(asked: Asked) -> Iterator[Mistake]:
    keys: KeyPath = ("smdistributed",)
    if "smdistributed" not in asked.distribution:
        return
    chosen = asked.distribution["smdistributed"]
    if not isinstance(chosen, dict):
        yield keys, "smdistributed strategy requires a dictionary"
    elif len(chosen) > 1:
        yield keys, ("Cannot use more than 1 smdistributed strategy. \n"
                      f"Choose one of the following supported strategies:{SMDISTRIBUTED_STRATEGIES}")
    else:
        for strategy in chosen:
            if strategy not in SMDISTRIBUTED_STRATEGIES:
                yield keys + (str(strategy),), (f"Invalid smdistributed strategy provided: {strategy} \n"
                                                 f"Supported strategies: {SMDISTRIBUTED_STRATEGIES}")


def _vendor_torchrun(asked: Asked) -> Iterator[Mistake]:
    if _is_enabled(_settings(asked.distribution, ("torch_distributed",))) and not (asked.entry_point or "").endswith(".py"):
        yield ("torch_distributed",), ("Unsupported entry point type for the distribution torch_distributed.\n"
                                       "Only python programs (*.py) are supported.")


def _vendor_mirrored(asked: Asked) -> Iterator[Mistake]:
    keys: KeyPath = ("multi_worker_mirrored_strategy",)
    if not _is_enabled(_settings(asked.distribution, keys)):
        return
    if asked.framework and asked.framework != "tensorflow":
        yield keys, ("Multi Worker Mirrored Strategy is currently only supported with dict_keys(['tensorflow']) frameworks "
                      f"but received {asked.framework}")
    others = ["smdistributed", "parameter_server"]
    if any(other in asked.distribution for other in others):
        yield keys, ("Multi Worker Mirrored Strategy is currently not supported with the following distribution strategies: "
                      f"{others}")


def _vendor_modelparallel(chosen: Dict[str, Any]) -> Iterator[Mistake]:
    keys = _MODELPARALLEL
    if not isinstance(chosen.get("smdistributed"), dict) or keys[1] not in chosen["smdistributed"]:
        return
    parameters = _settings(chosen, keys).get("parameters", {})
    if _is_enabled(_settings(chosen, keys)) and isinstance(parameters, (dict, str)):
        try:
            _check_mp_parameters(mp_parameters(chosen) or {})
        except ValueError as error:
            yield keys + ("parameters",), str(error)


_MP_CHOICES = {
    "pipeline": ["simple", "interleaved", "_only_forward"], "placement_strategy": ["spread", "cluster"],
    "optimize": ["speed", "memory"],
}
_MP_NUMBERS = ("microbatches", "partitions", "active_microbatches")
_MP_SWITCHES = ("auto_partition", "contiguous", "load_partition", "horovod", "ddp", "deterministic_server")


def _check_mp_parameters(parameters: Dict[str, Any]) -> None:
    """Raises ValueError for the first mistake, in the SDK's order and words."""
    for key, choices in _MP_CHOICES.items():
        _check_mp_choice(parameters, key, choices)
    for key in _MP_NUMBERS:
        if key in parameters and (not isinstance(parameters[key], int) or parameters[key] < 1):
            raise ValueError(f"The number of {key} must be a positive integer.")
    for key in _MP_SWITCHES:
        _check_mp_choice(parameters, key, [True, False])
    for is_wrong, text in _mp_conditions(parameters):
        if is_wrong:
            raise ValueError(text)


def _check_mp_choice(parameters: Dict[str, Any], key: str, choices: List[Any]) -> None:
    if key in parameters and parameters[key] not in choices:
        raise ValueError(f"{key} must be a value in: {choices}.")


def _mp_conditions(parameters: Dict[str, Any]) -> Iterator[Tuple[bool, str]]:
    def given(key: str) -> bool:
        return key in parameters

    yield given("partition_file") and not isinstance(parameters["partition_file"], str), "'partition_file' must be a str."
    yield (parameters.get("auto_partition") is False and not given("default_partition"),
           "default_partition must be supplied if auto_partition is set to False!")
    yield given("default_partition") and not given("partitions"), "default_partition needs partitions to be set as well"
    yield (given("default_partition") and parameters["default_partition"] >= parameters["partitions"],
           "default_partition must be less than the number of partitions!")
    yield given("memory_weight") and not 0.0 <= parameters["memory_weight"] <= 1.0, "memory_weight must be between 0.0 and 1.0!"
    for key in ("ddp_port", "ddp_dist_backend"):
        yield given(key) and not given("ddp"), f"`{key}` needs `ddp` to be set as well"
    port = parameters.get("ddp_port", 0)
    yield not isinstance(port, int) or port < 0, f"Invalid port number {port}."
    yield (bool(parameters.get("horovod") and parameters.get("ddp")), "'ddp' and 'horovod' cannot be simultaneously enabled.")


def mp_parameters(distribution: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    """Returns the parameters of smdistributed.modelparallel if it is enabled, else None. Raises ValueError in the SDK's
    words."""
    settings = _settings(distribution, ("smdistributed", "modelparallel"))
    if not _is_enabled(settings):
        return None
    given = settings.get("parameters", {})
    if isinstance(given, dict):
        return given
    if not os.path.exists(given):
        raise ValueError(f"Expected a string path to an existing modelparallel config, or a dictionary. Received: {given}.")
    try:
        with open(given, encoding="utf-8") as file:
            return json.load(file)
    except json.JSONDecodeError:
        raise ValueError(f"Cannot parse {given} as a json file.") from None


def with_parameters(distribution: Dict[str, Any], folder: pathlib.Path) -> Dict[str, Any]:
    """Returns a copy with the parameters of smdistributed.modelparallel read from the file that is named there, because the job
    runs in other folders and on other machines. A relative path starts at `folder`. If the file cannot be read, the path stays,
    and mistakes() reports why."""
    made = copy.deepcopy(distribution)
    settings = _settings(made, ("smdistributed", "modelparallel"))
    if isinstance(settings.get("parameters"), str):
        settings["parameters"] = str(folder / settings["parameters"])
        with contextlib.suppress(ValueError, OSError):
            settings["parameters"] = mp_parameters(made) or settings["parameters"]
    return made


# ------------------------------------------------------------ hyperparameters

def hyperparameters_of(job: Job, base: str = "/opt/ml") -> Dict[str, str]:
    """Returns what the container gets: names and values as the SDK v2 makes them, each value as JSON. `base` is the base
    folder, which has the source in `code`. Raises ValueError if mp_parameters() does."""
    values = dict(job.hyperparameters)
    level = values.get("sagemaker_container_log_level", LOG_LEVEL)
    if job.framework == "tensorflow":
        values.update(_model_dir(job, base))
    values.update({
        "sagemaker_submit_directory": f"{base}/code",
        "sagemaker_program": job.entry_point if job.source_dir else os.path.basename(job.entry_point),
        "sagemaker_container_log_level": level, "sagemaker_job_name": job.name, "sagemaker_region": region()})
    values.update(hyperparameters_of_distribution(job.distribution, job.instance_type))
    return {str(key): json.dumps(value) for key, value in values.items() if key != "model_dir" or value is not False}


def _model_dir(job: Job, base: str) -> Dict[str, Any]:
    """Passes TensorFlow's script the folder for its model, unless `model_dir` is false."""
    given = job.hyperparameters.get("model_dir")
    if given is not None:
        return {"model_dir": given}
    if job.output_path and not _is_enabled(_settings(job.distribution, ("mpi",))):
        return {"model_dir": f"{job.output_path.rstrip('/')}/{job.name}/model"}
    return {"model_dir": f"{base}/model"}


def hyperparameters_of_distribution(distribution: Dict[str, Any], instance_type: Optional[str]) -> Dict[str, Any]:
    """Returns what the strategies add to the hyperparameters, not yet as JSON."""
    if "pytorchddp" in distribution:  # another name for the same strategy, as in the SDK
        distribution = {**distribution, "smdistributed": {"dataparallel": distribution["pytorchddp"]}}
    torchrun = _is_enabled(_settings(distribution, ("torch_distributed",)))
    values = {} if torchrun and "smdistributed" not in distribution else dict(_of_strategies(distribution, instance_type))
    if torchrun:
        values["sagemaker_torch_distributed_enabled"] = True
        if instance_type is not None:
            values["sagemaker_instance_type"] = instance_type
    return values


def _of_strategies(distribution: Dict[str, Any], instance_type: Optional[str]) -> Iterator[Tuple[str, Any]]:
    if "parameter_server" in distribution:
        yield "sagemaker_parameter_server_enabled", _is_enabled(distribution["parameter_server"])
    if "mpi" in distribution:
        mpi = distribution["mpi"]
        yield "sagemaker_mpi_enabled", _is_enabled(mpi)
        if mpi.get("processes_per_host"):
            yield "sagemaker_mpi_num_of_processes_per_host", mpi["processes_per_host"]
        yield "sagemaker_mpi_custom_mpi_options", mpi.get("custom_mpi_options", "")
    if "smdistributed" in distribution:
        parameters = mp_parameters(distribution)
        if parameters:
            yield "mp_parameters", parameters
        dataparallel = _settings(distribution, ("smdistributed", "dataparallel"))
        yield "sagemaker_distributed_dataparallel_enabled", _is_enabled(dataparallel)
        yield "sagemaker_instance_type", instance_type
        if _is_enabled(dataparallel):
            yield "sagemaker_distributed_dataparallel_custom_mpi_options", dataparallel.get("custom_mpi_options", "")
    if "multi_worker_mirrored_strategy" in distribution:
        yield "sagemaker_multi_worker_mirrored_strategy_enabled", _is_enabled(distribution["multi_worker_mirrored_strategy"])


def region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"


# ------------------------------------------------------------ options of mpirun

# For each option: how many words follow it, and the function that applies it. Without a function there is nothing to do,
# because all processes get the whole environment and every line is tagged with its rank anyway.
_Meaning = Optional[Callable[[Launch, List[str]], bool]]


def _export(launch: Launch, words: List[str]) -> bool:
    name, equals, value = words[0].partition("=")
    if equals:
        launch.environment[name] = value
    return True


def _nccl_debug(launch: Launch, words: List[str]) -> bool:
    launch.environment["NCCL_DEBUG"] = words[0]
    return True


def _verbose(launch: Launch, words: List[str]) -> bool:
    launch.environment.setdefault("SHOAL_LOG", "info")
    return True


def _bind(launch: Launch, words: List[str]) -> bool:
    if words[0] in ("core", "none"):
        launch.options += ["--bind", words[0]]
    return words[0] in ("core", "none")


def _timeout(launch: Launch, words: List[str]) -> bool:
    if words[0].isdigit():
        launch.options += ["--timeout", words[0]]
    return words[0].isdigit()


MPI_OPTIONS: Dict[str, Tuple[int, _Meaning]] = {
    "x": (1, _export), "NCCL_DEBUG": (1, _nccl_debug),
    "v": (0, _verbose), "verbose": (0, _verbose), "bind-to": (1, _bind), "timeout": (1, _timeout),
    "tag-output": (0, None), "allow-run-as-root": (0, None), "oversubscribe": (0, None),
}


def _read_mpi_options(text: str, launch: Launch) -> None:
    """Applies the options that have a meaning here; adds one note to the launch about all others."""
    words, ignored = shlex.split(text), []
    while words:
        option, words = words[0], words[1:]
        count, meaning = MPI_OPTIONS.get(option.lstrip("-"), (-1, None)) if option.startswith("-") else (-1, None)
        if count < 0:  # an unknown option owns the words that follow it, up to the next option
            count = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
            understood = False
        elif len(words) < count:
            understood = False
        else:
            understood = meaning is None or meaning(launch, words[:count])
        if not understood:
            ignored.append(" ".join([option, *words[:count]]))
        words = words[count:]
    if ignored:
        launch.notes.append("custom_mpi_options: no mpirun starts the workers, so these mean nothing here: "
                            f"{'; '.join(ignored)}")


# ------------------------------------------------------------ TF_CONFIG

def tf_config(style: str, hosts: List[str], host: str, is_server: bool = False,
              address: Callable[[str, int], str] = "{}:{}".format) -> Optional[Dict[str, Any]]:
    """Returns TF_CONFIG of a process on `host`, as SageMaker's TensorFlow containers write it. With `is_server` it is that of
    the parameter server that runs alongside the worker. `address` maps a host's name and port to the address that reaches it,
    by default the name itself. Returns None if the script gets none: with a parameter server on one host."""
    if style == "multi_worker_mirrored_strategy":
        return {"cluster": {"worker": [address(one, 8890) for one in hosts]}, "environment": "cloud",
                "task": {"index": hosts.index(host), "type": "worker"}}
    if len(hosts) == 1:
        return None
    cluster = {"master": [address(hosts[0], 2222)], "ps": [address(one, 2223) for one in hosts],
               "worker": [address(one, 2222) for one in hosts[1:]]}
    if is_server:
        task = {"index": hosts.index(host), "type": "ps"}
    elif host == hosts[0]:
        task = {"index": 0, "type": "master"}
    else:
        task = {"index": hosts.index(host) - 1, "type": "worker"}
    return {"cluster": cluster, "environment": "cloud", "task": task}
