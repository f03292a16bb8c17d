"""Statistics of a study: means, 95 % intervals over seeds, paired differences from `alone`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from motley.study.running import Outcome


@dataclass(frozen=True, slots=True)
class Estimate:
    mean: float
    half_width: float  # of the 95 % t interval; nan for one seed

    def __str__(self) -> str:
        return format(self, ".2f")

    def __format__(self, spec: str) -> str:
        return (
            format(self.mean, spec)
            if np.isnan(self.half_width)
            else f"{self.mean:{spec}} ± {self.half_width:{spec}}"
        )


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


def interval(values: Sequence[float]) -> Estimate:
    """Mean and half width of the 95 % t interval."""
    if len(values) < 2:
        return Estimate(float(np.mean(values)), float("nan"))
    error = np.std(values, ddof=1) / np.sqrt(len(values))
    return Estimate(float(np.mean(values)), float(stats.t.ppf(0.975, len(values) - 1) * error))


def has_spread(values: Sequence[float]) -> bool:
    """Whether a test against zero can be made: not with one value, nor with several that differ by
    rounding only.
    """
    return len(values) > 1 and float(np.std(values)) > 1e-9


def table(
    outcomes: Sequence[Outcome], arms: Sequence[str], baseline: str = "alone"
) -> list[StudyRow]:
    """Rows in the order start, arms; peers in the order met."""
    peers = list(dict.fromkeys(o.peer for o in outcomes))
    alone = {(o.peer, o.seed): _mean(o.end) for o in outcomes if o.arm == baseline}
    lines = []
    for peer in peers:
        first = {o.seed: o for o in outcomes if o.peer == peer}
        starts = [o.start for o in first.values()]
        lines.append(
            _line(
                "start",
                peer,
                starts,
                [
                    _mean(s) - alone.get((peer, seed), np.nan)
                    for seed, s in zip(first, starts, strict=True)
                ],
                [],
            )
        )
        for arm in arms:
            own = [o for o in outcomes if o.peer == peer and o.arm == arm]
            gains = [_mean(o.end) - alone.get((peer, o.seed), np.nan) for o in own]
            lines.append(
                _line(arm, peer, [o.end for o in own], gains, [_mean(o.ood) for o in own if o.ood])
            )
    return lines


def _line(
    arm: str, peer: str, accuracies: list[dict[str, float]], gains: list[float], ood: list[float]
) -> StudyRow:
    known = [g for g in gains if not np.isnan(g)]
    spread = has_spread(known)
    return StudyRow(
        arm=arm,
        peer=peer,
        by_kind={kind: interval([a[kind] for a in accuracies]) for kind in accuracies[0]},
        mean=interval([_mean(a) for a in accuracies]),
        gain=interval(known) if known else Estimate(float("nan"), float("nan")),
        p_value=float(stats.ttest_1samp(known, 0).pvalue) if spread else float("nan"),
        ood=interval(ood) if ood else Estimate(float("nan"), float("nan")),
    )


def _mean(by_kind: dict[str, float]) -> float:
    return float(np.mean(list(by_kind.values()))) if by_kind else float("nan")


@dataclass(frozen=True, slots=True)
class Glance:
    """One arm over all peers. A peer's own kind is the one it is best at before training."""

    arm: str
    own: Estimate
    others: Estimate
    mean: Estimate
    fall: Estimate  # how far the own kind fell below its start at the worst evaluation


def glance(outcomes: Sequence[Outcome], arms: Sequence[str]) -> list[Glance]:
    """Means over the peers of each run, then mean and interval over seeds."""
    return [
        Glance(
            arm=arm,
            own=_over_seeds(outcomes, arm, lambda o: o.end[_own_kind(o)]),
            others=_over_seeds(
                outcomes,
                arm,
                lambda o: _mean({k: v for k, v in o.end.items() if k != _own_kind(o)}),
            ),
            mean=_over_seeds(outcomes, arm, lambda o: _mean(o.end)),
            fall=_over_seeds(
                outcomes, arm, lambda o: o.start[_own_kind(o)] - o.lowest[_own_kind(o)]
            ),
        )
        for arm in arms
    ]


def _own_kind(outcome: Outcome) -> str:
    return max(outcome.start, key=lambda kind: outcome.start[kind])


def _over_seeds(
    outcomes: Sequence[Outcome], arm: str, value: Callable[[Outcome], float]
) -> Estimate:
    seeds = sorted({o.seed for o in outcomes if o.arm == arm})
    return interval(
        [
            float(np.mean([value(o) for o in outcomes if o.arm == arm and o.seed == seed]))
            for seed in seeds
        ]
    )


def glance_markdown(lines: Sequence[Glance]) -> str:
    head = ["arm", "own kind", "others' kinds", "mean over kinds", "deepest fall of the own kind"]
    return markdown_table(
        head,
        [[line.arm, *map(str, (line.own, line.others, line.mean, line.fall))] for line in lines],
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return (
        "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
        + "\n"
    )


def markdown(lines: Sequence[StudyRow]) -> str:
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
    return markdown_table(head, rows)


def _gain(line: StudyRow) -> tuple[str, str]:
    if line.arm == "alone" or np.isnan(line.gain.mean):
        return "", ""
    return f"{line.gain.mean:+.2f} ± {line.gain.half_width:.2f}", "" if np.isnan(
        line.p_value
    ) else f"{line.p_value:.3f}"
