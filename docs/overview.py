"""Print a table of crews, such as the README's: python docs/overview.py RESULTS... [--ours ARM...]

A row per crew and peer: how good it ends alone with what it samples in the crew, alone with all the
crew's sampling, under ftis, and under ours. RESULTS are results.jsonl files of studies, or their
folders. Ours is the first of the arms named that a crew was run with.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from motley.study.outcomes import CrewOutcome, read_crew_outcomes
from motley.study.report import markdown_table
from motley.study.standings import ArmStanding, standings

BESIDE_OURS = ("alone/own", "alone", "ftis")
OURS = ("uplift/sure", "uplift/kept", "auto", "uplift/both", "uplift/relative")


def read_crews(paths: Sequence[Path]) -> dict[str, list[CrewOutcome]]:
    """Outcomes by crew. Lines that name none are of the crew that the file is called by."""
    crews: dict[str, list[CrewOutcome]] = {}
    for given in paths:
        path = given / "results.jsonl" if given.is_dir() else given
        if not path.exists():
            raise ValueError(
                f"{path} is not there; give results.jsonl files, or folders of studies"
            )
        found = read_crew_outcomes(path)
        if not found:
            raise ValueError(f"{path} is empty; give the study's command again, which writes it")
        for crew in dict.fromkeys(one.crew for one in found):
            name = crew or path.stem
            if name in crews:
                raise ValueError(f"{path}: crew {name} was in another file too; give one of them")
            crews[name] = [one for one in found if one.crew == crew]
    return crews


def overview(crews: Mapping[str, Sequence[CrewOutcome]], ours: Sequence[str]) -> str:
    """The table, as Markdown."""
    rows = []
    for crew, outcomes in crews.items():
        arms = list(dict.fromkeys(one.arm for one in outcomes))
        own = next((arm for arm in ours if arm in arms), "")
        found = standings(outcomes, arms, outcomes[0].measure)
        for peer in dict.fromkeys(row.peer for row in found):
            by_arm = {row.arm: row for row in found if row.peer == peer}
            ends = [_end(by_arm, arm) for arm in (*BESIDE_OURS, own)]
            rows.append([crew, peer or "all", *ends, own])
    head = ["crew", "peer", *BESIDE_OURS, "ours", "which is"]
    return markdown_table(head, rows)


def _end(by_arm: Mapping[str, ArmStanding], arm: str) -> str:
    return str(by_arm[arm].mean) if arm in by_arm else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--ours", nargs="+", default=OURS)
    given = parser.parse_args()
    try:
        table = overview(read_crews(given.results), given.ours)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
    print(table, end="")


if __name__ == "__main__":
    main()
