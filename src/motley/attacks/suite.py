"""Attacks x defences x seeds, each run in a process of its own, and what became of honest peers.

Every attack is run on the crew as its file says and on the same crew without defences; beside them
stands the same crew without an attack. Results are kept, so that a stopped suite goes on.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from motley.attacks.attack import Attack, Cast, NotMountableError, Stage
from motley.attacks.catalogue import ATTACKS
from motley.attacks.crew import AttackedCrew, Parts
from motley.clock import RealClock
from motley.config import CrewConfig, PeerConfig, Trust
from motley.models.opening import initial_policy
from motley.runs.checking import is_mixed
from motley.study.holding import held_alone
from motley.study.outcomes import read_whole_lines
from motley.study.processes import Job, LostRunsError, make_all
from motley.study.running import keep, warm
from motley.tasks import load_task

Progress = Callable[[int, int], None]  # (done, of how many)


class AttackTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one seed."""

    crew: str  # Staging.crew
    attack: str  # nothing: everyone is honest
    defended: bool
    seed: int
    success: dict[str, float]  # by attack; without one, of every attack on the same crew
    accuracy: float
    taken: float
    detected: int | None  # round
    false_alarms: float
    stopped: str = ""  # why an honest peer could not go on


@dataclass(frozen=True, slots=True)
class Staging:
    """One crew as it is to be run, with one attack or with none."""

    parts: Parts
    attack: str
    defended: bool
    measured: tuple[str, ...]  # attacks whose success is measured

    @property
    def crew(self) -> str:
        twin = " with a twin" if self.parts.twin else ""
        return f"{len(self.parts.hostile)} of {len(self.parts.config.peer)}{twin}"


def undefended(config: CrewConfig) -> CrewConfig:
    """The same crew with every defence off that can be."""
    none = Trust(alpha=0.0, habits=False, mute_rounds=0, sender_share=1.0, grad_share=0.0)
    return msgspec.structs.replace(config, trust=none)


def stage_of(config: CrewConfig) -> Stage:
    task = load_task(config.crew.task, config.task)
    return Stage(config, task, initial_policy(config.students[0], 0, config.prompt, task).prompts)


def parts_of(config: CrewConfig, cast: Cast, hostile: int) -> Parts:
    """The crew in which an attack plays: the last peers of the file are the hostile ones."""
    if cast.peers:
        config = with_peers(config, cast.peers)
    count = cast.hostile or hostile
    names = [peer.name for peer in config.peer]
    if config.has_roles:
        raise ValueError("attacks are mounted on crews whose peers all sample and learn")
    if is_mixed(config):
        raise ValueError(
            "attacks are written in one vocabulary, and the peers of this crew have several; give "
            "all of them models that share a tokenizer"
        )
    if count >= len(names):
        raise ValueError(f"{count} hostile peers of {len(names)} leave nobody honest; use fewer")
    if cast.twin:
        config = _with_twin(config, names[0], names[-count])
    return Parts(config, tuple(names[-count:]), cast.twin)


def with_peers(config: CrewConfig, count: int) -> CrewConfig:
    """The crew with so many peers: the last left out, or the first again under other names."""
    have = config.peer
    peers = tuple(
        have[i] if i < len(have) else msgspec.structs.replace(have[i % len(have)], name=f"more-{i}")
        for i in range(count)
    )
    each, crew = config.problems_per_peer, config.crew
    if crew.layout == "vertical":
        crew = msgspec.structs.replace(crew, problems_per_round=each * count)
    else:
        crew = msgspec.structs.replace(crew, group_size=config.rollouts_per_group * count)
    return msgspec.structs.replace(config, peer=peers, crew=crew)


def _with_twin(config: CrewConfig, honest: str, hostile: str) -> CrewConfig:
    twin = msgspec.structs.replace(config.named(honest), name=hostile)
    swapped: Callable[[PeerConfig], PeerConfig] = lambda p: twin if p.name == hostile else p
    return msgspec.structs.replace(config, peer=tuple(map(swapped, config.peer)))


def stagings(config: CrewConfig, attacks: Sequence[Attack], hostile: int) -> list[Staging]:
    """What is to be run for every seed: each crew without an attack, and each attack."""
    free: dict[tuple[str, bool], Staging] = {}
    attacked = []
    for attack in attacks:
        for defended in (False, True):
            whole = config if defended else undefended(config)
            if defended and whole == undefended(config):
                continue  # it has no defences
            parts = parts_of(whole, attack.cast, hostile)
            staging = Staging(parts, attack.name, defended, (attack.name,))
            attacked.append(staging)
            place = (staging.crew, defended)
            before = free[place].measured if place in free else ()
            free[place] = Staging(parts, "", defended, (*before, attack.name))
    return [*free.values(), *attacked]


