"""How long this process waits for its training data. A job's agent sets SHOAL_JOB_INPUT to a file name, and reads the file while
the process trains:

    watch_torch()         time in next() of torch's DataLoader
    watch_tensorflow()    time in next() of a tf.data iterator, outside tf.function

Without the variable nothing is changed. The file has three doubles: seconds waited, batches, and the monotonic time at which a
wait that is under way began (0: none). Only waits of the main thread count: other threads load ahead."""
from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from typing import Any, Callable, NamedTuple, Optional

VARIABLE = "SHOAL_JOB_INPUT"  # "%p" in it is replaced by the process's number
_FORM = struct.Struct("<ddd")
_meter: Optional["Meter"] = None


class Waited(NamedTuple):
    seconds: float
    batches: int


class Meter:
    """The counters of this process. Processes that it forks do not count."""

    def __init__(self, path: str):
        self.pid, self.seconds, self.batches = os.getpid(), 0.0, 0
        with open(path, "w+b") as file:
            file.write(bytes(_FORM.size))
            file.flush()
            self.memory = mmap.mmap(file.fileno(), _FORM.size)

    def is_counting(self) -> bool:
        return os.getpid() == self.pid and threading.current_thread() is threading.main_thread()

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function, and adds the time that it takes. An end of the data (StopIteration) is not a batch."""
        begun = time.monotonic()
        _FORM.pack_into(self.memory, 0, self.seconds, self.batches, begun)
        try:
            batch = function(*arguments)
            self.batches += 1
            return batch
        finally:
            self.seconds += time.monotonic() - begun
            _FORM.pack_into(self.memory, 0, self.seconds, self.batches, 0.0)


def waited(path: str, now: float) -> Optional[Waited]:
    """Returns what a process has waited until `now` (monotonic time of this machine), or None if it has not counted."""
    try:
        with open(path, "rb") as file:
            seconds, batches, begun = _FORM.unpack(file.read(_FORM.size))
    except (OSError, struct.error):
        return None
    return Waited(seconds + (max(now - begun, 0.0) if begun else 0.0), int(batches))


def _meter_open() -> Optional[Meter]:
    """Returns this process's meter; None if nobody asks for it, or the file cannot be made: training continues without."""
    global _meter
    path = os.environ.get(VARIABLE)
    if _meter is None and path:
        try:
            _meter = Meter(path.replace("%p", str(os.getpid())))
        except (OSError, ValueError):
            os.environ.pop(VARIABLE, None)
    return _meter


def _watch(owner: Any, name: str, is_now: Callable[[], bool] = lambda: True) -> None:
    """Replaces a method by one that counts its time. Does nothing the second time."""
    plain = getattr(owner, name)
    if getattr(plain, "is_watched", False):
        return

    @functools.wraps(plain)
    def counted(*arguments: Any) -> Any:
        meter = _meter_open()
        if meter is None or not meter.is_counting() or not is_now():
            return plain(*arguments)
        return meter.call(plain, *arguments)

    counted.is_watched = True  # type: ignore[attr-defined]
    setattr(owner, name, counted)


def watch_torch() -> None:
    if os.environ.get(VARIABLE):
        from torch.utils.data import dataloader
        _watch(dataloader._BaseDataLoaderIter, "__next__")


def watch_tensorflow() -> None:
    """Inside tf.function the iterator is part of the graph, and Python sees no wait."""
    if not os.environ.get(VARIABLE):
        return
    import tensorflow as tf
    try:
        from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    except ImportError:
        return
    if hasattr(OwnedIterator, "_next_internal"):
        _watch(OwnedIterator, "_next_internal", tf.executing_eagerly)
