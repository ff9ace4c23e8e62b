#!/usr/bin/env python3
"""with_tensorflow.py PROGRAM [ARGUMENT ...]: runs a test program with the interpreter that has TensorFlow. If there is
none, prints the reason as a skipped plan."""
import os
import pathlib
import subprocess
import sys

INTERPRETER = pathlib.Path(__file__).resolve().parents[2] / "build/tensorflow/bin/python3"


def skip(reason):
    print(f"1..0 # SKIP {reason}")
    sys.exit(0)


if not INTERPRETER.exists():
    skip(f"there is no {INTERPRETER}: `make test-all` makes it")
# Finds it without importing it: importing takes seconds, and an installed TensorFlow that fails to import is a failure, not
# a skip.
found = "import importlib.util, sys; sys.exit(not importlib.util.find_spec('tensorflow'))"
if subprocess.run([INTERPRETER, "-c", found]).returncode:
    skip(f"{INTERPRETER} has no TensorFlow")
os.environ.update(TF_CPP_MIN_LOG_LEVEL="2", CUDA_VISIBLE_DEVICES="", TF_ENABLE_ONEDNN_OPTS="0")
os.execv(INTERPRETER, [str(INTERPRETER), *sys.argv[1:]])
