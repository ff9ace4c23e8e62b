"""Data-parallel training of a model whose parameters, gradients and optimizer states are sharded over the ranks
(include/shoal/shards.h, docs/shards.md).

    optimizer = torch.optim.AdamW(model.parameters())
    model = shoal.torch.ShardedDataParallel(model, optimizer=optimizer)

    forward     a hook before a module gathers its unit: its parameters become views of that memory; a hook after it releases the
                unit: its parameters are Released
    backward    the graph has kept tensors in the memory of a unit as places in it: the first one that is needed gathers the unit
                again. The last gradient of a unit begins the sum of all of them and releases the unit
    step        optimizer.step() waits for the sums and steps this rank's shards

                              gather(u)                        gather(u)                ready(all of u), release(u)
        forward of module u   |--------| release(u)  backward  |---------------------|  step()

The order of the last pass predicts which unit comes next, and its gather begins one unit ahead.
"""
from __future__ import annotations

import weakref

import torch
from torch import nn

from . import _checkpoint, _communicator, _divided, _first_values, _gradients, _optimizer, _own_part, _shards, ddp
from ._parameters import Parameters

CHANGED = "change the module before it is wrapped, or make a new ShardedDataParallel of it on all ranks"
WHOLE_BYTES = 64 << 10  # units of fewer bytes stay whole: a gather costs more time than this saves memory
PLAIN = (torch.Tensor, nn.Parameter)


# ---- Parameters that are not live ------------------------------------------------------------------------------------------

