"""Tensor parallelism: each rank of a group has a part of the model's layers, over torch's DeviceMesh and DTensor.

    model = shoal.torch.tensor_parallel(model)          all ranks, or a mesh, or a group
    optimizer = torch.optim.AdamW(model.parameters())   this rank's parts
    loss(model(inputs), targets).backward()             the same batch on all ranks of the group
    shoal.torch.tensor.clip_grad_norm_(model, 1.0)
    optimizer.step()

    plan      which modules are divided, and how (_tensor_plan.py)
    parts     a divided module has plain parameters, of this rank's part; values between them are DTensors (_tensor_parts.py)
    layers    the modules that compute with parts (_tensor_layers.py)
    rules     what DTensor does not know of attention on the CPU (_tensor_rules.py)
"""
from __future__ import annotations

import logging
import math
import re

import torch
import torch.distributed as dist
from torch import nn

OLDEST_TORCH = (2, 5)  # whose DTensor is public
if tuple(int(number) for number in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise NotImplementedError(f"shoal: tensor parallelism needs torch 2.5 or newer, and this is {torch.__version__}")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402

from . import _divided, _own_part, _tensor_layers, _tensor_plan, _tensor_rules  # noqa: E402
from ._tensor_layers import Columns, Divided, Rows, Words  # noqa: E402
from ._tensor_parts import Part, Team, whole_of  # noqa: E402

_log = logging.getLogger("shoal.torch")


def tensor_parallel(model, mesh=None, plan=None, *, within=None, init=None):
    """Divides the model's layers among the ranks of a group, in place, and returns the model. All ranks of the group call it.

    `mesh`: a DeviceMesh of one dimension, a process group, or a degree, which means groups of that many neighboring ranks; by
    default all ranks. All ranks of the group train on the same batch. For data parallelism and pipelines, use groups of ranks with
    the same part.

    `plan`: by default the plan that a model of transformers brings, and for other modules the automatic plan. That divides pairs of
    linear layers (nn.Linear, and Conv1D of transformers), attention with separate or joined queries, keys and values,
    nn.MultiheadAttention, and embeddings with the linear layers that score their rows. "hf": the model's own plan only. A dict: a
    style for each name of a module, in which * is one part of a name: "colwise", "colwise_gather_output", "rowwise",
    "packed_colwise" (two sections of columns), "qkv" (three), "heads", "replicate", or torch's ColwiseParallel() and
    RowwiseParallel(). `within`: a function that returns true for the names of modules that a plan other than a dict may divide. A
    line of the log names the modules that stay whole.

    Parameters get the values of the group's first rank. If they are on the device meta, they get memory and values module by
    module: by init(module), which sets only the module's own parameters, or by its reset_parameters(). With the same seed, the
    values are those of one process that makes its modules in this order.

    The model's code stays as it is. Between divided modules, values are DTensors, which have the shape of the whole value. Dropout
    of values in parts draws the same numbers on each rank of the group. In models of transformers, config.use_cache becomes
    False."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"shoal: model must be an nn.Module, not {type(model).__name__}")
    if _divided.parts_of(model)[1] is not None:
        raise RuntimeError("shoal: the model is divided already: call tensor_parallel() once")
    mesh = _mesh_of(mesh, _device_of(model))
    choices, whole = _choose(model, plan, mesh.size(), within)
    _tensor_plan.check(model, choices, mesh.size())
    team = Team(mesh)
    _compare(team, choices)
    _tensor_rules.register()
    _divide(model, choices, team, init)
    _keep_no_words(model)
    _tell(model, choices, whole, team)
    return model


def plan_of(model, degree):
    """Returns the plan that tensor_parallel() makes by itself for a number of ranks: a dict to change, and to pass as plan=."""
    return _tensor_plan.words_of(_choose(model, None, degree)[0])


def memory_of(model, degree, plan=None):
    """Returns a dict: the bytes of parameters that each of this number of ranks will have (bytes), those among them that are the
    same on all ranks (same_bytes), and those of the whole model (whole_bytes). With AdamW, parameters, gradients and states take
    four times as much."""
    choices, _ = _choose(model, plan, degree)
    _tensor_plan.check(model, choices, degree)
    modules = dict(model.named_modules())
    divided = {id(modules[name].get_parameter(key)) for name, choice in choices.items() for key in _parts_of(choice, modules[name], None)}
    sizes = {id(each): each.numel() * each.element_size() for each in model.parameters()}
    whole, same = sum(sizes.values()), sum(size for key, size in sizes.items() if key not in divided)
    return {"bytes": same + (whole - same) // degree, "same_bytes": same, "whole_bytes": whole}


def _device_of(model):
    device = next((each.device.type for each in model.parameters()), "cpu")
    return "cpu" if device == "meta" else device


def _mesh_of(given, device):
    """Returns a mesh of one dimension."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ValueError(f"shoal: the mesh has {given.ndim} dimensions: pass the one of tensor parallelism, such as mesh[\"tensor\"]")
        return given
    if isinstance(given, dist.ProcessGroup):
        return DeviceMesh.from_group(given, device)
    size = dist.get_world_size()
    degree = size if given is None else given
    if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
        raise TypeError(f"shoal: mesh must be a DeviceMesh, a process group, or a number of ranks from 1 on, not {given!r}")
    if size % degree:
        raise ValueError(f"shoal: {degree} ranks of tensor parallelism do not divide the {size} ranks of the job")
    return init_device_mesh(device, (size // degree, degree), mesh_dim_names=("data", "tensor"))["tensor"]


# ---- Choosing --------------------------------------------------------------------------------------------------------------


def _choose(model, plan, size, within=None):
    """Returns (choices by names of modules, why other modules stay whole)."""
    if isinstance(plan, dict):
        return _tensor_plan.named(model, plan)
    if plan not in (None, "hf"):
        raise TypeError(f"shoal: plan must be None, \"hf\", or a dict of styles by names of modules, not {plan!r}")
    own = _tensor_plan.own_plan_of(model)
    if plan == "hf" and not own:
        raise ValueError(f"shoal: {type(model).__name__} brings no plan (_tp_plan) for plan=\"hf\": leave plan out")
    chosen, whole = _tensor_plan.named(model, own, is_strict=False)
    chosen = {name: choice for name, choice in chosen.items() if within is None or within(name)}
    if plan == "hf":
        return chosen, whole
    found = _tensor_plan.Automatic(model, size, within)
    return _tensor_plan.merged(chosen, found.choices), {**found.whole, **whole}


def _compare(team, choices):
    """Raises an error on all ranks if the plan of one differs from that of the first."""
    text = repr(sorted((name, choice.kind.__name__, *choice[1:]) for name, choice in choices.items()))
    own = torch.tensor([float(text != team.share_text(text))], device=team.mesh.device_type)
    others = team.sum(own).item()
    if others:
        raise ValueError(f"shoal: {others:.0f} of the {team.size} ranks of tensor parallelism have another model or another plan than the first")


def _keep_no_words(model):
    """Models of transformers keep the keys and values of a call for the next word (use_cache), also while they train, and begin with
    an empty tensor that DTensor cannot divide. Training does not need them."""
    for module in model.modules():
        if getattr(getattr(module, "config", None), "use_cache", None) is True:
            module.config.use_cache = False


def _tell(model, choices, whole, team):
    """Logs once which modules stay whole."""
    missing = {name: reason for name, reason in whole.items() if name not in choices}
    if team.size == 1 or dist.get_rank() != 0:
        return
    if not choices:
        _log.warning("shoal: tensor parallelism divides no module of %s: pass plan=, a dict of styles by names", type(model).__name__)
    elif missing:
        lines = dict.fromkeys(f"{re.sub('[0-9]+', '*', name)} ({reason})" for name, reason in missing.items())
        _log.warning("shoal: tensor parallelism of %d ranks leaves whole: %s", team.size, "; ".join(lines))


# ---- Dividing --------------------------------------------------------------------------------------------------------------


def _parts_of(choice, module, team):
    """Returns the Part of each parameter of which a rank has a part, by its name in the module."""
    is_conv1d = _tensor_plan.is_conv1d(module)
    if choice.kind is Columns:
        found = {"weight": Part(team, 1 if is_conv1d else 0, choice.sections), "bias": Part(team, 0, choice.sections)}
    elif choice.kind is Rows:
        found = {"weight": Part(team, 0 if is_conv1d else 1)}
    elif choice.kind is Words:
        found = {"weight": Part(team, 0)}
    else:
        found = {"in_proj_weight": Part(team, 0, 3), "in_proj_bias": Part(team, 0, 3), "q_proj_weight": Part(team, 0), "k_proj_weight":
                 Part(team, 0), "v_proj_weight": Part(team, 0), "out_proj.weight": Part(team, 1)}
    has = dict(module.named_parameters())
    return {name: part for name, part in found.items() if name in has}


def _divide(model, choices, team, init):
    modules = dict(model.named_modules())
    parts = {name: _parts_of(choice, modules[name], team) for name, choice in choices.items()}
    by_owner = {}  # Part, by the owner's id and the name of a parameter in it
    for name, found in parts.items():
        for key, part in found.items():
            path, _, last = key.rpartition(".")
            by_owner[id(modules[name].get_submodule(path)), last] = part
    _refuse_tied(modules, by_owner)
    _take_own(modules, by_owner, team, init)
    for name, choice in choices.items():
        _tensor_layers.divide(modules[name], choice.kind, Divided(team, parts[name], choice.output, choice.sections))
    for module in modules.values():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # else it calls a kernel with the parameters, in evaluations
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    own = _divided.parts_of(model)[0]
    for parameter in model.parameters():
        if id(parameter) not in own and parameter.requires_grad:
            parameter.register_hook(whole_of)  # its gradient is a DTensor after operations with DTensors


def _refuse_tied(modules, by_owner):
    """Raises an error if several modules have one parameter and divide it in different ways."""
    first = {}
    for name, module in modules.items():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            part = by_owner.get((id(module), key))
            if first.setdefault(id(parameter), (name, part))[1] != part:
                raise ValueError(f"shoal: {name} and {first[id(parameter)][0]} have the same {key}, which the plan divides in one of them only, "
                                 "or in another way")


class _Held:
    """A parameter or buffer of the model, in all modules that have it. part: this rank's part of it, or None."""

    def __init__(self, part):
        self.part, self.last, self._places = part, None, []  # last: the last module that has it

    def add(self, module, store, key):
        self._places.append((store, key))
        self.last = module

    @property
    def tensor(self):
        store, key = self._places[0]
        return store[key]

    def replace(self, tensor):
        for store, key in self._places:
            store[key] = tensor

    def materialize(self):
        """Gives a tensor on the device meta memory. Returns true if it had none."""
        was_meta = self.tensor.is_meta
        if was_meta:
            self.replace(_own_part._on(self.tensor, "cpu"))
        return was_meta

    def divide(self):
        """Keeps only this rank's part, in the same parameter object, because an optimizer may have it already."""
        self.tensor.data, self.tensor.grad = self.part.own(self.tensor.detach()), None


def _take_own(modules, by_owner, team, init):
    """Copies the first rank's values to all parameters and buffers, and keeps this rank's parts. It handles inner modules first, in
    the order in which modules are made. A tied parameter is divided when the last module that has it has set its values."""
    held, of_module = {}, {}
    modules = _inner_first(modules)
    for module in modules.values():
        for store in (module._parameters, module._buffers):
            for key, tensor in store.items():
                if tensor is not None:
                    each = held.setdefault(id(tensor), _Held(by_owner.get((id(module), key))))
                    each.add(module, store, key)
                    of_module.setdefault(module, {})[each] = None
    with torch.no_grad():
        for name, module in modules.items():
            own = of_module.get(module, {})
            if any([each.materialize() for each in own]):
                _own_part._initialize(name, module, init)
            for each in own:
                if each.last is module:
                    if each.tensor.numel():
                        team.share_first(each.tensor)
                    if each.part is not None:
                        each.divide()


def _inner_first(modules):
    """Returns modules by names, with inner modules first."""
    found, (whole, *_) = {}, modules.values()
    names = {id(module): name for name, module in modules.items()}

    def visit(module):
        if id(module) in names and names[id(module)] not in found:
            for child in module.children():
                visit(child)
            found[names[id(module)]] = module
    visit(whole)
    return found


# ---- States ----------------------------------------------------------------------------------------------------------------


def _named_parts(model):
    """Returns the Part of each entry of the model's state_dict of which a rank has a part."""
    parts, team = _divided.parts_of(model)
    if team is None:
        raise RuntimeError("shoal: the model is not divided: call tensor_parallel() first")
    return {name: parts[id(each)] for name, each in model.state_dict(keep_vars=True).items() if id(each) in parts}


@torch.no_grad()
def full_state_dict(model, to=0):
    """Collects the state of the whole model on the rank `to` of the group, as copies under the model's own names. Other ranks get
    an empty dict. With to=None all ranks get the state. All ranks of the group call it."""
    parts, found = _named_parts(model), {}
    rank = _divided.parts_of(model)[1].rank
    for name, value in model.state_dict().items():
        whole = parts[name].whole(value) if name in parts else value
        if to in (None, rank):
            found[name] = whole if name in parts or not isinstance(value, torch.Tensor) else value.clone()
    return found


@torch.no_grad()
def load_full_state_dict(model, state, strict=True):
    """Loads the state of a whole model, as full_state_dict() or one process saves it. This rank keeps its parts. All ranks of the
    group call it, with equal states."""
    parts, own = _named_parts(model), model.state_dict()
    for name, part in parts.items():
        expected = part.whole_shape(own[name].shape)
        if name in state and state[name].shape != expected:
            raise ValueError(f"shoal: the state has {name} of the shape {list(state[name].shape)}, and the whole model has {list(expected)}")
    return model.load_state_dict({name: parts[name].own(value) if name in parts else value for name, value in state.items()}, strict)


@torch.no_grad()
def whole(model, state):
    """Returns a state in which the parts of parameters are replaced by whole tensors: entries by names of parameters, or, as in
    flattened states of optimizers, state.NAME.KEY. So torch.distributed.checkpoint saves the same tensors as one process. All ranks
    of the group call it."""
    return _mapped(model, state, lambda part, value, shape: part.whole(value) if value.shape == shape else value)


def own(model, state):
    """Undoes whole(): returns a state in which whole tensors are replaced by this rank's parts."""
    return _mapped(model, state, lambda part, value, shape: part.own(value) if value.shape == part.whole_shape(shape) else value)


def _mapped(model, state, change):
    parts, shapes = _named_parts(model), {name: each.shape for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}
    found = {}
    for key, value in state.items():
        name = key if key in parts else key.removeprefix("state.").rpartition(".")[0]
        is_part = name in parts and isinstance(value, torch.Tensor)
        found[key] = change(parts[name], value, shapes[name]) if is_part else value
    return found


@torch.no_grad()
def full_optimizer_state_dict(model, optimizer, to=0):
    """Like full_state_dict(), for the optimizer of the model's parameters: its state_dict() as one process has it."""
    parts, team = _divided.parts_of(model)
    state, order = optimizer.state_dict(), [each for group in optimizer.param_groups for each in group["params"]]
    values = {number: {key: _whole_value(each, parts.get(id(order[number])), order[number]) for key, each in found.items()}
              for number, found in state["state"].items()}
    return {**state, "state": values} if to in (None, team.rank) else {}


def _whole_value(value, part, parameter):
    is_divided = part is not None and isinstance(value, torch.Tensor) and value.shape == parameter.shape
    return part.whole(value) if is_divided else value.clone() if isinstance(value, torch.Tensor) else value


@torch.no_grad()
def load_full_optimizer_state_dict(model, optimizer, state):
    """Loads what full_optimizer_state_dict() or one process has saved. All ranks of the group call it, with equal states."""
    parts, _ = _divided.parts_of(model)
    order = [each for group in optimizer.param_groups for each in group["params"]]
    values = {number: {key: _own_value(each, parts.get(id(order[number])), order[number]) for key, each in found.items()}
              for number, found in state["state"].items()}
    optimizer.load_state_dict({**state, "state": values})


def _own_value(value, part, parameter):
    is_divided = part is not None and isinstance(value, torch.Tensor) and value.shape == part.whole_shape(parameter.shape)
    return part.own(value) if is_divided else value


# ---- Gradients -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(model, max_norm, norm_type=2.0):
    """Like torch.nn.utils.clip_grad_norm_ of the whole model: returns the norm of its gradients. All ranks of the group call it."""
    parameters = [each for each in model.parameters() if each.grad is not None]
    total = _divided.power(parameters, norm_type, *_divided.parts_of(model))
    norm = (total if norm_type == math.inf else total ** (1 / norm_type)).float()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for each in parameters:
        each.grad.mul_(factor.to(each.grad.dtype))
    return norm
