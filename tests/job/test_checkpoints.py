#!/usr/bin/env python3
"""Checkpoints at a URI while a job trains: complete sets however the writer ends, restored at the start; and a job's
results at its output_path."""
import contextlib
import errno
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest.mock

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job.data import checkpoints, storage  # noqa: E402
from shoal.job.data.checkpoints import Synchronizer  # noqa: E402
from shoal.job.document import Job  # noqa: E402
from shoal.job.engines import agent, contract, shared  # noqa: E402
from stores import S3, Said, files_below, message, wait_for  # noqa: E402
from tap import expect, run_cases  # noqa: E402

s3 = S3()
LONG_S = 60


class Run:
    """A folder that is synchronized with s3://data/PREFIX, or with another folder."""

    def __init__(self, uri, host="algo-1", **more):
        self.folder = tempfile.TemporaryDirectory(prefix="shoal-test-checkpoints-")
        self.local = pathlib.Path(self.folder.name) / "checkpoints"
        self.said = Said()
        self.sync = Synchronizer(self.local, uri, self.said, host=host, interval_s=0.05, **more)
        self.sync.start()

    def write(self, name, data):
        """Writes a file atomically, as careful scripts do."""
        path = self.local / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(name.rsplit("/", 1)[-1] + ".tmp").write_bytes(data)
        os.replace(path.with_name(name.rsplit("/", 1)[-1] + ".tmp"), path)

    def set_is(self, **wanted):
        """Waits until the manifest has exactly these files."""
        def has():
            entries = manifest(self.sync)
            sizes = {name: len(data) for name, data in wanted.items()}
            return entries is not None and {name: entry["size"] for name, entry in entries.items()} == sizes and all(
                entry["key"] == name for name, entry in entries.items())
        wait_for(has, f"the set {sorted(wanted)}")

    def finish(self, **more):
        self.sync.finish(LONG_S, **more)
        return files_below(self.local)


def manifest(sync):
    item = sync.store.info(sync.manifest.key)
    try:
        return json.loads(sync.store.read_all(item))["files"] if item else None
    except storage.ChangedError:
        return None


def brought(uri, host="algo-1"):
    """Returns the files that a new start restores."""
    run = Run(uri, host)
    return run.finish()


def objects(prefix):
    return {key[len(prefix) + 1:]: body for key, body in s3.listed(prefix + "/").items()}


# ---- out and in ----

def files_go_out_while_training_and_come_back():
    for uri in ("s3://data/there", tempfile.mkdtemp(prefix="shoal-test-there-") + "/new/folder"):
        run = Run(uri)
        run.write("one.pt", b"1" * 100)
        run.write("deep/two.pt", b"2" * 200)
        run.set_is(**{"one.pt": b"1" * 100, "deep/two.pt": b"2" * 200})
        run.write("last +%41ü", b"last")
        expect(run.finish() == {"one.pt": b"1" * 100, "deep/two.pt": b"2" * 200, "last +%41ü": b"last"})
        expect(brought(uri) == {"one.pt": b"1" * 100, "deep/two.pt": b"2" * 200, "last +%41ü": b"last"})
    plain = {name: body for name, body in objects("there").items() if not name.startswith(".shoal")}
    expect(plain == {"one.pt": b"1" * 100, "deep/two.pt": b"2" * 200, "last +%41ü": b"last"}, plain)


def a_file_that_changes_and_one_that_goes():
    run = Run("s3://data/changes")
    run.write("last.pt", b"first")
    run.write("old.pt", b"old")
    run.set_is(**{"last.pt": b"first", "old.pt": b"old"})
    run.write("last.pt", b"second!")
    (run.local / "old.pt").unlink()
    run.set_is(**{"last.pt": b"second!"})
    run.finish()
    there = objects("changes")
    expect(sorted(there) == [".shoal/algo-1.json", "last.pt"] and there["last.pt"] == b"second!", there)
    expect(brought("s3://data/changes") == {"last.pt": b"second!"})


