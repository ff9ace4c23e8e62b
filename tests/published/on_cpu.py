#!/usr/bin/env python3
"""on_cpu.py SCRIPT WORD ...: runs a script that was written for GPUs on this machine's CPUs, unchanged.

torch.cuda answers as if there were one GPU for each process, and the device "cuda" is the CPU. Packages that the scripts import
and that need a GPU or a download have stand-ins in the folder stand_ins. Names that torch has lost since are there."""
import functools
import os
import pathlib
import runpy
import sys
import types

import torch
import torch._dynamo  # noqa: F401: it keeps a table of functions of torch.cuda, which must be the real ones

STAND_INS = pathlib.Path(__file__).resolve().parent / "stand_ins"
REAL_DEVICE = torch.device


def is_cuda(value):
    return isinstance(value, str) and value.split(":")[0] == "cuda"


class DeviceType(type):
    """torch.device, which is the CPU if a script asks for a GPU."""

    def __call__(cls, kind="cuda", index=None):
        if isinstance(kind, int) or is_cuda(kind):
            return REAL_DEVICE("cpu")
        return REAL_DEVICE(kind) if index is None else REAL_DEVICE(kind, index)

    def __instancecheck__(cls, value):
        return isinstance(value, REAL_DEVICE)


class Device(metaclass=DeviceType):
    """Takes the place of torch.device, also when a device is pickled."""
    __module__, __qualname__ = "torch", "device"


def without_cuda(function):
    """Returns the function, which takes the CPU for "cuda"."""
    @functools.wraps(function)
    def changed(*words, **options):
        words = ["cpu" if is_cuda(each) else each for each in words]
        if is_cuda(options.get("device")):
            options["device"] = "cpu"
        return function(*words, **options)
    return changed


def pretend():
    nothing, zero = (lambda *_, **__: None), (lambda *_, **__: 0)
    for name in ("set_device", "manual_seed", "manual_seed_all", "empty_cache", "synchronize", "reset_peak_memory_stats",
                 "reset_max_memory_allocated", "set_per_process_memory_fraction"):
        setattr(torch.cuda, name, nothing)
    for name in ("current_device", "memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_cached",
                 "max_memory_cached"):
        setattr(torch.cuda, name, zero)
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = torch.get_rng_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = nothing
    torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
    torch.cuda.amp.autocast = lambda enabled=True, **_: torch.autocast("cpu", torch.bfloat16, enabled=enabled)
    for name in ("Int", "Long", "Float", "Half", "BFloat16"):
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    torch.device = Device
    for name in ("tensor", "zeros", "ones", "empty", "full", "rand", "randn", "arange", "zeros_like", "ones_like", "empty_like"):
        setattr(torch, name, without_cuda(getattr(torch, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    torch.Tensor.to, torch.nn.Module.to = without_cuda(torch.Tensor.to), without_cuda(torch.nn.Module.to)
    torch.Tensor.pin_memory = lambda self, *_, **__: self


def restore():
    """What torch had when the scripts were written."""
    sys.modules["torch._six"] = torch._six = types.ModuleType("torch._six")
    torch._six.inf, torch._six.string_classes = float("inf"), (str, bytes)
    name = "smdistributed.modelparallel.test"  # the vendor's own tests, of which a script imports two names that it does not use
    for each in (name, f"{name}.torch", f"{name}.torch.utils"):
        sys.modules[each] = types.ModuleType(each)
    sys.modules[f"{name}.torch.utils"].dump_model = sys.modules[f"{name}.torch.utils"].verify = None


def run(words, prepare=None):
    """Runs a script. prepare() is called before it, when the path already has the stand-ins."""
    script = os.path.abspath(words[0])
    sys.path[0] = str(STAND_INS)
    sys.path.insert(0, os.path.dirname(script))
    os.environ["PATH"] = f"{STAND_INS / 'bin'}:{os.environ['PATH']}"
    sys.argv = words
    if prepare is not None:
        prepare()
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    pretend()
    restore()
    run(sys.argv[1:])
