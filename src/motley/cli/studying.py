"""motley study: crews under several arms, and what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from motley.cli.common import AsJson, Settings, app, command_line, plain_errors, print_rows, tell
from motley.cli.progress import counted_runs
from motley.config import CrewConfig, read_config, with_changes

if TYPE_CHECKING:
    from motley.study.arms import Arm
    from motley.study.plans import Claim, EstimatorPlan, Study
    from motley.study.running import Ended
    from motley.study.statistics import Comparison
    from motley.tasks import Measure

MOST_NAMES = 3  # of crews in the name of a folder
SEEDS = 5  # where neither a plan nor the command line says how many
STUDIES = Path("runs") / "studies"  # where those of plans are, which share their runs

Jobs = Annotated[
    int, typer.Option(min=1, help="Runs at a time, one core each; on a GPU, if they fit.")
]
Unsaved = Annotated[
    bool,
    typer.Option(
        "--unsaved",
        help="Runs write no checkpoints: for large models on a small disk. One that is stopped "
        "begins again.",
    ),
]


@dataclass(frozen=True, slots=True)
class _StudyAsked:
    """A study as a command line has it, and where it is to be."""

    crews: list[CrewConfig]
    arms: list[tuple[Arm, Sequence[int]]]
    out: Path  # of all runs
    folder: Path  # of the report
    by_name: bool  # each crew has a folder in it
    saved: bool  # runs write checkpoints
    claims: Sequence[Claim] = ()
    measured: EstimatorPlan | None = None  # gradients


@app.command()
def study(
    what: Annotated[
        list[str] | None,
        typer.Argument(
            help="The name of a study (--list has them), a plan (TOML), the folder of a study; or "
            "crew files, or folders of them."
        ),
    ] = None,
    arms: Annotated[
        str,
        typer.Option(
            help="Arms separated by spaces, such as 'alone best=uplift/relative:crew.rounds=40'. A "
            "plan has its own."
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="The plan's tiny crews: minutes on two cores.")
    ] = False,
    list_them: Annotated[
        bool, typer.Option("--list", help="The studies that come with Motley.")
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; the plan's, or 5.")
    ] = None,
    first_seed: Annotated[
        int | None,
        typer.Option(min=0, help="The first of them, where others were looked at before."),
    ] = None,
    jobs: Jobs = 2,
    out: Annotated[
        Path | None, typer.Option(help="Where runs are kept; a stopped study goes on there.")
    ] = None,
    drawn: Annotated[int, typer.Option(min=0, help="Also so many crews drawn by a seed.")] = 0,
    draw_seed: Annotated[int, typer.Option(help="The seed they are drawn by.")] = 0,
    unsaved: Unsaved = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Run crews under several arms and seeds: tables, report.html and CSV files with means,
    intervals, paired differences from alone and alone/own, and what became of a plan's claims.
    """
    with plain_errors():
        if list_them:
            _list(as_json)
            return
        told = settings or ()
        if plan := _plan_of(what or [], drawn):
            from motley.study.plans import study_of

            asked = _of_plan(study_of(plan, quick, arms, seeds, first_seed, told, unsaved), out)
        elif quick:
            raise ValueError("--quick is for plans, which have tiny crews; motley study --list")
        else:
            numbers = range(first_seed or 0, (first_seed or 0) + (seeds or SEEDS))
            configs = _read([Path(one) for one in what or []], told)
            configs += _drawn(drawn, draw_seed, told) if drawn else []
            folder = out or Path("runs") / _folder_name(configs, drawn, draw_seed)
            by_name = len(configs) > 1 or bool(drawn)
            asked = _of_crews(configs, arms, numbers, folder, by_name, not unsaved)
        _make(asked, jobs, as_json)


def _list(as_json: bool) -> None:
    from motley.study.plans import read_plan, shipped_plans

    plans = [read_plan(path) for path in shipped_plans().values()]
    rows = [
        {"study": plan.name, "question": plan.question, "quick": plan.quick_time} for plan in plans
    ]
    print_rows(rows, "motley study NAME, or with --quick", as_json)


def _plan_of(what: Sequence[str], drawn: int) -> Path | None:
    """The file of a plan, if that is what was named."""
    from motley.study.plans import plan_file

    plans = [path for one in what if (path := plan_file(one))]
    if plans and (len(what) > 1 or drawn):
        raise ValueError(
            f"{plans[0]} is a plan, which names its crews itself; give it alone, or crew files only"
        )
    return plans[0] if plans else None


def _of_plan(study: Study, out: Path | None) -> _StudyAsked:
    base = out or (study.place.parent if study.place else STUDIES)
    folder = study.place if study.place and not out else base / study.name
    study.write(folder)
    return _StudyAsked(
        study.crews, study.arms, base, folder, True, study.plan.saved, study.claims, study.measured
    )


