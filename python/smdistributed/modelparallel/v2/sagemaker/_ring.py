"""Causal attention over sequences of which each rank of a group has two pieces.

A sequence is cut into 2n pieces for n ranks; rank r has pieces r and 2n-1-r, as the published scripts divide batches. So every rank
attends to equally many keys. With 2 ranks:

    piece    0      1      2      3
    rank     0      1      1      0

Rank r sees of another rank's keys either the first piece, with all of its queries (that rank comes before r), or both pieces, with its
second half of queries (that rank comes after r). So no block but a rank's own needs a mask. The ring and its merge of partial softmaxes
are those of Ring Attention (Liu et al. 2023)."""
from __future__ import annotations

import functools

import torch
import torch.distributed as dist
from torch.nn import functional

from torch.sagemaker._tensor import gathered


def positions(rank, size, length, device):
    """Returns the positions of a rank's tokens within the whole sequence. length: the number of its tokens."""
    half = torch.arange(length // 2, device=device)
    return torch.cat([half + rank * (length // 2), half + (2 * size - 1 - rank) * (length // 2)])


# ---- All keys at once ------------------------------------------------------------------------------------------------------


class _GatherSequence(torch.autograd.Function):
    """All ranks' tokens forward, the sum of the ranks' gradients of this rank's tokens backward."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return gathered(tensor, group, 2)

    @staticmethod
    def backward(ctx, gradient):
        parts = [part.contiguous() for part in gradient.chunk(dist.get_world_size(ctx.group), 2)]
        own = torch.empty_like(parts[0])
        dist.reduce_scatter(own, parts, group=ctx.group)
        return own, None


@functools.lru_cache(maxsize=4)
def _mask(rank, size, length, device):
    """Returns which of all keys each of this rank's queries sees."""
    keys = torch.cat([positions(other, size, length, device) for other in range(size)])
    return positions(rank, size, length, device)[:, None] >= keys[None, :]


def attend_at_once(query, key, value, scale, group):
    """Returns the attention of this rank's queries (batch, heads, tokens, width) to all ranks' keys and values, which may have fewer
    heads. Each rank holds all keys and values of a layer meanwhile."""
    key, value = (_of_each_head(_GatherSequence.apply(each, group), query) for each in (key, value))
    mask = _mask(dist.get_rank(group), dist.get_world_size(group), query.shape[2], query.device)
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def _of_each_head(tensor, query):
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


# ---- In a ring -------------------------------------------------------------------------------------------------------------


def attend_in_ring(query, key, value, scale, group):
    """Like attend_at_once, but keys and values go round from rank to rank, so that each holds two ranks' at most."""
    return _Ring.apply(query, key, value, scale, group)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, scale, group):
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        out = torch.zeros_like(query, dtype=torch.float32)
        seen = query.new_full(query.shape[:3], float("-inf"), dtype=torch.float32)  # the logarithm of the sum of exponentials
        held = [key.contiguous(), value.contiguous()]
        for step in range(size):
            arriving = _pass_on(held, group) if step + 1 < size else None
            rows, columns = _block(step, rank, size, query.shape[2])
            keys, values = (_of_each_head(each[:, :, columns], query) for each in held)
            _merge(out, seen, rows, *_forward(query[:, :, rows], keys, values, scale, step == 0))
            held = arriving() if arriving else held
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, seen)
        ctx.scale, ctx.group = scale, group
        return out

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, out, seen = ctx.saved_tensors
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        of_query = torch.zeros_like(query, dtype=torch.float32)
        held = [key.contiguous(), value.contiguous()]
        sums = [torch.zeros_like(each, dtype=torch.float32) for each in held]  # travel with the keys and values that they are for
        for step in range(size):
            arriving = _pass_on(held, ctx.group) if step + 1 < size else None
            rows, columns = _block(step, rank, size, query.shape[2])
            keys, values = (_of_each_head(each[:, :, columns], query) for each in held)
            parts = _backward(gradient[:, :, rows], query[:, :, rows], keys, values, out[:, :, rows], seen[:, :, rows], ctx.scale,
                              step == 0)
            of_query[:, :, rows] += parts[0]
            for total, part in zip(sums, parts[1:]):
                total[:, :, columns] += part.float().unflatten(1, (total.shape[1], -1)).sum(2)
            sums = _pass_on(sums, ctx.group)()
            held = arriving() if arriving else held
        return of_query.to(query.dtype), sums[0].to(key.dtype), sums[1].to(value.dtype), None, None


def _block(step, rank, size, length):
    """Returns (rows of queries, columns of keys) that meet in a step, in which this rank has the keys of rank - step."""
    everything = slice(0, length)
    if step == 0:
        return everything, everything
    return (everything, slice(0, length // 2)) if step <= rank else (slice(length // 2, length), everything)


def _pass_on(tensors, group):
    """Sends tensors to the next rank. Returns a function that waits for those of the rank before."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    after, before = (dist.get_global_rank(group, (rank + shift) % size) for shift in (1, -1))
    received = [torch.empty_like(tensor) for tensor in tensors]
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, after, group) for tensor in tensors]
                                   + [dist.P2POp(dist.irecv, tensor, before, group) for tensor in received])

    def wait():
        for work in works:
            work.wait()
        return received
    return wait


def _merge(out, seen, rows, part, of_part):
    """Adds the attention to more keys. seen, of_part: the logarithms of the sums of exponentials of the scores."""
    total = torch.logaddexp(seen[:, :, rows], of_part)
    out[:, :, rows] *= (seen[:, :, rows] - total).exp().unsqueeze(-1)
    out[:, :, rows] += part * (of_part - total).exp().unsqueeze(-1)
    seen[:, :, rows] = total


def _forward(query, key, value, scale, is_causal):
    """Returns the attention to some keys, and the logarithms of the sums of exponentials of the scores."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal, scale=scale)
    return forward_by_formula(query, key, value, scale, is_causal)


def forward_by_formula(query, key, value, scale, is_causal):
    """Like _forward, on any device."""
    scores = _scores(query, key, scale, is_causal)
    seen = scores.logsumexp(-1)
    return (scores - seen.unsqueeze(-1)).exp() @ value.float(), seen


def _backward(gradient, query, key, value, out, seen, scale, is_causal):
    """Returns the gradients of query, key and value by some keys. seen: the logarithms for all keys."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient.contiguous(), query, key, value, out, seen, 0.0, is_causal, scale=scale)
    return backward_by_formula(gradient, query, key, value, out, seen, scale, is_causal)


def backward_by_formula(gradient, query, key, value, out, seen, scale, is_causal):
    """Like _backward, on any device."""
    gradient = gradient.float()
    weights = (_scores(query, key, scale, is_causal) - seen.unsqueeze(-1)).exp()
    of_weights = gradient @ value.float().transpose(-1, -2)
    of_scores = weights * (of_weights - (gradient * out.float()).sum(-1, keepdim=True)) * scale
    return of_scores @ key.float(), of_scores.transpose(-1, -2) @ query.float(), weights.transpose(-1, -2) @ gradient


def _scores(query, key, scale, is_causal):
    scores = query.float() @ key.float().transpose(-1, -2) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores
