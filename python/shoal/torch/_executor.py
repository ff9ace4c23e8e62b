"""A pipeline (include/shoal/pipeline.h, section "Running") whose actions are computed in Python."""
from __future__ import annotations

import ctypes
import os
import weakref

from .. import _native
from .._native import OK
from ._communicator import BackendError, cause_of, is_own, text_of, timed_out


class Executor:
    """struct shoal_pipeline. Making it is a collective call. edges: pairs of stages."""

    def __init__(self, communicator, schedule, edges, timeout_ms):
        self._library, self._owner, self._address = _native.load(), os.getpid(), None
        self._context, self._compute, self._held, self._error = communicator.context, None, {}, None
        own, address = (_native.Edge * max(1, len(edges)))(*edges), ctypes.c_void_p()
        options = _native.PipelineOptions(edges=own, edge_count=len(edges), timeout_ms=timeout_ms)
        status = self._library.pipeline_create(self._context, communicator.address, schedule.address, ctypes.byref(options),
                                               ctypes.byref(address))
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, self._context, communicator.address)}")
        self._address, executor = address.value, weakref.ref(self)
        # The pipeline keeps these until it is freed.
        self._calls = _native.PipelineCalls(compute=_native.ComputeFn(lambda *given: executor()._compute_guarded(*given)),
                                            released=_native.ReleasedFn(_releaser(self._held)))

    def __del__(self, is_own=is_own):
        if getattr(self, "_address", None) and is_own(self._owner):
            self._library.pipeline_free(self._address)

    def run(self, compute, forward_only=False):
        """Runs the schedule: compute(struct shoal_work) for each action."""
        self._compute, self._error = compute, None
        run = self._library.pipeline_forward if forward_only else self._library.pipeline_step
        status = run(self._address, ctypes.byref(self._calls))
        error, self._compute, self._error = self._error, None, None
        try:
            if status != OK:
                self._raise(status, error)
        finally:
            del error  # its traceback has this frame: a cycle, which would keep the pipeline's memory

    def _raise(self, status, error):
        """Raises what has ended a run. error: what compute has raised on this rank, or None."""
        if error is not None and not isinstance(error, Exception):  # what a signal handler raised
            raise error
        failure = self._failure()
        text = failure.text.decode(errors="replace") if failure else _native.error_of(status, self._context)
        try:
            raise BackendError(f"shoal: {timed_out(status)}{text}") from error
        finally:
            del error

    def _compute_guarded(self, _, work, text, text_bytes):
        try:
            self._compute(work.contents)
            return OK
        except BaseException as error:  # must not be lost in the frames of C
            self._error = error
            reason = text_of(error).encode()[:text_bytes - 1]
            ctypes.memmove(text, reason + b"\0", len(reason) + 1)
            return _native.ERR_ABORTED

    def _failure(self):
        """Returns the first cause of the pipeline's failure, or None."""
        failure = _native.Failure()
        return failure if self._library.pipeline_failure(self._address, ctypes.byref(failure)) == OK else None

    def fail(self, communicators, text):
        """Ends the waits of other ranks on these communicators, with the cause of the pipeline's failure; if it has not failed, with
        this text."""
        failure = self._failure() or cause_of(text)
        for communicator in communicators:
            self._library.comm_fail(communicator.address, ctypes.byref(failure))

    def hold(self, tensor):
        """Keeps a tensor until the pipeline has released it. Returns the owner for struct shoal_parcel."""
        self._held[id(tensor)] = tensor
        return id(tensor)

    def alloc(self, size):
        """Returns the address of memory for outputs. Only inside compute."""
        memory = ctypes.c_void_p()
        status = self._library.pipeline_alloc(self._address, size, ctypes.byref(memory))
        if status != OK:
            raise BackendError(f"shoal: {_native.error_of(status, self._context)}")
        return memory.value

    def times(self):
        """Returns struct shoal_pipeline_times of the last step."""
        times = _native.PipelineTimes()
        self._library.pipeline_step_times(self._address, ctypes.byref(times))
        return times


def _releaser(held):
    """Returns a callback that holds no executor: the pipeline also calls it while it is freed."""
    def released(_, owner):
        held.pop(owner, None)
    return released
