"""shard_optimizer_state with a step after the backward pass: each data-parallel rank steps its share of the parameters, keeps only
the states of that share, and sends the new values to the others.

    step function       gradients become averages on all data-parallel ranks, as without shares
    the program         unscales and clips them
    optimizer.step()    rank 0 steps a b, rank 1 c, rank 2 d e;  then each sends what it has stepped

A parameter is in one share as a whole, so any optimizer can step it that looks at one parameter at a time. Shares are filled by the
sizes of whole parameters, so ranks that have parts of the same ones step them together."""
from __future__ import annotations

import contextlib

import torch.distributed as dist

BROADCAST_BYTES = 64 << 20


class Shares:
    """The shares of the parameters of an optimizer. group: the process group of the ranks that have the same parameters. size_of:
    returns the number of elements of the whole parameter."""

    def __init__(self, optimizer, group, size_of):
        self._optimizer, self._group = optimizer, group
        parameters = list({id(each): each for entry in optimizer.param_groups for each in entry["params"]}.values())
        self.parameters = [[] for _ in range(group.size())]  # by rank
        sizes = [0] * group.size()
        for parameter in sorted(parameters, key=lambda each: -size_of(each)):  # a stable order, so equal on all ranks
            rank = sizes.index(min(sizes))
            self.parameters[rank].append(parameter)
            sizes[rank] += size_of(parameter)
        self._own = {id(each) for each in self.parameters[group.rank()]}
        self._every = {id(each) for each in parameters}

    def are_complete(self):
        """Returns true if each parameter of the optimizer is in a share. A wrapper for 16 bits may have replaced them."""
        return all(id(each) in self._every for entry in self._optimizer.param_groups for each in entry["params"])

    @contextlib.contextmanager
    def _own_only(self):
        """Inside, the optimizer has only this rank's share."""
        groups = self._optimizer.param_groups
        whole = [entry["params"] for entry in groups]
        for entry in groups:
            entry["params"] = [each for each in entry["params"] if id(each) in self._own]
        try:
            yield
        finally:
            for entry, parameters in zip(groups, whole):
                entry["params"] = parameters

    def step(self, step, *args, **kwargs):
        """Runs step(*args, **kwargs) on this rank's share. Then all ranks have all values."""
        with self._own_only():
            result = step(*args, **kwargs)
        for rank, stepped in enumerate(self.parameters):
            if stepped:
                dist._broadcast_coalesced(self._group, [each.detach() for each in stepped], BROADCAST_BYTES, rank)
        return result

    def drop_others(self):
        """Drops the states of other ranks' shares, after all states have been loaded."""
        for parameter in list(self._optimizer.state):
            if id(parameter) not in self._own:
                del self._optimizer.state[parameter]
