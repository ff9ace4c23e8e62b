#!/usr/bin/env python3
"""Jobs with data, checkpoints and results in S3, through the command from end to end: each host's requests, what is safe
however the script ends, and what a job with another name finds."""
import os
import pathlib
import signal
import subprocess
import sys
import time

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job.data import checkpoints  # noqa: E402
from shoal.job.document.folder import JobFolder  # noqa: E402
from shoal.job.engines import agent  # noqa: E402
from jobs import DATA_PARALLEL, RUN_S, SHOAL, Jobs, content, expect_failed  # noqa: E402
from stores import S3, wait_for  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

s3 = S3()
KiB = 1 << 10


def objects(prefix):
    """Returns the objects below s3://data/PREFIX as {name: bytes}."""
    return {key[len(prefix) + 1:]: body for key, body in s3.listed(prefix + "/").items()}


def wait_for_set(prefix, name, body):
    """Waits until the first host's set has this content. The manifest comes after the object."""
    def has():
        try:
            there = objects(prefix)
        except s3.client.exceptions.NoSuchKey:  # it got its plain name after the listing
            return False
        return there.get(name) == body and ".shoal/algo-1.json" in there
    wait_for(has, f"{name} at s3://data/{prefix}", every_s=0.2)


def notes_of(err):
    return [line for line in err.splitlines() if "checkpoints are not at" in line]


# ---- in and out ----

READS = """
import os
channel, rank = os.environ["SM_CHANNEL_TRAIN"], os.environ["RANK"]
for name in sorted(os.listdir(channel)):
    print(name, open(os.path.join(channel, name)).read(), flush=True)
open(f"../checkpoints/of-{rank}", "w").write(f"weights of {rank}")
if rank == "0":
    open(os.path.join(os.environ["SM_MODEL_DIR"], "model"), "w").write("made")
"""


def data_come_and_results_go():
    """Two hosts of two ranks: each host has its share, each object is requested once, and all results are in S3."""
    for name in "abcde":
        s3.put(f"e2e/{name}", f"body-of-{name}".encode())
    with Jobs() as jobs:
        s3.proxy.forget()
        status = jobs.run(READS, instance_count=2, workers_per_host=2, distribution=DATA_PARALLEL, output_path="s3://data/out",
                          checkpoints={"uri": "s3://data/kept"},
                          channels={"train": {"uri": "s3://data/e2e/", "input_mode": "FastFile", "distribution": "ShardedByS3Key"}})
        for host, ranks, names in (("algo-1", (0, 1), "ace"), ("algo-2", (2, 3), "bd")):
            lines = [line for line in jobs.log(host=host).splitlines() if "body-of" in line]
            expect(sorted(lines) == [f"{rank}| {name} body-of-{name}" for rank in ranks for name in names], lines, jobs.told())
        expect("also with FastFile, all data are fetched before the script starts" in (jobs.folder() / "runner.log").read_text(), jobs.told())
        expect(sorted(s3.proxy.gets("/e2e/")) == [f"/data/e2e/{name}" for name in "abcde"], s3.proxy.gets())
        kept = objects("kept")
        expect({name: body for name, body in kept.items() if name.startswith("of-")} ==
               {f"of-{rank}": f"weights of {rank}".encode() for rank in range(4)}, kept)
        expect({name for name in kept if not name.startswith("of-")} == {".shoal/algo-1.json", ".shoal/algo-2.json"}, kept)
        expect(status["model"] == "s3://data/out/job/output/model.tar.gz", status)
        archive = jobs.root / "model.tar.gz"
        archive.write_bytes(objects("out")["job/output/model.tar.gz"])
        expect(content(archive, "model") == "made")


# ---- the last checkpoints ----

# Rank 0 saves at SIGTERM; rank 1 has no handler, so SIGTERM kills it.
SAVES = """
import os, signal, sys, time
path = "../checkpoints/last"
def write(text):
    open(path + ".tmp", "w").write(text)
    os.replace(path + ".tmp", path)
def save(*_):
    time.sleep(2)
    write("step 7")
    sys.exit(143)
if "AGAIN" in os.environ:
    print("found", open(path).read(), flush=True)
    sys.exit(0)
if os.environ["RANK"] == "0":
    signal.signal(signal.SIGTERM, save)
    write("step 1")
print("begun", flush=True)
time.sleep(600)
"""
RANKS = {"distribution": DATA_PARALLEL, "workers_per_host": 2}


