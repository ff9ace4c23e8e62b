"""PyTorch, TensorFlow and Estimator with the names and arguments of the SageMaker Python SDK v2, so that a notebook cell runs
after only its import is changed:

    from shoal.job import PyTorch
    estimator = PyTorch(entry_point="train.py", source_dir="code", instance_count=2, instance_type="local", image_uri="any",
                        distribution={"smdistributed": {"dataparallel": {"enabled": True}}}, hyperparameters={"epochs": 3})
    estimator.fit("data/train")
    predictor = estimator.deploy(1, "local")

An estimator makes a Job; engines.py starts it on the engine `where`. Arguments that have a meaning only on AWS are accepted,
and one line of the log names them. If the SDK refuses a `distribution`, it is a ValueError in the SDK's words. A `distribution`
that the SDK accepts but nobody can mean is a JobError, which is also a ValueError."""
from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import pathlib
import re
import sys
import tempfile
import time
from typing import Any, Dict, Iterator, List, Optional, Tuple, Type, Union

from shoal.job.document import Channel, Checkpoints, Job, JobError, Metric, Problem, Where, as_data, reading, repository
from shoal.job.document import distribution as distributions
from shoal.job.document.folder import JobFolder, Status, jobs_folder
from shoal.job.sdk.inputs import channels_of, whole_uri
from shoal.job.sdk.predictor import IGNORED, Model, Predictor, PyTorchModel, TensorFlowModel
from shoal.job.watching.metrics import record_of

logger = logging.getLogger("shoal.job")
TROUBLESHOOTING = "https://docs.aws.amazon.com/sagemaker/latest/dg/sagemaker-python-sdk-troubleshooting.html"
BASE = "/opt/ml"
STAMP_LENGTH = len("-2026-01-31-23-59-59-999")

# Arguments without a meaning outside AWS.
AWS_ONLY = (
    "role", "keep_alive_period_in_seconds", "volume_size", "volume_kms_key", "output_kms_key", "sagemaker_session", "tags",
    "subnets",
    "security_group_ids", "encrypt_inter_container_traffic", "use_spot_instances", "max_wait", "rules", "debugger_hook_config",
    "tensorboard_output_config", "enable_sagemaker_metrics", "enable_network_isolation", "profiler_config", "code_location",
    "training_repository_access_mode", "training_repository_credentials_provider_arn", "enable_infra_check",
    "disable_output_compression", "enable_remote_debug", "enable_session_tag_chaining", "training_plan",
    "instance_placement_config",
    "compiler_config")
# Arguments that would change the job in ways that Shoal does not support, so they are refused.
NOT_SERVED = {
    "instance_groups": "all hosts of a job are of one kind; set instance_count and instance_type",
    "container_entry_point": "give entry_point", "container_arguments": "give hyperparameters",
    "training_recipe": "give entry_point", "recipe_overrides": "give hyperparameters",
}
# Names of the SDK's version 1 that its version 2 still accepts.
RENAMED = {
    "train_instance_count": "instance_count", "train_instance_type": "instance_type", "train_max_run": "max_run",
    "train_use_spot_instances": "use_spot_instances", "train_max_wait": "max_wait", "train_volume_size": "volume_size",
    "train_volume_kms_key": "volume_kms_key", "image_name": "image_uri", "distributions": "distribution",
}
# Arguments of deploy(), and of the model that it makes, without a meaning here.
DEPLOY_IGNORED = (
    "initial_instance_count", "instance_type", "accelerator_type", "use_compiled_model", "wait", "kms_key",
    "data_capture_config",
    "tags", "serverless_inference_config", "async_inference_config", "volume_size", "model_data_download_timeout",
    "container_startup_health_check_timeout", "inference_recommendation_id", "explainer_config")
MODEL_IGNORED = ("vpc_config_override", *IGNORED)


class UnexpectedStatusException(ValueError):
    """A job ended with another status than it should have."""

    def __init__(self, message: str, allowed_statuses: List[str], actual_status: str):
        self.allowed_statuses = allowed_statuses
        self.actual_status = actual_status
        super().__init__(message)


