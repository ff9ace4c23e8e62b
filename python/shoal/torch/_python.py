"""The back-end "shoal" of torch.distributed in pure Python, over the C API, for machines without a C++ compiler.

Before torch 2.14, Group is a ProcessGroup (it *is* the group); from 2.14 on it is a Backend of one. Each method posts one
operation of Shoal and returns a Work, which is finished unless the caller asked for an asynchronous one. docs/python.md lists
what the C++ shim can do and this one cannot.

Threads. ctypes releases the GIL around every call, and no Python runs on the thread that drives Shoal. So a thread that holds
the GIL never waits for Shoal, and the driving thread never waits for the GIL. Waits are divided into slices of SLICE_MS,
between which Python handles signals.
"""
import atexit
import contextlib
import ctypes
import datetime
import os
import threading
import time
import weakref

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from .. import _native
from .._native import ERR_ARGUMENT, OK, PENDING
from ._communicator import BackendError, is_own, milliseconds, timed_out
from ._operands import (Operands, are_equal_lengths, check_equal, check_gathered, check_none, check_own_part, check_pairs, check_parts,
                        check_root, check_tensor, check_types, in_words_of_torch, moved, moved_together, only, only_list, reduction,
                        split_counts)

SLICE_MS = 50
IDLE_THREADS = 4  # for callbacks of futures
CALLS_END_S = 10  # other threads finish posting far sooner; if not, the communicator is not freed
STOP_S = 5

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))
IS_BACKEND = VERSION >= (2, 14)  # otherwise this shim is a whole group
KEPT_WORKS = 0 if VERSION >= (2, 8) else 64  # see Group._keep
Base = c10d.Backend if IS_BACKEND else dist.ProcessGroup
NoSharedMemory = getattr(torch, "OutOfMemoryError", MemoryError)


# ---- The process: the groups in it, and memory that it shares ----------------------------------------------------------------

_futures = None
_groups = weakref.WeakSet()
_lock = threading.Lock()


def _forget():
    """Resets the module in a forked child: what the parent made belongs to the parent."""
    global _futures, _groups, _lock
    _futures, _groups, _lock = None, weakref.WeakSet(), threading.Lock()


@atexit.register
def _free_groups():
    """Notifies the other ranks that this rank leaves, and stops writes to tensors while the interpreter ends."""
    for group in list(_groups):
        group.shutdown()
    if _futures:
        _futures.stop()


os.register_at_fork(after_in_child=_forget)


