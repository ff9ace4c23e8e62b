"""Processes of a job: tests whether one still runs, starts one that ends with its parent, finds free ports."""
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
# A slot is the port at which ranks meet and the 16 ports after it: Shoal's store listens on one of these. `shoal run` has the
# same slots (tools/run/run_spawn.c). They are below the ephemeral ports of the kernel, which therefore assigns none of them.
SLOT_PORTS = 17
SLOTS = range(20000, 32750, SLOT_PORTS)
_locks: List[socket.socket] = []  # they lock the slots of this process
_libc = ctypes.CDLL(None, use_errno=True)


def _kernel() -> str:
    """Identifies the context in which pids are unique: the booted kernel, the pid namespace, and the time namespace, which
    shifts start times."""
    words = []
    for read, path in ((pathlib.Path.read_text, "sys/kernel/random/boot_id"), (os.readlink, "self/ns/pid"), (os.readlink, "self/ns/time")):
        try:
            words.append(read(pathlib.Path("/proc", path)).strip())
        except OSError:  # an older kernel, or a sandbox without these files
            words.append("-")
    return " ".join(words)


def identity(pid: int) -> Optional[str]:
    """Returns a unique name of a process: no other has the same pid, start time and kernel. Returns None if it has ended."""
    try:
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else name_of(pid, int(fields[19]))


def name_of(pid: int, start: int) -> str:
    """Returns the unique name of the process of this kernel that has this pid and was started then, in ticks since boot."""
    return f"{_kernel()} {pid} {start}"


def is_alive(process: Optional[str]) -> Optional[bool]:
    """Returns whether the process that identity() named still runs. Returns None if this cannot be found out here: its pid
    belongs to another kernel or namespace, or /proc hides it."""
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
    """Sends a signal to the whole process group that the process leads. Does nothing if the whole group is gone."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def group_is_alive(group: int) -> bool:
    """Returns true if a process of the group runs, such as the program of a shell that has ended."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX" and int(fields[2]) == group:
            return True
    return False


def ending_text(code: int) -> str:
    """Describes a Popen.returncode."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


def exit_code(code: int) -> int:
    """Converts a Popen.returncode to a shell's exit code."""
    return code if code >= 0 else 128 - code


def shoal_command() -> str:
    """Returns the command `shoal`: the one that started us, else the one of this package, else the one on PATH."""
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
    """Returns the variables, with a PYTHONPATH that lets a Python process of ours find this package if it is not installed.
    An installed package needs none, and its folder on PYTHONPATH would let back-ports there hide modules of the standard
    library."""
    package = str(pathlib.Path(shoal.__file__).resolve().parents[1])
    installed = [*site.getsitepackages(), site.getusersitepackages()]
    paths = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
    if package in paths or package in (os.path.realpath(path) for path in installed):
        return dict(variables)
    return {**variables, "PYTHONPATH": os.pathsep.join([package, *paths])}


def python_module(module: str, *words: str) -> List[str]:
    return [sys.executable, "-m", module, *words]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def asks_this_machine(host: Optional[str]) -> bool:
    """Returns true if a request's Host header names this machine itself. A server on the loopback interface refuses all other
    requests: a foreign page could reach it by a name of its own that resolves to 127.0.0.1."""
    return bool(host) and re.sub(r":\d+$", "", host or "").lower() in ("localhost", "127.0.0.1", "[::1]")


def free_port() -> int:
    """Returns the first port of a free slot. Nobody else gets the slot from this function or from `shoal run` while this process
    runs: its ports may be used much later."""
    for port in random.sample(SLOTS, len(SLOTS)):
        lock = _slot_lock(port)
        if lock and all(_can_bind(each) for each in range(port, port + SLOT_PORTS)):
            _locks.append(lock)
            return port
        if lock:
            lock.close()
    raise OSError(f"no {SLOT_PORTS} free ports in a row from {SLOTS.start} to {SLOTS.stop - 1}")


def _slot_lock(port: int) -> Optional[socket.socket]:
    """Locks a slot by a name in the abstract Unix namespace, which has the scope of the ports. Returns None if it is locked."""
    lock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        lock.bind(f"\0shoal-run-port-{port}")
    except OSError:
        lock.close()
        return None
    return lock


def _can_bind(port: int) -> bool:
    """Returns true if a server without SO_REUSEADDR can use the port: connections of an ended job may still block it."""
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True
