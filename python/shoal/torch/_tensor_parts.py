"""The ranks of a tensor-parallel group, which part of a parameter a rank has, and tensors that go into and out of divided modules.

A divided module computes with plain tensors. Between divided modules, values are torch's DTensors: they have the shape of the
whole value, so the model's code works as in one process, and torch inserts what communication its operations need.

    x  whole, equal on all ranks          enter    its gradient is summed over the group
    y  columns of each rank, a DTensor    shown    the model's code sees all columns
    z  whole                              summed   the products of all ranks are added up"""
from __future__ import annotations

import dataclasses
import weakref

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree


class Team:
    """The ranks of a tensor-parallel group."""

    def __init__(self, mesh):
        self.mesh, self.group = mesh, mesh.get_group()
        self.rank, self.size = self.group.rank(), self.group.size()
        self._entered = (None, 0, None)  # the last value that was entered: a weak reference, its version, what it became

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        raise TypeError("shoal: a module of tensor parallelism cannot be pickled: save its full_state_dict()")

    # ---- Collectives, without a graph ----

    def sum(self, tensor):
        """Returns the sum over all ranks."""
        found = whole_of(tensor).clone(memory_format=torch.contiguous_format)
        if _has_memory(found):
            dist.all_reduce(found, group=self.group)
        return found

    def gather(self, tensor):
        """Returns the tensors of all ranks, in the order of ranks."""
        tensor = tensor.contiguous()
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        if _has_memory(tensor):
            dist.all_gather(found, tensor, group=self.group)
        return found

    def share_first(self, tensor):
        """Gives a tensor the value of the first rank."""
        value = tensor.detach().contiguous()
        dist.broadcast(value, dist.get_global_rank(self.group, 0), group=self.group)
        if value.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(value)

    def share_text(self, text):
        """Returns the first rank's text."""
        found = [text]
        dist.broadcast_object_list(found, dist.get_global_rank(self.group, 0), group=self.group)
        return found[0]

    # ---- Values of a forward pass ----

    def enter(self, value):
        """Returns a whole value that the ranks use for different columns. Its gradient is their sum. A value that several modules
        use is entered once, so that its gradient is summed once."""
        value = whole_of(value)
        reference, version, entered = self._entered
        if reference is not None and reference() is value and version == value._version and entered.requires_grad == value.requires_grad \
                and torch.is_grad_enabled():
            return entered
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        entered = _Enter.apply(value, self)
        self._entered = (weakref.ref(value, self._forget), value._version, entered)
        return entered

    def _forget(self, reference):
        if self._entered[0] is reference:
            self._entered = (None, 0, None)

    def summed(self, value):
        """Returns the sum of the ranks' values. It may be in the memory of this rank's value."""
        return _Sum.apply(value if value.is_contiguous() else value.contiguous(), self)

    def shown(self, value, dim=-1):
        """Returns a rank's part of a value as a DTensor."""
        return DTensor.from_local(value, self.mesh, [Shard(dim % value.dim())], run_check=False)

    def own_columns(self, value, count):
        """Returns this rank's columns of a value with `count` columns: a DTensor, a whole tensor, or these columns already."""
        if isinstance(value, Sections):
            value = value.whole()
        if not isinstance(value, DTensor):
            if value.shape[-1] != count:
                return value
            value = DTensor.from_local(value, self.mesh, [Replicate()], run_check=False)
        own = [Shard(value.dim() - 1)]
        return value.redistribute(placements=own).to_local(grad_placements=own)

    # ---- Values between stages of a pipeline, of which each rank sends its part ----

    def packed(self, value):
        """Returns a value in which this rank's parts are plain tensors in dicts."""
        return pytree.tree_map(_packed, value)

    def unpacked(self, value):
        return pytree.tree_map(self._unpacked, value, is_leaf=lambda each: isinstance(each, dict) and PART in each)

    def _unpacked(self, value):
        if not (isinstance(value, dict) and PART in value):
            return value
        return Sections(value[PART], self, value["sections"]) if value["sections"] > 1 else self.shown(value[PART], value["dim"])

    def whole(self, value):
        return pytree.tree_map(whole_of, value)


PART = "shoal.part"  # in a message between stages


def _packed(value):
    if isinstance(value, Sections):
        return {PART: value._local, "dim": value.dim() - 1, "sections": value._sections}
    if isinstance(value, DTensor) and isinstance(value.placements[0], Shard):
        return {PART: value.to_local(grad_placements=value.placements), "dim": value.placements[0].dim, "sections": 1}
    return whole_of(value)


