#!/usr/bin/env python3
"""`shoal doctor --data` for folders, S3 (moto) and a web server: the rate of storage, compared with the need of a job."""
import contextlib
import functools
import http.server
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading

TOP = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TOP / "tests/multi"), str(TOP / "python")]

from shoal.job.data import doctor, storage  # noqa: E402
from jobs import SHOAL  # noqa: E402
from stores import S3  # noqa: E402
from tap import expect, run_cases  # noqa: E402

s3 = S3()
FOLDER = pathlib.Path(tempfile.mkdtemp(prefix="shoal-doctor-"))
SIZES = [0, 1, 999, 131072, 131073, 3 << 20, (16 << 20) + 7]  # the borders of the classes; the last is read in two parts
for number, size in enumerate(SIZES):
    (FOLDER / f"{number}.bin").write_bytes(bytes([number]) * size)
PROFILE = FOLDER.parent / f"{FOLDER.name}.json"
PROFILE.write_text(json.dumps([{"profile": "net", "batch": 10, "forward_ms": 5, "backward_ms": 15}, {"name": "w", "elements": 1, "ready": 1}]))


def told(*words, code=0):
    done = subprocess.run([SHOAL, "doctor", *map(str, words)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "SHOAL_PYTHON": sys.executable})
    expect(done.returncode == code, words, done)
    return done.stdout, done.stderr


def found(uri, *words, code=0):
    """Returns what is measured. On a busy machine nothing may be read in a short time; then more time is given."""
    for seconds in ("0.6", "6", "60"):
        one = json.loads(told("--data", uri, "--seconds", seconds, "--streams", "1,3", "--json", *words, code=code)[0])
        if all(rate["bytes_s"] > 0 and rate["reads_s"] > 0 for rate in one["rates"]):
            break
    return one


def refused(*words, about, code=2):
    out, err = told(*words, code=code)
    expect(not out and len(err.splitlines()) == 1 and about in err, words, out, err)


def a_folder_is_measured():
    one = found(FOLDER)
    expect((one["objects"], one["bytes"]) == (len(SIZES), sum(SIZES)), one)
    expect([rate["streams"] for rate in one["rates"]] == [1, 3] and all(rate["bytes_s"] > 0 for rate in one["rates"]), one)
    expect([(row["objects"], row["number"]) for row in one["sizes"]] ==
           [("up to 128 KiB", 4), ("up to 1 MiB", 1), ("up to 16 MiB", 1), ("larger", 1)], one)
    expect(one["need_bytes_s"] is one["is_input_bound"] is one["verdict"] is None, one)
    single = found((FOLDER / "3.bin").as_uri())
    expect((single["objects"], single["bytes"], single["read_again"]) == (1, 131072, True), single)


