"""The back-end "shoal" of torch.distributed in pure Python, over the C API: for where no C++ compiler is found.

Group is, before torch 2.14, a ProcessGroup (it *is* the group); from 2.14 on a Backend of one. Each method posts one operation
of Shoal and gives a Work; where the caller did not ask for an asynchronous one, it is finished. docs/python.md says what this
shim cannot do and the C++ one can.

Threads. ctypes releases the GIL around every call, and no Python runs on a thread that drives Shoal: who holds the GIL never
waits for Shoal, and who drives never waits for the GIL. Waits go in slices of SLICE_MS, between which Python looks for signals.
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
from .._native import ERR_ARGUMENT, OK, PENDING, UINT8
from ._communicator import BackendError, milliseconds, timed_out

SLICE_MS = 50
CALLS_END_S = 10  # what other threads post ends far sooner; else the communicator is rather kept
STOP_S = 5

IS_BACKEND = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)  # else the shim is a whole group
Base = c10d.Backend if IS_BACKEND else dist.ProcessGroup
NoSharedMemory = getattr(torch, "OutOfMemoryError", MemoryError)

_BESIDE = 'Write init_process_group("cpu:shoal,cuda:nccl") to have NCCL for tensors of GPUs' + (
    "." if IS_BACKEND else ', and install a C++ compiler: before torch 2.14 the shim in Python cannot stand beside NCCL.')
_TYPES = {torch.float32: _native.FLOAT32, torch.float64: _native.FLOAT64, torch.bfloat16: _native.BFLOAT16,
          torch.float16: _native.FLOAT16, torch.int64: _native.INT64, torch.int32: _native.INT32, torch.int8: _native.INT8,
          torch.uint8: UINT8}


def _operators(**names):
    """Shoal's operators by torch's, as far as this version of torch has them."""
    return {getattr(dist.ReduceOp, name): operator for name, operator in names.items() if hasattr(dist.ReduceOp, name)}


_OPERATORS = _operators(SUM=_native.SUM, AVG=_native.AVG, MIN=_native.MIN, MAX=_native.MAX, PRODUCT=_native.PROD,
                        BAND=_native.BITAND, BOR=_native.BITOR, BXOR=_native.BITXOR, PREMUL_SUM=_native.SCALED_SUM)
_BOOL_OPERATORS = _operators(SUM=_native.MAX, MAX=_native.MAX, BOR=_native.BITOR, PRODUCT=_native.MIN, MIN=_native.MIN,
                             BAND=_native.BITAND, BXOR=_native.BITXOR)


# ---- The process: the groups in it, and memory that it shares ----------------------------------------------------------------

_futures = None
_groups = weakref.WeakSet()
_lock = threading.Lock()


def _forget():
    """In a forked child: what the parent made is the parent's."""
    global _futures, _groups, _lock
    _futures, _groups, _lock = None, weakref.WeakSet(), threading.Lock()


@atexit.register
def _free_groups():
    """Others are told that this rank is gone; and nothing is written to tensors of an interpreter that ends."""
    for group in list(_groups):
        group.shutdown()
    if _futures:
        _futures.stop()


os.register_at_fork(after_in_child=_forget)


def empty(context, nbytes):
    """uint8 tensor over memory that the host's other ranks can map, freed with the last tensor that views it."""
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
    if owner == os.getpid():  # not so in a forked child, where the memory is still the parent's
        _native.load().mem_free(context, address)


# ---- Types and operators -----------------------------------------------------------------------------------------------------


def _moved(dtype):
    """The type in which elements travel where they are only moved: a type of Shoal, and how many of it make one element."""
    return (_TYPES[dtype], 1) if dtype in _TYPES else (UINT8, torch.empty((), dtype=dtype).element_size())


def _reduced(dtype, reduce_op):
    """The type, operator and scale of Shoal for a reduction of torch. TypeError where there is none."""
    kind = reduce_op.op
    if dtype is torch.bool:
        type_, operator = UINT8, _BOOL_OPERATORS.get(kind)
    else:
        type_, operator = _TYPES.get(dtype), _OPERATORS.get(kind)
    if type_ is None or operator is None:
        raise TypeError(f"shoal: {kind.name} of {dtype} is not supported. There are SUM, AVG, MIN, MAX, PRODUCT, PREMUL_SUM of "
                        "float32, float64, bfloat16, float16, int64, int32, int8 and uint8, for integers BAND, BOR and BXOR "
                        "too, and bool without AVG and PREMUL_SUM: convert the tensor first")
    return type_, operator, reduce_op.__getstate__()[1] if operator == _native.SCALED_SUM else 1.0


