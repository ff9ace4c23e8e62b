#!/usr/bin/env python3
"""Input channels: the names and bytes that boto3 lists in S3, over HTTP; shards, manifests, a shared cache. Each fault is
one clear error."""
import contextlib
import errno
import functools
import http.server
import io
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest.mock

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job.data import channels, fetching, progress, storage  # noqa: E402
from shoal.job.document import Channel  # noqa: E402
from shoal.job.document.folder import Amount, JobFolder, Status  # noqa: E402
from shoal.job.engines import agent  # noqa: E402
from jobs import RUN_S, SHOAL, Jobs, expect_failed  # noqa: E402
from stores import CREDENTIALS, S3, Said, channel_folder, files_below, job_folder, message, wait_for  # noqa: E402
from tap import Skip, expect, run_cases  # noqa: E402

s3 = S3()
KiB, MiB = 1 << 10, 1 << 20


def bring(uri, job, host=0, hosts=1, **more):
    """Returns the files of the channel's folder, and the log lines."""
    said = Said()
    channels.channel_bring(Channel(uri, **more), channel_folder(job, host), host, hosts, said)
    return files_below(channel_folder(job, host)), said


def failure(uri, job, host=0, hosts=1, **more):
    """Returns the error's text. Expects that no partial files are left."""
    folder = channel_folder(job, host)
    text = message(channels.channel_bring, Channel(uri, **more), folder, host, hosts, Said())
    expect(sorted(path.name for path in folder.parent.iterdir()) == [], list(folder.parent.iterdir()))
    return text


def cached(job):
    return sorted(path.name for path in (job / "cache").rglob("*") if path.is_file())


def program(body, job, environment=None, prefix=()):
    """Starts Python code in a separate process, with `job` defined."""
    lead = f"import sys; sys.path[:0] = {sys.path[:2]!r}\nimport os, pathlib\njob = pathlib.Path({str(job)!r})\n"
    lead += "from shoal.job.data import channels, fetching\nfrom shoal.job.document import Channel\n"
    return subprocess.Popen([*prefix, sys.executable, "-c", lead + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True, stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})})


def ended(process, code=0):
    out, err = process.communicate(timeout=120)
    expect(process.returncode == code, process.returncode, out, err)
    return out


# ---- names and bytes ----

def put_tree():
    for key in ("tree/a.csv", "tree/deep/er/b.bin", "tree/with space+plus%41.txt", "tree/ünïcode-日本.txt", "tree/empty",
                "tree-extra/y"):
        s3.put(key, b"" if key == "tree/empty" else None)
    for number in range(20):
        s3.put(f"tree/many/{number:03d}")
    s3.put("tree/marker/", b"")
    s3.put("tree/", b"")


def names_and_bytes_are_those_of_list_objects_v2():
    put_tree()
    listed = s3.listed("tree/")
    expect(len(listed) == 27, sorted(listed))
    with job_folder() as job:
        files, said = bring("s3://data/tree/", job)
        expect(files == {key[len("tree/"):]: body for key, body in listed.items() if not key.endswith("/")}, sorted(files))
        expect(len(said) == 1 and "25 objects" in said[0] and "/s" in said[0], said)


def a_prefix_is_text():
    put_tree()
    with job_folder() as job:
        files, _ = bring("s3://data/tree", job)
        listed = {key[len("tree"):].lstrip("/"): body for key, body in s3.listed("tree").items() if not key.endswith("/")}
        expect(files == listed and "-extra/y" in files and "a.csv" in files, sorted(files))


def an_object_by_its_whole_key_keeps_its_name():
    body = s3.put("single/table.csv")
    with job_folder() as job:
        expect(bring("s3://data/single/table.csv", job)[0] == {"table.csv": body})


def a_large_object_comes_in_parts():
    body = os.urandom(3 * MiB + 17)
    s3.put("large/blob", body)
    before, fetching.PART_BYTES = fetching.PART_BYTES, 256 * KiB
    try:
        with job_folder() as job:
            s3.proxy.forget()
            files, _ = bring("s3://data/large/", job)
            expect(files == {"blob": body})
            expect(len(s3.proxy.gets("blob")) == 13, s3.proxy.gets("blob"))
            expect([name for name in cached(job) if "." in name] == [], cached(job))
    finally:
        fetching.PART_BYTES = before


