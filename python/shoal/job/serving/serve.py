"""`shoal job serve NAME|model.tar.gz|FOLDER|URI`: an endpoint for a trained model, on this machine.

    model.tar.gz --> a folder of its own --> one process, or a supervisor and --workers processes that share the socket

serving.py handles the requests. `start` does the same for deploy(): it returns when the model is loaded, with the port in
use."""
from __future__ import annotations

import argparse
import contextlib
import errno
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import traceback
import types
import urllib.error
import urllib.request
import zlib
from typing import Any, Dict, Iterator, List, Optional, Sequence

from shoal.job import processes, serving
from shoal.job.data import channels
from shoal.job.data.fetching import local_errors
from shoal.job.data.storage import StorageError
from shoal.job.document import local_path
from shoal.job.document.folder import JobFolder
from shoal.job.serving import ServeError, tfserving

GRACE_S = 25  # the containers are killed 30 s after SIGTERM
START_TIMEOUT_S = 600.0
RESTARTS_MAX = 3  # of workers that end by themselves
RESTARTS_WITHIN_S = 300.0
POLL_S = 0.05
LOG_LINES = 20
EXIT_FAILED = 1
EXIT_NOT_LOADED = 3


# ---- the model's folder ----

def model_find(target: str) -> str:
    """Returns the path or URI of a model; for a job's name, that of its model."""
    if "://" in target or os.sep in target or target.endswith(".tar.gz") or os.path.exists(target):
        return target
    folder = JobFolder(target)
    if not folder.path.is_dir():
        raise ServeError(f"there is no job {target} below {folder.path.parent}, and no file of this name")
    if folder.model.exists():
        return str(folder.model)
    with contextlib.suppress(OSError, ValueError, TypeError):
        model = folder.status().model
        if model:
            return model
    raise ServeError(f"the job {target} has no model.tar.gz: `shoal job status {target}` tells how it ended")


@contextlib.contextmanager
def model_unpacked(target: str) -> Iterator[pathlib.Path]:
    """Yields the folder of a model: a folder itself, or an archive unpacked to a temporary folder."""
    place = model_find(target)
    path = local_path(place)
    if path is not None and path.is_dir():
        yield path.absolute()
        return
    if path is not None and not path.exists():
        raise ServeError(f"there is no {path}")
    with tempfile.TemporaryDirectory(prefix="shoal-serve-") as name:
        folder = pathlib.Path(name)
        if path is None:
            path = folder / "model.tar.gz"
            channels.file_bring(place, path)
        (folder / "model").mkdir()
        archive_unpack(path, folder / "model")
        yield folder / "model"


