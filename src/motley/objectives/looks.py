"""Looks: what a row decides from the log-ratios of the whole batch, before its first step.

A look takes the batch's terms and its micro-batches, scored without gradient, and gives the terms
with what it decided. The learner pays a forward pass for it.

Must not know how a batch is cut: what it decides is the same for every cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from motley.objectives.batch import LossBatch, Terms
from motley.objectives.ratios import pushed_out

SAME = 1e-5  # squares this close, relatively, are equal but for rounding


@dataclass(frozen=True, slots=True)
class NoLook:
    """Nothing is to be decided."""

    def __call__(self, terms: Terms, scored: Sequence[LossBatch]) -> Terms:
        return terms


@dataclass(frozen=True, slots=True)
class SecondMoment:
    """The largest d^2 such that all tokens, or spans, pushed out whose d^2 is no larger have a mean
    d^2 of at most `budget` (M2PO).
    """

    budget: float = 0.04

    def __call__(self, terms: Terms, scored: Sequence[LossBatch]) -> Terms:
        square_N = torch.cat([_squares(batch) for batch in scored]).sort().values
        if not len(square_N):
            return terms
        count_N = torch.arange(1, len(square_N) + 1)
        fits_N = square_N.double().cumsum(0) / count_N <= self.budget
        # of equal ones all are kept or none: neither the order of tokens nor rounding may matter
        last_N = torch.cat([square_N[1:] > (1 + 2 * SAME) * square_N[:-1], torch.tensor([True])])
        kept_N = square_N[fits_N & last_N]
        return replace(terms, most_square=(1 + SAME) * float(kept_N[-1]) if len(kept_N) else 0.0)


def _squares(batch: LossBatch) -> Tensor:
    return (batch.log_ratio_BT.detach() ** 2)[batch.once(pushed_out(batch))].cpu()


@dataclass(frozen=True, slots=True)
class EffectiveSamples:
    """The learning rate times sqrt(min(1, ESS/(n·base_ess))), ESS = (sum w)^2 / sum w^2 over the n
    sequences with A other than 0 (VCPO). w = prod_t rho_t, at most C unless ess = "free".
    """

    C: float = 8.0
    base_ess: float = 1.0
    ess: Literal["truncated", "free"] = "truncated"

    def __call__(self, terms: Terms, scored: Sequence[LossBatch]) -> Terms:
        most = math.log(self.C) if self.ess == "truncated" and self.C > 0 else math.inf
        log_w_N = torch.cat([_log_products(batch) for batch in scored]).clamp(max=most)
        if not len(log_w_N):
            return terms
        log_ess = 2 * log_w_N.logsumexp(0) - (2 * log_w_N).logsumexp(0)
        share = math.exp(float(log_ess)) / len(log_w_N)
        # a ratio that is no number shows in the loss, which nothing is learned from
        return replace(terms, lr_scale=math.sqrt(min(1.0, share / self.base_ess)))


def _log_products(batch: LossBatch) -> Tensor:
    # not every device has float64
    log_ratio_BT, advantage_B = batch.shared_log_ratio_BT.detach().cpu(), batch.advantage_B.cpu()
    return log_ratio_BT.double().sum(1)[advantage_B != 0]


Look = NoLook | SecondMoment | EffectiveSamples