def empty(context, nbytes):
    """Returns a uint8 tensor in memory that the host's other ranks can map. It is freed with the last tensor that views it."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    memory, library = ctypes.c_void_p(), _native.load()
    status = library.mem_alloc(context, nbytes, ctypes.byref(memory))
    if status != OK:
        raise NoSharedMemory(f"shoal: {_native.error_of(status, context)}")
    block = (ctypes.c_uint8 * nbytes).from_address(memory.value)
    weakref.finalize(block, _free, os.getpid(), context, memory.value).atexit = False
    return torch.frombuffer(block, dtype=torch.uint8)


def _free(owner, context, address):
    if owner == os.getpid():  # not in a forked child, where the memory is still the parent's
        _native.load().mem_free(context, address)


# ---- Work --------------------------------------------------------------------------------------------------------------------


class Work(dist.Work):
    """One operation: its request, and its operands, which live until it is done. `inputs` are the tensors whose shapes a
    profile shows."""

    def __init__(self, group, result, inputs=()):
        super().__init__()
        self.request, self.operands, self.title, self.inputs = ctypes.c_void_p(), Operands(), "", inputs
        self._group, self._result, self._library = group, result, group.library
        self._error = self._future = None
        self._is_resolved = False

    def __del__(self, is_own=is_own):
        if is_own(self._group._owner):
            self._library.request_free(self.request)

    # The interface for Python callers. C++ calls only wait and get_future.

    def wait(self, timeout=None):
        """Raises the operation's error. A timeout > 0 that passes raises an error for the caller; the operation continues."""
        try:
            self._finish(milliseconds(timeout))
        finally:
            self._complete_future()
        self._group.was_asked_for(self)
        self._group.leave_block(self)
        return True

    def _complete_future(self):
        """Completes a future that was taken earlier before wait() returns, as other back-ends do."""
        future = self._future
        if future is not None and self.is_completed():
            self.resolve()
            with contextlib.suppress(RuntimeError):  # wait() raises it as well
                future.wait()

    def _finish(self, limit_ms=0):
        until = time.monotonic() + limit_ms / 1000 if limit_ms else None
        status = PENDING
        while status == PENDING:
            status = self._library.request_wait(self.request, min(SLICE_MS, limit_ms or SLICE_MS))
            if status == PENDING and until and time.monotonic() >= until:
                raise BackendError(f"{self.title}: this wait timed out after {limit_ms} ms; nothing is lost, it may be "
                                   "waited for again")
        self._settle(status)
        if self._error:
            raise self._error
        return self._result

    def is_completed(self):
        status = self._library.request_test(self.request)
        if status == PENDING:
            return False
        self._settle(status)
        return True

    def is_success(self):
        return self.is_completed() and self._error is None

    def exception(self):
        return self._error if self.is_completed() else None

    def synchronize(self):
        self.wait()

    def result(self):
        self.wait()
        return self._result

    def get_future(self):
        """Returns a torch.futures.Future of the list of output tensors."""
        self._group.was_asked_for(self)
        with self._group.lock:
            is_first = self._future is None
            if is_first:
                self._done = torch.futures.Future()
                # C++ also sees an exception in a callback as an error; only Python knows Future.set_exception.
                self._future = self._done.then(lambda _: self._finish())
        if is_first and self.is_completed():  # a caller that has waited may ask for the value at once
            self.resolve()
        elif is_first:
            _resolver().add(self)
        return self._future

    def on_done(self, function, argument):
        self._library.request_on_done(self.request, function, argument)

    def resolve(self):
        with self._group.lock:
            is_first, self._is_resolved = not self._is_resolved, True
        if is_first:
            self._done.set_result(None)

    def _settle(self, status):
        """Runs once the request is done: copies results back or keeps the error, and releases the operands."""
        group = self._group
        with group.lock:
            if self not in group.running:
                return
            if status == OK:
                try:
                    self.operands.bring_back()
                except RuntimeError as error:  # for example, the tensor is expanded
                    self._error = error
            else:
                self._error = group.error(self.title, _native.error_of(status, comm=group.comm))
            self.operands.let_go()
            group.running.discard(self)


class WorkOfMany(dist.Work):
    """The operations posted inside one _coalescing_manager(device=...)."""

    def __init__(self, works):
        super().__init__()
        self._works = works

    def wait(self, timeout=None):
        until = time.monotonic() + timeout.total_seconds() if milliseconds(timeout) else None
        for work in self._works:
            work.wait(until and datetime.timedelta(seconds=max(0.001, until - time.monotonic())))
        return True

    def is_completed(self):
        return all([work.is_completed() for work in self._works])

    def is_success(self):
        return all([work.is_success() for work in self._works])

    def exception(self):
        return next(filter(None, [work.exception() for work in self._works]), None)

    def synchronize(self):
        self.wait()

    def result(self):
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self):
        """A future of the outputs of all works, in their order."""
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(lambda _: self.result())