def what_a_script_saves_at_the_end_is_safe_and_comes_back():
    with Jobs() as jobs:
        jobs.start(SAVES, checkpoints={"uri": "s3://data/stopped"}, **RANKS)
        for rank in (0, 1):
            jobs.wait_for_line(f"{rank}| begun")
        wait_for_set("stopped", "last", b"step 1")
        run, = jobs.processes("--grace 20 ")  # the document's time
        code, out, err = jobs.call("stop", "job", "--wait")
        expect(code == 0 and "job: Stopped" in err and notes_of(err) == [], code, out, err, jobs.told())
        expect(objects("stopped")["last"] == b"step 7", objects("stopped"), jobs.told())
        jobs.run(SAVES, name="second", checkpoints={"uri": "s3://data/stopped"}, environment={"AGAIN": "1"}, **RANKS)
        expect("0| found step 7\n" in jobs.log("second") and "1| found step 7\n" in jobs.log("second"), jobs.told("second"))


# Rank 0 writes the next version in place and is killed in the middle. The other rank has some seconds to live.
TEARS = """
import os, signal, time
path = "../checkpoints/last"
if os.environ["RANK"] == "0":
    open(path, "w").write("whole")
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
    open(path, "w").write("ha")
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def what_a_killed_script_left_torn_replaces_nothing():
    """Neither while the other rank lives nor at the end. The command that started the job reports it. On a crowded machine
    the agent may notice the kill only after the file has settled; then nothing shows that it is half-written."""
    with Jobs() as jobs:
        go = jobs.root / "go"
        document = jobs.document(TEARS, checkpoints={"uri": "s3://data/torn"}, environment={"GO": str(go)}, **RANKS)
        command = subprocess.Popen([SHOAL, "job", "run", document], env=jobs.environment, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE, text=True)
        wait_for_set("torn", "last", b"whole")
        go.touch()
        jobs.wait_for_line("shoal run: rank 0 (pid")
        last = jobs.folder() / "hosts/algo-1/checkpoints/last"
        late_s = time.time() - last.stat().st_mtime
        err = command.communicate(timeout=RUN_S)[1]
        expect_failed(jobs, r"^rank 0 killed by signal 9", 137)
        expect(last.read_text() == "ha")
        if late_s > checkpoints.SETTLE_S and objects("torn")["last"] == b"ha":
            raise Skip(f"the agent read of the kill {late_s:.1f} s late")
        expect(objects("torn")["last"] == b"whole" and sorted(objects("torn")) == [".shoal/algo-1.json", "last"], objects("torn"))
        text, = notes_of(err)
        expect("are not at s3://data/torn: last may be half-written, as a process of the script was killed; the set of 2" in text, err)


# Its first process is killed as soon as it has saved. The second one finds the file and ends.
SAVES_ONCE = """
import os, signal
path = "../checkpoints/last"
if not os.path.exists(path):
    open(path + ".tmp", "w").write("step 7")
    os.replace(path + ".tmp", path)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def what_was_saved_before_a_kill_is_safe_when_the_script_completes():
    with Jobs() as jobs:
        jobs.run(SAVES_ONCE, checkpoints={"uri": "s3://data/restarted"}, restarts=1)
        expect(notes_of(jobs.err) == [] and objects("restarted").get("last") == b"step 7", objects("restarted"), jobs.told())


def a_slow_store_gets_the_last_checkpoints():
    """Copying takes longer than the grace time plus the time that the job's processes may take to end."""
    grace_s = 10  # the script takes 2 s, more on a crowded machine
    with Jobs() as jobs:
        jobs.start(SAVES, checkpoints={"uri": "s3://data/slow"}, stop_grace=grace_s, **RANKS)
        wait_for_set("slow", "last", b"step 1")
        s3.proxy.forget()
        s3.proxy.hold_after = 0
        try:
            jobs.call("stop", "job")
            jobs.wait_for(lambda: jobs.status()["status"] == "Stopping", "the runner to hear of it")
            time.sleep(grace_s + 2 * agent.KILL_AFTER_S + 2)
            expect(not jobs.ended("job"), "it ended before its checkpoints were safe", jobs.told())
        finally:
            s3.proxy.hold_after = None
        expect(jobs.wait_for_end()["status"] == "Stopped" and not JobFolder("job", jobs.jobs).notes(), jobs.told())
        expect(objects("slow")["last"] == b"step 7", objects("slow"), jobs.told())


