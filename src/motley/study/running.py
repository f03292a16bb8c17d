"""Run every arm of every crew with every seed, several at a time, each in a process of its own.

What is done is not done again.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from motley.config import CrewConfig, read_config, write_config
from motley.runs.checking import check_config
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.study.arms import Arm, crews_of
from motley.study.outcomes import Outcome, outcome_of, read_outcomes
from motley.study.processes import Job, Lost, make_all

Progress = Callable[[int, int], None]  # (done, of how many)
LONGEST_NAME = 80  # letters of a run's folder


class Kept(Protocol):
    """What is kept of a run, for one peer."""

    @property
    def arm(self) -> str: ...
    @property
    def made(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Studied:
    """A crew of a study, and the folder that keeps its outcomes."""

    config: CrewConfig
    folder: Path

    @property
    def name(self) -> str:
        return self.config.crew.name

    @property
    def path(self) -> Path:
        return self.folder / "outcomes.jsonl"


@dataclass(frozen=True, slots=True)
class Ended:
    """What a study has: outcomes by crew, and the runs that gave none."""

    outcomes: dict[str, list[Outcome]]
    lost: list[Lost]


def run_study(
    crews: Sequence[Studied],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    jobs: int,
    progress: Progress,
) -> Ended:
    """Crews x arms x seeds in one pool of processes; `progress(done, total)` after every run.

    Results are kept in the crew's FOLDER/outcomes.jsonl.
    """
    check_names([crew.name for crew in crews], "study")
    for crew in crews:
        for arm in arms:
            for config in crews_of(crew.config, arm, 0):
                check_config(config)
        claim(crew.folder, crew.config)
    outcomes = {crew.name: read_outcomes(crew.path) for crew in crews}
    for crew in crews:
        check_kept(crew.path, outcomes[crew.name], arms)
    done = {(name, o.arm, o.seed) for name, some in outcomes.items() for o in some}
    todo = [
        (crew, arm, seed)
        for seed in seeds
        for crew in crews
        for arm in arms
        if (crew.name, arm.label, seed) not in done
    ]
    total = len(crews) * len(arms) * len(seeds)
    progress(total - len(todo), total)

    def kept(made: tuple[Studied, list[Outcome]]) -> None:
        crew, found = made
        keep(crew.path, found)
        _drop_weights(crew, found[0])
        outcomes[crew.name] += found
        done.add((crew.name, found[0].arm, found[0].seed))
        progress(len(done & wanted), total)

    wanted = {(crew.name, arm.label, seed) for crew in crews for arm in arms for seed in seeds}
    first = warm_starts([(crew.config, seed) for crew, _, seed in todo])
    runs = [
        Job(
            f"crew {crew.name}, arm {arm.label}, seed {seed}",
            partial(_run, crew, arm, seed),
            names_of_warm_starts(crew.config, seed),
        )
        for crew, arm, seed in todo
    ]
    lost = make_all(jobs, first, runs, kept)
    return Ended(
        {
            name: [o for o in some if (name, o.arm, o.seed) in wanted]
            for name, some in outcomes.items()
        },
        lost,
    )


def check_names(names: Sequence[str], what: str) -> None:
    if len(set(names)) < len(names):
        raise ValueError(f"the crews of a {what} must have different names; got {', '.join(names)}")


def check_kept(path: Path, kept: Sequence[Kept], arms: Sequence[Arm]) -> None:
    """Refuse a folder where the name of an arm stood for something else."""
    texts = {arm.label: arm.text for arm in arms}
    for one in kept:
        before, now = one.made or one.arm, texts.get(one.arm)
        if now is not None and now != before:
            raise ValueError(
                f"arm {one.arm}={now}: {path} holds runs of {one.arm}={before}; choose another "
                "name, or another folder with --out"
            )


def keep(path: Path, results: Sequence[msgspec.Struct]) -> None:
    """Add results to a file of JSON lines."""
    with path.open("ab") as file:
        file.write(b"".join(msgspec.json.encode(one) + b"\n" for one in results))


def claim(folder: Path, config: CrewConfig) -> None:
    """A study's folder belongs to one crew file: another's outcomes must not be taken for it."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "crew.toml"
    if made.exists() and read_config(made) != config:
        raise ValueError(
            f"{folder} holds a study of another crew file; choose another folder with --out, or "
            "delete it"
        )
    write_config(config, made)


# Warm starts are shared by all arms of a seed: made once, before the runs that would each make them


def warm_starts(needed: Sequence[tuple[CrewConfig, int]]) -> list[Job[None]]:
    """Those of every crew and seed, each once."""
    found = {
        _warm_name(config, seed, peer.name): Job(
            _warm_name(config, seed, peer.name), partial(warm, config, seed, peer.name)
        )
        for config, seed in needed
        for peer in config.students
    }
    return list(found.values())


def names_of_warm_starts(config: CrewConfig, seed: int) -> tuple[str, ...]:
    return tuple(_warm_name(config, seed, peer.name) for peer in config.students)


def _warm_name(config: CrewConfig, seed: int, peer: str) -> str:
    return f"crew {config.crew.name}, warm start of {peer}, seed {seed}"


def warm(config: CrewConfig, seed: int, peer: str) -> None:
    """Make a peer's warm start, which is then cached."""
    torch.set_num_threads(1)
    crew = msgspec.structs.replace(config.crew, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        LocalCrew.start(
            msgspec.structs.replace(config, crew=crew).alone(peer), Path(folder) / "warm"
        )


def _run(crew: Studied, arm: Arm, seed: int) -> tuple[Studied, list[Outcome]]:
    """The crew, and the outcomes of its peers."""
    torch.set_num_threads(1)
    outcomes = []
    for config in crews_of(crew.config, arm, seed):
        run = crew.folder / "runs" / folder_name(arm.label, seed) / config.crew.name
        local = LocalCrew.start_or_resume(config, run)
        for _ in local.rounds():
            pass
        lines = read_metrics(run)
        outcomes += [
            outcome_of(config, arm.label, peer.name, lines, arm.made) for peer in config.students
        ]
    return crew, outcomes


def _drop_weights(crew: Studied, kept: Outcome) -> None:
    """The numbers are what a study is for, and models are large. Not before they are kept: until
    then a run that is stopped goes on from its weights.
    """
    folder = crew.folder / "runs" / folder_name(kept.arm, kept.seed)
    for weights in ("start", "checkpoints"):
        for path in folder.glob(f"*/{weights}"):
            shutil.rmtree(path)


def folder_name(label: str, seed: int) -> str:
    """A run's folder: an arm's label in letters that every disk takes.

    >>> folder_name("uplift/relative:scale=1", 0)
    'uplift-relative-scale=1-0'
    """
    name = re.sub(r"[^\w.,+=-]", "-", label)
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return f"{name}-{seed}"
