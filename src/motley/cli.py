"""The command line. Owns words and exit codes; every piece of work belongs to a module it calls."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

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

if TYPE_CHECKING:
    from motley.crew import LocalCrew
    from motley.display import Skills

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
    """What a user did wrong, or a disk, is one line and not a traceback."""
    try:
        yield
    except (ConfigError, ValueError, FloatingPointError, OSError) as error:
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
        console.print("stopping after this round; Ctrl-C again stops at once")

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


def _run(crew: LocalCrew) -> bool:
    """Train to the end, or to a Ctrl-C, with the live table; True if a stop was asked for. The crew is saved either way."""
    from motley.crew import read_metrics
    from motley.display import LiveTable

    table = LiveTable(crew.config, first_round=crew.finished_rounds)
    table.update(read_metrics(crew.folder))
    with _stop_on_interrupt() as stop_asked, Live(table, console=console, refresh_per_second=4, transient=not console.is_terminal):
        for lines in crew.rounds():
            table.update(lines)
            if not console.is_terminal and "heldout" in lines[0]:
                console.print(_plain_progress(lines, crew.config.crew.rounds, table.time_left()), highlight=False, soft_wrap=True)
            if stop_asked():
                crew.save()
                break
        return stop_asked()


def _plain_progress(lines: list[dict[str, Any]], rounds: int, left: str) -> str:
    """A line where there is no terminal to redraw."""
    from motley.display import mean

    peers = ", ".join(f"{line['peer']} {mean(line['heldout']):.0%}" for line in lines if "heldout" in line)
    return f"round {lines[0]['round']} of {rounds}: held-out accuracy {peers}; {left} left"


def _start(config: CrewConfig, folder: Path, may_resume: bool = False) -> LocalCrew:
    from motley.crew import LocalCrew

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[skill]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, Any] = {}

        def show(peer: str, steps: int, accuracy: dict[str, float]) -> None:
            wanted = next(p.warm.accuracy for p in config.peer if p.name == peer and p.warm)
            if peer not in tasks:
                tasks[peer] = progress.add_task(f"warm start of {peer}", total=1.0, skill="")
            reached = sum(min(1.0, accuracy[k] / wanted[k]) for k in wanted) / len(wanted)
            progress.update(tasks[peer], completed=reached, skill=" ".join(f"{k} {v:.0%}" for k, v in accuracy.items()))

        return (LocalCrew.start_or_resume if may_resume else LocalCrew.start)(config, folder, show)


def _finish(crew: LocalCrew, alone: Skills) -> None:
    from motley.crew import read_metrics
    from motley.display import draw_curves, skill_matrix, skills_at

    lines = read_metrics(crew.folder)
    console.print(skill_matrix(skills_at(lines, last=False), skills_at(lines, last=True), alone))
    png, page = draw_curves(lines, alone, crew.folder)
    console.print(f"curves: {png} and {page}", soft_wrap=True)
    console.print(f"run folder: {crew.folder}", soft_wrap=True)


def _train_alone(config: CrewConfig, folder: Path) -> bool:
    """Every peer by itself, in RUN/alone/PEER, going on with what is there; then RUN/alone.json. True if a stop was asked for."""
    from motley.crew import read_metrics
    from motley.display import skills_at

    found: Skills = {}
    for peer in config.peer:
        own = folder / "alone" / peer.name
        crew = _start(config.alone(peer.name), own, may_resume=True)
        stop_asked = _run(crew)
        if crew.finished_rounds < config.crew.rounds or (stop_asked and peer is not config.peer[-1]):
            return True
        found |= skills_at(read_metrics(own), last=True)
    _write_alone(folder, " ".join(["motley", *sys.argv[1:]]), found)
    return False


def _write_alone(folder: Path, command: str, skills: Skills) -> None:
    (folder / "alone.json").write_text(json.dumps({"command": command, "skills": skills}, indent=2) + "\n")


def _train(begin: Callable[[], LocalCrew], folder: Path, alone: bool, recorded: dict[str, Any] | None = None) -> None:
    """Run a crew to its end, or until it is stopped; then say how to go on."""
    try:
        crew = begin()
        if recorded:
            _write_alone(folder, recorded["command"], recorded["skills"])
        stop_asked = _run(crew)
        unfinished = crew.finished_rounds < crew.config.crew.rounds
        stopped = (stop_asked and (unfinished or alone)) or (alone and _train_alone(crew.config, folder))
    except KeyboardInterrupt:
        stopped = True
    if stopped:
        saved = any((folder / "checkpoints").glob("round-*"))
        again = f"motley train --resume {folder}{' --alone' if alone else ''}" if saved else "the same command; nothing was saved yet"
        console.print(f"stopped; go on with: {again}", soft_wrap=True)
        raise typer.Exit(130)
    path = folder / "alone.json"
    _finish(crew, json.loads(path.read_text())["skills"] if path.exists() else {})


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
            from motley.crew import LocalCrew

            if objective or rounds or seed is not None or out:
                raise ValueError("--resume goes on with the run's own settings; remove --objective, --rounds, --seed and --out")
            _train(lambda: LocalCrew.resume(resume), resume, alone)
        elif crew_file is not None:
            config = _changed(read_config(crew_file), objective, rounds, seed)
            folder = out or _new_folder(config.crew.name)
            _train(lambda: _start(config, folder), folder, alone)


@app.command()
def demo(objective: Objective = "", rounds: Rounds = 0, seed: Seed = None, out: Out = None, alone: Alone = False) -> None:
    """Three different tiny models learn from each other: `motley train` on the crew file in the package."""
    with _plain_errors():
        with as_file(files("motley") / "crews" / "demo.toml") as path:
            config = read_config(path)
        recorded = json.loads((files("motley") / "crews" / "demo_alone.json").read_text())
        changed = _changed(config, objective, rounds, seed)
        comparable = msgspec.structs.replace(config.crew, objective=changed.crew.objective, variant=changed.crew.variant) == changed.crew
        folder = out or _new_folder("demo")
        _train(lambda: _start(changed, folder), folder, alone, recorded if comparable and not alone else None)


def _print(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    """A table, or with --json one object."""
    if as_json:
        sys.stdout.write(json.dumps({"title": title, "rows": rows}) + "\n")
        return
    table = Table(title=title)
    for column in rows[0]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    console.print(table)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3f}" if value == 0 or 0.001 <= abs(value) < 1000 else f"{value:.1e}"
    return str(value)


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
    from motley.policies import initial_policy, saved_policy
    from motley.tasks import load_task

    with _plain_errors():
        folder, name, parameters, sampling = Path(target), task or "digits", {}, Sampling()
        if (folder / "config.toml").exists():
            config = read_config(folder / "config.toml")
            policies, sampling, name = trained_policies(folder), config.sampling, task or config.crew.task
            parameters = config.task if name == config.crew.task else {}
        elif folder.is_dir():
            policies = {folder.name: saved_policy(folder)}
        elif target.startswith("tiny:"):
            policies = {target: initial_policy(PeerConfig(name="model", model=target), seed=0)}
        else:
            raise ValueError(f"there is no run or model folder {target}; give one that exists, or a model such as tiny:1m")
        chosen_task = load_task(name, parameters)
        if peer and peer not in policies:
            raise ValueError(f"{target} has no peer {peer!r}; it has {', '.join(policies)}")
        if split not in chosen_task.splits:
            raise ValueError(f"split {split!r} is not in this task; it has {', '.join(chosen_task.splits)}")
        rows = [
            {"peer": name, **line.row()}
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
    out: Annotated[Path | None, typer.Option(help="Where outcomes are kept; a stopped study goes on there.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a crew under several arms and seeds; mean, interval and paired difference from alone."""
    from motley.study.arms import parse_arms
    from motley.study.report import glance, glance_markdown, markdown, table
    from motley.study.run import run_study

    with _plain_errors():
        config = read_config(crew_file)
        chosen = parse_arms(arms)
        folder = out or Path("runs") / f"study-{config.crew.name}"
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("runs")
            outcomes = run_study(
                config, chosen, range(seeds), folder, jobs, lambda done, total: progress.update(bar, completed=done, total=total)
            )
        labels = [arm.label for arm in chosen]
        lines, short = table(outcomes, labels), glance(outcomes, labels)
        if as_json:
            sys.stdout.write(msgspec.json.encode({"glance": short, "lines": lines}).decode() + "\n")
        else:
            sys.stdout.write(f"{glance_markdown(short)}\n{markdown(lines)}")


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
