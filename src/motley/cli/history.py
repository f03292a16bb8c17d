"""motley log: what is on a crew's log."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import TaskProgressColumn
from rich.table import Table
from rich.text import Text

from motley.cli.common import AsJson, app, plain_errors, printable, results, stderr, tell
from motley.cli.progress import timed_bars

if TYPE_CHECKING:
    from motley.archive import Archive, Seen, Tally

LEAST_WIDTH = 100  # of a table; a narrower terminal breaks the lines
PIPED_WIDTH = 240  # where there is no terminal
_WORDS = ("sender", "id", "kind", "problem", "fault", "faults")  # columns of text

Row = dict[str, object]


@app.command("log")
def log_command(
    target: Annotated[
        str, typer.Argument(help="A run folder, a peer's or a hub's; or the name of a crew.")
    ],
    newest: Annotated[
        int | None, typer.Option("--list", min=1, help="Show the newest N records, one row each.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Print records as they come, until Ctrl-C.")
    ] = False,
    export: Annotated[
        Path | None, typer.Option(help="Write every group to this new file: .jsonl or .parquet.")
    ] = None,
    peer: Annotated[str, typer.Option(help="Only what this peer sent.")] = "",
    after: Annotated[
        int | None, typer.Option(min=0, help="Only what stands behind this position of the log.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who sent what to a crew's log, and what is wrong with a record."""
    with plain_errors():
        from motley.archive import find_log, open_log

        if (newest is not None) + follow + (export is not None) > 1:
            raise ValueError(
                "--list, --follow and --export are three ways to see a log; give one of them"
            )
        with open_log(find_log(target)) as archive:
            _check_peer(archive, peer)
            if follow:
                _follow(archive, after, peer, as_json)
            elif export is not None:
                _export(archive, export, after or 0, peer, as_json)
            elif newest is not None:
                _list(archive, newest, after or 0, peer, as_json)
            else:
                _summarise(archive, after or 0, peer, as_json)


def _check_peer(archive: Archive, peer: str) -> None:
    from motley.archive import UNKNOWN
    from motley.config import parse_config
    from motley.records import HUB

    charter = archive.charter() if peer else None
    if charter:
        known = [
            *(p.name for p in parse_config(charter.config, source="the crew's charter").peer),
            HUB,
            UNKNOWN,
        ]
        if peer not in known:
            raise ValueError(
                f"crew {archive.crew} has no peer {peer!r}; it has {', '.join(known[:-1])}, and "
                f"senders that are {UNKNOWN}"
            )


# Ways to see a log


def _summarise(archive: Archive, after: int, peer: str, as_json: bool) -> None:
    from motley.archive import Tally

    tallies: dict[str, Tally] = {}
    total = Tally()
    for seen in _read(archive, after, peer):
        tallies.setdefault(seen.sender, Tally()).add(seen)
        total.add(seen)
    now_s = archive.clock.now_s()
    rows = [_tally_row(sender, tallies[sender], now_s) for sender in sorted(tallies)]
    whole = _tally_row("all", total, now_s)
    if as_json:
        _print_json(
            {"crew": archive.crew, "folder": str(archive.folder), "senders": rows, "total": whole}
        )
    else:
        _print_table(archive, [*rows, whole], num_totals=1)


def _list(archive: Archive, newest: int, after: int, peer: str, as_json: bool) -> None:
    if not peer:  # then the newest N are the last N positions, or fewer
        after = max(after, archive.source.last() - newest)
    now_s = archive.clock.now_s()
    rows = [_record_row(seen, now_s) for seen in deque(_read(archive, after, peer), maxlen=newest)]
    if as_json:
        _print_json({"crew": archive.crew, "folder": str(archive.folder), "records": rows})
    elif rows:
        _print_table(archive, rows)
    else:
        tell("nothing")


def _follow(archive: Archive, after: int | None, peer: str, as_json: bool) -> None:
    say = lambda text: Console(stderr=True, soft_wrap=True).print(
        text, highlight=False, markup=False
    )
    with suppress(KeyboardInterrupt):  # the way to end it
        for seen in archive.follow(after, say):
            if peer in ("", seen.sender):
                row = _record_row(seen, archive.clock.now_s())
                if as_json:
                    _print_json(row)
                else:
                    sys.stdout.write(_line(row) + "\n")
                sys.stdout.flush()


