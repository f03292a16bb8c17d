"""Surrogates: (objective_BT, factor_BT, ratio_BT), the last two detached.

The factor is the multiplier of A·grad log p that the surrogate applies, the ratio what it would be
without a clip.
"""

from __future__ import annotations

import math
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
    pushed_out,
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


def dual_clip_floor(batch: LossBatch, dual_clip: float, delta: float) -> Tensor:
    """delta·A where A < 0, and dual_clip·A for strangers; -inf elsewhere: no value may be below.

    A stranger that reports a tiny q makes its ratio as large as it likes, and a clipped ratio has
    no upper bound where A < 0.
    """
    most_B = torch.where(batch.terms.stranger_B, min(dual_clip, delta), delta)
    floor_B = torch.where(batch.advantage_B < 0, most_B * batch.advantage_B, -torch.inf)
    return floor_B[:, None]


def stranger_bounded(batch: LossBatch, ratio_BT: Tensor, dual_clip: float) -> Tensor:
    """The ratio, of strangers at most dual_clip: for rows that bound it on neither side."""
    most_B = torch.where(batch.terms.stranger_B, dual_clip, torch.inf)
    return ratio_BT.clamp(max=most_B[:, None])


@dataclass(frozen=True, slots=True)
class RatioTimesAdvantage:
    """ratio·A, the ratio with gradient and already clipped by itself (GMPO); with A < 0 at least
    delta·A, and for strangers dual_clip·A.

    A clipped token has no gradient: factor 0.
    """

    ratio: GeometricRatio = GeometricRatio()
    delta: float = math.inf
    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        free_BT = self.ratio.clipped(batch) == batch.log_ratio_BT
        plain_BT = bounded_exp(sequence_log_ratio(batch).detach())[:, None].expand_as(ratio_BT)
        value_BT = ratio_BT * batch.advantage_B[:, None]
        floor_B1 = dual_clip_floor(batch, self.dual_clip, self.delta)
        factor_BT = torch.where(free_BT & (value_BT > floor_B1), ratio_BT, 0.0)
        return torch.maximum(value_BT, floor_B1), factor_BT.detach(), plain_BT


@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """min(ratio·A, clip(ratio, 1 - clip_low, 1 + clip_high)·A), the ratio with gradient; with A < 0
    at least delta·A, and for strangers dual_clip·A.
    """

    ratio: Ratio = TokenRatio()
    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float = math.inf
    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = self.ratio(batch)
        advantage_B1 = batch.advantage_B[:, None]
        plain_BT = ratio_BT * advantage_B1
        clipped_BT = ratio_BT.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage_B1
        value_BT = torch.minimum(plain_BT, clipped_BT)
        floor_B1 = dual_clip_floor(batch, self.dual_clip, self.delta)
        acts_BT = (plain_BT <= clipped_BT) & (value_BT > floor_B1)
        factor_BT = torch.where(acts_BT, ratio_BT, 0.0)
        return torch.maximum(value_BT, floor_B1), factor_BT.detach(), ratio_BT.detach()


@dataclass(frozen=True, slots=True)
class ProbabilityMasked:
    """rho_t·A - tau·d_t^2 where p_t - q_t <= mask_high (A > 0) or >= -mask_low (A < 0); elsewhere
    -tau·d_t^2 (DPPO). Where A = 0 nothing.

    Of strangers rho is at most dual_clip, and d within its logarithm either way.
    """

    mask_low: float = 0.2
    mask_high: float = 0.2
    tau: float = 1e-3
    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        advantage_B1, log_ratio_BT = batch.advantage_B[:, None], batch.log_ratio_BT
        plain_BT = bounded_exp(log_ratio_BT)
        ratio_BT = stranger_bounded(batch, plain_BT, self.dual_clip)
        p_BT, q_BT = (batch.span_total(x).exp() for x in (batch.logp_BT, batch.logp_sampler_BT))
        moved_BT = p_BT - q_BT
        keep_BT = torch.where(
            advantage_B1 > 0, moved_BT <= self.mask_high, moved_BT >= -self.mask_low
        )
        most_B1 = torch.where(batch.terms.stranger_B, math.log(self.dual_clip), math.inf)[:, None]
        square_BT = log_ratio_BT.clamp(-most_B1, most_B1) ** 2
        value_BT = torch.where(keep_BT, ratio_BT * advantage_B1, 0.0) - self.tau * square_BT
        factor_BT = torch.where(keep_BT & (ratio_BT == plain_BT), ratio_BT, 0.0)
        value_BT = torch.where(advantage_B1 == 0, 0.0, value_BT)
        return value_BT, factor_BT.detach(), plain_BT.detach()


@dataclass(frozen=True, slots=True)
class MomentMasked:
    """rho_t·A, but 0 where a step pushes rho further from 1 (A > 0 and d_t > 0, or A < 0 and d_t <
    0) and d_t^2 is above what the batch allows (M2PO).

    Of strangers rho is at most dual_clip.
    """

    dual_clip: float = DUAL_CLIP

    def __call__(self, batch: LossBatch) -> Applied:
        plain_BT = bounded_exp(batch.log_ratio_BT)
        ratio_BT = stranger_bounded(batch, plain_BT, self.dual_clip)
        square_BT = batch.log_ratio_BT**2
        keep_BT = ~pushed_out(batch) | (square_BT <= batch.terms.most_square)
        value_BT = torch.where(keep_BT, ratio_BT * batch.advantage_B[:, None], 0.0)
        factor_BT = torch.where(keep_BT & (ratio_BT == plain_BT), ratio_BT, 0.0)
        return value_BT, factor_BT.detach(), plain_BT.detach()


@dataclass(frozen=True, slots=True)
class SoftGate:
    """(4/tau)·sigmoid(tau·(rho_t - 1))·A, tau = tau_pos where A > 0, else tau_neg (SAPO).

    Its weight on A·grad log p is rho_t·4·g·(1 - g), g the sigmoid: 1 at rho = 1, at most about
    1.6, and it vanishes on both sides.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def __call__(self, batch: LossBatch) -> Applied:
        ratio_BT = bounded_exp(batch.log_ratio_BT)
        advantage_B1 = batch.advantage_B[:, None]
        tau_B1 = torch.where(advantage_B1 > 0, self.tau_pos, self.tau_neg)
        gate_BT = torch.sigmoid(tau_B1 * (ratio_BT - 1))
        factor_BT = 4 * gate_BT * (1 - gate_BT) * ratio_BT
        value_BT = 4 * gate_BT / tau_B1 * advantage_B1
        return value_BT, factor_BT.detach(), ratio_BT.detach()


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


Surrogate = (
    Reinforce
    | InnerClip
    | LogProb
    | RatioTimesAdvantage
    | ClippedRatio
    | ProbabilityMasked
    | MomentMasked
    | SoftGate
    | Collaborative
)
