"""Building peers: a model made or opened and tried out, with its learner, its sampler half and its
place in a run folder.

Owns the order: a start is made and warmed, opened, written and read again, and cut to what trains.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch
from safetensors import SafetensorError

from motley.config import (
    AUTO,
    CrewConfig,
    PeerConfig,
    Prompt,
    TrainPart,
    read_config,
)
from motley.engines import open_engine
from motley.engines.judge import Judge
from motley.exchange import Log, Outbox
from motley.exchange.blobs import Blobs
from motley.files import disk_error, whole
from motley.learning.checkpoint import AnyState, checkpoints, load_manifest, round_of
from motley.learning.descent import Upkeep
from motley.learning.fitting import check_supported, must_recompute
from motley.learning.learner import Learner
from motley.learning.warm import warm_start
from motley.models.opening import initial_policy, is_tiny, peer_seed, placed
from motley.models.policy import MadeOf, Policy, with_masters, with_trained_part
from motley.models.returning import (
    check_part_returns,
    check_returns,
    note_returned,
    returned_before,
)
from motley.objectives import objective
from motley.peers.follower import Sampler
from motley.peers.peer import Peer
from motley.peers.sampling import SamplerHalf
from motley.runs.best import best_checkpoint
from motley.runs.folder import Run, newest_checkpoint, peer_folder
from motley.tasks import Task, load_task

logger = logging.getLogger(__name__)
WarmProgress = Callable[[str, int, dict[str, float]], None]  # (peer, steps, accuracy per kind)


def build_peer(
    run: Run,
    me: PeerConfig,
    log: Log,
    outbox: Outbox,
    hub: bytes,
    warm_progress: WarmProgress | None = None,
) -> Peer:
    """A peer with the model of start/, which is made and warmed first if it is not there."""
    config = run.config
    start = run.folder / "start" / me.name
    if not start.exists() and (me.warm or is_tiny(me.model)):
        _make_start(config, me, run.task, start, warm_progress)
    policy = with_masters(_checked_policy(run, me, start), me.masters)
    upkeep = Upkeep(
        kind=me.optimizer, offload=me.offload, seed=peer_seed(me.name, config.crew.seed)
    )
    if me.gradient_checkpointing == AUTO:
        policy.gradient_checkpointing = must_recompute(policy, upkeep, config.learning)
    row = objective(config.crew.objective, config.crew.variant, config.objective)
    lr = me.lr or config.learning.lr
    learner = Learner(
        policy,
        row,
        config.learning,
        lr,
        config.trust,
        config.teach,
        rounds=config.crew.rounds,
        seed=config.crew.seed,
        upkeep=upkeep,
    )
    return Peer(_half(run, me, policy, outbox), learner, log, hub)


def _checked_policy(run: Run, me: PeerConfig, start: Path) -> Policy:
    """What a peer begins with, tried out: what is computed wrongly is refused, and before the
    first round also what would not come back from disk.
    """
    policy = _opened_policy(run.config, me, start, run.task)
    resumes = bool(checkpoints(run.folder / "checkpoints"))
    # an adapter's base is where it was, unless it was made here
    written = start.exists() or me.keep_layers or not _is_lora(me)
    with TemporaryDirectory(dir=run.folder / "start", prefix=".tried-") as place:
        if written and not resumes and not returned_before(policy):
            check_returns(policy, Path(place) / "whole")
            note_returned(policy)
        policy = _with_trained_part(run.config, me, policy)
        if not resumes and (policy.is_adapted or policy.is_partial):
            check_part_returns(policy, Path(place) / "part")
    check_supported(policy)
    return policy


def build_sampler(
    run: Run, me: PeerConfig, log: Log, outbox: Outbox, blobs: Blobs, hub: bytes
) -> Sampler:
    """A sampler with its learner's model, whose weights are still to come."""
    followed = run.config.named(me.follows)
    # the learner's model on the sampler's machine
    here = msgspec.structs.replace(followed, device=me.device, dtype=me.dtype)
    policy = initial_policy(here, run.config.crew.seed, run.config.prompt, run.task)
    policy = _with_trained_part(run.config, here, policy)
    return Sampler(_half(run, me, policy, outbox), log, blobs, hub)


def _half(run: Run, me: PeerConfig, policy: Policy, outbox: Outbox) -> SamplerHalf:
    weather = run.config.weather(me.name, run.started_s)
    engine = open_engine(policy, me.engine, run.folder / "engine" / me.name)
    logger.info(
        "%s: %s from %s, on %s in %s, sampled by %s",
        *(me.name, me.model, policy.base.name_or_path or "here", policy.device, policy.dtype),
        me.engine,
    )
    half = SamplerHalf(
        run.config,
        me,
        run.task,
        policy,
        engine,
        outbox,
        run.clock,
        weather,
        scorer=run.scorer,
        mixed=run.mixed,
    )
    half.judge = Judge(me.judge) if me.judge else None
    return half


