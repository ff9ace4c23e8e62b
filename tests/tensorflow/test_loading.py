#!/usr/bin/env python3
"""Messages of libshoal_tensorflow.so if TensorFlow is not loaded or lacks functions. Needs no TensorFlow."""
import os
import pathlib
import shutil
import sys
import tempfile

from tap import Skip, call, expect, run_cases

LIBRARY = pathlib.Path(os.environ["SHOAL_LIBRARY"])
OPERATIONS = pathlib.Path(__file__).resolve().parents[2] / "python/shoal/tensorflow/operations"
LOAD = """
import ctypes, sys
for path in sys.argv[1:]:
    library = ctypes.CDLL(path)
library.shoal_tensorflow_problem.restype = ctypes.c_char_p
print(library.shoal_tensorflow_problem().decode())
"""


def problem(*before):
    """Returns the library's message after these libraries were loaded."""
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


# Checks with a C++ compiler that its std::function has the layout of struct done, as done.c assumes.
FUNCTIONS = r"""
#include <cstdio>
#include <functional>
#include <memory>
extern "C" {
#include "done.h"
}
#ifndef __GLIBCXX__
int main() { puts("no libstdc++"); }
#else
static int called;
static_assert(sizeof(std::function<void()>) == sizeof(struct done), "the layout");

static bool is_kept(std::function<void()> *original) {
    struct done copy;
    if (!done_copy(&copy, (const TF_AsyncOpKernelDoneCallback *)original))
        return false;
    delete original;
    const int before = called;
    done_run(&copy);
    return called == before + 1;
}

int main() {
    auto owned = std::make_shared<int>(1);
    char much[200] = {1};
    bool is_right = is_kept(new std::function<void()>([] { called++; }));
    is_right &= is_kept(new std::function<void()>([owned] { called += *owned; }));
    is_right &= is_kept(new std::function<void()>([owned, much] { called += much[0] * *owned; }));
    puts(is_right && owned.use_count() == 1 ? "kept" : "not kept");
}
#endif
"""


def functions_of_a_cpp_compiler_are_copied_run_and_freed():
    cpp, c = shutil.which("c++"), shutil.which("cc")
    if not cpp or not c:
        raise Skip("there is no C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        program, done = pathlib.Path(folder, "functions.cpp"), pathlib.Path(folder, "done.o")
        program.write_text(FUNCTIONS)
        for command in ((c, "-D_GNU_SOURCE", "-c", OPERATIONS / "done.c", "-o", done),
                        (cpp, "-std=c++17", "-I", OPERATIONS, program, done, "-ldl", "-o", program.with_suffix(""))):
            code, out, err = call(*command)
            expect(code == 0, command, out, err)
        code, out, err = call(program.with_suffix(""))
        if out.strip() == "no libstdc++":
            raise Skip("this compiler has another C++ library")
        expect(code == 0 and out.strip() == "kept", code, out, err)


run_cases([functions_of_a_cpp_compiler_are_copied_run_and_freed, without_tensorflow_it_says_so, a_function_that_is_missing_is_named, it_needs_no_tensorflow_to_be_linked])