class Pages(http.server.SimpleHTTPRequestHandler):
    """Python's own server, which does not support ranges. The next `cuts` answers end after 300 KiB."""

    asked, cuts, has_ranges = [], 0, False

    def do_GET(self):
        start = self.headers.get("Range")
        type(self).asked.append((self.path, start))
        path = pathlib.Path(self.translate_path(self.path))
        if not path.is_file():
            return super().do_GET()
        data, begin = path.read_bytes(), int(start.split("=")[1].rstrip("-")) if start and self.has_ranges else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        self.send_header("Last-Modified", self.date_time_string(path.stat().st_mtime))
        self.end_headers()
        cut, type(self).cuts = self.cuts > 0 and len(data) - begin > 300 * KiB, self.cuts - (self.cuts > 0)
        self.wfile.write(data[begin:begin + 300 * KiB] if cut else data[begin:])

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def web_server():
    """Serves a folder; yields the folder and its address without a final slash."""
    with tempfile.TemporaryDirectory() as name:
        class Here(Pages):
            asked = []

            def __init__(self, *words):
                super().__init__(*words, directory=name)

        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Here) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield pathlib.Path(name), f"http://127.0.0.1:{server.server_port}", Here
            server.shutdown()


def pages_of_a_web_server_are_a_folder():
    files = {"rows.csv": b"1,2\n", "deep/er/b c+50%.bin": b"bbb", "deep/none": b"", "deep/r\u00fcbe#?.txt": b"root"}
    with job_folder() as job, web_server() as (top, url, server):
        for name, body in files.items():
            (top / "data" / name).parent.mkdir(parents=True, exist_ok=True)
            (top / "data" / name).write_bytes(body)
        (top / "data-of-others").write_bytes(b"others")
        expect(bring(f"{url}/data/", job)[0] == files and bring(f"{url}/data", job)[0] == files)
        expect(bring(f"{url}/data/rows.csv", job)[0] == {"rows.csv": b"1,2\n"})
        expect(bring(f"{url}/data/deep/er/b%20c+50%25.bin", job)[0] == {"b c+50%.bin": b"bbb"})
        (top / "list").write_text(json.dumps([{"prefix": f"{url}/data/"}, "rows.csv"]))
        expect(bring(f"{url}/list", job, data_type="ManifestFile")[0] == {"rows.csv": b"1,2\n"})
        server.asked.clear()
        said = bring(f"{url}/data/", job)[1]
        expect("11 bytes of them were there" in said[-1] and not any("rows" in path for path, _ in server.asked), said, server.asked)
    with job_folder() as job, web_server() as (top, url, server):
        (top / "data").mkdir()
        expect(failure(f"{url}/nothing", job).startswith("there is no object at "))
        server.extensions_map = {**server.extensions_map, ".html": "text/plain"}
        (top / "data/index.html").write_text("hello")
        expect("is not a page of links" in failure(f"{url}/data/", job))
        expect("a query is not served" in failure(f"{url}/data/?x=1", job))


def a_web_server_that_cuts_is_asked_for_the_rest():
    body = os.urandom(700 * KiB)
    for has_ranges in (False, True):
        with job_folder() as job, web_server() as (top, url, server):
            (top / "blob").write_bytes(body)
            server.cuts, server.has_ranges = 1, has_ranges
            expect(bring(f"{url}/blob", job)[0] == {"blob": body})
            expect(len(server.asked) == 2 and server.asked[1][1].startswith("bytes="), server.asked)


def a_file_of_a_web_server_that_changes_is_one_error():
    with job_folder() as job, web_server() as (top, url, server):
        (top / "blob").write_bytes(b"first")
        store, key = storage.store_open(f"{url}/blob")
        item = store.info(key)
        (top / "blob").write_bytes(b"other")
        os.utime(top / "blob", (1, 1))
        expect("blob has changed since it was listed (5 bytes then)" in message(store.read_all, item))
        expect("nothing can be written there" in message(store.put, top / "blob", key))


# ---- shares and manifests ----

def shards_take_the_sorted_keys_in_turn():
    bodies = {f"{name}": s3.put(f"shards/{name}") for name in ("d", "a", "c", "b", "e")}
    with job_folder(3) as job:
        shares = [bring("s3://data/shards/", job, host, 3, distribution="ShardedByS3Key")[0] for host in range(3)]
        expect([sorted(share) for share in shares] == [["a", "d"], ["b", "e"], ["c"]], shares)
        expect({**shares[0], **shares[1], **shares[2]} == bodies)


