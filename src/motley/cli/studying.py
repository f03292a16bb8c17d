"""motley study: crews under several arms, and what was found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from motley.cli.common import AsJson, Settings, app, command_line, plain_errors, tell
from motley.cli.progress import counted_runs
from motley.config import CrewConfig, read_config, with_changes

if TYPE_CHECKING:
    from motley.study.arms import Arm
    from motley.study.running import Ended
    from motley.study.statistics import Comparison
    from motley.tasks import Measure

MOST_NAMES = 3  # of crews in the name of a folder


@app.command()
def study(
    arms: Annotated[
        str,
        typer.Option(
            help="Arms separated by spaces, such as 'alone best=uplift/relative:crew.rounds=40'."
        ),
    ],
    crew_files: Annotated[
        list[Path] | None, typer.Argument(help="Crew files, or folders of them.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
    first_seed: Annotated[
        int, typer.Option(min=0, help="The first of them, where others were looked at before.")
    ] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, one core each.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Where outcomes are kept; a stopped study goes on there.")
    ] = None,
    drawn: Annotated[int, typer.Option(min=0, help="Also so many crews drawn by a seed.")] = 0,
    draw_seed: Annotated[int, typer.Option(help="The seed they are drawn by.")] = 0,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Run crews under several arms and seeds: tables, report.html and CSV files with means,
    intervals and paired differences from alone and alone/own.
    """
    from motley.study.arms import parse_arms
    from motley.study.processes import LostRunsError
    from motley.study.running import Studied, run_study

    with plain_errors():
        chosen = parse_arms(arms)
        configs = _read(crew_files or [], settings or ())
        if drawn:
            configs += _drawn(drawn, draw_seed, settings or ())
        if not configs:
            raise ValueError("there is no crew to study; give crew files, or --drawn 6")
        measure = _measure(configs)
        folder = out or Path("runs") / _folder_name(configs, drawn, draw_seed)
        by_name = len(configs) > 1 or bool(drawn)
        crews = [Studied(c, folder / c.crew.name if by_name else folder) for c in configs]
        with counted_runs() as count:
            numbers = range(first_seed, first_seed + seeds)
            ended = run_study(crews, chosen, numbers, jobs, count)
        if any(ended.outcomes.values()):
            _report(ended, configs, chosen, measure, folder, as_json)
        if ended.lost:
            raise LostRunsError(ended.lost, len(crews) * len(chosen) * seeds)


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


def _report(
    ended: Ended,
    configs: Sequence[CrewConfig],
    arms: Sequence[Arm],
    measure: Measure,
    folder: Path,
    as_json: bool,
) -> None:
    """Write what was found into the folder, and say it."""
    from motley.study.findings import findings, plain
    from motley.study.pages import Making
    from motley.study.statistics import few_seeds_warning
    from motley.study.writing import TABLE, files_of

    labels = [arm.label for arm in arms]
    found = findings(ended.outcomes, labels, measure)
    names = {arm.label: arm.text for arm in arms if arm.made}
    made = Making(command_line(), configs, labels, measure, names)
    files = files_of(found, made)
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    if as_json:
        sys.stdout.write(msgspec.json.encode(plain(found) | {"lost": ended.lost}).decode() + "\n")
        return
    sys.stdout.write(files[TABLE])
    if few := few_seeds_warning(found.num_seeds):
        tell(f"warning: {few}")
    tell(f"report: {', '.join(str(folder / name) for name in files)}")


def say_found(compared: Sequence[Comparison], num_seeds: int) -> None:
    """A sentence per comparison, and a warning where seeds are few."""
    from motley.study.statistics import few_seeds_warning, sentences

    for text in sentences(compared):
        tell(text)
    if few := few_seeds_warning(num_seeds):
        tell(f"warning: {few}")
