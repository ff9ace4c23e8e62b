"""FastFile: the files of a channel are there with their names and sizes before the script starts; the bytes of each come when
it is opened first, and stay.

    worker: open("train/0001.jpg") --> the kernel asks --> View: a placeholder? bring the object, put it in place --> "go on"

This needs neither root nor FUSE: the workers run below a seccomp filter (filtered.py) that makes the kernel ask before a file
is opened for reading. So it holds for every program that a worker runs, whatever it is written in. An object that cannot be
brought is an error of the open: EIO, or ENOSPC for a full disk, and a line in the log.

Limits. An object comes whole when it is opened first. Files opened through io_uring, and processes outside the job, see
placeholders: they have the sticky bit ("T" in ls -l) and no bytes, and only root can read them. Where the kernel has no such
filter (before 5.5, or a container that forbids it) why_not() says so, and channels.py brings everything before the start."""
from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import json
import os
import pathlib
import platform
import select
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from shoal.job.fetching import Cache, Say, Stopped, bytes_text
from shoal.job.filtered import CALLS
from shoal.job.storage import FullError, Item, Store, StorageError, store_open

PLACEHOLDER_MODE = stat.S_ISVTX | 0o200  # no one may read it, but root
AT_ONCE = 16
PATH_MAX = 4096
AT_FDCWD = 0xFFFFFF9C
NOTICE = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif
ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp
GO_ON = 1
RECEIVE = 0xC0002100 | NOTICE.size << 16
SEND = 0xC0002101 | ANSWER.size << 16
OUR_WANT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
SAID_MAX = 20
PROBE_TIMEOUT_S = 60


# ---- placeholders and their list ----

def placeholder_make(place: pathlib.Path, size: int) -> None:
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444)
    try:
        if size:
            os.ftruncate(descriptor, size)
            os.fchmod(descriptor, PLACEHOLDER_MODE)
    finally:
        os.close(descriptor)


def _listing_path(folder: pathlib.Path) -> pathlib.Path:
    return folder.with_name(f".{folder.name}.fastfile")


def listing_write(folder: pathlib.Path, store: Store, cache: pathlib.Path, named: Sequence[Tuple[str, Item]]) -> None:
    uri = store.uri(named[0][1].key) if named else ""
    objects = [[name, *dataclasses.astuple(item)] for name, item in named if item.size]
    _listing_path(folder).write_text(json.dumps({"store": uri, "cache": str(cache), "objects": objects}))


def listing_remove(folder: pathlib.Path) -> None:
    _listing_path(folder).unlink(missing_ok=True)


@dataclasses.dataclass
class Wanted:
    """A placeholder and what belongs there."""

    place: pathlib.Path
    item: Item
    cache: Cache
    is_there: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def bring(self) -> None:
        """The placeholder is replaced at once, by the whole object."""
        from shoal.job import channels
        with self.lock:
            if self.is_there:
                return
            source = self.cache.bring(self.item)
            coming = self.place.with_name(f".{self.place.name}.coming")
            coming.unlink(missing_ok=True)
            channels.link(source, coming)
            os.replace(coming, self.place)
            self.is_there = True


def _listing_read(listing: pathlib.Path) -> List[Wanted]:
    """The placeholders that are still there."""
    data = json.loads(listing.read_text())
    if not data["objects"]:
        return []
    folder = listing.with_name(listing.name[1:-len(".fastfile")])
    cache = Cache(pathlib.Path(data["cache"]), store_open(data["store"])[0])
    found = [Wanted(folder / name, Item(*item), cache) for name, *item in data["objects"]]
    return [wanted for wanted in found if _is_placeholder(os.stat(wanted.place))]


