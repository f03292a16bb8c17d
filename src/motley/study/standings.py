"""Arms against their opponents: paired differences for every peer and for the mean over peers, what
the arm took, and how far it let fall what a peer was good at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from motley.study.arms import OPPONENTS
from motley.study.outcomes import Outcome, Spent
from motley.study.report import by_seed, mean_of, peers_of
from motley.study.statistics import (
    Comparison,
    Estimate,
    bounded_interval,
    holm,
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
    against: dict[str, Against]  # opponent -> ; empty for opponents
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
    outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure = "accuracy"
) -> list[ArmStanding]:
    """Rows of all peers together, then of each, if there are several; arms in their order."""
    peers = peers_of(outcomes)
    return [
        row
        for peer in ([ALL, *peers] if len(peers) > 1 else peers)
        for row in _standings([o for o in outcomes if peer in (ALL, o.peer)], arms, peer, measure)
    ]


def _standings(
    outcomes: Sequence[Outcome], arms: Sequence[str], peer: str, measure: Measure
) -> list[ArmStanding]:
    against = {other: _against(outcomes, arms, other, peer) for other in opponents_of(arms)}
    rows = []
    for arm in arms:
        ends = by_seed(outcomes, arm, lambda o: mean_of(o.end))
        spent = lambda value, arm=arm: _mean_spent(outcomes, arm, value)
        falls = [f for o in outcomes if o.arm == arm and (f := fall_of(o, measure)) is not None]
        rows.append(
            ArmStanding(
                arm=arm,
                peer=peer,
                mean=bounded_interval(ends, measure),
                against={other: met[arm] for other, met in against.items() if arm in met},
                sampled_tokens=spent(lambda s: s.sampled),
                own_tokens=spent(lambda s: s.own),
                foreign_tokens=spent(lambda s: s.foreign),
                seconds=spent(lambda s: s.seconds),
                fall=float(np.mean(falls)) if falls else NONE,
                worst_fall=max(falls, default=NONE),
            )
        )
    return rows


def _against(
    outcomes: Sequence[Outcome], arms: Sequence[str], opponent: str, peer: str
) -> dict[str, Against]:
    """By arm: every one that is no opponent itself, paired by seed."""
    challengers = [arm for arm in arms if arm not in opponents_of(arms)]
    before = _end_by_seed(outcomes, opponent)
    words = f"{peer}: " if peer != ALL else ""
    compared = [
        Comparison(
            f"{words}{arm}",
            opponent,
            tuple(e - before[s] for s, e in _end_by_seed(outcomes, arm).items() if s in before),
        )
        for arm in challengers
    ]
    corrected = holm([one.p_value for one in compared])
    return {
        arm: Against(one, one.estimate, one.p_value, p)
        for arm, one, p in zip(challengers, compared, corrected, strict=True)
    }


def _end_by_seed(outcomes: Sequence[Outcome], arm: str) -> dict[int, float]:
    seeds = sorted({o.seed for o in outcomes if o.arm == arm})
    return dict(zip(seeds, by_seed(outcomes, arm, lambda o: mean_of(o.end)), strict=True))


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


def cells(rows: Sequence[ArmStanding]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    opponents = list(dict.fromkeys(other for row in rows for other in row.against))
    head = ["peer", "arm", "mean"]
    for other in opponents:
        head += [f"against {other}", "p (Holm)"]
    head += ["tokens sampled", "learned: own + foreign", "deepest fall: mean", "worst", "seconds"]
    return head, [_cells(row, opponents) for row in rows]


def _cells(row: ArmStanding, opponents: Sequence[str]) -> list[str]:
    met = [text for other in opponents for text in against_cells(row.against.get(other))]
    learned = [amount(row.own_tokens), amount(row.foreign_tokens)]
    return [
        row.peer or "all",
        row.arm,
        str(row.mean),
        *met,
        amount(row.sampled_tokens),
        " + ".join(learned) if all(learned) else "",
        *("" if np.isnan(fall) else f"{fall:.3f}" for fall in (row.fall, row.worst_fall)),
        "" if np.isnan(row.seconds) else f"{row.seconds:.0f}",
    ]


def against_cells(against: Against | None) -> tuple[str, str]:
    """A difference with its interval, and its corrected p."""
    if against is None or np.isnan(against.difference.mean):
        return "", ""
    estimate, p = against.difference, against.holm_p
    width = "" if np.isnan(estimate.low) else f" ± {estimate.half_width:.3f}"
    return f"{estimate.mean:+.3f}{width}", "" if np.isnan(p) else f"{p:.3f}"


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
