#!/usr/bin/env python3
"""Runs the tests of the front-ends with versions of Python and of the frameworks that `make test` does not use. Records the
results in docs/versions.jsonl, and writes the tables of docs/python.md and docs/tensorflow.md from them.

  versions.py [ROW ...]   only those rows; a word is enough: 2.15, tensorflow, newest
  versions.py --list      prints the rows
  versions.py --check     prints failures, and rows that have not run with today's sources; exit code 1 if a table differs
  versions.py --tables    writes the tables

Each row has a virtual environment in build/versions, which is kept unless --discard is set. PyTorch for x86-64 downloads
gigabytes of CUDA, so these rows are not part of `make test`. A row is skipped if its interpreter is neither on PATH nor in
pyenv's folder. "newest" installs the newest versions of the index and records which they were: run it at night. A
`constraint` in pip's configuration does not apply to these rows. Exit code 1: a test failed; 2: an environment could not be
made."""
import argparse
import collections
import datetime
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import version_records
from interpreter import find_python

TOP = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 3600  # of a program

# sources: folders whose change requires another run. page: the page of its table.
Row = collections.namedtuple("Row", "name python packages programs sources page lends_torch", defaults=(False,))

OPERATIONS = (["tests/python/test_ops.py", "2"], ["tests/python/test_ddp.py", "2"])
TENSORFLOW = (["tests/tensorflow/test_operations.py"], ["tests/tensorflow/test_gradients.py"], ["tests/tensorflow/test_keras.py"])
TRAINERS = (["tests/python/test_trainers.py"], ["tests/python/test_keras.py"], ["tests/python/test_torchft.py"])


# Folders that use the framework. The C library and its declarations in Python do not; including them would require these
# rows too often.
SHIMS = ("python/shoal/torch",), "docs/python.md"
KERAS = ("python/shoal/torch", "python/shoal/_keras"), "docs/python.md"
OF_TENSORFLOW = ("python/shoal/tensorflow", "python/shoal/_keras"), "docs/tensorflow.md"


def torch_row(python, version):
    return Row(f"python{python}-torch{version}", python, [f"torch=={version}", "numpy"], OPERATIONS, *SHIMS)


def tensorflow_row(python, version):
    return Row(f"python{python}-tensorflow{version}", python, [f"tensorflow-cpu=={version}", "keras>=3"], TENSORFLOW, *OF_TENSORFLOW)


ROWS = [
    torch_row("3.9", "2.4.1"), torch_row("3.9", "2.8.0"), torch_row("3.11", "2.14.1"), torch_row("3.13", "2.15.0"),
    tensorflow_row("3.11", "2.16.2"), tensorflow_row("3.11", "2.18.1"), tensorflow_row("3.13", "2.20.0"),
    Row("newest-torch", "3.11", ["torch", "numpy"], OPERATIONS, *SHIMS),
    Row("newest-tensorflow", "3.11", ["tensorflow-cpu", "keras"], TENSORFLOW, *OF_TENSORFLOW),
    # With the PyTorch of build/torch, which their newest releases require.
    Row("newest-trainers", "3.11", ["accelerate", "transformers", "lightning", "keras", "torchft"], TRAINERS, *KERAS, True),
    Row("newest-deepspeed", "3.11", ["deepspeed"], (["tests/python/test_deepspeed.py"],), *SHIMS, True),
]


def run(*words):
    return subprocess.run(list(map(str, words)), check=True, stdout=subprocess.DEVNULL, env={**os.environ, "PIP_CONSTRAINT": os.devnull})


