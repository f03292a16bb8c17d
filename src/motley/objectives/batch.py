"""What an objective is given and what it returns. Owns no formula.

Axes: P problem (group), G in group, B sequence, T completion token, V vocabulary. A name ends in
its axes. Two stages. `Samples` -> `Terms`: everything that needs the whole group or the whole
batch, once. `LossBatch` -> `LossOutput`: the loss of one micro-batch, whose sum over all
micro-batches does not depend on how the batch was cut.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

# No less counts as the learner's log-prob. A model may find a token impossible, and the sums and
# exponents made of an infinity are no numbers.
LEAST_LOGP = -1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """One training batch before the learner has scored it: one entry per sequence, groups next to
    each other.
    """

    reward_B: Tensor
    group_B: Tensor  # int64, index of the sequence's group, 0..P-1
    sender_B: Tensor  # int64, whose sequence it is, 0..S-1
    own_B: Tensor  # bool, sampled by this learner's own policy, of whatever version
    # bool, sampled elsewhere than by the receiver's own engine: its log-probs are somebody's word,
    # also where the somebody is a sampler with the receiver's weights
    stranger_B: Tensor
    success_B: Tensor  # the receiver's running mean reward on this kind of problem
    # mean reward of the sequence's sender over its last batches, as a multiple of the receiver's
    # own: 1 for own sequences, and where either is not known
    skill_B: Tensor
    length_B: Tensor  # int64, completion tokens, the end token included
    ended_B: Tensor  # bool, the last token is the end token
    logq_mean_B: Tensor  # mean over tokens of the sampler's log-prob
    max_length: int  # the sampling limit, in tokens

    def __post_init__(self) -> None:
        sizes = {
            t.shape
            for t in (
                self.reward_B,
                self.group_B,
                self.sender_B,
                self.own_B,
                self.stranger_B,
                self.success_B,
                self.skill_B,
                self.length_B,
                self.ended_B,
                self.logq_mean_B,
            )
        }
        assert len(sizes) == 1, f"per-sequence tensors differ in shape: {sizes}"

    def first(self, count: int) -> Samples:
        """The first sequences alone."""
        cut: dict[str, Any] = {name: table[:count] for name, table in _tensors(self).items()}
        return replace(self, **cut)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the whole batch decides for each of its sequences, and the denominators. No gradient."""

    advantage_B: Tensor
    own_B: Tensor
    stranger_B: Tensor
    success_B: Tensor
    log_expectation_B: Tensor  # logE of GEPO over the sequence's group
    # longest completion of the sequence's group, in tokens; without end tokens if the row has none
    group_longest_B: Tensor
    pair_B: Tensor  # int64, which two neighbours of a group and sender are a pair of the F-TIS code
    num_sequences: int  # with skip_silent only those of speaking groups, so perhaps 0
    num_tokens: int  # the same
    num_penalised: int  # all sequences, but for lessons
    num_penalised_tokens: int
    num_penalised_pairs: int
    num_pairs: int
    max_length: int
    most_square: float = math.inf  # M2PO's bound on d^2
    lr_scale: float = 1.0  # what is left of the learning rate

    def take(self, index_B: Tensor, device: torch.device | None = None) -> Terms:
        """The terms of some of the sequences; the denominators stay those of the whole batch."""
        taken: dict[str, Any] = {
            name: table[index_B].to(device) for name, table in _tensors(self).items()
        }
        return replace(self, **taken)

    @staticmethod
    def of_nothing(samples: Samples) -> Terms:
        """Of a batch without sequences; its denominators count from 0."""
        assert not len(samples.reward_B)
        return Terms(
            advantage_B=samples.reward_B,
            own_B=samples.own_B,
            stranger_B=samples.stranger_B,
            success_B=samples.success_B,
            log_expectation_B=samples.logq_mean_B,
            group_longest_B=samples.length_B,
            pair_B=samples.group_B,
            num_sequences=0,
            num_tokens=0,
            num_penalised=0,
            num_penalised_tokens=0,
            num_penalised_pairs=0,
            num_pairs=0,
            max_length=samples.max_length,
        )

    def with_lessons(self, samples: Samples, weight: float) -> Terms:
        """The same with those sequences of a batch that these terms lack, at this advantage.

        Each is a group by itself and counts in the denominators, but for those of a penalty; of the
        others nothing changes.
        """
        first = len(self.advantage_B)
        count = len(samples.reward_B) - first
        if not count:
            return self
        added = {
            "advantage_B": self.advantage_B.new_full((count,), weight),
            "own_B": samples.own_B[first:],
            "stranger_B": samples.stranger_B[first:],
            "success_B": samples.success_B[first:],
            "log_expectation_B": samples.logq_mean_B[first:],
            "group_longest_B": samples.length_B[first:],
            "pair_B": self.num_pairs + torch.arange(count),
        }
        joined: dict[str, Any] = {
            name: torch.cat([table, added[name].to(table.dtype)])
            for name, table in _tensors(self).items()
        }
        return replace(
            self,
            **joined,
            num_sequences=self.num_sequences + count,
            num_tokens=self.num_tokens + int(samples.length_B[first:].sum()),
            num_pairs=self.num_pairs + count,
        )


