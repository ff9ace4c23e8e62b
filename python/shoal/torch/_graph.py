"""A model as a graph of units: the calls that its forward pass makes. A unit is a module that runs as a whole, as plain Python;
the operations around units are recorded one by one (torch.fx), with sizes as variables. So a unit may do whatever it wants, and
only the code that calls units is recorded.

    x = self.embedding(words)          call_module  embedding     a unit
    for block in self.blocks:          call_module  blocks.0      a unit
        x = block(x)                   call_module  blocks.1      a unit
    return self.head(x) * self.scale   call_module  head          a unit, get_attr scale, call_function mul

Each value has an example without memory (a fake tensor). It answers what the recorded code asks about shapes; the answer is
recorded and compared in each step.

Objects among the arguments, such as lists of boxes, have no fakes. A forward pass with one of them is recorded with real values."""
from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import enum
import sys
import typing

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch.func import functional_call
from torch.fx import Graph, Node, Proxy, Tracer
from torch.fx import proxy as proxies
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

UNKNOWN = object()  # the example of a value that depends on data
# Functions that make tensors. fx records calls with a recorded argument only, and torch's parser refuses some of these.
MAKERS = ("arange", "bernoulli", "complex", "empty", "eye", "full", "linspace", "logspace", "normal", "ones", "rand", "randint", "randn",
          "randperm", "tensor", "tril_indices", "triu_indices", "zeros")
LIMITS = ("finfo", "iinfo")  # functions of a type of elements
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, slice, type, enum.Enum, torch.dtype, torch.device, torch.layout,
             torch.memory_format)  # arguments of these types are part of the record
LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
DATA = tuple(getattr(fake_tensor, name) for name in
             ("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException") if hasattr(fake_tensor, name))
REMEDY = "move this code into a module of its own, which then runs as a whole, or make the model an nn.Sequential"


class Changed(RuntimeError):
    """The forward pass would take another way than the one that was recorded."""


def compare(value, expected, place):
    """A recorded answer: the forward pass took its way because of it."""
    if value != expected:
        raise Changed(f"the forward pass changes from step to step: a value at {place} was {expected!r} for the example and is {value!r} "
                      f"now; {REMEDY}")


class _Refused(Exception):
    """The forward pass cannot be recorded."""


class _Value(Proxy):
    """A value of the forward pass while it is recorded."""

    def __len__(self):
        return self.tracer.answer(self, self.tracer.length_of(self), len)

    def __index__(self):
        return self.tracer.answer(self, self.tracer.number_of(self, int))

    __int__ = __index__

    def __float__(self):
        return float(self.tracer.answer(self, self.tracer.number_of(self, (int, float))))

    def __getattr__(self, name):
        return _Attribute(self, name)


class _Object(_Value):
    """An argument that is an object. isinstance() answers for it as for the example."""

    @property
    def __class__(self):
        return type(self.node.meta["example"])


class _Attribute(proxies.Attribute, _Value):
    """An attribute of a value, such as x.shape. It may also be a method that is called next."""


# ---- Recording -------------------------------------------------------------------------------------------------------------


def unit_chooser(model, chosen=None):
    """Returns a function that returns true for modules that are units. chosen: what Pipeline documents as `units`."""
    if chosen is None:
        around = {}  # the length of the longest list of which a module is a member
        for each in model.modules():
            for child in each.children() if isinstance(each, LISTS) else ():
                around[id(child)] = max(around.get(id(child), 0), len(each))
        inside = {id(each): max((len(below) for below in each.modules() if isinstance(below, LISTS)), default=0) for each in model.modules()}
        return lambda each: not isinstance(each, LISTS) and inside[id(each)] <= around.get(id(each), 0)
    if callable(chosen) and not isinstance(chosen, type):
        return chosen
    kinds = (chosen,) if isinstance(chosen, type) else tuple(chosen)
    if not kinds or not all(isinstance(kind, type) and issubclass(kind, nn.Module) for kind in kinds):
        raise TypeError("shoal: units must be a set of classes of modules, such as {Block}, or a function that returns true for a "
                        f"module that is a unit; it is {chosen!r}")
    holders = {id(each) for each in model.modules() if any(isinstance(below, kinds) for below in each.modules())}
    return lambda each: isinstance(each, kinds) or id(each) not in holders