def nothing_is_sent_twice():
    run = Run("s3://data/twice")
    run.write("a", b"a")
    run.set_is(a=b"a")
    s3.proxy.forget()
    time.sleep(0.5)  # ten passes
    run.finish()
    expect([path for method, path in s3.proxy.requests if method == "PUT"] == [], s3.proxy.requests)
    run = Run("s3://data/twice")
    run.finish()
    expect({path for method, path in s3.proxy.requests if method == "PUT"} == {"/data/twice/.shoal/algo-1.json"}, s3.proxy.requests)


def what_a_user_has_put_there_comes_and_stays():
    """They also stay if the script first empties its folder, but are not restored again. A job's own files go when the
    script removes them."""
    s3.put("given/base.pt", b"base")
    s3.put("given/deep/more.pt", b"more")
    Run("s3://data/given").finish()  # it writes nothing
    run = Run("s3://data/given")
    expect(files_below(run.local) == {"base.pt": b"base", "deep/more.pt": b"more"})
    run.write("new.pt", b"new")
    run.finish()
    run = Run("s3://data/given")
    expect(files_below(run.local) == {"base.pt": b"base", "deep/more.pt": b"more", "new.pt": b"new"})
    for name in ("base.pt", "new.pt"):
        (run.local / name).unlink()
    run.set_is(**{"deep/more.pt": b"more"})
    run.finish()
    expect(brought("s3://data/given") == {"deep/more.pt": b"more"})
    expect(sorted(objects("given")) == [".shoal/algo-1.json", "base.pt", "deep/more.pt"], objects("given"))


def the_first_change_may_be_a_removal():
    """In a folder of this machine that no job has written to."""
    with tempfile.TemporaryDirectory() as there:
        (pathlib.Path(there) / "given").write_bytes(b"given")
        run = Run(there)
        (run.local / "given").unlink()
        run.finish()
        expect(run.said[1:] == [] and brought(there) == {} and (pathlib.Path(there) / "given").read_bytes() == b"given", run.said)


def files_keep_their_mode_in_a_folder():
    before = os.umask(0o077)
    try:
        with tempfile.TemporaryDirectory() as there:
            run = Run(there + "/kept")
            run.write("secret", b"secret")
            run.write("open", b"open")
            (run.local / "open").chmod(0o644)
            run.finish()
            modes = {path.name: path.stat().st_mode & 0o777 for path in pathlib.Path(there, "kept").rglob("*") if path.is_file()}
            expect(modes == {"secret": 0o600, "open": 0o644, "algo-1.json": 0o600}, modes)
    finally:
        os.umask(before)


def a_manifest_that_names_other_places_is_one_error():
    """Others may write at the URI. Nothing outside is copied, written or deleted."""
    for name, key in (("stolen", "../victim"), ("../planted", "../planted"), ("../planted", ".shoal/algo-1/../planted"), ("/planted", "/planted"),
                      ("stolen", "victim"), ("linked/victim", "linked/victim"), ("linked/planted", ".shoal/algo-1/linked/planted"), ("stolen", ".shoal/algo-2/stolen"), (".shoal/x", ".shoal/x"), ("a//b", "a//b")):
        for host in ("algo-1", "algo-2"):
            with tempfile.TemporaryDirectory() as name_of_top:
                top = pathlib.Path(name_of_top)
                (top / "there/.shoal/algo-1").mkdir(parents=True)
                (top / "victim").write_bytes(b"victim")
                (top / "there/linked").symlink_to(top)
                entry = {"key": key, "size": 6, "version": str((top / "victim").stat().st_mtime_ns), "mtime_ns": 1}
                (top / "there/.shoal/algo-1.json").write_text(json.dumps({"version": 1, "time": 1, "files": {name: entry}}))
                sync = Synchronizer(top / "local/checkpoints", str(top / "there"), Said(), host=host)
                text = message(sync.start)
                expect("below the folder of checkpoints" in text, text)
                (top / "there/linked").unlink()
                kept = {path for path in files_below(top) if path != "there/.shoal/algo-2.json"}
                expect(kept == {"there/.shoal/algo-1.json", "victim"}, files_below(top))


