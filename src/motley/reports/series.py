"""Which numbers of a metrics line a tracker is told: the few that one watches, or all.

docs/studies.md has the few with their meaning. Knows metrics lines only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from motley.learning.senders import SenderMetrics
from motley.runs.curves import leaves
from motley.runs.metrics import LearnerLine, MetricsLine, SamplerLine

Scalars = dict[str, float]


def scalars_of(line: MetricsLine, everything: bool = False) -> Scalars:
    """Numbers by name, the peer first.

    >>> scalars_of(LearnerLine(round=1, peer="small", heldout={"sort": 0.5}))
    {'small/heldout': 0.5, 'small/heldout/sort': 0.5}
    """
    if everything:
        return {f"{line.peer}/{key}": value for key, value in leaves(msgspec.to_builtins(line))}
    few = _of_sampler(line) if isinstance(line, SamplerLine) else _of_learner(line)
    return {f"{line.peer}/{name}": value for name, value in few if value is not None}


def _of_sampler(line: SamplerLine) -> Iterator[tuple[str, float | None]]:
    yield "reward", line.reward
    yield "tokens", line.sampled_tokens
    yield "behind", line.behind
    yield "seconds", line.timing.sample_s if line.timing else None


def _of_learner(line: LearnerLine) -> Iterator[tuple[str, float | None]]:
    senders = line.senders or {}
    strangers = {name: s for name, s in senders.items() if name != line.peer}
    num_groups = sum(s.groups for s in senders.values())
    yield "reward", line.reward
    yield from _by_kind("heldout", line.heldout)
    yield from _by_kind("ood", line.ood)
    yield "entropy", _mean(senders, "entropy")
    yield "kl", _mean(strangers or senders, "kl_k3")
    yield "grad_norm", line.grad_norm
    yield "lr", line.lr
    yield "tokens", _mean(senders, "tokens")
    yield "truncated", _mean(senders, "truncated")
    yield "filtered", _mean(strangers, "filtered_negative")
    if num_groups:
        yield "silent", sum(s.silent_groups for s in senders.values()) / num_groups
        yield "foreign", sum(s.groups for s in strangers.values()) / num_groups
    if line.refused is not None:
        yield "refused", sum(sum(reasons.values()) for reasons in line.refused.values())
    yield "seconds", _seconds(line)


def _by_kind(name: str, values: Mapping[str, float] | None) -> Iterator[tuple[str, float]]:
    """The mean; of several kinds each too."""
    if values:
        yield name, sum(values.values()) / len(values)
        yield from ((f"{name}/{kind}", value) for kind, value in values.items())


def _mean(senders: Mapping[str, SenderMetrics], key: str) -> float | None:
    """Over those who know it, by how many groups are theirs."""
    known = [(s.groups, value) for s in senders.values() if (value := s.number(key)) is not None]
    total = sum(groups for groups, _ in known)
    return sum(groups * value for groups, value in known) / total if total else None


def _seconds(line: LearnerLine) -> float | None:
    took = line.timing
    return took.sample_s + (took.learn_s or 0.0) - (took.overlap_s or 0.0) if took else None
