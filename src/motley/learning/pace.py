"""Pace: who waits for whom. A crew is in lockstep or asynchronous, and `pace_of` says which.

The two objects here answer every question that depends on it; nobody else looks at the crew file's
word. They own no state: what waits is in `Waiting`.

| pace | a step takes | it waits for | what is too old |
|---|---|---|---|
| `Lockstep` | one round | all crewmates' groups of it, or its close | nothing |
| `Async` | its own share of a round, and what is there of others | that share | is dropped, or \
samplers wait |
| `Async` without a share of its own | a round's worth, of any sender | as much | the same |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol

from motley.config import CrewConfig
from motley.learning.select import Candidate
from motley.learning.waiting import Round, Take, Wait, Waiting
from motley.records import Backlog, Group

MOST_OWN_ROUNDS = 2  # that wait for a peer which samples on
ROUNDS_AHEAD = 1  # by which an honest crewmate may be ahead, who closed the present one before us


class Pace(Protocol):
    """The questions, answered by `Lockstep` and `Async`."""

    @property
    def awaits_others(self) -> bool:
        """Whether a step waits for named crewmates, so that one can be late."""
        ...

    @property
    def may_run_dry(self) -> bool:
        """Whether a crew may end with fewer steps than rounds, because nothing more comes."""
        ...

    @property
    def samples_beside(self) -> bool:
        """Whether what is sampled beside a step, with the weights of before, is of use."""
        ...

    @property
    def rounds_unheard(self) -> int:
        """How many rounds to sample at most while the log cannot be read."""
        ...

    def may_sample(self, author: str, turns: Turns, waiting: Waiting) -> bool:
        """Whether it is time to sample the next round."""
        ...

    def has_sampled(self, turns: Turns) -> bool:
        """Whether the round that the next step learns from was sampled here already."""
        ...

    def wants(self, group: Group, learned_rounds: int) -> bool:
        """Whether a group that comes now can still be learned from."""
        ...

    def is_early(self, group: Group, learned_rounds: int) -> bool:
        """Whether what a group is for is so far off that it is left on the log until then."""
        ...

    def shed(self, waiting: Waiting, round: Round) -> None:
        """Let go of what will be too old before it has its turn, after groups came."""
        ...

    def awaited(self, waiting: Waiting, round: Round) -> list[str]:
        """Whose groups the next step waits for, by name."""
        ...

    def choose(self, waiting: Waiting, round: Round, again: Sequence[int] = ()) -> Wait | Take:
        """What the next step learns from.

        `again`: positions that the same step took before a crash.
        """
        ...

    def settle(self, waiting: Waiting, round: Round, replayed: bool) -> None:
        """Let go of what can no longer be learned from, after a step.

        `replayed`: as before a crash, which says nothing of what has become stale since.
        """
        ...


@dataclass(frozen=True, slots=True)
class Turns:
    """How far a peer is."""

    sampled: int  # rounds
    learned: int
    replayed: bool = False  # the next step was taken before a crash
    unread: int = 0  # of the sampled rounds, those on their way to the log and back


@dataclass(frozen=True, slots=True)
class Lockstep:
    """Everyone samples a round, then everyone learns from it."""

    config: CrewConfig
    awaits_others: ClassVar[bool] = True
    may_run_dry: ClassVar[bool] = False
    # the next round is sampled with the weights that the step makes
    samples_beside: ClassVar[bool] = False
    rounds_unheard: ClassVar[int] = 1

    def may_sample(self, author: str, turns: Turns, waiting: Waiting) -> bool:
        return turns.sampled <= turns.learned

    def has_sampled(self, turns: Turns) -> bool:
        return turns.sampled != turns.learned

    def wants(self, group: Group, learned_rounds: int) -> bool:
        return group.round >= learned_rounds

    def is_early(self, group: Group, learned_rounds: int) -> bool:
        return group.round > learned_rounds + ROUNDS_AHEAD

    def shed(self, waiting: Waiting, round: Round) -> None:
        """Nothing is ever too old."""

    def awaited(self, waiting: Waiting, round: Round) -> list[str]:
        there = Counter(
            c.group.origin.peer
            for c in waiting
            if c.group.round == round.number and not c.group.branch
        )
        return [name for name in round.crewmates if there[name] < self.config.problems_per_peer]

    def choose(self, waiting: Waiting, round: Round, again: Sequence[int] = ()) -> Wait | Take:
        # The round decides, also again. Nothing is stale: how early a crewmate's groups came must
        # not matter.
        ready = [
            replace(c, since=waiting.window.version)
            for c in waiting.whole_families(round)
            if c.group.round == round.number
        ]
        # What was refused before the crash, and is taken on trust now, comes too late for it.
        before = [c for c in ready if c.position in again]
        if again and len(before) == len(again):
            ready = before
        authors = {c.group.origin.peer for c in ready if not c.group.branch}
        enough = not self.awaited(waiting, round) or (round.closed and len(authors) >= round.quorum)
        if not ready or not enough:
            return Wait()
        taken = waiting.take(ready)
        # a round is over once learned from: what was not taken is not wanted later
        waiting.drop(lambda c: c.group.round <= round.number, "not selected")
        return Take(taken)

    def settle(self, waiting: Waiting, round: Round, replayed: bool) -> None:
        """Nothing is left of a round that is over."""


@dataclass(frozen=True, slots=True)
class Async:
    """Who samples takes a step once its own share of a round is there, with what of others is
    there and fresh. So it takes as many steps as it samples rounds, and waits for nobody.

    A learner without samples of its own takes one once there is a round's worth, of any sender. So
    does everyone in a horizontal crew, of groups that have all their parts.
    """

    config: CrewConfig
    awaits_others: ClassVar[bool] = False
    may_run_dry: ClassVar[bool] = True

    @property
    def samples_beside(self) -> bool:
        # Where nothing older than the present version is learned from, it would all be dropped.
        rules = self.config.learning
        return not self._drops or rules.max_age > 0 or rules.max_age_s > 0

    @property
    def rounds_unheard(self) -> int:
        return max(1, self.config.learning.max_age)

    @property
    def _drops(self) -> bool:
        return self.config.learning.stale == "drop"

    def may_sample(self, author: str, turns: Turns, waiting: Waiting) -> bool:
        if turns.replayed:
            return False
        if not self._drops:
            return not holds_up(waiting.backlog, author, self.config)
        own = waiting.own_per_step
        if not own:
            return True
        # What is sampled now is learned from after these, and must not be too old by then.
        rules, there = self.config.learning, waiting.num_own
        oldest = max(1, rules.max_age) if rules.max_age_s else rules.max_age
        return turns.unread + there // own <= oldest and there <= MOST_OWN_ROUNDS * own

    def has_sampled(self, turns: Turns) -> bool:
        return False

    def wants(self, group: Group, learned_rounds: int) -> bool:
        return True

    def is_early(self, group: Group, learned_rounds: int) -> bool:
        return False

    def shed(self, waiting: Waiting, round: Round) -> None:
        # A step takes of a sender the first in order, and at most all that it takes at all. What
        # comes later pushes a group back or leaves it where it is: only steps bring it forward.
        most = self._most_of_sender(waiting)
        if not most or max(waiting.authors.values(), default=0) <= most:
            return
        places: Counter[str] = Counter()
        beyond: set[int] = set()
        for c in self._in_order(waiting.whole_families(round), waiting.own_per_step):
            if c.stranger and not c.group.branch:
                places[c.group.origin.peer] += 1
                if places[c.group.origin.peer] > most:
                    beyond.add(c.position)
        waiting.drop(lambda c: c.position in beyond, "stale")

    def _most_of_sender(self, waiting: Waiting) -> int:
        """How many groups of a sender can have their turn within the window; 0: no one knows."""
        rules, layout = self.config.learning, self.config.crew.layout
        bounded = self._drops and not rules.max_age_s and layout == "vertical"
        return (rules.max_age + 1) * waiting.per_step if bounded else 0

    def awaited(self, waiting: Waiting, round: Round) -> list[str]:
        return []

    def choose(self, waiting: Waiting, round: Round, again: Sequence[int] = ()) -> Wait | Take:
        # Where the window is in seconds, these have passed since.
        if self._drops and not (again and self.config.learning.max_age_s):
            waiting.drop_stale(round)
        if again:
            return waiting.take_again(again)
        whole, own = waiting.whole_families(round), waiting.own_per_step
        counted = {c.family for c in whole if not (c.group.branch or (own and c.stranger))}
        if len(counted) < (own or waiting.per_step):
            return Wait()
        taken = waiting.take(self._in_order(whole, own), own_most=own)
        # none: there is no own group yet to go with the foreign ones
        return Take(taken) if taken else Wait()

    def _in_order(self, whole: list[Candidate], own: int) -> list[Candidate]:
        """Put the freshest of each sender first: what is left over ages and is dropped.

        Of what this learner samples for itself the oldest: each step has a share of it, and none
        is to be left over. With "pace" nothing is dropped, and the oldest of everyone go first.
        """
        if not self._drops:
            return whole
        newest: dict[str, int] = {}
        for c in whole:
            newest[c.family] = max(c.since, newest.get(c.family, c.since))
        return sorted(whole, key=lambda c: 0 if own and not c.stranger else -newest[c.family])

    def settle(self, waiting: Waiting, round: Round, replayed: bool) -> None:
        if self._drops and not (replayed and self.config.learning.max_age_s):
            waiting.drop_incomplete(round)


def pace_of(config: CrewConfig) -> Pace:
    """The pace that the crew file asks for."""
    return Lockstep(config) if config.crew.pace == "lockstep" else Async(config)


def holds_up(backlog: Backlog, author: str, config: CrewConfig) -> bool:
    """Whether so much waits for a learner that an author should wait too.

    Never while the learner lacks a full step: that would be for ever. Nor while the author has less
    than its share of what waits: who sends too much holds up nobody else.

    In a horizontal crew only the author's own parts count: others may wait for those of a slower
    one, which must go on.
    """
    waiting = dict(backlog.waiting)
    its = waiting.get(author, 0)
    total = its if config.crew.layout == "horizontal" else sum(waiting.values())
    rules, per_step, share = (
        config.learning,
        config.problems_per_step(config.student_of(author)),
        config.problems_per_peer,
    )
    if rules.max_age_s:
        return its >= share and total >= per_step and backlog.oldest_s > rules.max_age_s
    window = max(1, rules.max_age)
    return its > window * share and total > window * per_step
