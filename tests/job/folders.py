"""Job folders like those of real jobs, made by code, and a browser for looking at pages. Times are fixed: 2026-11-23, 10:00
UTC."""
import contextlib
import itertools
import json
import math
import os
import pathlib
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(TOP / "tests/multi"))
sys.path.insert(0, str(TOP / "python"))
from shoal.job import processes  # noqa: E402
from shoal.job.document import Job, Metric, as_data  # noqa: E402
from shoal.job.document.folder import JobFolder, Status  # noqa: E402
from tap import Skip, expect  # noqa: E402

SHOAL = os.path.abspath(os.environ.setdefault("SHOAL_COMMAND", str(TOP / "build/shoal")))
BEGAN = 1795428000.0


def use_job_python():
    """Restarts with the interpreter that has the packages of dev/venv/job.txt, if it exists."""
    python = os.environ.get("SHOAL_TEST_JOB_PYTHON", str(TOP / "build/job/bin/python3"))
    if os.access(python, os.X_OK) and sys.executable != python and not os.environ.get("SHOAL_TEST_IN_JOB_PYTHON"):
        os.environ["SHOAL_TEST_IN_JOB_PYTHON"] = "yes"
        os.execv(python, [python, *sys.argv])


@contextlib.contextmanager
def jobs():
    """Yields a temporary folder for jobs."""
    with tempfile.TemporaryDirectory(prefix="shoal-watch-") as place:
        yield pathlib.Path(place)


def job(place, name="fashion", status="Completed", hosts=2, workers=2, seconds=120, failure=None, traced=True):
    """Makes a job that has trained for this many seconds. Rank 3 is slow."""
    folder = JobFolder(name, place)
    folder.create()
    names = [f"algo-{index + 1}" for index in range(hosts)]
    document = Job(entry_point="train.py", name=name, source_dir="src", framework="pytorch", instance_count=hosts, workers_per_host=workers,
                   distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
                   hyperparameters={"epochs": 16, "lr": 0.05, "note": "<b>a & b</b>", "api_key": "hunter2"},
                   metric_definitions=[Metric("train:loss", r"loss=([\d.]+)")])
    folder.document.write_text(json.dumps(as_data(document)))
    ended = BEGAN + seconds + 5 if status in ("Completed", "Failed", "Stopped") else None
    folder.status_write(Status(name, status, BEGAN - 3, BEGAN, ended, 0, names, workers, os.getpid(), processes.identity(os.getpid()),
                               platform.node(), exit_code=None if ended is None else 1 if failure else 0, failure_reason=failure,
                               model=f"file://{folder.model}" if status == "Completed" else None))
    numbers(folder, names, workers, seconds)
    for index, host in enumerate(names):
        folder.log(host).write_text("".join(f"{index * workers}| epoch {second // 8 + 1} loss={2.3 * math.exp(-second / 40):.4f} <tag>\n"
                                            for second in range(seconds)))
        folder.event("Training", host)
    if traced:
        traces(folder, names, workers)
    return folder


