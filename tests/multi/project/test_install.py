#!/usr/bin/env python3
"""Installs into an empty folder and builds the README's program against it, shared and static, as a user would."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[3]
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
    # As on a machine without other .pc files: the library links to libc only.
    env = {**os.environ, "PKG_CONFIG_LIBDIR": str(found[0].parent), "PKG_CONFIG_PATH": "", "PKG_CONFIG_SYSROOT_DIR": str(ROOT)}
    code, out, err = call("pkg-config", *words, "shoal", env=env)
    expect(code == 0, out, err)
    return out.split()


def plain_environment():
    """Returns an environment that does not help the loader, because the installed command must find its library by itself."""
    return {name: value for name, value in os.environ.items() if name not in ("LD_LIBRARY_PATH", "LD_PRELOAD", "LD_RUN_PATH")}


def runs_on_two_workers(program, env=None):
    code, out, err = call(PREFIX / "bin/shoal", "run", "-n", "2", program, env=env or plain_environment())
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
    code, out, err = call("cc", program_of_readme(), *pkg_config("--cflags"), library_directory() / "libshoal.a",
                          "-lpthread", "-ldl", "-o", program)
    expect(code == 0, out, err)
    code, out, err = call("ldd", program)
    expect("libshoal" not in out, out)
    runs_on_two_workers(program)


def installed_shoal(*words):
    code, out, err = call(PREFIX / "bin/shoal", *words, env=plain_environment(), cwd="/")
    expect(code == 0, words, out, err)
    return out


def commands():
    return re.findall(r"^\s+shoal ([a-z]+(?: [a-z]+)?)\s{2,}", installed_shoal("--help"), re.M)


def groff(page):
    """Returns a manual page as text. Follows pages that only refer to another."""
    if not shutil.which("groff"):
        raise Skip("groff is not installed")
    code, out, err = call("groff", "-man", "-ww", "-Tascii", "-P-cbu", "-I", PREFIX / "share/man", page)
    expect(code == 0 and not err, page, err)
    return out


def page_text(name):
    manual_pages(1)
    return groff(PREFIX / "share/man/man1" / name)


def command_runs_where_it_was_installed_and_where_it_was_moved():
    expect(installed_shoal("--version").startswith("shoal "))
    moved = ROOT / "moved"
    shutil.copytree(PREFIX, moved, symlinks=True)
    code, out, err = call(moved / "bin/shoal", "--version", env=plain_environment(), cwd="/")
    expect(code == 0, out, err)
    code, out, err = call("readelf", "-d", moved / "bin/shoal")
    paths = re.findall(r"(?:RUNPATH|RPATH).*\[(.*?)\]", out)
    expect(len(paths) == 1 and paths[0].startswith("$ORIGIN/../") and ":" not in paths[0], "no path of this build may stay in it:", paths)


def package_file_requires_nothing():
    text = next(PREFIX.rglob("shoal.pc")).read_text()
    expect("Requires" not in text, text)
    expect("-lshoal" in pkg_config("--libs"), text)


def manual_pages(section):
    """Returns the manual pages. They exist if Sphinx was there when the build was configured."""
    if not (BUILD / "sphinx/bin/python3").exists():
        raise Skip(f"no Sphinx at {BUILD}/sphinx: `make build/sphinx/made`")
    return sorted((PREFIX / f"share/man/man{section}").iterdir())


def manual_pages_are_there_for_every_command_and_function():
    pages = {path.name for path in manual_pages(1)}
    wanted = {"shoal.1", *(f"shoal-{command.replace(' ', '-')}.1" for command in commands())}
    expect(pages == wanted, sorted(pages ^ wanted))
    pages = {path.name for path in manual_pages(3)}
    functions = re.findall(r"^\s+(shoal_\w+);", (TOP / "src/shoal.map").read_text(), re.M)
    expect(len(functions) > 30 and {"shoal.3", *(f"{name}.3" for name in functions)} <= pages, functions, pages)


def manual_pages_of_functions_say_what_the_header_says():
    manual_pages(3)
    for name, told in (("shoal_allreduce", ("SHOAL_COLLECTIVES(3)", "#include <shoal/shoal.h>", "const void *input", "element by element")),
                       ("shoal_mem_alloc", ("Allocates memory that the other ranks of this host can map", "ERR_MEMORY")),
                       ("shoal_request_wait", ("SHOAL_FOREVER", "timeout_ms"))):
        out = groff(PREFIX / f"share/man/man3/{name}.3")
        words = " ".join(out.split())
        expect(all(text in words for text in told) and "<#" not in out, name, told, out)


def manual_pages_format_without_a_warning():
    for page in manual_pages(1) + manual_pages(3):
        groff(page)
        if shutil.which("man"):
            code, out, err = call("man", "--warnings", "-l", page, env={**os.environ, "MANPAGER": "cat", "LC_ALL": "C.UTF-8"})
            expect(code == 0 and out and not err, page, err)


def manual_pages_have_each_section_option_and_setting():
    settings = re.findall(r"^SHOAL_\w+", installed_shoal("info", "--settings"), re.M)
    text = page_text("shoal.1")
    expect(len(settings) > 10 and not [name for name in settings if f" {name} (" not in text], text)
    for command in commands():
        text = page_text(f"shoal-{command.replace(' ', '-')}.1")
        for section in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "ENVIRONMENT", "EXIT STATUS", "EXAMPLES", "SEE ALSO"):
            expect(f"\n{section}\n" in text, command, section, text)
        rows = re.findall(r"^ +(-.*?)(?:  |$)", installed_shoal(*command.split(), "--help"), re.M)
        options = re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(rows))
        expect(options, command)
        for option in options:
            expect(re.search(rf"^ +.*(?<![\w-]){option}(?![\w-])", text.split("\nOPTIONS\n")[1], re.M), command, option, text)


def help_texts_of_another_shape_make_no_page():
    command = ROOT / "odd"
    go, info = "echo '    shoal go   does it'", "*info*) echo 'SHOAL_X  1  (default 1)'; echo '    what it means';;"
    for body, told in (("exit 3", "exit code 3"), ("exit 0", "it printed nothing"),
                       (f"{go}; echo 'SHOAL_X'", "a line that is no setting"),
                       (f'case "$*" in {info} *) {go};; esac', '`shoal go --help` says nothing that makes "Options"')):
        command.write_text(f"#!/bin/sh\n{body}\n")
        command.chmod(0o755)
        code, out, err = call(TOP / "docs/sphinx/make.py", "man", ROOT / "pages", command)
        expect(code == 1 and not out and told in err, body, code, out, err)
    code, out, err = call(TOP / "docs/sphinx/make.py", "man", ROOT / "pages", ROOT / "nothing")
    expect(code == 1 and "cannot run" in err, code, out, err)


def library_links_to_libc_only():
    code, out, err = call("readelf", "-d", library_directory() / "libshoal.so")
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", out))
    expect(needed <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}, needed)


def symbols_of(library):
    """Returns the symbols that a library defines for its other files; for a shared library also those that it does not
    export."""
    code, out, err = call("nm", "--defined-only", library)
    expect(code == 0, err)
    return set(re.findall(r"^[0-9a-f]+ [A-Za-z] (\w+)$", out, re.M))


def libraries_hold_no_code_that_is_for_tests():
    """Installed files contain neither the simulated transport nor the weather of tests."""
    of_tests = {name for name in symbols_of(BUILD / "tests/libweather.a") if name.startswith("shoal_")}
    expect({"shoal_sim_create", "shoal_shuffle_create"} <= of_tests, of_tests)
    for file in ("libshoal.so", "libshoal.a", "shoal"):
        held = symbols_of(BUILD / file)
        expect(("main" if file == "shoal" else "shoal_network_open") in held, "no symbols to look at", file)
        expect(not of_tests & held and not [name for name in held if re.match("shoal_(sim|shuffle)_", name)], file, of_tests & held)


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
    for name, body in (("dpkg-query", "exit 1"), ("id", "echo 1000")):  # nothing is installed, and the user is not root
        (bin / name).write_text(f"#!/bin/sh\n{body}\n")
        (bin / name).chmod(0o755)
    code, out, err = call(TOP / "dev/deps.sh", "build", env={**os.environ, "PATH": f"{bin}:{os.environ['PATH']}"})
    expect(code == 2 and "   meson\n" in err and "   gcc\n" in err, code, out, err)
    code, out, err = call(TOP / "dev/deps.sh", "nonsense")
    expect(code == 2 and 'unknown purpose "nonsense"' in err, code, out, err)


try:
    run_cases([missing_packages_are_listed_where_they_cannot_be_installed, install_puts_everything_in_place,
               program_builds_and_runs_against_the_shared_library, program_builds_and_runs_against_the_static_library, library_links_to_libc_only,
               libraries_hold_no_code_that_is_for_tests,
               command_runs_where_it_was_installed_and_where_it_was_moved, package_file_requires_nothing,
               manual_pages_are_there_for_every_command_and_function, manual_pages_of_functions_say_what_the_header_says,
               manual_pages_format_without_a_warning,
               manual_pages_have_each_section_option_and_setting, help_texts_of_another_shape_make_no_page,
               header_compiles_alone_as_c11_and_cpp17])
finally:
    shutil.rmtree(ROOT, ignore_errors=True)
