"""The command line of a program that writes files of the repository from others, and compares them with --check."""
import pathlib
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent


def run(description, files, differences):
    """Writes files, which returns texts by path; with --check, prints differences instead. Returns the exit code."""
    words = sys.argv[1:]
    if words == ["--check"]:
        found = differences()
        for path, line, text in found:
            print(f"{path.relative_to(TOP)}:{line}: {text}")
        return 1 if found else 0
    if words:
        print(description)
        return 0 if words == ["--help"] else 2
    for path, text in files().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return 0
