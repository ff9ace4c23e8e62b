"""The gradient engine (include/shoal/gradients.h) for tensors: a reducer, and its memory as tensors."""
import contextlib
import ctypes
import os
import re

import torch

from .. import _native, _scaling
from .._native import OK
from . import _communicator
from ._communicator import BackendError, is_own, timed_out

COMPRESSIONS = {"none": _native.COMPRESS_NONE, "fp16": _native.COMPRESS_FLOAT16, "bf16": _native.COMPRESS_BFLOAT16,
                "int8": _native.COMPRESS_INT8}
# The library's type, and how many of its elements make one of torch's.
TYPES = {torch.float32: (_native.FLOAT32, 1), torch.float64: (_native.FLOAT64, 1), torch.bfloat16: (_native.BFLOAT16, 1),
         torch.float16: (_native.FLOAT16, 1), torch.complex64: (_native.FLOAT32, 2), torch.complex128: (_native.FLOAT64, 2)}

FOREVER = _communicator.UINT32_MAX


class Communicator:
    """A communicator for the gradients of one module, separate from the calls of the group. All ranks make it together."""

    def __init__(self, store, rank, size, timeout, name):
        self._owner, self._library = os.getpid(), _native.load()
        self.context, self.address = _communicator.join(store, rank, size, timeout, name)

    def __del__(self, is_own=is_own):
        if getattr(self, "address", None) and is_own(self._owner):
            self._library.comm_free(self.address)

    def local_size(self):
        """The number of ranks on this host."""
        place = _native.Place()
        self._library.comm_place(self.address, self._library.comm_rank(self.address), ctypes.byref(place))
        return place.local_size

    def numbers_of_first(self, numbers):
        """Copies rank 0's array of uint32 to every rank."""
        status = self._library.broadcast(self.address, numbers, numbers, ctypes.sizeof(numbers), _native.UINT8, 0, None)
        if status != OK:
            raise BackendError(f"shoal: {timed_out(status)}{_native.error_of(status, comm=self.address)}")
        return numbers


class BackwardEnd:
    """The autograd engine calls this object at the end of a backward pass, or drops it if an exception ended the pass. A thread
    of the engine may drop it some time later, so it releases the steps when it is called."""

    def __init__(self, steps, task):
        self.steps, self.task = steps, task

    def __call__(self):
        steps, self.steps = self.steps, None
        steps.backward_ended(self.task)

    def __del__(self):
        if self.steps:
            self.steps.backward_broke(self.task)


class _HostMemory:
    """A reducer's memory if its gradients are on the CPU: marking a gradient copies it at once, and finish waits."""
    options, copies_at_once = {}, True

    def enter(self):
        """Orders what the reducer does from now on after the current stream's work."""

    def leave(self):
        """Orders later work of the current stream after what the reducer has done."""

    def settle(self, library, address):
        """Waits until nothing uses the reducer's memory."""

    def bytes_at(self, address, count, handle):
        block = (ctypes.c_uint8 * count).from_address(address)
        block.handle = handle
        return torch.frombuffer(block, dtype=torch.uint8)


class _DeviceMemory:
    """A reducer's memory on a device. It works in the order of one stream: the stream that was current when it was made. If a
    program makes gradients on another stream, each of the two streams waits for the other."""
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
        """Waits for the reducer's operations, which other ranks may need, and for kernels, which may read gradients on any
        stream."""
        library.reducer_wait(address, FOREVER)
        with contextlib.suppress(RuntimeError):  # after a failure the context runs nothing
            self._torch.synchronize(self._device)

    def bytes_at(self, address, count, handle):
        return self._shim.bytes_at(address, count, self._device, handle)


class _Handle:
    """Owns a reducer's memory. Each view holds it, because a program may keep a gradient longer than the module."""

    def __init__(self, library, address, memory):
        self._owner, self._library, self._address, self._memory = os.getpid(), library, address, memory

    def __del__(self, is_own=is_own):
        if is_own(self._owner):
            self._memory.settle(self._library, self._address)
            self._library.reducer_free(self._address)


