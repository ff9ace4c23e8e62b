#!/usr/bin/env python3
"""Metrics of a job: from the log, and from Shoal's and the kernel's counters of its ranks; exported to Prometheus and
TensorBoard."""
import json
import math
import os
import pathlib
import signal
import struct
import subprocess
import sys
import threading
import threading
import time
import tracemalloc

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import folders  # noqa: E402
folders.use_job_python()
os.environ.setdefault("SHOAL_JOB_TENSORBOARD", "no")
from folders import SHOAL, TOP, Metric, Skip, expect  # noqa: E402
from shoal import _input  # noqa: E402
from shoal.job.watching import metrics, report, watch  # noqa: E402
from shoal.job.watching.metrics import LogMetrics, Reader, Sampler, Value  # noqa: E402
from tap import run_cases  # noqa: E402

PATIENCE_S = 60
EXAMPLE = pathlib.Path(SHOAL).parent / "examples/fashion_mnist"
DATA = pathlib.Path("/usr/share/datasets/fashion-mnist")


def lines_of(folder):
    return [json.loads(line) for line in folder.metrics.read_text().splitlines()] if folder.metrics.exists() else []


def empty(place):
    return folders.job(place, seconds=0, traced=False)


def found(*lines, regex=r"loss=([^ ]+)", host="algo-1", rank=None):
    """Returns (rank, name, value, step) of a definition's matches in lines, and the log lines."""
    with folders.jobs() as place:
        folder, said = empty(place), []
        log = LogMetrics([Metric("loss", regex)], folder, said.append)
        for line in lines:
            log.line(host, rank, line)
        log.close()
        return [(record["rank"], record["name"], record["value"], record["step"]) for record in lines_of(folder)], said


def numbers_are_found_anywhere_in_a_line():
    expect(found("3| epoch 1 loss=0.5 acc=1", "3| loss=0.25") == ([(3, "loss", 0.5, 0), (3, "loss", 0.25, 1)], []), "with the prefix of shoal run")
    expect(found("[1,mpirank:7,algo-2]<stdout>:loss=1e-3")[0] == [(7, "loss", 0.001, 0)], "the toolkit's")
    expect(found("[1,2]<stderr>: loss=4")[0] == [(2, "loss", 4.0, 0)], "mpirun's")
    expect(found("[rank1]: loss=4")[0] == found("[default1]: loss=4")[0] == [(1, "loss", 4.0, 0)], "torchrun's")
    expect(found("loss=4")[0] == [(None, "loss", 4.0, 0)], "no prefix")
    expect(found("5| loss=4", rank=2)[0] == [(2, "loss", 4.0, 0)], "the caller knows")
    expect(found("0| loss=1 loss=2 loss=3")[0] == [(0, "loss", 1.0, 0), (0, "loss", 2.0, 1), (0, "loss", 3.0, 2)], "several in a line")
    expect(found("0| loss: 7", regex=r"loss: \d+")[0] == [] and found("0| 7 apples", regex=r"\d+(?= apples)")[0] == [(0, "loss", 7.0, 0)], "no group")
    expect(found("0| step (12)", regex=r"step \((\d+)\)|epoch (\d+)")[0] == [(0, "loss", 12.0, 0)], "a group that is not there")


def what_is_no_number_is_told_once():
    numbers, said = found("0| loss=none", "0| loss=", "0| loss=bad", "0| loss=1.5")
    expect(numbers == [(0, "loss", 1.5, 0)] and said == ["metric loss: 'none' is not a number: ignored, like further ones"], numbers, said)
    numbers, said = found("0| epoch 3", regex=r"step (\d+)|epoch 3")  # matched without its group
    expect(numbers == [] and said == ["metric loss: None is not a number: ignored, like further ones"], numbers, said)
    numbers, said = found("0| loss=nan", "0| loss=inf", "0| loss=2")
    expect([value for _, _, value, _ in numbers] == [None, None, 2.0] and said == [], numbers, said)