def _of_crews(
    configs: list[CrewConfig], arms: str, seeds: range, folder: Path, by_name: bool, saved: bool
) -> _StudyAsked:
    from motley.study.arms import parse_arms

    if not arms:
        raise ValueError("crew files need --arms, such as --arms 'alone/own alone ftis auto'")
    chosen = parse_arms(arms)
    if not configs:
        raise ValueError(
            "there is no crew to study; give the name of a study (motley study --list), crew "
            "files, or --drawn 6"
        )
    return _StudyAsked(configs, [(arm, seeds) for arm in chosen], folder, folder, by_name, saved)


def _make(asked: _StudyAsked, jobs: int, as_json: bool) -> None:
    from motley.study.processes import LostRunsError
    from motley.study.running import run_study, studied

    measure = _measure(asked.crews)
    crews = studied(asked.crews, asked.out, asked.folder, asked.by_name)
    with counted_runs() as count:
        ended = run_study(crews, asked.arms, jobs, count, asked.measured, asked.saved)
    if any(ended.outcomes.values()):
        _report(ended, asked, measure, as_json)
    elif as_json:
        _print_nothing_found(ended, asked, measure)
    if ended.lost:
        raise LostRunsError(ended.lost, ended.total)


def _read(paths: Sequence[Path], settings: Sequence[str]) -> list[CrewConfig]:
    """The crews of files, and of all files in folders."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inner = [*sorted(path.glob("*.toml")), *sorted(path.glob("*/crew.toml"))]
            if not inner:
                raise ValueError(
                    f"{path} has no crew files; give a folder of *.toml, or of another study"
                )
            files += inner
        else:
            files.append(path)
    return [read_config(path, settings) for path in files]


def _drawn(number: int, seed: int, settings: Sequence[str]) -> list[CrewConfig]:
    from motley.study.drawing import drawn_crews

    return [with_changes(config, settings) for config in drawn_crews(number, seed)]


def _measure(configs: Sequence[CrewConfig]) -> Measure:
    """What all crews are measured in."""
    from motley.tasks import load_task

    found = {c.crew.name: load_task(c.crew.task, c.task).measure for c in configs}
    if len(set(found.values())) > 1:
        each = ", ".join(f"{name} in {measure}" for name, measure in found.items())
        raise ValueError(
            f"crews that are measured differently cannot be compared: {each}; study them apart"
        )
    return next(iter(found.values()))


def _folder_name(configs: Sequence[CrewConfig], drawn: int, draw_seed: int) -> str:
    names = [config.crew.name for config in configs[: len(configs) - drawn]]
    if len(names) > MOST_NAMES:
        names = [names[0], "and", str(len(names) - 1), "others"]
    if drawn:
        names += ["drawn", str(drawn), "by", str(draw_seed)]
    return "-".join(["study", *names])


def _report(ended: Ended, asked: _StudyAsked, measure: Measure, as_json: bool) -> None:
    """Write what was found into the folder, and say it."""
    from motley.study.estimators import estimators_of
    from motley.study.findings import findings, plain
    from motley.study.looks import looks_of
    from motley.study.pages import Making
    from motley.study.statistics import few_seeds_warning
    from motley.study.writing import TABLE, files_of

    arms, folder = [arm for arm, _ in asked.arms], asked.folder
    labels = [arm.label for arm in arms]
    found = findings(ended.outcomes, labels, measure, asked.claims)
    names = {arm.label: arm.text for arm in arms if arm.made}
    made = Making(command_line(), asked.crews, labels, measure, names)
    files = files_of(found, made, [*looks_of(ended.runs), *estimators_of(ended.runs)])
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if as_json:
        _print_json(plain(found), ended)
        return
    sys.stdout.write(files[TABLE])
    if few := few_seeds_warning(found.num_seeds):
        tell(f"warning: {few}")
    tell(f"report: {', '.join(str(folder / name) for name in files)}")


def _print_nothing_found(ended: Ended, asked: _StudyAsked, measure: Measure) -> None:
    """For a program that reads what is printed: every run was lost, and nothing is written."""
    from motley.study.findings import findings, plain

    labels = [arm.label for arm, _ in asked.arms]
    _print_json(plain(findings(ended.outcomes, labels, measure, asked.claims)), ended)


def _print_json(found: dict[str, object], ended: Ended) -> None:
    sys.stdout.write(msgspec.json.encode(found | {"lost": ended.lost}).decode() + "\n")


def say_found(compared: Sequence[Comparison], num_seeds: int) -> None:
    """A sentence per comparison, and a warning where seeds are few."""
    from motley.study.statistics import few_seeds_warning, sentences

    for text in sentences(compared):
        tell(text)
    if few := few_seeds_warning(num_seeds):
        tell(f"warning: {few}")
