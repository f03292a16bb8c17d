"""How far something has come, and the time that is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from motley.cli.common import stderr


def timed_bars(
    words: str,
    *columns: ProgressColumn,
    console: Console,
    transient: bool = False,
    disable: bool = False,
    recent_s: float = 30.0,
) -> Progress:
    """Bars behind words, then columns of one's own, the time that has passed and what is left.

    What is left is told by what was done in the last `recent_s`.
    """
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    return Progress(
        TextColumn(words),
        BarColumn(),
        *columns,
        *times,
        console=console,
        transient=transient,
        disable=disable,
        speed_estimate_period=recent_s,
    )


@contextmanager
def counted_runs() -> Iterator[Callable[[float, int], None]]:
    """A bar on stderr to tell how many runs of how many are done; parts of runs count too."""
    # a run can take an hour: all that were made count
    with timed_bars("runs", MofNCompleteColumn(), console=stderr(), recent_s=inf) as progress:
        bar = progress.add_task("runs")
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def skills_text(accuracy: dict[str, float]) -> str:
    return " ".join(f"{kind} {value:.0%}" for kind, value in accuracy.items())