def _tensors(one: Samples | Terms) -> dict[str, Tensor]:
    values = {field.name: getattr(one, field.name) for field in fields(one)}
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanTable:
    """Which tokens of a micro-batch are compared together: spans, row by row.

    Tokens of the learner's own vocabulary are each a span, and so is every place behind them. Of a
    sequence of another vocabulary, log-probs count only when summed over a span (motley.spelling).
    """

    place_BT: Tensor  # int64, of the token in its span
    last_BT: Tensor  # int64, where its span ends in the row
    open_BT: Tensor  # bool, its span was cut by length, before it closed
    longest: int  # span, in tokens

    def total(self, value_BT: Tensor) -> Tensor:
        """The sum over each token's span.

        By pairs, then pairs of pairs: the same on every device, however large a table is.
        """
        back = 1
        while back < self.longest:
            before_BT = torch.nn.functional.pad(value_BT[:, :-back], (back, 0))
            value_BT = value_BT + torch.where(self.place_BT >= back, before_BT, 0.0)
            back *= 2
        return value_BT.gather(1, self.last_BT)

    def without(self, gone_BT: Tensor) -> SpanTable:
        """The same where some tokens count no more: what is left of their spans never closed."""
        left_BT = self.total(gone_BT) > 0
        return replace(self, open_BT=self.open_BT | left_BT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBatch:
    """One micro-batch.

    Only `logp_learner_BT` carries a gradient; values outside the mask are ignored.

    `spans`: what of it is compared by spans of several tokens; None: each token by itself. The
    sampler's log-probs are then laid on the learner's tokens, so that their sums over spans are
    the sampler's. Where a span was cut by length no honest ratio exists, and it counts at most 1.

    `logp_start_BT`: the learner's log-probs when the round began; None: it has not moved since.
    `logp_ref_BT`: those of the policy it began the run with; None: no penalty asks for them.
    """

    logp_learner_BT: Tensor
    logp_sampler_BT: Tensor
    mask_BT: Tensor  # bool, True = a completion token
    ended_B: Tensor  # bool, the last token is the end token
    terms: Terms
    withheld_BT: Tensor | None = None  # bool, tokens not to be made likelier; None: no token is
    logp_start_BT: Tensor | None = None
    num_taken: int = 0  # optimiser steps since the round began
    logp_ref_BT: Tensor | None = None
    spans: SpanTable | None = None

    @property
    def advantage_B(self) -> Tensor:
        return self.terms.advantage_B

    @property
    def log_ratio_BT(self) -> Tensor:
        """d_t = log p - log q, zero outside the mask; of a span on each of its tokens.

        The gradient is the token's own. So over the tokens of a span the gradient of any f(d) adds
        up to that of f(d) of the span.
        """
        if self.spans is None:
            return torch.where(self.mask_BT, self.logp_BT - self.logp_sampler_BT, 0.0)
        logp_BT, total_BT = self.logp_BT, self._span_total().detach()
        log_ratio_BT = logp_BT - logp_BT.detach() + self._bounded(total_BT)
        return torch.where(self.mask_BT, log_ratio_BT, 0.0)

    @property
    def span_log_ratio_BT(self) -> Tensor:
        """The same with the gradient of the whole span: for what is counted once per span."""
        if self.spans is None:
            return self.log_ratio_BT
        total_BT = self._span_total()
        log_ratio_BT = total_BT - total_BT.detach() + self._bounded(total_BT.detach())
        return torch.where(self.mask_BT, log_ratio_BT, 0.0)

    @property
    def shared_log_ratio_BT(self) -> Tensor:
        """The same with each token's share alone: for sums over sequences."""
        if self.spans is None:
            return self.log_ratio_BT
        logp_BT, total_BT = self.logp_BT, self._span_total().detach()
        # evenly, since rounding must not decide on which side of 1 a bounded ratio is
        even_BT = logp_BT - logp_BT.detach() + self._bounded(total_BT) / self._num_BT
        own_BT = logp_BT - self.logp_sampler_BT
        return torch.where(self.mask_BT, torch.where(self.spans.open_BT, even_BT, own_BT), 0.0)

    @property
    def compared_logp_BT(self) -> Tensor:
        """The learner's log-probs, less what a span that never closed has above the sampler's."""
        if self.spans is None:
            return self.logp_BT
        total_BT = self._span_total().detach()
        above_BT = (total_BT - self._bounded(total_BT)) / self._num_BT
        return self.logp_BT - above_BT

    @property
    def _num_BT(self) -> Tensor:
        """Tokens of each token's span."""
        assert self.spans is not None
        return self.spans.total(self.mask_BT).clamp(min=1)

    def _span_total(self) -> Tensor:
        return self.span_total(self.logp_BT - self.logp_sampler_BT)

    def _bounded(self, total_BT: Tensor) -> Tensor:
        assert self.spans is not None
        return torch.where(self.spans.open_BT, total_BT.clamp(max=0), total_BT)

    def span_total(self, value_BT: Tensor) -> Tensor:
        """The sum over each token's span, of what the mask has."""
        if self.spans is None:
            return value_BT
        return self.spans.total(torch.where(self.mask_BT, value_BT, 0.0))

    def once(self, mask_BT: Tensor) -> Tensor:
        """Of the tokens of a mask, the first of each span."""
        return mask_BT if self.spans is None else mask_BT & (self.spans.place_BT == 0)

    @property
    def logp_BT(self) -> Tensor:
        """The learner's log-probs, at least LEAST_LOGP; zero outside the mask."""
        return torch.where(self.mask_BT, self.logp_learner_BT.clamp(min=LEAST_LOGP), 0.0)

    @property
    def moved_BT(self) -> Tensor:
        """log p - log p at the start of the round, zero outside the mask."""
        return self.logp_BT - self.at_start().logp_BT.detach()

    @property
    def ref_log_ratio_BT(self) -> Tensor:
        """log p of the reference - log p, zero outside the mask."""
        assert self.logp_ref_BT is not None, "a penalty toward the reference needs its log-probs"
        ref_BT = self.logp_ref_BT.clamp(min=LEAST_LOGP)
        return torch.where(self.mask_BT, ref_BT - self.logp_BT, 0.0)

    def penalised(self) -> LossBatch:
        """The same with every answer in the denominators: silent ones too, and no lesson."""
        terms = replace(
            self.terms,
            num_sequences=self.terms.num_penalised,
            num_tokens=self.terms.num_penalised_tokens,
            num_pairs=self.terms.num_penalised_pairs,
        )
        return replace(self, terms=terms)

    def at_start(self) -> LossBatch:
        """The same as it was at the start of the round."""
        if self.logp_start_BT is None:
            return self
        return replace(self, logp_learner_BT=self.logp_start_BT)

    def token_mean(self, value_BT: Tensor) -> Tensor:
        """Mean over each sequence's own tokens."""
        return torch.where(self.mask_BT, value_BT, 0.0).sum(1) / self.mask_BT.sum(1).clamp(min=1)

    def span_mean(self, value_BT: Tensor) -> Tensor:
        """Sum over each sequence's spans, by its own tokens."""
        once_BT = self.once(self.mask_BT)
        return torch.where(once_BT, value_BT, 0.0).sum(1) / self.mask_BT.sum(1).clamp(min=1)

    def without_end(self) -> LossBatch:
        """The same with the end token masked out of every sequence that has one."""
        position_T = torch.arange(self.mask_BT.shape[1], device=self.mask_BT.device)
        last_B1 = self.mask_BT.sum(1, keepdim=True) - 1
        is_end_BT = self.ended_B[:, None] & (position_T == last_B1)
        return replace(
            self,
            mask_BT=self.mask_BT & ~is_end_BT,
            ended_B=torch.zeros_like(self.ended_B),
            spans=self.spans and self.spans.without(is_end_BT),
        )

    def fixed(self, fixed_BT: Tensor) -> LossBatch:
        """The same without a gradient through some tokens."""
        logp_BT = self.logp_learner_BT
        return replace(self, logp_learner_BT=torch.where(fixed_BT, logp_BT.detach(), logp_BT))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """The loss to minimise, and, detached, what the method did to each token and sequence."""

    loss: Tensor
    weight_BT: Tensor  # the factor on A·grad log p after truncation and clip, before the filter
    free_BT: Tensor  # the same before truncation and clip
    factor_BT: Tensor  # the surrogate's part of it: 0 where a clip took the gradient
    keep_B: Tensor  # bool, passed the filter
    kl_B: Tensor  # the filter's estimate of the sequence's KL
