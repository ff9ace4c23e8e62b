"""A recorded forward pass (_graph.py), cut into stages at the begin of units.

The operations between two units belong to the stage before the border or to the one behind it: so that the fewest bytes cross.
A value that a later stage needs goes to it directly, over an edge, however many stages are between:

    stage 0  x = stem(image)      edges  0 -> 1: x      1 -> 2: y
    stage 1  y = body(x)                 0 -> 2: x
    stage 2  return head(y + x)

Parameters are not sent: a stage that uses one has it. A parameter of several stages is tied. Arguments that are objects are not sent
either: each stage has them."""
from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

from . import _graph, _own_part


def borders_of(units, cuts):
    """Returns the numbers of the units at which stages 1, 2, ... begin. A cut is a unit's name, or that of a module with units
    in it, which stands for the first of them."""
    numbers = [_unit_at(units, name) for name in cuts]
    if numbers != sorted(set(numbers)) or numbers[:1] == [0]:
        raise ValueError(f"shoal: cuts must name units in their order, each at most once and not the first unit ({units[0]}), which "
                         f"begins the first stage: {list(cuts)}. The units are {', '.join(units)}")
    return numbers


def _unit_at(units, name):
    if name in units:
        return units.index(name)
    for number, unit in enumerate(units):
        if unit.startswith(f"{name}."):
            return number
        if isinstance(name, str) and name.startswith(f"{unit}."):
            raise ValueError(f"shoal: cuts has {name!r}, which is inside the unit {unit}: stages begin with whole units; choose smaller "
                             "ones with units=")
    raise ValueError(f"shoal: cuts has {name!r}, which is not a unit of the model: its units are {', '.join(units)}")


def borders_in(units, others, borders):
    """Returns the borders of a forward pass that calls only some of the units of another one, for the same stages."""
    places = {name: number for number, name in enumerate(others)}
    return [next((number for number, name in enumerate(units) if places[name] >= border), len(units)) for border in borders]


class Split:
    """A forward pass in stages. edges: for each pair of stages (from, to), the nodes whose values go from one to the other."""

    def __init__(self, recorded, borders):
        self.recorded, self.count = recorded, len(borders) + 1
        self._nodes = [node for node in recorded.graph.nodes if node.op not in ("get_attr", "placeholder", "output")]
        self._inputs = [node for node in recorded.graph.nodes if node.op == "placeholder"]
        self._output = next(node for node in recorded.graph.nodes if node.op == "output")
        self.stage_of = self._assign(borders)
        self.edges = self._find_edges()
        self._refuse_writes()

    # ---- Which node belongs to which stage ----

    def _assign(self, borders):
        begins = [self._begin_of(number) for number in borders]
        stage_of, stage = {node: 0 for node in self._inputs}, 0
        for place, node in enumerate(self._nodes):
            while stage < len(begins) and place >= begins[stage]:
                stage += 1
            stage_of[node] = stage
        stage_of[self._output] = self.count - 1
        return stage_of

    def _begin_of(self, number):
        """Returns the place among the nodes at which the stage of a unit begins."""
        called = [place for place, node in enumerate(self._nodes) if node.op == "call_module"]
        names = self.recorded.units[number:number + 1]  # none behind the last unit
        first = next((place for place in called if self._nodes[place].target in names), len(self._nodes))
        last = max((place for place in called if place < first), default=-1)
        places = {node: place for place, node in enumerate(self._nodes)}
        return min(range(first, last, -1), key=lambda place: self._bytes_across(place, places))

    def _bytes_across(self, place, places):
        """Returns the bytes of values that are made before a place among the nodes and used from there on."""
        made = [*self._tensors(), *self._nodes[:place]]
        return sum(_graph.bytes_of(node.meta["example"]) for node in made
                   if any(places.get(user, len(places)) >= place for user in node.users))

    def _tensors(self):
        """Returns the inputs that the first stage sends."""
        return [node for node in self._inputs if not node.meta.get("is_object")]

    def _find_edges(self):
        edges = {}
        for node in (*self._tensors(), *self._nodes):
            for stage in sorted({self.stage_of[user] for user in node.users} - {self.stage_of[node]}):
                edges.setdefault((self.stage_of[node], stage), []).append(node)
        return edges

    def _refuse_writes(self):
        """A stage that changes a value of another one in place changes a copy, which no later stage gets."""
        for node in self._nodes:
            changed = node.all_input_nodes[0] if self._changes(node) and node.all_input_nodes else None
            if changed is None or changed.op == "get_attr" or self.stage_of[changed] == self.stage_of[node]:
                continue
            if any(self.stage_of[user] > self.stage_of[node] for user in changed.users):
                raise ValueError(f"shoal: stage {self.stage_of[node]} changes the value {changed} of stage {self.stage_of[changed]} in "
                                 f"place ({node.target}), and a later stage uses it: cut at another unit")

    def _changes(self, node):
        """Returns true if a node may change its first argument: an operation, or a unit such as nn.ReLU(inplace=True)."""
        return _graph.writes(node) or node.meta.get("changes", False)

    def is_changed(self, node, stage):
        """Returns true if a stage changes a value in place."""
        return any(self._changes(user) and user.all_input_nodes[0] is node and self.stage_of[user] == stage for user in node.users)

    # ---- What a stage needs ----

    def units_of(self, stage):
        return list(dict.fromkeys(node.target for node in self._nodes if node.op == "call_module" and self.stage_of[node] == stage))

    def attributes_of(self, stage):
        """Returns the names of parameters and buffers that operations of a stage use themselves."""
        return sorted({node.target for node in self.recorded.graph.nodes if node.op == "get_attr" and "constant" not in node.meta
                       and any(self.stage_of[user] == stage for user in node.users)})

    def sources(self, stage):
        return sorted(begin for begin, end in self.edges if end == stage)

    def targets(self, stage):
        return sorted(end for begin, end in self.edges if begin == stage)

    def module(self, stage, model):
        """Returns a stage as a module. Its arguments: the model's inputs on stage 0, elsewhere those of them that are objects; and a
        list of values from each source.
        It returns a list of values for each target, and the model's result, on the last stage. It has the model's units, not
        copies of them."""
        return _Builder(self, stage).build().module(model)

    def link(self, stage, model):
        """Returns a stage as a module of a chain: its arguments are tensors from the stage before, and it returns those that the
        next one needs, skips included."""
        for node in (node for border in range(1, self.count) for node in self.crossing(border)):
            if not isinstance(node.meta["example"], torch.Tensor):
                raise NotImplementedError(f"shoal: stage {self.stage_of[node]} sends {node}, which is not a tensor, and torch's pipelines hand over "
                                          "tensors only: cut at another unit")
        return _Builder(self, stage).build_link().module(model)

    def crossing(self, stage):
        """Returns the nodes whose values are made before a stage and used in it or behind it."""
        return [node for node in (*self._inputs, *self._nodes)
                if self.stage_of[node] < stage and any(self.stage_of[user] >= stage for user in node.users)] if stage < self.count else []

    def nodes_of(self, stage):
        """Yields the nodes of a stage: inputs, then operations."""
        yield from (node for node in self._inputs if self.stage_of[node] == stage or node.meta.get("is_object"))
        yield from (node for node in self._nodes if self.stage_of[node] == stage)

    def result(self):
        return self._output.args[0]


