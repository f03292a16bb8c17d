"""The tables of a crew: how good its peers are at every kind, under every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from motley.study.outcomes import Outcome
from motley.study.statistics import UNKNOWN, Estimate, bounded_interval
from motley.tasks import Measure


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One row of the table: an arm and a peer; one estimate per kind, then over the kinds."""

    arm: str
    peer: str
    by_kind: dict[str, Estimate]
    mean: Estimate
    ood: Estimate


def table(
    outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure = "accuracy"
) -> list[StudyRow]:
    """Rows in the order start, arms; peers in the order met."""
    lines = []
    for peer in peers_of(outcomes):
        first = {o.seed: o for o in reversed(outcomes) if o.peer == peer}  # of the first arm
        lines.append(_line("start", peer, [o.start for o in first.values()], [], measure))
        for arm in arms:
            own = [o for o in outcomes if o.peer == peer and o.arm == arm]
            ood = [mean_of(o.ood) for o in own if o.ood]
            lines.append(_line(arm, peer, [o.end for o in own], ood, measure))
    return lines


def peers_of(outcomes: Sequence[Outcome]) -> list[str]:
    """In the order met."""
    return list(dict.fromkeys(o.peer for o in outcomes))


def _line(
    arm: str, peer: str, scores: list[dict[str, float]], ood: list[float], measure: Measure
) -> StudyRow:
    return StudyRow(
        arm=arm,
        peer=peer,
        by_kind={kind: bounded_interval([a[kind] for a in scores], measure) for kind in scores[0]},
        mean=bounded_interval([mean_of(a) for a in scores], measure),
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


# Words


def glance_cells(lines: Sequence[Glance]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    head = ["arm", "own kind", "others' kinds", "mean over kinds"]
    rows = [[line.arm, *map(str, (line.own, line.others, line.mean))] for line in lines]
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
    head = ["peer", "arm", *kinds, "mean", "out of distribution"]
    rows = [
        [
            line.peer,
            line.arm,
            *(str(line.by_kind[k]) for k in kinds),
            str(line.mean),
            "" if np.isnan(line.ood.mean) else str(line.ood),
        ]
        for line in lines
    ]
    return head, rows