def a_number_that_is_cut_is_told():
    """[0-9.]+ matches only the first digits of 1.5e-05."""
    numbers, said = found("0| loss=1.5e-05", "0| loss=7e-05", "0| loss=2.25", regex="loss=([0-9.]+)")
    expect([value for _, _, value, _ in numbers] == [1.5, 7.0, 2.25] and len(said) == 1, numbers, said)
    expect(said[0] == "metric loss: the expression ends within the number 1.5e-05, which is read as 1.5; ([-+.\\w]+) matches every number", said)
    numbers, said = found("0| loss=1.5e-05", "0| loss=7e-05,", "0| loss=-7.5e-05 acc=1", "0| loss=nan", regex="loss=" + metrics.ANY_NUMBER)
    expect([value for _, _, value, _ in numbers] == [1.5e-05, 7e-05, -7.5e-05, None] and said == [], numbers, said)
    numbers, said = found("0| loss=1.5 elapsed", "0| loss=1.5, 2", "0| loss=3.", regex="loss=([0-9.]+)")
    expect([value for _, _, value, _ in numbers] == [1.5, 1.5, 3.0] and said == [], numbers, said)
    expect("loss=" + metrics.ANY_NUMBER in (TOP / "docs/jobs.md").read_text(), "the regular expression of the manual")


def an_expression_that_does_not_compile_is_named():
    with folders.jobs() as place:
        try:
            LogMetrics([Metric("good", "x"), Metric("bad", "loss=([")], empty(place))
        except ValueError as error:
            expect(str(error).startswith("metric bad: the regular expression 'loss=([' does not compile: unterminated"), error)
        else:
            raise AssertionError("no error")


def a_long_line_is_looked_at_to_its_limit():
    expect(found("0| " + "x" * 200_000 + "loss=1")[0] == [], "beyond the limit")
    expect(found("0| loss=1 " + "x" * 200_000)[0] == [(0, "loss", 1.0, 0)], "before it")


def a_full_disk_ends_nothing():
    with folders.jobs() as place:
        folder, said = empty(place), []
        folder.metrics.unlink()
        folder.metrics.symlink_to("/dev/full")
        record = metrics.Record(folder, "algo-1", said.append)
        for _ in range(3):
            record.add([Value("loss", 1.0)])
        record.close()
        expect(len(said) == 1 and said[0].startswith("cannot keep metrics of algo-1: No space left on device") and "continues" in said[0], said)


def writers_do_not_mix_lines():
    with folders.jobs() as place:
        folder = empty(place)
        records = [metrics.Record(folder, f"algo-{index}") for index in range(4)]
        threads = [threading.Thread(target=lambda record=record: [record.add([Value("a", 1.0, 0, step), Value("b", 2.0, 1, step)]) for step in range(300)])
                   for record in records]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        reader = Reader(folder)
        expect(reader.read() and len(lines_of(folder)) == 2400 and all(series.count == 300 for series in reader.series.values()), reader.series)
        expect(not reader.read(), "nothing new")
        with open(folder.metrics, "a") as file:
            file.write('{"time": 1, "host": "h", "rank": 0, "name": "x", "value": 7, "step": nu')
        expect(not reader.read(), "half a line")
        with open(folder.metrics, "a") as file:
            file.write('ll}\ngarbage\n{"time": null}\n')
        expect(reader.read() and reader.last("x", 0) == 7.0, reader.series)


def lines_that_nobody_here_has_written_are_left_out():
    """The page would show such a rank unchanged, and sort by it."""
    with folders.jobs() as place:
        folder = empty(place)
        for rank in ('"<script>"', "[1]", "{}", "true", "1.5", "3"):
            with open(folder.metrics, "a") as file:
                file.write('{"time": 1, "host": "h", "rank": %s, "name": "shoal/cpu", "value": 7, "step": null}\n' % rank)
        reader = Reader(folder)
        expect(reader.read() and list(reader.series) == [("shoal/cpu", "h", 3)], reader.series)
        expect(report.lateness(reader).count("<tr>") == 2, report.lateness(reader))


def a_long_file_is_read_in_pieces():
    """A reader may also begin near the end, to get only the newest values."""
    with folders.jobs() as place:
        folder = empty(place)
        line = '{"time": %d, "host": "h", "rank": 0, "name": "x", "value": %d, "step": null}\n'
        folder.metrics.write_text("".join(line % (at, at) for at in range(60_000)))
        expect(folder.metrics.stat().st_size > 4 * metrics.READ_BYTES, folder.metrics.stat())
        whole, newest = Reader(folder), Reader(folder, 10_000)
        tracemalloc.start()
        expect(whole.read() and newest.read(), "")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        expect(peak < 3 * folder.metrics.stat().st_size, "bytes, text and lines at once", peak)
        expect(whole.series["x", "h", 0].count == 60_000 and 100 < newest.series["x", "h", 0].count < 200, newest.series)
        expect(whole.last("x", 0) == newest.last("x", 0) == 59_999, "")


