"""All that a study found, worked out once: for the terminal, and for the page and the files.

How it is written down is in `study/writing.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.study import report, standings
from motley.study.crews import OverCrews, over_crews
from motley.study.judging import Judgement, judged
from motley.study.outcomes import Outcome
from motley.study.plans import Claim
from motley.study.report import Glance, StudyRow
from motley.study.standings import ALL, ArmStanding
from motley.study.statistics import MARGIN
from motley.tasks import Measure


@dataclass(frozen=True, slots=True)
class CrewFindings:
    """Of one crew."""

    crew: str
    arms: list[str]  # those that have outcomes
    outcomes: list[Outcome]
    glance: list[Glance]
    lines: list[StudyRow]
    standings: list[ArmStanding]

    @property
    def over_peers(self) -> list[ArmStanding]:
        return [row for row in self.standings if row.peer == ALL] or self.standings

    @property
    def by_peer(self) -> list[ArmStanding]:
        """Of each peer, where there are several."""
        return [row for row in self.standings if row not in self.over_peers]


@dataclass(frozen=True, slots=True)
class Findings:
    judgements: list[Judgement]  # one per claim
    crews: list[CrewFindings]
    over: list[OverCrews]  # empty for one crew
    margin: float  # of equivalence, where no claim states another; nan: none

    @property
    def has_parts(self) -> bool:
        """Whether a claim is about several crews or peers, so that a sentence cannot have all."""
        return any(len(one.parts) > 1 for one in self.judgements)

    @property
    def num_seeds(self) -> int:
        """That the crew with the fewest has."""
        return min(len({o.seed for o in one.outcomes}) for one in self.crews)


def findings(
    outcomes: Mapping[str, Sequence[Outcome]],
    arms: Sequence[str],
    measure: Measure,
    claims: Sequence[Claim] = (),
) -> Findings:
    """`outcomes`: by crew. Arms and crews of which every run was lost are left out."""
    margin = MARGIN if measure == "accuracy" else float("nan")  # rewards have no scale
    found = [_of_crew(crew, some, arms, measure, margin) for crew, some in outcomes.items() if some]
    several = {one.crew: one.standings for one in found} if len(outcomes) > 1 else {}
    return Findings(judged(claims, outcomes), found, over_crews(several, arms), margin)


def _of_crew(
    crew: str, outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure, margin: float
) -> CrewFindings:
    made = {o.arm for o in outcomes}
    there = [arm for arm in arms if arm in made]
    return CrewFindings(
        crew=crew,
        arms=there,
        outcomes=list(outcomes),
        glance=report.glance(outcomes, there, measure),
        lines=report.table(outcomes, there, measure),
        standings=standings.standings(outcomes, there, measure, margin),
    )


def plain(found: Findings) -> dict[str, object]:
    """What --json has: the claims; of one crew its tables, of several those of each and those over
    crews; of none the keys of both, empty.
    """
    claims: dict[str, object] = {"judgements": found.judgements}
    if not found.crews:
        one, over = ("glance", "lines", "standings", "below"), ("over_crews", "sentences")
        return claims | {key: [] for key in one + over} | {"crews": {}}
    if len(found.crews) == 1 and not found.over:
        return claims | _plain(found.crews[0])
    return claims | {
        "crews": {one.crew: _plain(one) for one in found.crews},
        "over_crews": found.over,
        "sentences": [one.sentence for one in found.over],
    }


def _plain(one: CrewFindings) -> dict[str, object]:
    return {
        "glance": one.glance,
        "lines": one.lines,
        "standings": one.standings,
        "sentences": standings.said(one.standings),
        "below": standings.below(one.standings),
    }
