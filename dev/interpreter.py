"""The Python that virtual environments are made of and that tests run by."""
import os
import subprocess

OF_MACHINE = "/usr/bin/python3"


def interpreter():
    """The machine's own where it is of the version that `python3` is. Distributions compile theirs with profiles: importing torch takes
    it three quarters of what one takes that was compiled with the defaults."""
    if not os.access(OF_MACHINE, os.X_OK):
        return "python3"
    ask = "import sys; print(sys.version_info[:2])"
    versions = {subprocess.run([python, "-c", ask], capture_output=True, text=True).stdout for python in ("python3", OF_MACHINE)}
    return OF_MACHINE if len(versions) == 1 else "python3"
