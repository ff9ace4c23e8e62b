#!/usr/bin/env python3
"""test_guides.py [PAGE ...]: the blocks of code in the guides, as they are written there (guide_blocks.py). Each is a case. A
block that is skipped prints its reason; it still has to compile, and its options of `shoal` have to exist. Without arguments
it runs all guides except the quick start, which is a test of its own in `make test`."""
import ast
import collections
import functools
import os
import pathlib
import re
import shutil
import sys
import tempfile
import textwrap

from guide_blocks import blocks_of, shoal_options
from tap import Skip, call, expect, run_cases

TOP = pathlib.Path(__file__).resolve().parents[2]
COMMAND = pathlib.Path(os.environ.get("SHOAL_COMMAND", TOP / "build/shoal"))
ROOT = pathlib.Path(tempfile.mkdtemp(prefix="shoal-guides-"))
PAGES = [*sorted((TOP / "docs").glob("*.md")), TOP / "python/smdistributed/README.md"]
TIMEOUT_S = 300
MISSING = 77  # exit code of the lines before a block, if the machine lacks something


def bin_of(interpreter):
    """Returns the folder of an environment's programs."""
    folder = TOP / "build" / interpreter / "bin"
    if not (folder / "python3").exists():
        raise Skip(f"there is no {folder}: `make test-all` makes it")
    return folder


@functools.lru_cache
def installed():
    """Returns a folder in which Python finds what `pip install .` leaves: torch finds the backend by its entry points."""
    points = re.findall(r'^\[project\.entry-points\."(.*?)"\]\n(.*?)\n', (TOP / "pyproject.toml").read_text(), re.M)
    folder = ROOT / "installed/shoal-0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("".join(f"[{group}]\n{line.replace(chr(34), '')}\n\n" for group, line in points))
    return folder.parent


def environment(interpreter, folder):
    paths = [str(installed()), str(TOP / "python"), str(TOP / "python/smdistributed")]
    path = f"{bin_of(interpreter)}:{COMMAND.parent}:{os.environ['PATH']}"
    return {**os.environ, "PYTHONPATH": ":".join(paths), "PATH": path, "TOP": str(TOP), "SHOAL_JOBS": str(folder / "jobs"),
            "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}


def compiles(block):
    """Checks what can be checked without running the block."""
    if block.language in ("python", "diff"):
        ast.parse(block.program)
    elif block.language == "sh":
        code, _, err = call("bash", "-n", "-c", block.program)
        expect(code == 0, err)
        for words, options in shoal_options(block.text):
            code, told, err = call(COMMAND, *words.split(), "--help", env=environment("job", ROOT))
            expect(code == 0, f"shoal {words} --help", err)
            for option in options:
                expect(re.search(rf"{option}\b", told), f"shoal {words} has no option {option}")
    elif block.language == "toml" and sys.version_info >= (3, 11):
        import tomllib
        tomllib.loads(block.program)


def run_shell(block, folder):
    env = environment(block.rest or "torch", folder)
    return call("bash", "-euo", "pipefail", "-c", block.program, env=env, cwd=folder, timeout=TIMEOUT_S)


def run_python(block, folder):
    script = folder / f"block_{block.line}.py"
    script.write_text(block.program)
    command = (COMMAND, "run", "-n", "2", bin_of(block.how) / "python3", script)
    return call(*command, env=environment(block.how, folder), cwd=folder, timeout=TIMEOUT_S)


def test(block, folder):
    compiles(block)
    if block.how == "skip":
        raise Skip(block.rest)
    if block.how == "file":
        (folder / block.rest).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.rest).write_text(block.program)
        if block.language == "toml" and "entry_point" in block.program:
            code, out, err = call(COMMAND, "job", "check", folder / block.rest, env=environment("job", folder))
            expect(code == 0, out, err)
        return
    code, out, err = (run_shell if block.how == "sh" else run_python)(block, folder)
    if block.how == "sh" and code == MISSING:
        raise Skip(err.strip())
    told = (textwrap.indent(block.program, "    "), out[-3000:], err[-3000:])
    expect(code == 0, f"{block.page}:{block.line} ended with {code}", *told)
    for wanted in block.prints:
        expect(re.search(wanted, out + err, re.M), f"it does not print {wanted}", *told)


def case_of(block, folder):
    case = functools.partial(test, block, folder)
    case.__name__ = block.name
    return case


def mistakes_in_comments_are_told():
    for text, told in (("```python\na\n```\n", "put a comment"), ("```\na\n```\n", 'language is ""'),
                       ("<!-- test: skip -->\n```sh\na\n```\n", "why is the block"),
                       ("x:\n\n    shoal run\n", "is indented code")):
        try:
            blocks_of("page", text)
        except ValueError as error:
            expect(told in str(error), text, error)
        else:
            raise AssertionError(f"no mistake is told of {text}")
    block = blocks_of("page", "a\n<!-- test: torch\nx = 1\nprints: y\n-->\n```diff\n- b\n+ c\n```\n")[0]
    expect((block.line, block.how, block.program, block.prints) == (6, "torch", "x = 1\nc\n", ["y"]), block)
    found = shoal_options("A=b shoal job run x --name y | shoal trace -\nshoal run -n 2 --meet n:1 ./a --own  # --no\n")
    expect(found == [("job run", ["--name"]), ("trace", []), ("run", ["--meet"])], found)


def main():
    pages = [TOP / page for page in sys.argv[1:]] or [page for page in PAGES if page.stem != "quick-start"]
    blocks = [block for page in pages for block in blocks_of(page.relative_to(TOP).as_posix(), page.read_text())]
    folders = {page: ROOT / page for page in {block.page for block in blocks}}
    for folder in folders.values():
        folder.mkdir(parents=True)
    words = {"skip": "skipped", "file": "kept as files for others"}
    ways = collections.Counter(words.get(block.how, "run") for block in blocks)
    print(f"# {len(blocks)} blocks: {', '.join(f'{count} {way}' for way, count in sorted(ways.items()))}")
    run_cases([mistakes_in_comments_are_told, *(case_of(block, folders[block.page]) for block in blocks)])


if __name__ == "__main__":
    try:
        main()
    except ValueError as mistake:
        sys.exit(f"{mistake}")
    finally:
        shutil.rmtree(ROOT, ignore_errors=True)
