"""Run every arm of every crew with every seed, several at a time, each in a process of its own.

What is done is not done again: a run belongs to what its crew file says (study/keys.py), and not to
the study that asked for it first.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec
import torch

from motley.clock import Clock, RealClock
from motley.config import CrewConfig, read_config, write_beside, write_config
from motley.files import append, drop_unfinished_line, replace
from motley.learning.checkpoint import checkpoints
from motley.links import Network
from motley.runs.checking import check_config
from motley.runs.local import LocalCrew
from motley.runs.metrics import encoded, read_metrics
from motley.sim.simulation import SimCrew
from motley.study.arms import Arm, crews_of, parse_arm
from motley.study.gpu_memory import PEAKS, alike_run, alike_warm, measure, uses_gpu
from motley.study.holding import end_with_the_study, held_alone
from motley.study.keys import key_of, run_name, with_copies
from motley.study.outcomes import (
    Outcome,
    StudyRun,
    lines_lacking,
    outcome_of,
    read_outcomes,
    read_whole_outcomes,
)
from motley.study.plans import EstimatorPlan
from motley.study.processes import Job, Lost, Tell, make_all
from motley.study.shared_gpu import shared_gpu
from motley.tasks import Split, Task, evaluation_set, load_task

Progress = Callable[[float, int], None]  # (done, of how many)
SAVES = 4  # checkpoints of a run at the least, to go on from if it is stopped
OUTCOMES = "outcomes.jsonl"


class Kept(Protocol):
    """What is kept of a run, for one peer."""

    @property
    def arm(self) -> str: ...
    @property
    def made(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Studied:
    """A crew of a study, the folder of its outcomes, and the one of all runs."""

    config: CrewConfig
    folder: Path
    runs: Path

    @property
    def name(self) -> str:
        return self.config.crew.name

    @property
    def path(self) -> Path:
        return self.folder / OUTCOMES


@dataclass(frozen=True, slots=True)
class KeyedRun:
    """A run that a study needs, under its key. Several arms may come to the same one."""

    key: str
    config: CrewConfig
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / OUTCOMES

    @property
    def is_done(self) -> bool:
        """Whether what every student came to was kept, and can be read."""
        try:
            kept = read_outcomes(self.path)
        except ValueError:
            return False  # torn by a crash of the machine: it is made again
        students = {peer.name for peer in self.config.students}
        return {one.peer for one in kept if one.key == self.key} == students

    def outcomes(self, arm: Arm) -> list[Outcome]:
        """As those of an arm, which may have been called otherwise when they were made."""
        return [
            msgspec.structs.replace(one, arm=arm.label, made=arm.made)
            for one in read_outcomes(self.path)
        ]


class Wanted(NamedTuple):
    """An arm of a crew with a seed: one run, or one for each peer if they are alone."""

    crew: Studied
    arm: Arm
    seed: int
    runs: list[KeyedRun]

    @staticmethod
    def of(crew: Studied, arm: Arm, seed: int) -> Wanted:
        keyed = [(key_of(config), config) for config in crews_of(crew.config, arm, seed)]
        runs = [KeyedRun(key, config, crew.runs / run_name(config, key)) for key, config in keyed]
        return Wanted(crew, arm, seed, runs)


@dataclass(frozen=True, slots=True)
class Ended:
    """What a study has: outcomes by crew, the runs that gave none, and where the others are."""

    outcomes: dict[str, list[Outcome]]
    lost: list[Lost]
    total: int  # runs that were wanted
    runs: list[StudyRun] = field(default_factory=list)


def run_study(
    crews: Sequence[Studied],
    arms: Sequence[tuple[Arm, Sequence[int]]],
    jobs: int,
    progress: Progress,
    measured: EstimatorPlan | None = None,
    saved: bool = True,
) -> Ended:
    """Crews x arms, each with its seeds, in one pool of processes; `progress(done, total)` as they
    go on. `measured`: gradients of which arm are. `saved`: runs have checkpoints.

    What a crew came to is in its FOLDER/outcomes.jsonl, and each run in its own.
    """
    check_names([crew.name for crew in crews], "study")
    if measured and not saved:
        raise ValueError(
            f"gradients of {measured.arm} are measured at checkpoints, and runs that are not saved "
            "have none; leave out --unsaved and saved = false, or [estimators] of the plan"
        )
    for crew in crews:
        for arm, _ in arms:
            for config in crews_of(crew.config, arm, 0):
                check_config(config)
        _check_measured_alike(crew.config, [arm for arm, _ in arms])
    before = {crew.name: _kept_by_label(crew, [arm for arm, _ in arms]) for crew in crews}
    for crew in crews:
        _write_crew(crew)
    wanted = [
        Wanted.of(crew, arm, seed)
        # seed by seed, so that a study that is stopped has something of all
        for seed in sorted({seed for _, seeds in arms for seed in seeds})
        for crew in crews
        for arm, seeds in arms
        if seed in seeds and not _has(before[crew.name], arm, seed)
    ]
    lost, total = _make(wanted, jobs, progress, measured, saved)
    asked = {(arm.label, seed) for arm, seeds in arms for seed in seeds}
    outcomes = {}
    for crew in crews:
        all_outcomes = before[crew.name] + _found(wanted, crew)
        replace(crew.path, encoded(_not_among(all_outcomes, crew) + all_outcomes))
        outcomes[crew.name] = [one for one in all_outcomes if (one.arm, one.seed) in asked]
    return Ended(outcomes, lost, total, _made(wanted))


def _has(kept: Sequence[Outcome], arm: Arm, seed: int) -> bool:
    return any((one.arm, one.seed) == (arm.label, seed) for one in kept)


def _found(wanted: Sequence[Wanted], crew: Studied) -> list[Outcome]:
    """Of all arms and seeds whose runs are done."""
    return [
        outcome
        for one in wanted
        if one.crew is crew and all(run.is_done for run in one.runs)
        for run in one.runs
        for outcome in run.outcomes(one.arm)
    ]


def _not_among(found: Sequence[Outcome], crew: Studied) -> list[Outcome]:
    """What the crew's file has of other arms and seeds: a part that is looked at now leaves them
    there. Those of another crew file are left out.
    """
    there = {(one.arm, one.seed) for one in found}
    others: dict[tuple[str, str, int], list[Outcome]] = {}
    for one in read_whole_outcomes(crew.path):
        if (one.arm, one.seed) not in there:
            others.setdefault((one.arm, one.made, one.seed), []).append(one)
    kept = []
    for (label, made, seed), outcomes in others.items():
        with suppress(ValueError):  # an arm that this crew cannot have
            arm = parse_arm(f"{label}={made}" if made else label)
            keys = {run.key for run in Wanted.of(crew, arm, seed).runs}
            kept += [one for one in outcomes if one.key in keys]
    return kept


def _made(wanted: Sequence[Wanted]) -> list[StudyRun]:
    return [
        StudyRun(one.crew.name, one.arm.label, one.seed, run.folder)
        for one in wanted
        for run in one.runs
        if run.is_done
    ]


def _make(
    wanted: Sequence[Wanted],
    jobs: int,
    progress: Progress,
    measured: EstimatorPlan | None,
    saved: bool,
) -> tuple[list[Lost], int]:
    """Make the runs that are not there; which were lost, of how many."""
    all_runs: dict[str, tuple[Wanted, KeyedRun]] = {}
    for one in wanted:
        for run in one.runs:
            all_runs.setdefault(run.key, (one, run))
    todo = {key: (one, run) for key, (one, run) in all_runs.items() if not run.is_done}
    total, done = len(all_runs), len(all_runs) - len(todo)
    names = {
        key: f"crew {run.config.crew.name}, arm {one.arm.label}, seed {one.seed}"
        for key, (one, run) in todo.items()
    }
    going_on: dict[str, float] = {}  # by name, how far
    progress(done, total)

    def heard(name: str, share: float) -> None:
        going_on[name] = share
        progress(done + sum(going_on.values()), total)

    def kept(key: str) -> None:
        nonlocal done
        done += 1
        going_on.pop(names[key], None)
        _drop_weights(todo[key][1].folder)
        progress(done + sum(going_on.values()), total)

    first = warm_starts([(one.crew.config, one.seed) for one, _ in todo.values()])
    work = [
        Job(
            names[key],
            partial(_run, run, one.arm, _measured(measured, wanted, one), saved),
            names_of_warm_starts(one.crew.config, one.seed),
            tells=True,
            alike=alike_run(run.config, _measured(measured, wanted, one) is not None),
        )
        for key, (one, run) in todo.items()
    ]
    on_gpu = any(uses_gpu(run.config) for _, run in todo.values())
    gpu = shared_gpu(wanted[0].crew.runs / PEAKS, measure) if on_gpu else None
    return make_all(jobs, first, work, kept, heard, gpu), total


def _measured(
    asked: EstimatorPlan | None, wanted: Sequence[Wanted], one: Wanted
) -> EstimatorPlan | None:
    """What is to be measured of the runs of an arm with a seed; None: nothing."""
    if asked is None or one.arm.label != asked.arm:
        return None
    seeds = sorted({other.seed for other in wanted})
    return asked if one.seed in seeds[: asked.seeds] else None


def _check_measured_alike(config: CrewConfig, arms: Sequence[Arm]) -> None:
    """Refuse arms whose means would be over different kinds, or over different problems of them."""
    measured = {arm.label: _Measured.of(crews_of(config, arm, 0)[0]) for arm in arms}
    first, *others = measured
    for label in others:
        its, expected = measured[label], measured[first]
        if its == expected:
            continue
        if its.words != expected.words:
            what = f"is measured in {its.words}, and arm {first} in {expected.words}"
        elif its.problems != expected.problems:
            alike = len(set(its.problems) & set(expected.problems))
            what = (
                f"is measured on {len(its.problems)} problems, and arm {first} on "
                f"{len(expected.problems)}, of which {alike} are the same"
            )
        else:
            continue
        raise ValueError(
            f"crew {config.crew.name}: arm {label} {what}, so that their means cannot be "
            "compared; leave out what the arm sets of the task or of evaluate, or study a crew "
            "file of its own"
        )


@dataclass(frozen=True)
class _Measured:
    """What the scores of a crew are of."""

    spec: str
    parameters: dict[str, Any]
    per_kind: int

    @classmethod
    def of(cls, config: CrewConfig) -> _Measured:
        return cls(config.crew.task, config.task, config.evaluate.problems)

    @cached_property
    def _task(self) -> Task:
        return load_task(self.spec, self.parameters)

    @cached_property
    def words(self) -> str:
        task = self._task
        splits = [f"{s} {', '.join(sorted(task.kinds_of(s)))}" for s in self._splits]
        return f"{task.measure} on {'; '.join(splits)}"

    @cached_property
    def problems(self) -> list[tuple[Split, str]]:
        """Their splits and ids, in order."""
        return [
            (split, problem.id)
            for split in self._splits
            for problem in evaluation_set(self._task, split, self.per_kind)
        ]

    @property
    def _splits(self) -> list[Split]:
        return [split for split in self._task.splits if split != "train"]


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
    """Add results to a file of JSON lines, behind its last whole one."""
    drop_unfinished_line(path)
    append(path, encoded(results), synced=True)


def keep_only(path: Path, results: Sequence[msgspec.Struct]) -> None:
    """Have a file of JSON lines hold these and no others."""
    replace(path, encoded(results))


def _kept_by_label(crew: Studied, arms: Sequence[Arm]) -> list[Outcome]:
    """Outcomes of version 0.5, which kept them by the names of arms, and one crew in a folder."""
    kept = [one for one in read_whole_outcomes(crew.path) if not one.key]
    if kept:
        _check_same(crew.folder, crew.config)
        check_kept(crew.path, kept, arms)
    return kept


def claim(folder: Path, config: CrewConfig) -> None:
    """A folder that keeps results by names belongs to one crew file: another's must not be taken
    for it.
    """
    _check_same(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    write_config(config, folder / "crew.toml")


def _check_same(folder: Path, config: CrewConfig) -> None:
    made = folder / "crew.toml"
    if made.exists() and key_of(read_config(made)) != key_of(config):
        raise ValueError(
            f"{folder} holds a study of another crew file; choose another folder with --out, or "
            "delete it"
        )


def _write_crew(crew: Studied) -> None:
    crew.folder.mkdir(parents=True, exist_ok=True)
    write_beside(crew.config, crew.folder / "crew.toml")


# Warm starts are shared by all arms of a seed: made once, before the runs that would each make them


def warm_starts(needed: Sequence[tuple[CrewConfig, int]]) -> list[Job[None]]:
    """Those of every crew and seed, each once."""
    found = {
        _warm_name(config, seed, peer.name): Job(
            _warm_name(config, seed, peer.name),
            partial(warm, config, seed, peer.name),
            tells=True,
            alike=alike_warm(peer),
        )
        for config, seed in needed
        for peer in config.students
        if peer.warm
    }
    return list(found.values())


def names_of_warm_starts(config: CrewConfig, seed: int) -> tuple[str, ...]:
    return tuple(_warm_name(config, seed, peer.name) for peer in config.students if peer.warm)


def _warm_name(config: CrewConfig, seed: int, peer: str) -> str:
    return f"crew {config.crew.name}, warm start of {peer}, seed {seed}"


def warm(config: CrewConfig, seed: int, peer: str, tell: Tell = lambda share: None) -> None:
    """Make a peer's warm start, which is then cached. It tells that it goes on, and not how far."""
    end_with_the_study()
    torch.set_num_threads(1)
    crew = msgspec.structs.replace(config.crew, seed=seed)
    alone = msgspec.structs.replace(config, crew=crew).alone(peer)
    with tempfile.TemporaryDirectory() as folder:
        LocalCrew(alone, Path(folder) / "warm", lambda *_: tell(0.0))
    _give_back()


