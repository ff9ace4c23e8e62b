"""The numbers of a job: those that its metric definitions find in the log, and those that Shoal and the kernel have of each
rank while it trains. The job does nothing for this: `shoal top` reads the memory in which the ranks record their operations
anyway; /proc has the rest. psutil would read the same files, but would have to be installed in the Python of the script on
each host (decision 76).

    agent of a host --> LogMetrics.line(...)  --.
                    --> Sampler, a thread     --+--> Record --> metrics.jsonl, tensorboard/HOST

    watch.py, report.py <-- Reader <-- metrics.jsonl

`python3 -m shoal.job.watching.metrics FOLDER HOST PID` runs the sampler as a process of its own, for the ranks that PID has started."""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import shoal
from shoal import _input
from shoal.job.document import Metric
from shoal.job.document.folder import JobFolder
from shoal.job.processes import shoal_command

LINE_MAX = 8192  # characters of a line that are searched: some expressions are slow on long lines
INTERVAL_S = 1.0
CLOSE_S = 600.0  # every sample is kept for this long; afterwards means over LATER_S
LATER_S = 10.0
DUMP_S = 300.0  # between two copies of the flight recorders; the first copies come sooner, at intervals that double
POINTS_MAX = 2000  # most points of a series; if there are more, neighbors are merged
READ_BYTES = 1 << 20  # size of a read of metrics.jsonl
WAITING_S = 1.0  # a rank that has waited for less counts as working
STALL_S = 10.0  # waits of this length are a stall, which an operator wants to see
STALL_FRESH_S = 30.0  # the last sample of a wait is valid for this long
IDLE_CORES = 0.5  # a process that uses less computes nothing that could hide its communication

Say = Callable[[str], None]

# What Sampler writes: name -> (meaning, unit). The metrics "host/..." have no rank.
SHOAL_METRICS: Dict[str, Tuple[str, str]] = {
    "shoal/steps_per_s": ("Steps per second, if the rank's operations repeat", "1/s"),
    "shoal/operations_per_s": ("Operations that ended", "1/s"),
    "shoal/bytes_per_s": ("Bytes of their larger operands", "B/s"),
    "shoal/network_bytes_per_s": ("Bytes that the rank handed to the network", "B/s"),
    "shoal/exposed": ("Communication that nothing hides: share of the time in which threads of the rank were blocked in Shoal", ""),
    "shoal/input": ("Share of the time in which the rank waited for a batch, if a loader is seen", ""),
    "shoal/idle": ("Share of the time in which the process was on no core and not in Shoal, at least", ""),
    "shoal/waiting_s": ("How long the rank has waited for other ranks in the operation that is under way", "s"),
    "shoal/came_last": ("Share of the operations to which the rank came last", ""),
    "shoal/late_s": ("How long after the first rank it then came, on average", "s"),
    "shoal/batch": ("Samples of a step over all ranks, if the program measures the noise scale", ""),
    "shoal/noise_scale": ("Noise scale of the gradients, in samples: far below it, a larger batch saves steps", ""),
    "shoal/noise_error": ("Its standard error", ""),
    "shoal/cpu": ("Processor time of the process, in cores", ""),
    "shoal/memory_bytes": ("Resident memory of the process", "B"),
    "host/cpu": ("Processors of the host that are busy", ""),
    "host/memory_available_bytes": ("Memory of the host that is free or can be freed", "B"),
    "host/received_bytes_per_s": ("Bytes that the host's network interfaces received", "B/s"),
    "host/sent_bytes_per_s": ("Bytes that they sent", "B/s"),
}


@dataclasses.dataclass
class Value:
    """A number. The file has null for one that is not finite."""

    name: str
    value: float
    rank: Optional[int] = None
    step: Optional[int] = None
    waits_for: Sequence[int] = ()  # with shoal/waiting_s: the ranks of the world that are known

    def line(self, now: float, host: str) -> str:
        data = {"time": now, "host": host, "rank": self.rank, "name": self.name,
                "value": self.value if math.isfinite(self.value) else None, "step": self.step}
        return json.dumps({**data, "waits_for": self.waits_for} if self.waits_for else data) + "\n"


def stderr_say(text: str) -> None:
    print(f"shoal job: {text}", file=sys.stderr, flush=True)


