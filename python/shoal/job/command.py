"""The command `shoal job`: parses arguments, calls the other modules, prints. It makes no decisions about jobs itself."""
from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import pathlib
import signal
import sys
import time
from typing import Any, Callable, Dict, NoReturn, Optional, Sequence

from shoal.job import engines, processes
from shoal.job.document import Job, JobError, as_data, reading
from shoal.job.document.folder import ENDED, Status, jobs_folder
from shoal.job.engines.shared import name_make

EXIT_COMPLETED, EXIT_FAILED, EXIT_USAGE, EXIT_STOPPED = 0, 1, 2, 3
EXIT_OF = {"Completed": EXIT_COMPLETED, "Failed": EXIT_FAILED, "Stopped": EXIT_STOPPED}

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} ({self.prog} --help explains)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def say(text: str) -> None:
    print(f"shoal job: {text}", file=sys.stderr, flush=True)


# ---- documents ----

def document_read(words: argparse.Namespace) -> Job:
    """Reads the document and applies the settings of the command line. Raises JobError with all mistakes."""
    job = reading.job_read(words.file)
    if not words.set and not getattr(words, "name", None):
        return job
    data = as_data(job)
    for setting in words.set or []:
        setting_apply(data, setting)
    if getattr(words, "name", None):
        data["name"] = words.name
    return reading.job_of(data)


