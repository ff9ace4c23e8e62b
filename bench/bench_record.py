"""The file that keeps a suite's measurements, docs/figures/bench-SUITE.jsonl: JSON lines, so that two files can be compared
line by line.

The first line records what was measured, on which machine, by which command; "libraries" holds what all rows of a library
have in common. Each other line is one measurement:

  {"round": 0, "bytes": 8, "state": "near", "library": "mpich", "median_us": 0.4, ...}    of a curve: one library, one size
  {"round": 0, "case": "median, us", "state": "near", "value": 43.805}                    of a case

Values that belong to a size in a round and not to one library, such as the ratio, are in Shoal's row. In memory these rows
are one point with "results", by library. The file contains no value that can be computed from the rows.
"""
import json

KEY = ("round", "bytes", "state")
SHARED = ("ratio", "ratio_openmpi", "ratio_deepspeed", "peer", "wire")


def common_of(points, library):
    """Returns the common part of a library's results."""
    results = [point["results"][library] for point in points if library in point["results"]]
    return {name: value for name, value in results[0].items() if name != "bytes" and
            all(name in one and one[name] == value for one in results)} if len(results) > 1 else {}


def rows_of(point, libraries):
    if "results" not in point:
        return [point]
    key = {name: point[name] for name in KEY}
    shared = {name: point[name] for name in SHARED if name in point}
    return [{**key, "library": library, **(shared if library == "shoal" else {}),
             **{name: value for name, value in result.items() if name not in key and name not in libraries[library]}}
            for library, result in point["results"].items()]


def write(path, record):
    points = record["points"]
    libraries = {name: common_of(points, name) for point in points for name in point.get("results", ())}
    head = {name: value for name, value in record.items() if name not in ("points", "summary")}
    head |= {"libraries": libraries} if libraries else {}
    rows = [row for point in points for row in rows_of(point, libraries)]
    path.write_text("".join(json.dumps(row) + "\n" for row in (head, *rows)))


def is_same(point, row):
    return all(point[name] == row[name] for name in KEY) and row["library"] not in point["results"]


def read(path):
    head, *rows = map(json.loads, path.read_text().splitlines())
    libraries, points = head.pop("libraries", {}), []
    for row in rows:
        if "library" not in row:
            points.append(row)
            continue
        library = row.pop("library")
        if not (points and is_same(points[-1], {**row, "library": library})):
            points.append({**{name: row[name] for name in KEY}, "results": {}})
        points[-1].update({name: row.pop(name) for name in SHARED if name in row})
        result = {name: value for name, value in row.items() if name == "bytes" or name not in KEY}
        points[-1]["results"][library] = libraries[library] | result
    return {**head, "points": points}