class CapacityError(UnexpectedStatusException):
    """A job found too few machines."""


# ------------------------------------------------------------ a job that was started

class TrainingJob:
    """A job that fit() started."""

    def __init__(self, name: str):
        self.name = self.job_name = name
        self.folder = JobFolder(name)

    def wait(self, logs: Any = True) -> None:
        """Waits until the job has ended. Raises UnexpectedStatusException if it failed."""
        from shoal.job import engines
        status = engines.job_wait(self.folder, sys.stdout if logs and logs != "None" else None)
        if logs and logs != "None" and status.started and status.ended:
            print(f"Training seconds: {status.ended - status.started:.0f}")
        for note in self.folder.notes():
            print(note, file=sys.stderr)
        _check_status(status)

    def stop(self) -> None:
        from shoal.job import engines
        engines.job_stop(self.folder)

    def status(self) -> Status:
        from shoal.job import engines
        return engines.job_status(self.folder)

    def describe(self) -> Dict[str, Any]:
        """Returns the parts of DescribeTrainingJob's answer that exist here."""
        status, job = self.status(), self.job()
        ended = status.status in ("Completed", "Failed", "Stopped")
        found = {
            "TrainingJobName": self.name, "TrainingJobStatus": status.status if ended or status.status == "Stopping"
            else "InProgress",
            "SecondaryStatus": status.status, "FailureReason": status.failure_reason, "CreationTime": status.created,
            "TrainingStartTime": status.started, "TrainingEndTime": status.ended,
            "HyperParameters": distributions.hyperparameters_of(job), "Environment": job.environment,
            "ModelArtifacts": {"S3ModelArtifacts": status.model} if status.model else None,
            "ResourceConfig": {"InstanceCount": job.instance_count, "InstanceType": job.instance_type},
            "StoppingCondition": {"MaxRuntimeInSeconds": job.max_run}}
        return {key: value for key, value in found.items() if value is not None}

    def job(self) -> Job:
        """The document of the job."""
        return reading.job_of(json.loads(self.folder.document.read_text(encoding="utf-8")), files=False)


def _start(job: Job, clone: Optional[pathlib.Path] = None) -> JobFolder:
    found = reading.problems(as_data(job))
    if found:
        raise JobError(found)
    from shoal.job import engines
    return engines.job_start(job, clone=clone)


def _check_status(status: Status) -> None:
    if status.status == "Stopped":
        logger.warning("Job ended with status 'Stopped' rather than 'Completed'. This could mean the job timed out or stopped "
                       "early for some other reason: Consider checking whether it completed as you expect.")
    elif status.status != "Completed":
        reason = status.failure_reason or "(No reason provided)"
        kind = CapacityError if "CapacityError" in reason else UnexpectedStatusException
        raise kind(f"Error for Training job {status.name}: {status.status}. Reason: {reason}. Check troubleshooting guide for "
                   f"common errors: {TROUBLESHOOTING}", ["Completed", "Stopped"], status.status)


class TrainingJobAnalytics:
    """The metrics of a job as a pandas table."""

    def __init__(self, training_job_name: str, metric_names: Optional[List[str]] = None):
        self.name, self.metric_names = training_job_name, metric_names

    def dataframe(self, force_refresh: bool = False) -> Any:
        """Returns the columns timestamp (seconds since the first), metric_name, value."""
        import pandas
        rows = list(self._rows())
        first = min((row["time"] for row in rows), default=0.0)
        return pandas.DataFrame([(row["time"] - first, row["name"], row["value"]) for row in rows],
                                columns=["timestamp", "metric_name", "value"])

    def export_csv(self, filename: str) -> None:
        self.dataframe().to_csv(filename)

    def _rows(self) -> Iterator[Dict[str, Any]]:
        """Yields the numbers of the metric definitions; the file also has what Shoal measures itself."""
        names = self.metric_names or [metric.name for metric in TrainingJob(self.name).job().metric_definitions]
        path = JobFolder(self.name).metrics
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            for row in map(record_of, file):
                if row and row["name"] in names:
                    yield row