def a_wait_that_is_under_way_is_counted():
    """`shoal top` counts a wait when it ends, but the wait that matters never ends."""
    quiet = metrics.rates(metrics.Counters(at=11, waits_s=300, cpu_s=1.0), metrics.Counters(at=10, cpu_s=1.0))
    busy = metrics.rates(metrics.Counters(at=11, waits_s=300, cpu_s=2.0), metrics.Counters(at=10, cpu_s=1.0))
    ended = metrics.rates(metrics.Counters(at=11, waited_s=300, cpu_s=1.0), metrics.Counters(at=10, cpu_s=1.0))
    expect((quiet["shoal/exposed"], busy["shoal/exposed"], ended["shoal/exposed"]) == (1.0, 0.0, 1.0), quiet, busy, ended)
    world = {"size": 4, "waits_us": 5e6, "waits_for": [2]}
    expect(metrics.waits_of({"communicators": [world, {"size": 2, "waits_us": None, "waits_for": []}]}) == (5.0, [2]), "the world")
    expect(metrics.waits_of({"communicators": [{**world, "size": 2}, {**world, "waits_us": None}]}) == (5.0, []), "ranks of a part of it")
    expect(metrics.waits_of({"communicators": []}) == (0.0, []), "none")


def a_noise_scale_is_told_as_the_library_tells_it():
    known = {"rank": 0, "batch": 300.0, "noise_scale": 1000.0, "noise_error": 52.0}
    none = {"rank": 0, "batch": None, "noise_scale": None, "noise_error": None}
    values = {"shoal/batch": 300.0, "shoal/noise_scale": 1000.0, "shoal/noise_error": 52.0}
    expect(metrics.noise_of({"communicators": [none, known]}) == values, "of the communicator that measures")
    expect(metrics.noise_of({"communicators": [none, {**known, "rank": 1}]}) == {}, "of its rank 0 alone")
    with folders.jobs() as place:
        folder = folders.job(place, seconds=3, traced=False)
        reader = Reader(folder)
        reader.read()
        expect(reader.noise() is None, reader.noise())
        metrics.Record(folder, "algo-1").add([metrics.Value(name, value, 0) for name, value in values.items()], folders.BEGAN + 30)
        reader.read()
        sentence = ("your global batch is 0.3 times the noise scale (1000 samples, error 52): doubling it should cost 23 % more samples and "
                    "save 38 % of the steps")
        expect(reader.noise() == sentence, reader.noise())
        expect(sentence in watch.table(folder.status(), reader, "", 200, 60), "the table")
        expect(f"Y{sentence[1:]}." in report.verdict(reader), report.verdict(reader))
        expect("Noise scale <code>shoal/noise_scale</code>" in report.curves(reader, folder.status()), "a plot")
        page = metrics.prometheus_text(folder, reader)
        expect('shoal_job_noise_scale{shoal_job="fashion",host="algo-1",rank="0"} 1000.0' in page, page)
        metrics.Record(folder, "algo-1").add([metrics.Value("shoal/noise_scale", math.nan, 0)], folders.BEGAN + 31)
        reader.read()
        expect(reader.noise() is None, "no longer known")
    for batch, scale, error in ((300, 1000, 52), (8, 0.5, 0.123), (1.5e7, 123456789, 7), (64, 64, 64)):
        expect(metrics.noise_text(batch, scale, error) == _of_the_library(batch, scale, error), metrics.noise_text(batch, scale, error))


def _of_the_library(batch, scale, error):
    from shoal import _scaling
    nan = math.nan
    return str(_scaling.Noise(scale, error, nan, nan, nan, nan, nan, nan, batch, 9, 0, 0))


def a_series_stays_small():
    series = metrics.Series()
    for at in range(100_000):
        series.add(float(at), float(at))
    expect(len(series.points) <= metrics.POINTS_MAX and series.count == 100_000 and series.last == (99_999.0, 99_999.0), len(series.points))
    expect(abs(series.mean() - 50_000) < 100 and series.points == sorted(series.points), series.mean())