def numbers(folder, names, workers, seconds, first=0):
    lines = []
    for second in range(first, first + seconds):
        for rank in range(len(names) * workers):
            slow = rank == 3
            values = {"shoal/steps_per_s": 41 + rank % 2, "shoal/operations_per_s": 330 + 8 * rank, "shoal/bytes_per_s": 4.1e8 + 1e6 * second,
                      "shoal/network_bytes_per_s": 9.5e7, "shoal/exposed": 0.05 if slow else 0.18 + 0.03 * math.sin(second / 9 + rank),
                      "shoal/came_last": 0.7 if slow else 0.1, "shoal/late_s": 0.0041 if slow else 0.0003,
                      "shoal/cpu": 0.98 + 0.02 * math.sin(second), "shoal/memory_bytes": (600 + rank) * 2 ** 20}
            lines += [record(second, names[rank // workers], rank, name, value) for name, value in values.items()]
        for host in names:
            lines += [record(second, host, None, "host/cpu", 2.1), record(second, host, None, "host/memory_available_bytes", 3e10)]
        lines.append(record(second, names[0], 0, "train:loss", 2.3 * math.exp(-second / 40), second))
    with open(folder.metrics, "a") as file:
        file.write("".join(lines))


def record(second, host, rank, name, value, step=None):
    return json.dumps({"time": BEGAN + second, "host": host, "rank": rank, "name": name, "value": value, "step": step}) + "\n"


def traces(folder, names, workers, steps=20, tensors=5):
    """Writes flight recorders: each step has `tensors` overlapping all-reduces, then a barrier. Rank 3 comes last."""
    folder.traces.mkdir()
    size = len(names) * workers
    for rank in range(size):
        lines, sequence = [], 0
        for step in range(steps):
            for tensor in range(tensors + 1):
                sequence += 1
                posted = int(1e9 + step * 25e6 + tensor * 3e6 + (1.5e6 if rank == 3 else rank * 1e5))
                arrived = int(1e9 + step * 25e6 + tensor * 3e6 + 1.5e6)
                kind, count = ("barrier", 0) if tensor == tensors else ("all-reduce", 1 << (16 + tensor))
                lines.append(json.dumps({
                    "comm": "world", "comm_id": "00000000000000aa", "rank": rank, "size": size, "world_rank": rank, "host": names[rank // workers],
                    "pid": 1000 + rank, "record": sequence - 1, "sequence": sequence, "kind": kind, "algorithm": "ring", "count": count, "type": "FLOAT32",
                    "op": "SUM", "root": -1, "tag": 0, "status": "SHOAL_OK", "last_rank": 3, "late_us": 1500.0, "step": -1, "peer": -1, "clock": "boot",
                    "ns_per_tick": 1.0, "posted_ticks": posted, "arrived_ticks": arrived, "done_ticks": arrived + 2_000_000 + 900_000 * tensor,
                    "unix_us": int(BEGAN * 1e6) + posted // 1000}))
        (folder.traces / f"{names[rank // workers]}.{rank}").write_text("\n".join(lines) + "\n")


# ---- a browser ----

def chromium():
    """Returns the command, or skips the case with a reason."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not found:
        raise Skip("no chromium: dev/deps.sh test installs it")
    return found


def browse(url, *words, timeout=240):
    """Runs headless Chromium on the URL; returns its stdout and stderr. No request leaves the machine."""
    with tempfile.TemporaryDirectory(prefix="shoal-browser-") as profile:
        command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={profile}",
                   "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", *words, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
        expect(done.returncode == 0, f"chromium: exit code {done.returncode}", done.stderr[-2000:])
        return done.stdout, done.stderr


# ---- contents of a screenshot ----

class Picture:
    """A PNG with 8 bits per channel."""

    def __init__(self, path):
        data = path.read_bytes()
        self.width, self.height, depth, kind = struct.unpack(">IIBB", data[16:26])
        expect(depth == 8 and kind in (2, 6), depth, kind)
        self.each, packed, at = 3 if kind == 2 else 4, b"", 8
        while at < len(data):
            length, name = struct.unpack(">I4s", data[at:at + 8])
            packed += data[at + 8:at + 8 + length] if name == b"IDAT" else b""
            at += length + 12
        raw, stride = zlib.decompress(packed), self.width * self.each
        self.rows, row = [], bytearray(stride)
        for start in range(0, len(raw), stride + 1):
            row = unfiltered(raw[start], bytearray(raw[start + 1:start + 1 + stride]), row, self.each)
            self.rows.append(row)

    def colour(self, x, y):
        return tuple(self.rows[y][x * self.each:x * self.each + 3])

    def columns_of(self, colour, y):
        """Returns the columns in which a row has approximately this color."""
        row, near = self.rows[y], [range(one - 24, one + 25) for one in colour]
        reds = row[0::self.each]
        return [x for x in range(self.width) if reds[x] in near[0] and all(row[x * self.each + i] in near[i] for i in (1, 2))]


def unfiltered(kind, row, above, each):
    """Decodes a line of a PNG. Each byte is stored as a difference from neighbors: none, the one before, the one above, the
    mean of both, or the nearest of three."""
    if kind == 1:
        for channel in range(each):
            row[channel::each] = bytes(itertools.accumulate(row[channel::each], lambda before, one: before + one & 255))
    elif kind == 2:
        row = bytearray(one + up & 255 for one, up in zip(row, above))
    for i in range(len(row)) if kind > 2 else ():
        left, up, corner = (row[i - each], above[i], above[i - each]) if i >= each else (0, above[i], 0)
        if kind == 3:
            told = (left + up) // 2
        else:
            to_left, to_up, to_corner = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
            told = left if to_left <= to_up and to_left <= to_corner else up if to_up <= to_corner else corner
        row[i] = row[i] + told & 255
    return row


def longest_run(columns):
    """Returns the length of the longest run of consecutive columns."""
    best = run = 0
    before = None
    for x in columns:
        run = run + 1 if before is not None and x == before + 1 else 1
        best, before = max(best, run), x
    return best


def bars_of(picture, colour):
    """Returns (row below, width) of each filled bar of this color, from the top. Lines are thinner: no six of their rows
    share columns."""
    found, common, thick, wide = [], set(), 0, 0
    for y in range(picture.height):
        columns = picture.columns_of(colour, y)
        rest = common & set(columns) if thick else set(columns)
        if len(rest) >= 6:
            common, thick, wide = rest, thick + 1, max(wide, longest_run(columns))
            continue
        if thick >= 6:
            found.append((y, wide))
        common, thick, wide = set(), 0, 0
    return found


def curve_of(picture, colour, top):
    """Returns the height at each column of the widest line below `top` that continues from column to column."""
    first = {}
    for y in range(top, picture.height):
        for x in picture.columns_of(colour, y):
            first.setdefault(x, y)
    best, line = [], []
    for x in range(picture.width):
        if x in first and line and abs(first[x] - line[-1]) <= 2:
            line.append(first[x])
        else:
            line = [first[x]] if x in first else []
        best = max(best, line, key=len)
    return best


def expect_drawn(picture, colour):
    """Checks a picture of job()'s job: rank 3 came last seven times as often as the others, and the loss, the first curve,
    falls."""
    bars = bars_of(picture, colour)
    widths = [width for _, width in bars]
    expect(len(bars) == 4 and max(widths[:3]) - min(widths[:3]) <= 1 and 6 <= widths[3] / widths[0] <= 8, bars)
    curve = curve_of(picture, colour, bars[-1][0])
    expect(len(curve) > picture.width * 0.7, len(curve), picture.width)
    expect(all(after >= before - 1 for before, after in zip(curve, curve[1:])) and curve[-1] - curve[0] > 50, curve)