# ------------------------------------------------------------ estimators

class EstimatorBase:
    """What all estimators share. `where` is an engine's name, or Where(...); by default this machine. `workers_per_host` and
    `requirements` are those of the document. These three arguments are not the SDK's."""

    framework: Optional[str] = None
    model_cls: Type[Model] = Model
    attached: Dict[str, Any] = {}  # arguments of the constructor that attach() adds
    framework_version: Optional[str] = None
    py_version: Optional[str] = None
    image_uri: Optional[str] = None
    distribution: Dict[str, Any] = {}

    def __init__(self, role: Any = None, instance_count: Optional[int] = None, instance_type: Optional[str] = None,
                 keep_alive_period_in_seconds: Any = None, volume_size: Any = 30, volume_kms_key: Any = None,
                 max_run: int = 24 * 60 * 60, input_mode: str = "File", output_path: Optional[str] = None,
                 output_kms_key: Any = None,
                 base_job_name: Optional[str] = None, sagemaker_session: Any = None, tags: Any = None, subnets: Any = None,
                 security_group_ids: Any = None, model_uri: Optional[str] = None, model_channel_name: str = "model",
                 metric_definitions: Optional[List[Dict[str, str]]] = None, encrypt_inter_container_traffic: Any = None,
                 use_spot_instances: Any = False, max_wait: Any = None, checkpoint_s3_uri: Optional[str] = None,
                 checkpoint_local_path: Optional[str] = None, rules: Any = None, debugger_hook_config: Any = None,
                 tensorboard_output_config: Any = None, enable_sagemaker_metrics: Any = None,
                 enable_network_isolation: Any = None,
                 profiler_config: Any = None, disable_profiler: Any = None, environment: Optional[Dict[str, str]] = None,
                 max_retry_attempts: Optional[int] = None, source_dir: Optional[str] = None, git_config: Any = None,
                 hyperparameters: Optional[Dict[str, Any]] = None, container_log_level: int = logging.INFO,
                 code_location: Any = None, entry_point: Optional[str] = None, dependencies: Any = None,
                 instance_groups: Any = None,
                 training_repository_access_mode: Any = None, training_repository_credentials_provider_arn: Any = None,
                 enable_infra_check: Any = None, container_entry_point: Any = None, container_arguments: Any = None,
                 disable_output_compression: Any = False, enable_remote_debug: Any = None,
                 enable_session_tag_chaining: Any = None,
                 training_plan: Any = None, instance_placement_config: Any = None,
                 where: Union[None, str, Where] = None, workers_per_host: Optional[int] = None,
                 requirements: Optional[str] = None,
                 **kwargs: Any):
        given = {name: value for name, value in locals().items() if name not in ("self", "kwargs", "__class__")}
        self._take(given, kwargs)
        self._hyperparameters: Dict[str, Any] = dict(hyperparameters or {})
        self._current_job_name: Optional[str] = None
        self.latest_training_job: Optional[TrainingJob] = None
        self.jobs: List[TrainingJob] = []

    def _take(self, given: Dict[str, Any], kwargs: Dict[str, Any]) -> None:
        """Makes attributes of arguments, reports those without a meaning here, and refuses unknown ones."""
        for old, new in RENAMED.items():
            if old in kwargs and new in given:
                given[new] = kwargs.pop(old)
                logger.warning("%s has been renamed in sagemaker>=2: it is %s", old, new)
        for name in kwargs:
            raise TypeError(f"{type(self).__name__}.__init__() got an unexpected keyword argument '{name}'"
                            + distributions.names_like(name, given))
        for name, mend in NOT_SERVED.items():
            if given.get(name):
                raise JobError(f"{type(self).__name__}: {name} is not served: {mend}")
        for name, value in given.items():
            if name not in ("hyperparameters", "enable_network_isolation"):
                setattr(self, name, value)
        ignored = [name for name in AWS_ONLY if given.get(name) not in (None, False)
                   and (name, given[name]) != ("volume_size", 30)]
        if ignored:
            logger.warning("%s: without meaning outside AWS, and ignored: %s", type(self).__name__, ", ".join(ignored))

    # -- methods that the SDK's estimators also have --

    def set_hyperparameters(self, **kwargs: Any) -> None:
        """Like the SDK's: values become JSON here, and again when they are sent; the script gets the same arguments."""
        self._hyperparameters.update({name: json.dumps(value) for name, value in kwargs.items()})

    def hyperparameters(self) -> Dict[str, str]:
        """Returns the hyperparameters as they are sent, each as JSON. After fit() they include those that describe the run."""
        sent = distributions.hyperparameters_of(self.as_job())
        return sent if self._current_job_name else {name: value for name, value in sent.items()
                                                    if name not in distributions.OF_THE_RUN}

    def training_image_uri(self, region: Optional[str] = None) -> Optional[str]:
        return self.image_uri

    def fit(self, inputs: Any = None, wait: bool = True, logs: Any = "All", job_name: Optional[str] = None,
            experiment_config: Optional[Dict[str, str]] = None) -> None:
        """Starts a job and waits for its end. Raises JobError with all mistakes before anything starts, and
        UnexpectedStatusException if the job fails."""
        if experiment_config:
            logger.warning("fit: without meaning outside AWS, and ignored: experiment_config")
        self._prepare_for_training(job_name)
        job = self.as_job(inputs)
        folder = self._start(job)
        self.latest_training_job = TrainingJob(folder.name)
        self.jobs.append(self.latest_training_job)
        if wait:
            self.latest_training_job.wait(logs=logs)

    def _start(self, job: Job) -> JobFolder:
        """Starts the job. With git_config the clone becomes part of the job's folder."""
        if not self.git_config:
            return _start(job)
        jobs = jobs_folder()
        jobs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".clone-", dir=jobs) as place:
            clone = pathlib.Path(place).resolve() / "source"
            repository.clone(self.git_config, clone)
            repository.paths_into(job, clone)
            return _start(job, clone)

    def _prepare_for_training(self, job_name: Optional[str] = None) -> None:
        self._current_job_name = job_name or self._name_make()

    def _name_make(self) -> str:
        now = time.time()
        script = pathlib.Path(self.entry_point or "").stem
        base = self.base_job_name or re.sub(r"[^a-zA-Z0-9]+", "-", script).strip("-") or "job"
        stamp = time.strftime("-%Y-%m-%d-%H-%M-%S", time.gmtime(now)) + f"-{int(now * 1000) % 1000:03d}"
        return base[:reading.NAME_MAX - STAMP_LENGTH].rstrip("-") + stamp

    def as_job(self, inputs: Any = None) -> Job:
        """Returns the document of the job that fit(inputs) starts."""
        where = self._where()
        channels = channels_of(inputs, self.input_mode, where.options.get("file_systems", {}))
        if self.model_uri:
            if self.model_channel_name in channels:
                raise ValueError(f"Duplicate channel {self.model_channel_name} not allowed.")
            channels[self.model_channel_name] = Channel(whole_uri(self.model_uri))
        return Job(
            entry_point=self.entry_point, name=self._current_job_name, base_job_name=self.base_job_name,
            framework=self.framework,
            source_dir=self.source_dir and _path(self.source_dir), requirements=self.requirements,
            dependencies=[_path(path) for path in self.dependencies or []],
            instance_count=1 if self.instance_count is None else self.instance_count,
            instance_type=self.instance_type or "local",
            workers_per_host=self.workers_per_host, distribution=distributions.with_parameters(self.distribution, pathlib.Path.cwd()),
            hyperparameters=self._sent_hyperparameters(), channels=channels,
            metric_definitions=[Metric(one.get("Name"), one.get("Regex")) for one in self.metric_definitions or []],
            environment=dict(self.environment or {}), max_run=self.max_run, restarts=self.max_retry_attempts or 0,
            checkpoints=self._checkpoints(), output_path=self.output_path and whole_uri(_path(self.output_path)), where=where)

    def _sent_hyperparameters(self) -> Dict[str, Any]:
        sent = {str(name): value for name, value in self._hyperparameters.items()}
        if self.container_log_level != distributions.LOG_LEVEL:
            sent["sagemaker_container_log_level"] = self.container_log_level
        return sent

    def _where(self) -> Where:
        where = Where(self.where) if isinstance(self.where, str) else copy.deepcopy(self.where) or Where()
        if where.engine in ("kubernetes", "sagemaker"):
            for name, value in (("image", self.image_uri), ("role", self.role)):
                if value:
                    where.options.setdefault(name, value)
        return where

    def _checkpoints(self) -> Optional[Checkpoints]:
        if not self.checkpoint_s3_uri:
            return None
        path = self.checkpoint_local_path or f"{BASE}/checkpoints"
        return Checkpoints(whole_uri(self.checkpoint_s3_uri), path[len(BASE) + 1:] if path.startswith(BASE + "/") else path)

    @classmethod
    def attach(cls, training_job_name: str, sagemaker_session: Any = None,
               model_channel_name: str = "model") -> "EstimatorBase":
        """Returns an estimator of a job that was started before, by anyone. Waits for its end, without logs."""
        from shoal.job import engines
        training_job = TrainingJob(engines.folder_find(training_job_name).name)
        estimator = cls._of_job(training_job.job(), model_channel_name)
        estimator._current_job_name = training_job_name
        estimator.latest_training_job = training_job
        estimator.jobs.append(training_job)
        training_job.wait(logs="None")
        return estimator

    @classmethod
    def _of_job(cls, job: Job, model_channel_name: str) -> "EstimatorBase":
        if cls.framework and cls.framework != job.framework:
            raise ValueError(f"Training job: {job.name} didn't use image for requested framework")
        hyperparameters = dict(job.hyperparameters)
        level = hyperparameters.pop("sagemaker_container_log_level", distributions.LOG_LEVEL)
        model = job.channels.get(model_channel_name)
        checkpoints = job.checkpoints
        fields = dict(
            entry_point=job.entry_point, source_dir=job.source_dir, dependencies=job.dependencies or None,
            hyperparameters=hyperparameters, container_log_level=level,
            image_uri=job.where.options.get("image", "attached"), instance_count=job.instance_count,
            instance_type=job.instance_type,
            max_run=job.max_run, output_path=job.output_path, base_job_name=job.base_job_name, model_uri=model and model.uri,
            model_channel_name=model_channel_name, environment=job.environment or None, max_retry_attempts=job.restarts or None,
            metric_definitions=[{"Name": one.name, "Regex": one.regex} for one in job.metric_definitions] or None,
            checkpoint_s3_uri=checkpoints and checkpoints.uri, checkpoint_local_path=checkpoints and checkpoints.local_path,
            where=job.where, workers_per_host=job.workers_per_host, requirements=job.requirements)
        if cls.framework:
            fields["distribution"] = job.distribution or None
        return cls(**fields, **cls.attached)

    def logs(self) -> None:
        """Follows the logs of the latest job until it has ended."""
        self._latest().wait(logs=True)

    def _latest(self) -> TrainingJob:
        if self.latest_training_job is None:
            raise ValueError("Estimator is not associated with a training job")
        return self.latest_training_job

    @property
    def model_data(self) -> Optional[str]:
        """The URI of model.tar.gz, or None if the script has left no model."""
        if self.latest_training_job is not None:
            return self.latest_training_job.status().model
        logger.warning("No finished training job found associated with this estimator. Please make sure this estimator is "
                       "only used for building workflow config")
        return os.path.join(self.output_path or "", self._current_job_name or "", "output", "model.tar.gz")

    @property
    def training_job_analytics(self) -> TrainingJobAnalytics:
        if self._current_job_name is None:
            raise ValueError("Estimator is not associated with a TrainingJob")
        return TrainingJobAnalytics(self._current_job_name)

    def create_model(self, entry_point: Optional[str] = None, source_dir: Optional[str] = None, name: Optional[str] = None,
                     predictor_cls: Optional[Type[Predictor]] = None, env: Optional[Dict[str, str]] = None,
                     model_server_workers: Optional[int] = None, **kwargs: Any) -> Model:
        """Returns the model of the latest job, served by the training script unless another is named."""
        _refuse_unknown("create_model", kwargs, MODEL_IGNORED)
        latest = self._latest()
        model = latest.status().model
        if model is None:
            raise JobError(f"job {latest.name} has left no model ({latest.status().status}): a script leaves it in the folder "
                           "that SM_MODEL_DIR names")
        entry_point, source_dir = self._serving_script(entry_point, source_dir)
        return self.model_cls(model, entry_point=entry_point, source_dir=source_dir, name=name or self.base_job_name,
                              predictor_cls=predictor_cls, env=env, model_server_workers=model_server_workers)

    def _serving_script(self, entry_point: Optional[str], source_dir: Optional[str]) -> Tuple[Optional[str], Optional[str]]:
        """Returns the script that an endpoint loads, and its folder: the given ones, or those of the training."""
        if self.git_config:  # the script is in the job's folder
            job = self._latest().job()
            return entry_point or job.entry_point, source_dir or job.source_dir
        return entry_point or self.entry_point, source_dir or self.source_dir

    def deploy(self, initial_instance_count: Any = None, instance_type: Any = None, serializer: Any = None,
               deserializer: Any = None,
               accelerator_type: Any = None, endpoint_name: Optional[str] = None, use_compiled_model: Any = False,
               wait: Any = True,
               model_name: Optional[str] = None, kms_key: Any = None, data_capture_config: Any = None, tags: Any = None,
               serverless_inference_config: Any = None, async_inference_config: Any = None, volume_size: Any = None,
               model_data_download_timeout: Any = None, container_startup_health_check_timeout: Any = None,
               inference_recommendation_id: Any = None, explainer_config: Any = None, **kwargs: Any) -> Predictor:
        """Starts an endpoint on this machine that serves the model of the latest job; returns when it answers."""
        given = {name: value for name, value in locals().items() if name in DEPLOY_IGNORED}
        ignored = [name for name, value in {**given, **kwargs}.items() if name in DEPLOY_IGNORED + MODEL_IGNORED
                   and name not in ("initial_instance_count", "instance_type") and value not in (None, False, True)]
        model = self.create_model(name=model_name, **kwargs)
        if ignored:
            logger.warning("deploy: without meaning outside AWS, and ignored: %s", ", ".join(ignored))
        return model.deploy(serializer=serializer, deserializer=deserializer, endpoint_name=endpoint_name)


