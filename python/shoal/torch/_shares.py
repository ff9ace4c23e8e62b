"""Stages that are on several ranks, their replicas: each of these has a share of the samples of each microbatch
(include/shoal/pipeline.h, "Replicas"). What a stage sends is cut along its samples, and what it receives is joined:

    stage 0, two replicas       [ 0 1 2 ] [ 3 4 5 ]        6 samples
    messages                    0 1 | 2 | 3 | 4 5
    stage 1, three replicas     [ 0 1 ] [ 2 3 ] [ 4 5 ]

How a value depends on the number of samples is seen by recording the forward pass with twice as many: a dimension that doubles has
the samples, and so does a number that doubles. Both stay in autograd, so gradients go the same ways back."""
from __future__ import annotations

import ctypes
import typing

import torch
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from .. import _native
from . import _graph


class Part(typing.NamedTuple):
    """How a leaf of a value depends on the samples: a tensor has `factor` times as many elements in a dimension, a number is
    `factor` times as large (dimension is None), and a size has such numbers (factor is a tuple)."""
    factor: typing.Any
    dimension: typing.Any = None


def share_of(samples, replicas, replica):
    """Returns the first sample and the number of samples of a replica."""
    first, count = ctypes.c_uint64(), ctypes.c_uint64()
    _native.load().replica_share(samples, replicas, replica, ctypes.byref(first), ctypes.byref(count))
    return first.value, count.value