def _error(failure, place=""):
    """The exception of torch's users for a ShoalError."""
    return (ValueError if failure.status == ERR_ARGUMENT else BackendError)(f"{timed_out(failure.status)}{failure}{place}")


# ---- Work --------------------------------------------------------------------------------------------------------------------


class Work(dist.Work):
    """One operation: its operands, which live until it is done, and its request.

    The addresses of operands are asked of reads(), writes() and updates(). They make one flat copy of tensors that do not lie
    in memory as one vector; what was written to it is copied back when the operation is done.
    """

    def __init__(self, group, result):
        super().__init__()
        self.request = ctypes.c_void_p()
        self._group, self._result, self._library = group, result, group.library
        self._operands, self.copies_back = [], []
        self.title, self.inputs = "", []  # of a profile: the operation's name and the tensors whose shapes it shows
        self._error = self._future = None

    def __del__(self):
        self._library.request_free(self.request)

    def reads(self, *tensors):
        return self._address(tensors, is_read=True, is_written=False)

    def writes(self, *tensors):
        return self._address(tensors, is_read=False, is_written=True)

    def updates(self, *tensors):
        return self._address(tensors, is_read=True, is_written=True)

    def _address(self, tensors, is_read, is_written):
        _check(tensors)
        if is_read:
            self.inputs += tensors
        if not _is_one_vector(tensors):
            counts = [tensor.numel() for tensor in tensors]
            flat = torch.empty(sum(counts), dtype=tensors[0].dtype)
            pieces = [(tensor.detach(), piece.view(tensor.shape)) for tensor, piece in zip(tensors, flat.split(counts))]
            if is_read:
                for tensor, piece in pieces:
                    piece.copy_(tensor)
            if is_written:
                self.copies_back += pieces
            tensors = (flat,)
        self._operands.append(tensors)
        return tensors[0].data_ptr()

    # The interface for Python callers. C++ calls wait and get_future alone.

    def wait(self, timeout=None):
        """Raises what went wrong. A timeout > 0 that passes is an error for the caller; the operation goes on."""
        limit_ms = milliseconds(timeout)
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
        return True

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
        """A torch.futures.Future of the list of output tensors."""
        with self._group.lock:
            is_first = self._future is None
            if is_first:
                self._done = torch.futures.Future()
                # An exception of result() in a callback is an error for C++ too; Future.set_exception is known to Python alone.
                self._future = self._done.then(lambda _: self.result())
        if is_first:
            _resolver().add(self)
        return self._future

    def on_done(self, function, argument):
        self._library.request_on_done(self.request, function, argument)

    def resolve(self):
        self._done.set_result(None)

    def _settle(self, status):
        """Once the request is done: copies back, or says what happened; lets go of the operands."""
        group = self._group
        with group.lock:
            if self not in group.running:
                return
            if status == OK:
                try:
                    with torch.inference_mode():  # so that tensors of inference may be written to, too
                        for tensor, piece in self.copies_back:
                            tensor.copy_(piece)
                except RuntimeError as error:  # such as a tensor that is expanded
                    self._error = error
            else:
                self._error = group.error(_native.error_of(status, comm=group.comm))
            self._operands = self.copies_back = ()
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


def _check(tensors):
    for tensor in tensors:
        if not tensor.is_cpu:
            raise ValueError(f"shoal: this tensor is on {tensor.device}, and Shoal moves the memory of the CPU. " + _BESIDE)
        if tensor.layout is not torch.strided:
            raise TypeError(f"shoal: tensors of layout {tensor.layout} are not supported: use to_dense() first")
        if tensor.dtype is not tensors[0].dtype:
            raise ValueError(f"shoal: one operation was given tensors of {tensors[0].dtype} and of {tensor.dtype}")


