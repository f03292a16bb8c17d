"""The role of a peer or a learner in a process of its own, in a crew whose log is on a hub.

Owns the order in which it receives, samples, learns, publishes and saves.

| it waits for | in | until |
|---|---|---|
| the hub | learning, hearing from others | it is back; sampling goes on within the window |
| crewmates' groups | lockstep | all are there, the deadline, or nobody awaited there |
| its own share of a round | async | it is on the log, or all its rounds are used up |
| a round's worth, without such a share | async | it is there, or nothing more is to come |
| its own sampling | learning | it is done; see `overlap.py` |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import msgspec

from motley.clock import timed
from motley.distributed.overlap import Overlap, TakeStep
from motley.distributed.pardons import Pardons
from motley.distributed.participant import Station
from motley.distributed.patience import Patience
from motley.distributed.recovery import Recovery
from motley.exchange import Log, LogError, Mark
from motley.exchange.arriving import ArrivingLog
from motley.learning.journal import Journal, WrittenStep
from motley.learning.learner import StepReport
from motley.learning.pace import Turns
from motley.learning.waiting import Wait
from motley.peers.peer import Peer
from motley.peers.sampling import Sampled
from motley.peers.spreading import spread
from motley.peers.torchrun import Ranks
from motley.runs.building import WarmProgress, build_peer, shared_policy
from motley.runs.metrics import LearnerLine, Timing


def begin_learning(
    station: Station, progress: WarmProgress | None, held: ExitStack, ranks: Ranks | None = None
) -> LearnerRole:
    """A peer as its folder and the log have it, with its present version in the outbox.

    The engine is checked before anything is restored, and the outbox mended before anything is put
    in it. `held`: what is let go when it leaves, in turn. `ranks`: its other devices' processes,
    where torchrun has started them.
    """
    hub = station.joining.membership.hub
    peer = build_peer(station.run, station.me, _seen_log(station), station.outbox, hub, progress)
    station.witness.rely_on(peer.admission)
    station.check_engine(peer.half)
    if peer.me.devices > 1:
        policy = partial(shared_policy, station.config, peer.me.name, peer.half.policy.dtype)
        held.callback(spread(peer, policy, ranks).close)
    recovery = Recovery(station, peer, Journal(station.folder / "journal.jsonl"))
    over = recovery.start_or_restore()
    recovery.mend()
    peer.publish_weights()
    return LearnerRole(station, peer, recovery, over)


def _seen_log(station: Station) -> Log:
    """The log as it is seen at this end of the link."""
    weather = station.config.weather(station.me.name, station.joining.membership.joined_s)
    return station.log if weather.link.instant else ArrivingLog(station.log, weather, station.clock)


def _sampled_before(peer: Peer) -> Sampled | None:
    """What was sampled of a lockstep round that was not learned from before the stop.

    A round that was passed over, or that the outbox has lost, is looked at anew.
    """
    if not peer.pace.has_sampled(Turns(peer.half.sampled_rounds, peer.learned_rounds)):
        return None
    sampled = peer.half.sampled_in(peer.learned_rounds)
    if sampled is None:
        peer.half.sampled_rounds = peer.learned_rounds
    return sampled


class LearnerRole:
    def __init__(self, station: Station, peer: Peer, recovery: Recovery, over: bool) -> None:
        self.station, self.peer = station, peer
        self.overlap = Overlap(station.config, peer.half, station.say)
        self._recovery, self._journal = recovery, recovery.journal
        self._patience = Patience(station, peer)
        # async: there is nothing more to come, though fewer steps were taken than there are rounds
        self._over = over
        self._sampled = _sampled_before(peer)
        self._sample_s = 0.0
        self._ahead = False  # the next turn's round was sampled beside the last step
        self._idle = False  # nothing on the log could be learned from
        self._without: list[str] = []  # who was not waited for
        self._pardons = Pardons(station.folder)
        self._pardoned: tuple[str, ...] = ()
        self._between = True  # two rounds: nothing was received for the next one yet

    @property
    def finished_rounds(self) -> int:
        return self.peer.learned_rounds

    @property
    def finished(self) -> bool:
        peer, crew = self.peer, self.station.config.crew
        if peer.learned_rounds >= crew.rounds or self._over:
            return True
        if self.station.me.role == "learner":
            return not peer.senders  # everyone was shut out; others go on for as long as it does
        if not peer.pace.may_run_dry or peer.half.sampled_rounds < crew.rounds or not self._idle:
            return False
        return self._patience.is_all_there()

    def waits_for(self) -> str:
        return self._patience.words()

    @property
    def stuck(self) -> str:
        return self._patience.stuck if self._idle else ""

    def save(self) -> None:
        self._recovery.save(self._over)

    # One turn

    def turn(self) -> LearnerLine | None:
        """Sample if it is time to, learn if it can. Where they overlap, or nobody is awaited, the
        other way round: what is sampled then is as fresh as can be.

        The metrics line of a finished round.
        """
        peer = self.peer
        done = self._journal.of(peer.learned_rounds)
        self._pardon(done)
        heard = self._receive_to(done.cursor) if done else self._try_to_receive()
        beside = done is None and heard and self._may_sample_beside()
        first = done is None and heard and not peer.pace.awaits_others
        step = self._choose(done) if beside or first else None
        if step is None:
            beside = False
            sampled = self._sample(replayed=done is not None)
            if done is None and (sampled or not heard):
                peer.receive()
            step = self._choose(done)
        if step is None:
            peer.publish_weights()
            self.station.courier.wake()
            if done:
                raise ValueError(
                    f"the log does not hold what round {peer.learned_rounds + 1} was learned from "
                    "before the restart"
                )
            return None
        self.station.tell("learning", self.finished_rounds)
        report, timing = self._learn(step, beside)
        peer.publish_weights()
        self.station.courier.wake()
        return self._round_is_over(report, timing)

    def _pardon(self, done: WrittenStep | None) -> None:
        """Hear senders again that the owner pardons. `done`: as before a crash."""
        if self._between:
            self._between = False
            self._pardoned = done.pardoned if done else self._pardons.asked
            for name in self._pardoned:
                self.peer.scrutiny.pardon(name)

    def _choose(self, done: WrittenStep | None) -> TakeStep | None:
        """The next step, written down, if there is enough for it.

        `done`: the same as before a crash.
        """
        peer = self.peer
        closed = done.closed if done else self._patience.is_closed()
        self._without = peer.awaited() if closed else []
        chosen = peer.choose(closed, again=done.positions if done else ())
        self._idle = isinstance(chosen, Wait)
        if isinstance(chosen, Wait):
            return None
        written = WrittenStep.of(
            peer.learned_rounds, peer.cursor, closed, chosen.groups, self._pardoned
        )
        self._journal.add(written)
        self._pardons.done(self._pardoned)
        return partial(peer.step, chosen, done is not None)

    def _learn(self, step: TakeStep, beside: bool) -> tuple[StepReport | None, Timing]:
        """Take the step, and sample beside it if asked to."""
        if beside:
            both = self.overlap.both(partial(step, refresh=False))
            self._sampled, self._ahead = both.sampled, both.sampled is not None
            return both.report, both.timing
        report, learn_s = timed(step, self.station.clock)
        if self._sampled and self._sampled.fresh:
            self.overlap.observe()
        return report, Timing(self._sample_s, learn_s)

    def _try_to_receive(self) -> bool:
        """Whether the log could be read. An error only if sampling cannot go on without it."""
        try:
            self.peer.receive()
        except LogError:
            self._patience.begin_anew()
            if not self.station.may_sample_unheard():
                raise
            return False
        return True

    def _receive_to(self, position: int) -> bool:
        while self.peer.cursor < position:
            before = self.peer.cursor
            self.peer.receive(until=position)
            if self.peer.cursor == before:
                raise ValueError(
                    f"the log ends at {before}, and this peer had read to {position}; is it "
                    "another log?"
                )
        return True

    def _sample(self, replayed: bool) -> bool:
        """Sample the next round if it is time to; whether something was sampled."""
        peer = self.peer
        if self._ahead or not peer.may_sample(replayed):
            self._ahead = False
            return False
        if peer.pace.awaits_others:  # nobody samples a round that it has learned from
            peer.half.sampled_rounds = max(peer.half.sampled_rounds, peer.learned_rounds)
        if self._is_past(peer.half.sampled_rounds, replayed):
            self._pass_over()
            return False
        self.station.tell("sampling", self.finished_rounds)
        self._sampled, self._sample_s = timed(peer.half.sample, self.station.clock)
        self.station.courier.wake()
        self._patience.begin_anew()
        return True

    def _pass_over(self) -> None:
        """Do not sample the next round.

        In lockstep it counts as sampled only once it is learned from: until then who had it may be
        shut out, and then it must be sampled after all.
        """
        self._sampled = None
        if not self.peer.pace.awaits_others:
            self.peer.half.sampled_rounds += 1

    def _may_sample_beside(self) -> bool:
        """Whether to sample the next round beside a step.

        What is to be learned from in that step counts as waiting, as it does in turn.
        """
        half = self.peer.half
        round, may = half.sampled_rounds, self.overlap.on and self.peer.may_sample()
        return may and half.sampled_in(round) is None and not self._is_past(round, replayed=False)

    def _is_past(self, round: int, replayed: bool) -> bool:
        """Nobody would use what is sampled now: it is on the log, or the crew went on.

        In an async crew nobody goes on without anyone: groups of every round are of use.
        """
        peer = self.peer
        if peer.half.outbox.note_of(Mark("round", round)) is not None:
            return False
        if peer.admitted.complete[peer.me.name] > round:
            return True
        if not peer.pace.awaits_others or self.station.config.crew.deadline_s == 0:
            return False
        return replayed or self._patience.has_gone_on(round)

    def _round_is_over(self, report: StepReport | None, timing: Timing) -> LearnerLine:
        peer = self.peer
        line = self.station.run.line(peer, peer.learned_rounds, self._sampled, report, timing)
        if self._without:
            line = msgspec.structs.replace(line, without=self._without)
        self._sampled, self._sample_s, self._between = None, 0.0, True
        self._patience.begin_anew()
        self._write(line)
        if (
            peer.learned_rounds == self.station.config.crew.rounds
            or peer.learned_rounds % self.station.config.learning.checkpoint_every == 0
        ):
            self.save()
        return line

    def _write(self, line: LearnerLine) -> None:
        """Others wait for this peer's groups, so it does not stop early; it says when it could."""
        stopping = self.station.run.stopping
        before = stopping.reason
        self.station.run.write([line])
        if stopping.reason and not before:
            self.station.say(f"{stopping.reason}; goes on for the crew, its best model is kept")

    def last_lines(self) -> Iterator[LearnerLine]:
        if self.finished_rounds >= self.station.config.crew.rounds or self._over:
            return
        line = self.station.run.last_line(self.peer)
        self.station.run.write([line])
        self._over = True
        self.save()
        yield line
