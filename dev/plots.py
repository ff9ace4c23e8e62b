"""The plots of docs/glance.md, drawn from the records in docs/figures. dev/readme.py writes them and compares them."""
import pathlib
import statistics
import sys

TOP = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP / "bench"), str(TOP / "dev")]

from bench_report import TITLES, Axis, number_text, record_read, size_text  # noqa: E402
from svg import Picture, markup  # noqa: E402

FIGURES = TOP / "docs/figures"
# Pixels: the whole, room for labels on the left and on the right, room for the title. At a phone's width words can still be
# read.
WIDTH, LEFT, RIGHT, HEAD = 580, 66, 104, 66
STEPS = (("ResNet-50", "torch-ddp-resnet50"), ("GPT-2", "torch-ddp-gpt2"))
PEERS = (("impi", "a", "Intel MPI"), ("openmpi", "b", "Open MPI"), ("mpich", "c", "MPICH"))
NAMES = {**TITLES, "shoal": "Shoal"}
FAILURES = {  # cases of the record -> label
    "3 hosts x 2, the `shoal run` of a host is killed": "shoal run of a host is killed, 3 hosts",
    "3 hosts x 2, the ranks blame one of them": "the ranks blame a rank, 3 hosts",
    "2 hosts x 2, a worker is killed; the others compute with Shoal": "a rank is killed, 2 hosts",
    "8 hosts x 1, the same": "a rank is killed, 8 hosts",
    "2 hosts x 1, a worker exits with code 3; the other knows nothing of Shoal": "exit code 3, no Shoal in the program",
    "3 hosts x 2, the cable of a host is cut; the workers ignore SIGTERM": "a cable is cut, SIGTERM ignored",
    "3 hosts x 2, a worker is killed; the others know nothing of Shoal and ignore SIGTERM":
        "a worker is killed, SIGTERM ignored"}


def record(suite):
    return record_read(FIGURES, suite)


def caption(told, what):
    machine, kernel = told["machine"], told["machine"]["kernel"].partition("-")[0]
    return f"`{told['command']}` on {machine['cpu']}, {machine['cores']} cores, Linux {kernel}. {what}"


def rounds_text(counts):
    counts = sorted(counts)
    return f"{counts[0]} to {counts[-1]} rounds" if counts[0] < counts[-1] else f"{counts[0]} round{'s' * (counts[0] > 1)}"


def heading(picture, title, what):
    picture.write(12, 26, title, weight="bold", size=17)
    picture.write(12, 48, what, "soft")


def label_all(picture, x, labels, gap=18):
    """Writes labels (y, text, color) at x, moved down where they would overlap."""
    below = 0
    for y, text, color in sorted(labels):
        below = max(y, below + gap)
        picture.write(x, below + 5, text, color)


# ---- All-reduce by size ------------------------------------------------------------------------------------------------------

def near(told):
    return [row for row in told["summary"] if row["state"] == "near"]


def times_over_shoal():
    """Returns (label, color, {size: time over Shoal's}) for each peer."""
    rows, gloo = near(record("plain")), near(record("torch-all_reduce-2"))
    lines = [(title, color, {row["bytes"]: row["times_us"][name] / row["times_us"]["shoal"] for row in rows})
             for name, color, title in PEERS]
    return [*lines, ("Gloo", "d", {row["bytes"]: row["ratio"]["value"] for row in gloo})]


