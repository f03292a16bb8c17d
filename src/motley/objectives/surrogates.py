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
    SequenceRatio,
    TokenRatio,
    bounded_exp,
    sequence_log_ratio,
)

Applied = tuple[Tensor, Tensor, Tensor]
DUAL_CLIP = 3.0


@dataclass(frozen=True, slots=True)
class Reinforce:
    """R_t·A with R_t = exp(lp_t - sg(lp_t)): value A, gradient A·grad log p, in every step of a
    round.
    """

    def __call__(self, batch: LossBatch) -> Applied:
        logp_BT = batch.logp_BT
        unit_BT = (logp_BT - logp_BT.detach()).exp()
        one_BT = torch.ones_like(batch.logp_sampler_BT)
        return unit_BT * batch.advantage_B[:, None], one_BT, one_BT


@dataclass(frozen=True, slots=True)
class InnerClip:
    """min(R_t·A, clip(R_t, 1 - clip_low, 1 + clip_high)·A) with R_t = exp(lp_t - lp_t at the start
    of the round): PPO's clip, within a round (GRPO, TIS, F-TIS).

    In a round of one step R is exactly 1 and the clip can never bind: then it is Reinforce.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __call__(self, batch: LossBatch) -> Applied:
        if batch.logp_start_BT is None:
            return Reinforce()(batch)
        ratio_BT = bounded_exp(batch.moved_BT)
        advantage_B1 = batch.advantage_B[:, None]
        plain_BT = ratio_BT * advantage_B1
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_B1
        factor_BT = torch.where(plain_BT <= clipped_BT, ratio_BT, 0.0)
        return torch.minimum(plain_BT, clipped_BT), factor_BT.detach(), ratio_BT.detach()


@dataclass(frozen=True, slots=True)
class LogProb:
    """log p_t·A: the gradient of Reinforce, another value (CISPO, TOPR)."""

    def __call__(self, batch: LossBatch) -> Applied:
        one_BT = torch.ones_like(batch.logp_sampler_BT)
        return batch.logp_BT * batch.advantage_B[:, None], one_BT, one_BT


def dual_clip_floor(batch: LossBatch, dual_clip: float) -> Tensor:
    """dual_clip·A for strangers' sequences with A < 0, -inf for others: no value may be below.

    A stranger that reports a tiny q makes its ratio as large as it likes, and a clipped ratio has
    no upper bound where A < 0.
    """
    bounded_B = batch.terms.stranger_B & (batch.advantage_B < 0)
    return torch.where(bounded_B, dual_clip * batch.advantage_B, -torch.inf)[:, None]


@dataclass(frozen=True, slots=True)
class RatioTimesAdvantage:
    """ratio·A, the ratio with gradient and already clipped by itself (GMPO); for strangers with
    A < 0 at least dual_clip·A.

    A clipped token has no gradient: factor 0.
    """

    ratio: GeometricRatio = GeometricRatio()
    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        free_BT = self.ratio.clipped(batch) == batch.log_ratio_BT
        plain_BT = bounded_exp(sequence_log_ratio(batch).detach())[:, None].expand_as(ratio_BT)
        value_BT = ratio_BT * batch.advantage_B[:, None]
        floor_B1 = dual_clip_floor(batch, self.dual_clip)
        factor_BT = torch.where(free_BT & (value_BT > floor_B1), ratio_BT, 0.0)
        return torch.maximum(value_BT, floor_B1), factor_BT.detach(), plain_BT


@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A), the ratio with gradient; for
    strangers with A < 0 at least dual_clip·A.
    """

    ratio: Ratio = TokenRatio()
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        advantage_B1 = batch.advantage_B[:, None]
        plain_BT = ratio_BT * advantage_B1
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_B1
        value_BT = torch.minimum(plain_BT, clipped_BT)
        floor_B1 = dual_clip_floor(batch, self.dual_clip)
        acts_BT = (plain_BT <= clipped_BT) & (value_BT > floor_B1)
        factor_BT = torch.where(acts_BT, ratio_BT, 0.0)
        return torch.maximum(value_BT, floor_B1), factor_BT.detach(), ratio_BT.detach()


@dataclass(frozen=True, slots=True)
class Collaborative:
    """Own sequences: GSPO's clipped s·A. Foreign: c·sg(c)^alpha·A, c = clip(s, low, 1), with low =
    1 - cross_clip + u·cross_step after u steps of the round, at most 1 (HACPO).

    A foreign sequence outside of low..1 has no gradient; inside it weighs s^(1 + alpha).
    """

    own: ClippedRatio = ClippedRatio(ratio=SequenceRatio())
    cross_clip: float = 0.8
    cross_step: float = 0.025
    alpha: float = 1.0

    def __call__(self, batch: LossBatch) -> Applied:
        value_BT, factor_BT, ratio_BT = self.own(batch)
        low = min(1.0, 1 - self.cross_clip + batch.num_taken * self.cross_step)
        sequence_BT = self.own.ratio(batch)
        clipped_BT = sequence_BT.clamp(low, 1.0)
        weight_BT = clipped_BT.detach() ** self.alpha
        inside_BT = (sequence_BT >= low) & (sequence_BT <= 1)
        cross_BT = clipped_BT * weight_BT * batch.advantage_B[:, None]
        cross_factor_BT = torch.where(inside_BT, sequence_BT * weight_BT, 0.0).detach()
        own_B1 = batch.terms.own_B[:, None]
        return (
            torch.where(own_B1, value_BT, cross_BT),
            torch.where(own_B1, factor_BT, cross_factor_BT),
            ratio_BT,
        )


Surrogate = Reinforce | InnerClip | LogProb | RatioTimesAdvantage | ClippedRatio | Collaborative
