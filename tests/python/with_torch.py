#!/usr/bin/env python3
"""with_torch.py [--in NAME] PROGRAM [ARGUMENT ...]: runs a test program with the interpreter that has PyTorch, that of
build/torch or of build/NAME. If there is none, prints the reason as a skipped plan."""
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
# Finds it without importing it: importing takes seconds, and an installed PyTorch that fails to import is a failure, not a
# skip.
found = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('torch'))"
if subprocess.run([INTERPRETER, "-c", found]).returncode:
    skip(f"{INTERPRETER} has no PyTorch")
os.execv(INTERPRETER, [str(INTERPRETER), *sys.argv[1:]])
