"""Reports of bench/bench.py's measurements: a record, a Markdown table, a plot, and a judgement of each target.

Only figures of the same state of the machine are combined. The states are near (the two cores share a cache, an exchange
takes under 100 ns), far (they do not, under 1 us) and crowded (one core for both ranks, or others use the machine). A round
whose runs saw different states is mixed.
"""
import math
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import bench_record

STATES = ("near", "far", "crowded", "mixed", "unknown")
COLORS = {"near": "#1f6fb4", "far": "#d9701a", "crowded": "#777777", "mixed": "#aaaaaa", "unknown": "#777777"}
TITLES = {"impi": "Intel MPI", "openmpi": "Open MPI", "mpich": "MPICH", "gloo": "Gloo", "deepspeed": "DeepSpeed"}
METRICS = {"ratio_deepspeed": "DeepSpeed "}  # a table's words before the limit, if the limit is not of the main figure
K, M = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parent.parent
DEVELOPERS = ("cliffs", "four")  # suites that begin so find regressions
HUGE = 1 << 62


def exchange_state(exchange_ns):
    if exchange_ns is None:
        return "unknown"
    return "near" if exchange_ns < 100 else "far" if exchange_ns < 1000 else "crowded"


def size_text(size):
    value, units = size, ["B", "KiB", "MiB", "GiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:g} {units[0]}" if value == int(value) else f"{value:.2f} {units[0]}"


def spread(values):
    return {"value": median(values), "least": min(values), "most": max(values)}


# ---- Summaries -------------------------------------------------------------------------------------------------------------

def groups(points, key):
    """Returns points by key and state, in the order of the states."""
    found = {}
    for one in points:
        found.setdefault((one[key], one["state"]), []).append(one)
    order = list(dict.fromkeys(one[key] for one in points))
    return [(what, state, found[what, state]) for what in order for state in STATES if (what, state) in found]


def loop_ratio(point):
    """Returns the ratio of loop times, against the peer that a point names, or the fastest."""
    results = point["results"]
    peers = [point["peer"]] if "peer" in point else [name for name in results if name != "shoal"]
    return min(results[name]["loop_us"] for name in peers) / results["shoal"]["loop_us"]


def wire_summary(points):
    """Summarizes emulated hosts: shares of the wire's bound, and CPU seconds per GB sent by all hosts."""
    names = points[0]["results"]
    return {"share": spread([one["results"]["shoal"]["share"] for one in points]),
            "shares": {name: median([one["results"][name]["share"] for one in points]) for name in names},
            "cpu_s_per_gb": {name: median([one["results"][name]["cpu_s_per_gb"] for one in points]) for name in names},
            "ratio_openmpi": spread([one["ratio_openmpi"] for one in points]),
            "wire_gb_s": spread([one["wire"]["both_gb_s"] for one in points])}


def curve_summary(record):
    rows = []
    for size, state, points in groups(record["points"], "bytes"):
        names = points[0]["results"]
        shoal = [one["results"]["shoal"] for one in points]
        row = {"bytes": size, "state": state, "rounds": len(points), "ratio": spread([one["ratio"] for one in points])}
        row["times_us"] = {name: median([one["results"][name]["median_us"] for one in points]) for name in names}
        row |= {name: one[name] for name, one in (("algorithm", shoal[-1]), ("peer", points[0])) if name in one}
        row["loop_ratio"] = spread([loop_ratio(one) for one in points])
        if state != "unknown":
            row["exchange_ns"] = median([one["exchange_ns"] for one in shoal])
            row["over_exchange_us"] = spread([one["median_us"] - one["exchange_ns"] / 1000 for one in shoal])
        if "ratio_deepspeed" in points[0]:
            row["ratio_deepspeed"] = spread([one["ratio_deepspeed"] for one in points])
        if "wire" in points[0]:
            row.update(wire_summary(points))
        if "probe_us" in shoal[0]:
            row["of_probe"] = spread([one["median_us"] / one["probe_us"] for one in shoal])
        rows.append(row)
    return rows


def cases_summary(record):
    return [{"case": case, "state": state, "rounds": len(points), "value": spread([one["value"] for one in points])}
            for case, state, points in groups(record["points"], "case")]


def summary(record):
    return curve_summary(record) if record["kind"] == "curve" else cases_summary(record)


def folder_of(suite):
    """Returns the folder of a suite's record: that of the benchmark if only developers compare it, else that of the manual."""
    return ROOT / ("bench/records" if suite.startswith(DEVELOPERS) else "docs/figures")


def record_path(folder, suite):
    """folder: None for the suite's own."""
    return (folder or folder_of(suite)) / f"bench-{suite}.jsonl"


def record_write(folder, record):
    """Writes the record. If the suite has a plot, draws it anew: only the few that the docs show. `make docs` draws all."""
    record["summary"] = summary(record)
    path = record_path(folder, record["suite"])
    path.parent.mkdir(parents=True, exist_ok=True)
    bench_record.write(path, record)
    if path.with_suffix(".svg").exists():
        path.with_suffix(".svg").write_text(plot(record))


def record_read(folder, suite):
    record = bench_record.read(record_path(folder, suite))
    return {**record, "summary": summary(record)}


# ---- Table -----------------------------------------------------------------------------------------------------------------

def number_text(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread_text(one, text=number_text):
    return f"{text(one['value'])} ({text(one['least'])} .. {text(one['most'])})"


def share_text(value):
    return f"{value:.3f}"


def wire_cells(row, peers):
    return [spread_text(row["wire_gb_s"], share_text), spread_text(row["share"], share_text),
            *(share_text(row["shares"][name]) for name in peers),
            *(number_text(row["cpu_s_per_gb"][name]) for name in ("shoal", *peers))]


def curve_table(rows):
    peers = [name for name in rows[0]["times_us"] if name != "shoal"]
    peers.sort(reverse=True)
    probed = "of_probe" in rows[0]
    against = TITLES[rows[0]["peer"]] if "peer" in rows[0] else "fastest peer" if len(peers) > 2 else "faster peer"
    head = ["size", "state", "exchange ns", "rounds", "Shoal us", *(f"{name} us" for name in peers), f"{against} / Shoal"]
    head += ["in a loop"]
    has_deepspeed = "ratio_deepspeed" in rows[0]
    wired = "share" in rows[0]
    more = ["wire GB/s", "Shoal of the wire", *(f"{name} of it" for name in peers), "CPU s/GB Shoal", *peers] if wired else []
    head += (["Shoal / probe"] if probed else []) + (["DeepSpeed / Shoal"] if has_deepspeed else [])
    lines = [head + more]
    for row in rows:
        times = [row["times_us"]["shoal"], *(row["times_us"][name] for name in peers)]
        exchange = f"{row['exchange_ns']:.0f}" if "exchange_ns" in row else "-"
        cells = [size_text(row["bytes"]), row["state"], exchange, str(row["rounds"]),
                 *map(number_text, times), spread_text(row["ratio"]), spread_text(row["loop_ratio"])]
        cells += [spread_text(row["of_probe"])] if probed else []
        cells += [spread_text(row["ratio_deepspeed"])] if has_deepspeed else []
        lines.append(cells + (wire_cells(row, peers) if wired else []))
    return lines


def cases_table(rows):
    return [["case", "state", "rounds", "value"]] + [[row["case"], row["state"], str(row["rounds"]), spread_text(row["value"])]
                                                     for row in rows]


def judged(suite, lines, rows):
    """Appends each row's target to a table's lines, the strictest one if there are several, and a mark if it is met."""
    told = [["wants", "met"]]
    for row in rows:
        targets = [target for target in TARGETS if target.suite == suite and row in target_rows(target, rows)]
        limits = {}
        for target in targets:
            limits[target.metric] = (max if target.least else min)(target.limit, limits.get(target.metric, target.limit))
        signs = {target.metric: sign_text(target) for target in targets}
        wants = [f"{METRICS.get(metric, '')}{signs[metric]} {limit:g}" for metric, limit in limits.items()]
        met = ("yes" if all(is_met(target, row) for target in targets) else "no") if targets else "-"
        told.append([", ".join(wants) or "-", met])
    return [cells + more for cells, more in zip(lines, told)]


def markdown(record):
    rows = record.get("summary") or summary(record)
    lines = curve_table(rows) if record["kind"] == "curve" else cases_table(rows)
    lines = judged(record["suite"], lines, rows) if record.get("is_judged") else lines
    lines.insert(1, ["---"] + ["---:"] * (len(lines[0]) - 1))
    what = record["machine"]
    text = f"### {record['title']}\n\n"
    text += f"`{record['command']}` on {what['cpu']}, {what['cores']} cores, Linux {what['kernel']}."
    text += f" Shoal's part: `{record['shoal_command']}`." if record["shoal_command"] else ""
    text += f" Median over rounds (least .. most); {record['what']}.\n\n"
    return text + "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


# ---- Plot ------------------------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 30, 50, 60


class Axis:
    """A logarithmic axis from least to most over the pixels from start to end."""

    def __init__(self, least, most, start, end):
        self.low, self.high, self.start, self.end = math.log2(least), math.log2(most), start, end

    def at(self, value):
        part = (math.log2(value) - self.low) / max(self.high - self.low, 1e-9)
        return round(self.start + part * (self.end - self.start), 1)


def text_svg(x, y, text, anchor="middle", size=12, extra=""):
    safe = text.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" {extra}>{safe}</text>'


def line_svg(x0, y0, x1, y1, color="#dddddd", width=1.0, extra=""):
    return f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{color}" stroke-width="{width}" {extra}/>'


def page_svg(height, parts):
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">\n'
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n")


def powers(least, most):
    return [2.0 ** power for power in range(math.floor(math.log2(least)), math.ceil(math.log2(most)) + 1)]


def curve_grid(x, y, sizes, ratios):
    parts = []
    for ratio in ratios:
        strong = {"color": "#555555", "width": 1.5} if ratio == 1 else {}
        parts += [line_svg(LEFT, y.at(ratio), WIDTH - RIGHT, y.at(ratio), **strong),
                  text_svg(LEFT - 8, y.at(ratio) + 4, f"{ratio:g}x", "end")]
    for size in sizes:
        parts += [line_svg(x.at(size), TOP, x.at(size), HEIGHT - BOTTOM),
                  text_svg(x.at(size), HEIGHT - BOTTOM + 18, size_text(size), size=11)]
    return parts


def curve_series(x, y, rows, state):
    chosen = [row for row in rows if row["state"] == state]
    color = COLORS[state]
    path = " ".join(f"{x.at(row['bytes'])},{y.at(row['ratio']['value'])}" for row in chosen)
    parts = [f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>']
    for row in chosen:
        at, ratio = x.at(row["bytes"]), row["ratio"]
        parts += [line_svg(at, y.at(ratio["least"]), at, y.at(ratio["most"]), color, 1.5),
                  f'<circle cx="{at}" cy="{y.at(ratio["value"])}" r="3.5" fill="{color}"/>']
    return parts


def peers_text(rows):
    if "peer" in rows[0]:
        return TITLES[rows[0]["peer"]]
    names = [title for name, title in TITLES.items() if name in rows[0]["times_us"]]
    best = "fastest" if len(names) > 2 else "faster"
    return f"the {best} of {', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


def curve_plot(record, rows):
    sizes = sorted({row["bytes"] for row in rows})
    ratios = powers(min(1, *(row["ratio"]["least"] for row in rows)), max(2, *(row["ratio"]["most"] for row in rows)))
    x = Axis(sizes[0], sizes[-1], LEFT + 15, WIDTH - RIGHT - 15)
    y = Axis(ratios[0], ratios[-1], HEIGHT - BOTTOM, TOP)
    parts = [text_svg(WIDTH / 2, 22, record["title"], size=15),
             text_svg(WIDTH / 2, 40, f"time of {peers_text(rows)} over Shoal's; above 1 Shoal is faster", size=11)]
    parts += curve_grid(x, y, sizes, ratios)
    for index, state in enumerate(state for state in STATES if any(row["state"] == state for row in rows)):
        parts += curve_series(x, y, rows, state)
        parts.append(text_svg(LEFT + 15 + 110 * index, HEIGHT - 14, f"● {state}", "start", 12, f'fill="{COLORS[state]}"'))
    return page_svg(HEIGHT, parts)


def cases_plot(record, rows):
    """Draws one line per case and state: the median as a dot, minimum to maximum as a bar, on a logarithmic axis."""
    values = powers(min(1, *(row["value"]["least"] for row in rows)), max(2, *(row["value"]["most"] for row in rows)))
    height = TOP + 20 * len(rows) + 40
    x = Axis(values[0], values[-1], 360, WIDTH - RIGHT)
    parts = [text_svg(WIDTH / 2, 22, record["title"], size=15)]
    for value in values:
        parts += [line_svg(x.at(value), TOP - 10, x.at(value), height - 35), text_svg(x.at(value), height - 18, f"{value:g}")]
    for index, row in enumerate(rows):
        y, color, one = TOP + 20 * index, COLORS[row["state"]], row["value"]
        parts += [text_svg(350, y + 4, f"{row['case']} ({row['state']})", "end", 11),
                  line_svg(x.at(one["least"]), y, x.at(one["most"]), y, color, 2),
                  f'<circle cx="{x.at(one["value"])}" cy="{y}" r="4" fill="{color}"/>']
    return page_svg(height, parts)


def plot(record):
    rows = record.get("summary") or summary(record)
    return curve_plot(record, rows) if record["kind"] == "curve" else cases_plot(record, rows)


# ---- Targets ---------------------------------------------------------------------------------------------------------------

@dataclass
class Target:
    """The target of a suite's figures, from one size up to below another. least: limit is a minimum, otherwise a maximum.
    case: only the case of this name. beside: the peer without which there is no target."""
    suite: str
    text: str
    metric: str
    limit: float
    least: bool = True
    size_from: int = 0
    size_below: int = HUGE
    case: str = ""
    beside: str = ""


def torch_targets():
    for ranks in (2, 4):
        for collective in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
            for memory, large in (("", 3), ("-zero-copy", 6)):
                suite = f"torch-{collective}-{ranks}{memory}"
                yield Target(suite, "faster than Gloo", "ratio", 1)
                yield Target(suite, "up to 64 KiB", "ratio", 5, size_below=64 * K + 1)
                yield Target(suite, "from 16 MiB", "ratio", large, size_from=16 * M)
            yield Target(f"torch-hosts-{ranks}-{collective}", "never slower", "ratio", 1)
        yield Target(f"torch-all_reduce-{ranks}", "never slower than DeepSpeed", "ratio_deepspeed", 1, beside="deepspeed")
    yield Target("torch-latency", "64 B from Python", "value", 25, False, case="Shoal, median, us")
    for suite in ("torch-ddp-gpt2", "torch-ddp-resnet50"):
        yield Target(suite, "never slower", "value", 1, False, case="step over Gloo's")
        yield Target(suite, "what costs time", "value", 0.25, False, case="communication not hidden over Gloo's")
    yield Target("torch-fsdp-gpt", "faster", "value", 1.2, case="steps per second over Gloo's")


TARGETS = [
    Target("plain", "never slower at 8 B", "ratio", 1, size_below=9),
    Target("plain", "never slower", "ratio", 0.95),
    Target("plain", "from 512 B", "ratio", 1.3, size_from=512, size_below=16 * M),
    Target("plain", "from 16 MiB", "ratio", 1.6, size_from=16 * M),
    Target("plain", "8 B over the bare exchange, us", "over_exchange_us", 0.15, False, 8, 9),
    Target("inplace", "from 32 KiB", "ratio", 3.5, size_from=32 * K, size_below=256 * K),
    Target("inplace", "from 256 KiB to 2 MiB", "ratio", 4, size_from=256 * K, size_below=2 * M + 1),
    Target("inplace", "over reading and writing once", "of_probe", 1.15, False, 2 * M + 1),
    *[Target(suite, "never slower", "ratio", 0.95) for suite in (
        "shared", "reduce-scatter", "all-gather", "all-gather-shared", "all-gather-inplace", "broadcast", "reduce",
        "all-to-all", "gather", "scatter")],
    *[Target(suite, "never slower", "ratio", 0.9) for suite in ("four", "four-inplace")],
    *[Target(suite, "over float32's time", "value", 1.2, False) for suite in ("sixteen", "four-sixteen")],
    *[Target(f"four-{suite}", "never slower", "ratio", 0.9) for suite in (
        "reduce-scatter", "all-gather", "all-gather-shared", "all-gather-inplace", "broadcast", "reduce", "all-to-all",
        "gather", "scatter")],
    *[Target(suite, "over the smooth curve", "value", 1.3, False) for suite in (
        "cliffs", "cliffs-reduce-scatter", "cliffs-all-gather", "cliffs-broadcast", "cliffs-reduce", "cliffs-all-to-all",
        "cliffs-gather", "cliffs-scatter")],
    *[Target(f"hosts-{name}", text, "share", limit, size_from=at, size_below=below)
      for name in ("4x1-all-reduce", "4x1-all-gather", "2x2-all-reduce", "2x2-all-gather")
      for text, limit, at, below in (("of the wire at 16 MiB", 0.93, 16 * M, 64 * M),
                                     ("of the wire from 64 MiB", 0.95, 64 * M, HUGE))],
    *[Target(f"hosts-{name}", "never slower", "ratio", 1) for name in ("4x1-all-reduce", "4x1-all-gather")],
    Target("hosts-4x1-all-reduce", "up to 4 KiB beside Open MPI", "ratio_openmpi", 1, size_below=4 * K + 1),
    Target("hosts-2x1-unshaped", "beside Open MPI", "ratio_openmpi", 1.3, size_from=64 * M),
    Target("late", "from the late peer's arrival, us", "value", 100, False),
    Target("quota", "over Open MPI's", "value", 3, False),
    Target("busy", "over the fastest MPI's", "value", 1.5, False),
    *torch_targets(),
]


def target_rows(target, rows):
    """Returns the rows that a target covers. States other than near and far count only if there are no others."""
    rows = [row for row in rows if target.size_from <= row.get("bytes", 0) < target.size_below and target.metric in row
            and target.case in ("", row.get("case"))]
    clean = {row.get("bytes", row.get("case")) for row in rows if row["state"] in ("near", "far")}
    return [row for row in rows if row["state"] in ("near", "far") or row.get("bytes", row.get("case")) not in clean]


def is_met(target, row):
    value = row[target.metric]["value"]
    return value >= target.limit if target.least else value <= target.limit


def sign_text(target):
    return ">=" if target.least else "<="


def target_print(target, row):
    name = row["case"] if "case" in row else size_text(row["bytes"])
    print(f"{'met' if is_met(target, row) else 'NOT MET':8} {target.suite:24} {target.text}: {name}, {row['state']}: "
          f"{spread_text(row[target.metric])} in {row['rounds']} rounds, wants {sign_text(target)} {target.limit:g}")


def targets_print(folder, suites):
    """Prints each target with its figures. Returns 1 if a target is missed or has no figure, so that scripts notice."""
    missed = 0
    for target in TARGETS:
        if target.suite not in suites:
            continue
        is_there = record_path(folder, target.suite).exists()
        record = record_read(folder, target.suite) if is_there else {"summary": []}
        rows = target_rows(target, record["summary"])
        if not rows and target.beside in record.get("left_out", {}):
            print(f"{'-':8} {target.suite:24} {target.text}: left out: {record['left_out'][target.beside]}")
            continue
        if not rows:
            print(f"{'-':8} {target.suite:24} {target.text}: no figure on record")
        for row in rows:
            target_print(target, row)
        missed += not rows or not all(is_met(target, row) for row in rows)
    print(f"{missed} targets not met or without a figure")
    return 1 if missed else 0
