"""What several crews say together: an arm's difference to its opponents, with crews as the unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.study.standings import (
    ALL,
    Against,
    ArmStanding,
    against_cells,
    equivalence_head,
    met,
)
from motley.study.statistics import Comparison


@dataclass(frozen=True, slots=True)
class OverCrews:
    """An arm against an opponent, over the crews in which both were run."""

    arm: str
    opponent: str
    over: Against  # one difference per crew: the mean over its seeds
    by_crew: dict[str, float]
    without: list[str]  # crews that have no seed with runs of both
    below: list[str]  # crews that end below the opponent outside their own interval
    above: list[str]

    @property
    def sentence(self) -> str:
        num = len(self.by_crew)
        named = f": {', '.join(self.below)}" if self.below else ""
        lacking = f"; no seed has runs of both in {', '.join(self.without)}" if self.without else ""
        return (
            f"{self.over.sentence}; {len(self.below)} of {num} below it outside their interval"
            f"{named}; {len(self.above)} above{lacking}"
        )


def over_crews(crews: Mapping[str, Sequence[ArmStanding]], arms: Sequence[str]) -> list[OverCrews]:
    """Rows by opponent, then by arm; p values corrected for the arms that meet an opponent."""
    found: dict[str, dict[str, dict[str, Against]]] = {}  # opponent -> arm -> crew ->
    for crew, rows in crews.items():
        for row in _whole(rows):
            for opponent, against in row.against.items():
                found.setdefault(opponent, {}).setdefault(row.arm, {})[crew] = against
    return [
        one
        for opponent, by_arm in found.items()
        for one in _against(opponent, {arm: by_arm[arm] for arm in arms if arm in by_arm})
    ]


def _whole(rows: Sequence[ArmStanding]) -> list[ArmStanding]:
    """Those of the mean over peers; a crew of one peer has no others."""
    return [row for row in rows if row.peer == ALL] or list(rows)


def _against(opponent: str, by_arm: Mapping[str, Mapping[str, Against]]) -> list[OverCrews]:
    means = {
        arm: {crew: one.difference.mean for crew, one in each.items() if one.compared.differences}
        for arm, each in by_arm.items()
    }
    compared = [
        Comparison(arm, opponent, tuple(each.values()), unit="crew") for arm, each in means.items()
    ]
    margin = next((one.margin for each in by_arm.values() for one in each.values()), float("nan"))
    return [
        OverCrews(
            arm=over.compared.first,
            opponent=opponent,
            over=over,
            by_crew=means[over.compared.first],
            without=[c for c in by_arm[over.compared.first] if c not in means[over.compared.first]],
            below=[crew for crew, a in by_arm[over.compared.first].items() if a.is_below],
            above=[crew for crew, a in by_arm[over.compared.first].items() if a.is_above],
        )
        for over in met(compared, margin)
    ]


def cells(rows: Sequence[OverCrews]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    margins = {row.over.margin for row in rows}
    head = [
        "arm",
        "against",
        "crews",
        "mean over crews",
        "p (Holm)",
        *equivalence_head(margins),
        "g",
        "crews below",
        "crews above",
        "lowest",
    ]
    return head, [
        [
            row.arm,
            row.opponent,
            str(len(row.by_crew)),
            *against_cells(row.over, margins),
            f"{len(row.below)}: {', '.join(row.below)}" if row.below else "0",
            str(len(row.above)),
            _lowest(row),
        ]
        for row in rows
    ]


def _lowest(row: OverCrews) -> str:
    if not row.by_crew:
        return ""
    crew = min(row.by_crew, key=lambda name: row.by_crew[name])
    return f"{row.by_crew[crew]:+.3f} ({crew})"
