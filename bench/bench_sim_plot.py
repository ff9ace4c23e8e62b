"""Plots of the records that bench_sim.py writes: times of a collective over hosts or sizes, and efficiencies of steps over
workers. A dashed line is the bound of wire and PCIe."""
import math

from bench_report import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, line_svg, page_svg, size_text, text_svg

COLORS = ("#1f6fb4", "#d9701a", "#2f8f4e", "#8a4fb0", "#b03a3a", "#777777")
LABELS_APART = 45  # pixels


def decades(least, most):
    """Returns the powers of ten around a range, at least two."""
    low = math.floor(math.log10(least))
    return [10.0 ** power for power in range(low, max(math.ceil(math.log10(most)), low + 1) + 1)]


def time_text(us):
    return f"{us / 1e6:g} s" if us >= 1e6 else f"{us / 1e3:g} ms" if us >= 1e3 else f"{us:g} us"


def network_text(row):
    return (f"network {row['rate_gbit_s']:g} Gbit/s, latency {row['latency_us']:g} us, {row['message_us']:g} us per message and "
            f"side, memory {row['memory_gb_s']:g} GB/s per rank; dashed: the bound")


def head(rows, what):
    each = rows[0]["ranks"] // rows[0]["hosts"]
    return [text_svg(WIDTH / 2, 18, f"{what} predicted, {each} rank{'' if each == 1 else 's'} per host", size=15),
            text_svg(WIDTH / 2, 34, network_text(rows[0]), size=11)]


def grid(x, marks, values, texts, title):
    """Draws the lines of both axes. marks and values: pairs of a pixel and its label."""
    parts, last = [], -LABELS_APART
    for at, text in values:
        parts += [line_svg(LEFT, at, WIDTH - RIGHT, at), text_svg(LEFT - 8, at + 4, text, "end")]
    for mark, text in zip(marks, texts):
        at = x.at(mark)
        if at >= last + LABELS_APART:
            last = at
            parts += [line_svg(at, TOP, at, HEIGHT - BOTTOM), text_svg(at, HEIGHT - BOTTOM + 18, text, size=11)]
    return [*parts, text_svg((LEFT + WIDTH - RIGHT) / 2, HEIGHT - BOTTOM + 36, title)]


def curve(number, points, bounds, name):
    """Draws a curve with a dot at each point, and its bound. Points are pixels."""
    color = COLORS[number % len(COLORS)]

    def line(of, width, extra=""):
        path = " ".join(f"{at},{height}" for at, height in of)
        return f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{extra}/>'

    return [line(bounds, 1.2, ' stroke-dasharray="5 4"'), line(points, 2),
            *(f'<circle cx="{at}" cy="{height}" r="3" fill="{color}"/>' for at, height in points),
            text_svg(LEFT + 10 + 220 * (number % 3), HEIGHT - 8, f"● {name}", "start", 12, f'fill="{color}"')]


def times(rows):
    """Plots times over hosts, a curve for each size. If all rows have one number of hosts, plots them over sizes."""
    over_hosts = len({row["hosts"] for row in rows}) > 1
    key = "hosts" if over_hosts else "bytes"
    marks = sorted({row[key] for row in rows})
    x = Axis(marks[0], max(marks[-1], marks[0] * 1.5), LEFT, WIDTH - RIGHT)
    lines = decades(min(row["bound_us"] or row["time_us"] for row in rows), max(row["time_us"] for row in rows))
    y = Axis(lines[0], lines[-1], HEIGHT - BOTTOM, TOP)
    parts = head(rows, rows[0]["collective"]) + grid(
        x, marks, [(y.at(us), time_text(us)) for us in lines], [str(mark) if over_hosts else size_text(mark) for mark in marks],
        "hosts" if over_hosts else "size")
    for number, size in enumerate(sorted({row["bytes"] for row in rows}) if over_hosts else [None]):
        chosen = [row for row in rows if size in (None, row["bytes"])]
        parts += curve(number, [(x.at(row[key]), y.at(row["time_us"])) for row in chosen],
                       [(x.at(row[key]), y.at(row["bound_us"])) for row in chosen if row["bound_us"]],
                       "predicted" if size is None else size_text(size))
    return page_svg(HEIGHT, parts)


# Herring, SC20: BERT-large on 2,048 V100.
PUBLISHED_RANKS, PUBLISHED = 2048, 0.85


def published(x, height_of, marks):
    if not marks[0] <= PUBLISHED_RANKS <= marks[-1]:
        return []
    at, height = x.at(PUBLISHED_RANKS), height_of(PUBLISHED)
    return [f'<path d="M{at - 6} {height - 6}l12 12m0 -12l-12 12" stroke="#b03a3a" stroke-width="2"/>',
            text_svg(at - 10, height + 20, "published: 85 % at 2,048 (Herring, BERT-large)", "end", 11, 'fill="#b03a3a"')]


def efficiencies(rows):
    """Plots efficiencies of steps over workers, a curve for each profile."""
    def height_of(share):
        return round(HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP), 1)

    marks = sorted({row["ranks"] for row in rows})
    x = Axis(marks[0], max(marks[-1], marks[0] * 1.5), LEFT, WIDTH - RIGHT)
    parts = head(rows, "efficiency of training steps") + grid(
        x, marks, [(height_of(percent / 100), f"{percent} %") for percent in range(0, 101, 20)], map(str, marks), "workers")
    for number, profile in enumerate(dict.fromkeys(row["profile"] for row in rows)):
        chosen = [row for row in rows if row["profile"] == profile]
        parts += curve(number, [(x.at(row["ranks"]), height_of(row["efficiency"])) for row in chosen],
                       [(x.at(row["ranks"]), height_of(row["bound_efficiency"])) for row in chosen],
                       f"{profile}, backward {chosen[0]['backward_us'] / 1e3:g} ms")
    return page_svg(HEIGHT, parts + published(x, height_of, marks))


def plot(rows):
    """Returns the picture of a suite's rows."""
    return efficiencies(rows) if "profile" in rows[0] else times(rows)
