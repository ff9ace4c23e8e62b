"""The gradient engine (include/shoal/gradients.h) of tensors: a reducer, and its memory as tensors."""
import ctypes
import os

import torch

from .. import _native
from .._native import OK
from . import _communicator
from ._communicator import BackendError, timed_out

COMPRESSIONS = {"none": _native.COMPRESS_NONE, "fp16": _native.COMPRESS_FLOAT16, "bf16": _native.COMPRESS_BFLOAT16,
                "int8": _native.COMPRESS_INT8}
# Type, and how many of it one element is.
TYPES = {torch.float32: (_native.FLOAT32, 1), torch.float64: (_native.FLOAT64, 1), torch.bfloat16: (_native.BFLOAT16, 1),
         torch.float16: (_native.FLOAT16, 1), torch.complex64: (_native.FLOAT32, 2), torch.complex128: (_native.FLOAT64, 2)}


class Communicator:
    """One of its own for a module's gradients, so that nothing mixes with the calls of the group. All ranks make it together."""

    def __init__(self, store, rank, size, timeout, name):
        self._owner, self._library = os.getpid(), _native.load()
        self.address = _communicator.join(store, rank, size, timeout, name)

    def __del__(self):
        if getattr(self, "address", None) and self._owner == os.getpid():  # in a forked child it is the parent's
            self._library.comm_free(self.address)

    def numbers_of_first(self, numbers):
        """Rank 0's array of uint32 on every rank."""
        status = self._library.broadcast(self.address, numbers, numbers, ctypes.sizeof(numbers), _native.UINT8, 0, None)
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, comm=self.address)}")
        return numbers


class BackwardEnd:
    """The autograd engine calls it at the end of a backward pass, or drops it where an exception ended the pass."""

    def __init__(self, steps, task):
        self.steps, self.task, self.is_done = steps, task, False

    def __call__(self):
        self.is_done = True
        self.steps.backward_ended(self.task)

    def __del__(self):
        if not self.is_done:
            self.steps.backward_broke(self.task)


class _Handle:
    """The owner of a reducer's memory. Each view holds it, as a program may keep a gradient for longer than the module."""

    def __init__(self, library, address):
        self._owner, self._library, self._address = os.getpid(), library, address

    def __del__(self):
        if self._owner == os.getpid():
            self._library.reducer_free(self._address)


class Reducer:
    """struct shoal_reducer, whose averages stay in its memory, or are copied back with results_in_views=0. It is freed when neither
    it nor a view is used any more."""

    def __init__(self, communicator, names, parameters, order=None, results_in_views=1, **options):
        self._library, self._address = _native.load(), None
        self._context, address = _communicator.context(), ctypes.c_void_p()
        self.count = len(parameters)
        self._forms = [(parameter.numel(), parameter.dtype) for parameter in parameters]
        self.counts = [parameter.numel() * TYPES[parameter.dtype][1] for parameter in parameters]
        entries = (_native.Parameter * self.count)(*(
            (count, TYPES[parameter.dtype][0], name.encode())
            for count, parameter, name in zip(self.counts, parameters, names)))
        chosen = _native.ReducerOptions(keeps_layout=1, results_in_views=results_in_views, order=order, **options)
        self._check(self._library.reducer_create(self._context, communicator.address, entries, self.count,
                                                 ctypes.byref(chosen), ctypes.byref(address)))
        self._address = address.value
        self._handle = _Handle(self._library, self._address)
        self.views = [self._view(i, parameter) for i, parameter in enumerate(parameters)] if results_in_views else []

    def _view(self, index, parameter):
        """A view with the parameter's strides where these leave no hole, as a gradient has them."""
        size = parameter.numel() * parameter.element_size()
        if size == 0:
            return torch.empty_like(parameter, requires_grad=False)
        block = (ctypes.c_uint8 * size).from_address(self._library.reducer_view(self._address, index))
        block.handle = self._handle
        flat = torch.frombuffer(block, dtype=torch.uint8).view(parameter.dtype)
        strides = torch.empty_like(parameter, device="meta").stride()
        return flat.as_strided(parameter.shape, strides)

    def is_of(self, index, tensor):
        """Whether the tensor can be the gradient of this parameter."""
        return self._forms[index] == (tensor.numel(), tensor.dtype)

    def forms(self):
        """Of all parameters: their elements and types, as a checkpoint keeps them."""
        return [f"{count} {dtype}" for count, dtype in self._forms]

    def zeros_from(self, index):
        """Gradients of this and all later parameters."""
        return [torch.zeros(count, dtype=dtype) for count, dtype in self._forms[index:]]

    def begin(self):
        self._check(self._library.reducer_begin(self._address, _native.STEP_REDUCE))

    def ready(self, index, tensor):
        status = self._library.reducer_ready(self._address, index, tensor.data_ptr(), self.counts[index])
        if status != OK:
            self._check(status)

    def finish(self):
        self._check(self._library.reducer_finish(self._address, None))

    def join(self):
        """Takes part in a step of the other ranks. False: there is none, as all have joined."""
        more = ctypes.c_int()
        self._check(self._library.reducer_join(self._address, ctypes.byref(more), None))
        return bool(more.value)

    def is_used(self, index):
        return bool(self._library.reducer_is_used(self._address, index))

    def order(self):
        """In which gradients became ready."""
        numbers = (ctypes.c_uint32 * self.count)()
        self._check(self._library.reducer_order(self._address, numbers))
        return numbers

    def compare(self, parameters):
        """All ranks, between steps. Raises where one of the parameters has not the same values on all."""
        tensors = [parameter.detach().contiguous() for parameter in parameters]
        hashes = (ctypes.c_uint64 * self.count)(*(self._library.bytes_hash(tensor.data_ptr(), tensor.numel() * tensor.element_size())
                                                  for tensor in tensors))
        self._check(self._library.reducer_compare(self._address, hashes))

    def fail(self, status, text):
        """Here and on every rank."""
        self._library.reducer_fail(self._address, status, text.encode())

    def stats(self):
        """struct shoal_step_stats of the last step, or None."""
        stats = _native.StepStats()
        return stats if self._library.reducer_stats(self._address, ctypes.byref(stats)) == OK else None

    def residuals(self):
        """What int8 has cut off on this rank, as bytes: between steps."""
        state = torch.empty(self._library.reducer_residual_bytes(self._address), dtype=torch.uint8)
        self._check(self._library.reducer_export_residuals(self._address, state.data_ptr(), state.numel()))
        return state

    def take_residuals(self, state):
        """All ranks, each its own, between steps."""
        state = state.detach().to("cpu", torch.uint8).contiguous()
        self._check(self._library.reducer_import_residuals(self._address, state.data_ptr(), state.numel()))

    def _check(self, status):
        if status == OK:
            return
        failure, error = _native.Failure(), None
        if self._address and self._library.reducer_failure(self._address, ctypes.byref(failure)) == OK and failure.text:
            error = failure.text.decode(errors="replace")
        raise BackendError(f"shoal: {timed_out(status)}{error or _native.error_of(status, self._context)}")
