"""The C++ shim as a file: what it is compiled from, with which flags, and its name. A wheel carries shims that dev/wheel_shims.py
compiled in advance; _compile.py compiles others on the user's machine. This module needs neither torch nor libshoal."""
from __future__ import annotations

import hashlib
import pathlib

MODULE = "shoal_torch"
FOLDER = pathlib.Path(__file__).parent
SOURCES = FOLDER / "backend"
MAIN = SOURCES / "module.cpp"  # includes the other files
CARRIED = FOLDER / "compiled"  # the shims of a wheel
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")
FLAGS = ("-shared", "-fPIC", "-O2", "-std=c++20", f"-DTORCH_EXTENSION_NAME={MODULE}")


def fingerprint(header: pathlib.Path, git_version: str, has_new_strings: bool, abi_flags: str, is_rocm: bool) -> str:
    """A hash of all inputs of the compilation that the file's name does not contain. `header` is shoal.h. The others describe
    torch (its commit, whether it uses the C++11 strings of libstdc++, whether it is for AMD's GPUs) and Python (sys.abiflags)."""
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.[ch]*")), header, FOLDER / "_compile.py", pathlib.Path(__file__)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    digest.update(f"{git_version} {has_new_strings} {abi_flags} {is_rocm}".encode())
    return digest.hexdigest()[:16]


def name_of(torch_version: str, print_of_inputs: str, suffix: str) -> str:
    """The file's name. `suffix` is that of Python's extension modules (EXT_SUFFIX)."""
    return f"{MODULE}-{torch_version}-{print_of_inputs}{suffix}"


def release_of(torch_version: str) -> str:
    """The version without its local part: the releases 2.13.0+cpu and 2.13.0+cu130 have the same headers."""
    return torch_version.partition("+")[0]
