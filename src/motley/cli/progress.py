"""How far something has come, the time that is left, and what goes wrong meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

if TYPE_CHECKING:
    from motley.runs.metrics import MetricsLine

MOST_RECALLED = 12  # signs


def timed_bars(
    words: str,
    *columns: ProgressColumn,
    console: Console,
    transient: bool = False,
    disable: bool = False,
) -> Progress:
    """Bars behind words, then columns of one's own, the time that has passed and what is left."""
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(
        TextColumn(words),
        BarColumn(),
        *columns,
        *times,
        console=console,
        transient=transient,
        disable=disable,
    )


@contextmanager
def counted_runs() -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr to tell how many runs of how many are done."""
    with timed_bars("runs", MofNCompleteColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("runs")
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def show_signs(lines: Iterable[MetricsLine], console: Console) -> None:
    """Say what the lines of a round show to be wrong."""
    from motley.runs.signs import signs_of

    for said in signs_of(lines):
        console.print(
            f"[yellow]warning:[/yellow] {escape(str(said))}", highlight=False, soft_wrap=True
        )


def recall_signs(folder: Path, console: Console) -> None:
    """Say again, when a run ends, what was wrong with it."""
    from motley.runs.metrics import read_metrics
    from motley.runs.signs import signs_of

    said = signs_of(read_metrics(folder))
    if said:
        console.print(
            f"[yellow]{len(said)} warning{'s' if len(said) > 1 else ''} in this run:[/yellow]"
        )
    for one in said[:MOST_RECALLED]:
        console.print(f"- {escape(str(one))}", highlight=False, soft_wrap=True)
    if len(said) > MOST_RECALLED:
        console.print(
            f"- and {len(said) - MOST_RECALLED} more: see warnings in {folder / 'metrics.jsonl'}"
        )


def skills_text(accuracy: dict[str, float]) -> str:
    return " ".join(f"{kind} {value:.0%}" for kind, value in accuracy.items())
