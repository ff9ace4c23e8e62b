"""Runs one host's part of a job: brings the source and the data, starts the workers, keeps their output, and reports how
they ended.

    job.json --> B/code, B/input --> shoal run | torchrun | mpirun | python --> B/model, B/output
                                            |
                                     logs/HOST.log

An agent is its own process and works for one host only. local.py and hosts.py start agents and read their reports. An agent
uses only its main thread. SIGTERM and SIGINT ask it to stop: it sends the workers SIGTERM and gives them `stop_grace`
seconds."""
from __future__ import annotations

import ast
import codecs
import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import selectors
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import types
from typing import Any, BinaryIO, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

from shoal.job import processes
from shoal.job.document import Job, distribution, local_path
from shoal.job.document.folder import Amount, JobFolder
from shoal.job.engines import cluster, contract
from shoal.job.engines.contract import Container, ContractError
from shoal.job.engines.shared import is_left_out
from shoal.job.watching import metrics

EXIT_TIME_LIMIT = 124  # the exit code of `shoal run --timeout`
EXIT_AGENT = 125  # the agent could not do its work; `shoal run` uses the same code for its own failures
KILL_AFTER_S = 10.0  # seconds beyond its grace time after which a runner's whole process group is killed
LOOK_S = 0.1  # interval, within the grace time, of looking for processes that an ended runner left behind
DRAIN_S = 2.0  # seconds for which processes that the workers left running may hold our pipe
LINE_MAX = 1 << 16


def say(line: str) -> None:
    """Prints to stderr. That may be a file on a full disk, so errors are ignored: they must not end a training."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass


class AgentError(Exception):
    """The job cannot continue. The message is one line; exit_code is the agent's."""

    def __init__(self, reason: str, exit_code: int = EXIT_AGENT):
        super().__init__(reason)
        self.exit_code = exit_code


class StopAsked(BaseException):
    """A signal asked the agent to end before any worker ran."""


@dataclasses.dataclass
class Position:
    """This host's index among the hosts of the job, and the meeting point."""

    index: int
    hosts: List[str]
    meet: Tuple[str, int]

    @property
    def host(self) -> str:
        return self.hosts[self.index]


@dataclasses.dataclass
class Ending:
    status: str  # one of folder.ENDED
    exit_code: int = 0
    reason: Optional[str] = None
    is_secondary: bool = False  # another host caused the failure


Tell = Callable[..., None]  # reports this host's state, for example tell(status="Downloading")


# ---- the source ----

