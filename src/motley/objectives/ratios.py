"""Learner-to-sampler ratios, per token and per sequence, and estimates of the divergence.

All in float32 log space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from motley.objectives.advantages import group_largest, group_sum
from motley.objectives.batch import LossBatch

# exp(60) is 1e26: far past any bound used here, and a sum of thousands of them still fits in
# float32.
MAX_LOG_RATIO = 60.0


def bounded_exp(log_BT: Tensor) -> Tensor:
    return log_BT.clamp(max=MAX_LOG_RATIO).exp()


def k3(log_ratio_BT: Tensor) -> Tensor:
    """exp(x) - 1 - x."""
    return bounded_exp(log_ratio_BT) - 1 - log_ratio_BT


def k3_sampler_over_learner(log_ratio_BT: Tensor) -> Tensor:
    """exp(-d) - 1 + d: grows without bound where the learner finds the token unlikely.

    The estimator of the F-TIS filter, and of GEPO's released code.
    """
    return k3(-log_ratio_BT)


def sequence_log_ratio(batch: LossBatch) -> Tensor:
    """LP_i - LQ_i: the log of the ratio of geometric-mean token probabilities."""
    return batch.token_mean(batch.shared_log_ratio_BT)


def pushed_out(batch: LossBatch) -> Tensor:
    """bool_BT: tokens whose ratio a step pushes further from 1, those that PPO's clip is about."""
    return (batch.advantage_B[:, None] * batch.log_ratio_BT > 0) & batch.mask_BT


def log_expectation(logq_mean_B: Tensor, group_B: Tensor) -> Tensor:
    """logE = logsumexp_j(2·LQ_j) - logsumexp_j(LQ_j) over the sequence's group, taken relative to
    the group's largest LQ.
    """
    largest_B = group_largest(logq_mean_B, group_B)
    q_B = (logq_mean_B - largest_B).exp()
    return largest_B + group_sum(q_B**2, group_B).log() - group_sum(q_B, group_B).log()


def sampler_mean(batch: LossBatch) -> Tensor:
    return batch.token_mean(batch.logp_sampler_BT)


def learner_mean(batch: LossBatch) -> Tensor:
    return batch.token_mean(batch.compared_logp_BT)


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """rho_t = exp(d_t), with gradient."""

    def __call__(self, batch: LossBatch) -> Tensor:
        return bounded_exp(batch.log_ratio_BT)


@dataclass(frozen=True, slots=True)
class SequenceRatio:
    """s_i = exp(LP_i - LQ_i), with gradient (GSPO)."""

    def __call__(self, batch: LossBatch) -> Tensor:
        return bounded_exp(sequence_log_ratio(batch))[:, None].expand_as(batch.mask_BT)


@dataclass(frozen=True, slots=True)
class GroupRatio:
    """w_i = exp(LP_i - logE), with gradient through LP_i only (GEPO).

    scope "group": logE over the responses of the problem. "microbatch": over whatever shares the
    micro-batch, as the released code does; then the loss depends on the cut.
    """

    scope: Literal["group", "microbatch"] = "group"

    def log_denominator(self, batch: LossBatch) -> Tensor:
        if self.scope == "group":
            return batch.terms.log_expectation_B
        together_B = torch.zeros_like(batch.terms.pair_B)
        return log_expectation(sampler_mean(batch), together_B)

    def __call__(self, batch: LossBatch) -> Tensor:
        log_w_B = learner_mean(batch) - self.log_denominator(batch)
        return bounded_exp(log_w_B)[:, None].expand_as(batch.mask_BT)


@dataclass(frozen=True, slots=True)
class GroupOrSequenceRatio:
    """GEPO's ratio, or GSPO's for sequences whose KL is under `near` (gepo_plus), as the round
    began.
    """

    near: float = 0.002

    def __call__(self, batch: LossBatch) -> Tensor:
        log_ratio_BT = batch.at_start().log_ratio_BT.detach()
        kl_B = batch.span_mean(k3_sampler_over_learner(log_ratio_BT))
        log_denominator_B = torch.where(
            kl_B < self.near, sampler_mean(batch), batch.terms.log_expectation_B
        )
        return bounded_exp(learner_mean(batch) - log_denominator_B)[:, None].expand_as(
            batch.mask_BT
        )


@dataclass(frozen=True, slots=True)
class SmoothedSequenceRatio:
    """exp(LP) / ((1 - mix)·exp(LQ) + mix·sg(exp(LP))): GSPO with a denominator that cannot vanish
    (ds_gspo).
    """

    mix: float = 0.005

    def __call__(self, batch: LossBatch) -> Tensor:
        logp_B, logq_B = learner_mean(batch), sampler_mean(batch)
        log_keep, log_mix = torch.tensor([1 - self.mix, self.mix], device=logp_B.device).log()
        log_denominator_B = torch.logaddexp(log_keep + logq_B, log_mix + logp_B.detach())
        return bounded_exp(logp_B - log_denominator_B)[:, None].expand_as(batch.mask_BT)


@dataclass(frozen=True, slots=True)
class GeometricRatio:
    """exp(mean_t min(d_t, c)) for A > 0, exp(mean_t max(d_t, -c)) for A < 0 (GMPO): clipped where
    clipping is pessimistic. A span is clipped as one; its mean is still over tokens.
    """

    log_clip: float = 0.4

    def clipped(self, batch: LossBatch) -> Tensor:
        log_ratio_BT = batch.span_log_ratio_BT
        positive_B1 = batch.advantage_B[:, None] > 0
        return torch.where(
            positive_B1,
            log_ratio_BT.clamp(max=self.log_clip),
            log_ratio_BT.clamp(min=-self.log_clip),
        )

    def __call__(self, batch: LossBatch) -> Tensor:
        return bounded_exp(batch.span_mean(self.clipped(batch)))[:, None].expand_as(batch.mask_BT)


@dataclass(frozen=True, slots=True)
class ProductRatio:
    """prod_t rho_t = p(a)/q(a), the ratio of whole-sequence probabilities (RLOO)."""

    def __call__(self, batch: LossBatch) -> Tensor:
        return bounded_exp(batch.shared_log_ratio_BT.sum(1))[:, None].expand_as(batch.mask_BT)


Ratio = (
    TokenRatio
    | SequenceRatio
    | ProductRatio
    | GroupRatio
    | GroupOrSequenceRatio
    | SmoothedSequenceRatio
    | GeometricRatio
)


def span_ratio(ratio: Ratio, batch: LossBatch) -> Tensor:
    """The ratio of each token, with the gradient of all tokens that it is made of.

    That of a span has its token's own alone where a token's value is summed over tokens.
    """
    if isinstance(ratio, TokenRatio):
        return bounded_exp(batch.span_log_ratio_BT)
    return ratio(batch)
