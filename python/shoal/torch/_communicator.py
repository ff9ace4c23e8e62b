"""The common part of both shims: the process's context, and communicators through torch's Store."""
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
PAUSE_S, PAUSE_MAX_S = 50e-6, 0.02  # between two looks into a store
FAILED = -2  # what a callback of a store returns then

BackendError = getattr(dist, "DistBackendError", RuntimeError)

timeouts = {}  # of groups that were joined, by name

_contexts = {}  # by number
_process = None  # a name that no other process has
_lock = threading.Lock()


def context(number=0):
    """The address of a context of this process, made at first use; in a forked child a new one. It lives until the process ends. A
    context has one rank of a group at most, so that ranks that are threads of one process have one each."""
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
    """In a forked child: contexts are the parent's, and a thread that the child does not have may hold the lock."""
    global _contexts, _process, _lock
    _contexts, _process, _lock = {}, None, threading.Lock()


os.register_at_fork(after_in_child=_forget)


def is_own(process, getpid=os.getpid, is_ending=sys.is_finalizing):
    """Whether what a process made is this one's to free: not in a forked child, and not while the interpreter ends. __del__ takes it
    as a default argument, as the names of modules are gone then."""
    return not is_ending() and process == getpid()


def milliseconds(timeout):
    """0 where a timedelta is None or, as torch writes "none given", not positive."""
    return 0 if timeout is None else max(0, min(UINT32_MAX - 1, round(timeout.total_seconds() * 1000)))


def timed_out(status):
    """Programs look for these words in what a back-end raises."""
    return "timed out: " if status == ERR_TIMEOUT else ""


def join(store, rank, size, timeout, name):
    """The addresses of a context and of a new communicator in it, which all its ranks make together, with one Store. The caller
    frees the communicator."""
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
    """torch's Store as the library wants it: set, get with a deadline, erase."""

    def __init__(self, store, rank):
        # torch may hand out a store again for a later group: each rank counts its own joins, and keys carry the number.
        self._store, self._prefix = store, f"{store.add(f'shoal joins {rank}', 1)}/"
        self.error = None  # what the store raised, of which the library knows only that something was
        self.interruption = None  # what a handler of a signal raised while ranks were waited for

    def number_in_process(self):
        """How many ranks of this process came to the group before this one."""
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
        while not self._store.check([key]):  # its own wait cannot be left on a signal
            if time.monotonic() >= until:
                return -1
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_MAX_S)
        found = self._store.get(key)
        ctypes.memmove(value, found, min(len(found), capacity))
        return len(found)

    def _erase(self, key):
        with contextlib.suppress(Exception):  # FileStore and HashStore can, some wrappers cannot: then it stays
            self._store.delete_key(key)
        return 0