def source_bring(job: Job, code: pathlib.Path) -> None:
    """Makes B/code, whole or not at all. Replaces what was there."""
    unfinished = code.with_name("code.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        _source_copy(job, unfinished)
        shutil.rmtree(code, ignore_errors=True)
        os.replace(unfinished, code)
    except OSError as error:
        raise AgentError(f"cannot bring the source to {code}: {os_text(error)}{contract.space_text(code.parent, error)}") from error
    except shutil.Error as error:  # a list of (source, destination, text)
        raise _copy_error(error, code) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _copy_error(error: shutil.Error, code: pathlib.Path) -> AgentError:
    source, _, text = error.args[0][0]
    return AgentError(f"cannot bring the source to {code}: {source}: {text}")


def os_text(error: OSError) -> str:
    return f"{error.strerror or error}: {error.filename}" if error.filename else str(error.strerror or error)


def _source_copy(job: Job, folder: pathlib.Path) -> None:
    _source_copy_own(job, folder)
    for dependency in job.dependencies:
        _dependency_copy(pathlib.Path(dependency), folder)


def _left_out(folder: str, names: List[str]) -> List[str]:
    return [name for name in names if is_left_out(pathlib.Path(folder, name))]


def _dependency_copy(place: pathlib.Path, folder: pathlib.Path) -> None:
    """Copies a dependency next to the source, under its own name."""
    target = folder / place.name
    if target.exists():
        raise AgentError(f"dependencies: {place} would replace {place.name}, which the source or another dependency has: rename one")
    if place.is_dir():
        shutil.copytree(place, target, ignore=_left_out)
    elif place.is_file():
        shutil.copy(place, target)
    else:
        raise AgentError(f"dependencies: there is no {place}")


def _source_copy_own(job: Job, folder: pathlib.Path) -> None:
    if not job.source_dir:
        source = pathlib.Path(job.entry_point)
        if not source.is_file():
            raise AgentError(f"there is no {source}: entry_point names the script, or a file below source_dir")
        folder.mkdir(parents=True)
        shutil.copy(source, folder / source.name)
        return
    place = local_path(job.source_dir)
    if place is None:
        place = _source_download(job.source_dir, folder.with_name("source.tar.gz"))
    if place.is_dir():
        shutil.copytree(place, folder, ignore=_left_out)
    elif place.is_file() and tarfile.is_tarfile(place):
        _unpack(place, folder)
    else:
        raise AgentError(f"source_dir is {job.source_dir}, which is neither a folder nor a .tar.gz")


def _source_download(uri: str, path: pathlib.Path) -> pathlib.Path:
    from shoal.job.data import channels
    try:
        channels.file_bring(uri, path)
    except RuntimeError as error:
        raise AgentError(f"source_dir ({uri}): {error}") from error
    return path


def _unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpacks an archive. Refuses members outside the folder."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = os.path.realpath(folder / member.name)
            if os.path.commonpath([inside, os.path.realpath(folder)]) != os.path.realpath(folder) or not (member.isdir() or member.isreg()):
                raise AgentError(f"{archive} holds {member.name}, which is not a plain file or folder below it: pack the source again")
        tar.extractall(folder)


def entry_point_of(job: Job) -> str:
    """Returns a path below B/code, as the toolkit defines it."""
    return job.entry_point if job.source_dir else pathlib.Path(job.entry_point).name


def mpi4py_import(code: pathlib.Path) -> Optional[pathlib.Path]:
    """Returns the first source file that needs mpi4py. An import inside `try` does not count: the script can do without it."""
    for path in sorted(code.rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):  # Python reports it if it ever reads the file
            continue
        if _imports(tree, "mpi4py"):
            return path.relative_to(code)
    return None


def _imports(tree: ast.AST, package: str) -> bool:
    if isinstance(tree, ast.Try):
        return any(_imports(one, package) for one in [*tree.orelse, *tree.finalbody])
    names = [alias.name for alias in tree.names] if isinstance(tree, ast.Import) else []
    if isinstance(tree, ast.ImportFrom) and not tree.level:
        names = [tree.module or ""]
    return any(name.split(".")[0] == package for name in names) or any(
        _imports(one, package) for one in ast.iter_child_nodes(tree))


def requirements_of(job: Job, code: pathlib.Path) -> Optional[pathlib.Path]:
    """Returns the requirements file if it asks for anything."""
    path = code / (job.requirements or "requirements.txt")
    if job.requirements and not path.is_file():
        raise AgentError(f"there is no {job.requirements} in source_dir: requirements names a file there")
    if not path.is_file():
        return None
    lines = (line.strip() for line in _requirements_read(path).splitlines())
    return path if any(line and not line.startswith("#") for line in lines) else None


# Like pip, accepts two things besides UTF-8: a byte order mark, as PowerShell writes it, and a coding comment (PEP 263).
BYTE_ORDER_MARKS = ((codecs.BOM_UTF8, "utf-8-sig"), (codecs.BOM_UTF32, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))
CODING = re.compile(rb"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)", re.MULTILINE)


def _requirements_read(path: pathlib.Path) -> str:
    data = path.read_bytes()
    named = CODING.search(b"\n".join(data.splitlines()[:2]))
    coding = next((name for mark, name in BYTE_ORDER_MARKS if data.startswith(mark)), named[1].decode() if named else "utf-8")
    try:
        return data.decode(coding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise AgentError(f"{path.name}, line {line}, is not text in {coding} (byte 0x{data[error.start]:02x}): save the file as UTF-8") from error
    except LookupError as error:
        raise AgentError(f"{path.name} names a coding that Python does not know: {coding}") from error


def packages_of(job: Job, code: pathlib.Path) -> List[Tuple[str, List[str]]]:
    """Lists what pip installs before the script starts: each entry is a name for the log, and pip's arguments. A source with a
    setup.py is a package; it is installed as the platform's toolkit does."""
    requirements = requirements_of(job, code)
    found = [(requirements.name, ["--requirement", str(requirements)])] if requirements else []
    return found + ([("the package of setup.py", [*_isolation(code), str(code)])] if (code / "setup.py").is_file() else [])


def _isolation(code: pathlib.Path) -> List[str]:
    """Returns pip's options for a source with only a setup.py. If our setuptools can make wheels, it builds the package, and
    pip downloads nothing: many clusters have no package index."""
    has_own = importlib.util.find_spec("setuptools") and importlib.util.find_spec("setuptools.command.bdist_wheel")
    return ["--no-build-isolation"] if has_own and not (code / "pyproject.toml").is_file() else []


def packages_install(packages: List[Tuple[str, List[str]]], place: pathlib.Path, folder: pathlib.Path, run: Callable[..., Tuple[int, str]]) -> str:
    """Installs into an environment of the job's own, which also sees our packages. Each entry is a call of pip, as its options
    hold for all that it installs. Relative paths in requirements start at `place`. Returns the environment's interpreter."""
    shutil.rmtree(folder, ignore_errors=True)
    python = str(folder / "bin/python3")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--disable-pip-version-check", "--quiet"]
    names = " and ".join(name for name, _ in packages)
    steps = [(names, [sys.executable, "-m", "venv", "--without-pip", str(folder)]), *((name, [*pip, *words]) for name, words in packages)]
    for name, step in steps:
        code, output = run(step, place)
        if code:
            shutil.rmtree(folder, ignore_errors=True)
            lines = [line for line in output.splitlines() if line.strip()]
            errors = [line for line in lines if line.startswith("ERROR:")] or lines[-1:] or ["no output"]
            raise AgentError(f"cannot install {name}: {' '.join(step[1:4])} {processes.ending_text(code)}: {errors[0]}")
        if step is steps[0][1]:
            site = next((folder / "lib").glob("python3*/site-packages"))
            (site / "outer.pth").write_text("".join(f"{path}\n" for path in sys.path if path.endswith(("-packages", "site-packages"))))
    return python


# ---- data ----

def channels_bring(container: Container, position: Position, say: Callable[[str], None], report: Callable[..., None]) -> None:
    from shoal.job.data import channels
    for name, channel in container.job.channels.items():
        folder = container.channel(name)
        try:
            channels.channel_bring(channel, folder, position.index, len(position.hosts), say, report)
        except (OSError, ValueError, RuntimeError) as error:
            text = os_text(error) if isinstance(error, OSError) else str(error)
            full = contract.space_text(container.base, error) if isinstance(error, OSError) else ""
            raise AgentError(f"channel {name} ({channel.uri}): {text}{full}") from error


# ---- the output of the workers ----

class Cause:
    """Finds why the workers failed, and on which host. The cause comes from the events of `shoal run --events`; the last
    line of the rank's traceback is added. No line of the script can name another cause. Calls `kill_note` when a worker was
    killed."""

    ERROR = re.compile(r"^(?:(\d+)\| )?(?:\[rank(\d+)\]: *)?((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?:: .*)?)$")

    def __init__(self, own_host: int, kill_note: Callable[[], None] = lambda: None):
        self.own_host, self.kill_note = own_host, kill_note
        self.rest = b""
        self._begin()

    def _begin(self) -> None:
        self.first: Optional[Tuple[str, str]] = None  # rank, how it ended
        self.errors: Dict[str, str] = {}  # the last one of each rank
        self.lost: Optional[str] = None
        self.said: Optional[str] = None
        self.is_secondary = False  # another host knows more

    def hear(self, line: str) -> None:
        """Takes a line of the workers or of `shoal run`."""
        error = self.ERROR.match(line)
        if error:
            self.errors[error.group(1) or error.group(2) or ""] = error.group(3)

    def events_take(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.event_take(json.loads(line.decode("utf-8", "replace")))

    def event_take(self, event: Mapping[str, Any]) -> None:
        kind = event["event"]
        if kind == "started" and event["attempt"]:
            self._begin()
        elif kind == "killing" or (kind == "worker_ended" and is_end_of_killed(event)):
            self.kill_note()
        elif kind == "error":
            self.said = event["text"]
        elif kind == "cause":
            self._cause_take(event)

    def _cause_take(self, event: Mapping[str, Any]) -> None:
        kind, text, is_elsewhere = event["kind"], event["text"], event["at_host"] != self.own_host
        if kind == "worker":
            self.first = (str(event["rank"]), text)
            self.is_secondary = is_elsewhere
        elif kind == "lost" or (kind in ("timeout", "unstarted") and is_elsewhere):
            self.lost = text
        elif text:
            self.said = text
        if kind == "signal":  # this agent did not send it; the sender, or a lost host, knows more
            self.is_secondary = True

    def text(self, program: str, ending: str) -> str:
        if self.first:
            rank, how = self.first
            error = self.errors.get(rank)
            return f"rank {rank} {how}" + (f": {error}" if error else "")
        error = self.lost or next(iter(self.errors.values()), None) or (self.said if program == "shoal run" else None)
        return f"{program} {ending}" + (f": {error}" if error else "")


def is_end_of_killed(event: Mapping[str, Any]) -> bool:
    """Returns true if the event shows that a worker was killed. A shell ends with 128 + N when signal N killed its program. A
    script may also end like this by itself after it saved everything at SIGTERM or SIGINT, so these two do not count."""
    killed_by = event.get("code", 0) - 128
    return "signal" in event or (0 < killed_by < signal.NSIG and killed_by not in (signal.SIGTERM, signal.SIGINT))


class Lines:
    """Cuts the incoming bytes into lines. Each line goes to the log, which followers read, and to the functions in `hear`."""

    def __init__(self, log: BinaryIO, hear: Sequence[Callable[[str], None]], say: Callable[[str], None]):
        self.log: Optional[BinaryIO] = log
        self.hear, self.say = hear, say
        self.rest = b""

    def take(self, data: bytes) -> None:
        *lines, self.rest = (self.rest + data).split(b"\n")
        if len(self.rest) > LINE_MAX:
            lines, self.rest = [*lines, self.rest], b""
        if lines:
            self._pass(lines)

    def end(self) -> None:
        if self.rest:
            self._pass([self.rest])
        self.rest = b""

    def _pass(self, lines: List[bytes]) -> None:
        self._keep(b"".join(line + b"\n" for line in lines))
        for line in lines:
            text = line.decode("utf-8", "replace")
            for hear in self.hear:
                hear(text)

    def _keep(self, data: bytes) -> None:
        """Writes to the log. A failed write must not end a training."""
        try:
            if self.log:
                self.log.write(data)
        except OSError as error:
            self.log = None
            self.say(f"cannot write to the log: {os_text(error)}; the job continues without it")


# ---- the agent ----

class Agent:
    """Runs one host's part. `tell` reports its state. `others_wait` returns true when all hosts of the job are ready to train,
    and false if they never will be."""

    def __init__(self, folder: JobFolder, job: Job, position: Position, tell: Tell, others_wait: Callable[[], bool]):
        self.folder, self.job, self.position, self.tell, self.others_wait = folder, job, position, tell, others_wait
        self.base = folder.base(position.host)
        self.is_stopping = False
        self.is_preparing = True  # while true, a signal ends everything at once; afterwards the workers have their grace time
        self.checkpoints: Any = None
        self.python = sys.executable
        self.container = Container(self.base, job, position.host, position.hosts, {}, contract.gpu_count(),
                                   str(job.where.options.get("interface") or contract.interface_name()), position.meet)

    def run(self) -> Ending:
        """Does everything. Never raises for what can go wrong with a job."""
        self._signals_take()
        try:
            self._prepare()
            if self.is_stopping:  # StopAsked was raised in code that drops exceptions, such as a __del__
                raise StopAsked
            self.tell(status="Ready")
            if not self.others_wait():
                raise StopAsked
            ending = self._train_again_and_again()
        except StopAsked:
            self._cache_note()
            ending = Ending("Stopped", 143, "stopped before the workers were started")
        except (AgentError, ContractError) as error:
            self._cache_note()
            ending = Ending("Failed", getattr(error, "exit_code", EXIT_AGENT), str(error))
        except OSError as error:
            ending = Ending("Failed", EXIT_AGENT, f"{os_text(error)}{contract.space_text(self.folder.path, error)}")
        self.is_preparing = False  # when the others end, they stop this host also; that must not cut off its own report
        return self._finish(ending)

    def say(self, text: str) -> None:
        """Logs one line about this host."""
        say(f"shoal job: {self.position.host}: {text}")

    def _signals_take(self) -> None:
        self.wake_reading, wake_writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _signal(self, number: int, frame: Optional[types.FrameType]) -> None:
        is_first, self.is_stopping = not self.is_stopping, True
        if is_first and self.is_preparing:
            raise StopAsked

    # -- before --

    def _prepare(self) -> None:
        self.tell(status="Downloading")
        job, container = self.job, self.container
        self.launch = launch_here(job)
        for note in self.launch.notes:
            self.say(note)
            self.tell(note=note)
        self.base.mkdir(parents=True, exist_ok=True)
        contract.folders_make(container)
        source_bring(job, container.code)
        job.entry_point = entry_point_of(job)
        container.hyperparameters = contract.hyperparameters_read(distribution.hyperparameters_of(job, str(self.base)))
        self.command = contract.command_of(container.code, job.entry_point, contract.arguments_of(container.hyperparameters))
        self._mpi4py_refuse()
        packages = packages_of(job, container.code)
        if packages:
            self.say(f"installing {' and '.join(name for name, _ in packages)}")
            place = (container.code / (job.requirements or "")).parent if job.requirements else container.code
            self.python = packages_install(packages, place, self.base / "environment", self._call)
            self.command = [self.python if word == sys.executable else word for word in self.command]
        channels_bring(container, self.position, self.say, self._report)
        self._checkpoints_bring()
        contract.config_write(container)

    def _report(self, amount: Optional[Amount]) -> None:
        """Reports how much of the current download has arrived."""
        self.folder.progress_write(self.position.host, amount)

    def _mpi4py_refuse(self) -> None:
        """Refuses sources that need mpi4py. No mpirun starts the workers, so each would be alone in its MPI and silently train
        by itself."""
        workers = self.launch.workers_per_host * len(self.position.hosts)
        path = mpi4py_import(self.container.code) if self.launch.runner == "mpi" and workers > 1 else None
        if path:
            raise AgentError(f"distribution.mpi: {path} imports mpi4py, but `shoal run` starts the workers, and not mpirun, so each of the "
                             f"{workers} workers would be alone in its MPI_COMM_WORLD: use Shoal or torch.distributed in the script, or start it by "
                             "mpirun itself (`mpirun -n N python3 ...`), under which Shoal's ranks also find each other")

    def _cache_note(self) -> None:
        """Logs how to reuse the cache: it is in this job's folder, where a job of another name does not look."""
        cache = self.folder.path / "cache"
        if (cache / "objects").is_dir():
            self.tell(note=f"the data that have arrived stay in {cache}: another job with SHOAL_CACHE={cache} continues with them")

    def _call(self, command: List[str], cwd: pathlib.Path) -> Tuple[int, str]:
        """Runs a helper program until it ends, or until the agent must."""
        process = subprocess.Popen(command, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   start_new_session=True, preexec_fn=processes.end_with_parent)
        try:
            output, _ = process.communicate()
            return process.returncode, output.decode("utf-8", "replace")
        except BaseException:
            processes.group_signal(process.pid, signal.SIGKILL)
            process.wait()
            raise

    def _checkpoints_bring(self) -> None:
        """Brings the checkpoints. If the document has no URI for them, they stay in the job's folder, which outlives an
        attempt."""
        place = self.job.checkpoints
        if place is None:
            self.folder.checkpoints.mkdir(exist_ok=True)
            if not self.container.checkpoints.exists():
                self.container.checkpoints.symlink_to(self.folder.checkpoints)
            return
        from shoal.job.data import checkpoints
        self.checkpoints = checkpoints.Synchronizer(self.base / place.local_path, place.uri, self.say, self.position.host, job=self.job.name or "")
        try:
            self.checkpoints.start(self._report)
        except RuntimeError as error:
            raise AgentError(f"checkpoints ({place.uri}): {error}") from error

    def _checkpoints_finish(self, is_completed: bool) -> None:
        """Copies the last checkpoints. If that fails, the job's status stays as it is, and the failure is logged and
        reported."""
        if not self.checkpoints:
            return
        from shoal.job.data import checkpoints
        deadline_s = checkpoints.timeout_of(self.job)
        self.tell(keeping=deadline_s)
        try:
            self.checkpoints.finish(deadline_s, is_completed)
        except RuntimeError as error:
            self.say(str(error))
            self.tell(note=str(error))

    # -- the workers --

    def environment(self) -> Dict[str, str]:
        variables = {**processes.python_environment(), **self.job.environment, **contract.environment_of(self.container),
                     "PYTHONUNBUFFERED": "1", **self.launch.environment}
        if len(self.position.hosts) > 1 and self.job.where.engine == "local":
            variables.setdefault("SHOAL_HOST_ID", self.position.host)
        for name, value in metrics.trace_environment(self.folder, self.position.host).items():
            variables.setdefault(name, value)
        library = pathlib.Path(processes.shoal_command()).parent / "libshoal.so"
        if library.is_file():  # the library of a build folder, from the same build as the command
            variables.setdefault("SHOAL_LIBRARY", str(library))
        return variables

    def _train_again_and_again(self) -> Ending:
        """Trains, and starts the workers again if the runner cannot do that itself."""
        restarts = self.job.restarts if self.launch.runner in ALONE else 0
        ending = self._train()
        for attempt in range(1, restarts + 1):
            if ending.status != "Failed" or ending.exit_code == EXIT_TIME_LIMIT:
                break
            self.say(f"starting again, {attempt} of {restarts} times: {ending.reason}")
            self.tell(attempt=attempt)
            ending = self._train()
        return ending

    def _train(self) -> Ending:
        events_reading, self.events = os.pipe()
        command = RUNNERS[self.launch.runner](self)
        (self.container.output / "failure").unlink(missing_ok=True)  # an earlier attempt or run may have left one
        self.is_preparing = False
        self.tell(status="Training")
        kill_note = self.checkpoints.kill_note if self.checkpoints else lambda: None
        cause = Cause(self.position.index, kill_note)
        with open(events_reading, "rb", buffering=0) as events, open(self.folder.log(self.position.host), "ab", buffering=0) as log, \
                metrics.Watching(self.job.metric_definitions, self.folder, self.position.host, self.say) as watching:
            lines = Lines(log, [cause.hear, watching.line], self.say)
            try:
                passed = () if self.launch.runner in ALONE else (self.events,)
                training = Training(command, self.container.code, self.environment(), lines, self.job, passed, kill_note)
            finally:
                os.close(self.events)
            watching.look_at(training.process.pid)
            code = training.run(lambda: self.is_stopping, self.wake_reading, events, cause.events_take)
        return self._ending_of(code, training, cause, command)

    def _ending_of(self, code: int, training: "Training", cause: Cause, command: List[str]) -> Ending:
        if training.is_over_time:
            return Ending("Failed", EXIT_TIME_LIMIT, f"time limit: the script ran longer than max_run, {self.job.max_run} s")
        if code == 0 and not self.is_stopping:
            return Ending("Completed")
        if self.is_stopping:
            return Ending("Stopped", processes.exit_code(code), "stopped on request")
        program = self.job.entry_point if self.launch.runner in ALONE else "shoal run"
        own = contract.failure_read(self.container)
        return Ending("Failed", processes.exit_code(code), own or cause.text(program, processes.ending_text(code)), cause.is_secondary)

    # -- after --

    def _finish(self, ending: Ending) -> Ending:
        self._checkpoints_finish(ending.status == "Completed")
        try:
            if ending.status == "Failed" and self.container.output.is_dir():
                contract.failure_write(self.container, ending.reason or "")
            elif ending.status == "Completed":
                contract.success_write(self.container)
        except OSError as error:
            self.say(f"cannot write how it ended below {self.container.output}: {os_text(error)}")
        return ending


class Training:
    """The runner's process and what waits for it: its output, the time limit, and the steps from SIGTERM to SIGKILL."""

    def __init__(self, command: List[str], cwd: pathlib.Path, environment: Mapping[str, str], lines: Lines, job: Job,
                 pass_fds: Tuple[int, ...], kill_note: Callable[[], None]):
        self.lines, self.job, self.kill_note = lines, job, kill_note
        self.is_over_time = False
        self.has_ended = False  # it is reaped only after its group is killed: until then its number is reserved
        self.kill_at: Optional[float] = None
        self.drain_until: Optional[float] = None
        try:
            self.process = subprocess.Popen(command, cwd=cwd, env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                            stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=processes.end_with_parent,
                                            pass_fds=pass_fds)
        except OSError as error:
            raise AgentError(f"cannot start {command[0]}: {error.strerror}") from error
        self.end_at = time.monotonic() + job.max_run

    def run(self, is_asked_to_stop: Callable[[], bool], wake: int, events: BinaryIO, events_take: Callable[[bytes], None]) -> int:
        """Waits until the runner has ended and its pipe is empty. Returns Popen.returncode. Calls events_take with the bytes
        read from `events`."""
        assert self.process.stdout
        os.set_blocking(events.fileno(), False)
        selector = selectors.DefaultSelector()
        selector.register(self.process.stdout, selectors.EVENT_READ)
        selector.register(events, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        try:
            while not self._is_done():
                ready = [key for key, _ in selector.select(self._seconds_to_wait())]
                for key in sorted(ready, key=lambda key: key.fileobj is events):  # events are newer than waiting lines
                    if key.fd == wake:
                        pipe_drain(wake)
                    elif key.fileobj is events:
                        data = events.read(LINE_MAX)
                        events_take(data or b"")
                        if data == b"":
                            selector.unregister(events)
                    elif not self._read():
                        selector.unregister(self.process.stdout)
                        self.drain_until = time.monotonic()
                self._look_at_clock(is_asked_to_stop())
        finally:
            selector.close()
            self._clean()
        while data := events.read(LINE_MAX):
            events_take(data)
        return self.process.returncode

    def _is_done(self) -> bool:
        if not self.has_ended:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return False
            self.has_ended = True
            if ended.si_code != os.CLD_EXITED:
                self.kill_note()
        if self._has_grace():
            return False
        if self.drain_until is None:
            self.drain_until = time.monotonic() + DRAIN_S
        return time.monotonic() >= self.drain_until

    def _has_grace(self) -> bool:
        """Returns true if the runner is being stopped and processes that it started may still save a checkpoint. A shell, for
        example, ends at SIGTERM at once."""
        return self.kill_at is not None and time.monotonic() < self.kill_at and processes.group_is_alive(self.process.pid)

    def _read(self) -> bool:
        assert self.process.stdout
        data = os.read(self.process.stdout.fileno(), LINE_MAX)
        self.lines.take(data)
        return bool(data)

    def _seconds_to_wait(self) -> float:
        if not self.has_ended:
            until = self.kill_at or self.end_at
        else:
            until = self.drain_until or time.monotonic() + LOOK_S
        return min(max(until - time.monotonic(), 0.02), 60.0)

    def _look_at_clock(self, is_asked_to_stop: bool) -> None:
        now = time.monotonic()
        if self.kill_at is None and now >= self.end_at:
            self.is_over_time = True
        if self.kill_at is None and (self.is_over_time or is_asked_to_stop):
            processes.group_signal(self.process.pid, signal.SIGTERM)
            self.kill_at = now + self.job.stop_grace + KILL_AFTER_S
        if self.kill_at is not None and now >= self.kill_at:
            self._kill()

    def _kill(self) -> None:
        """Kills everything left in the runner's process group. A program behind a shell that has ended may be writing."""
        is_alive = processes.group_is_alive(self.process.pid)
        processes.group_signal(self.process.pid, signal.SIGKILL)
        if is_alive:
            self.kill_note()

    def _clean(self) -> None:
        """Kills and reaps everything left in the runner's process group."""
        self._kill()
        self.process.wait()
        self.lines.end()
        if self.process.stdout:
            self.process.stdout.close()


def pipe_drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 4096):
            pass
    except BlockingIOError:
        pass


# ---- the launch that the document defines ----

def launch_here(job: Job) -> distribution.Launch:
    """Derives from `distribution` what starts the workers on this host. Raises AgentError."""
    try:
        return distribution.launch_of(job, contract.gpu_count())
    except ValueError as error:
        raise AgentError(str(error)) from error


# ---- what starts the workers ----

# Variables that other launchers set for a worker, in addition to those of `shoal run`. $NAME is a variable of `shoal run`.
OF_TORCHRUN = {"ROLE_RANK": "$RANK", "ROLE_WORLD_SIZE": "$WORLD_SIZE", "ROLE_NAME": "default",
               "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
OF_OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "$RANK", "OMPI_COMM_WORLD_SIZE": "$WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK": "$LOCAL_RANK",
               "OMPI_COMM_WORLD_LOCAL_SIZE": "$LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_NODE_RANK": "$LOCAL_RANK"}


def _with_variables(variables: Mapping[str, str], command: List[str]) -> List[str]:
    """Wraps the command in a shell that sets the variables and then replaces itself by the command."""
    return ["/bin/sh", "-c", "".join(f'export {name}="{value}"; ' for name, value in variables.items()) + 'exec "$@"', "sh", *command]


def _by_shoal(agent: "Agent", variables: Mapping[str, str] = {}, first_words: Sequence[str] = ()) -> List[str]:
    position, job, launch = agent.position, agent.job, agent.launch
    command = [*first_words, *agent.command]
    words = [processes.shoal_command(), "run", "-n", str(launch.workers_per_host), "--ends", "--events", str(agent.events),
             "--grace", str(job.stop_grace), *launch.options]
    if job.restarts:
        words += ["--restarts", str(job.restarts)]
    if len(position.hosts) == 1:
        words += ["--hosts", "1"]
    else:
        address = f"[{position.meet[0]}]" if ":" in position.meet[0] else position.meet[0]
        words += ["--hosts", str(len(position.hosts)), "--host-index", str(position.index), "--meet", f"{address}:{position.meet[1]}"]
    return [*words, "--", *(_with_variables(variables, command) if variables else command)]


RUNNERS: Dict[str, Callable[["Agent"], List[str]]] = {
    "shoal": _by_shoal, "plain": lambda agent: agent.command, "mpi": lambda agent: _by_shoal(agent, OF_OPEN_MPI),
    "torchrun": lambda agent: _by_shoal(agent, {**OF_TORCHRUN, "GROUP_WORLD_SIZE": str(len(agent.position.hosts))}),
    # One process on each host. It sends its ports to the others before it starts the script with TF_CONFIG.
    "tensorflow": lambda agent: _by_shoal(agent, first_words=[agent.python, "-c", cluster.BEGIN, agent.launch.tf_config or ""])}
ALONE = ("plain",)  # runners that start one process, without `shoal run`
