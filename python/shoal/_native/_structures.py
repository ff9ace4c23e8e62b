"""How structs of the headers that begin with struct_bytes begin in Python."""
import ctypes

_initialize = ctypes.Structure.__init__


class Sized(ctypes.Structure):
    """A struct that the library may lengthen. A new one holds what its *_INIT macro says, but for the fields that are given."""

    _begin = {}

    def __init__(self, **fields):
        _initialize(self, **{**self._begin, **fields})


def begins(**fields):
    """Tells a struct its size and the fields of its *_INIT macro that are not zero."""

    def complete(struct):
        struct._begin = {"struct_bytes": ctypes.sizeof(struct), **fields}
        return struct

    return complete
