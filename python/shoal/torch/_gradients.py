"""The gradient engine (include/shoal/gradients.h) of tensors: a reducer, and its memory as tensors."""
import contextlib
import ctypes
import os

import torch

from .. import _native
from .._native import OK
from . import _communicator
from ._communicator import BackendError, is_own, timed_out

COMPRESSIONS = {"none": _native.COMPRESS_NONE, "fp16": _native.COMPRESS_FLOAT16, "bf16": _native.COMPRESS_BFLOAT16,
                "int8": _native.COMPRESS_INT8}
# Type, and how many of it one element is.
TYPES = {torch.float32: (_native.FLOAT32, 1), torch.float64: (_native.FLOAT64, 1), torch.bfloat16: (_native.BFLOAT16, 1),
         torch.float16: (_native.FLOAT16, 1), torch.complex64: (_native.FLOAT32, 2), torch.complex128: (_native.FLOAT64, 2)}

FOREVER = _communicator.UINT32_MAX


class Communicator:
    """One of its own for a module's gradients, so that nothing mixes with the calls of the group. All ranks make it together."""

    def __init__(self, store, rank, size, timeout, name):
        self._owner, self._library = os.getpid(), _native.load()
        self.context, self.address = _communicator.join(store, rank, size, timeout, name)

    def __del__(self, is_own=is_own):
        if getattr(self, "address", None) and is_own(self._owner):
            self._library.comm_free(self.address)

    def numbers_of_first(self, numbers):
        """Rank 0's array of uint32 on every rank."""
        status = self._library.broadcast(self.address, numbers, numbers, ctypes.sizeof(numbers), _native.UINT8, 0, None)
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, comm=self.address)}")
        return numbers


class BackwardEnd:
    """The autograd engine calls it at the end of a backward pass, or drops it where an exception ended the pass. A thread of the
    engine's may drop it some time after the pass, so it lets go of the steps when it has been called."""

    def __init__(self, steps, task):
        self.steps, self.task = steps, task

    def __call__(self):
        steps, self.steps = self.steps, None
        steps.backward_ended(self.task)

    def __del__(self):
        if self.steps:
            self.steps.backward_broke(self.task)


class _HostMemory:
    """Of a reducer, where its gradients are the CPU's: marks copy them at once, and finish waits."""
    options, copies_at_once = {}, True

    def enter(self):
        """What the current stream has comes before what the reducer does from now on."""

    def leave(self):
        """What the reducer has done comes before what is put on the current stream from now on."""

    def settle(self, library, address):
        """Waits until nothing uses the reducer's memory."""

    def bytes_at(self, address, count, handle):
        block = (ctypes.c_uint8 * count).from_address(address)
        block.handle = handle
        return torch.frombuffer(block, dtype=torch.uint8)


class _DeviceMemory:
    """Of a reducer on a device. It works in the order of one stream, which others wait for, and which waits for others, where a
    program makes gradients on another stream than the one that was current first."""
    copies_at_once = False

    def __init__(self, device):
        import shoal.torch
        name, self._shim = shoal.torch._shim(0)
        if name != "c++":
            raise NotImplementedError(f"shoal: a parameter is on {device}, which the shim in C++ serves: it needs a C++ compiler, and "
                                      "SHOAL_TORCH_SHIM must not be \"python\"")
        self._device, self._torch = device, torch.get_device_module(device)
        torch.zeros(1, device=device)  # makes the driver's context of the device current
        is_current = self._torch.current_device() == device.index
        self._stream = self._torch.current_stream(device) if is_current else self._torch.Stream(device)
        self.options = {"is_on_device": 1, "stream": self._shim.handle_of(self._stream)}

    def enter(self):
        current = self._torch.current_stream(self._device)
        if current != self._stream:
            self._stream.wait_stream(current)

    def leave(self):
        current = self._torch.current_stream(self._device)
        if current != self._stream:
            current.wait_stream(self._stream)

    def settle(self, library, address):
        """The operations of other ranks may need this one; kernels may read gradients, on any stream."""
        library.reducer_wait(address, FOREVER)
        with contextlib.suppress(RuntimeError):  # a context that has failed runs nothing any more
            self._torch.synchronize(self._device)

    def bytes_at(self, address, count, handle):
        return self._shim.bytes_at(address, count, self._device, handle)


class _Handle:
    """The owner of a reducer's memory. Each view holds it, as a program may keep a gradient for longer than the module."""

    def __init__(self, library, address, memory):
        self._owner, self._library, self._address, self._memory = os.getpid(), library, address, memory

    def __del__(self, is_own=is_own):
        if is_own(self._owner):
            self._memory.settle(self._library, self._address)
            self._library.reducer_free(self._address)


class Reducer:
    """struct shoal_reducer, whose averages stay in its memory, or are copied back with results_in_views=0. It is freed when neither
    it nor a view is used any more."""

    def __init__(self, communicator, names, parameters, order=None, results_in_views=1, **options):
        self._library, self._address = _native.load(), None
        self._context, address = communicator.context, ctypes.c_void_p()
        device = parameters[0].device
        self._memory = _HostMemory() if device.type == "cpu" else _DeviceMemory(device)
        self.count = len(parameters)
        self._forms = [(parameter.numel(), parameter.dtype) for parameter in parameters]
        self.counts = [parameter.numel() * TYPES[parameter.dtype][1] for parameter in parameters]
        entries = (_native.Parameter * self.count)(*(
            (count, TYPES[parameter.dtype][0], name.encode())
            for count, parameter, name in zip(self.counts, parameters, names)))
        chosen = _native.ReducerOptions(keeps_layout=1, results_in_views=results_in_views, order=order, **options,
                                        **self._memory.options)
        self._check(self._library.reducer_create(self._context, communicator.address, entries, self.count,
                                                 ctypes.byref(chosen), ctypes.byref(address)))
        self._address = address.value
        self._handle = _Handle(self._library, self._address, self._memory)
        self.views = [self._view(i, parameter) for i, parameter in enumerate(parameters)] if results_in_views else []

    def _view(self, index, parameter):
        """A view with the parameter's strides where these leave no hole, as a gradient has them."""
        size = parameter.numel() * parameter.element_size()
        if size == 0:
            return torch.empty_like(parameter, requires_grad=False)
        flat = self._memory.bytes_at(self._library.reducer_view(self._address, index), size, self._handle).view(parameter.dtype)
        strides = torch.empty_like(parameter, device="meta").stride()
        return flat.as_strided(parameter.shape, strides)

    def can_read(self, index, tensor):
        """Whether the engine can copy this gradient of a parameter as it lies, and is through with it when it has been marked."""
        return (self._memory.copies_at_once and tensor.stride() == self.views[index].stride() and not tensor.is_conj()
                and not tensor.is_neg())

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
        self._memory.enter()
        status = self._library.reducer_ready(self._address, index, tensor.data_ptr(), self.counts[index])
        if status != OK:
            self._check(status)

    def finish(self):
        """The current stream then sees the averages."""
        self._memory.enter()
        self._check(self._library.reducer_finish(self._address, None))
        self._memory.leave()

    def join(self):
        """Takes part in a step of the other ranks. False: there is none, as all have joined."""
        more = ctypes.c_int()
        self._memory.enter()
        self._check(self._library.reducer_join(self._address, ctypes.byref(more), None))
        self._memory.leave()
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
        tensors = [parameter.detach().to("cpu").contiguous() for parameter in parameters]
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
