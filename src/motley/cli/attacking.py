"""motley attack: what hostile peers can do to a crew."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from motley.cli.common import (
    AsJson,
    CrewFile,
    Objective,
    Rounds,
    Settings,
    app,
    changed,
    plain_errors,
    print_rows,
    tell,
)
from motley.cli.progress import counted_runs
from motley.config import CrewConfig, read_config

if TYPE_CHECKING:
    from motley.attacks.report import AttackRow


@app.command("attack")
def attack_command(
    crew_file: CrewFile,
    attack: Annotated[
        list[str] | None, typer.Option(help="An attack by name, several times; all otherwise.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1.")] = 2,
    rounds: Rounds = None,
    objective: Objective = "",
    hostile: Annotated[int, typer.Option(min=1, help="Hostile peers: the crew file's last.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Where trials are kept; a stopped suite goes on there.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Attack a crew from inside, with and without its defences, and say what it costs.

    What honest peers take over, what they lose, when they notice, whom they suspect wrongly.
    """
    with plain_errors():
        config = changed(read_config(crew_file, settings or ()), objective, rounds, None)
        _check_measure(config)
        folder = out or Path("runs") / f"attack-{config.crew.name}"
        rows = _rows(config, attack or [], range(seeds), hostile, folder, jobs)
        if as_json:
            found = {"crew": config.crew.name, "rows": [row.plain() for row in rows]}
            sys.stdout.write(json.dumps(found) + "\n")
        else:
            title = f"{config.crew.name}: {config.crew.row}, {config.crew.rounds} rounds"
            print_rows([row.cells() for row in rows], title, as_json=False)
            for row in {row.attack: row for row in rows}.values():
                tell(f"{row.attack}: {row.wants}")


def _check_measure(config: CrewConfig) -> None:
    from motley.tasks import load_task

    if load_task(config.crew.task, config.task).measure == "reward":
        raise ValueError(
            f"task {config.crew.task} gives rewards, and motley attack says what is lost of an "
            "accuracy; use a task whose answers are right or wrong, such as digits"
        )


def _rows(
    config: CrewConfig, names: list[str], seeds: range, hostile: int, folder: Path, jobs: int
) -> list[AttackRow]:
    """A row or two of every attack, in the order of the catalogue."""
    from motley.attacks.catalogue import ATTACKS, chosen
    from motley.attacks.fuzzing import NAME, fuzz
    from motley.attacks.report import fuzz_row, rows_of, unmounted_row
    from motley.attacks.suite import run_suite, stage_of, stagings, why_not
    from motley.runs.checking import check_config
    from motley.study.running import claim

    wanted = chosen(names)
    attacks = [ATTACKS[name] for name in wanted if name in ATTACKS]
    reasons = {one.name: why_not(config, one, hostile) for one in attacks}
    mounted = [one for one in attacks if not reasons[one.name]]
    stages = stagings(config, mounted, hostile)
    for checked in (config, *(stage.parts.config for stage in stages)):
        check_config(checked)
    claim(folder, config)  # only now: a suite that is refused leaves nothing
    with counted_runs() as count:
        trials = run_suite(stages, seeds, folder, jobs, count)
    rows = []
    for one in attacks:
        reason = reasons[one.name]
        rows += [unmounted_row(one, reason)] if reason else rows_of(one, trials)
    return rows + ([fuzz_row(fuzz(stage_of(config)))] if NAME in wanted else [])