def peers_of(replicas, replica, others):
    """Returns the replicas of another stage that share samples with this one."""
    return range(replica * others // replicas, ((replica + 1) * others + replicas - 1) // replicas)


# ---- How values depend on samples ------------------------------------------------------------------------------------------

RESULT = "the model's result"


def rows_of(example):
    """Returns the number of samples of an example, (args, kwargs)."""
    rows = {leaf.shape[0] for leaf in pytree.tree_leaves(example) if isinstance(leaf, torch.Tensor) and leaf.dim()}
    if len(rows) != 1 or not min(rows):
        raise ValueError(f"shoal: replicate= needs an example whose tensors have the same number of samples in their first dimension; "
                         f"they have {sorted(rows)}")
    return min(rows)


def doubled(example):
    """Returns an example of twice as many samples, without memory."""
    def twice(leaf):
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        return torch.empty(2 * leaf.shape[0], *leaf.shape[1:], dtype=leaf.dtype, device="meta")
    return pytree.tree_map(twice, example)


class Parts:
    """The parts of each value of a forward pass. once and twice: it was recorded with `rows` samples and with twice as many."""

    def __init__(self, once, twice, rows):
        nodes, others = list(once.graph.nodes), list(twice.graph.nodes)
        if [(node.op, str(node.target)) for node in nodes] != [(node.op, str(node.target)) for node in others]:
            raise ValueError("shoal: the forward pass depends on the number of samples, so a stage cannot have a share of them: leave out "
                             f"replicate=, or {_graph.REMEDY}")
        self._rows, self._pairs = rows, {node: (node.meta.get("example"), other.meta.get("example")) for node, other in zip(nodes, others)}
        self._outputs = [next(node for node in each if node.op == "output") for each in (nodes, others)]

    def of(self, node):
        """Returns the parts of a value's leaves."""
        return self._between(*self._pairs[node], f"the value {node}")

    def of_result(self):
        """Returns the parts of the leaves of the model's result."""
        return self._between(*(map_arg(node.args[0], lambda each: each.meta["example"]) for node in self._outputs), RESULT)

    def _between(self, once, twice, name):
        first, form = pytree.tree_flatten(once)
        second, other = pytree.tree_flatten(twice)
        if form != other or any(each is _graph.UNKNOWN for each in first):
            raise self._refusal(name)
        return [self._part(one, two, name) for one, two in zip(first, second)]

    def _part(self, one, two, name):
        if isinstance(one, torch.Tensor):
            changed = [dimension for dimension, sizes in enumerate(zip(one.shape, two.shape)) if sizes[0] != sizes[1]]
            if one.dim() != two.dim() or len(changed) > 1:
                raise self._refusal(name)
            return Part(self._factor(one.shape[changed[0]], two.shape[changed[0]], name), changed[0]) if changed else None
        if isinstance(one, torch.Size):
            return Part(tuple(None if a == b else self._factor(a, b, name) for a, b in zip(one, two))) if one != two else None
        return None if one == two else Part(self._factor(one, two, name))

    def _factor(self, one, two, name):
        if not isinstance(one, int) or two != 2 * one or one % self._rows:
            raise self._refusal(name)
        return one // self._rows

    @staticmethod
    def _refusal(name):
        if name == RESULT:
            return ValueError(f"shoal: {name} is not in proportion to the number of samples, so the replicas of the last stage cannot join it: "
                              "call step() without outputs=, or leave out replicate=")
        return ValueError(f"shoal: {name} goes from one stage to another, and is not in proportion to the number of samples, so a stage "
                          "cannot have a share of them: cut at another unit, or leave out replicate=")


# ---- Cutting and joining ---------------------------------------------------------------------------------------------------


def cut(value, parts, rows, first, count):
    """Returns the samples [first, first + count) of a value of `rows` samples."""
    leaves, form = pytree.tree_flatten(value)
    _compare(leaves, parts)
    return pytree.tree_unflatten([_cut_leaf(leaf, part, rows, first, count) for leaf, part in zip(leaves, parts)], form)


def _cut_leaf(leaf, part, rows, first, count):
    if part is None:
        return leaf
    if part.dimension is not None:
        if leaf.shape[part.dimension] != part.factor * rows:
            raise RuntimeError(f"shoal: a value between stages has the shape {list(leaf.shape)}, but dimension {part.dimension} was "
                               f"{part.factor} times the number of samples ({rows}) when the model was recorded")
        return leaf.narrow(part.dimension, part.factor * first, part.factor * count)
    if isinstance(leaf, torch.Size):
        return torch.Size(each if factor is None else factor * count for each, factor in zip(leaf, part.factor))
    return part.factor * count


def joined(pieces, parts, counts):
    """Returns the value whose samples are in these pieces. counts: how many each has."""
    flat = [pytree.tree_flatten(piece) for piece in pieces]
    for leaves, _ in flat:
        _compare(leaves, parts)
    leaves = [_join_leaves(each, part, counts) for each, part in zip(zip(*(leaves for leaves, _ in flat)), parts)]
    return pytree.tree_unflatten(leaves, flat[0][1])


def _join_leaves(leaves, part, counts):
    if len(leaves) == 1:
        return leaves[0]
    if part is None:
        return _common(leaves, counts)
    if part.dimension is not None:
        return torch.cat(leaves, part.dimension)
    if isinstance(leaves[0], torch.Size):
        return torch.Size(each[0] if factor is None else sum(each) for each, factor in zip(zip(*leaves), part.factor))
    return sum(leaves)


def _common(leaves, counts):
    """Returns a leaf without samples. All replicas have the same one, or a mean over their samples. If it has a gradient, returns the
    mean over all replicas, so that each of them gets its share of the gradient."""
    first = leaves[0]
    if isinstance(first, torch.Tensor):
        if not first.requires_grad and all(_are_equal(first, leaf) for leaf in leaves):
            return first
        can_average = first.is_floating_point() or first.is_complex()
    elif isinstance(first, (bool, int, float, str)):
        if all(leaf == first for leaf in leaves):
            return first
        can_average = isinstance(first, float)
    else:
        return first
    if not can_average or not sum(counts):
        kind = str(first.dtype) if isinstance(first, torch.Tensor) else type(first).__name__
        raise RuntimeError(f"shoal: a value without a dimension of samples differs between the replicas of a stage ({kind}, such as {first} and "
                           f"{next(leaf for leaf in leaves if not _are_equal(first, leaf))}), and only means over samples can be joined: return "
                           "a mean as a floating-point number, or a value for each sample; or leave out replicate=")
    return sum(leaf * (count / sum(counts)) for leaf, count in zip(leaves, counts))


def _are_equal(one, other):
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def _compare(leaves, parts):
    if len(leaves) != len(parts):
        raise RuntimeError(f"shoal: a value between stages has {len(leaves)} parts, but had {len(parts)} when the model was recorded")


# ---- A stage ---------------------------------------------------------------------------------------------------------------

ABSENT = object()  # in place of a piece without samples


class StageShares:
    """What a replica of a stage cuts and joins. place: (replicas, replica). others: for each other stage, how many replicas it has.
    parts: by (mode, from, to), the parts of the values on that edge."""

    def __init__(self, number, place, others, parts):
        self._number, (self.replicas, self.replica), self._others, self._parts = number, place, others, parts

    def ways(self, stages):
        """Returns the messages from or to these stages: (stage, replica)."""
        return [(stage, replica) for stage in stages for replica in peers_of(self.replicas, self.replica, self._others[stage])]

    def own(self, samples):
        """Returns this replica's share of a microbatch: the first sample, and how many there are."""
        return share_of(samples, self.replicas, self.replica)

    def _common(self, samples, stage, replica):
        """Returns the samples that this replica shares with another one."""
        first, count = self.own(samples)
        begin, length = share_of(samples, self._others[stage], replica)
        low, high = max(first, begin), min(first + count, begin + length)
        return low, max(0, high - low)

    @staticmethod
    def samples_in(received):
        """Returns the number of samples of a microbatch, which each message has."""
        return next(each.value[0] for each in received if not each.is_absent)

    def join(self, mode, sources, received, samples):
        """Returns the values from each source. received: the messages. samples: how many the microbatch has."""
        values = {}
        for source in sources:
            found = [(each.value[1:], self._common(samples, source, replica)[1])
                     for each, (stage, replica) in zip(received, self.ways(sources)) if stage == source and not each.is_absent]
            counts = [count for _, count in found]
            parts = self._parts.get((mode, source, self._number), [])
            values[source] = [joined([pieces[place] for pieces, _ in found], part, counts) for place, part in enumerate(parts)]
        return values

    def cut(self, mode, targets, sent, samples):
        """Returns the content of each message: a list, or ABSENT. sent: for each target, the values for it."""
        first, count = self.own(samples)
        contents = []
        for target, replica in self.ways(targets):
            begin, length = self._common(samples, target, replica)
            parts = self._parts.get((mode, self._number, target), [])
            pieces = [cut(value, part, count, begin - first, length) for value, part in zip(sent.get(target, []), parts)]
            contents.append([samples, *pieces] if length else ABSENT)
        return contents