def _refuse_unknown(what: str, kwargs: Dict[str, Any], known: Any) -> None:
    for name in kwargs:
        if name not in known:
            raise TypeError(f"{what}() got an unexpected keyword argument '{name}'{distributions.names_like(name, known)}")


def _path(path: Any) -> str:
    return os.fspath(path)


class Framework(EstimatorBase):
    """Estimators with a script and a `distribution`."""

    def __init__(self, entry_point: str, source_dir: Optional[str] = None, hyperparameters: Optional[Dict[str, Any]] = None,
                 container_log_level: int = logging.INFO, code_location: Any = None, image_uri: Optional[str] = None,
                 dependencies: Any = None, enable_network_isolation: Any = None, git_config: Any = None,
                 checkpoint_s3_uri: Optional[str] = None, checkpoint_local_path: Optional[str] = None,
                 enable_sagemaker_metrics: Any = None, **kwargs: Any):
        if str(entry_point).startswith("s3://"):
            raise ValueError(f"Invalid entry point script: {entry_point}. Must be a path to a local file.")
        self.image_uri = kwargs.pop("image_name", image_uri)
        super().__init__(entry_point=_path(entry_point), source_dir=source_dir, hyperparameters=hyperparameters,
                         container_log_level=container_log_level, code_location=code_location, dependencies=dependencies,
                         enable_network_isolation=enable_network_isolation, git_config=git_config,
                         checkpoint_s3_uri=checkpoint_s3_uri, checkpoint_local_path=checkpoint_local_path,
                         enable_sagemaker_metrics=enable_sagemaker_metrics, **kwargs)

    def _distribute(self, distribution: Optional[Dict[str, Any]], framework_version: Optional[str],
                    py_version: Optional[str]) -> None:
        """Checks `distribution` first as the SDK does, then by our own rules."""
        self.framework_version, self.py_version = framework_version, py_version
        asked = distributions.Asked(distribution or {}, self.framework, self.entry_point)
        for _, text in distributions.vendor_mistakes(asked):
            raise ValueError(text, distribution) if text == distributions.BOTH else ValueError(text)
        found = [Problem(".".join(("distribution",) + place), text) for place, text in distributions.own_mistakes(asked)]
        if found:
            raise JobError(found)
        self.distribution = copy.deepcopy(distribution) or {}


