#!/usr/bin/env python3
"""Writes docs/tested-by.md: which tests prove which module, found by the names that a test uses.

  dev/tested.py            writes the page
  dev/tested.py --check    prints differences; exit code 1 if there are any (dev/check.py runs the same check)

A test of a module of src/ includes one of its headers, or calls functions that it defines. A test of a command runs it, or
includes its headers. A test of a Python package imports it, also in the scripts that it writes."""
import collections
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(TOP / "dev"))

import written  # noqa: E402

PAGE = TOP / "docs/tested-by.md"
ROOMS = ("device", "fusion", "pipeline", "transport")  # their folders count as modules
MOST = 8  # tests in a cell
PACKAGES = (*(f"shoal/{name}" for name in ("_native", "_keras", "torch", "tensorflow", "horovod")),
            *(f"shoal/job/{name}" for name in ("document", "engines", "data", "watching", "serving", "sdk", "sagemaker")),
            "smdistributed/dataparallel", "smdistributed/modelparallel")
# The first line of a definition begins a line; its last line ends with the brace that begins the body.
DEFINITION = re.compile(r"^(?!static\b)\w[\w \t*]*?\b((?:shoal|fusion|outer)_\w+)\([^;{}]*\)\n\{", re.M)
INCLUDE = re.compile(r'^#include [<"]([^>"]+)[>"]', re.M)
COMMAND = re.compile(r'(?:SHOAL|COMMAND|shoal\.c)\)?,\s*"(\w+)"|\bcommand\("(\w+)"|\bshoal (\w+) ')
IMPORT = re.compile(r"\b(?:from|import)\s+((?:shoal|smdistributed)(?:\.\w+)+)(?:\s+import\s+(\([\w,\s]+|[\w, ]+))?")
# Tests of all algorithms, which name none.
OF_ALL_PLANS = ("unit/test_plan_check", "sim/test_engine_sim", "multi/test_exact", "multi/test_programs")


def tests():
    """Returns the text of each test program, by a name such as "unit/test_link": a test keeps it if it moves to a folder
    within the first one."""
    found = {}
    for path in sorted((TOP / "tests").rglob("*")):
        if path.suffix in (".c", ".py", ".sh") and path.name.startswith(("test_", "fuzz_")):
            found[f"{path.relative_to(TOP / 'tests').parts[0]}/{path.stem}"] = path
    return found


# ---- src/ and tools/ -------------------------------------------------------------------------------------------------------

def module_of(path):
    """Returns the module of a file below src/."""
    parts = path.relative_to(TOP / "src").parts
    return "/".join(parts[:2]) if parts[0] in ROOMS and len(parts) > 2 else parts[0]


def headers_of(path, seen=None):
    """Returns the headers of the repository that a test includes, also through headers of tests."""
    seen = set() if seen is None else seen
    for name in INCLUDE.findall(path.read_text()):
        folders = (path.parent, *(TOP / folder for folder in ("src", "tests", "tests/unit", "tests/sim")))
        header = next(((folder / name).resolve() for folder in folders if (folder / name).is_file()), None)
        if header and header not in seen:
            seen.add(header)
            if TOP / "tests" in header.parents:
                headers_of(header, seen)
    return seen


def functions():
    """Returns the module that defines each function."""
    return {name: module_of(path) for path in sorted((TOP / "src").rglob("*.c"))
            for name in DEFINITION.findall(path.read_text())}


def scores_of_modules(programs):
    """Returns, for each module, by test, how many of its headers and functions the test names."""
    defined = functions()
    scores = {module_of(path): collections.Counter() for path in (TOP / "src").rglob("*.[ch]")}
    for test, path in programs.items():
        for header in headers_of(path) if path.suffix == ".c" else ():
            if TOP / "src" in header.parents:
                scores[module_of(header)][test] += 3  # a header of the module is a stronger sign than a function of it
        for name in set(re.findall(r"\b(?:shoal|fusion|outer)_\w+", path.read_text())) & set(defined):
            scores[defined[name]][test] += 1
    return scores


def scores_of_commands(programs):
    scores = {path.name: collections.Counter() for path in sorted((TOP / "tools").iterdir()) if path.is_dir()}
    for test, path in programs.items():
        words = ["".join(match) for match in COMMAND.findall(path.read_text())]
        headers = headers_of(path) if path.suffix == ".c" else ()
        words += [header.parent.name for header in headers if TOP / "tools" in header.parents]
        for word in set(words) & set(scores):
            scores[word][test] += words.count(word) + 5 * (word in test)  # its name says what a test is for
    return scores


# ---- Python ----------------------------------------------------------------------------------------------------------------

def scores_of_packages(programs):
    scores = {name: collections.Counter() for name in PACKAGES}
    for test, path in programs.items():
        for module, names in IMPORT.findall(path.read_text() if path.suffix == ".py" else ""):
            for imported in [module, *(f"{module}.{name.strip()}" for name in names.strip("(").split(","))]:
                package = next((name for name in PACKAGES if f"{imported}.".startswith(name.replace("/", ".") + ".")), None)
                if package:
                    scores[package][test] += 1
    return scores


# ---- The page --------------------------------------------------------------------------------------------------------------

def row(module, counter):
    names = sorted(counter, key=lambda test: (-counter[test], test))
    cells = ", ".join(f"`{name}`" for name in names[:MOST]) + (f", and {len(names) - MOST} more" if len(names) > MOST else "")
    return f"| `{module}` | {cells or 'none names it: tests of its users'} |"


def table(title, prefix, scores):
    return "\n".join([f"## {title}", "", "| | tests |", "|---|---|", *(row(prefix + name, scores[name]) for name in sorted(scores)), ""])


def page():
    programs = tests()
    return "\n".join([
        "# Which tests prove which module", "",
        "`dev/tested.py` writes this page from the names that tests use; `dev/check.py` fails if it is not current. A row begins",
        f"with the tests that name most of a module, and has {MOST} at most. `unit/test_text` is a program whose source is somewhere",
        "below `tests/unit`. [Testing](testing.md) describes the folders and how to run one test.", "",
        "A test of a module of `src/` includes one of its headers, or calls functions that it defines. These also prove, simulate",
        "or run the plans of every algorithm, without naming it:", "", *(f"- `{test}`" for test in OF_ALL_PLANS if test in programs), "",
        table("The library", "src/", scores_of_modules(programs)), table("Commands", "tools/", scores_of_commands(programs)),
        table("Python", "python/", scores_of_packages(programs))])


def differences():
    """Returns a finding if the page is not current."""
    wanted, there = page(), PAGE.read_text() if PAGE.exists() else ""
    if wanted == there:
        return []
    same = [a == b for a, b in zip(wanted.splitlines(), there.splitlines())]
    return [(PAGE, (same.index(False) if False in same else len(same)) + 1, "tests name other modules now: run dev/tested.py")]


if __name__ == "__main__":
    sys.exit(written.run(__doc__, lambda: {PAGE: page()}, differences))
