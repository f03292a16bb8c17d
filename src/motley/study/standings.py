"""Arms against their opponents: paired differences for every peer and for the mean over peers, what
the arm took, and how far it let fall what a peer was good at.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from motley.study.arms import OPPONENTS
from motley.study.outcomes import Outcome, Spent
from motley.study.report import by_seed, mean_of, peers_of
from motley.study.statistics import (
    MARGIN,
    Comparison,
    Estimate,
    bounded_interval,
    effect_size,
    equivalence_p,
    holm,
    number,
    sentence,
    signed,
)
from motley.tasks import Measure

ALL = ""  # in the place of a peer: the mean over all of them
GOOD = 0.5  # a kind that a peer solves at least so often at the start must not be lost
NONE = float("nan")


@dataclass(frozen=True, slots=True)
class Against:
    """An arm against one opponent."""

    compared: Comparison
    difference: Estimate
    p_value: float  # two-sided paired t test; nan where it cannot be made
    holm_p: float  # corrected for the arms that meet this opponent, with the same peer
    margin: float  # of equivalence; nan: none was stated
    equivalence_p: float  # two one-sided tests
    equivalence_holm_p: float  # corrected for the same
    effect: Estimate  # Hedges' g

    @property
    def is_below(self) -> bool:
        """Outside its interval."""
        return self.difference.high < 0

    @property
    def is_above(self) -> bool:
        return self.difference.low > 0

    @property
    def sentence(self) -> str:
        return sentence(self.compared, self.holm_p)


@dataclass(frozen=True, slots=True)
class ArmStanding:
    """An arm and a peer. Numbers without an interval are means over seeds; nan: not known."""

    arm: str
    peer: str  # or ALL
    mean: Estimate  # over kinds, at the end
    ood: Estimate  # the same out of distribution
    against: dict[str, Against]  # opponent -> ; empty for opponents
    ood_against: dict[str, Against]
    sampled_tokens: float  # a peer's, as all that follow
    own_tokens: float  # learned from
    foreign_tokens: float
    seconds: float
    fall: float  # deepest below its start of a kind it was GOOD at
    worst_fall: float  # of any seed, and of any peer


def opponents_of(arms: Sequence[str]) -> list[str]:
    """What arms are compared with: `alone` and `alone/own`, or the first arm if neither was run."""
    return [arm for arm in OPPONENTS if arm in arms] or [arms[0]]


def standings(
    outcomes: Sequence[Outcome],
    arms: Sequence[str],
    measure: Measure = "accuracy",
    margin: float = MARGIN,
) -> list[ArmStanding]:
    """Rows of all peers together, then of each, if there are several; arms in their order."""
    peers = peers_of(outcomes)
    return [
        row
        for peer in ([ALL, *peers] if len(peers) > 1 else peers)
        for row in _standings(
            _Peer(peer, [o for o in outcomes if peer in (ALL, o.peer)], arms, margin), measure
        )
    ]


@dataclass(frozen=True, slots=True)
class _Peer:
    """What rows are made of: outcomes of a peer, or of ALL."""

    peer: str
    outcomes: Sequence[Outcome]
    arms: Sequence[str]
    margin: float

    def by_seed(self, arm: str, value: Callable[[Outcome], float]) -> dict[int, float]:
        """Of the runs that have it."""
        some = [o for o in self.outcomes if o.arm == arm and not np.isnan(value(o))]
        return dict(zip(sorted({o.seed for o in some}), by_seed(some, arm, value), strict=True))

    def against(self, opponent: str, value: Callable[[Outcome], float]) -> dict[str, Against]:
        """By arm: every one that is no opponent itself, paired by seed."""
        challengers = [arm for arm in self.arms if arm not in opponents_of(self.arms)]
        before = self.by_seed(opponent, value)
        words = f"{self.peer}: " if self.peer != ALL else ""
        compared = [
            Comparison(
                f"{words}{arm}",
                opponent,
                tuple(e - before[s] for s, e in self.by_seed(arm, value).items() if s in before),
            )
            for arm in challengers
        ]
        return dict(zip(challengers, met(compared, self.margin), strict=True))


def met(compared: Sequence[Comparison], margin: float) -> list[Against]:
    """Comparisons with one opponent, corrected for their number."""
    same = [
        NONE if np.isnan(margin) else equivalence_p(one.differences, margin) for one in compared
    ]
    corrected, same_corrected = holm([one.p_value for one in compared]), holm(same)
    return [
        Against(
            compared=one,
            difference=one.estimate,
            p_value=one.p_value,
            holm_p=corrected[place],
            margin=margin,
            equivalence_p=same[place],
            equivalence_holm_p=same_corrected[place],
            effect=effect_size(one.differences),
        )
        for place, one in enumerate(compared)
    ]


def _end(outcome: Outcome) -> float:
    return mean_of(outcome.end)


def _ood(outcome: Outcome) -> float:
    return mean_of(outcome.ood)


def _standings(found: _Peer, measure: Measure) -> list[ArmStanding]:
    opponents = opponents_of(found.arms)
    against = {other: found.against(other, _end) for other in opponents}
    ood = {other: found.against(other, _ood) for other in opponents}
    rows = []
    for arm in found.arms:
        spent = lambda value, arm=arm: _mean_spent(found.outcomes, arm, value)
        made = [o for o in found.outcomes if o.arm == arm]
        falls = [f for o in made if (f := fall_of(o, measure)) is not None]
        rows.append(
            ArmStanding(
                arm=arm,
                peer=found.peer,
                mean=bounded_interval(list(found.by_seed(arm, _end).values()), measure),
                ood=bounded_interval(list(found.by_seed(arm, _ood).values()), measure),
                against={other: by_arm[arm] for other, by_arm in against.items() if arm in by_arm},
                ood_against={
                    other: by_arm[arm]
                    for other, by_arm in ood.items()
                    if arm in by_arm and by_arm[arm].compared.differences
                },
                sampled_tokens=spent(lambda s: s.sampled),
                own_tokens=spent(lambda s: s.own),
                foreign_tokens=spent(lambda s: s.foreign),
                seconds=spent(lambda s: s.seconds),
                fall=float(np.mean(falls)) if falls else NONE,
                worst_fall=max(falls, default=NONE),
            )
        )
    return rows


def _mean_spent(outcomes: Sequence[Outcome], arm: str, value: Callable[[Spent], float]) -> float:
    known = [o.spent for o in outcomes if o.arm == arm]
    counted = [spent for spent in known if spent is not None]
    if not counted or len(counted) < len(known):
        return NONE  # some were kept before tokens were counted
    return float(np.mean([value(spent) for spent in counted]))


def fall_of(outcome: Outcome, measure: Measure = "accuracy") -> float | None:
    """How far the worst-hit kind that the peer was good at fell below its start at any evaluation.

    None if it was good at none, and of rewards, which have no scale to be good on.
    """
    start = outcome.start
    good = [kind for kind in start if start[kind] >= GOOD and measure == "accuracy"]
    return max((start[kind] - outcome.lowest[kind] for kind in good), default=None)


# Words


def said(rows: Sequence[ArmStanding]) -> list[str]:
    """A sentence per comparison, opponent by opponent."""
    opponents = dict.fromkeys(other for row in rows for other in row.against)
    return [
        row.against[other].sentence for other in opponents for row in rows if other in row.against
    ]


def below(rows: Sequence[ArmStanding]) -> list[str]:
    """For each opponent and arm, whether some peer ends below it outside its interval."""
    each = [row for row in rows if row.peer != ALL]
    opponents = dict.fromkeys(other for row in each for other in row.against)
    arms = dict.fromkeys(row.arm for row in each if row.against)
    return [
        _below(arm, other, [row for row in each if row.arm == arm])
        for other in opponents
        for arm in arms
    ]


def _below(arm: str, opponent: str, rows: Sequence[ArmStanding]) -> str:
    if not all(row.against[opponent].compared.differences for row in rows):
        return f"{arm}: no seed has runs of it and of {opponent} for every peer"
    met = {row.peer: row.against[opponent].difference for row in rows}
    if any(np.isnan(one.high) for one in met.values()):
        return f"{arm}: one seed has no interval; whether a peer ends below {opponent} is open"
    losers = [
        f"{peer} ({signed(one.mean)}, 95 % {signed(one.low)} to {signed(one.high)})"
        for peer, one in met.items()
        if one.high < 0
    ]
    if not losers:
        return f"{arm}: no peer ends below {opponent} outside its interval"
    return f"{arm}: below {opponent} outside its interval: {', '.join(losers)}"


def cells(
    rows: Sequence[ArmStanding], on: Literal["heldout", "ood"] = "heldout"
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: how the arms end, and their differences."""
    ood = on == "ood"
    all_met = [row.ood_against if ood else row.against for row in rows]
    opponents = list(dict.fromkeys(other for by_other in all_met for other in by_other))
    margins = {one.margin for by_other in all_met for one in by_other.values()}
    head = ["peer", "arm", "out of distribution" if ood else "mean"]
    for other in opponents:
        head += [f"against {other}", "p (Holm)", *equivalence_head(margins), "g"]
    return head, [
        [
            row.peer or "all",
            row.arm,
            str(row.ood if ood else row.mean),
            *(text for other in opponents for text in against_cells(by_other.get(other), margins)),
        ]
        for row, by_other in zip(rows, all_met, strict=True)
    ]


