"""Arms x crews x seeds on virtual time: what each method loses against its own run in the first
crew, the one without delay.

"Best at one checkpoint" is taken at the round where the mean over seeds is highest: one round for
all seeds, not each seed's luckiest.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from matplotlib.figure import Figure

from motley.clock import RealClock
from motley.config import CrewConfig
from motley.runs.checking import check_config
from motley.runs.metrics import LearnerLine, learner_lines, read_metrics
from motley.sim.report import ages_of, num_dropped
from motley.sim.simulation import SimCrew
from motley.study.arms import Arm, crews_of
from motley.study.holding import held_alone
from motley.study.keys import key_of, run_name
from motley.study.outcomes import read_whole_lines
from motley.study.processes import Job, LostRunsError, make_all
from motley.study.report import markdown_table, mean_of
from motley.study.running import (
    check_kept,
    check_names,
    claim,
    keep,
    keep_only,
    names_of_warm_starts,
    warm_starts,
)
from motley.study.statistics import (
    Comparison,
    Estimate,
    bounded_interval,
)
from motley.tasks import Measure

DIAGNOSTICS = (
    "weight_var",
    "kl_k3",
    "kl_reverse",
    "estimation_error",
    "clipped",
    "ess",
    "entropy",
    "truncated",
)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One learner of one run."""

    crew: str
    arm: str
    seed: int
    peer: str
    curve: dict[int, float]  # round -> held-out score, mean over kinds
    hours: float  # simulated
    mean_age: float  # in versions, of the groups learned from
    max_age: int
    dropped: int
    grad_norm: float  # mean over steps; 0 without any
    diagnostics: dict[str, float]  # mean over steps and senders
    start: dict[str, float] = {}  # per kind, as `end`
    end: dict[str, float] = {}
    made: str = ""  # what an arm with a name stands for


def run_sweep(
    configs: Sequence[CrewConfig],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    folder: Path,
    jobs: int,
    progress: Callable[[int, int], None],
) -> list[Trial]:
    """Trials of crews x arms x seeds; `progress(done, total)` after every run.

    Results are kept in FOLDER/trials.jsonl. Another process that adds to them is waited for.
    """
    names = [config.crew.name for config in configs]
    check_names(names, "sweep")
    for config in configs:
        for arm in arms:
            check_config(crews_of(config, arm, 0)[0])
        claim(folder / config.crew.name, config)
    path = folder / "trials.jsonl"
    with held_alone(path, RealClock()):
        return _run_missing(configs, arms, seeds, path, jobs, progress)


def _run_missing(
    configs: Sequence[CrewConfig],
    arms: Sequence[Arm],
    seeds: Sequence[int],
    path: Path,
    jobs: int,
    progress: Callable[[int, int], None],
) -> list[Trial]:
    names = [config.crew.name for config in configs]
    kept_before = read_trials(path)
    check_kept(path, kept_before, arms)
    trials = _of_whole_runs(kept_before, configs, arms)
    if len(trials) < len(kept_before):
        keep_only(path, trials)
    done = {(t.crew, t.arm, t.seed) for t in trials}
    todo = [
        (c, arm, seed)
        for seed in seeds
        for c in configs
        for arm in arms
        if (c.crew.name, arm.label, seed) not in done
    ]
    total = len(configs) * len(arms) * len(seeds)
    progress(total - len(todo), total)
    # the crews of a sweep differ in their networks only, so that they share warm starts
    first = warm_starts([(configs[0], seed) for _, _, seed in todo])
    runs = [
        Job(
            f"crew {config.crew.name}, arm {arm.label}, seed {seed}",
            partial(_run, config, arm, seed, path.parent / "runs"),
            names_of_warm_starts(configs[0], seed),
        )
        for config, arm, seed in todo
    ]

    def kept(made: list[Trial]) -> None:
        keep(path, made)
        trials.extend(made)
        done.add((made[0].crew, made[0].arm, made[0].seed))
        progress(len(done & wanted), total)

    wanted = {(c, arm.label, seed) for c in names for arm in arms for seed in seeds}
    if lost := make_all(jobs, first, runs, kept):
        raise LostRunsError(lost, total)
    return [t for t in trials if (t.crew, t.arm, t.seed) in wanted]


def read_trials(path: Path) -> list[Trial]:
    return read_whole_lines(path, Trial)


