"""What both shims share: the process's contexts, and communicators made through torch's Store."""
import contextlib
import ctypes
import os
import secrets
import sys
import threading
import time

import torch.distributed as dist

from .. import _native
from .._native import ERR_TIMEOUT, OK

UINT32_MAX = 2**32 - 1
PAUSE_S, PAUSE_MAX_S = 50e-6, 0.02  # between two checks of a store
FAILED = -2  # the return value of a store's callback that failed

BackendError = getattr(dist, "DistBackendError", RuntimeError)

timeouts = {}  # of joined groups, by name

_contexts = {}  # by number
_process = None  # a name that is unique to this process
_lock = threading.Lock()


def context(number=0):
    """Returns the address of a context of this process, which is made at first use and lives until the process ends. A forked
    child makes a new one. A context holds at most one rank of a group, so ranks that are threads of one process have one
    context each."""
    with _lock:
        if number not in _contexts:
            try:
                _contexts[number] = _native.create_context()
            except _native.ShoalError as error:
                raise BackendError(f"shoal: cannot begin: {error} (the reason is on stderr)") from None
        return _contexts[number]


def _name_of_process():
    global _process
    with _lock:
        _process = _process or secrets.token_hex(8)
        return _process


def _forget():
    """Resets the module in a forked child: contexts belong to the parent, and a thread of the parent may hold the lock."""
    global _contexts, _process, _lock
    _contexts, _process, _lock = {}, None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def is_own(process, getpid=os.getpid, is_ending=sys.is_finalizing):
    """Returns true if this process may free what `process` made: not in a forked child, and not while the interpreter ends.
    __del__ takes this function as a default argument, because the names of modules are gone by then."""
    return not is_ending() and process == getpid()


def milliseconds(timeout):
    """Returns 0 if a timedelta is None or not positive, as torch passes for "no timeout given"."""
    return 0 if timeout is None else max(0, min(UINT32_MAX - 1, round(timeout.total_seconds() * 1000)))


def timed_out(status):
    """Programs search the exceptions of a back-end for these words."""
    return "timed out: " if status == ERR_TIMEOUT else ""


def text_of(error):
    """Returns the class and the text of a program's exception, which other ranks get as UTF-8. Not every text can be that, and some
    classes raise an error instead."""
    try:
        text = str(error)
    except Exception:
        text = "it has no text"
    return f"{type(error).__name__}: {text}".encode(errors="replace").decode()


def cause_of(text):
    """Returns the struct shoal_failure with which a rank ends the waits of others."""
    plain = text.removeprefix("shoal: ").encode(errors="replace")
    return _native.Failure(status=_native.ERR_ABORTED, text=plain[:_native.Failure.text.size - 1])


def join(store, rank, size, timeout, name):
    """Makes a communicator; all its ranks call this, with one Store. Returns the addresses of its context and of the
    communicator, which the caller frees."""
    comm, library, limit_ms = ctypes.c_void_p(), _native.load(), milliseconds(timeout)
    timeouts[name] = timeout
    options = _native.CommOptions(name=name.encode()[:31], timeout_ms=limit_ms, create_timeout_ms=limit_ms)
    meeting = _Meeting(store, rank)
    owner = context(meeting.number_in_process())
    callbacks = meeting.callbacks()
    status = library.comm_create_with(owner, ctypes.byref(callbacks), rank, size, ctypes.byref(options), ctypes.byref(comm))
    if meeting.interruption:
        library.comm_free(comm)
        raise meeting.interruption
    if status != OK:
        raise BackendError(f"shoal: rank {rank} of {size} cannot join group {name}: {timed_out(status)}"
                           f"{_native.error_of(status, owner)}") from meeting.error
    return owner, comm.value


class _Meeting:
    """torch's Store as the library needs it: set, get with a deadline, erase."""

    def __init__(self, store, rank):
        # torch may pass the same store for a later group. So each rank counts its joins, and keys contain that number.
        self._store, self._prefix = store, f"{store.add(f'shoal joins {rank}', 1)}/"
        self.error = None  # the store's exception, of which the library learns only that there was one
        self.interruption = None  # what a signal handler raised during the wait for ranks

    def number_in_process(self):
        """Returns how many ranks of this process joined the group before this one."""
        return self._store.add(f"{self._prefix}process {_name_of_process()}", 1) - 1

    def callbacks(self):
        functions = (_native.StoreSet, self._set), (_native.StoreGet, self._get), (_native.StoreErase, self._erase)
        return _native.Store(*(kind(self._guarded(function)) for kind, function in functions))

    def _guarded(self, function):
        def call(_, key, *arguments):
            try:
                return function(self._prefix + key.decode(), *arguments)
            except Exception as error:
                self.error = error
            except BaseException as interruption:  # must not be lost in the frames of C
                self.interruption = interruption
            return FAILED
        return call

    def _set(self, key, value, nbytes):
        self._store.set(key, ctypes.string_at(value, nbytes))
        return 0

    def _get(self, key, value, capacity, timeout_ms):
        until, pause = time.monotonic() + timeout_ms / 1000, PAUSE_S
        while not self._store.check([key]):  # a signal cannot interrupt the store's own wait
            if time.monotonic() >= until:
                return -1
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
        found = self._store.get(key)
        ctypes.memmove(value, found, min(len(found), capacity))
        return len(found)

    def _erase(self, key):
        with contextlib.suppress(Exception):  # FileStore and HashStore can erase, some wrappers cannot: the key then stays
            self._store.delete_key(key)
        return 0