def has_ood(rows: Sequence[ArmStanding]) -> bool:
    return any(not np.isnan(row.ood.mean) for row in rows)


def took_cells(rows: Sequence[ArmStanding]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table: what each peer paid."""
    head = ["peer", "arm", "tokens sampled", "learned: own + foreign", "seconds"]
    head += ["deepest fall: mean", "worst"]
    return head, [_took(row) for row in rows]


def _took(row: ArmStanding) -> list[str]:
    learned = [amount(row.own_tokens), amount(row.foreign_tokens)]
    return [
        row.peer or "all",
        row.arm,
        amount(row.sampled_tokens),
        " + ".join(learned) if all(learned) else "",
        "" if np.isnan(row.seconds) else f"{row.seconds:.0f}",
        *("" if np.isnan(fall) else f"{fall:.3f}" for fall in (row.fall, row.worst_fall)),
    ]


def equivalence_head(margins: Collection[float]) -> list[str]:
    """The head of the column of equivalence, if a margin was stated."""
    stated = sorted(margin for margin in margins if not np.isnan(margin))
    return [f"within ±{', ±'.join(map(number, stated))}: p (Holm)"] if stated else []


def against_cells(against: Against | None, margins: Collection[float]) -> list[str]:
    """A difference with its interval, its corrected p, that of equivalence, and its size."""
    columns = 3 + len(equivalence_head(margins))
    if against is None or np.isnan(against.difference.mean):
        return [""] * columns
    estimate = against.difference
    width = "" if np.isnan(estimate.low) else f" ± {estimate.half_width:.3f}"
    p_values = [against.holm_p, against.equivalence_holm_p][: columns - 2]
    return [
        f"{estimate.mean:+.3f}{width}",
        *("" if np.isnan(p) else f"{p:.3f}" if p >= 0.001 else "< 0.001" for p in p_values),
        f"{against.effect:.1f}",
    ]


def amount(value: float) -> str:
    """A count in three digits.

    >>> amount(812), amount(45_210), amount(1_234_567)
    ('812', '45.2k', '1.23M')
    """
    if np.isnan(value):
        return ""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            digits = 2 - int(np.log10(value / size))
            return f"{value / size:.{digits}f}{letter}"
    return f"{value:.0f}"
