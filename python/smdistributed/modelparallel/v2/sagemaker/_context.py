"""Context parallelism for models of transformers: each rank of a group has two pieces of every sequence (_ring.py). The model stays as
it is, with three changes: its attention exchanges keys and values, its tokens get their positions in the whole sequence, and its loss
is that of the whole sequence: its mean over the ranks of the group is the loss of one process."""
from __future__ import annotations

import torch
import torch.distributed as dist

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError
from torch.sagemaker import _ring
from torch.sagemaker.state_handler import state

IGNORED = -100  # the label of a token that does not count, in torch's cross_entropy and in transformers
METHODS = {"p2p": _ring.attend_in_ring, "all_gather": _ring.attend_at_once}


def parallelize(model, group, comm):
    """Prepares a model, in place. comm: a key of METHODS."""
    if not getattr(model, "_can_set_attn_implementation", lambda: False)():
        raise SMPUnsupportedError(f"tsm.transform: context_parallel_degree is {dist.get_world_size(group)}, and {type(model).__name__} is not "
                                  "a model of transformers 5 whose attention can be set, such as Llama or GPT-NeoX")
    from transformers import AttentionInterface

    name = f"context_parallel_{comm}"
    AttentionInterface.register(name, _attention(METHODS[comm]))
    model.set_attn_implementation(name)
    model.register_forward_pre_hook(_prepare, with_kwargs=True)


def _attention(method):
    """Returns an attention function of transformers."""
    def attend(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **kwargs):
        if not getattr(module, "is_causal", True) or attention_mask is not None or sliding_window is not None:
            raise SMPUnsupportedError("context parallelism serves causal attention to all former tokens, without a mask and without a "
                                      "sliding window")
        if dropout:
            raise SMPUnsupportedError("context parallelism: dropout of attention weights is not served: set attention_dropout to 0.0 in "
                                      "the model's configuration")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return method(query, key, value, scale, state.cp_process_group).transpose(1, 2).contiguous(), None
    return attend


def _prepare(model, args, kwargs):
    """Runs before the model is called: adds the positions of tokens and the successors of labels."""
    ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs_embeds"))
    length, size = ids.shape[1], state.cp_size
    if length % 2:
        raise SMPConfigError(f"context parallelism: the part of a sequence on this rank has {length} tokens, and must have an even number: "
                             f"two of {2 * size} pieces; use sequences of a multiple of {2 * size} tokens")
    mask = kwargs.get("attention_mask")
    if mask is not None and not bool((mask == 1).all()):
        raise SMPUnsupportedError("context parallelism: an attention_mask that hides tokens is not served: pass None, and set the labels of "
                                  f"padding to {IGNORED}")
    kwargs = {**kwargs, "attention_mask": None}
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = _ring.positions(state.cp_rank, size, length, ids.device).unsqueeze(0)
    if kwargs.get("labels") is not None and kwargs.get("shift_labels") is None:
        kwargs["shift_labels"], kwargs["num_items_in_batch"] = _successors(kwargs["labels"], state.cp_process_group)
    return args, kwargs


def _successors(labels, group):
    """Returns the label that follows each token in the whole sequence, and the divisor of the sum of losses."""
    rank, size, half = dist.get_rank(group), dist.get_world_size(group), labels.shape[1] // 2
    firsts = [torch.empty_like(labels[:, :2]) for _ in range(size)]
    dist.all_gather(firsts, labels[:, [0, half]].contiguous(), group=group)
    of_piece = [first[:, 0] for first in firsts] + [first[:, 1] for first in reversed(firsts)]
    of_piece.append(torch.full_like(of_piece[0], IGNORED))
    after = [of_piece[piece + 1].unsqueeze(1) for piece in (rank, 2 * size - 1 - rank)]
    shifted = torch.cat([labels[:, 1:half], after[0], labels[:, half + 1:], after[1]], 1)
    count = (shifted != IGNORED).sum().to(torch.float32)
    dist.all_reduce(count, group=group)
    return shifted, count / size
