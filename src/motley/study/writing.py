"""The files of a study's report: the page, the same as Markdown, CSV files, and outcomes as JSON
lines.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from motley.study import crews, judging, report, standings
from motley.study.findings import CrewFindings, Findings
from motley.study.outcomes import CrewOutcome
from motley.study.pages import Making, study_page, words_of
from motley.study.report import markdown_table
from motley.study.sections import Section
from motley.study.spreadsheets import claims_csv, comparisons_csv, study_csv
from motley.tasks import Measure

TABLE = "table.md"  # what is printed, too


def files_of(found: Findings, made: Making, sections: Sequence[Section] = ()) -> dict[str, str]:
    """By their names in the study's folder."""
    files = {
        "report.html": study_page(found, made, sections),
        TABLE: markdown(found, made, sections),
        "outcomes.csv": study_csv(found, made.measure),
        "comparisons.csv": comparisons_csv(found),
        "results.jsonl": results_lines(found, made.measure),
    }
    return files | ({"claims.csv": claims_csv(found)} if found.judgements else {})


def results_lines(found: Findings, measure: Measure) -> str:
    """The outcomes of all crews."""
    lines = [
        CrewOutcome(**msgspec.structs.asdict(outcome), crew=one.crew, measure=measure)
        for one in found.crews
        for outcome in one.outcomes
    ]
    return "".join(msgspec.json.encode(line).decode() + "\n" for line in lines)


# Markdown


def markdown(found: Findings, made: Making, sections: Sequence[Section] = ()) -> str:
    """The claims, all tables and sentences, and what the words mean."""
    several = len(found.crews) > 1
    claims = [one.sentence for one in found.judgements]
    parts = [f"## The claims\n\n{_bullets(claims)}"] if claims else []
    if found.has_parts:
        parts.append(markdown_table(*judging.cells(found.judgements)))
    parts += [
        f"## {one.crew}\n\n{_of_crew(one)}" if several else _of_crew(one) for one in found.crews
    ]
    if found.over:
        said = [one.sentence for one in found.over]
        parts.append(
            f"## Over crews\n\n{markdown_table(*crews.cells(found.over))}\n{_bullets(said)}"
        )
    parts += [_of_section(section) for section in sections]
    parts.append(f"## How to read this\n\n{_bullets(words_of(found, made.measure))}")
    return "\n".join(parts)


def _of_crew(one: CrewFindings) -> str:
    tables = {
        "The crew at a glance": report.glance_cells(one.glance),
        "Against alone": standings.cells(one.standings),
    }
    if standings.has_ood(one.standings):
        tables["Against alone, out of distribution"] = standings.cells(one.standings, "ood")
    tables["What each peer paid"] = standings.took_cells(one.standings)
    tables["Every peer"] = report.cells(one.lines)
    said = [*standings.said(one.over_peers), *standings.below(one.standings)]
    return "\n".join(
        [
            *(f"### {title}\n\n{markdown_table(*cells)}" for title, cells in tables.items()),
            *([f"### What was found\n\n{_bullets(said)}"] if said else []),
        ]
    )


def _of_section(section: Section) -> str:
    head, rows = section.table
    table = f"\n{markdown_table(head, rows)}" if rows else ""
    return f"## {section.title}\n\n{section.text}\n{table}"


def _bullets(said: Sequence[str]) -> str:
    return "".join(f"- {text}\n" for text in said)