class _Builder:
    """Copies the nodes of a stage to a graph of its own."""

    def __init__(self, split, stage):
        self._split, self._stage = split, stage
        self.graph, self.constants, self._copies = Graph(), {}, {}

    def build(self):
        """Makes the graph of a stage whose values come and go over edges."""
        split, stage = self._split, self._stage
        arrived = [(f"from_{source}", split.edges[source, stage]) for source in split.sources(stage)]
        self._copy_inputs()
        for name, nodes in arrived:
            values = self.graph.placeholder(name)
            for number, node in enumerate(nodes):
                self._take(node, self.graph.call_function(_item, (values, number)))
        self._copy_operations()
        sent = [[self._copy_of(node) for node in split.edges[stage, target]] for target in split.targets(stage)]
        self.graph.output((sent, self._result() if self._is_last() else None))
        return self

    def build_link(self):
        """Makes the graph of a stage of a chain: its values come as arguments from the stage before, and go to the next one."""
        split, stage = self._split, self._stage
        self._copy_inputs()
        for number, node in enumerate(split.crossing(stage)):
            self._take(node, self.graph.placeholder(f"value_{number}"))
        self._copy_operations()
        sent = [self._copy_of(node) for node in split.crossing(stage + 1)]
        self.graph.output(self._result() if self._is_last() else sent[0] if len(sent) == 1 else tuple(sent))
        return self

    def _is_last(self):
        return self._stage == self._split.count - 1

    def _result(self):
        return map_arg(self._split.result(), self._copy_of)

    def _copy_inputs(self):
        for node in self._split.nodes_of(self._stage):
            if node.op == "placeholder":
                self._copies[node] = self.graph.node_copy(node, self._copy_of)

    def _take(self, node, value):
        """A value from another stage is a leaf of autograd and a message's memory: neither can be changed in place."""
        self._copies[node] = self.graph.call_method("clone", (value,)) if self._split.is_changed(node, self._stage) else value

    def _copy_operations(self):
        for node in self._split.nodes_of(self._stage):
            if node.op != "placeholder":
                self._copies[node] = self.graph.node_copy(node, self._copy_of)

    def _copy_of(self, node):
        if node.op == "get_attr" and node not in self._copies:
            if "constant" in node.meta:
                self.constants[node.target] = node.meta["constant"]
            self._copies[node] = self.graph.get_attr(node.target)
        return self._copies[node]

    def module(self, model):
        root = parts([self._split], [self._stage], model)
        for name, value in self.constants.items():
            root.register_buffer(name, value, persistent=False)
        made = GraphModule(root, self.graph)
        made.graph.owning_module = None  # a cycle, which would keep the parameters until it is collected
        return made


def _item(values, number):
    return values[number]


def parts(splits, stages, model):
    """Returns what stages have of a model, under the model's names."""
    root = _own_part.StageParts()
    for name in sorted({name for split in splits for stage in stages for name in split.units_of(stage)}):  # outer units first
        _place(root, name, model.get_submodule(name))
    for name in sorted({name for split in splits for stage in stages for name in split.attributes_of(stage)}):
        owner, _, last = name.rpartition(".")
        owner = model.get_submodule(owner)
        _place(root, name, getattr(owner, last), last not in owner._non_persistent_buffers_set)
    return root


def _place(root, path, thing, is_persistent=True):
    """Makes a module, parameter or buffer reachable under its name, below empty modules."""
    *owners, last = path.split(".")
    for name in owners:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root._modules[name]
    if hasattr(root, last):  # in a unit around it
        return
    if isinstance(thing, nn.Module):
        root.add_module(last, thing)
    elif isinstance(thing, nn.Parameter):
        root.register_parameter(last, thing)
    else:
        root.register_buffer(last, thing, persistent=is_persistent)
