#!/usr/bin/env python3
"""The exercise in CONTRIBUTING.md: its edits apply to a copy of the tree, and its commands have the results that it
promises."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[3]
BUILD_S = 1800  # at a lower priority than tests that use all cores
RUN_S = 300


def blocks(text, language):
    """Returns the contents of the fenced blocks of a language ("" for commands), in order."""
    return [content for found, content in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if found == language]


def copy_tree(folder):
    """Copies the files that a commit of everything would contain."""
    code, names, err = call("git", "-C", TOP, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if code != 0:
        raise Skip("no git checkout: " + err.strip())
    for name in filter(None, names.split("\0")):
        if (TOP / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(TOP / name, folder / name)


class Copy:
    """A copy of the tree with the exercise's edits, and the commands that follow them."""

    def __init__(self, folder):
        self.folder = folder
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}

    def edit(self, patch):
        done = subprocess.run(["patch", "-p1", "--fuzz=0", "--no-backup-if-mismatch"], input=patch, cwd=self.folder,
                              capture_output=True, text=True, timeout=60)
        expect(done.returncode == 0, "the edits do not apply", done.stdout, done.stderr)

    def run(self, line, timeout):
        """Runs a line of the exercise as a reader would type it. Returns its output."""
        code, out, err = call("sh", "-c", line, timeout=timeout, env=self.environment, cwd=self.folder)
        expect(code == 0, f"{line}: exit code {code}", out[-4000:], err[-4000:])
        return out

    def build(self, targets):
        """Runs `ninja -C build` for the targets that the exercise runs, configured to build fast, because this test is
        about the edits."""
        if not (self.folder / "build").exists():
            self.run("meson setup build -Doptimization=0 -Ddebug=false -Dkernels=baseline", BUILD_S)
        self.run(f"nice ninja -C build {targets}", BUILD_S)


def commands_of(text):
    return [line for block in blocks(text, "") for line in block.splitlines()]


def without_the_last_loop(copy):
    """The page suggests this edit. The checker then names the rank that signals once more often than the other expects."""
    path = copy.folder / "src/collective/leader.c"
    loop = "    for (int peer = 1; peer < view->size; peer++)\n        shoal_plan_expect_credit(plan, peer);\n"
    expect(path.read_text().count(loop) == 1, path.read_text())
    path.write_text(path.read_text().replace(loop, ""))
    copy.build("tests/unit/test_plan_check")
    code, out, err = call("build/tests/unit/test_plan_check", "plan_check_accepts_leader", cwd=copy.folder)
    expect(code != 0, out, err)
    return out + err


def the_exercise_works():
    for tool in ("git", "patch", "meson", "ninja", "nice"):
        if not shutil.which(tool):
            raise Skip(f"no {tool}")
    text = (TOP / "CONTRIBUTING.md").read_text()
    operator, algorithm = blocks(text, "diff")
    commands = commands_of(text)
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(pathlib.Path(folder))
        copy_tree(copy.folder)
        copy.edit(operator)
        copy.edit(algorithm)
        expect("dev/native.py" in commands, commands)
        copy.run("dev/native.py", RUN_S)
        expect("BITXNOR = 9" in (copy.folder / "python/shoal/_native/_declarations.py").read_text(), "Python does not know it")
        copy.build("shoal tests/unit/test_kernels tests/unit/test_plan_check")
        told = {line: copy.run(line, RUN_S) for line in commands if line.startswith(("build/", "SHOAL_ALGORITHMS="))}
        said = without_the_last_loop(copy)
    expect(len(told) == 5, *commands)
    all_told = "\n".join(told.values())
    expect(" signals rank " in said and " expects " in said, said[-4000:])
    expect("plan_check_accepts_leader" in all_told and "leader-staged" in all_told, all_told[-4000:])


run_cases([the_exercise_works])
