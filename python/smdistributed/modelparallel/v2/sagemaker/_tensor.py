"""Tensor parallelism: each rank of a group has a slice of the linear layers, by the plans that models of transformers bring.

The slices are plain tensors, not DTensors, because the published scripts rely on it: each tensor-parallel rank has its own FSDP and
writes its own checkpoint (`tp2-0`, `tp2-1`), which must be complete by itself. The pair of layers is that of Megatron-LM (Shoeybi
et al. 2019, section 3): the first one's outputs are divided, the second one's inputs, so that a pair needs one all-reduce forward
and one backward."""
from __future__ import annotations

import re

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError
from torch.sagemaker.utils.module_utils import clean_name

COLUMN, ROW, GATHERED = "column", "row", "gathered"
# The styles of transformers' plans. None: the module stays whole on each rank.
STYLES = {"colwise": COLUMN, "rowwise": ROW, "colwise_gather_output": GATHERED, "colwise_rep": GATHERED, "embedding_rowwise": None,
          "replicated_with_grad_allreduce": None}


class _Enter(torch.autograd.Function):
    """Before a divided layer: the same value forward, the sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Leave(torch.autograd.Function):
    """After a pair of divided layers: the sum of the ranks' values forward, the same gradient backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class _Gather(torch.autograd.Function):
    """After a divided layer: all columns forward, this rank's gradients backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        return gathered(tensor, group, tensor.dim() - 1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.size, -1)[ctx.rank].contiguous(), None


def gathered(tensor, group, axis):
    """Returns the tensors of all ranks of a group, one after the other along an axis."""
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, axis)


class Divided(nn.Linear):
    """A linear layer of which this rank has a slice. style: COLUMN, ROW or GATHERED."""

    def __init__(self, whole, group, style):
        nn.Module.__init__(self)
        self.group, self.style = group, style
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.shape = whole.in_features, whole.out_features
        self.in_features = whole.in_features // (self.size if style == ROW else 1)
        self.out_features = whole.out_features // (1 if style == ROW else self.size)
        for name in ("weight", "bias"):
            value = getattr(whole, name)
            made = None if value is None else nn.Parameter(self.slice(name, value.detach()).clone(), value.requires_grad)
            self.register_parameter(name, made)
        self._register_load_state_dict_pre_hook(self._divide)
        self.train(whole.training)

    def forward(self, x):
        if self.style == ROW:
            x = _Leave.apply(functional.linear(x, self.weight), self.group)
            return x if self.bias is None else x + self.bias
        x = functional.linear(_Enter.apply(x, self.group), self.weight, self.bias)
        return _Gather.apply(x, self.group) if self.style == GATHERED else x

    def axis(self, name):
        """Returns the axis along which a parameter is divided, or None if it is whole."""
        if self.style == ROW:
            return 1 if name == "weight" else None
        return 0

    def slice(self, name, value):
        """Returns this rank's slice of the whole layer's parameter."""
        axis = self.axis(name)
        return value if axis is None else value.chunk(self.size, axis)[self.rank]

    def whole(self, device):
        """Returns a layer of the whole shape, without values."""
        return nn.utils.skip_init(nn.Linear, *self.shape, bias=self.bias is not None, device=device, dtype=self.weight.dtype)

    @torch.no_grad()
    def take(self, whole):
        """Copies this rank's slices of a whole layer."""
        for name, parameter in self.named_parameters():
            parameter.copy_(self.slice(name, getattr(whole, name)))

    def _divide(self, state_dict, prefix, *_):
        """Called before values are loaded: slices the values of a whole layer."""
        for name, axis in (("weight", self.axis("weight")), ("bias", self.axis("bias"))):
            value = state_dict.get(prefix + name)
            if axis is not None and value is not None and value.shape[axis] == self.shape[1 - axis]:
                state_dict[prefix + name] = self.slice(name, value)

    def extra_repr(self):
        return f"{super().extra_repr()}, {self.style} {self.rank} of {self.size}"


