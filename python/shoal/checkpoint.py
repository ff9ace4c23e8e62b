"""Sharded checkpoints without ranks: lists, reads and converts them. It needs no framework; include/shoal/checkpoints.h and
docs/checkpoints.md explain what a checkpoint is.

    import shoal.checkpoint
    shoal.checkpoint.to_safetensors("checkpoints", "model.safetensors")    # one plain file of the latest checkpoint
    shoal.checkpoint.from_safetensors("model.safetensors", "checkpoints")  # and back: any number of ranks load it

The command `python -m shoal checkpoint` does the same. to_torch() and from_torch() need PyTorch, the others NumPy."""
from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import json
import math
import mmap
import os
import pathlib
import pickle
import struct

from . import _native

STATES = {"master": _native.STATE_MASTER, "first": _native.STATE_FIRST, "second": _native.STATE_SECOND}
RULES = {_native.SGD: "SGD", _native.ADAM: "Adam", _native.ADAMW: "AdamW", _native.ADAGRAD: "Adagrad", _native.LION: "Lion",
         _native.LAMB: "LAMB"}
TORCH_STATES = {"SGD": ["momentum_buffer"], "Adam": ["exp_avg", "exp_avg_sq"], "AdamW": ["exp_avg", "exp_avg_sq"],
                "Adagrad": ["sum"]}  # torch.optim's names of first and second
# Types of parameters, by their names in safetensors: the library's type, and how many of its elements make one.
TYPES = {"F32": (_native.FLOAT32, 1), "F64": (_native.FLOAT64, 1), "BF16": (_native.BFLOAT16, 1), "F16": (_native.FLOAT16, 1),
         "C64": (_native.FLOAT32, 2)}
NAMES = {number: name for name, (number, each) in TYPES.items() if each == 1}
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # how names of a module's buffers usually end
_PIECE = 1 << 22  # elements that verify() reads at a time
_ERROR = 512
_MAGIC = b"shoalpy1"  # the program's own bytes in a checkpoint of Python begin with it


@dataclasses.dataclass
class Parameter:
    """One parameter of a checkpoint. A checkpoint that a program in C has saved knows no shapes: there they have one
    dimension."""
    name: str
    type: str  # its name in safetensors, such as "BF16"
    shape: list[int]
    steps: int  # how often it was stepped
    states: int  # that it has besides its master
    order: list[int] | None = None  # dimensions by stride, if not row by row in memory
    number: int = 0  # in the optimizer


