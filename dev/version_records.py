"""The results of dev/versions.py, one record per line in docs/versions.jsonl. Writes the tables of docs/python.md and
docs/tensorflow.md from them. A record holds a hash of the sources that it was made with. If the sources have changed since,
the row has to run again: its table says so, and has to be rewritten after the change."""
import datetime
import hashlib
import json
import pathlib
import re

TOP = pathlib.Path(__file__).resolve().parent.parent
BLOCK = r"(<!-- dev/versions.py -->\n).*?(<!-- end -->\n)"
SUFFIXES = (".py", ".h", ".c", ".cpp")
SHIMS = {"c++": "shim in C++", "python": "shim in Python"}  # tests/python names its cases after these
PAGES = {"docs/python.md": SHIMS, "docs/tensorflow.md": {"": "passed / failed / skipped"}}  # the columns of each page's table


def name_of(program):
    """Returns a program and its arguments as records name it."""
    return " ".join([pathlib.Path(program[0]).name, *program[1:]])


def fingerprint(folders, top=TOP):
    """Returns a hash of the sources in some folders."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in folders for path in (top / folder).rglob("*") if path.suffix in SUFFIXES):
        digest.update(f"{path.relative_to(top)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def read(top=TOP):
    """Returns {(row, program): record}, in the order of the file."""
    file = top / "docs/versions.jsonl"
    records = map(json.loads, file.read_text().splitlines() if file.exists() else ())
    return {(record["row"], record["program"]): record for record in records}


def keep(record, top=TOP):
    """Replaces the record of the same row and program, and rewrites the tables."""
    records = {**read(top), (record["row"], record["program"]): record}
    (top / "docs/versions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records.values()))
    write_tables(top)


def write_tables(top=TOP):
    for page in PAGES:
        path = top / page
        path.write_text(_written(page, path.read_text(), top))


def _count(record, shim):
    """Returns a cell "passed / failed / skipped", or "-" if none of its cases ran."""
    return (" / ".join(map(str, record["counts"].get(shim, ()))) or "-") + ("" if record["ended"] else ", did not end")


def _day(record, top):
    day = datetime.date.fromisoformat(record["date"])
    is_outdated = record["sources"] != fingerprint(record["folders"], top)
    return f"{day.day} {day:%B %Y}{', with older sources' if is_outdated else ''}"


def table(page, top):
    columns = PAGES[page]
    lines = ["| versions | program | " + " | ".join(columns.values()) + " | on |\n", "|---|---|" + "---:|" * len(columns) + "---|\n"]
    for record in read(top).values():
        if record["page"] == page:
            counts = [_count(record, shim) for shim in columns]
            cells = [record["versions"], f"`{record['program'].split()[0]}`", *counts, _day(record, top)]
            lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def _written(page, text, top):
    """Returns a page with its table from the records. Raises ValueError if it has no place for one."""
    text, count = re.subn(BLOCK, lambda match: f"{match[1]}\n{table(page, top)}\n{match[2]}", text, flags=re.S)
    if count != 1:
        raise ValueError(f"{page} has {count} blocks \"<!-- dev/versions.py -->\" that end with \"<!-- end -->\"")
    return text


def differences(top=TOP):
    """Yields (page, line, text) for pages whose table differs from the records."""
    found = []
    for page in PAGES:
        have = (top / page).read_text()
        try:
            want = _written(page, have, top)
        except ValueError as error:
            found.append((page, 1, str(error)))
            continue
        if have != want:
            line = next((i for i, (one, other) in enumerate(zip(have.splitlines(), want.splitlines()), 1) if one != other), 1)
            found.append((page, line, "it differs from docs/versions.jsonl and the sources of today: run dev/versions.py --tables"))
    return found


def failing(top=TOP):
    """Returns (row, program, failure) of each failure."""
    return [(*key, f"failed: {', '.join(record['failed'])}") for key, record in read(top).items() if record["failed"]]


def outdated(rows, top=TOP):
    """Returns (row, program, why it has to run again), for rows of dev/versions.py."""
    records, found = read(top), []
    for row in rows:
        sources = fingerprint(row.sources, top)
        for program in map(name_of, row.programs):
            record = records.get((row.name, program))
            if not record:
                found.append((row.name, program, "never ran"))
            elif record["sources"] != sources:
                found.append((row.name, program, f"ran on {record['date']}, with other sources"))
    return found
