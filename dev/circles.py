#!/usr/bin/env python3
"""Prints which files of each module call each other in a circle, and by which functions. dev/check.py fails on a circle that
KNOWN does not list.

A file of C calls another one if it names a function that the other file defines. Inline functions of headers do not count.
Circles make a module hard to read: none of their files can be understood, or tested, without all the others.
"""
import collections
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
# Files that still call each other in a circle, without their endings. Remove those that no longer do.
KNOWN = {}
COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
DEFINITION = re.compile(r"^(?!static\b|typedef\b|extern\b|__attribute__|#)[A-Za-z_][\w \*\(\),]*?\b(\w+)\([^;{}]*\)\s*\n\{", re.M)
NAME = re.compile(r"\b[a-z_]\w+\b")


def folders(top):
    """Returns each folder of C files below src and tools, relative to the top, and its files."""
    files = collections.defaultdict(list)
    for part in ("src", "tools"):
        for path in sorted((top / part).rglob("*.c")):
            files[path.parent.relative_to(top).as_posix()].append(path)
    return files.items()


def calls_between(paths):
    """Returns {file: {other file: names}}: the functions of the other file that the file names."""
    code = {path.name: COMMENT_OR_TEXT.sub(" ", path.read_text()) for path in paths}
    owners = {}
    for file, text in code.items():
        owners.update(dict.fromkeys(DEFINITION.findall(text), file))
    calls = {file: collections.defaultdict(set) for file in code}
    for file, text in code.items():
        for name in set(NAME.findall(text)):
            if owners.get(name, file) != file:
                calls[file][owners[name]].add(name)
    return calls


def reached(calls, file):
    """Returns the files that the file calls, directly or through others."""
    found, left = set(), [file]
    while left:
        for other in calls[left.pop()]:
            if other not in found:
                found.add(other)
                left.append(other)
    return found


def circles_of(calls):
    """Returns the circles: lists of files of which each one reaches all others."""
    reach = {file: reached(calls, file) for file in calls}
    circles = []
    for file in sorted(calls):
        circle = [other for other in sorted(reach[file]) if file in reach[other]]
        if len(circle) > 1 and circle[0] == file:
            circles.append(circle)
    return circles


def differences(top=TOP):
    """Yields (path, what to do) for each file of a circle that KNOWN does not have, and for each one in KNOWN that is in none."""
    for folder, paths in folders(top):
        stems = {pathlib.Path(file).stem for circle in circles_of(calls_between(paths)) for file in circle}
        known = KNOWN.get(folder, set())
        for stem in sorted(stems - known):
            yield top / folder / f"{stem}.c", "it calls files that call it: move what both need to a file below them (dev/circles.py)"
        for stem in sorted(known - stems):
            yield top / "dev/circles.py", f"{folder}/{stem} is in no circle any longer: remove it from KNOWN"


def main():
    for folder, paths in folders(TOP):
        calls = calls_between(paths)
        for circle in circles_of(calls):
            print(f"{folder}: {len(circle)} of {len(paths)} files: {' '.join(circle)}")
            for file in circle:
                for other in circle:
                    if other in calls[file]:
                        print(f"    {file} -> {other}: {' '.join(sorted(calls[file][other]))}")


if __name__ == "__main__":
    sys.exit(main())