def _check_versions(framework_version: Optional[str], py_version: Optional[str], image_uri: Optional[str]) -> None:
    if (framework_version is None or py_version is None) and image_uri is None:
        raise ValueError("framework_version or py_version was None, yet image_uri was also None. Either specify both "
                         "framework_version and py_version, or specify image_uri.")


class PyTorch(Framework):
    """Trains a script of PyTorch."""

    framework = "pytorch"
    model_cls = PyTorchModel

    def __init__(self, entry_point: Optional[str] = None, framework_version: Optional[str] = None,
                 py_version: Optional[str] = None,
                 source_dir: Optional[str] = None, hyperparameters: Optional[Dict[str, Any]] = None,
                 image_uri: Optional[str] = None,
                 distribution: Optional[Dict[str, Any]] = None, compiler_config: Any = None, training_recipe: Any = None,
                 recipe_overrides: Any = None, **kwargs: Any):
        for name, value in (("training_recipe", training_recipe), ("recipe_overrides", recipe_overrides)):
            if value is not None:
                raise JobError(f"PyTorch: {name} is not served: {NOT_SERVED[name]}")
        if entry_point is None:
            raise ValueError("Argument entry_point must be set when training_recipe is not provided")
        _check_versions(framework_version, py_version, kwargs.get("image_name", image_uri))
        super().__init__(entry_point, source_dir, hyperparameters, image_uri=image_uri, **kwargs)
        _note_compiler(self, compiler_config)
        self._distribute(distribution, framework_version, py_version)


