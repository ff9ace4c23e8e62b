#!/usr/bin/env python3
"""How the C++ shim is found or made: carried by the wheel, or compiled once for all processes that need it at the same time,
cached, and replaced by the Python shim if that fails. The compilers here are scripts; one returns a file that a real compiler made before."""
import ctypes
import fcntl
import functools
import os
import pathlib
import subprocess
import tempfile

import ranks  # first: finds a Python with torch, and sets the path to shoal for children
import torch  # noqa: F401
import warm
from tap import Skip, call, expect, run_cases

SHOW = "import shoal.torch; print(shoal.torch.shim())"
SECONDS_MAX = 300
UMASK = 0o002  # of ordinary users on many systems


def shows(count, folder, **variables):
    """Runs processes that load a shim at the same time; returns (exit code, stdout, stderr) of each."""
    env = {**os.environ, "SHOAL_TORCH_CACHE": str(folder), "SHOAL_TORCH_SHIM": "auto", **variables}
    with tempfile.TemporaryDirectory() as place:
        program = pathlib.Path(place, "show.py")
        program.write_text(SHOW)
        running = [subprocess.Popen([python, program], env=env, umask=UMASK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                    stderr=subprocess.PIPE, text=True) for _ in range(count)]
        told = [process.communicate(timeout=SECONDS_MAX) for process in running]
    return [(process.returncode, out, err) for process, (out, err) in zip(running, told)]


def show(folder, **variables):
    return shows(1, folder, **variables)[0]


@functools.cache
def compiled_shim():
    """Returns the shim in the user's cache, made by a real compiler if necessary."""
    program = "from shoal.torch import _compile; _compile.load(); print(_compile._loaded.__file__)"
    code, out, err = call(python, "-c", program, timeout=ranks.COMPILED_S)
    if code:
        raise Skip("no C++ shim can be made here: " + err.strip().splitlines()[-1])
    return out.strip()


def script(folder, text):
    path = pathlib.Path(folder, "compiler")
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def several_ask_and_one_compiles():
    made = compiled_shim()
    with tempfile.TemporaryDirectory() as folder:
        compiler = script(folder, f'echo once >> {folder}/count; sleep 1; for last; do :; done; cp {made} "$last"; chmod 775 "$last"')
        cache = pathlib.Path(folder, "cache")
        told = shows(3, cache, CXX=compiler)
        expect(all((code, out) == (0, "c++\n") for code, out, _ in told), *told)
        expect(sum(err.count("compiling the back-end") for _, _, err in told) == 1, *told)
        expect(show(cache, CXX=compiler) == (0, "c++\n", ""), "what is kept is compiled again")
        expect(pathlib.Path(folder, "count").read_text() == "once\n")
        expect(cache.stat().st_mode & 0o77 == 0, "the cache is open to others")
        expect(all(path.stat().st_mode & 0o22 == 0 for path in cache.glob("*.so")), "others could write to the shim")


def without_a_compiler_the_other_shim_serves():
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = show(folder, PATH=folder, CXX="")
        expect((code, out) == (0, "python\n"), out, err)
        expect("no C++ compiler is installed" in err and "cannot share a group with another back-end" in err, err)
        code, out, err = show(folder, PATH=folder, CXX="", SHOAL_TORCH_SHIM="c++")
        expect(code == 1 and "no C++ compiler is installed" in err, code, out, err)


CARRIED = """
import pathlib, sys, torch
import shoal.torch
from shoal.torch import _compile, _shim_file
folder, release, content = sys.argv[1:]
_shim_file.CARRIED = pathlib.Path(folder)
name = _compile._name(release or _shim_file.release_of(torch.__version__))
_shim_file.CARRIED.joinpath(name).write_bytes(pathlib.Path(content).read_bytes())
print(shoal.torch.shim(), _compile._loaded and pathlib.Path(_compile._loaded.__file__).parent)
"""


def show_with_carried(content, compiler, release="", **variables):
    """Runs a process whose package carries a file as its shim, for this release of torch or for another one. Returns the
    name of the shim and the folder that it was loaded from, what went to stderr, and the two folders."""
    with tempfile.TemporaryDirectory() as folder:
        carried, cache = pathlib.Path(folder, "carried"), pathlib.Path(folder, "cache")
        carried.mkdir()
        env = {**os.environ, "SHOAL_TORCH_CACHE": str(cache), "SHOAL_TORCH_SHIM": "auto", "CXX": compiler, **variables}
        code, out, err = call(python, "-c", CARRIED, carried, release, content, env=env)
        expect(code == 0, out, err)
        is_cached = cache.exists()
    return out.split(), err, carried, cache, is_cached


def the_shim_of_the_wheel_needs_no_compiler():
    with tempfile.TemporaryDirectory() as nothing:
        shown, err, carried, _, is_cached = show_with_carried(compiled_shim(), "", PATH=nothing)
    expect(shown == ["c++", str(carried)] and not err and not is_cached, shown, err)