def whole_of(value):
    """Returns a value without parts, as a plain tensor."""
    if isinstance(value, Sections):
        return value.whole()
    if not isinstance(value, DTensor):
        return value
    return value.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])


def _has_memory(tensor):
    """Returns false while a forward pass is recorded or counted, which moves no data."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, team):
        ctx.team = team
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.team.sum(gradient), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, team):
        if _has_memory(value):
            dist.all_reduce(value, group=team.group)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return whole_of(gradient), None


# ---- Parts -----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """Which part of a tensor a rank has: along dimension `dim`, its share of each of `sections` equal sections."""
    team: Team
    dim: int
    sections: int = 1

    def own(self, whole):
        """Returns this rank's part of a whole tensor, as a copy."""
        return torch.cat([each.chunk(self.team.size, self.dim)[self.team.rank] for each in whole.chunk(self.sections, self.dim)], self.dim)

    def joined(self, parts):
        """Returns the whole tensor of the parts of all ranks."""
        divided = [each.chunk(self.sections, self.dim) for each in parts]
        return torch.cat([each[number] for number in range(self.sections) for each in divided], self.dim)

    def whole(self, own):
        """Returns the whole tensor. All ranks of the team call it."""
        return self.joined(self.team.gather(own))

    def whole_shape(self, shape):
        return torch.Size(size * self.team.size if dim == self.dim else size for dim, size in enumerate(shape))


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, part):
        ctx.part = part
        return part.whole(value)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.part.own(whole_of(gradient)), None


def gathered(value, team, sections=1):
    """Returns all columns of a value of which each rank has its part."""
    return _Whole.apply(value, Part(team, value.dim() - 1, sections))


# ---- Values in sections ----------------------------------------------------------------------------------------------------

_SPLITS = {torch.Tensor.split, torch.split, torch.functional.split, torch.Tensor.chunk, torch.chunk, torch.Tensor.tensor_split, torch.tensor_split}
_VIEWS = {torch.Tensor.view, torch.Tensor.reshape, torch.reshape, torch.Tensor.unflatten, torch.unflatten}


class Sections(torch.Tensor):
    """The result of a module that computes several values at once, such as queries, keys and values: of each of these sections of
    columns a rank has its part. It has the shape of the whole value. Dividing it into its sections, or viewing it so, makes
    DTensors without communication; for any other operation the columns of all ranks are gathered."""

    @staticmethod
    def __new__(cls, local, team, sections):
        shape = Part(team, local.dim() - 1).whole_shape(local.shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad)

    def __init__(self, local, team, sections):
        self._local, self._team, self._sections = local, team, sections

    def whole(self):
        return gathered(self._local, self._team, self._sections)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(function, "__name__", "") in _QUESTIONS:
                return function(*args, **kwargs)
            if args and isinstance(args[0], Sections):
                found = args[0]._divided(function, args[1:], kwargs)
                if found is not None:
                    return found
        args, kwargs = pytree.tree_map(lambda each: each.whole() if isinstance(each, Sections) else each, (args, kwargs))
        return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"shoal: {function} on the result of a divided module: name this module in plan=, with \"replicate\"")

    def _divided(self, function, args, kwargs):
        """Returns the sections, or a view of them, if the function asks for these; else None."""
        if function in _SPLITS:
            whole = torch.empty(self.shape, device="meta")
            parts = function(whole, *args, **kwargs)
            width = self.shape[-1] // self._sections
            is_ours = len(parts) == self._sections and all(each.shape[-1] == width and each.shape[:-1] == self.shape[:-1] for each in parts)
            return tuple(self._team.shown(each) for each in self._local.chunk(self._sections, -1)) if is_ours else None
        if function in _VIEWS:
            return self._viewed(function(torch.empty(self.shape, device="meta"), *args, **kwargs).shape)
        return None

    def _viewed(self, shape):
        """Returns a view in which a dimension counts the sections and the next one is divided among ranks, or None."""
        leading = self.dim() - 1
        is_ours = shape[:leading] == self.shape[:-1] and len(shape) > leading + 1 and shape[leading] == self._sections \
            and shape[leading + 1] % self._team.size == 0
        if not is_ours:
            return None
        own = [*shape[:leading + 1], shape[leading + 1] // self._team.size, *shape[leading + 2:]]
        return self._team.shown(self._local.view(own), leading + 1)


_QUESTIONS = {"__get__", "size", "dim", "stride", "numel", "is_floating_point", "is_complex", "is_contiguous", "__len__", "ndimension",
              "element_size", "__repr__", "get_device"}