def an_s3_prefix_and_a_web_page_are_measured():
    for number, size in enumerate((5000, 70001, 2 << 20)):
        s3.put(f"doctor/{number}", bytes(size))
    one = found("s3://data/doctor")
    expect((one["objects"], one["bytes"]) == (3, 75001 + (2 << 20)) and one["rates"][0]["bytes_s"] > 0, one)
    expect(one["place"]["bucket_region"] == "us-east-1" and one["place"]["host_region"] == "", one)
    expect("nothing reports the place of this host" in one["place_text"], one)
    handler = functools.partial(type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=FOLDER)
    server_of = type("Server", (http.server.ThreadingHTTPServer,), {"handle_error": lambda *_: None})  # the last reads are cut
    with server_of(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        one = found(f"http://127.0.0.1:{server.server_port}/")
        server.shutdown()
    expect((one["objects"], one["bytes"]) == (len(SIZES), sum(SIZES)) and one["rates"][1]["reads_s"] > 0, one)


class Slow(storage.Store):
    """A store that gives each stream 2^20 bytes in a second, by a clock of its own. All its times are exact in binary."""

    scheme = "slow"

    def __init__(self, clock):
        self.clock = clock

    def list(self, prefix):
        return [storage.Item("a", 1 << 20), storage.Item("b", 1 << 20)]

    def read(self, item, start, end, take):
        for _ in range((end - start) >> 10):
            self.clock.now += 1 / 1024
            take(bytes(1024))


class Clock:
    now = 100.0

    def monotonic(self):
        return self.now


@contextlib.contextmanager
def replaced(module, **names):
    before = {name: getattr(module, name) for name in names}
    for name, value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def rates_are_bytes_over_time():
    clock = Clock()
    with replaced(doctor, time=clock, store_open=lambda uri: (Slow(clock), "")):
        one = doctor.measure("slow://x", [1], 7.5)
    (rate,) = one.rates
    expect(rate.rate == 1 << 20 and rate.seconds == 7.5 and rate.bytes == 7.5 * (1 << 20), rate.rate, rate.seconds)
    expect(len(rate.readings) == 7 and rate.first_ms == 1e3 / 1024 and one.is_again, rate)
    expect(doctor.verdict(one, doctor.Need(4 << 20, "")).startswith("Input-bound: a host of the job needs 4.2 MB/s and storage gives 1.0 MB/s"),
           doctor.verdict(one, doctor.Need(4 << 20, "")))
    expect("wait for data for 75 % of the time" in doctor.verdict(one, doctor.Need(4 << 20, "")))
    expect("Not input-bound" in doctor.verdict(one, doctor.Need(1 << 19, "")) and "2 times as much" in doctor.verdict(one, doctor.Need(1 << 19, "")))
    many = doctor.Found("u", one.items, 0, [doctor.Rate(1, 100, 1.0), doctor.Rate(4, 300, 1.0), doctor.Rate(9, 200, 1.0)], False, doctor.Regions())
    expect(many.best.streams == 4 and "1 stream is enough" in doctor.verdict(many, doctor.Need(90, "")), doctor.verdict(many, doctor.Need(90, "")))
    expect("4 streams are enough" in doctor.verdict(many, doctor.Need(150, "")))


def the_need_follows_from_the_profile():
    """Two workers read 30 samples of 100 bytes each in 60 ms, because the profile's 10 samples take 20 ms."""
    one = found(FOLDER, "--profile", PROFILE, "--batch", "30", "--sample-bytes", "0.1kB", "--workers", "2")
    expect(abs(one["need_bytes_s"] - 1e5) < 1e-4 and one["is_input_bound"] is False and one["wait_share"] == 0, one)
    one = found(FOLDER, "--profile", PROFILE, "--samples", str(sum(SIZES)))
    expect(abs(one["need_bytes_s"] - 10 / 0.02) < 1e-6, one)
    out, err = told("--data", FOLDER, "--need", "900000GB/s", "--seconds", "0.3", code=1)
    expect("Input-bound: " in out and re.search(r"wait for data for (99|100) % of the time", out) and not err, out, err)
    out, err = told("--data", FOLDER, "--need", "1kbit", "--seconds", "3")
    expect("Not input-bound: a host of the job needs 125 bytes/s" in out and "Mode File brings all of it in" in out, out)
    expect(max(map(len, out.splitlines())) <= 160, out)


class Metadata(http.server.BaseHTTPRequestHandler):
    """EC2's metadata service, version 2."""

    answers = {"placement/region": "eu-west-1", "placement/availability-zone-id": "euw1-az2"}

    def do_PUT(self):
        self.reply("token" if self.path == "/latest/api/token" else None)

    def do_GET(self):
        is_allowed = self.headers.get("X-aws-ec2-metadata-token") == "token"
        self.reply(self.answers.get(self.path.partition("/meta-data/")[2]) if is_allowed else None)

    def reply(self, text):
        self.send_response(200 if text else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_):
        pass


def region_and_zone_are_compared():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ.update(AWS_EC2_METADATA_SERVICE_ENDPOINT=f"http://127.0.0.1:{server.server_port}/", AWS_EC2_METADATA_DISABLED="false")
        expect(doctor.host_place() == ("eu-west-1", "euw1-az2"))
        store, _ = storage.store_open("s3://data/doctor")
        found = doctor.regions_find("s3://data/doctor", store)
        server.shutdown()
    os.environ.update(AWS_EC2_METADATA_DISABLED="true")
    expect(found == doctor.Regions("us-east-1", "", "eu-west-1", "euw1-az2"), found)
    expect("reads cross regions" in doctor.regions_text(found), doctor.regions_text(found))
    expect(doctor.host_place() == ("", ""))
    expect(doctor.bucket_place(store, "fast--use1-az4--x-s3")[1] == "use1-az4" and doctor.bucket_place(store, "none") == ("", ""))
    same = doctor.Regions("us-east-1", "use1-az4", "us-east-1", "use1-az4")
    expect(doctor.regions_text(same) == "the bucket and this host are in us-east-1", doctor.regions_text(same))
    expect("fast in its own zone only" in doctor.regions_text(same._replace(host_zone="use1-az5")))
    expect(doctor.regions_text(doctor.Regions()) == "" and "the place of the bucket" in doctor.regions_text(doctor.Regions("", "", "us-east-1", "")))


def what_cannot_be_measured_is_one_line():
    refused("--data", FOLDER / "none", about="nothing is there", code=1)
    refused("--data", "s3://nowhere/x", about="there is no such bucket", code=1)
    refused("--data", "ftp://host/x", about="is not served", code=1)
    refused("--data", FOLDER / "0.bin", about="all objects there are empty", code=1)
    refused("--data", FOLDER, "--need", "fast", about="takes a rate above 0, such as 300MB/s")
    refused("--data", FOLDER, "--need", "0MB/s", about="takes a rate above 0")
    refused("--data", FOLDER, "--streams", "0,4", about="takes numbers from 1 to 256")
    refused("--data", FOLDER, "--seconds", "-1", about="takes seconds above 0")
    refused("--data", FOLDER, "--profile", PROFILE, about="--profile needs the bytes of a sample")
    refused("--data", FOLDER, "--batch", "4", about="--batch is for --profile FILE")
    refused("--data", FOLDER, "--need", "1MB/s", "--profile", PROFILE, about="leave one out")
    refused("--data", FOLDER, "--profile", FOLDER / "1.bin", "--samples", "3", about="has no measured passes")
    refused("--data", FOLDER, "--profile", FOLDER / "none.json", "--samples", "3", about="No such file")
    refused("--data", FOLDER, "--hosts", "hosts.txt", about="unrecognized arguments: --hosts hosts.txt")
    refused("--data", about="expected one argument")


if __name__ == "__main__":
    run_cases([a_folder_is_measured, an_s3_prefix_and_a_web_page_are_measured, rates_are_bytes_over_time, the_need_follows_from_the_profile,
               region_and_zone_are_compared, what_cannot_be_measured_is_one_line])
