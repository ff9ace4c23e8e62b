"""Engine "slurm": writes the batch script, submits it with sbatch, and then asks Slurm only what the job's folder cannot tell. On the
hosts of the allocation srun starts hosts.py's members; so the folder of jobs has to be on a file system that all of them share.

where.options: partition, account, qos, constraint, reservation, gres, time, mem, cpus_per_task, as sbatch has them; sbatch: a list of
further words; setup: lines of shell that run first on the first host (module load ..., source venv/bin/activate)."""
from __future__ import annotations

import dataclasses
import shlex
import shutil
import subprocess
import sys
import time
from typing import Dict, List, Optional, Tuple

from shoal.job import processes
from shoal.job.document import Job
from shoal.job.folder import JobFolder, Status
from shoal.job.places import EngineError

OPTIONS = ("partition", "account", "qos", "constraint", "reservation", "gres", "time", "mem", "cpus_per_task")
ASK_S = 60.0  # until Slurm's commands have answered
# States of a job that has not ended, as squeue prints them.
UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESIZING",
             "SIGNALING", "STAGE_OUT", "STOPPED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")


def script_text(job: Job, folder: JobFolder) -> str:
    """The batch script."""
    options = job.where.options
    unknown = sorted(set(options) - set(OPTIONS) - {"sbatch", "setup", "port", "address", "interface", "start_timeout", "silence", "shared",
                                                  "checkpoints_timeout"})
    if unknown:
        raise EngineError(f"where.options.{unknown[0]} is not known with the engine slurm: known are {', '.join(OPTIONS)}, sbatch (a list "
                          "of further words) and setup")
    words = [f"--job-name={job.name}", f"--nodes={job.instance_count}", "--ntasks-per-node=1", f"--output={folder.path / 'slurm.out'}",
             "--open-mode=append"]
    words += [f"--{name.replace('_', '-')}={options[name]}" for name in OPTIONS if name in options]
    lines = ["#!/bin/sh", *(f"#SBATCH {shlex.quote(str(word))}" for word in [*words, *options.get("sbatch", [])])]
    setup = options.get("setup", [])
    lines += [setup] if isinstance(setup, str) else list(setup)
    member = [sys.executable, "-m", "shoal.job.hosts", str(folder.path)]
    # One member that fails does not end the others at once: they tell first what happened, and the first of them writes it down.
    lines.append("exec srun --ntasks-per-node=1 --kill-on-bad-exit=0 " + " ".join(map(shlex.quote, member)))
    return "\n".join(lines) + "\n"


def start(job: Job, folder: JobFolder) -> None:
    """Submits the job. Returns when Slurm has taken it, not when it runs."""
    script = folder.path / "slurm.sh"
    script.write_text(script_text(job, folder))
    code, out, err = ask("sbatch", "--parsable", str(script), environment=processes.python_environment())
    number = out.strip().split(";")[0]
    if code or not number.isdigit():
        said = (err or out).strip().splitlines() or ["it said nothing"]
        raise EngineError(f"sbatch exited with code {code}: {said[-1]}")
    folder.status_write(dataclasses.replace(folder.status(), engine_id=number))


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
    """(state, reason) as Slurm tells them; nothing where it does not answer."""
    code, out, err = ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--format=%T|%r")
    if code == 0 and "|" in out:
        state, _, reason = out.strip().splitlines()[0].partition("|")
        return state, reason
    if code and "Invalid job id" not in err:
        return None
    if shutil.which("sacct") is None:
        return "GONE", ""
    code, out, _ = ask("sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={number}", "--format=State,ExitCode")
    if code == 0 and out.strip():
        state, _, exit_code = out.strip().splitlines()[0].partition("|")
        return state.split()[0], f"exit code {exit_code}"
    return "GONE", ""


def lost_reason(folder: JobFolder, status: Status) -> Optional[str]:
    """The members write how the job stands. Where Slurm has ended it before they could, Slurm is asked why."""
    told = state_of(status.engine_id) if status.engine_id else None
    if told is None or told[0] in UNDER_WAY:
        return None
    state, reason = told
    detail = f" ({reason})" if reason and reason != "None" else ""
    return f"Slurm's job {status.engine_id} has ended without a word of its own: {state}{detail}; see {folder.path / 'slurm.out'}"


def stop(folder: JobFolder) -> None:
    """A job that waits is cancelled; one that runs gets SIGTERM, and its scripts their grace time."""
    status = folder.status()
    told = state_of(status.engine_id or "")
    if told and told[0] in WAITING:
        words: List[str] = []
        folder.status_write(dataclasses.replace(status, status="Stopped", ended=time.time(), exit_code=143))
    else:
        words = ["--signal=TERM"]
    code, _, err = ask("scancel", *words, status.engine_id or "")
    if code:
        raise EngineError(f"scancel exited with code {code}: {err.strip()}")