class Reducer:
    """struct shoal_reducer. Averages stay in its memory, or are copied back with results_in_views=0. It is freed when neither
    the object nor a view is in use."""

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
        self.check(self._library.reducer_create(self._context, communicator.address, entries, self.count,
                                                 ctypes.byref(chosen), ctypes.byref(address)))
        self._address = self.address = address.value
        self._handle = _Handle(self._library, self._address, self._memory)
        self.is_offloaded = device.type != "cpu" and "optimizer" in options  # gradients stay in the program's own memory
        self._parameters, self._kept = parameters, []  # tensors that the device still has to read
        self.views = [None if self.is_offloaded else self.view_at(self._library.reducer_view(self._address, i), parameter)
                      for i, parameter in enumerate(parameters)] if results_in_views else []

    def view_at(self, address, parameter):
        """Returns a view of the reducer's memory, with the parameter's strides if these leave no hole, like a gradient."""
        size = parameter.numel() * parameter.element_size()
        if size == 0:
            return torch.empty_like(parameter, requires_grad=False)
        flat = self._memory.bytes_at(address, size, self._handle).view(parameter.dtype)
        strides = torch.empty_like(parameter, device="meta").stride()
        return flat.as_strided(parameter.shape, strides)

    def can_read(self, index, tensor):
        """Returns true if the engine can copy this gradient without a conversion, and has finished with it when marking
        returns."""
        return (self._memory.copies_at_once and tensor.stride() == self.views[index].stride() and not tensor.is_conj()
                and not tensor.is_neg())

    def place(self, index, gradient):
        """Returns the tensor to mark as ready: the gradient if the engine can read it, otherwise a copy. None counts as zeros."""
        view = self.views[index]
        if gradient is not None and (gradient is view or self.can_read(index, gradient)):
            return gradient
        with torch.no_grad():
            if self.is_offloaded:
                view = self._dense(index, gradient)
                self._kept.append(view)
            elif gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        return view

    def _dense(self, index, gradient):
        """Returns the gradient with the strides of the parameter's memory."""
        if gradient is None:
            return torch.zeros_like(self._parameters[index], requires_grad=False)
        dense = torch.empty_like(self._parameters[index], requires_grad=False)
        is_plain = gradient.stride() == dense.stride() and not gradient.is_conj() and not gradient.is_neg()
        return gradient if is_plain else dense.copy_(gradient)

    def is_of(self, index, tensor):
        """Returns true if the tensor can be the gradient of this parameter."""
        return self._forms[index] == (tensor.numel(), tensor.dtype)

    def forms(self):
        """The numbers of elements and the types of all parameters, for a checkpoint."""
        return [f"{count} {dtype}" for count, dtype in self._forms]

    def zeros_from(self, index):
        """Zero gradients for this and all later parameters."""
        return [torch.zeros(count, dtype=dtype) for count, dtype in self._forms[index:]]

    def begin(self):
        self.check(self._library.reducer_begin(self._address, _native.STEP_REDUCE))

    def ready(self, index, tensor):
        self._memory.enter()
        status = self._library.reducer_ready(self._address, index, tensor.data_ptr(), self.counts[index])
        if status != OK:
            self.check(status)

    def finish(self):
        """Waits for the averages. Later work of the current stream sees them. Returns struct shoal_step_result."""
        result = _native.StepResult()
        self._memory.enter()
        self.check(self._library.reducer_finish(self._address, ctypes.byref(result)))
        self._memory.leave()
        self._kept.clear()
        return result

    def load_parameters(self):
        """With an optimizer: takes over what the program has written to the parameters."""
        self._memory.enter()
        self.check(self._library.reducer_load_parameters(self._address))

    def join(self):
        """Takes part in a step of the other ranks. Returns false if there is none because all have joined."""
        more = ctypes.c_int()
        self._memory.enter()
        self.check(self._library.reducer_join(self._address, ctypes.byref(more), None))
        self._memory.leave()
        return bool(more.value)

    def is_used(self, index):
        return bool(self._library.reducer_is_used(self._address, index))

    def order(self):
        """Returns the order in which gradients became ready."""
        numbers = (ctypes.c_uint32 * self.count)()
        self.check(self._library.reducer_order(self._address, numbers))
        return numbers

    def compare(self, parameters):
        """Compares the parameters of all ranks; all call it between steps. Raises an error if the values of a parameter
        differ."""
        self.check(self._compare(parameters))

    def difference(self, parameters, when):
        """Like compare(), but returns the text of that error, or None. when: replaces the reducer's count of its own steps."""
        status = self._compare(parameters)
        if status == OK:
            return None
        text, is_of_comparison = re.subn(r"(is not the same on all ranks) after step \d+", rf"\1 {when}", self._text_of(status))
        if not is_of_comparison:  # the reducer has failed
            self.check(status)
        return text

    def _compare(self, parameters):
        tensors = [parameter.detach().to("cpu").contiguous() for parameter in parameters]
        hashes = (ctypes.c_uint64 * self.count)(*(self._library.bytes_hash(tensor.data_ptr(), tensor.numel() * tensor.element_size())
                                                  for tensor in tensors))
        return self._library.reducer_compare(self._address, hashes)

    def fail(self, status, text):
        """Fails this reducer on every rank."""
        self._library.reducer_fail(self._address, status, text.encode())

    def set_batch(self, samples, scale):
        """Says that this rank's gradients of the step are means over that many samples, multiplied by 1 / scale."""
        self.check(self._library.reducer_set_batch(self._address, samples, scale))

    def noise(self):
        """The noise scale after the last step, as a Noise."""
        noise = _native.Noise()
        self.check(self._library.reducer_noise(self._address, ctypes.byref(noise)))
        return _scaling.noise_of(noise)

    def noise_average(self):
        average = _native.NoiseAverage()
        self.check(self._library.reducer_noise_average(self._address, ctypes.byref(average)))
        return average

    def take_noise_average(self, average):
        self.check(self._library.reducer_set_noise_average(self._address, ctypes.byref(average)))

    def stats(self):
        """struct shoal_step_stats of the last step, or None."""
        stats = _native.StepStats()
        return stats if self._library.reducer_stats(self._address, ctypes.byref(stats)) == OK else None

    def residuals(self):
        """Returns what int8 quantization has cut off on this rank, as bytes. Call it between steps."""
        state = torch.empty(self._library.reducer_residual_bytes(self._address), dtype=torch.uint8)
        self.check(self._library.reducer_export_residuals(self._address, state.data_ptr(), state.numel()))
        return state

    def take_residuals(self, state):
        """Restores residuals(). All ranks call it between steps, each with its own state."""
        state = state.detach().to("cpu", torch.uint8).contiguous()
        self.check(self._library.reducer_import_residuals(self._address, state.data_ptr(), state.numel()))

    def check(self, status):
        if status != OK:
            raise BackendError(self._text_of(status))

    def _text_of(self, status):
        failure, error = _native.Failure(), None
        if self._address and self._library.reducer_failure(self._address, ctypes.byref(failure)) == OK and failure.text:
            error = failure.text.decode(errors="replace")
        return f"shoal: {timed_out(status)}{error or _native.error_of(status, self._context)}"
