"""Checkpoints in and out while a job trains.

    hosts/algo-1/checkpoints/          s3://bucket/run
        epoch-3.pt            --->         epoch-3.pt                            plain names, for anybody
        last.pt               --->         last.pt
                                           .shoal/algo-1.json                    the manifest: which objects are one set

A set is the content of the folder at a time when no file in it was being written. Objects of a set are never overwritten: a new
version first goes to `.shoal/HOST/RUN/`, then the manifest is replaced, and only then the plain name. A reader that follows the
manifest, as `start` does, therefore gets all files of one set or an error, whenever the writer was killed.

The manifest names its writer: a run of a job. A run takes the manifest over when it starts, and replaces it only while it is
the named writer. So a late writer, on a host that was cut off, cannot change the set of the job that followed it; it stops."""
from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import socket
import threading
import time
import uuid
from typing import Any, Dict, List, Optional, Set, Tuple

from shoal.job.data.fetching import Progress, Report, Say, bring_at_once, local_errors
from shoal.job.data.storage import SWAP_STALE_S, ChangedError, Item, Stopped, StorageError, Store, join, store_open
from shoal.job.document import Job, local_path

OWN = ".shoal"
INTERVAL_S = 2.0
SETTLE_S = 1.0  # a file is complete if it has not changed for this long
TORN_S = INTERVAL_S + SETTLE_S  # a file that changed within this time before a process was killed may be half-written
TIMEOUT_S = 600.0  # to copy the last set
SAY_EVERY_S = 60.0  # interval of reporting that no set can be made because a file is always being written
LOOKS = 3  # attempts to read the sets of other hosts, which may be moving files to their plain names
CLAIM_S = SWAP_STALE_S + 1.0  # time to take over a manifest that others replace; a killed writer blocks it for SWAP_STALE_S
UNFINISHED = (".tmp", ".part", ".partial", ".incomplete")


def timeout_of(job: Job) -> float:
    """Returns the seconds within which the hosts of a job must copy their last sets."""
    return float(job.where.options.get("checkpoints_timeout", TIMEOUT_S))


class CheckpointError(StorageError):
    """The message is one line: what is not safe, and what is."""


class TakenError(CheckpointError):
    """Another run now writes there."""


@dataclasses.dataclass(frozen=True)
class Mark:
    """The properties of a file that change when the file does."""

    size: int
    mtime_ns: int
    inode: int


@dataclasses.dataclass
class Entry:
    """A file of a set, and the object with its bytes."""

    key: str  # below the URI
    size: int
    version: str
    mtime_ns: int  # 0 if no job has written it


def _scan(folder: pathlib.Path) -> Dict[str, Mark]:
    """Lists the files below a folder. Leaves out files that vanish meanwhile. Links to files count as files."""
    found: Dict[str, Mark] = {}
    for top, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.startswith(".") or name.endswith(UNFINISHED):
                continue
            path = pathlib.Path(top) / name
            with contextlib.suppress(OSError):
                if path.is_file():
                    status = path.stat()
                    found[path.relative_to(folder).as_posix()] = Mark(status.st_size, status.st_mtime_ns, status.st_ino)
    return found


