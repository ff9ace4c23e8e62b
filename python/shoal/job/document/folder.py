"""The folder of a job. All modules use the file names defined here, and only those.

    JOBS/NAME/
        job.json            the document, with the defaults filled in
        status.json         the job's status: struct Status; replaced as a whole
        logs/HOST.log       the output of a host's workers; lines have the prefix of `shoal run`
        traces/             the flight recorders of the workers, for `shoal trace`
        tensorboard/HOST/   the metrics for TensorBoard, if it is installed
        metrics.jsonl       one number a line: {"time", "host", "rank", "name", "value", "step"}
        events.jsonl        what happened, one event a line: {"time", "host", "what", ...}
        hosts/HOST/         that host's base folder, /opt/ml of the container contract
        hosts/HOST.json     the state of that host's part: struct HostState
        hosts/meet.json     where the ranks of several machines meet, and the secret that they prove
        hosts/HOST.progress the download under way to that host: struct Amount; exists only meanwhile
        engine_id           the engine's name for the job; written once, by the process that submitted it
        runner.log          messages of the process that runs the job
        model.tar.gz        what the script left in the hosts' model folders
        output.tar.gz       what it left in output/data
        checkpoints/        what it left in the checkpoint folder, if the document names no URI

JOBS is $SHOAL_JOBS, by default ~/.local/share/shoal/jobs.

status.json and each hosts/HOST.json belong to one process, the only one that writes them; it also touches them as its sign of
life (liveness.py). Files that are replaced are readable only by their owner: documents hold passwords, meet.json a secret."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import platform
import tempfile
import time
from typing import Any, Dict, List, Optional, Type, TypeVar

from shoal.job import processes
from shoal.job.document import JobError

STATUSES = ("Starting", "Pending", "Requeued", "Downloading", "Training", "Uploading", "Stopping", "Completed", "Failed", "Stopped")
ENDED = ("Completed", "Failed", "Stopped")
Record = TypeVar("Record")


@dataclasses.dataclass
class Status:
    """The status of a job. Times are seconds since 1970."""

    name: str
    status: str = "Starting"
    created: float = 0.0
    started: Optional[float] = None  # when the workers were started
    ended: Optional[float] = None
    attempt: int = 0  # how often all workers were started again
    hosts: List[str] = dataclasses.field(default_factory=list)
    workers_per_host: int = 1
    pid: Optional[int] = None  # the process that runs the job, on `machine`
    process: Optional[str] = None  # its unique name: processes.identity()
    pid_start: Optional[int] = None  # only in records of earlier versions, which have no `process`: its start time
    machine: Optional[str] = None
    engine: str = "local"  # what runs the job (Where.engine)
    engine_id: Optional[str] = None  # the engine's name for the job: a Slurm job's number, a TrainJob's name
    exit_code: Optional[int] = None
    failure_reason: Optional[str] = None  # at most 1,024 characters
    model: Optional[str] = None  # the URI of model.tar.gz
    run: int = 0  # how often the engine itself has restarted the job
    waits_for: Optional[str] = None  # why the engine has not started the job, in the engine's words


@dataclasses.dataclass
class HostState:
    """The state of one host's part of a job, for the other hosts, which see only the shared folder."""

    host: str
    status: str = "Starting"
    machine: Optional[str] = None
    run: int = 0  # as in Status; what an earlier run left does not count
    pid: Optional[int] = None
    process: Optional[str] = None
    pid_start: Optional[int] = None  # as in Status
    exit_code: Optional[int] = None
    failure_reason: Optional[str] = None
    is_secondary: bool = False  # it failed because of another host


@dataclasses.dataclass
class Amount:
    """The progress of a download."""

    what: str
    bytes: int  # that have arrived
    size: int  # in all
    rate: float  # bytes per second that arrived over the network