def steps_are_found_in_what_repeats():
    expect(metrics.step_length("abcabcabc") == 3 and metrics.step_length("xyzaabaabaab") == 3, "a period")
    expect(metrics.step_length("aaaaaaa") == 2 or metrics.step_length("aaaaaaa") == 1, metrics.step_length("aaaaaaa"))
    expect(metrics.step_length("abcdefgh") is None and metrics.step_length("") is None and metrics.step_length("ab") is None, "none")


def actions_of_pipelines_are_no_operations():
    call = {"pid": 1, "comm_id": "a", "kind": "all-reduce", "count": 1, "type": "float32", "op": "sum", "root": -1}
    lines = [json.dumps({**call, **more}) for more in ({}, {"kind": "send"}, {"comm_id": "b", "kind": "forward"}, {"comm_id": "b", "kind": "hand over"})]
    expect(list(metrics.calls_of(lines)) == [(1, "a")], metrics.calls_of(lines))
    comm = {"operations": 3, "bytes": 4, "sent_bytes": 5, "waited_us": 6e6, "came_last": 1, "late_us": 0, "waits_us": None, "is_track": False}
    found = metrics.counters_of({"communicators": [comm, {**comm, "operations": 100, "waits_us": 2e6, "is_track": True}]}, 0.0, 1.0)
    expect((found.operations, found.bytes, found.waited_s, found.waits_s) == (3, 4, 6.0, 2.0), found)


def rates_are_of_the_time_between_two_looks():
    before = metrics.Counters(100, 1000, 10, 1.0, 5, 0.5, 3.0, 50.0)
    now = metrics.Counters(300, 5000, 30, 1.5, 105, 0.7, 5.0, 52.0)
    expect(metrics.rates(now, before) == {"shoal/operations_per_s": 100, "shoal/bytes_per_s": 2000, "shoal/network_bytes_per_s": 10,
                                          "shoal/exposed": 0.25, "shoal/cpu": 1.0, "shoal/came_last": 0.5, "shoal/late_s": (0.7 - 0.5) / 100, "shoal/idle": 0}, "")
    again = metrics.rates(metrics.Counters(0, 0, 0, 0, 0, 0, 0, 54.0), now)  # its communicators were freed
    expect(again.pop("shoal/idle") == 1 and all(value == 0 for value in again.values()) and "shoal/late_s" not in again, again)
    text = "Inter-|\n face |\n    lo: 5 0 0 0 0 0 0 0 6 0\n  eth0: 100 1 0 0 0 0 0 0 200 2 0\n  eth1:7 1 0 0 0 0 0 0 9 2 0\n"
    expect(metrics.network_bytes(text) == (107, 209), metrics.network_bytes(text))


def waits_for_data_are_rates_too():
    """Seconds in a loader, and what is left of the time: on no core, not in Shoal and not in a loader."""
    before = metrics.Counters(0, 0, 0, 1.0, 0, 0, 3.0, 50.0, input_s=7.0)
    now = metrics.Counters(0, 0, 0, 1.5, 0, 0, 3.25, 52.0, input_s=7.5)
    found = metrics.rates(now, before)
    expect((found["shoal/input"], found["shoal/exposed"], found["shoal/cpu"], found["shoal/idle"]) == (0.25, 0.25, 0.125, 0.375), found)
    first = metrics.rates(now, metrics.Counters(at=48.0, cpu_s=3.25, waited_s=1.5))  # the loader began meanwhile
    expect(first["shoal/input"] == 1 and first["shoal/idle"] == 0, first)
    expect("shoal/input" not in metrics.rates(metrics.Counters(at=2.0), metrics.Counters(at=1.0)))


def a_process_counts_its_waits():
    with folders.jobs() as place:
        path = str(place / "waits")
        expect(_input.waited(path, 1.0) is None, "no file")
        meter = _input.Meter(path)
        expect(_input.waited(path, time.monotonic()) == (0, 0))
        expect(meter.call(lambda *found: found, 3, 4) == (3, 4) and meter.call(time.sleep, 0.05) is None)
        seconds, batches = _input.waited(path, time.monotonic())
        expect(seconds >= 0.05 and batches == 2, seconds, batches)
        try:
            meter.call(next, iter(()))
            raise AssertionError("no end")
        except StopIteration:
            expect(_input.waited(path, time.monotonic()).batches == 2)
        seen = []
        meter.call(lambda: seen.append(_input.waited(path, time.monotonic() + 5)))  # a wait that is under way counts
        expect(seen[0].seconds >= seconds + 5 and seen[0].batches == 2, seen)
        expect(_input.waited(path, time.monotonic()).seconds < seconds + 5 and meter.is_counting())
        other = threading.Thread(target=lambda: seen.append(meter.is_counting()))
        other.start()
        other.join()
        child = os.fork()
        if child == 0:
            os._exit(meter.is_counting())
        expect(seen[1] is False and os.waitpid(child, 0)[1] == 0, "another thread, or a fork, counts")
        pathlib.Path(path).write_bytes(b"torn")
        expect(_input.waited(path, 1.0) is None)