def why_not(config: CrewConfig, attack: Attack, hostile: int) -> str:
    """Why an attack cannot be mounted on this crew; nothing if it can."""
    try:
        attack.mount(stage_of(parts_of(config, attack.cast, hostile).config))
    except NotMountableError as error:
        return str(error)
    return ""


def run_suite(
    stages: Sequence[Staging], seeds: Sequence[int], folder: Path, jobs: int, progress: Progress
) -> list[AttackTrial]:
    """A trial of every staging and seed; `progress(done, total)` after every run.

    Results are kept in FOLDER/trials.jsonl. Another process that adds to them is waited for.
    """
    path = folder / "trials.jsonl"
    with held_alone(path, RealClock()):
        return _run_missing(stages, seeds, path, jobs, progress)


def _run_missing(
    stages: Sequence[Staging], seeds: Sequence[int], path: Path, jobs: int, progress: Progress
) -> list[AttackTrial]:
    wanted = [(s, seed) for seed in seeds for s in stages]
    trials = read_trials(path)
    left = [(s, seed) for s, seed in wanted if _found(trials, s, seed) is None]
    done = len(wanted) - len(left)
    progress(done, len(wanted))
    first = [
        Job(_warm_name(config.named(name), seed), partial(warm, config, seed, name))
        for config, seed, name in _warm_starts(left)
    ]
    runs = [
        Job(
            _name_of(staging, seed),
            partial(run_trial, staging, seed),
            tuple(_warm_name(peer, seed) for peer in staging.parts.config.peer),
        )
        for staging, seed in left
    ]

    def kept(trial: AttackTrial) -> None:
        keep(path, [trial])
        trials.append(trial)
        progress(sum(_found(trials, s, seed) is not None for s, seed in wanted), len(wanted))

    if lost := make_all(jobs, first, runs, kept):
        raise LostRunsError(lost, len(wanted))
    found = [_found(trials, staging, seed) for staging, seed in wanted]
    return [trial for trial in found if trial]


def _warm_name(peer: PeerConfig, seed: int) -> str:
    return f"warm start of {peer.name} from {peer.model}, seed {seed}"


def _name_of(staging: Staging, seed: int) -> str:
    defences = "with" if staging.defended else "without"
    return f"attack {staging.attack or 'none'} on {staging.crew}, {defences} defences, seed {seed}"


def read_trials(path: Path) -> list[AttackTrial]:
    return read_whole_lines(path, AttackTrial)


def _found(trials: Sequence[AttackTrial], staging: Staging, seed: int) -> AttackTrial | None:
    """The trial of a staging, if it has been made and measured all that is asked for."""
    wanted = (staging.crew, staging.attack, staging.defended, seed)
    return next(
        (
            trial
            for trial in trials
            if (trial.crew, trial.attack, trial.defended, trial.seed) == wanted
            and (trial.stopped or set(staging.measured) <= trial.success.keys())
        ),
        None,
    )


def _warm_starts(left: Sequence[tuple[Staging, int]]) -> list[tuple[CrewConfig, int, str]]:
    """Made once, before the runs that would each make them."""
    found: dict[tuple[str, str, int], tuple[CrewConfig, int, str]] = {}
    for staging, seed in left:
        for peer in staging.parts.config.peer:
            found.setdefault((peer.name, peer.model, seed), (staging.parts.config, seed, peer.name))
    return list(found.values())


def run_trial(staging: Staging, seed: int) -> AttackTrial:
    """One run, from its start to what became of it."""
    torch.set_num_threads(1)
    config = staging.parts.config
    config = msgspec.structs.replace(config, crew=msgspec.structs.replace(config.crew, seed=seed))
    parts, stage = replace(staging.parts, config=config), stage_of(config)
    mounted = {name: ATTACKS[name].mount(stage) for name in staging.measured}
    with tempfile.TemporaryDirectory() as folder:
        crew = AttackedCrew(parts, mounted.get(staging.attack), Path(folder))
        stopped = _trained(crew)
        evidence = crew.evidence()
        success = {name: one.success(evidence) for name, one in mounted.items()}
    return AttackTrial(
        crew=staging.crew,
        attack=staging.attack,
        defended=staging.defended,
        seed=seed,
        success=success,
        accuracy=evidence.accuracy,
        taken=evidence.taken,
        detected=crew.alarms.detected or None,
        false_alarms=crew.alarms.false_share,
        stopped=stopped,
    )


def _trained(crew: AttackedCrew) -> str:
    """Train to the end; what stopped an honest peer before it."""
    try:
        for _ in crew.rounds():
            pass
    except Exception as error:  # noqa: BLE001 - whatever a stranger's record raises in an honest peer is the result
        return f"after round {crew.finished_rounds}: {type(error).__name__}: {error}"
    return ""
