"""Starts, follows and stops jobs on any engine. The estimators and the command use these functions; they call no engine
directly.

    folder = job_start(job)                     returns when the job is under way
    status = job_wait(folder, out=sys.stdout)   follows the logs until the job has ended
    status = job_status(folder)                 the job's status, as far as it can be known from here
    job_stop(folder)"""
from __future__ import annotations

import dataclasses
import importlib
import pathlib
import shutil
import time
from typing import Any, BinaryIO, Dict, List, Optional, TextIO

from shoal.job.data.progress import Display
from shoal.job.document import Job, JobError
from shoal.job.document.folder import ENDED, JobFolder, Status, jobs_folder
from shoal.job.engines.shared import EngineError, folder_create

ENGINES = ("local", "hosts", "slurm", "kubernetes", "sagemaker")
BEFORE_TRAINING = ("Starting", "Pending", "Requeued", "Downloading")
LOOK_S = 0.2  # between two looks at the logs
STATUS_S = 1.0  # between two looks at the status
PATIENCE_S = 900.0  # a command that waits for a job gives up after this time without an answer
READ_BYTES = 1 << 18  # size of a read of a log
COLOURS = (36, 33, 35, 32, 34, 31)  # colors of hosts on a terminal


class NoSuchJob(EngineError):
    exit_code = 2


def engine_of(name: str) -> Any:
    """Returns the module of an engine. It has start(job, folder), which returns when the job is under way or raises
    EngineError; stop(folder), which requests the end; and refresh(folder, status), which returns the job's present status,
    given the status in its folder. If the job's own processes write the status file, refresh() does not."""
    if name not in ENGINES:
        raise EngineError(f"there is no engine {name!r}: known are {', '.join(ENGINES)}")
    return importlib.import_module("shoal.job.sagemaker" if name == "sagemaker" else f"shoal.job.engines.{name}")


def job_start(job: Job, jobs: Optional[pathlib.Path] = None, host_index: Optional[int] = None,
              clone: Optional[pathlib.Path] = None) -> JobFolder:
    """Starts a job whose document has no mistakes. With the engine "hosts" it starts this machine's part; this machine is host
    `host_index` unless something else defines its index. `clone` is that of folder_create(). Raises EngineError; then no trace
    of the job is left."""
    engine = engine_of(job.where.engine)
    if job.where.engine == "hosts":
        if clone:
            raise EngineError('git_config: with the engine "hosts" each machine would make its own clone, perhaps of another commit: '
                              "clone the repository to a folder that all machines see, and name it as source_dir")
        return engine.take_part(job, jobs, host_index)
    folder = folder_create(job, jobs, clone)
    try:
        engine.start(job, folder)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder


def folder_find(name: str, jobs: Optional[pathlib.Path] = None) -> JobFolder:
    """Returns the folder of an existing job. Raises EngineError."""
    folder = JobFolder(name, jobs)
    if "/" in name or not (folder.path / "status.json").is_file():
        raise NoSuchJob(f"there is no job named {name} in {folder.path.parent} (SHOAL_JOBS names another folder)")
    return folder


def jobs_list(jobs: Optional[pathlib.Path] = None) -> List[Status]:
    """Returns all jobs, the newest first. If the status of one cannot be found out, it is "Unknown", with the reason."""
    place = jobs or jobs_folder()
    names = [entry.name for entry in place.iterdir() if (entry / "status.json").is_file()] if place.is_dir() else []
    return sorted((_status_or_reason(JobFolder(name, jobs)) for name in names), key=lambda status: -status.created)


def _status_or_reason(folder: JobFolder) -> Status:
    status = Status(folder.name)
    try:
        status.created = (folder.path / "status.json").stat().st_mtime
        status = folder.status()
        return job_status(folder)
    except Exception as error:  # such as a missing package of its engine; the other jobs are still listed
        why = str(error) if isinstance(error, JobError) else f"{type(error).__name__}: {error}"
        return dataclasses.replace(status, name=folder.name, status="Unknown", failure_reason=why)


