"""The container contract: what SageMaker's platform and training toolkit promise to a script, below any base folder B (on the
platform: /opt/ml). Files and variables have the forms of sagemaker-training 5.1.4, so a script finds here what it finds there.

    B/code/                             the source; the script's working directory
    B/input/config/*.json               hyperparameters, resourceconfig, inputdataconfig
    B/input/data/CHANNEL/               data
    B/model/, B/output/data/            become model.tar.gz and output.tar.gz
    B/output/failure, B/output/success  how it ended
    B/checkpoints/                      kept while the job trains, and brought back when it starts again

agent.py makes these for its host; local.py and hosts.py pack the archives from the folders of all hosts."""
from __future__ import annotations

import dataclasses
import filecmp
import glob
import json
import os
import pathlib
import re
import shlex
import sys
import tarfile
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple

from shoal.job.document import Channel, Job
from shoal.job.document.folder import file_replace

FAILURE_MAX = 1024  # characters of a failure reason
GROUP = "homogeneousCluster"  # the platform's name for the only group of instances
# Hyperparameters of the toolkit, besides those that begin with sagemaker_. They are not passed to the script as arguments.
FRAMEWORK_NAMES = ("_tuning_objective_metric",)
# Hyperparameters that the toolkit knows. SM_FRAMEWORK_PARAMS holds the others with the prefix.
TOOLKIT_NAMES = ("sagemaker_program", "sagemaker_submit_directory", "sagemaker_enable_cloudwatch_metrics",
                 "sagemaker_container_log_level", "sagemaker_job_name", "sagemaker_region", "sagemaker_s3_output",
                 "_tuning_objective_metric")
LOG_LEVEL = 20  # logging.INFO
ENTRY_POINT = re.compile(r"[A-Za-z0-9._][A-Za-z0-9._+-]*(/[A-Za-z0-9._][A-Za-z0-9._+-]*)*")


class ContractError(Exception):
    """The message is one line: what is wrong, where, and what to do."""


@dataclasses.dataclass
class Container:
    """What one host's script is given."""

    base: pathlib.Path
    job: Job
    host: str
    hosts: List[str]
    hyperparameters: Dict[str, Any]  # not encoded: the user's, and those that begin with sagemaker_
    gpus: int = 0
    interface: str = "eth0"
    meet: Optional[Tuple[str, int]] = None  # where the ranks of several hosts meet

    @property
    def code(self) -> pathlib.Path:
        return self.base / "code"

    @property
    def model(self) -> pathlib.Path:
        return self.base / "model"

    @property
    def output(self) -> pathlib.Path:
        return self.base / "output"

    @property
    def config(self) -> pathlib.Path:
        return self.base / "input/config"

    @property
    def checkpoints(self) -> pathlib.Path:
        return self.base / "checkpoints"

    def channel(self, name: str) -> pathlib.Path:
        return self.base / "input/data" / name


# ---- hyperparameters ----

def hyperparameters_read(encoded: Mapping[str, Any]) -> Dict[str, Any]:
    """Decodes the values of hyperparameters.json. Text that is not JSON stays text."""
    def value_read(text: Any) -> Any:
        try:
            return json.loads(text) if isinstance(text, str) else text
        except ValueError:
            return text
    return {name: value_read(text) for name, text in encoded.items()}


def hyperparameters_encode(values: Mapping[str, Any]) -> Dict[str, str]:
    """Encodes values as the SDK v2 sends them: each as JSON in a string, including text."""
    return {name: json.dumps(value) for name, value in values.items()}


def _is_framework(name: str) -> bool:
    return name.startswith("sagemaker_") or name in FRAMEWORK_NAMES


def _of_script(hyperparameters: Mapping[str, Any]) -> Dict[str, Any]:
    return {name: value for name, value in hyperparameters.items() if not _is_framework(name)}