class _Tracer(Tracer):
    """Records one forward pass. Afterwards it forgets the model, because fx and modules that were imported meanwhile may keep it
    or one of its functions."""
    proxy_buffer_attributes = True
    _is_running = True

    def __init__(self, model, is_unit, objects):
        super().__init__()
        self._objects = objects  # numbers of leaves of the example
        self._model, self._is_unit, self.whole = model, is_unit, {}  # whole: why modules run as a whole, by their names
        self._modules = set(model.modules())
        self._tensors = dict((*model.named_buffers(), *model.named_parameters()))
        self._names = {id(tensor): name for name, tensor in self._tensors.items()}
        self._mode = contextlib.nullcontext() if objects else fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes = {}  # stand-ins for parameters and buffers, by id
        self._is_running = False  # a unit or an operation runs on examples: nothing is recorded

    # ---- What fx calls ----

    def proxy(self, node):
        return (_Object if node.meta.get("is_object") else _Value)(node, self)

    def is_leaf_module(self, m, module_qualified_name):
        return self._is_unit(m) or module_qualified_name in self.whole

    def call_module(self, m, forward, args, kwargs):
        if self._is_running:
            return forward(*args, **kwargs)
        if m not in self._modules:  # the code has just made it, as many models make their loss: its operations are recorded
            if any(True for _ in (*m.parameters(), *m.buffers())):
                raise _Refused(f"{_place()} makes a module with values of its own, {type(m).__name__}, in each forward pass")
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if self.is_leaf_module(m, name):
            return super().call_module(m, forward, args, kwargs)
        last = next(reversed(self.graph.nodes))
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:  # a module that cannot be recorded runs as a whole
            self._erase_after(last)
            self.whole[name] = _reason(error)
            return self.create_proxy("call_module", name, args, kwargs)

    def _erase_after(self, last):
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.graph.erase_node(node)

    def getattr(self, attr, attr_val, parameter_proxy_cache):
        name = None if self._is_running or not isinstance(attr_val, torch.Tensor) else self._names.get(id(attr_val))
        return attr_val if name is None else self.create_proxy("get_attr", name, (), {})

    def create_args_for_root(self, root_fn, is_module, concrete_args=None):
        leaves, form = pytree.tree_flatten(self._example)
        recorded = [self._placeholder(number, leaf) for number, leaf in enumerate(leaves)]
        args, kwargs = pytree.tree_unflatten(recorded, form)
        return lambda model: model.forward(*args, **kwargs), [self.root]

    def _placeholder(self, number, leaf):
        if not isinstance(leaf, torch.Tensor) and number not in self._objects:
            return leaf
        node = self.create_node("placeholder", f"input_{number}", (), {})
        node.meta["is_object"] = number in self._objects
        node.meta["example"] = leaf if number in self._objects else self._fake(leaf)
        return self.proxy(node)

    def create_arg(self, a):
        if not (isinstance(a, dict) and dataclasses.is_dataclass(a)):
            return super().create_arg(a)
        fields = {field.name: self.create_arg(getattr(a, field.name)) for field in dataclasses.fields(a)}
        return self.create_node("call_function", type(a), (), fields)  # such as the results of transformers

    def create_node(self, *words, **options):
        if not self._is_running and _modes() != self._ambient:
            raise _Refused(f"{_place()} runs under torch.no_grad(), autocast or the like, which a record does not keep")
        node = super().create_node(*words, **options)
        node.meta["example"] = UNKNOWN
        return node

    def create_proxy(self, kind, target, args, kwargs, *rest, **options):
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        if kind == "output":
            return proxy
        proxy.node.meta["example"] = self._run(proxy.node)
        return proxy

    def to_bool(self, obj):
        return bool(self.answer(obj, self.number_of(obj, (bool, int, float, str, type(None), torch.dtype, torch.device)), bool))

    def iter(self, obj):
        value = obj.node.meta["example"]
        if isinstance(value, (dict, collections.abc.KeysView)):
            return iter(self.answer(obj, list(value), list))
        return iter([obj[number] for number in range(len(obj))])

    def keys(self, obj):
        """Returns the keys of a dict, for f(**obj) and {}.update(obj)."""
        value = obj.node.meta["example"]
        return iter(self.answer(obj, list(value), list)) if isinstance(value, dict) else super().keys(obj)

    # ---- Examples ----

    def record(self, example):
        """Returns the graph of model(*args, **kwargs), with (args, kwargs) as the example."""
        self._example, self._ambient = example, _modes()
        with self._recorded_makers():
            return self.trace(self._model)

    @contextlib.contextmanager
    def _recorded_makers(self):
        """Replaces torch's functions that make tensors by ones that are recorded, and those that describe a type by ones that take a
        recorded type."""
        former = {name: getattr(torch, name) for name in (*MAKERS, *LIMITS)}
        for name, function in former.items():
            setattr(torch, name, self._described(function) if name in LIMITS else self._recorded(function))
        try:
            yield
        finally:
            for name, function in former.items():
                setattr(torch, name, function)

    def _recorded(self, function):
        def make(*args, **kwargs):
            return function(*args, **kwargs) if self._is_running else self.create_proxy("call_function", function, args, kwargs)
        return make

    def _described(self, function):
        def describe(kind):
            if isinstance(kind, Proxy):
                kind = self.answer(kind, self.number_of(kind, torch.dtype))
            return function(kind)
        return describe

    def _fake(self, tensor):
        if self._objects:
            return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor.detach().clone()
        if id(tensor) not in self._fakes:
            with self._mode:
                self._fakes[id(tensor)] = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return self._fakes[id(tensor)]

    def _run(self, node):
        """Returns the example of a node."""
        if node.op == "get_attr":
            return self._fake(self._tensors[node.target] if node.target in self._tensors else vars(self.root)[node.target])
        used = [each.meta["example"] for each in node.all_input_nodes]
        if any(each is UNKNOWN for each in used):
            return UNKNOWN
        args, kwargs = map_arg((node.args, node.kwargs), lambda each: each.meta["example"])
        was_running, self._is_running = self._is_running, True
        before = {each: _state(each.meta["example"]) for each in node.all_input_nodes}
        try:
            with self._mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
                return self._call(node, args, kwargs)
        except DATA:
            return UNKNOWN
        finally:
            self._is_running = was_running
            node.meta["has_changed"] = any(_state(each.meta["example"]) != state for each, state in before.items())

    def _call(self, node, args, kwargs):
        if node.op == "call_function":
            return node.target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        unit = self.root.get_submodule(node.target)
        fakes = {name: self._fake(each) for name, each in (*unit.named_parameters(), *unit.named_buffers())}
        return functional_call(unit, fakes, args, kwargs)

    # ---- Answers ----

    def number_of(self, obj, kinds):
        value = obj.node.meta["example"]
        if value is UNKNOWN or not isinstance(value, kinds):
            raise _Refused(f"{_place()} decides by the values of a tensor")
        return value

    def length_of(self, obj):
        value = obj.node.meta["example"]
        if value is UNKNOWN or not hasattr(value, "__len__"):
            raise _Refused(f"{_place()} asks for the length of a value that has none, or whose length depends on data")
        return len(value)

    def answer(self, obj, value, function=None):
        """Records that the forward pass has used this value, and returns it."""
        asked = self.create_node("call_function", function, (obj.node,), {}) if function else obj.node
        value = function(value) if function is bool else value
        compared = self.create_node("call_function", compare, (asked, value, _place()), {})
        compared.meta["example"] = None
        asked.meta["example"] = value
        return value


