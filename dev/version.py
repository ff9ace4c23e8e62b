#!/usr/bin/env python3
"""The version, which meson.build names. Other files repeat it, because they are read without a build.

  dev/version.py           prints it
  dev/version.py 0.2.0     writes another one into meson.build and all files that repeat it
  dev/version.py --check   prints files that name another one; exit code 1 if there are any (dev/check.py does the same)"""
import pathlib
import re
import sys

import native

TOP = pathlib.Path(__file__).resolve().parent.parent
NUMBERS = r"(\d+\.\d+\.\d+)"
# File, a pattern whose group is the version or a part of it, and which part: None is all of it.
SOURCE = ("meson.build", rf"^  version: '{NUMBERS}'", None)
REPEATED = (
    ("include/shoal/shoal.h", r"^#define SHOAL_VERSION_MAJOR (\d+)$", 0),
    ("include/shoal/shoal.h", r"^#define SHOAL_VERSION_MINOR (\d+)$", 1),
    ("include/shoal/shoal.h", r"^#define SHOAL_VERSION_PATCH (\d+)$", 2),
    ("python/shoal/__init__.py", rf'^__version__ = "{NUMBERS}"$', None),
    ("python/smdistributed/pyproject.toml", rf'^version = "{NUMBERS}"$', None),
    ("python/smdistributed/pyproject.toml", rf'^dependencies = \["shoal=={NUMBERS}"\]$', None),
)
CHANGELOG = ("CHANGELOG.md", rf"^## {NUMBERS}\b", None)  # the newest version comes first; people write its notes


class Missing(Exception):
    """A file names no version where it should; the text names both."""


def find(top, place):
    """Returns the text of a file, and the match of its version."""
    name, pattern, _ = place
    text = (top / name).read_text()
    match = re.search(pattern, text, re.M)
    if not match:
        raise Missing(f"{name} has no line like {pattern}")
    return text, match


def current(top=TOP):
    return find(top, SOURCE)[1][1]


def part_of(version, part):
    return version if part is None else version.split(".")[part]


def differences(top=TOP):
    """Returns (file, line, what to do) for each place that differs from meson.build."""
    wanted, found = current(top), []
    for place in (*REPEATED, CHANGELOG):
        text, match = find(top, place)
        if match[1] != part_of(wanted, place[2]):
            line = text.count("\n", 0, match.start()) + 1
            mend = f"dev/version.py {wanted} writes it everywhere"
            if place is CHANGELOG:
                mend = f"begin the notes of {wanted} here"
            found.append((place[0], line, f"{match[1]}, but meson.build says {wanted}: {mend}"))
    return found


def write(version, top=TOP):
    for place in (SOURCE, *REPEATED):
        text, match = find(top, place)
        (top / place[0]).write_text(text[:match.start(1)] + part_of(version, place[2]) + text[match.end(1):])


def main(words):
    if words == ["--help"]:
        print(__doc__)
    elif not words:
        print(current())
    elif words == ["--check"]:
        found = differences()
        for name, line, mend in found:
            print(f"{name}:{line}: {mend}")
        return 1 if found else 0
    elif len(words) == 1 and re.fullmatch(NUMBERS, words[0]):
        write(words[0])
        native.WRITTEN.write_text(native.text_of(native.HEADERS))
        print(f"{words[0]} is written; now begin its notes in CHANGELOG.md")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
