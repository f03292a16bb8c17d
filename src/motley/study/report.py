"""The tables of a study: means over seeds, and paired differences from `alone`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from motley.study.arms import ALONE, OPPONENTS
from motley.study.outcomes import Outcome
from motley.study.statistics import (
    UNKNOWN,
    Comparison,
    Estimate,
    bounded_interval,
    interval,
    p_value_of,
)
from motley.tasks import Measure

BASELINE = ALONE


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One row of the table: an arm and a peer; one estimate per kind, then over the kinds."""

    arm: str
    peer: str
    by_kind: dict[str, Estimate]
    mean: Estimate
    gain: Estimate  # over alone, paired by seed
    p_value: float  # of that gain, two-sided paired t test; nan where it cannot be made
    ood: Estimate


def table(
    outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure = "accuracy"
) -> list[StudyRow]:
    """Rows in the order start, arms; peers in the order met."""
    peers = list(dict.fromkeys(o.peer for o in outcomes))
    alone = {(o.peer, o.seed): mean_of(o.end) for o in outcomes if o.arm == BASELINE}
    lines = []
    for peer in peers:
        first = {o.seed: o for o in outcomes if o.peer == peer}
        starts = [o.start for o in first.values()]
        gains = [
            mean_of(s) - alone.get((peer, seed), np.nan)
            for seed, s in zip(first, starts, strict=True)
        ]
        lines.append(_line("start", peer, starts, gains, [], measure))
        for arm in arms:
            own = [o for o in outcomes if o.peer == peer and o.arm == arm]
            gains = [mean_of(o.end) - alone.get((peer, o.seed), np.nan) for o in own]
            ood = [mean_of(o.ood) for o in own if o.ood]
            lines.append(_line(arm, peer, [o.end for o in own], gains, ood, measure))
    return lines


def _line(
    arm: str,
    peer: str,
    scores: list[dict[str, float]],
    gains: list[float],
    ood: list[float],
    measure: Measure,
) -> StudyRow:
    known = [g for g in gains if not np.isnan(g)]
    return StudyRow(
        arm=arm,
        peer=peer,
        by_kind={kind: bounded_interval([a[kind] for a in scores], measure) for kind in scores[0]},
        mean=bounded_interval([mean_of(a) for a in scores], measure),
        gain=interval(known) if known else UNKNOWN,
        p_value=p_value_of(known),
        ood=bounded_interval(ood, measure) if ood else UNKNOWN,
    )


def mean_of(by_kind: dict[str, float]) -> float:
    return float(np.mean(list(by_kind.values()))) if by_kind else float("nan")


@dataclass(frozen=True, slots=True)
class Glance:
    """One arm over all peers. A peer's own kind is the one it is best at before training."""

    arm: str
    own: Estimate
    others: Estimate
    mean: Estimate
    fall: Estimate  # how far the own kind fell below its start at the worst evaluation


def glance(
    outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure = "accuracy"
) -> list[Glance]:
    """Means over the peers of each run, then mean and interval over seeds."""
    bounded = lambda arm, value: bounded_interval(by_seed(outcomes, arm, value), measure)
    return [
        Glance(
            arm=arm,
            own=bounded(arm, lambda o: o.end[_own_kind(o)]),
            others=bounded(
                arm, lambda o: mean_of({k: v for k, v in o.end.items() if k != _own_kind(o)})
            ),
            mean=bounded(arm, lambda o: mean_of(o.end)),
            fall=interval(
                by_seed(outcomes, arm, lambda o: o.start[_own_kind(o)] - o.lowest[_own_kind(o)])
            ),
        )
        for arm in arms
    ]


def _own_kind(outcome: Outcome) -> str:
    return max(outcome.start, key=lambda kind: outcome.start[kind])


def by_seed(
    outcomes: Sequence[Outcome], arm: str, value: Callable[[Outcome], float]
) -> list[float]:
    """An arm's value per seed, in the order of the seeds: the mean over the peers of the run."""
    seeds = sorted({o.seed for o in outcomes if o.arm == arm})
    return [
        float(np.mean([value(o) for o in outcomes if o.arm == arm and o.seed == seed]))
        for seed in seeds
    ]


# Comparisons


def baselines_of(arms: Sequence[str]) -> list[str]:
    """What arms are compared with: the opponents, or the first arm if none of them was run."""
    return [arm for arm in OPPONENTS if arm in arms] or [arms[0]]


def comparisons(outcomes: Sequence[Outcome], arms: Sequence[str]) -> list[Comparison]:
    """Every arm against each baseline, over all peers; the mean over kinds, paired by seed."""
    return _comparisons(outcomes, arms, "")


def comparisons_by_peer(outcomes: Sequence[Outcome], arms: Sequence[str]) -> list[Comparison]:
    """The same for each peer."""
    peers = dict.fromkeys(o.peer for o in outcomes)
    return [
        one
        for peer in peers
        for one in _comparisons([o for o in outcomes if o.peer == peer], arms, f"{peer}: ")
    ]


def _comparisons(outcomes: Sequence[Outcome], arms: Sequence[str], before: str) -> list[Comparison]:
    baselines = baselines_of(arms)
    ends = {arm: _end_by_seed(outcomes, arm) for arm in arms}
    return [
        Comparison(
            f"{before}{arm}",
            baseline,
            tuple(end - ends[baseline][s] for s, end in ends[arm].items() if s in ends[baseline]),
        )
        for baseline in baselines
        for arm in arms
        if arm not in baselines
    ]


def _end_by_seed(outcomes: Sequence[Outcome], arm: str) -> dict[int, float]:
    seeds = sorted({o.seed for o in outcomes if o.arm == arm})
    values = by_seed(outcomes, arm, lambda o: mean_of(o.end))
    return dict(zip(seeds, values, strict=True))


# Words


def glance_markdown(lines: Sequence[Glance]) -> str:
    return markdown_table(*glance_cells(lines))


def glance_cells(lines: Sequence[Glance]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    head = ["arm", "own kind", "others' kinds", "mean over kinds", "deepest fall of the own kind"]
    rows = [[line.arm, *map(str, (line.own, line.others, line.mean, line.fall))] for line in lines]
    return head, rows


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
        + "\n"
    )


def markdown(lines: Sequence[StudyRow]) -> str:
    return markdown_table(*cells(lines))


def cells(lines: Sequence[StudyRow]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    kinds = list(lines[0].by_kind)
    head = ["peer", "arm", *kinds, "mean", "against alone", "p", "out of distribution"]
    rows = [
        [
            line.peer,
            line.arm,
            *(str(line.by_kind[k]) for k in kinds),
            str(line.mean),
            *_gain(line),
            "" if np.isnan(line.ood.mean) else str(line.ood),
        ]
        for line in lines
    ]
    return head, rows


def _gain(line: StudyRow) -> tuple[str, str]:
    if line.arm == BASELINE or np.isnan(line.gain.mean):
        return "", ""
    p = "" if np.isnan(line.p_value) else f"{line.p_value:.3f}"
    if np.isnan(line.gain.low):
        return f"{line.gain.mean:+.2f}", p
    return f"{line.gain.mean:+.2f} ± {line.gain.half_width:.2f}", p
