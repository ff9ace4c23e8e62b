"""Sharded checkpoints of a module whose optimizer an engine runs (Translation of _optimizer.py). The engine saves and loads
parameters and states (include/shoal/checkpoints.h). Its bytes of the program's own hold what else a module needs: shapes, buffers, the settings of
the optimizer's groups, and what the program adds."""
from __future__ import annotations

import collections
import ctypes

import torch
import torch.distributed as dist

from .. import _native, checkpoint
from . import _optimizer

Loaded = collections.namedtuple("Loaded", "step extra")
Loaded.__doc__ = "What load_checkpoint() has loaded: the step, and the program's own values."

_KINDS = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.complex64: "C64"}
_BUFFER_KINDS = {**_KINDS, torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
                 torch.bool: "BOOL"}


# ---- What a checkpoint knows of a module ---------------------------------------------------------------------------------


def _entries(engine):
    return [checkpoint.Parameter(name, _KINDS.get(form.dtype), list(form.shape), 0, 0, checkpoint.order_of(form), number)
            for name, form, number in zip(engine.names, engine.forms, engine.numbers)]


def _aliases(module, entries):
    """Other names of tied parameters."""
    own, names = {}, {entry.name for entry in entries}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in names:
            own[id(parameter)] = name
    return {name: own[id(parameter)] for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in own and own[id(parameter)] != name}


def _buffers(module):
    """The buffers that state_dict() has, by name."""
    kept = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}


def _pack(module, engine, extra):
    """The bytes for rank 0 to save."""
    data, buffers, entries = bytearray(), {}, _entries(engine)
    for entry in entries:
        if entry.type is None:
            raise ValueError(f"shoal: parameter {entry.name} is of complex128, which checkpoints cannot hold: use complex64")
    for name, buffer in _buffers(module).items():
        if buffer.dtype not in _BUFFER_KINDS:
            raise ValueError(f"shoal: buffer {name} is of {buffer.dtype}, which checkpoints cannot hold: register it with "
                             "persistent=False, and save it in extra=")
        raw = bytes(_bytes_of(buffer))
        buffers[name] = {"type": _BUFFER_KINDS[buffer.dtype], "shape": list(buffer.shape), "begin": len(data), "end": len(data) + len(raw)}
        data += raw
    optimizer = engine.optimizer
    header = checkpoint.header_of(entries, _optimizer.base_of(optimizer), buffers, _aliases(module, entries))
    begin = len(data)
    try:
        data += checkpoint.torch_bytes({"groups": torch.optim.Optimizer.state_dict(optimizer)["param_groups"], "extra": extra})
        header["torch"] = [begin, len(data)]
        checkpoint.own_of(header, bytes(data))
    except Exception as error:
        raise TypeError("shoal: extra may hold tensors, numbers, strings, and lists and dicts of these, as "
                        f"torch.load(weights_only=True) reads them: {error}") from None
    packed = checkpoint.pack(header, data)
    if len(packed) > _native.CHECKPOINT_EXTRA_MAX:
        raise ValueError(f"shoal: the module's buffers and extra have {len(packed)} bytes; a checkpoint holds at most "
                         f"{_native.CHECKPOINT_EXTRA_MAX} of them: save large values yourself")
    return packed


def _bytes_of(tensor):
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else b""


# ---- Agreement -----------------------------------------------------------------------------------------------------------


def _from_first(group, function):
    """Calls the function on rank 0. Returns its result on all ranks, or raises its error on all, as a ValueError, TypeError or
    RuntimeError: classes derived from these may need more than a text."""
    answer, cause = [None, None], None
    if group.rank() == 0:
        try:
            answer[0] = function()
        except Exception as error:  # whatever it is, the other ranks wait for it
            kind = next((each for each in (ValueError, TypeError) if isinstance(error, each)), RuntimeError)
            answer[1], cause = (kind, str(error)), error
    dist.broadcast_object_list(answer, dist.get_global_rank(group, 0), group=group)
    if answer[1]:
        kind, text = answer[1]
        raise kind(text if text.startswith("shoal: ") else f"shoal: {text}") from cause
    return answer[0]


# ---- Saving and loading --------------------------------------------------------------------------------------------------


def save(module, group, engine, folder, step, extra, keep):
    packed = b""

    def prepare():
        nonlocal packed
        packed = _pack(module, engine, extra)
    _from_first(group, prepare)
    options = _native.SaveOptions(step=step, extra=ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p), extra_bytes=len(packed), keep=keep)
    engine.save(folder, options)


def _read_header(folder, step):
    with checkpoint.Checkpoint(folder, step) as opened:
        return opened.step, opened.extra()


def load(module, group, engine, folder, step):
    step, packed = _from_first(group, lambda: _read_header(folder, step))
    header, data = checkpoint.unpack(packed)
    buffers = checkpoint.buffers_of(header, data)
    own = checkpoint.own_of(header, data)
    if header:
        _compare(header, _entries(engine))
        _compare_buffers(buffers, _buffers(module))
        _compare_groups(own.get("groups"), engine.optimizer)
    engine.load(folder, _native.LoadOptions(step=step))
    with torch.no_grad():
        for name, buffer in _buffers(module).items():
            if name in buffers:
                buffer.copy_(buffers[name])
    if own.get("groups"):
        torch.optim.Optimizer.load_state_dict(engine.optimizer, {"state": {}, "param_groups": own["groups"]})
    return Loaded(step, own.get("extra") if header else data or None)


def _compare(header, entries):
    """The engine compares names, types and numbers of elements."""
    saved = {each["name"]: each for each in header["parameters"]}
    for entry in entries:
        there = saved.get(entry.name)
        if there and there["shape"] != entry.shape:
            raise ValueError(f"shoal: the checkpoint is of another model: parameter {entry.name} has the shape {there['shape']} there, "
                             f"and {entry.shape} here")
        if there and there.get("order") != entry.order:
            raise ValueError(f"shoal: parameter {entry.name} has another memory format in the checkpoint: its dimensions by stride "
                             f"are {there.get('order') or 'in order'} there, and {entry.order or 'in order'} here: convert the "
                             "module, as with module.to(memory_format=...), before it is wrapped")


def _compare_buffers(saved, own):
    for name, buffer in own.items():
        if name in saved and list(saved[name].shape) != list(buffer.shape):
            raise ValueError(f"shoal: the checkpoint is of another model: buffer {name} has the shape {list(saved[name].shape)} there, and "
                             f"{list(buffer.shape)} here")


def _compare_groups(saved, optimizer):
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved and [len(group["params"]) for group in saved] != sizes:
        raise ValueError(f"shoal: the checkpoint is of another optimizer: its groups have {[len(group['params']) for group in saved]} "
                         f"parameters, and this one's {sizes}")