def arguments_of(hyperparameters: Mapping[str, Any]) -> List[str]:
    """Returns the script's arguments, sorted: `--name value`, `-n value`, `--name k=v,k=v` for a mapping, `--flag True`."""
    arguments = []
    for name, value in sorted(_of_script(hyperparameters).items()):
        arguments.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, Mapping):
            arguments.append(",".join(f"{key}={word}" for key, word in sorted(value.items())))
        else:
            arguments.append("" if value is None else str(value))
    return arguments


def command_of(code: pathlib.Path, entry_point: str, arguments: List[str], python: str = sys.executable) -> List[str]:
    """Returns the command that starts the entry point in its folder: as a Python program, as a package (if code has a
    setup.py), or else by the shell."""
    if not ENTRY_POINT.fullmatch(entry_point) or ".." in entry_point.split("/"):
        raise ContractError(f"entry_point is {entry_point!r}: it must be a path below source_dir, of letters, digits and . _ + -")
    if not (code / entry_point).exists() and not (code / "setup.py").is_file():
        raise ContractError(f"there is no {entry_point} in {code}: entry_point names a file below source_dir")
    if (code / "setup.py").is_file():
        return [python, "-m", entry_point[:-3] if entry_point.endswith(".py") else entry_point, *arguments]
    if entry_point.endswith(".py"):
        return [python, "-u", entry_point, *arguments]
    _shell_script_prepare(code / entry_point)
    return ["/bin/sh", "-c", " ".join(shlex.quote(word) for word in (f"./{entry_point}", *arguments))]


def _shell_script_prepare(path: pathlib.Path) -> None:
    """Makes a script executable, as the toolkit does. Files often lose their mode on the way, as in archives from Windows."""
    path.chmod(path.stat().st_mode | 0o111)
    with open(path, "rb") as file:
        first = file.readline(4096)
    if first.endswith(b"\r\n"):
        raise ContractError(f"{path.name} has Windows line endings, which a shell takes for a part of its words: save it with Unix line "
                            f"endings, as `sed -i 's/\\r$//' {path.name}` does")


# ---- files that the script reads ----

def folders_make(container: Container) -> None:
    for folder in (container.config, container.base / "input/data", container.model, container.output / "data"):
        folder.mkdir(parents=True, exist_ok=True)


def channel_config(channel: Channel) -> Dict[str, str]:
    """Returns a channel's entry in inputdataconfig.json."""
    config = {"TrainingInputMode": channel.input_mode, "S3DistributionType": channel.distribution,
              "RecordWrapperType": channel.record_wrapping or "None"}
    if channel.content_type:
        config["ContentType"] = channel.content_type
    return config


def resource_config(container: Container) -> Dict[str, Any]:
    job, hosts = container.job, sorted(container.hosts, key=_host_number)
    return {"current_host": container.host, "current_instance_type": job.instance_type, "current_group_name": GROUP, "hosts": hosts,
            "instance_groups": [{"instance_group_name": GROUP, "instance_type": job.instance_type, "hosts": hosts}],
            "network_interface_name": container.interface}


def input_data_config(job: Job) -> Dict[str, Any]:
    return {name: channel_config(channel) for name, channel in job.channels.items()}


def config_write(container: Container) -> None:
    """Writes the three files of B/input/config."""
    for name, content in (("hyperparameters", hyperparameters_encode(container.hyperparameters)),
                          ("resourceconfig", resource_config(container)), ("inputdataconfig", input_data_config(container.job))):
        file_replace(container.config / f"{name}.json", json.dumps(content, indent=1) + "\n")


def _host_number(host: str) -> Tuple[int, str]:
    """Returns the key that sorts algo-10 after algo-9; plain text sorting puts it after algo-1."""
    number = re.search(r"(\d+)$", host)
    return (int(number.group(1)) if number else 0, host)


# ---- variables ----