def a_seed_shuffles_shards_on_all_hosts_alike():
    for number in range(12):
        s3.put(f"shuffled/{number:02d}")
    with job_folder(2) as job:
        def shares(seed):
            more = {"distribution": "ShardedByS3Key", "shuffle_seed": seed}
            return [sorted(bring("s3://data/shuffled/", job, host, 2, **more)[0]) for host in range(2)]
        first, second = shares(7)
        expect(len(first) == len(second) == 6 and len({*first, *second}) == 12, first, second)
        expect(shares(7) == [first, second] and shares(8) != [first, second], shares(8))


def a_host_without_a_share_gets_an_empty_folder():
    s3.put("alone/one")
    with job_folder(2) as job:
        files, said = bring("s3://data/alone/", job, 1, 2, distribution="ShardedByS3Key")
        expect(files == {} and channel_folder(job, 1).is_dir() and any("gets none" in line for line in said), files, said)


def a_manifest_names_its_objects():
    bodies = {name: s3.put(f"listed/{name}") for name in ("a", "b/c", "not-this")}
    s3.put("manifests/good", json.dumps([{"prefix": "s3://data/listed/"}, "b/c", "a"]).encode())
    with job_folder() as job:
        files, _ = bring("s3://data/manifests/good", job, data_type="ManifestFile")
        expect(files == {name: bodies[name] for name in ("a", "b/c")}, files)


def a_wrong_manifest_is_one_error():
    s3.put("listed/a")
    cases = {"not-json": (b"[", "is not JSON"), "no-prefix": (b'["a"]', "does not begin with a prefix"),
             "number": (b'[{"prefix": "s3://data/listed/"}, 3]', "has the entry 3"),
             "missing": (b'[{"prefix": "s3://data/listed/"}, "a", "x", "y"]',
                         "names s3://data/listed/x and 1 more, which is not there")}
    with job_folder() as job:
        for name, (body, text) in cases.items():
            s3.put(f"manifests/{name}", body)
            expect(text in failure(f"s3://data/manifests/{name}", job, data_type="ManifestFile"), name)
        expect("there is no manifest" in failure("s3://data/manifests/none", job, data_type="ManifestFile"))


# ---- local data ----

def local_data_are_linked():
    with job_folder() as job, tempfile.TemporaryDirectory() as name:
        source = pathlib.Path(name) / "the data"
        source.mkdir()
        (source / "x").write_bytes(b"1")
        (source / "y").write_bytes(b"2")
        for uri in (str(source), f"file://{name}/the%20data"):
            expect(bring(uri, job)[0] == {"x": b"1", "y": b"2"})
            expect(os.path.realpath(channel_folder(job)) == os.path.realpath(source))
        expect(bring(str(source / "x"), job)[0] == {"x": b"1"} and (channel_folder(job) / "x").is_symlink())
        files, _ = bring(str(source), job, 1 - 1, 2, distribution="ShardedByS3Key")
        expect(files == {"x": b"1"} and files_below(source) == {"x": b"1", "y": b"2"}, files)
        expect(not (job / "cache").exists())


def missing_local_data_are_one_error():
    with job_folder() as job:
        expect(failure("/nonexistent/data", job) == "there is no /nonexistent/data")


# ---- once on a machine ----

def hosts_of_one_machine_share_a_download():
    bodies = {f"{number:02d}": s3.put(f"shared/{number:02d}", os.urandom(50 * KiB)) for number in range(12)}
    with job_folder(3) as job:
        s3.proxy.forget()
        body = ("index = int(os.environ['INDEX'])\nchannels.channel_bring(Channel('s3://data/shared/'), "
                "job / f'hosts/algo-{index + 1}/input/data/training', index, 3, print)\n")
        for process in [program(body, job, {"INDEX": str(index)}) for index in range(3)]:
            expect("12 objects" in ended(process))
        expect(sorted(s3.proxy.gets("/shared/")) == [f"/data/shared/{name}" for name in sorted(bodies)], s3.proxy.gets())
        for host in range(3):
            expect(files_below(channel_folder(job, host)) == bodies)


def what_is_in_the_cache_is_not_brought_again():
    body = s3.put("again/one")
    with job_folder() as job:
        bring("s3://data/again/", job)
        s3.proxy.forget()
        files, said = bring("s3://data/again/", job)
        expect(files == {"one": body} and s3.proxy.gets("/again/") == [] and "were there" in said[-1], said)
        changed = s3.put("again/one", b"another")
        expect(bring("s3://data/again/", job)[0] == {"one": changed})


def the_cache_may_be_elsewhere():
    s3.put("cache/one")
    with job_folder() as job, tempfile.TemporaryDirectory() as name:
        os.environ["SHOAL_CACHE"] = name
        try:
            bring("s3://data/cache/", job)
        finally:
            del os.environ["SHOAL_CACHE"]
        expect(not (job / "cache").exists() and any((pathlib.Path(name) / "objects").iterdir()))