class TensorFlow(Framework):
    """Trains a script of TensorFlow. `model_dir` is passed to the script, unless it is False."""

    framework = "tensorflow"
    model_cls = TensorFlowModel

    def __init__(self, py_version: Optional[str] = None, framework_version: Optional[str] = None, model_dir: Any = None,
                 image_uri: Optional[str] = None, distribution: Optional[Dict[str, Any]] = None, compiler_config: Any = None,
                 **kwargs: Any):
        distribution = kwargs.pop("distributions", distribution)
        _check_versions(framework_version, py_version, kwargs.get("image_name", image_uri))
        super().__init__(image_uri=image_uri, **kwargs)
        _note_compiler(self, compiler_config)
        self.model_dir = model_dir
        self._distribute(distribution, framework_version, py_version)

    def _serving_script(self, entry_point: Optional[str], source_dir: Optional[str]) -> Tuple[Optional[str], Optional[str]]:
        """As in the SDK, a SavedModel is served without the training script, unless that has functions for an endpoint."""
        from shoal.job.serving import tfserving
        script, folder = super()._serving_script(entry_point, source_dir)
        if entry_point or tfserving.LOADERS & tfserving.names_defined(pathlib.Path(folder or "", script or "")):
            return script, folder
        return None, None

    def _sent_hyperparameters(self) -> Dict[str, Any]:
        sent = super()._sent_hyperparameters()
        sent.pop("model_dir", None)
        return sent if self.model_dir is None else {**sent, "model_dir": self.model_dir}

    @classmethod
    def _of_job(cls, job: Job, model_channel_name: str) -> "EstimatorBase":
        job = copy.deepcopy(job)
        model_dir = job.hyperparameters.pop("model_dir", None)
        estimator = super()._of_job(job, model_channel_name)
        estimator.model_dir = model_dir
        return estimator


