"""Jobs on SageMaker itself, through the vendor's own SDK, which is imported only when it is needed.

SDK v3 starts a driver on every host. `Shoal` names ours (sagemaker_driver/), which starts `shoal run`:

    from sagemaker.train import ModelTrainer
    from shoal.job.sagemaker import Shoal
    ModelTrainer(..., distributed=Shoal(process_count_per_node=8)).train()

SDK v2 starts the training toolkit in the container, which starts `smddprun` of the package smdistributed. The estimator and
`distribution` are the vendor's. The engine "sagemaker" uses the installed SDK, v3 before v2.

The container must have Shoal: in its image, or in the requirements of the source. Logs stay where SageMaker writes them.

where.options: image and role; sdk ("v2" or "v3"), framework_version, py_version (v2), subnets, security_group_ids,
encrypt_inter_container_traffic, volume_size (GB), tags."""
from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pathlib
import secrets
import time
from typing import Any, Dict, Iterator, List, Optional

from shoal.job.document import Channel, Job, Problem
from shoal.job.document.folder import ENDED, JobFolder, Status, file_replace
from shoal.job.engines import contract
from shoal.job.engines.shared import EngineError

DRIVERS = pathlib.Path(__file__).resolve().parent / "driver"
OPTIONS = {"image": str, "role": str, "sdk": str, "framework_version": str, "py_version": str, "subnets": list,
           "security_group_ids": list, "encrypt_inter_container_traffic": bool, "volume_size": int, "tags": list}
NEEDED = {"image": "name a training image that has Shoal", "role": "name the role that the job takes"}
SDKS = {"v3": "sagemaker.train", "v2": "sagemaker.estimator"}
OF_TENSORFLOW = ("parameter_server", "multi_worker_mirrored_strategy")
BASE = pathlib.PurePosixPath("/opt/ml")
ASK_S = 10.0  # between two requests for a job's status
# SageMaker's names of a job's phases, and ours. All phases before the data are "Starting".
PHASES = {"Downloading": "Downloading", "Training": "Training", "Uploading": "Uploading", "Stopping": "Stopping"}


# ---- The driver of SDK v3 ----

def _config_class() -> Any:
    """Returns the class Shoal, made once. Its base class is the SDK's, so it exists only if the SDK can be imported."""
    if "Shoal" in globals():
        return globals()["Shoal"]
    try:
        from pydantic import Field
        from sagemaker.train.distributed import DistributedConfig
    except ImportError as error:
        raise ImportError(f"shoal.job.sagemaker.Shoal is for the SageMaker Python SDK v3, which cannot be imported ({error}); "
                          "pip install 'sagemaker>=3'") from error

    class Shoal(DistributedConfig):
        """For `distributed` of sagemaker.train.ModelTrainer: every host starts its workers by `shoal run`.

        process_count_per_node: workers of each host; by default its GPUs, else 1.
        run_options: more options of `shoal run`, such as ["--bind", "core"].
        secret: what the workers prove to each other; random for each object. It travels with the drivers, below the job's S3
        prefix."""

        process_count_per_node: Optional[int] = Field(default=None, ge=1)
        run_options: Optional[List[str]] = None
        secret: str = Field(default_factory=lambda: secrets.token_hex(32), repr=False)

        @property
        def driver_dir(self) -> str:
            return str(DRIVERS)

        @property
        def driver_script(self) -> str:
            return "shoal_driver.py"

    Shoal.__module__, Shoal.__qualname__ = __name__, "Shoal"
    globals()["Shoal"] = Shoal
    return Shoal


def __getattr__(name: str) -> Any:
    if name != "Shoal":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _config_class()


# ---- Mistakes that prevent a job from running on SageMaker ----

