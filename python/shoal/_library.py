"""The C library, through ctypes: what include/shoal/shoal.h declares, as far as Python needs it.

load() gives an object whose attributes are the functions without their prefix: load().comm_free(comm). All release the GIL.
Not here: what tensors are (shoal/torch), and any wish to make the C API comfortable.
"""
import ctypes
import functools
import types
from ctypes import POINTER, c_char, c_char_p, c_double, c_int, c_long, c_size_t, c_uint32, c_uint64, c_void_p

OK, PENDING, ERR_ARGUMENT, ERR_TIMEOUT = 0, 1, 2, 6

TYPES = {"float32": 0, "float64": 1, "bfloat16": 2, "int64": 3, "float16": 4, "int32": 5, "int8": 6, "uint8": 7}
OPERATORS = {"sum": 0, "avg": 1, "max": 2, "min": 3, "prod": 4, "bitand": 5, "bitor": 6, "bitxor": 7, "scaled_sum": 8}


class ShoalError(Exception):
    """A call that was refused or failed: its status, the paragraph that Shoal wrote about it, and the rank that caused it (-1:
    none)."""

    def __init__(self, status, text, rank=-1):
        super().__init__(text)
        self.status, self.rank = status, rank


class _Sized(ctypes.Structure):
    """A struct that the library may lengthen."""

    def __init__(self, **fields):
        super().__init__(struct_bytes=ctypes.sizeof(self), **fields)


class ContextOptions(_Sized):
    _fields_ = [("struct_bytes", c_size_t), ("log", c_void_p), ("log_arg", c_void_p), ("settings", POINTER(c_char_p))]


class CommOptions(_Sized):
    _fields_ = [("struct_bytes", c_size_t), ("name", c_char_p), ("timeout_ms", c_uint32), ("create_timeout_ms", c_uint32)]


class Options(_Sized):
    _fields_ = [("struct_bytes", c_size_t), ("timeout_ms", c_uint32), ("trace_tag", c_uint32), ("scale", c_double),
                ("wait_ms", c_uint32)]


class Failure(_Sized):
    _fields_ = [("struct_bytes", c_size_t), ("status", c_int), ("rank", c_int), ("reporter", c_int), ("pid", c_int),
                ("sequence", c_uint64), ("step", c_int), ("waited_ms", c_uint64), ("host", c_char * 64),
                ("operation", c_char * 96), ("text", c_char * 512)]


class Place(_Sized):
    _fields_ = [("struct_bytes", c_size_t), ("hosts", c_int), ("host", c_int), ("local_rank", c_int), ("local_size", c_int),
                ("pid", c_int), ("host_name", c_char * 64)]


class Tensor(ctypes.Structure):
    _fields_ = [("input", c_void_p), ("output", c_void_p), ("count", c_size_t)]


StoreSet = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_size_t)
StoreGet = ctypes.CFUNCTYPE(c_long, c_void_p, c_char_p, c_void_p, c_size_t, c_uint32)
StoreErase = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p)


class Store(ctypes.Structure):
    _fields_ = [("set", StoreSet), ("get", StoreGet), ("erase", StoreErase), ("arg", c_void_p)]


_counts = POINTER(c_size_t)
_tensors = [POINTER(Tensor), c_size_t]
_vector = [c_void_p, c_void_p, c_size_t, c_int]  # input, output, count, type

# shoal_<name>_post: what stands between the communicator and the options.
_POSTS = {
    "allreduce": [*_vector, c_int],
    "reduce": [*_vector, c_int, c_int],
    "reduce_scatter": [*_vector, c_int],
    "broadcast": [*_vector, c_int],
    "allgather": _vector,
    "gather": [*_vector, c_int],
    "scatter": [*_vector, c_int],
    "barrier": [],
    "allgatherv": [c_void_p, c_void_p, _counts, _counts, c_int],
    "reduce_scatterv": [c_void_p, c_void_p, _counts, c_int, c_int],
    "alltoallv": [c_void_p, _counts, _counts, c_void_p, _counts, _counts, c_int],
    "allreduce_coalesced": [*_tensors, c_int, c_int],
    "reduce_scatter_coalesced": [*_tensors, c_int, c_int],
    "allgather_coalesced": [*_tensors, c_int],
    "send": [c_void_p, c_size_t, c_int, c_int, c_int],
    "recv": [c_void_p, c_size_t, c_int, c_int, c_int],
}

# The others: what they return and take.
_CALLS = {
    "version": (c_char_p, []),
    "status_text": (c_char_p, [c_int]),
    "context_create": (c_int, [POINTER(ContextOptions), POINTER(c_void_p)]),
    "comm_create_with": (c_int, [c_void_p, POINTER(Store), c_int, c_int, POINTER(CommOptions), POINTER(c_void_p)]),
    "context_destroy": (None, [c_void_p]),
    "comm_create": (c_int, [c_void_p, POINTER(CommOptions), POINTER(c_void_p)]),
    "comm_rank": (c_int, [c_void_p]),
    "comm_size": (c_int, [c_void_p]),
    "comm_place": (c_int, [c_void_p, c_int, POINTER(Place)]),
    "comm_finalize": (c_int, [c_void_p]),
    "broadcast": (c_int, [c_void_p, *_vector, c_int, POINTER(Options)]),
    "comm_free": (None, [c_void_p]),
    "comm_abort": (None, [c_void_p]),
    "request_wait": (c_int, [c_void_p, c_uint32]),
    "request_test": (c_int, [c_void_p]),
    "request_on_done": (None, [c_void_p, c_void_p, c_void_p]),
    "request_free": (None, [c_void_p]),
    "mem_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "mem_free": (c_int, [c_void_p, c_void_p]),
    "last_failure": (c_int, [c_void_p, c_void_p, POINTER(Failure)]),
}


@functools.lru_cache(maxsize=None)
def load():
    """The library at shoal.library_path(), loaded at the first call. OSError when it cannot be."""
    from . import library_path

    library = ctypes.CDLL(str(library_path()))
    functions = types.SimpleNamespace()
    posts = {f"{name}_post": (c_int, [c_void_p, *arguments, POINTER(Options), POINTER(c_void_p)])
             for name, arguments in _POSTS.items()}
    for name, (result, arguments) in {**_CALLS, **posts}.items():
        function = getattr(library, f"shoal_{name}")
        function.restype, function.argtypes = result, arguments
        setattr(functions, name, function)
    return functions


def error_of(status, context=None, comm=None):
    """The ShoalError for a status that a call returned: in the words of the communicator's failure, else of the context's."""
    library, failure = load(), Failure()
    if (context or comm) and library.last_failure(context, comm, ctypes.byref(failure)) == OK and failure.text:
        return ShoalError(status, failure.text.decode(errors="replace"), failure.rank)
    return ShoalError(status, library.status_text(status).decode())


def create_context():
    context = c_void_p()
    status = load().context_create(None, ctypes.byref(context))
    if status != OK:
        raise error_of(status)
    return context.value


def counts(numbers):
    """An array of size_t."""
    return (c_size_t * len(numbers))(*numbers)
