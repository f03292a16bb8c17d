"""What all commands share: options, tables, and how errors and Ctrl-C are met."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from motley.cli.shell import App as App
from motley.cli.shell import app as app
from motley.cli.shell import console as console
from motley.cli.shell import results as results
from motley.cli.shell import warn as warn
from motley.config import CrewConfig
from motley.files import new_run_folder
from motley.reports.scores import cell_text
from motley.runs.ending import PLAIN

bench_app = App(
    no_args_is_help=True,
    help="Measure speed against a known rival, or gradients against the true one.",
)
app.add_typer(bench_app, name="bench", rich_help_panel="More")

LONGEST_CELL = 48  # letters of a stranger in a table

CrewFile = Annotated[Path, typer.Argument(help="A crew file (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Objective = Annotated[
    str, typer.Option(help="Use this objective instead of the crew file's; NAME or NAME/VARIANT.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=(
            "Use this instead of what the crew file says, such as learning.lr=1e-5 or "
            "peer.NAME.device=cpu. Repeatable."
        ),
    ),
]
Rounds = Annotated[
    int | None, typer.Option(help="Train this many rounds instead of the crew file's.")
]
Seed = Annotated[int | None, typer.Option(help="Use this seed instead of the crew file's.")]
Out = Annotated[
    Path | None, typer.Option(help="The run's folder; a new one under runs/ otherwise.")
]
Best = Annotated[
    bool,
    typer.Option("--best", help="The checkpoint that was best on held-out, not the newest one."),
]
Alone = Annotated[
    bool,
    typer.Option("--alone", help="Also train every peer by itself, with all the crew's sampling."),
]


def run_folder(out: Path | None, name: str) -> AbstractContextManager[Path]:
    """The folder that was asked for, or a new one."""
    return nullcontext(out) if out else new_run_folder(name)


def say(text: str) -> None:
    """A line as it is, of what is being done."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def tell(text: str) -> None:
    """A line as it is, of what came of it: -q leaves it."""
    results.print(text, highlight=False, soft_wrap=True, markup=False)


def stderr() -> Console:
    """Where bars go that must not stand between results; silent with -q."""
    return Console(stderr=True, quiet=console.quiet)


@contextmanager
def plain_errors() -> Iterator[None]:
    """What a user did wrong, or a disk, is one line and not a traceback; what a user's own function
    raised comes with its own.
    """
    try:
        yield
    except PLAIN as error:
        shown = Console(stderr=True, soft_wrap=True)
        if details := getattr(error, "details", ""):  # where in a user's own code it happened
            shown.print(escape(details), highlight=False)
        said = _refused(error) if isinstance(error, OSError) else str(error)
        said = "; ".join([said, *getattr(error, "__notes__", ())])
        shown.print(f"[red]error:[/red] {escape(said)}", highlight=False)
        raise typer.Exit(2) from None


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_BUSY = (errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.EIO, errno.ETIMEDOUT)


def _refused(error: OSError) -> str:
    """Which place the system refused, why, and the remedy; its own words where it names none."""
    if error.filename is None or error.errno is None:
        return str(error)
    place = error.filename if isinstance(error.filename, int) else os.fsdecode(error.filename)
    remedy = "check the name, or give another place"
    if error.errno in _BUSY:
        remedy = "try again, or give another place"
    elif error.errno in _FULL:
        remedy = "make room there, and run the same command again"
    elif error.errno in _FORBIDDEN:
        remedy = "give yourself the rights to it, or give another place"
    return f"{place}: {error.strerror}; {remedy}"


@contextmanager
def stop_on_interrupt(
    words: str = "stopping after this round; Ctrl-C again stops at once",
) -> Iterator[Callable[[], bool]]:
    """Ctrl-C, or a kill, asks for a stop at the next good moment; a second Ctrl-C stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        console.print(words)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def changed(config: CrewConfig, objective: str, rounds: int | None, seed: int | None) -> CrewConfig:
    """A crew with what the command line says instead."""
    crew, settings = config.crew, config.objective
    if objective:
        name, _, variant = objective.partition("/")
        crew, settings = msgspec.structs.replace(crew, objective=name, variant=variant), {}
    if rounds is not None:
        crew = msgspec.structs.replace(crew, rounds=rounds)
    if seed is not None:
        crew = msgspec.structs.replace(crew, seed=seed)
    return msgspec.structs.replace(config, crew=crew, objective=settings)


def say_choice(config: CrewConfig, beside_json: bool = False) -> CrewConfig:
    """The same crew; which row "auto" took for it, and why, is said."""
    if config.crew.chosen and beside_json:
        stderr().print(config.crew.chosen, highlight=False, soft_wrap=True, markup=False)
    elif config.crew.chosen:
        say(config.crew.chosen)
    return config


def command_line() -> str:
    """The command that is running, to be pasted."""
    return shlex.join(["motley", *sys.argv[1:]])


def print_rows(
    rows: list[dict[str, Any]], title: str, as_json: bool, **others: list[dict[str, Any]]
) -> None:
    """A table, or with --json one object. `others`: more tables, by their names."""
    if as_json:
        sys.stdout.write(json.dumps({"title": title, "rows": rows, **others}) + "\n")
        return
    for name, some in {title: rows, **others}.items():
        _print_table(name, some)


def _print_table(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(cell_text, row.values()))
    # in a file nothing need be cut off
    (results if results.is_terminal else Console(width=160)).print(table)


def printable(text: str, most: int = LONGEST_CELL) -> str:
    """What a stranger wrote, cut, and without anything a terminal would obey."""
    cut = text if len(text) <= most else text[: most - 1] + "…"
    return "".join(letter if letter.isprintable() else "?" for letter in cut)
