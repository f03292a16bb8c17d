"""Diagnostics of one step, per sender. docs/metrics.md gives each key its formula.

Reads arrays; changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.learning.readings import Reading, ReadingCounts, RolloutSpans
from motley.learning.select import Candidate
from motley.learning.senders import Distribution, SenderMetrics, Spread
from motley.objectives.ratios import MAX_LOG_RATIO

Floats = NDArray[np.float64]

TIE = 1e-5  # relative: the rounding of float32 log-probs is below it
BOUND = 1e-3  # relative: what the wire's rounding of log-probs can do to a ratio is below it
QUANTILES = {"q05": 0.05, "q50": 0.5, "q95": 0.95}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredRow:
    """What a step knows about one sequence after scoring it.

    Token arrays have one entry per completion token; log-ratios one per span, which is a token
    where sender and learner have one vocabulary.
    """

    keep: bool
    kl: float  # the filter's estimate
    log_ratio: Floats
    weight: Floats  # the factor on A·grad log p, had the filter kept the sequence
    mean_weight: float
    free: Floats  # the same without truncation and clip
    logq: float  # the sampler's mean log-prob
    entropy: Floats
    push: Floats  # -dloss/dlogp

    @property
    def used_weight(self) -> Floats:
        return self.weight if self.keep else np.zeros_like(self.weight)

    @property
    def mean_used_weight(self) -> float:
        return self.mean_weight if self.keep else 0.0


@dataclass(slots=True, kw_only=True)
class Row:
    """One sequence of a step.

    `scored` stays None where its advantage was zero and scoring it was skipped.
    """

    sender: str
    group: int
    reward: float
    advantage: float
    num_tokens: int
    truncated: bool
    age: int
    num_withheld: int = 0  # tokens that were not pushed up
    spans: RolloutSpans | None = None  # None: each token is compared by itself
    scored: ScoredRow | None = None


def sender_metrics(rows: Sequence[Row]) -> dict[str, SenderMetrics]:
    # a step that is not finite is measured before anyone knows
    with np.errstate(invalid="ignore", over="ignore"):
        return {
            sender: _of_sender([r for r in rows if r.sender == sender])
            for sender in sorted({r.sender for r in rows})
        }


def _of_sender(rows: list[Row]) -> SenderMetrics:
    metrics = SenderMetrics(
        groups=len({r.group for r in rows}),
        sequences=len(rows),
        reward=_mean([r.reward for r in rows]),
        accuracy=_mean([float(r.reward >= 1) for r in rows]),
        tokens=_mean([r.num_tokens for r in rows]),
        truncated=_mean([float(r.truncated) for r in rows]),
        age=_mean([r.age for r in rows]),
        silent_groups=len({r.group for r in rows} - {r.group for r in rows if r.scored}),
    )
    scored = [(r, r.scored) for r in rows if r.scored]
    return _with_scored(metrics, scored) if scored else metrics


def _with_scored(metrics: SenderMetrics, scored: list[tuple[Row, ScoredRow]]) -> SenderMetrics:
    log_ratio = np.concatenate([s.log_ratio for _, s in scored])
    num_tokens = sum(r.num_tokens for r, _ in scored)
    weight = np.concatenate([s.used_weight for _, s in scored])
    ratio = np.exp(np.minimum(log_ratio, MAX_LOG_RATIO))
    free = np.concatenate([s.free for _, s in scored])
    weight_had_it_been_kept = np.concatenate([s.weight for _, s in scored])
    groups = _by_group(scored)
    before, after = _rank_agreement(groups)
    return msgspec.structs.replace(
        metrics,
        kl_k1=float(-log_ratio.sum() / num_tokens),
        kl_k3=float((ratio - 1 - log_ratio).sum() / num_tokens),
        kl_reverse=float((ratio * log_ratio - ratio + 1).sum() / num_tokens),
        ratio=Distribution(**_described(ratio)),
        weight=Distribution(**_described(weight)),
        weight_var=float(weight.var()),
        free_weight=Spread(**_described(free), var=float(free.var())),
        clipped=float((np.abs(weight_had_it_been_kept - free) > BOUND * free).mean()),
        estimation_error=_mean([_estimation_error(members) for members in groups]),
        flatness=_mean([flatness(np.array([s.logq for _, s in members])) for members in groups]),
        ess=effective_sample_size(weight),
        filter_kl=Distribution(**_described(np.array([s.kl for _, s in scored]))),
        filtered_positive=_mean([float(not s.keep) for r, s in scored if r.advantage > 0]),
        filtered_negative=_mean([float(not s.keep) for r, s in scored if r.advantage <= 0]),
        tau_before=before,
        tau_after=after,
        entropy=float(np.concatenate([s.entropy for _, s in scored]).mean()),
        withheld=_withheld([r for r, _ in scored if r.advantage > 0]),
    )


def with_readings(
    senders: dict[str, SenderMetrics], candidates: Sequence[Candidate]
) -> dict[str, SenderMetrics]:
    """The same, with how groups of senders of another vocabulary were read."""
    by_sender: dict[str, list[ReadingCounts]] = {}
    for c in candidates:
        if isinstance(c.reading, Reading) and c.group.origin.peer in senders:
            by_sender.setdefault(c.group.origin.peer, []).append(c.reading.counts())
    read = {peer: _read(senders[peer], counts) for peer, counts in by_sender.items()}
    return {**senders, **read}


def _read(metrics: SenderMetrics, counts: Sequence[ReadingCounts]) -> SenderMetrics:
    total = ReadingCounts(*(sum(column) for column in zip(*counts, strict=True)))
    return msgspec.structs.replace(
        metrics,
        span_bytes=total.num_closed_bytes / total.num_bytes if total.num_bytes else None,
        span_tokens=total.num_tokens / total.num_spans if total.num_spans else None,
        text_only=total.text_only / total.sent,
        uncut=total.uncut / total.sent,
    )


def _withheld(positive: list[Row]) -> float | None:
    tokens = sum(r.num_tokens for r in positive)
    return sum(r.num_withheld for r in positive) / tokens if tokens else None


def _by_group(scored: list[tuple[Row, ScoredRow]]) -> list[list[tuple[Row, ScoredRow]]]:
    groups: dict[int, list[tuple[Row, ScoredRow]]] = {}
    for row, its in scored:
        groups.setdefault(row.group, []).append((row, its))
    return [groups[group] for group in sorted(groups)]


def effective_sample_size(weight: Floats) -> float:
    """(sum w)^2 / (n·sum w^2): the effective sample size, as a share of the tokens."""
    square = float((weight**2).sum())
    return float(weight.sum() ** 2 / (len(weight) * square)) if square else 0.0


def _tau(a: Floats, b: Floats) -> float | None:
    """Kendall's tau-b of two rankings of the same items, each as `_order` gives it; None where one
    of them is all ties.
    """
    scale = np.sqrt((a**2).sum() * (b**2).sum())
    return float((a * b).sum() / scale) if scale else None


def _order(value: Floats, tie: float = TIE) -> Floats:
    """sign(x_i - x_j), with differences of rounding counted as ties."""
    difference = value[:, None] - value
    return np.where(np.abs(difference) <= tie * np.abs(value).max(), 0.0, np.sign(difference))


def _order_of_pulls(
    members: list[tuple[Row, ScoredRow]], weight: Callable[[ScoredRow], float]
) -> Floats:
    """That of A·weight. Weights of reported log-probs are as rounded as these are on the wire."""
    return _order(np.array([r.advantage * weight(s) for r, s in members]), BOUND)


def flatness(logq: Floats) -> float:
    """1/(1 + CV^2) of the group's geometric-mean probabilities: the mean weight GEPO gives samples
    of the learner's own policy.
    """
    q = np.exp(logq - logq.max())
    return float(q.mean() ** 2 / (q**2).mean())


def _estimation_error(members: list[tuple[Row, ScoredRow]]) -> float:
    """|E_q[w·A] - E_p[A]| of a group: with the weights used, and by the learner's own score of the
    same sequences, normalised.
    """
    advantage = np.array([r.advantage for r, _ in members])
    used = np.array([s.mean_used_weight for _, s in members])
    log_ratio = np.array([s.log_ratio.sum() for _, s in members])
    share = np.exp(log_ratio - log_ratio.max())
    return float(abs((used * advantage).mean() - (share * advantage).sum() / share.sum()))


def _rank_agreement(groups: list[list[tuple[Row, ScoredRow]]]) -> tuple[float | None, float | None]:
    """Mean over groups of tau(reward, A·mean weight), had nothing been filtered and as it was."""
    before, after = [], []
    for members in groups:
        reward = _order(np.array([r.reward for r, _ in members]))
        before.append(_tau(reward, _order_of_pulls(members, lambda s: s.mean_weight)))
        kept = all(s.keep for _, s in members)
        used = lambda s: s.mean_used_weight
        after.append(before[-1] if kept else _tau(reward, _order_of_pulls(members, used)))
    return _mean([t for t in before if t is not None]), _mean([t for t in after if t is not None])


def _described(value: Floats) -> dict[str, float]:
    return {"mean": float(value.mean()), "max": float(value.max())} | {
        name: float(q)
        for name, q in zip(QUANTILES, np.quantile(value, list(QUANTILES.values())), strict=True)
    }


def _mean(values: Sequence[float]) -> float | None:
    """None where there is nothing to average: not the same as zero."""
    return float(np.mean(values)) if len(values) else None
