"""`shoal doctor --data URI`: measures how fast this host reads from storage, and compares that with the need of a job.

    found = measure("s3://bucket/train", streams=[1, 8], seconds=8)
    found.best.rate          bytes per second with the fastest number of streams
    verdict(found, need)     one sentence: is the job input-bound?

It reads objects through the store of the job's own channels, and keeps none of the bytes. Nothing is written."""
from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import random
import re
import statistics
import sys
import threading
import time
import urllib.request
from typing import Any, Dict, Iterator, List, NamedTuple, NoReturn, Optional, Sequence, Tuple

from shoal.job.data.progress import bytes_text
from shoal.job.data.storage import Item, LocalStore, Stopped, StorageError, Store, at_once, store_open
from shoal.job.document import JobError

PART_BYTES = 16 << 20  # larger objects are read in parts, as channels bring them
STREAMS_MAX = 256
CLASSES = ((128 << 10, "up to 128 KiB"), (1 << 20, "up to 1 MiB"), (16 << 20, "up to 16 MiB"), (None, "larger"))
METADATA_TIMEOUT_S = 1.0
EXIT_FINE, EXIT_BOUND, EXIT_USAGE = 0, 1, 2
UNITS = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 1024.0, "mib": 1024.0 ** 2, "gib": 1024.0 ** 3,
         "kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


# ---- measuring ----

class Reading(NamedTuple):
    """A read of an object, or of a part of it."""

    bytes: int
    seconds: float
    first_s: float  # until the first bytes came
    size: int  # bytes in the whole object


@dataclasses.dataclass
class Rate:
    """What a number of streams got, all at once."""

    streams: int
    bytes: int = 0
    seconds: float = 0.0
    readings: List[Reading] = dataclasses.field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def objects_per_s(self) -> float:
        return len(self.readings) / self.seconds if self.seconds else 0.0

    @property
    def first_ms(self) -> float:
        return 1e3 * statistics.median(one.first_s for one in self.readings) if self.readings else 0.0


@dataclasses.dataclass
class Found:
    uri: str
    items: List[Item]
    listing_s: float
    rates: List[Rate]
    is_again: bool  # some objects were read more than once, so a cache may have answered
    regions: "Regions"

    @property
    def total(self) -> int:
        return sum(item.size for item in self.items)

    @property
    def best(self) -> Rate:
        return max(self.rates, key=lambda rate: rate.rate)


class Pieces:
    """Objects, or parts of large ones, in a random order that is the same each time; without end. Any thread may take one."""

    def __init__(self, items: Sequence[Item], has_ranges: bool):
        self.all = [(item, start, min(start + PART_BYTES, item.size) if has_ranges else item.size)
                    for item in items if item.size for start in range(0, item.size if has_ranges else 1, PART_BYTES)]
        random.Random(0).shuffle(self.all)
        self.taken = 0

    def __iter__(self) -> Iterator[Tuple[Item, int, int]]:
        for piece in itertools.cycle(self.all):
            self.taken += 1
            yield piece

    @property
    def is_again(self) -> bool:
        return self.taken > len(self.all)