def steps(folder) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, in ascending order."""
    count, error = ctypes.c_size_t(), ctypes.create_string_buffer(_ERROR)
    numbers = (ctypes.c_uint64 * 0)()
    while True:
        _check(_native.load().checkpoint_steps(os.fsencode(folder), numbers, len(numbers), ctypes.byref(count), error, _ERROR),
               error)
        if count.value <= len(numbers):
            return list(numbers[:count.value])
        numbers = (ctypes.c_uint64 * count.value)()


class Checkpoint:
    """An open checkpoint: `with Checkpoint(folder) as checkpoint:`. step: None for the latest. Its attributes are step,
    saved_at (seconds since 1970), optimizer (a name, or None for values only), shards, file_bytes and parameters."""

    def __init__(self, folder, step=None):
        self._library, self._address = _native.load(), ctypes.c_void_p()
        error, about = ctypes.create_string_buffer(_ERROR), _native.CheckpointAbout()
        _check(self._library.checkpoint_open(os.fsencode(folder), _native.CHECKPOINT_LATEST if step is None else step,
                                             ctypes.byref(self._address), error, _ERROR), error)
        _check(self._library.checkpoint_describe(self._address, ctypes.byref(about)))
        self.step, self.saved_at, self.optimizer = about.step, about.saved_at, RULES.get(about.rule)
        self.shards, self.file_bytes, self._extra_bytes = about.shards, about.file_bytes, about.extra_bytes
        try:
            self.header = unpack(self.extra())[0]
            self.parameters = [self._parameter(number) for number in range(about.parameters)]
        except BaseException:
            self.close()
            raise

    def _parameter(self, number):
        entry = _native.CheckpointParameter()
        _check(self._library.checkpoint_entry(self._address, number, ctypes.byref(entry)))
        name = entry.name.decode(errors="replace") or str(number)
        known = {"name": name, "type": NAMES[entry.type], "shape": [entry.count]}
        known.update(self.header["parameters"][number] if self.header else {"number": number})
        return Parameter(steps=entry.steps, states=entry.states, **known)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self._library.checkpoint_close(self._address)
        self._address = None

    def extra(self) -> bytes:
        """Returns the bytes that the program has saved with the checkpoint; those of Python begin with a header."""
        memory, error = ctypes.create_string_buffer(self._extra_bytes), ctypes.create_string_buffer(_ERROR)
        _check(self._library.checkpoint_extra(self._address, memory, error, _ERROR), error)
        return memory.raw

    def read(self, number, state="master", begin=0, count=None) -> array.array:
        """Reads elements of a parameter's state ("master", "first", "second"), as float64 if the parameter's type is, else
        float32, in the order of the parameter's memory. The master is the exact value of the parameter."""
        entry = self.parameters[number]
        whole = math.prod(entry.shape) * TYPES[entry.type][1]
        count = whole - begin if count is None else count
        values = array.array("d" if entry.type == "F64" else "f", bytes(count * (8 if entry.type == "F64" else 4)))
        error = ctypes.create_string_buffer(_ERROR)
        _check(self._library.checkpoint_read(self._address, number, STATES[state], begin, count, values.buffer_info()[0], error,
                                             _ERROR), error)
        return values

    def verify(self):
        """Reads all values and compares their checksums. Raises an error that names the first file that was changed."""
        for number, entry in enumerate(self.parameters):
            count = math.prod(entry.shape) * TYPES[entry.type][1]
            for state in list(STATES)[:1 + entry.states]:
                for begin in range(0, count, _PIECE):
                    self.read(number, state, begin, min(_PIECE, count - begin))


def _check(status, error=None):
    if status != _native.OK:
        text = error.value.decode(errors="replace") if error else ""
        raise _native.ShoalError(status, text or _native.load().status_text(status).decode())


# ---- The program's own bytes ---------------------------------------------------------------------------------------------


def pack(header, data=b"") -> bytes:
    """Joins a header of JSON, and bytes to whose ranges it refers."""
    text = json.dumps(header).encode()
    return _MAGIC + struct.pack("<Q", len(text)) + text + bytes(data)


def unpack(extra):
    """Returns header and bytes that pack() has joined, or (None, extra) if these are not bytes of pack()."""
    if not extra.startswith(_MAGIC):
        return None, extra
    (length,) = struct.unpack_from("<Q", extra, len(_MAGIC))
    at = len(_MAGIC) + 8
    return json.loads(extra[at:at + length]), extra[at + length:]


# ---- Arrays --------------------------------------------------------------------------------------------------------------


def _numpy():
    try:
        import numpy
    except ImportError:
        raise ImportError("shoal.checkpoint converts values with NumPy: pip install numpy") from None
    return numpy


def _rounded(values, kind):
    """Rounds float32 to a parameter's type, to the nearest, as the library does. Complex numbers are pairs already."""
    numpy = _numpy()
    if kind == "F16":
        with numpy.errstate(over="ignore"):
            return values.astype(numpy.float16)
    if kind != "BF16":
        return values
    bits = values.view(numpy.uint32)
    rounded = (bits + numpy.uint32(0x7fff) + (bits >> 16 & 1)) >> 16
    return numpy.where(numpy.isnan(values), bits >> 16 | 0x40, rounded).astype(numpy.uint16)