# ---- writing ----

class Record:
    """Writes the numbers of a host. Any thread may use it. If the disk is full, it reports this once and then drops the
    numbers; the job continues."""

    def __init__(self, folder: JobFolder, host: str, say: Say = stderr_say):
        self.folder, self.host, self.say = folder, host, say
        self.lock = threading.Lock()
        self.file: Any = None
        self.is_broken = False
        self.board = Board(folder, host, say)

    def add(self, values: Sequence[Value], now: Optional[float] = None) -> None:
        now = round(time.time() if now is None else now, 3)
        lines = "".join(value.line(now, self.host) for value in values)
        with self.lock:
            if not values or self.is_broken:
                return
            try:
                if self.file is None:
                    self.file = open(self.folder.metrics, "ab", buffering=0)
                self.file.write(lines.encode())  # one write, so that lines of several hosts do not mix
                self.board.add(values, now)
            except OSError as error:
                self.is_broken = True
                self.say(f"cannot keep metrics of {self.host}: {error.strerror}: {self.folder.metrics}; the job continues without it")

    def close(self) -> None:
        with self.lock:
            if self.file is not None:
                self.file.close()
                self.file = None
            self.board.close()


class Board:
    """Writes for TensorBoard if tensorboardX, or PyTorch with tensorboard, is installed. SHOAL_JOB_TENSORBOARD=no turns this
    off."""

    def __init__(self, folder: JobFolder, host: str, say: Say):
        self.path, self.say = folder.tensorboard / host, say
        self.writer: Any = None
        self.is_tried = os.environ.get("SHOAL_JOB_TENSORBOARD", "") == "no"
        self.steps: Dict[str, int] = collections.defaultdict(int)

    def add(self, values: Sequence[Value], now: float) -> None:
        if not self.is_tried:
            self.is_tried = True
            self.writer = self._open()
        for value in values if self.writer else ():
            tag = value.name if value.rank is None else f"{value.name}/rank {value.rank}"
            step = self.steps[tag] if value.step is None else value.step
            self.steps[tag] = step + 1
            self.writer.add_scalar(tag, value.value, step, now)

    def _open(self) -> Any:
        try:
            try:
                from tensorboardX import SummaryWriter  # type: ignore
            except ImportError:
                import importlib.util
                if not importlib.util.find_spec("tensorboard") or not importlib.util.find_spec("torch"):
                    return None
                from torch.utils.tensorboard import SummaryWriter  # type: ignore
            return SummaryWriter(str(self.path), flush_secs=5)
        except Exception as error:  # training continues, whatever is wrong with that package
            self.say(f"nothing is written for TensorBoard: {type(error).__name__}: {error}")
            return None

    def close(self) -> None:
        if self.writer:
            self.writer.close()
            self.writer = None


# ---- metrics of the log ----

# The prefixes of launchers on a worker's line: `shoal run`, mpirun with tags, the toolkit's mpirun, torchrun.
PREFIX = re.compile(r"^(?:(\d+)\| |\[\d+,(?:mpirank:)?(\d+)(?:,[^\]]*)?\]<std(?:out|err)>: ?|\[(?:default|rank)(\d+)\]: ?)")


# Continuations of a number that make it another number: an exponent, or more digits.
NUMBER_GOES_ON = re.compile(r"\.?\d+(?:[eE][-+]?\d+)?|[eE][-+]?\d+")
ANY_NUMBER = r"([-+.\w]+)"


def rank_of(text: str) -> Optional[int]:
    """Returns the rank in a launcher's prefix of the line."""
    found = PREFIX.match(text)
    return int(found.group(1) or found.group(2) or found.group(3)) if found else None


