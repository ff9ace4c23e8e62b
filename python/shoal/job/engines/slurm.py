"""Engine "slurm": writes the batch script and submits it with sbatch. Afterwards it asks Slurm only what the job's folder does
not show. On the hosts of the allocation srun starts the members of hosts.py, so the folder of jobs must be on a file system
that all hosts share.

where.options: partition, account, qos, constraint, reservation, gres, time, mem, cpus_per_task, as in sbatch; sbatch: a list of
further arguments; setup: lines of shell that run first on the first host (module load ..., source venv/bin/activate). Without
`time` the job gets one from max_run, if the document sets that; without cpus_per_task it gets a core for each worker.

Slurm may restart a job by itself (after a preemption, a node failure, `scontrol requeue`). So a stop or a failure is final only
once Slurm has also ended the job; a file in the job's folder then records that."""
from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
import subprocess
import sys
import time
from typing import Dict, List, Optional, Tuple

from shoal.job import processes
from shoal.job.document import Job
from shoal.job.document.folder import ENDED, JobFolder, Status, file_replace, touched_at
from shoal.job.engines import liveness
from shoal.job.engines.shared import EngineError, end_seconds, job_read, workers_per_host

OPTIONS = ("partition", "account", "qos", "constraint", "reservation", "gres", "time", "mem", "cpus_per_task")
ASK_S = 60.0  # for Slurm's commands to answer
QUIET_S = 10.0  # time without a sign of life after which Slurm is asked
EARLIER_S = 60  # Slurm may send the signal this much before the requested time
BRING_S = 600  # time that a job may need before its script runs, in addition to max_run
ASKED_S = 86400.0  # time after a job's end for which Slurm is asked if it restarts the job
COMPLETING_S = 300.0  # a job that has been COMPLETING for this time is over: a host that does not answer may hold it for hours
GONE = "GONE"  # Slurm no longer knows the job
OVER = "slurm.over"  # in the job's folder: Slurm has ended the job for good
# States of a job that has not ended, as squeue prints them.
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
UNDER_WAY = (*WAITING, "RUNNING", "COMPLETING", "SUSPENDED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED")


def script_text(job: Job, folder: JobFolder) -> str:
    """Returns the batch script."""
    options = job.where.options
    unknown = sorted(set(options) - set(OPTIONS) - {"sbatch", "setup", "port", "address", "interface", "start_timeout", "silence", "shared",
                                                  "checkpoints_timeout"})
    if unknown:
        raise EngineError(f"where.options.{unknown[0]} is not known with the engine slurm: known are {', '.join(OPTIONS)}, sbatch (a list "
                          "of further arguments) and setup")
    further = list(map(str, options.get("sbatch", [])))
    if any(re.match(r"--array\b|-a", word) for word in further):
        raise EngineError("where.options.sbatch has --array, and each task of the array would run in the one folder of this job: start "
                          "`shoal job run` once for each, with --name and --set")
    words = [f"--job-name={job.name}", f"--nodes={job.instance_count}", "--ntasks-per-node=1", f"--output={folder.path / 'slurm.out'}",
             "--open-mode=append", *_defaults(job, further)]
    words += [f"--{name.replace('_', '-')}={options[name]}" for name in OPTIONS if name in options]
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(word)}" for word in [*words, *further])]
    setup = options.get("setup", [])
    lines += [setup] if isinstance(setup, str) else list(setup)
    member = [sys.executable, "-m", "shoal.job.engines.hosts", str(folder.path)]
    # A member that fails does not end the others at once: each first reports what happened, and the first host writes it down.
    # Since 22.05 srun takes a task's cores only from its own arguments.
    srun = "exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} "
    lines.append(srun + " ".join(map(shlex.quote, member)))
    return "\n".join(lines) + "\n"


def _defaults(job: Job, further: List[str]) -> List[str]:
    """Returns options that follow from other fields of the document."""
    options, words = job.where.options, [f"--signal=TERM@{_signal_s(job)}"]
    if "time" not in options and job.max_run != Job.max_run:
        words.append(f"--time={-(-(job.max_run + BRING_S + end_seconds(job)) // 60)}")
    cores = job.workers_per_host or workers_per_host(job)
    if "cpus_per_task" not in options and cores > 1 and not any(re.match(r"--cpus-per-|-c|--exclusive", word) for word in further):
        words.append(f"--cpus-per-task={cores}")
    return words


