"""The command line. Owns words and exit codes; every piece of work belongs to a module it calls."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import as_file, files
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from motley.config import ConfigError, CrewConfig, PeerConfig, read_config
from motley.records import Sampling
from motley.tasks import Split

app = typer.Typer(no_args_is_help=True, add_completion=False, help="A crew of different language models that train each other.")
bench_app = typer.Typer(no_args_is_help=True, help="Measure speed against a known rival, in one run.")
app.add_typer(bench_app, name="bench")
console = Console()

CrewFile = Annotated[Path, typer.Argument(help="A crew file (TOML).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Objective = Annotated[str, typer.Option(help="Use this objective instead of the crew file's; NAME or NAME/VARIANT.")]
Rounds = Annotated[int, typer.Option(help="Train this many rounds instead of the crew file's.")]
Seed = Annotated[int | None, typer.Option(help="Use this seed instead of the crew file's.")]
Out = Annotated[Path | None, typer.Option(help="The run's folder; a new one under runs/ otherwise.")]
Alone = Annotated[bool, typer.Option("--alone", help="Also train every peer by itself, with all the crew's sampling.")]


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What a user did wrong is one line, not a traceback."""
    try:
        yield
    except (ConfigError, ValueError, FloatingPointError) as error:
        Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None


@contextmanager
def _stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """Ctrl-C asks for a stop after the present round; a second one stops at once."""
    asked = False

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def _new_folder(name: str) -> Path:
    number = 1
    while (folder := Path("runs") / f"{name}-{number:03d}").exists():
        number += 1
    return folder


def _changed(config: CrewConfig, objective: str, rounds: int, seed: int | None) -> CrewConfig:
    crew, settings = config.crew, config.objective
    if objective:
        name, _, variant = objective.partition("/")
        crew, settings = msgspec.structs.replace(crew, objective=name, variant=variant), {}
    if rounds:
        crew = msgspec.structs.replace(crew, rounds=rounds)
    if seed is not None:
        crew = msgspec.structs.replace(crew, seed=seed)
    return msgspec.structs.replace(config, crew=crew, objective=settings)


def _run(crew: Any, title: str = "") -> bool:
    """Train to the end with the live table; False if interrupted, the crew saved."""
    from motley.crew import read_metrics
    from motley.display import LiveTable

    table = LiveTable(crew.config, first_round=crew.finished_rounds)
    table.update(read_metrics(crew.folder))
    with _stop_on_interrupt() as stop_asked, Live(table, console=console, refresh_per_second=4, transient=not console.is_terminal) as live:
        for lines in crew.rounds():
            table.update(lines)
            if not console.is_terminal and "heldout" in lines[0]:
                live.console.print(_plain_progress(lines, crew.config.crew.rounds, table.time_left()), highlight=False)
            if stop_asked() and crew.finished_rounds < crew.config.crew.rounds:
                crew.save()
                return False
    return True


def _plain_progress(lines: list[dict[str, Any]], rounds: int, left: str) -> str:
    """A line where there is no terminal to redraw."""
    from motley.display import mean

    peers = ", ".join(f"{line['peer']} {mean(line['heldout']):.0%}" for line in lines if "heldout" in line)
    return f"round {lines[0]['round']} of {rounds}: held-out accuracy {peers}; {left} left"


def _start(config: CrewConfig, folder: Path, may_resume: bool = False) -> Any:
    from motley.crew import LocalCrew

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[skill]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(peer: str, steps: int, accuracy: dict[str, float]) -> None:
            wanted = next(p.warm.accuracy for p in config.peer if p.name == peer and p.warm)
            if peer not in tasks:
                tasks[peer] = progress.add_task(f"warm start of {peer}", total=1.0, skill="")
            reached = sum(min(1.0, accuracy[k] / wanted[k]) for k in wanted) / len(wanted)
            progress.update(tasks[peer], completed=reached, skill=" ".join(f"{k} {v:.0%}" for k, v in accuracy.items()))

        return (LocalCrew.start_or_resume if may_resume else LocalCrew.start)(config, folder, show)


