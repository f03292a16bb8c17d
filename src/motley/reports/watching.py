"""A crew while it trains, in front of a person: the live table, plain lines where there is no
terminal, and the reporters.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.live import Live

from motley.config import CrewConfig
from motley.reports.display import LiveTable
from motley.reports.saying import show_signs
from motley.reports.scores import score_text
from motley.reports.trackers import Reports
from motley.runs.metrics import LearnerLine, learner_lines, mean, measure_of, read_metrics


class Trainable(Protocol):
    """A crew that trains: LocalCrew or ProcessCrew."""

    config: CrewConfig
    folder: Path
    finished_rounds: int

    def rounds(self) -> Iterator[list[LearnerLine]]: ...


def watched(
    crew: Trainable, console: Console, progress: bool = True
) -> Generator[Sequence[LearnerLine], None, None]:
    """Train to the last round; the lines of each, or none where nothing has happened yet.

    `progress`: it is shown.
    """
    table = LiveTable(crew.config, first_round=crew.finished_rounds)
    table.update(learner_lines(read_metrics(crew.folder)))
    live = Live(table, console=console, refresh_per_second=4, transient=not redraws(console))
    with live if progress else nullcontext(), closing(Reports(crew.config, crew.folder)) as reports:
        for lines in crew.rounds():
            table.update(lines)
            reports.log(lines)
            show_signs(lines, console)
            if progress and lines and not redraws(console) and lines[0].heldout:
                words = _plain_progress(lines, crew.config.crew.rounds, table.time_left())
                console.print(words, highlight=False, soft_wrap=True)
            yield lines


def redraws(console: Console) -> bool:
    return console.is_terminal or console.is_jupyter


def _plain_progress(lines: Sequence[LearnerLine], rounds: int, left: str) -> str:
    """A line where there is no terminal to redraw."""
    measure = measure_of(lines)
    peers = ", ".join(
        f"{line.peer} {score_text(mean(line.heldout), measure)}" for line in lines if line.heldout
    )
    return f"round {lines[0].round} of {rounds}: held-out {measure} {peers}; {left} left"
