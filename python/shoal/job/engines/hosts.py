"""Engine "hosts": the machines of an allocation. The same `shoal job run` is started once on each, by srun, mpirun, Kubernetes
or by hand. A machine finds its index in the variables of its launcher, as `shoal run` does.

With a shared folder (the default) the first host makes the folder of the job and the others join it: each writes
hosts/HOST.json for the others to read, and the first packs the results of all. Without a shared folder (where.options.shared =
false) each machine has its own folder of the same name, with its own part of everything.

    machine 0: shoal job run --> member (leader) --> agent of algo-1        JOBS/NAME/hosts/algo-1.json
    machine 1: shoal job run --> member          --> agent of algo-2        JOBS/NAME/hosts/algo-2.json"""
from __future__ import annotations

import contextlib
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

from shoal.job import processes
from shoal.job.document import Job, JobError
from shoal.job.document.folder import ENDED, HostState, JobFolder, Status, file_replace, record_read, touched_at
from shoal.job.engines import liveness, local
from shoal.job.engines.agent import EXIT_TIME_LIMIT, Ending
from shoal.job.engines.local import Host, Runner
from shoal.job.engines.shared import EngineError, NameTaken, folder_create, job_read

JOIN_S = 600.0  # for all hosts to arrive (where.options.start_timeout)
PORT = 29500  # by default torchrun's

# Variables of launchers that start one process on each host: the number of hosts, and this host's index.
SOURCES = (("SLURM_STEP_NUM_NODES", "SLURM_NODEID"), ("SLURM_NNODES", "SLURM_NODEID"), ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
           ("PMI_SIZE", "PMI_RANK"), ("PET_NNODES", "PET_NODE_RANK"), ("DSTACK_NODES_NUM", "DSTACK_NODE_RANK"))
ADDRESSES = (("MASTER_ADDR", "MASTER_PORT"), ("PET_MASTER_ADDR", "PET_MASTER_PORT"), ("DSTACK_MASTER_NODE_IP", "MASTER_PORT"))


# ---- this machine's index ----

def index_find(job: Job, environment: Mapping[str, str], given: Optional[int] = None) -> int:
    """Returns this machine's index among the hosts, from 0. Raises EngineError."""
    count = job.instance_count
    if given is None:
        given = _index_told(count, environment)
    if given is None:
        given = _index_among(job.where.hosts)
    if given is None and count > 1:
        raise EngineError(f"nothing says which of the {count} hosts this is: start `shoal job run` once on each by srun, mpirun or "
                          "Kubernetes, name this machine in where.hosts, or say --host-index")
    if not 0 <= (given or 0) < count:
        raise EngineError(f"the launcher numbers this host {given}, but instance_count is {count}: only hosts 0 to {count - 1} take part")
    return given or 0


def _index_told(count: int, environment: Mapping[str, str]) -> Optional[int]:
    for hosts, index in SOURCES:
        if environment.get(hosts, "").isdigit() and environment.get(index, "").isdigit():
            if int(environment[hosts]) != count:
                raise EngineError(f"{hosts} is {environment[hosts]}, but instance_count is {count}: both are the number "
                                  "of hosts of the job, so set them alike")
            return int(environment[index])
    return None


def _index_among(hosts: List[str]) -> Optional[int]:
    own = platform.node()
    names = [name for name in hosts if name in (own, own.split(".")[0])]
    return hosts.index(names[0]) if names else None


def address_find(job: Job, environment: Mapping[str, str]) -> Optional[Tuple[str, int]]:
    """Returns the address of the first host if the document or the variables have it."""
    options = job.where.options
    port = int(options.get("port") or 0)
    if options.get("address"):
        return str(options["address"]), port
    for host, its_port in ADDRESSES:
        if environment.get(host):
            return environment[host], port or int(environment.get(its_port) or 0)
    return (job.where.hosts[0], port) if job.where.hosts else None


# ---- start, status and stop ----

def take_part(job: Job, jobs: Optional[pathlib.Path], host_index: Optional[int] = None) -> JobFolder:
    """Starts this machine's part. The first host makes the folder, the others wait for it. Raises EngineError."""
    index = index_find(job, os.environ, host_index)
    if job.instance_count > 1 and not job.name:
        raise EngineError(f"a job on {job.instance_count} machines needs a name that all of them know: set `name`, or say --name")
    is_alone = index == 0 or not is_shared(job)
    folder = folder_create(job, jobs) if is_alone else _folder_await(job, jobs, index)
    folder.own_host = folder.status().hosts[index]
    local.runner_start(folder, "shoal.job.engines.hosts", [str(index)], folder.host_state(folder.own_host).exists)
    return folder