def sdk_installed(wanted: Optional[str] = None) -> str:
    """Returns the installed SDK, "v3" or "v2"."""
    for name, module in SDKS.items():
        if wanted in (None, name) and _is_there(module):
            return name
    asked = f", {wanted} as where.options says," if wanted else ""
    raise EngineError(f"the engine sagemaker needs the vendor's SDK{asked} and it is not installed: "
                      f"pip install '{'sagemaker<3' if wanted == 'v2' else 'sagemaker>=3'}'")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def mistakes(job: Job, sdk: str) -> List[Problem]:
    """Returns everything that prevents this job from running on SageMaker through this SDK."""
    finders = (_mistakes_of_options, _mistakes_of_places, _mistakes_for_v3 if sdk == "v3" else _mistakes_for_v2)
    return [problem for finder in finders for problem in finder(job)]


def _mistakes_of_options(job: Job) -> Iterator[Problem]:
    options = job.where.options
    for name, text in NEEDED.items():
        if not options.get(name):
            yield Problem(f"where.options.{name}", f"is missing: {text}")
    for name, value in options.items():
        if name not in OPTIONS:
            yield Problem(f"where.options.{name}", f"is not known with the engine sagemaker: known are {', '.join(OPTIONS)}")
        elif not isinstance(value, OPTIONS[name]):
            yield Problem(f"where.options.{name}", f"needs {OPTIONS[name].__name__}, not {value!r}")
    if options.get("sdk") not in (None, *SDKS):
        yield Problem("where.options.sdk", f"is {options['sdk']!r}, and there are v2 and v3")


def _mistakes_of_places(job: Job) -> Iterator[Problem]:
    if not job.instance_type.startswith("ml."):
        yield Problem("instance_type", f"is {job.instance_type}, and SageMaker's begin with ml., such as ml.c5.4xlarge")
    if job.checkpoints and not job.checkpoints.uri.startswith("s3://"):
        yield Problem("checkpoints.uri", f"is {job.checkpoints.uri}, and SageMaker keeps checkpoints at s3:// URIs")
    if job.output_path and not job.output_path.startswith("s3://"):
        yield Problem("output_path", f"is {job.output_path}, and SageMaker writes to s3:// URIs")
    for name, channel in job.channels.items():
        if not channel.uri.startswith("s3://"):
            yield Problem(f"channels.{name}.uri", f"is {channel.uri}, and SageMaker reads s3:// URIs: upload the data first")


def _mistakes_for_v2(job: Job) -> Iterator[Problem]:
    if job.requirements not in (None, "requirements.txt"):
        yield Problem("requirements", f"is {job.requirements}, and the toolkit installs requirements.txt of source_dir alone")


def _mistakes_for_v3(job: Job) -> Iterator[Problem]:
    for name in OF_TENSORFLOW:
        if job.distribution.get(name, {}).get("enabled"):
            yield Problem(f"distribution.{name}", "cannot be started by SDK v3: install SDK v2")
    if job.dependencies:
        yield Problem("dependencies", "are for SDK v2: put these folders into source_dir, or install SDK v2")
    if not job.source_dir:
        yield Problem("source_dir", "is missing, and SDK v3 takes a folder and the entry point in it")