def _opened_policy(config: CrewConfig, me: PeerConfig, start: Path, task: Task | None) -> Policy:
    """The policy a peer begins with, from its folder if it has one; all of it trains."""
    policy = initial_policy(me, config.crew.seed, config.prompt, task)
    if start.exists():
        try:
            policy.load(start)
        except ValueError as error:
            raise ValueError(f"{error}; or delete {start}, which is then made again") from error
        # where an adapter's folder says its base is
        policy.base.name_or_path = str(start.resolve())
        policy.made_of = MadeOf(model=f"../../../../start/{me.name}")  # seen from a checkpoint
    return policy


def _with_trained_part(config: CrewConfig, me: PeerConfig, policy: Policy) -> Policy:
    policy = with_trained_part(policy, me.train, peer_seed(me.name, config.crew.seed))
    return placed(policy, me) if me.bits else policy


def _is_lora(me: PeerConfig) -> bool:
    return isinstance(me.train, TrainPart) and me.train.lora is not None


def _make_start(
    config: CrewConfig,
    me: PeerConfig,
    task: Task,
    start: Path,
    warm_progress: WarmProgress | None,
) -> None:
    """Make the model that a peer begins with, and warm it."""
    whole_model = msgspec.structs.replace(me, train="full")
    policy = initial_policy(whole_model, config.crew.seed, config.prompt, task)
    if me.warm:
        progress = (
            (lambda steps, accuracy: warm_progress(me.name, steps, accuracy))
            if warm_progress
            else None
        )
        warm_start(policy, task, me.warm, peer_seed(me.name, config.crew.seed), progress)
    try:
        with whole(start) as partial:
            policy.save(partial)
    except (OSError, SafetensorError) as error:
        raise disk_error(start, getattr(error, "strerror", None) or str(error)) from error


def trained_policies(
    folder: Path, task: Task | None = None, rules: Prompt | None = None, best: bool = False
) -> dict[str, Policy]:
    """Every peer's policy at the newest checkpoint of a run, which is only read; for another task,
    or asked in another way. `best`: each at the one that was the best on held-out problems.
    """
    config = read_config(folder / "config.toml")
    config = msgspec.structs.replace(config, prompt=rules or config.prompt)
    task = task or load_task(config.crew.task, config.task)
    policies = {}
    for me in config.students:
        own = peer_folder(folder, me.name)
        newest = newest_checkpoint(own)
        if not (newest / me.name).exists():  # a peer's own folder holds that peer alone
            continue
        chosen = best_checkpoint(own, me.name) if best else newest
        load_manifest(chosen, AnyState)
        policies[me.name] = _first_policy(config, me, own, task)
        policies[me.name].load(chosen / "model" if best else newest / me.name / "model")
    return policies


def policies_after(folder: Path, round: int) -> dict[str, Policy]:
    """Every peer's policy as a run's checkpoint of this round has it; 0: before the first."""
    config = read_config(folder / "config.toml")
    task = load_task(config.crew.task, config.task)
    policies = {}
    for me in config.students:
        own = peer_folder(folder, me.name)
        if (me.warm or is_tiny(me.model)) and not (own / "start" / me.name).exists():
            raise ValueError(
                f"{own} has no weights of {me.name} any more, as runs of a study that is done; "
                "give a run that still has its start/ and checkpoints/"
            )
        policies[me.name] = _first_policy(config, me, own, task)
        policies[me.name].version = round
        if not round:
            continue
        checkpoint = own / "checkpoints" / f"round-{round:06d}"
        kept = sorted({0, *map(round_of, checkpoints(own / "checkpoints"))})
        if round not in kept:
            raise ValueError(
                f"{own} has no checkpoint of round {round}; it has those of "
                f"{', '.join(map(str, kept))} (0 is the beginning)"
            )
        load_manifest(checkpoint, AnyState)
        policies[me.name].load(checkpoint / me.name / "model")
    return policies


def shared_policy(config: CrewConfig, name: str, dtype: torch.dtype) -> Policy:
    """What a peer begins with before any warm start, on the CPU, for a process that takes a part of
    it: on another machine there is no run folder, and all values come from the peer.

    `dtype`: of the peer's own arithmetic. It is asked nothing, so it needs no task.
    """
    me = msgspec.structs.replace(config.named(name), device="cpu", dtype="float32")
    policy = initial_policy(me, config.crew.seed, config.prompt)
    policy.dtype = dtype
    return _with_trained_part(config, me, policy)


def _first_policy(config: CrewConfig, me: PeerConfig, own: Path, task: Task) -> Policy:
    """As a run of this folder began."""
    opened = _opened_policy(config, me, own / "start" / me.name, task)
    return _with_trained_part(config, me, opened)