def archive_unpack(archive: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpacks plain files, folders, and links that stay inside. Raises ServeError for anything else."""
    try:
        with local_errors(folder), tarfile.open(archive) as tar:
            top = os.path.realpath(folder)
            for member in tar:
                _member_check(archive, member, top)
                member.mode |= 0o700 if member.isdir() else 0o600
                if hasattr(tarfile, "data_filter"):
                    tar.extract(member, folder, filter="data")
                else:
                    tar.extract(member, folder)
            while tar.fileobj and tar.fileobj.read(1 << 20):
                pass  # gzip's checksum comes last
    except (tarfile.TarError, zlib.error, EOFError, ValueError, StorageError) as error:
        raise ServeError(f"{archive} cannot be unpacked: {str(error).splitlines()[0].rstrip(':')}") from error


def _member_check(archive: pathlib.Path, member: tarfile.TarInfo, top: str) -> None:
    places = [os.path.join(top, member.name)]
    if member.issym():
        places.append(os.path.join(top, os.path.dirname(member.name), member.linkname))
    elif member.islnk():
        places.append(os.path.join(top, member.linkname))
    outside = any(os.path.commonpath([os.path.realpath(place), top]) != top for place in places)
    if outside or member.isdev():
        raise ServeError(f"{archive} holds {member.name}, which does not stay below the model's folder: pack it anew")


def code_put(model: pathlib.Path, entry_point: Optional[str], source_dir: Optional[str],
             folder: pathlib.Path) -> Optional[pathlib.Path]:
    """Copies the arguments' script to the folder. Returns its folder, or None if the model's own script is used."""
    if source_dir:
        source = local_path(source_dir)
        if source is None or not source.is_dir():
            raise ServeError(f"source_dir {source_dir} is not a folder of this machine")
        if not entry_point or not (source / entry_point).is_file():
            raise ServeError(f"there is no {entry_point} in source_dir {source_dir}: entry_point names a file there")
        shutil.copytree(source, folder / "code")
        return folder / "code"
    if entry_point and os.path.isfile(entry_point):
        (folder / "code").mkdir()
        if (model / "code").is_dir():
            shutil.copytree(model / "code", folder / "code", dirs_exist_ok=True)
        shutil.copy(entry_point, folder / "code")
        return folder / "code"
    return None


# ---- one process ----

def run_worker(listener: socket.socket, handler: serving.Handler, options: argparse.Namespace) -> int:
    """Loads the model and serves until SIGTERM. Returns the exit code."""
    handler.origin = origin_of(*listener.getsockname()[:2])
    handler.load()
    import uvicorn

    is_local = listener.getsockname()[0] in ("127.0.0.1", "::1")
    app = serving.application(handler, options.show_errors, options.max_bytes, is_local)
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=options.grace, lifespan="on")
    server = uvicorn.Server(config)
    ended = threading.Event()
    original = server.handle_exit

    def handle_exit(number: int, frame: Optional[types.FrameType]) -> None:
        """Waits no longer than the grace time for a prediction that does not end."""
        if not ended.is_set():
            ended.set()
            timer = threading.Timer(options.grace + 2, os._exit, [0])
            timer.daemon = True
            timer.start()
        original(number, frame)

    server.handle_exit = handle_exit  # type: ignore[method-assign]
    try:
        server.run(sockets=[listener])
    except (KeyboardInterrupt, SystemExit):  # uvicorn raises the signal again after it has answered all requests
        pass
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if server.started else EXIT_FAILED)  # a thread that still predicts must not delay the exit


# ---- several processes ----

class Supervisor:
    """Starts the workers, and restarts one that ends by itself. Ends all of them when asked to, when `parent` has ended, when a
    worker cannot load the model, and when workers end too often."""

    def __init__(self, command: List[str], listener: socket.socket, options: argparse.Namespace):
        self.command, self.listener, self.options = command, listener, options
        self.workers: Dict[int, "subprocess.Popen[bytes]"] = {}
        self.restarts: List[float] = []
        self.exit_code = 0
        self.kill_at: Optional[float] = None  # set when everything is to end

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        for _ in range(self.options.workers):
            self._start()
        while self.workers:
            for pid, worker in list(self.workers.items()):
                if worker.poll() is not None:
                    del self.workers[pid]
                    self._ended(pid, worker.returncode)
            self._look()
            time.sleep(POLL_S)
        return self.exit_code

    def _look(self) -> None:
        if self.options.parent and os.getppid() != self.options.parent:
            self._end()
        if self.kill_at is not None and time.monotonic() > self.kill_at:
            self._send(signal.SIGKILL)

    def _start(self) -> None:
        worker = subprocess.Popen(self.command, pass_fds=(self.listener.fileno(),), stdin=subprocess.DEVNULL,
                                  env=processes.python_environment(), preexec_fn=_end_with_parent)
        self.workers[worker.pid] = worker
        if self.kill_at is not None:
            worker.terminate()

    def _ended(self, pid: int, code: int) -> None:
        if self.kill_at is not None:
            return
        now = time.monotonic()
        self.restarts = [one for one in self.restarts if now - one < RESTARTS_WITHIN_S] + [now]
        if code == EXIT_NOT_LOADED:
            self._give_up(f"the model cannot be loaded (pid {pid}): the endpoint ends")
        elif len(self.restarts) > RESTARTS_MAX:
            self._give_up(f"a worker (pid {pid}) {_ending_text(code)}, the {len(self.restarts)}th within "
                          f"{RESTARTS_WITHIN_S:.0f} s: the endpoint ends")
        else:
            say(f"a worker (pid {pid}) {_ending_text(code)}: another takes its place")
            self._start()

    def _give_up(self, text: str) -> None:
        say(text)
        self.exit_code = EXIT_FAILED
        self._end()

    def _end(self, *_: Any) -> None:
        if self.kill_at is None:
            self.kill_at = time.monotonic() + self.options.grace + 4
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for worker in list(self.workers.values()):
            worker.send_signal(number)


def _end_with_parent() -> None:
    """In a new process: requests SIGTERM when the supervisor's only thread, which started it, has ended."""
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _ending_text(code: int) -> str:
    return f"ended with exit code {code}" if code >= 0 else f"was killed by signal {-code} ({signal.Signals(-code).name})"


# ---- the command ----

def say(text: str) -> None:
    print(f"shoal job serve: {text}", file=sys.stderr, flush=True)


def parser_make() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal job serve",
                                     description="An endpoint for a trained model: POST /invocations, GET /ping.")
    parser.add_argument("model", metavar="NAME|MODEL", help="a job's name, a model.tar.gz, a folder, or a URI")
    port = int(os.environ.get("SAGEMAKER_BIND_TO_PORT", "8080"))
    parser.add_argument("--port", type=int, default=port, help=f"0 takes a free one ({port})")
    parser.add_argument("--address", default="127.0.0.1", help="where to listen; 0.0.0.0 for all interfaces (127.0.0.1)")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with the model (1)")
    parser.add_argument("--entry-point", help="the script with model_fn and the others, in place of the model's own")
    parser.add_argument("--source-dir", help="the folder of the script")
    parser.add_argument("--grace", type=int, default=GRACE_S, help=f"seconds for running requests after SIGTERM ({GRACE_S})")
    parser.add_argument("--max-bytes", type=int, default=serving.BODY_BYTES_MAX, help="the largest body of a request")
    parser.add_argument("--show-errors", action="store_true", help="answers show tracebacks and paths of this machine")
    parser.add_argument("--socket", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--code", help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    return parser


def main(words: Sequence[str]) -> int:
    """Serves until SIGTERM or Ctrl-C. Returns the exit code."""
    options = parser_make().parse_args(list(words))
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGTERM, _end_at_once)
    try:
        return _serve(options)
    except (ServeError, StorageError) as error:
        say(str(error))
        return EXIT_FAILED if options.code is None else EXIT_NOT_LOADED
    except serving.FunctionError as error:
        traceback.print_exception(type(error.cause), error.cause, error.cause.__traceback__)
        _, told = serving.error_data(error, pathlib.Path(options.code or "."), True)
        say(f"{error.name} raised {told['error']['type']}: {error}")
        return EXIT_NOT_LOADED
    except OSError as error:
        say(f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
    except KeyboardInterrupt:
        return 130
    return EXIT_FAILED


def _end_at_once(*_: Any) -> None:
    """Ends at once while the model is unpacked or loaded: no client waits for an answer yet. Temporary folders are removed."""
    raise SystemExit(0)


def _serve(options: argparse.Namespace) -> int:
    if options.workers < 1:
        raise ServeError(f"--workers {options.workers}: at least 1")
    _packages_check()
    if options.code is not None:  # a worker of a supervisor
        model = pathlib.Path(options.model)
        handler = tfserving.handler_make(model, options.entry_point, pathlib.Path(options.code))
        return run_worker(socket.socket(fileno=options.socket), handler, options)
    listener = socket.socket(fileno=options.socket) if options.socket is not None else listen(options.address, options.port)
    with listener, model_unpacked(options.model) as model, tempfile.TemporaryDirectory(prefix="shoal-serve-") as name:
        code = code_put(model, options.entry_point, options.source_dir, pathlib.Path(name)) or model / "code"
        program = options.entry_point
        if program and not options.source_dir:  # it was copied into the script's folder
            program = os.path.basename(program)
        _requirements_tell(code)
        address, port = listener.getsockname()[:2]
        say(f"{url_of(address, port)}/invocations, once the model is loaded")
        command = [sys.executable, "-m", "shoal.job.serving.serve", str(model), "--socket", str(listener.fileno()), "--code", str(code),
                   "--grace", str(options.grace), "--max-bytes", str(options.max_bytes)]
        command += ["--entry-point", program] if program else []
        command += ["--show-errors"] if options.show_errors else []
        return Supervisor(command, listener, options).run()


def url_of(address: str, port: int) -> str:
    return f"http://{f'[{address}]' if ':' in address else address}:{port}"


def origin_of(address: str, port: int) -> str:
    """Returns the URL at which this machine reaches a listening socket."""
    return url_of({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address), port)


def _packages_check() -> None:
    for name in ("starlette", "uvicorn", "numpy"):
        try:
            __import__(name)
        except ImportError as error:
            raise ServeError(f"the endpoint needs {name}, which is not installed: pip install 'shoal[job]' numpy") from error


def _requirements_tell(code: pathlib.Path) -> None:
    if (code / "requirements.txt").is_file():
        say("the model has a requirements.txt: install it here when a package is missing; the endpoint installs nothing")


def listen(address: str, port: int) -> socket.socket:
    """Returns a listening socket. Raises ServeError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise ServeError(f"port {port} of {address} is in use: end the program that has it, or choose another with "
                             "--port") from error
        raise ServeError(f"cannot listen at {address}, port {port}: {getattr(error, 'strerror', None) or error}") from error
    return listener


# ---- from Python ----

class Endpoint:
    """A running endpoint. `stop` ends it; otherwise it ends with the process that started it."""

    def __init__(self, url: str, process: "subprocess.Popen[bytes]", log: Any):
        self.url, self.pid = url, process.pid
        self._process, self._log = process, log

    def stop(self, grace_s: float = GRACE_S) -> None:
        """Ends the endpoint. Running requests are answered; after the grace time the processes are killed."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(grace_s + 8)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._log.close()

    def __enter__(self) -> "Endpoint":
        return self

    def __exit__(self, *_: Any) -> None:
        self.stop()


def start(model_data: str, entry_point: Optional[str] = None, source_dir: Optional[str] = None, port: int = 0, workers: int = 1,
          environment: Optional[Dict[str, str]] = None, timeout_s: float = START_TIMEOUT_S) -> Endpoint:
    """Starts an endpoint at 127.0.0.1 and returns when its model is loaded. Raises ServeError with the last lines of the
    script."""
    listener = listen("127.0.0.1", port)
    log = tempfile.TemporaryFile(prefix="shoal-serve-")
    words = ["--socket", str(listener.fileno()), "--workers", str(workers), "--parent", str(os.getpid())]
    words += ["--entry-point", entry_point] if entry_point else []
    words += ["--source-dir", source_dir] if source_dir else []
    variables = processes.python_environment({**os.environ, **(environment or {})})
    with listener:
        process = subprocess.Popen([sys.executable, "-m", "shoal.job.serving.serve", model_data, *words],
                                   pass_fds=(listener.fileno(),), env=variables, stdin=subprocess.DEVNULL, stdout=log,
                                   stderr=log, start_new_session=True)
        endpoint = Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}", process, log)
    try:
        _wait_until_loaded(endpoint.url, process, timeout_s)
    except BaseException as error:
        told = _last_lines(log)
        endpoint.stop(2)
        if isinstance(error, ServeError):
            raise ServeError(f"{error}: {told}") from None
        raise
    return endpoint


def _wait_until_loaded(url: str, process: "subprocess.Popen[bytes]", timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if process.poll() is not None:
            raise ServeError("the endpoint has ended before the model was loaded")
        try:
            with urllib.request.urlopen(url + "/ping", timeout=1) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise ServeError(f"the model has not been loaded within {timeout_s:.0f} s")


def _last_lines(log: Any) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return "\n".join(lines[-LOG_LINES:]) or "it has written nothing"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
