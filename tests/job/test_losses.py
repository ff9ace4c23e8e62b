#!/usr/bin/env python3
"""What the report says a job lost its time to: shares that follow from the numbers, and the one change that gains most."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import folders  # noqa: E402
from folders import expect  # noqa: E402
from shoal.job.watching import losses, report, watch  # noqa: E402
from shoal.job.watching.metrics import Reader, Record, Value  # noqa: E402
from tap import run_cases  # noqa: E402


def reader_of(place, *ranks, name="one", seconds=3):
    """A job whose ranks have these numbers, by name without "shoal/", for some seconds."""
    folder = folders.job(place, name=name, seconds=0, traced=False)
    for second in range(seconds):
        for rank, numbers in enumerate(ranks):
            record = Record(folder, f"algo-{rank // 2 + 1}")
            record.add([Value(f"shoal/{key}", value, rank) for key, value in numbers.items()], folders.BEGAN + second)
            record.close()
    reader = Reader(folder)
    reader.read()
    return folder, reader


def shares(reader):
    found = losses.losses_of(reader)
    expect(abs(sum(loss.share for loss in found) - 1) < 1e-9 and all(0 <= loss.share <= 1 for loss in found), found)
    return {loss.what: round(loss.share, 6) for loss in found}


def shares_follow_from_the_numbers():
    with folders.jobs() as place:
        fast = {"exposed": 0.3, "input": 0.25, "idle": 0.05, "operations_per_s": 40, "steps_per_s": 4, "came_last": 0.0, "late_s": 0.0}
        slow = {**fast, "exposed": 0.1, "input": 0.35, "came_last": 1.0, "late_s": 0.04}
        _, reader = reader_of(place, fast, slow)
        # A step a quarter of a second long is late by 0.04 s: 0.16 of the time, for one rank of two; or (0.3 + 0.1) / 2 - 0.1.
        expect(shares(reader) == {losses.INPUT: 0.3, losses.LATE: 0.1, losses.COMMUNICATION: 0.1, losses.IDLE: 0.05, losses.COMPUTING: 0.45},
               shares(reader))
        found = losses.losses_of(reader)
        expect(found[0].what == losses.INPUT, found)
        expect(losses.change(reader, found).startswith("Faster input would gain up to 30 % of the time (1.4 times the speed)"), losses.change(reader, found))
        expect(losses.input_text(reader) == "ranks wait for data 30 % of the time", losses.input_text(reader))


def the_change_is_for_the_largest_loss():
    with folders.jobs() as place:
        even = {"exposed": 0.4, "idle": 0.0}
        _, reader = reader_of(place, even, even)
        expect(shares(reader) == {losses.COMMUNICATION: 0.4, losses.INPUT: 0, losses.LATE: 0, losses.IDLE: 0, losses.COMPUTING: 0.6}, shares(reader))
        expect(losses.change(reader, losses.losses_of(reader)).startswith("Cheaper communication would gain up to 40 %"))
        expect(losses.input_text(reader) is None, losses.input_text(reader))
        late = {"exposed": 0.5, "operations_per_s": 10, "came_last": 0.0, "late_s": 0.0}
        _, reader = reader_of(place, late, late, late, {**late, "exposed": 0.1, "came_last": 0.9, "late_s": 0.05}, name="late")
        text = losses.change(reader, losses.losses_of(reader))
        expect(text.startswith("Ranks that come at the same time would gain up to 34 %") and "rank 3 on algo-2 came last in 90 %" in text, text)
        _, reader = reader_of(place, {"exposed": 0.04}, {"exposed": 0.04}, name="fine")
        expect(losses.change(reader, losses.losses_of(reader)) == "No change of input or communication would gain more than 5 % of the time.")
        _, reader = reader_of(place, name="none")
        expect(losses.losses_of(reader) == [] and losses.change(reader, []) == "")


def shares_never_exceed_the_whole():
    """Threads overlap: a rank may be blocked in Shoal and in a loader at once."""
    with folders.jobs() as place:
        for name, numbers in (("a", {"exposed": 0.9, "input": 0.8, "idle": 0.5}), ("b", {"exposed": 1.0, "input": 1.0}), ("c", {"exposed": 0.0}),
                              ("d", {"exposed": 0.2, "operations_per_s": 1e6, "came_last": 1.0, "late_s": 60.0})):
            _, reader = reader_of(place, numbers, numbers, name=name)
            shares(reader)
        _, reader = reader_of(place, {"exposed": 0.25}, name="alone")
        expect(shares(reader)[losses.LATE] == 0, shares(reader))  # nobody to wait for


def the_page_and_the_table_have_them():
    with folders.jobs() as place:
        folder, reader = reader_of(place, {"exposed": 0.3, "input": 0.31}, {"exposed": 0.3, "input": 0.31})
        page = report.report_write(folder, place / "page.html").read_text()
        expect("Where the time went" in page and "Faster input would gain up to 31 %" in page and "waited for data for 31 %" in page, page[-4000:])
        expect("No loader was seen" not in page, page)
        table = watch.table(folder.status(), reader, "http://x/", 220, 50)
        expect("ranks wait for data 31 % of the time; `shoal doctor --data` measures the storage" in table.splitlines(), table)
        folder, _ = reader_of(place, {"exposed": 0.3}, {"exposed": 0.3}, name="unseen")
        page = report.report_write(folder, place / "page.html").read_text()
        expect("No loader was seen" in page and "waited for data" not in page, page[-4000:])


if __name__ == "__main__":
    run_cases([shares_follow_from_the_numbers, the_change_is_for_the_largest_loss, shares_never_exceed_the_whole, the_page_and_the_table_have_them])
