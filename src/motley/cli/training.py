"""motley train and demo: a crew on this machine."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from motley.cli.common import (
    Alone,
    Objective,
    Out,
    Rounds,
    Seed,
    Settings,
    app,
    changed,
    console,
    plain_errors,
    results,
    run_folder,
    say,
    say_choice,
    stop_on_interrupt,
    tell,
)
from motley.cli.progress import skills_text, timed_bars
from motley.cli.watching import Watch, page_beside
from motley.config import CrewConfig, read_config
from motley.files import read_json, replace
from motley.reports.saying import recall_signs
from motley.runs.ending import PLAIN, resume_command

if TYPE_CHECKING:
    from motley.distributed.processes import ProcessCrew
    from motley.reports.display import Skills
    from motley.runs.local import LocalCrew


logger = logging.getLogger(__name__)


def _run(crew: LocalCrew | ProcessCrew) -> bool:
    """Train to the end, or to a Ctrl-C, with the live table; True if a stop was asked for.

    The crew is saved either way.
    """
    from motley.reports.watching import watched

    with stop_on_interrupt() as stop_asked, closing(watched(crew, console)) as rounds:
        for _ in rounds:
            if stop_asked():
                crew.save()
                break
        return stop_asked()


def _start_processes(begin: Callable[[Callable[[str], None]], ProcessCrew]) -> ProcessCrew:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        crew = begin(say)
        bar = progress.add_task("peers join and warm up", total=len(crew.config.students))
        for ready in crew.gather():
            progress.update(bar, completed=ready)
    return crew


def _start(config: CrewConfig, folder: Path, may_resume: bool = False) -> LocalCrew:
    from motley.runs.local import LocalCrew

    skill = TextColumn("{task.fields[skill]}")
    bars = timed_bars("{task.description}", skill, console=console, transient=True)
    with bars as progress:
        tasks: dict[str, TaskID] = {}

        def show(peer: str, steps: int, accuracy: dict[str, float]) -> None:
            warm = next(p.warm for p in config.peer if p.name == peer and p.warm)
            if peer not in tasks:
                tasks[peer] = progress.add_task(f"warm start of {peer}", total=1.0, skill="")
            progress.update(
                tasks[peer],
                completed=warm.share(steps, accuracy),
                skill=skills_text(accuracy),
            )

        return (LocalCrew.start_or_resume if may_resume else LocalCrew.start)(config, folder, show)


def _finish(crew: LocalCrew | ProcessCrew, alone: Skills) -> None:
    from motley.reports.display import draw_curves, skill_matrix, skills_at
    from motley.runs.metrics import learner_lines, measure_of, read_metrics

    if crew.stopped:
        console.print(
            f"over after round {crew.finished_rounds} of {crew.config.crew.rounds}: {crew.stopped}",
            soft_wrap=True,
            highlight=False,
        )
    lines = learner_lines(read_metrics(crew.folder))
    before, after = skills_at(lines, last=False), skills_at(lines, last=True)
    results.print(skill_matrix(before, after, alone, measure_of(lines)))
    png, page = draw_curves(lines, alone, crew.folder)
    tell(f"curves: {png} and {page}")
    recall_signs(crew.folder, console)
    tell(f"run folder: {crew.folder}")


def _train_alone(config: CrewConfig, folder: Path) -> bool:
    """Every peer by itself, in RUN/alone/PEER, going on with what is there; then RUN/alone.json.

    True if a stop was asked for.
    """
    from motley.reports.display import skills_at
    from motley.runs.metrics import learner_lines, read_metrics

    skills: Skills = {}
    for peer in config.students:
        own = folder / "alone" / peer.name
        crew = _start(config.alone(peer.name), own, may_resume=True)
        stop_asked = _run(crew)
        if not crew.finished or (stop_asked and peer is not config.students[-1]):
            return True
        skills |= skills_at(learner_lines(read_metrics(own)), last=True)
    _write_alone(folder, _Alone(" ".join(["motley", *sys.argv[1:]]), skills))
    return False


class _Alone(msgspec.Struct, frozen=True):
    """What every peer reaches by itself, and by which command: RUN/alone.json."""

    command: str
    skills: dict[str, dict[str, float]]


def _write_alone(folder: Path, alone: _Alone) -> None:
    replace(folder / "alone.json", msgspec.json.format(msgspec.json.encode(alone)) + b"\n")


def _read_alone(folder: Path) -> Skills:
    path = folder / "alone.json"
    if not path.exists():
        return {}
    remedy = f"delete it, and make it again with: {_again(folder, True)}"
    return read_json(path, _Alone, remedy).skills


def _train(
    begin: Callable[[], LocalCrew | ProcessCrew],
    folder: Path,
    alone: bool,
    recorded: _Alone | None = None,
) -> None:
    """Run a crew to its end, or until it is stopped; then say how to go on."""
    begun = False
    try:
        crew = begin()
        begun = True
        if recorded:
            _write_alone(folder, recorded)
        stop_asked = _run(crew)
        stopped = (stop_asked and (not crew.finished or alone)) or (
            alone and _train_alone(crew.config, folder)
        )
    except KeyboardInterrupt:
        stopped = True
    except PLAIN as error:
        if begun:  # otherwise the folder may be another run's
            error.add_note(f"go on with: {_again(folder, alone)}")
        raise
    if stopped:
        if (folder / "metrics.jsonl").exists():
            recall_signs(folder, console)
        tell(f"stopped; go on with: {_again(folder, alone)}")
        raise typer.Exit(130)
    _finish(crew, _read_alone(folder))


def _again(folder: Path, alone: bool) -> str:
    if any((folder / "checkpoints").glob("round-*")) or (folder / "peers").exists():
        return resume_command(folder, *["--alone"] * alone)
    return "the same command; nothing was saved yet"


@app.command()
def train(
    crew_file: Annotated[Path | None, typer.Argument(help="A crew file (TOML).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    objective: Objective = "",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Out = None,
    alone: Alone = False,
    watch: Watch = False,
    settings: Settings = None,
) -> None:
    """Train a crew on this machine, or go on with a run."""
    with plain_errors():
        _check_launch()
        if (crew_file is None) == (resume is None):
            raise ValueError("give a crew file to start, or --resume RUN to go on; not both")
        if resume is not None:
            if objective or seed is not None or out:
                raise ValueError(
                    "--resume goes on with the run's own objective, seed and folder; remove "
                    "--objective, --seed and --out, or begin a new run"
                )
            longer = [] if rounds is None else [f"crew.rounds={rounds}"]
            begin = _resuming(resume, [*(settings or ()), *longer])
            with page_beside(resume, watch):
                _train(begin, resume, alone)
        elif crew_file is not None:
            config = changed(read_config(crew_file, settings or ()), objective, rounds, seed)
            say_choice(config)
            with run_folder(out, config.crew.name) as folder, page_beside(folder, watch):
                logger.info("run folder %s", folder.resolve())
                _train(_starting(config, folder), folder, alone)


def _check_launch() -> None:
    from motley.peers.torchrun import Launched

    launched = Launched.of(os.environ)
    if launched and launched.size > 1:
        raise ValueError(
            f"torchrun started {launched.size} processes, and motley train starts those of a "
            "peer's devices itself, on this machine; run it without torchrun, or run motley hub "
            "CREW.toml and torchrun ... -m motley join ..., for devices on several machines"
        )


def _starting(config: CrewConfig, folder: Path) -> Callable[[], LocalCrew | ProcessCrew]:
    if not config.needs_processes:
        return lambda: _start(config, folder)
    from motley.distributed.processes import ProcessCrew

    return lambda: _start_processes(lambda say: ProcessCrew.start(config, folder, say))


def _resuming(folder: Path, settings: Sequence[str]) -> Callable[[], LocalCrew | ProcessCrew]:
    from motley.runs.local import LocalCrew
    from motley.runs.resuming import config_to_resume

    config = config_to_resume(folder, settings)
    if not (folder / "peers").exists():
        return lambda: LocalCrew.resume(folder, say, config=config)
    from motley.distributed.processes import ProcessCrew

    return lambda: _start_processes(lambda say: ProcessCrew.resume(folder, say, config))


@app.command()
def demo(
    objective: Objective = "",
    rounds: Rounds = None,
    seed: Seed = None,
    out: Out = None,
    alone: Alone = False,
    watch: Watch = False,
    settings: Settings = None,
) -> None:
    """Watch three different tiny models learn from each other, in minutes on a CPU."""
    with plain_errors():
        with as_file(files("motley") / "crews" / "demo.toml") as path:
            config, with_changes = read_config(path), read_config(path, settings or ())
        recorded = msgspec.json.decode(
            (files("motley") / "crews" / "demo_alone.json").read_bytes(), type=_Alone
        )
        config_now = say_choice(changed(with_changes, objective, rounds, seed))
        same_but_objective = msgspec.structs.replace(
            config,
            crew=msgspec.structs.replace(
                config.crew,
                objective=config_now.crew.objective,
                variant=config_now.crew.variant,
                chosen=config_now.crew.chosen,
            ),
            objective=config_now.objective,
        )
        known = recorded if same_but_objective == config_now and not alone else None
        with run_folder(out, "demo") as folder, page_beside(folder, watch):
            _train(lambda: _start(config_now, folder), folder, alone, known)