@contextlib.contextmanager
def shared_cache():
    with tempfile.TemporaryDirectory() as name, unittest.mock.patch.dict(os.environ, SHOAL_CACHE=name):
        yield pathlib.Path(name)


def what_a_script_changes_in_place_stays_its_own():
    """Runs as root, who may write to files of mode 0444. The other host, a later job and the cache keep the store's
    content. A file system that shares blocks and one without room differ only in cost."""
    if not os.access("/proc/sys/kernel/hostname", os.W_OK):
        raise Skip("only root may write to the files of the cache")
    body = s3.put("inplace/lines", b"1\n2\n3\n")
    with shared_cache() as cache, job_folder(2) as job:
        bring("s3://data/inplace/", job)
        with open(channel_folder(job) / "lines", "r+b") as file:
            file.write(b"9")
        expect(bring("s3://data/inplace/", job, 1, 2)[0] == {"lines": body})
        with job_folder() as later:
            expect(bring("s3://data/inplace/", later)[0] == {"lines": body})
        expect([path.read_bytes() for path in cache.rglob("*") if path.is_file()] == [body])
        with unittest.mock.patch("os.statvfs", lambda path: unittest.mock.Mock(f_bavail=0, f_frsize=4096)), \
                unittest.mock.patch.object(channels, "_clone", lambda source, place: False):
            files, said = bring("s3://data/inplace/", job, 1, 2)
        expect(files == {"lines": body} and "no room for a second copy of 6 bytes" in said[0], said)
        with unittest.mock.patch.object(channels, "_copy", side_effect=OSError(errno.ENOSPC, "No space left on device")):
            files, said = bring("s3://data/inplace/", job, 1, 2)  # others have used the room meanwhile
        expect(files == {"lines": body} and "no room for a second copy of 6 bytes" in said[0], said)


def who_may_not_write_to_the_cache_gets_links():
    s3.put("linked/lines", b"1")
    with shared_cache() as cache, job_folder() as job, unittest.mock.patch("os.access", lambda path, mode: False):
        bring("s3://data/linked/", job)
        path, = (path for path in cache.rglob("*") if path.is_file())
        expect(os.path.samefile(path, channel_folder(job) / "lines") and path.stat().st_mode & 0o777 == 0o444)


def a_file_of_the_cache_that_was_written_to_comes_again():
    body = s3.put("written/blob", b"from the store")
    with shared_cache() as cache, job_folder() as job:
        bring("s3://data/written/", job)
        path, = (path for path in cache.rglob("*") if path.is_file())
        os.chmod(path, 0o644)
        path.write_bytes(b"from a program")  # the same length
        expect(bring("s3://data/written/", job)[0] == {"blob": body} and path.read_bytes() == body)


def a_file_that_comes_again_needs_no_room_of_its_own():
    body = s3.put("room/blob", os.urandom(100 * KiB))
    with shared_cache() as cache:
        with job_folder() as job:
            bring("s3://data/room/", job)
        path, = (path for path in cache.rglob("*") if path.is_file())
        os.utime(path, (1, 1))  # as after a write
        blocks = (fetching.SPARE_BYTES + 50 * KiB) // 4096
        with job_folder() as job, unittest.mock.patch("os.statvfs", lambda path: unittest.mock.Mock(f_bavail=blocks, f_frsize=4096)):
            expect(bring("s3://data/room/", job)[0] == {"blob": body}, "")


# ---- interruptions and faults ----

def a_journal_without_its_file_counts_for_nothing():
    """Operators who need space remove the largest files, which are partial downloads."""
    body = os.urandom(MiB)
    s3.put("journal/blob", body)
    before, fetching.PART_BYTES = fetching.PART_BYTES, 256 * KiB
    try:
        with shared_cache() as folder, job_folder() as job:
            store, key = storage.store_open("s3://data/journal/blob")
            final = fetching.Cache(folder, store).path(store.info(key))
            final.parent.mkdir(parents=True)
            final.with_suffix(".done").write_text("".join(f"\n[{256 * KiB}, {start * 256 * KiB}]\n" for start in range(4)))
            expect(bring("s3://data/journal/", job)[0] == {"blob": body})
    finally:
        fetching.PART_BYTES = before



