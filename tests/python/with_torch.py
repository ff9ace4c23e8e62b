#!/usr/bin/env python3
"""with_torch.py [--in NAME] PROGRAM [ARGUMENT ...]: runs a test program with the interpreter that has PyTorch, that of build/torch
or of build/NAME. Without one it says why, which counts as skipped."""
import os
import pathlib
import subprocess
import sys

NAME = "torch"
if sys.argv[1] == "--in":
    NAME = sys.argv[2]
    del sys.argv[1:3]
INTERPRETER = pathlib.Path(__file__).resolve().parents[2] / f"build/{NAME}/bin/python3"


def skip(reason):
    print(f"1..0 # SKIP {reason}")
    sys.exit(0)


if not INTERPRETER.exists():
    skip(f"there is no {INTERPRETER}: `make test-all` makes it")
# Found, not imported: that takes seconds, and a PyTorch that is there and cannot be imported is a failure.
found = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"
if subprocess.run([INTERPRETER, "-c", found]).returncode:
    skip(f"{INTERPRETER} has no PyTorch")
os.execv(INTERPRETER, [str(INTERPRETER), *sys.argv[1:]])