def hosts_share_a_uri():
    """Each host gets the files of all hosts and maintains its own."""
    first, second = Run("s3://data/hosts", "algo-1"), Run("s3://data/hosts", "algo-2")
    first.write("rank0.pt", b"zero")
    second.write("rank1.pt", b"one")
    first.finish()
    second.finish()
    first, second = Run("s3://data/hosts", "algo-1"), Run("s3://data/hosts", "algo-2")
    expect(files_below(first.local) == files_below(second.local) == {"rank0.pt": b"zero", "rank1.pt": b"one"})
    s3.proxy.forget()
    first.write("rank0.pt", b"zero again")
    (second.local / "rank0.pt").unlink()  # another host's file, so it stays
    first.finish()
    second.finish()
    expect(not any("rank1" in path for method, path in s3.proxy.requests if method == "PUT"), s3.proxy.requests)
    expect(brought("s3://data/hosts", "algo-1") == {"rank0.pt": b"zero again", "rank1.pt": b"one"})


def the_set_replaces_what_a_killed_script_left():
    run = Run("s3://data/left")
    run.write("last.pt", b"whole")
    run.finish()
    again = tempfile.TemporaryDirectory()
    local = pathlib.Path(again.name)
    (local / "last.pt").write_bytes(b"to")
    (local / "other.pt").write_bytes(b"other")
    Synchronizer(local, "s3://data/left", Said()).start()
    expect(files_below(local) == {"last.pt": b"whole", "other.pt": b"other"}, files_below(local))


# ---- progress reports ----

KiB = 1 << 10


@contextlib.contextmanager
def held(prefix, count=8):
    """Puts this many checkpoints of 100 KiB at s3://data/PREFIX. The server holds its answers after half of the bytes."""
    for number in range(count):
        s3.put(f"{prefix}/{number}", b"a" * 100 * KiB)
    s3.proxy.forget()
    s3.proxy.hold_after = count * 50 * KiB
    try:
        yield
    finally:
        s3.proxy.hold_after = None


def what_comes_back_is_reported():
    reports = []
    with tempfile.TemporaryDirectory() as name:
        sync = Synchronizer(pathlib.Path(name), "s3://data/reported", Said())
        starting = threading.Thread(target=sync.start, args=[reports.append])
        with held("reported"):
            starting.start()
            wait_for(lambda: any(one and 0 < one.bytes < one.size for one in reports), "a report")
        starting.join(LONG_S)
        sync.finish(LONG_S)
        told = {(one.what, one.size) for one in reports if one}
        expect(told == {("checkpoints", 800 * KiB)} and reports[-1] is None, reports)
        expect(len(files_below(name)) == 8)


def a_stop_does_not_wait_for_what_comes_back():
    def stop(amount):
        if amount and amount.bytes:
            raise agent.StopAsked
    with tempfile.TemporaryDirectory() as name, held("stopped"):
        try:
            Synchronizer(pathlib.Path(name), "s3://data/stopped", Said()).start(stop)
        except agent.StopAsked:
            expect(files_below(name) == {}, files_below(name))
            return
    raise AssertionError("the stop is lost")


# ---- whole sets ----

@contextlib.contextmanager
def being_written(name):
    """Makes the file look changed at every look. Yields a list with one entry per look."""
    original, looks = checkpoints._scan, []

    def scan(folder):
        looks.append(0)
        marks = original(folder)
        if name in marks:
            marks[name] = checkpoints.Mark(marks[name].size, len(looks), marks[name].inode)
        return marks

    checkpoints._scan = scan
    try:
        yield looks
    finally:
        checkpoints._scan = original


def a_file_that_is_being_written_waits():
    run = Run("s3://data/writing")
    run.write("a", b"a")
    run.set_is(a=b"a")
    with being_written("big") as looks:
        run.write("big", b"torn")
        run.write("b", b"b")
        time.sleep(1.5 * checkpoints.SETTLE_S)
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 5, "more passes")
        expect(set(manifest(run.sync)) == {"a"}, manifest(run.sync))
    run.set_is(a=b"a", b=b"b", big=b"torn")
    run.finish()


