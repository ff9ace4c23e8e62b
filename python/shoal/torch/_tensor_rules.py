"""Rules for operations of attention on the CPU that torch's DTensor lacks: it divides them by batch, or by heads."""
from __future__ import annotations

import warnings

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

_OPERATIONS = {"_scaled_dot_product_flash_attention_for_cpu": 3, "_scaled_dot_product_flash_attention_for_cpu_backward": 6}
_is_registered = False


def register():
    """Registers the rules, once. From then on a plain tensor in an operation with DTensors is taken as whole and equal on all ranks,
    which holds for all plain tensors of a model that this package divides."""
    global _is_registered
    if _is_registered:
        return
    _is_registered = True
    dispatcher = DTensor._op_dispatcher
    for name, count in _OPERATIONS.items():
        operation = getattr(getattr(torch.ops.aten, name, None), "default", None)
        if operation is not None and operation not in dispatcher.sharding_propagator.op_strategy_funcs:
            dispatcher._custom_op_handlers[operation] = _rule_of(count)
    dispatcher._allow_implicit_replication = True
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")  # see tensor_parallel()


def _rule_of(count):
    """Returns the function that runs an operation whose first `count` arguments are of batch x heads x length (x size). The query
    decides where all of them are. A mask may have one batch or head for all."""
    query_number = 0 if count == 3 else 1

    def run(operation, args, kwargs):
        query = args[query_number]
        mesh = query.device_mesh
        places = [each if each in (Shard(0), Shard(1)) else Replicate() for each in query.placements]
        mask = kwargs.get("attn_mask")
        if mask is not None:
            own = [Replicate() if mask.dim() < 4 or (isinstance(each, Shard) and mask.shape[each.dim] == 1) else each for each in places]
            kwargs = {**kwargs, "attn_mask": _at(mask, mesh, own)}
        found = operation(*(_at(each, mesh, places) for each in args[:count]), *args[count:], **kwargs)
        return tuple(DTensor.from_local(each, mesh, places, run_check=False) for each in found)
    return run


def _at(value, mesh, places):
    """Returns this rank's part of a DTensor, or of a plain tensor that is whole."""
    if not isinstance(value, DTensor):
        value = DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return value.redistribute(placements=places).to_local()
