"""The Python for virtual environments and tests."""
import os
import pathlib
import shutil
import subprocess

OF_MACHINE = "/usr/bin/python3"


def interpreter():
    """Returns the machine's own Python if it has the version of `python3`. Distributions compile theirs with profiles:
    importing torch takes three quarters of the time of a Python compiled with the defaults."""
    if not os.access(OF_MACHINE, os.X_OK):
        return "python3"
    ask = "import sys; print(sys.version_info[:2])"
    versions = {subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout for python in ("python3", OF_MACHINE)}
    return OF_MACHINE if len(versions) == 1 else "python3"


def find_python(version):
    """Returns an interpreter of that version that runs, or None. One on PATH may be pyenv's stand-in for a version in
    another folder."""
    candidates = [shutil.which(f"python{version}"), *sorted(pathlib.Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"))]
    return next((one for one in filter(None, candidates) if not subprocess.run([one, "-c", ""], capture_output=True).returncode), None)