def page_cache_drop(item: Item) -> None:
    """Asks the kernel to forget a file of this machine, so that the disk is measured. Pages that are not yet written stay."""
    descriptor = os.open(item.key, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def read_measure(store: Store, piece: Tuple[Item, int, int], rate: Rate, lock: threading.Lock, until: float) -> None:
    """Reads a piece; stops in the middle when the time is over, and then counts the bytes that have come."""
    item, start, end = piece
    if isinstance(store, LocalStore):
        page_cache_drop(item)
    begun = time.monotonic()
    first: List[float] = []

    def take(data: bytes) -> None:
        now = time.monotonic()
        first[:] = first or [now - begun]
        with lock:
            rate.bytes += len(data) if now <= until else 0
        if now > until:
            raise Stopped

    store.read(item, start, end, take)
    with lock:
        rate.readings.append(Reading(end - start, time.monotonic() - begun, first[0], item.size))


def rate_measure(store: Store, pieces: Iterator[Tuple[Item, int, int]], streams: int, seconds: float) -> Rate:
    """Reads for `seconds` with `streams` streams at once. The rate's time ends after `seconds`, or at the last read if that is
    earlier."""
    rate, lock, stop = Rate(streams), threading.Lock(), threading.Event()
    begun = time.monotonic()
    until = begun + seconds

    def work(piece: Tuple[Item, int, int]) -> None:
        read_measure(store, piece, rate, lock, until)
        if time.monotonic() > until:
            raise Stopped

    try:
        at_once(pieces, work, streams, stop)
    except Stopped:
        pass
    rate.seconds = max(min(time.monotonic(), until) - begun, 1e-9)
    return rate


def measure(uri: str, streams: Sequence[int], seconds: float) -> Found:
    """Measures each number of streams for an equal share of the time. Raises StorageError if nothing can be read."""
    store, key = store_open(uri)
    begun = time.monotonic()
    items = store.list(key)
    listing_s = time.monotonic() - begun
    if not any(item.size for item in items):
        raise StorageError(f"{uri}: {'all objects there are empty' if items else 'nothing is there'}: name a file, a folder or a prefix "
                           "that holds data")
    pieces = Pieces(items, store.has_ranges)
    source = iter(pieces)
    rates = [rate_measure(store, source, count, seconds / len(streams)) for count in streams]
    return Found(uri, items, listing_s, rates, pieces.is_again, regions_find(uri, store))


# ---- regions ----

class Regions(NamedTuple):
    """Region and zone of a bucket and of this host; empty if nothing reports them."""

    bucket_region: str = ""
    bucket_zone: str = ""
    host_region: str = ""
    host_zone: str = ""


def metadata_get(endpoint: str, path: str, token: str) -> str:
    request = urllib.request.Request(f"{endpoint}/latest/meta-data/{path}", headers={"X-aws-ec2-metadata-token": token})
    with urllib.request.urlopen(request, timeout=METADATA_TIMEOUT_S) as answer:
        return str(answer.read().decode().strip())


def host_place() -> Tuple[str, str]:
    """Returns region and zone id of this EC2 instance; empty texts elsewhere."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return "", ""
    endpoint = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")
    ask = urllib.request.Request(f"{endpoint}/latest/api/token", method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "60"})
    try:
        with urllib.request.urlopen(ask, timeout=METADATA_TIMEOUT_S) as answer:
            token = answer.read().decode()
        return metadata_get(endpoint, "placement/region", token), metadata_get(endpoint, "placement/availability-zone-id", token)
    except (OSError, ValueError):
        return "", ""


def bucket_place(store: Any, bucket: str) -> Tuple[str, str]:
    """Returns the region of a bucket, and the zone id of a directory bucket, whose name has it (NAME--ZONE--x-s3)."""
    zone = re.fullmatch(r".*--([a-z0-9-]+)--x-s3", bucket)
    try:
        region = store.client.head_bucket(Bucket=bucket)["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "")
        if not region:  # us-east-1 has no name here
            region = store.client.get_bucket_location(Bucket=bucket)["LocationConstraint"] or "us-east-1"
    except Exception:  # botocore's errors: permission to read objects is enough for all else
        region = ""
    return region, zone[1] if zone else ""


def regions_find(uri: str, store: Store) -> Regions:
    if store.scheme != "s3":
        return Regions()
    return Regions(*bucket_place(store, uri.split("://", 1)[1].split("/", 1)[0]), *host_place())


def regions_text(regions: Regions) -> str:
    """One line on bucket and host; empty if neither is known."""
    bucket, host = regions.bucket_zone or regions.bucket_region, regions.host_zone or regions.host_region
    if not bucket and not host:
        return ""
    if not regions.bucket_region or not regions.host_region:
        known = f"the bucket is in {bucket}" if bucket else f"this host is in {host}"
        return f"{known}; nothing reports the place of {'this host' if bucket else 'the bucket'}"
    if regions.bucket_region != regions.host_region:
        return (f"the bucket is in {regions.bucket_region} and this host in {regions.host_region}: reads cross regions, which is slow and is "
                "billed by the byte; copy the data to a bucket of this region, or run the job there")
    if regions.bucket_zone and regions.host_zone and regions.bucket_zone != regions.host_zone:
        return (f"the bucket is in zone {regions.bucket_zone} and this host in {regions.host_zone}: both are in {regions.host_region}, but a "
                "directory bucket is fast in its own zone only")
    return f"the bucket and this host are in {regions.host_region}"


# ---- what a job needs ----

class Need(NamedTuple):
    rate: float  # bytes per second
    text: str  # how it was computed


def number_read(text: str, suffix: str, takes: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-z]*)" + suffix, text.strip(), re.I)
    unit = UNITS.get(found[2].lower() or "b") if found else None
    if not found or unit is None or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"takes {takes}, not {text!r}")
    return float(found[1]) * unit


def rate_read(text: str) -> float:
    return number_read(text, r"(?:/s)?", "a rate above 0, such as 300MB/s or 2.5gbit")


def size_read(text: str) -> float:
    return number_read(text, "", "a size above 0, such as 110kB")


def streams_read(text: str) -> List[int]:
    numbers = [int(word) if word.strip().isdigit() else 0 for word in text.split(",")]
    if not all(1 <= number <= STREAMS_MAX for number in numbers):
        raise argparse.ArgumentTypeError(f"takes numbers from 1 to {STREAMS_MAX}, such as 1,4,16, not {text!r}")
    return sorted(set(numbers))


def count_read(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"takes a number above 0, not {text!r}")
    return int(text)


def seconds_read(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86400:
        raise argparse.ArgumentTypeError(f"takes seconds above 0, not {text!r}")
    return seconds


def profile_read(path: str) -> Dict[str, Any]:
    """Returns the facts that shoal.torch.profile or shoal.tensorflow.profile measured."""
    try:
        facts = json.loads(pathlib.Path(path).read_text())[0]
        if facts["batch"] > 0 and facts["forward_ms"] + facts["backward_ms"] > 0:
            return dict(facts)
    except OSError as error:
        raise JobError(f"{path}: {error.strerror}") from error
    except (ValueError, LookupError, TypeError):
        pass
    raise JobError(f"{path} has no measured passes: write it with shoal.torch.profile(model, example), or give --need RATE")


def need_find(words: argparse.Namespace, total: int) -> Optional[Need]:
    """Returns what one host needs: its workers' samples of a step, over the time of the step."""
    if words.need:
        return Need(words.need, "as given")
    if not words.profile:
        return None
    facts = profile_read(words.profile)
    sample_bytes = words.sample_bytes or total / words.samples
    batch = words.batch or facts["batch"]
    step_s = 1e-3 * (facts["forward_ms"] + facts["backward_ms"]) * batch / facts["batch"]
    rate = words.workers * batch * sample_bytes / step_s
    return Need(rate, f"{words.workers} worker{'s' * (words.workers > 1)} x {batch} samples x {bytes_text(sample_bytes)} in {1e3 * step_s:.4g} ms "
                      "of computing")


def wait_share(rate: float, need: float) -> float:
    """The share of time for which ranks wait for data, if computing and reading overlap fully."""
    return max(0.0, 1 - rate / need)


def verdict(found: Found, need: Need) -> str:
    best = found.best
    given = f"storage gives {bytes_text(best.rate)}/s with {best.streams} stream{'s' * (best.streams > 1)}"
    if best.rate < need.rate:
        return (f"Input-bound: a host of the job needs {bytes_text(need.rate)}/s and {given}, so ranks would wait for data for "
                f"{100 * wait_share(best.rate, need.rate):.0f} % of the time.")
    enough = min(rate.streams for rate in found.rates if rate.rate >= need.rate)
    return (f"Not input-bound: a host of the job needs {bytes_text(need.rate)}/s and {given}, {best.rate / need.rate:.3g} times as much; "
            f"{enough} stream{'s' * (enough > 1)} {'are' if enough > 1 else 'is'} enough.")


# ---- printing ----

def classes_of(found: Found) -> List[Tuple[str, int, float, float]]:
    """For each class of sizes: its name, objects, and the bytes per second and milliseconds of one stream."""
    rows, below = [], -1  # empty objects belong to the first class
    for most, name in CLASSES:
        count = sum(below < item.size and (most is None or item.size <= most) for item in found.items)
        reads = [one for rate in found.rates for one in rate.readings if below < one.size and (most is None or one.size <= most)]
        busy = sum(one.seconds for one in reads)
        if count:
            rows.append((name, count, sum(one.bytes for one in reads) / busy if busy else 0.0,
                         1e3 * statistics.median(one.seconds for one in reads) if reads else 0.0))
        below = most or 0
    return rows


def text_print(found: Found, need: Optional[Need]) -> None:
    sizes = sorted(item.size for item in found.items)
    print(f"{found.uri}: {len(sizes):,} object{'s' * (len(sizes) > 1)}, {bytes_text(found.total)}; the median has "
          f"{bytes_text(statistics.median(sizes))}, the largest {bytes_text(sizes[-1])}; listed in {found.listing_s:.2f} s\n")
    print(f"{'streams':>7} {'rate':>14} {'reads/s':>9} {'first byte':>12}")
    for rate in found.rates:
        print(f"{rate.streams:7} {bytes_text(rate.rate) + '/s':>14} {rate.objects_per_s:9.1f} " +
              (f"{rate.first_ms:9.1f} ms" if rate.readings else f"{'-':>12}"))
    print(f"\n{'objects':16} {'number':>9} {'a stream gets':>14} {'a read takes':>13}")
    for name, count, rate, ms in classes_of(found):
        print(f"{name:16} {count:9,} " + (f"{bytes_text(rate) + '/s':>14} {ms:10.1f} ms" if rate else f"{'not read':>14}"))
    print(f"\nMode File brings all of it in {found.total / max(found.best.rate, 1e-9):.0f} s, before the script starts.")
    if found.is_again:
        print("Some objects were read more than once: a cache may have made later reads faster.")
    text = regions_text(found.regions)
    if text:
        print(f"{text[0].upper()}{text[1:]}.")
    if need:
        print(f"Need: {bytes_text(need.rate)}/s for a host ({need.text}).")
    print(verdict(found, need) if need else "Give --need RATE, or --profile FILE with --samples N, to compare it with what a job needs.")


def data_of(found: Found, need: Optional[Need]) -> Dict[str, Any]:
    return {
        "uri": found.uri, "objects": len(found.items), "bytes": found.total, "listing_s": found.listing_s,
        "rates": [{"streams": rate.streams, "bytes_s": rate.rate, "reads_s": rate.objects_per_s, "first_byte_ms": rate.first_ms}
                  for rate in found.rates],
        "sizes": [{"objects": name, "number": count, "stream_bytes_s": rate, "read_ms": ms} for name, count, rate, ms in classes_of(found)],
        "read_again": found.is_again, "place": found.regions._asdict(), "place_text": regions_text(found.regions),
        "need_bytes_s": need.rate if need else None, "is_input_bound": found.best.rate < need.rate if need else None,
        "wait_share": wait_share(found.best.rate, need.rate) if need else None, "verdict": verdict(found, need) if need else None}


# ---- the command ----

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"shoal doctor: {message} (shoal doctor --help explains)", file=sys.stderr)
        raise SystemExit(EXIT_USAGE)


