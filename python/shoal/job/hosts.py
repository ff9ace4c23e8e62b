"""Engine "hosts": the machines of an allocation. The same `shoal job run` is started once on each, by srun, mpirun, Kubernetes or by
hand; where a machine stands is taken from what started it, as `shoal run` does it.

With a shared folder (the default) the first host makes the folder of the job, the others join it: each writes hosts/HOST.json, which
the others read, and the first packs the results of all. Without one (where.options.shared = false) each machine has a folder of the
same name of its own, with its own part of everything.

    machine 0: shoal job run --> member (leader) --> agent of algo-1        JOBS/NAME/hosts/algo-1.json
    machine 1: shoal job run --> member          --> agent of algo-2        JOBS/NAME/hosts/algo-2.json"""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import secrets
import signal
import sys
import time
from typing import Any, Dict, List, Mapping, Optional, Tuple

from shoal.job import local, processes
from shoal.job.agent import Ending
from shoal.job.document import Job
from shoal.job.folder import ENDED, HostState, JobFolder, Status, file_replace
from shoal.job.local import Runner
from shoal.job.places import EngineError, NameTaken, folder_create, job_read

BEAT_S = 2.0  # between two signs of life, and between two looks at those of the others
SILENCE_S = 60.0  # without a sign of life a host is lost (where.options.silence)
JOIN_S = 600.0  # until all hosts must be there (where.options.start_timeout)
PORT = 29500  # where nothing says another one: torchrun's

