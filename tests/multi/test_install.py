#!/usr/bin/env python3
"""Installs into an empty folder and builds the README's program against it, shared and static, as a user would."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parent.parent.parent
BUILD = pathlib.Path(os.environ["SHOAL_COMMAND"]).parent
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-install-"))
PREFIX = ROOT / "usr/local"


def program_of_readme():
    text = (TOP / "README.md").read_text()
    source = ROOT / "hello.c"
    source.write_text(re.search(r"```c\n(.*?)```", text, re.S).group(1))
    return source


def pkg_config(*words):
    found = list(PREFIX.rglob("shoal.pc"))
    expect(len(found) == 1, "shoal.pc is not installed once:", found)
    env = {**os.environ, "PKG_CONFIG_PATH": str(found[0].parent), "PKG_CONFIG_SYSROOT_DIR": str(ROOT)}
    code, out, err = call("pkg-config", *words, "shoal", env=env)
    expect(code == 0, out, err)
    return out.split()


def runs_on_two_workers(program, env=None):
    code, out, err = call(PREFIX / "bin/shoal", "run", "-n", "2", program, env=env)
    expect(code == 0, out, err)
    for rank in (0, 1):
        expect(f"rank {rank} of 2: the sum of all ranks is 1" in out, out, err)


def install_puts_everything_in_place():
    code, out, err = call("meson", "install", "-C", BUILD, "--destdir", ROOT, "--no-rebuild", timeout=120)
    expect(code == 0, out, err)
    for name in ("bin/shoal", "include/shoal/shoal.h"):
        expect((PREFIX / name).exists(), name, out)
    for name in ("libshoal.so", "libshoal.so.0", "libshoal.a"):
        expect(list(PREFIX.rglob(name)), name, out)


def library_directory():
    return next(PREFIX.rglob("libshoal.so")).parent


def program_builds_and_runs_against_the_shared_library():
    program = ROOT / "hello-shared"
    code, out, err = call("cc", program_of_readme(), *pkg_config("--cflags", "--libs"), "-o", program)
    expect(code == 0, out, err)
    runs_on_two_workers(program, {**os.environ, "LD_LIBRARY_PATH": str(library_directory())})


def program_builds_and_runs_against_the_static_library():
    program = ROOT / "hello-static"
    code, out, err = call("cc", program_of_readme(), *pkg_config("--cflags"), library_directory() / "libshoal.a", "-lpthread", "-ldl",
                          "-o", program)
    expect(code == 0, out, err)
    code, out, err = call("ldd", program)
    expect("libshoal" not in out, out)
    runs_on_two_workers(program, {**os.environ, "LD_LIBRARY_PATH": str(library_directory())})


def library_links_to_libc_only():
    code, out, err = call("readelf", "-d", library_directory() / "libshoal.so")
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", out))
    expect(needed <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, needed)


def header_compiles_alone_as_c11_and_cpp17():
    header = PREFIX / "include/shoal/shoal.h"
    code, out, err = call("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c", header)
    expect(code == 0, err)
    if not shutil.which("c++"):
        raise Skip("no C++ compiler for the second half")
    code, out, err = call("c++", "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++", header)
    expect(code == 0, err)


def missing_packages_are_listed_where_they_cannot_be_installed():
    bin = ROOT / "bin"
    bin.mkdir()
    for name, body in (("dpkg-query", "exit 1"), ("id", "echo 1000")):  # nothing is installed, and we are not root
        (bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin / name).chmod(0o755)
    code, out, err = call(TOP / "dev/deps.sh", "build", env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"})
    expect(code == 2 and "   meson\n" in err and "   gcc\n" in err, code, out, err)


try:
    run_cases([missing_packages_are_listed_where_they_cannot_be_installed, install_puts_everything_in_place, program_builds_and_runs_against_the_shared_library,
               program_builds_and_runs_against_the_static_library, library_links_to_libc_only,
               header_compiles_alone_as_c11_and_cpp17])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