class HuggingFace(Framework):
    """Trains a script of Transformers, over PyTorch or TensorFlow. The packages come from the script's requirements.txt or from the
    Python that starts the job; the versions choose the framework."""

    attached = {"py_version": None}

    def __init__(self, py_version: Optional[str], entry_point: str, transformers_version: Optional[str] = None,
                 tensorflow_version: Optional[str] = None, pytorch_version: Optional[str] = None, source_dir: Optional[str] = None,
                 hyperparameters: Optional[Dict[str, Any]] = None, image_uri: Optional[str] = None,
                 distribution: Optional[Dict[str, Any]] = None, compiler_config: Any = None, **kwargs: Any):
        if image_uri is None:
            _check_transformers(transformers_version, tensorflow_version, pytorch_version)
        self.framework = "tensorflow" if tensorflow_version else "pytorch"
        self.model_cls = TensorFlowModel if tensorflow_version else PyTorchModel
        self.tensorflow_version, self.pytorch_version = tensorflow_version, pytorch_version
        super().__init__(entry_point, source_dir, hyperparameters, image_uri=image_uri or "huggingface", **kwargs)
        _note_compiler(self, compiler_config)
        self._distribute(distribution, transformers_version, py_version)
        self.image_uri = image_uri

    @classmethod
    def _of_job(cls, job: Job, model_channel_name: str) -> "EstimatorBase":
        estimator = super()._of_job(job, model_channel_name)
        estimator.framework, estimator.distribution = job.framework, copy.deepcopy(job.distribution)
        return estimator


