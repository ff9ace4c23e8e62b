"""Shoal as a back-end of torch.distributed.

    import shoal.torch
    torch.distributed.init_process_group("shoal")            # or "cpu:shoal", "cuda:shoal", "cpu:shoal,cuda:nccl"

The import registers the back-end (an installed package registers itself when torch is imported). Two shims connect torch to the
C library: one in C++, which is compiled against the installed torch at first use and kept in a cache, and one in Python for
machines without a compiler. SHOAL_TORCH_SHIM=c++ or python selects one."""
from __future__ import annotations

import datetime
import importlib
import inspect
import os
import sys

import torch
import torch.distributed as dist

from .. import _input
from . import _communicator, _compile, _rendezvous

_SHIMS = ("auto", "c++", "python")
_chosen = None  # (name, module), set when the first group or tensor is made
_registered = set()


def register(name: str = "shoal") -> None:
    """Registers the back-end with torch.distributed under a name. It serves tensors of the CPU, of CUDA devices, and of the
    device that another package has added to torch, if it has by now. Registering again changes nothing."""
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
    """Like torch.empty, but in memory that the other ranks of the host map, so that collectives copy nothing. It is freed with
    the last tensor that views it. Such memory exists on the CPU only."""
    if device is not None and torch.device(device).type != "cpu":
        raise ValueError(f"shoal: shoal.torch.empty returns memory of the CPU, not of {device}: write torch.empty(..., "
                         f"device=\"{device}\") for a tensor there")
    shape = torch.Size(size[0] if len(size) == 1 and hasattr(size[0], "__len__") else size)
    plain = torch.empty((), dtype=dtype, device="cpu")
    memory = _shim(0)[1].empty(_communicator.context(), shape.numel() * plain.element_size())
    return memory.view(plain.dtype).view(shape)


def shim() -> str:
    """The name of the shim that this process uses: "c++" or "python"."""
    return _shim(0)[0]


def monitored_barrier(group: dist.ProcessGroup | None = None, timeout: datetime.timedelta | None = None,
                      wait_all_ranks: bool = False) -> None:
    """Like torch.distributed.monitored_barrier, which torch itself supports for Gloo only: a barrier whose error names the
    ranks that did not arrive in time."""
    group = group or dist.group.WORLD
    group.monitored_barrier(timeout or datetime.timedelta(seconds=300), wait_all_ranks)


def _backend_for(group, device_type: str) -> str:
    """Returns the name of the back-end for tensors of such devices in a process group."""
    backends = dict(pair.split(":", 1) for pair in str(dist.get_backend_config(group)).split(",") if ":" in pair)
    return backends.get(device_type, "none")


def _serves(group, device_type: str) -> bool:
    """Returns true if Shoal moves the tensors of such devices in a process group."""
    return _backend_for(group, device_type) in _registered


def _serves_cpu(group) -> bool:
    return _serves(group, "cpu")


def _shim(rank: int):
    global _chosen
    if _chosen is None:  # _compile.load has a lock: concurrent threads make the same choice
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
                print(f"shoal: {reason}: the Python shim serves instead; it is slower, and before torch 2.14 it cannot share a "
                      "group with another back-end", file=sys.stderr)
    from . import _python
    return "python", _python


def _create(options, pg_options=None):
    ranks = [int(rank) for rank in options.global_ranks_in_group]
    name = f"torch.{options.group_id or 'world'}"
    return join(options.store, options.group_rank, options.group_size, options.timeout, name, ranks)


def _create_plain(store, rank, size, timeout):
    return join(store, rank, size, timeout, "torch", [])


def _enter_devices():
    """Makes the driver's context of each device current on this thread, which GPUs need to sum among themselves. torch makes
    the context at the first use of a device; selecting a device that is already selected (0, on rank 0) makes none."""
    for name in ("cuda", *_added_device()):
        device = getattr(torch, name, None)
        if device and device.is_available():
            torch.empty(1, device=torch.device(name, device.current_device()))


def join(store, rank, size, timeout, name, ranks):
    """Makes a group of torch over Shoal. All its ranks call this, with one Store. `ranks` are their ranks in the job. Only
    torch calls it, and the C++ shim when a group is split."""
    # If this variable is 0, DDP allocates its buckets through the group, which saves a copy each way; torch's default is 1. It
    # applies to the whole process, and would also change NCCL's behavior.
    if not torch.cuda.is_available():
        os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    create = _shim(rank)[1].create
    if os.environ.get("SHOAL_GPU_PEER_BYTES", "0") not in ("", "0"):
        _enter_devices()
    context, comm = _communicator.join(store, rank, size, timeout, name)
    return create(context, comm, rank, size, timeout, name, ranks)


_LATER = {"DistributedDataParallel": "ddp", "ShardedDataParallel": "sharded", "Pipeline": "pipeline", "LocalSGD": "outer",
          "DiLoCo": "outer", "DistributedSampler": "sampler", "SyncBatchNorm": "norm", "convert_sync_batchnorm": "norm",
          "divide_batch": "sampler", "hooks": "hooks", "profile": "profiles", "Profile": "profiles", "ScaledLR": "scheduler",
          "Noise": "scheduler", "scale_moments": "scheduler", "tensor_parallel": "tensor", "tensor": "tensor"}


def __getattr__(name):
    """Imports these names at first use, because they need more of torch than a back-end does."""
    if name in _LATER:
        module = importlib.import_module(f".{_LATER[name]}", __name__)
        return module if name == _LATER[name] else getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


register()
_rendezvous.register()
_input.watch_torch()
