#!/usr/bin/env python3
"""What libshoal_tensorflow.so says where it finds no TensorFlow, or one that lacks functions. Needs no TensorFlow."""
import os
import pathlib
import sys

from tap import call, expect, run_cases

LIBRARY = pathlib.Path(os.environ["SHOAL_LIBRARY"])
LOAD = """
import ctypes, sys
for path in sys.argv[1:]:
    library = ctypes.CDLL(path)
library.shoal_tensorflow_problem.restype = ctypes.c_char_p
print(library.shoal_tensorflow_problem().decode())
"""


def problem(*before):
    """What the library says after these were loaded."""
    code, out, err = call(sys.executable, "-c", LOAD, *before, LIBRARY, LIBRARY.with_name("libshoal_tensorflow.so"))
    expect(code == 0, code, out, err)
    return out.strip()


def without_tensorflow_it_says_so():
    told = problem()
    expect(told == "libtensorflow_framework.so.2 is not loaded in this process: import tensorflow first", told)


def a_function_that_is_missing_is_named():
    told = problem(os.environ["SHOAL_OLD_FRAMEWORK"])
    expect(told == "libtensorflow_framework.so.2 has no function TF_DeleteStatus: this TensorFlow is too old for these "
           "operations, or too new", told)


def it_needs_no_tensorflow_to_be_linked():
    code, out, err = call("readelf", "--dynamic", LIBRARY.with_name("libshoal_tensorflow.so"))
    needed = [line.split("[")[1].rstrip("]") for line in out.splitlines() if "(NEEDED)" in line]
    foreign = [one for one in needed if "tensorflow" in one or "stdc++" in one]
    expect(code == 0 and "libshoal.so.0" in needed and not foreign, needed, err)


run_cases([without_tensorflow_it_says_so, a_function_that_is_missing_is_named, it_needs_no_tensorflow_to_be_linked])