def a_killed_download_goes_on_where_it_was():
    body = os.urandom(4 * MiB)
    s3.put("killed/blob", body)
    with job_folder() as job:
        fetch = ("fetching.PART_BYTES = 1 << 17\n"
                 "channels.channel_bring(Channel('s3://data/killed/'), job / 'hosts/algo-1/input/data/training', 0, 1, print)\n")
        s3.proxy.forget()
        s3.proxy.hold_after = 2 * MiB
        process = program(fetch, job)
        try:
            wait_for(lambda: any(path.read_text().count("[") > 3 for path in job.glob("cache/objects/*/*.done")), "done parts")
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
            s3.proxy.hold_after = None
        expect(not channel_folder(job).exists())
        done = sum(path.read_text().count("[") for path in job.glob("cache/objects/*/*.done"))
        s3.proxy.forget()
        out = ended(program(fetch, job))
        expect(f"{fetching.bytes_text(done << 17)} of them were there" in out, done, out)
        # A request of the killed process may reach the proxy after forget().
        expect(32 - done <= len(s3.proxy.gets("blob")) < 32, done, s3.proxy.gets())
        expect(files_below(channel_folder(job)) == {"blob": body})
        expect([name for name in cached(job) if "." in name] == [], cached(job))


@contextlib.contextmanager
def cut(times):
    """Connections end after 300 KiB, this many times."""
    s3.proxy.forget()
    s3.proxy.cut_after, s3.proxy.cuts = 300 * KiB, times
    try:
        yield
    finally:
        s3.proxy.cut_after = None


def a_connection_that_is_cut_costs_one_more_request():
    """The new request is for the missing bytes. The cut comes after the reader has taken a piece; bytes that arrived but
    were not yet taken are lost."""
    body = os.urandom(MiB)
    s3.put("cut/blob", body)
    asked, pieces = [], []
    original = storage.S3Store._read_some

    def read_some(self, item, start, end, take):
        def note(data):
            take(data)
            pieces.append(len(data))
            s3.proxy.may_cut.set()
        asked.append((start, end))
        return original(self, item, start, end, note)

    storage.S3Store._read_some = read_some
    s3.proxy.may_cut.clear()
    try:
        with job_folder() as job, cut(1):
            files, said = bring("s3://data/cut/", job)
    finally:
        storage.S3Store._read_some = original
        s3.proxy.may_cut.set()
    expect(files == {"blob": body} and "1.0 MB in" in said[-1], said)
    expect(len(asked) == 2 and asked[0] == (0, MiB) and 0 < asked[1][0] <= 300 * KiB and asked[1][1] == MiB, asked)
    expect(sum(pieces) == MiB, pieces)
    expect(len(s3.proxy.gets("blob")) == 2, s3.proxy.gets())


def a_connection_that_is_always_cut_is_one_error():
    s3.put("cut-always/blob", os.urandom(4 * MiB))
    before, storage.RETRIES = storage.RETRIES, 2
    try:
        with job_folder() as job, cut(1000):
            text = failure("s3://data/cut-always/", job)
            expect(text == "s3://data/cut-always/blob: the connection ended early, again and again", text)
            expect(len(s3.proxy.gets("blob")) == 3, s3.proxy.gets())
    finally:
        storage.RETRIES = before


def fewer_bytes_than_were_listed_are_one_error():
    """A store sends fewer bytes, without an error."""
    s3.put("short/blob", b"b" * MiB)
    original = storage.S3Store.read
    storage.S3Store.read = lambda self, item, start, end, take: original(self, item, start, end - 1, take)
    try:
        with job_folder() as job:
            text = failure("s3://data/short/", job)
            expect(text == "s3://data/short/blob: 1,048,576 bytes were asked for, and 1,048,575 came", text)
            expect(not any(name.endswith(".done") or "." not in name for name in cached(job)), cached(job))
    finally:
        storage.S3Store.read = original


def an_object_that_changes_is_one_error():
    """Between listing and reading, and between two parts."""
    s3.put("changing/blob", b"a" * MiB)
    original = storage.S3Store._read_some
    lock = threading.Lock()

    def changing(self, item, start, end, take):
        with lock:
            if start >= first and not changed:
                changed.append(s3.put("changing/blob", b"b" * MiB))
        return original(self, item, start, end, take)

    before, fetching.PART_BYTES = fetching.PART_BYTES, 256 * KiB
    storage.S3Store._read_some = changing
    try:
        for first in (0, 512 * KiB):
            changed = []
            s3.put("changing/blob", b"a" * MiB)
            with job_folder() as job:
                text = failure("s3://data/changing/", job)
                expect(text.startswith("s3://data/changing/blob has changed since it was listed (1,048,576 bytes then)"), text)
                expect(cached(job) == [], cached(job))
    finally:
        storage.S3Store._read_some = original
        fetching.PART_BYTES = before