class Manifest:
    """One host's set at a URI."""

    def __init__(self, store: Store, top: str, host: str):
        self.store, self.top, self.host = store, top, host
        self.key = join(top, f"{OWN}/{host}.json")
        self.item: Optional[Item] = None  # as last read or written
        self.entries: Dict[str, Entry] = {}
        self.writer: Dict[str, Any] = {}
        self.time = 0.0  # 0 if no set was there yet

    def entry(self, name: str, key: str, size: int, version: str, mtime_ns: int) -> Entry:
        """Makes an entry. All names and keys from outside pass through here. The file must be below the folder; its object must
        have the same name or be stored in this host's folder until it gets that name. Raises CheckpointError."""
        parts = {*name.split("/"), *key.split("/")}
        is_aside = key.startswith(f"{OWN}/{self.host}/") and key.endswith(f"/{name}")
        is_plain = not parts & {"", ".", ".."} and "\0" not in name and name.split("/")[0] != OWN and (key == name or is_aside)
        if not is_plain or not all(self.store.is_below(self.top, join(self.top, one)) for one in (name, key)):
            raise CheckpointError(f"{self.store.uri(join(self.top, ''))}: the object {json.dumps(key)} makes no file {json.dumps(name)} below "
                                  f"the folder of checkpoints: rename it, or remove {self.store.uri(self.key)} to start without")
        return Entry(key, size, version, mtime_ns)

    def read(self) -> bool:
        self.item = self.store.info(self.key)
        if self.item is None:
            return False
        try:
            data = json.loads(self.store.read_all(self.item))
            self.entries = {name: self.entry(name, **entry) for name, entry in data["files"].items()}
            self.writer, self.time = data.get("writer", {}), float(data["time"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.store.uri(self.key)} is not a manifest of checkpoints ({error}): "
                                  "remove it to start without") from error
        return True

    def write(self, entries: Dict[str, Entry], writer: Dict[str, Any], at: float) -> None:
        """Raises TakenError if another writer has replaced the manifest that was last read or written; then changes nothing."""
        files = {name: dataclasses.asdict(entry) for name, entry in sorted(entries.items())}
        data = {"version": 1, "host": self.host, "time": round(at, 3), "writer": writer, "files": files}
        text = (json.dumps(data, indent=1) + "\n").encode()
        try:
            self.item = self.store.swap(text, self.key, self.item)
        except ChangedError:
            now = Manifest(self.store, self.top, self.host)
            if now.read() and now.writer != writer:
                by = ", ".join(f"{what} {now.writer[what]}" for what in ("job", "machine", "run") if now.writer.get(what)) or "another writer"
                raise TakenError(f"{by} has taken over {self.store.uri(self.key)}, and this job copies nothing more") from None
            self.item = self.store.swap(text, self.key, now.item)  # we wrote it, but the answer was lost
        self.entries, self.writer, self.time = entries, writer, at


