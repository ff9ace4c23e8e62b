"""Measures what `shoal advise` and `shoal sim step` need to know about a model: one process, a few steps.

    profile = shoal.torch.profile(model, (images,), loss=lambda output: F.cross_entropy(output, labels))
    profile.save("mine.json")

A step is timed from the beginning of the forward pass. A hook on each parameter notes when its gradient is complete:

    forward_ms |------------|
    backward_ms             |------g-----g--------g|      ready = share of the backward pass at g
"""
from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time

import torch

from shoal._profiles import Profile, gradients_of, short


def profile(model: torch.nn.Module, example, loss=None, *, steps: int = 3, batch: int | None = None, name: str | None = None) -> Profile:
    """Runs `steps` training steps of a model without an optimizer, after one that is not timed, and returns its Profile.

    `example` is a batch: a tensor, a tuple or list of the model's arguments, or a dictionary of named ones. `loss` turns the
    model's output into a scalar; by default it is the output's `loss`, if it has one, or the mean of all floating-point tensors
    in it. `batch` is the number of samples; by default the length of the first tensor. The model keeps its mode, its gradients
    and its buffers, and the random numbers continue as if nothing had happened. Run it in one process, on the device and with
    the precision of the training."""
    if not (isinstance(steps, int) and steps >= 1):
        raise ValueError(f"shoal: steps is {steps!r}, but must be a number from 1 on")
    positional, named = _arguments_of(example)
    batch = batch if batch is not None else _length_of([*positional, *named.values()])
    if not (isinstance(batch, int) and batch >= 1):
        raise ValueError(f"shoal: batch is {batch!r}, but must be a number of samples from 1 on")
    parameters = [(key, each) for key, each in model.named_parameters() if each.requires_grad and each.numel()]
    if not parameters:
        raise ValueError("shoal: the model has no parameter that requires a gradient, so there is nothing to profile")
    device = parameters[0][1].device
    with _Untouched(model, device):
        kept = _Kept(model)
        run = _Run(model, positional, named, loss or _loss_of, parameters, _Clock(device))
        with kept.counted():
            run.step()
        timed = [run.step() for _ in range(steps)]
    forward, backward = (statistics.median(column) for column in zip(*((one.forward, one.backward) for one in timed)))
    shares = [statistics.median(one.ready[index] for one in timed) for index in range(len(parameters))]
    return Profile(name=short(name or type(model).__name__), batch=batch, forward_ms=1e3 * forward, backward_ms=1e3 * backward,
                   activation_bytes=kept.bytes / batch, activation_16_bytes=kept.bytes_16 / batch,
                   recomputed_bytes=kept.recomputed_bytes / batch, batch_norms=_batch_norms_of(model),
                   gradients=gradients_of([(key, each.numel()) for key, each in parameters], shares))


def _batch_norms_of(model):
    return sum(isinstance(module, torch.nn.modules.batchnorm._BatchNorm) for module in model.modules())


# ---- The example and the loss -----------------------------------------------------------------------------------------------


def _arguments_of(example):
    if isinstance(example, dict):
        return (), example
    return (tuple(example) if isinstance(example, (tuple, list)) else (example,)), {}


def _tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors_in(each)


def _length_of(arguments):
    for tensor in _tensors_in(arguments):
        if tensor.dim():
            return tensor.shape[0]
    raise ValueError("shoal: the example has no tensor whose length could be the number of samples: pass batch=")


def _loss_of(output):
    found = getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    means = [each.float().mean() for each in _tensors_in(output) if each.is_floating_point() and each.requires_grad]
    if not means:
        raise ValueError("shoal: the model's output has no floating-point tensor with a gradient: pass loss=, a function that makes a "
                         "scalar of it")
    return sum(means)


# ---- A step -----------------------------------------------------------------------------------------------------------------


class _Clock:
    """Moments on the device's own time: work on a GPU is still queued when a hook runs."""

    def __init__(self, device):
        self._is_gpu = device.type == "cuda"

    def now(self):
        if not self._is_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def finish(self):
        if self._is_gpu:
            torch.cuda.synchronize()

    def seconds(self, begin, end):
        return begin.elapsed_time(end) / 1e3 if self._is_gpu else end - begin


@dataclasses.dataclass
class _Timed:
    forward: float  # seconds
    backward: float
    ready: list  # of each parameter; 1.0 if the step did not reach it


