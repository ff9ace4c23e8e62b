"""The page about a job: one HTML file that needs nothing else. The sections are made here as text; watch.py also sends them to
the browser one by one as they change. Plots are SVG without text, stretched to the available width. Their text is HTML next to
them, so that it keeps its size on a narrow screen."""
from __future__ import annotations

import collections
import dataclasses
import datetime
import html
import json
import math
import os
import pathlib
import re
import statistics
import subprocess
import tempfile
import time
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from shoal.job import engines
from shoal.job.document.folder import ENDED, JobFolder, Status
from shoal.job.watching import losses
from shoal.job.watching.metrics import SHOAL_METRICS, Reader, Series, Stall, shoal_command, step_length

LINES_MAX = 8  # of a plot; with more ranks it shows the minimum, the median and the maximum
POINTS_MAX = 400  # of a line
LOG_LINES, LOG_BYTES = 60, 1 << 16  # of each host
TAIL_BYTES = 1 << 20  # the end of metrics.jsonl, which has the newest numbers
EVENTS_MAX = 40
OPERATIONS_MAX = 300  # of a timeline, on each rank
DASHES = ("", "6 3", "2 2", "8 3 2 3")
TRACE_S = 60  # time limit of `shoal trace`

BYTES = ("B", "B/s")
PREFIXES = {1.0: "", 2.0 ** 10: "Ki", 2.0 ** 20: "Mi", 2.0 ** 30: "Gi", 2.0 ** 40: "Ti"}

Section = Tuple[str, str]  # id, HTML


def text(value: Any) -> str:
    return html.escape(str(value))