def _modes():
    """What a program may switch around a part of its code."""
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def _state(example):
    """Changes if the value, a tensor or a structure of tensors, is changed in place."""
    leaves, form = pytree.tree_flatten(example)
    return form, [(id(each), each._version) if isinstance(each, torch.Tensor) else id(each) for each in leaves]


def _place():
    """Returns the line of the model's code that runs."""
    frame = sys._getframe(1)
    while frame.f_back and (frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


# ---- The graph -------------------------------------------------------------------------------------------------------------


class Recorded(typing.NamedTuple):
    """A forward pass. units: the names of units, in the order of their first calls. whole: the units that could not be divided,
    with reasons."""
    graph: Graph
    units: list
    form: typing.Any  # the tree that the arguments make
    constants: list  # arguments that are part of the record: (number, value)
    whole: dict
    objects: frozenset  # the numbers of arguments that are objects

    def constants_in(self, leaves):
        """Returns the arguments of another call that would be part of its record."""
        return [(number, leaf) for number, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor) and number not in self.objects]

    def inputs_in(self, leaves):
        """Returns the arguments of a call that the graph has as inputs: tensors and objects."""
        return [leaf for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) or number in self.objects]

    def objects_in(self, leaves):
        return [leaves[number] for number in sorted(self.objects)]


