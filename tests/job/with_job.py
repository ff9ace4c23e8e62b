#!/usr/bin/env python3
"""with_job.py PROGRAM [ARGUMENT ...]: runs a test program with the interpreter that has the packages of training jobs. If
there is none, prints the reason as a skipped plan."""
import os
import pathlib
import subprocess
import sys

INTERPRETER = pathlib.Path(__file__).resolve().parents[2] / "build/job/bin/python3"


def skip(reason):
    print(f"1..0 # SKIP {reason}")
    sys.exit(0)


if not INTERPRETER.exists():
    skip(f"there is no {INTERPRETER}: `make test-all` makes it")
# Finds them without importing: an installed package that fails to import is a failure, not a skip.
found = "import importlib.util, sys; sys.exit(not all(importlib.util.find_spec(name) for name in ('boto3', 'moto', 'uvicorn')))"
if subprocess.run([INTERPRETER, "-c", found]).returncode:
    skip(f"{INTERPRETER} lacks packages of dev/venv/job.txt")
os.execv(INTERPRETER, [str(INTERPRETER), *sys.argv[1:]])