def _is_one_vector(tensors):
    """Do they lie one behind another?"""
    end = tensors[0].data_ptr()
    for tensor in tensors:
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        if not is_plain or (tensor.data_ptr() != end and tensor.numel()):
            return False
        end += tensor.numel() * tensor.element_size()
    return True


class Resolver:
    """Resolves Futures and copies back, on threads of its own.

    Shoal calls sem_post when a request is done: that needs no GIL. Callbacks of a Future may wait for another one, as those of
    PowerSGD do; so before it runs any, a thread sees to it that another one waits.
    """

    _libc = ctypes.CDLL(None)
    _sem_post = _native.DoneFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)

    def __init__(self):
        self._works, self._waiting, self._lock = set(), 0, threading.Lock()
        self._threads, self._must_stop = [], False
        self._semaphore = ctypes.create_string_buffer(128)  # a sem_t, which is 32 bytes at most where Shoal runs
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
        """Before Python ends: a thread that came back to it afterwards, from a callback in C++, would end the process badly."""
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
            with self._lock:
                self._waiting += 1


def _resolver():
    global _futures
    with _lock:
        if _futures is None:
            _futures = Resolver()
        return _futures


# ---- Profiles ------------------------------------------------------------------------------------------------------------------


# The names that the shim in C++ gives to operations, where they differ from those in the C library.
_TITLES = {"allreduce": "all_reduce", "allreduce_coalesced": "all_reduce_coalesced", "allgather": "all_gather",
           "allgatherv": "all_gather", "allgather_coalesced": "all_gather_coalesced", "reduce_scatterv": "reduce_scatter",
           "alltoallv": "all_to_all"}
_is_profiling = getattr(torch.autograd, "_profiler_enabled", lambda: False)
_Record = getattr(torch._C._profiler, "_RecordFunctionFast", None)


def _profiled(work):
    """The event of an operation in a profile of torch, from the call until it returns: a Work in Python has no other."""
    inputs, work.inputs = work.inputs, ()
    if _Record is None or not _is_profiling():
        return contextlib.nullcontext()
    return _Record(work.title, inputs)


# ---- The group ---------------------------------------------------------------------------------------------------------------


