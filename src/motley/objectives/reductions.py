"""Reductions: from values per token to this micro-batch's share of one number.

Every denominator is the whole batch's, so the shares of the micro-batches add up. Filtered
sequences stay in the denominator, except in `PairSurvivors`, which says so. One that counts nothing
is 1: there is nothing to divide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motley.objectives.batch import LossBatch


def _kept(value_B: Tensor, keep_B: Tensor) -> Tensor:
    """Zero where filtered.

    Not left out: how many are left would have to be asked of a GPU, and waited for.
    """
    return torch.where(keep_B, value_B, 0.0)


def _masked(value_BT: Tensor, batch: LossBatch) -> Tensor:
    return torch.where(batch.mask_BT, value_BT, 0.0)


@dataclass(frozen=True, slots=True)
class SequenceMean:
    """(1/B) sum_i (1/|a_i|) sum_t: every sequence counts the same."""

    def __call__(self, value_BT: Tensor, keep_B: Tensor, batch: LossBatch) -> Tensor:
        return _kept(batch.token_mean(value_BT), keep_B).sum() / max(1, batch.terms.num_sequences)


@dataclass(frozen=True, slots=True)
class SequenceSum:
    """(1/B) sum_i sum_t: the log-prob of a sequence is the sum over its tokens."""

    def __call__(self, value_BT: Tensor, keep_B: Tensor, batch: LossBatch) -> Tensor:
        total_B = _masked(value_BT, batch).sum(1)
        return _kept(total_B, keep_B).sum() / max(1, batch.terms.num_sequences)


@dataclass(frozen=True, slots=True)
class TokenMean:
    """sum / total tokens: every token counts the same."""

    def __call__(self, value_BT: Tensor, keep_B: Tensor, batch: LossBatch) -> Tensor:
        return _kept(_masked(value_BT, batch).sum(1), keep_B).sum() / max(1, batch.terms.num_tokens)


@dataclass(frozen=True, slots=True)
class ConstantLength:
    """sum / (B·max_len), max_len the sampling limit: no length enters the scale (Dr.GRPO)."""

    def __call__(self, value_BT: Tensor, keep_B: Tensor, batch: LossBatch) -> Tensor:
        return _kept(_masked(value_BT, batch).sum(1), keep_B).sum() / (
            max(1, batch.terms.num_sequences) * batch.terms.max_length
        )


@dataclass(frozen=True, slots=True)
class PairSurvivors:
    """Mean over pairs of the mean over each pair's survivors of the token mean: the F-TIS code's
    micro-batches of 2.

    Filtered sequences are removed from the denominator; a pair with no survivor counts as zero. A
    cut must not part a pair.
    """

    def __call__(self, value_BT: Tensor, keep_B: Tensor, batch: LossBatch) -> Tensor:
        pair_BB = (batch.terms.pair_B[:, None] == batch.terms.pair_B[None, :]).to(value_BT.dtype)
        survivors_B = (pair_BB @ keep_B.to(value_BT.dtype)).clamp(min=1)
        return _kept(batch.token_mean(value_BT) / survivors_B, keep_B).sum() / batch.terms.num_pairs


Reduction = SequenceMean | SequenceSum | TokenMean | ConstantLength | PairSurvivors