def _widened(raw, kind):
    """Returns the float32 or float64 values of a tensor's bytes in a safetensors file."""
    numpy = _numpy()
    if kind == "BF16":
        return (numpy.frombuffer(raw, numpy.uint16).astype(numpy.uint32) << 16).view(numpy.float32)
    if kind == "F16":
        return numpy.frombuffer(raw, numpy.float16).astype(numpy.float32)
    return numpy.frombuffer(raw, numpy.float64 if kind == "F64" else numpy.float32)


def order_of(tensor):
    """Returns the dimensions of a torch tensor by stride, as Parameter.order has them."""
    import torch
    strides = torch.empty_like(tensor, device="meta").stride()
    rows = [dimension for dimension, size in enumerate(tensor.shape) if size != 1]
    order = sorted(rows, key=lambda dimension: -strides[dimension])
    return None if order == rows else order


def memory_dimensions(shape, order):
    """Returns all dimensions in the order of memory. `order` leaves out those of size 1, which may be anywhere."""
    rest = [dimension for dimension, size in enumerate(shape) if size == 1]
    return rest + (order or [dimension for dimension, size in enumerate(shape) if size != 1])


def _row_by_row(values, entry):
    numpy = _numpy()
    if not entry.order:
        return values
    dimensions, each = memory_dimensions(entry.shape, entry.order), TYPES[entry.type][1]
    ordered = values.reshape([entry.shape[dimension] for dimension in dimensions] + [each])
    return numpy.ascontiguousarray(ordered.transpose([*numpy.argsort(dimensions), len(dimensions)])).reshape(-1)


def _as_in_memory(values, entry):
    """The reverse of _row_by_row()."""
    numpy = _numpy()
    if not entry.order:
        return values
    dimensions, each = memory_dimensions(entry.shape, entry.order), TYPES[entry.type][1]
    rows = values.reshape(entry.shape + [each])
    return numpy.ascontiguousarray(rows.transpose([*dimensions, len(dimensions)])).reshape(-1)


# ---- One plain file: safetensors -----------------------------------------------------------------------------------------


def to_safetensors(folder, path, step=None) -> int:
    """Writes the values of a checkpoint as one safetensors file: parameters in their own types, and the module's buffers.
    Returns the step. Needs memory for the largest parameter only."""
    with Checkpoint(folder, step) as checkpoint:
        numpy = _numpy()
        header, data = unpack(checkpoint.extra())
        buffers = header["buffers"] if header else {}
        aliases = header["aliases"] if header else {}
        numbers = {entry.name: number for number, entry in enumerate(checkpoint.parameters)}
        numbers.update((alias, numbers[name]) for alias, name in aliases.items())
        tensors = [(name, checkpoint.parameters[number].type, checkpoint.parameters[number].shape)
                   for name, number in numbers.items()]
        tensors += [(name, each["type"], each["shape"]) for name, each in buffers.items()]
        notes = {"format": "pt", "step": str(checkpoint.step), "shoal.buffers": json.dumps(list(buffers)),
                 "shoal.aliases": json.dumps(aliases),
                 "shoal.orders": json.dumps({entry.name: entry.order for entry in checkpoint.parameters if entry.order})}
        with _Replaced(path) as file:
            file.write(_safetensors_header(tensors, notes))
            for number in numbers.values():
                entry = checkpoint.parameters[number]
                values = numpy.frombuffer(checkpoint.read(number), numpy.float64 if entry.type == "F64" else numpy.float32)
                file.write(_rounded(_row_by_row(values, entry), entry.type).tobytes())
            for each in buffers.values():
                file.write(data[each["begin"]:each["end"]])
        return checkpoint.step


_BYTES = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "I8": 1, "U8": 1,
          "BOOL": 1}


