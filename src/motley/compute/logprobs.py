"""From hidden states to log-probs of target tokens.

Owns the projection to the vocabulary, in chunks: a batch's logits never exist at once. Knows no
layer: `scoring` makes the hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from motley.compute.packed import Packed

LOGITS_AT_ONCE = 2**25
LOGITS_AT_ONCE_GPU = 2**26  # 256 MiB of them: fewer make products too small for a large GPU
ROWS_EVEN = 128  # a product's tiles


@dataclass(frozen=True, slots=True)
class Scores:
    """Per target token: log-prob under the model at the record's temperature (with gradient), and
    entropy (without).
    """

    logp_M: Tensor
    entropy_M: Tensor


def score_hidden(hidden_MD: Tensor, head: nn.Linear, packed: Packed) -> Scores:
    """Project to the vocabulary in chunks; logits of more than one are dropped after use and
    recomputed for the gradient.

    Hidden states in a half type are multiplied in it, by kernels; float32 ones in float32. Logits
    are float32 either way.
    """
    if hidden_MD.dtype != torch.float32 and head.bias is None:
        return Scores(*_Score.apply(hidden_MD, head.weight, packed.target_M, packed.temperature_M))
    bias_V = None if head.bias is None else head.bias.float()
    return Scores(
        *_FloatScore.apply(
            hidden_MD.float(), head.weight.float(), bias_V, packed.target_M, packed.temperature_M
        )
    )


def project(hidden_MD: Tensor, head: nn.Linear) -> Tensor:
    """Float32 logits as `score_hidden` makes them, all at once."""
    if hidden_MD.dtype != torch.float32 and head.bias is None:
        return _product(hidden_MD, head.weight.to(hidden_MD.dtype).t())
    logits_MV: Tensor = head(hidden_MD.float())
    return logits_MV.float()


class _FloatScore(torch.autograd.Function):
    """In float32 by torch's own kernels. Keeps the distributions if they are one chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        target_M: Tensor,
        temperature_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        rows = max(1, LOGITS_AT_ONCE // len(weight_VD))
        for hidden, target, temperature in zip(
            hidden_MD.split(rows), target_M.split(rows), temperature_M.split(rows), strict=True
        ):
            logits = F.linear(hidden, weight_VD, bias_V).div_(temperature[:, None])
            logp = torch.log_softmax(logits, -1)
            p = torch.exp(logp, out=logits)
            chunks.append((logp.gather(1, target[:, None]).squeeze(1), logp.mul_(p).sum(-1).neg_()))
        ctx.rows = rows
        ctx.save_for_backward(
            hidden_MD, weight_VD, bias_V, target_M, temperature_M, p if len(chunks) == 1 else None
        )
        logp_M, entropy_M = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, dlogp_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, weight_VD, bias_V, target_M, temperature_M, kept = ctx.saved_tensors
        dweight_VD, dbias_V, dhidden = None, None, []
        for hidden, target, temperature, dlogp in zip(
            *(each.split(ctx.rows) for each in (hidden_MD, target_M, temperature_M, dlogp_M)),
            strict=True,
        ):
            p = (
                torch.softmax(F.linear(hidden, weight_VD, bias_V).div_(temperature[:, None]), -1)
                if kept is None
                else kept
            )
            share = (dlogp / temperature)[:, None]
            dlogits = (p * -share).scatter_add_(1, target[:, None], share)
            dhidden.append(dlogits @ weight_VD)
            if ctx.needs_input_grad[1]:
                dweight_VD = (
                    dlogits.t() @ hidden
                    if dweight_VD is None
                    else dweight_VD.addmm_(dlogits.t(), hidden)
                )
            if ctx.needs_input_grad[2]:
                dbias_V = dlogits.sum(0) if dbias_V is None else dbias_V.add_(dlogits.sum(0))
        return torch.cat(dhidden), dweight_VD, dbias_V, None, None


class _Score(torch.autograd.Function):
    """Log-prob and entropy of every row.

    Keeps of a row its hidden state and its log-sum-exp. Entropy has no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MD: Tensor, weight_VD: Tensor, target_M: Tensor, temperature_M: Tensor
    ) -> tuple[Tensor, Tensor]:
        from motley.compute import kernels

        half_VD = weight_VD.to(hidden_MD.dtype)
        chunks = [
            kernels.score(_product(hidden, half_VD.t()), target, temperature)
            for hidden, target, temperature in _chunks(
                len(half_VD), hidden_MD, target_M, temperature_M
            )
        ]
        logp_M, entropy_M, lse_M = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        ctx.save_for_backward(hidden_MD, half_VD, target_M, temperature_M, lse_M)
        ctx.mark_non_differentiable(entropy_M)
        return logp_M, entropy_M

    @staticmethod
    def backward(ctx: Any, dlogp_M: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MD, half_VD, *per_row = ctx.saved_tensors
        dweight_VD = (
            torch.zeros_like(half_VD, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        )
        dhidden = [
            _chunk_gradient(chunk, half_VD, dweight_VD)
            for chunk in map(
                _Chunk._make, _chunks(len(half_VD), hidden_MD, *per_row, dlogp_M.contiguous())
            )
        ]
        return torch.cat(dhidden), dweight_VD, None, None


class _Chunk(NamedTuple):
    hidden_MD: Tensor
    target_M: Tensor
    temperature_M: Tensor
    lse_M: Tensor
    dlogp_M: Tensor


def _chunk_gradient(chunk: _Chunk, half_VD: Tensor, dweight_VD: Tensor | None) -> Tensor:
    """Of the hidden states; the weights' is added to theirs."""
    from motley.compute import kernels

    dlogits_MV = kernels.score_backward(
        _product(chunk.hidden_MD, half_VD.t()),
        chunk.target_M,
        chunk.temperature_M,
        chunk.lse_M,
        chunk.dlogp_M,
        half_VD.dtype,
    )
    if dweight_VD is not None:
        _add_product(dweight_VD, dlogits_MV.t(), chunk.hidden_MD)
    return dlogits_MV @ half_VD


def _chunks(vocabulary: int, *per_row: Tensor) -> Iterator[tuple[Tensor, ...]]:
    rows = max(1, LOGITS_AT_ONCE_GPU // vocabulary)
    rows = rows // ROWS_EVEN * ROWS_EVEN or rows
    return zip(*(each.split(rows) for each in per_row), strict=True)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """In float32, of two in a half type; only a GPU multiplies so without widening them first."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _add_product(to: Tensor, a: Tensor, b: Tensor) -> None:
    """to += a·b, in float32."""
    if a.is_cuda:
        torch.ops.aten.addmm.dtype_out(to, a, b, torch.float32, out=to)
    else:
        to.addmm_(a.float(), b.float())