def _export(archive: Archive, path: Path, after: int, peer: str, as_json: bool) -> None:
    from motley.archive import LogTexts, crew_of, export, problems_of

    try:
        problem_of, why = problems_of(archive), ""
    except ValueError as error:
        problem_of, why = (
            lambda group: None,
            f"without prompts and answers, as the task cannot be loaded: {error}",
        )
    records = _read(archive, after, peer, with_tables=True)
    done = export(records, path, problem_of, LogTexts(crew_of(archive)))
    if as_json:
        _print_json(
            {
                "file": str(path),
                "groups": done.num_groups,
                "left_out": dict(done.left_out),
                "note": why,
            }
        )
        return
    faults = f"; {_counts(done.left_out)} left out" if done.left_out else ""
    for text in (f"{done.num_groups} groups in {path}{faults}", why):
        if text:
            tell(text)


def _read(archive: Archive, after: int, peer: str, with_tables: bool = False) -> Iterator[Seen]:
    """The records that are wanted, with a bar on stderr for how far the reading has come."""
    console = stderr()
    with timed_bars(
        "reading",
        TaskProgressColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("", total=max(0, archive.source.last() - after))
        for seen in archive.records(after, with_tables):
            if peer in ("", seen.sender):
                yield seen
            progress.update(bar, completed=seen.position - after)


# Rows and words


def _tally_row(sender: str, tally: Tally, now_s: float) -> Row:
    return {
        "sender": sender,
        "records": tally.num_records,
        "groups": tally.num_groups,
        "rollouts": tally.num_rollouts,
        "tokens": tally.num_tokens,
        "bytes": tally.num_bytes,
        "bytes_per_token": tally.bytes_per_token,
        "rounds": None if tally.first_round is None else [tally.first_round, tally.last_round],
        "age_s": None if tally.newest_s is None else now_s - tally.newest_s,
        "reward": tally.reward,
        "faults": dict(sorted(tally.faults.items())),
    }


def _record_row(seen: Seen, now_s: float) -> Row:
    group = seen.group
    return {
        "position": seen.position,
        "id": seen.id,
        "kind": seen.kind,
        "round": group.round if group else None,
        "problem": group.problem if group else None,
        "rollouts": len(group.rollouts) if group else None,
        "tokens": seen.num_tokens if group else None,
        "reward": seen.reward,
        "bytes": seen.num_bytes,
        "age_s": now_s - group.created_s if group else None,
        "fault": seen.fault,
    }


def _line(row: Row) -> str:
    """A record as one line of text: `12 a.0.3 group, round 0, ...`."""
    parts = [f"{row['position']} {printable(str(row['id']))} {row['kind'] or 'unreadable'}"]
    if row["kind"] == "group":
        parts += [
            f"round {row['round']}",
            f"problem {printable(str(row['problem']))}",
            f"{row['rollouts']} rollouts of {row['tokens']} tokens",
            f"reward {_cell('reward', row['reward'])}",
        ]
    parts.append(f"{row['bytes']} bytes")
    if row["age_s"] is not None:
        parts.append(f"made {_cell('age_s', row['age_s'])} ago")
    return ", ".join([*parts, *([f"FAULT {row['fault']}"] if row["fault"] else [])])


def _print_json(content: Row) -> None:
    sys.stdout.write(msgspec.json.encode(content).decode() + "\n")


def _print_table(archive: Archive, rows: list[Row], num_totals: int = 0) -> None:
    """Rows under their names; totals come last, and stand apart.

    Where it is narrow words break, and no number does.
    """
    title = f"log of crew {archive.crew}" if archive.crew else f"log of {archive.folder}"
    table = Table(
        title=Text(printable(title)), box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0)
    )
    for name in rows[0]:
        words = name in _WORDS
        heading = name.removesuffix("_s").replace("_", " ")
        table.add_column(
            heading, justify="left" if words else "right", no_wrap=not words, overflow="fold"
        )
    for number, row in enumerate(rows, 1):
        table.add_row(
            *(Text(_cell(name, value)) for name, value in row.items()),
            end_section=number == len(rows) - num_totals,
        )
    Console(width=max(results.width, LEAST_WIDTH) if results.is_terminal else PIPED_WIDTH).print(
        table
    )


def _cell(name: str, value: object) -> str:
    if value is None:
        return ""
    if name == "age_s" and isinstance(value, float):
        return printable(_age(value))
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.1e}"
    if isinstance(value, list):
        return "..".join(map(str, value))
    return _counts(value) if isinstance(value, dict) else printable(str(value))


def _age(seconds: float) -> str:
    """Whole units, as a person would say it. A sender's clock may be ahead of ours."""
    for unit, size_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if abs(seconds) >= 2 * size_s:
            return f"{seconds / size_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
