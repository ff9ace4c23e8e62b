"""Processes of a job: whether one is still there, how one is started so that it ends with its parent, which port is free."""
from __future__ import annotations

import ctypes
import os
import pathlib
import random
import re
import shutil
import signal
import site
import socket
import sys
from typing import Dict, List, Mapping, Optional

import shoal

PR_SET_PDEATHSIG = 1
# Below the ports that the kernel gives to sockets that ask for none, so that none of these takes a port between look and use.
PORTS = range(20000, 32000)
PORTS_AFTER = 17  # Shoal's store listens at one of the 16 ports after the one where ranks meet
_libc = ctypes.CDLL(None, use_errno=True)


def _kernel() -> str:
    """What pids are counted by: the kernel since its start, the pid namespace, and the time namespace, which moves start times."""
    words = []
    for read, path in ((pathlib.Path.read_text, "sys/kernel/random/boot_id"), (os.readlink, "self/ns/pid"), (os.readlink, "self/ns/time")):
        try:
            words.append(read(pathlib.Path("/proc", path)).strip())
        except OSError:  # an older kernel, or a sandbox without these files
            words.append("-")
    return " ".join(words)


def identity(pid: int) -> Optional[str]:
    """Names a process for good: no other has the same pid, start time and kernel. None for one that has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else f"{_kernel()} {pid} {fields[19]}"


def is_alive(process: Optional[str]) -> Optional[bool]:
    """Returns whether the process that identity() named still runs; None if nobody here can tell: its pid is counted elsewhere, or
    /proc hides it."""
    kernel, pid, _ = process.rsplit(" ", 2) if process else ("", "", "")
    if kernel != _kernel():
        return None
    if identity(int(pid)) == process or os.path.exists(f"/proc/{pid}"):
        return identity(int(pid)) == process
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return None


def end_with_parent() -> None:
    """For preexec_fn: the process gets SIGTERM when the thread that started it is gone."""
    _libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def group_signal(pid: int, number: int) -> None:
    """To the whole process group that the process leads; nothing when all of it is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def group_is_alive(group: int) -> bool:
    """Whether a process of the group runs, as the program behind a shell that has ended."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[2]) == group:
            return True
    return False


def ending_text(code: int) -> str:
    """What Popen.returncode says."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_code(code: int) -> int:
    """Popen.returncode as a shell says it."""
    return code if code >= 0 else 128 - code


def shoal_command() -> str:
    """The command `shoal`: the one that started us, else the one of this package, else the one on PATH."""
    named = os.environ.get("SHOAL_COMMAND")
    if named:
        return named
    try:
        return str(shoal.command_path())
    except FileNotFoundError:
        found = shutil.which("shoal")
        if found:
            return found
        raise


def python_environment(variables: Mapping[str, str] = os.environ) -> Dict[str, str]:
    """The variables, with a PYTHONPATH by which a Python of ours finds this package if it is not installed. An installed package needs
    none: back-ports in its folder would hide modules of the standard library."""
    package = str(pathlib.Path(shoal.__file__).resolve().parents[1])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    if package in paths or package in (os.path.realpath(path) for path in installed):
        return dict(variables)
    return {**variables, "PYTHONPATH": os.pathsep.join([package, *paths])}


def python_module(module: str, *words: str) -> List[str]:
    return [sys.executable, "-m", module, *words]


def is_free(port: int, address: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True


def asks_this_machine(host: Optional[str]) -> bool:
    """Returns true if a request's Host header names this machine itself. A server of the loopback refuses all others: a page from
    elsewhere could ask it through a name of its own that resolves to 127.0.0.1."""
    return bool(host) and re.sub(r":\d+$", "", host or "").lower() in ("localhost", "127.0.0.1", "[::1]")


def free_port() -> int:
    """A port that nobody listens at, and nor at those after it which Shoal may take."""
    for _ in range(200):
        port = random.choice(PORTS)
        if all(is_free(port + further, "") for further in range(PORTS_AFTER)):
            return port
    raise OSError(f"no free port among {PORTS.start} to {PORTS.stop}")