class LogMetrics:
    """Finds the numbers that metric definitions name. A regular expression matches anywhere in a line, any number of times.
    Its first group is the number, or the whole match if it has no group. Raises ValueError for an expression that does not
    compile."""

    def __init__(self, definitions: Iterable[Metric], folder: JobFolder, say: Say = stderr_say):
        self.folder, self.say = folder, say
        self.definitions = [(metric.name, _compiled(metric)) for metric in definitions]
        self.records: Dict[str, Record] = {}
        self.steps: Dict[Tuple[str, Optional[int], str], int] = collections.defaultdict(int)
        self.told: set = set()

    def line(self, host: str, rank: Optional[int], text: str) -> None:
        """Takes a line of stdout or stderr. If rank is None, a launcher's prefix may name the rank."""
        if not self.definitions:
            return
        text = text[:LINE_MAX]
        rank = rank_of(text) if rank is None else rank
        values = [value for name, regex in self.definitions for value in self._values(host, rank, name, regex, text)]
        if values:
            if host not in self.records:
                self.records[host] = Record(self.folder, host, self.say)
            self.records[host].add(values)

    def _values(self, host: str, rank: Optional[int], name: str, regex: "re.Pattern[str]", text: str) -> Iterable[Value]:
        for match in regex.finditer(text):
            number = match.group(1 if regex.groups else 0)
            try:
                value = float(number)
            except (TypeError, ValueError):
                self._tell(name, f"{number!r} is not a number: ignored, like further ones")
                continue
            rest = NUMBER_GOES_ON.match(text, match.end(1 if regex.groups else 0))
            if rest:
                self._tell(name, f"the expression ends within the number {number}{rest.group()}, which is read as {number}; {ANY_NUMBER} "
                                 "matches every number")
            key = (host, rank, name)
            yield Value(name, value, rank, self.steps[key])
            self.steps[key] += 1

    def _tell(self, name: str, what: str) -> None:
        if name not in self.told:
            self.told.add(name)
            self.say(f"metric {name}: {what}")

    def close(self) -> None:
        for record in self.records.values():
            record.close()


def _compiled(metric: Metric) -> "re.Pattern[str]":
    try:
        return re.compile(metric.regex)
    except re.error as error:
        raise ValueError(f"metric {metric.name}: the regular expression {metric.regex!r} does not compile: {error}") from error


# ---- sampling ----

def trace_environment(folder: JobFolder, host: str) -> Dict[str, str]:
    """Returns variables that make workers write their flight recorders to the job's folder when they end or fail, and count
    there how long they wait for data. Makes the folder."""
    folder.traces.mkdir(exist_ok=True)
    path = str(folder.traces / f"{host}.%r")
    return {"SHOAL_TRACE_FILE": path, _input.VARIABLE: str(_input_file(folder, host, "%p"))}


def _input_file(folder: JobFolder, host: str, pid: Any) -> pathlib.Path:
    """Returns the file in which a worker counts how long it waits for data. Its name begins with a dot, because it is not a
    trace."""
    return folder.traces / f".{host}.{pid}.input"


