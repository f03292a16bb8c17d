"""motley replay, motley pardon: what to do once a sender was caught, or caught wrongly."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import TaskID, TaskProgressColumn

from motley.cli.common import AsJson, app, plain_errors, print_rows, run_folder, stderr, tell
from motley.cli.progress import timed_bars

Folder = Annotated[Path, typer.Argument(help="A run folder, or that of a peer that joined a hub.")]


@app.command("replay")
def replay_command(
    run: Folder,
    without: Annotated[
        list[str], typer.Option(help="A peer whose groups are left out; may be given again.")
    ],
    after: Annotated[
        int | None,
        typer.Option("--from", min=0, help="A kept checkpoint's round, or 0; else the oldest."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The new folder; one under runs/ otherwise.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Take a run's steps again from its log without what a peer contributed since a checkpoint.

    Nothing is sampled. The new folder can be gone on from in place of the old one.
    """
    with plain_errors():
        from motley.archive import open_log
        from motley.runs.replay import KeptLog, Replay, kept_rounds

        first = kept_rounds(run)[0] if after is None else after
        with open_log(run) as archive:
            log = KeptLog(archive.entries())
            hub = archive.hub
        fresh = run_folder(out, f"{run.name}-without-{'-'.join(without)}")
        with (
            fresh as target,
            timed_bars("taking steps again", TaskProgressColumn(), console=stderr()) as bars,
        ):
            tasks: dict[str, TaskID] = {}

            def progress(peer: str, done: int, total: int) -> None:
                if peer not in tasks:
                    tasks[peer] = bars.add_task(peer, total=total)
                bars.update(tasks[peer], completed=done)

            outcomes = Replay(run, log, hub, tuple(without), first, target).run(progress)
        rows = [
            {
                "peer": outcome.peer,
                "rounds": outcome.rounds,
                "groups_left_out": outcome.left_out,
                "before": _mean(outcome.before),
                "after": _mean(outcome.after),
            }
            for outcome in outcomes
        ]
        print_rows(rows, f"without {', '.join(without)} since round {first}: {target}", as_json)


def _mean(by_kind: dict[str, float]) -> float:
    return sum(by_kind.values()) / len(by_kind)


@app.command("pardon")
def pardon_command(
    run: Annotated[Path, typer.Argument(help="The folder of a peer that joined a hub.")],
    peer: Annotated[str, typer.Argument(help="Whom it shall hear again.")],
) -> None:
    """Have a peer hear a muted sender again, and forget what it held against it."""
    with plain_errors():
        from motley.config import read_config
        from motley.distributed.pardons import Pardons

        known = [p.name for p in read_config(run / "config.toml").peer]
        if peer not in known:
            raise ValueError(f"the crew has no peer {peer!r}; it has {', '.join(known)}")
        Pardons(run).ask(peer)
        tell(f"{peer} is heard again from the next round of {run} on")