def setting_apply(data: Dict[str, Any], setting: str) -> None:
    """Applies KEY=VALUE. The key may have dots; the value is JSON, or else text."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise JobError(f"--set takes KEY=VALUE, such as hyperparameters.lr=0.2, not {setting!r}")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    *above, last = key.split(".")
    place: Any = data
    for name in above:
        place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            raise JobError(f"--set {setting}: {name} holds nothing that could be set")
    place[last] = value


def check(words: argparse.Namespace) -> int:
    job = document_read(words)
    if words.format == "json":
        print(json.dumps(as_data(job), indent=1))
    else:
        hosts = "1 host" if job.instance_count == 1 else f"{job.instance_count} hosts"
        print(f"{words.file}: no mistakes: {job.entry_point} on {hosts}, engine {job.where.engine}")
    return 0


# ---- running ----

def run(words: argparse.Namespace) -> int:
    job = document_read(words)
    if words.write:
        return manifests_write(job, words.write)
    folder = engines.job_start(job, host_index=words.host_index)
    if words.detach:
        print_status(engines.job_status(folder), words.format) if words.format == "json" else print(folder.name)
        return 0
    say(f"{folder.name} runs; its files are in {folder.path}")
    signals = StopOnSignal(folder)
    status = engines.job_wait(folder, None if words.quiet else sys.stdout, sys.stderr)
    signals.end()
    if words.format == "json":
        print_status(status, "json")
    ending_say(status, folder)
    return EXIT_OF[status.status]


def manifests_write(job: Job, path: str) -> int:
    from shoal.job.engines import kubernetes
    if job.where.engine != "kubernetes":
        raise JobError(f'--write is for the engine "kubernetes", and this job\'s is "{job.where.engine}"')
    job.name = job.name or name_make(job)
    kubernetes.write(job, pathlib.Path(path))
    say(f"{path}: kubectl create -f {path} starts the job {job.name}")
    return 0


class StopOnSignal:
    """While we wait for a job, Ctrl-C and SIGTERM stop it. A second Ctrl-C ends us and leaves the job alone."""

    def __init__(self, folder: Any):
        self.folder, self.count = folder, 0
        self.before = {number: signal.signal(number, self.take) for number in (signal.SIGINT, signal.SIGTERM)}

    def take(self, *_: Any) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt
        say(f"stopping {self.folder.name}; press Ctrl-C again to leave without waiting for its end")
        engines.job_stop(self.folder)

    def end(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def ending_say(status: Status, folder: Any) -> None:
    for note in folder.notes():
        say(note)
    if status.status == "Failed":
        say(f"{status.name} failed: {status.failure_reason} (exit code {status.exit_code}; all output: {folder.logs})")
    elif status.model:
        say(f"the model: {status.model}")
    elif status.status == "Completed":
        say(f"{status.name} wrote no model: its script left nothing in the folder that SM_MODEL_DIR names")


# ---- status, logs, reports ----

def seconds_text(seconds: float) -> str:
    whole = int(seconds)
    return f"{seconds:.1f} s" if seconds < 60 else f"{whole // 60} min {whole % 60} s" if seconds < 3600 else \
        f"{whole // 3600} h {whole % 3600 // 60} min"


def print_status(status: Status, form: str, stall: Optional[str] = None) -> None:
    if form == "json":
        print(json.dumps(dataclasses.asdict(status), indent=1))
        return
    rows = {"name": status.name, "status": engines.status_text(status), "hosts": ", ".join(status.hosts), "engine": status.engine}
    if stall:
        rows["stands still"] = stall
    if status.engine_id:
        rows["id there"] = status.engine_id
    if status.machine:
        rows["runs on"] = f"{status.machine} (pid {status.pid})"
    if status.started:
        rows["trained for"] = seconds_text((status.ended or time.time()) - status.started)
    if status.attempt:
        rows["started again"] = f"{status.attempt} times"
    if status.status == "Failed":
        rows["failure"] = status.failure_reason or ""
        rows["exit code"] = str(status.exit_code)
    if status.model:
        rows["model"] = status.model
    for name, value in rows.items():
        print(f"{name:14}{value}")


def status(words: argparse.Namespace) -> int:
    from shoal.job.watching.report import stall_of
    folder = engines.folder_find(words.name)
    told = engines.job_status(folder)
    print_status(told, words.format, stall_of(folder, told))
    return EXIT_OF.get(told.status, 0)


def list_jobs(words: argparse.Namespace) -> int:
    jobs = engines.jobs_list()
    if words.format == "json":
        print(json.dumps([dataclasses.asdict(job) for job in jobs], indent=1))
        return 0
    if not jobs:
        say(f"no jobs in {jobs_folder()}")
    for job in jobs:
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.created))
        why = f": {job.failure_reason}" if job.status == "Unknown" else f": {job.waits_for}" if job.waits_for else ""
        print(f"{created}  {job.status:12}{len(job.hosts):3} host{'s' if len(job.hosts) != 1 else ' '}  {job.name}{why}")
    return 0


def logs(words: argparse.Namespace) -> int:
    folder = engines.folder_find(words.name)
    if words.follow:
        return EXIT_OF[engines.job_wait(folder, sys.stdout).status]
    engines.Follower(folder, sys.stdout).follow()
    return 0


def stop(words: argparse.Namespace) -> int:
    folder = engines.folder_find(words.name)
    told = engines.job_status(folder)
    if told.status in ENDED:
        say(f"{folder.name} has ended already: {told.status}")
        return 0
    engines.job_stop(folder)
    if words.wait:
        told = engines.job_wait(folder)
        for note in folder.notes():
            say(note)
        say(f"{folder.name}: {told.status}")
    return 0


# ---- what other modules do ----

def report(words: argparse.Namespace) -> int:
    from shoal.job.watching import report as reports
    folder = engines.folder_find(words.name)
    path = pathlib.Path(words.output or f"{folder.name}.html")
    try:
        reports.report_write(folder, path)
    except OSError as error:
        say(f"cannot write {path}: {error.strerror}")
        return EXIT_FAILED
    print(path)
    return 0


def watch(words: argparse.Namespace) -> int:
    from shoal.job.watching import watch as watching
    return watching.main(engines.folder_find(words.name), words.port) or 0


# ---- arguments ----

def parser_make() -> Parser:
    parser = Parser(prog="shoal job", add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)

    def command(name: str, does: Callable[[argparse.Namespace], int], about: str, *, is_named: bool = True, example: str = "") -> Parser:
        made = commands.add_parser(name, prog=f"shoal job {name}", description=about, epilog=example and f"Examples:\n{example}",
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
        made.set_defaults(does=does)
        if is_named:
            made.add_argument("name", metavar="NAME", help="the job")
        return made

    def has_format(made: Parser) -> None:
        made.add_argument("--format", choices=("text", "json"), default="text", help="json: for programs")

    def has_document(made: Parser) -> None:
        made.add_argument("file", metavar="FILE", help="the document: .json, .toml or .py")
        made.add_argument("--set", action="append", metavar="KEY=VALUE",
                          help="replace a field of the document, such as hyperparameters.lr=0.2; may be repeated")
        has_format(made)

    has_document(command("check", check, "Lists all mistakes of a document, with their places. Starts nothing.", is_named=False,
                         example="  shoal job check job.toml\n  shoal job check job.toml --format json     print the document with its defaults"))
    running = command("run", run, "Starts a job, shows the output of its workers, and waits until it ends. Ctrl-C stops the job.", is_named=False,
                      example="  shoal job run job.toml\n  shoal job run job.toml --name first --set instance_count=2\n"
                              "  name=$(shoal job run job.toml --detach) && shoal job logs $name --follow")
    has_document(running)
    running.add_argument("--name", help="the job's name (default: the document's, else made from the entry point and the time)")
    running.add_argument("--host-index", type=int, metavar="I", help='for the engine "hosts": the index of this host, from 0')
    running.add_argument("--write", metavar="YAML", help='for the engine "kubernetes": write the manifests and start nothing')
    running.add_argument("--detach", action="store_true", help="print the job's name and return at once")
    running.add_argument("--quiet", action="store_true", help="do not show the output of the workers")
    has_format(command("list", list_jobs, "Lists all jobs, the newest first.", is_named=False, example="  shoal job list"))
    has_format(command("status", status, "Prints the state of a job. The exit code is 1 if the job failed, 3 if it was stopped.",
                       example="  shoal job status first\n  shoal job status first --format json"))
    logging = command("logs", logs, "Prints what the workers of a job wrote, host after host; with --follow, also new lines as they come.",
                      example="  shoal job logs first\n  shoal job logs first --follow")
    logging.add_argument("-f", "--follow", action="store_true", help="print new lines until the job ends, with the job's exit code")
    stopping = command("stop", stop, "Asks a job to end. Its script gets SIGTERM, and has stop_grace seconds to end.",
                       example="  shoal job stop first --wait")
    stopping.add_argument("--wait", action="store_true", help="wait until the job has ended")
    reporting = command("report", report, "Writes one self-contained HTML page about a job.",
                        example="  shoal job report first -o first.html")
    reporting.add_argument("-o", "--output", metavar="FILE", help="the file to write (default NAME.html)")
    watching = command("watch", watch, "Shows a running job, in a browser on this machine and as a table in the terminal.",
                       example="  shoal job watch first")
    watching.add_argument("--port", type=int, default=0, help="port of the page (default: a free one)")
    return parser


def dispatch(argv: Sequence[str]) -> int:
    if argv[:1] == ["serve"]:  # it parses its own arguments
        from shoal.job.serving import serve
        return serve.main(argv[1:]) or 0
    if argv[:1] == ["doctor"]:  # `shoal doctor --data`
        from shoal.job.data import doctor
        return doctor.main(argv[1:])
    parser = parser_make()
    words = parser.parse_args(argv)
    if words.help or not words.command:  # the command in C prints the help
        os.execv(processes.shoal_command(), ["shoal", "job", *["--help"] * words.help])
    return words.does(words)


def main(argv: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a log may hold characters that the terminal's encoding lacks
            stream.reconfigure(errors="backslashreplace")
    try:
        return dispatch(list(argv))
    except JobError as error:
        for line in str(error).splitlines():
            say(line)
        return getattr(error, "exit_code", EXIT_USAGE)
    except ImportError as error:
        say(f"{argv[0]} needs the Python package {error.name}: pip install 'shoal[job]' installs it")
        return EXIT_FAILED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except OSError as error:
        say(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}; SHOAL_JOBS names another folder of jobs")
        return EXIT_FAILED
    except KeyboardInterrupt:
        return 130