def prometheus_reads_the_page():
    with folders.jobs() as place:
        folder = folders.job(place, seconds=20, traced=False)
        metrics.Record(folder, 'algo-"1\\').add([Value("a\nb", math.nan, 1), Value("train:loss", 0.25, 0)], folders.BEGAN + 30)
        reader = Reader(folder)
        reader.read()
        text = metrics.prometheus_text(folder, reader)
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError as error:
            raise Skip("no prometheus_client: make build/job/made installs it") from error
        families = {family.name: family for family in text_string_to_metric_families(text)}
        expect(all(family.type == "gauge" and family.documentation for family in families.values()), families)
        cpu = {(sample.labels["host"], sample.labels["rank"]): sample.value for sample in families["shoal_job_cpu"].samples}
        expect(sorted(cpu) == [("algo-1", "0"), ("algo-1", "1"), ("algo-2", "2"), ("algo-2", "3")], cpu)
        own = {(sample.labels["name"], sample.labels["host"]): sample.value for sample in families["shoal_job_metric"].samples}
        expect(own["train:loss", 'algo-"1\\'] == 0.25 and math.isnan(own["a\nb", 'algo-"1\\']), own)
        expect([(sample.labels["status"], sample.value) for sample in families["shoal_job_status"].samples] == [("Completed", 1.0)], families)


def events_of(path):
    """Yields the events of a TensorBoard file. Its records are length, checksum, data, checksum."""
    from tensorboardX.proto import event_pb2
    data, at = path.read_bytes(), 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        yield event_pb2.Event.FromString(data[at + 12:at + 12 + length])
        at += length + 16


def tensorboard_reads_what_is_written():
    try:
        import tensorboardX  # noqa: F401
    except ImportError as error:
        raise Skip("no tensorboardX: make build/job/made installs it") from error
    with folders.jobs() as place:
        folder = empty(place)
        os.environ["SHOAL_JOB_TENSORBOARD"] = ""
        try:
            record = metrics.Record(folder, "algo-1")
            for step in range(3):
                record.add([Value("train:loss", 1.0 / (step + 1), 0, step), Value("host/cpu", 2.5)], folders.BEGAN + step)
            record.close()
        finally:
            os.environ["SHOAL_JOB_TENSORBOARD"] = "no"
        (path,) = (folder.tensorboard / "algo-1").glob("events.out.tfevents.*")
        told = [(event.step, value.tag, value.simple_value, event.wall_time) for event in events_of(path) for value in event.summary.value]
        losses = [(step, value) for step, tag, value, _ in told if "loss" in tag]
        expect([step for step, _ in losses] == [0, 1, 2] and abs(losses[2][1] - 1 / 3) < 1e-6, told)
        expect([(step, value, at) for step, tag, value, at in told if tag == "host/cpu"] == [(step, 2.5, folders.BEGAN + step) for step in range(3)], told)


# ---- a job that runs ----

def means(reader):
    return {name: {rank: series.mean() for (_, rank), series in reader.of(name).items()} for name in reader.names()}


def rank_1_is_late(mean):
    """As in the probe. Stalls of the machine that delay the other rank matter less with every sample."""
    exposed, last = mean.get("shoal/exposed", {}), mean.get("shoal/came_last", {})
    return len(exposed) == len(last) == 2 and exposed[0] > exposed[1] > 0 and last[1] > last[0]


