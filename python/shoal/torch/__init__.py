"""Shoal as a back-end of torch.distributed.

    import shoal.torch
    torch.distributed.init_process_group("shoal")            # or "cpu:shoal", "cuda:shoal", "cpu:shoal,cuda:nccl"

The import registers the back-end (an installed package registers itself when torch is imported). Two shims over the same C
library can serve a process: one in C++, compiled against this very torch when it is first needed and kept, and one in Python
where no compiler is found. SHOAL_TORCH_SHIM=c++ or python chooses."""
from __future__ import annotations

import datetime
import importlib
import inspect
import os
import sys

import torch
import torch.distributed as dist

from . import _communicator, _compile, _rendezvous

_SHIMS = ("auto", "c++", "python")
_chosen = None  # (name, module), once a group or a tensor was asked for
_registered = set()


def register(name: str = "shoal") -> None:
    """Makes the back-end known to torch.distributed under a name, for tensors of the CPU, of CUDA devices, and of the device that
    another package has added to torch, if it has by now. Doing it again changes nothing."""
    if name in _registered:
        return
    if "extended_api" in inspect.signature(dist.Backend.register_backend).parameters:
        dist.Backend.register_backend(name, _create, extended_api=True, devices=["cpu", "cuda", *_added_device()])
    else:  # before torch 2.0
        dist.Backend.register_backend(name, _create_plain)
    _registered.add(name)


def _added_device() -> list:
    name = getattr(torch._C, "_get_privateuse1_backend_name", lambda: "privateuseone")()
    return [] if name == "privateuseone" else [name]


def empty(*size, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> torch.Tensor:
    """A tensor like torch.empty's in memory that the other ranks of the host map: collectives on it copy nothing. Freed with
    the last tensor that views it. There is such memory on the CPU alone."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"shoal: shoal.torch.empty gives memory of the CPU, not of {device}: write torch.empty(..., "
                         f"device=\"{device}\") for a tensor there")
    shape = torch.Size(size[0] if len(size) == 1 and hasattr(size[0], "__len__") else size)
    plain = torch.empty((), dtype=dtype, device="cpu")
    memory = _shim(0)[1].empty(_communicator.context(), shape.numel() * plain.element_size())
    return memory.view(plain.dtype).view(shape)


def shim() -> str:
    """Which shim serves this process: "c++" or "python"."""
    return _shim(0)[0]


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """torch.distributed.monitored_barrier, which torch itself refuses to all back-ends but Gloo: a barrier whose error names
    the ranks that did not come in time."""
    group = group or dist.group.WORLD
    group.monitored_barrier(timeout or datetime.timedelta(seconds=300), wait_all_ranks)


def _backend_for(group, device_type: str) -> str:
    """The name of the back-end that tensors of such devices have in a process group."""
    backends = dict(pair.split(":", 1) for pair in str(dist.get_backend_config(group)).split(",") if ":" in pair)
    return backends.get(device_type, "none")


def _serves(group, device_type: str) -> bool:
    """Whether Shoal moves the tensors of such devices in a process group."""
    return _backend_for(group, device_type) in _registered


def _serves_cpu(group) -> bool:
    return _serves(group, "cpu")


def _shim(rank: int):
    global _chosen
    if _chosen is None:  # _compile.load has a lock: threads that choose at once choose alike
        _chosen = _choose(rank)
    return _chosen


def _choose(rank: int):
    wanted = os.environ.get("SHOAL_TORCH_SHIM") or "auto"
    if wanted not in _SHIMS:
        raise ValueError(f"SHOAL_TORCH_SHIM is \"{wanted}\", but must be one of {', '.join(_SHIMS)}")
    if wanted != "python":
        try:
            return "c++", _compile.load()
        except _compile.Unavailable as reason:
            if wanted == "c++":
                raise
            if rank == 0:
                print(f"shoal: {reason}: the Python shim serves instead; it is slower, and before torch 2.14 it cannot sit beside "
                      "another back-end in one group", file=sys.stderr)
    from . import _python
    return "python", _python


def _create(options, pg_options=None):
    ranks = [int(rank) for rank in options.global_ranks_in_group]
    name = f"torch.{options.group_id or 'world'}"
    return join(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


def _create_plain(store, rank, size, timeout):
    return join(store, rank, size, timeout, "torch", [])


def _enter_devices():
    """GPUs sum among themselves where this thread has a context of the driver. torch makes it when a device is first used: to
    choose one that is chosen already (0, on rank 0) makes none."""
    for name in ("cuda", *_added_device()):
        device = getattr(torch, name, None)
        if device and device.is_available():
            torch.empty(1, device=torch.device(name, device.current_device()))


def join(store, rank, size, timeout, name, ranks):
    """A group of torch that Shoal serves; all its ranks call this, with one Store. ranks: theirs in the job. Not for users: torch
    calls it, and the shim in C++ where a group is split."""
    # DDP takes the memory of its buckets from the group where this is 0, which spares a copy each way; torch's default is 1. It
    # is of the process, and would change what NCCL does.
    if not torch.cuda.is_available():
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    create = _shim(rank)[1].create
    if os.environ.get("SHOAL_GPU_PEER_BYTES", "0") not in ("", "0"):
        _enter_devices()
    context, comm = _communicator.join(store, rank, size, timeout, name)
    return create(context, comm, rank, size, timeout, name, ranks)


_LATER = {"DistributedDataParallel": "ddp", "LocalSGD": "outer", "DiLoCo": "outer", "DistributedSampler": "sampler",
          "SyncBatchNorm": "norm", "convert_sync_batchnorm": "norm", "divide_batch": "sampler", "hooks": "hooks"}


def __getattr__(name):
    """These are imported where they are used, as they need more of torch than a back-end does."""
    if name in _LATER:
        module = importlib.import_module(f".{_LATER[name]}", __name__)
        return module if name == _LATER[name] else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
_rendezvous.register()
