"""What each unit of a model takes: times, bytes, and what it sends to later units; and stages of equal load
(include/shoal/pipeline.h, sections "Profiles" and "Partitions").

A model with values is measured on the example, unit by unit. On the device meta, times follow from the numbers of operations."""
from __future__ import annotations

import contextlib
import ctypes
import json
import time

import torch
from torch.func import functional_call
from torch.fx import Interpreter
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from .. import _native
from .._native import OK
from . import _backward, _graph, _parcels, _replicas, _schedules

TIMES = 3  # a unit is run; the shortest time counts
FLOPS_PER_US, BYTES_PER_US = 10e3, 10e3  # of a core, for a model without values
LINK_BYTES_PER_US, LINK_LATENCY_US = 5e3, 30.0  # between two ranks


# ---- Measuring -------------------------------------------------------------------------------------------------------------


class _Meter(Interpreter):
    """Runs a recorded forward pass, and measures each unit. `found` has the measurements of each unit that a
    Profile needs."""

    def __init__(self, model, recorded):
        super().__init__(model, graph=recorded.graph)
        self._model, self._now = model, None
        self._constants = {node.target: node.meta["constant"] for node in recorded.graph.nodes if "constant" in node.meta}
        self.found = {name: {"forward_us": 0.0, "input_gradient_us": 0.0, "weight_gradient_us": 0.0, "kept_bytes": 0}
                      for name in recorded.units}

    def get_attr(self, target, args, kwargs):
        return self._values_of(self._constants[target] if target in self._constants else self.fetch_attr(target))

    def call_module(self, target, args, kwargs):
        unit = self._model.get_submodule(target)
        values = {name: self._values_of(each) for name, each in (*unit.named_parameters(), *unit.named_buffers())}
        self._now = self.found[target]
        results = []
        best = [min(each) for each in zip(*(self._measure(unit, values, args, kwargs, results) for _ in range(self.times)))]
        for name, took in zip(("forward_us", "input_gradient_us", "weight_gradient_us", "kept_bytes"), best):
            self._now[name] += took
        return pytree.tree_map(_detached, results[-1])

    def call_function(self, target, args, kwargs):
        return self._operation(lambda: super(_Meter, self).call_function(target, args, kwargs))

    def call_method(self, target, args, kwargs):
        return self._operation(lambda: super(_Meter, self).call_method(target, args, kwargs))

    def _operation(self, call):
        """An operation counts for the unit before it; its backward pass for as much."""
        with torch.no_grad():
            took, result = self.clocked(call)
        now = self._now or next(iter(self.found.values()), None)
        if now is not None:
            now["forward_us"] += took
            now["input_gradient_us"] += took
        return result

    def _measure(self, unit, values, args, kwargs, results):
        """Runs a unit forward and backward. Returns its three times and the bytes that it keeps."""
        leaves = pytree.tree_map(_leaf, (args, kwargs))
        args, kwargs = pytree.tree_map(_copy, leaves)
        kept = _Kept([*values.values()])
        with kept.counted():
            forward, result = self.clocked(lambda: functional_call(unit, values, args, kwargs))
        results.append(result)
        roots = [each for each in pytree.tree_leaves(result) if isinstance(each, torch.Tensor) and each.requires_grad]
        leaves = [each for each in pytree.tree_leaves(leaves) if isinstance(each, torch.Tensor) and each.requires_grad]
        if not roots:
            return forward, 0.0, 0.0, kept.bytes
        gradients = [torch.ones_like(root) for root in roots]
        first, (_, rest) = self.clocked(lambda: _backward.input_gradients(roots, gradients, leaves))
        second, _ = self.clocked(rest)
        return forward, first, second, kept.bytes


def _detached(value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, _graph.CONSTANTS):
        return value
    pickled, tensors = _parcels.pickled_without_tensors(value)
    return _parcels.unpickled(pickled, [each.detach() for each in tensors])


def _leaf(value):
    """Returns a leaf of a new graph for a tensor that may have a gradient."""
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return value
    return value.detach().requires_grad_()


def _copy(value):
    """A unit may change its arguments in place, which a leaf does not allow."""
    return value.clone() if isinstance(value, torch.Tensor) else value


class _ClockMeter(_Meter):
    """Measures times, with copies of buffers and views of parameters, so that the model stays as it is."""
    times = TIMES

    def _values_of(self, tensor):
        copy = tensor.detach() if isinstance(tensor, torch.nn.Parameter) else tensor.detach().clone()
        return copy.requires_grad_(tensor.requires_grad)

    def clocked(self, call):
        begin = time.perf_counter()
        result = call()
        return (time.perf_counter() - begin) * 1e6, result