def parallelize(model, group):
    """Replaces the linear layers that the model's plan names, in place."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if not plan:
        raise SMPUnsupportedError(f"tsm.transform: {type(model).__name__} has no tp_plan: use a model of transformers that brings one, such "
                                  "as Llama or GPT-NeoX, or set model.tp_plan to a dict such as {\"layers.*.up\": \"colwise\", "
                                  "\"layers.*.down\": \"rowwise\"}")
    _check_heads(model, dist.get_world_size(group))
    tied = _tied(model)
    for name, module in list(model.named_modules()):
        style = _style(plan, name)
        if style is not None and isinstance(module, nn.Linear) and id(module.weight) not in tied:
            _check_shape(name, module, style, dist.get_world_size(group))
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, Divided(module, group, style))


def _style(plan, name):
    """Returns the style of a module, or None."""
    for pattern, style in plan.items():
        if re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name):
            if style not in STYLES:
                raise SMPUnsupportedError(f"tsm.transform: the plan of {name} is {style}, which is not served: leave tensor_parallel_degree "
                                          "out, and divide the model by hybrid_shard_degree")
            return STYLES[style]
    return None


def _tied(model):
    """Returns the ids of parameters that several modules have."""
    seen, tied = set(), set()
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            (tied if id(parameter) in seen else seen).add(id(parameter))
    return tied


def _check_heads(model, degree):
    config = getattr(model, "config", None)
    for name in ("num_attention_heads", "num_key_value_heads"):
        count = getattr(config, name, None)
        if count is not None and count % degree:
            raise SMPConfigError(f"tsm.transform: tensor_parallel_degree {degree} must divide {name}, which is {count}")


def _check_shape(name, module, style, degree):
    width = module.in_features if style == ROW else module.out_features
    if width % degree:
        raise SMPConfigError(f"tsm.transform: tensor_parallel_degree {degree} must divide the {'inputs' if style == ROW else 'outputs'} of "
                             f"{name}, which are {width}")


@torch.no_grad()
def send_values(model, group):
    """Broadcasts the values of a whole model on the group's first rank to the others. Parameters without memory get memory. Buffers
    are sent as well."""
    first = dist.get_global_rank(group, 0)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, value in table.items():
                if value is None:
                    continue
                if value.is_meta:
                    made = torch.empty_like(value, device="cpu")
                    table[name] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
                sent = _movable(table[name].detach(), group)
                dist.broadcast(sent, first, group=group)
                table[name].copy_(sent)


def check_values(is_meta, group):
    """Raises an error if only some ranks of a group have a model's values."""
    known = [None] * dist.get_world_size(group)
    dist.all_gather_object(known, is_meta, group=group)
    if 0 < sum(known) < len(known):
        raise SMPConfigError(f"tsm.transform: on {sum(known)} of {len(known)} tensor-parallel ranks the model is on the "
                             "device meta, and on the others it has values: pass load_state_dict_from_rank0=True, or make it alike on all")


def divided_parameters(model):
    """Returns the parameters of which this rank has a slice."""
    return [parameter for module in model.modules() if isinstance(module, Divided)
            for name, parameter in module.named_parameters() if module.axis(name) is not None]


def gather_parameters(model, state_dict, prefix=""):
    """Makes the slices in a state dict whole, except those that are whole already. Ranks whose state dict is empty, as those of FSDP
    with rank0_only, do nothing."""
    for path, module in model.named_modules():
        if not isinstance(module, Divided):
            continue
        for name, _ in module.named_parameters():
            key, axis = prefix + clean_name(f"{path}.{name}"), module.axis(name)
            value = state_dict.get(key)
            if axis is not None and value is not None and value.shape[axis] < module.shape[1 - axis]:
                state_dict[key] = gathered(_movable(value, module.group), module.group, axis).to(value.device)


def _movable(value, group):
    """Returns a value on a device whose memory the group's back-end sends: NCCL sends that of GPUs only."""
    return value.cuda() if value.device.type == "cpu" and dist.get_backend(group) == "nccl" else value