def parser_make() -> Parser:
    parser = Parser(prog="shoal doctor", add_help=False)
    parser.add_argument("--data", metavar="URI", required=True)
    parser.add_argument("--need", metavar="RATE", type=rate_read)
    parser.add_argument("--profile", metavar="FILE")
    parser.add_argument("--batch", metavar="N", type=count_read)
    parser.add_argument("--samples", metavar="N", type=count_read)
    parser.add_argument("--sample-bytes", metavar="SIZE", type=size_read)
    parser.add_argument("--workers", metavar="N", type=count_read, default=1)
    parser.add_argument("--streams", metavar="LIST", type=streams_read, default=[1, 4, 16])
    parser.add_argument("--seconds", metavar="S", type=seconds_read, default=9.0)
    parser.add_argument("--json", action="store_true")
    return parser


def words_check(parser: Parser, words: argparse.Namespace) -> None:
    if words.need and words.profile:
        parser.error("--need and --profile both define what the job needs: leave one out")
    if words.profile and not words.samples and not words.sample_bytes:
        parser.error("--profile needs the bytes of a sample: --samples N of the whole data, or --sample-bytes SIZE")
    for name in ("batch", "samples", "sample_bytes"):
        if getattr(words, name) and not words.profile:
            parser.error(f"--{name.replace('_', '-')} is for --profile FILE")


def main(argv: Sequence[str]) -> int:
    parser = parser_make()
    words = parser.parse_args(argv)
    words_check(parser, words)
    if words.profile:
        profile_read(words.profile)  # before the measurement
    try:
        found = measure(words.data, words.streams, words.seconds)
    except (StorageError, OSError) as error:
        print(f"shoal doctor: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_BOUND
    need = need_find(words, found.total)
    if words.json:
        print(json.dumps(data_of(found, need)))
    else:
        text_print(found, need)
    return EXIT_BOUND if need and found.best.rate < need.rate else EXIT_FINE