_READABLE = {getattr(torch.Tensor, name).__get__ for name in
             ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad", "grad_fn", "ndim", "_version", "is_sparse")}
_READABLE |= {torch.Tensor.grad.__set__, torch.Tensor.size, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel,
              torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__,
              torch.Tensor.register_hook}


class Released(nn.Parameter):
    """The class of a parameter while its unit is not live. It has its shape and type, but an operation on it is an error."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        if function in _READABLE:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*arguments, **(options or {}))
        flat, _ = torch.utils._pytree.tree_flatten((arguments, options))
        name = next((each._shoal_name for each in flat if type(each) is cls), "of a sharded module")
        raise RuntimeError(f"shoal: parameter {name} is sharded, and its unit is not live: values are there while the module that owns "
                           "it runs within the wrapper's forward pass. If another module uses it, choose a unit that has both "
                           "(units=); for checkpoints call full_state_dict() on all ranks")


class _LiveUnit:
    """A unit on this rank. Its parameters are views of its memory while it is live; these views are kept for each place in memory
    that the unit has had."""

    def __init__(self, unit, parameters, placeholders, is_whole):
        self.number, self.indices, self.is_whole = unit.number, sorted(unit.indices), is_whole
        self._parameters = [parameters[index] for index in self.indices]
        self._placeholders = [placeholders[index] for index in self.indices]
        self._places = {}  # address: bytes, views of parameters
        self.begin, self.end, self.bytes = 0, 0, None  # while it is live
        self.users = 0  # modules whose forward pass runs
        self.is_repeated = False  # a forward pass within a backward pass has used it, whose graph may keep tensors in this memory
        self._uses = 0  # of the memory by our own tensors
        self._versions = []  # of the parameters when it became live
        self.clear_gradients()

    def clear_gradients(self):
        self.missing = len(self.indices)  # gradients in this step
        self.waiting = []  # those that autograd has accumulated, and the engine does not have yet

    def show(self, shards):
        addresses = [shards.address_of(index) for index in self.indices]
        if addresses[0] not in self._places:
            with torch.inference_mode(False):  # a later training pass uses the same views
                self._places[addresses[0]] = self._views_at(shards, addresses)
        self.bytes, views = self._places[addresses[0]]
        self.begin, self.end = addresses[0], addresses[0] + self.bytes.numel()
        for parameter, view in zip(self._parameters, views):
            parameter.__class__ = nn.Parameter
            parameter.data = view
        self._versions = [parameter._version for parameter in self._parameters]
        self._uses = self._uses_now()

    def _uses_now(self):
        return torch._C._storage_Use_Count(self.bytes.untyped_storage()._cdata)

    def is_kept(self):
        """Returns true if a graph may need this place in memory: a repeated forward pass keeps tensors instead of places."""
        return self.is_repeated and self._uses_now() > self._uses

    def _views_at(self, shards, addresses):
        sizes = [form.numel() * form.element_size() for form in self._placeholders]
        whole = shards.bytes_at(addresses[0], addresses[-1] - addresses[0] + sizes[-1])
        begins = [address - addresses[0] for address in addresses]
        return whole, [whole[begin:begin + size].view(form.dtype).as_strided(form.shape, form.stride())
                       for begin, size, form in zip(begins, sizes, self._placeholders)]

    def mark_changed(self):
        """Graphs that have kept former values of a whole unit are refused."""
        for parameter in self._parameters if self.is_whole else ():
            torch.autograd.graph.increment_version(parameter)

    def hide(self):
        self.is_repeated = False
        for parameter, version in zip(self._parameters, self._versions):
            if parameter._version != version:
                raise RuntimeError(f"shoal: parameter {parameter._shoal_name} was changed in place while its unit was live, and such a "
                                   "change is lost: load_full_state_dict() changes values, and an embedding must have no max_norm")
        for parameter, placeholder in zip(self._parameters, self._placeholders):
            parameter.data = placeholder
            parameter.__class__ = Released


# ---- Which units are live --------------------------------------------------------------------------------------------------


class _Order:
    """Predicts the next unit: the one that came next at this place of the last pass."""

    def __init__(self):
        self._last, self._now = [], []

    def begin(self):
        self._last, self._now = self._now, []

    def after(self, number):
        self._now.append(number)
        place = len(self._now)
        is_known = place < len(self._last) and self._last[place - 1] == number
        return self._last[place] if is_known else _shards.NO_UNIT


class _Saved:
    """A tensor in the memory of a live unit, as an autograd graph keeps it: its place in the unit."""

    def __init__(self, unit, tensor, changes):
        self.unit, self.changes, self.offset = unit, changes, tensor.data_ptr() - unit.begin
        self.form = tensor.dtype, tensor.shape, tensor.stride()
        self.bits = tensor.is_conj(), tensor.is_neg()

    def tensor(self):
        """The tensor, at the unit's present place."""
        dtype, shape, strides = self.form
        found = self.unit.bytes[self.offset:].view(dtype).as_strided(shape, strides)
        is_conj, is_neg = self.bits
        found = torch._neg_view(found) if is_neg else found
        return found.conj() if is_conj else found


class _Flow:
    """Gathers and releases units. All ranks run the same passes, so they make the same calls. Hooks call it on the thread that
    runs the forward or backward pass."""

    def __init__(self, shards, units, names, parameters, live_units, marker):
        placeholders = _first_values.placeholders_of(parameters)
        self._shards, self._names, self._parameters, self._most = shards, names, parameters, live_units
        self._marker = marker  # a parameter that gets a zero gradient, because a loss scaler looks for one; or None
        self.units = [_LiveUnit(unit, parameters, placeholders, shards.address_of(unit.indices[0]) is not None)
                      for unit in units.all]  # now only units that stay whole have an address
        self._unit_of = [self.units[unit.number] for unit in units.of]
        self._is_ready = bytearray(len(parameters))
        self._live = {}  # by number, the one that was used last at the end
        self._orders = {"forward": _Order(), "inference": _Order(), "backward": _Order()}
        self.is_inside = self._is_backward_begun = False  # inside: the wrapper's forward pass runs
        self._open = None  # the unit whose gradients the engine gets one by one
        self.changes = 0
        for index, (name, parameter) in enumerate(zip(names, parameters)):
            parameter._shoal_name = name
            parameter.register_post_accumulate_grad_hook(self._hook_of(index))
        for unit in self.units:
            unit.show(shards) if unit.is_whole else unit.hide()

    def _hook_of(self, index):
        flow = weakref.ref(self)

        def accumulated(_):
            alive = flow()
            if alive is not None:
                alive.ready(index)
        return accumulated

    # ---- Live units ----

    def use(self, unit, spared=None):
        """Makes a unit live, and leaves the unit `spared` live."""
        if unit.is_whole:
            return
        if unit.number not in self._live:
            self._make_room(unit, spared)
            self._shards.gather(unit, self._order().after(unit.number))
            unit.show(self._shards)
        self._live.pop(unit.number, None)
        self._live[unit.number] = unit

    def _make_room(self, wanted, spared):
        """Releases the unit that was used longest ago, if as many as possible are live."""
        if len(self._live) < self._most:
            return
        for unit in self._live.values():
            if not unit.users and not unit.is_kept() and unit is not spared:
                self._release(unit)
                return
        raise RuntimeError(f"shoal: no room for the unit of parameter {self._names[wanted.indices[0]]}: {self._most} units are live and "
                           "in use: pass a larger live_units, choose units that do not contain each other, or checkpoint fewer "
                           "units at a time")

    def _release(self, unit):
        del self._live[unit.number]
        unit.hide()
        self._shards.release(unit)

    def _release_unused(self, unit):
        if unit.number in self._live and not unit.users and not unit.is_kept():
            self._release(unit)

    def release_all(self):
        """Ends all uses: those of parameters that had no gradient, or of a pass that an exception has ended."""
        for unit in list(self._live.values()):
            unit.users = 0
            self._release(unit)

    def _order(self):
        if not _is_in_backward():
            return self._orders["forward" if torch.is_grad_enabled() else "inference"]
        if not self._is_backward_begun:
            self._is_backward_begun = True
            self._orders["backward"].begin()
        return self._orders["backward"]

    # ---- Forward ----

    def begin_forward(self):
        self.release_all()
        self._is_backward_begun = False
        self._orders["forward" if torch.is_grad_enabled() else "inference"].begin()

    def enter(self, units):
        """Before the forward pass of a module that needs these units."""
        if not self.is_inside and not _is_in_backward():
            raise RuntimeError(f"shoal: a module with parameter {self._names[units[0].indices[0]]} runs outside the forward pass of the "
                               "wrapper: call the ShardedDataParallel itself, not its module")
        for unit in units:
            self.use(unit)
            unit.users += 1

    def leave(self, units):
        """After the forward pass of a module, also if an exception has ended it."""
        is_repeated = _is_in_backward() and torch.is_grad_enabled()  # by a checkpoint: its backward pass follows
        for unit in units:
            unit.users = max(0, unit.users - 1)
            unit.is_repeated |= is_repeated
            if not is_repeated:
                self._release_unused(unit)

    # ---- Saved tensors ----

    def pack(self, tensor):
        """What a graph keeps instead of a tensor. A view of a unit's memory becomes its place in the unit."""
        if type(tensor) in PLAIN and tensor.layout is torch.strided and tensor.device.type == "cpu":
            address = tensor.data_ptr()
            for unit in self._live.values():
                if unit.begin <= address < unit.end:
                    return _Saved(unit, tensor, self.changes)
        return tensor.detach(), tensor._version  # detached, else a graph would own its own output

    def unpack(self, kept):
        if isinstance(kept, _Saved):
            return self._tensor_of(kept)
        tensor, version = kept
        if tensor._version != version:
            raise RuntimeError("shoal: one of the variables needed for gradient computation has been modified by an inplace "
                               f"operation: a tensor of shape {list(tensor.shape)} is at version {tensor._version}, and {version} was "
                               "saved")
        return tensor

    def _tensor_of(self, saved):
        name = self._names[saved.unit.indices[0]]
        if saved.changes != self.changes:
            raise RuntimeError(f"shoal: this graph needs the unit of parameter {name} as it was before optimizer.step() or "
                               "load_checkpoint(): make the backward pass before that")
        if torch.is_grad_enabled():
            raise NotImplementedError(f"shoal: create_graph=True is not possible with the sharded parameter {name}: such a graph would "
                                      "keep memory of units that are released")
        last = next(reversed(self._live.values()), None)  # the same operation may just have got a tensor of this unit
        self.use(saved.unit, last)
        return saved.tensor()

    # ---- Gradients and steps ----

    def ready(self, index):
        """The gradient of a parameter has been accumulated. The last one of a unit begins their sum."""
        unit = self._unit_of[index]
        if self._is_ready[index]:
            raise RuntimeError(f"shoal: parameter {self._names[index]} got a second gradient before optimizer.step(): make one backward "
                               "pass for each step, of the sum of all losses, or call zero_grad() to leave a batch out; with a "
                               "reentrant checkpoint of a module that is used twice pass use_reentrant=False")
        self._is_ready[index] = 1
        unit.missing -= 1
        unit.waiting.append(index)
        if self._open is None:
            self._open = unit
        if unit is self._open or not unit.missing:
            self._mark_waiting(unit)
        if not unit.missing:
            self._open = None if unit is self._open else self._open
            self._release_unused(unit)

    def _mark_waiting(self, unit):
        """The engine has room for gradients of two units that are incomplete. One is marked as its gradients come, so that the next
        one reuses their memory. The others keep them until they are complete, and then pass through the second place."""
        for index in unit.waiting:
            self._mark(index)
        unit.waiting.clear()

    def _mark(self, index):
        parameter = self._parameters[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient.layout is not torch.strided or gradient.dtype is not parameter.dtype:
            raise TypeError(f"shoal: the gradient of {self._names[index]} is a tensor of {gradient.layout} and {gradient.dtype}, but must "
                            f"be dense and {parameter.dtype}")
        if gradient.stride() != parameter.stride() or gradient.is_conj() or gradient.is_neg():
            gradient = torch.empty_strided(parameter.size(), parameter.stride(), dtype=parameter.dtype).copy_(gradient)
        self._shards.ready(index, gradient)
        if parameter is self._marker:
            parameter.grad = torch.zeros_like(gradient)

    def step(self):
        """Steps this rank's shards. A unit without gradients stays as it is."""
        for unit in self.units:
            if 0 < unit.missing < len(unit.indices):
                lacking = next(index for index in unit.indices if not self._is_ready[index])
                raise RuntimeError(f"shoal: parameter {self._names[lacking]} has no gradient, but others of its unit have one: choose "
                                   "units that are used as a whole (units=), or freeze it with requires_grad_(False)")
        self.release_all()
        result = self._shards.step()
        self.count_change()
        self._clear_gradients()
        return result

    def count_change(self):
        """Parameters have other values. Graphs that need the former ones are refused."""
        self.changes += 1
        for unit in self.units:
            unit.mark_changed()

    def drop(self):
        """Drops gradients of a backward pass that no step follows."""
        if any(self._is_ready):
            self._shards.drop()
            for unit in self.units:
                for index in unit.waiting:
                    self._parameters[index].grad = None
            self._clear_gradients()

    def _clear_gradients(self):
        self._is_ready, self._open = bytearray(len(self._parameters)), None
        for unit in self.units:
            unit.clear_gradients()


def _is_in_backward():
    return torch._C._current_graph_task_id() >= 0


# ---- The optimizer ---------------------------------------------------------------------------------------------------------


class _Sharding(_optimizer.Translation):
    """Runs a torch optimizer on the shards of one module."""
    WHERE, REMEDY = "on shards", "use torch.distributed.fsdp.fully_shard over \"shoal\""
    CALLS, READ, WRITE = "shards_", "read", "write"

    def attach(self, shards):
        self._take_over(shards)
        if self._scaler is not None:  # GradScaler then leaves the check for infinity to step()
            self.optimizer._step_supports_amp_scaling = True

    def make_flow(self, shards, units, live_units):
        marker = self._marker if self._scaler is not None else None
        self._flow = _Flow(shards, units, self._names, self._parameters, live_units, marker)
        return self._flow

    def step(self):
        self._pass_settings()
        self._result = self._flow.step()
        if self._scaler is not None:
            self._report_to_scaler(self._result.is_skipped)

    def drop(self):
        self._flow.drop()

    def _report_to_scaler(self, is_skipped):
        """Its update() then lowers the scale on all ranks alike."""
        found = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
        for each in found.values():
            each.fill_(float(is_skipped))

    # ---- Values of parameters ----

    def settle(self):
        self._flow.release_all()

    def loaded(self):
        super().loaded()
        self._flow.count_change()

    def read_parameter(self, index):
        """Returns a whole parameter. All ranks call it, in the same order."""
        values = self._empty(index)
        if values.numel():
            self._call(self.READ, index, _optimizer.MASTER, values.data_ptr())
        return values.to(self._forms[index].dtype)

    def write_parameter(self, index, values):
        """Sets a parameter on this rank's shard."""
        ordered = self._empty(index).copy_(values)
        if ordered.numel():
            self._call(self.WRITE, index, _optimizer.MASTER, ordered.data_ptr())


# ---- The module ------------------------------------------------------------------------------------------------------------


class ShardedDataParallel(nn.Module):
    """Trains a module on the CPU with torch.optim's SGD, Adam, AdamW or Adagrad, made over its parameters and without steps so
    far. Each rank keeps its shard of every parameter and its optimizer states; a unit of parameters is whole only while it is
    used.

    `units`: which modules' parameters are gathered together: a set of classes, or a function that returns true for such a module.
    By default the members of the longest ModuleList or Sequential. Every other module that owns parameters is a unit of its own.
    `live_units`: how many units are in memory at a time, at least 2. `whole_bytes`: units of fewer bytes stay whole.
    `max_norm` clips the norm of the averages, in place of torch.nn.utils.clip_grad_norm_; see grad_norm(). `grad_scaler` is the
    torch.amp.GradScaler that scales the loss: a step with an infinite gradient is skipped on all ranks.

    Making it is a collective call. Rank 0's parameters and buffers are copied to all ranks, unless init_sync=False promises that
    they are equal. Parameters on the device meta get their values one module after the other, by `init`, a function that sets what
    a module owns itself, or by its reset_parameters(). Parameters that require no gradient, and buffers, stay whole on every
    rank. `shard_weights`: a number for each rank, whose share of the parameters is proportional to it; equal shares otherwise."""

    def __init__(self, module, optimizer, units=None, live_units=3, whole_bytes=WHOLE_BYTES, max_norm=None, grad_scaler=None,
                 process_group=None, init_sync=True, init=None, shard_weights=None):
        super().__init__()
        if not (isinstance(live_units, int) and live_units >= 2):
            raise ValueError(f"shoal: live_units is {live_units!r}, but must be a number from 2 on: one unit computes while the next one "
                             "is gathered")
        _own_part.refuse_stages(module, "ShardedDataParallel")
        _divided.refuse_max_norm(module, max_norm)
        self.module = module
        new = _first_values.leave_meta(module, optimizer)
        self._watched = Parameters(module, (), CHANGED)
        names, parameters = self._watched.names, self._watched.tensors
        _check(names, parameters)
        self.process_group = ddp._group_of(process_group, None, "cpu")
        self._optimizer = _Sharding(optimizer, names, parameters, self.process_group.rank(), max_norm, grad_scaler)
        divided = _shards.Units(module, parameters, units)
        if init_sync:
            ddp._compare_shapes(self.process_group, names, parameters)
        weights = _optimizer.weights_of(shard_weights, self.process_group.size())
        self._shards = self._make_shards(names, parameters, divided, weights, live_units=live_units, whole_bytes=whole_bytes)
        self._optimizer.attach(self._shards)
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        _first_values.set_values(module, new, init, self.process_group if init_sync else None,
                                 lambda parameter: self._optimizer.write_parameter(indices[id(parameter)], parameter.detach()))
        self._flow = self._optimizer.make_flow(self._shards, divided, live_units)
        for owner, used in divided.used_by:
            self._hook(owner, [self._flow.units[unit.number] for unit in used])

    def _make_shards(self, names, parameters, divided, weights, **options):
        group = self.process_group
        timeout = _communicator.timeouts.get(f"torch.{group.group_name}")
        store = torch.distributed.distributed_c10d._get_process_group_store(group)
        communicator = _gradients.Communicator(store, group.rank(), group.size(), timeout, "shards")
        return _shards.Shards(communicator, names, parameters, divided, timeout_ms=_communicator.milliseconds(timeout), **options,
                              **self._optimizer.options(weights=weights))

    def _hook(self, owner, units):
        flow = self._flow
        owner.register_forward_pre_hook(lambda *_: flow.enter(units), prepend=True)
        owner.register_forward_hook(lambda *_: flow.leave(units), always_call=True)

    # ---- A step ----

    @torch._disable_dynamo
    def forward(self, *inputs, **kwargs):
        self._look()
        if _is_in_backward():
            return self.module(*inputs, **kwargs)  # a checkpoint around the wrapper repeats the pass
        self._flow.begin_forward()
        self._flow.is_inside = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._flow.pack, self._flow.unpack):
                return self.module(*inputs, **kwargs)
        finally:
            self._flow.is_inside = False

    def _look(self):
        with torch._C.DisableTorchFunctionSubclass():  # forms of released parameters may be read
            replaced = self._watched.look()
        if replaced:
            raise RuntimeError(f"shoal: parameter {self._watched.names[replaced[0]]} was replaced by another tensor: set the values of a "
                               "sharded module with load_full_state_dict()")

    def zero_grad(self, set_to_none=True):
        self._optimizer.optimizer.zero_grad(set_to_none)

    def grad_norm(self):
        """With max_norm=: the norm of the last step's averages, before they were clipped; None before a step."""
        return self._optimizer.norm()

    def no_sync(self):
        raise NotImplementedError("shoal: ShardedDataParallel has no no_sync(): a rank has no room for all gradients. Make one backward "
                                  "pass of the sum of the losses, or use shoal.torch.DistributedDataParallel(optimizer=)")

    # ---- Values ----

    def full_state_dict(self, to=0):
        """Collects the state of the module, without this wrapper, on rank `to`, as copies; the other ranks get an empty dict. All
        ranks call it between steps."""
        is_kept = self.process_group.rank() == to
        self._flow.release_all()
        values = {}
        for index, parameter in enumerate(self._watched.tensors):
            value = self._optimizer.read_parameter(index)
            values[id(parameter)] = value if is_kept else None
        state = self.module.state_dict(keep_vars=True)
        return {name: values[id(tensor)] if id(tensor) in values else tensor.detach().clone()
                for name, tensor in state.items()} if is_kept else {}

    def load_full_state_dict(self, state, strict=True):
        """Loads the state of a whole module, such as full_state_dict() returns, of which this rank keeps its shards. All ranks call
        it between steps, with equal values. Load the optimizer's state afterwards."""
        self._flow.release_all()
        own = self.module.state_dict(keep_vars=True)
        _check_state(own, state, strict)
        indices = {id(tensor): index for index, tensor in enumerate(self._watched.tensors)}
        with torch.no_grad():
            for name in own.keys() & state.keys():
                index = indices.get(id(own[name]))
                if index is None:
                    own[name].copy_(state[name])
                else:
                    self._optimizer.write_parameter(index, state[name])

    def save_checkpoint(self, folder, step, extra=None, keep=0):
        """Saves a sharded checkpoint of the module and its optimizer, in which each rank writes its share, as
        shoal.torch.DistributedDataParallel.save_checkpoint() does. Either class loads it."""
        _checkpoint.save(self.module, self.process_group, self._optimizer, folder, step, extra, keep)

    def load_checkpoint(self, folder, step=None):
        """Loads a sharded checkpoint, of which each rank reads its share, as DistributedDataParallel.load_checkpoint() does.
        Returns (step, extra)."""
        return _checkpoint.load(self.module, self.process_group, self._optimizer, folder, step)

    def memory(self):
        """Returns the bytes of shards, live units, gradients and whole units on this rank, by these names."""
        used = self._shards.memory()
        return {name.removesuffix("_bytes"): getattr(used, name)
                for name in ("shard_bytes", "live_bytes", "gradient_bytes", "whole_bytes")}

    def state_dict(self, *_, **__):
        raise RuntimeError("shoal: each rank has only its shard of the parameters: call full_state_dict() or save_checkpoint() on all ranks")

    def load_state_dict(self, *_, **__):
        raise RuntimeError("shoal: each rank keeps only its shard of the parameters: call load_full_state_dict() on all ranks")

    def _apply(self, *_, **__):
        raise RuntimeError("shoal: a sharded module cannot be converted or moved: do that before it is wrapped")

    def __getstate__(self):
        raise TypeError("shoal: a sharded module cannot be copied or pickled: save its full_state_dict(), and the optimizer's "
                        "state_dict() after consolidate_state_dict()")


def _check(names, parameters):
    ddp._check_parameters(names, parameters)
    for name, parameter in zip(names, parameters):
        if type(parameter) is not nn.Parameter:
            kind = type(parameter).__name__
            raise TypeError(f"shoal: parameter {name} is a {kind}, but ShardedDataParallel shards plain parameters only: initialize or "
                            "convert it first" if not issubclass(type(parameter), Released) else
                            f"shoal: parameter {name} is sharded already: wrap a module once")
        if parameter.device.type != "cpu":
            raise NotImplementedError(f"shoal: parameter {name} is on {parameter.device}, and ShardedDataParallel trains on the CPU: use "
                                      "torch.distributed.fsdp.fully_shard for other devices")


def _check_state(own, state, strict):
    """Refuses the state of another module before anything is loaded."""
    missing, other = [name for name in own if name not in state], [name for name in state if name not in own]
    if strict and (missing or other):
        raise ValueError(f"shoal: the state is of another module: it lacks {missing[:3]} and also has {other[:3]} ({len(missing)} and "
                         f"{len(other)} in all)")
    for name in own.keys() & state.keys():
        if own[name].shape != state[name].shape:
            raise ValueError(f"shoal: the state is of another module: {name} has the shape {list(state[name].shape)} there and "
                             f"{list(own[name].shape)} here")
