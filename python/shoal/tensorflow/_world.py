"""The job to which this process belongs: a context and a communicator of the C library, made by init()."""
from __future__ import annotations

import ctypes
import os

import tensorflow as tf

from shoal import _native

from . import _operations

UINT32_MAX = 2**32 - 1
TIMEOUT_MS = 600_000  # the default of SHOAL_TIMEOUT_MS (src/comm/comm_settings.c)

# The same mapping as in operations/world.c.
_CLASSES = {
    _native.ERR_ARGUMENT: tf.errors.InvalidArgumentError, _native.ERR_MEMORY: tf.errors.ResourceExhaustedError,
    _native.ERR_UNSUPPORTED: tf.errors.UnimplementedError, _native.ERR_TIMEOUT: tf.errors.DeadlineExceededError,
    _native.ERR_PEER_LOST: tf.errors.AbortedError, _native.ERR_ABORTED: tf.errors.AbortedError,
    _native.ERR_MISMATCH: tf.errors.FailedPreconditionError, _native.ERR_STATE: tf.errors.FailedPreconditionError,
    _native.ERR_AUTH: tf.errors.PermissionDeniedError,
}

WORLDS_MAX = 256  # equal to WORLD_MAX of operations/world.h

_current = None  # World, between init() and shutdown()
_worlds = {}  # by number: 0 is the world of all ranks; the others contain some ranks, and this rank
_next_world = 1
_on_shutdown = []  # functions without arguments
_on_end = []  # functions that are called with the number of a world before it ends


class World:
    """A communicator. limit_ms: the deadline of its operations from init(); 0 means that of SHOAL_TIMEOUT_MS."""

    def __init__(self, context, comm, limit_ms):
        self.context, self.comm, self.place, self.limit_ms = context, comm, _place_of(comm), limit_ms
        library = _native.load()
        self.rank, self.size = library.comm_rank(comm), library.comm_size(comm)

    def publish(self, number):
        """Makes operations with this number use this communicator."""
        deadline_ms = self.limit_ms or int(os.environ.get("SHOAL_TIMEOUT_MS") or TIMEOUT_MS)
        _operations.load().library.shoal_tensorflow_set_world(number, self.context, self.comm, deadline_ms)
        _worlds[number] = self
        return self

    def gather(self, block, otherwise):
        """Returns the bytes of all ranks, which have one length. It does not use TensorFlow: that takes longer, and a strategy
        must be made before TensorFlow computes anything. otherwise: the beginning of an error's text."""
        every = ctypes.create_string_buffer(len(block) * self.size)
        status = _native.load().allgather(self.comm, block, every, len(block), _native.UINT8, None)
        if status != _native.OK:
            raise error_of(status, f"{otherwise}: {_native.error_of(status, self.context, self.comm)}")
        return [every.raw[rank * len(block):(rank + 1) * len(block)] for rank in range(self.size)]


def error_of(status, text):
    """Returns TensorFlow's exception for a status."""
    return _CLASSES.get(status, tf.errors.InternalError)(None, None, f"shoal: {text}")


def init(timeout_s: float | None = None) -> None:
    """Joins the job for which the launcher started this process, or a job of one rank without a launcher. Every rank calls it
    once. timeout_s: the deadline of each operation, instead of SHOAL_TIMEOUT_MS."""
    global _current, _next_world
    if _current is not None:
        raise RuntimeError("init() called more than once. shoal.tensorflow is already initialized.")
    _operations.load()
    library = _native.load()
    context, comm = _native.create_context(), ctypes.c_void_p()
    limit = 0 if timeout_s is None else max(1, min(UINT32_MAX - 1, round(timeout_s * 1000)))
    options = _native.CommOptions(name=b"tensorflow", timeout_ms=limit)
    status = library.comm_create(context, ctypes.byref(options), ctypes.byref(comm))
    if status != _native.OK:
        error = error_of(status, f"this process cannot join the job: {_native.error_of(status, context)}")
        library.context_destroy(context)
        raise error
    _current = World(context, comm, limit).publish(0)
    _next_world = 1


