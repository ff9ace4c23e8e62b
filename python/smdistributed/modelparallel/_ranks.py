"""Which rank has which part: rank tables for a placement strategy, as the C core computes them (include/shoal/placement.h). This
module does not import torch.

A strategy is the letters D, P and T in some order: (reduced) data, pipeline and tensor parallelism. The right-most letter varies
fastest from rank to rank."""
from __future__ import annotations

import ctypes

from shoal import _native
from smdistributed.modelparallel.exceptions import SMPConfigError

# The number of a kind of group in C, and the name of a rank's number in it.
_OF_KINDS = {
    "WORLD": (_native.GROUP_WORLD, None), "MP_GROUP": (_native.GROUP_MODEL, "mp"), "DP_GROUP": (_native.GROUP_DATA, "dp"),
    "PP_GROUP": (_native.GROUP_PIPELINE, "pp"), "TP_GROUP": (_native.GROUP_TENSOR, "tp"), "RDP_GROUP": (_native.GROUP_REPLICAS, "rdp"),
}
KINDS = tuple(_OF_KINDS)
_ERROR_BYTES = 512


class Placement:
    """The ranks of a job of `size` processes. strategy: "cluster", "spread", or the letters. shards: sharded_data_parallel_degree.
    Raises SMPConfigError if the degrees do not divide the job."""

    def __init__(self, size, pipeline_degree, tensor_degree=1, strategy="cluster", shards=1):
        self.size, self.strategy = size, strategy
        self._placement = _native.Placement(ranks=size, pipeline=pipeline_degree, tensor=tensor_degree, shards=shards,
                                            strategy=strategy.encode())
        self.places(0)  # the first mistake of the parameters
        self.sizes = {"D": size // (pipeline_degree * tensor_degree), "P": pipeline_degree, "T": tensor_degree}

    def _call(self, function, *arguments):
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if getattr(_native.load(), function)(ctypes.byref(self._placement), *arguments, error, _ERROR_BYTES) != _native.OK:
            raise SMPConfigError(f"smp.init: {error.value.decode(errors='replace')}")

    def _located(self, rank):
        found = _native.Coordinates()
        self._call("placement_locate", rank, ctypes.byref(found))
        return found

    def places(self, rank):
        """Returns for each letter the rank's number among the ranks that differ in that letter only."""
        found = self._located(rank)
        return {"D": found.rdp, "P": found.pp, "T": found.tp}

    def group(self, kind, rank):
        """Returns the ranks of the rank's group of a kind, in ascending order."""
        return self._listed(_OF_KINDS[kind][0], rank)

    def shards_of(self, rank):
        """Returns the ranks that divide parameters and states with this one."""
        return self._listed(_native.GROUP_SHARDS, rank)

    def _listed(self, kind, rank):
        ranks, count = (ctypes.c_int * self.size)(), ctypes.c_size_t()
        self._call("placement_group", kind, rank, ranks, self.size, ctypes.byref(count))
        return ranks[:count.value]

    def rank_in(self, kind, rank):
        """Returns a rank's number in its group of a kind."""
        name = _OF_KINDS[kind][1]
        return rank if name is None else getattr(self._located(rank), name)

    def groups(self, kind):
        """Returns all groups of a kind, in the order of their first ranks."""
        found = {tuple(self.group(kind, rank)): None for rank in range(self.size)}
        return [list(group) for group in found]