def a_set_waits_for_a_file_that_is_always_being_written():
    """For example a shard that takes minutes, or a log. The other files alone would not be a set. The log mentions it now
    and then; the end makes a set of all files."""
    before, checkpoints.SAY_EVERY_S = checkpoints.SAY_EVERY_S, 1.5
    try:
        run = Run("s3://data/patience")
        run.write("shard-0", b"epoch 1")
        run.write("shard-1", b"epoch 1")
        run.set_is(**{"shard-0": b"epoch 1", "shard-1": b"epoch 1"})
        with being_written("shard-1"):
            run.write("shard-0", b"of epoch 2")
            run.write("shard-1", b"half")
            wait_for(lambda: len(run.said) >= 2, "two lines")
            expect(read_only("s3://data/patience") == {"shard-0": b"epoch 1", "shard-1": b"epoch 1"})
        for line in run.said:
            expect(" s, as shard-1 is always being written: keep logs in another folder; the set of 2" in line, run.said)
        run.write("shard-1", b"of epoch 2")
        run.finish()
        expect(brought("s3://data/patience") == {"shard-0": b"of epoch 2", "shard-1": b"of epoch 2"})
    finally:
        checkpoints.SAY_EVERY_S = before


def the_older_of_two_writers_stops():
    """A host that was cut off continues to copy while the job is restarted. It replaces nothing, and its log names the job
    that took over."""
    for uri in ("s3://data/older", tempfile.mkdtemp(prefix="shoal-test-older-")):
        older = Run(uri, job="first")
        older.write("model", b"epoch 1")
        older.set_is(model=b"epoch 1")
        newer = Run(uri, job="second")
        expect(files_below(newer.local) == {"model": b"epoch 1"})
        older.write("model", b"epoch two of the first")
        older.write("late", b"late")
        wait_for(lambda: any("has taken over" in line for line in older.said), "the end of the older one")
        newer.write("model", b"epoch 2")
        newer.set_is(model=b"epoch 2")
        text = message(older.sync.finish, LONG_S)
        expect(text.startswith(f"the last checkpoints are not at {uri}: job second, machine ") and "has taken over" in text, text)
        newer.write("late", b"in time")
        newer.finish()
        expect(brought(uri) == {"model": b"epoch 2", "late": b"in time"})
        plain = objects("older") if uri.startswith("s3") else files_below(uri)
        expect(sorted(plain) == [".shoal/algo-1.json", "late", "model"], sorted(plain))


def a_manifest_is_replaced_by_one_writer_at_a_time():
    with tempfile.TemporaryDirectory() as name:
        stores = [(storage.LocalStore(), f"{name}/below/manifest"), (storage.S3Store(), "data/swap/manifest")]
        for store, key in stores:
            first = store.swap(b"first!", key, None)
            expect(first == store.info(key), first)
            second = store.swap(b"second", key, first)
            for before in (None, first, second._replace(version=second.version + "1")):
                text = message(store.swap, b"other!", key, before)
                expect("has changed since" in text, text)
            expect(store.read_all(store.swap(b"third.", key, second)) == b"third.")
        store, key = stores[0]
        pathlib.Path(key + ".next").write_bytes(b"of another writer")
        now = store.info(key)
        expect("is being replaced by another writer" in message(store.swap, b"fourth", key, now))
        os.utime(key + ".next", (1, 1))  # its writer was killed long ago
        store.swap(b"fourth", key, now)
        expect(files_below(name) == {"below/manifest": b"fourth"}, files_below(name))