def _finish(crew: Any, alone: dict[str, dict[str, float]]) -> None:
    from motley.crew import read_metrics
    from motley.display import draw_curves, skill_matrix, skills_at

    lines = read_metrics(crew.folder)
    console.print(skill_matrix(skills_at(lines, last=False), skills_at(lines, last=True), alone))
    png, page = draw_curves(lines, alone, crew.folder)
    console.print(f"curves: {png} and {page}", soft_wrap=True)
    console.print(f"run folder: {crew.folder}", soft_wrap=True)


def _train_alone(config: CrewConfig, folder: Path) -> dict[str, dict[str, float]] | None:
    """Every peer by itself, in RUN/alone/PEER; goes on with what is there. None if interrupted."""
    from motley.crew import read_metrics
    from motley.display import skills_at

    found: dict[str, dict[str, float]] = {}
    for peer in config.peer:
        own = folder / "alone" / peer.name
        crew = _start(config.alone(peer.name), own, may_resume=True)
        if not _run(crew):
            return None
        found |= skills_at(read_metrics(own), last=True)
    (folder / "alone.json").write_text(json.dumps({"command": " ".join(["motley", *sys.argv[1:]]), "skills": found}, indent=2) + "\n")
    return found


def _train(config: CrewConfig, folder: Path, alone: bool, recorded: dict[str, dict[str, float]], resume: bool = False) -> None:
    from motley.crew import LocalCrew

    crew = LocalCrew.resume(folder) if resume else _start(config, folder)
    done = _run(crew)
    found = _train_alone(crew.config, folder) if done and alone else recorded
    if not done or found is None:
        again = " --alone" if alone else ""
        console.print(
            f"stopped after round {crew.finished_rounds} and saved; go on with: motley train --resume {folder}{again}", soft_wrap=True
        )
        raise typer.Exit(130)
    _finish(crew, found)


@app.command()
def train(
    crew_file: Annotated[Path | None, typer.Argument(help="A crew file (TOML).")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run folder.")] = None,
    objective: Objective = "",
    rounds: Rounds = 0,
    seed: Seed = None,
    out: Out = None,
    alone: Alone = False,
) -> None:
    """Train a crew on this machine."""
    with _plain_errors():
        if (crew_file is None) == (resume is None):
            raise ValueError("give a crew file to start, or --resume RUN to go on; not both")
        if resume is not None:
            _train(read_config(resume / "config.toml"), resume, alone, {}, resume=True)
        elif crew_file is not None:
            config = _changed(read_config(crew_file), objective, rounds, seed)
            _train(config, out or _new_folder(config.crew.name), alone, {})


@app.command()
def demo(objective: Objective = "", rounds: Rounds = 0, seed: Seed = None, out: Out = None, alone: Alone = False) -> None:
    """Three different tiny models learn from each other: `motley train` on the crew file in the package."""
    with _plain_errors():
        with as_file(files("motley") / "crews" / "demo.toml") as path:
            config = read_config(path)
        recorded = json.loads((files("motley") / "crews" / "demo_alone.json").read_text())["skills"]
        changed = _changed(config, objective, rounds, seed)
        comparable = msgspec.structs.replace(config.crew, objective=changed.crew.objective, variant=changed.crew.variant) == changed.crew
        _train(changed, out or _new_folder("demo"), alone, recorded if comparable else {})


def _print(rows: list[dict[str, Any]], title: str, as_json: bool, extra: dict[str, Any] | None = None) -> None:
    """A table, or with --json one object."""
    if as_json:
        sys.stdout.write(json.dumps({"title": title, "rows": rows, **(extra or {})}) + "\n")
        return
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)