def sizes_plot():
    lines = times_over_shoal()
    sizes = sorted({size for *_, values in lines for size in values})
    x, y = Axis(sizes[0], sizes[-1], LEFT + 10, WIDTH - RIGHT), Axis(0.5, 1024, 414, HEAD + 14)
    mpis, gloo = [value for *_, values in lines[:-1] for value in values.values()], lines[-1][2].values()
    picture = Picture(WIDTH, 462, "All-reduce of two ranks by size: time of other libraries over Shoal's",
                      f"Intel MPI, Open MPI and MPICH take {number_text(min(mpis))} to {number_text(max(mpis))} times as long "
                      f"as Shoal; Gloo, from PyTorch, {number_text(min(gloo))} to {number_text(max(gloo))} times.")
    heading(picture, "All-reduce of two ranks: time over Shoal's",
            "above 1, Shoal is faster; MPIs from C, Gloo from PyTorch; logarithmic axes")
    for times in (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024):
        line = [(LEFT, y.at(times)), (WIDTH - RIGHT + 10, y.at(times))]
        picture.line(line, *(("shoal", 2.5) if times == 1 else ("grid", 1)))
        picture.write(LEFT - 8, y.at(times) + 5, f"{times:,g}x", "soft", "end", size=13)
    for size in (8, 512, 32 << 10, 2 << 20, 256 << 20):
        picture.write(x.at(size), 436, size_text(size), "soft", "middle", size=13)
    for _, color, values in lines:
        points = [(x.at(size), y.at(value)) for size, value in sorted(values.items())]
        picture.line(points, color, 2.5)
        for point in points:
            picture.dot(*point, color)
    ends = [(y.at(values[max(values)]), title, color) for title, color, values in lines]
    label_all(picture, WIDTH - RIGHT + 18, [*ends, (y.at(1), "Shoal", "shoal")])
    return picture


def sizes_caption():
    plain, gloo = record("plain"), record("torch-all_reduce-2")
    counts = [row["rounds"] for told in (plain, gloo) for row in near(told)]
    return caption(plain, f"Gloo: `{gloo['command']}`, on the same machine, Shoal also from PyTorch. Float32, plain memory, "
                          f"out of place in C; medians of {rounds_text(counts)} in which the cores shared a cache. At small "
                          "sizes Gloo waits for a thread of its own.")


# ---- Training steps ----------------------------------------------------------------------------------------------------------

def step_of(told, name):
    """Returns the median milliseconds of (a step without communication, a step), over all rounds."""
    return tuple(statistics.median([point["value"] for point in told["points"] if point["case"] == f"{name}, {case}, ms"])
                 for case in ("step without communication", "step"))


