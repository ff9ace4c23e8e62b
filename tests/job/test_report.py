#!/usr/bin/env python3
"""The page about a job: its contents, that it loads nothing else, and that it is readable wide and narrow, light and dark."""
import html.parser
import json
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import folders  # noqa: E402
from folders import expect  # noqa: E402
from shoal.job.document.folder import JobFolder  # noqa: E402
from shoal.job.watching import report  # noqa: E402
from tap import run_cases  # noqa: E402

VOID = ("meta", "br", "line", "rect", "polyline")


class Page(html.parser.HTMLParser):
    """Parses sections by id and their text. Checks that every tag is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.section, self.tags, self.wrong = [], {}, None, [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "section":
            self.section = dict(attributes)["id"]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.wrong.append(tag)
        else:
            self.open.pop()

    def handle_data(self, data):
        self.text[self.section] = self.text.get(self.section, "") + data


def page_of(folder):
    with folders.jobs() as place:
        path = report.report_write(folder, place / "page.html")
        expect([name.name for name in place.iterdir()] == ["page.html"], list(place.iterdir()))
        text = path.read_text()
    page = Page(text)
    expect(not page.open and not page.wrong, page.open, page.wrong)
    return page, text


def actions_of_pipelines_are_left_out_of_a_step():
    common = {"ph": "X", "pid": 1, "ts": 5.0, "dur": 2.0}
    events = [{"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 0"}},
              {**common, "tid": 1, "name": "all-reduce", "cat": "all-reduce", "args": {"communicator": "world", "sequence": 7}},
              {**common, "tid": 2, "name": "0F1", "cat": "forward", "args": {"stage": 0, "microbatch": 1, "step": 3, "status": "OK"}},
              {**common, "tid": 2, "name": "waiting for stage 1"}]
    found = report._operations(events)
    expect({comm: {rank: [each.sequence for each in each_rank] for rank, each_rank in ranks.items()} for comm, ranks in found.items()} ==
           {"world": {"rank 0": [7]}}, found)


def a_page_tells_all_of_a_job():
    with folders.jobs() as place:
        page, text = page_of(folders.job(place, status="Failed", failure="algo-2: rank 3 killed by signal 9 (SIGKILL) <&>"))
    told = page.text
    expect("Failed" in told["head"] and "algo-2: rank 3 killed by signal 9 (SIGKILL) <&>" in told["head"] and "exit code 1" in told["head"], told["head"])
    expect("2 hosts, 4 workers" in told["head"] and "2 min 5 s" in told["head"], told["head"])
    expect("Rank 3 on algo-2 came last in 70 % of the operations; ranks were blocked in communication for 15 % of the time." in told["head"], told["head"])
    expect("Exposed communication shoal/exposed" in told["curves"] and "2 min 5 s" in told["curves"], told["curves"])  # the axis is the job's
    expect("3algo-2" in told["ranks"] and "70 %" in told["ranks"] and "4.1 ms" in told["ranks"] and "600 MiB" in told["ranks"], told["ranks"])
    expect(told["curves"].index("train:loss") < told["curves"].index("shoal/steps_per_s") < told["curves"].index("host/cpu"), told["curves"])
    expect("0.117" in told["curves"], told["curves"])  # the newest loss
    expect("hyperparameters.lr" in told["settings"] and "0.05" in told["settings"] and "<b>a & b</b>" in told["settings"], told["settings"])
    expect("hunter2" not in text and "api_key" in text, "a secret")
    expect("algo-2" in told["events"] and "Training" in told["events"], told["events"])
    expect("epoch 15 loss=0.1170 <tag>" in re.sub(r"loss=0\.11\d+", "loss=0.1170", told["logs"]), told["logs"])
    # A step is 5 all-reduces and a barrier on 4 ranks, each with a wait and a run.
    rects = [attributes for tag, attributes in page.tags if tag == "rect"]
    expect("6 operations of communicator world" in told["timeline"], told["timeline"])
    expect(len([rect for rect in rects if rect["class"] == "running"]) == 24, rects)
    waits = [float(rect["width"]) for rect in rects if rect["class"] == "waiting"]
    expect(len(waits) == 18 and max(waits) > 30, waits)  # rank 3 never waits


def settings_show_no_secrets():
    """People share pages, and every environment variable may hold a secret, whatever its name."""
    secrets = {"WANDB_KEY": "k1", "DB_PASS": "k2", "MY_PWD": "k3", "DATABASE_URL": "postgres://u:k4@h/d", "SLACK_WEBHOOK": "k5", "PLAIN": "k6"}
    with folders.jobs() as place:
        folder = folders.job(place, seconds=3, traced=False)
        document = json.loads(folder.document.read_text())
        document["environment"] = secrets
        document["hyperparameters"].update(store="s3://me:k7@host/data", password="k8", note="http://host/a@b")
        folder.document.write_text(json.dumps(document))
        page, text = page_of(folder)
    told = page.text["settings"]
    expect(all(name in told for name in secrets) and not re.search(r"\bk[1-8]\b", text), told)
    expect("s3://(not shown)@host/data" in told and "http://host/a@b" in told, told)


def a_page_asks_for_nothing():
    with folders.jobs() as place:
        page, text = page_of(folders.job(place))
    for tag, attributes in page.tags:
        expect(tag not in ("script", "link", "img", "iframe", "object"), tag)
        expect(not {"src", "href", "xlink:href"} & set(attributes), tag, attributes)
    expect("url(" not in text and "@import" not in text, "the style asks for something")


def a_job_without_numbers_has_a_page():
    with folders.jobs() as place:
        folder = folders.job(place, status="Training", seconds=0, traced=False)
        page, _ = page_of(folder)
        expect("No numbers yet" in page.text["curves"] and "no flight recorders" in page.text["timeline"], page.text)
        expect("No rank of Shoal" in page.text["ranks"] and "while the job was running" in page.text["note"], page.text)
        (folder.path / "traces").mkdir()
        (folder.path / "traces/algo-1.0").write_text("{torn")
        folder.document.write_text("{")
        page, _ = page_of(folder)
        expect("could not be read: shoal trace: " in page.text["timeline"] and "cannot be read" in page.text["settings"], page.text)


def a_page_that_cannot_be_written_leaves_nothing():
    with folders.jobs() as place:
        folder = folders.job(place, seconds=3, traced=False)
        for path in (place / "no/page.html", pathlib.Path("/dev/full/page.html")):
            try:
                report.report_write(folder, path)
            except OSError as error:
                expect(str(path.parent) in str(error.filename), error)
            else:
                raise AssertionError(f"{path} was written")
        (place / "folder.html").mkdir()
        try:
            report.report_write(folder, place / "folder.html")
        except OSError:
            pass
        expect(not list(place.glob(".*part")), list(place.iterdir()))


def many_ranks_are_summed_up():
    with folders.jobs() as place:
        page, text = page_of(folders.job(place, hosts=2, workers=8, seconds=30, traced=False))
    expect("greatest of 16 ranks" in page.text["curves"] and "rank 15" not in page.text["curves"], page.text["curves"])
    expect(len(text) < 400_000, len(text))


def plots_take_what_numbers_there_are():
    nan = float("nan")
    drawn = report.plot([report.Line("a", [(0, 1.0), (1, nan), (2, 3.0), (3, 4.0)])], "", 0, 3)
    expect(drawn.count("<polyline") == 2 and drawn.count('class="dot"') == 1, drawn)  # an interruption, and a single point
    expect(">-1" not in report.plot([report.Line("a", [(0, 0.0), (1, 0.0)])], "B", 0, 1), "what is zero all the time begins at zero")
    for values in ([5.0, 5.0], [0.0, 0.0], [-3.0, -3.0], [1e-300, 2e-300], [1e18, -1e18], [3.0]):
        drawn = report.plot([report.Line("a", [(float(at), value) for at, value in enumerate(values)])], "B", 0, 1)
        expect("nan" not in drawn and drawn.count('class="y"') < 20, values, drawn)
    for low, high in ((0, 1), (0, 0.7), (330, 354), (-1, 1e6)):
        marks = report.ticks(low, high)
        expect(2 <= len(marks) <= 7 and all(low - 1e-9 <= mark <= high + 1e-9 for mark in marks), marks)
    expect([report.number_text(*words) for words in ((5e8, "B/s"), (0.0041, "s"), (41, "1/s"), (0.123456, ""), (nan, "B"), (12345, ""))] ==
           ["477 MiB/s", "4.1 ms", "41/s", "0.123", "–", "12345"], "number_text")


# ---- in a browser ----

def light_and_dark_are_drawn():
    with folders.jobs() as place:
        path = report.report_write(folders.job(place), place / "page.html")
        for scheme, brightness, curves in ((1, range(240, 256), (0x00, 0x72, 0xb2)), (0, range(0, 60), (0x56, 0xb4, 0xe9))):
            shot = place / f"{scheme}.png"
            folders.browse(path.as_uri(), f"--screenshot={shot}", "--window-size=800,1900", "--hide-scrollbars", f"--blink-settings=preferredColorScheme={scheme}")
            picture = folders.Picture(shot)
            corner = picture.colour(0, 0)
            expect((picture.width, picture.height) == (800, 1900) and all(channel in brightness for channel in corner), corner)
            folders.expect_drawn(picture, curves)


FRAME = """<!doctype html><iframe id=a width=400 height=900 src="page.html"></iframe><iframe id=b width=1600 height=900 src="page.html"></iframe>
<pre id=out></pre><script>onload = () => { out.textContent = ["a", "b"].map(id => { const page = document.getElementById(id).contentDocument,
  root = page.documentElement, small = [...page.querySelectorAll("td, .y, .x, p, pre, .legend")].map(e => parseFloat(getComputedStyle(e).fontSize));
  return root.scrollWidth + "/" + root.clientWidth + "/" + Math.min(...small) + "/" + page.querySelectorAll(".plot").length; }).join(" "); };</script>"""


def the_page_fits_400_and_1600_pixels():
    with folders.jobs() as place:
        report.report_write(folders.job(place), place / "page.html")
        (place / "frame.html").write_text(FRAME)
        out, err = folders.browse((place / "frame.html").as_uri(), "--dump-dom", "--allow-file-access-from-files", "--virtual-time-budget=5000")
        found = re.search(r"<pre id=\"out\">(\d+)/(\d+)/([\d.]+)/(\d+) (\d+)/(\d+)/([\d.]+)/(\d+)</pre>", out)
        expect(found, out[-2000:], err)
        for wide, room, least, plots in (found.groups()[:4], found.groups()[4:]):
            expect(int(wide) <= int(room) and float(least) >= 12 and int(plots) == 12, found.group())


if __name__ == "__main__":
    run_cases([a_page_tells_all_of_a_job, actions_of_pipelines_are_left_out_of_a_step, settings_show_no_secrets, a_page_asks_for_nothing, a_job_without_numbers_has_a_page, a_page_that_cannot_be_written_leaves_nothing,
               many_ranks_are_summed_up, plots_take_what_numbers_there_are, light_and_dark_are_drawn, the_page_fits_400_and_1600_pixels])