def a_shim_for_another_torch_is_left_alone():
    with tempfile.TemporaryDirectory() as nothing:
        shown, err, *_ = show_with_carried(compiled_shim(), "", release="1.2.3", PATH=nothing)
    expect(shown == ["python", "None"] and "no C++ compiler is installed" in err, shown, err)


def a_carried_shim_that_cannot_be_loaded_is_compiled():
    made = compiled_shim()
    with tempfile.TemporaryDirectory() as folder:
        broken = pathlib.Path(folder, "broken.so")
        broken.write_text("this is not a library")
        compiler = script(folder, f'for last; do :; done; cp {made} "$last"')
        shown, err, carried, cache, _ = show_with_carried(broken, compiler)
    expect(shown == ["c++", str(cache)] and f"shoal: {carried}/" in err and "cannot be loaded" in err, shown, err)


def where_it_does_not_compile_the_other_shim_serves():
    with tempfile.TemporaryDirectory() as folder:
        code, out, err = show(pathlib.Path(folder, "cache"), CXX=script(folder, "echo a planted error; exit 1"))
        expect((code, out) == (0, "python\n") and "does not compile" in err, code, out, err)
        (log,) = pathlib.Path(folder, "cache").glob("*.log")
        expect(str(log) in err and "a planted error" in log.read_text(), err)


def what_others_could_have_put_there_is_not_loaded():
    made = compiled_shim()
    with tempfile.TemporaryDirectory() as folder:
        cache = pathlib.Path(folder, "cache")
        cache.mkdir(mode=0o700)
        shim = cache / pathlib.Path(made).name
        shim.write_bytes(pathlib.Path(made).read_bytes())
        expect(show(cache, CXX="false")[:2] == (0, "c++\n"), "the copy is not taken")
        for path, mode in ((shim, 0o666), (cache, 0o777)):
            path.chmod(mode)
            code, out, err = show(cache, CXX="false")
            expect((code, out) == (0, "python\n") and str(path) in err and "others" in err, code, out, err)
            path.chmod(0o700)


NUMBER_IN_A_TEXT = r"""
#include <sstream>
extern "C" long length_of(long number)
{
    std::ostringstream text;
    text << number;
    return static_cast<long>(text.str().size());
}
"""


def the_standard_library_is_the_one_of_torch():
    """Also with a compiler that would link its own into the shim."""
    from shoal.torch import _compile
    try:
        command = _compile._command()
    except _compile.Unavailable as error:
        raise Skip(str(error))
    with tempfile.TemporaryDirectory() as folder:
        source, made = pathlib.Path(folder, "number.cpp"), pathlib.Path(folder, "made.so")
        source.write_text(NUMBER_IN_A_TEXT)
        command[command.index(str(_compile.MAIN))] = str(source)
        code, out, err = call(*command, "-static-libstdc++", "-o", made)
        expect(code == 0, out, err)
        expect(b"\0libstdc++.so.6\0" in made.read_bytes(), "it has a standard library of its own")
        expect(ctypes.CDLL(str(made)).length_of(ctypes.c_long(-12345)) == 6)


ASKED_AT_ONCE = """
import importlib.util, threading, time
import shoal.torch
begin, found, made, make = threading.Barrier(8), [], [], importlib.util.module_from_spec
def make_slowly(spec):
    made.append(spec.name)
    time.sleep(0.3)
    return make(spec)
importlib.util.module_from_spec = make_slowly
def ask():
    begin.wait(60)
    found.append(shoal.torch._shim(0)[1])
threads = [threading.Thread(target=ask) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
print(len(found), len(set(map(id, found))), made.count("shoal_torch"))
"""
LOCKED = """
from shoal.torch import _compile
_compile.LOCKED_S = 1
try:
    _compile.load()
except _compile.Unavailable as error:
    print(error)
"""


def threads_that_ask_at_once_get_one_module():
    compiled_shim()
    for shim, loads in (("c++", 1), ("python", 0)):
        code, out, err = call(python, "-c", ASKED_AT_ONCE, env={**os.environ, "SHOAL_TORCH_SHIM": shim})
        expect((code, out) == (0, f"8 1 {loads}\n"), shim, code, out, err)


def a_process_that_holds_the_lock_is_not_waited_for_in_vain():
    with tempfile.TemporaryDirectory() as folder, open(pathlib.Path(folder, "lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.chmod(folder, 0o700)
        code, out, err = call(python, "-c", LOCKED, env={**os.environ, "SHOAL_TORCH_CACHE": folder})
        expect(code == 0 and f"another process has held {folder}/lock for 1 s" in out, code, out, err)


if __name__ == "__main__":
    python = warm.start()
    run_cases([several_ask_and_one_compiles, without_a_compiler_the_other_shim_serves, the_shim_of_the_wheel_needs_no_compiler,
               a_shim_for_another_torch_is_left_alone, a_carried_shim_that_cannot_be_loaded_is_compiled,
               where_it_does_not_compile_the_other_shim_serves, what_others_could_have_put_there_is_not_loaded,
               the_standard_library_is_the_one_of_torch, threads_that_ask_at_once_get_one_module,
               a_process_that_holds_the_lock_is_not_waited_for_in_vain])
