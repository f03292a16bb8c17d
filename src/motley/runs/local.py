"""A crew whose peers live in one process and take turns.

Its log is in memory, with a file in the run folder (see runs/folder.py).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from motley.clock import timed
from motley.config import CrewConfig, by_name, config_text, may_become, read_config
from motley.exchange import MemoryLog, Outbox, ShortLogError, Signer, cut_log
from motley.files import sync
from motley.learning.checkpoint import (
    AnyState,
    CheckpointError,
    OtherStateError,
    checkpoints,
    load_manifest,
    load_newest,
    round_of,
    save_checkpoint,
    save_training,
)
from motley.learning.pace import pace_of
from motley.learning.waiting import Wait
from motley.peers.peer import Learned, Peer
from motley.peers.state import PeerState
from motley.records import HUB, Charter, Roster
from motley.runs.building import WarmProgress, build_peer
from motley.runs.checking import check_config, is_mixed
from motley.runs.ending import resume_command
from motley.runs.folder import Run, held_alone, new_folder, newest_checkpoint
from motley.runs.lines import by_sender
from motley.runs.metrics import LearnerLine, Timing
from motley.runs.resuming import config_to_resume, founded, go_on_with
from motley.tasks import Task
from motley.trust import Identity

logger = logging.getLogger(__name__)


class CrewState(msgspec.Struct, frozen=True, kw_only=True):
    """A crew in one process, in a checkpoint."""

    round: int
    log_records: int
    metrics_bytes: int
    peers: dict[str, PeerState]


class GoneOnError(ValueError):
    """The run of a crew was gone on with by another one."""


class LocalCrew:
    """Peers in turn. `rounds()` trains; every yielded list has one metrics line per peer."""

    def __init__(
        self,
        config: CrewConfig,
        folder: Path,
        warm_progress: WarmProgress | None = None,
        task: Task | None = None,
    ) -> None:
        """`task`: where it is at hand as an object."""
        _check_devices(config)
        self.config = config
        self.folder = folder
        self.finished_rounds = 0
        self._saves = True
        self._pace = pace_of(config)
        self._run = Run(config, folder, task=task, mixed=is_mixed(config))
        self._log = MemoryLog(folder / "groups" / "log.bin")
        hub = found_log(config, self._log, self._run.task)
        self.peers = [
            build_peer(
                self._run, me, self._log, one_process_outbox(config, me.name), hub, warm_progress
            )
            for me in config.peer
        ]

    @classmethod
    def start(
        cls,
        config: CrewConfig,
        folder: Path,
        warm_progress: WarmProgress | None = None,
        task: Task | None = None,
        saves: bool = True,
    ) -> LocalCrew:
        """A new run in a new folder, with the skills before training as its first metrics lines.

        `saves` False: it has no checkpoints, and cannot go on once it is stopped.
        """
        check_config(config, task=task)
        with new_folder(folder, config, f"go on with: {resume_command(folder)}"):
            crew = cls(config, folder, warm_progress, task)
            crew._saves = saves
            crew._run.write([crew._run.first_line(peer) for peer in crew.peers])
            if saves:
                crew.save()
        return crew

    @classmethod
    def start_or_resume(
        cls,
        config: CrewConfig,
        folder: Path,
        warm_progress: WarmProgress | None = None,
        task: Task | None = None,
    ) -> LocalCrew:
        """Go on with a run of this folder, or begin it."""
        if not checkpoints(folder / "checkpoints"):
            return cls.start(config, folder, warm_progress, task)
        before = read_config(folder / "config.toml")
        if not may_become(before, config):
            raise ValueError(
                f"{folder} holds a run of other settings; choose another folder, or delete it"
            )
        return cls.resume(folder, task=task, config=config)

    @classmethod
    def resume(
        cls,
        folder: Path,
        say: Callable[[str], None] = lambda text: None,
        task: Task | None = None,
        config: CrewConfig | None = None,
    ) -> LocalCrew:
        """Go on from the newest whole checkpoint. What was written after it is cut off and done
        again.

        `config`: with other rounds, or whatever else may change; None: as RUN/config.toml has it.
        """
        config = config or config_to_resume(folder)
        newest = newest_checkpoint(folder)
        with held_alone(folder):
            return cls._resumed(folder, newest, say, task, config)

    @classmethod
    def _resumed(
        cls,
        folder: Path,
        newest: Path,
        say: Callable[[str], None],
        task: Task | None,
        config: CrewConfig,
    ) -> LocalCrew:
        try:
            newest, state = load_newest(folder / "checkpoints", CrewState, say)
        except OtherStateError:
            load_manifest(newest, AnyState)  # is whole, then
            raise ValueError(
                f"{folder} is a simulated run, which is not resumed; run motley sim again, with "
                "another --out"
            ) from None
        began = founded(folder)
        go_on_with(folder, began[0] if began else config, config, state.round)
        try:
            cut_log(folder / "groups" / "log.bin", state.log_records)
        except ShortLogError as error:
            raise ValueError(f"{error}; {_despite(error.num_whole, newest)}") from None
        crew = cls(config, folder, task=task)
        if began and began[1].task != crew._run.task.fingerprint:
            raise ValueError(
                f"{folder}: task {config.crew.task} asks other problems than when the run began; "
                "put its files back as they were, or begin a new run"
            )
        crew._run.cut_metrics(state.metrics_bytes, say)
        crew.finished_rounds = state.round
        logger.info("going on from %s", newest)
        for peer in crew.peers:
            crew._run.restore(peer, newest, state.peers[peer.me.name])
        return crew

    @property
    def stopped(self) -> str:
        """Why the crew is over before its last round; empty if it is not."""
        return self._run.stopping.reason

    @property
    def finished(self) -> bool:
        return bool(self.stopped) or self.finished_rounds >= self.config.crew.rounds

    def rounds(self) -> Iterator[list[LearnerLine]]:
        """Train to the last round, or until every peer is as good as it is going to be.

        Stopping between two yields loses nothing once `save` is called. Nor does an error while a
        round is sampled, where a step awaits everyone.
        """
        with held_alone(self.folder):
            while not self.finished:
                self._check_alone()
                # where a step awaits everyone, everyone samples before anyone learns
                together = self._pace.awaits_others
                lines = self._round_together() if together else self._round_in_turn()
                self.finished_rounds += 1
                self._run.write(lines)
                is_due = self.finished_rounds % self.config.learning.checkpoint_every == 0
                if self._saves and (self.finished or is_due):
                    self.save()
                yield lines

    def _check_alone(self) -> None:
        """That nobody has gone on with the run since this crew did, while it was not held."""
        if self._run.metrics.stat().st_size != self._run.metrics_bytes:
            raise GoneOnError(
                f"another crew or process has gone on with {self.folder} since; what it trained is "
                "there: resume the folder to go on behind it"
            )

    def save(self) -> None:
        self._check_alone()
        # the checkpoint counts on what they hold
        for path in (self._run.metrics, self.folder / "groups" / "log.bin"):
            sync(path)
        state = CrewState(
            round=self.finished_rounds,
            log_records=len(self._log),
            metrics_bytes=self._run.metrics_bytes,
            peers={p.me.name: p.state() for p in self.peers},
        )

        def write(folder: Path) -> None:
            for peer in self.peers:
                save_training(peer.learner.policy, peer.learner.optimiser, folder / peer.me.name)

        save_checkpoint(self.folder / "checkpoints", self.finished_rounds, state, write)

    def _save_last_round(self) -> None:
        """Save what the last round left, of which nothing has changed."""
        if not self._saves:
            return
        newest = checkpoints(self.folder / "checkpoints")[-1]
        try:
            if round_of(newest) < self.finished_rounds:
                self.save()
        except (OSError, ValueError) as error:  # what ended the next round is what must be said
            logger.warning("round %d could not be saved: %s", self.finished_rounds, error)

    def _round_together(self) -> list[LearnerLine]:
        clock = self._run.clock
        try:
            # rewards of one peer's answers are computed while the next one samples
            begun = [timed(peer.half.begin, clock) for peer in self.peers]
            drawn = [
                timed(partial(peer.half.drawn, answered), clock)
                for peer, (answered, _) in zip(self.peers, begun, strict=True)
            ]
        except Exception:
            self._save_last_round()  # nothing of this one is kept yet
            raise
        sampled = [
            timed(partial(peer.half.keep, drawn_round), clock)
            for peer, (drawn_round, _) in zip(self.peers, drawn, strict=True)
        ]
        for peer in self.peers:
            peer.publish()
        learned = [timed(partial(_receive_and_learn, peer), clock) for peer in self.peers]
        number, lines = self.finished_rounds + 1, []
        for peer, (_, begin_s), (_, draw_s), (batch, keep_s), (result, learn_s) in zip(
            self.peers, begun, drawn, sampled, learned, strict=True
        ):
            if isinstance(result, Wait):
                raise ValueError(
                    f"peer {peer.me.name} has only {len(peer.waiting)} groups of round "
                    f"{number} and cannot go on: "
                    f"refused so far {by_sender(peer.admission.refused)}{_newest(peer)}; a "
                    "lockstep crew needs every peer's groups"
                )
            timing = Timing(begin_s + draw_s + keep_s, learn_s)
            lines.append(self._run.line(peer, number, batch, result.report, timing))
        return lines

    def _round_in_turn(self) -> list[LearnerLine]:
        lines, clock = [], self._run.clock
        for peer in self.peers:
            sampled, sample_s = timed(peer.half.sample, clock) if peer.may_sample() else (None, 0.0)
            peer.publish()
            result, learn_s = timed(partial(_receive_and_learn, peer), clock)
            report = result.report if isinstance(result, Learned) else None
            lines.append(
                self._run.line(
                    peer, self.finished_rounds + 1, sampled, report, Timing(sample_s, learn_s)
                )
            )
        return lines


def _despite(num_records: int, newest: Path) -> str:
    """What to do where the log has fewer whole records than the newest checkpoint counts on."""
    copy = "put the log back from a copy"
    for older in reversed(checkpoints(newest.parent)[:-1]):
        with suppress(CheckpointError):
            if load_manifest(older, CrewState).log_records <= num_records:
                return f"{copy}, or delete {newest} to go on from {older.name}"
    return (
        f"{copy}. Without one the run cannot go on, but its checkpoints are whole: motley eval and "
        "motley export read them"
    )


def _check_devices(config: CrewConfig) -> None:
    for peer in config.peer:
        if peer.devices > 1:
            raise ValueError(
                f"peer {peer.name}: devices={peer.devices} needs a process of its own for the "
                "peer, and this crew runs in one; leave devices out, or begin a run with "
                "processes = true"
            )


def _newest(peer: Peer) -> str:
    """Why the newest record was refused, in words."""
    kept = peer.admission.kept
    return f", the last because {kept[-1].detail}" if kept else ""


def _receive_and_learn(peer: Peer) -> Learned | Wait:
    peer.receive_all()
    return peer.learn()


def one_process_identity(config: CrewConfig, name: str) -> Identity:
    """Make a key from the crew's seed, so that records are the same every time.

    Peers of one process have nothing to hide from each other.
    """
    return Identity.of(
        hashlib.sha256(
            f"one process/{config.crew.name}/{config.crew.seed}/{name}".encode()
        ).digest()
    )


def one_process_outbox(config: CrewConfig, name: str) -> Outbox:
    identity = one_process_identity(config, name)
    return Outbox(None, Signer(identity.public, identity.sign), config.crew.lossless)


def found_log(config: CrewConfig, log: MemoryLog, task: Task) -> bytes:
    """Begin the log of a crew in one process as a hub does; the hub's key.

    On a log that has begun, nothing changes.
    """
    name, outbox = config.crew.name, one_process_outbox(config, HUB)
    charter = Charter(crew=name, config=config_text(by_name(config)), task=task.fingerprint)
    keys = {me.name: one_process_identity(config, me.name).public for me in config.peer}
    outbox.put([charter, Roster(crew=name, number=0, keys=keys)])
    outbox.deliver(log)
    return outbox.key
