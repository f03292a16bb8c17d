"""What goes wrong in a run, in words on a screen: as it happens, and again when the run ends."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

if TYPE_CHECKING:
    from motley.runs.metrics import MetricsLine

MOST_RECALLED = 12  # signs


def show_signs(lines: Iterable[MetricsLine], console: Console) -> None:
    """Say what the lines of a round show to be wrong."""
    from motley.runs.signs import signs_of

    heard = _heard(console)
    for said in signs_of(lines):
        heard.print(
            f"[yellow]warning:[/yellow] {escape(str(said))}", highlight=False, soft_wrap=True
        )


def recall_signs(folder: Path, console: Console) -> None:
    """Say again, when a run ends, what was wrong with it."""
    from motley.runs.metrics import read_metrics
    from motley.runs.signs import signs_of

    heard, said = _heard(console), signs_of(read_metrics(folder))
    if said:
        heard.print(
            f"[yellow]{len(said)} warning{'s' if len(said) > 1 else ''} in this run:[/yellow]"
        )
    for one in said[:MOST_RECALLED]:
        heard.print(f"- {escape(str(one))}", highlight=False, soft_wrap=True)
    if len(said) > MOST_RECALLED:
        heard.print(
            f"- and {len(said) - MOST_RECALLED} more: see warnings in {folder / 'metrics.jsonl'}"
        )


def _heard(console: Console) -> Console:
    """Who wants quiet still wants warnings."""
    return Console(stderr=True) if console.quiet else console
