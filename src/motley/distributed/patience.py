"""Patience: how long a learner waits for its crewmates, and when it goes on without them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from motley.distributed.participant import Station
from motley.learning.waiting import Round
from motley.peers.peer import Peer
from motley.runs.lines import by_sender
from motley.trust.steadiness import UNLIKE

LEAST_WITNESSES = 2  # whatever the quorum: no peer is believed alone in what the crew has done
MOST_NAMED = 16  # of those who are waited for, in a sentence
REMEDY_S = 60.0  # of waiting, after which it also says what can be done


class Patience:
    def __init__(self, station: Station, peer: Peer) -> None:
        self._station, self._peer = station, peer
        self._since_s = station.clock.elapsed_s()
        self._last_rounds: dict[str, int] | None = None  # in which others are heard, once asked

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
        if self._station.log.connection.trouble:
            return False
        if peer.pace.awaits_others and self._is_vain():
            return True
        if crew.deadline_s == 0:
            return False
        if self.waited_s >= crew.deadline_s:
            return True
        if not peer.pace.awaits_others:
            return False
        if self.has_gone_on(peer.learned_rounds):
            return True
        awaited = peer.awaited()
        self._station.presence.await_beats(awaited)
        return peer.me.name not in awaited and all(self._is_gone(name) for name in awaited)

    def _is_vain(self) -> bool:
        """Whether everything came that is waited for, and was refused: it does not come again."""
        awaited = self._peer.awaited()
        return bool(awaited) and awaited == self._peer.forgone()

    @property
    def stuck(self) -> str:
        """Why what is waited for can never come, in words; empty if it may."""
        peer = self._peer
        if not peer.crewmates:
            return f"every peer that samples for {peer.me.name} is muted, {self._why(peer.senders)}"
        if not (peer.pace.awaits_others and self._is_vain()):
            return ""
        names = peer.awaited()
        return (
            f"round {peer.learned_rounds + 1} cannot go on: groups of {', '.join(names)} came and "
            f"do not count, and it needs those of {self._station.config.quorum} peers, "
            f"{self._why(names)}"
        )

    def _why(self, names: Sequence[str]) -> str:
        """What was refused of peers, and what to do about it."""
        admission = self._peer.admission
        counts = by_sender(admission.refused)
        said = [f"{name}: {_counted(counts[name])}" for name in names if name in counts]
        last = [kept.detail for kept in admission.kept if kept.sender in names][-1:]
        unlike = any(UNLIKE & counts.get(name, {}).keys() for name in names)
        remedy = (
            "if rewards come out differently each time or on each machine, set "
            "crew.check_rewards = false and resume"
            if unlike
            else "see Groups are refused in docs/troubleshooting.md"
        )
        return "; ".join(
            [f"refused {', '.join(said)}", *(f"the last because {why}" for why in last), remedy]
        )

    def has_gone_on(self, round: int) -> bool:
        """Whether the crew has closed a lockstep round without this peer. Only a quorum may say so.

        Those that really went on are at least a quorum: nobody closes a round without groups of a
        quorum (`Lockstep.choose`), and who published a later round has closed this one
        (`Lockstep.may_sample`), so that fewer would stand in the next round and wait for us. And
        what they closed it with is on the log, so that we can close it with the same.
        """
        peer, crewmates = self._peer, self._peer.crewmates
        others = set(crewmates) - {peer.me.name}
        quorum = max(LEAST_WITNESSES, self._station.config.quorum)
        ahead = {c.group.origin.peer for c in peer.waiting if c.group.round > round}
        ahead.update(early.place.sender for early in peer.early)
        closed = Round(round, crewmates, quorum, closed=True)
        there = {
            c.group.origin.peer
            for c in peer.waiting.whole_families(closed)
            if c.group.round == round
        }
        return len(self._witnesses(ahead, round)) >= quorum and len(there & others) >= quorum

    def _witnesses(self, ahead: Collection[str], round: int) -> list[str]:
        """Who is ahead of a round and would have waited for this peer in it.

        Where each hears some of the others only, who does not hear this peer goes on without it
        and says nothing by that.
        """
        peer = self._peer
        besides = {peer.me.name, *peer.admission.revoked}
        return [
            name
            for name in ahead
            if name not in besides
            and peer.scrutiny.is_awaited(name)
            and peer.hearing.is_heard_by(name, round)
        ]

    def is_all_there(self) -> bool:
        """Whether nothing is to come that a step would wait for, in an async crew."""
        # a deadline is for others: own groups are on their way
        return (not self._peer.waiting.own_per_step and self.is_closed()) or all(
            self._has_sent_all(name) or self._has_ended(name) for name in self._sources()
        )

    def _sources(self) -> list[str]:
        """Without whose groups an async step is not taken: its own, or anybody's."""
        peer = self._peer
        return [peer.me.name] if peer.waiting.own_per_step else peer.crewmates

    def _has_sent_all(self, name: str) -> bool:
        """Whether nothing is to come of a sender; where it is heard in some rounds only, of the
        last of these.
        """
        peer = self._peer
        if peer.hearing.is_always_heard(name):
            return peer.admitted.complete[name] >= self._station.config.crew.rounds
        if self._last_rounds is None:
            self._last_rounds = peer.hearing.last_rounds()
        return name not in self._last_rounds or peer.admitted.is_whole(
            name, self._last_rounds[name]
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
        if self.stuck:
            return self.stuck
        if not peer.pace.awaits_others:
            return "; ".join([self._how_many(), *self._last()])
        awaited, refused = peer.awaited(), by_sender(peer.admission.refused)
        waiting = (
            f"round {peer.learned_rounds + 1}: waiting for {', '.join(awaited)} for "
            f"{self.waited_s:.0f} s"
        )
        why = {
            name: f"{sum(counts.values())} records of {name} were refused: {', '.join(counts)}"
            for name, counts in refused.items()
        }
        reasons = [why[name] for name in awaited if name in why]
        return "; ".join([waiting, *reasons, *self._remedy(awaited)])

    def _how_many(self) -> str:
        waiting = self._peer.waiting
        if share := waiting.own_per_step:
            return f"waiting for its own groups: {waiting.num_own} of {share} are there"
        return f"waiting for groups: {len(waiting)} are there"

    def _last(self) -> list[str]:
        """Whose groups an async crew still waits for, once all its own are sampled."""
        rounds, peer = self._station.config.crew.rounds, self._peer
        if peer.half.sampled_rounds < rounds:
            return []
        late = [name for name in self._sources() if not self._has_sent_all(name)]
        words = [
            f"{name} has sent {peer.admitted.complete[name]} of {rounds} rounds"
            if peer.hearing.is_always_heard(name)
            else f"{name} has not sent the last of its rounds that are heard"
            for name in late[:MOST_NAMED]
        ]
        return [*words, *self._remedy(late)]

    def _remedy(self, late: list[str]) -> list[str]:
        others = [name for name in late if name != self._peer.me.name]
        if self.waited_s < REMEDY_S or not others:
            return []
        return [f"to go on without one, the hub's owner says motley hub ... --revoke {others[0]}"]


def _counted(counts: Mapping[str, int]) -> str:
    """{"reward": 2} -> "2 for reward"."""
    return ", ".join(f"{times} for {reason}" for reason, times in counts.items())