def variable_text(value: Any) -> str:
    """Returns text unchanged, None as empty text, and everything else as compact JSON with sorted keys."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _training_environment(container: Container) -> Dict[str, Any]:
    """Returns the toolkit's description of a host, the content of SM_TRAINING_ENV."""
    job, resources, values = container.job, resource_config(container), container.hyperparameters
    entry_point = values.get("sagemaker_program") or job.entry_point
    is_distributed = any(name.endswith("_enabled") and value is True for name, value in values.items() if _is_framework(name))
    return {
        "additional_framework_parameters": {n: v for n, v in values.items() if _is_framework(n) and n not in TOOLKIT_NAMES},
        "channel_input_dirs": {name: str(container.channel(name)) for name in job.channels},
        "current_host": container.host, "current_instance_group": GROUP, "current_instance_group_hosts": resources["hosts"],
        "current_instance_type": job.instance_type, "distribution_hosts": resources["hosts"] if is_distributed else [],
        "distribution_instance_groups": [GROUP] if is_distributed else [],
        "framework_module": os.environ.get("SAGEMAKER_TRAINING_MODULE"), "hosts": resources["hosts"],
        "hyperparameters": _of_script(values), "input_config_dir": str(container.config),
        "input_data_config": input_data_config(job), "input_dir": str(container.base / "input"),
        "instance_groups": [GROUP], "instance_groups_dict": {GROUP: resources["instance_groups"][0]},
        "is_hetero": False, "is_master": container.host == resources["hosts"][0], "job_name": job.name,
        "log_level": values.get("sagemaker_container_log_level", LOG_LEVEL), "master_hostname": resources["hosts"][0],
        "model_dir": str(container.model), "module_dir": str(values.get("sagemaker_submit_directory") or container.code),
        "module_name": entry_point[:-3] if entry_point.endswith(".py") else entry_point,
        "network_interface_name": container.interface, "num_cpus": len(os.sched_getaffinity(0)), "num_gpus": container.gpus,
        "num_neurons": 0, "output_data_dir": str(container.output / "data"), "output_dir": str(container.output),
        "output_intermediate_dir": str(container.output / "intermediate"), "resource_config": resources,
        "user_entry_point": entry_point,
    }


# Names that the toolkit changes between its description of the host and its variables.
RENAMED = {"hyperparameters": "hps", "additional_framework_parameters": "framework_params"}
NOT_ALONE = ("channel_input_dirs", "distribution_hosts", "is_master", "job_name", "master_hostname")  # in SM_TRAINING_ENV only


def environment_of(container: Container) -> Dict[str, str]:
    """Returns the variables of the contract: SM_*, and the few without that prefix."""
    described = _training_environment(container)
    values = {RENAMED.get(name, name): value for name, value in described.items() if name not in NOT_ALONE}
    values["channels"] = sorted(container.job.channels)
    values["training_env"] = described
    values["user_args"] = arguments_of(container.hyperparameters)
    values.update({f"channel_{name}": path for name, path in described["channel_input_dirs"].items()})
    values.update({f"hp_{name}": value for name, value in described["hyperparameters"].items()})
    values.update({"host_count": len(container.hosts), "current_host_rank": described["hosts"].index(container.host)})
    if container.meet:
        values.update({"master_addr": container.meet[0], "master_port": container.meet[1]})
    variables = {f"SM_{name.upper()}": variable_text(value) for name, value in values.items()}
    return {**variables, "TRAINING_JOB_NAME": container.job.name or "", "JOB_NAME": container.job.name or "",
            "CURRENT_HOST": container.host, "SAGEMAKER_BASE_DIR": str(container.base)}


def gpu_count(environment: Optional[Mapping[str, str]] = None) -> int:
    """Returns the number of GPUs that a process with these variables sees."""
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        words = [word.strip() for word in visible.split(",")]
        return len([word for word in words if word and word != "-1"])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def interface_name() -> str:
    """Returns the interface of the default route, or the loopback interface if there is no such route."""
    try:
        rows = [line.split() for line in pathlib.Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        rows = []
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), "lo")


# ---- how it ended ----

def failure_text(reason: str) -> str:
    """Cuts the end off a reason longer than FAILURE_MAX characters."""
    reason = reason.strip()
    return reason if len(reason) <= FAILURE_MAX else reason[:FAILURE_MAX - 3].rstrip() + "..."