def record(model, example, is_unit, takes_objects=False):
    """Records the forward pass of a model in its present mode. example: (args, kwargs). takes_objects: arguments of other types than
    CONSTANTS are inputs, like tensors; else they are part of the record. The model stays as it is."""
    before = set(vars(model))
    leaves, form = pytree.tree_flatten(example)
    objects = frozenset(number for number, leaf in enumerate(leaves)
                        if takes_objects and not isinstance(leaf, (torch.Tensor, *CONSTANTS)))
    tracer = _Tracer(model, is_unit, objects)
    try:
        graph = tracer.record(example)
    except Exception as error:
        raise RuntimeError(f"shoal: the forward pass of {type(model).__name__} cannot be recorded: {_reason(error)}; {REMEDY}") from error
    finally:
        constants = {name: vars(model).pop(name) for name in set(vars(model)) - before}  # tensors that the code has made
        whole = tracer.whole
        vars(tracer).clear()
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in constants:
            node.meta["constant"] = constants[node.target]
        if node.op == "call_module":
            node.meta["changes"] = getattr(model.get_submodule(node.target), "inplace", False) is True
    if objects:
        _drop_values(graph)
    _drop_unused(graph)
    units = list(dict.fromkeys(node.target for node in graph.nodes if node.op == "call_module"))
    fixed = [(number, leaf) for number, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor) and number not in objects]
    return Recorded(graph, units, form, fixed, whole, objects)


def _drop_values(graph):
    """Replaces real values of examples by tensors without memory."""
    for node in graph.nodes:
        node.meta["example"] = pytree.tree_map(
            lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf if isinstance(leaf, CONSTANTS) else UNKNOWN,
            node.meta["example"])


def _reason(error):
    return str(error) if isinstance(error, _Refused) else f"{type(error).__name__}: {error}"


def _drop_unused(graph):
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


def has_effect(node: Node):
    """Returns true if a node does more than to return a value."""
    if node.op in ("placeholder", "output", "call_module"):
        return True
    return node.op != "get_attr" and (node.target is compare or writes(node))


def writes(node: Node):
    """Returns true if a node changes its first argument."""
    if node.op not in ("call_method", "call_function"):
        return False
    if node.meta.get("has_changed"):
        return True
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_inplace = name.endswith("_") and not name.endswith("__")
    return is_inplace or name in ("setitem", "iadd", "isub", "imul", "itruediv") or node.kwargs.get("inplace") is True


def bytes_of(value):
    """Returns the bytes of the tensors of an example."""
    if value is UNKNOWN:
        return 0
    return sum(each.numel() * each.element_size() if isinstance(each, torch.Tensor) else 8 for each in pytree.tree_leaves(value))
