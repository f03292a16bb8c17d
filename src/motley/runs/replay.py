"""Replay: a run's steps taken again from its log, as if some senders had never been there.

What such a sender put into the weights since a checkpoint is thereby taken out of them. Owns the
order of the steps and the new run folder; nothing is sampled, and the old folder is only read.
"""

from __future__ import annotations

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from motley.config import CrewConfig, PeerConfig, read_config
from motley.exchange import Entry, Log
from motley.learning.checkpoint import (
    checkpoints,
    load_manifest,
    load_training,
    save_checkpoint,
    save_training,
)
from motley.learning.waiting import Wait
from motley.peers.peer import Peer
from motley.peers.state import PeerState
from motley.runs.building import build_peer
from motley.runs.folder import Run, newest_checkpoint
from motley.runs.local import one_process_outbox
from motley.runs.metrics import LearnerLine

Unset = msgspec.UnsetType
Progress = Callable[[str, int, int], None]  # (peer, rounds done, rounds in all)


class SavedRun(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a crew in one process, or of a peer in its own: whichever was saved."""

    round: int | Unset = msgspec.UNSET
    log_records: int | Unset = msgspec.UNSET
    metrics_bytes: int
    over: bool | Unset = msgspec.UNSET
    rounds: int | Unset = msgspec.UNSET
    peer: PeerState | Unset = msgspec.UNSET
    peers: dict[str, PeerState] | Unset = msgspec.UNSET

    def of(self, name: str) -> PeerState:
        if isinstance(self.peers, dict):
            return self.peers[name]
        assert isinstance(self.peer, PeerState)
        return self.peer

    def with_states(self, states: dict[str, PeerState], metrics_bytes: int) -> SavedRun:
        if isinstance(self.peers, dict):
            return msgspec.structs.replace(self, peers=states, metrics_bytes=metrics_bytes)
        (state,) = states.values()
        return msgspec.structs.replace(self, peer=state, metrics_bytes=metrics_bytes)


@dataclass(frozen=True, slots=True)
class Replayed:
    """What became of a peer."""

    peer: str
    rounds: int  # taken again
    left_out: int  # groups of the senders that are left out
    before: dict[str, float]  # accuracy by kind, at the newest checkpoint
    after: dict[str, float]


def kept_rounds(folder: Path) -> list[int]:
    """The rounds from which a run's steps can be taken again; the oldest first."""
    newest_checkpoint(folder)
    return [int(path.name.removeprefix("round-")) for path in checkpoints(folder / "checkpoints")]


class KeptLog:
    """A log as it was at one moment. Nothing can be added to it."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = list(entries)
        self._positions = [entry.position for entry in entries]

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        raise ValueError("a log that is only kept for a replay takes no records")

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        start = bisect_right(self._positions, after)
        if not sender:
            return self._entries[start : start + limit]
        own = [e for e in self._entries[start:] if e.id.startswith(f"{sender}.")]
        return own[:limit]


@dataclass(frozen=True, slots=True)
class Replay:
    folder: Path
    log: Log
    hub: bytes
    without: Sequence[str]
    after: int  # the round from which steps are taken again; 0: the beginning
    out: Path

    def run(self, progress: Progress = lambda peer, done, total: None) -> list[Replayed]:
        """Take the steps again, and save the outcome as the newest checkpoint of a new folder."""
        config = read_config(self.folder / "config.toml")
        newest = newest_checkpoint(self.folder)
        saved = load_manifest(newest, SavedRun)
        mine = [me for me in config.students if (newest / me.name).exists()]
        self._check(config, mine)
        self._copy()
        run = Run(config, self.out, mixed=any(saved.of(me.name).admission.tables for me in mine))
        outcomes = [self._again(run, me, saved, newest, progress) for me in mine]
        peers = {peer.me.name: peer for _, peer in outcomes}
        states = {name: _moved_on(peer.state(), saved.of(name)) for name, peer in peers.items()}
        number = int(newest.name.removeprefix("round-"))

        def write(target: Path) -> None:
            for name, peer in peers.items():
                save_training(peer.learner.policy, peer.learner.optimiser, target / name)

        state = saved.with_states(states, run.metrics.stat().st_size)
        save_checkpoint(self.out / "checkpoints", number, state, write)
        return [outcome for outcome, _ in outcomes]

    def _check(self, config: CrewConfig, mine: Sequence[PeerConfig]) -> None:
        known = [peer.name for peer in config.peer]
        for name in self.without:
            if name not in known:
                raise ValueError(f"the crew has no peer {name!r}; it has {', '.join(known)}")
        if [me.name for me in mine] == list(self.without):
            raise ValueError(f"{mine[0].name} cannot be replayed without itself")
        kept = [0, *kept_rounds(self.folder)]
        if self.after not in kept:
            raise ValueError(
                f"there is no checkpoint of round {self.after}; choose one of "
                f"{', '.join(map(str, kept))} with --from (0 is the beginning)"
            )
        if self.out.exists() and any(self.out.iterdir()):
            raise ValueError(f"folder {self.out} is not empty; choose another with --out")

    def _copy(self) -> None:
        """Everything that the run can go on from, but for what is made again."""
        made_again = shutil.ignore_patterns("checkpoints", "metrics.jsonl", "journal.jsonl")
        shutil.copytree(self.folder, self.out, ignore=made_again, dirs_exist_ok=True)

    def _again(
        self, run: Run, me: PeerConfig, saved: SavedRun, newest: Path, progress: Progress
    ) -> tuple[Replayed, Peer]:
        peer = build_peer(run, me, self.log, one_process_outbox(run.config, me.name), self.hub)
        load_training(peer.learner.policy, peer.learner.optimiser, newest / me.name)
        peer.half.refresh()
        before = run.accuracies(peer).heldout
        peer = build_peer(run, me, self.log, one_process_outbox(run.config, me.name), self.hub)
        if self.after:
            checkpoint = self.folder / "checkpoints" / f"round-{self.after:06d}"
            run.restore(peer, checkpoint, load_manifest(checkpoint, SavedRun).of(me.name))
        else:
            run.cut_steps(me.name, 0)
        others = [name for name in self.without if name != me.name]
        for name in others:
            peer.scrutiny.standing.shut_out(name, "left out")
        dropped_before = _num_dropped(peer, others)
        peer.let_go(others, "muted")
        total = saved.of(me.name).learned_rounds
        for line in _steps(run, peer, total):
            run.write([line])
            progress(me.name, line.round, total)
        peer.receive_all()
        peer.half.refresh()
        outcome = Replayed(
            peer=me.name,
            rounds=peer.learned_rounds - self.after,
            left_out=_num_dropped(peer, others) - dropped_before,
            before=before,
            after=run.accuracies(peer).heldout,
        )
        return outcome, peer


def _steps(run: Run, peer: Peer, total: int) -> Iterator[LearnerLine]:
    """Steps in the order of the log: each as soon as what it waits for is there.

    At the end of the log, rounds that never became whole are closed with what there is of them.
    """
    while peer.learned_rounds < total:
        result = peer.learn()
        if isinstance(result, Wait):
            following = peer.log.read(peer.cursor, limit=1)
            if following:
                peer.receive(until=following[0].position)
                continue
            result = peer.learn(closed=True)
            if isinstance(result, Wait):
                return
        yield run.line(peer, peer.learned_rounds, None, result.report)


def _num_dropped(peer: Peer, senders: Sequence[str]) -> int:
    return sum(n for (name, _), n in peer.waiting.dropped.items() if name in senders)


def _moved_on(state: PeerState, saved: PeerState) -> PeerState:
    """The peer as it is after the replay, with what it had published when it was saved."""
    return msgspec.structs.replace(
        state, sampled_rounds=saved.sampled_rounds, head=saved.head, version=saved.version
    )