@app.command("eval")
def evaluate_command(
    target: Annotated[str, typer.Argument(help="A run folder, or a model such as tiny:1m.")],
    task: Annotated[str, typer.Option(help="A task; the run's own otherwise.")] = "",
    split: Annotated[Split, typer.Option(help="heldout, ood or train.")] = "heldout",
    problems: Annotated[int, typer.Option(min=2, help="Problems per kind.")] = 200,
    samples: Annotated[int, typer.Option(min=1, help="k of avg@k and pass@k.")] = 8,
    peer: Annotated[str, typer.Option(help="Only this peer of the run.")] = "",
    as_json: AsJson = False,
) -> None:
    """Greedy and sampled accuracy with standard errors, and the best constant answer beside them."""
    from motley.crew import trained_policies
    from motley.engines import TorchEngine
    from motley.evaluation import evaluate
    from motley.policies import initial_policy
    from motley.tasks import load_task

    with _plain_errors():
        if Path(target).is_dir():
            config = read_config(Path(target) / "config.toml")
            policies, sampling = trained_policies(Path(target)), config.sampling
            chosen_task = load_task(task, {}) if task else load_task(config.crew.task, config.task)
        else:
            policies, sampling = {target: initial_policy(PeerConfig(name="model", model=target), seed=0)}, Sampling()
            chosen_task = load_task(task or "digits", {})
        if peer and peer not in policies:
            raise ValueError(f"{target} has no peer {peer!r}; it has {', '.join(policies)}")
        if split not in chosen_task.splits:
            raise ValueError(f"split {split!r} is not in this task; it has {', '.join(chosen_task.splits)}")
        rows = [
            {"peer": name, **asdict(line)}
            for name, policy in policies.items()
            if peer in ("", name)
            for line in evaluate(TorchEngine(policy), policy.vocabulary, chosen_task, split, sampling, problems, samples)
        ]
        _print(rows, f"{target} on {split}", as_json)


@app.command()
def study(
    crew_file: CrewFile,
    arms: Annotated[str, typer.Option(help="Arms separated by spaces, such as 'alone ftis uplift/relative:scale=1'.")],
    seeds: Annotated[int, typer.Option(min=1, help="Seeds 0..N-1.")] = 5,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 2,
    out: Annotated[Path, typer.Option(help="Where outcomes are kept; a stopped study goes on there.")] = Path("runs/study"),
    as_json: AsJson = False,
) -> None:
    """Run a crew under several arms and seeds; mean, interval and paired difference from alone."""
    from motley.study.arms import parse_arm
    from motley.study.report import markdown, table
    from motley.study.run import run_study

    with _plain_errors():
        config = read_config(crew_file)
        chosen = [parse_arm(text) for text in arms.split()]
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("runs")
            outcomes = run_study(
                config, chosen, range(seeds), out, jobs, lambda done, total: progress.update(bar, completed=done, total=total)
            )
        lines = table(outcomes, [arm.label for arm in chosen])
        sys.stdout.write(json.dumps({"lines": [asdict(line) for line in lines]}) + "\n" if as_json else markdown(lines))


@app.command()
def check(crew_file: CrewFile, as_json: AsJson = False) -> None:
    """Check a crew file, its task and, per peer, the engine's log-probs against the trainer's."""
    from motley.conformance import check_crew

    with _plain_errors():
        rows = check_crew(read_config(crew_file))
        _print(rows, f"check of {crew_file}", as_json)
        if any(row["result"] != "ok" for row in rows):
            raise typer.Exit(1)


@bench_app.command("local")
def bench_local(
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each; the median counts.")] = 9, as_json: AsJson = False
) -> None:
    """Sampling and training tokens/s against transformers' generate and a plain padded step."""
    from motley.benchmark import local_benchmark

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task("measuring", total=None)
        rows = local_benchmark(repeats, lambda what, done, total: progress.update(bar, description=what, completed=done, total=total))
    _print(rows, "tokens per second, this machine", as_json)


if __name__ == "__main__":
    app()