def _of_whole_runs(
    trials: Sequence[Trial], configs: Sequence[CrewConfig], arms: Sequence[Arm]
) -> list[Trial]:
    """Without those of a run some of whose learners a full disk, or a kill, left out.

    Of arms that are not asked for this time, all are kept.
    """
    students = {
        (config.crew.name, arm.label): {
            peer.name for crew in crews_of(config, arm, 0) for peer in crew.students
        }
        for config in configs
        for arm in arms
    }
    found: dict[tuple[str, str, int], set[str]] = {}
    for t in trials:
        found.setdefault((t.crew, t.arm, t.seed), set()).add(t.peer)
    return [
        t
        for t in trials
        if found[t.crew, t.arm, t.seed] >= students.get((t.crew, t.arm), set[str]())
    ]


def _run(config: CrewConfig, arm: Arm, seed: int, folder: Path) -> list[Trial]:
    torch.set_num_threads(1)
    return [
        trial
        for crew in crews_of(config, arm, seed)
        for trial in _simulate(crew, config.crew.name, arm, folder)
    ]


def _simulate(crew: CrewConfig, name: str, arm: Arm, folder: Path) -> list[Trial]:
    key = hashlib.sha256(f"{arm.label} {key_of(crew)}".encode()).hexdigest()
    run = folder / run_name(crew, key)
    shutil.rmtree(run, ignore_errors=True)  # a run that was stopped is made anew
    for _ in SimCrew(crew, run).rounds():
        pass
    lines = learner_lines(read_metrics(run))
    shutil.rmtree(run)
    return [
        _trial(name, arm, crew.crew.seed, [line for line in lines if line.peer == p.name])
        for p in crew.students
    ]


def _trial(crew: str, arm: Arm, seed: int, lines: list[LearnerLine]) -> Trial:
    ages, measured = ages_of(lines), [line for line in lines if line.heldout]
    senders = [sender for line in lines for sender in (line.senders or {}).values()]
    norms = [line.grad_norm for line in lines if line.grad_norm is not None]
    known = {
        key: [value for s in senders if (value := s.number(key)) is not None] for key in DIAGNOSTICS
    }
    return Trial(
        crew=crew,
        arm=arm.label,
        made=arm.made,
        seed=seed,
        peer=lines[0].peer,
        curve={line.round: mean_of(line.heldout or {}) for line in measured},
        hours=(lines[-1].time_s or 0.0) / 3600,
        mean_age=sum(age * count for age, count in ages) / max(1, sum(count for _, count in ages)),
        max_age=max((age for age, _ in ages), default=0),
        dropped=num_dropped(lines),
        grad_norm=sum(norms) / max(1, len(norms)),
        diagnostics={key: float(np.mean(values)) for key, values in known.items() if values},
        start=measured[0].heldout or {},
        end=measured[-1].heldout or {},
    )


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One arm in one crew."""

    arm: str
    crew: str
    last: Estimate  # accuracy after the last round
    best: Estimate  # accuracy at `best_round`
    best_round: int
    loss: Estimate  # last here less last in the first crew, paired by seed
    p_value: float  # of that difference; nan where it cannot be made
    mean_age: float
    max_age: int
    diagnostics: dict[str, float]


def table(
    trials: Sequence[Trial],
    crews: Sequence[str],
    arms: Sequence[str],
    measure: Measure = "accuracy",
) -> list[SweepRow]:
    """A line per arm and crew, over all seeds; several learners of a run count with their mean."""
    return [_line(trials, arm, crew, crews[0], measure) for arm in arms for crew in crews]


def _line(trials: Sequence[Trial], arm: str, crew: str, first: str, measure: Measure) -> SweepRow:
    own = [t for t in trials if t.arm == arm and t.crew == crew]
    rounds = sorted(set.intersection(*(set(t.curve) for t in own)))
    best_round = max(rounds, key=lambda number: float(np.mean([t.curve[number] for t in own])))
    loss = comparison(trials, arm, crew, first)
    return SweepRow(
        arm=arm,
        crew=crew,
        last=bounded_interval(by_seed(own, last_of), measure),
        best=bounded_interval(by_seed(own, lambda t: t.curve[best_round]), measure),
        best_round=best_round,
        loss=loss.estimate,
        p_value=loss.p_value if crew != first else float("nan"),
        mean_age=float(np.mean([t.mean_age for t in own])),
        max_age=max(t.max_age for t in own),
        diagnostics={
            key: float(np.mean(known))
            for key in DIAGNOSTICS
            if (known := [t.diagnostics[key] for t in own if key in t.diagnostics])
        },
    )


def comparison(trials: Sequence[Trial], arm: str, crew: str, first: str) -> Comparison:
    """An arm in a crew against itself in the first, after the last round, paired by seed."""
    of = lambda name: [t for t in trials if t.arm == arm and t.crew == name]
    before = {(t.seed, t.peer): last_of(t) for t in of(first)}
    paired = [t for t in of(crew) if (t.seed, t.peer) in before]
    differences = by_seed(paired, lambda t: last_of(t) - before[t.seed, t.peer])
    return Comparison(f"{arm} under {crew}", f"under {first}", tuple(differences))


def by_seed(trials: Sequence[Trial], value: Callable[[Trial], float]) -> list[float]:
    """Per seed, in their order: learners of one run are not independent, and count as one."""
    seeds = sorted({t.seed for t in trials})
    return [float(np.mean([value(t) for t in trials if t.seed == seed])) for seed in seeds]


def last_of(trial: Trial) -> float:
    return trial.curve[max(trial.curve)]


def markdown(lines: Sequence[SweepRow]) -> str:
    return markdown_table(*cells(lines))


def cells(lines: Sequence[SweepRow]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table."""
    head = [
        "arm",
        "crew",
        "last",
        "best (round)",
        "against no delay",
        "p",
        "age mean, max",
        "weight variance",
        "KL(q‖p)",
        "error",
        "clipped",
    ]
    rows = []
    for line in lines:
        first = line.crew == lines[0].crew
        numbers = [
            f"{line.diagnostics[key]:.3f}" if key in line.diagnostics else ""
            for key in ("weight_var", "kl_k3", "estimation_error", "clipped")
        ]
        rows.append(
            [
                line.arm,
                line.crew,
                f"{line.last:.3f}",
                f"{line.best:.3f} ({line.best_round})",
                "" if first else _signed(line.loss),
                "" if np.isnan(line.p_value) else f"{line.p_value:.3f}",
                f"{line.mean_age:.1f}, {line.max_age}",
                *numbers,
            ]
        )
    return head, rows