def _check_transformers(transformers: Optional[str], tensorflow: Optional[str], pytorch: Optional[str]) -> None:
    """Raises ValueError in the SDK's words."""
    if transformers is None:
        raise ValueError("transformers_version, and image_uri are both None. Specify either transformers_version or image_uri")
    if (tensorflow is None) == (pytorch is None):
        which = "both None. Specify either" if tensorflow is None else "both not None. Specify only"
        raise ValueError(f"tensorflow_version and pytorch_version are {which} tensorflow_version or pytorch_version.")
    if len(transformers.split(".")) != len((tensorflow or pytorch or "").split(".")):
        raise ValueError("Please use either full version or shortened version for both transformers_version, tensorflow_version and "
                         "pytorch_version.")


def _note_compiler(estimator: Framework, compiler_config: Any) -> None:
    estimator.compiler_config = compiler_config
    if compiler_config is not None:
        logger.warning("%s: without meaning outside AWS, and ignored: compiler_config", type(estimator).__name__)


class Estimator(EstimatorBase):
    """Trains any script. `entry_point` is required: there is no container whose program could run."""

    def __init__(self, image_uri: str, role: Any = None, instance_count: Optional[int] = None,
                 instance_type: Optional[str] = None,
                 disable_profiler: Any = False, **kwargs: Any):
        self.image_uri = image_uri
        super().__init__(role, instance_count, instance_type, disable_profiler=disable_profiler, **kwargs)
        if not self.entry_point:
            raise JobError("Estimator: the program of a container is not served: set entry_point and source_dir")

    def set_hyperparameters(self, **kwargs: Any) -> None:
        """Like the SDK's, which converts to JSON only if there is a source_dir."""
        self._hyperparameters.update(kwargs)

    def hyperparameters(self) -> Dict[str, Any]:
        sent = super().hyperparameters()
        return sent if self.source_dir else {**sent, **self._hyperparameters}