class _FlopMeter(_Meter):
    """Counts operations and bytes, on tensors without memory."""
    times = 1

    def _values_of(self, tensor):
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu").requires_grad_(tensor.requires_grad)

    def clocked(self, call):
        with FlopCounterMode(display=False) as counter:
            result = call()
        return counter.get_total_flops() / FLOPS_PER_US + _graph.bytes_of(result) / BYTES_PER_US, result


class _Kept:
    """The bytes that a graph keeps, without parameters."""

    def __init__(self, values):
        self._seen, self.bytes = {each.untyped_storage()._cdata for each in values}, 0
        self._held = []  # so that no other storage gets the same address

    def counted(self):
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self._held.append(storage)
            self.bytes += storage.nbytes()
        return tensor.detach()  # the graph would hold itself through the tensor, and never be freed


def measure(model, recorded, example):
    """Returns what each unit takes, by its name."""
    inputs = recorded.inputs_in(pytree.tree_leaves(example))
    tensors = [leaf for leaf in inputs if isinstance(leaf, torch.Tensor)]
    is_meta = any(each.is_meta for each in (*model.parameters(), *model.buffers(), *tensors))
    mode = torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) if is_meta else contextlib.nullcontext()
    with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
        meter = (_FlopMeter if is_meta else _ClockMeter)(model, recorded)
        meter.run(*([torch.empty(each.shape, dtype=each.dtype) for each in tensors] if is_meta else inputs))
    return meter.found


# ---- The profile -----------------------------------------------------------------------------------------------------------


def profile_of(model, recorded, example):
    """Returns the model's profile as the library's JSON."""
    found, units = measure(model, recorded, example), []
    used, outputs = _unit_of(recorded), {}
    for node, last in _last_readers(recorded, used).items():
        if last > used[node]:
            outputs.setdefault(used[node], {}).setdefault(last, []).append(_graph.bytes_of(node.meta["example"]))
    parameters = _parameters_of(model, recorded, used)
    found[recorded.units[-1]]["kept_bytes"] += _bytes_of_loss(recorded)
    for number, name in enumerate(recorded.units):
        sent = {last: sum(sizes) for last, sizes in outputs.get(number, {}).items()}
        units.append({"name": name, **found[name], "parameter_bytes": sum(size for size, users in parameters if number in users),
                      "output_bytes": sent.pop(number + 1, 0),
                      "outputs": [{"to": recorded.units[last], "bytes": size} for last, size in sorted(sent.items()) if size]})
    return json.dumps({"name": type(model).__name__, "units": units, "ties": _ties(recorded.units, parameters)})


def _bytes_of_loss(recorded):
    """Returns the bytes that the last unit has besides, for the loss: that keeps about as much as the model's result, whose gradient is
    as large."""
    output = next(node for node in recorded.graph.nodes if node.op == "output")
    return 2 * sum(_graph.bytes_of(node.meta["example"]) for node in output.all_input_nodes)


def _unit_of(recorded):
    """Returns for each node the number of its unit. An operation belongs to the unit before it."""
    numbers, unit, of = {name: number for number, name in enumerate(recorded.units)}, 0, {}
    for node in recorded.graph.nodes:
        if node.op == "call_module":
            unit = max(unit, numbers[node.target])
        if node.op != "get_attr":
            of[node] = unit
    return of


def _last_readers(recorded, used):
    return {node: max((used[user] for user in node.users), default=0) for node in used}


def _parameters_of(model, recorded, used):
    """Returns (bytes, numbers of the units that use it) of each parameter."""
    users, sizes = {}, {}
    names = dict(model.named_parameters(remove_duplicate=False))
    for node in recorded.graph.nodes:
        if node.op == "call_module":
            found, numbers = model.get_submodule(node.target).parameters(), [used[node]]
        elif node.op == "get_attr" and node.target in names:
            found, numbers = [names[node.target]], [used[user] for user in node.users]
        else:
            continue
        for parameter in found:
            users.setdefault(id(parameter), set()).update(numbers)
            sizes[id(parameter)] = parameter.numel() * parameter.element_size()
    return [(sizes[key], users[key]) for key in users]


def _ties(units, parameters):
    groups = {}
    for size, users in parameters:
        if len(users) > 1:
            groups[tuple(sorted(users))] = groups.get(tuple(sorted(users)), 0) + size
    return [{"units": [units[number] for number in users], "bytes": size} for users, size in groups.items()]


# ---- The partition ---------------------------------------------------------------------------------------------------------