def _safetensors_header(tensors, notes):
    table, at = {"__metadata__": notes}, 0
    for name, kind, shape in tensors:
        end = at + math.prod(shape) * _BYTES[kind]
        table[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class _Replaced:
    """A file that is written under a temporary name, and gets its own when all of it is on the disk."""

    def __init__(self, path):
        self._path, self._temporary = pathlib.Path(path), pathlib.Path(f"{path}.partial")

    def __enter__(self):
        self._file = open(self._temporary, "wb")
        return self._file

    def __exit__(self, kind, *_):
        if kind is None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if kind is None:
            os.replace(self._temporary, self._path)
        else:
            self._temporary.unlink()


def _read_safetensors(path):
    """Returns notes, the table of tensors by their places, and the bytes of all."""
    with open(path, "rb") as file:
        begin = file.read(8)
        length = struct.unpack("<Q", begin)[0] if len(begin) == 8 else 0
        text = file.read(length) if 0 < length < os.fstat(file.fileno()).st_size else b""
        try:
            table = json.loads(text)
            notes = table.pop("__metadata__", {})
            places = sorted(table.items(), key=lambda each: each[1]["data_offsets"])
        except (ValueError, AttributeError, KeyError, TypeError):
            raise ValueError(f"{path} is not a safetensors file, or was cut short") from None
        size = os.fstat(file.fileno()).st_size - 8 - length
        if size == 0:
            return notes, places, memoryview(b"")
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))[8 + length:]
    for name, each in places:
        first, end = each["data_offsets"]
        if not 0 <= first <= end <= size or each["dtype"] not in _BYTES or end - first != math.prod(each["shape"]) * _BYTES[each["dtype"]]:
            raise ValueError(f"{path}: tensor {name} does not fit the file, which may have been cut short, or is of {each['dtype']}")
    return notes, places, data


def from_safetensors(path, folder, step=0, buffers=BUFFERS) -> None:
    """Writes a checkpoint of values from a safetensors file; any number of ranks loads it, and their optimizers begin anew.
    Tensors of integers become buffers of the module, and so do those whose names end with one of `buffers`."""
    notes, places, data = _read_safetensors(path)
    named = set(json.loads(notes.get("shoal.buffers", "[]")))
    aliases, orders = (json.loads(notes.get(f"shoal.{what}", "{}")) for what in ("aliases", "orders"))
    entries, values, others, kept = [], [], {}, bytearray()
    for name, each in places:
        raw = data[slice(*each["data_offsets"])]
        if name in aliases:
            continue
        if name in named or each["dtype"] not in TYPES or name.rsplit(".", 1)[-1] in buffers:
            others[name] = {"type": each["dtype"], "shape": each["shape"], "begin": len(kept), "end": len(kept) + len(raw)}
            kept += raw
            continue
        entries.append(Parameter(name, each["dtype"], each["shape"], 0, 0, orders.get(name), len(entries)))
        values.append([_as_in_memory(_widened(raw, each["dtype"]), entries[-1])])
    _write(folder, step, -1, entries, values, header_of(entries, None, others, aliases), kept)


def header_of(entries, optimizer, buffers, aliases):
    """The header of a checkpoint's own bytes. buffers: for each name its type, shape, and range in the bytes that follow."""
    parameters = [{"name": each.name, "type": each.type, "shape": list(each.shape), "number": each.number,
                   **({"order": each.order} if each.order else {})} for each in entries]
    return {"parameters": parameters, "optimizer": optimizer, "buffers": buffers, "aliases": aliases}


def _write(folder, step, rule, entries, values, header, data):
    """values: for each parameter, NumPy arrays of its master and its states."""
    numpy = _numpy()
    kept = [[numpy.ascontiguousarray(each) for each in states] for states in values]
    table = (_native.CheckpointValues * len(entries))()
    for row, entry, states in zip(table, entries, kept):
        row.struct_bytes = ctypes.sizeof(row)
        kind, each = TYPES[entry.type]
        row.parameter = _native.Parameter(count=math.prod(entry.shape) * each, type=kind, name=entry.name.encode())
        row.steps = entry.steps
        for number, state in enumerate(states):
            row.states[number] = state.ctypes.data
    extra, error = pack(header, data), ctypes.create_string_buffer(_ERROR)
    options = _native.SaveOptions(step=step, extra=ctypes.cast(ctypes.c_char_p(extra), ctypes.c_void_p), extra_bytes=len(extra))
    _check(_native.load().checkpoint_write(os.fsencode(folder), ctypes.byref(options), rule, table, len(entries), error, _ERROR),
           error)