def a_swap_that_fails_leaves_no_name_behind():
    """Also a swap whose writer read an old version, as a file server's cache may show it."""
    with tempfile.TemporaryDirectory() as name:
        store, key = storage.LocalStore(), f"{name}/manifest"
        first = store.swap(b"first!", key, None)
        with unittest.mock.patch.object(storage, "_file_place", side_effect=OSError(errno.EIO, "Input/output error")):
            expect("Input/output error" in message(store.swap, b"second", key, first))
        expect(files_below(name) == {"manifest": b"first!"}, files_below(name))
        store.swap(b"second", key, first)
        with unittest.mock.patch.object(storage.LocalStore, "info", lambda self, key: first):
            expect("has changed since" in message(store.swap, b"third!", key, first))
        expect(files_below(name) == {"manifest": b"second"}, files_below(name))


def a_folder_without_hard_links_keeps_checkpoints():
    with tempfile.TemporaryDirectory() as there, \
            unittest.mock.patch("os.link", side_effect=OSError(errno.EPERM, "Operation not permitted")):
        run = Run(there)
        run.write("a", b"a")
        run.finish()
        expect(brought(there) == {"a": b"a"}, run.said)


def a_start_waits_for_a_writer_that_may_have_been_killed():
    """It was killed after it took the name .next. The file is removed when it is old enough."""
    with tempfile.TemporaryDirectory() as there:
        run = Run(there)
        run.write("a", b"a")
        run.finish()
        left = pathlib.Path(there) / ".shoal/algo-1.json.next"
        left.write_bytes(b"half")
        at = time.time() - storage.SWAP_STALE_S + 2
        os.utime(left, (at, at))
        expect(brought(there) == {"a": b"a"} and not left.exists(), files_below(there))


def an_answer_that_is_lost_is_no_other_writer():
    """The store has written the manifest but answers with an error, so the retry finds the first attempt's manifest."""
    original, lost = storage.S3Store.swap, []

    def swap(self, data, key, before):
        item = original(self, data, key, before)
        if before and len(lost) < 1:
            lost.append(key)
            raise storage.StorageError("s3://data/lost: the store cannot be reached")
        return item

    run = Run("s3://data/lost")
    storage.S3Store.swap = swap
    try:
        run.write("a", b"a")
        run.set_is(a=b"a")
        run.finish()
        expect(lost and brought("s3://data/lost") == {"a": b"a"}, run.said)
    finally:
        storage.S3Store.swap = original


WRITER = """
import os, pathlib, sys, time
sys.path[:0] = sys.argv[1:3]
from shoal.job.data import checkpoints, storage
checkpoints.SETTLE_S = 0.0
calls = ["put", "copy", "delete", "swap"]
left = [int(sys.argv[4])]
for name in calls:
    def wrapped(self, *words, original=getattr(storage.LocalStore, name)):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), 9)
        return original(self, *words)
    setattr(storage.LocalStore, name, wrapped)
local = pathlib.Path(sys.argv[3])
sync = checkpoints.Synchronizer(local, sys.argv[6], print)
sync.start()
for name in ("model", "optimizer"):
    (local / name).write_bytes(sys.argv[5].encode() * 1000)
sync.finish(60)
"""


def a_writer_that_is_killed_leaves_a_whole_set():
    """The writer is killed before each of its writes in turn. A reader gets both files of the same round, never of
    different ones."""
    with tempfile.TemporaryDirectory() as there:
        def write(kills_after, letter):
            with tempfile.TemporaryDirectory() as local:
                return subprocess.run([sys.executable, "-c", WRITER, *sys.path[:2], local, str(kills_after), letter, there],
                                      capture_output=True, timeout=120)

        done = write(1000, "a")
        expect(done.returncode == 0, done.stderr)
        state, kills = "a", 0
        while True:
            letter = "bc"[kills % 2]
            code = write(kills, letter).returncode
            expect(code in (0, -signal.SIGKILL), code)
            got = read_only(there)
            expect(set(got) == {"model", "optimizer"} and got["model"] == got["optimizer"], got)
            expect(got["model"][:1].decode() in (state, letter), got, state, letter)
            state = got["model"][:1].decode()
            if code == 0:
                break
            kills += 1
        expect(4 < kills < 20 and state == letter, kills, state)
        expect(sorted(files_below(there)) == [".shoal/algo-1.json", "model", "optimizer"], sorted(files_below(there)))