class Synchronizer:
    """Keeps the files below `local` at `uri`. `start` brings the last set back and begins; `finish` copies what is left and
    ends.

    Several hosts may share a URI if each has a different `host`; then all get the files of all. If a job has written a file
    there and this job removes its own copy, the file is removed at the URI also. A file that no job has written leaves the set,
    but stays at the URI."""

    def __init__(self, local: pathlib.Path, uri: str, say: Say, host: str = "algo-1", interval_s: float = INTERVAL_S, job: str = ""):
        self.local, self.uri, self.say, self.host, self.interval_s = local, uri, say, host, interval_s
        self.store, top = store_open(uri)
        self.top = top.rstrip("/")
        self.manifest = Manifest(self.store, self.top, host)
        self.writer = {"job": job, "machine": socket.gethostname(), "run": uuid.uuid4().hex[:12]}
        self.sent: Dict[str, Mark] = {}  # marks of the files whose bytes the manifest has
        self.foreign: Dict[str, Mark] = {}  # marks of the files that another host's manifest has
        self.seen: Dict[str, Tuple[Mark, float]] = {}  # a file's mark, and since when it has had it
        self.kills: List[Tuple[float, float]] = []  # when processes were killed: by the clock of files, by the monotonic one
        self.torn: List[str] = []  # files that a killed process may have left half-written
        self.waiting_since: Optional[float] = None  # start of the current wait for a moment without writes
        self.said_at = 0.0
        self.end_at = 0.0
        self.ending = threading.Event()
        self.copying = ""
        self.failure: Optional[StorageError] = None
        self.thread: Optional[threading.Thread] = None

    # -- in --

    def start(self, report: Report = lambda amount: None) -> None:
        """Brings the last set back, whole or not at all. Calls `report` with the amount that has arrived. Raises
        StorageError."""
        for folder in filter(None, (self.local, local_path(self.uri))):
            with local_errors(folder):
                folder.mkdir(parents=True, exist_ok=True)
        self._claim()
        self._settle_names()  # a killed writer may have left some unsettled
        wanted = self._wanted()
        if wanted:
            self._bring(wanted, report)
        self.thread = threading.Thread(target=self._run, name="checkpoints", daemon=True)
        self.thread.start()

    def _claim(self) -> None:
        """Makes this run the manifest's writer. Removes what lost writers began."""
        until = time.monotonic() + CLAIM_S
        while True:
            try:
                self.manifest.read()
                self.manifest.write(self.manifest.entries, self.writer, self.manifest.time)
                break
            except (TakenError, ChangedError):
                if time.monotonic() >= until:
                    raise
                time.sleep(SETTLE_S)
        kept = {join(self.top, entry.key) for entry in self.manifest.entries.values()}
        for item in self.store.list(join(self.top, f"{OWN}/{self.host}/")):
            if item.key not in kept:
                self.store.delete(item.key)

    def _wanted(self) -> Dict[str, Tuple[Item, int]]:
        """Returns the files to bring, by name: those of all hosts' manifests, or everything there if no job has made a set."""
        own = join(self.top, OWN) + "/"
        for left in reversed(range(LOOKS)):
            items = {item.key: item for item in self.store.list(self.top + "/")}
            keys = [key for key in items if key.startswith(own) and key.endswith(".json") and "/" not in key[len(own):]]
            manifests = [one for one in self._read_others(keys, len(own)) if one.time]
            if not manifests:
                return self._adopt([item for key, item in items.items() if not key.startswith(own) and not key.endswith("/")])
            found: Dict[str, Tuple[Item, int]] = {}
            lost: Dict[str, str] = {}
            for manifest in manifests:
                for name, entry in manifest.entries.items():
                    item = items.get(join(self.top, entry.key))
                    if item and (item.size, item.version) == (entry.size, entry.version):
                        found[name] = (item, entry.mtime_ns)
                    else:
                        lost[name] = f"{self.store.uri(join(self.top, entry.key))} {'has changed' if item else 'is gone'}"
            missing = [text for name, text in lost.items() if name not in found]
            if not missing:
                return found
            if len(manifests) > 1 and left:
                time.sleep(SETTLE_S)
        raise CheckpointError(f"the last set of checkpoints is incomplete: {missing[0]} since {self.store.uri(own)}*.json "
                              "was written: put it back, or remove these manifests to start with what is there")

    def _adopt(self, items: List[Item]) -> Dict[str, Tuple[Item, int]]:
        """Makes the objects at a URI that no job has written the first set, unchanged."""
        named = {item.key[len(self.top) + 1:]: item for item in items}
        self.manifest.entries = {name: self.manifest.entry(name, name, item.size, item.version, 0) for name, item in named.items()}
        return {name: (item, 0) for name, item in named.items()}

    def _read_others(self, keys: List[str], lead: int) -> List[Manifest]:
        manifests = [Manifest(self.store, self.top, key[lead:-len(".json")]) for key in keys]
        return sorted((one for one in manifests if one.read()), key=lambda one: one.time)

    def _bring(self, wanted: Dict[str, Tuple[Item, int]], report: Report) -> None:
        """Brings all files under temporary names, then renames them."""
        progress = Progress("checkpoints", len(wanted), sum(item.size for item, _ in wanted.values()), self.say, report)
        stop = threading.Event()
        try:
            missing = self._missing(wanted, progress)
            bring_at_once(missing, lambda name: self._bring_one(name, *wanted[name], stop, progress), stop, progress)
            with local_errors(self.local):
                for name in missing:
                    os.replace(_coming(self.local / name), self.local / name)
        except BaseException:
            for name in wanted:
                with contextlib.suppress(OSError):
                    _coming(self.local / name).unlink()
            raise
        progress.end()
        looks = _scan(self.local)
        self.sent = {name: looks[name] for name in self.manifest.entries if name in looks}
        self.foreign = {name: looks[name] for name in wanted if name in looks and name not in self.sent}

    def _is_same(self, place: pathlib.Path, item: Item, mtime_ns: int) -> bool:
        try:
            status = place.stat()
        except OSError:
            return False
        return bool(mtime_ns) and (status.st_size, status.st_mtime_ns) == (item.size, mtime_ns)

    def _missing(self, wanted: Dict[str, Tuple[Item, int]], progress: Progress) -> List[str]:
        """Returns the files that are not yet here as the set has them."""
        missing = []
        for name, (item, mtime_ns) in sorted(wanted.items()):
            if self._is_same(self.local / name, item, mtime_ns):
                progress.add(item.size, is_new=False)
            else:
                missing.append(name)
        return missing

    def _bring_one(self, name: str, item: Item, mtime_ns: int, stop: threading.Event, progress: Progress) -> None:
        """Brings one file under its temporary name."""
        place = self.local / name
        coming = _coming(place)
        with local_errors(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            with open(coming, "wb") as file:
                if stop.is_set():  # the other temporary files may be removed already, and nobody would remove this one later
                    coming.unlink()
                    raise Stopped

                def take(data: bytes) -> None:
                    if stop.is_set():
                        raise Stopped
                    with local_errors(place):
                        file.write(data)
                    progress.add(len(data))
                self.store.read(item, 0, item.size, take)
                file.flush()
                os.fsync(file.fileno())  # because _is_same relies on size and time
            if mtime_ns:
                os.utime(coming, ns=(mtime_ns, mtime_ns))

    # -- out --

    def kill_note(self) -> None:
        """Records that a process of the script was just killed, by anyone, possibly while writing. Any thread may call this."""
        self.kills.append((time.time(), time.monotonic()))

    def finish(self, deadline_s: float, is_completed: bool = False) -> None:
        """Copies what is left and ends; the script must have ended. If is_completed, its last attempt completed, so its files
        are final and earlier kills do not matter. Raises CheckpointError if not all files are safe within the deadline; the
        previous set is safe."""
        if self.thread is None:
            return
        if is_completed:
            self.kills.clear()
        self.end_at = time.monotonic() + deadline_s
        self.ending.set()
        self.thread.join(max(deadline_s, 0.0))
        is_late = self.thread.is_alive()
        if self.failure or is_late:
            reason = self.failure or f"{self.copying or 'copying'} has not ended within {deadline_s:g} s"
            raise CheckpointError(f"the last checkpoints are not at {self.uri}: {reason}; {self._last_text()}") from self.failure
        self.thread = None
        if self.torn:
            more = f" and {len(self.torn) - 1} more" if len(self.torn) > 1 else ""
            raise CheckpointError(f"the last checkpoints are not at {self.uri}: {self.torn[0]}{more} may be half-written, as a process "
                                  f"of the script was killed; {self._last_text()}")

    def _last_text(self) -> str:
        if not self.manifest.time:
            return "no set is there"
        return "the set of " + time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.manifest.time)) + " is there, whole"

    def _run(self) -> None:
        while not self.ending.wait(self.interval_s):
            self._pass(is_last=False)
            if isinstance(self.failure, TakenError):
                return
        self._pass(is_last=True)
        while self.failure and not isinstance(self.failure, TakenError) and time.monotonic() + SETTLE_S < self.end_at:
            time.sleep(SETTLE_S)
            self._pass(is_last=True)

    def _pass(self, is_last: bool) -> None:
        """Copies a set if there is a new one. Logs a failure once; the next pass tries again."""
        try:
            self._settle_names()  # those that the last pass could not settle
            chosen = self._choose(is_last)
            if chosen is not None:
                self._send(chosen)
            if self.failure:
                self.say(f"checkpoints: {self.uri} can be written again")
            self.failure = None
        except StorageError as error:
            if not self.failure or isinstance(error, TakenError):
                self.say(f"checkpoints: {error}")
            self.failure = error
        except Exception as error:  # of any kind: finish() must report it
            self.failure = StorageError(f"{type(error).__name__}: {error}")

    def _choose(self, is_last: bool) -> Optional[Dict[str, Mark]]:
        """Returns the files of the next set, or None if the last set is current or something is being written."""
        now = time.monotonic()
        looks = self._look(now)
        self.torn = sorted(name for name, mark in looks.items() if self.sent.get(name) != mark and self._may_be_torn(name, mark))
        if looks == self.sent:
            self.waiting_since = None
            return None
        if any(name in self.sent for name in self.torn):  # without this file the rest would not be a set
            return None
        chosen = {name: mark for name, mark in looks.items() if name not in self.torn}
        unsettled = [name for name in chosen if not is_last and now - self.seen[name][1] < SETTLE_S]
        if unsettled:
            self._say_unsettled(unsettled, now)
            return None
        self.waiting_since = None
        return None if chosen == self.sent else chosen

    def _say_unsettled(self, names: List[str], now: float) -> None:
        """Logs once a minute that no set can be made. An old set is better than one with a half-written file."""
        if self.waiting_since is None:
            self.waiting_since = self.said_at = now
        if now - self.said_at >= SAY_EVERY_S:
            self.said_at = now
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.say(f"checkpoints: nothing has been copied to {self.uri} for {now - self.waiting_since:.0f} s, as {names[0]}{more} is always being "
                     f"written: keep logs in another folder; {self._last_text()}")

    def _may_be_torn(self, name: str, mark: Mark) -> bool:
        """Returns true if a killed process may have left the file half-written. A process cannot have changed the file after it
        was killed. A file's time is that of the beginning of a write, so we detect long writes by changes between our looks. A
        file that os.replace moved to its name is whole, but a Mark does not show how the file got there: such a file also
        counts as torn until it changes or the script completes."""
        since = self.seen[name][1]
        return any(mark.mtime_ns <= at * 1e9 and (mark.mtime_ns >= (at - TORN_S) * 1e9 or since >= clock - TORN_S)
                   for at, clock in self.kills)

    def _look(self, now: float) -> Dict[str, Mark]:
        """Returns the files that this host is responsible for, each with its mark. Records when a mark was first seen."""
        looks = {name: mark for name, mark in _scan(self.local).items() if self.foreign.get(name) != mark}
        self.seen = {name: self._since(name, mark, now) for name, mark in looks.items()}
        return looks

    def _since(self, name: str, mark: Mark, now: float) -> Tuple[Mark, float]:
        before = self.seen.get(name)
        return before if before and before[0] == mark else (mark, now)

    def _send(self, chosen: Dict[str, Mark]) -> None:
        """Copies the next set, in the order that leaves a whole set at any time."""
        entries = {}
        marks = {}
        for name, mark in chosen.items():
            if self.sent.get(name) == mark and name in self.manifest.entries:
                entries[name], marks[name] = self.manifest.entries[name], mark
                continue
            self.copying = name
            entry = self._send_one(name, mark)
            if entry is None:  # it changed meanwhile, so this is not a set; the next pass copies it
                return
            entries[name], marks[name] = entry, mark
        removed = [entry.key for name, entry in self.manifest.entries.items() if name not in entries and entry.mtime_ns]
        kept = self._keys_of_others() if removed else set()
        self.copying = "the manifest"
        self.manifest.write(entries, self.writer, time.time())
        self.sent = marks
        self._settle_names()
        for key in removed:
            if key not in kept:
                self.store.delete(join(self.top, key))
        self.copying = ""

    def _keys_of_others(self) -> Set[str]:
        """Returns the keys of objects in other hosts' sets."""
        own = join(self.top, OWN) + "/"
        keys = [item.key for item in self.store.list(own) if item.key.endswith(".json") and "/" not in item.key[len(own):]]
        others = self._read_others([key for key in keys if key != self.manifest.key], len(own))
        return {entry.key for manifest in others for entry in manifest.entries.values()}

    def _send_one(self, name: str, mark: Mark) -> Optional[Entry]:
        """Copies one file to a key that only this run uses. Returns None if the file changed meanwhile."""
        key = f"{OWN}/{self.host}/{self.writer['run']}/{name}"
        path = self.local / name
        try:
            item = self.store.put(path, join(self.top, key))
        except StorageError:
            if _mark(path) != mark:
                return None
            raise
        if _mark(path) != mark or item.size != mark.size:
            return None
        return self.manifest.entry(name, key, item.size, item.version, mark.mtime_ns)

    def _settle_names(self) -> None:
        """Moves the files of the set from .shoal to their plain names."""
        aside = {name: entry.key for name, entry in self.manifest.entries.items() if entry.key != name}
        if not aside:
            return
        moved = dict(self.manifest.entries)
        for name, key in aside.items():
            self.copying = name
            item = self.store.copy(join(self.top, key), join(self.top, name))
            moved[name] = self.manifest.entry(name, name, item.size, item.version, moved[name].mtime_ns)
        self.manifest.write(moved, self.writer, self.manifest.time)
        for key in aside.values():
            self.store.delete(join(self.top, key))


def _coming(place: pathlib.Path) -> pathlib.Path:
    return place.with_name(f".{place.name}.coming")


def _mark(path: pathlib.Path) -> Optional[Mark]:
    try:
        status = path.stat()
    except OSError:
        return None
    return Mark(status.st_size, status.st_mtime_ns, status.st_ino)
