"""Do all ranks hold the same parameters? The front ends compare hashes in the first step and every EVERY steps."""
from __future__ import annotations

import collections
import ctypes
import warnings

from . import _native

# Hashing reads all parameters once, at 13 GB/s on one core; averaging their gradients takes at least as long in every step. So
# with 100 steps between two comparisons these cost at most 1 % of the time of averaging.
EVERY = 100
ADVICE = ("From here on the ranks train different models. Usual causes: a checkpoint was loaded on some ranks only, or the optimizer "
          "stepped other settings there; processors of different kinds, or other numbers of threads, can round differently. "
          "compare_every=0 switches this comparison off")


class Comparison:
    """Decides when ranks compare, and reports a difference: by one warning, after which it stays quiet, or by an error each time.
    every: steps between two comparisons, the same on all ranks; 0: never."""

    def __init__(self, every, raises, failure=RuntimeError):
        if not isinstance(every, int) or isinstance(every, bool) or every < 0:
            raise ValueError(f"shoal: compare_every is {every!r}, but must be a number of steps, or 0 to compare never")
        self._every, self._raises, self._failure = every, raises, failure

    def is_due(self, step):
        """step counts from 1. All ranks get the same answer."""
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def report(self, text):
        """Call it on all ranks that have found the difference."""
        if self._raises:
            raise self._failure(f"{text}. {ADVICE}")
        self._every = 0
        warnings.warn(f"{text}. {ADVICE}", stacklevel=2)


def hash_of(array):
    """Returns the hash of a NumPy array's bytes, so NaNs with the same bits are equal."""
    import numpy  # here, because torch works without NumPy
    array = numpy.ascontiguousarray(array)
    return _native.load().bytes_hash(array.ctypes.data, array.nbytes)


def difference(gather, names, arrays, when):
    """Compares arrays with those of all ranks. Returns a text that names the first that differs, or None. gather(value) returns
    the values of all ranks, by rank: one number for each rank, and more only if these differ."""
    hashes = [hash_of(array) for array in arrays]
    together = (ctypes.c_uint64 * len(hashes))(*hashes)
    if len(set(gather(_native.load().bytes_hash(together, ctypes.sizeof(together))))) == 1:
        return None
    by_rank = gather(hashes)
    for name, found in zip(names, zip(*by_rank)):
        common = collections.Counter(found).most_common(1)[0][0]
        others = [str(rank) for rank, each in enumerate(found) if each != common]
        if others:
            return (f"shoal: {name} is not the same on all ranks {when}: rank{'s' * (len(others) > 1)} {', '.join(others)} "
                    f"differ{'s' * (len(others) == 1)} from most")
    return None
