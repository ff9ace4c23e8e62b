"""Measures what `shoal advise` and `shoal sim step` need to know about a model: one process, a few steps.

    profile = shoal.torch.profile(model, (images,), loss=lambda output: F.cross_entropy(output, labels))
    profile.save("mine.json")

A step is timed from the beginning of the forward pass. A hook on each parameter notes when its gradient is complete:

    forward_ms |------------|
    backward_ms             |------g-----g--------g|      ready = share of the backward pass at g
"""
from __future__ import annotations

import dataclasses
import statistics
import time

import torch

from shoal._profiles import Gradient, Profile, gradients_of, short

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
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda tensor: tensor):
            run.step()
        timed = [run.step() for _ in range(steps)]
    forward, backward = (statistics.median(column) for column in zip(*((one.forward, one.backward) for one in timed)))
    shares = [statistics.median(one.ready[index] for one in timed) for index in range(len(parameters))]
    return Profile(name=short(name or type(model).__name__), batch=batch, forward_ms=1e3 * forward, backward_ms=1e3 * backward,
                   activation_bytes=kept.bytes / batch, batch_norms=_batch_norms_of(model), gradients=gradients_of([(key, each.numel()) for key, each in parameters], shares))


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


class _Kept:
    """Counts the memory that autograd keeps: each storage once, without parameters and buffers."""

    def __init__(self, model):
        self.bytes = 0
        self._seen = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}

    def pack(self, tensor):
        if tensor.layout == torch.strided and torch._C._current_graph_task_id() < 0:  # not in a repeated forward pass
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._seen:
                self._seen.add(storage.data_ptr())
                self.bytes += storage.nbytes() * (2 if tensor.is_floating_point() and tensor.element_size() == 2 else 1)
        return tensor


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
