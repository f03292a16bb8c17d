"""Importance weights (stop-gradient) and filters: how much of a token counts, and which sequences
count at all.

`free` is what a weight would be without its bounds: for the diagnostics, which show how often a
bound acts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from motley.objectives.batch import LossBatch
from motley.objectives.ratios import bounded_exp, k3_sampler_over_learner


def token_ratio(batch: LossBatch) -> Tensor:
    return bounded_exp(batch.log_ratio_BT.detach())


def product_ratio(batch: LossBatch) -> Tensor:
    """prod_t rho_t of a sequence, for each of its tokens."""
    log_ratio_B = batch.shared_log_ratio_BT.detach().sum(1)
    return bounded_exp(log_ratio_B)[:, None].expand_as(batch.logp_sampler_BT)


@dataclass(frozen=True, slots=True)
class Unweighted:
    """1."""

    def __call__(self, batch: LossBatch) -> Tensor:
        return torch.ones_like(batch.logp_sampler_BT)

    def free(self, batch: LossBatch) -> Tensor:
        return self(batch)


@dataclass(frozen=True, slots=True)
class Truncated:
    """min(rho_t, C)."""

    C: float = 2.0

    def __call__(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch).clamp(max=self.C)

    def free(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch)


@dataclass(frozen=True, slots=True)
class TokenMasked:
    """rho_t where it is at most C, else 0."""

    C: float = 3.0

    def __call__(self, batch: LossBatch) -> Tensor:
        rho_BT = token_ratio(batch)
        return torch.where(rho_BT <= self.C, rho_BT, 0.0)

    def free(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch)


@dataclass(frozen=True, slots=True)
class SequenceTruncated:
    """min(prod_t rho_t, C): one weight for all tokens of a sequence."""

    C: float = 3.0

    def __call__(self, batch: LossBatch) -> Tensor:
        return product_ratio(batch).clamp(max=self.C)

    def free(self, batch: LossBatch) -> Tensor:
        return product_ratio(batch)


@dataclass(frozen=True, slots=True)
class SequenceMasked:
    """prod_t rho_t where it is at most C, else 0."""

    C: float = 3.0

    def __call__(self, batch: LossBatch) -> Tensor:
        product_BT = product_ratio(batch)
        return torch.where(product_BT <= self.C, product_BT, 0.0)

    def free(self, batch: LossBatch) -> Tensor:
        return product_ratio(batch)


@dataclass(frozen=True, slots=True)
class ClippedAbove:
    """clip(rho_t, 0, 1 + clip_high) (CISPO)."""

    clip_high: float = 4.0

    def __call__(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch).clamp(max=1 + self.clip_high)

    def free(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch)


@dataclass(frozen=True, slots=True)
class TaperedNegatives:
    """A >= 0: 1.

    A < 0: clip(prod_t rho_t, 0, 1), the ratio of whole-sequence probabilities (TOPR).
    """

    def __call__(self, batch: LossBatch) -> Tensor:
        sequence_B = batch.shared_log_ratio_BT.detach().sum(1).clamp(max=0).exp()
        weight_B = torch.where(batch.advantage_B >= 0, 1.0, sequence_B)
        return weight_B[:, None].expand_as(batch.logp_sampler_BT)

    def free(self, batch: LossBatch) -> Tensor:
        return product_ratio(batch)


@dataclass(frozen=True, slots=True)
class Uplifting:
    """A > 0: clamp(rho_t, floor, C), which is 1 as shipped. A <= 0: min(rho_t, 1).

    Learn what works from anyone; unlearn only what you would do yourself.

    With gate above 0 the floor of foreign sequences is floor·(1 - s)^gate, s the receiver's success
    on their kind, from 0 to 1. Where it fails it imitates; where it succeeds it takes what it might
    have written itself.

    With sure above 0 that floor is multiplied by q_t^sure, q_t the sender's probability of the
    token, or of its span. What the sender was sure of is imitated, not what it drew by chance.

    With gamma above 0 foreign sequences with A > 0 weigh gamma·p/(p + gamma)^2 instead (LUFFY's
    shaping): at most 1/4, at p = gamma. It vanishes on tokens that the learner finds absurd.
    """

    floor: float = 1.0
    C: float = 1.0
    gamma: float = 0.0
    gate: float = 0.0
    sure: float = 0.0

    def __post_init__(self) -> None:
        if self.floor > self.C:
            raise ValueError(
                f"objective setting floor = {self.floor} is above C = {self.C}; raise C or lower "
                "floor"
            )

    def __call__(self, batch: LossBatch) -> Tensor:
        rho_BT = token_ratio(batch)
        lifts_B1 = batch.advantage_B[:, None] > 0
        lifted_BT = rho_BT.clamp(self.floor, self.C)
        foreign_B1 = ~batch.terms.own_B[:, None]
        if self.gate or self.sure:
            guarded_BT = torch.maximum(rho_BT.clamp(max=self.C), self._foreign_floor(batch))
            lifted_BT = torch.where(foreign_B1, guarded_BT, lifted_BT)
        if self.gamma:
            p_BT = batch.logp_BT.detach().exp()
            shaped_BT = self.gamma * p_BT / (p_BT + self.gamma) ** 2
            lifted_BT = torch.where(foreign_B1, shaped_BT, lifted_BT)
        return torch.where(lifts_B1, lifted_BT, rho_BT.clamp(max=1))

    def _foreign_floor(self, batch: LossBatch) -> Tensor:
        q_BT = batch.span_total(batch.logp_sampler_BT).exp().clamp(max=1)
        fails_B1 = (1 - batch.terms.success_B[:, None].clamp(0, 1)).to(q_BT.dtype)
        return self.floor * fails_B1**self.gate * q_BT**self.sure

    def free(self, batch: LossBatch) -> Tensor:
        return token_ratio(batch)


@dataclass(frozen=True, slots=True)
class Fallen:
    """rho_t < 1: 1, else 0. What is no less likely than it was is left alone."""

    def __call__(self, batch: LossBatch) -> Tensor:
        return (batch.log_ratio_BT.detach() < 0).to(batch.logp_sampler_BT.dtype)

    def free(self, batch: LossBatch) -> Tensor:
        return torch.ones_like(batch.logp_sampler_BT)


def sequence_kl(
    batch: LossBatch, estimator: Literal["k3", "k1"], over: Literal["own", "group"]
) -> Tensor:
    """KL_i = mean_t(exp(-d_t) - 1 + d_t) (k3) or mean_t(-d_t) (k1), over the own length or the
    group's longest. Of spans the sum, over the length in tokens: still nats per token.
    """
    log_ratio_BT = batch.log_ratio_BT.detach()
    value_BT = k3_sampler_over_learner(log_ratio_BT) if estimator == "k3" else -log_ratio_BT
    if over == "own":
        return batch.span_mean(value_BT)
    return (
        torch.where(batch.once(batch.mask_BT), value_BT, 0.0).sum(1) / batch.terms.group_longest_B
    )


@dataclass(frozen=True, slots=True)
class KeepAll:
    """Nothing is dropped; the KL is still measured."""

    def __call__(self, batch: LossBatch) -> tuple[Tensor, Tensor]:
        return torch.ones_like(batch.ended_B), sequence_kl(batch, "k3", "own")


@dataclass(frozen=True, slots=True)
class DropUnlikelyNegatives:
    """Drop A <= 0 and KL_i >= g (F-TIS).

    What is dropped stays in the group's statistics and in the denominator.

    g belongs to its estimator: g = 50 with k3 fires at about one token 1e4 times less likely here
    than where it was made; with kl = "k1" (OPSM) use g of about 0.1 to 1.
    """

    g: float = 50.0
    kl: Literal["k3", "k1"] = "k3"
    kl_over: Literal["own", "group"] = "own"

    def __call__(self, batch: LossBatch) -> tuple[Tensor, Tensor]:
        kl_B = sequence_kl(batch, self.kl, self.kl_over)
        return (batch.advantage_B > 0) | (kl_B < self.g), kl_B


Weight = (
    Unweighted
    | Truncated
    | TokenMasked
    | SequenceTruncated
    | SequenceMasked
    | ClippedAbove
    | TaperedNegatives
    | Uplifting
    | Fallen
)
Filter = KeepAll | DropUnlikelyNegatives