def _run(
    run: KeyedRun,
    arm: Arm,
    measured: EstimatorPlan | None,
    saved: bool,
    tell: Tell,
    clock: Clock = RealClock(),
) -> str:
    """The key of a run that was made, here or by another study meanwhile. It goes on from its
    newest checkpoint, if it has one.
    """
    end_with_the_study()
    torch.set_num_threads(1)
    with held_alone(run.folder, clock):
        if not run.is_done:
            if is_simulated(run.config):
                _simulate(run, tell)
            else:
                _train(run, measured, saved, tell)
            _keep_outcomes(run, arm)
    _give_back()
    return run.key


def _keep_outcomes(run: KeyedRun, arm: Arm) -> None:
    lines = read_metrics(run.folder)
    if not is_simulated(run.config) and (lacking := lines_lacking(run.config, lines)):
        raise ValueError(
            f"{run.folder}: metrics.jsonl lacks {lacking}, so what the run came to cannot be told; "
            "delete this folder, and give the command again: it makes the run anew"
        )
    outcomes = [
        msgspec.structs.replace(
            outcome_of(run.config, arm.label, peer.name, lines, arm.made), key=run.key
        )
        for peer in run.config.students
    ]
    replace(run.path, encoded(outcomes))


def is_simulated(config: CrewConfig) -> bool:
    """Samplers, learners and networks take their time beside each other: that is made up."""
    return config.has_roles or config.network != Network()


