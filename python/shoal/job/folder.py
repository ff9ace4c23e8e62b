"""The folder of a job: every module reads and writes a job's files by the names given here, and only here.

    JOBS/NAME/
        job.json            the document, with the defaults filled in
        status.json         how the job stands: struct Status; replaced as a whole
        logs/HOST.log       what the workers of a host wrote, a line each, as `shoal run` prefixes it
        traces/             the flight recorders of the workers, for `shoal trace`
        tensorboard/HOST/   the metrics for TensorBoard, where that is installed
        metrics.jsonl       one number a line: {"time", "host", "rank", "name", "value", "step"}
        events.jsonl        what happened, a line each: {"time", "host", "what", ...}
        hosts/HOST/         that host's base folder, /opt/ml of the container contract
        hosts/HOST.json     how the part of that host stands: struct HostState
        hosts/meet.json     where the ranks of several machines meet, and the secret that they prove
        hosts/HOST.progress what is on its way to that host: struct Amount; there while it comes
        engine_id           what the engine calls the job; written once, by who handed it over
        runner.log          what the process that runs the job had to say itself
        model.tar.gz        what the script left in the hosts' model folders
        output.tar.gz       what it left in output/data
        checkpoints/        what it left in the checkpoint folder, when the document names no other place

JOBS is $SHOAL_JOBS, else ~/.local/share/shoal/jobs.

status.json and hosts/HOST.json belong to one process each, which alone writes them and touches them as its sign of life
(liveness.py). Files that are replaced are for their owner's eyes only: documents hold passwords, meet.json a secret."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from typing import Any, Dict, List, Optional, Type, TypeVar

from shoal.job.document import JobError

STATUSES = ("Starting", "Pending", "Requeued", "Downloading", "Training", "Uploading", "Stopping", "Completed", "Failed", "Stopped")
ENDED = ("Completed", "Failed", "Stopped")
Record = TypeVar("Record")


@dataclasses.dataclass
class Status:
    """How a job stands. Times are seconds since 1970."""

    name: str
    status: str = "Starting"
    created: float = 0.0
    started: Optional[float] = None  # when the workers were started
    ended: Optional[float] = None
    attempt: int = 0  # how often all were started again
    hosts: List[str] = dataclasses.field(default_factory=list)
    workers_per_host: int = 1
    pid: Optional[int] = None  # the process that runs the job, on `machine`
    process: Optional[str] = None  # names it for good: processes.identity()
    machine: Optional[str] = None
    engine: str = "local"  # what runs the job: Where.engine
    engine_id: Optional[str] = None  # what it calls the job: the number of a Slurm job, the name of a TrainJob
    exit_code: Optional[int] = None
    failure_reason: Optional[str] = None  # at most 1,024 characters
    model: Optional[str] = None  # the URI of model.tar.gz
    run: int = 0  # how often the engine itself has begun the job anew
    waits_for: Optional[str] = None  # why the engine has not begun the job, in its words


@dataclasses.dataclass
class HostState:
    """How one host's part of a job stands, for the other hosts, who see the folder and nothing else of it."""

    host: str
    status: str = "Starting"
    machine: Optional[str] = None
    run: int = 0  # as in Status: what an earlier run has left does not count
    pid: Optional[int] = None
    process: Optional[str] = None
    exit_code: Optional[int] = None
    failure_reason: Optional[str] = None
    is_secondary: bool = False  # it failed because of another host


@dataclasses.dataclass
class Amount:
    """How much of a download has come."""

    what: str
    bytes: int  # that are here
    size: int  # of all
    rate: float  # bytes per second that have come over the network


def jobs_folder() -> pathlib.Path:
    named = os.environ.get("SHOAL_JOBS")
    if named:
        return pathlib.Path(named)
    try:
        return pathlib.Path(os.environ.get("XDG_DATA_HOME") or pathlib.Path.home() / ".local/share") / "shoal/jobs"
    except RuntimeError:  # no HOME, and no entry in /etc/passwd
        raise JobError(f"user {os.getuid()} has no home folder: let SHOAL_JOBS name the folder of jobs") from None


def host_names(count: int) -> List[str]:
    """The names of a job's hosts, as the container contract has them."""
    return [f"algo-{index + 1}" for index in range(count)]


class JobFolder:
    """The files of one job. Making the object touches nothing."""

    def __init__(self, name: str, jobs: Optional[pathlib.Path] = None):
        self.name = name
        self.own_host: Optional[str] = None  # which host of the job we are, where each machine runs its own part
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
        """The base folder of a host, /opt/ml of the container contract."""
        return self.path / "hosts" / host

    def host_state(self, host: str) -> pathlib.Path:
        return self.path / "hosts" / f"{host}.json"

    def progress_write(self, host: str, amount: Optional[Amount]) -> None:
        """None: all has come. What cannot be written is not shown, and ends no download."""
        path = self.path / "hosts" / f"{host}.progress"
        with contextlib.suppress(OSError):
            if amount:
                file_replace(path, json.dumps(dataclasses.asdict(amount)) + "\n", is_lasting=False)
            else:
                path.unlink()

    def progress(self) -> Dict[str, Amount]:
        """What is on its way to each host."""
        found: Dict[str, Amount] = {}
        for path in (self.path / "hosts").glob("*.progress"):
            with contextlib.suppress(OSError, ValueError, TypeError):  # it has come meanwhile
                found[path.stem] = Amount(**json.loads(path.read_text()))
        return found

    def create(self) -> None:
        """Raises FileExistsError when a job of that name is there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()
        self.logs.mkdir()

    def status(self) -> Status:
        """Raises JobError: the file cannot be read, or not now."""
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
        """Readers see the old status or the new one, never a part."""
        file_replace(self.path / "status.json", json.dumps(dataclasses.asdict(status), indent=1) + "\n")

    def event(self, what: str, host: Optional[str] = None, **more: Any) -> None:
        line: Dict[str, Any] = {"time": round(time.time(), 3), "host": host, "what": what, **more}
        append_line(self.events, line)

    def notes(self) -> List[str]:
        """What the hosts had to say of the job itself, each line once."""
        found: Dict[str, None] = {}
        for line in self.events.read_text(encoding="utf-8").splitlines() if self.events.exists() else []:
            with contextlib.suppress(ValueError):  # a full disk has cut the line off
                event = json.loads(line)
                if event["what"] == "note":
                    found[event["text"]] = None
        return list(found)


def append_line(path: pathlib.Path, record: Dict[str, Any]) -> None:
    """One write, so that lines of several processes do not mix."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def record_read(kind: Type[Record], path: pathlib.Path) -> Record:
    """The record that a file holds. Fields that only a newer version knows are left out. Raises OSError, ValueError, TypeError."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(data, dict):
        raise ValueError("it is not an object of JSON")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in data.items() if name in known})


def touched_at(path: pathlib.Path) -> float:
    """When the file was written or touched last. Raises OSError."""
    with open(path, "rb") as file:  # opened before it is dated: NFS asks the server then
        return os.fstat(file.fileno()).st_mtime


def file_replace(path: pathlib.Path, text: str, is_lasting: bool = True) -> None:
    """Readers find the old content or the new one, and if is_lasting also after a loss of power. Only the owner may read it. If the
    disk is full, nothing is left behind."""
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
            file.flush()
            if is_lasting:
                os.fsync(file.fileno())
        os.replace(unfinished, path)  # closed before, as NFS has the data on the server then
    except BaseException:
        with contextlib.suppress(FileNotFoundError):  # a signal's exception may come when the file is in its place already
            os.unlink(unfinished)
        raise
