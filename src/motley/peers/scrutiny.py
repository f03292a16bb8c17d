"""Scrutiny: what a receiver makes of everyone who sends to it, beyond single records.

Admission judges a record by itself; here a sender is judged by all it sent: the audit of its
log-probs, its habits, and the standing that follows from both. Owns what is drawn from a sender's
past; a peer asks it whom to await, whose groups to leave, which tokens not to push up.

| when | it takes in | it may say |
|---|---|---|
| a record is refused | the reason | the sender is muted |
| a step is chosen | tokens and log-probs | who is muted, what to audit, what to withhold |
| a step was taken | the learner's log-probs, who broke it | the sender is muted |
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from motley.config import Trust
from motley.learning.learner import StepReport
from motley.learning.readings import BySpans, Floats, Reading
from motley.learning.select import Candidate
from motley.peers.sampling import SamplerHalf
from motley.records import Group, Problem, Sampling
from motley.trust import RefusedRecord
from motley.trust.audit import Audit, AuditState
from motley.trust.habits import WINDOW, Habits, Mask
from motley.trust.standing import Standing, StandingState, Suspicion

BROKE_A_STEP = "a step that is no number"
ROUNDS_OF_HABITS = 2  # whose senders are remembered, where a round hears some of them only

Familiar = Callable[[Problem], Sequence[int]]  # the tokens of a problem and of its answer


class HeardGroup(NamedTuple):
    """A group that was admitted, with its problem and its place in the log."""

    group: Group
    problem: Problem
    position: int


class ScrutinyState(msgspec.Struct, frozen=True, kw_only=True):
    """In a checkpoint. Habits are read again from the groups at these places of the log."""

    audit: AuditState = AuditState()
    standing: StandingState = StandingState()
    heard: list[int] = []


@dataclass(slots=True)
class Scrutiny:
    me: str
    rules: Trust
    sampling: Sampling
    vocabulary_size: int
    familiar: Familiar
    secret: bytes  # nobody else can tell what will be audited
    most_senders: int = 0  # whose habits are remembered; 0: everyone's
    audit: Audit = field(init=False)
    habits: Habits = field(init=False)
    standing: Standing = field(init=False)
    _heard: dict[str, deque[int]] = field(default_factory=dict)  # places of the newest groups
    _evident: set[str] = field(default_factory=set)  # against whom the audit has something

    def __post_init__(self) -> None:
        self.audit = Audit(self.sampling, self.vocabulary_size, self.rules.alpha)
        self.habits = Habits(self.me, self.most_senders)
        self.standing = Standing(self.rules.mute_rounds)

    # Taking in

    def refused(self, refused: RefusedRecord, now: int) -> list[str]:
        """A record was refused in round `now`; who is muted for it.

        Where others may write under a sender's name, only what it signed is held against it.
        """
        sender = refused.sender
        if not refused.signed or sender == self.me:
            return []
        return [sender] if self.standing.strike(sender, refused.reason, now) else []

    def hear(self, taken: Sequence[Candidate], now: int) -> list[str]:
        """Groups are to be learned from in round `now`; who is muted for what they show."""
        for candidate in taken:
            if candidate.group.branch:  # ends of answers, whose beginnings are another's
                continue
            if self.rules.habits:
                heard = HeardGroup(candidate.group, candidate.problem, candidate.position)
                self._learn_habits(heard)
            if self.rules.alpha and candidate.group.origin.peer != self.me:
                self._hear_tokens(candidate)
        senders = sorted({c.group.origin.peer for c in taken} - {self.me})
        return [name for name in senders if self._convict(name, now)]

    def _hear_tokens(self, candidate: Candidate) -> None:
        """Bet on tokens as their sender drew them."""
        reading = candidate.reading
        if isinstance(reading, Reading):
            self.audit.hear(reading.sent, len(reading.pair.sender))
        else:
            self.audit.hear(candidate.group)

    def _learn_habits(self, heard: HeardGroup) -> None:
        sender = heard.group.origin.peer
        gone = self.habits.hear(sender, heard.group.rollouts, self.familiar(heard.problem))
        places = self._heard.setdefault(sender, deque(maxlen=WINDOW))
        places.append(heard.position)
        if self.most_senders:  # in the order of the habits, so that they are read again in it
            self._heard[sender] = self._heard.pop(sender)
            self._heard.pop(gone, None)

    def settle(self, taken: Sequence[Candidate], report: StepReport, now: int) -> list[str]:
        """A step was taken in round `now`; who is muted for what it showed."""
        for candidate in taken:
            if candidate.position in report.log_ratios:
                self._compare(candidate, report.log_ratios[candidate.position])
        broke = [name for name in report.blamed if self.standing.mute(name, BROKE_A_STEP, now)]
        senders = sorted({c.group.origin.peer for c in taken} - {self.me})
        return [*broke, *(name for name in senders if self._convict(name, now))]

    def forgo(self, candidate: Candidate) -> None:
        """A group cannot be read. What was bet on it is lost: to take it for never sent would be to
        bet on what can be read only, with hindsight.
        """
        if self.rules.alpha and candidate.group.origin.peer != self.me:
            self._hear_tokens(candidate)
            self._compare(candidate, [])
            self._weigh(candidate.group.origin.peer)

    def _weigh(self, sender: str) -> None:
        """Note whether the audit has something against a sender, so that not everyone who was ever
        heard is asked for in every round.
        """
        if self._suspicion(sender).is_worth_showing:
            self._evident.add(sender)
        else:
            self._evident.discard(sender)

    def _compare(self, candidate: Candidate, log_ratios: Sequence[Floats]) -> None:
        """Bet on what the learner makes of a group: tokens, or spans of another vocabulary."""
        sender, reading = candidate.group.origin.peer, candidate.reading
        if not isinstance(reading, Reading):
            self.audit.compare(sender, log_ratios)
            return
        spans = [read.spans for read in reading.rollouts if isinstance(read, BySpans)]
        paid = [one.wagers(ratios) for one, ratios in zip(spans, log_ratios, strict=True)]
        self.audit.compare_spans(
            sender,
            np.concatenate([*paid, np.empty(0)]),
            np.concatenate([*(one.num_sent_S for one in spans), np.empty(0, np.int64)]),
            reading.num_forgone(),
        )

    def begin_round(self, now: int) -> None:
        """Strikes fade, sentences end; who is heard again is audited anew."""
        for sender in self.standing.begin_round(now):
            self.audit.forget(sender)

    def pardon(self, sender: str) -> None:
        self.standing.pardon(sender)
        self.audit.forget(sender)

    def _convict(self, sender: str, now: int) -> bool:
        self._weigh(sender)
        lie = self.audit.lie(sender)
        return lie is not None and self.standing.mute(sender, f"log-probs {lie}", now)

    # Answering

    def is_muted(self, sender: str) -> bool:
        return sender in self.standing.muted

    def is_awaited(self, sender: str) -> bool:
        return self.standing.is_awaited(sender)

    def audited(self, taken: Sequence[Candidate]) -> frozenset[int]:
        """One group of every other sender, chosen by nothing that its sender could know."""
        if not self.rules.alpha:
            return frozenset()
        chosen: dict[str, tuple[bytes, int]] = {}
        for candidate in taken:
            sender = candidate.group.origin.peer
            if sender != self.me:
                drawn = hashlib.blake2b(candidate.hash, key=self.secret[:64]).digest()
                lot = (drawn, candidate.position)
                chosen[sender] = min(chosen.get(sender, lot), lot)
        return frozenset(position for _, position in chosen.values())

    def withheld(self, taken: Sequence[Candidate]) -> Callable[[Candidate, int], Mask | None]:
        """Which tokens of a step's rollouts are not to be pushed up."""
        senders = {c.group.origin.peer for c in taken} - {self.me}
        habits = {name: self.habits.of(name) for name in senders} if self.rules.habits else {}

        problems = {c.position: c.problem for c in taken}
        familiar = lru_cache(maxsize=1)(lambda position: self.familiar(problems[position]))

        def mask(candidate: Candidate, number: int) -> Mask | None:
            known = habits.get(candidate.group.origin.peer)
            if known is None or known.is_plain:
                return None
            tokens = candidate.group.rollouts[number].tokens
            return known.withheld(tokens, familiar(candidate.position))

        return mask

    def suspicions(self) -> dict[str, Suspicion]:
        """Everyone against whom there is something to show."""
        standing = self.standing
        names = {*standing.strikes, *standing.muted, *self._evident} - {self.me}
        return {
            name: suspicion
            for name in sorted(names)
            if (suspicion := self._suspicion(name)).is_worth_showing
        }

    def _suspicion(self, name: str) -> Suspicion:
        sentence = self.standing.muted.get(name)
        return Suspicion(
            evidence=round(self.audit.evidence(name), 2),
            strikes=round(self.standing.strikes.get(name, 0.0), 2),
            muted=sentence.reason if sentence else "",
            until=sentence.until if sentence else None,
        )

    # For checkpoints

    def state(self) -> ScrutinyState:
        return ScrutinyState(
            audit=self.audit.state(),
            standing=self.standing.state(),
            heard=[position for places in self._heard.values() for position in places],
        )

    def load_state(self, state: ScrutinyState, heard: Sequence[HeardGroup]) -> None:
        """`heard`: the groups that stand where the state says, in its order."""
        self.habits, self._heard = Habits(self.me, self.most_senders), {}
        self.audit.load_state(state.audit)
        self.standing.load_state(state.standing)
        self._evident = set()
        for name in self.audit.senders:
            self._weigh(name)
        for one in heard:
            self._learn_habits(one)


def scrutiny_of(half: SamplerHalf) -> Scrutiny:
    """That of the peer which samples with this half."""
    task, policy, config = half.task, half.policy, half.config

    def familiar(problem: Problem) -> tuple[int, ...]:
        answer = policy.vocabulary.encode(task.target(problem)) if problem.answer else []
        return (*policy.prompts.ids(problem), *answer)

    alone = config.authors == [half.me.name]  # then there is nobody to tell habits of
    few = 0 if config.crew.hear is None else ROUNDS_OF_HABITS * config.num_heard(half.me.name)
    return Scrutiny(
        me=half.me.name,
        rules=msgspec.structs.replace(config.trust, habits=False) if alone else config.trust,
        sampling=config.sampling,
        vocabulary_size=policy.vocabulary.size,
        familiar=familiar,
        secret=half.outbox.secret(b"motley audit"),
        most_senders=few,
    )
