"""Advantages: what a sequence is worth against the others.

Pure functions of the whole batch, in float64, before any cut.

Must not know log-probs of the learner: an advantage is settled before the learner scores anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from motley.objectives.batch import Samples

STD_EPSILON = 1e-4
VARIANCE_EPSILON = 1e-8
MAX_BETA_FACTOR = 1e6
# Equal means differ by rounding: their variance is 1e-33, not 0. Group means that really differ do
# so by more than 1e-5.
MIN_BETA_VARIANCE = 1e-10


def num_groups(group_B: Tensor) -> int:
    return int(group_B.max()) + 1


def group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Each sequence's group total, as one entry per sequence."""
    total_P = value_B.new_zeros(num_groups(group_B))
    return total_P.index_add(0, group_B, value_B)[group_B]


def group_mean(value_B: Tensor, group_B: Tensor) -> Tensor:
    return group_sum(value_B, group_B) / group_sum(torch.ones_like(value_B), group_B)


def group_std(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Unbiased standard deviation within the group; zero for a group of one."""
    count_B = group_sum(torch.ones_like(value_B), group_B)
    squared_B = group_sum((value_B - group_mean(value_B, group_B)) ** 2, group_B)
    return (squared_B / (count_B - 1).clamp(min=1)).sqrt()


def group_largest(value_B: Tensor, group_B: Tensor) -> Tensor:
    largest_P = value_B.new_full((num_groups(group_B),), -torch.inf)
    return largest_P.scatter_reduce(0, group_B, value_B, "amax")[group_B]


def rewards(samples: Samples) -> Tensor:
    """In float64, as everything that is made of them."""
    return samples.reward_B.double()


@dataclass(frozen=True, slots=True)
class Centred:
    """A = r - mean(r)."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_B = rewards(samples)
        return reward_B - group_mean(reward_B, samples.group_B)


@dataclass(frozen=True, slots=True)
class Standardised:
    """A = (r - mean(r)) / (std(r) + 1e-4), std unbiased."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_B = rewards(samples)
        spread_B = group_std(reward_B, samples.group_B) + STD_EPSILON
        return (reward_B - group_mean(reward_B, samples.group_B)) / spread_B


@dataclass(frozen=True, slots=True)
class BatchStandardised:
    """A = (r - mean(r)) / (std + 1e-4), std unbiased and over the rewards of the whole batch."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_B = rewards(samples)
        spread = group_std(reward_B, torch.zeros_like(samples.group_B)) + STD_EPSILON
        return (reward_B - group_mean(reward_B, samples.group_B)) / spread


@dataclass(frozen=True, slots=True)
class LeaveOneOut:
    """A = r - the mean of the others of the group; 0 for a group of one (RLOO)."""

    def __call__(self, samples: Samples) -> Tensor:
        reward_B, group_B = rewards(samples), samples.group_B
        count_B = group_sum(torch.ones_like(reward_B), group_B)
        return (reward_B - group_mean(reward_B, group_B)) * count_B / (count_B - 1).clamp(min=1)


@dataclass(frozen=True, slots=True)
class Whitened:
    """A = (x - mean(x)) / sqrt(var(x) + 1e-8), mean and unbiased variance over all tokens of the
    batch (REINFORCE++). x = r, or r - the group's mean with baseline = "group".
    """

    baseline: Literal["none", "group"] = "none"

    def __call__(self, samples: Samples) -> Tensor:
        value_B, length_B = rewards(samples), samples.length_B
        if self.baseline == "group":
            value_B = value_B - group_mean(value_B, samples.group_B)
        total = length_B.sum()
        centred_B = value_B - (length_B * value_B).sum() / total
        variance = (length_B * centred_B**2).sum() / (total - 1).clamp(min=1)
        return centred_B / (variance + VARIANCE_EPSILON).sqrt()


@dataclass(frozen=True, slots=True)
class BetaNormalised:
    """A = (r - m) / BetaPDF(m; alpha, beta), m the group's mean; alpha and beta by moments of m
    over the batch (BNPO).

    k = mu(1-mu)/v - 1, alpha = max(1, 1 + k·mu/3), beta = max(1, 1 + k·(1-mu)/3); 1/PDF <= 1e6.
    k = 0 where v = 0, that is under MIN_BETA_VARIANCE. A mean outside 0..1 counts as the nearer of
    the two, so that no reward can stop a step.
    """

    def __call__(self, samples: Samples) -> Tensor:
        reward_B = rewards(samples)
        mean_B = group_mean(reward_B, samples.group_B)
        first_P = [
            int((samples.group_B == p).nonzero()[0]) for p in range(num_groups(samples.group_B))
        ]
        share_B = mean_B.clamp(0, 1)
        mean_P = share_B[first_P]
        mu = mean_P.mean()
        variance = mean_P.var() if len(mean_P) > 1 else torch.zeros_like(mu)
        k = mu * (1 - mu) / variance - 1 if variance > MIN_BETA_VARIANCE else torch.zeros_like(mu)
        alpha = (1 + k * mu / 3).clamp(min=1)
        beta = (1 + k * (1 - mu) / 3).clamp(min=1)
        log_beta_function = torch.lgamma(alpha) + torch.lgamma(beta) - torch.lgamma(alpha + beta)
        log_pdf_B = (
            torch.xlogy(alpha - 1, share_B) + torch.xlogy(beta - 1, 1 - share_B) - log_beta_function
        )
        return (reward_B - mean_B) * torch.exp(-log_pdf_B).clamp(max=MAX_BETA_FACTOR)


@dataclass(frozen=True, slots=True)
class CapabilityAware:
    """A = o·(r - mean(r/o)) / (std(r) + 1e-4), o the sender's skill over the receiver's (HACPO).

    o is held between 1/most_skill and most_skill; it is 1 for own sequences. Mean and std are the
    group's: of all its senders (horizontal) or of one (vertical). A baseline above the group's
    best reward is the mean of the group's own sequences instead, or of all where it has none.
    A group of equal rewards stays silent.
    """

    most_skill: float = 10.0

    def __call__(self, samples: Samples) -> Tensor:
        reward_B, group_B = rewards(samples), samples.group_B
        skill_B = samples.skill_B.double().clamp(1 / self.most_skill, self.most_skill)
        skill_B = torch.where(samples.own_B, 1.0, skill_B)
        baseline_B = group_mean(reward_B / skill_B, group_B)
        too_high_B = baseline_B > group_largest(reward_B, group_B)
        baseline_B = torch.where(too_high_B, _mean_of_own(samples), baseline_B)
        spread_B = group_std(reward_B, group_B)
        advantage_B = skill_B * (reward_B - baseline_B) / (spread_B + STD_EPSILON)
        return torch.where(spread_B == 0, 0.0, advantage_B)


def _mean_of_own(samples: Samples) -> Tensor:
    """The mean reward of the group's own sequences; of all where it has none."""
    reward_B, group_B = rewards(samples), samples.group_B
    own_B = samples.own_B.double()
    num_own_B = group_sum(own_B, group_B)
    mean_B = group_sum(reward_B * own_B, group_B) / num_own_B
    return torch.where(num_own_B > 0, mean_B, group_mean(reward_B, group_B))


# Adjustments: (samples, advantage) -> advantage. The named remedies that `uplift` is made of.


@dataclass(frozen=True, slots=True)
class ReceiverRelative:
    """Foreign samples that beat the receiver's own running success s on this kind: A = scale·(r -
    s); other foreign: min(A, 0).

    An all-correct group of a better peer speaks, and falls silent as the receiver catches up.
    """

    scale: float = 2.0

    def __call__(self, samples: Samples, advantage_B: Tensor) -> Tensor:
        gain_B = rewards(samples) - samples.success_B
        foreign_B = torch.where(gain_B > 0, self.scale * gain_B, advantage_B.clamp(max=0))
        return torch.where(samples.own_B, advantage_B, foreign_B)


@dataclass(frozen=True, slots=True)
class BothBaselines:
    """Foreign samples that beat the receiver's own running success s on this kind: the larger of A
    and scale·(r - s); other foreign: min(A, 0).

    A rare success counts as in its sender's group, a sure one by what the receiver lacks.
    """

    scale: float = 1.0

    def __call__(self, samples: Samples, advantage_B: Tensor) -> Tensor:
        relative_B = ReceiverRelative(self.scale)(samples, advantage_B)
        beats_B = samples.reward_B > samples.success_B
        return torch.where(beats_B, torch.maximum(advantage_B, relative_B), relative_B)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Own groups in which every reward is the same and positive: A = rehearse·r instead of 0, so
    that own skill is held.
    """

    rehearse: float = 0.3

    def __call__(self, samples: Samples, advantage_B: Tensor) -> Tensor:
        reward_B = rewards(samples)
        solved_B = samples.own_B & (group_std(reward_B, samples.group_B) == 0) & (reward_B > 0)
        return torch.where(solved_B, self.rehearse * reward_B, advantage_B)


@dataclass(frozen=True, slots=True)
class ForeignCap:
    """Scale foreign advantages down until their share of sum |A| is at most `foreign_cap`."""

    foreign_cap: float = 0.5

    def __call__(self, samples: Samples, advantage_B: Tensor) -> Tensor:
        own = advantage_B[samples.own_B].abs().sum()
        foreign = advantage_B[~samples.own_B].abs().sum()
        if foreign <= self.foreign_cap * (own + foreign):
            return advantage_B
        factor = self.foreign_cap * own / ((1 - self.foreign_cap) * foreign)
        return torch.where(samples.own_B, advantage_B, factor * advantage_B)


Advantage = (
    Centred
    | Standardised
    | BatchStandardised
    | LeaveOneOut
    | Whitened
    | BetaNormalised
    | CapabilityAware
)
Adjustment = ReceiverRelative | BothBaselines | Rehearsal | ForeignCap
