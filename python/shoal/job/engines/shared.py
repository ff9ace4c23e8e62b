"""What all engines share: they make a job's folder, read its document from there, pack its source, and keep its result."""
from __future__ import annotations

import json
import os
import pathlib
import shutil
import time
from typing import Iterator, List, Optional, Tuple

from shoal.job.document import Job, JobError, as_data, distribution, local_path, reading, repository
from shoal.job.document.folder import JobFolder, Status, file_replace, host_names
from shoal.job.engines import contract

NAME_MAX = 63


class EngineError(JobError):
    """The job cannot be started, or a request cannot be met. The message is one line; exit_code is the command's."""

    exit_code = 1


class NameTaken(EngineError):
    """A job of that name already exists."""

    exit_code = 2


def name_make(job: Job) -> str:
    """Makes a name of base_job_name or the entry point, and the time. Like the SDK's names, it is unique to the millisecond."""
    now = time.time()
    stamp = time.strftime("%Y-%m-%d-%H-%M-%S", time.gmtime(now)) + f"-{int(now * 1000) % 1000:03d}"
    base = job.base_job_name or pathlib.Path(job.entry_point).stem
    words = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in base).strip("-") or "job"
    return f"{words[:NAME_MAX - 1 - len(stamp)].rstrip('-')}-{stamp}"


def folder_create(job: Job, jobs: Optional[pathlib.Path] = None, clone: Optional[pathlib.Path] = None) -> JobFolder:
    """Makes the job's folder with the document and a first status, whole or not at all. `clone` is a folder with the job's
    source; it moves into the job's folder."""
    job.name = job.name or name_make(job)
    folder = JobFolder(job.name, jobs)
    try:
        folder.create()
    except FileExistsError:
        raise NameTaken(f"there is a job named {job.name} already ({folder.path}): choose another name, or remove that folder") from None
    except OSError as error:
        raise EngineError(f"cannot make {folder.path}: {error.strerror}{contract.space_text(_existing(folder.path), error)}; SHOAL_JOBS names "
                          "another folder of jobs") from error
    try:
        if clone:
            shutil.move(str(clone), str(folder.path / "source"))
            repository.paths_moved(job, clone, folder.path / "source")
        paths_complete(job)
        file_replace(folder.document, json.dumps(as_data(job), indent=1) + "\n")
        folder.status_write(Status(job.name, created=time.time(), hosts=host_names(job.instance_count), engine=job.where.engine,
                                   workers_per_host=workers_per_host(job)))
        (folder.path / "hosts").mkdir()
        folder.events.touch()
    except OSError as error:
        text = f"cannot write into {folder.path}: {error.strerror}{contract.space_text(_existing(folder.path), error)}"
        shutil.rmtree(folder.path, ignore_errors=True)
        raise EngineError(text) from error
    return folder


def workers_per_host(job: Job) -> int:
    """Returns the number of workers per host, as far as this machine can know it."""
    gpus = contract.gpu_count() // (job.instance_count if job.where.engine == "local" else 1)
    return distribution.launch_of(job, gpus).workers_per_host


def _existing(path: pathlib.Path) -> pathlib.Path:
    return next(place for place in (path, *path.parents) if place.exists())


def paths_complete(job: Job) -> None:
    """Makes paths of this machine absolute, because the job does not run in our working directory."""
    if job.source_dir:
        job.source_dir = _absolute(job.source_dir)
    else:
        job.entry_point = _absolute(job.entry_point)
    job.dependencies = [_absolute(path) for path in job.dependencies]
    for channel in job.channels.values():
        channel.uri = _absolute(channel.uri)
    if job.checkpoints:
        job.checkpoints.uri = _absolute(job.checkpoints.uri)
    if job.output_path:
        job.output_path = _absolute(job.output_path)


def _absolute(uri: str) -> str:
    return uri if "://" in uri else os.path.abspath(os.path.expanduser(uri))


def end_seconds(job: Job) -> int:
    """Returns the seconds that a host may need to end after SIGTERM: for its script, its last checkpoints, and everything
    else."""
    from shoal.job.data import checkpoints
    return job.stop_grace + 60 + (int(checkpoints.timeout_of(job)) if job.checkpoints else 0)


def job_read(folder: JobFolder) -> Job:
    """Reads the document that folder_create wrote."""
    return reading.job_of(json.loads(folder.document.read_text(encoding="utf-8")), files=False)


# ---- the source ----

def is_left_out(path: pathlib.Path) -> bool:
    """Returns true for what is never part of a source: files made from it, its history, and folders of jobs, which may be below
    it."""
    return path.name in ("__pycache__", ".git") or all((path / name).is_file() for name in ("job.json", "status.json", "events.jsonl"))


def source_files(place: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields the files of a source that leaves this machine. Follows links that stay within the source. Raises EngineError."""
    top = os.path.realpath(place)

    def walk(folder: pathlib.Path, above: Tuple[str, ...]) -> Iterator[pathlib.Path]:
        for path in folder.iterdir():
            real = os.path.realpath(path)
            if is_left_out(path):
                continue
            if os.path.commonpath([real, top]) != top or real in above:
                raise EngineError(f"{path} is a link to {real}, which the source must not take along: put a copy there, or remove the link")
            if path.is_dir():
                yield from walk(path, (*above, real))
            elif path.is_file():
                yield path
    yield from walk(place, (top,)) if place.is_dir() else [place]


# ---- the result ----

def result_keep(job: Job, folder: JobFolder, hosts: List[str], with_model: bool, below: str = "") -> Optional[str]:
    """Packs model.tar.gz and output.tar.gz from the folders of these hosts and copies them to the folder `below` the usual
    place in output_path. Returns the URI of the model, or None if the script left no file in a model folder."""
    model = contract.model_files({host: folder.base(host) / "model" for host in hosts}) if with_model else {}
    output = contract.output_files({host: folder.base(host) / "output/data" for host in hosts})
    if model:
        contract.archive_write(model, folder.model)
    if output:
        contract.archive_write(output, folder.output)
    archives = [archive for archive, files in ((folder.model, model), (folder.output, output)) if files]
    kept = [_output_copy(job, archive, below) for archive in archives]
    return kept[0] if model else None


def _output_copy(job: Job, archive: pathlib.Path, below: str) -> str:
    """Copies an archive to OUTPUT_PATH/NAME/output, where the platform puts it."""
    if not job.output_path:
        return archive.as_uri()
    uri = f"{job.output_path.rstrip('/')}/{job.name}/output/{below}{archive.name}"
    from shoal.job.data import storage
    try:
        store, key = storage.store_open(uri)
        store.put(archive, key)
    except storage.StorageError as error:
        space = contract.space_text(_existing(pathlib.Path(key)), error.__cause__) if isinstance(error, storage.FullError) else ""
        raise contract.ContractError(f"cannot copy {archive.name} to {uri}: {error}{space}") from error
    path = local_path(uri)
    return path.absolute().as_uri() if path else uri