class Resolver:
    """Resolves Futures and copies results back, on threads of its own.

    When a request is done, Shoal calls sem_post, which needs no GIL. Callbacks of a Future may wait for another one, as those
    of PowerSGD do. So before a thread runs callbacks, it ensures that another thread waits for requests.
    """

    _libc = ctypes.CDLL(None)
    _sem_post = _native.DoneFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)

    def __init__(self):
        self._works, self._waiting, self._lock = set(), 0, threading.Lock()
        self._threads, self._must_stop = [], False
        self._semaphore = ctypes.create_string_buffer(128)  # a sem_t has at most 32 bytes on the platforms of Shoal
        self._libc.sem_init(self._semaphore, 0, 0)

    def add(self, work):
        with self._lock:
            self._works.add(work)
            if not self._waiting:
                self._start_thread()
        work.on_done(self._sem_post, ctypes.addressof(self._semaphore))

    def _start_thread(self):
        self._waiting += 1
        self._threads.append(threading.Thread(target=self._run, name="shoal-futures", daemon=True))
        self._threads[-1].start()

    def stop(self):
        """Called before Python ends, because a thread that returns to Python afterwards, from a callback in C++, would crash
        the process."""
        self._must_stop = True
        for _ in self._threads:
            self._libc.sem_post(self._semaphore)
        for thread in self._threads:
            thread.join(STOP_S)

    def _run(self):
        while True:
            self._libc.sem_wait(self._semaphore)
            if self._must_stop:
                return
            with self._lock:
                work = next((work for work in self._works if work.is_completed()), None)
                if work is None:
                    continue
                self._works.discard(work)
                self._waiting -= 1
                if self._works and not self._waiting:
                    self._start_thread()
            work.resolve()
            del work
            with self._lock:
                if self._waiting >= IDLE_THREADS and not self._must_stop:
                    self._threads.remove(threading.current_thread())
                    return
                self._waiting += 1


def _resolver():
    global _futures
    with _lock:
        if _futures is None:
            _futures = Resolver()
        return _futures


# ---- Profiles ------------------------------------------------------------------------------------------------------------------


# The C++ shim's names of operations that differ from those of the C library.
_TITLES = {"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "allgather": "all_gather",
           "allgatherv": "all_gather", "reduce_scatterv": "reduce_scatter"}
_is_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: False)
_Record = getattr(torch._C._profiler, "_RecordFunctionFast", None)


def _profiled(work):
    """The event of an operation in a profile of torch, from the call until it returns. A Work in Python has no other event."""
    inputs, work.inputs = work.inputs, ()
    if _Record is None or not _is_profiling():
        return contextlib.nullcontext()
    return _Record(work.title, inputs)


# ---- The group ---------------------------------------------------------------------------------------------------------------


