"""Engine "local": all hosts of the job are groups of processes on this machine, each with its own base folder.

    start() --> runner (this file as a program; outlives the caller) --> agent of algo-1 --> its workers
                                                                     --> agent of algo-2 --> its workers

Only the runner writes status.json. It reads its agents' reports from pipes, and packs the archives. If it is killed, the agents
end their workers, and readers of the status find that the process is gone (liveness.py).

    event                                 the runner's action, here and in hosts.py
    all hosts are Ready                   lets its agents continue; they start their workers
    a host has ended, and not well        notes it; NOTICE_S later asks the hosts that still run to stop
    SIGTERM or SIGINT                     asks all hosts to stop, with stop_grace
    a host that was asked does not end    kills it, but later if its last checkpoints are being copied
    all hosts have ended                  packs, and writes how the job ended: Stopped if a host was asked to stop from outside, else
                                          Failed by the first failure that is not another's consequence, else Completed"""
from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import selectors
import signal
import subprocess
import sys
import time
from typing import Any, Callable, Dict, List, Optional

from shoal.job import processes
from shoal.job.document import Job
from shoal.job.document.folder import ENDED, JobFolder, Status
from shoal.job.engines import agent, contract, liveness
from shoal.job.engines.agent import Agent, Ending, Position
from shoal.job.engines.contract import ContractError
from shoal.job.engines.shared import EngineError, job_read, result_keep

NOTICE_S = 5.0  # time for the other hosts to notice a failure and end by themselves
RESERVE_BYTES = 1 << 16  # freed before the last status is written, so that it fits on a full disk
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
PHASES = ("Starting", "Downloading", "Ready", "Training")  # of a host; a ready job is reported as Downloading


# ---- start, status and stop ----

def start(job: Job, folder: JobFolder) -> None:
    """Starts the job and returns when its runner runs. The folder must exist and hold the document and a first status."""
    port = job.where.options.get("port")
    if port is not None and not processes.is_free(int(port)):
        raise EngineError(f"port {port} is in use on this machine: where.options.port must be free, or left out to have one chosen")
    runner_start(folder, "shoal.job.engines.local", [], lambda: folder.status().pid is not None)


def runner_start(folder: JobFolder, module: str, words: List[str], is_begun: Callable[[], bool]) -> None:
    """Starts the process that runs the job; it outlives us. Returns when it has begun."""
    with open(folder.runner_log, "ab") as log:
        runner = subprocess.Popen(processes.python_module(module, str(folder.path), *words), stdin=subprocess.DEVNULL, stdout=log,
                                  stderr=log, start_new_session=True, env=processes.python_environment(), cwd="/")
    _children.append(runner)
    deadline = time.monotonic() + liveness.START_S
    while not is_begun():
        if runner.poll() is not None and not is_begun():
            raise EngineError(f"the process that runs the job {processes.ending_text(runner.returncode)} at once: {runner_last_line(folder)}")
        if time.monotonic() > deadline:
            runner.kill()
            runner.wait()
            raise EngineError(f"the process that runs the job has not begun within {liveness.START_S:.0f} s: {runner_last_line(folder)}")
        time.sleep(0.02)


_children: List["subprocess.Popen[bytes]"] = []  # runners started here, kept so that ended ones are reaped


def runner_last_line(folder: JobFolder) -> str:
    lines = folder.runner_log.read_text(errors="replace").split("\n") if folder.runner_log.exists() else []
    return next((line for line in reversed(lines) if line.strip()), f"it wrote nothing into {folder.runner_log}")


def refresh(folder: JobFolder, status: Status) -> Status:
    for child in _children:
        child.poll()
    return liveness.failed_if_lost(folder, status, liveness.SILENCE_S)


def stop(folder: JobFolder) -> None:
    """Asks the runner to stop the job; returns at once."""
    status = folder.status()
    is_alive = processes.is_alive(status.process)
    if is_alive is None:
        raise EngineError(f"job {folder.name} runs elsewhere ({status.machine}, pid {status.pid}): stop it there")
    if is_alive:
        os.kill(status.pid or 0, signal.SIGTERM)


# ---- the runner ----