def is_shared(job: Job) -> bool:
    return bool(job.where.options.get("shared", True))


def _folder_await(job: Job, jobs: Optional[pathlib.Path], index: int) -> JobFolder:
    """Waits for the folder that the first host makes. Refuses the folder of an older job of this name."""
    folder = JobFolder(job.name or "", jobs)
    _meet_await(job, folder)
    host = folder.status().hosts[index]
    if folder.host_state(host).exists() or folder.status().status in ENDED:
        raise NameTaken(f"there is a job named {job.name} already ({folder.path}): choose another name, or remove that folder")
    return folder


def _meet_await(job: Job, folder: JobFolder, run: int = 0) -> Dict[str, Any]:
    """Waits for what the first host writes for the others in this run of the job."""
    limit, path = float(job.where.options.get("start_timeout", JOIN_S)), folder.path / "hosts/meet.json"
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            told = json.loads(path.read_text())
            if told.get("run", 0) == run:
                return told
        time.sleep(0.1)
    raise EngineError(f"the first host has not made {path} within {limit:.0f} s: `shoal job run` has to be started there as well; if the "
                      "machines share no folder, set where.options.shared = false")


def start(job: Job, folder: JobFolder) -> None:
    raise EngineError("jobs on hosts are started by `shoal job run` on each of them")


def stop(folder: JobFolder) -> None:
    """Asks this machine's member to stop the job, if there is one; the member asks the others."""
    for host in folder.status().hosts:
        state = state_read(folder, host)
        if state and processes.is_alive(state.process):
            os.kill(state.pid or 0, signal.SIGTERM)
            return
    raise EngineError(f"no host of job {folder.name} runs on {platform.node()}: stop it on {folder.status().machine or 'its first host'}")


def state_read(folder: JobFolder, host: str) -> Optional[HostState]:
    """Returns the state of a host, or None if it does not exist or cannot be read now."""
    try:
        return record_read(HostState, folder.host_state(host))
    except (OSError, ValueError, TypeError):
        return None


def refresh(folder: JobFolder, status: Status) -> Status:
    return status if status.status in ENDED else liveness.failed_if_lost(folder, status, liveness.silence_of(job_read(folder).where.options))


# ---- the member ----

@dataclasses.dataclass
class Other(Host):
    """Another machine's part, known only by its file."""

    state: Optional[HostState] = None  # the last one read; None before the first
    touched: float = 0.0  # its last sign of life, by the folder's clock
    heard_at: float = dataclasses.field(default_factory=time.monotonic)  # when `touched` last changed, by our clock