def a_store_that_is_too_slow_is_told():
    with Jobs() as jobs:
        jobs.start(SAVES, checkpoints={"uri": "s3://data/late"}, where={"engine": "local", "options": {"checkpoints_timeout": 1}}, **RANKS)
        wait_for_set("late", "last", b"step 1")
        s3.proxy.forget()
        s3.proxy.hold_after = 0
        try:
            code, out, err = jobs.call("stop", "job", "--wait")
        finally:
            s3.proxy.hold_after = None
        text, = notes_of(err)
        expect(code == 0 and "are not at s3://data/late: " in text and "has not ended within 1 s; the set of 2" in text, code, out, err)
        jobs.wait_for_silence()


# ---- what is on its way ----

def what_was_coming_to_a_killed_host_is_shown_no_more():
    """Checkpoints are fetched like data, with a bar. The bar ends when the agent that fetched them ends, however it ends."""
    for number in range(8):
        s3.put(f"coming/{number}", b"a" * 100 * KiB)
    with Jobs() as jobs:
        s3.proxy.forget()
        s3.proxy.hold_after = 400 * KiB
        try:
            jobs.start("pass", checkpoints={"uri": "s3://data/coming"})
            folder = JobFolder("job", jobs.jobs)
            wait_for(lambda: any(0 < amount.bytes < amount.size for amount in folder.progress().values()), "the middle of it")
            coming = folder.progress()
            expect([(host, amount.what) for host, amount in coming.items()] == [("algo-1", "checkpoints")], coming)
            killed, = [pid for pid in jobs.processes("shoal.job.engines.local") if '"index": 0' in open(f"/proc/{pid}/cmdline").read()]
            os.kill(killed, signal.SIGKILL)
            jobs.wait_for_end()
        finally:
            s3.proxy.hold_after = None
        expect_failed(jobs, r"^the agent of algo-1 \(pid \d+\) was killed by signal 9 \(SIGKILL\)$", 137)
        expect(folder.progress() == {}, folder.progress())


# ---- a second run ----

def a_job_of_another_name_goes_on_with_what_has_come():
    """In the cache that the first job's message names."""
    for number in range(30):
        s3.put(f"again/{number:02}", b"a" * 100 * KiB)
    with Jobs() as jobs:
        cache = jobs.folder() / "cache"
        s3.proxy.forget()
        s3.proxy.hold_after = 2000 * KiB
        try:
            jobs.start("pass", channels={"training": "s3://data/again/"})
            wait_for(lambda: any(not path.suffix for path in cache.glob("objects/*/*")), "the first object")
            wait_for(lambda: s3.proxy.answer_bytes >= s3.proxy.hold_after, "the middle of the download")
            err = jobs.call("stop", "job", "--wait")[2]
            expect(f"stay in {cache}: another job with SHOAL_CACHE={cache} continues with them" in err, err)
            jobs.wait_for_silence()
        finally:
            s3.proxy.hold_after = None
        came = sum(not path.suffix for path in cache.glob("objects/*/*"))
        s3.proxy.forget()
        jobs.environment["SHOAL_CACHE"] = str(cache)
        jobs.run("pass", name="second", channels={"training": "s3://data/again/"})
        log = (jobs.folder("second") / "runner.log").read_text()
        expect("30 objects, 3.1 MB in" in log and f"{came * 100 * KiB / 1e6:.1f} MB of them were there" in log, came, log)
        expect(30 - came <= len(s3.proxy.gets("/again/")) < 30, came, s3.proxy.gets())  # one of the first job may come late


run_cases([
    data_come_and_results_go,
    what_a_script_saves_at_the_end_is_safe_and_comes_back,
    what_a_killed_script_left_torn_replaces_nothing,
    what_was_saved_before_a_kill_is_safe_when_the_script_completes,
    a_slow_store_gets_the_last_checkpoints,
    a_store_that_is_too_slow_is_told,
    what_was_coming_to_a_killed_host_is_shown_no_more,
    a_job_of_another_name_goes_on_with_what_has_come,
])
