"""A backward pass in two halves: the gradients of inputs first, the gradients of parameters later (Qi et al. 2023, "Zero Bubble
Pipeline Parallelism").

A graph's nodes that lead to an input need to run for the first half. Some of them also lead, directly, to parameters: these
border nodes run again in the second half, for the gradients of parameters only. The gradients that reach them are kept.

    root -> gelu -> linear -> norm -> input         the first half runs all of them
                       |        |
                     weight   weight                border nodes: linear, norm
"""
from __future__ import annotations

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


def input_gradients(roots, gradients, inputs):
    """Returns the gradients of inputs, None for one that is not used, and a function that adds up the gradients of all parameters.
    gradients: of the roots; None stands for 1."""
    edges, nodes = [get_gradient_edge(root) for root in roots], [get_gradient_edge(each).node for each in inputs]
    reached = _nodes_of(edges)
    leading = _leading_to(nodes, reached)
    border = [node for node in reached if node in leading and _others(node, leading)]
    kept = {}
    handles = [node.register_prehook(lambda arrived, node=node: kept.__setitem__(node, arrived)) for node in border]
    try:
        found = _gradients_through([pair for edge, *pair in zip(edges, roots, gradients) if edge.node in leading], inputs)
    finally:
        for handle in handles:
            handle.remove()
    apart = [(edge, torch.ones_like(root) if gradient is None else gradient)
             for edge, root, gradient in zip(edges, roots, gradients) if edge.node not in leading]
    return found, _Deferred(kept, leading, apart)


def _gradients_through(pairs, inputs):
    if not pairs:
        return [None] * len(inputs)
    roots, gradients = zip(*pairs)
    return torch.autograd.grad(roots, inputs, gradients, retain_graph=True, allow_unused=True)


class _Deferred:
    """The second half. A border node that shares no parameter with others computes only what leads to its parameters. Autograd
    would go from one node of a group on to the other, so these are called by themselves, and compute the gradient of their
    input once more."""

    def __init__(self, kept, leading, apart):
        self._kept, self._leading = kept, leading
        direct = [(node, _parameters_of(_others(node, leading))) for node in kept]
        self._groups = _grouped([*direct, *((pair, _parameters_of([pair[0].node])) for pair in apart)])

    def __call__(self):
        for members, parameters in self._groups:
            if len(members) == 1 and members[0] in self._kept:
                kept = self._kept[members[0]]
                arrived = [(GradientEdge(members[0], number), gradient) for number, gradient in enumerate(kept)]
                handle = members[0].register_prehook(lambda _, kept=kept: kept)  # hooks have changed these gradients already
                try:
                    _backward(arrived, inputs=parameters)
                finally:
                    handle.remove()
            else:
                _backward([pair for member in members for pair in self._edges_of(member)])
        self._groups = self._kept = self._leading = None

    def _edges_of(self, member):
        """Returns the edges to parameters that begin at a member of a group, with their gradients."""
        if member not in self._kept:
            return [member]
        with torch.no_grad():
            found = (member if callable(member) else member.apply)(*self._kept[member])
        found = found if isinstance(found, tuple) else (found,)
        return [(GradientEdge(following, number), _fitted(gradient, following._input_metadata[number]))
                for (following, number), gradient in zip(member.next_functions, found)
                if gradient is not None and following is not None and following not in self._leading]


def _fitted(gradient, form):
    """Reduces a gradient to the shape and type of its tensor, as autograd does between nodes."""
    return gradient.sum_to_size(form.shape).to(form.dtype)


def _backward(pairs, **options):
    pairs = [(edge, gradient) for edge, gradient in pairs if gradient is not None]
    if pairs:
        edges, gradients = zip(*pairs)
        torch.autograd.backward(edges, gradients, **options)


def _nodes_of(edges):
    """Returns all nodes of a graph, as the keys of a dict."""
    found, waiting = {}, [edge.node for edge in edges]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _leading_to(targets, nodes):
    """Returns the nodes from which a target is reached, with the targets."""
    before = {}
    for node in nodes:
        for following, _ in node.next_functions:
            before.setdefault(following, []).append(node)
    leading, waiting = set(), list(targets)
    while waiting:
        node = waiting.pop()
        if node not in leading:
            leading.add(node)
            waiting += before.get(node, ())
    return leading


def _others(node, leading):
    return [following for following, _ in node.next_functions if following is not None and following not in leading]


def _parameters_of(nodes):
    """Returns the parameters that are reached from nodes."""
    found, seen, waiting = {}, set(), list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            variable = getattr(node, "variable", None)
            if variable is not None:
                found[id(variable)] = variable
            waiting += [following for following, _ in node.next_functions if following is not None]
    return found


def _grouped(pairs):
    """Joins members that have a common parameter. pairs: (member, parameters by their ids). Returns (members, parameters)."""
    groups = []
    for member, parameters in pairs:
        members, joined, apart = [member], dict(parameters), []
        for others, theirs in groups:
            if joined.keys() & theirs.keys():
                members, joined = others + members, {**theirs, **joined}
            else:
                apart.append((others, theirs))
        groups = [*apart, (members, joined)]
    return [(members, list(parameters.values())) for members, parameters in groups if parameters]