def step_length(calls: Sequence[Any]) -> Optional[int]:
    """Returns the number of calls after which their sequence repeats: the smallest length with three repetitions at the end."""
    count = len(calls)
    for length in range(1, count // 3 + 1):
        tail = calls[count - 3 * length:]
        if len(tail) >= 6 and tail[:length] == tail[length:2 * length] == tail[2 * length:]:
            return length
    return None


# Kinds of records by which steps are not found: messages, and actions of pipelines, which are on tracks.
NOT_OF_STEPS = ("send", "receive", "drain", "barrier", "split", "forward", "backward", "input gradient", "weight gradient", "recompute", "hand over")


def calls_of(lines: Iterable[str]) -> Dict[Tuple[int, str], List[Tuple[Any, ...]]]:
    """Returns the calls of each (process, communicator) in a flight recorder's lines, without messages and actions of pipelines."""
    calls: Dict[Tuple[int, str], List[Tuple[Any, ...]]] = collections.defaultdict(list)
    for line in lines:
        try:
            record = json.loads(line)
            if record["kind"] not in NOT_OF_STEPS:
                calls[record["pid"], record["comm_id"]].append(tuple(record[key] for key in ("kind", "count", "type", "op", "root")))
        except (ValueError, KeyError, TypeError):  # a partial line
            continue
    return calls


@dataclasses.dataclass
class Counters:
    """Sums of a rank's process since its start."""

    operations: float = 0
    bytes: float = 0
    sent_bytes: float = 0
    waited_s: float = 0
    came_last: float = 0
    late_s: float = 0
    cpu_s: float = 0
    at: float = 0
    waits_s: float = 0  # the longest wait under way; not a sum
    input_s: float = math.nan  # in loaders; NaN if none is seen


def counters_of(process: Mapping[str, Any], cpu_s: float, at: float, input_s: float = math.nan) -> Counters:
    """A track counts with its waits only: its operations are actions of a pipeline."""
    every = process["communicators"]
    comms = [comm for comm in every if not comm.get("is_track")]
    return Counters(sum(comm["operations"] for comm in comms), sum(comm["bytes"] for comm in comms),
                    sum(comm["sent_bytes"] for comm in comms), max((comm["waited_us"] for comm in comms), default=0) / 1e6,
                    sum(comm["came_last"] for comm in comms), sum(comm["late_us"] for comm in comms) / 1e6, cpu_s, at,
                    max((comm["waits_us"] or 0 for comm in every), default=0) / 1e6, input_s)


def rates(now: Counters, before: Counters) -> Dict[str, float]:
    """Computes metrics of the time between two looks. A sum that fell, as after a communicator was freed, counts as 0."""
    span = now.at - before.at
    delta = {field.name: max(getattr(now, field.name) - getattr(before, field.name), 0.0) for field in dataclasses.fields(Counters)}
    found = {"shoal/operations_per_s": delta["operations"] / span, "shoal/bytes_per_s": delta["bytes"] / span,
             "shoal/network_bytes_per_s": delta["sent_bytes"] / span, "shoal/exposed": _exposed(now, delta, span),
             "shoal/cpu": delta["cpu_s"] / span}
    if math.isfinite(now.input_s):
        before_s = before.input_s if math.isfinite(before.input_s) else 0.0
        found["shoal/input"] = min(max(now.input_s - before_s, 0.0) / span, 1.0)
    busy = found["shoal/exposed"] + found["shoal/cpu"] + found.get("shoal/input", 0.0)
    found["shoal/idle"] = max(1.0 - busy, 0.0)
    if delta["operations"]:
        found["shoal/came_last"] = min(delta["came_last"] / delta["operations"], 1.0)
    if delta["came_last"]:
        found["shoal/late_s"] = delta["late_s"] / delta["came_last"]
    return found


def _exposed(now: Counters, delta: Mapping[str, float], span: float) -> float:
    """Returns the share of the time in which nothing hid the communication. Waits are summed when they end, so a wait that is
    under way is added here if the process computes nothing meanwhile."""
    waited = min(delta["waited_s"] / span, 1.0)
    is_idle = now.waits_s >= WAITING_S and delta["cpu_s"] / span < IDLE_CORES
    return max(waited, min(now.waits_s / span, 1.0)) if is_idle else waited


def waits_of(process: Mapping[str, Any]) -> Tuple[float, List[int]]:
    """Returns the longest wait of a process that is under way, in seconds, and the ranks of the world for which it waits.
    `shoal top` numbers ranks within a communicator; in a communicator as large as the largest one these are the world's
    ranks."""
    comms = process["communicators"]
    longest = max(comms, key=lambda comm: comm["waits_us"] or 0, default=None)
    if longest is None or not longest["waits_us"]:
        return 0.0, []
    is_world = longest["size"] == max(comm["size"] for comm in comms)
    return longest["waits_us"] / 1e6, list(longest["waits_for"]) if is_world else []


def noise_of(process: Mapping[str, Any]) -> Dict[str, float]:
    """Returns the metrics of a communicator in which the process is rank 0 and that publishes a noise scale: all its ranks publish
    the same."""
    for comm in process["communicators"]:
        if comm["rank"] == 0 and comm.get("noise_scale"):
            return {"shoal/batch": comm["batch"] or math.nan, "shoal/noise_scale": comm["noise_scale"], "shoal/noise_error": comm["noise_error"]}
    return {}


def noise_text(batch: float, scale: float, error: float) -> str:
    """Says what the batch is in units of the noise scale, and what twice the batch would cost, as shoal_noise_text does:
    docs/batch-size.md has the formula."""
    gain = 2 * (scale + batch) / (scale + 2 * batch)  # steps of this batch that one step of twice the batch is worth
    return (f"your global batch is {_samples_text(batch / scale)} times the noise scale ({_samples_text(scale)} samples, error "
            f"{_samples_text(error)}): doubling it should cost {100 * (2 / gain - 1):.0f} % more samples and save {100 * (1 - 1 / gain):.0f} % "
            "of the steps")


def _samples_text(number: float) -> str:
    return f"{number:.0f}" if 10 <= number < 1e6 else f"{number:.2g}" if number < 10 else f"{number:.3g}"


STALE_S = 1.0  # a sample older than this was delayed
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def _stat_of(pid: int) -> Optional[List[str]]:
    """Returns the fields of /proc/PID/stat, starting with the state."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def cpu_seconds(pid: int) -> float:
    fields = _stat_of(pid)
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S if fields else 0.0


def is_started_by(pid: int, ancestor: int) -> bool:
    for _ in range(64):
        if pid == ancestor:
            return True
        fields = _stat_of(pid)
        pid = int(fields[1]) if fields else 0
        if pid <= 1:
            return False
    return False


class HostLook:
    """What the kernel counts for the whole host. Rates are those since the previous look."""

    def __init__(self) -> None:
        self.before: Optional[Tuple[float, float, int, int]] = None

    def values(self, at: float) -> List[Value]:
        received, sent = network_bytes(pathlib.Path("/proc/net/dev").read_text())
        now = (at, _busy_seconds(), received, sent)
        before, self.before = self.before, now
        found = [Value("host/memory_available_bytes", _memory_available())]
        if before and at > before[0]:
            span = at - before[0]
            found += [Value("host/cpu", max(now[1] - before[1], 0) / span), Value("host/received_bytes_per_s", max(received - before[2], 0) / span),
                      Value("host/sent_bytes_per_s", max(sent - before[3], 0) / span)]
        return found


def network_bytes(text: str) -> Tuple[int, int]:
    """Returns the bytes received and sent by all interfaces of /proc/net/dev except the loopback interface."""
    received = sent = 0
    for line in text.splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() != "lo" and len(fields) >= 9:
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


def _busy_seconds() -> float:
    with open("/proc/stat") as file:
        user, nice, system, _, _, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def _memory_available() -> float:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024.0
    return math.nan


class Sampler:
    """Samples the ranks that process `pid` has started, on a thread, until they have ended or stop() is called. `shoal` is the
    command."""

    def __init__(self, folder: JobFolder, host: str, pid: int, shoal: str, interval_s: float = INTERVAL_S, say: Say = stderr_say):
        self.folder, self.host, self.pid, self.shoal, self.interval_s, self.say = folder, host, pid, shoal, interval_s, say
        self.record = Record(folder, host, say)
        self.before: Dict[int, Counters] = {}
        self.mine: Dict[int, bool] = {}
        self.step: Dict[int, int] = {}  # by process: the operations in each of its steps
        self.host_look = HostLook()
        self.is_stopped = threading.Event()
        self.top: Optional["subprocess.Popen[str]"] = None
        self.began = self.dumped_at = time.monotonic()
        self.dump_after_s = 5 * interval_s
        self.due_at = 0.0
        self.thread = threading.Thread(target=self.run, name="shoal-metrics", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Returns when the thread has ended."""
        self.is_stopped.set()
        top = self.top
        if top:
            top.terminate()
        self.thread.join(timeout=10)

    def run(self) -> None:
        """Samples until the process has ended. `shoal top` ends when no rank is there, yet or any longer, so it is started
        again."""
        try:
            while not self.is_stopped.is_set() and (_stat_of(self.pid) or ["Z"])[0] != "Z":
                self._look()
                self.is_stopped.wait(self.interval_s)
        except Exception as error:  # metrics must not end a training
            self.say(f"no more metrics of {self.host}: {type(error).__name__}: {error}")
        finally:
            self.record.close()
            for path in self.folder.traces.glob(_input_file(self.folder, self.host, "*").name):
                path.unlink(missing_ok=True)

    def _look(self) -> None:
        command = [self.shoal, "top", "--format", "json", "--interval", str(self.interval_s), str(self.pid)]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as self.top:
            assert self.top.stdout
            try:
                for line in self.top.stdout:
                    if self.is_stopped.is_set():
                        break
                    self.take(json.loads(line))
            finally:
                self.top.kill()

    def take(self, look: Mapping[str, Any]) -> None:
        """Takes one sample of `shoal top`."""
        at = look["unix_us"] / 1e6
        mine = [process for process in look["processes"] if self._is_mine(process["pid"])]
        if time.monotonic() - self.dumped_at > self.dump_after_s:
            self._dump()
        # A sample delayed by copying the recorders is too old to combine with what the kernel counts now.
        if not mine or at < self.due_at or time.time() - at > STALE_S:
            return
        self.due_at = at + (0 if time.monotonic() - self.began < CLOSE_S else LATER_S) - self.interval_s / 2
        values = [value for process in mine for value in self._process_values(process, at)]
        self.record.add(values + self.host_look.values(at), at)

    def _is_mine(self, pid: int) -> bool:
        """Returns true if our process started this one: hosts emulated on one machine see each other's ranks."""
        if pid not in self.mine:
            self.mine[pid] = is_started_by(pid, self.pid)
        return self.mine[pid]

    def _process_values(self, process: Mapping[str, Any], at: float) -> List[Value]:
        pid, rank = process["pid"], process["world_rank"]
        waited = _input.waited(str(_input_file(self.folder, self.host, pid)), time.monotonic())
        now = counters_of(process, cpu_seconds(pid), at, waited.seconds if waited else math.nan)
        before = self.before.get(pid)
        self.before[pid] = now
        values = [Value("shoal/memory_bytes", process["memory_bytes"], rank)]
        values += [Value(name, value, rank) for name, value in noise_of(process).items()]
        if before and at > before.at:
            found = rates(now, before)
            values += [Value(name, value, rank) for name, value in found.items()]
            if max(now.waits_s, before.waits_s) >= WAITING_S:  # a wait that has ended is written as 0
                values.append(Value("shoal/waiting_s", now.waits_s if now.waits_s >= WAITING_S else 0.0, rank, None, waits_of(process)[1]))
            if pid in self.step:
                values.append(Value("shoal/steps_per_s", found["shoal/operations_per_s"] / self.step[pid], rank))
        return values

    def _dump(self) -> None:
        """Saves the present flight recorders, in case the job ends without writing them, and looks for steps in them."""
        self.dumped_at = time.monotonic()
        self.dump_after_s = min(2 * self.dump_after_s, DUMP_S)
        done = subprocess.run([self.shoal, "top", "--dump", str(self.pid)], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        lines = [line for line in done.stdout.splitlines() if _pid_in(line, self.mine)]
        if not lines:
            return
        self._find_steps(lines)
        try:
            self.folder.traces.mkdir(exist_ok=True)
            part = self.folder.traces / f".{self.host}.live"
            part.write_text("\n".join(lines) + "\n")
            os.replace(part, self.folder.traces / f"{self.host}.live")
        except OSError as error:
            self.say(f"cannot keep a trace of {self.host}: {error.strerror}")

    def _find_steps(self, lines: List[str]) -> None:
        longest: Dict[int, int] = collections.defaultdict(int)
        for (pid, _), calls in calls_of(lines).items():
            length = step_length(calls)
            if length and len(calls) > longest[pid]:
                longest[pid] = len(calls)
                self.step[pid] = length


PID = re.compile(r'"pid":(\d+)')


def _pid_in(line: str, mine: Mapping[int, bool]) -> bool:
    found = PID.search(line)
    return bool(found and mine.get(int(found.group(1))))


class Watching:
    """An agent's metrics of its host while the workers run: line() takes the lines of the log, look_at() samples the ranks that
    a process starts. A context manager."""

    def __init__(self, definitions: Iterable[Metric], folder: JobFolder, host: str, say: Say = stderr_say):
        self.folder, self.host, self.say = folder, host, say
        self.log = LogMetrics(definitions, folder, say)
        self.sampler: Optional[Sampler] = None

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: Any) -> None:
        if self.sampler:
            self.sampler.stop()
        self.log.close()

    def line(self, text: str) -> None:
        self.log.line(self.host, None, text)

    def look_at(self, pid: int) -> None:
        try:
            self.sampler = Sampler(self.folder, self.host, pid, shoal_command(), say=self.say)
        except FileNotFoundError as error:
            self.say(f"the ranks are not looked at: {error}")
            return
        self.sampler.start()


# ---- reading ----

class Series:
    """The values of a metric of one rank, by time. Merges neighbors if there are many."""

    def __init__(self) -> None:
        self.points: List[Tuple[float, float]] = []
        self.last: Tuple[float, float] = (0.0, math.nan)
        self.count = 0
        self.sum, self.finite = 0.0, 0  # sum and number of the finite values
        self.each = 1  # values in each point
        self.open: List[Tuple[float, float]] = []

    def add(self, at: float, value: float) -> None:
        self.last = (at, value)
        self.count += 1
        if math.isfinite(value):
            self.sum, self.finite = self.sum + value, self.finite + 1
        self.open.append((at, value))
        if len(self.open) < self.each:
            return
        self.points.append(_mean(self.open))
        self.open = []
        if len(self.points) > POINTS_MAX:
            self.points = [_mean(self.points[i:i + 2]) for i in range(0, len(self.points), 2)]
            self.each *= 2

    def recent(self, count: int) -> List[float]:
        return [value for _, value in self.points[-count:] if math.isfinite(value)]

    def mean(self) -> float:
        return self.sum / self.finite if self.finite else math.nan


def _mean(points: Sequence[Tuple[float, float]]) -> Tuple[float, float]:
    return points[-1][0], sum(value for _, value in points) / len(points)


Key = Tuple[str, str, Optional[int]]  # name, host, rank


def record_of(line: bytes) -> Optional[Dict[str, Any]]:
    """Parses a line of metrics.jsonl. Returns None for a line that a full disk has cut off, or that another program wrote."""
    try:
        record = json.loads(line)
        rank, waits_for = record["rank"], record.get("waits_for", [])
        if not all(one is None or type(one) is int for one in (rank, *waits_for)):
            return None
        value = math.nan if record["value"] is None else float(record["value"])
        return {"name": str(record["name"]), "host": str(record["host"]), "rank": rank, "value": value, "time": float(record["time"]),
                "step": record.get("step"), "waits_for": waits_for}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _end_of(waits: Mapping[int, Tuple[float, Sequence[int]]], rank: int) -> Optional[int]:
    """Returns the rank at the end of the chain of waits that begins with this one, or None for a circle."""
    for _ in range(len(waits)):
        rank = waits[rank][1][0]
        if rank not in waits:
            return rank
    return None


@dataclasses.dataclass
class Stall:
    """A rank that holds up others, as in `shoal top`, but over all hosts of the job."""

    rank: int
    host: str  # "" before the first number of that rank
    held: int  # ranks that wait for it, directly or indirectly
    seconds: float


class Reader:
    """Reads metrics.jsonl as it grows. With tail_bytes it begins at most that many bytes before the end, for readers that want
    the newest values."""

    def __init__(self, folder: JobFolder, tail_bytes: Optional[int] = None):
        self.path, self.tail_bytes = folder.metrics, tail_bytes
        self.offset = 0
        self.rest = b""  # a line that is still being written
        self.series: Dict[Key, Series] = {}
        self.waits: Dict[int, Tuple[float, float, List[int]]] = {}  # rank -> time of sample, seconds waited, awaited ranks

    def read(self) -> bool:
        """Reads the lines that are new, piece by piece because the file of a long job has gigabytes. Returns false if there are
        none."""
        has_lines = False
        try:
            with open(self.path, "rb") as file:
                if self.tail_bytes is not None:
                    self.offset = max(self.offset, os.fstat(file.fileno()).st_size - self.tail_bytes)
                file.seek(self.offset)
                for piece in iter(lambda: file.read(READ_BYTES), b""):
                    self.offset += len(piece)
                    *lines, self.rest = (self.rest + piece).split(b"\n")
                    has_lines |= bool(lines)
                    for line in lines:
                        self._take(line)
        except FileNotFoundError:
            return False
        return has_lines

    def _take(self, line: bytes) -> None:
        record = record_of(line)
        if record is None:
            return
        key = (record["name"], record["host"], record["rank"])
        self.series.setdefault(key, Series()).add(record["time"], record["value"])
        if record["name"] == "shoal/waiting_s" and record["rank"] is not None:
            self.waits[record["rank"]] = (record["time"], record["value"], record["waits_for"])

    def stall(self, now: float) -> Optional[Stall]:
        """Returns the rank at the end of the most chains of waits, if these have lasted."""
        waits = {rank: (seconds + now - at, waits_for) for rank, (at, seconds, waits_for) in self.waits.items()
                 if seconds > 0 and now - at < STALL_FRESH_S and waits_for}
        ends = collections.Counter(end for end in (_end_of(waits, rank) for rank in waits) if end is not None)
        for rank, held in ends.most_common(1):
            seconds = max(waits[one][0] for one in waits if _end_of(waits, one) == rank)
            host = next((host for _, host, of in self.series if of == rank), "")
            return Stall(rank, host, held, seconds) if seconds >= STALL_S else None
        return None

    def noise(self) -> Optional[str]:
        """Returns the sentence about the newest noise scale, or None if the program measures none."""
        names = ("shoal/batch", "shoal/noise_scale", "shoal/noise_error")
        for rank in sorted({rank for name, _, rank in self.series if name == names[1] and rank is not None}):
            batch, scale, error = (self.last(name, rank) for name in names)
            if batch and scale and error is not None and all(map(math.isfinite, (batch, scale, error))):
                return noise_text(batch, scale, error)
        return None

    def names(self) -> List[str]:
        """Returns the script's metrics in order of appearance, then ours."""
        seen = list(dict.fromkeys(name for name, _, _ in self.series))
        order = list(SHOAL_METRICS)
        return [name for name in seen if name not in order] + [name for name in order if name in seen]

    def of(self, name: str) -> Dict[Tuple[str, Optional[int]], Series]:
        found = {(host, rank): series for (its, host, rank), series in self.series.items() if its == name}
        return dict(sorted(found.items(), key=lambda item: (-1 if item[0][1] is None else item[0][1], item[0][0])))

    def last(self, name: str, rank: Optional[int]) -> Optional[float]:
        found = [series.last for (its, _, of), series in self.series.items() if its == name and of == rank]
        return max(found)[1] if found else None


# ---- for Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats ----

def prometheus_name(name: str) -> str:
    """Returns a metric's name for Prometheus, which wants full names of base units."""
    return "shoal_job_" + re.sub(r"_s$", "_seconds", re.sub(r"_per_s$", "_per_second", name.replace("shoal/", "").replace("/", "_")))


def prometheus_text(folder: JobFolder, reader: Reader) -> str:
    """Returns the newest value of each metric. For metrics of the log, the document's name of the metric is a label."""
    status = folder.status()
    lines = ["# HELP shoal_job_status 1 for the status that the job has.", "# TYPE shoal_job_status gauge",
             f"shoal_job_status{_labels(shoal_job=folder.name, status=status.status)} 1",
             "# HELP shoal_job_attempts How often all workers were started again.", "# TYPE shoal_job_attempts gauge",
             f"shoal_job_attempts{_labels(shoal_job=folder.name)} {status.attempt}"]
    is_log_begun = False
    for name in reader.names():
        ours = SHOAL_METRICS.get(name)
        metric = prometheus_name(name) if ours else "shoal_job_metric"
        if ours or not is_log_begun:
            lines += [f"# HELP {metric} {ours[0] if ours else 'Metrics of the log, as the job document defines them.'}", f"# TYPE {metric} gauge"]
            is_log_begun = is_log_begun or not ours
        for (host, rank), series in reader.of(name).items():
            labels = {"shoal_job": folder.name, "host": host, **({} if rank is None else {"rank": str(rank)}), **({} if ours else {"name": name})}
            if name == "shoal/waiting_s" and rank in reader.waits:
                labels["waits_for"] = ",".join(map(str, reader.waits[rank][2]))
            lines.append(f"{metric}{_labels(**labels)} {_number(series.last[1])}")
    return "\n".join(lines) + "\n"


def _labels(**labels: str) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return "{" + ",".join(f'{key}="{escaped(value)}"' for key, value in labels.items()) + "}"


def _number(value: float) -> str:
    return "NaN" if math.isnan(value) else "+Inf" if value == math.inf else "-Inf" if value == -math.inf else repr(value)


def main(words: Sequence[str]) -> int:
    path = pathlib.Path(words[0])
    with contextlib.suppress(KeyboardInterrupt):
        Sampler(JobFolder(path.name, path.parent), words[1], int(words[2]), shoal_command()).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