# ---- One plain file: torch.save ------------------------------------------------------------------------------------------


def _torch_types():
    import torch
    return {"F32": torch.float32, "F64": torch.float64, "BF16": torch.bfloat16, "F16": torch.float16, "C64": torch.complex64,
            "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def _torch_tensor(checkpoint, number, state):
    """A state as a tensor of the parameter's shape and memory format, in float32 or float64."""
    import torch
    entry, values = checkpoint.parameters[number], checkpoint.read(number, state)
    flat = torch.frombuffer(values, dtype=torch.float64 if entry.type == "F64" else torch.float32) if len(values) else torch.empty(0)
    if entry.type == "C64":
        flat = torch.view_as_complex(flat.view(-1, 2))
    dimensions = memory_dimensions(entry.shape, entry.order)
    ordered = flat.view([entry.shape[dimension] for dimension in dimensions])
    return ordered.permute([dimensions.index(dimension) for dimension in range(len(dimensions))])


def to_torch(folder, path, step=None) -> int:
    """Writes a checkpoint as one file of torch.save: a dict of "model" and "optimizer", as their state_dict() returns them,
    "step", and "extra". torch's own optimizers load it. Returns the step."""
    import torch
    with Checkpoint(folder, step) as checkpoint, _Replaced(path) as file:
        header, data = unpack(checkpoint.extra())
        torch.save(whole_of(checkpoint, header, data), file)
        return checkpoint.step


def whole_of(checkpoint, header, data) -> dict:
    """The dict that to_torch() writes."""
    types, model, states = _torch_types(), collections.OrderedDict(), {}
    own = own_of(header, data)
    names = TORCH_STATES.get(checkpoint.optimizer, [])
    for number, entry in enumerate(checkpoint.parameters):
        master = _torch_tensor(checkpoint, number, "master")
        model[entry.name] = master.to(types[entry.type])
        if entry.steps == 0:
            continue
        state = {name: _torch_tensor(checkpoint, number, key) for name, key in zip(names[:entry.states], ("first", "second"))}
        if checkpoint.optimizer != "SGD":
            state["step"] = _scalar(float(entry.steps))
        if entry.type in ("BF16", "F16"):
            state["master"] = master
        states[entry.number] = state
    for alias, name in (header["aliases"] if header else {}).items():
        model[alias] = model[name]
    model.update(buffers_of(header, data))
    groups = own.get("groups") or [{"params": sorted(entry.number for entry in checkpoint.parameters)}]
    return {"model": model, "optimizer": {"state": states, "param_groups": groups}, "step": checkpoint.step,
            "extra": own.get("extra"), "names": [entry.name for entry in sorted(checkpoint.parameters, key=lambda each: each.number)]}


def _scalar(value):
    import torch
    return torch.tensor(value)


def own_of(header, data):
    """What PyTorch has saved in a checkpoint's own bytes: settings of groups, and the program's `extra`."""
    import io

    import torch
    if not header or "torch" not in header:
        return {}
    return torch.load(io.BytesIO(data[slice(*header["torch"])]), weights_only=True)


def buffers_of(header, data):
    """The module's buffers, as tensors by name."""
    import torch
    types = _torch_types()
    found = {}
    for name, each in (header["buffers"] if header else {}).items():
        raw = bytearray(data[each["begin"]:each["end"]])
        flat = torch.frombuffer(raw, dtype=types[each["type"]]) if raw else torch.empty(0, dtype=types[each["type"]])
        found[name] = flat.view(each["shape"])
    return found


def from_torch(path, folder, step=None, buffers=BUFFERS) -> int:
    """Writes a checkpoint from a file of torch.save: one of to_torch(), or any dict of "model" and "optimizer" whose optimizer
    has the model's parameters in their order. Returns the step."""
    import torch
    try:
        whole = torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path} is not a file of torch.save, or was cut short: {error}") from None
    if not isinstance(whole, dict) or not isinstance(whole.get("model"), dict):
        raise ValueError(f"{path} is not a dict of \"model\" (a state_dict) and \"optimizer\": save one with torch.save")
    step = whole.get("step", 0) if step is None else step
    optimizer = whole.get("optimizer") or {"state": {}, "param_groups": []}
    names = {torch_type: name for name, torch_type in _torch_types().items()}
    model, data, others, aliases, own = whole["model"], bytearray(), {}, {}, []
    for name, tensor in model.items():
        if tensor.dtype not in names:
            raise ValueError(f"{path}: {name} is of {tensor.dtype}, which a checkpoint cannot hold")
        twin = next((other for other in own if model[other].data_ptr() == tensor.data_ptr() and tensor.numel()
                     and model[other].shape == tensor.shape), None)
        if twin:
            aliases[name] = twin
        elif names[tensor.dtype] in TYPES and name.rsplit(".", 1)[-1] not in buffers and name in whole.get("names", model):
            own.append(name)
        else:
            raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
            others[name] = {"type": names[tensor.dtype], "shape": list(tensor.shape), "begin": len(data), "end": len(data) + len(raw)}
            data += raw
    own = whole.get("names", own)
    rule = _rule_of(optimizer["state"])
    entries, values = [], []
    for number, name in enumerate(own):
        entry, states = _entry_of(path, name, number, model[name], optimizer["state"].get(number, {}), rule, names)
        entries.append(entry)
        values.append(states)
    header = header_of(entries, RULES.get(rule), others, aliases)
    begin = len(data)
    data += torch_bytes({"groups": optimizer["param_groups"], "extra": whole.get("extra")})
    header["torch"] = [begin, len(data)]
    _write(folder, step, rule, entries, values, header, data)
    return step