@dataclasses.dataclass
class Host:
    """A host of a job, for the runner: an agent on this machine, or another machine (hosts.py), which has no process here."""

    name: str
    process: Optional["subprocess.Popen[bytes]"] = None
    status: str = "Starting"
    ending: Optional[Ending] = None
    is_lost: bool = False  # it counts as ended because it was lost
    keeps_until: float = 0.0  # time until which its last checkpoints are copied after its workers have ended
    rest: bytes = b""


class Runner:
    TICK_S = 60.0  # between two looks at what sends no reports

    def __init__(self, folder: JobFolder):
        self.folder = folder
        self.job = job_read(folder)
        self.status = folder.status()
        self.hosts: List[Host] = []
        self.failed: List[Host] = []  # hosts that failed or were stopped, in the order of the reports
        self.is_stopping = False
        self.end_at: Optional[float] = None  # when hosts that still run are asked to stop
        self.kill_at: Optional[float] = None  # when they are killed, unless their last checkpoints are being copied
        self.selector = selectors.DefaultSelector()

    def run(self) -> int:
        """Returns the exit code of the job."""
        self.reserve = self.folder.path / f".reserve-{os.getpid()}"
        try:
            self.reserve.write_bytes(b"\0" * RESERVE_BYTES)
            self._signals_take()
            self._status_change(pid=os.getpid(), process=processes.identity(os.getpid()), machine=platform.node())
            self._hosts_start()
            liveness.beat(self._beats())
            self._hosts_watch()
            ending = self._ending()
        except OSError as error:
            ending = Ending("Failed", agent.EXIT_AGENT, f"{agent.os_text(error)}{contract.space_text(self.folder.path, error)}")
        finally:
            self._hosts_end()
        return self._finish(ending)

    def _beats(self) -> List[pathlib.Path]:
        """Returns the files whose times are our signs of life."""
        return [self.folder.path / "status.json"]

    def _signals_take(self) -> None:
        self.wake_reading, wake_writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop_asked)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the job outlives the terminal
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(self.wake_reading, selectors.EVENT_READ)

    def _stop_asked(self, *_: Any) -> None:
        self.is_stopping = True

    def _status_change(self, **fields: Any) -> None:
        """Writes the status. A full disk does not end the job."""
        self.status = dataclasses.replace(self.status, **fields)
        self._try(self.folder.status_write, self.status)

    def _event(self, what: str, host: Optional[str] = None, **more: Any) -> None:
        self._try(self.folder.event, what, host, **more)

    def _try(self, write: Callable[..., None], *words: Any, **more: Any) -> None:
        try:
            write(*words, **more)
        except OSError as error:
            agent.say(f"shoal job: {agent.os_text(error)}{contract.space_text(self.folder.path, error)}")

    # -- hosts --

    def _hosts_start(self) -> None:
        port = int(self.job.where.options.get("port") or processes.free_port())
        for index in range(len(self.status.hosts)):
            self._host_start(index, ["127.0.0.1", port], self._host_environment(index))

    def _host_start(self, index: int, meet: List[Any], environment: Dict[str, str]) -> None:
        position = {"index": index, "hosts": self.status.hosts, "meet": meet, "cores": self._cores_of(index)}
        process = subprocess.Popen(processes.python_module("shoal.job.engines.local", str(self.folder.path), json.dumps(position)),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=environment,
                                   preexec_fn=processes.end_with_parent)
        assert process.stdout
        os.set_blocking(process.stdout.fileno(), False)
        self.hosts.append(Host(self.status.hosts[index], process))
        self.selector.register(process.stdout, selectors.EVENT_READ, self.hosts[-1])

    def _host_environment(self, index: int) -> Dict[str, str]:
        """Returns a host's variables. The hosts of a job divide the machine's GPUs."""
        environment = processes.python_environment()
        count, gpus = len(self.status.hosts), contract.gpu_count(environment)
        if count > 1 and gpus >= count:
            names = (environment.get(CUDA_VISIBLE_DEVICES) or ",".join(map(str, range(gpus)))).split(",")
            each = gpus // count
            environment[CUDA_VISIBLE_DEVICES] = ",".join(names[index * each:(index + 1) * each])
        return environment

    def _cores_of(self, index: int) -> List[int]:
        """Returns a host's cores. The hosts also divide the cores, because each binds its workers to its own. Returns none if
        there are too few."""
        cores, count = sorted(os.sched_getaffinity(0)), len(self.status.hosts)
        each = len(cores) // count
        return cores[index * each:(index + 1) * each] if count > 1 and each >= self.status.workers_per_host else []

    def _hosts_watch(self) -> None:
        tick_at = time.monotonic()
        while not self._is_over():
            for key, _ in self.selector.select(max(min([tick_at, *self._deadlines()]) - time.monotonic(), 0.02)):
                if key.data is None:
                    agent.pipe_drain(self.wake_reading)
                elif not self._hear(key.data):
                    self.selector.unregister(key.fileobj)
                    self._agent_ended(key.data)
            if time.monotonic() >= tick_at:
                self._tick()
                tick_at = time.monotonic() + self.TICK_S
            if self.is_stopping and self.kill_at is None:
                self._status_change(status="Stopping")
                self._hosts_stop(self.job.stop_grace)
            self._look_at_clock()

    def _running(self) -> List[Host]:
        return [host for host in self.hosts if host.process and host.ending is None]

    def _deadlines(self) -> List[float]:
        """Returns the times for which _look_at_clock() waits."""
        if self.kill_at is None:
            return [self.end_at] if self.end_at is not None else []
        return [max(self.kill_at, host.keeps_until) for host in self._running()]

    def _tick(self) -> None:
        """Called every TICK_S, and at the beginning."""

    def _is_over(self) -> bool:
        return all(host.ending is not None for host in self.hosts)

    def _hear(self, host: Host) -> bool:
        """Reads reports of an agent, each a line of JSON. Returns false at the end of its pipe."""
        assert host.process and host.process.stdout
        data = os.read(host.process.stdout.fileno(), 1 << 16)
        *lines, host.rest = (host.rest + data).split(b"\n")
        for line in lines:
            self._report_take(host, json.loads(line))
        return bool(data)

    def _report_take(self, host: Host, report: Dict[str, Any]) -> None:
        if "ending" in report:
            self._event("ended", host.name, **report["ending"])
            self._ended(host, Ending(**report["ending"]))
        if "attempt" in report:
            self._status_change(attempt=max(self.status.attempt, report["attempt"]))
            self._event("again", host.name, attempt=report["attempt"])
        if "keeping" in report:
            host.keeps_until = time.monotonic() + report["keeping"] + agent.KILL_AFTER_S
        if "note" in report:
            self._event("note", host.name, text=report["note"])
        if "status" in report:
            host.status = report["status"]
            self._event(host.status, host.name)
            self._phase_look()

    def _phase_look(self) -> None:
        """Updates the job's phase: that of the host furthest behind."""
        if self.failed or self.status.status in ("Stopping", *ENDED):
            return
        phase = PHASES[min(PHASES.index(host.status) if host.status in PHASES else len(PHASES) - 1 for host in self.hosts)]
        if phase == "Ready":
            self._hosts_go()
        elif phase != self.status.status:
            self._status_change(status=phase, **({"started": time.time()} if phase == "Training" else {}))

    def _hosts_go(self) -> None:
        """Lets all hosts start their workers. All are ready now, so no workers wait for a host that still brings its data."""
        for host in self._running():
            assert host.process and host.process.stdin
            try:
                host.process.stdin.write(b"go\n")
                host.process.stdin.flush()
            except BrokenPipeError:  # it has ended, as its other pipe will show
                pass

    def _agent_ended(self, host: Host) -> None:
        """Called when an agent's pipe has ended: the agent has ended or soon will."""
        assert host.process
        try:
            code = host.process.wait(timeout=agent.KILL_AFTER_S)
        except subprocess.TimeoutExpired:
            processes.group_signal(host.process.pid, signal.SIGKILL)
            code = host.process.wait()
        self.folder.progress_write(host.name, None)  # the agent may have been killed during a download
        if host.ending is None:
            self._ended(host, Ending("Failed", processes.exit_code(code),
                                     f"the agent of {host.name} (pid {host.process.pid}) {processes.ending_text(code)}"))

    def _ended(self, host: Host, ending: Ending) -> None:
        """Notes how a host has ended. If one of our own hosts ends after a failure, that is a consequence of the failure."""
        if host.process and not self.is_stopping:
            if ending.status == "Stopped" and self.end_at is not None:
                ending = Ending("Failed", ending.exit_code, "another host failed", True)
            elif ending.status == "Failed" and any(one.ending and not one.ending.is_secondary for one in self.failed):
                ending = dataclasses.replace(ending, is_secondary=True)
        host.ending = ending
        if ending.status != "Completed":
            self.failed.append(host)
            self.end_at = time.monotonic() + NOTICE_S if self.end_at is None else self.end_at

    def _look_at_clock(self) -> None:
        now = time.monotonic()
        if self.end_at is not None and now >= self.end_at and self.kill_at is None:
            self._hosts_stop(min(self.job.stop_grace, 10))
        for host in self._running():
            if host.process and self.kill_at is not None and now >= max(self.kill_at, host.keeps_until):
                processes.group_signal(host.process.pid, signal.SIGKILL)

    def _hosts_stop(self, grace: float) -> None:
        self.kill_at = time.monotonic() + grace + 2 * agent.KILL_AFTER_S
        for host in self._running():
            if host.process:
                host.process.terminate()

    def _hosts_end(self) -> None:
        """Ends all agents: none may outlive us, whatever happened."""
        for host in self.hosts:
            if host.process and host.process.poll() is None:
                host.process.terminate()
                self._agent_ended(host)

    # -- the end --

    def _ending(self) -> Ending:
        if self.is_stopping or any(host.ending and host.ending.status == "Stopped" for host in self.failed):
            return Ending("Stopped", 143, "stopped on request")
        if not self.failed:
            return Ending("Completed")
        first = min(self.failed, key=lambda host: (host.ending and host.ending.is_secondary, host.is_lost))
        assert first.ending
        name = f"{first.name}: " if len(self.status.hosts) > 1 and not first.is_lost else ""
        return Ending("Failed", first.ending.exit_code or 1, f"{name}{first.ending.reason}")

    def _below(self) -> str:
        return ""

    def _hosts_to_pack(self) -> List[str]:
        return self.status.hosts

    def _finish(self, ending: Ending) -> int:
        model = None
        try:
            if ending.status == "Completed":
                self._status_change(status="Uploading")
            model = result_keep(self.job, self.folder, self._hosts_to_pack(), with_model=ending.status != "Failed", below=self._below())
        except (ContractError, OSError) as error:
            text = agent.os_text(error) if isinstance(error, OSError) else str(error)
            if ending.status == "Completed":
                ending = Ending("Failed", agent.EXIT_AGENT, text)
            else:
                print(f"shoal job: {text}", file=sys.stderr)
        self.reserve.unlink(missing_ok=True)
        reason = contract.failure_text(ending.reason) if ending.reason and ending.status == "Failed" else None
        self._status_change(status=ending.status, ended=time.time(), exit_code=ending.exit_code, failure_reason=reason, model=model)
        self._event(ending.status, reason=reason)
        return ending.exit_code


# ---- the programs ----

def _agent_main(folder: JobFolder, position: Dict[str, Any]) -> int:
    """Runs an agent. Its reports go to stdout, which is the runner's pipe."""
    reports = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(**report: Any) -> None:
        try:
            reports.write(json.dumps(report) + "\n")
        except OSError:  # the runner is gone; SIGTERM will follow
            pass

    if position["cores"]:
        os.sched_setaffinity(0, position["cores"])
    job = job_read(folder)
    ending = Agent(folder, job, Position(position["index"], position["hosts"], tuple(position["meet"])), tell, lambda: bool(sys.stdin.readline())).run()
    tell(ending=dataclasses.asdict(ending))
    return ending.exit_code


def main(words: List[str]) -> int:
    path = pathlib.Path(words[0])
    folder = JobFolder(path.name, path.parent)
    return _agent_main(folder, json.loads(words[1])) if len(words) > 1 else Runner(folder).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
