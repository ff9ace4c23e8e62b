"""Jobs for tests: a temporary folder of jobs, documents, the command. SHOAL_COMMAND names the command."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "multi"))

from scripts import HAND_OVER  # noqa: E402
from tap import call, expect  # noqa: E402

TOP = pathlib.Path(__file__).resolve().parents[2]
SHOAL = os.path.abspath(os.environ.get("SHOAL_COMMAND", str(TOP / "build/shoal")))
RUN_S = 120  # on an idle machine a job of these tests takes a second or two
DATA_PARALLEL = {"smdistributed": {"dataparallel": {"enabled": True}}}


class Jobs:
    """A context manager with a folder for scripts and one for jobs. At the end it kills processes that still run. `python`,
    if given, runs the scripts instead of the job's interpreter."""

    def __init__(self, python=None):
        self.python = python

    def __enter__(self):
        self.root = pathlib.Path(tempfile.mkdtemp(prefix="shoal-job-"))
        self.jobs = self.root / "jobs"
        self.environment = {**os.environ, "SHOAL_JOBS": str(self.jobs), "SHOAL_PYTHON": sys.executable}
        return self

    def __exit__(self, *_):
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        shutil.rmtree(self.root, ignore_errors=True)

    def write(self, name, text):
        path = self.root / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        return path

    def document(self, script="", name="job", **fields):
        """Writes a document with this script; returns its path."""
        if self.python:
            self.write("script.py", script)
            script = HAND_OVER.format(python=self.python)
        self.write("train.py", script)
        path = self.root / f"{name}.json"
        data = {"name": name, "entry_point": "train.py", "source_dir": str(self.root / "source"), "stop_grace": 20, **fields}
        path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
        return path

    def call(self, *words, timeout=RUN_S, **environment):
        """Runs `shoal job` with these words; returns (exit code, stdout, stderr)."""
        return call(SHOAL, "job", *words, timeout=timeout, env={**self.environment, **environment}, cwd=self.root)

    def run(self, script="", *words, name="job", code=0, **fields):
        """Runs a job to its end; returns its status."""
        done = self.call("run", self.document(script, name, **fields), *words)
        expect(done[0] == code, f"exit code {done[0]}, not {code}", *done[1:], self.told(name))
        self.out, self.err = done[1:]
        return self.status(name)

    def start(self, script="", *words, name="job", **fields):
        """Starts a job and returns while it runs."""
        code, out, err = self.call("run", self.document(script, name, **fields), "--detach", *words)
        expect((code, out) == (0, f"{name}\n"), code, out, err, self.told(name))

    def folder(self, name="job"):
        return self.jobs / name

    def status(self, name="job"):
        """Returns the status in the form for programs."""
        code, out, err = self.call("status", name, "--format", "json")
        expect(out, code, err)
        return json.loads(out)

    def log(self, name="job", host="algo-1"):
        path = self.folder(name) / "logs" / f"{host}.log"
        return path.read_text() if path.exists() else ""

    def told(self, name="job"):
        """Returns everything about a job, for the report of a failed case."""
        paths = [self.folder(name) / word for word in ("status.json", "events.jsonl", "runner.log")]
        paths += sorted((self.folder(name) / "logs").glob("*"))
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths if path.exists())

    def wait_for(self, question, what, name="job"):
        end = time.monotonic() + RUN_S
        while not question():
            expect(time.monotonic() < end, f"not within {RUN_S} s: {what}", self.told(name))
            time.sleep(0.02)

    def wait_for_line(self, line, name="job", host="algo-1"):
        self.wait_for(lambda: line in self.log(name, host), f"{line!r} in the log of {host}", name)

    def wait_for_end(self, name="job"):
        self.wait_for(lambda: self.ended(name), "the end of the job", name)
        return self.status(name)

    def ended(self, name):
        return json.loads((self.folder(name) / "status.json").read_text())["status"] in ("Completed", "Failed", "Stopped")

    def processes(self, word=None):
        """Returns the processes of our jobs: all whose command line or environment contains our folder. `word` selects by
        command line."""
        found = []
        for entry in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                known = command + (entry / "environ").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if str(self.root) in known and int(entry.name) != os.getpid() and (word is None or word in command):
                found.append(int(entry.name))
        return found

    def wait_for_silence(self, name="job"):
        """Waits until no process of a job is left."""
        self.wait_for(lambda: not self.processes(), "the end of all processes of the job", name)


def expect_failed(jobs, said, exit_code, name="job"):
    """Expects the same error in the status, in the command's output and in the failure file."""
    status = jobs.status(name)
    expect(status["status"] == "Failed" and re.search(said, status["failure_reason"]), status, jobs.told(name))
    expect(status["exit_code"] == exit_code and status["ended"] and not status["model"], status)
    expect(len(status["failure_reason"]) <= 1024, status)
    code, out, err = jobs.call("status", name)
    expect(code == 1 and status["failure_reason"] in out, code, out, err)
    halves = [path for path in jobs.folder(name).rglob("*") if path.name == "model.tar.gz" or "unfinished" in path.name]
    expect(not halves, halves, jobs.told(name))
    expect("Traceback" not in (jobs.folder(name) / "runner.log").read_text(), jobs.told(name))
    jobs.wait_for_silence(name)


def where(**options):
    """Returns the engine "hosts" with this machine as all of the hosts."""
    return {"engine": "hosts", "options": {"address": "127.0.0.1", **options}}


class Machines:
    """`shoal job run` on several machines. of_machine(index) returns a machine's own variables."""

    def __init__(self, jobs, document, count, words=lambda index: ["--host-index", str(index)], of_machine=lambda index: {}):
        self.commands = [subprocess.Popen([SHOAL, "job", "run", document, *words(index)],
                                          env={**jobs.environment, **of_machine(index)}, stdout=subprocess.PIPE,
                                          stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
                         for index in range(count)]

    def wait(self):
        """Returns (exit code, stdout, stderr) of each."""
        outputs = [command.communicate(timeout=RUN_S) for command in self.commands]
        return [(command.returncode, *output) for command, output in zip(self.commands, outputs)]


def names_in(archive):
    """The names in an archive, sorted."""
    done = subprocess.run(["tar", "tzf", archive], capture_output=True, text=True, check=True)
    return sorted(done.stdout.split())


def content(archive, name):
    return subprocess.run(["tar", "xzOf", archive, name], capture_output=True, text=True, check=True).stdout
