#!/usr/bin/env python3
"""Writes the tables of README.md from the figures on record in docs/figures, between the comments that name them.

  dev/readme.py            writes them
  dev/readme.py --check    prints what differs; exit code 1 when something does (dev/check.py asks the same)
"""
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TOP / "bench"))

from bench_report import TITLES, number_text, record_read, size_text  # noqa: E402

README = TOP / "README.md"
K, M = 1 << 10, 1 << 20
BLOCK = r"(<!-- dev/readme.py: {} -->\n).*?(<!-- end -->\n)"


def record(suite):
    """A suite's record, and by size its rows of cores that share a cache."""
    told = record_read(TOP / "docs/figures", suite)
    rows = {row["bytes"]: row for row in told["summary"] if row["state"] == "near"}
    if not rows:
        raise ValueError(f"docs/figures/bench-{suite}.jsonl has no figure of cores that share a cache, which the tables want")
    return told, rows


def time_text(microseconds):
    for limit, divisor, unit in ((1e3, 1, "us"), (1e6, 1e3, "ms")):
        if microseconds < limit:
            value = microseconds / divisor
            return f"{value:.3g} {unit}" if value >= 10 else f"{value:.2f} {unit}"
    return f"{microseconds / 1e6:.2f} s"


def time_of(rows, size, name):
    return time_text(rows[size]["times_us"][name]) if size in rows else "-"


def ratio_of(rows, size, metric="ratio"):
    return number_text(rows[size][metric]["value"]) if size in rows and metric in rows[size] else "-"


def table(head, lines):
    rows = [f"| {' | '.join(cells)} |\n" for cells in (head, *lines)]
    return rows[0] + f"|---|{'---:|' * (len(head) - 1)}\n" + "".join(rows[1:])


def rounds_text(*parts):
    counts = [row["rounds"] for rows, sizes in parts for row in (rows[size] for size in sizes if size in rows)]
    return f"{min(counts)} to {max(counts)} rounds" if min(counts) < max(counts) else f"{counts[0]} rounds"


def all_reduce():
    (plain, near), (inplace, shared) = record("plain"), record("inplace")
    sizes = [size for size in (8, 4 * K, 32 * K, 256 * K, 2 * M, 16 * M, 64 * M, 256 * M) if size in near or size in shared]
    peers = [name for name in TITLES if name in next(iter(near.values()))["times_us"]]
    best = f"{'fastest' if len(peers) > 2 else 'faster'} peer / Shoal"
    head = ["all-reduce, float32 sum", "Shoal", *(TITLES[name] for name in peers), best, "Shoal, shared in place", best]
    lines = [[size_text(size), *(time_of(near, size, name) for name in ("shoal", *peers)), ratio_of(near, size),
              time_of(shared, size, "shoal"), ratio_of(shared, size)] for size in sizes]
    return (f"`{plain['command']}` and `{inplace['command']}` on {plain['machine']['cpu']}: medians of "
            f"{rounds_text((near, sizes), (shared, sizes))} in which the cores shared a cache.\n\n{table(head, lines)}")


def from_python():
    sizes = (64, 32 * K, 2 * M, 16 * M, 64 * M, 256 * M)
    (told, near), (_, shared) = record("torch-all_reduce-2"), record("torch-all_reduce-2-zero-copy")
    head = ["", "Shoal", "Gloo", "Gloo / Shoal", "DeepSpeed / Shoal", "Shoal, `shoal.torch.empty`", "Gloo / Shoal"]
    lines = [[size_text(size), time_of(near, size, "shoal"), time_of(near, size, "gloo"), ratio_of(near, size),
              ratio_of(near, size, "ratio_deepspeed"), time_of(shared, size, "shoal"), ratio_of(shared, size)]
             for size in sizes]
    return (f"`{told['command']}` and `torch-all_reduce-2-zero-copy`, {told['what']}: medians of "
            f"{rounds_text((near, sizes), (shared, sizes))} in which the cores shared a cache.\n\n{table(head, lines)}")


BLOCKS = {"all-reduce": all_reduce, "from Python": from_python}


def written(text):
    """The text with each block as the records have it. ValueError: a block is not there once, or a record has no such figures."""
    for name, make in BLOCKS.items():
        text, count = re.subn(BLOCK.format(re.escape(name)), lambda match: f"{match[1]}\n{make()}\n{match[2]}", text, flags=re.S)
        if count != 1:
            raise ValueError(f"README.md has {count} blocks \"<!-- dev/readme.py: {name} -->\" that end with \"<!-- end -->\"")
    return text


def differences():
    """(line, text) of README.md where it is not as the records have it."""
    have = README.read_text()
    try:
        want = written(have).splitlines()
    except ValueError as error:
        return [(1, str(error))]
    lines = have.splitlines()
    at = next((i for i, (one, other) in enumerate(zip(lines, want)) if one != other), min(len(lines), len(want)))
    return [] if lines == want else [(at + 1, "it differs from docs/figures: run dev/readme.py")]


def main():
    if sys.argv[1:] == ["--check"]:
        for line, text in differences():
            print(f"README.md:{line}: {text}")
        return 1 if differences() else 0
    if sys.argv[1:]:
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    README.write_text(written(README.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