class Group(Base):
    """A group of torch: a communicator of Shoal and the operations under way on it."""

    # torch asks these of a Backend; as class attributes, for the properties of its base class lead back here without end.
    supports_coalescing = False
    supports_splitting = False

    _group_name = _group_desc = ""

    def __init__(self, context, comm, rank, size, timeout, name, ranks):
        """context, comm: their addresses. The communicator becomes this group's, which frees it."""
        super().__init__(rank, size)
        self.context, self.comm, self.label, self.ranks, self.running = context, comm, name, ranks, set()
        self.library, self.lock, self._owner, self._calls = _native.load(), threading.RLock(), os.getpid(), 0
        self._left, self._timeout_ms, self._sweep_at, self._coalesced = threading.Condition(self.lock), 0, 64, None
        _groups.add(self)

    def __del__(self):
        self.shutdown()

    def getBackendName(self):
        return "shoal"

    name = getBackendName

    # ---- Posting

    def _post(self, call, work, options, *operands, scale=1.0):
        """Posts shoal_<call>_post for a Work whose operands have been asked for; waits where the caller wants it."""
        work.title = "shoal:" + _TITLES.get(call, call)
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
            self.running.add(work)  # before the post: from here on an interrupt may come, and operands must live
            status = getattr(self.library, call + "_post")(comm, *operands, ctypes.byref(told), ctypes.byref(work.request))
            if status != OK:
                self.running.discard(work)
                raise self.error(_native.error_of(status, self.context, None if status == ERR_ARGUMENT else comm))
        finally:
            self._leave()
        if self._coalesced is not None:
            self._coalesced.append(work)
        if waits:
            work.wait()
        elif work.copies_back:
            work.get_future()  # so that they are copied also where nobody waits
        return work

    def _enter(self):
        """The communicator, which is not freed before _leave()."""
        with self.lock:
            if self.comm is None:
                raise BackendError(f"shoal: group \"{self.label}\" was destroyed")
            self._calls += 1
            return self.comm

    def _leave(self):
        with self.lock:
            self._calls -= 1
            self._left.notify_all()

    def error(self, failure):
        """The exception for a ShoalError, with the rank in the job where that is another than in the group."""
        known = 0 <= failure.rank < len(self.ranks) and self.ranks[failure.rank] != failure.rank
        place = f" (rank {failure.rank} of group {self.label} is rank {self.ranks[failure.rank]} of the job)" if known else ""
        return _error(failure, place)

    def _sweep(self):
        """Lets go of operations that are done and that nobody waited for."""
        for work in list(self.running):
            work.is_completed()
        self._sweep_at = 2 * len(self.running) + 64

    # ---- Collectives. Arguments are checked here where Shoal, which sees only addresses and counts, cannot.

    def broadcast(self, tensors, opts=c10d.BroadcastOptions()):
        (tensor,) = tensors
        work = Work(self, tensors)
        type_, width = _moved(tensor.dtype)
        memory = work.updates(tensor) if opts.rootRank == self.rank() else work.writes(tensor)
        work.inputs = tensors
        return self._post("broadcast", work, opts, memory, memory, tensor.numel() * width, type_, opts.rootRank)

    def allreduce(self, tensors, opts=c10d.AllreduceOptions()):
        (tensor,) = tensors
        work = Work(self, tensors)
        type_, operator, scale = _reduced(tensor.dtype, opts.reduceOp)
        memory = work.updates(tensor)
        return self._post("allreduce", work, opts, memory, memory, tensor.numel(), type_, operator, scale=scale)

    def allreduce_coalesced(self, tensors, opts=c10d.AllreduceCoalescedOptions()):
        work = Work(self, tensors)
        type_, operator, scale = _reduced(_dtype(tensors), opts.reduceOp)
        memories = [work.updates(tensor) for tensor in tensors]
        entries = _entries(memories, memories, [tensor.numel() for tensor in tensors])
        return self._post("allreduce_coalesced", work, opts, entries, len(entries), type_, operator, scale=scale)

    def reduce(self, tensors, opts=c10d.ReduceOptions()):
        (tensor,) = tensors
        work = Work(self, tensors)
        type_, operator, scale = _reduced(tensor.dtype, opts.reduceOp)
        memory = work.updates(tensor) if opts.rootRank == self.rank() else work.reads(tensor)
        return self._post("reduce", work, opts, memory, memory, tensor.numel(), type_, operator, opts.rootRank, scale=scale)

    def allgather(self, output_lists, inputs, opts=c10d.AllgatherOptions()):
        (outputs,), (tensor,) = output_lists, inputs
        work = Work(self, outputs)
        counts = self._parts(outputs, tensor, "all_gather")
        type_, width = _moved(tensor.dtype)
        given, taken = work.reads(tensor), work.writes(*outputs)
        if len(set(counts)) == 1:
            return self._post("allgather", work, opts, given, taken, counts[0] * width, type_)
        counts = _native.counts([count * width for count in counts])
        return self._post("allgatherv", work, opts, given, taken, counts, None, type_)

    def all_gather_single(self, output, tensor, opts=c10d.AllgatherOptions()):
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(self, outputs, inputs, opts=c10d.AllgatherOptions()):
        return self._gather_each([[output] for output in outputs], inputs, outputs, opts)

    def allgather_coalesced(self, output_lists, inputs, opts=c10d.AllgatherOptions()):
        if len(output_lists) != self.size() or any(len(outputs) != len(inputs) for outputs in output_lists):
            raise ValueError(f"shoal: all_gather_coalesced takes {self.size()} lists of {len(inputs)} outputs, not "
                             f"{[len(outputs) for outputs in output_lists]}")
        return self._gather_each(list(zip(*output_lists)), inputs, [tensor for part in output_lists for tensor in part], opts)

    def _gather_each(self, output_lists, inputs, result, opts):
        work = Work(self, result)
        _dtype(inputs[:1])
        self._check_whole(output_lists, inputs, "all_gather")
        given, taken = [work.reads(tensor) for tensor in inputs], [work.writes(*outputs) for outputs in output_lists]
        if len(inputs) == 1:
            type_, width = _moved(inputs[0].dtype)
            return self._post("allgather", work, opts, given[0], taken[0], inputs[0].numel() * width, type_)
        lengths = [tensor.numel() * tensor.element_size() for tensor in inputs]  # as bytes: they may have different types
        return self._post("allgather_coalesced", work, opts, _entries(given, taken, lengths), len(lengths), UINT8)

    def reduce_scatter(self, outputs, input_lists, opts=c10d.ReduceScatterOptions()):
        (tensor,), (inputs,) = outputs, input_lists
        work = Work(self, outputs)
        counts = self._parts(inputs, tensor, "reduce_scatter")
        type_, operator, scale = _reduced(tensor.dtype, opts.reduceOp)
        given, taken = work.reads(*inputs), work.writes(tensor)
        if len(set(counts)) == 1:
            return self._post("reduce_scatter", work, opts, given, taken, counts[0], type_, operator, scale=scale)
        return self._post("reduce_scatterv", work, opts, given, taken, _native.counts(counts), type_, operator, scale=scale)

    def reduce_scatter_single(self, output, tensor, opts=c10d.ReduceScatterOptions()):
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(self, outputs, inputs, opts=c10d.ReduceScatterOptions()):
        work = Work(self, outputs)
        type_, operator, scale = _reduced(_dtype([*outputs, *inputs]), opts.reduceOp)
        self._check_whole([[tensor] for tensor in inputs], outputs, "reduce_scatter")
        given, taken = [work.reads(tensor) for tensor in inputs], [work.writes(output) for output in outputs]
        if len(outputs) == 1:
            return self._post("reduce_scatter", work, opts, given[0], taken[0], outputs[0].numel(), type_, operator,
                              scale=scale)
        entries = _entries(given, taken, [tensor.numel() for tensor in outputs])
        return self._post("reduce_scatter_coalesced", work, opts, entries, len(entries), type_, operator, scale=scale)

    def gather(self, output_lists, inputs, opts=c10d.GatherOptions()):
        (tensor,), outputs = inputs, output_lists[0] if output_lists else []
        work = Work(self, outputs)
        type_, width = _moved(tensor.dtype)
        given, taken = work.reads(tensor), None
        if opts.rootRank == self.rank():
            self._check_whole([outputs], inputs, "gather")
            taken = work.writes(*outputs)
        return self._post("gather", work, opts, given, taken, tensor.numel() * width, type_, opts.rootRank)

    def scatter(self, outputs, input_lists, opts=c10d.ScatterOptions()):
        (tensor,), inputs = outputs, input_lists[0] if input_lists else []
        work = Work(self, outputs)
        type_, width = _moved(tensor.dtype)
        given, taken = None, work.writes(tensor)
        if opts.rootRank == self.rank():
            self._check_whole([inputs], outputs, "scatter")
            given = work.reads(*inputs)
        return self._post("scatter", work, opts, given, taken, tensor.numel() * width, type_, opts.rootRank)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=c10d.AllToAllOptions()):
        counts = self._split(output, output_splits), self._split(tensor, input_splits)
        return self._exchange([output], [tensor], *counts, opts)

    def alltoall(self, outputs, inputs, opts=c10d.AllToAllOptions()):
        if len(outputs) != self.size() or len(inputs) != self.size():
            raise ValueError(f"shoal: all_to_all takes a tensor for each of {self.size()} ranks, not {len(inputs)} and "
                             f"{len(outputs)}")
        return self._exchange(outputs, inputs, *([tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)), opts)

    def _exchange(self, outputs, inputs, output_counts, input_counts, opts):
        work = Work(self, outputs)
        type_, width = _moved(_dtype([*outputs, *inputs]))
        given, taken = work.reads(*inputs), work.writes(*outputs)
        input_counts, output_counts = (_native.counts([count * width for count in counts])
                                       for counts in (input_counts, output_counts))
        return self._post("alltoallv", work, opts, given, input_counts, None, taken, output_counts, None, type_)

    def send(self, tensors, peer, tag=0):
        (tensor,) = tensors
        work = Work(self, tensors)
        type_, width = _moved(tensor.dtype)
        return self._post("send", work, None, work.reads(tensor), tensor.numel() * width, type_, peer, tag)

    def recv(self, tensors, peer, tag=0):
        (tensor,) = tensors
        work = Work(self, tensors)
        type_, width = _moved(tensor.dtype)
        work.inputs = tensors
        return self._post("recv", work, None, work.writes(tensor), tensor.numel() * width, type_, peer, tag)

    def recv_anysource(self, tensors, tag=0):
        raise NotImplementedError("shoal: a receive from any rank is not supported: give recv() its src")

    def barrier(self, opts=c10d.BarrierOptions()):
        return self._post("barrier", Work(self, []), opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier whose error names the ranks that did not come, as that of each operation here does."""
        opts = c10d.BarrierOptions()
        if isinstance(timeout, c10d.BarrierOptions):  # what a Backend is called with
            opts = timeout
        elif timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # torch calls the new names or the old ones, by version and by whether C++ or Python calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _parts(self, parts, own, name):
        """Counts of a list that has a tensor for each rank, where this rank's other operand is `own`."""
        counts = [part.numel() for part in parts]
        _check([own, *parts])
        if len(counts) != self.size() or counts[self.rank()] != own.numel():
            raise ValueError(f"shoal: {name} takes a list of {self.size()} tensors, one for each rank, of which number "
                             f"{self.rank()} has {own.numel()} elements as the other tensor; the list has {counts} elements")
        return counts

    def _check_whole(self, wholes, parts, name):
        """Has each whole (one tensor, or one for each rank) as many elements as one such part of each rank?"""
        for whole, part in zip(wholes, parts):
            _check([part, *whole])
            if not whole or any(tensor.numel() * len(whole) != part.numel() * self.size() for tensor in whole):
                raise ValueError(f"shoal: {name} among {self.size()} ranks takes parts of one length; the tensor for all has "
                                 f"{[tensor.numel() for tensor in whole]} elements, the tensor for one {part.numel()}")

    def _split(self, tensor, splits):
        """Elements for each rank, from lengths along dimension 0 (none: even ones)."""
        length = tensor.size(0) if tensor.dim() else 1
        if not splits and length % self.size() == 0:
            splits = [length // self.size()] * self.size()
        if len(splits) != self.size() or sum(splits) != length or min(splits) < 0:
            raise ValueError(f"shoal: {length} rows cannot be split among {self.size()} ranks as {splits or 'even parts'}")
        return [split * (tensor.numel() // max(1, length)) for split in splits]

    # ---- What torch asks of a group beside

    _device_types = [torch.device("cpu")]

    # A ProcessGroup keeps its name and description with its back-ends; this one has none.
    def setGroupName(self, name):
        self._group_name = name

    def getGroupName(self):
        return self._group_name

    def setGroupDesc(self, description):
        self._group_desc = description

    def getGroupDesc(self):
        return self._group_desc

    if not IS_BACKEND:  # older versions of torch ask a group in Python for these
        group_name, group_desc = property(getGroupName), property(getGroupDesc)
        _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def _get_backend(self, device):
        return self

    def supports_tensor_alloc(self, device):
        return torch.device(device).type == "cpu"

    def allocate_tensor(self, size, *, dtype, device):
        try:
            return empty(self.context, size * torch.empty((), dtype=dtype).element_size()).view(dtype)
        except NoSharedMemory:  # told by the library
            return torch.empty(size, dtype=dtype)

    def set_timeout(self, timeout):
        self._timeout_ms = milliseconds(timeout)

    def _set_sequence_number_for_group(self):
        pass

    def _get_sequence_number_for_group(self):
        return 0

    def _start_coalescing(self, device):
        self._coalesced = []

    def _end_coalescing(self, device):
        works, self._coalesced = self._coalesced, None
        return WorkOfMany(works)

    def abort(self):
        """All operations end with an error, on every rank."""
        with self.lock:
            if self.comm is not None:
                self.library.comm_abort(self.comm)

    def shutdown(self):
        """The local end: operations not done fail. In a forked child the group is the parent's."""
        if self._owner != os.getpid():
            return
        with self.lock:
            comm, self.comm = self.comm, None
            if comm is None:
                return
            if self._left.wait_for(lambda: not self._calls, CALLS_END_S):
                self.library.comm_free(comm)


def _dtype(tensors):
    if not tensors:
        raise ValueError("shoal: a collective was given no tensor")
    _check(tensors)
    return tensors[0].dtype


def _entries(given, taken, counts):
    """The array of shoal_tensor of a coalesced call."""
    return (_native.Tensor * len(counts))(*zip(given, taken, counts))


create = Group
