"""The inputs of fit(): TrainingInput and FileSystemInput, with the names and the `config` of sagemaker.inputs, and their
conversion to channels."""
from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Dict, List, Optional, Union

from shoal.job.document import Channel, JobError

FILE_SYSTEM_TYPES = ["FSxLustre", "EFS"]
FILE_SYSTEM_MODES = ["ro", "rw"]


@dataclasses.dataclass
class ShuffleConfig:
    """The seed by which the objects of a channel are shuffled."""

    seed: int


class TrainingInput:
    """The data of one channel."""

    def __init__(self, s3_data: str, distribution: Optional[str] = None, compression: Optional[str] = None,
                 content_type: Optional[str] = None, record_wrapping: Optional[str] = None, s3_data_type: str = "S3Prefix",
                 instance_groups: Optional[List[str]] = None, input_mode: Optional[str] = None,
                 attribute_names: Optional[List[str]] = None, target_attribute_name: Optional[str] = None,
                 shuffle_config: Optional[ShuffleConfig] = None, hub_access_config: Optional[dict] = None,
                 model_access_config: Optional[dict] = None):
        source: Dict[str, Any] = {"S3DataType": s3_data_type, "S3Uri": s3_data}
        more = {"S3DataDistributionType": distribution or (None if target_attribute_name else "FullyReplicated"),
                "InstanceGroupNames": instance_groups, "AttributeNames": attribute_names, "HubAccessConfig": hub_access_config,
                "ModelAccessConfig": model_access_config}
        source.update({key: value for key, value in more.items() if value is not None})
        self.config: Dict[str, Any] = {"DataSource": {"S3DataSource": source}}
        outside = {"CompressionType": compression, "ContentType": content_type, "RecordWrapperType": record_wrapping,
                   "InputMode": input_mode, "TargetAttributeName": target_attribute_name,
                   "ShuffleConfig": {"Seed": shuffle_config.seed} if shuffle_config else None}
        self.config.update({key: value for key, value in outside.items() if value is not None})

    def channel(self, input_mode: str) -> Channel:
        """Returns the channel; `input_mode` is the default if the input has none of its own."""
        source = self.config["DataSource"]["S3DataSource"]
        for key, name in (("InstanceGroupNames", "instance_groups"), ("AttributeNames", "attribute_names")):
            if source.get(key):
                raise JobError(f"TrainingInput: {name} is not served; leave it out")
        return Channel(whole_uri(source["S3Uri"]), self.config.get("InputMode") or input_mode,
                       source.get("S3DataDistributionType", "FullyReplicated"), source["S3DataType"],
                       self.config.get("ContentType"),
                       self.config.get("CompressionType"), self.config.get("RecordWrapperType"),
                       self.config.get("ShuffleConfig", {}).get("Seed"))


class FileSystemInput:
    """A folder of a file system that all hosts have mounted."""

    def __init__(self, file_system_id: str, file_system_type: str, directory_path: str, file_system_access_mode: str = "ro",
                 content_type: Optional[str] = None):
        if file_system_type not in FILE_SYSTEM_TYPES:
            raise ValueError(f"Unrecognized file system type: {file_system_type}. Valid values: "
                             f"{', '.join(FILE_SYSTEM_TYPES)}.")
        if file_system_access_mode not in FILE_SYSTEM_MODES:
            raise ValueError(f"Unrecognized file system access mode: {file_system_access_mode}. "
                             f"Valid values: {', '.join(FILE_SYSTEM_MODES)}.")
        self.config: Dict[str, Any] = {"DataSource": {"FileSystemDataSource": {
            "FileSystemId": file_system_id, "FileSystemType": file_system_type, "DirectoryPath": directory_path,
            "FileSystemAccessMode": file_system_access_mode}}}
        if content_type:
            self.config["ContentType"] = content_type

    def channel(self, mounts: Dict[str, str]) -> Channel:
        """Returns the channel. `mounts` maps identifiers of file systems to their folders here; other file systems are found at
        the path itself."""
        source = self.config["DataSource"]["FileSystemDataSource"]
        folder = mounts.get(source["FileSystemId"], "").rstrip("/") + source["DirectoryPath"]
        return Channel(folder, content_type=self.config.get("ContentType"))


Input = Union[str, TrainingInput, FileSystemInput]


def channels_of(inputs: Union[None, Input, Dict[str, Input]], input_mode: str, mounts: Dict[str, str]) -> Dict[str, Channel]:
    """Converts the inputs of fit() to channels. A single input becomes channel "training"."""
    if inputs is None:
        return {}
    if not isinstance(inputs, dict):
        inputs = {"training": inputs}
    return {name: _channel_of(one, input_mode, mounts) for name, one in inputs.items()}


def _channel_of(one: Any, input_mode: str, mounts: Dict[str, str]) -> Channel:
    if isinstance(one, (str, os.PathLike)):
        return Channel(whole_uri(os.fspath(one)), input_mode)
    if isinstance(one, TrainingInput):
        return one.channel(input_mode)
    if isinstance(one, FileSystemInput):
        return one.channel(mounts)
    raise ValueError(f"Cannot format input {one}. Expecting one of str, TrainingInput, file_input or FileSystemInput")


def whole_uri(uri: str) -> str:
    """Makes a URI such as file://data absolute, which the SDK takes as a path below the working directory; returns all others
    unchanged."""
    path = uri[len("file://"):]
    return pathlib.Path(path).absolute().as_uri() if uri.startswith("file://") and not path.startswith("/") else uri