def number_text(value: float, unit: str = "") -> str:
    """Formats a number with three digits, and with a prefix if the unit has prefixes."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞" if value > 0 else "-∞"
    size = abs(value)
    if unit in BYTES:
        scale = _scale(value)
        return f"{value / scale:.{0 if size / scale >= 100 else 3}{'f' if size / scale >= 100 else 'g'}} {PREFIXES[scale]}{unit}"
    if unit == "s" and size:
        scale, name = (1.0, "s") if size >= 1 else (1e-3, "ms") if size >= 1e-3 else (1e-6, "us")
        return f"{value / scale:.3g} {name}"
    return (f"{value:.0f}" if 1000 <= size < 1e6 else f"{value:.3g}") + (f" {unit}" if unit and unit != "1/s" else "/s" if unit else "")


def time_text(at: Optional[float]) -> str:
    return "–" if at is None else datetime.datetime.fromtimestamp(at).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def span_text(seconds: float) -> str:
    whole = int(max(seconds, 0))
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"


# ---- plots ----

@dataclasses.dataclass
class Line:
    label: str
    points: List[Tuple[float, float]]


def lines_of(series: Dict[Tuple[str, Optional[int]], Series]) -> List[Line]:
    """Returns a line for each rank; for many ranks the minimum, the median and the maximum."""
    hosts = {host for host, _ in series}
    named = [Line((f"rank {rank}" if rank is not None else host if len(hosts) > 1 else "the job" if host == "" else host), its.points)
             for (host, rank), its in series.items()]
    named = [line for line in named if any(math.isfinite(value) for _, value in line.points)]
    return named if len(named) <= LINES_MAX else _spread(named)


def _spread(lines: Sequence[Line]) -> List[Line]:
    begin = min(line.points[0][0] for line in lines)
    width = max((max(line.points[-1][0] for line in lines) - begin) / POINTS_MAX, 1.0)
    cells: Dict[int, List[float]] = collections.defaultdict(list)
    for line in lines:
        for at, value in line.points:
            if math.isfinite(value):
                cells[int((at - begin) / width)].append(value)
    made = [(begin + (cell + 0.5) * width, values) for cell, values in sorted(cells.items())]
    return [Line(f"greatest of {len(lines)} ranks", [(at, max(values)) for at, values in made]),
            Line("median", [(at, statistics.median(values)) for at, values in made]), Line("least", [(at, min(values)) for at, values in made])]


def thinned(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Returns at most POINTS_MAX points, each the mean of its neighbors."""
    each = -(-len(points) // POINTS_MAX)
    groups = [points[i:i + each] for i in range(0, len(points), each)] if each > 1 else [[point] for point in points]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _scale(value: float) -> float:
    """Returns the binary prefix for a value."""
    return 2.0 ** (10 * min(int(math.log2(max(abs(value), 1.0)) // 10), 4))


def ticks(low: float, high: float, scale: float = 1.0) -> List[float]:
    """Returns two to six numbers between the limits that are round when divided by the scale."""
    low, high = low / scale, high / scale
    step = 10.0 ** math.floor(math.log10((high - low) / 3))
    step = next(step * factor for factor in (5, 2, 1) if (high - low) / (step * factor) >= 2)
    first = math.ceil(low / step - 1e-9)
    return [index * step * scale for index in range(first, int(math.floor(high / step + 1e-9)) + 1)]


def plot(lines: Sequence[Line], unit: str, begin: float, end: float) -> str:
    """Draws the lines over the time since `begin`."""
    values = [value for line in lines for _, value in line.points if math.isfinite(value)]
    low, high = min(values), max(values)
    low = 0.0 if 0 <= low <= high / 2 else low
    if high - low < 1e-9 * max(abs(high), 1e-9):
        low, high = (0.0, high * 1.2 or 1.0) if high >= 0 else (low - 1, high + 1)
    span = max(end - begin, 1e-3)
    high += (high - low) * 0.05
    rows = [(tick, 100 * (tick - low) / (high - low)) for tick in ticks(low, high, _scale(high) if unit in BYTES else 1.0)]
    drawn = "".join(f'<line class="grid" x1="0" x2="1000" y1="{1000 - 10 * at:.1f}" y2="{1000 - 10 * at:.1f}"/>' for _, at in rows)
    for index, line in enumerate(lines):
        for piece in _pieces(thinned(line.points)):
            points = piece if len(piece) > 1 else 2 * piece  # a line of one point is visible by its round ends
            at = " ".join(f"{1000 * (moment - begin) / span:.1f},{1000 - 1000 * (value - low) / (high - low):.1f}" for moment, value in points)
            look = f'stroke-dasharray="{DASHES[index % 4]}"' if len(piece) > 1 else 'class="dot"'
            drawn += f'<polyline points="{at}" style="stroke:var(--s{index % 8})" {look}><title>{text(line.label)}</title></polyline>'
    labels = "".join(f'<span class="y" style="bottom:{at:.1f}%">{text(number_text(tick, unit))}</span>' for tick, at in rows)
    labels += f'<span class="x" style="left:0">0</span><span class="x" style="right:0">{text(span_text(span) if span >= 10 else f"{span:.1f} s")}</span>'
    return f'<div class="plot">{labels}<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{drawn}</svg></div>'


def _pieces(points: Sequence[Tuple[float, float]]) -> Iterable[List[Tuple[float, float]]]:
    """Yields the parts of a line between values that are not finite."""
    piece: List[Tuple[float, float]] = []
    for point in [*points, (0.0, math.nan)]:
        if math.isfinite(point[1]):
            piece.append(point)
        elif piece:
            yield piece
            piece = []


def legend(lines: Sequence[Line], unit: str) -> str:
    """Draws each line's key and newest value."""
    keys = []
    for index, line in enumerate(lines):
        style = f"border-color:var(--s{index % 8});border-top-style:{'solid' if not DASHES[index % 4] else 'dashed'}"
        keys.append(f'<span><span class="key" style="{style}"></span>{text(line.label)} <b>{text(number_text(line.points[-1][1], unit))}</b></span>')
    return f'<div class="legend">{"".join(keys)}</div>'


# Words for the plots; names of metrics are for programs.
TITLES = {"shoal/steps_per_s": "Steps", "shoal/operations_per_s": "Operations", "shoal/bytes_per_s": "Bytes of operations",
          "shoal/network_bytes_per_s": "Bytes to the network", "shoal/exposed": "Exposed communication", "shoal/input": "Waiting for data", "shoal/idle": "Idle",
          "shoal/waiting_s": "Waiting now",
          "shoal/came_last": "Came last", "shoal/late_s": "Late by", "shoal/batch": "Global batch", "shoal/noise_scale": "Noise scale",
          "shoal/noise_error": "Error of the noise scale", "shoal/cpu": "Cores", "shoal/memory_bytes": "Memory",
          "host/cpu": "Busy cores of the host", "host/memory_available_bytes": "Free memory of the host",
          "host/received_bytes_per_s": "Bytes received by the host", "host/sent_bytes_per_s": "Bytes sent by the host"}


def curves(reader: Reader, status: Status) -> str:
    """Draws all plots over the time of the job, so that they line up with each other and with what happened."""
    moments = [point[0] for series in reader.series.values() for point in (series.points[:1] + series.points[-1:])]
    if not moments:
        return "<p class=soft>No numbers yet: none of the metric definitions has matched, and no rank has been looked at.</p>"
    begin, end, cards = min(status.started or math.inf, *moments), max(status.ended or 0, *moments), []
    for name in reader.names():
        meaning, unit = SHOAL_METRICS.get(name, ("", ""))
        lines = lines_of(reader.of(name))
        if lines:
            about = f"<p class=soft>{text(meaning)}</p>" if meaning else ""
            title = f"{text(TITLES[name])} <code>{text(name)}</code>" if name in TITLES else text(name)
            cards.append(f'<div class="card"><h3>{title}</h3>{about}{plot(lines, unit, begin, end)}{legend(lines, unit)}</div>')
    return f'<div class="cards">{"".join(cards)}</div>'


# ---- tables ----

def table(head: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[int] = (0,)) -> str:
    """Draws a table. Cells are HTML; `words` are the columns that hold text."""
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}{' class=text' if at in words else ''}>{cell}</{tag}>" for at, cell in enumerate(cells)) + "</tr>"
    return f'<div class="scroll"><table>{row(head, "th")}{"".join(row(cells, "td") for cells in rows)}</table></div>'


@dataclasses.dataclass
class Rank:
    """Means over the job, and the newest values."""

    rank: int
    host: str
    last: Dict[str, float]
    mean: Dict[str, float]


def ranks_of(reader: Reader) -> List[Rank]:
    found: Dict[int, Rank] = {}
    for (name, host, rank), series in reader.series.items():
        if rank is not None and name in SHOAL_METRICS:
            of = found.setdefault(rank, Rank(rank, host, {}, {}))
            of.host, of.last[name], of.mean[name] = host, series.last[1], series.mean()
    return [found[rank] for rank in sorted(found)]


def lateness(reader: Reader) -> str:
    ranks = ranks_of(reader)
    if not ranks:
        return "<p class=soft>No rank of Shoal has been seen.</p>"
    rows = []
    for rank in ranks:
        share, mean = rank.mean.get("shoal/came_last", math.nan), rank.mean
        bar = f'<span class="bar" style="width:{100 * share:.0f}px"></span> {100 * share:.0f} %' if math.isfinite(share) else "–"
        cell = [number_text(mean.get(name, math.nan), SHOAL_METRICS[name][1]) for name in
                ("shoal/late_s", "shoal/steps_per_s", "shoal/operations_per_s", "shoal/bytes_per_s", "shoal/network_bytes_per_s")]
        shares = [mean.get(name, math.nan) for name in ("shoal/exposed", "shoal/input")]
        rows.append([text(rank.rank), text(rank.host), bar, *map(text, cell),
                     *(f"{100 * share:.1f} %" if math.isfinite(share) else "–" for share in shares),
                     text(number_text(mean.get("shoal/cpu", math.nan))), text(number_text(rank.last.get("shoal/memory_bytes", math.nan), "B"))])
    head = ["rank", "host", "came last", "late by", "steps", "operations", "bytes", "on the network", "exposed", "input", "cores", "memory"]
    note = "<p class=soft>Means over the job; memory is the newest value. Exposed: share of the time in which the rank was blocked in Shoal; input: in which it waited for a batch.</p>"
    return table(head, rows, (0, 1)) + note


def lost(reader: Reader) -> str:
    """What the ranks lost their time to, and the one change that would gain most."""
    found = losses.losses_of(reader)
    if not found:
        return "<p class=soft>No rank of Shoal has been seen.</p>"
    rows = [[text(loss.what), f"{100 * loss.share:.0f} %", text(loss.means)]
            for loss in found if loss.share > 0 or loss.what != losses.IDLE]
    is_seen = any(name == "shoal/input" for name, _, _ in reader.series)
    note = "" if is_seen else "<p class=soft>No loader was seen: a wait for data counts as idle, or as computing if the process loads by itself.</p>"
    return f"<p>{text(losses.change(reader, found))}</p>{table(['a rank was', 'of its time', ''], rows, (0, 2))}{note}"


# ---- the timeline of a step ----

@dataclasses.dataclass
class Operation:
    name: str
    sequence: int
    begin: float  # microseconds
    arrived: float
    end: float


def trace_read(folder: JobFolder) -> Dict[str, Dict[str, List[Operation]]]:
    """Returns operations by communicator and rank, on one clock, from the flight recorders that the job has kept."""
    files = sorted(map(str, folder.traces.glob("[!.]*"))) if folder.traces.is_dir() else []
    files = [file for file in files if not file.endswith(".live")] or files
    if not files:
        return {}
    with tempfile.TemporaryDirectory(prefix="shoal-report-") as place:
        path = pathlib.Path(place, "trace.json")
        done = subprocess.run([shoal_command(), "trace", "--json", "-o", str(path), *files], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=TRACE_S)
        if done.returncode:
            raise OSError(done.stderr.strip() or f"shoal trace ended with {done.returncode}")
        return _operations(json.loads(path.read_text())["traceEvents"])


def _operations(events: Sequence[Dict[str, Any]]) -> Dict[str, Dict[str, List[Operation]]]:
    names = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    found: Dict[str, Dict[str, List[Operation]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    last: Dict[Tuple[int, int], Operation] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        track = (event["pid"], event["tid"])
        if "stage" in event.get("args", ()):  # an action of a pipeline, on a track of its own
            continue
        if "args" in event:
            last[track] = Operation(event["name"], event["args"]["sequence"], event["ts"], event["ts"], event["ts"] + event["dur"])
            if event["cat"] not in ("send", "receive", "drain", "split"):
                found[event["args"]["communicator"]][names[event["pid"]]].append(last[track])
        elif event["name"].startswith("waiting") and track in last:
            last[track].arrived = event["ts"] + event["dur"]
    return found


def step_of(ranks: Dict[str, List[Operation]]) -> Tuple[int, int]:
    """Returns the first and last sequence number of the newest whole step: a repetition, or else the last operations."""
    longest = sorted(max(ranks.values(), key=len), key=lambda operation: operation.sequence)
    length = None
    for skipped in range(min(12, len(longest))):  # the end of a job often differs from its steps
        body = longest[:len(longest) - skipped]
        length = step_length([operation.name for operation in body])
        if length:
            longest = body
            break
    length = min(length or 12, OPERATIONS_MAX, len(longest))
    return longest[-length].sequence, longest[-1].sequence


def timeline(folder: JobFolder) -> str:
    try:
        comms = trace_read(folder)
    except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
        return f"<p class=soft>The flight recorders could not be read: {text(error)}</p>"
    if not comms:
        return "<p class=soft>The job has kept no flight recorders.</p>"
    name = max(comms, key=lambda comm: sum(map(len, comms[comm].values())))
    first, last = step_of(comms[name])
    ranks = {rank: [operation for operation in operations if first <= operation.sequence <= last] for rank, operations in comms[name].items()}
    ranks = {rank: operations for rank, operations in ranks.items() if operations}
    begin = min(operation.begin for operations in ranks.values() for operation in operations)
    end = max(operation.end for operations in ranks.values() for operation in operations)
    lanes = "".join(f"<p class=soft>{text(rank)}</p>{_lane(operations, begin, max(end - begin, 1e-3))}" for rank, operations in ranks.items())
    count = last - first + 1
    head = f"{count} operation{'s' if count != 1 else ''} of communicator {name}, {number_text((end - begin) / 1e6, 's')} from the first call to the last end"
    keys = ('<div class=legend><span><span class=swatch style="background:var(--wait)"></span>waiting for other ranks</span>'
            '<span><span class=swatch style="background:var(--run)"></span>running</span></div>')
    return f'<div class="card"><p>{text(head)}</p>{keys}{lanes}</div>'


def _lane(operations: Sequence[Operation], begin: float, span: float) -> str:
    """Draws a rank's operations. Those that overlap are drawn in rows of their own within the lane."""
    ends: List[float] = []
    rows = []
    for operation in sorted(operations, key=lambda operation: operation.begin):
        row = next((at for at, until in enumerate(ends) if until <= operation.begin), len(ends))
        ends[row:row + 1] = [operation.end]
        rows.append((row, operation))
    drawn, height = "", 100 / max(len(ends), 1)
    for row, operation in rows:
        title = f"<title>{text(operation.name)}: waiting {number_text((operation.arrived - operation.begin) / 1e6, 's')}, running {number_text((operation.end - operation.arrived) / 1e6, 's')}</title>"
        for kind, since, until in (("waiting", operation.begin, operation.arrived), ("running", operation.arrived, operation.end)):
            if until > since:
                drawn += (f'<rect class="{kind}" x="{1000 * (since - begin) / span:.2f}" width="{max(1000 * (until - since) / span, 0.8):.2f}" '
                          f'y="{row * height + height * 0.1:.1f}" height="{height * 0.8:.1f}">{title}</rect>')
    return f'<div class="lane" style="height:{max(26, 9 * len(ends))}px"><svg viewBox="0 0 1000 100" preserveAspectRatio="none">{drawn}</svg></div>'


# ---- what happened ----

def stall_text(stall: Stall) -> str:
    on = f" on {stall.host}" if stall.host else ""
    return f"rank {stall.rank}{on} holds up {stall.held} rank{'s' if stall.held != 1 else ''} for {span_text(stall.seconds)}"


def stall_of(folder: JobFolder, status: Status) -> Optional[str]:
    """Returns the stall of a job that trains, for an operator, from the newest numbers only."""
    if status.status in ENDED:
        return None
    reader = Reader(folder, TAIL_BYTES)
    reader.read()
    stall = reader.stall(time.time())
    return stall_text(stall) if stall else None


def verdict(reader: Reader) -> str:
    """A line about the whole job: whether one rank holds the others up, how much of the time is communication, and what the batch is
    in units of the noise scale, if that is measured. Empty if the job has no ranks of Shoal's, or one."""
    ranks = [rank for rank in ranks_of(reader) if math.isfinite(rank.mean.get("shoal/exposed", math.nan))]
    if len(ranks) < 2:
        return ""
    exposed = statistics.mean(rank.mean["shoal/exposed"] for rank in ranks)
    last = max(ranks, key=lambda rank: rank.mean.get("shoal/came_last", 0.0))
    share = last.mean.get("shoal/came_last", 0.0)
    who = (f"Rank {last.rank} on {last.host} came last in {100 * share:.0f} % of the operations" if share > 1.5 / len(ranks)
           else "No rank holds the others up")
    waits = [rank.mean["shoal/input"] for rank in ranks if math.isfinite(rank.mean.get("shoal/input", math.nan))]
    data = f", and waited for data for {100 * statistics.mean(waits):.0f} %" if waits else ""
    noise = reader.noise()
    about_batch = f" {noise[0].upper()}{noise[1:]}." if noise else ""
    return f"{who}; ranks were blocked in communication for {100 * exposed:.0f} % of the time{data}.{about_batch}"


def head(status: Status, stall: Optional[Stall] = None, judged: str = "") -> str:
    spans = [f"created {time_text(status.created)}"]
    if status.started:
        spans.append(f"trained for {span_text((status.ended or time.time()) - status.started)}")
    if status.attempt:
        spans.append(f"started again {status.attempt} time{'s' if status.attempt != 1 else ''}")
    workers = len(status.hosts) * status.workers_per_host
    spans.append(f"{len(status.hosts)} host{'s' if len(status.hosts) != 1 else ''}, {workers} worker{'s' if workers != 1 else ''}")
    failed = ""
    if status.failure_reason:
        code = f" (exit code {status.exit_code})" if status.exit_code is not None else ""
        failed = f'<div class="failure"><b>Why it failed{text(code)}</b><br>{text(status.failure_reason)}</div>'
    if stall and status.status not in ENDED:
        failed += (f'<div class="failure"><b>The job stands still</b><br>{text(stall_text(stall))}. <code>shoal top</code> on that host names '
                   "the process and the command that shows where it is.</div>")
    model = f"<p>model: <code>{text(status.model)}</code></p>" if status.model else ""
    judged = f"<p>{text(judged)}</p>" if judged else ""
    return (f'<h1>{text(status.name)}</h1><p><span class="status {text(status.status)}">{text(status.status)}</span> '
            f'<span class=soft>{text("; ".join(spans))}</span></p>{judged}{failed}{model}')


def events(folder: JobFolder) -> str:
    rows = []
    for line in _tail(folder.events, LOG_BYTES).splitlines():
        try:
            record = json.loads(line)
            at = datetime.datetime.fromtimestamp(record.pop("time")).strftime("%H:%M:%S")
            host, what = record.pop("host", None) or "", record.pop("what")
        except (ValueError, KeyError, TypeError, AttributeError):  # the first line may be cut off
            continue
        more = ", ".join(f"{key} {value}" for key, value in record.items() if value not in (None, False))
        rows.append([text(at), text(host), text(what), text(more)])
    return table(["time", "host", "what", ""], rows[-EVENTS_MAX:], (0, 1, 2, 3)) if rows else "<p class=soft>Nothing has happened yet.</p>"


def _flat(data: Any, name: str = "") -> Iterable[Tuple[str, Any]]:
    if isinstance(data, dict) and data:
        for key, value in data.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    elif data not in (None, {}, [], ""):
        yield name, data if isinstance(data, str) else json.dumps(data)


SECRET = ("secret", "token", "password", "passwd", "credential", "access_key", "api_key", "apikey", "webhook")
HIDDEN = "(not shown)"
# The part of a URL with a user's name and password (RFC 3986, 3.2.1).
USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


def settings(folder: JobFolder) -> str:
    """Draws the document. People pass pages on, so it hides all values of the environment, values with a name like that of a
    secret, and passwords in URLs."""
    try:
        data = json.loads(folder.document.read_text())
    except (OSError, ValueError) as error:
        return f"<p class=soft>The document cannot be read: {text(error)}</p>"
    rows = [[f"<code>{text(name)}</code>", text(_shown(name, value))] for name, value in _flat(data)]
    return table(["setting", "value"], rows, (0, 1))


def _shown(name: str, value: str) -> str:
    is_secret = name.startswith("environment.") or any(word in name.lower() for word in SECRET)
    return HIDDEN if is_secret else USERINFO.sub(HIDDEN + "@", value)


def _tail(path: pathlib.Path, most: int) -> str:
    try:
        with open(path, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - most, 0))
            return file.read(most).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def logs(folder: JobFolder, status: Status) -> str:
    cards = []
    for host in status.hosts:
        lines = _tail(folder.log(host), LOG_BYTES).splitlines()[-LOG_LINES:]
        shown = "\n".join(line.rpartition("\r")[2] for line in lines)  # only the last state of a redrawn progress bar
        cards.append(f'<h3>{text(host)}</h3><div class="card"><pre>{text(shown) or "(nothing yet)"}</pre></div>')
    return "".join(cards)


# ---- the page ----

def sections(folder: JobFolder, reader: Reader, trace: Optional[str] = None) -> List[Section]:
    """Returns the whole page as the folder is now: first what happened, then the numbers. `trace` is the section "timeline" if
    it was made before."""
    status = engines.job_status(folder)
    hosts = ", ".join(status.hosts) + (f" on {status.machine}" if status.machine else "")
    return [("head", head(status, reader.stall(time.time()), verdict(reader))),
            ("losses", f"<h2>Where the time went</h2>{lost(reader)}"),
            ("ranks", f"<h2>Ranks, and who was late</h2>{lateness(reader)}"),
            ("events", f"<h2>What happened</h2>{events(folder)}"),
            ("logs", f"<h2>The log's end</h2>{logs(folder, status)}"),
            ("curves", f"<h2>Metrics</h2>{curves(reader, status)}"),
            ("timeline", f"<h2>One step</h2>{timeline(folder) if trace is None else trace}"),
            ("settings", f"<h2>Settings</h2>{settings(folder)}<p class=soft>Hosts: {text(hosts)}</p>")]


def page(title: str, body: Sequence[Section], script: str = "") -> str:
    """Returns one HTML page that loads nothing else."""
    style = (pathlib.Path(__file__).parent / "report.css").read_text()
    made = "".join(f'<section id="{name}">{content}</section>\n' for name, content in body)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{text(title)}</title>\n<style>\n{style}</style></head>\n<body>\n{made}{script}</body></html>\n")


def report_write(folder: JobFolder, path: pathlib.Path) -> pathlib.Path:
    """Writes the page about a job, which may still run. Returns its path. Replaces an existing page as a whole."""
    reader = Reader(folder)
    reader.read()
    status = engines.job_status(folder)
    made = sections(folder, reader)
    if status.status not in ENDED:
        made.insert(1, ("note", f"<p class=soft>Written while the job was running, {text(time_text(time.time()))}.</p>"))
    path = pathlib.Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(page(f"{folder.name}: report", made), encoding="utf-8")
        os.replace(part, path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    return path