class _Run:
    def __init__(self, model, positional, named, loss, parameters, clock):
        self._model, self._positional, self._named, self._loss = model, positional, named, loss
        self._parameters, self._clock = [each for _, each in parameters], clock

    def step(self):
        moments, clock = {}, self._clock
        for parameter in self._parameters:
            parameter.grad = None
        hooks = [_on_gradient(parameter, lambda index=index: moments.__setitem__(index, clock.now()))
                 for index, parameter in enumerate(self._parameters)]
        try:
            clock.finish()
            begin = clock.now()
            loss = self._loss(self._model(*self._positional, **self._named))
            if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
                raise ValueError("shoal: loss must return a tensor of one element")
            middle = clock.now()
            loss.backward()
            end = clock.now()
            clock.finish()
        finally:
            for hook in hooks:
                hook.remove()
        backward = clock.seconds(middle, end)
        shares = [clock.seconds(middle, moments[index]) / backward if index in moments else 1.0 for index in range(len(self._parameters))]
        return _Timed(clock.seconds(begin, middle), backward, [min(max(share, 0.0), 1.0) for share in shares])


def _on_gradient(parameter, then):
    if hasattr(parameter, "register_post_accumulate_grad_hook"):
        return parameter.register_post_accumulate_grad_hook(lambda _: then())
    return parameter.register_hook(lambda _: then())  # before torch 2.1: the gradient is there, and not yet added


# ---- What a forward pass keeps ----------------------------------------------------------------------------------------------


def _repeated(module):
    """Returns the outermost modules of which a list has several of one class: the layers of a transformer, the blocks of a ResNet.
    They are what programs recompute."""
    parts = list(module.children())
    is_list = isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) and len(parts) > 1 and len({type(part) for part in parts}) == 1
    if is_list and any(True for _ in parts[0].children()):
        return parts
    return [layer for part in parts for layer in _repeated(part)]


class _Kept:
    """Counts the memory that autograd keeps: each storage once, without parameters and buffers."""

    def __init__(self, model):
        self._layers = _repeated(model)
        self._own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
        self._outside, self._inputs, self._inside = {}, {}, []  # (bytes with 32 bits, bytes) by address; `_inside` has a dictionary for each layer
        self._held = []  # inputs of layers: while they live, no other storage has their address
        self._now = self._outside

    @property
    def bytes(self):
        """As if all floating-point values had 32 bits."""
        return sum(wide for wide, _ in self._all())

    @property
    def bytes_16(self):
        """As they are; 0 if no value has 16 bits."""
        return sum(real for _, real in self._all()) if any(wide != real for wide, real in self._all()) else 0

    @property
    def recomputed_bytes(self):
        """The inputs of layers, and the largest of what one layer keeps and what the rest of the model keeps: the backward pass
        releases the rest (the loss, the head) before it repeats the last layer. 0: no layer is repeated."""
        parts = [sum(wide for at, (wide, _) in part.items() if at not in self._inputs) for part in (self._outside, *self._inside)]
        return sum(wide for wide, _ in self._inputs.values()) + max(parts) if self._inside else 0

    def _all(self):
        return {at: bytes for part in (self._outside, *self._inside) for at, bytes in part.items()}.values()

    @contextlib.contextmanager
    def counted(self):
        hooks = [hook for layer in self._layers
                 for hook in (layer.register_forward_pre_hook(self._enter, with_kwargs=True), layer.register_forward_hook(self._leave))]
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            self._held.clear()
            for hook in hooks:
                hook.remove()

    def _enter(self, _module, positional, named):
        if torch._C._current_graph_task_id() < 0:
            for tensor in _tensors_in([positional, named]):
                self._held.append(tensor)
                self._count(tensor, self._inputs)
            self._now = {}
            self._inside.append(self._now)

    def _leave(self, *_):
        self._now = self._outside

    def _pack(self, tensor):
        if torch._C._current_graph_task_id() < 0:  # not in a repeated forward pass
            self._count(tensor, self._now)
        return tensor

    def _count(self, tensor, into):
        if tensor.layout == torch.strided and (at := tensor.untyped_storage().data_ptr()) not in self._own:
            real = tensor.untyped_storage().nbytes()
            into[at] = (real * (2 if tensor.is_floating_point() and tensor.element_size() == 2 else 1), real)


class _Untouched:
    """Gives gradients, buffers and random numbers back."""

    def __init__(self, model, device):
        self._model = model
        self._random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])

    def __enter__(self):
        self._gradients = [(each, each.grad) for each in self._model.parameters()]
        self._buffers = [(each, each.detach().clone()) for each in self._model.buffers()]
        self._random.__enter__()

    def __exit__(self, *what):
        self._random.__exit__(*what)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