def read_only(uri):
    """Returns what a start would restore, without becoming a writer."""
    with tempfile.TemporaryDirectory() as name:
        sync = Synchronizer(pathlib.Path(name), uri, Said(), host="reader")
        sync._bring(sync._wanted(), lambda amount: None)
        return files_below(name)


# ---- ends and faults ----

def a_file_that_a_killed_script_left_torn_stays_at_home():
    """One file is in the set, such as a script's last.pt, and one is not. Nobody writes any more files but passes continue,
    so the file looks as settled as any."""
    for name in ("last", "epoch-2"):
        uri = f"s3://data/torn-{name}"
        run = Run(uri)
        run.write("last", b"whole")
        run.set_is(last=b"whole")
        (run.local / name).write_bytes(b"ha")
        run.sync.kill_note()
        time.sleep(1.5 * checkpoints.SETTLE_S)
        text = message(run.sync.finish, LONG_S)
        expect(f"are not at {uri}: {name} may be half-written, as a process of the script was killed; the set of 2" in text, text)
        expect(text.endswith(" is there, whole"), text)
        expect(brought(uri) == {"last": b"whole"})
        expect(objects(f"torn-{name}")["last"] == b"whole" and "epoch-2" not in objects(f"torn-{name}"))


def one_write_of_many_seconds_is_torn_too():
    """The file's time is that of its beginning. Only its size shows how recently it was written."""
    run = Run("s3://data/slow-write")
    run.write("last", b"whole")
    run.set_is(last=b"whole")
    with being_written("big") as looks:
        run.write("big", b"so far")
        os.utime(run.local / "big", (1, 1))
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 2, "two passes")
        run.sync.kill_note()
    expect("big may be half-written" in message(run.sync.finish, LONG_S))
    expect(brought("s3://data/slow-write") == {"last": b"whole"})


def what_others_save_after_a_kill_is_safe():
    """Rank 1 does not handle SIGTERM, and rank 0 saves; a restarted script writes the file again."""
    run = Run("s3://data/others")
    run.write("last", b"whole")
    run.set_is(last=b"whole")
    (run.local / "last").write_bytes(b"ha")
    run.sync.kill_note()
    time.sleep(0.1)
    run.write("last", b"after it")
    run.finish()
    expect(brought("s3://data/others") == {"last": b"after it"})


def the_agent_hears_who_was_killed():
    """A shell's exit code 137 is its program's; scripts that have saved may end with 1 or 143."""
    heard = []
    cause = agent.Cause(0, lambda: heard.append(event))
    killed = [{"event": "worker_ended", "signal": 9}, {"event": "worker_ended", "signal": 15}, {"event": "worker_ended", "code": 137},
              {"event": "worker_ended", "code": 139}, {"event": "killing", "ranks": [0, 1]}]
    others = [{"event": "worker_ended", "code": code} for code in (0, 1, 143, 130, 255)]
    for event in [*killed, *others]:
        cause.event_take(event)
    expect(heard == killed, heard)
    line = "rank 1 (pid 7) has ended: killed by signal 9 (Killed)"
    cause.hear(f"shoal run: {line}")  # a script's own output
    expect(heard == killed, heard)


DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("begun", flush=True)
while True:
    open("last", "w").write("half")
    time.sleep(0.01)
