"""Batches to test objectives on: lists of sequences in float64, and their tensors.

Every number fits in float32, so that the objective and its reference see the same inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from marks import slow
from motley.objectives import (
    OBJECTIVES,
    VARIANTS,
    LossBatch,
    LossOutput,
    Objective,
    Samples,
    SpanTable,
    Terms,
)

ROWS: list[tuple[str, str]] = [(name, "") for name in OBJECTIVES] + [
    (name, v) for name, rows in VARIANTS.items() for v in rows
]
ROW_IDS = [f"{name}-{variant}" if variant else name for name, variant in ROWS]


def cases_of(rows: Sequence[tuple[str, str]]) -> list[Any]:
    """Cases of a test. What is published differs from its row in a bound only."""
    return [slow(*row) if row[1] == "published" else row for row in rows]


@dataclass(frozen=True)
class Case:
    """A batch as lists: one entry per sequence, one array of token log-probs for each."""

    reward: list[float]
    group: list[int]
    own: list[bool]
    success: list[float]
    ended: list[bool]
    lp: list[np.ndarray]
    lq: list[np.ndarray]
    max_length: int = 16
    skill: list[float] = field(default_factory=list)  # none: all are as good as the receiver
    ref: list[np.ndarray] = field(default_factory=list)  # of the reference, where there is one
    # sizes of the spans of each sequence, in tokens; none: each token is one
    spans: list[list[int]] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)  # the last span was cut by length

    def __len__(self) -> int:
        return len(self.reward)

    @property
    def lengths(self) -> list[int]:
        return [len(tokens) for tokens in self.lq]

    def take(self, index: Sequence[int]) -> Case:
        """Some of the sequences in the given order, groups numbered anew in order of appearance."""
        seen: dict[int, int] = {}
        return Case(
            reward=[self.reward[i] for i in index],
            group=[seen.setdefault(self.group[i], len(seen)) for i in index],
            own=[self.own[i] for i in index],
            success=[self.success[i] for i in index],
            ended=[self.ended[i] for i in index],
            lp=[self.lp[i] for i in index],
            lq=[self.lq[i] for i in index],
            max_length=self.max_length,
            skill=[self.skill[i] for i in index] if self.skill else [],
            ref=[self.ref[i] for i in index] if self.ref else [],
            spans=[self.spans[i] for i in index] if self.spans else [],
            open=[self.open[i] for i in index] if self.open else [],
        )


def tiny(
    reward: Sequence[float],
    lp: Sequence[Sequence[float]],
    lq: Sequence[Sequence[float]],
    *,
    group: Sequence[int] | None = None,
    own: Sequence[bool] | None = None,
    success: float = 0.0,
    ended: Sequence[bool] | None = None,
    max_length: int = 16,
    ref: Sequence[Sequence[float]] = (),
) -> Case:
    """A case written out by hand; one group of own, ended sequences unless told otherwise."""
    num = len(reward)
    return Case(
        reward=list(reward),
        group=list(group or [0] * num),
        own=list(own if own is not None else [True] * num),
        success=[success] * num,
        ended=list(ended if ended is not None else [True] * num),
        lp=[_float32(row) for row in lp],
        lq=[_float32(row) for row in lq],
        max_length=max_length,
        ref=[_float32(row) for row in ref],
    )


def _float32(values: Sequence[float] | np.ndarray) -> np.ndarray:
    return np.asarray(values, dtype=np.float32).astype(np.float64)


# name -> (spread of the log ratio, log ratio of the odd tokens, authors, rewards)
REGIMES: dict[str, tuple[float, float, str, str]] = {
    "near": (0.05, 0.45, "vertical", "binary"),
    "apart": (0.5, 2.5, "vertical", "graded"),
    "far": (1.0, 12.0, "vertical", "binary"),
    "horizontal": (0.7, 4.0, "horizontal", "binary"),
    "signed": (0.3, 12.0, "horizontal", "signed"),
}
# All correct, all wrong, alone in its group, all equal and neither; the rest vary.
GROUP_SIZES = (4, 3, 4, 1, 2, 5, 6)


def make_case(regime: str, seed: int) -> Case:
    """A batch of groups of many sizes, own and foreign, some of one token, some not ended."""
    spread, odd, layout, rewards = REGIMES[regime]
    rng = np.random.default_rng(seed)
    group = [p for p, size in enumerate(GROUP_SIZES) for _ in range(size)]
    own_group = rng.permutation([True, False] * len(GROUP_SIZES))[: len(GROUP_SIZES)]
    num = len(group)
    own = [
        bool(rng.random() < 0.5) if layout == "horizontal" else bool(own_group[p]) for p in group
    ]
    lengths = rng.integers(1, 8, num)
    lengths[[0, 7, num - 1]] = 1
    lengths[[8, 9]] = 4
    lq = [_float32(-rng.exponential(1.0, n)) for n in lengths]
    lp = []
    for i, lq_i in enumerate(lq):
        drift = rng.normal(0, spread, len(lq_i)) * (
            0.0 if own[i] and regime in ("near", "far") else 1.0
        )
        if i % 3 == 0:
            drift[rng.integers(len(drift))] = odd * rng.choice([-1, 1])
        # one of them is below its group's mean and one is not, whatever the rewards
        if i in (8, 9):
            drift[0] = -odd
        lp.append(_float32(lq_i + drift))
    return Case(
        reward=_rewards(rewards, group, rng),
        group=group,
        own=own,
        success=[float(_float32(rng.random(1))[0]) for _ in group],
        ended=[bool(rng.random() < 0.7) for _ in group],
        lp=lp,
        lq=lq,
        skill=[1.0 if mine else (0.375, 2.5, 30.0)[i % 3] for i, mine in enumerate(own)],
        ref=_references(lp, odd, seed),
    )


def _references(lp: list[np.ndarray], odd: float, seed: int) -> list[np.ndarray]:
    """A policy that the learner has left: a little everywhere, and far at some tokens."""
    rng = np.random.default_rng([seed, 1])
    ref = [_float32(row + rng.normal(0, 0.3, len(row))) for row in lp]
    for i in range(0, len(ref), 4):
        ref[i][0] = float(_float32(ref[i] + odd * rng.choice([-1, 1]))[0])
    return ref


def _rewards(kind: str, group: list[int], rng: np.random.Generator) -> list[float]:
    num = len(group)
    drawn = {
        "binary": rng.integers(0, 2, num).astype(float),
        "graded": rng.integers(0, 5, num) / 4,
        "signed": _float32(rng.normal(0.3, 1.0, num)),
    }[kind]
    drawn[[0, 1, 2, 3]] = 1.0
    drawn[[4, 5, 6]] = 0.0 if kind != "signed" else -0.5
    drawn[[7, 8, 9, 10]] = [1.0, 0.0, 1.0, 1.0] if kind == "binary" else [0.75, 0.5, 0.25, 0.5]
    drawn[[12, 13]] = 0.25 if kind != "binary" else 1.0
    drawn[[14, 15]] = [0.0, 1.0]
    return [float(r) for r in drawn]


def samples_of(case: Case) -> Samples:
    return Samples(
        reward_B=torch.tensor(case.reward),
        group_B=torch.tensor(case.group),
        sender_B=torch.zeros(len(case), dtype=torch.int64),
        own_B=torch.tensor(case.own),
        stranger_B=~torch.tensor(case.own),
        success_B=torch.tensor(case.success),
        skill_B=torch.tensor(case.skill or [1.0] * len(case)),
        length_B=torch.tensor(case.lengths),
        ended_B=torch.tensor(case.ended),
        logq_mean_B=torch.tensor([float(row.mean()) for row in case.lq]),
        max_length=case.max_length,
    )


def batch_of(
    case: Case,
    terms: Terms,
    extra: int = 0,
    garbage: float = 0.0,
    withheld: torch.Tensor | None = None,
) -> LossBatch:
    """The case as one micro-batch, padded with `extra` more columns; `garbage` stands outside the
    mask.
    """
    width = max(case.lengths) + extra
    logp_BT, logq_BT = (
        torch.full((len(case), width), garbage),
        torch.full((len(case), width), -garbage / 2),
    )
    ref_BT = torch.full((len(case), width), garbage * 2) if case.ref else None
    mask_BT = torch.zeros(len(case), width, dtype=torch.bool)
    for i, n in enumerate(case.lengths):
        if ref_BT is not None:
            ref_BT[i, :n] = torch.tensor(case.ref[i])
        logp_BT[i, :n], logq_BT[i, :n] = torch.tensor(case.lp[i]), torch.tensor(case.lq[i])
        mask_BT[i, :n] = True
    return LossBatch(
        logp_learner_BT=logp_BT.requires_grad_(),
        logp_sampler_BT=logq_BT,
        mask_BT=mask_BT,
        ended_B=torch.tensor(case.ended),
        terms=terms,
        withheld_BT=withheld,
        logp_ref_BT=ref_BT,
        spans=span_table(case, width) if case.spans else None,
    )


def span_table(case: Case, width: int) -> SpanTable:
    place_BT = torch.zeros(len(case), width, dtype=torch.int64)
    last_BT = torch.arange(width).repeat(len(case), 1)
    open_BT = torch.zeros(len(case), width, dtype=torch.bool)
    for i, sizes in enumerate(case.spans):
        start = 0
        for size in sizes:
            place_BT[i, start : start + size] = torch.arange(size)
            last_BT[i, start : start + size] = start + size - 1
            start += size
        open_BT[i, start - sizes[-1] if sizes else start : start] = case.open[i]
    longest = max((size for sizes in case.spans for size in sizes), default=1)
    return SpanTable(place_BT=place_BT, last_BT=last_BT, open_BT=open_BT, longest=longest)


def spanned(case: Case, seed: int) -> Case:
    """The same where foreign sequences are of another vocabulary, and some of them cut open."""
    rng = np.random.default_rng([seed, 2])
    spans: list[list[int]] = []
    for own, length in zip(case.own, case.lengths, strict=True):
        cuts = np.flatnonzero(rng.random(length - 1) < rng.choice([0.0, 0.4, 1.0])) + 1
        spans.append([] if own else np.diff([0, *cuts, length]).tolist())
    is_open = [
        bool(sizes) and not ended and rng.random() < 0.7
        for sizes, ended in zip(spans, case.ended, strict=True)
    ]
    return replace(case, spans=spans, open=is_open)


def prepared(row: Objective, case: Case) -> Terms:
    """The terms of a case, with what its log-probs decide."""
    terms = row.prepare(samples_of(case))
    return row.settle(terms, [batch_of(case, terms)])


@dataclass(frozen=True)
class Result:
    """A loss with its gradient per sequence, unpadded."""

    loss: float
    gradient: list[np.ndarray]
    output: LossOutput
    terms: Terms


def run(
    row: Objective,
    case: Case,
    cuts: Sequence[Sequence[int]] = (),
    extra: int = 0,
    garbage: float = 0.0,
    withheld: torch.Tensor | None = None,
) -> Result:
    """The objective's loss and gradient on a case, in one piece or summed over `cuts` (index
    lists).
    """
    terms = prepared(row, case)
    loss, gradient = 0.0, [np.zeros(n) for n in case.lengths]
    for index in cuts or [range(len(case))]:
        batch = batch_of(
            case.take(list(index)),
            terms.take(torch.tensor(list(index))),
            extra,
            garbage,
            withheld,
        )
        output = row.loss(batch)
        output.loss.backward()
        loss += float(output.loss.detach())
        grad_BT = batch.logp_learner_BT.grad
        assert bool((grad_BT[~batch.mask_BT] == 0).all()), "gradient outside the mask"
        for b, i in enumerate(index):
            gradient[i] = grad_BT[b, : case.lengths[i]].double().numpy()
    return Result(loss, gradient, output, terms)


def flat(gradient: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(list(gradient))
