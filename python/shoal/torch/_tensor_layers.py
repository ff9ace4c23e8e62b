"""Modules of which each rank of a tensor-parallel group has a part. The model's own modules get these classes, so their names,
hooks and attributes stay.

    Columns    of a linear layer: its weight's output features; the result is in parts
    Rows       of a linear layer: its weight's input features; the results of all ranks are added up
    Words      of an embedding: its rows
    Heads      of nn.MultiheadAttention: all of the above
"""
from __future__ import annotations

import math
import typing

import torch
from torch import nn
from torch.nn import functional

from . import _divided
from ._tensor_parts import Sections, gathered, whole_of


class Divided(typing.NamedTuple):
    """What a divided module needs besides its parameters. output: "parts", "sections" or "whole"."""
    team: typing.Any
    parts: dict
    output: str = "parts"
    sections: int = 1


class _Module:
    """The part that all divided modules have in common. `_shoal` is a Divided."""

    def extra_repr(self):
        team = self._shoal.team
        return f"{super().extra_repr()}, part {team.rank} of {team.size}"

    def _product(self, value, bias):
        """Returns the linear layer's result for this rank's weight."""
        weight = self.weight.t() if _is_transposed(self) else self.weight
        return functional.linear(value, weight, bias)


class Columns(_Module):
    def forward(self, input):
        team, _, output, sections = self._shoal
        found = self._product(team.enter(input), self.bias)
        if output == "whole":
            return gathered(found, team, sections)
        return Sections(found, team, sections) if output == "sections" else team.shown(found)


class Rows(_Module):
    def forward(self, input):
        team = self._shoal.team
        own = team.own_columns(input, self.weight.shape[0 if _is_transposed(self) else 1] * team.size)
        found = team.summed(self._product(own, None))
        return found if self.bias is None else found + self.bias


class Words(_Module):
    def forward(self, input):
        team, rows = self._shoal.team, self.weight.shape[0]
        own = whole_of(input) - team.rank * rows
        elsewhere = (own < 0) | (own >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - team.rank * rows
        is_here = padding is not None and 0 <= padding < rows
        found = functional.embedding(own.masked_fill(elsewhere, 0), self.weight, padding if is_here else None)
        return team.summed(found.masked_fill(elsewhere.unsqueeze(-1), 0))


class Heads(_Module):
    """Like nn.MultiheadAttention, with this rank's heads."""

    def extra_repr(self):
        return f"part {self._shoal.team.rank} of {self._shoal.team.size}"

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, average_attn_weights=True, is_causal=False):
        query, key, value = whole_of(query), whole_of(key), whole_of(value)
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")  # torch's own text
        is_batched = query.dim() == 3
        if is_batched and not self.batch_first:
            query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        if not is_batched:
            query, key, value = (each.unsqueeze(0) for each in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        result, weights = self._attend(query, key, value, key_padding_mask, attn_mask, need_weights)
        result = functional.linear(result, self.out_proj.weight, None)
        result = self._shoal.team.summed(result)
        result = result if self.out_proj.bias is None else result + self.out_proj.bias
        if weights is not None:
            weights = gathered(weights.movedim(1, -1), self._shoal.team).movedim(-1, 1)  # of all heads
            weights = weights.mean(1) if average_attn_weights else weights
        if not is_batched:
            return result.squeeze(0), None if weights is None else weights.squeeze(0)
        return result if self.batch_first else result.transpose(0, 1), weights

    def _attend(self, query, key, value, key_padding_mask, attn_mask, need_weights):
        """Returns the joined results of this rank's heads, and their weights."""
        heads = self.num_heads // self._shoal.team.size
        query, key, value = (each.unflatten(-1, (heads, self.head_dim)).transpose(1, 2) for each in self._projected(query, key, value))
        mask = self._mask(key_padding_mask, attn_mask, query, heads)
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = query @ key.transpose(-2, -1) / math.sqrt(self.head_dim)
            weights = functional.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            return (weights @ value).transpose(1, 2).flatten(2), weights
        found = functional.scaled_dot_product_attention(query, key, value, mask, dropout)
        return found.transpose(1, 2).flatten(2), None

    def _projected(self, query, key, value):
        """Returns this rank's columns of queries, keys and values."""
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        weights = self.in_proj_weight.chunk(3) if self._qkv_same_embed_dim else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        enter = self._shoal.team.enter
        if self._qkv_same_embed_dim and query is key and key is value:
            return functional.linear(enter(query), self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        return [functional.linear(enter(each), weight, bias) for each, weight, bias in zip((query, key, value), weights, biases)]

    def _mask(self, key_padding_mask, attn_mask, query, heads):
        """Returns both masks as numbers to add to the scores, or None."""
        found = None
        if attn_mask is not None:
            found = _numbers(attn_mask, query.dtype)
            if found.dim() == 3:  # one for each head
                first = self._shoal.team.rank * heads
                found = found.view(-1, self.num_heads, *found.shape[1:])[:, first:first + heads]
        if key_padding_mask is not None:
            padding = _numbers(key_padding_mask, query.dtype)[:, None, None, :]
            found = padding if found is None else found + padding
        return found


def _numbers(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -math.inf) if mask.dtype is torch.bool else mask.to(dtype)


def _is_transposed(module):
    """Returns true for the Conv1D of transformers, a linear layer whose weight has its input features first."""
    return isinstance(module, _Module) and not isinstance(module, nn.Linear)


# ---- Dividing a module -----------------------------------------------------------------------------------------------------

_classes = {}


def divide(module, kind, divided):
    """Makes a module a divided one of a kind. Its parameters are those of this rank by now."""
    pair = (kind, type(module))
    if pair not in _classes:
        _classes[pair] = type(f"{kind.__name__}Of{type(module).__name__}", (kind, type(module)), {"__module__": __name__})
    module.__class__ = _classes[pair]
    setattr(module, _divided.KEY, divided)