"""


def the_end_of_a_program_behind_a_shell_is_noted():
    """The shell ends at SIGTERM. Its program writes until it is killed."""
    notes, lines = [], []
    with tempfile.TemporaryDirectory() as name, unittest.mock.patch.object(agent, "KILL_AFTER_S", 0.5), \
            open(os.path.join(name, "log"), "wb") as log:
        (pathlib.Path(name) / "deaf.py").write_text(DEAF)
        reading, writing = os.pipe()
        wake, wake_writing = os.pipe2(os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_writing, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        try:
            with open(reading, "rb", buffering=0) as events:
                training = agent.Training(["/bin/sh", "-c", f"{sys.executable} deaf.py; exit 3"], pathlib.Path(name), os.environ,
                                          agent.Lines(log, [lines.append], lines.append), Job("train.py", stop_grace=0), (),
                                          lambda: notes.append(time.time()))
                os.close(writing)
                training.run(lambda: bool(lines), wake, events, lambda data: None)
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
        written = (pathlib.Path(name) / "last").stat().st_mtime
        expect(notes and notes[-1] >= written, notes, written)


def a_deadline_is_kept_and_the_set_before_is_named():
    run = Run("s3://data/late")
    run.write("model", b"first")
    run.set_is(model=b"first")
    original, release = storage.S3Store.put, threading.Event()

    def slow(self, path, key):
        release.wait(LONG_S)
        return original(self, path, key)

    storage.S3Store.put = slow
    try:
        run.write("model", b"second")
        wait_for(lambda: run.sync.copying == "model", "the beginning of a copy")
        began = time.monotonic()
        text = message(run.sync.finish, 0.5)
        expect(time.monotonic() - began < 20)
        expect(text.startswith("the last checkpoints are not at s3://data/late: model has not ended within 0.5 s; the set of 2"), text)
        expect(text.endswith(" is there, whole"), text)
        expect(read_only("s3://data/late") == {"model": b"first"})
    finally:
        release.set()
        run.sync.thread.join(LONG_S)
        storage.S3Store.put = original


def a_store_that_fails_is_said_once_and_tried_again():
    original, broken = storage.S3Store.put, [True]

    def put(self, path, key):
        if broken[0]:
            raise storage.StorageError("s3://data/broken: the store cannot be reached")
        return original(self, path, key)

    storage.S3Store.put = put
    try:
        run = Run("s3://data/broken")
        run.write("a", b"a")
        wait_for(lambda: run.said, "the failure")
        time.sleep(0.5)
        expect(run.said == ["checkpoints: s3://data/broken: the store cannot be reached"], run.said)
        broken[0] = False
        run.set_is(a=b"a")
        wait_for(lambda: len(run.said) == 2, "the end of the failure")
        broken[0] = True
        run.write("b", b"b")
        text = message(run.sync.finish, 3)
        expect("the last checkpoints are not at s3://data/broken: s3://data/broken: the store cannot be reached" in text, text)
        expect("is there, whole" in text, text)
    finally:
        storage.S3Store.put = original


def a_store_that_refuses_for_some_seconds_at_the_end_gets_all():
    """Tries as often as the deadline permits: more than three times."""
    original, is_ending, refused = storage.S3Store.put, threading.Event(), []

    def put(self, path, key):
        if not is_ending.is_set() or len(refused) < 5:
            refused.extend([key] if is_ending.is_set() else [])
            raise storage.StorageError("s3://data/refuses: the store cannot be reached")
        return original(self, path, key)

    run = Run("s3://data/refuses")
    storage.S3Store.put = put
    try:
        run.write("a", b"a")
        is_ending.set()
        run.finish()
        expect(brought("s3://data/refuses") == {"a": b"a"} and len(refused) == 5 and len(run.said) == 2, refused, run.said)
    finally:
        storage.S3Store.put = original


def a_set_that_is_not_whole_is_one_error():
    run = Run("s3://data/spoilt")
    run.write("a", b"a")
    run.write("b", b"b")
    run.finish()
    s3.put("spoilt/a", b"somebody else's")
    with tempfile.TemporaryDirectory() as name:
        text = message(Synchronizer(pathlib.Path(name), "s3://data/spoilt", Said()).start)
        expect("the last set of checkpoints is incomplete: s3://data/spoilt/a has changed since" in text, text)
        expect(files_below(name) == {})
        s3.client.delete_object(Bucket="data", Key="spoilt/a")
        expect("s3://data/spoilt/a is gone since" in message(Synchronizer(pathlib.Path(name), "s3://data/spoilt", Said()).start))
        s3.put("spoilt/.shoal/algo-1.json", b"{")
        text = message(Synchronizer(pathlib.Path(name), "s3://data/spoilt", Said()).start)
        expect("is not a manifest of checkpoints" in text, text)


def a_bucket_that_is_not_there_is_one_error():
    with tempfile.TemporaryDirectory() as name:
        text = message(Synchronizer(pathlib.Path(name), "s3://no-such-bucket/run", Said()).start)
        expect(text.startswith("s3://no-such-bucket/run/.shoal/algo-1.json") and text.endswith("there is no such bucket"), text)


def archive_send(archive, output_path):
    """Sends an archive as a job does at its end. A failure is one line."""
    try:
        return shared._output_copy(Job("train.py", name="job-1", output_path=output_path), archive, "")
    except contract.ContractError as error:
        return str(error)


def what_a_job_leaves_is_copied():
    with tempfile.TemporaryDirectory() as name:
        archive = pathlib.Path(name) / "model.tar.gz"
        archive.write_bytes(b"model")
        expect(archive_send(archive, "s3://data/results/") == "s3://data/results/job-1/output/model.tar.gz")
        expect(objects("results") == {"job-1/output/model.tar.gz": b"model"}, objects("results"))
        for uri in (f"file://{name}/the%20results", f"{name}/the results"):
            kept = pathlib.Path(name) / "the results/job-1/output/model.tar.gz"
            expect(archive_send(archive, uri) == kept.as_uri() and kept.read_bytes() == b"model")
            kept.unlink()
        text = archive_send(archive, "s3://no-such-bucket/x")
        expect(text.startswith("cannot copy model.tar.gz to s3://no-such-bucket/x/job-1") and "there is no such bucket" in text, text)


def a_large_archive_goes_in_parts():
    with tempfile.TemporaryDirectory() as name:
        body = os.urandom((33 << 20) + 5)
        archive = pathlib.Path(name) / "model.tar.gz"
        archive.write_bytes(body)
        s3.proxy.forget()
        archive_send(archive, "s3://data/parts")
        expect(objects("parts") == {"job-1/output/model.tar.gz": body})
        expect(len([path for method, path in s3.proxy.requests if method == "PUT"]) == 3, s3.proxy.requests)
        before, storage.COPY_BYTES = storage.COPY_BYTES, 12 << 20
        try:
            item = storage.S3Store().copy("data/parts/job-1/output/model.tar.gz", "data/copies/model")
        finally:
            storage.COPY_BYTES = before
        expect(objects("copies") == {"model": body} and item.size == len(body))


run_cases([
    files_go_out_while_training_and_come_back,
    a_file_that_changes_and_one_that_goes,
    nothing_is_sent_twice,
    what_a_user_has_put_there_comes_and_stays,
    the_first_change_may_be_a_removal,
    files_keep_their_mode_in_a_folder,
    a_manifest_that_names_other_places_is_one_error,
    hosts_share_a_uri,
    the_set_replaces_what_a_killed_script_left,
    what_comes_back_is_reported,
    a_stop_does_not_wait_for_what_comes_back,
    a_file_that_is_being_written_waits,
    a_set_waits_for_a_file_that_is_always_being_written,
    the_older_of_two_writers_stops,
    a_manifest_is_replaced_by_one_writer_at_a_time,
    a_swap_that_fails_leaves_no_name_behind,
    a_folder_without_hard_links_keeps_checkpoints,
    a_start_waits_for_a_writer_that_may_have_been_killed,
    an_answer_that_is_lost_is_no_other_writer,
    a_writer_that_is_killed_leaves_a_whole_set,
    a_file_that_a_killed_script_left_torn_stays_at_home,
    one_write_of_many_seconds_is_torn_too,
    what_others_save_after_a_kill_is_safe,
    the_agent_hears_who_was_killed,
    the_end_of_a_program_behind_a_shell_is_noted,
    a_deadline_is_kept_and_the_set_before_is_named,
    a_store_that_fails_is_said_once_and_tried_again,
    a_store_that_refuses_for_some_seconds_at_the_end_gets_all,
    a_set_that_is_not_whole_is_one_error,
    a_bucket_that_is_not_there_is_one_error,
    what_a_job_leaves_is_copied,
    a_large_archive_goes_in_parts,
])
