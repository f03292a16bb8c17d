"""Recovery: what a learner keeps in its folder, so that it can be killed at any moment.

What was sampled is in the outbox, what was learned from is in the journal, the rest is in the
newest checkpoint; the log has everything else, and the same steps are taken again from the same
groups.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import msgspec

from motley.distributed.participant import Station
from motley.exchange import LogError
from motley.exchange.arriving import ArrivingLog
from motley.files import replace, sync
from motley.learning.checkpoint import checkpoints, load_manifest, save_checkpoint, save_training
from motley.learning.journal import Journal
from motley.peers.peer import Peer
from motley.peers.state import PeerState
from motley.records import Weights
from motley.trust import known


class LearnerState(msgspec.Struct, frozen=True, kw_only=True):
    """A learner in a checkpoint."""

    metrics_bytes: int
    over: bool  # there is nothing more to come, whatever the round
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
        state = LearnerState(metrics_bytes=run.metrics.stat().st_size, over=over, peer=peer.state())
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
            run.cut_metrics(0, station.folder)
            run.write([run.first_line(peer)])
            self.save(over=False)
            return False
        state = load_manifest(kept[-1], LearnerState)
        run.cut_metrics(state.metrics_bytes, kept[-1])
        if isinstance(peer.log, ArrivingLog):
            peer.log.here = max(state.peer.cursor, self.journal.cursor)
        station.joining.patiently(lambda: run.restore(peer, kept[-1], state.peer))
        station.say(f"going on after round {peer.learned_rounds}")
        return state.over

    def mend(self) -> None:
        """Go on behind what the log has of this peer, its newest version included."""
        last = self.station.mend_outbox()
        if last and isinstance(content := known(last)[0], Weights):
            self._check_reach(content.version)
            if self.peer.weights:
                self.peer.weights.published = content.version

    def _check_reach(self, version: int) -> None:
        """Versions are published once: a learner that lost its folder cannot make other ones."""
        reach = max(self.peer.learner.policy.version, self.journal.reach)
        if version > reach:
            raise ValueError(
                f"the log has version {version} of {self.peer.me.name}, and "
                f"{self.station.folder} reaches {reach} only; "
                "come back with the folder it learned in (--out), or begin the crew anew under "
                "another name"
            )

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