class Group(Base):
    """A group of torch: a communicator of Shoal and the operations in progress on it."""

    # torch reads these from a Backend. They are class attributes because the properties of the base class would call back here
    # endlessly.
    supports_coalescing = False
    supports_splitting = False
    options = None  # torch 2.15 reads it to attach its flight recorder

    _group_name = _group_desc = ""

    def __init__(self, context, comm, rank, size, timeout, name, ranks):
        """context, comm: their addresses. The group takes ownership of the communicator and frees it."""
        super().__init__(rank, size)
        self.context, self.comm, self.label, self.ranks, self.running = context, comm, name, ranks, set()
        self.library, self.lock, self._owner, self._calls = _native.load(), threading.RLock(), os.getpid(), 0
        self._left, self._timeout_ms, self._sweep_at, self._coalesced = threading.Condition(self.lock), 0, 64, None
        self._unwaited, self._kept = set(), []
        _groups.add(self)

    def __del__(self):
        if self.comm is not None:  # while the interpreter ends, modules may be gone, but _free_groups() has run
            self.shutdown()

    def getBackendName(self):
        return "shoal"

    name = getBackendName

    # ---- Posting

    def _post(self, call, work, options, *operands, scale=1.0, title=None):
        """Posts shoal_<call>_post for a Work whose operands are prepared, and waits if the caller asked for that. `title` is
        the C++ shim's name of the operation, if it does not follow from the call."""
        work.title = "shoal:" + (title or _TITLES.get(call, call))
        with _profiled(work):
            return self._post_and_wait(call, work, options, *operands, scale=scale)

    def _post_and_wait(self, call, work, options, *operands, scale):
        if len(self.running) >= self._sweep_at:
            self._sweep()
        waits = not getattr(options, "asyncOp", True) and self._coalesced is None
        told = _native.Options(timeout_ms=milliseconds(getattr(options, "timeout", None)) or self._timeout_ms, scale=scale,
                               wait_ms=SLICE_MS if waits else 0)
        comm = self._enter()
        try:
            self.running.add(work)  # before the post: an interrupt may come from here on, and the operands must live
            status = getattr(self.library, call + "_post")(comm, *operands, ctypes.byref(told), ctypes.byref(work.request))
            if status != OK:
                self.running.discard(work)
                raise self.error(work.title, _native.error_of(status, self.context, None if status == ERR_ARGUMENT else comm))
        finally:
            self._leave()
        if self._coalesced is not None:
            self._coalesced[work] = None
        if waits:
            work.wait()
            return work
        if work.operands.has_copies:
            work.get_future()  # so that results are copied back even if nobody waits
        if options is not None:  # messages have none, and no C++ code of torch posts any
            self._keep(work)
        return work

    def _keep(self, work):
        """Keeps works alive for old versions of torch. Before torch 2.8, C++ keeps a Work without its object in Python; once
        the object is gone, a wait blocks forever. So the objects, and with them their tensors, live until KEPT_WORKS others
        were waited for."""
        if KEPT_WORKS:
            with self.lock:
                self._unwaited.add(work)

    def was_asked_for(self, work):
        """Called after wait(), or when the future was taken, which holds the work until it is done."""
        with self.lock:
            if work in self._unwaited:
                self._unwaited.discard(work)
                self._kept.append(work)
                del self._kept[:-KEPT_WORKS]

    def leave_block(self, work):
        """Called once a work was waited for. torch does not end a coalescing block that an exception left, and the block would
        hold all works forever."""
        with self.lock:
            if self._coalesced is not None:
                self._coalesced.pop(work, None)

    def _enter(self):
        """Returns the communicator, which is not freed before _leave()."""
        with self.lock:
            if self.comm is None:
                raise BackendError(f"shoal: group {self.label} was destroyed")
            self._calls += 1
            return self.comm

    def _leave(self):
        with self.lock:
            self._calls -= 1
            self._left.notify_all()

    def error(self, title, failure):
        """The exception for a ShoalError. It adds the rank in the job if that differs from the rank in the group."""
        known = 0 <= failure.rank < len(self.ranks) and self.ranks[failure.rank] != failure.rank
        place = f" (rank {failure.rank} of group {self.label} is rank {self.ranks[failure.rank]} of the job)" if known else ""
        kind = ValueError if failure.status == ERR_ARGUMENT else BackendError
        return kind(f"{title}: {timed_out(failure.status)}{in_words_of_torch(str(failure))}{place}")

    def _sweep(self):
        """Releases operations that are done and that nobody waited for."""
        for work in list(self.running):
            work.is_completed()
        self._sweep_at = 2 * len(self.running) + 64

    # ---- Collectives. These check the arguments that Shoal cannot: it sees only addresses and counts.

    def broadcast(self, tensors, opts=c10d.BroadcastOptions()):
        tensor = only(tensors)
        root = check_root(opts.rootRank, self.size())
        work = Work(self, tensors, tensors)
        type_, width = moved(tensor.dtype)
        memory = work.operands.output(tensor, has_contents=root == self.rank())
        return self._post("broadcast", work, opts, memory, memory, tensor.numel() * width, type_, root)

    def allreduce(self, tensors, opts=c10d.AllreduceOptions()):
        tensor = only(tensors)
        type_, operator, scale = reduction(tensor.dtype, opts.reduceOp)
        work = Work(self, tensors, tensors)
        memory = work.operands.output(tensor, has_contents=True)
        return self._post("allreduce", work, opts, memory, memory, tensor.numel(), type_, operator, scale=scale)

    def allreduce_coalesced(self, tensors, opts=c10d.AllreduceCoalescedOptions()):
        if not tensors:
            raise ValueError("shoal: no tensors to reduce")
        check_types(tensors, tensors[0].dtype)
        type_, operator, scale = reduction(tensors[0].dtype, opts.reduceOp)
        work = Work(self, tensors, tensors)
        memories = [work.operands.output(tensor, has_contents=True) for tensor in tensors]
        entries = _entries(memories, memories, [tensor.numel() for tensor in tensors])
        return self._post("allreduce_coalesced", work, opts, entries, len(entries), type_, operator, scale=scale)

    def reduce(self, tensors, opts=c10d.ReduceOptions()):
        tensor = only(tensors)
        type_, operator, scale = reduction(tensor.dtype, opts.reduceOp)
        root = check_root(opts.rootRank, self.size())
        work = Work(self, tensors, tensors)
        memory = work.operands.output(tensor, has_contents=True) if root == self.rank() else work.operands.input(tensor)
        return self._post("reduce", work, opts, memory, memory, tensor.numel(), type_, operator, root, scale=scale)

    def allgather(self, output_lists, inputs, opts=c10d.AllgatherOptions()):
        outputs, tensor = only_list(output_lists, "outputs"), only(inputs)
        check_parts(outputs, tensor.dtype, self.size())
        check_own_part(outputs, self.rank(), tensor, "input", "output")
        work = Work(self, outputs, inputs)
        type_, width = moved(tensor.dtype)
        given, taken = work.operands.input(tensor), work.operands.output(*outputs)
        if are_equal_lengths(outputs):
            return self._post("allgather", work, opts, given, taken, tensor.numel() * width, type_)
        counts = _native.counts([output.numel() * width for output in outputs])
        return self._post("allgatherv", work, opts, given, taken, counts, None, type_)

    def all_gather_single(self, output, tensor, opts=c10d.AllgatherOptions()):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        check_pairs(outputs, inputs)
        for output, tensor in zip(outputs, inputs):
            check_gathered(output, tensor, self.size())
        title = "all_gather_into_tensor" if len(inputs) == 1 else "all_gather_into_tensor_coalesced"
        return self._gather_each(title, [[output] for output in outputs], inputs, outputs, opts)

    def allgather_coalesced(self, output_lists, inputs, opts=c10d.AllgatherOptions()):
        if not inputs or len(output_lists) != self.size():
            raise ValueError(f"shoal: {len(output_lists)} lists of outputs of {len(inputs)} inputs for {self.size()} ranks")
        for outputs in output_lists:
            if len(outputs) != len(inputs):
                raise ValueError(f"shoal: a list of {len(outputs)} outputs for {len(inputs)} inputs")
        rows = list(zip(*output_lists))
        for row, tensor in zip(rows, inputs):
            check_tensor(tensor)
            check_parts(row, tensor.dtype, self.size())
            check_equal(row, tensor)
        title = "all_gather" if len(inputs) == 1 else "all_gather_coalesced"
        return self._gather_each(title, rows, inputs, [tensor for part in output_lists for tensor in part], opts)

    def _gather_each(self, title, output_lists, inputs, result, opts):
        work = Work(self, result, inputs)
        given = [work.operands.input(tensor) for tensor in inputs]
        taken = [work.operands.output(*outputs) for outputs in output_lists]
        if len(inputs) == 1:
            type_, width = moved(inputs[0].dtype)
            return self._post("allgather", work, opts, given[0], taken[0], inputs[0].numel() * width, type_, title=title)
        lengths = [tensor.numel() * tensor.element_size() for tensor in inputs]
        type_ = moved_together([tensor.dtype for tensor in inputs])
        return self._post("allgather_coalesced", work, opts, _entries(given, taken, lengths), len(lengths), type_, title=title)

    def reduce_scatter(self, outputs, input_lists, opts=c10d.ReduceScatterOptions()):
        inputs, tensor = only_list(input_lists, "inputs"), only(outputs)
        check_parts(inputs, tensor.dtype, self.size())
        check_own_part(inputs, self.rank(), tensor, "output", "input")
        type_, operator, scale = reduction(tensor.dtype, opts.reduceOp)
        work = Work(self, outputs, inputs)
        given, taken = work.operands.input(*inputs), work.operands.output(tensor)
        if are_equal_lengths(inputs):
            return self._post("reduce_scatter", work, opts, given, taken, tensor.numel(), type_, operator, scale=scale)
        counts = _native.counts([part.numel() for part in inputs])
        return self._post("reduce_scatterv", work, opts, given, taken, counts, type_, operator, scale=scale)

    def reduce_scatter_single(self, output, tensor, opts=c10d.ReduceScatterOptions()):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        check_pairs(outputs, inputs)
        check_types(inputs, inputs[0].dtype)
        for output, tensor in zip(outputs, inputs):
            check_gathered(tensor, output, self.size())
        type_, operator, scale = reduction(inputs[0].dtype, opts.reduceOp)
        work = Work(self, outputs, inputs)
        given = [work.operands.input(tensor) for tensor in inputs]
        taken = [work.operands.output(output) for output in outputs]
        if len(outputs) == 1:
            return self._post("reduce_scatter", work, opts, given[0], taken[0], outputs[0].numel(), type_, operator,
                              scale=scale, title="reduce_scatter_tensor")
        entries = _entries(given, taken, [tensor.numel() for tensor in outputs])
        return self._post("reduce_scatter_coalesced", work, opts, entries, len(entries), type_, operator, scale=scale,
                          title="reduce_scatter_tensor_coalesced")

    def gather(self, output_lists, inputs, opts=c10d.GatherOptions()):
        tensor, root = only(inputs), check_root(opts.rootRank, self.size())
        outputs = self._parts_of_root(output_lists, tensor, root, "outputs")
        work = Work(self, outputs, inputs)
        type_, width = moved(tensor.dtype)
        given, taken = work.operands.input(tensor), work.operands.output(*outputs) if outputs else None
        return self._post("gather", work, opts, given, taken, tensor.numel() * width, type_, root)

    def scatter(self, outputs, input_lists, opts=c10d.ScatterOptions()):
        tensor, root = only(outputs), check_root(opts.rootRank, self.size())
        inputs = self._parts_of_root(input_lists, tensor, root, "inputs")
        work = Work(self, outputs, inputs)
        type_, width = moved(tensor.dtype)
        given, taken = work.operands.input(*inputs) if inputs else None, work.operands.output(tensor)
        return self._post("scatter", work, opts, given, taken, tensor.numel() * width, type_, root)

    def _parts_of_root(self, lists, one, root, what):
        """Returns the root's list of one tensor for each rank. Other ranks have no list."""
        if root != self.rank():
            check_none(lists, root, what)
            return []
        if len(lists) != 1:
            raise ValueError(f"shoal: the root needs one list of {what}, not {len(lists)}")
        check_parts(lists[0], one.dtype, self.size())
        check_equal(lists[0], one)
        return lists[0]

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=c10d.AllToAllOptions()):
        check_types([output, tensor], tensor.dtype)
        gives, takes = split_counts(tensor, input_splits, self.size()), split_counts(output, output_splits, self.size())
        return self._exchange("all_to_all_single", [output], [tensor], takes, gives, opts)

    def alltoall(self, outputs, inputs, opts=c10d.AllToAllOptions()):
        if not inputs:
            raise ValueError("shoal: no inputs")
        check_parts(inputs, inputs[0].dtype, self.size())
        check_parts(outputs, inputs[0].dtype, self.size())
        takes, gives = ([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs))
        return self._exchange("all_to_all", outputs, inputs, takes, gives, opts)

    def _exchange(self, title, outputs, inputs, takes, gives, opts):
        work = Work(self, outputs, inputs)
        type_, width = moved(inputs[0].dtype)
        given, taken = work.operands.input(*inputs), work.operands.output(*outputs)
        gives, takes = (_native.counts([count * width for count in counts]) for counts in (gives, takes))
        return self._post("alltoallv", work, opts, given, gives, None, taken, takes, None, type_, title=title)

    def send(self, tensors, peer, tag=0):
        tensor = only(tensors)
        work = Work(self, tensors, tensors)
        type_, width = moved(tensor.dtype)
        return self._post("send", work, None, work.operands.input(tensor), tensor.numel() * width, type_, peer, tag)

    def recv(self, tensors, peer, tag=0):
        tensor = only(tensors)
        work = Work(self, tensors, tensors)
        type_, width = moved(tensor.dtype)
        return self._post("recv", work, None, work.operands.output(tensor), tensor.numel() * width, type_, peer, tag)

    def recv_anysource(self, tensors, tag=0):
        raise NotImplementedError("shoal: a receive from any rank is not supported: pass src to recv()")

    def barrier(self, opts=c10d.BarrierOptions()):
        return self._post("barrier", Work(self, []), opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier whose error names the missing ranks. Every operation of this back-end does that."""
        opts = c10d.BarrierOptions()
        if isinstance(timeout, c10d.BarrierOptions):  # the call of a Backend
            opts = timeout
        elif timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # Which name torch calls depends on its version and on whether C++ or Python calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- What torch asks of a group besides collectives

    _device_types = [torch.device("cpu")]

    # A ProcessGroup keeps its name and description in its back-ends; this one has no back-end.
    def setGroupName(self, name):
        self._group_name = name

    def getGroupName(self):
        return self._group_name

    def setGroupDesc(self, description):
        self._group_desc = description

    def getGroupDesc(self):
        return self._group_desc

    if not IS_BACKEND:  # older versions of torch read these from a group in Python
        group_name, group_desc = property(getGroupName), property(getGroupDesc)
        _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, device):
        return self

    def supports_tensor_alloc(self, device):
        """Returns true for the CPU. From torch 2.14 on, C++ passes the device's number, and does not let a back-end in Python
        allocate."""
        return not isinstance(device, int) and torch.device(device).type == "cpu"

    def allocate_tensor(self, size, dtype, device):
        try:
            return empty(self.context, size * torch.empty((), dtype=dtype).element_size()).view(dtype)
        except NoSharedMemory:  # the library has logged it
            return torch.empty(size, dtype=dtype)

    def set_timeout(self, timeout):
        self._timeout_ms = milliseconds(timeout)

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return 0

    # Python passes a device to a group; C++ calls a Backend without one.
    def start_coalescing(self, device=None):
        self._coalesced = {}

    def end_coalescing(self, device=None):
        with self.lock:
            works, self._coalesced = list(self._coalesced), None
        return WorkOfMany(works)

    _start_coalescing, _end_coalescing = start_coalescing, end_coalescing

    def abort(self):
        """Ends all operations with an error, on every rank."""
        with self.lock:
            if self.comm is not None:
                self.library.comm_abort(self.comm)

    def shutdown(self):
        """Ends the group on this rank: unfinished operations fail. Does nothing in a forked child, where the group is the
        parent's."""
        if self._owner != os.getpid():
            return
        with self.lock:
            comm, self.comm = self.comm, None
            if comm is None:
                return
            self._unwaited.clear()  # works hold their group
            self._kept.clear()
            if self._left.wait_for(lambda: not self._calls, CALLS_END_S):
                self.library.comm_free(comm)


def _entries(given, taken, counts):
    """The array of shoal_tensor for a coalesced call."""
    return (_native.Tensor * len(counts))(*zip(given, taken, counts))


create = Group