def ranks_are_looked_at_from_outside():
    """Two emulated hosts with two ranks each on one machine: each sampler records its own host's ranks."""
    probe = pathlib.Path(SHOAL).parent / "tests/multi/top_probe"
    if not probe.exists():
        raise Skip(f"there is no {probe}: build it")
    with folders.jobs() as place:
        folder, said = empty(place), []
        run = subprocess.Popen([SHOAL, "run", "-n", "2", probe, "busy"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        other = subprocess.Popen([SHOAL, "run", "-n", "2", probe, "busy"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL)
        sampler = Sampler(folder, "algo-1", run.pid, SHOAL, interval_s=0.2, say=said.append)
        sampler.start()
        try:
            reader, until = Reader(folder), time.monotonic() + PATIENCE_S
            while time.monotonic() < until and not (len(reader.of("shoal/steps_per_s")) == 2 and (folder.traces / "algo-1.live").exists() and
                                                    rank_1_is_late(means(reader))):
                time.sleep(0.1)
                reader.read()
        finally:
            for process in (run, other):
                process.send_signal(signal.SIGTERM)
                process.wait(timeout=PATIENCE_S)
        sampler.thread.join(timeout=PATIENCE_S)
        expect(not sampler.thread.is_alive() and not said, said)
        reader.read()
        expect(set(reader.of("shoal/cpu")) == {("algo-1", 0), ("algo-1", 1)}, reader.series.keys())
        mean = means(reader)
        for rank in (0, 1):
            # one all-reduce of 256 KiB per step
            expect(mean["shoal/operations_per_s"][rank] > 1 and mean["shoal/bytes_per_s"][rank] > 1e5, mean)
            expect(mean["shoal/memory_bytes"][rank] > 1e6 and 0 <= mean["shoal/cpu"][rank] < 3, mean)
        expect(rank_1_is_late(mean), mean)
        expect(mean["shoal/network_bytes_per_s"][0] == 0 and mean["host/memory_available_bytes"][None] > 1e7, mean)


def a_job_has_its_numbers_and_its_page():
    """A real job: Fashion-MNIST on two workers, through `shoal job`."""
    import jobs
    from shoal.job.document.folder import JobFolder
    from shoal.job.watching import report
    if not EXAMPLE.exists() or not DATA.is_dir():
        raise Skip(f"{EXAMPLE} or {DATA} is not there: make build, dev/deps.sh demo")
    with jobs.Jobs() as made:
        made.run(f'import os\nos.execv({str(EXAMPLE)!r}, ["fashion_mnist", "--epochs", "1", "--limit", "4000", "--hidden", "64"])\n', workers_per_host=2,
                 distribution=jobs.DATA_PARALLEL, metric_definitions=[{"name": "train:loss", "regex": "loss +([0-9.]+)"}])
        folder = JobFolder("job", made.jobs)
        reader = Reader(folder)
        reader.read()
        expect(reader.last("train:loss", 0) is not None and reader.last("train:loss", 0) < 2.3, folder.metrics.read_text()[-500:], made.log())
        expect(sorted(path.name for path in folder.traces.glob("algo-1.[01]")) == ["algo-1.0", "algo-1.1"], list(folder.traces.glob("*")))
        text = report.report_write(folder, made.root / "page.html").read_text()
        expect("train:loss" in text and 'class="running"' in text and "Completed" in text, text[-3000:])
        code, out, err = made.call("report", "job", "-o", made.root / "again.html")
        expect((code, out, err) == (0, f"{made.root / 'again.html'}\n", ""), code, out, err)
        again = (made.root / "again.html").read_text()
        expect("train:loss" in again and "Completed" in again, again[-3000:])
        code, out, err = made.call("report", "job", "-o", made.root / "no/again.html")
        expect((code, err) == (1, f"shoal job: cannot write {made.root / 'no/again.html'}: No such file or directory\n"), code, err)
        code, out, err = made.call("watch", "job")
        expect(code == 0 and out.startswith("job: Completed") and "train:loss" in out, code, out, err)


if __name__ == "__main__":
    run_cases([numbers_are_found_anywhere_in_a_line, what_is_no_number_is_told_once, an_expression_that_does_not_compile_is_named,
               a_long_line_is_looked_at_to_its_limit, a_full_disk_ends_nothing, writers_do_not_mix_lines, a_series_stays_small,
               a_number_that_is_cut_is_told, lines_that_nobody_here_has_written_are_left_out, a_long_file_is_read_in_pieces,
               a_wait_that_is_under_way_is_counted, a_noise_scale_is_told_as_the_library_tells_it,
               steps_are_found_in_what_repeats, actions_of_pipelines_are_no_operations, rates_are_of_the_time_between_two_looks, waits_for_data_are_rates_too, a_process_counts_its_waits, prometheus_reads_the_page, tensorboard_reads_what_is_written,
               ranks_are_looked_at_from_outside, a_job_has_its_numbers_and_its_page])
