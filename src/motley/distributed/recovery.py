"""Recovery: what a learner keeps in its folder, so that it can be killed at any moment.

What was sampled is in the outbox, what was learned from is in the journal, the rest is in the
newest checkpoint; the log has everything else, and the same steps are taken again from the same
groups.

Where some of it is lost, or the folder is an older copy, the log knows more of this peer than its
folder. Then it goes on from what it has, behind what it has published: it learns again what it had
learned, not bit for bit the same, and publishes nothing under an id that the log has.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from motley.distributed.participant import Station
from motley.exchange import LogError
from motley.exchange.arriving import ArrivingLog
from motley.files import replace, sync
from motley.learning.checkpoint import checkpoints, load_newest, save_checkpoint, save_training
from motley.learning.journal import Journal
from motley.peers.peer import Peer
from motley.peers.state import PeerState
from motley.records import Weights
from motley.trust import known


class LearnerState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A learner in a checkpoint."""

    metrics_bytes: int
    over: bool  # there is nothing more to come, whatever the round
    rounds: int = 0  # of the crew then; 0: a checkpoint of version 0.5, whose crew stays as it is
    peer: PeerState


@dataclass(frozen=True, slots=True)
class Recovery:
    station: Station
    peer: Peer
    journal: Journal

    def save(self, over: bool) -> None:
        """`over`: there is nothing more to come, whatever the round."""
        peer, run = self.peer, self.station.run
        sync(run.metrics)
        state = LearnerState(
            metrics_bytes=run.metrics.stat().st_size,
            over=over,
            rounds=run.config.crew.rounds,
            peer=peer.state(),
        )
        root = self.station.folder / "checkpoints"
        save_checkpoint(
            root,
            peer.learned_rounds,
            state,
            lambda f: save_training(peer.learner.policy, peer.learner.optimiser, f / peer.me.name),
        )
        self.journal.forget_before(int(checkpoints(root)[0].name.removeprefix("round-")))
        self._keep_refusals()
        self._tidy_blobs()

    def start_or_restore(self) -> bool:
        """Begin with a first checkpoint, or go on from the newest; whether it was over then."""
        station, peer, run = self.station, self.peer, self.station.run
        kept = checkpoints(station.folder / "checkpoints")
        if not kept:
            run.cut_metrics(0, station.say)
            self._check_journal(0)
            run.write([run.first_line(peer)])
            self.save(over=False)
            return False
        whole, state = load_newest(station.folder / "checkpoints", LearnerState, station.say)
        run.cut_metrics(state.metrics_bytes, station.say)
        longer = 0 < state.rounds < run.config.crew.rounds
        if state.over and longer:
            run.cut_last_line(station.say)
        self._check_journal(state.peer.learned_rounds)
        if isinstance(peer.log, ArrivingLog):
            peer.log.here = max(state.peer.cursor, self.journal.cursor)
        station.joining.patiently(lambda: run.restore(peer, whole, state.peer))
        station.say(f"going on after round {peer.learned_rounds}")
        return state.over and not longer

    def _check_journal(self, round: int) -> None:
        if num_lost := self.journal.forget_unreachable(round):
            self.station.say(
                f"the journal lacks a step after round {round}: {num_lost} behind it are taken anew"
            )

    def mend(self) -> None:
        """Go on behind what the log has of this peer, its newest version included."""
        mended = self.station.mend_outbox()
        if mended is None:
            return
        peer = self.peer
        peer.half.on_log = lambda group: group.id in mended.forgotten or group in peer.admitted
        if isinstance(content := known(mended.last)[0], Weights):
            self._go_behind(content.version)
            if peer.weights:
                peer.weights.published = content.version

    def _go_behind(self, version: int) -> None:
        """Versions are published once: a learner that lost some has other numbers for the next.

        What it has now is the version behind the newest, so that its samplers get all of it soon.
        """
        peer, rounds = self.peer, self.station.config.crew.rounds
        reach = max(peer.learner.policy.version, self.journal.reach)
        if version <= reach:
            return
        behind = min(version + 1, rounds)
        self.station.say(
            f"the log has version {version} of {peer.me.name}, and {self.station.folder} reaches "
            f"{reach} only: what was learned between is lost, going on from {reach} as {behind}"
        )
        peer.renumber(behind)
        self.save(over=False)

    def _keep_refusals(self) -> None:
        """The newest refusals, for people to look at; their records are on the log."""
        refusals = self.peer.admission.kept
        content = b"".join(msgspec.json.encode(refusal) + b"\n" for refusal in refusals)
        replace(self.station.folder / "refused.jsonl", content)

    def _tidy_blobs(self) -> None:
        """Have the store forget versions that no sampler can need.

        Only once this process knows what they are.
        """
        publisher = self.peer.weights.publisher if self.peer.weights else None
        blobs = self.station.blobs
        # the first of this process may never have been stored
        if publisher and blobs and publisher.num_anchors > 2:
            with suppress(LogError):  # at the next checkpoint, then
                blobs.keep_only(publisher.needed())