def an_object_that_vanishes_is_one_error():
    s3.put("vanishing/blob")
    original = storage.S3Store._read_some

    def vanishing(self, item, start, end, take):
        s3.client.delete_object(Bucket="data", Key="vanishing/blob")
        return original(self, item, start, end, take)

    storage.S3Store._read_some = vanishing
    try:
        with job_folder() as job:
            expect("vanishing/blob has changed since" in failure("s3://data/vanishing/", job))
    finally:
        storage.S3Store._read_some = original


def missing_data_are_one_error():
    with job_folder() as job:
        text = failure("s3://data/nothing/", job)
        expect(text == "there is no object at s3://data/nothing/: the key of an object has to begin with this text", text)
        expect("there is no such bucket" in failure("s3://no-such-bucket/x", job))
        expect("names no bucket" in failure("s3://", job))


def missing_credentials_are_one_error():
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    kept = {name: os.environ.pop(name) for name in names}
    try:
        with job_folder() as job:
            text = failure("s3://data/tree/a.csv", job)
            expect(text.startswith("s3://data/tree/a.csv: no credentials were found: set AWS_ACCESS_KEY_ID"), text)
    finally:
        os.environ.update(kept)


def a_job_without_credentials_is_told():
    """The command, the status and the failure file have the error; nothing has run, and nothing is left."""
    with Jobs() as jobs:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            del jobs.environment[name]
        jobs.run("print('not reached')", channels={"training": "s3://data/tree/a.csv"}, code=1)
        expect_failed(jobs, "^channel training .*: s3://data/tree/a.csv: no credentials were found: set AWS_ACCESS_KEY_ID", 125)
        expect("not reached" not in jobs.log() and "job failed: " in jobs.err, jobs.err, jobs.told())
        expect(files_below(jobs.folder() / "hosts/algo-1/input/data") == {}, jobs.told())


def a_job_whose_object_changes_is_told():
    """The last object is replaced while the first ones arrive."""
    for number in range(30):
        s3.put(f"replaced/{number:02}", b"a" * 100 * KiB)
    with Jobs() as jobs:
        s3.proxy.forget()
        s3.proxy.hold_after = 300 * KiB
        try:
            jobs.start("print('not reached')", channels={"training": "s3://data/replaced/"})
            wait_for(lambda: s3.proxy.answer_bytes >= s3.proxy.hold_after, "the beginning of the download")
            s3.put("replaced/29", b"b" * 100 * KiB)
        finally:
            s3.proxy.hold_after = None
        jobs.wait_for_end()
        expect_failed(jobs, "^channel training .*: s3://data/replaced/29 has changed since it was listed", 125)
        expect("not reached" not in jobs.log(), jobs.told())
        expect(files_below(jobs.folder() / "hosts/algo-1/input/data") == {}, jobs.told())


def denied_access_is_one_error():
    class Denies(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Denies) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = with_endpoint(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    expect("access is denied (AccessDenied): check the credentials" in text, text)


def a_store_that_cannot_be_reached_is_one_error():
    import socket
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        text = with_endpoint(f"http://127.0.0.1:{taken.getsockname()[1]}")
    expect("the store cannot be reached" in text, text)


def with_endpoint(url):
    before, os.environ["AWS_ENDPOINT_URL_S3"] = os.environ["AWS_ENDPOINT_URL_S3"], url
    try:
        with job_folder() as job:
            return failure("s3://data/tree/", job)
    finally:
        os.environ["AWS_ENDPOINT_URL_S3"] = before


def a_full_disk_is_one_error():
    """Noticed before the first byte, or in the middle if the space is used up meanwhile."""
    for number in range(3):
        s3.put(f"big/{number}", os.urandom(900 * KiB))
    with job_folder() as job:
        mount = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c",
                 f"mount -t tmpfs -o size=2m none {job}/cache && touch {job}/mounted && exec \"$@\"", "sh")
        (job / "cache").mkdir()
        for blind in (False, True):
            body = ("fetching.Cache._check_space = lambda self, missing: None\n" if blind else "") + (
                "try:\n    channels.channel_bring(Channel('s3://data/big/'), job / 'hosts/algo-1/input/data/training', 0, 1, print)\n"
                "except RuntimeError as error:\n    print(type(error).__name__, error)\n"
                "print([name for _, _, names in os.walk(job / 'cache') for name in names if '.' in name])\n"
                "print(os.listdir(job / 'hosts/algo-1/input/data'))\n")
            process = program(body, job, prefix=mount)
            out, err = process.communicate(timeout=120)
            if not (job / "mounted").exists():
                raise Skip("no mount of our own: " + err.strip())
            lines = out.splitlines()
            expect(len(lines) == 3 and lines[1:] == ["[]", "[]"], out, err)
            text = "no space is left on the disk of" if blind else "2.8 MB must be fetched to"
            expect(lines[0].startswith("FullError") and text in lines[0] and "SHOAL_CACHE" in lines[0], out, err)


