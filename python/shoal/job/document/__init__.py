"""The job document: all settings of one job, as plain data. Field names are those of the SageMaker Python SDK v2 if it has the
field. reading.py reads documents and finds their mistakes; other modules of this package run them."""
from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, Dict, List, Optional, Union
from urllib.parse import unquote


def local_path(uri: str) -> Optional[pathlib.Path]:
    """Returns the path that a URI names on this machine, or None if it is elsewhere. The part after file:// is quoted, as
    Path.as_uri() writes it; a plain path is not."""
    if uri.startswith("file://"):
        return pathlib.Path(unquote(uri[len("file://"):]))
    return None if "://" in uri else pathlib.Path(uri)


@dataclasses.dataclass
class Channel:
    """The data of one input channel, and how each host gets them."""

    uri: str  # a folder or file, file://..., s3://bucket/prefix, or http(s)://...
    input_mode: str = "File"  # "File": all data arrive before the script starts; "FastFile": the same here
    distribution: str = "FullyReplicated"  # or "ShardedByS3Key": objects are divided among hosts
    data_type: str = "S3Prefix"  # or "ManifestFile"
    content_type: Optional[str] = None
    compression: Optional[str] = None
    record_wrapping: Optional[str] = None
    shuffle_seed: Optional[int] = None


@dataclasses.dataclass
class Metric:
    """A number to read from the log: the first group of the regular expression."""

    name: str
    regex: str


@dataclasses.dataclass
class Checkpoints:
    """Files below `local_path` are copied to `uri` while the job trains, and back when it starts again."""

    uri: str
    local_path: str = "checkpoints"  # below the base folder, or an absolute path


@dataclasses.dataclass
class Where:
    """What starts the job. `local`: this machine; each host of the job is a group of processes here. `hosts`: the named
    machines, in an allocation that runs the same command on each. `slurm`, `kubernetes`, `sagemaker`: these engines."""

    engine: str = "local"
    hosts: List[str] = dataclasses.field(default_factory=list)
    options: Dict[str, Any] = dataclasses.field(default_factory=dict)  # of the engine: partition, namespace, image, role, ...


@dataclasses.dataclass
class Job:
    """One training job."""

    entry_point: str
    name: Optional[str] = None  # by default made of base_job_name or the entry point, and the time
    base_job_name: Optional[str] = None
    framework: Optional[str] = None  # "pytorch", "tensorflow" or nothing
    source_dir: Optional[str] = None
    requirements: Optional[str] = None  # a file below source_dir; by default requirements.txt if it exists
    dependencies: List[str] = dataclasses.field(default_factory=list)  # folders and files to copy next to the source
    instance_count: int = 1
    instance_type: str = "local"
    workers_per_host: Optional[int] = None  # by default what the distribution defines, else the host's GPUs, else 1
    distribution: Dict[str, Any] = dataclasses.field(default_factory=dict)
    hyperparameters: Dict[str, Any] = dataclasses.field(default_factory=dict)
    channels: Dict[str, Channel] = dataclasses.field(default_factory=dict)
    metric_definitions: List[Metric] = dataclasses.field(default_factory=list)
    environment: Dict[str, str] = dataclasses.field(default_factory=dict)
    max_run: int = 86400  # seconds
    stop_grace: int = 120  # seconds that the script has to end after SIGTERM
    restarts: int = 0
    checkpoints: Optional[Checkpoints] = None
    output_path: Optional[str] = None  # where model.tar.gz and output.tar.gz go, in addition to the job's folder
    where: Where = dataclasses.field(default_factory=Where)


def as_data(job: Job) -> Dict[str, Any]:
    """Returns the document as JSON stores it; reading.py reads it back to the same job."""
    return dataclasses.asdict(job)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A mistake in a document."""

    where: str  # file, line if known, and key; may be empty
    text: str

    def __str__(self) -> str:
        return f"{self.where}: {self.text}" if self.where else self.text


class JobError(ValueError):
    """A job cannot be started as written, or a request to a job cannot be met. `problems` has all mistakes at once."""

    def __init__(self, found: Union[str, List[Problem]]):
        self.problems = [Problem("", found)] if isinstance(found, str) else found
        super().__init__("\n".join(map(str, self.problems)))