class Partition:
    """The library's choice of stages for a profile. schedule: a Schedule, or a word for one that fits the model. first_units: the
    number of the first unit of each stage. replicas: the number for each rank of the schedule, "auto", or None (one each)."""

    def __init__(self, profile, schedule, ranks, microbatches, stages, memory, options, replicas=None):
        self._library, self._replicas = _native.load(), replicas
        if replicas not in (None, "auto"):
            options, ranks = {"rank_replicas": (ctypes.c_uint32 * len(replicas))(*replicas), **options}, len(replicas)
        self._chosen = _native.PartitionOptions(**{"memory_bytes": memory or 0, "bytes_per_us": LINK_BYTES_PER_US,
                                                   "latency_us": LINK_LATENCY_US, **options})
        given = profile.encode()
        with self._owned("profile", lambda out, text: self._library.profile_read(given, len(given), out, text,
                                                                                 _schedules.TEXT_BYTES)) as address:
            if isinstance(schedule, _schedules.Schedule):
                self.schedule, self.kind = schedule, "as given"
                make = self._make_for
            else:
                make = self._choose
            with self._owned("partition", lambda out, text: make(address, schedule, ranks, microbatches, stages, out, text)) as made:
                self._read(made)

    @contextlib.contextmanager
    def _owned(self, kind, call):
        """Makes an object of the library, and frees it at the end."""
        address, text = ctypes.c_void_p(), ctypes.create_string_buffer(_schedules.TEXT_BYTES)
        status = call(ctypes.byref(address), text)
        if status != OK:
            raise ValueError(f"shoal: {text.value.decode(errors='replace') or _native.error_of(status)}")
        try:
            yield address
        finally:
            getattr(self._library, f"{kind}_free")(address)

    def _make_for(self, profile, schedule, ranks, microbatches, stages, out, text):
        return self._library.partition_create(profile, schedule.address, ctypes.byref(self._chosen), out, text, _schedules.TEXT_BYTES)

    def _choose(self, profile, kind, ranks, microbatches, stages, out, text):
        options, schedule, chosen = _schedules.options_of(kind, ranks, microbatches, stages), ctypes.c_void_p(), ctypes.c_int()
        call = self._library.partition_replicate if self._replicas == "auto" else self._library.partition_choose
        status = call(profile, ctypes.byref(options), ctypes.byref(self._chosen), ctypes.byref(schedule), out, ctypes.byref(chosen), text,
                      _schedules.TEXT_BYTES)
        if status == OK:
            self.schedule, self.kind = _schedules.Schedule(schedule.value), self._library.schedule_name(chosen.value).decode()
        if status == OK and self._replicas not in (None, "auto"):
            self.schedule = self.schedule.replicated(self._replicas)
        return status

    def _read(self, address):
        self.stages = [_native.Stage() for _ in range(self.schedule.stages)]
        for number, stage in enumerate(self.stages):
            self._library.partition_stage(address, number, ctypes.byref(stage))
        self.reasons = [self._library.partition_reason(address, number).decode() for number in range(len(self.stages))]
        self.times, self.memory = _native.PartitionTimes(), [_native.RankMemory() for _ in range(self.schedule.ranks)]
        self._library.partition_step_times(address, ctypes.byref(self.times))
        for rank, memory in enumerate(self.memory):
            self._library.partition_memory(address, rank, ctypes.byref(memory))
        self.first_units = [stage.first_unit for stage in self.stages]
        recomputed = [number for number, stage in enumerate(self.stages) if stage.recomputes]
        if recomputed != self.schedule.recomputed_stages():
            self.schedule = self.schedule.recomputed(recomputed)

    def text(self, units):
        """Returns a line for each stage and each rank, and one for the step."""
        lines = [f"schedule: {self.kind}, {self.schedule.microbatches} microbatches"]
        for number, stage in enumerate(self.stages):
            names = units[stage.first_unit:stage.first_unit + stage.unit_count]
            named = " to ".join(dict.fromkeys((names[0], names[-1]))) if names else "no unit"
            passes = 2 if stage.recomputes else 1
            lines.append(f"stage {number} on {_replicas.members_named(self.schedule, number)}: {named}, "
                         f"{passes * stage.forward + stage.input_gradient + stage.weight_gradient:.0f} us per microbatch"
                         f"{', recomputed' if stage.recomputes else ''}; {self.reasons[number]}")
        lines += [f"{_replicas.rank_named(self.schedule, rank)}: {memory.total_bytes / 2**20:.1f} MiB{' each' if count > 1 else ''}"
                  for rank, (memory, count) in enumerate(zip(self.memory, self.schedule.replicas()))]
        times = self.times
        lines.append(f"predicted step: {times.step:.0f} us, bubble {100 * times.bubble:.1f} %, no partition is shorter than "
                     f"{times.lower_bound:.0f} us")
        return "\n".join(lines)
