"""How torch's DTensor divides the operations of attention that its version does not know on the CPU: by batch, or by heads."""
from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

_is_registered = False


def register():
    """Registers the rules, once. From then on a plain tensor in an operation with DTensors is taken as whole and equal on all ranks,
    which holds for all plain tensors of a model that this package divides."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    propagator = DTensor._op_dispatcher.sharding_propagator
    for name, rule in (("_scaled_dot_product_flash_attention_for_cpu", _forward), ("_scaled_dot_product_flash_attention_for_cpu_backward", _backward)):
        operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if operation is not None and operation not in propagator.op_strategy_funcs:
            register_sharding(operation)(rule)
            # torch keeps what a rule has returned; the mask, which has a name in calls, must count there.
            propagator.register_op_strategy(operation, propagator.op_strategy_funcs[operation],
                                            RuntimeSchemaInfo(100, ["attn_mask"], needs_pytree=True))
    DTensor._op_dispatcher._allow_implicit_replication = True


_PLACES = (Replicate(), Shard(0), Shard(1))  # of tensors batch x heads x length x size


def _places(mask):
    """Returns the places that fit a mask, which stays where it is: it may have one of its first dimensions for all."""
    if mask is None:
        return _PLACES
    return [place for place in _PLACES if mask.placements == (place,) or (
        mask.placements == (Replicate(),) and (place == Replicate() or mask.ndim < 4 or mask.shape[place.dim] == 1))]


def _forward(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
    """Results: the values of each query, and the logarithms of sums."""
    more = [] if attn_mask is None else [attn_mask.placements[0]]
    return [([place] * 2, [place] * 3 + [None, None, *more]) for place in _places(attn_mask)]


def _backward(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
    more = [] if attn_mask is None else [attn_mask.placements[0]]
    return [([place] * 3, [place] * 6 + [None, None, *more]) for place in _places(attn_mask)]
