"""Which rank has which part. Tensor-parallel ranks are neighbors, and so are the context-parallel ranks of a shard group. With 8
processes, hybrid_shard_degree 2 and tensor_parallel_degree 2:

    rank           0 1 2 3 4 5 6 7
    replica        0 0 0 0 1 1 1 1
    shard          0 0 1 1 0 0 1 1
    tensor rank    0 1 0 1 0 1 0 1

The ranks of a shard group divide the parameters. Ranks that differ only in their replica have the same values. The context rank is the
remainder of the shard by the context-parallel degree."""
from __future__ import annotations

from smdistributed.modelparallel.exceptions import SMPConfigError


class Ranker:
    """Ranks of a job of `size` processes."""

    def __init__(self, size, shard_degree, tensor_degree=1, context_degree=1):
        """shard_degree: 0 for the largest. Raises SMPConfigError if the degrees do not fit."""
        if size % tensor_degree:
            raise SMPConfigError(f"tsm.init: {size} processes cannot be divided into tensor-parallel groups of {tensor_degree}: start a "
                                 "multiple, or change tensor_parallel_degree")
        most = size // tensor_degree
        shards = shard_degree or most
        if most % shards:
            raise SMPConfigError(f"tsm.init: hybrid_shard_degree {shards} must divide {most}, the number of processes ({size}) by "
                                 f"tensor_parallel_degree ({tensor_degree})")
        if context_degree > shards or shards % context_degree:
            raise SMPConfigError(f"tsm.init: context_parallel_degree {context_degree} must divide hybrid_shard_degree, which is {shards}: "
                                 "context-parallel ranks share the shards of one replica")
        self.size, self.shard_degree, self.tensor_degree, self.context_degree = size, shards, tensor_degree, context_degree

    def get_rep_rank(self, rank):
        """Returns which replica a rank belongs to."""
        return rank // (self.shard_degree * self.tensor_degree)

    def get_shard_rank(self, rank):
        return rank // self.tensor_degree % self.shard_degree

    def get_tp_rank(self, rank):
        return rank % self.tensor_degree

    def get_cp_rank(self, rank):
        return self.get_shard_rank(rank) % self.context_degree

    def get_rep_groups(self):
        """Returns the groups of ranks that have the same values, one rank of each replica."""
        return self._groups(lambda rank: (self.get_shard_rank(rank), self.get_tp_rank(rank)))

    def get_shard_groups(self):
        """Returns the groups of ranks that divide parameters."""
        return self._groups(lambda rank: (self.get_rep_rank(rank), self.get_tp_rank(rank)))

    def get_tp_groups(self):
        return self._groups(lambda rank: (self.get_rep_rank(rank), self.get_shard_rank(rank)))

    def get_cp_groups(self):
        return self._groups(lambda rank: (self.get_rep_rank(rank), self.get_shard_rank(rank) // self.context_degree, self.get_tp_rank(rank)))

    def get_rep_rank_groups(self):
        """Returns the ranks of each replica."""
        return self._groups(self.get_rep_rank)

    def _groups(self, place):
        found = {}
        for rank in range(self.size):
            found.setdefault(place(rank), []).append(rank)
        return list(found.values())
