"""All that a study found, worked out once: for the terminal, and for the page and the files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motley.study import crews, report, standings
from motley.study.crews import OverCrews, over_crews
from motley.study.outcomes import Outcome
from motley.study.report import Glance, StudyRow, markdown_table
from motley.study.standings import ALL, ArmStanding
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
    crews: list[CrewFindings]
    over: list[OverCrews]  # empty for one crew

    @property
    def num_seeds(self) -> int:
        """That the crew with the fewest has."""
        return min(len({o.seed for o in one.outcomes}) for one in self.crews)


def findings(
    outcomes: Mapping[str, Sequence[Outcome]], arms: Sequence[str], measure: Measure
) -> Findings:
    """`outcomes`: by crew. Arms and crews of which every run was lost are left out."""
    found = [_of_crew(crew, some, arms, measure) for crew, some in outcomes.items() if some]
    several = {one.crew: one.standings for one in found} if len(outcomes) > 1 else {}
    return Findings(found, over_crews(several, arms))


def _of_crew(
    crew: str, outcomes: Sequence[Outcome], arms: Sequence[str], measure: Measure
) -> CrewFindings:
    made = {o.arm for o in outcomes}
    there = [arm for arm in arms if arm in made]
    return CrewFindings(
        crew=crew,
        arms=there,
        outcomes=list(outcomes),
        glance=report.glance(outcomes, there, measure),
        lines=report.table(outcomes, there, measure),
        standings=standings.standings(outcomes, there, measure),
    )


def plain(found: Findings) -> dict[str, object]:
    """What --json has: of one crew its tables, of several those of each and those over crews."""
    if len(found.crews) == 1 and not found.over:
        return _plain(found.crews[0])
    return {
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


def markdown(found: Findings) -> str:
    """All tables and sentences."""
    several = len(found.crews) > 1
    parts = [
        f"## {one.crew}\n\n{_markdown(one)}" if several else _markdown(one) for one in found.crews
    ]
    if found.over:
        said = [one.sentence for one in found.over]
        parts.append(
            f"## Over crews\n\n{markdown_table(*crews.cells(found.over))}\n{_bullets(said)}"
        )
    return "\n".join(parts)


def _markdown(one: CrewFindings) -> str:
    tables = [
        markdown_table(*report.glance_cells(one.glance)),
        markdown_table(*standings.cells(one.standings)),
        markdown_table(*report.cells(one.lines)),
    ]
    said = [*standings.said(one.over_peers), *standings.below(one.standings)]
    return "\n".join([*tables, *([_bullets(said)] if said else [])])


def _bullets(said: Sequence[str]) -> str:
    return "".join(f"- {text}\n" for text in said)
