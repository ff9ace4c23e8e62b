"""Loads the C++ shim: the one that the wheel carries for this torch and this Python, or else one that is compiled here from
backend/ against the installed torch and kept in a cache."""
from __future__ import annotations

import atexit
import contextlib
import fcntl
import importlib.util
import os
import pathlib
import shutil
import stat
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time

import torch

import shoal
from shoal import _native

from . import _shim_file
from ._shim_file import FLAGS, MAIN, MODULE, TORCH_LIBRARIES

OLDEST_TORCH = (2, 4)


LOCKED_S = 900  # time to wait for another process that compiles; longer than COMPILED_S, at which it stops its compiler
COMPILED_S, LOOK_S = 600, 0.1

_loaded, _lock = None, threading.Lock()


class Unavailable(RuntimeError):
    """The C++ shim cannot be used here; the text gives the reason."""


def load():
    """Returns the compiled module, with the functions create and empty. Compiles it if neither the wheel nor the cache has it.
    Raises Unavailable. Any thread may call this."""
    global _loaded
    if not _lock.acquire(timeout=LOCKED_S):
        raise Unavailable(f"another thread of this process has been loading the C++ shim for {LOCKED_S} s")
    try:
        _loaded = _loaded or _load()
        return _loaded
    finally:
        _lock.release()


def _forget():
    """Resets the lock in a forked child, because a thread of the parent may hold it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget)


def _load():
    _native.load()  # the module then finds it loaded, wherever its file is
    module = _carried() or _compiled()
    atexit.register(module.finish)
    return module


def _carried():
    """Returns the module that the wheel carries for this torch and this Python, or None."""
    try:
        path = _shim_file.CARRIED / _name(_shim_file.release_of(torch.__version__))
    except OSError:  # the name depends on shoal.h: _cached() reports that it is missing
        return None
    if not path.exists():
        return None
    try:
        return _import(path)
    except ImportError as error:  # such as an older C++ library, or a torch that was built in another way
        print(f"shoal: {path} cannot be loaded ({error}), so the C++ shim is compiled here", file=sys.stderr)
        return None


def _compiled():
    path = _cached()
    try:
        return _import(path)
    except ImportError as error:
        raise Unavailable(f"{path} cannot be loaded ({error}); once it is deleted, it is compiled anew") from error


def _import(path: pathlib.Path):
    spec = importlib.util.spec_from_file_location(MODULE, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cache_folder() -> pathlib.Path:
    """The folder of compiled shims: $SHOAL_TORCH_CACHE, else `shoal` in the user's cache folder."""
    named = os.environ.get("SHOAL_TORCH_CACHE")
    if named:
        return pathlib.Path(named)
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "shoal"


def _cached() -> pathlib.Path:
    if _torch_version() < OLDEST_TORCH:
        raise Unavailable(f"torch {torch.__version__} is older than {'.'.join(map(str, OLDEST_TORCH))}, what the C++ shim needs")
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _expect_own(folder)
        compiled = folder / _name(torch.__version__)
        if not compiled.exists():
            _compile_once(_command(), compiled)
        _expect_own(compiled)
        return compiled
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        if isinstance(error, Unavailable):
            raise
        raise Unavailable(f"there is no folder for the compiled shim ({error}); set SHOAL_TORCH_CACHE to one") from error


def _expect_own(path: pathlib.Path) -> None:
    """Raises Unavailable if another user may have written the path: loaded code runs as this user."""
    status = path.stat()
    if status.st_uid not in (0, os.getuid()) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Unavailable(f"{path} belongs to, or can be written by, others than this user; SHOAL_TORCH_CACHE names another folder")


def _compile_once(command: list, compiled: pathlib.Path) -> None:
    """Compiles in one of several processes. The others wait for it and share its failure."""
    log, begin = compiled.with_suffix(".log"), time.time()
    with _locked(compiled.parent / "lock"):
        if log.exists() and log.stat().st_mtime >= begin:
            raise Unavailable(f"the C++ shim does not compile ({log} has what the compiler said)")
        if not compiled.exists():
            _compile(command, compiled, log)


def _torch_version():
    return tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])


def _name(version: str) -> str:
    """Returns the name of the file for this process; `version` is that of torch."""
    inputs = _shim_file.fingerprint(shoal.include_path() / "shoal/shoal.h", torch.version.git_version,
                                    torch.compiled_with_cxx11_abi(), sys.abiflags, bool(torch.version.hip))
    return _shim_file.name_of(version, inputs, sysconfig.get_config_var("EXT_SUFFIX"))


def _command() -> list:
    """The compiler's command without the name of the result."""
    compiler = next(filter(None, map(shutil.which, filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")))), None)
    if not compiler:
        raise Unavailable("no C++ compiler is installed (CXX, c++, g++, clang++)")
    python = pathlib.Path(sysconfig.get_path("include"))
    if not (python / "Python.h").exists():
        raise Unavailable(f"Python's headers are not in {python} (Debian: python3-dev)")
    top = pathlib.Path(torch.__file__).parent
    include = top / "include"
    folders = (include, include / "torch/csrc/api/include", python, shoal.include_path())
    return [compiler, *FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", *_same_pybind(), *(["-DSHOAL_TORCH_ROCM"] if torch.version.hip else []),
            *(f"-isystem{folder}" for folder in folders), str(MAIN), str(shoal.library_path()),
            f"-L{top / 'lib'}", *(f"-l{library}" for library in TORCH_LIBRARIES), *_standard_library()]


def _standard_library() -> list:
    """The path of the C++ library that torch runs with. If a compiler does not find the shared library, it silently links the
    static one. The shim then has a second copy, whose locale tables torch has not initialized, and the first number formatted
    into a text ends the process."""
    with open("/proc/self/maps") as file:
        paths = {line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/libstdc++.so" in line}
    return sorted(path for path in paths if os.path.exists(path))


def _same_pybind() -> list:
    """Older versions of pybind11 share types only between modules that name the same compiler and library."""
    names = ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    values = ((name, getattr(torch._C, f"_PYBIND11_{name}", None)) for name in names)
    return [f'-DPYBIND11_{name}="{value}"' for name, value in values if value]


def _took(file) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _locked(path: pathlib.Path):
    file, until = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), time.monotonic() + LOCKED_S
    try:
        while not _took(file):
            if time.monotonic() > until:
                raise Unavailable(f"another process has held {path} for {LOCKED_S} s: it compiles the C++ shim, or was stopped")
            time.sleep(LOOK_S)
        yield
    finally:
        os.close(file)


def _compile(command: list, compiled: pathlib.Path, log: pathlib.Path) -> None:
    print(f"shoal: compiling the back-end for torch {torch.__version__}, once; about a minute", end="", file=sys.stderr, flush=True)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(dir=compiled.parent) as folder:
        made = pathlib.Path(folder) / "made.so"
        try:
            result = subprocess.run([*command, "-o", str(made)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                    timeout=COMPILED_S)
        except subprocess.TimeoutExpired:
            log.write_text(" ".join(command) + f"\nnot done after {COMPILED_S} s\n")  # for the processes that wait for this one
            raise Unavailable(f"{command[0]} had not compiled the C++ shim after {COMPILED_S} s") from None
        print(f" ... {'failed' if result.returncode else 'done'} after {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        if result.returncode:
            log.write_text(" ".join(command) + "\n" + result.stdout)
            raise Unavailable(f"the C++ shim does not compile with {command[0]} ({log} has what it said)")
        made.chmod(0o700)  # independent of the user's umask: see _expect_own
        os.replace(made, compiled)
