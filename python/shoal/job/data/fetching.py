"""Objects of a store as files of a cache on this machine. Each is downloaded once, however many processes and hosts of a job
want it.

    CACHE/objects/ab/abcd...         an object, whole; the name is the digest of its URI, size and version, and defines its time
    CACHE/objects/ab/abcd....part    an unfinished object; its downloader holds the lock (flock), the others wait
    CACHE/objects/ab/abcd....done    which parts of a large object are in .part, one a line

A process that is killed leaves .part and .done behind, and the next one continues from there: the version is part of the name,
and S3 is asked for this version only (If-Match). If a part has the wrong length, or its object has changed, it never becomes an
object."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import threading
import time
import uuid
from typing import Any, Callable, Iterator, List, Optional, Sequence, Set, TypeVar

from shoal.job.data.progress import LINE_EVERY_S, bytes_text, text_of
from shoal.job.data.storage import ChangedError, FullError, Item, Stopped, StorageError, Store, at_once
from shoal.job.document.folder import Amount

OBJECTS_AT_ONCE = 8
PARTS_AT_ONCE = 4  # of one object
PART_BYTES = 16 << 20
POLL_S = 0.02
STALL_S = 300.0  # seconds without progress after which we stop waiting for another process's download
REPORT_EVERY_S = 0.2
SPARE_BYTES = 1 << 20

Say = Callable[[str], None]
Report = Callable[[Optional[Amount]], None]  # None: nothing is under way
Wanted = TypeVar("Wanted")


def cache_folder(near: pathlib.Path) -> pathlib.Path:
    """Returns $SHOAL_CACHE if set; else `cache` in the folder of the job that owns `near` (JOB/hosts/HOST/...); else a folder
    next to `near`."""
    named = os.environ.get("SHOAL_CACHE")
    if named:
        return pathlib.Path(named).absolute()
    near = near.absolute()
    for parent in near.parents:
        if parent.name == "hosts" and (parent.parent / "job.json").exists():
            return parent.parent / "cache"
    return near.parent / ".shoal-cache"


class Progress:
    """Reports how much has arrived: to `report` continuously, and as a line every ten seconds. `end` logs the total. Any thread
    may call `add`."""

    def __init__(self, what: str, objects: int, size: int, say: Say, report: Report = lambda amount: None):
        self.what, self.objects, self.size, self.say, self.report = what, objects, size, say, report
        self.lock = threading.Lock()
        self.bytes = 0  # that are here
        self.came = 0  # that this process downloaded
        self.started = self.said = time.monotonic()
        self.reported = 0.0

    def add(self, count: int, is_new: bool = True) -> None:
        with self.lock:
            self.bytes += count
            self.came += count if is_new else 0

    def amount(self, now: float) -> Amount:
        return Amount(self.what, self.bytes, self.size, self.came / max(now - self.started, 1e-3))

    def draw(self) -> None:
        now = time.monotonic()
        if now - self.reported >= REPORT_EVERY_S:
            self.reported = now
            self.report(self.amount(now))
        if now - self.said >= LINE_EVERY_S:
            self.said = now
            self.say(text_of(self.amount(now)))

    def end(self) -> None:
        self.clear()
        now = time.monotonic()
        there = f", {bytes_text(self.bytes - self.came)} of them were there" if self.bytes > self.came else ""
        objects = f"{self.objects:,} object" + ("" if self.objects == 1 else "s")
        rate = bytes_text(self.amount(now).rate)
        self.say(f"{self.what}: {objects}, {bytes_text(self.bytes)} in {now - self.started:.1f} s, {rate}/s{there}")

    def clear(self) -> None:
        self.report(None)


def bring_at_once(wanted: Sequence[Wanted], bring: Callable[[Wanted], object], stop: threading.Event,
                  progress: Progress) -> None:
    """Brings eight at a time with at_once(), and reports the progress meanwhile."""
    try:
        at_once(wanted, bring, min(OBJECTS_AT_ONCE, len(wanted)), stop, progress.draw)
    finally:
        progress.clear()


class Cache:
    """The objects of one store, cached in a folder."""

    def __init__(self, folder: pathlib.Path, store: Store):
        self.folder, self.store = folder, store
        self.stop = threading.Event()
        self.unknown = uuid.uuid4().hex  # the version of objects without one: no other process may rely on their bytes
        self.begun: Set[pathlib.Path] = set()  # parts that this process has begun or continued

    def path(self, item: Item) -> pathlib.Path:
        version = item.version or self.unknown
        digest = hashlib.sha256(f"{self.store.uri(item.key)}\n{item.size}\n{version}".encode()).hexdigest()[:40]
        return self.folder / "objects" / digest[:2] / digest

    def bring_all(self, items: Sequence[Item], progress: Progress) -> None:
        """Returns when every object is there. After an error, what has arrived stays for the next attempt; only if the disk is
        full are the parts removed."""
        with local_errors(self.folder):
            missing = self._look(items, progress)
            self._check_space(missing)
        try:
            bring_at_once(missing, lambda item: self.bring(item, progress), self.stop, progress)
        except FullError:
            self._drop_parts()
            raise

    def _look(self, items: Sequence[Item], progress: Progress) -> List[Item]:
        """Returns the missing objects."""
        missing = []
        for item in items:
            if _is_there(self.path(item), item):
                progress.add(item.size, is_new=False)
            else:
                missing.append(item)
        return missing

    def _check_space(self, missing: List[Item]) -> None:
        if not missing:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        needed = sum(max(item.size - self._there_bytes(item), 0) for item in missing)
        room = os.statvfs(self.folder)
        free = room.f_bavail * room.f_frsize
        if needed + SPARE_BYTES > free:
            raise FullError(f"{bytes_text(needed)} must be fetched to {self.folder}, where {bytes_text(free)} are free: "
                            "make room there, or name another folder with SHOAL_CACHE")

    def _there_bytes(self, item: Item) -> int:
        """Returns the bytes of the disk that the object uses already: its part, and the old file that it replaces."""
        final, old = self.path(item), 0
        with contextlib.suppress(OSError):
            old = _blocks_bytes(final) if final.stat().st_nlink == 1 else 0  # the bytes of a file with a second name stay
        return _blocks_bytes(final.with_suffix(".part")) + old

    def bring(self, item: Item, progress: Optional[Progress] = None) -> pathlib.Path:
        """Downloads one object, or waits for another process that does."""
        final = self.path(item)
        if _is_there(final, item):
            if progress:
                progress.add(item.size, is_new=False)
            return final
        part = final.with_suffix(".part")
        with local_errors(part):
            part.parent.mkdir(parents=True, exist_ok=True)
            with self._locked(part, final, item) as descriptor:
                if descriptor is None:
                    if progress:
                        progress.add(item.size, is_new=False)
                    return final
                self.begun.add(part)
                self._fill(item, descriptor, part, progress)
                os.fchmod(descriptor, 0o444)
                os.utime(descriptor, ns=(_stamp_ns(final),) * 2)
                os.fsync(descriptor)
                os.replace(part, final)
                part.with_suffix(".done").unlink(missing_ok=True)
                self.begun.discard(part)
        return final

    @contextlib.contextmanager
    def _locked(self, part: pathlib.Path, final: pathlib.Path, item: Item) -> Iterator[Optional[int]]:
        """Yields the part file, locked by us, or None if the object has arrived meanwhile."""
        standing_since = time.monotonic()
        size_before = -1
        while True:
            if _is_there(final, item):
                yield None
                return
            descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if self._lock(descriptor, part) and not _is_there(final, item):
                    yield descriptor
                    return
                size = _blocks_bytes(part)
            finally:
                os.close(descriptor)
            if size != size_before:
                size_before, standing_since = size, time.monotonic()
            if time.monotonic() - standing_since > STALL_S:
                raise StorageError(f"another process brings {part} and has made no progress for {STALL_S:.0f} s: end that process")
            if self.stop.wait(POLL_S):
                raise Stopped

    def _lock(self, descriptor: int, part: pathlib.Path) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise StorageError(f"{part.parent} is on a file system without locks ({error.strerror}): "
                               "name a folder of a local disk with SHOAL_CACHE") from error
        with contextlib.suppress(FileNotFoundError):
            return os.stat(part).st_ino == os.fstat(descriptor).st_ino
        return False

    # -- the parts of an object --

    def _fill(self, item: Item, descriptor: int, part: pathlib.Path, progress: Optional[Progress]) -> None:
        try:
            if self.store.has_ranges and item.version and item.size > PART_BYTES:
                self._fill_parts(item, descriptor, part.with_suffix(".done"), progress)
            elif item.size:
                os.ftruncate(descriptor, 0)
                self._read(item, 0, item.size, descriptor, progress)
            else:
                os.ftruncate(descriptor, 0)
        except ChangedError:
            part.unlink(missing_ok=True)
            part.with_suffix(".done").unlink(missing_ok=True)
            raise
        if os.fstat(descriptor).st_size != item.size:
            part.unlink(missing_ok=True)
            raise StorageError(f"{self.store.uri(item.key)} has {item.size:,} bytes, and {os.fstat(descriptor).st_size:,} came")

    def _fill_parts(self, item: Item, descriptor: int, journal_path: pathlib.Path, progress: Optional[Progress]) -> None:
        is_begun = os.fstat(descriptor).st_size == item.size  # if false, the journal belongs to a file that is gone
        done = _journal_read(journal_path) if is_begun else set()
        os.ftruncate(descriptor, item.size)
        starts = range(0, item.size, PART_BYTES)
        for start in starts:
            if start in done and progress:
                progress.add(min(PART_BYTES, item.size - start), is_new=False)
        lock = threading.Lock()
        with open(journal_path, "a" if is_begun else "w", encoding="utf-8") as journal:
            def bring_part(start: int) -> None:
                try:
                    self._read(item, start, min(start + PART_BYTES, item.size), descriptor, progress)
                except BaseException:
                    self.stop.set()
                    raise
                os.fdatasync(descriptor)
                with lock:
                    journal.write(f"\n[{PART_BYTES}, {start}]\n")  # the first newline ends a line that was cut off
                    journal.flush()

            at_once([start for start in starts if start not in done], bring_part, PARTS_AT_ONCE, threading.Event())

    def _read(self, item: Item, start: int, end: int, descriptor: int, progress: Optional[Progress]) -> None:
        at = start

        def take(data: bytes) -> None:
            nonlocal at
            if self.stop.is_set():
                raise Stopped
            _write_at(descriptor, data, at, self.folder)
            at += len(data)
            if progress:
                progress.add(len(data))

        self.store.read(item, start, end, take)
        if at != end:
            raise StorageError(f"{self.store.uri(item.key)}: {end - start:,} bytes were asked for, and {at - start:,} came")

    def _drop_parts(self) -> None:
        for part in list(self.begun):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
                part.with_suffix(".done").unlink(missing_ok=True)


def _stamp_ns(final: pathlib.Path) -> int:
    """Returns the time that an object of the cache must have; a file with another time has been written to. The time depends on
    the version, so that programs that compare times see the change."""
    return (10**9 + int(final.name[:7], 16)) * 10**9


def _is_there(final: pathlib.Path, item: Item) -> bool:
    """Returns true if the object is there, unchanged since it arrived."""
    try:
        status = final.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (item.size, _stamp_ns(final))


def _write_at(descriptor: int, data: bytes, at: int, folder: pathlib.Path) -> None:
    view = memoryview(data)
    with local_errors(folder):
        while view:
            written = os.pwrite(descriptor, view, at)
            view, at = view[written:], at + written


def _journal_read(path: pathlib.Path) -> Set[int]:
    """Returns the starts of the complete parts. Ignores a line that was cut off."""
    done: Set[int] = set()
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text(encoding="utf-8").split("\n"):
            with contextlib.suppress(ValueError, TypeError):
                part_bytes, start = json.loads(line)
                if part_bytes == PART_BYTES:
                    done.add(start)
    return done


def _blocks_bytes(path: pathlib.Path) -> int:
    try:
        return os.stat(path).st_blocks * 512
    except OSError:
        return 0


@contextlib.contextmanager
def local_errors(path: Any) -> Iterator[None]:
    """Turns an error of this machine's disk into a StorageError of one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise FullError(f"no space is left on the disk of {error.filename or path}: make room there, or name another "
                            "folder with SHOAL_CACHE") from error
        raise StorageError(f"{error.strerror or error}: {error.filename or path}") from error
