#!/usr/bin/env python3
"""Prints which files of each module call each other in a circle, and by which functions. dev/check.py fails on a circle that
KNOWN does not list. With a folder, prints its files in floors: each file calls only files on lower lines. docs/architecture.md
has such pictures; dev/check.py fails if the code differs.

A file of C calls another one if it names a function that the other file defines. Inline functions of headers do not count.
Circles make a module hard to read: none of their files can be understood, or tested, without all the others.

Examples:
    python3 dev/circles.py
    python3 dev/circles.py src/engine

Exit codes:
    0   printed
    2   wrong arguments
"""
import argparse
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
# A picture of floors in a page: a heading, then a line for each floor: file names, and after two spaces what they do.
PICTURE = re.compile(r"^ floors of (\S+)\n((?: .*\n)+)", re.M)
FILES = re.compile(r" \w+(?:, \w+)*")


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


def floors_of(calls):
    """Returns lists of files, the highest first. Each file is just above the highest file that it calls. There must be no circle."""
    heights = {}

    def height(file):
        if file not in heights:
            heights[file] = 1 + max(map(height, calls[file]), default=-1)
        return heights[file]

    floors = collections.defaultdict(list)
    for file in sorted(calls):
        floors[height(file)].append(file)
    return [floors[height] for height in sorted(floors, reverse=True)]


def pictures_in(page):
    """Yields (folder, [files without their endings, ...] of each line, the highest first) of the page's pictures of floors."""
    for match in PICTURE.finditer(page):
        yield match.group(1), [FILES.match(line).group().strip().split(", ") for line in match.group(2).splitlines()]


def picture_faults(page, top=TOP):
    """Yields what is wrong with the pictures of a page."""
    modules = dict(folders(top))
    for folder, lines in pictures_in(page):
        calls = calls_between(modules.get(folder, []))
        line_of = {f"{stem}.c": number for number, line in enumerate(lines) for stem in line}
        for file in sorted(calls.keys() ^ line_of.keys()):
            yield f"the floors of {folder} {'lack' if file in calls else 'have'} {file}, which is {'' if file in calls else 'not '}there"
        for file in sorted(calls.keys() & line_of.keys()):
            for other in sorted(other for other in calls[file] if line_of.get(other, len(lines)) <= line_of[file]):
                yield f"in {folder}, {file} calls {other}, which is not below it (dev/circles.py {folder})"


def differences(top=TOP):
    """Yields (path, what to do) for each file of a circle that KNOWN does not have, and for each one in KNOWN that is in none."""
    for folder, paths in folders(top):
        stems = {pathlib.Path(file).stem for circle in circles_of(calls_between(paths)) for file in circle}
        known = KNOWN.get(folder, set())
        for stem in sorted(stems - known):
            yield top / folder / f"{stem}.c", "it calls files that call it: move what both need to a file below them (dev/circles.py)"
        for stem in sorted(known - stems):
            yield top / "dev/circles.py", f"{folder}/{stem} is in no circle any longer: remove it from KNOWN"


def print_circles():
    for folder, paths in folders(TOP):
        calls = calls_between(paths)
        for circle in circles_of(calls):
            print(f"{folder}: {len(circle)} of {len(paths)} files: {' '.join(circle)}")
            for file in circle:
                for other in circle:
                    if other in calls[file]:
                        print(f"    {file} -> {other}: {' '.join(sorted(calls[file][other]))}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", help="a folder of C files, such as src/engine")
    folder = parser.parse_args().folder
    modules = dict(folders(TOP))
    if not folder:
        return print_circles()
    if folder not in modules:
        parser.error(f"{folder} has no C files: name a folder below src or tools, such as src/engine")
    calls = calls_between(modules[folder])
    if circles_of(calls):
        parser.error(f"files of {folder} call each other in a circle: run dev/circles.py without a folder")
    for floor in floors_of(calls):
        print(", ".join(pathlib.Path(file).stem for file in floor))


if __name__ == "__main__":
    sys.exit(main())