def failure_write(container: Container, reason: str) -> None:
    """Writes B/output/failure, unless the script has written it."""
    path = container.output / "failure"
    if not path.exists():
        path.write_text(reason.strip() + "\n", encoding="utf-8")


def failure_read(container: Container) -> Optional[str]:
    """Returns what the script itself has written to B/output/failure."""
    path = container.output / "failure"
    text = path.read_text(encoding="utf-8", errors="replace").strip() if path.is_file() else ""
    return failure_text(text) if text else None


def success_write(container: Container) -> None:
    (container.output / "success").touch()


# ---- archives ----

def _files_below(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields all files and empty folders, relative to the folder. Follows links, and refuses a link to a folder that holds it."""
    def walk(place: pathlib.Path, above: Tuple[str, ...]) -> Iterator[pathlib.Path]:
        real = os.path.realpath(place)
        if real in above:
            raise ContractError(f"{place} is a link to a folder that holds it: it cannot be packed; remove the link")
        entries = sorted(place.iterdir())
        if not entries and place != folder:
            yield place.relative_to(folder)
        for entry in entries:
            if entry.is_dir():
                yield from walk(entry, (*above, real))
            elif entry.is_file():
                yield entry.relative_to(folder)
            elif entry.is_symlink():
                raise ContractError(f"{entry} is a link to a file that is not there ({os.readlink(entry)}): remove it")
    if folder.is_dir():
        yield from walk(folder, ())


def model_files(folders: Mapping[str, pathlib.Path]) -> Dict[str, pathlib.Path]:
    """Returns the files of all hosts' folders by their names in the archive. Raises ContractError if hosts wrote different
    files of one name."""
    found: Dict[str, Tuple[str, pathlib.Path]] = {}
    for host, folder in folders.items():
        for name in _files_below(folder):
            path = folder / name
            other_host, other = found.setdefault(str(name), (host, path))
            if other != path and path.is_file() and not (other.is_file() and filecmp.cmp(other, path, shallow=False)):
                raise ContractError(f"{other_host} and {host} both wrote {name} into their model folders, with different content "
                                    f"({other} and {path}): let one host write it, or give it a name for each host")
    return {name: path for name, (_, path) in found.items()}


def output_files(folders: Mapping[str, pathlib.Path]) -> Dict[str, pathlib.Path]:
    """Like model_files(), but for output data: if several hosts used a file name, their files go below their host's name."""
    by_name: Dict[str, Dict[str, pathlib.Path]] = {}
    for host, folder in folders.items():
        for name in _files_below(folder):
            by_name.setdefault(str(name), {})[host] = folder / name
    return {(name if len(paths) == 1 else f"{host}/{name}"): path for name, paths in by_name.items() for host, path in paths.items()}


def archive_write(files: Mapping[str, pathlib.Path], archive: pathlib.Path) -> None:
    """Writes a .tar.gz with the files at its root. The archive appears whole or not at all."""
    unfinished = archive.with_name(f".{archive.name}.unfinished")
    try:
        with tarfile.open(unfinished, "w:gz", dereference=True, compresslevel=6) as tar:
            for name, path in sorted(files.items()):
                tar.add(path, arcname=name, recursive=False)
        os.replace(unfinished, archive)
    except OSError as error:
        raise ContractError(f"cannot write {archive}: {error.strerror or error}{space_text(archive.parent, error)}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def space_text(folder: pathlib.Path, error: OSError) -> str:
    """Returns text about free space to append to an error of a full disk."""
    if error.errno not in (28, 122):  # ENOSPC, EDQUOT
        return ""
    space = os.statvfs(folder)
    return f" ({folder} has {_size_text(space.f_bavail * space.f_frsize)} free of {_size_text(space.f_blocks * space.f_frsize)})"


def _size_text(count: int) -> str:
    return f"{count >> 10} KiB" if count < 10 << 20 else f"{count >> 20} MiB"