def jobs_folder() -> pathlib.Path:
    named = os.environ.get("SHOAL_JOBS")
    if named:
        return pathlib.Path(named)
    try:
        return pathlib.Path(os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share") / "shoal/jobs"
    except RuntimeError:  # no HOME, and no entry in /etc/passwd
        raise JobError(f"user {os.getuid()} has no home folder: let SHOAL_JOBS name the folder of jobs") from None


def host_names(count: int) -> List[str]:
    """Returns the names of a job's hosts, as the container contract defines them."""
    return [f"algo-{index + 1}" for index in range(count)]


class JobFolder:
    """The files of one job. Making the object touches nothing."""

    def __init__(self, name: str, jobs: Optional[pathlib.Path] = None):
        self.name = name
        self.own_host: Optional[str] = None  # our host of the job, if each machine runs its own part
        self.path = (jobs or jobs_folder()).absolute() / name
        self.document = self.path / "job.json"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.logs = self.path / "logs"
        self.traces = self.path / "traces"
        self.tensorboard = self.path / "tensorboard"
        self.model = self.path / "model.tar.gz"
        self.output = self.path / "output.tar.gz"
        self.checkpoints = self.path / "checkpoints"
        self.runner_log = self.path / "runner.log"
        self.engine_id = self.path / "engine_id"

    def log(self, host: str) -> pathlib.Path:
        return self.logs / f"{host}.log"

    def base(self, host: str) -> pathlib.Path:
        """Returns the base folder of a host, /opt/ml of the container contract."""
        return self.path / "hosts" / host

    def host_state(self, host: str) -> pathlib.Path:
        return self.path / "hosts" / f"{host}.json"

    def progress_write(self, host: str, amount: Optional[Amount]) -> None:
        """Writes how much has arrived; None means that nothing more is under way. Ignores errors of writing: they must not end
        a download."""
        path = self.path / "hosts" / f"{host}.progress"
        with contextlib.suppress(OSError):
            if amount:
                file_replace(path, json.dumps(dataclasses.asdict(amount)) + "\n", is_lasting=False)
            else:
                path.unlink()

    def progress(self) -> Dict[str, Amount]:
        """Returns the downloads under way, by host."""
        found: Dict[str, Amount] = {}
        for path in (self.path / "hosts").glob("*.progress"):
            with contextlib.suppress(OSError, ValueError, TypeError):  # it has ended meanwhile
                found[path.stem] = Amount(**json.loads(path.read_text()))
        return found

    def create(self) -> None:
        """Makes the folder. Raises FileExistsError if a job of that name exists."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        self.logs.mkdir()

    def status(self) -> Status:
        """Reads the status. Raises JobError if the file cannot be read, or not at the moment."""
        try:
            status = record_read(Status, self.path / "status.json")
            if status.engine_id is None and self.engine_id.exists():
                status.engine_id = self.engine_id.read_text().strip() or None
        except OSError as error:
            raise JobError(f"cannot read {self.path / 'status.json'}: {error.strerror}") from error
        except (ValueError, TypeError) as error:
            raise JobError(f"{self.path / 'status.json'} holds no status of a job: {error}") from error
        return status

    def status_write(self, status: Status) -> None:
        """Replaces the status. Readers see the old one or the new one, never a part."""
        file_replace(self.path / "status.json", json.dumps(dataclasses.asdict(status), indent=1) + "\n")

    def status_follow(self, old: Status, new: Status) -> None:
        """Writes the status that an engine reports, if it has changed. A new state is also an event."""
        if new != old:
            self.status_write(new)
        if new.status != old.status:
            self.event(new.status, reason=new.failure_reason)

    def event(self, what: str, host: Optional[str] = None, **more: Any) -> None:
        line: Dict[str, Any] = {"time": round(time.time(), 3), "host": host, "what": what, **more}
        append_line(self.events, line)

    def notes(self) -> List[str]:
        """Returns the hosts' notes about the job, each line once."""
        found: Dict[str, None] = {}
        for line in self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else []:
            with contextlib.suppress(ValueError):  # a line cut off by a full disk
                event = json.loads(line)
                if event["what"] == "note":
                    found[event["text"]] = None
        return list(found)


def append_line(path: pathlib.Path, record: Dict[str, Any]) -> None:
    """Appends with one write, so that lines of several processes do not mix."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def record_read(kind: Type[Record], path: pathlib.Path) -> Record:
    """Reads a record from a file. Leaves out fields that only newer versions know, and names the process of a record of an
    earlier version if it runs on this machine. Raises OSError, ValueError, TypeError."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("it is not an object of JSON")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if data.get("pid_start") and not data.get("process") and data.get("machine") == platform.node():
        data["process"] = processes.name_of(data.get("pid"), data["pid_start"])
    return kind(**{name: value for name, value in data.items() if name in known})


def touched_at(path: pathlib.Path) -> float:
    """Returns the time when the file was last written or touched. Raises OSError."""
    with open(path, "rb") as file:  # open before fstat: then NFS asks the server
        return os.fstat(file.fileno()).st_mtime


def file_replace(path: pathlib.Path, text: str, is_lasting: bool = True) -> None:
    """Replaces a file. Readers find the old content or the new one; if is_lasting, also after a power loss. Only the owner may
    read the file. On a full disk nothing is left behind."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            if is_lasting:
                os.fsync(file.fileno())
        os.replace(unfinished, path)  # the file was closed before, so NFS has its data on the server
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # a signal's exception may come after the rename
            os.unlink(unfinished)
        raise