def _given(arguments: Dict[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in arguments.items() if value not in (None, {}, [])}


def _checkpoint_folder(job: Job) -> Optional[str]:
    return str(BASE / job.checkpoints.local_path) if job.checkpoints else None


# ---- SDK v2 ----

def estimator_arguments(job: Job) -> Dict[str, Any]:
    """Returns the arguments of the vendor's estimator. Its container starts the workers by `distribution`, so that is passed
    unchanged."""
    options, hyperparameters = job.where.options, dict(job.hyperparameters)
    if job.workers_per_host:  # the toolkit reads it for every way to start workers
        hyperparameters["sagemaker_mpi_num_of_processes_per_host"] = job.workers_per_host
    same = ("role", "encrypt_inter_container_traffic", "subnets", "security_group_ids", "volume_size", "tags")
    versions = ("framework_version", "py_version") if job.framework else ()  # the plain estimator has neither
    return _given({
        "entry_point": job.entry_point, "source_dir": job.source_dir, "dependencies": job.dependencies or None,
        "image_uri": options.get("image"),
        "instance_count": job.instance_count, "instance_type": job.instance_type, "distribution": job.distribution,
        "hyperparameters": hyperparameters, "environment": job.environment, "max_run": job.max_run,
        "max_retry_attempts": job.restarts or None, "output_path": job.output_path, "base_job_name": job.base_job_name,
        "metric_definitions": [{"Name": metric.name, "Regex": metric.regex} for metric in job.metric_definitions],
        "checkpoint_s3_uri": job.checkpoints and job.checkpoints.uri, "checkpoint_local_path": _checkpoint_folder(job),
        **{name: options.get(name) for name in (*same, *versions)}})


def _input_of(channel: Channel) -> Any:
    from sagemaker.inputs import ShuffleConfig, TrainingInput
    shuffle = None if channel.shuffle_seed is None else ShuffleConfig(channel.shuffle_seed)
    return TrainingInput(channel.uri, **_given({
        "distribution": channel.distribution, "s3_data_type": channel.data_type, "input_mode": channel.input_mode,
        "content_type": channel.content_type, "compression": channel.compression, "record_wrapping": channel.record_wrapping,
        "shuffle_config": shuffle}))


def _submit_v2(job: Job) -> str:
    classes = {"pytorch": ("sagemaker.pytorch", "PyTorch"), "tensorflow": ("sagemaker.tensorflow", "TensorFlow")}
    module, name = classes.get(job.framework or "", ("sagemaker.estimator", "Estimator"))
    estimator = getattr(importlib.import_module(module), name)(**estimator_arguments(job))
    inputs = {name: _input_of(channel) for name, channel in job.channels.items()}
    estimator.fit(inputs or None, wait=False, job_name=job.name)
    return str(estimator.latest_training_job.name)


# ---- SDK v3 ----

def _workers_per_host(job: Job) -> Optional[int]:
    """Returns the job's number of workers per host; None means each host's GPUs."""
    return job.workers_per_host or job.distribution.get("mpi", {}).get("processes_per_host")


def _trainer_of(job: Job) -> Any:
    """Returns the vendor's ModelTrainer, not started."""
    from sagemaker.train import ModelTrainer, configs
    is_distributed = job.distribution or job.workers_per_host or job.instance_count > 1
    source = {"source_dir": job.source_dir, "entry_script": job.entry_point, "requirements": _requirements(job)}
    metrics = [configs.MetricDefinition(name=one.name, regex=one.regex) for one in job.metric_definitions]
    trainer = ModelTrainer(**_given({
        "training_image": job.where.options["image"], "role": job.where.options["role"], "base_job_name": job.name,
        "source_code": configs.SourceCode(**_given(source)), "hyperparameters": job.hyperparameters,
        "environment": job.environment, "tags": job.where.options.get("tags"),
        "input_data_config": [_channel_of(name, channel) for name, channel in job.channels.items()],
        "stopping_condition": configs.StoppingCondition(max_runtime_in_seconds=job.max_run),
        "distributed": _config_class()(process_count_per_node=_workers_per_host(job)) if is_distributed else None,
        **_places_of(job)}))
    if metrics:
        trainer.with_metric_definitions(metrics)
    if job.restarts:
        trainer.with_retry_strategy(configs.RetryStrategy(maximum_retry_attempts=job.restarts))
    return trainer


def _places_of(job: Job) -> Dict[str, Any]:
    """Returns the machines, the network, and the URIs for results."""
    from sagemaker.train import configs
    options = job.where.options
    compute = {"instance_type": job.instance_type, "instance_count": job.instance_count,
               "volume_size_in_gb": options.get("volume_size")}
    network = _given({"subnets": options.get("subnets"), "security_group_ids": options.get("security_group_ids"),
                      "enable_inter_container_traffic_encryption": options.get("encrypt_inter_container_traffic")})
    kept = {"s3_uri": job.checkpoints.uri, "local_path": _checkpoint_folder(job)} if job.checkpoints else None
    return {"compute": configs.Compute(**_given(compute)), "networking": configs.Networking(**network) if network else None,
            "output_data_config": configs.OutputDataConfig(s3_output_path=job.output_path) if job.output_path else None,
            "checkpoint_config": configs.CheckpointConfig(**kept) if kept else None}


def _requirements(job: Job) -> Optional[str]:
    """Returns the requirements file, because SDK v3 installs only what it is given."""
    usual = "requirements.txt"
    return job.requirements or (usual if (pathlib.Path(job.source_dir or ".") / usual).is_file() else None)


def _channel_of(name: str, channel: Channel) -> Any:
    from sagemaker.train import configs
    source = configs.S3DataSource(s3_data_type=channel.data_type, s3_uri=channel.uri,
                                  s3_data_distribution_type=channel.distribution)
    shuffle = None if channel.shuffle_seed is None else configs.ShuffleConfig(seed=channel.shuffle_seed)
    return configs.Channel(**_given({
        "channel_name": name, "data_source": configs.DataSource(s3_data_source=source), "input_mode": channel.input_mode,
        "content_type": channel.content_type, "compression_type": channel.compression, "shuffle_config": shuffle,
        "record_wrapper_type": channel.record_wrapping}))


def _submit_v3(job: Job) -> str:
    trainer = _trainer_of(job)
    trainer.train(wait=False, logs=False)
    return str(trainer._latest_training_job.training_job_name)


# ---- The engine ----

_asked: Dict[str, float] = {}  # when a job's status was last requested


def start(job: Job, folder: JobFolder) -> None:
    """Submits the job to SageMaker. Reports mistakes of the document first. Returns when the job has been accepted."""
    sdk = sdk_installed(job.where.options.get("sdk"))
    problems = mistakes(job, sdk)
    if problems:
        raise EngineError(problems)
    try:
        name = _submit_v3(job) if sdk == "v3" else _submit_v2(job)
    except Exception as error:  # errors of the SDK, botocore and pydantic all describe the cause
        raise EngineError(f"SageMaker's SDK {sdk} has not started the job: {type(error).__name__}: {error}") from error
    file_replace(folder.engine_id, name)
    folder.event("Submitted", name=name)


def _ask(operation: str, name: str) -> Dict[str, Any]:
    import boto3  # both SDKs need it
    try:
        return dict(getattr(boto3.client("sagemaker"), operation)(TrainingJobName=name))
    except Exception as error:
        raise EngineError(f"SageMaker does not answer {operation} for {name}: {type(error).__name__}: {error}") from error


def stop(folder: JobFolder) -> None:
    """Requests the end: the workers get SIGTERM, and 120 s to end."""
    status = folder.status()
    _ask("stop_training_job", status.engine_id or folder.name)
    _asked.pop(folder.name, None)
    folder.status_write(dataclasses.replace(status, status="Stopping"))


def refresh(folder: JobFolder, status: Status) -> Status:
    """Asks SageMaker for the status and writes it: no other process does."""
    if status.status in ENDED or status.engine_id is None or time.monotonic() - _asked.get(folder.name, -ASK_S) < ASK_S:
        return status
    _asked[folder.name] = time.monotonic()  # even if it refuses: that may be because of too many requests
    told = _ask("describe_training_job", status.engine_id)
    new = status_of(status, told)
    folder.status_follow(status, new)
    return new


def status_of(status: Status, told: Dict[str, Any]) -> Status:
    """Converts DescribeTrainingJob's answer to a status."""
    begun, ended = told.get("TrainingStartTime"), told.get("TrainingEndTime")
    new = dataclasses.replace(status, started=begun.timestamp() if begun else status.started)
    if told["TrainingJobStatus"] not in ENDED:
        return dataclasses.replace(new, status=PHASES.get(told.get("SecondaryStatus", ""), "Starting"))
    return dataclasses.replace(
        new, status=told["TrainingJobStatus"], ended=ended.timestamp() if ended else time.time(),
        exit_code={"Completed": 0, "Failed": 1}.get(told["TrainingJobStatus"], 143), failure_reason=_reason_of(told),
        model=told.get("ModelArtifacts", {}).get("S3ModelArtifacts"))


def _reason_of(told: Dict[str, Any]) -> Optional[str]:
    return contract.failure_text(told.get("FailureReason") or "SageMaker reports no reason") if told["TrainingJobStatus"] == "Failed" else None
