"""How long this process waits for its training data. A job's agent sets SHOAL_JOB_INPUT to a file name, and reads the file while
the process trains:

    watch_torch()         time in next() of torch's DataLoader
    watch_tensorflow()    time in next() of a tf.data iterator, outside tf.function; and in those of Keras's fit(), evaluate()
                          and predict()

Without the variable nothing is changed. The file has three doubles: seconds waited, batches, and the monotonic time at which a
wait that is under way began (0: none). Only waits of the training itself count: other threads load ahead."""
from __future__ import annotations

import contextlib
import functools
import mmap
import os
import struct
import threading
import time
from typing import Any, Callable, Iterator, NamedTuple, Optional

VARIABLE = "SHOAL_JOB_INPUT"  # "%p" in it is replaced by the process's number
_FORM = struct.Struct("<ddd")
_meter: Optional["Meter"] = None


class Waited(NamedTuple):
    seconds: float
    batches: int


class Meter:
    """The counters of this process. Processes that it forks do not count."""

    def __init__(self, path: str):
        self.pid, self.seconds, self.batches, self.begun = os.getpid(), 0.0, 0, 0.0
        self.is_calling = False  # in call(), which counts
        with open(path, "w+b") as file:
            file.write(bytes(_FORM.size))
            file.flush()
            self.memory = mmap.mmap(file.fileno(), _FORM.size)

    def is_counting(self) -> bool:
        return os.getpid() == self.pid and threading.current_thread() is threading.main_thread()

    def begin(self) -> None:
        self.begun = time.monotonic()
        _FORM.pack_into(self.memory, 0, self.seconds, self.batches, self.begun)

    def end(self, batches: int) -> None:
        self.seconds += time.monotonic() - self.begun
        self.batches += batches
        self.begun = 0.0
        _FORM.pack_into(self.memory, 0, self.seconds, self.batches, 0.0)

    def stop(self) -> None:
        """Ends a wait that has found the end of the data, if there is one."""
        if self.begun:
            self.end(0)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function, and adds the time that it takes. An end of the data (StopIteration) is not a batch."""
        batches = 0
        self.begin()
        self.is_calling = True
        try:
            batch = function(*arguments)
            batches = 1
            return batch
        finally:
            self.is_calling = False
            self.end(batches)


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
    """In a tf.function of the program's own the iterator is part of the graph, and Python sees no wait."""
    if not os.environ.get(VARIABLE):
        return
    import tensorflow as tf
    try:
        from tensorflow.python.data.ops.iterator_ops import OwnedIterator
    except ImportError:
        return
    if hasattr(OwnedIterator, "_next_internal"):
        _watch(OwnedIterator, "_next_internal", tf.executing_eagerly)
    _watch_keras(tf)


def _watch_keras(tf: Any) -> None:
    """fit() takes its batches in a graph. So each of its data sets gets two more stages, which run when the graph asks for a batch
    and when it gets one. TensorFlow adds a prefetch at the end of a pipeline, which would ask ahead of the training: here it is
    added before these stages instead. The last request of an epoch may get none. fit() catches this, which ends the wait."""
    try:
        from keras import backend
        from keras.src.backend.tensorflow.trainer import TFEpochIterator
        plain, catch = TFEpochIterator._get_iterator, TFEpochIterator.catch_stop_iteration
    except (ImportError, AttributeError):
        return
    if backend.backend() != "tensorflow" or getattr(plain, "is_watched", False):
        return

    @functools.wraps(plain)
    def counted(self: Any) -> Any:
        dataset, meter = plain(self), _meter_open()
        if meter is None or os.getpid() != meter.pid or not isinstance(dataset, tf.data.Dataset):
            return dataset
        return _counted(tf, dataset, meter)

    @contextlib.contextmanager
    def caught(self: Any) -> Iterator[None]:
        try:
            with catch(self):
                yield
        finally:
            meter = _meter_open()
            if meter is not None and os.getpid() == meter.pid:
                meter.stop()

    counted.is_watched = True  # type: ignore[attr-defined]
    TFEpochIterator._get_iterator, TFEpochIterator.catch_stop_iteration = counted, caught


def _counted(tf: Any, dataset: Any, meter: Meter) -> Any:
    def begin() -> bool:
        if not meter.is_calling:  # predict() calls next() of the iterator, which counts
            meter.begin()
        return True

    def end() -> bool:
        if not meter.is_calling:
            meter.end(1)
        return True

    def pass_on(_: Any, batch: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(end, [], tf.bool)]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    if "Prefetch" not in type(dataset).__name__:
        dataset = dataset.prefetch(tf.data.AUTOTUNE)
    begins = tf.data.Dataset.counter().map(lambda _: tf.numpy_function(begin, [], tf.bool))
    return tf.data.Dataset.zip((begins, dataset)).map(pass_on).with_options(options)
