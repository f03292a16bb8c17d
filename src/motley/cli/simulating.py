"""motley sim and sweep: crews on virtual time."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn

from motley.cli.common import (
    AsJson,
    CrewFile,
    Objective,
    Out,
    Rounds,
    Seed,
    Settings,
    app,
    changed,
    command_line,
    console,
    plain_errors,
    print_rows,
    run_folder,
    say_choice,
    stderr,
    stop_on_interrupt,
    tell,
)
from motley.cli.progress import counted_runs, timed_bars
from motley.cli.studying import say_found
from motley.cli.watching import Watch, page_beside
from motley.config import CrewConfig, read_config
from motley.reports.saying import recall_signs, show_signs


@app.command()
def sim(
    crew_file: CrewFile,
    objective: Objective = "",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Out = None,
    watch: Watch = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a crew on virtual time, with simulated delays, losses, outages, speeds and churn."""
    from motley.reports.display import duration
    from motley.sim.report import summary

    with plain_errors():
        config = changed(read_config(crew_file, settings or ()), objective, rounds, seed)
        say_choice(config, beside_json=as_json)
        with run_folder(out, config.crew.name) as folder, page_beside(folder, watch):
            took_s = _simulate(config, folder, stderr() if as_json else console)
            title = f"{config.crew.name}: {config.crew.row}, {duration(took_s)} simulated"
            print_rows(summary(folder), title, as_json)
            recall_signs(folder, Console(stderr=as_json))
            if not as_json:
                tell(f"run folder: {folder}")


def _simulate(config: CrewConfig, folder: Path, console: Console) -> float:
    """Train to the end with a bar, or to a Ctrl-C; the seconds that were simulated."""
    from motley.reports.display import duration
    from motley.reports.trackers import Reports
    from motley.sim.simulation import SimCrew

    columns = (MofNCompleteColumn(), TextColumn("{task.description}"))
    progress, reports = timed_bars("round", *columns, console=console), Reports(config, folder)
    with progress, stop_on_interrupt("stopping") as stop_asked, closing(reports):
        bar = progress.add_task("warm start", total=config.crew.rounds)

        def show(text: str, completed: int = 0) -> None:
            progress.update(bar, description=text, completed=completed)

        crew = SimCrew(config, folder, lambda peer, *_: show(f"warm start of {peer}"))
        for lines in crew.rounds():
            reports.log(lines)
            show_signs(lines, console)
            show(f"{duration(lines[-1].time_s or 0.0)} simulated", crew.finished_rounds)
            if stop_asked():
                recall_signs(folder, console)
                tell(
                    f"stopped at round {crew.finished_rounds}; a simulation is not resumed: "
                    f"its metrics so far are in {folder}"
                )
                raise typer.Exit(130)
    return crew.events.clock.now_s()


def _with_lr(config: CrewConfig, lr: float) -> CrewConfig:
    return (
        msgspec.structs.replace(config, learning=msgspec.structs.replace(config.learning, lr=lr))
        if lr
        else config
    )


@app.command()
def sweep(
    crew_files: Annotated[
        list[Path], typer.Argument(help="Crew files, the one without delay first.")
    ],
    arms: Annotated[
        str,
        typer.Option(help="Arms separated by spaces, such as 'grpo gepo gepo:beta=0.005 ftis'."),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1.")] = 5,
    lr: Annotated[
        float, typer.Option(help="Use this learning rate instead of the crew files'.")
    ] = 0.0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Where outcomes are kept; a stopped sweep goes on there.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Simulate several crews under several arms and seeds: a table, a plot, report.html and
    trials.csv, with what each arm loses against the first crew.
    """
    from motley.study.arms import parse_arms
    from motley.study.pages import Making, sweep_comparisons, sweep_page
    from motley.study.spreadsheets import sweep_csv
    from motley.study.sweep import draw, glance, markdown, run_sweep, table
    from motley.tasks import load_task

    with plain_errors():
        configs = [_with_lr(read_config(path, settings or ()), lr) for path in crew_files]
        chosen = parse_arms(arms)
        folder = out or Path("runs") / "sweep"
        with counted_runs() as count:
            trials = run_sweep(configs, chosen, range(seeds), folder, jobs, count)
        crews, labels = [c.crew.name for c in configs], [arm.label for arm in chosen]
        made = Making(
            command_line(),
            configs,
            labels,
            load_task(configs[0].crew.task, configs[0].task).measure,
            {arm.label: arm.text for arm in chosen if arm.made},
        )
        lines = table(trials, crews, labels, made.measure)
        (folder / "report.html").write_text(sweep_page(trials, made), encoding="utf-8")
        (folder / "trials.csv").write_text(
            sweep_csv(trials, crews[0], made.measure), encoding="utf-8"
        )
        text = f"{glance(lines)}\n{markdown(lines)}"
        (folder / "table.md").write_text(text)
        draw(lines, folder / "sweep.png", made.measure)
        if as_json:
            sys.stdout.write(msgspec.json.encode({"lines": lines}).decode() + "\n")
        else:
            sys.stdout.write(text)
            tell("")
            say_found(sweep_comparisons(trials, crews, labels), seeds)
            tell(f"table, plot and report: {folder}/table.md, sweep.png, report.html, trials.csv")
