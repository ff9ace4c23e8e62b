#!/usr/bin/env python3
"""Writes the figures on record in docs/figures into pages: the tables of docs/how-fast.md and the plots of docs/glance.md
(plots.py), between the comments that name them, and the bar chart of README.md. Pictures are for light and dark pages.

  dev/readme.py            writes them
  dev/readme.py --check    prints differences; exit code 1 if there are any (dev/check.py runs the same check)
"""
import functools
import html
import pathlib
import re
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP / "bench"), str(TOP / "dev")]

import plots  # noqa: E402
import written  # noqa: E402
from bench_report import TITLES, number_text, record_read, size_text  # noqa: E402
from svg import COLORS  # noqa: E402

PICTURES = TOP / "docs/pictures"
K, M = 1 << 10, 1 << 20
BLOCK = r"(<!-- dev/readme.py: {} -->\n).*?(<!-- end -->\n)"


def record(suite):
    """Returns a suite's record, and by size its rows of cores that share a cache."""
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


PAGES = {TOP / "docs/how-fast.md": {"all-reduce": all_reduce, "from Python": from_python},
         TOP / "docs/glance.md": {name: functools.partial(plots.block, name) for name in plots.PLOTS}}


# ---- The bar chart ------------------------------------------------------------------------------------------------------------

WIDTH, LEFT, BAR, GROUP = 760, 150, 22, 76  # pixels: whole width, width of labels, height of a bar, distance between sizes
CHART_SIZES = (2 * M, 16 * M, 64 * M)


def chart(scheme):
    """All-reduce from PyTorch by size. Gloo's bar has the full length; Shoal's shows its part of Gloo's time."""
    told, near = record("torch-all_reduce-2")
    color, room = COLORS[scheme], WIDTH - LEFT - 170
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {56 + GROUP * len(CHART_SIZES)}" font-family="system-ui, sans-serif" '
           f'font-size="15"><title>All-reduce from PyTorch: Shoal takes a fraction of the time of Gloo</title>',
           text_of(0, 20, "all_reduce from PyTorch, two ranks, float32: time, less is better", color["text"], "bold")]
    for number, size in enumerate(CHART_SIZES):
        top, ratio = 44 + GROUP * number, near[size]["ratio"]["value"]
        out.append(text_of(0, top + BAR + 6, size_text(size), color["text"]))
        for row, (name, length) in enumerate((("gloo", room), ("shoal", room / ratio))):
            title = TITLES.get(name, "Shoal")
            y = top + row * (BAR + 4)
            label = f"{title} {time_of(near, size, name)}" + (f", {number_text(ratio)} times faster" if name == "shoal" else "")
            out += [f'<rect x="{LEFT - 60}" y="{y}" width="{length:.1f}" height="{BAR}" rx="3" fill="{color["shoal" if name == "shoal" else "peer"]}"/>',
                    text_of(LEFT - 52 + length, y + 16, label, color["text" if name == "shoal" else "soft"])]
    out.append(text_of(0, 48 + GROUP * len(CHART_SIZES), f"{told['command']} on {told['machine']['cpu']}", color["soft"]))
    return "\n".join([*out, "</svg>", ""])


def text_of(x, y, text, color, weight="normal"):
    return f'<text x="{x:.0f}" y="{y}" fill="{color}" font-weight="{weight}">{html.escape(text)}</text>'


# ---- All of it ---------------------------------------------------------------------------------------------------------------

def written_page(page, blocks):
    """Returns the page's text with each block from the records. Raises ValueError if a block is not there exactly once, or a
    record lacks its figures."""
    text = page.read_text()
    for name, make in blocks.items():
        block = BLOCK.format(re.escape(name))
        text, count = re.subn(block, lambda match, make=make: f"{match[1]}\n{make()}\n{match[2]}", text, flags=re.S)
        if count != 1:
            raise ValueError(f'{page.name} has {count} blocks "<!-- dev/readme.py: {name} -->" that end with "<!-- end -->"')
    return text


def pictures():
    """Returns each picture's path and text."""
    drawn = {name: plot().text for name, (_, plot, _) in plots.PLOTS.items()}
    return {PICTURES / f"{name}-{scheme}.svg": text(scheme)
            for name, text in {"all-reduce": chart, **drawn}.items() for scheme in COLORS}


def page_differences(page, blocks):
    try:
        return file_differences({page: written_page(page, blocks)})
    except ValueError as error:
        return [(page, 1, str(error))]


def file_differences(files):
    return [(path, difference_of(path, text), "it differs from docs/figures: run dev/readme.py") for path, text in files.items()
            if not path.exists() or path.read_text() != text]


def differences():
    """Returns (path, line, text) for each file that differs from the records."""
    try:
        drawn = file_differences(pictures())
    except ValueError as error:
        drawn = [(PICTURES, 1, str(error))]
    return [*(one for page, blocks in PAGES.items() for one in page_differences(page, blocks)), *drawn]


def difference_of(path, text):
    """Returns the first line that differs."""
    have, want = path.read_text().splitlines() if path.exists() else [], text.splitlines()
    return next((number for number, (one, other) in enumerate(zip(have, want), 1) if one != other), min(len(have), len(want)) + 1)


def wanted():
    """Returns each file's path and text."""
    return {**{page: written_page(page, blocks) for page, blocks in PAGES.items()}, **pictures()}


if __name__ == "__main__":
    sys.exit(written.run(__doc__, wanted, differences))