def _train(run: KeyedRun, measured: EstimatorPlan | None, saved: bool, tell: Tell) -> None:
    from motley.study.gradients import measure_if_due  # which is about runs of studies, too

    if not saved or not checkpoints(run.folder / "checkpoints"):
        shutil.rmtree(run.folder, ignore_errors=True)  # nothing to go on from: it is made anew
    if saved:
        crew = LocalCrew.start_or_resume(often_saved(run.config), run.folder)
    else:
        crew = LocalCrew.start(run.config, run.folder, saves=False)
    write_beside(crew.config, run.folder / "config.toml")

    def went_on() -> None:
        if measured:
            measure_if_due(run.folder, measured, crew.finished_rounds)
        tell(crew.finished_rounds / run.config.crew.rounds)

    went_on()
    for _ in crew.rounds():
        went_on()


def _simulate(run: KeyedRun, tell: Tell) -> None:
    shutil.rmtree(run.folder, ignore_errors=True)  # one that was stopped is made anew
    crew = SimCrew(run.config, run.folder)
    write_beside(run.config, run.folder / "config.toml")
    for _ in crew.rounds():
        tell(min(1.0, crew.finished_rounds / run.config.crew.rounds))


def often_saved(config: CrewConfig) -> CrewConfig:
    """With a checkpoint several times on the way: a run that is stopped goes on from the newest."""
    every = min(config.learning.checkpoint_every, -(-config.crew.rounds // SAVES))
    learning = msgspec.structs.replace(config.learning, checkpoint_every=every)
    return msgspec.structs.replace(config, learning=learning)


def _give_back() -> None:
    """What a run held of the GPU, while the process waits for the next."""
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _drop_weights(folder: Path) -> None:
    """The numbers are what a study is for, and models are large, as are traces of steps. Not before
    they are kept: until then a run that is stopped goes on from its weights.
    """
    for large in ("start", "checkpoints", "groups/traces"):
        shutil.rmtree(folder / large, ignore_errors=True)


def studied(configs: Sequence[CrewConfig], out: Path, folder: Path, by_name: bool) -> list[Studied]:
    """Crews of a study in `folder`; runs, and copies of their files, are shared by all of `out`."""
    return [
        Studied(
            with_copies(config, out / "data"),
            folder / config.crew.name if by_name else folder,
            out / "runs",
        )
        for config in configs
    ]
