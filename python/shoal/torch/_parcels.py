"""Messages between stages: values of a model as one piece of memory and a note that describes it.

A value is a tensor, a number, a word, a size, or a tuple, list or dict of values. The note is JSON, which holds everything but
the elements of tensors; these follow each other in the memory, each aligned. A note that is too long for its message is stored
behind the tensors. So each message describes itself, and shapes may change from one to the next.

If a pipeline takes objects, values of other types are pickled, without the tensors in them, which are sent as others are: they
may have gradients."""
from __future__ import annotations

import ctypes
import functools
import io
import json
import pickle

import torch

from .. import _native

ALIGNMENT = 64
NOTE = _native.Parcel.note
WORDS = (bool, int, float, str, type(None))
ABSENT = b"-"  # the note of a microbatch without samples
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps() would make one for each message
_decode = functools.lru_cache(maxsize=1024)(json.loads)  # most messages have the form of an earlier one


class Message:
    """What a message carries: its note, its tensors, each contiguous, and their offsets. takes_objects: values of any type may be in
    it."""

    def __init__(self, value, takes_objects=False):
        self._takes_objects = takes_objects
        self.given, self.tensors, self.offsets, self.bytes = [], [], [], 0  # given: the tensors of the value themselves
        self.note = _encode(self._form(value)).encode()
        self.is_long = len(self.note) > NOTE.size
        if self.is_long:
            self._place(torch.frombuffer(bytearray(self.note), dtype=torch.uint8))
            self.note = b"#%d" % len(self.note)

    def _form(self, value):
        if isinstance(value, torch.Tensor):
            return self._form_of_tensor(value)
        if isinstance(value, WORDS):
            return ["w", value]
        if isinstance(value, torch.Size):
            return ["s", *value]
        if isinstance(value, (torch.dtype, torch.device)):
            return ["y" if isinstance(value, torch.dtype) else "e", _name_of(value)]
        if type(value) in (tuple, list):
            return ["u" if type(value) is tuple else "l", *map(self._form, value)]
        if type(value) is dict and all(isinstance(key, str) for key in value):
            return ["d", {key: self._form(each) for key, each in value.items()}]
        if self._takes_objects:
            return self._form_of_object(value)
        raise TypeError(f"shoal: a value of the type {type(value).__name__} cannot be handed from one stage to the next: cut at another "
                        "unit, or let the unit return tensors, numbers, tuples, lists or dicts of them")

    def _form_of_object(self, value):
        try:
            pickled, inside = pickled_without_tensors(value)
        except Exception as error:
            raise TypeError(f"shoal: a value of the type {type(value).__name__} cannot be handed from one stage to the next, because it cannot "
                            f"be pickled ({type(error).__name__}: {error}): cut at another unit") from error
        forms = [self._form_of_tensor(each) for each in inside]
        self._place(torch.frombuffer(bytearray(pickled), dtype=torch.uint8))
        return ["o", len(pickled), *forms]

    def _form_of_tensor(self, tensor):
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise TypeError(f"shoal: a tensor of {tensor.layout} cannot be handed from one stage to the next: cut at another unit")
        self.given.append(tensor)
        self._place(tensor.detach().resolve_conj().resolve_neg().contiguous())
        return ["t", _name_of(tensor.dtype), int(tensor.requires_grad), *tensor.shape]

    def _place(self, tensor):
        self.offsets.append(self.bytes)
        self.tensors.append(tensor)
        self.bytes += -(-_size_of(tensor) // ALIGNMENT) * ALIGNMENT

    def single(self):
        """Returns the tensor, if one tensor is all of the message's memory; else None."""
        return self.tensors[0] if len(self.tensors) == 1 and _size_of(self.tensors[0]) else None

    def size_of_single(self):
        return _size_of(self.tensors[0])

    def write(self, memory):
        """Copies the tensors to memory, a tensor of bytes."""
        for tensor, offset in zip(self.tensors, self.offsets):
            memory[offset:offset + _size_of(tensor)].view(tensor.dtype).copy_(tensor.reshape(-1))


@functools.lru_cache(maxsize=64)
def _name_of(thing):
    return str(thing).rpartition("torch.")[2] if isinstance(thing, torch.dtype) else str(thing)


def _size_of(tensor):
    return tensor.numel() * tensor.element_size()


class Received:
    """A message that has arrived. value: its value. tensors: those of the value, in the sender's order. They are views of the
    message's memory, which nobody may change. Of activations, those that need a gradient are leaves of a graph, which autograd
    protects from changes; the others are copies. address: of the memory."""

    def __init__(self, note, address, size, is_gradient=False, owner=None):
        self.address, self._memory, self._used, self.tensors = address, bytes_at(address, size, owner), 0, []
        self._is_gradient = is_gradient
        self.is_absent = note == ABSENT
        if note.startswith(b"#"):
            length = int(note[1:])
            begin = size - -(-length // ALIGNMENT) * ALIGNMENT
            note = bytes(self._memory[begin:begin + length].tolist())
        self.value = None if self.is_absent else self._value(_decode(note))

    def _value(self, form):
        kind, *rest = form
        if kind == "t":
            return self._tensor(*rest[:2], rest[2:])
        if kind == "w":
            return rest[0]
        if kind == "s":
            return torch.Size(rest)
        if kind in "ye":
            return getattr(torch, rest[0]) if kind == "y" else torch.device(rest[0])
        if kind == "d":
            return {key: self._value(each) for key, each in rest[0].items()}
        if kind == "o":
            return self._object(rest[0], [self._value(each) for each in rest[1:]])
        values = [self._value(each) for each in rest]
        return tuple(values) if kind == "u" else values

    def _object(self, size, inside):
        pickled = self._memory[self._used:self._used + size].numpy().tobytes()
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return unpickled(pickled, inside)

    def _tensor(self, dtype, needs_gradient, shape):
        dtype = getattr(torch, dtype)
        count = torch.Size(shape).numel() * dtype.itemsize
        tensor = self._memory[self._used:self._used + count].view(dtype).view(shape)
        self._used += -(-count // ALIGNMENT) * ALIGNMENT
        if not self._is_gradient:
            tensor = tensor.requires_grad_() if needs_gradient and torch.is_grad_enabled() else tensor.clone()
        self.tensors.append(tensor)
        return tensor


def pickled_without_tensors(value):
    """Returns the bytes of an object, and its tensors."""
    tensors, written = [], io.BytesIO()
    pickler = pickle.Pickler(written, pickle.HIGHEST_PROTOCOL)
    pickler.persistent_id = lambda each: tensors.append(each) or len(tensors) - 1 if isinstance(each, torch.Tensor) else None
    pickler.dump(value)
    return written.getvalue(), tensors


def unpickled(pickled, tensors):
    """Returns a copy of the object, with these tensors."""
    unpickler = pickle.Unpickler(io.BytesIO(pickled))
    unpickler.persistent_load = tensors.__getitem__
    return unpickler.load()


def bytes_at(address, count, owner=None):
    """A tensor of bytes. A program may keep one longer than the pipeline: it holds the owner of the memory."""
    if not count:
        return torch.empty(0, dtype=torch.uint8)
    block = (ctypes.c_uint8 * count).from_address(address)
    block.owner = owner
    return torch.frombuffer(block, dtype=torch.uint8)


def read(parcel, is_gradient, owner):
    """Returns the message in a struct shoal_parcel, whose memory lasts as long as its owner."""
    note = ctypes.string_at(ctypes.addressof(parcel) + NOTE.offset, parcel.note_bytes)
    return Received(note, parcel.data, parcel.bytes, is_gradient, owner)


def write_note(parcel, note):
    ctypes.memmove(ctypes.addressof(parcel) + NOTE.offset, note, len(note))
    parcel.note_bytes = len(note)