def make(row):
    """Returns the row's interpreter, or None if its Python is not installed."""
    folder = TOP / "build/versions" / row.name
    interpreter = folder / "bin/python3"
    base = find_python(row.python)
    if row.name.startswith("newest"):
        shutil.rmtree(folder, ignore_errors=True)
    if (folder / "made").exists():
        return interpreter
    if not base:
        return None
    print(f"# {row.name}: installing {' '.join(row.packages)}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    run(base, "-m", "venv", folder)
    if row.lends_torch:
        site = next(folder.glob("lib/python3*/site-packages"))
        (site / "torch.pth").write_text(str(next((TOP / "build/torch").glob("lib/python3*/site-packages"))))
    run(interpreter, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *row.packages)
    (folder / "made").touch()
    return interpreter


def environment(row):
    found = {"SHOAL_LIBRARY": TOP / "build/libshoal.so", "SHOAL_COMMAND": TOP / "build/shoal",
             "SHOAL_PROBE": TOP / "build/tests/multi/launcher_probe", "LD_LIBRARY_PATH": TOP / "build",
             "PYTHONPATH": f"{TOP}/python:{TOP}/tests/multi", "SHOAL_TORCH_CACHE": TOP / "build/versions" / row.name / "shim"}
    return {**os.environ, **{name: str(value) for name, value in found.items()}}


def versions(interpreter, row):
    """Returns the versions that pip installed of the row's packages."""
    names = [re.split("[=<>]", package)[0] for package in row.packages]
    told = subprocess.run([interpreter, "-c", f"import importlib.metadata as m, sys; print(sys.version.split()[0]); "
                           f"[print(name, m.version(name)) for name in {names}]"], check=True, capture_output=True, text=True)
    return "Python " + ", ".join(told.stdout.split("\n")).strip(", ")


def test(interpreter, row, program):
    """Returns one program's results: {shim: [passed, failed, skipped]}, the names of failed cases, and whether it ran all
    of its cases and its exit code agrees with them. The shim is "" if the cases name none."""
    try:
        ended = subprocess.run([interpreter, TOP / program[0], *program[1:]], env=environment(row), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True, errors="replace", timeout=LIMIT_S)
        output, code = ended.stdout, ended.returncode
    except subprocess.TimeoutExpired as late:
        output, code = (late.stdout or b"").decode(errors="replace"), None
    log = TOP / "build/versions" / f"{row.name}-{pathlib.Path(program[0]).stem}.log"
    log.write_text(output)
    lines = re.findall(r"^(not )?ok \d+ - (.*?)( # SKIP.*)?$", output, re.M)
    counts = {}
    for lacks, name, reason in lines:
        shim = name.split()[0] if name.split()[0] in version_records.SHIMS else ""
        counts.setdefault(shim, [0, 0, 0])[1 if lacks else 2 if reason else 0] += 1
    failed, planned = [name for lacks, name, _ in lines if lacks], re.search(r"^1\.\.(\d+)", output, re.M)
    ended = code == (1 if failed else 0) and planned is not None and int(planned[1]) == len(lines)
    if not ended:
        why = f"no end within {LIMIT_S} s" if code is None else f"exit code {code}"
        failed.append(f"{why} after {lines[-1][1] if lines else 'nothing'}: {' '.join(output.split()[-20:])}")
    return counts, failed, ended


def run_row(row, interpreter):
    """Returns true if all of its programs passed."""
    words, passed_all = versions(interpreter, row), True
    for program in row.programs:
        began_s, sources = time.monotonic(), version_records.fingerprint(row.sources)
        counts, failed, ended = test(interpreter, row, program)
        passed_all = passed_all and not failed
        name = version_records.name_of(program)
        print(f"# {row.name}: {name}: {counts}, {time.monotonic() - began_s:.0f} s", *(f"#     failed: {one}" for one in failed),
              sep="\n", flush=True)
        version_records.keep({"row": row.name, "program": name, "page": row.page, "versions": words, "date": f"{datetime.date.today()}",
                              "counts": counts, "failed": failed, "ended": ended, "folders": row.sources, "sources": sources})
    return passed_all


def check():
    for name, program, why in version_records.failing() + version_records.outdated(ROWS):
        print(f"# {name}: {program}: {why}")
    for page, line, text in version_records.differences():
        print(f"{page}:{line}: {text}")
    return 1 if version_records.differences() else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--discard", action="store_true", help="remove a row's environment once its tests have run")
    options = parser.parse_args()
    chosen = [row for row in ROWS if not options.rows or any(word in row.name for word in options.rows)]
    if options.list or not chosen:
        print("\n".join(f"{row.name:28} {' '.join(row.packages)}" for row in ROWS))
        return 0 if options.list else 2
    if options.tables:
        version_records.write_tables()
        return 0
    if options.check:
        return check()
    has_failed, is_complete = False, True
    for row in chosen:
        try:
            interpreter = make(row)
        except subprocess.CalledProcessError as error:
            print(f"# {row.name}: {' '.join(map(str, error.cmd))} failed", flush=True)
            is_complete = False
            continue
        if not interpreter:
            print(f"# {row.name}: skipped, there is no python{row.python}")
            continue
        has_failed = not run_row(row, interpreter) or has_failed
        if options.discard:
            shutil.rmtree(TOP / "build/versions" / row.name)
    return 1 if has_failed else 0 if is_complete else 2


if __name__ == "__main__":
    sys.exit(main())