def data_larger_than_the_disk_are_one_error():
    """Refused before any byte arrives, also with FastFile."""
    s3.put("larger/blob", os.urandom(100 * KiB))
    with job_folder() as job, unittest.mock.patch("os.statvfs", lambda path: unittest.mock.Mock(f_bavail=9, f_frsize=4096)):
        s3.proxy.forget()
        text = failure("s3://data/larger/", job, input_mode="FastFile")
        expect(text.startswith(f"102.4 kB must be fetched to {job}/cache, where 36.9 kB are free") and s3.proxy.gets("blob") == [], text)


def names_that_cannot_be_files_are_one_error():
    cases = {"up": (["up/../../x"], "makes no name of a file"),
             "twice": (["twice/a//b", "twice/a/b"], "would both be the file a/b"),
             "both": (["both/a", "both/a/b"], "would be a file and")}
    for name, (keys, text) in cases.items():
        named = [(channels._name(key, name), storage.Item(key, 1)) for key in keys]
        expect(text in message(channels._check_names, storage.LocalStore(), named), name)
    for key in ("clash/a", "clash/a/b"):
        s3.put(key)
    s3.put("folder-with-bytes/", b"bytes")
    with job_folder() as job:
        expect("s3://data/clash/a would be a file and, for s3://data/clash/a/b, a folder" in failure("s3://data/clash/", job))
        expect("has 5 bytes and the name of a folder" in failure("s3://data/folder-with-bytes", job))


def what_is_not_served_is_one_error():
    with job_folder() as job:
        expect("input mode Pipe is not served" in failure("s3://data/tree/", job, input_mode="Pipe"))
        expect("AugmentedManifestFile is not served" in failure("s3://data/tree/", job, data_type="AugmentedManifestFile"))
        expect("compression Gzip belongs to" in failure("s3://data/tree/", job, compression="Gzip"))
        for scheme in ("gs", "memory", "nosuchscheme"):
            text = failure(f"{scheme}://x/y", job)
            expect(text.startswith(f"{scheme}://x/y: {scheme}:// is not served, only s3://, http://"), text)


# ---- what is shown ----

class Terminal(io.StringIO):
    def isatty(self):
        return True


def progress_is_a_bar_on_a_terminal_and_lines_elsewhere():
    with job_folder() as job:
        folder, said = JobFolder(job.name, job.parent), Said()
        (job / "hosts").mkdir(exist_ok=True)
        folder.status_write(Status("job", hosts=["algo-1", "algo-2"]))
        ahead, behind = (fetching.Progress("channel train", 2, 2000, said, functools.partial(folder.progress_write, host))
                         for host in folder.status().hosts)
        shows = [progress.Display(folder, told) for told in (Terminal(), io.StringIO())]
        for one, count in ((ahead, 1500), (behind, 500)):
            one.add(count)
            one.draw()
        expect(said == [], said)
        behind.said, shows[1].line_at = behind.said - 11, 0
        behind.draw()
        expect(said[0].startswith("channel train: 500 bytes of 2.0 kB, ") and said[0].endswith("/s"), said)
        for show in shows:
            show.show()
        ahead.end()
        behind.end()
        for show in shows:
            show.show()
        bar, line = (show.told.getvalue() for show in shows)
        expect(re.fullmatch(r"\ralgo-2: channel train \[#+\.+\]  25 % of 2\.0 kB, [\d.]+ (bytes|kB|MB|GB)/s\x1b\[K\r\x1b\[K", bar), repr(bar))
        expect(re.fullmatch(r"shoal job: \S+: algo-2: channel train: 500 bytes of 2\.0 kB, .*/s\n", line), repr(line))
        expect(said[1].startswith("channel train: 2 objects, 1.5 kB in ") and len(said) == 3, said)
        expect(folder.progress() == {} and not list((job / "hosts").glob("*progress*")), list((job / "hosts").iterdir()))


