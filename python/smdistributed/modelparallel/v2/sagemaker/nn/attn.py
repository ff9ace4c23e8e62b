"""Attention modules over torch's scaled_dot_product_attention, which chooses the kernel."""
from __future__ import annotations

from torch import nn
from torch.nn import functional

from smdistributed.modelparallel.exceptions import SMPConfigError, SMPUnsupportedError
from torch.sagemaker import _ring
from torch.sagemaker.state_handler import is_initialized, state

LAYOUTS = ("b h s d", "b s h d")


class _Attention(nn.Module):
    def __init__(self, attention_dropout_prob=0.0, scale=None):
        super().__init__()
        self.attention_dropout_prob, self.scale = attention_dropout_prob, scale

    def _attend(self, query, key, value, causal, cast_dtype, layout):
        """Returns a tensor of the shape (batch, heads, tokens, width)."""
        if layout == "b s h d":
            query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        if cast_dtype is not None:
            query, key, value = (each.to(cast_dtype) for each in (query, key, value))
        dropout = self.attention_dropout_prob if self.training else 0.0
        if is_initialized() and state.cp_size > 1:
            if not causal or dropout:
                raise SMPUnsupportedError("torch.sagemaker.nn.attn: context parallelism serves causal attention without dropout")
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            return _ring.attend_in_ring(query, key, value, scale, state.cp_process_group)
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, 1) if groups > 1 else each for each in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=causal, scale=self.scale)


class FlashSelfAttention(_Attention):
    """Attention of as many keys and values as queries. triton_flash_attention and use_alibi are not served."""

    def __init__(self, attention_dropout_prob=0.0, scale=None, triton_flash_attention=False, use_alibi=False):
        if triton_flash_attention or use_alibi:
            raise SMPUnsupportedError("FlashSelfAttention: triton_flash_attention and use_alibi are not served: use a model of transformers "
                                      "with ALiBi, such as MPT, and attn_implementation=\"sdpa\"")
        super().__init__(attention_dropout_prob, scale)

    def forward(self, qkv, attn_mask=None, causal=False, cast_dtype=None, layout="b h s d"):
        """qkv: three tensors, or one with all their heads. layout: of these tensors, one of LAYOUTS."""
        if attn_mask is not None:
            raise SMPUnsupportedError("FlashSelfAttention: attn_mask is for ALiBi, which is not served")
        query, key, value = _several(qkv, 3, layout)
        return self._attend(query, key, value, causal, cast_dtype, layout)


class FlashGroupedQueryAttention(_Attention):
    """Attention in which several heads of queries share keys and values."""

    def forward(self, q, kv, causal=False, cast_dtype=None, layout="b s h d"):
        """kv: two tensors, or one with all their heads. layout: of these tensors, one of LAYOUTS."""
        key, value = _several(kv, 2, layout)
        return self._attend(q, key, value, causal, cast_dtype, layout)


def _several(tensors, count, layout):
    """Returns `count` tensors, from a tuple or from one tensor that has the heads of all."""
    if layout not in LAYOUTS:
        raise SMPConfigError(f"torch.sagemaker.nn.attn: layout must be one of {LAYOUTS}, not {layout!r}")
    if isinstance(tensors, (tuple, list)):
        return tensors
    axis = layout.split().index("h")
    if tensors.shape[axis] % count:
        raise SMPConfigError(f"torch.sagemaker.nn.attn: the tensor has {tensors.shape[axis]} heads, which must be a multiple of {count}")
    return tensors.chunk(count, axis)
