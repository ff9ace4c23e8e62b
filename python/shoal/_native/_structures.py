"""Initial values of the headers' structs that begin with struct_bytes."""
import ctypes

_initialize = ctypes.Structure.__init__


class Sized(ctypes.Structure):
    """A struct that later versions of the library may lengthen. A new one has the values of its *_INIT macro and of the given
    fields."""

    _begin = {}

    def __init__(self, **fields):
        _initialize(self, **{**self._begin, **fields})


def begins(**fields):
    """Sets a struct's size and the fields of its *_INIT macro that are not zero."""

    def complete(struct):
        struct._begin = {"struct_bytes": ctypes.sizeof(struct), **fields}
        return struct

    return complete
