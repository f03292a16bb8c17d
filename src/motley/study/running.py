"""Run every arm with every seed, several at a time, each in a process of its own.

What is done is not done again.
"""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from motley.config import CrewConfig, read_config, write_config
from motley.runs.checking import check_config
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, learner_lines, read_metrics
from motley.study.arms import Arm, crews_of

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of one run: held-out score per kind before, after, and the lowest on the way."""

    arm: str
    seed: int
    peer: str
    start: dict[str, float]
    end: dict[str, float]
    lowest: dict[str, float]
    ood: dict[str, float]
    curve: dict[int, dict[str, float]] = {}  # round -> per kind


def run_study(
    config: CrewConfig,
    arms: Sequence[Arm],
    seeds: Sequence[int],
    folder: Path,
    jobs: int,
    progress: Callable[[int, int], None],
) -> list[Outcome]:
    """Outcomes of arms x seeds; `progress(done, total)` after every run.

    Results are kept in FOLDER/outcomes.jsonl.
    """
    for arm in arms:
        for crew in crews_of(config, arm, 0):
            check_config(crew)
    claim(folder, config)
    path = folder / "outcomes.jsonl"
    outcomes = read_outcomes(path)
    done = {(o.arm, o.seed) for o in outcomes}
    todo = [(arm, seed) for seed in seeds for arm in arms if (arm.label, seed) not in done]
    total = len(arms) * len(seeds)
    progress(total - len(todo), total)
    # Warm starts are shared by all arms of a seed: made once, before the runs that would each make
    # them.
    first = [
        partial(warm, config, seed, peer.name)
        for seed in sorted({s for _, s in todo})
        for peer in config.students
    ]
    runs = in_processes(
        jobs, first, [partial(_run, config, arm, seed, folder) for arm, seed in todo]
    )
    for number, made in enumerate(runs, total - len(todo) + 1):
        keep(path, made)
        outcomes += made
        progress(number, total)
    wanted = {(arm.label, seed) for arm in arms for seed in seeds}
    return [o for o in outcomes if (o.arm, o.seed) in wanted]


def in_processes(
    jobs: int, first: Sequence[Callable[[], None]], then: Sequence[Callable[[], T]]
) -> Iterator[T]:
    """Call everything in processes of their own, several at a time; the results of `then` as they
    come, after all of `first`.
    """
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            for made in [pool.submit(call) for call in first]:
                made.result()
            for future in as_completed([pool.submit(call) for call in then]):
                yield future.result()
        except BaseException:
            # otherwise the rest of the queue would still be run
            pool.shutdown(wait=False, cancel_futures=True)
            raise


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


def read_outcomes(path: Path) -> list[Outcome]:
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Outcome) for line in path.read_bytes().splitlines()]


def warm(config: CrewConfig, seed: int, peer: str) -> None:
    """Make a peer's warm start, which is then cached."""
    torch.set_num_threads(1)
    crew = msgspec.structs.replace(config.crew, seed=seed)
    with tempfile.TemporaryDirectory() as folder:
        LocalCrew.start(
            msgspec.structs.replace(config, crew=crew).alone(peer), Path(folder) / "warm"
        )


def _run(config: CrewConfig, arm: Arm, seed: int, folder: Path) -> list[Outcome]:
    torch.set_num_threads(1)
    outcomes = []
    for crew_config in crews_of(config, arm, seed):
        name = f"{arm.label.replace('/', '-').replace(':', '-')}-{seed}"
        run = folder / "runs" / name / crew_config.crew.name
        crew = LocalCrew.start_or_resume(crew_config, run)
        for _ in crew.rounds():
            pass
        lines = learner_lines(read_metrics(run))
        outcomes += [_outcome(arm, seed, peer.name, lines) for peer in crew_config.students]
        # the numbers are what a study is for, and models are large
        for weights in ("start", "checkpoints"):
            shutil.rmtree(run / weights)
    return outcomes


def _outcome(arm: Arm, seed: int, peer: str, lines: Sequence[LearnerLine]) -> Outcome:
    own = [line for line in lines if line.peer == peer and line.heldout]
    heldout = [line.heldout or {} for line in own]
    return Outcome(
        arm=arm.label,
        seed=seed,
        peer=peer,
        start=heldout[0],
        end=heldout[-1],
        lowest={kind: min(measured[kind] for measured in heldout) for kind in heldout[0]},
        ood=own[-1].ood or {},
        curve={line.round: line.heldout or {} for line in own},
    )
