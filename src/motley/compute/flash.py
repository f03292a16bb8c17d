"""Attention over packed tokens by torch's flash kernels: no padding, no masks, and a prompt's keys
are read where they stand.

Needs Triton, and for the kernels a CUDA GPU; `varlen` and `varlen_backward` are all that touches
those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from motley.compute import kernels
from motley.compute.layers import Heads, Rotation
from motley.compute.packed import Packed, Spans


def attend_by_flash(
    query_NHd: Tensor, key_NHd: Tensor, value_NHd: Tensor, packed: Packed, scaling: float | None
) -> Tensor:
    """Prompts causally; completions over their prompt and themselves. [N, H, d], contiguous."""
    scaling = query_NHd.shape[-1] ** -0.5 if scaling is None else scaling
    out_NHd: Tensor = _Flash.apply(query_NHd, key_NHd, value_NHd, packed, scaling)
    return out_NHd


class TurnedHeads(NamedTuple):
    """How heads side by side are turned to their positions, and into which dtype."""

    heads: Heads
    rotation: Rotation
    dtype: torch.dtype

    def __call__(self, qkv_NHd: Tensor) -> Tensor:
        return kernels.rotate(qkv_NHd, *self.rotation, self.heads.rotated, self.dtype)

    def back(self, dturned_NHd: Tensor, dtype: torch.dtype) -> Tensor:
        return kernels.rotate(dturned_NHd, *self.rotation, self.heads.rotated, dtype, back=True)


def attend_turned(qkv_NHd: Tensor, turned: TurnedHeads, packed: Packed, scaling: float) -> Tensor:
    """The same from heads of queries, keys and values side by side, before the rotation."""
    out_NHd: Tensor = _TurnedFlash.apply(qkv_NHd, turned, packed, scaling)
    return out_NHd


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_NHd: Tensor,
        key_NHd: Tensor,
        value_NHd: Tensor,
        packed: Packed,
        scaling: float,
    ) -> Tensor:
        out_NHd, lse_HN = _both(query_NHd, key_NHd, value_NHd, packed, scaling)
        ctx.save_for_backward(query_NHd, key_NHd, value_NHd, out_NHd, lse_HN)
        ctx.packed, ctx.scaling = packed, scaling
        return out_NHd

    @staticmethod
    def backward(ctx: Any, dout_NHd: Tensor) -> tuple[Tensor | None, ...]:
        query_NHd, key_NHd, value_NHd, out_NHd, lse_HN = ctx.saved_tensors
        parts = _both_backward(
            dout_NHd.contiguous(),
            query_NHd,
            key_NHd,
            value_NHd,
            out_NHd,
            lse_HN,
            ctx.packed,
            ctx.scaling,
        )
        return *parts, None, None


class _TurnedFlash(torch.autograd.Function):
    """With the rotation in it: a GPU of this speed waits for whoever starts its kernels, and every
    Function takes time to start.
    """

    @staticmethod
    def forward(
        ctx: Any, qkv_NHd: Tensor, turned: TurnedHeads, packed: Packed, scaling: float
    ) -> Tensor:
        turned_NHd = turned(qkv_NHd.contiguous())
        query, key, value = turned_NHd.split(turned.heads.counts, 1)
        out_NHd, lse_HN = _both(query, key, value, packed, scaling)
        ctx.save_for_backward(turned_NHd, out_NHd, lse_HN)
        ctx.turned, ctx.packed, ctx.scaling, ctx.dtype = turned, packed, scaling, qkv_NHd.dtype
        return out_NHd

    @staticmethod
    def backward(ctx: Any, dout_NHd: Tensor) -> tuple[Tensor | None, ...]:
        turned_NHd, out_NHd, lse_HN = ctx.saved_tensors
        query, key, value = turned_NHd.split(ctx.turned.heads.counts, 1)
        parts = _both_backward(
            dout_NHd.contiguous(), query, key, value, out_NHd, lse_HN, ctx.packed, ctx.scaling
        )
        return ctx.turned.back(torch.cat(parts, 1), ctx.dtype), None, None, None


def _both(
    query_NHd: Tensor, key_NHd: Tensor, value_NHd: Tensor, packed: Packed, scaling: float
) -> tuple[Tensor, Tensor]:
    """Two parts: every prompt and every completion causally over itself, and completions over their
    prompt.

    A part's kernel gives its log-sum-exps, by which both are merged.
    """
    own, prompts, answers = packed.own, packed.prompts, packed.answers
    first = prompts.total
    out_NHd, lse_HN = varlen(query_NHd, key_NHd, value_NHd, own, own, scaling, causal=True)
    if answers.total:
        over_prompts = varlen(
            query_NHd[first:],
            key_NHd[:first],
            value_NHd[:first],
            answers,
            prompts,
            scaling,
            causal=False,
        )
        lse_HN = kernels.merge(out_NHd, lse_HN, *over_prompts)
    return out_NHd, lse_HN


def _both_backward(
    dout_NHd: Tensor,
    query_NHd: Tensor,
    key_NHd: Tensor,
    value_NHd: Tensor,
    out_NHd: Tensor,
    lse_HN: Tensor,
    packed: Packed,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """With the merged output and log-sum-exps a part's backward kernel computes the very softmax
    weights that the whole has, so that the parts' gradients add up to the whole's.
    """
    own, prompts, answers = packed.own, packed.prompts, packed.answers
    first = prompts.total
    dquery_NHd, dkey_NHd, dvalue_NHd = varlen_backward(
        dout_NHd, query_NHd, key_NHd, value_NHd, out_NHd, lse_HN, own, own, scaling, causal=True
    )
    if answers.total:
        dquery, dkey, dvalue = varlen_backward(
            dout_NHd[first:],
            query_NHd[first:],
            key_NHd[:first],
            value_NHd[:first],
            out_NHd[first:],
            lse_HN[:, first:].contiguous(),
            answers,
            prompts,
            scaling,
            causal=False,
        )
        dquery_NHd[first:] += dquery
        dkey_NHd[:first] += dkey
        dvalue_NHd[:first] += dvalue
    return dquery_NHd, dkey_NHd, dvalue_NHd


def varlen(
    query_NHd: Tensor,
    key_KHd: Tensor,
    value_KHd: Tensor,
    queries: Spans,
    keys: Spans,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Each stretch of queries over the stretch of keys of the same number: the output, contiguous,
    and its log-sum-exps [H, N].
    """
    out_NHd, lse_HN, *_ = torch.ops.aten._flash_attention_forward(
        _dense(query_NHd),
        _dense(key_KHd),
        _dense(value_KHd),
        queries.start_S,
        keys.start_S,
        # with 1 it takes a way of its own, on which no stretch may be empty
        max(2, queries.longest),
        keys.longest,
        0.0,
        causal,
        False,
        scale=scaling,
    )
    assert lse_HN.shape == (query_NHd.shape[1], query_NHd.shape[0]), (
        f"log-sum-exps of shape {tuple(lse_HN.shape)}"
    )
    return out_NHd.contiguous(), lse_HN


def varlen_backward(
    dout_NHd: Tensor,
    query_NHd: Tensor,
    key_KHd: Tensor,
    value_KHd: Tensor,
    out_NHd: Tensor,
    lse_HN: Tensor,
    queries: Spans,
    keys: Spans,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values."""
    no_dropout = torch.empty(2, dtype=torch.uint64, device=query_NHd.device)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        dout_NHd,
        _dense(query_NHd),
        _dense(key_KHd),
        _dense(value_KHd),
        out_NHd,
        lse_HN,
        queries.start_S,
        keys.start_S,
        max(2, queries.longest),
        keys.longest,
        0.0,
        causal,
        no_dropout,
        no_dropout,
        scale=scaling,
    )
    return gradients


def _dense(heads_NHd: Tensor) -> Tensor:
    """With the values of a head next to each other."""
    return heads_NHd if heads_NHd.stride(-1) == 1 else heads_NHd.contiguous()
