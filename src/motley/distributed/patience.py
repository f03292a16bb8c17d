"""Patience: how long a learner waits for its crewmates, and when it goes on without them."""

from __future__ import annotations

from motley.distributed.participant import Station
from motley.peer import Peer
from motley.run import by_sender


class Patience:
    def __init__(self, station: Station, peer: Peer) -> None:
        self._station, self._peer = station, peer
        self._since_s = station.clock.elapsed_s()

    def begin_anew(self) -> None:
        """A round begins; or the hub is away, and who cannot be heard is not late."""
        self._since_s = self._station.clock.elapsed_s()

    @property
    def waited_s(self) -> float:
        """For crewmates, while connected."""
        return self._station.clock.elapsed_s() - self._since_s

    def is_closed(self) -> bool:
        """Whether to go on with what is there.

        Never while the hub cannot be reached: then it is we who are missing.
        """
        crew, peer = self._station.config.crew, self._peer
        if crew.deadline_s == 0 or self._station.log.connection.trouble:
            return False
        if self.waited_s >= crew.deadline_s:
            return True
        if not peer.pace.awaits_others:
            return False
        awaited = peer.awaited()
        if any(
            c.group.round > peer.learned_rounds
            for c in peer.waiting
            if c.group.origin.peer not in awaited
        ):
            return True  # the crew has closed this round long ago
        return peer.me.name not in awaited and all(self._is_gone(name) for name in awaited)

    def is_all_there(self) -> bool:
        """Whether no crewmate has anything to come, in an async crew."""
        rounds, peer = self._station.config.crew.rounds, self._peer
        return self.is_closed() or all(
            peer.admitted.complete[name] >= rounds or self._has_ended(name)
            for name in peer.crewmates
        )

    def _is_gone(self, name: str) -> bool:
        heard = self._station.presence.heard.get(name)
        return heard is not None and heard.gone

    def _has_ended(self, name: str) -> bool:
        """A sampler makes as many rounds as its learner's steps take, and then says so."""
        heard = self._station.presence.heard.get(name)
        return (
            self._station.config.named(name).role == "sampler"
            and heard is not None
            and heard.state == "finished"
        )

    def words(self) -> str:
        """What it waits for."""
        peer = self._peer
        if not peer.pace.awaits_others:
            return f"waiting for groups: {len(peer.waiting)} are there"
        awaited, refused = peer.awaited(), by_sender(peer.admission.refused)
        waiting = (
            f"round {peer.learned_rounds + 1}: waiting for {', '.join(awaited)} for "
            f"{self.waited_s:.0f} s"
        )
        why = {
            name: f"{sum(counts.values())} records of {name} were refused: {', '.join(counts)}"
            for name, counts in refused.items()
        }
        return "; ".join([waiting, *(why[name] for name in awaited if name in why)])