class Member(Runner):
    """The runner of one host. Its own agent reports over a pipe as in the engine "local". The other hosts are known by their
    files, which it reads every TICK_S."""

    TICK_S = liveness.BEAT_S

    def __init__(self, folder: JobFolder, index: int, run: int = 0):
        super().__init__(folder)
        self.index, self.name = index, self.status.hosts[index]
        self.is_shared = is_shared(self.job)
        self.is_writer = index == 0 or not self.is_shared
        if run != self.status.run:  # an earlier run of the same job, and its result, do not count
            before = self.status
            self.status = Status(before.name, created=before.created, hosts=before.hosts, workers_per_host=before.workers_per_host,
                                 engine=before.engine, engine_id=before.engine_id, run=run)
        self.state = HostState(self.name, run=run, machine=platform.node(), pid=os.getpid(), process=processes.identity(os.getpid()))
        self.others = [Other(name) for name in self.status.hosts if name != self.name and self.is_shared]
        self.silence_s = liveness.silence_of(self.job.where.options)

    def _cores_of(self, index: int) -> List[int]:
        return []  # the machine is ours alone

    def _status_change(self, **fields: Any) -> None:
        """Changes the job's status. One host writes it; each host writes its own state."""
        self.status = dataclasses.replace(self.status, **fields)
        if self.is_writer:
            self._try(self.folder.status_write, self.status)

    def _state_change(self, **fields: Any) -> None:
        self.state = dataclasses.replace(self.state, **fields)
        self._try(file_replace, self.folder.host_state(self.name), json.dumps(dataclasses.asdict(self.state)) + "\n")

    def _beats(self) -> List[pathlib.Path]:
        return [self.folder.host_state(self.name), *(super()._beats() if self.is_writer else [])]

    def _hosts_start(self) -> None:
        self._state_change()
        self._host_start(self.index, self._meet(), processes.python_environment())
        self.own = self.hosts[0]
        self.hosts += self.others

    def _meet(self) -> List[Any]:
        """Returns where the ranks meet. In a shared folder the first host chooses this, and writes it down with the job's
        secret."""
        if self.is_shared and self.index:
            told = _meet_await(self.job, self.folder, self.state.run)
            os.environ.setdefault("SHOAL_SECRET", told["secret"])
            return [told["address"], told["port"]]
        address, port = address_find(self.job, os.environ) or (platform.node(), 0)
        port = port or (processes.free_port() if self.is_shared else PORT)
        if self.is_shared:
            told = {"address": address, "port": port, "secret": os.environ.setdefault("SHOAL_SECRET", secrets.token_hex(32)), "run": self.state.run}
            file_replace(self.folder.path / "hosts/meet.json", json.dumps(told) + "\n")
        return [address, port]

    # -- the other hosts --

    def _tick(self) -> None:
        for other in self.others:
            if other.ending is None or other.is_lost:
                self._other_look(other)
        self._phase_look()

    def _phase_look(self) -> None:
        if self.own.ending is None and self.state.status != self.own.status:
            self._state_change(status=self.own.status)
        super()._phase_look()

    def _other_look(self, other: Other) -> None:
        state = state_read(self.folder, other.name)
        if state and state.run == self.state.run and state != other.state:
            other.state, other.status = state, state.status
            if state.status in ENDED:
                self.failed = [host for host in self.failed if host is not other]  # it may have counted as lost
                other.is_lost = False
                self._ended(other, Ending(state.status, state.exit_code or 0, state.failure_reason, state.is_secondary))
        if other.state:
            with contextlib.suppress(OSError):
                touched = touched_at(self.folder.host_state(other.name))
                other.heard_at = other.heard_at if touched == other.touched else time.monotonic()
                other.touched = touched
        silence = time.monotonic() - other.heard_at
        limit = self.silence_s if other.state else float(self.job.where.options.get("start_timeout", JOIN_S))
        if other.ending is None and silence > limit:
            other.is_lost = True
            self.folder.progress_write(other.name, None)  # its agent cannot do this itself
            self._ended(other, Ending("Failed", 1, self._lost_text(other, limit, silence)))

    def _lost_text(self, other: Other, limit: float, silence: float) -> str:
        if other.state:
            return f"{other.name} ({other.state.machine}) was lost: no sign of life for {silence:.0f} s"
        return f"{other.name} was not there within {limit:.0f} s: start `shoal job run` on each of the {len(self.status.hosts)} machines"

    def _is_over(self) -> bool:
        """Returns true if this member has nothing left to wait for. The first host of a shared folder waits for all hosts that
        arrived to end, because it packs their results."""
        if self.own.ending is None:
            return False
        if self.state.status not in ENDED:
            own = self.own.ending
            self._state_change(status=own.status, exit_code=own.exit_code, failure_reason=own.reason, is_secondary=own.is_secondary)
        is_ending = self.end_at is not None or self.is_stopping
        return not self.is_writer or all(other.ending or (is_ending and other.state is None) for other in self.others)

    # -- the end --

    def _ending(self) -> Ending:
        ending = super()._ending()
        if ending.status == "Stopped" and self.is_writer and self.status.engine == "slurm":
            from shoal.job.engines import slurm
            limit = slurm.limit_reached(self.job, self.status.engine_id or os.environ.get("SLURM_JOB_ID", ""))
            return Ending("Failed", EXIT_TIME_LIMIT, f"Slurm's time limit of {limit} has come") if limit else ending
        return ending

    def _below(self) -> str:
        """Returns the folder for this host's results, if each host keeps its own; the first host's are in the usual place."""
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
    """`words`: the folder, then this host's index. Without an index this member was not started by an engine, and the folder
    exists."""
    path = pathlib.Path(words[0])
    folder = JobFolder(path.name, path.parent)
    run = 0 if len(words) > 1 else int(os.environ.get("SLURM_RESTART_COUNT") or 0)
    try:
        job = job_read(folder)
        index = int(words[1]) if len(words) > 1 else index_find(job, os.environ)
        if index and len(words) == 1:
            _meet_await(job, folder, run)
        return Member(folder, index, run).run()
    except JobError as error:
        sys.exit(f"shoal job: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