def a_stop_is_heard_while_progress_is_written():
    """SIGTERM comes after the file was renamed from its temporary name."""
    def replaced(*names, replace=os.replace):
        replace(*names)
        raise agent.StopAsked
    with job_folder() as job, unittest.mock.patch("os.replace", replaced):
        folder = JobFolder(job.name, job.parent)
        (job / "hosts").mkdir(exist_ok=True)
        try:
            folder.progress_write("algo-1", Amount("channel train", 1, 2, 1.0))
        except agent.StopAsked:
            expect([path.name for path in (job / "hosts").iterdir() if path.is_file()] == ["algo-1.progress"])
            return
    raise AssertionError("the stop is lost")


def a_job_shows_its_download_on_the_terminal():
    """`shoal job run` shows the bar while the server delays its answers, and removes it when the script starts."""
    for number in range(8):
        s3.put(f"shown/{number}", b"a" * 100 * KiB)
    with Jobs() as jobs:
        document = jobs.document("print('trains now')", channels={"training": "s3://data/shown/"})
        main, other = pty.openpty()
        s3.proxy.forget()
        s3.proxy.hold_after = 400 * KiB
        running = subprocess.Popen([SHOAL, "job", "run", document], stdin=subprocess.DEVNULL, stdout=other, stderr=other,
                                   env=jobs.environment)
        os.close(other)
        try:
            shown = terminal_read(main, r"channel training \[#+\.+\] +\d+ % of 819\.2 kB, [\d.]+ (bytes|kB|MB)/s")
            s3.proxy.hold_after = None
            shown += terminal_read(main, "Completed")
            expect(running.wait(timeout=RUN_S) == 0, shown, jobs.told())
        finally:
            s3.proxy.hold_after = None
            running.kill()
            running.wait()
            os.close(main)
        last_bar = shown.rindex("channel training [")
        expect("trains now" in shown[last_bar:] and "\x1b[K" in shown[last_bar:shown.index("trains now")], repr(shown))


def terminal_read(main, pattern):
    """Returns a program's terminal output, read until the pattern appears."""
    shown, until = "", time.monotonic() + RUN_S
    while not re.search(pattern, shown):
        expect(time.monotonic() < until, f"nothing like {pattern}", repr(shown))
        if select.select([main], [], [], 1)[0]:
            shown += os.read(main, 1 << 16).decode(errors="replace")
    return shown


expect(CREDENTIALS["AWS_ACCESS_KEY_ID"] == os.environ["AWS_ACCESS_KEY_ID"])
run_cases([
    names_and_bytes_are_those_of_list_objects_v2,
    a_prefix_is_text,
    an_object_by_its_whole_key_keeps_its_name,
    a_large_object_comes_in_parts,
    pages_of_a_web_server_are_a_folder,
    a_web_server_that_cuts_is_asked_for_the_rest,
    a_file_of_a_web_server_that_changes_is_one_error,
    shards_take_the_sorted_keys_in_turn,
    a_seed_shuffles_shards_on_all_hosts_alike,
    a_host_without_a_share_gets_an_empty_folder,
    a_manifest_names_its_objects,
    a_wrong_manifest_is_one_error,
    local_data_are_linked,
    missing_local_data_are_one_error,
    hosts_of_one_machine_share_a_download,
    what_is_in_the_cache_is_not_brought_again,
    the_cache_may_be_elsewhere,
    what_a_script_changes_in_place_stays_its_own,
    who_may_not_write_to_the_cache_gets_links,
    a_file_of_the_cache_that_was_written_to_comes_again, a_file_that_comes_again_needs_no_room_of_its_own,
    a_journal_without_its_file_counts_for_nothing,
    a_killed_download_goes_on_where_it_was,
    a_connection_that_is_cut_costs_one_more_request,
    a_connection_that_is_always_cut_is_one_error,
    fewer_bytes_than_were_listed_are_one_error,
    an_object_that_changes_is_one_error,
    an_object_that_vanishes_is_one_error,
    missing_data_are_one_error,
    missing_credentials_are_one_error,
    a_job_without_credentials_is_told,
    a_job_whose_object_changes_is_told,
    denied_access_is_one_error,
    a_store_that_cannot_be_reached_is_one_error,
    a_full_disk_is_one_error,
    data_larger_than_the_disk_are_one_error,
    names_that_cannot_be_files_are_one_error,
    what_is_not_served_is_one_error,
    progress_is_a_bar_on_a_terminal_and_lines_elsewhere,
    a_stop_is_heard_while_progress_is_written,
    a_job_shows_its_download_on_the_terminal,
])