# Variables that tell how many hosts there are and which this is, of what starts one process on each.
SOURCES = (("SLURM_STEP_NUM_NODES", "SLURM_NODEID"), ("SLURM_NNODES", "SLURM_NODEID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
           ("PMI_SIZE", "PMI_RANK"), ("PET_NNODES", "PET_NODE_RANK"), ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK"))
ADDRESSES = (("MASTER_ADDR", "MASTER_PORT"), ("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("DSTACK_MASTER_NODE_IP", "MASTER_PORT"))


# ---- where this machine stands ----

def index_find(job: Job, environment: Mapping[str, str], given: Optional[int] = None) -> int:
    """Which host this machine is, from 0. Raises EngineError."""
    count = job.instance_count
    if given is None:
        given = _index_told(count, environment)
    if given is None:
        given = _index_among(job.where.hosts)
    if given is None and count > 1:
        raise EngineError(f"nothing says which of the {count} hosts this is: start `shoal job run` once on each by srun, mpirun or "
                          "Kubernetes, name this machine in where.hosts, or say --host-index")
    if not 0 <= (given or 0) < count:
        raise EngineError(f"this is host {given} of what started it, and instance_count is {count}: 0 to {count - 1} can take part")
    return given or 0


def _index_told(count: int, environment: Mapping[str, str]) -> Optional[int]:
    for hosts, index in SOURCES:
        if environment.get(hosts, "").isdigit() and environment.get(index, "").isdigit():
            if int(environment[hosts]) != count:
                raise EngineError(f"{hosts} is {environment[hosts]}, and instance_count is {count}: both say how many hosts the job has")
            return int(environment[index])
    return None


def _index_among(hosts: List[str]) -> Optional[int]:
    own = platform.node()
    names = [name for name in hosts if name in (own, own.split(".")[0])]
    return hosts.index(names[0]) if names else None


def address_find(job: Job, environment: Mapping[str, str]) -> Optional[Tuple[str, int]]:
    """Where the first host is reached, as far as the document or the variables tell."""
    options = job.where.options
    port = int(options.get("port") or 0)
    if options.get("address"):
        return str(options["address"]), port
    for host, its_port in ADDRESSES:
        if environment.get(host):
            return environment[host], port or int(environment.get(its_port) or 0)
    return (job.where.hosts[0], port) if job.where.hosts else None


# ---- from outside ----

def take_part(job: Job, jobs: Optional[pathlib.Path], host_index: Optional[int] = None) -> JobFolder:
    """Starts this machine's part. The first host makes the folder, the others wait for it. Raises EngineError."""
    index = index_find(job, os.environ, host_index)
    if job.instance_count > 1 and not job.name:
        raise EngineError(f"a job on {job.instance_count} machines needs a name that all of them know: set `name`, or say --name")
    is_alone = index == 0 or not is_shared(job)
    folder = folder_create(job, jobs) if is_alone else _folder_await(job, jobs, index)
    folder.own_host = folder.status().hosts[index]
    local.runner_start(folder, "shoal.job.hosts", [str(index)], folder.host_state(folder.own_host).exists)
    return folder


def is_shared(job: Job) -> bool:
    return bool(job.where.options.get("shared", True))


def _folder_await(job: Job, jobs: Optional[pathlib.Path], index: int) -> JobFolder:
    """The folder that the first host makes. One of an older job of this name is none."""
    folder = JobFolder(job.name or "", jobs)
    _meet_await(job, folder)
    host = folder.status().hosts[index]
    if folder.host_state(host).exists() or folder.status().status in ENDED:
        raise NameTaken(f"there is a job named {job.name} already ({folder.path}): choose another name, or remove that folder")
    return folder


def _meet_await(job: Job, folder: JobFolder) -> None:
    limit = _seconds(job, "start_timeout", JOIN_S)
    deadline = time.monotonic() + limit
    while not (folder.path / "hosts/meet.json").is_file():
        if time.monotonic() > deadline:
            raise EngineError(f"the first host has not made {folder.path}/hosts/meet.json within {limit:.0f} s: `shoal job run` has to be "
                              "started there, too; where the machines share no folder, set where.options.shared = false")
        time.sleep(0.1)


def _seconds(job: Job, option: str, default: float) -> float:
    return float(job.where.options.get(option, default))


def start(job: Job, folder: JobFolder) -> None:
    raise EngineError("jobs on hosts are started by `shoal job run` on each of them")


def stop(folder: JobFolder) -> None:
    """Asks this machine's member, if there is one; it tells the others."""
    for host in folder.status().hosts:
        state = state_read(folder, host)
        if state and state.machine == platform.node() and processes.is_alive(state.pid, state.pid_start):
            os.kill(state.pid or 0, signal.SIGTERM)
            return
    raise EngineError(f"no host of job {folder.name} runs on {platform.node()}: stop it on {folder.status().machine or 'its first host'}")


def state_read(folder: JobFolder, host: str) -> Optional[HostState]:
    try:
        return HostState(**json.loads(folder.host_state(host).read_text()))
    except FileNotFoundError:
        return None


def _writer_of(folder: JobFolder, status: Status) -> Tuple[str, str]:
    """The host that writes the status of the folder, and what to call it: the first one in a shared folder. A machine's own folder holds
    the state of its own host alone."""
    if is_shared(job_read(folder)):
        return status.hosts[0], "its first host"
    return next((host for host in status.hosts if folder.host_state(host).exists()), status.hosts[0]), "its host on this machine"


def lost_reason(folder: JobFolder, status: Status) -> Optional[str]:
    host, words = _writer_of(folder, status)
    state = state_read(folder, host)
    if state is None:
        return None if time.time() - status.created < SILENCE_S else f"{words} was never started"
    if state.machine == platform.node():
        is_gone = not processes.is_alive(state.pid, state.pid_start)
        return f"the process of {words} (pid {state.pid}) is gone: it was killed, or the machine was started anew" if is_gone else None
    silence = _now_there(folder) - folder.host_state(host).stat().st_mtime
    return f"{words} ({state.machine}) has given no sign of life for {silence:.0f} s" if silence > SILENCE_S else None


def _now_there(folder: JobFolder) -> float:
    """The time by the clock that dates the files of the folder."""
    probe = folder.path / f".now-{platform.node()}-{os.getpid()}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


# ---- the member ----

@dataclasses.dataclass
class Other:
    """What is known of another host."""

    name: str
    state: Optional[HostState] = None
    heard_at: float = 0.0  # by our clock, when its sign of life was last another one
    is_lost: bool = False


class Member(Runner):
    """The part of one host. Its own agent is heard over a pipe as in the engine "local"; the others are files."""

    TICK_S = BEAT_S

    def __init__(self, folder: JobFolder, index: int):
        super().__init__(folder)
        self.index, self.name = index, self.status.hosts[index]
        self.is_shared = is_shared(self.job)
        self.is_writer = index == 0 or not self.is_shared
        self.state = HostState(self.name, machine=platform.node(), pid=os.getpid(), pid_start=processes.start_time(os.getpid()))
        self.others = [Other(name, None, time.monotonic()) for name in self.status.hosts if name != self.name and self.is_shared]
        self.began_at = time.monotonic()
        self.first_other: Optional[Other] = None
        self.lost: Optional[str] = None

    def _cores_of(self, index: int) -> List[int]:
        return []  # the machine is ours alone

    def _status_change(self, **fields: Any) -> None:
        """The status of the job is written by one host; each writes its own state."""
        self.status = dataclasses.replace(self.status, **fields)
        if self.is_writer:
            self._try(self.folder.status_write, self.status)

    def _state_change(self, **fields: Any) -> None:
        self.state = dataclasses.replace(self.state, alive=time.time(), **fields)
        self._try(file_replace, self.folder.host_state(self.name), json.dumps(dataclasses.asdict(self.state)) + "\n")

    def _hosts_start(self) -> None:
        self._state_change()
        self.meet = self._meet()
        self._host_start(self.index, self.meet, processes.python_environment())

    def _meet(self) -> List[Any]:
        """Where the ranks meet. The first host of a shared folder chooses, and writes it down with the secret of the job."""
        path = self.folder.path / "hosts/meet.json"
        if self.is_shared and self.index:
            told = json.loads(path.read_text())
            os.environ.setdefault("SHOAL_SECRET", told["secret"])
            return [told["address"], told["port"]]
        address, port = address_find(self.job, os.environ) or (platform.node(), 0)
        port = port or (processes.free_port() if self.is_shared else PORT)
        if self.is_shared:
            secret = os.environ.setdefault("SHOAL_SECRET", secrets.token_hex(32))
            file_replace(path, json.dumps({"address": address, "port": port, "secret": secret}) + "\n")
        return [address, port]

    # -- the others --

    def _tick(self) -> None:
        self._state_change(status=self._own_status())
        for other in self.others:
            self._other_look(other)
        if self.is_stopping or self.first or self.lost:
            return
        self._phase_look()

    def _own_status(self) -> str:
        own = self.hosts[0]
        if own.ending is None or self.state.status in ENDED:
            return own.status if own.ending is None else self.state.status
        return "Uploading"

    def _other_look(self, other: Other) -> None:
        state = state_read(self.folder, other.name)
        if state and (other.state is None or state.alive != other.state.alive):
            other.state, other.heard_at = state, time.monotonic()
        silence = time.monotonic() - other.heard_at
        if other.state is None:
            limit = _seconds(self.job, "start_timeout", JOIN_S)
            if silence > limit:
                self._other_failed(other, f"{other.name} was not there within {limit:.0f} s: start `shoal job run` on each of the "
                                          f"{len(self.status.hosts)} machines")
        elif other.state.status in ("Failed", "Stopped"):
            self._other_failed(other, None)
        elif other.state.status not in ENDED and silence > _seconds(self.job, "silence", SILENCE_S):
            other.is_lost = True
            self.folder.progress_write(other.name, None)  # nobody is there who would
            self._other_failed(other, f"{other.name} ({other.state.machine}) was lost: no sign of life for {silence:.0f} s")

    def _other_failed(self, other: Other, lost: Optional[str]) -> None:
        if self.first_other is None or (lost is None and self.lost):
            self.first_other, self.lost = other, lost
        if self.end_at is None:
            self.end_at = time.monotonic() + local.NOTICE_S

    def _phase_look(self) -> None:
        if not self.hosts or self.hosts[0].ending:
            return
        known = [other.state.status if other.state else "Starting" for other in self.others]
        phases = [local.PHASES.index(status) if status in local.PHASES else len(local.PHASES) - 1 for status in [self.hosts[0].status, *known]]
        self._phase_is(local.PHASES[min(phases)])

    def _is_over(self) -> bool:
        """The first host of a shared folder waits for the end of all, which it then packs."""
        if not super()._is_over():
            return False
        if self.hosts[0].ending and self.state.status not in ENDED:
            own = self._own_ending()
            self._state_change(status=own.status, exit_code=own.exit_code, failure_reason=own.reason, is_secondary=own.is_secondary)
        return not (self.is_writer and self.is_shared) or all(self._is_gone(other) for other in self.others)

    def _is_gone(self, other: Other) -> bool:
        if other.state is None:
            return self.end_at is not None or self.is_stopping
        return other.state.status in ENDED or other.is_lost

    # -- the end --

    def _own_ending(self) -> Ending:
        """What the other hosts are told."""
        own = self.hosts[0].ending
        assert own
        if own.status == "Failed" and self.first_other and not self.first:
            return dataclasses.replace(own, is_secondary=True)
        if own.status == "Stopped" and self.first_other and not self.is_stopping:  # stopped because of another host
            return Ending("Failed", own.exit_code, "another host failed", True)
        return own

    def _ending(self) -> Ending:
        """The first cause over all hosts."""
        own = self._own_ending()
        states = [other.state for other in self.others if other.state]
        if self.is_stopping or any(state.status == "Stopped" and not state.is_secondary for state in states):
            return Ending("Stopped", 143, "stopped on request")
        failed = [(self.name, own.exit_code, own.reason, own.is_secondary)] if own.status == "Failed" else []
        failed += [(state.host, state.exit_code, state.failure_reason, state.is_secondary) for state in states if state.status == "Failed"]
        failed.sort(key=lambda one: one[3])
        if failed and (not failed[0][3] or not self.lost):
            host, code, reason, _ = failed[0]
            return Ending("Failed", code or 1, f"{host}: {reason}" if len(self.status.hosts) > 1 else reason)
        return Ending("Failed", 1, self.lost) if self.lost else own

    def _below(self) -> str:
        """Where each host keeps its own, that of the first is at the usual place."""
        return "" if self.is_shared or self.index == 0 else f"{self.name}/"

    def _hosts_to_pack(self) -> List[str]:
        return self.status.hosts if self.is_shared else [self.name]

    def _finish(self, ending: Ending) -> int:
        code = super()._finish(ending) if self.is_writer else ending.exit_code
        self.reserve.unlink(missing_ok=True)
        if self.state.status not in ENDED:
            self._state_change(status=ending.status, exit_code=ending.exit_code, failure_reason=ending.reason)
        return code


def main(words: List[str]) -> int:
    path = pathlib.Path(words[0])
    folder = JobFolder(path.name, path.parent)
    index = int(words[1]) if len(words) > 1 else _index_in_allocation(folder)
    return Member(folder, index).run()


def _index_in_allocation(folder: JobFolder) -> int:
    """Of a member that an engine has started itself, in a folder that is there."""
    job = job_read(folder)
    try:
        index = index_find(job, os.environ)
        if index:
            _meet_await(job, folder)
    except EngineError as error:
        sys.exit(f"shoal job: {error}")
    return index


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