def job_status(folder: JobFolder) -> Status:
    """Returns the job's status. Raises JobError if it cannot be found out now."""
    status = folder.status()
    return engine_of(status.engine).refresh(folder, status)


def job_stop(folder: JobFolder) -> None:
    """Requests the end of a job and returns at once. Leaves an ended job as it is."""
    status = job_status(folder)
    if status.status not in ENDED:
        engine_of(status.engine).stop(folder)


def job_wait(folder: JobFolder, out: Optional[TextIO] = None, told: Optional[TextIO] = None) -> Status:
    """Waits until the job has ended. Writes its logs to `out` (with the engine "hosts" those of this machine), its phases and
    downloads to `told`."""
    follower = Follower(folder, out) if out else None
    display = Display(folder, told) if told else None
    asker = Asker(folder, told)
    seen, look_at = "", 0.0
    while True:
        if time.monotonic() >= look_at:
            status, look_at = asker.status(), time.monotonic() + STATUS_S
            if display and status_text(status) != seen:
                display.clear()
                if follower and status.status in ENDED:
                    follower.follow()  # shows its last lines before its end
                print(f"shoal job: {folder.name}: {status_text(status)}", file=told, flush=True)
            seen = status_text(status)
        if display and status.status in BEFORE_TRAINING:
            display.show()
        if follower:
            follower.follow()
        if status.status in ENDED:
            return status
        time.sleep(LOOK_S)


def status_text(status: Status) -> str:
    return f"{status.status} ({status.waits_for})" if status.waits_for else status.status


class Asker:
    """Asks for a job's status repeatedly. A wait does not end because a server does not answer for a while."""

    def __init__(self, folder: JobFolder, told: Optional[TextIO] = None):
        self.folder, self.told, self.said = folder, told, ""
        self.last, self.answered_at = folder.status(), time.monotonic()

    def status(self) -> Status:
        """Returns the last known status. Raises JobError after PATIENCE_S without an answer, or if the job's folder is gone."""
        try:
            self.last, self.said = job_status(self.folder), ""
            self.answered_at = time.monotonic()
        except (JobError, OSError) as error:
            if not self.folder.path.exists() or time.monotonic() - self.answered_at > PATIENCE_S:
                raise
            if self.told and str(error) != self.said:
                print(f"shoal job: {error}; the job may well continue, so it is asked about again", file=self.told, flush=True)
            self.said = str(error)
        return self.last


class Follower:
    """Shows what the logs of all hosts have received since the last look."""

    def __init__(self, folder: JobFolder, out: TextIO):
        self.folder, self.out = folder, out
        status = folder.status()
        self.hosts = status.hosts
        self.shown = [folder.own_host] if folder.own_host else status.hosts
        self.read: Dict[str, int] = {host: 0 for host in self.hosts}
        self.is_coloured = out.isatty()

    def follow(self) -> None:
        """Shows whole lines only, except at the end of a job, whose last line may lack its newline."""
        for number, host in enumerate(self.hosts):
            if host not in self.shown:
                continue
            try:
                with open(self.folder.log(host), "rb") as log:
                    self._show(host, number, log)
            except FileNotFoundError:
                continue
        self.out.flush()

    def _show(self, host: str, number: int, log: BinaryIO) -> None:
        log.seek(self.read[host])
        prefix = self._prefix(host, number)
        while True:
            data = log.read(READ_BYTES)
            whole = data[:data.rfind(b"\n") + 1] or (data if len(data) == READ_BYTES else b"")  # a line may exceed a read
            if not whole:
                return
            log.seek(len(whole) - len(data), 1)
            self.read[host] += len(whole)
            lines = whole.decode("utf-8", "replace").split("\n")
            self.out.write("".join(f"{prefix}{line}\n" for line in (lines[:-1] if whole.endswith(b"\n") else lines)))

    def _prefix(self, host: str, number: int) -> str:
        if len(self.hosts) == 1:
            return ""
        return f"\x1b[{COLOURS[number % len(COLOURS)]}m{host} |\x1b[0m " if self.is_coloured else f"{host} | "