def steps_plot():
    steps = [(model, name, *step_of(record(suite), name)) for model, suite in STEPS for name in ("Gloo", "Shoal")]
    longest = max(step for *_, step in steps)
    described = [f"{model} with {name}: {bare:.0f} ms of computation, {step - bare:.0f} ms of communication that is not hidden."
                 for model, name, bare, step in steps]
    picture = Picture(WIDTH, 296, "Training steps through PyTorch's DDP: what communication adds", " ".join(described))
    heading(picture, "A training step through PyTorch's DDP, two ranks",
            "light: the step alone; strong: what communication adds; shorter is better")
    for number, (model, name, bare, step) in enumerate(steps):
        top = HEAD + 16 + 48 * number + 14 * (number // 2)
        scale, mine = (WIDTH - 316) / longest, name == "Shoal"
        picture.write(12, top + 22, f"{model}, {name}", weight="bold" if mine else "normal")
        picture.box(166, top, bare * scale, 32, "shoal-fill" if mine else "peer-soft")
        picture.box(166 + bare * scale, top, (step - bare) * scale, 32, "shoal" if mine else "soft")
        picture.write(174 + step * scale, top + 22, f"{step:,.0f} ms, +{step - bare:.0f}", "text" if mine else "soft")
    return picture


def steps_caption():
    told = [record(suite) for _, suite in STEPS]
    counts = [len({point["round"] for point in one["points"]}) for one in told]
    return caption(told[0], f"GPT-2: `{told[1]['command']}`. Each value: {told[0]['what']}; {rounds_text(counts)}. Each rank "
                            "has one core, so a rank that sums cannot compute meanwhile. The steps have gradients as long as "
                            "the models' (102 and 498 MB).")


# ---- Wire --------------------------------------------------------------------------------------------------------------------

def wire_plot():
    rows = record("hosts-4x1-all-reduce")["summary"]
    series = [("shoal", "shoal"), ("openmpi", "b"), ("gloo", "d")]
    x, y_of = Axis(rows[0]["bytes"], rows[-1]["bytes"], LEFT + 10, WIDTH - RIGHT), lambda share: 374 - share * 260
    last = {name: rows[-1]["shares"][name] for name, _ in series}
    described = ", ".join(f"{NAMES[name]} uses {share * 100:.0f} %" for name, share in last.items())
    picture = Picture(WIDTH, 422, "All-reduce of four hosts: share of the wire that is used",
                      f"At {size_text(rows[-1]['bytes'])} {described}.")
    heading(picture, "All-reduce over four hosts at 1 Gbit/s: share of the wire",
            "100 % is the rate of one stream of iperf3 between two of these hosts")
    for share in (0, 0.25, 0.5, 0.75, 1):
        picture.line([(LEFT, y_of(share)), (WIDTH - RIGHT + 10, y_of(share))], "grid")
        picture.write(LEFT - 8, y_of(share) + 5, f"{share * 100:.0f} %", "soft", "end", size=13)
    for row in rows[::2]:
        picture.write(x.at(row["bytes"]), 396, size_text(row["bytes"]), "soft", "middle", size=13)
    for name, color in reversed(series):
        points = [(x.at(row["bytes"]), y_of(row["shares"][name])) for row in rows]
        picture.line(points, color, 3 if name == "shoal" else 2)
        for point in points:
            picture.dot(*point, color)
    label_all(picture, WIDTH - RIGHT + 18, [(y_of(last[name]) - 12, NAMES[name], color) for name, color in series])
    return picture


def wire_caption():
    told = record("hosts-4x1-all-reduce")
    rounds = rounds_text([row["rounds"] for row in told["summary"]])
    return caption(told, f"Four emulated hosts (network namespaces) of one rank share the machine's cores; {rounds}. "
                         "A share above 100 % is a burst that the traffic shaper lets through.")


# ---- Failures ----------------------------------------------------------------------------------------------------------------

def failures_plot():
    cases = {row["case"]: row["value"] for row in record("ends")["summary"]}
    longest, room = max(one["most"] for one in cases.values()), WIDTH - 356
    described = "; ".join(f"{label}: {cases[case]['value']:.2f} s" for case, label in FAILURES.items())
    picture = Picture(WIDTH, HEAD + 26 + 36 * len(FAILURES), "After a failure: seconds until the job has ended on all hosts",
                      f"{described}.")
    heading(picture, "After a failure: seconds until all hosts have ended",
            "every host has named the first cause by then; the promise is 5 s")
    for number, (case, label) in enumerate(FAILURES.items()):
        top, value = HEAD + 10 + 36 * number, cases[case]["value"]
        picture.write(268, top + 19, label, "text", "end", size=14)
        picture.box(278, top, max(value / longest * room, 2), 24, "shoal")
        picture.write(286 + value / longest * room, top + 18, f"{value:.2f} s", "soft")
    return picture


def failures_caption():
    told = record("ends")
    counts = [row["rounds"] for row in told["summary"]]
    return caption(told, f"Emulated hosts; medians of {rounds_text(counts)}, from the failure until the last `shoal run` has "
                         "returned. A program without Shoal has no rank that notices, so its workers get SIGTERM and then "
                         "SIGKILL.")


# name -> (alternative text, picture, caption)
PLOTS = {"glance-sizes": ("Time of MPI libraries and Gloo over Shoal's, by size", sizes_plot, sizes_caption),
         "glance-steps": ("Steps of ResNet-50 and GPT-2: Gloo and Shoal", steps_plot, steps_caption),
         "glance-wire": ("Share of the wire that an all-reduce uses, by size", wire_plot, wire_caption),
         "glance-failures": ("Seconds until a job has ended after a failure", failures_plot, failures_caption)}


def block(name):
    """Returns a plot and its caption in Markdown."""
    alt, _, told = PLOTS[name]
    return f"{markup(name, alt)}\n{told()}\n"