def _is_placeholder(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and bool(status.st_mode & stat.S_ISVTX)


# ---- answering ----

class View:
    """Fills the FastFile channels below `data` while commands run that were started as `command` says:

        with View(base / "input/data", say) as view:
            subprocess.Popen(view.command(words), pass_fds=view.pass_fds)

    Where no channel has mode FastFile, the words stay as they are and nothing runs. The caller has to be an ancestor of the
    command."""

    def __init__(self, data: pathlib.Path, say: Say):
        self.say = say
        self.wanted = {}  # type: Dict[Tuple[int, int], Wanted]
        for listing in sorted(data.glob(".*.fastfile")):
            self.add(_listing_read(listing))
        self.brought: List[Item] = []
        self.failed = 0

    def add(self, wanted: List[Wanted]) -> None:
        for one in wanted:
            status = os.stat(one.place)
            self.wanted[status.st_dev, status.st_ino] = one

    def __enter__(self) -> "View":
        if self.wanted:
            self.calls = CALLS[platform.machine()]
            self.control, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.wake_reading, self.wake_writing = os.pipe2(os.O_CLOEXEC)
            self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="fastfile")
            self.thread = threading.Thread(target=self._serve, name="fastfile", daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if not self.wanted:
            return
        for wanted in self.wanted.values():
            wanted.cache.stop.set()
        os.close(self.wake_writing)
        self.thread.join()
        self.pool.shutdown(wait=True)
        for end in (self.control, self.theirs):
            end.close()
        os.close(self.wake_reading)
        size = sum(item.size for item in self.brought)
        self.say(f"FastFile: {len(self.brought):,} of {len(self.wanted):,} objects were opened, {bytes_text(size)} came")

    def command(self, words: Sequence[str]) -> List[str]:
        if not self.wanted:
            return list(words)
        launcher = pathlib.Path(__file__).with_name("filtered.py")
        return [sys.executable, "-I", "-S", str(launcher), str(self.theirs.fileno()), "--", *words]

    @property
    def pass_fds(self) -> Tuple[int, ...]:
        return (self.theirs.fileno(),) if self.wanted else ()

    def _serve(self) -> None:
        """Answers at once what is no placeholder; the others wait in the pool."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(self.wake_reading, select.POLLIN | select.POLLHUP)
        listeners: List[int] = []
        is_over = False
        while not is_over:
            for descriptor, events in poll.poll():
                if descriptor == self.wake_reading:
                    is_over = True
                elif descriptor == self.control.fileno():
                    for listener in socket.recv_fds(self.control, 64, 1)[1]:
                        listeners.append(listener)
                        poll.register(listener, select.POLLIN)
                elif events & select.POLLIN:
                    self._question(descriptor)
                else:  # nobody is left who could ask
                    poll.unregister(descriptor)
                    listeners.remove(descriptor)
                    os.close(descriptor)
        self.pool.shutdown(wait=True)
        for listener in listeners:
            os.close(listener)

    def _question(self, listener: int) -> None:
        notice = bytearray(NOTICE.size)
        try:
            fcntl.ioctl(listener, RECEIVE, notice, True)
        except OSError:  # who asked is gone, or was interrupted
            return
        number, pid, _, call, _, _, *arguments = NOTICE.unpack(notice)
        error, wanted = 0, None
        try:
            wanted = self._wanted_of(pid, call, arguments)
        except OSError as failure:  # the kernel will say what is wrong with the path; but a want of ours opens no placeholder
            error = failure.errno if failure.errno in OUR_WANT else 0
        except (ValueError, OverflowError):
            pass
        if wanted is None:
            _answer(listener, number, error or 0)
        else:
            self.pool.submit(self._fill, listener, number, wanted)

    def _wanted_of(self, pid: int, call: int, arguments: List[int]) -> Optional[Wanted]:
        at, address = (AT_FDCWD, arguments[0]) if call == self.calls.open else (arguments[0] & 0xFFFFFFFF, arguments[1])
        status = os.stat(_path_seen(pid, at, _text_read(pid, address)))
        return self.wanted.get((status.st_dev, status.st_ino)) if _is_placeholder(status) else None

    def _fill(self, listener: int, number: int, wanted: Wanted) -> None:
        error = 0
        try:
            is_first = not wanted.is_there
            wanted.bring()
            if is_first:
                self.brought.append(wanted.item)
        except Stopped:
            error = errno.EIO
        except Exception as failure:  # whatever it is, who asked must not wait for ever
            error = errno.ENOSPC if isinstance(failure, FullError) else errno.EIO
            self._say_failure(wanted, failure)
        _answer(listener, number, error)

    def _say_failure(self, wanted: Wanted, failure: Exception) -> None:
        self.failed += 1
        if self.failed <= SAID_MAX:
            more = "; further ones are not told" if self.failed == SAID_MAX else ""
            self.say(f"FastFile: {wanted.place.name} cannot be opened: {failure}{more}")


def _answer(listener: int, number: int, error: int) -> None:
    try:
        fcntl.ioctl(listener, SEND, ANSWER.pack(number, 0, -error, 0 if error else GO_ON))
    except OSError:  # who asked does not wait any more
        pass


def _text_read(pid: int, address: int) -> bytes:
    """The text at an address of another process."""
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(memory, PATH_MAX, address).split(b"\0", 1)[0]
    finally:
        os.close(memory)


def _path_seen(pid: int, at: int, path: bytes) -> bytes:
    """What a path means to another process, as a path of ours."""
    if path.startswith(b"/"):
        return path
    return os.fsencode(f"/proc/{pid}/{'cwd' if at == AT_FDCWD else f'fd/{at}'}/") + path


# ---- whether it works here ----

class _Probe(Store):
    """An object of one word."""

    def read(self, item: Item, start: int, end: int, take: Callable[[bytes], None]) -> None:
        take(b"there")


@functools.lru_cache(maxsize=1)
def why_not() -> Optional[str]:
    """Why FastFile does not work here; nothing where it does. Found by trying it."""
    if platform.machine() not in CALLS:
        return f"no filter is known for the processor {platform.machine()}"
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-fastfile-") as name:
            return _probe(pathlib.Path(name))
    except (OSError, subprocess.SubprocessError) as error:
        return " ".join(str(error).split())


def _probe(folder: pathlib.Path) -> Optional[str]:
    place = folder / "data/probe"
    place.parent.mkdir()
    placeholder_make(place, 5)
    view = View(place.parent, lambda _: None)
    view.add([Wanted(place, Item("probe", 5), Cache(folder / "cache", _Probe()))])
    with view:
        done = subprocess.run(view.command(["cat", str(place)]), pass_fds=view.pass_fds, capture_output=True,
                              timeout=PROBE_TIMEOUT_S, stdin=subprocess.DEVNULL)
    if done.stdout == b"there":
        return None
    lines = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1].replace("shoal job: FastFile: ", "") if lines else "a file that was opened had no bytes"