def _signed(loss: Estimate) -> str:
    width = "" if np.isnan(loss.low) else f" ± {loss.half_width:.3f}"
    return f"{loss.mean:+.3f}{width}"


def glance(lines: Sequence[SweepRow]) -> str:
    """A row per arm: last accuracy in the first crew, then in each other, with the difference."""
    crews = list(dict.fromkeys(line.crew for line in lines))
    cell = {
        (line.arm, line.crew): f"{line.last:.3f}"
        if line.crew == crews[0]
        else f"{line.last.mean:.3f} ({_signed(line.loss)})"
        for line in lines
    }
    return markdown_table(
        ["arm", *crews],
        [
            [arm, *(cell[arm, crew] for crew in crews)]
            for arm in dict.fromkeys(x.arm for x in lines)
        ],
    )


def draw(lines: Sequence[SweepRow], path: Path, measure: Measure) -> None:
    """Accuracy or reward after the last round against the crew, a curve per arm, with 95 %
    intervals.
    """
    crews = list(dict.fromkeys(line.crew for line in lines))
    arms = list(dict.fromkeys(line.arm for line in lines))
    figure = Figure(figsize=(1.6 * len(crews) + 3, 4.2), layout="constrained")
    axis = figure.subplots()
    for number, arm in enumerate(arms):
        own = [line for line in lines if line.arm == arm]
        shift = (number - (len(arms) - 1) / 2) * 0.06  # so that intervals do not hide each other
        places = [crews.index(line.crew) + shift for line in own]
        axis.errorbar(
            places,
            [line.last.mean for line in own],
            np.array(
                [
                    [line.last.mean - line.last.low for line in own],
                    [line.last.high - line.last.mean for line in own],
                ]
            ),
            label=arm,
            capsize=2,
            marker="o",
        )
    axis.set_xticks(range(len(crews)), crews, rotation=20)
    axis.set_ylabel(f"held-out {measure} after the last round")
    axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)