def torch_bytes(value):
    import io

    import torch
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _rule_of(states):
    keys = {key for state in states.values() for key, value in state.items() if value is not None}
    return (_native.ADAMW if "exp_avg_sq" in keys else _native.SGD if "momentum_buffer" in keys
            else _native.ADAGRAD if "sum" in keys else -1)


def _entry_of(path, name, number, tensor, state, rule, names):
    """A parameter, and NumPy arrays of its master and states. States that it lacks are zeros."""
    import torch
    kind = names[tensor.dtype]
    wide = torch.float64 if kind == "F64" else torch.float32
    wanted = TORCH_STATES[RULES[rule]] if rule > 0 else []
    entry = Parameter(name, kind, list(tensor.shape), _steps_of(state), len(wanted), order_of(tensor), number)
    found = [state.get("master", tensor)] + [state.get(key) for key in wanted]
    values = []
    for each in found:
        each = torch.zeros_like(tensor) if each is None else each
        if each.shape != tensor.shape:
            raise ValueError(f"{path}: a state of parameter {number} of the optimizer has the shape {list(each.shape)}, and {name}, which "
                             f"has this number in the model, {list(tensor.shape)}: put the names of all parameters, in the "
                             "optimizer's order, into the file as a list \"names\"")
        each = each.permute(memory_dimensions(tensor.shape, entry.order))
        each = torch.view_as_real(each.contiguous()) if each.is_complex() else each
        values.append(each.to(wide).contiguous().reshape(-1).numpy())
    return entry, values


def _steps_of(state):
    """How often a parameter was stepped. torch's SGD does not count: only its first step, without a momentum, differs."""
    return int(state.get("step", 2 if state else 0))
