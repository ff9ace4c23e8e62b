#!/usr/bin/env python3
"""Runs Horovod's own tests over Shoal. Prints a table of results, and the names of failed tests.

  horovod.py PATH [WORD ...]     PATH: a checkout of Horovod. With words: only rows whose name contains one of them
  horovod.py --list

Two ranks run each file; one runs test/single, as in Horovod. PyTorch comes from build/torch, TensorFlow from build/tensorflow.
A row "in graphs" runs a file's tests only in TensorFlow's graphs, one "eagerly" only without them; the file itself would run
each test in both ways. "without Muon" removes this optimizer from torch.optim, because the tests use every optimizer with a
model that Muon refuses. build/horovod-logs has each rank's output. docs/horovod.md explains why tests fail. Exit code 1: a test
failed; 2: a row had no result."""
import argparse
import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
LIMIT_S = 1800  # of a row

# mode: passed to dev/horovod_rank, which applies it. shuts_down: after each test, because these tests break a communicator
# that the next one needs. tests: an expression for pytest's -k.
Row = collections.namedtuple("Row", "file venv mode shuts_down ranks tests", defaults=("", False, 2, ""))
ROWS = (
    Row("test/parallel/test_torch.py", "torch", tests="not duplicate_name"),
    Row("test/parallel/test_torch.py", "torch", tests="duplicate_name"),
    Row("test/parallel/test_torch.py", "torch", "without Muon", tests="broadcast_state or force_allreduce"),
    Row("test/parallel/test_adasum_pytorch.py", "torch"),
    Row("test/single/test_torch_elastic.py", "torch", ranks=1),
    Row("test/parallel/test_tensorflow.py", "tensorflow", "eagerly", True),
    Row("test/parallel/test_tensorflow.py", "tensorflow", "in graphs", True),
    Row("test/parallel/test_tensorflow_process_sets.py", "tensorflow", "eagerly"),
    Row("test/parallel/test_tensorflow_process_sets.py", "tensorflow", "in graphs"),
    Row("test/parallel/test_tensorflow_process_sets_dynamic.py", "tensorflow", "eagerly"),
    Row("test/parallel/test_process_sets_static.py", "tensorflow"),
    Row("test/parallel/test_tensorflow2_keras.py", "tensorflow"),
    Row("test/parallel/test_tensorflow2_keras_process_sets.py", "tensorflow"),
)
WORST_FIRST = ("failed", "absent", "skipped", "passed")  # a test's outcome is the worst of its ranks


def name_of(row):
    return " ".join(filter(None, [pathlib.Path(row.file).name, row.mode, row.tests]))


def environment(row, path, logs):
    """Returns the environment of both ranks. dev/horovod_rank reads the last variables."""
    site = next((TOP / "build/horovod").glob("lib/python3*/site-packages"))
    folders = [TOP / "python", TOP / "dev/horovod_rank", site, path / "test/utils", path / "test/parallel"]
    return {**os.environ, "PYTHONPATH": ":".join(map(str, folders)), "SHOAL_LIBRARY": str(TOP / "build/libshoal.so"),
            "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "HOROVOD_TESTS_LOGS": str(logs), "HOROVOD_TESTS_VENV": row.venv,
            "HOROVOD_TESTS_MODE": row.mode, "HOROVOD_TESTS_SHUT_DOWN": str(int(row.shuts_down))}


def worst(told):
    return min(told, key=lambda each: WORST_FIRST.index(each[0]))


def run(row, path):
    """Returns {test: (outcome, why)}, the worst of all ranks."""
    logs = TOP / "build/horovod-logs" / name_of(row).replace(" ", "-")
    shutil.rmtree(logs, ignore_errors=True)
    logs.mkdir(parents=True)
    words = [TOP / "build/shoal", "run", "-n", row.ranks, "--timeout", LIMIT_S, TOP / f"build/{row.venv}/bin/python3", "-m", "pytest",
             "-q", "-p", "horovod_rank", "-p", "no:cacheprovider", "-k", row.tests, path / row.file]
    with open(logs / "output", "w") as output:
        subprocess.run(list(map(str, words)), stdout=output, stderr=subprocess.STDOUT, cwd=path, env=environment(row, path, logs))
    outcomes = {}
    for rank in range(row.ranks):
        file = logs / f"rank{rank}"
        for line in file.read_text().splitlines() if file.exists() else ():
            test, outcome, why = json.loads(line)
            outcomes.setdefault(test, []).append((outcome, why))
    return {test: worst(told + [("absent", "a rank told no outcome")] * (row.ranks - len(told))) for test, told in outcomes.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", type=pathlib.Path)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    if options.list or not options.path:
        print("\n".join(map(name_of, ROWS)))
        return 0 if options.list else 2
    if not (TOP / "build/horovod").exists():
        subprocess.run([TOP / "dev/venv.sh", "horovod"], check=True)
    table, code = [], 0
    for row in ROWS:
        if options.words and not any(word in name_of(row) for word in options.words):
            continue
        outcomes = run(row, options.path.resolve())
        counts = collections.Counter(outcome for outcome, _ in outcomes.values())
        failed = counts["failed"] + counts["absent"]
        code = max(code, 2 if not outcomes else int(failed > 0))
        table.append(f"| {name_of(row)} | {counts['passed']} | {failed} | {counts['skipped']} |")
        print(f"# {table[-1]}", *(f"#     {outcome}: {test}: {why}" for test, (outcome, why) in outcomes.items()
                                   if outcome in ("failed", "absent")), sep="\n", flush=True)
    print("| file | passed | failed | skipped |\n|---|---:|---:|---:|", *table, sep="\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
