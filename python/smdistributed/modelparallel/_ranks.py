"""Which rank has which part: rank tables for a placement strategy. This module does not import torch.

A strategy is the letters D, P and T in some order: (reduced) data, pipeline and tensor parallelism. The right-most letter varies
fastest from rank to rank. With 2 of each, "DPT" (cluster) and "PTD":

    rank   0 1 2 3 4 5 6 7        rank   0 1 2 3 4 5 6 7
    rdp    0 0 0 0 1 1 1 1        rdp    0 1 0 1 0 1 0 1
    pp     0 0 1 1 0 0 1 1        pp     0 0 0 0 1 1 1 1
    tp     0 1 0 1 0 1 0 1        tp     0 0 1 1 0 0 1 1
"""
from __future__ import annotations

from smdistributed.modelparallel.exceptions import SMPConfigError

KINDS = ("WORLD", "MP_GROUP", "DP_GROUP", "PP_GROUP", "TP_GROUP", "RDP_GROUP")


class Placement:
    """The ranks of a job of `size` processes. strategy: the letters."""

    def __init__(self, size, pipeline_degree, tensor_degree=1, strategy="DPT"):
        whole = pipeline_degree * tensor_degree
        if size % whole:
            raise SMPConfigError(f"smp.init: {size} processes cannot be divided into replicas of {whole} (pipeline_parallel_degree "
                                 f"{pipeline_degree} x tensor_parallel_degree {tensor_degree}): start a multiple of {whole}")
        self.size, self.strategy = size, strategy
        self.sizes = {"D": size // whole, "P": pipeline_degree, "T": tensor_degree}

    def places(self, rank):
        """Returns the rank among those that differ in one letter only, by letters."""
        found = {}
        for letter in reversed(self.strategy):
            found[letter] = rank % self.sizes[letter]
            rank //= self.sizes[letter]
        return found

    def group(self, kind, rank):
        """Returns the ranks of the group of a kind that has this rank."""
        same = {"WORLD": "", "MP_GROUP": "D", "DP_GROUP": "P", "PP_GROUP": "DT", "TP_GROUP": "DP", "RDP_GROUP": "PT"}[kind]
        own = self.places(rank)
        return [other for other in range(self.size) if all(self.places(other)[letter] == own[letter] for letter in same)]

    def groups(self, kind):
        """Returns all groups of a kind, in the order of their first ranks."""
        found = {tuple(self.group(kind, rank)): None for rank in range(self.size)}
        return [list(group) for group in found]
