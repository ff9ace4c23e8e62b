"""Batch normalization over the batches of all workers, for tensors on the CPU, which torch's SyncBatchNorm refuses.

    model = shoal.torch.convert_sync_batchnorm(model)        # before DistributedDataParallel

forward     each rank: mean, sum of squared deviations and count of its samples -> all-gather -> those of the whole batch
backward    each rank: sum of dy and of dy (x - mean) -> all-reduce -> dx as one process has it on the whole batch

Weight and bias get this rank's share of their gradients, like those of any other layer. A rank without samples in a batch also
takes part, or the others would wait for it. Every rank must make the same number of forward and of backward passes."""
from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

SMALL_BATCH = 16  # with fewer samples, mean and variance are too rough


class SyncBatchNorm(_BatchNorm):
    """torch.nn.SyncBatchNorm for the CPU, with the same arguments and the same state_dict."""

    def __init__(self, num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, process_group=None, device=None,
                 dtype=None):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.process_group = process_group

    def _check_input_dim(self, input):
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(f"shoal: SyncBatchNorm of {self.num_features} channels takes tensors of shape (samples, "
                             f"{self.num_features}, ...), not {tuple(input.shape)}")

    def forward(self, input):
        self._check_input_dim(input)
        is_tracking = self.training and self.track_running_stats
        if is_tracking:
            self.num_batches_tracked.add_(1)
        if not self.training and self.running_mean is not None:
            return torch.nn.functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0,
                                                  self.eps)
        group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
        result, mean, var, count = _Normalized.apply(input, self.weight, self.bias, self.eps, group)
        if is_tracking:
            self._track(mean, var, count)
        return result

    @torch.no_grad()
    def _track(self, mean, var, count):
        momentum = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        unbiased = var * (count / (count - 1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running.double() * (1 - momentum) + new * momentum)

    @classmethod
    def convert_sync_batchnorm(cls, module, process_group=None):
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(module, process_group=None):
    """Returns the module with a SyncBatchNorm in place of each batch norm in it, including torch's SyncBatchNorm. Parameters,
    buffers and the hooks of other modules are unchanged."""
    converted = module
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        converted = _synced(module, process_group)
    for name, child in module.named_children():
        converted.add_module(name, convert_sync_batchnorm(child, process_group))
    return converted


def _synced(norm, process_group):
    if isinstance(norm, torch.nn.modules.lazy.LazyModuleMixin):
        raise ValueError(f"shoal: {type(norm).__name__} does not know its channels yet: run the model once on a batch, then convert "
                         "it")
    # On "meta", because every tensor in it is replaced.
    synced = SyncBatchNorm(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats,
                           process_group or getattr(norm, "process_group", None), device="meta")
    synced._parameters.update(norm._parameters)
    synced._buffers.update(norm._buffers)
    synced.train(norm.training)
    return synced


def local_norms(module):
    """Returns the names of the layers whose mean and variance come from one worker's batch."""
    synced = SyncBatchNorm, torch.nn.SyncBatchNorm
    return [name for name, part in module.named_modules() if isinstance(part, _BatchNorm) and not isinstance(part, synced)]


# ---- The function ------------------------------------------------------------------------------------------------------------


def _dims(tensor):
    return [dim for dim in range(tensor.dim()) if dim != 1]


def _shaped(vector, tensor):
    """Reshapes a vector of one number for each channel so that it broadcasts over a tensor."""
    return vector.view(1, -1, *[1] * (tensor.dim() - 2))


def _arithmetic(tensor):
    """Returns the type of the computation: half floats are computed as float32."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _own(input):
    """Returns this rank's row: mean and sum of squared deviations of each channel, and the number of elements of a channel."""
    channels, elements = input.size(1), input.numel() // max(1, input.size(1))
    row = torch.zeros(2 * channels + 1, dtype=torch.float64)
    if elements:
        var, mean = torch.var_mean(input.to(_arithmetic(input)), _dims(input), correction=0)
        row[:channels], row[channels:-1] = mean, var.double() * elements
    row[-1] = elements
    return row


def _gathered(row, group):
    """Returns the rows of all ranks."""
    if group is None or dist.get_world_size(group) == 1:
        return row[None]
    rows = row.new_empty((dist.get_world_size(group), row.numel()))
    dist.all_gather(list(rows), row, group=group)  # some versions lack all_gather_single or warn about all_gather_into_tensor
    return rows


def _whole(rows):
    """Returns mean, variance and count of the whole batch, of which each row describes a part. Deviations from the common mean
    are added, which avoids cancellation when means are large."""
    channels, counts = rows.size(1) // 2, rows[:, -1:]
    count = counts.sum().item()
    if count < 2:
        raise ValueError(f"shoal: SyncBatchNorm in training needs more than one value of each channel, and the {len(rows)} ranks "
                         f"have {count:.0f} together: is the batch empty?")
    means, deviations = rows[:, :channels], rows[:, channels:-1]
    mean = (means * counts).sum(0) / count
    var = (deviations + counts * (means - mean).square()).sum(0) / count
    return mean, var, count


class _Normalized(torch.autograd.Function):
    """(x - mean) / sqrt(var + eps) * weight + bias with mean and variance over all ranks. Also returns these two, in
    float64."""

    @staticmethod
    def forward(ctx, input, weight, bias, eps, group):
        if not input.is_cpu:
            raise ValueError(f"shoal: SyncBatchNorm got a tensor on {input.device}, but serves only tensors on the CPU: convert the model "
                             "with torch.nn.SyncBatchNorm.convert_sync_batchnorm for others")
        mean, var, count = _whole(_gathered(_own(input), group))
        kind = _arithmetic(input)
        ctx.save_for_backward(input, weight, mean, var)
        ctx.eps, ctx.group, ctx.count, ctx.bias_type = eps, group, count, bias.dtype if bias is not None else None
        ctx.set_materialize_grads(False)
        # This also accepts float16 and bfloat16 input, with float32 numbers for the channels.
        result = torch.batch_norm(input, *(None if one is None else one.to(kind) for one in (weight, bias, mean, var)), False, 0.0, eps,
                                  False) if input.numel() else torch.empty_like(input)
        ctx.mark_non_differentiable(mean, var)
        return result, mean, var, count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        input, weight, mean, var = ctx.saved_tensors
        kind = _arithmetic(input)
        grad = (torch.zeros_like(input) if grad is None else grad).to(kind)
        inverse, centred = (var + ctx.eps).rsqrt(), input.to(kind) - _shaped(mean.to(kind), input)
        own = torch.stack([grad.sum(_dims(grad)), (grad * centred).sum(_dims(grad))]).double()
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = own.clone()
            if ctx.group is not None:
                dist.all_reduce(sums, group=ctx.group)
            of_input = _of_input(grad, centred, sums / ctx.count, inverse, weight).to(input.dtype)
        of_weight = (own[1] * inverse).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_bias = own[0].to(ctx.bias_type) if ctx.needs_input_grad[2] else None
        return of_input, of_weight, of_bias, None, None


def _of_input(grad, centred, means, inverse, weight):
    scale = inverse if weight is None else inverse * weight
    slope = means[1] * inverse.square()
    one, two, three = (_shaped(vector.to(grad.dtype), grad) for vector in (means[0], slope, scale))
    return (grad - one - centred * two) * three