def _place_of(comm):
    place, library = _native.Place(), _native.load()
    library.comm_place(comm, library.comm_rank(comm), ctypes.byref(place))
    return place


def add_world(ranks) -> int:
    """Makes a communicator of these ranks. All ranks of the job call it. Returns the number for operations on it, which is the
    same on all ranks; ranks outside of it cannot use the number."""
    global _next_world
    world, library = current(), _native.load()
    if _next_world == WORLDS_MAX:
        raise RuntimeError(f"shoal: {WORLDS_MAX - 1} communicators of some ranks were made since init(), which is the limit: make "
                           "each once, and keep it")
    number, comm = _next_world, ctypes.c_void_p()
    options = _native.CommOptions(name=f"tensorflow.{number}".encode(), timeout_ms=world.limit_ms)
    status = library.comm_split(world.comm, 0 if world.rank in ranks else -1, 0, ctypes.byref(options), ctypes.byref(comm))
    if status != _native.OK:
        raise error_of(status, f"no communicator of the ranks {list(ranks)} was made: "
                       f"{_native.error_of(status, world.context, world.comm)}")
    _next_world += 1
    if comm:
        World(world.context, comm, world.limit_ms).publish(number)
    return number


def remove_world(number: int) -> None:
    """Ends a communicator of add_world. All of its ranks call it; on other ranks it does nothing."""
    if number not in _worlds:
        return
    _tell_end(number)
    world = _worlds.pop(number)
    library = _native.load()
    status = library.comm_finalize(world.comm)
    error = _native.error_of(status, world.context, world.comm)
    _operations.load().library.shoal_tensorflow_set_world(number, None, None, 0)
    library.comm_free(world.comm)
    if status != _native.OK:
        raise error_of(status, f"a communicator of some ranks did not end in good order: {error}")


def shutdown() -> None:
    """Leaves the job once every rank has called it. Optional. init() may be called again afterwards."""
    global _current
    world = current()
    for function in _on_shutdown:
        function()
    for number in sorted(_worlds)[1:]:
        remove_world(number)
    _tell_end(0)
    library = _native.load()
    status = library.comm_finalize(world.comm)
    error = None
    if status != _native.OK:
        error = error_of(status, f"the job did not end in good order: {_native.error_of(status, world.context, world.comm)}")
    _current = None
    _worlds.clear()
    _operations.load().library.shoal_tensorflow_set_world(0, None, None, 0)
    library.comm_free(world.comm)
    library.context_destroy(world.context)
    if error:
        raise error


def on_shutdown(function) -> None:
    _on_shutdown.append(function)


def on_end(function) -> None:
    """Registers function(number), which is called before a world ends."""
    _on_end.append(function)


def _tell_end(number):
    for function in _on_end:
        function(number)


def is_initialized() -> bool:
    """Returns true between init() and shutdown()."""
    return _current is not None


def current() -> World:
    if _current is None:
        raise RuntimeError("shoal.tensorflow is not initialized: call init() first")
    return _current


def rank() -> int:
    """Returns this process's rank in the job."""
    return current().rank


def size() -> int:
    """Returns the number of ranks of the job."""
    return current().size


def local_rank() -> int:
    """Returns this process's rank on its host."""
    return current().place.local_rank


def local_size() -> int:
    """Returns the number of ranks on this host."""
    return current().place.local_size


def cross_rank() -> int:
    """Returns this host's index in the job."""
    return current().place.host


def cross_size() -> int:
    """Returns the number of hosts of the job."""
    return current().place.hosts


def world_at(number: int) -> World:
    current()
    return _worlds[number]


def size_of(number: int) -> int:
    return world_at(number).size


def rank_of(number: int) -> int:
    return world_at(number).rank
