#!/usr/bin/env python3
"""Records the terminal of docs/pictures/killed-{light,dark}.svg: four workers train, `shoal top` looks at them, one is killed, and
the others name it. Everything is run when this is called, and each line appears in the picture when it came.

  dev/recording.py            records and writes both pictures
  dev/recording.py --show     prints the lines with their times, and writes nothing

It needs a build (`make build`) and build/torch (`make build/torch/made`)."""
import html
import json
import os
import pathlib
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time

TOP = pathlib.Path(__file__).resolve().parent.parent
SHOAL, PYTHON = TOP / "build/shoal", TOP / "build/torch/bin/python3"
COLUMNS, VICTIM, PATIENCE_S = 100, 2, 120
PACE_S = 1.5  # a reader's time for a command, before what it prints
TRAIN = """
import sys
import time
import torch
import torch.distributed as dist
import shoal.torch
torch.set_num_threads(1)
dist.init_process_group("shoal")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.randn(64, 512)
for step in range(100000):
    loss = (model(data) - data).square().mean()
    optimizer.zero_grad()
    try:
        loss.backward()
    except dist.DistBackendError as error:
        sys.exit(f"training ends at step {step}")
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
    time.sleep(0.02)
"""
COLORS = {"light": {"back": "#f6f8fa", "text": "#1f2328", "command": "#0969da", "cause": "#cf222e"},
          "dark": {"back": "#151b23", "text": "#f0f6fc", "command": "#4493f8", "cause": "#ff7b72"}}


class Recording:
    """Lines with the second at which each came."""

    def __init__(self):
        self.lines, self.began = [], time.monotonic()

    def add(self, text, kind="text"):
        now = time.monotonic() - self.began
        self.lines += [(now, line, kind) for line in textwrap.wrap(text, COLUMNS, subsequent_indent="     ", drop_whitespace=False) or [""]]

    def command(self, text):
        self.add(f"$ {text}", "command")
        time.sleep(PACE_S)


def environment():
    return {**os.environ, "PYTHONPATH": str(TOP / "python"), "SHOAL_LIBRARY": str(TOP / "build/libshoal.so"), "SHOAL_LOG": "warn"}


def lines_of(process):
    """A queue that gets each line of a process as it comes, and None at the end."""
    found = queue.Queue()

    def read():
        for line in process.stdout:
            found.put(line.rstrip("\n"))
        found.put(None)
    threading.Thread(target=read, daemon=True).start()
    return found


def take(found, recording, is_enough, until):
    """Records lines until one is enough. Raises TimeoutError."""
    while time.monotonic() < until:
        try:
            line = found.get(timeout=0.05)
        except queue.Empty:
            continue
        if line is None:
            return
        if is_wanted(line):
            recording.add(line, "cause" if "killed by signal" in line and "rank" in line else "text")
        if is_enough(line):
            return
    raise TimeoutError("the job has not printed what was waited for")


def is_wanted(line):
    return not re.search(r"share \d+ cores|UserWarning|warnings.warn|compiling the back-end|flight recorder|had printed nothing", line)


def narrowed(line):
    """A line of the table as it is on a narrow terminal, where a rank has two lines."""
    return [line[:77].rstrip(), " " * 8 + line[99:]] if line.startswith("  ") else [line]


def pid_of(rank, job):
    look = json.loads(subprocess.run([SHOAL, "top", "--once", "--format", "json", str(job)], capture_output=True, text=True, check=True).stdout)
    return next(process["pid"] for process in look["processes"] if process["world_rank"] == rank)


def record():
    recording = Recording()
    recording.command("shoal run -n 4 python3 train.py &")
    job = subprocess.Popen([SHOAL, "run", "-n", "4", PYTHON, "-c", TRAIN], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env=environment(), stdin=subprocess.DEVNULL)
    found, until = lines_of(job), time.monotonic() + PATIENCE_S
    take(found, recording, lambda line: "step 60" in line, until)
    recording.command("shoal top")
    look = subprocess.run([SHOAL, "top", "--once", str(job.pid)], capture_output=True, text=True, check=True).stdout
    for line in (part for line in look.splitlines() for part in narrowed(line)):
        recording.add(line)
    pid = pid_of(VICTIM, job.pid)
    time.sleep(PACE_S)
    while not found.empty():
        found.get()
    recording.command(f"kill -9 {pid}    # rank {VICTIM}")
    os.kill(pid, 9)
    take(found, recording, lambda line: line is None, until)
    job.wait()
    return [(at, text, kind) for at, text, kind in shortened(recording.lines)]


def shortened(lines):
    """Nobody wants to wait for PyTorch's import: gaps are cut to two seconds, except after the kill, which is what is shown."""
    gone, before, is_after, made = 0.0, 0.0, False, []
    for at, text, kind in lines:
        gone += 0 if is_after else max(at - before - 2, 0)
        made.append((at - gone, text, kind))
        before, is_after = at, is_after or text.startswith("$ kill")
    return made


def svg(lines, scheme):
    """A picture in which each line appears at its time. It needs no script, and its end is what stays."""
    color, step = COLORS[scheme], 19
    height = 24 + step * len(lines)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {COLUMNS * 8 + 40} {height}" font-family="ui-monospace, Menlo, monospace" font-size="13">',
           "<title>A worker is killed; all others name it within two seconds</title>",
           "<style>text { white-space: pre; animation: show 1ms linear both } @keyframes show { from { opacity: 0 } to { opacity: 1 } } "
           "@media (prefers-reduced-motion) { text { animation: none } }</style>",
           f'<rect width="100%" height="100%" rx="8" fill="{color["back"]}"/>']
    for number, (at, text, kind) in enumerate(lines, 1):
        weight = ' font-weight="bold"' if kind != "text" else ""
        out.append(f'<text x="20" y="{8 + step * number}" fill="{color[kind]}"{weight} style="animation-delay: {at:.2f}s">{html.escape(text)}</text>')
    return "\n".join([*out, "</svg>", ""])


def main():
    if sys.argv[1:] not in ([], ["--show"]):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    lines = record()
    for at, text, _ in lines if sys.argv[1:] else ():
        print(f"{at:6.2f}  {text}")
    for scheme in () if sys.argv[1:] else COLORS:
        (TOP / f"docs/pictures/killed-{scheme}.svg").write_text(svg(lines, scheme))
    return 0


if __name__ == "__main__":
    sys.exit(main())
