"""Surrogates: (objective_BT, factor_BT, ratio_BT), the last two detached.

The factor is the multiplier of A·grad log p that the surrogate applies, the ratio what it would be
without a clip.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from motley.objectives.batch import LossBatch
from motley.objectives.ratios import (
    GeometricRatio,
    Ratio,
    TokenRatio,
    bounded_exp,
    sequence_log_ratio,
)

Applied = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Reinforce:
    """R_t·A with R_t = exp(lp_t - sg(lp_t)): value A, gradient A·grad log p.

    Also the inner min(R·A, clip(R, 1-e, 1+e)·A) of TIS and F-TIS: with one optimiser step per batch
    R is exactly 1, so its clip can never bind and both have this value and this gradient.
    """

    def __call__(self, batch: LossBatch) -> Applied:
        # -inf - -inf would give NaN in the gradient
        logp_BT = torch.where(batch.mask_BT, batch.logp_learner_BT, 0.0)
        unit_BT = (logp_BT - logp_BT.detach()).exp()
        one_BT = torch.ones_like(batch.logp_sampler_BT)
        return unit_BT * batch.advantage_B[:, None], one_BT, one_BT


@dataclass(frozen=True, slots=True)
class LogProb:
    """log p_t·A: the gradient of Reinforce, another value (CISPO, TOPR)."""

    def __call__(self, batch: LossBatch) -> Applied:
        one_BT = torch.ones_like(batch.logp_sampler_BT)
        return batch.logp_learner_BT * batch.advantage_B[:, None], one_BT, one_BT


@dataclass(frozen=True, slots=True)
class RatioTimesAdvantage:
    """ratio·A, the ratio with gradient and already clipped by itself (GMPO).

    A clipped token has no gradient: factor 0.
    """

    ratio: GeometricRatio = GeometricRatio()

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        free_BT = self.ratio.clipped(batch) == batch.log_ratio_BT
        plain_BT = bounded_exp(sequence_log_ratio(batch).detach())[:, None].expand_as(ratio_BT)
        return (
            ratio_BT * batch.advantage_B[:, None],
            torch.where(free_BT, ratio_BT, 0.0).detach(),
            plain_BT,
        )


@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A), the ratio with gradient."""

    ratio: Ratio = TokenRatio()
    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        advantage_B1 = batch.advantage_B[:, None]
        plain_BT = ratio_BT * advantage_B1
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_B1
        factor_BT = torch.where(plain_BT <= clipped_BT, ratio_BT, 0.0)
        return torch.minimum(plain_BT, clipped_BT), factor_BT.detach(), ratio_BT.detach()


Surrogate = Reinforce | LogProb | RatioTimesAdvantage | ClippedRatio
