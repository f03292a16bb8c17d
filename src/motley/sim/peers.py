"""How simulated peers live: what they do next, how long it takes, what a crash takes from them.

The peers know nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from motley.config import PeerConfig
from motley.exchange import MemoryLog, Outbox
from motley.exchange.arriving import ArrivingLog
from motley.exchange.blobs import Blobs
from motley.learning.learner import StepReport
from motley.learning.waiting import Take, Wait
from motley.peers.follower import Sampler
from motley.peers.peer import Peer
from motley.peers.sampling import DrawnRound, Sampled
from motley.sim.events import Events


class World(Protocol):
    """What a simulated peer sees of the rest."""

    events: Events
    log: MemoryLog

    def blobs_of(self, learner: str) -> Blobs: ...

    def appended(self) -> None:
        """Something new is on the log."""
        ...

    def sampled(self, author: Sampler, sampled: Sampled) -> None: ...

    def learned(
        self, student: Peer, sampled: Sampled | None, report: StepReport | None, without: list[str]
    ) -> None: ...


class _Life:
    """Joining, leaving, crashing; one thing at a time."""

    def __init__(self, world: World, me: PeerConfig, outbox: Outbox, blobs: Blobs | None) -> None:
        self.world, self.me = world, me
        self.here = self.busy = False
        self._outbox, self._blobs = outbox, blobs
        self._due: set[float] = set()  # when something of the outbox arrives
        self._lives = 0  # what was planned in an earlier life does not happen
        self.gone = False
        events, churn = world.events, me.churn
        events.at(churn.join_s, self.come)
        for crash_s, restart_s in churn.crashes:
            events.at(crash_s, self.crash)
            events.at(restart_s, self.come)
        if churn.leave_s:
            events.at(churn.leave_s, self.leave)

    def come(self) -> None:
        self.here = True
        self.news()

    def leave(self) -> None:
        """Go for good. What is being done is not finished; what is on its way arrives."""
        self.crash()
        self.gone = True

    def crash(self) -> None:
        self.here = self.busy = False
        self._lives += 1

    def news(self) -> None:
        """Look at the log, then at what to do."""
        raise NotImplementedError

    def takes(self, seconds: float, then: Callable[[], None]) -> None:
        """Be busy for so long; then, unless there was a crash, have it done."""
        self.busy = True
        life = self._lives

        def done() -> None:
            if life == self._lives:
                self.busy = False
                then()

        self.world.events.after(seconds, done)

    def send(self) -> None:
        """Have what is in the outbox arrive when it is due."""
        due_s = self._outbox.due_s
        if due_s < math.inf and due_s not in self._due:
            self._due.add(due_s)
            self.world.events.at(due_s, self._arrive)

    def _arrive(self) -> None:
        self._due.discard(self.world.events.clock.now_s())
        self._outbox.deliver(self.world.log, self.world.events.clock.now_s(), self._blobs)
        self.delivered()
        self.send()
        self.world.appended()

    def delivered(self) -> None:
        """The way is free again."""


class SimSampler(_Life):
    def __init__(self, world: World, sampler: Sampler) -> None:
        self.sampler = sampler
        super().__init__(world, sampler.me, sampler.half.outbox, None)

    def crash(self) -> None:
        super().crash()
        self.sampler.forget()

    def news(self) -> None:
        if self.here:
            while not self.sampler.receive():
                pass
            self._renew()

    def _renew(self) -> None:
        if not self.here:
            return
        before = self.sampler.transfer
        self.sampler.renew()
        if self.sampler.transfer and self.sampler.transfer is not before:
            self.world.events.at(self.sampler.transfer.arrives_s, self._renew)
        self._next()

    def _next(self) -> None:
        if self.busy or self.sampler.finished or not self.sampler.may_sample():
            return
        drawn = self.sampler.half.draw()
        self.takes(drawn.sampled.num_tokens / self.me.speed.sample, partial(self._keep, drawn))

    def _keep(self, drawn: DrawnRound) -> None:
        self.world.sampled(self.sampler, self.sampler.half.keep(drawn))
        self.send()
        self._next()


class SimStudent(_Life):
    """A peer or a learner.

    A step that a crash interrupts is taken again, from the same groups: they are in its journal.
    """

    def __init__(self, world: World, peer: Peer) -> None:
        self.peer = peer
        self._chosen: Take | Wait = Wait()
        self._sampled: Sampled | None = None
        self._waits_since_s = 0.0
        self._without: list[str] = []  # who was late for what was chosen
        self._looks: set[float] = set()  # when something arrives
        super().__init__(
            world,
            peer.me,
            peer.half.outbox,
            world.blobs_of(peer.me.name) if peer.weights else None,
        )

    def come(self) -> None:
        self.peer.publish_weights()
        self.send()
        super().come()

    def delivered(self) -> None:
        if self.here:
            self.peer.publish_weights()

    @property
    def finished(self) -> bool:
        return self.peer.learned_rounds >= self.peer.config.crew.rounds

    @property
    def over(self) -> bool:
        """Nobody waits for it any more."""
        return self.finished or self.gone

    def hears_of(self, ids: Sequence[str]) -> bool:
        """Whether one of these records on the log may matter to it.

        At the end of a slow link each does: its way begins when it is first seen.
        """
        hearing = self.peer.hearing
        if not hearing.is_partial or isinstance(self.peer.log, ArrivingLog):
            return True
        return any(map(hearing.may_matter, ids))

    def news(self) -> None:
        if not self.here or self.finished:
            return
        self.peer.receive_all()
        if isinstance(self.peer.log, ArrivingLog):
            self._look_again(self.peer.log.next_s)
        self._next()

    def _look_again(self, at_s: float) -> None:
        if at_s < math.inf and at_s not in self._looks:
            self._looks.add(at_s)
            self.world.events.at(at_s, self.news)

    def _next(self) -> None:
        if self.busy or self.finished or not self.here:
            return
        if isinstance(self._chosen, Wait):
            self._without = self._late()
            self._chosen = self.peer.choose(closed=bool(self._without))
        if isinstance(self._chosen, Take):
            tokens = sum(len(r.tokens) for c in self._chosen.groups for r in c.group.rollouts)
            self.takes(tokens / self.me.speed.learn, self._learn)
        elif self.peer.may_sample():
            drawn = self.peer.half.draw()
            self.takes(drawn.sampled.num_tokens / self.me.speed.sample, partial(self._keep, drawn))

    def _late(self) -> list[str]:
        """Who is late for the round by more than the deadline."""
        crew = self.peer.config.crew
        if not self.peer.pace.awaits_others or not crew.deadline_s or not self._sampled:
            return []
        late_s = self._waits_since_s + crew.deadline_s
        if self.world.events.clock.now_s() >= late_s:
            return self.peer.awaited()
        self.world.events.at(late_s, self._next)
        return []

    def _keep(self, drawn: DrawnRound) -> None:
        self._sampled = self.peer.half.keep(drawn)
        self._waits_since_s = self.world.events.clock.now_s()
        self.send()
        self._next()

    def _learn(self) -> None:
        assert isinstance(self._chosen, Take)
        report = self.peer.step(self._chosen)
        self._chosen = Wait()
        self.peer.publish_weights()
        self.world.learned(self.peer, self._sampled, report, self._without)
        self._sampled = None
        self.send()
        self._next()
