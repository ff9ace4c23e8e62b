"""Decides whether the process that runs a job is still there, for all engines whose jobs write their own status.

The process is named by its identity (processes.py) and gives signs of life: one of its threads touches its files from the start
until it ends, also during packing and upload. A reader on the same kernel asks the kernel; any other reader looks at the age of
the file. A reader reports a loss but writes nothing, so a silent job that gives a sign of life again is not lost. Only the
job's own process writes how the job ended."""
from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import platform
import threading
import time
from typing import List, Mapping, Optional

from shoal.job import processes
from shoal.job.document.folder import ENDED, JobFolder, Status, touched_at

BEAT_S = 2.0  # between two signs of life
SILENCE_S = 60.0  # a process without a sign of life for this time counts as lost (where.options.silence)
START_S = 60.0  # within which a newly started process must have begun


def silence_of(options: Mapping[str, object]) -> float:
    return float(str(options.get("silence", SILENCE_S)))


def beat(paths: List[pathlib.Path]) -> None:
    """Gives signs of life by touching these files until this process ends."""
    def touch() -> None:
        while True:
            for path in paths:
                with contextlib.suppress(OSError):  # a file server that is away for a moment
                    os.utime(path)
            time.sleep(BEAT_S)
    threading.Thread(target=touch, name="beat", daemon=True).start()


def failed_if_lost(folder: JobFolder, status: Status, silence_s: float) -> Status:
    """Returns the status of a job that has not reported its end: unchanged, or Failed if the process that runs it is gone or
    silent."""
    is_alive = processes.is_alive(status.process)
    is_unnamed = status.pid is not None and status.process is None  # by an earlier version, which touches no status
    if is_alive or is_unnamed or status.status in ENDED:
        return status
    try:
        touched = touched_at(folder.path / "status.json")
        silence = _now_there(folder) - touched
    except OSError:  # a file server that is away for a moment
        return status
    if is_alive is None and silence <= (silence_s if status.pid else START_S):
        return status
    now = folder.status()  # it may have ended between our two looks
    if now.status in ENDED or now.process != status.process:
        return now
    return dataclasses.replace(now, status="Failed", ended=touched, exit_code=1, failure_reason=_reason(now, is_alive, silence, touched))


def _reason(status: Status, is_alive: Optional[bool], silence: float, touched: float) -> str:
    if status.pid is None:
        return "the process that runs the job was never started"
    if is_alive is False:
        return f"the process that ran the job (pid {status.pid}) is gone: it was killed, or the machine was restarted"
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(touched))
    return (f"seems lost since {since}: the process that runs the job (pid {status.pid} on {status.machine}) has given no sign of life for "
            f"{silence:.0f} s")


def _now_there(folder: JobFolder) -> float:
    """Returns the time by the clock that dates the folder's files, or by our own clock if we may not write there."""
    probe = folder.path / f".now-{platform.node()}-{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