def _signal_s(job: Job) -> int:
    """Returns how many seconds before its time limit the job gets SIGTERM: as many as it needs to end, but at most half of a
    short limit."""
    limit = seconds_of(str(job.where.options.get("time", "")))
    return min(end_seconds(job), limit // 2 if limit else 65535, 65535)


def seconds_of(text: str) -> Optional[int]:
    """Converts a time in Slurm's form to seconds: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S. Returns None for UNLIMITED and anything
    else."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if not all(part.isdigit() for part in (*parts, days or "0")) or len(parts) > 3:
        return None
    numbers = [int(part) for part in parts]
    if dash:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + seconds
    return numbers[0] * 60 if len(numbers) == 1 else sum(number * 60 ** place for place, number in enumerate(reversed(numbers)))


def start(job: Job, folder: JobFolder) -> None:
    """Submits the job. Returns when Slurm has accepted it, not when it runs."""
    script = folder.path / "slurm.sh"
    file_replace(script, script_text(job, folder))
    code, out, err = ask("sbatch", "--parsable", str(script), environment=processes.python_environment())
    number = out.strip().split(";")[0]
    if code or not number.isdigit():
        said = (err or out).strip().splitlines() or ["it said nothing"]
        raise EngineError(f"sbatch exited with code {code}: {said[-1]}")
    file_replace(folder.engine_id, number)  # not into the status, which the job itself may already write


def ask(program: str, *words: str, environment: Optional[Dict[str, str]] = None) -> Tuple[int, str, str]:
    """Runs one of Slurm's commands."""
    path = shutil.which(program)
    if path is None:
        raise EngineError(f"there is no {program} on PATH: the engine slurm is for machines that submit to Slurm")
    try:
        done = subprocess.run([path, *words], capture_output=True, text=True, timeout=ASK_S, stdin=subprocess.DEVNULL, env=environment)
    except subprocess.TimeoutExpired:
        return 1, "", f"{program} has not answered within {ASK_S:.0f} s"
    return done.returncode, done.stdout, done.stderr


def state_of(number: str) -> Optional[Tuple[str, str]]:
    """Returns (state, reason) as Slurm reports them, or None if it does not answer."""
    code, out, err = ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r")
    if code == 0 and "|" in out:
        state, _, reason = out.strip().splitlines()[0].partition("|")
        return state, "" if reason == "None" else reason
    if code and "Invalid job id" not in err:
        return None
    if shutil.which("sacct") is None:
        return GONE, ""
    code, out, _ = ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={number}", "--format=State,ExitCode")
    if code == 0 and out.strip():
        state, _, exit_code = out.strip().splitlines()[0].partition("|")
        return state.split()[0], f"exit code {exit_code}"
    return GONE, ""


def limit_reached(job: Job, number: str) -> Optional[str]:
    """Returns the time limit of a job if that is why Slurm has sent SIGTERM. Called within the job."""
    try:
        code, out, _ = ask("squeue", "--noheader", f"--jobs={number}", "--format=%L|%l")
    except EngineError:  # this host has no squeue
        return None
    left, _, limit = out.strip().partition("|")
    seconds = seconds_of(left.lstrip("-"))
    return limit if code == 0 and seconds is not None and seconds <= _signal_s(job) + EARLIER_S else None


def refresh(folder: JobFolder, status: Status) -> Status:
    """Returns the job's status. The members write it. Slurm is asked before they have begun, when they are silent, and after a
    stop or a failure."""
    if status.engine_id is None or status.status == "Completed":
        return status
    if status.status in ENDED:
        is_final = (folder.path / OVER).exists() or time.time() - (status.ended or 0.0) > ASKED_S
        return status if is_final else _after_end(folder, status)
    if status.process and liveness.failed_if_lost(folder, status, QUIET_S).status != "Failed":
        return status
    told = state_of(status.engine_id)
    if told is None:
        return liveness.failed_if_lost(folder, status, liveness.silence_of(job_read(folder).where.options)) if status.pid else status
    if told[0] in WAITING:
        return dataclasses.replace(status, status="Requeued" if status.pid else "Pending", waits_for=told[1])
    now = folder.status()
    return now if now.status in ENDED or _is_under_way(told[0], _touched(folder)) else _ended(folder, now, *told)


def _touched(folder: JobFolder) -> float:
    try:
        return touched_at(folder.path / "status.json")
    except OSError:  # a file server that is away for a moment
        return time.time()


def _is_under_way(state: str, since: float) -> bool:
    """`since`: the time of the job's end, or of its last sign of life."""
    return state in UNDER_WAY and (state != "COMPLETING" or time.time() - since <= COMPLETING_S)


def _after_end(folder: JobFolder, status: Status) -> Status:
    """Returns the status of a job whose members have written that it has ended: Slurm may still restart it."""
    try:
        told = state_of(status.engine_id or "")
    except EngineError:  # a machine without Slurm: the written status stays
        return status
    if told and told[0] in WAITING:
        return dataclasses.replace(status, status="Requeued", waits_for=told[1], ended=None, exit_code=None, failure_reason=None)
    if told and _is_under_way(told[0], status.ended or 0.0):
        return dataclasses.replace(status, status="Stopping", ended=None)
    if told and told[0] not in UNDER_WAY:
        with contextlib.suppress(OSError):
            (folder.path / OVER).touch()
    return status


def _ended(folder: JobFolder, status: Status, state: str, reason: str) -> Status:
    """Returns the status of a job that Slurm ended before its members could write so. Writes it, because Slurm forgets the
    reason."""
    detail = f" ({reason})" if reason else ""
    text = f"Slurm's job {status.engine_id} has ended without a message: {state}{detail}; see {folder.path / 'slurm.out'}"
    status = dataclasses.replace(status, status="Failed", ended=time.time(), exit_code=1, failure_reason=text)
    if state not in (GONE, *UNDER_WAY):  # GONE: this may be another Slurm; COMPLETING: Slurm may restart the job
        with contextlib.suppress(OSError):
            folder.status_write(status)
            (folder.path / OVER).touch()
    return status


def stop(folder: JobFolder) -> None:
    """Cancels a job that waits; sends SIGTERM to one that runs, whose scripts then have their grace time."""
    status = folder.status()
    told = state_of(status.engine_id or "")
    is_waiting = told is not None and told[0] in WAITING
    code, _, err = ask("scancel", *([] if is_waiting else ["--signal=TERM"]), status.engine_id or "")
    if code:
        raise EngineError(f"scancel exited with code {code}: {err.strip()}")
    if is_waiting:
        folder.status_write(dataclasses.replace(status, status="Stopped", ended=time.time(), exit_code=143))
        (folder.path / OVER).touch()
