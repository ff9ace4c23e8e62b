#!/usr/bin/env python3
"""Prints the files of the package that a wheel holds as they are, a line each, for meson: all of python/shoal but what becomes a library."""
import pathlib

HERE = pathlib.Path(__file__).resolve().parent
SUFFIXES = (".py", ".css", ".h", ".cpp")
COMPILED = HERE / "shoal/tensorflow/operations"  # becomes libshoal_tensorflow.so

for path in sorted((HERE / "shoal").rglob("*")):
    if path.suffix in SUFFIXES and COMPILED not in path.parents:
        print(path.relative_to(HERE).as_posix())
