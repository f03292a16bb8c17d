"""motley rollouts: prompts, completions, rewards, and why a sample was not learned from."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motley.cli.common import AsJson, app, console, plain_errors, printable, say

if TYPE_CHECKING:
    from motley.archive import LoggedRollout, RolloutFilter, RolloutReader

PIPED_WIDTH = 200  # of a table, where there is no terminal
MOST_OF_A_TEXT = 20_000  # letters that are shown of a completion, with --full


@app.command("rollouts")
def rollouts_command(
    run: Annotated[
        str, typer.Argument(help="A run folder, a peer's or a hub's; or the name of a crew.")
    ],
    peer: Annotated[str, typer.Option(help="What this learner made of them.")] = "",
    sender: Annotated[str, typer.Option(help="Only what this peer sampled.")] = "",
    rounds: Annotated[str, typer.Option("--round", help="Of these rounds: 7, 3..9, ..9.")] = "",
    kind: Annotated[str, typer.Option(help="Only this kind of problem.")] = "",
    reward: Annotated[str, typer.Option(help="With such a reward: 1, ..0.5, -3..-1.")] = "",
    grep: Annotated[
        str, typer.Option(help="Where this regular expression is in the prompt or completion.")
    ] = "",
    reason: Annotated[
        str,
        typer.Option(
            help=(
                "Of this fate, or a part of its name: learned, silent, filtered, withheld, stale, "
                "late, muted, refused, waiting, 'not recorded'; or truncated."
            )
        ),
    ] = "",
    limit: Annotated[int, typer.Option(min=1, help="Rollouts of a page.")] = 20,
    page: Annotated[int, typer.Option(min=1, help="Which page.")] = 1,
    full: Annotated[bool, typer.Option("--full", help="Show texts whole, one below another.")] = (
        False
    ),
    to_csv: Annotated[
        Path | None, typer.Option("--csv", help="Write all that match to this new file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Read what was sampled in a run, and what every learner made of it."""
    with plain_errors():
        from motley.archive import RolloutFilter, RolloutReader, find_log, open_log, read_range

        everything = RolloutFilter()
        wanted = RolloutFilter(
            peer=peer,
            sender=sender,
            rounds=read_range(rounds, "--round") if rounds else everything.rounds,
            kind=kind,
            rewards=read_range(reward, "--reward") if reward else everything.rewards,
            grep=_pattern(grep) if grep else None,
            reason=reason,
        )
        with open_log(find_log(run)) as archive:
            reader = RolloutReader.of(archive)
            if to_csv is not None:
                _write_csv(reader, wanted, to_csv, as_json)
            else:
                _show_page(reader, wanted, (page, limit), full, as_json)


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(
            f"--grep {text!r} is no regular expression: {error}; put a \\ before letters with a "
            "meaning of their own"
        ) from None


def _show_page(
    reader: RolloutReader,
    wanted: RolloutFilter,
    place: tuple[int, int],
    full: bool,
    as_json: bool,
) -> None:
    """`place`: page and limit. Nothing behind the page is read."""
    page, limit = place
    there = islice(reader.rollouts(wanted), (page - 1) * limit, page * limit + 1)
    rows = list(there)
    more, rows = len(rows) > limit, rows[:limit]
    if as_json:
        content = {
            "run": str(reader.archive.folder),
            "page": page,
            "limit": limit,
            "more": more,
            "note": reader.note,
            "rollouts": rows,
        }
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
        return
    if not rows:
        say("no rollout matches" if page == 1 else f"there is no page {page}")
    elif full:
        _print_blocks(rows, wanted.peer)
    else:
        _print_table(rows, wanted.peer)
    if reader.note:
        say(reader.note)
    if more:
        say(f"there are more: --page {page + 1}")


def _print_table(rows: list[LoggedRollout], peer: str) -> None:
    table = Table(show_edge=False)
    for column in ("round", "sender", "kind", "prompt", "completion", "reward", "ending"):
        table.add_column(column, overflow="fold")
    table.add_column(f"for {peer}" if peer else "what became of it", overflow="fold")
    for row in rows:
        cells = (
            str(row.round),
            row.sender,
            row.kind or "",
            _shown(row.prompt),
            _shown(row.completion, f"({row.num_tokens} tokens)"),
            "" if row.reward is None else f"{row.reward:.4g}",
            row.ending,
            fate_words(row, peer),
        )
        table.add_row(*(Text(printable(cell, 200)) for cell in cells))
    (console if console.is_terminal else Console(width=PIPED_WIDTH)).print(table)


def _print_blocks(rows: Iterable[LoggedRollout], peer: str) -> None:
    for row in rows:
        reward = "no number" if row.reward is None else f"{row.reward:.4g}"
        heading = (
            f"--- round {row.round}, {row.sender}, problem {row.slot}, sample {row.number}"
            f"{f', {row.kind}' if row.kind else ''}: reward {reward}, {row.ending} after "
            f"{row.num_tokens} tokens; {fate_words(row, peer)}"
        )
        say(printable(heading, MOST_OF_A_TEXT))
        for name, text in (
            ("prompt", row.prompt),
            ("answer", row.answer),
            ("completion", row.completion),
        ):
            if text is not None:
                say(f"{name}: {_lines(text)}")


def fate_words(row: LoggedRollout, peer: str) -> str:
    """What became of a rollout: in one word where it is the same for everyone."""
    fates = {peer: row.fates[peer]} if peer in row.fates else row.fates
    if len(set(fates.values())) <= 1:
        return next(iter(fates.values()), "")
    return ", ".join(f"{name} {fate}" for name, fate in fates.items())


def _shown(text: str | None, otherwise: str = "") -> str:
    return otherwise if text is None else printable(text.replace("\n", "↵"))


def _lines(text: str) -> str:
    """A stranger's text with its line breaks, and nothing else that a terminal would obey."""
    return "\n".join(printable(line, MOST_OF_A_TEXT) for line in text[:MOST_OF_A_TEXT].split("\n"))


def _write_csv(reader: RolloutReader, wanted: RolloutFilter, path: Path, as_json: bool) -> None:
    from motley.files import whole

    if path.exists():
        raise ValueError(
            f"{path} is there already and is not overwritten; choose another name, or delete it"
        )
    with whole(path) as partial, partial.open("w", encoding="utf-8", newline="") as file:
        count = 0
        for text in _csv_rows(reader, wanted):
            file.write(text)
            count += 1
    if as_json:
        content = {"file": str(path), "rollouts": count - 1, "note": reader.note}
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")
        return
    say(f"{count - 1} rollouts in {path}")
    if reader.note:
        say(reader.note)


def _csv_rows(reader: RolloutReader, wanted: RolloutFilter) -> Iterator[str]:
    """A heading, then a row per rollout, with a column for each learner's verdict."""
    from motley.archive import LoggedRollout

    names = [name for name in LoggedRollout.__struct_fields__ if name != "fates"]
    learners = [wanted.peer] if wanted.peer else list(reader.learners)
    yield _csv_row([*names, *(f"fate_{name}" for name in learners)])
    for row in reader.rollouts(wanted):
        cells = [getattr(row, name) for name in names]
        yield _csv_row([*cells, *(row.fates.get(name, "") for name in learners)])


def _csv_row(cells: list[object]) -> str:
    line = io.StringIO()
    csv.writer(line).writerow(["" if cell is None else cell for cell in cells])
    return line.getvalue()
