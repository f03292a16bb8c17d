"""Which admitted groups one step learns from.

Plain functions of the waiting groups; no model, no clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from motley.config import Learning
from motley.learning.readings import Reading, RolloutSpans
from motley.records import Group, Problem
from motley.spelling import Tokenwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An admitted group, waiting.

    Age is counted on the receiver's own clock, in its versions or in seconds.

    `since`: the version that sampled it, for a group of the receiver's own weights; the version at
    its arrival, for a foreign one.
    """

    group: Group
    problem: Problem
    own: bool  # sampled with the receiver's own weights, of whatever version
    stranger: bool  # sampled by another than the receiver, maybe with its weights
    # groups of one family share their statistics: parts of one problem from several authors have
    # the same
    family: str
    since: int
    position: int  # in the log
    came_s: float = 0.0
    hash: bytes = b""  # of the record
    # how a group of another vocabulary is read, whose rollouts have the receiver's tokens here
    reading: Reading | Tokenwise = Tokenwise()

    def spans_of(self, number: int) -> RolloutSpans | None:
        """Of a rollout that is compared by spans; None: each of its tokens is one."""
        return self.reading.spans_of(number) if isinstance(self.reading, Reading) else None

    def is_compared(self, number: int) -> bool:
        """Whether the log-probs of a rollout can be compared, so that a ratio of it exists."""
        return isinstance(self.reading, Tokenwise) or self.spans_of(number) is not None

    def letter_of(self, number: int, otherwise: str) -> str:
        """What became of a rollout that is not learned from for what it is."""
        if isinstance(self.reading, Tokenwise):
            return otherwise
        return self.reading.letter_of(number, otherwise)

    def sent_letters(self, letters: str) -> str:
        """A letter for each rollout as it was sent."""
        if isinstance(self.reading, Tokenwise):
            return letters
        return self.reading.sent_letters(letters)

    def sent_number(self, number: int) -> int:
        """The number of a rollout as it was sent."""
        if isinstance(self.reading, Tokenwise):
            return number
        return self.reading.number_R[number]

    def logq_mean(self, number: int) -> float:
        """Mean over a rollout's tokens of the sampler's log-prob; over the sender's own where the
        receiver has none.
        """
        rollout = self.group.rollouts[number]
        if not rollout.tokens:
            assert isinstance(self.reading, Reading), "only what cannot be cut has no tokens"
            rollout = self.reading.sent.rollouts[self.sent_number(number)]
        return sum(rollout.logprobs) / len(rollout.logprobs)

    def age(self, version: int) -> int:
        return version - self.since


@dataclass(frozen=True, slots=True)
class Selection:
    """`take` trains now, `wait` may train later."""

    take: list[Candidate]
    wait: list[Candidate]


def stale_families(
    waiting: Sequence[Candidate], most: float, age: Callable[[Candidate], float]
) -> set[str]:
    """Families past the staleness window.

    One is as old as its newest part: it could not be used before that.
    """
    newest: dict[str, float] = {}
    for candidate in waiting:
        newest[candidate.family] = min(age(candidate), newest.get(candidate.family, age(candidate)))
    return {family for family, youngest in newest.items() if youngest > most}


def select(
    waiting: Sequence[Candidate],
    rules: Learning,
    most: int,
    share: float = 1.0,
    own_most: int = 0,
) -> Selection:
    """Take `most` families, of each sender in turn its first, by each sender's quota and the share
    of own groups.

    `share`: the most of a step that may be one stranger's. `own_most`: above 0, so many that the
    receiver sampled itself go before anybody's turn, and no more of them.
    """
    ready, first = _with_own_first(waiting, own_most) if own_most else (waiting, frozenset[str]())
    own = [c for c in ready if c.own]
    foreign = _within_quota([c for c in ready if not c.own], rules.quota)
    if rules.own_share:
        foreign = foreign[: _foreign_room(len(own), most, rules.own_share)]
    allowed = {id(c) for c in own + foreign}
    take = _families_in_turn([c for c in ready if id(c) in allowed], most, first)
    if share < 1:
        # own groups are there: others may have no more beside them than in a full step
        take = _within_share(take, 0 if own_most else most, share)
    taken = {id(c) for c in take}
    return Selection(take, [c for c in waiting if id(c) not in taken])


def _with_own_first(
    waiting: Sequence[Candidate], most: int
) -> tuple[list[Candidate], frozenset[str]]:
    """Leave out what the receiver sampled beyond `most`; with the families of the rest of it.

    What it sampled with weights that were lost is as a stranger's, and fills up.
    """
    mine = sorted((c for c in waiting if not c.stranger), key=lambda c: not c.own)
    later = {id(c) for c in mine[most:]}
    first = frozenset(c.family for c in mine[:most])
    return [c for c in waiting if id(c) not in later], first


def _families_in_turn(
    candidates: list[Candidate], most: int, first: Collection[str] = ()
) -> list[Candidate]:
    """Take these first; then the first family of each sender, the second of each, and so on.

    So who sends much takes no place of who sends little. Parts of one group are taken together or
    not at all.
    """
    authors: dict[str, set[str]] = {}
    for c in candidates:
        authors.setdefault(c.family, set()).add(c.group.origin.peer)
    turns: Counter[frozenset[str]] = Counter()
    turn: dict[str, int] = {}
    for family, peers in authors.items():
        turn[family] = turns[frozenset(peers)]
        turns[frozenset(peers)] += 1
    taken = set(sorted(turn, key=lambda family: (family not in first, turn[family]))[:most])
    return [c for c in candidates if c.family in taken]


def _within_share(take: list[Candidate], most: int, share: float) -> list[Candidate]:
    """Let go of a stranger's last groups beyond its share of this step or of one of `most`, in
    groups and in tokens.

    One is always left of it: a crew in which nobody else sends goes on, if in smaller steps.
    """
    for peer in dict.fromkeys(c.group.origin.peer for c in take if c.stranger):
        others = [c for c in take if c.group.origin.peer != peer]
        room = int(share * max(most, len(others) / (1 - share)) + 1e-9)
        theirs = [c for c in take if c.group.origin.peer == peer][: max(1, room)]
        while len(theirs) > 1 and sum(map(_num_tokens, theirs)) > _room(others, most, share):
            theirs.pop()
        kept = {id(c) for c in others + theirs}
        take = [c for c in take if id(c) in kept]
    return take


def _room(others: list[Candidate], most: int, share: float) -> float:
    """How many tokens are a share of this step, or of one of `most` groups like the others'."""
    if not others:
        return math.inf
    tokens = sum(map(_num_tokens, others))
    return share * tokens * max(1 / (1 - share), most / len(others))


def _num_tokens(candidate: Candidate) -> int:
    return sum(len(rollout.tokens) for rollout in candidate.group.rollouts)


def _within_quota(foreign: list[Candidate], quota: int) -> list[Candidate]:
    if not quota:
        return foreign
    taken: Counter[str] = Counter()
    kept = []
    for candidate in foreign:
        taken[candidate.group.origin.peer] += 1
        if taken[candidate.group.origin.peer] <= quota:
            kept.append(candidate)
    return kept


def _foreign_room(num_own: int, most: int, own_share: float) -> int:
    """How many foreign groups fit so that own groups are at least their share of the step."""
    own = min(num_own, most)
    return min(
        most - math.ceil(own_share * most - 1e-9), int(own * (1 - own_share) / own_share + 1e-9)
    )
