"""The C library, through ctypes.

load() returns an object whose attributes are the functions without their prefix: load().comm_free(comm). All release the GIL.
Structs, callbacks and constants have their names in the headers without the prefix: CommOptions, StoreGet, ERR_TIMEOUT,
FLOAT32; dev/native.py generates them from the headers. This module knows nothing of tensors (see shoal/torch), and does not
make the C API more comfortable.
"""
import ctypes
import functools
import types

from ._declarations import *  # noqa: F401,F403
from ._declarations import ERR_UNSUPPORTED, FUNCTIONS, OK, Failure


class ShoalError(Exception):
    """A call that was refused or failed: its status, Shoal's text about it, and the rank that caused it (-1 if none)."""

    def __init__(self, status, text, rank=-1):
        super().__init__(text)
        self.status, self.rank = status, rank


@functools.lru_cache(maxsize=None)
def load():
    """Returns the library at shoal.library_path(), which the first call loads. Raises OSError if that fails. A function that
    this library lacks raises ShoalError when it is called."""
    from shoal import library_path

    path = str(library_path())
    library, functions = ctypes.CDLL(path), types.SimpleNamespace()
    for name, (result, arguments) in FUNCTIONS.items():
        try:
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        except AttributeError:
            function = _absent(path, name)
        setattr(functions, name.removeprefix("shoal_"), function)
    return functions


def _absent(path, name):
    from shoal import __version__

    def raises(*_):
        raise ShoalError(ERR_UNSUPPORTED, f"{path} has no function {name}: it is not the library of shoal {__version__}, the "
                         f"Python package at {__path__[0]}; install or build both from one source")
    return raises


def error_of(status, context=None, comm=None):
    """Returns the ShoalError for a status that a call returned, with the text of the communicator's failure, else of the
    context's."""
    library, failure = load(), Failure()
    if (context or comm) and library.last_failure(context, comm, ctypes.byref(failure)) == OK and failure.text:
        return ShoalError(status, failure.text.decode(errors="replace"), failure.rank)
    return ShoalError(status, library.status_text(status).decode())


def create_context():
    context = ctypes.c_void_p()
    status = load().context_create(None, ctypes.byref(context))
    if status != OK:
        raise error_of(status)
    return context.value


def counts(numbers):
    """An array of size_t."""
    return (ctypes.c_size_t * len(numbers))(*numbers)
