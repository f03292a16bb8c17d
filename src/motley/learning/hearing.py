"""Hearing: whose groups of a round a learner takes in, where the crew file says `hear = N`.

In every round all who sample are dealt out into lots, and a learner listens to one lot, the same in
all rounds. It hears itself, everyone who samples with its weights, and N others in its lot. Who is
in a lot follows from the crew file and the round alone. So anyone can deal again, and no sender can
choose who hears it. What is not heard is passed by on its id: it is not decoded, not admitted and
not remembered, only counted. Knows ids of records, and nothing that stands in one.

Since a learner's lot stays and its members change, a server can hand it that lot and nothing else.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from motley.config import CrewConfig

MOST_ROUND_DIGITS = 10  # of an id: none of a crew's rounds has more
MAX_STRETCHES = 4096  # between two steps
MOST_DRAWS = 256  # remembered
MOST_TEXTS = 16  # rounds as ids have them, the same
MOST_DEALS = 64  # rounds, shared by all peers of a process


class Stretch(NamedTuple):
    """Groups that stand one behind another in the log, the last included."""

    first: int
    last: int


@lru_cache(MOST_DEALS)
def dealt(seed: int, round: int, names: tuple[str, ...], num_lots: int) -> tuple[list[str], ...]:
    """Who is in each lot of a round: all in the order of their hashes, one lot after the other."""
    hash_of = lambda name: hashlib.sha256(f"{seed}/{round}/{name}".encode()).digest()
    order = sorted(names, key=hash_of)
    return tuple(order[lot::num_lots] for lot in range(num_lots))


class Lots:
    """The lots of a crew with `hear`.

    As many as there can be, if each is to have N others for whoever listens to it.
    """

    def __init__(self, config: CrewConfig) -> None:
        assert config.crew.hear is not None
        self._seed, self._names = config.crew.seed, tuple(config.authors)
        most_own = max(Counter(map(config.student_of, self._names)).values())
        self.count = max(1, len(self._names) // (config.crew.hear + most_own))
        self._place_of = {one.name: place for place, one in enumerate(config.students)}

    def of(self, learner: str) -> int:
        """Which lot a learner listens to."""
        return self._place_of[learner] % self.count

    def heard_by(self, learner: str, round: int) -> list[str]:
        """Who is in its lot, in the order in which it hears them.

        From a place of its own on, so that everyone is heard by about as many.
        """
        members = self._dealt(round)[self.of(learner)]
        first = self._place_of[learner] // self.count % len(members)
        return members[first:] + members[:first]

    def of_group(self, id: str) -> int | None:
        """In which lot the group of an id is; None: this is no id of a group, or nobody's."""
        sender, *place = id.split(".", 2)
        round = _round_of(place[0] if place else "")
        if round is None:
            return None
        lots = enumerate(self._dealt(round))
        return next((lot for lot, members in lots if sender in members), None)

    def _dealt(self, round: int) -> tuple[list[str], ...]:
        return dealt(self._seed, round, self._names, self.count)


def can_stand_in_lots(config: CrewConfig) -> bool:
    """Whether it spares readers anything if a crew's groups stand in lots.

    Whom a learner always hears would be in all of them: where others sample for it, they are many.
    """
    return not config.has_roles and config.crew.hear is not None and Lots(config).count > 1


def _round_of(text: str) -> int | None:
    """The round of an id; None: it is none that a crew can have."""
    is_number = text.isascii() and text.isdigit() and len(text) <= MOST_ROUND_DIGITS
    return int(text) if is_number else None


@dataclass(slots=True)
class Hearing:
    config: CrewConfig
    me: str
    passed_by: int = 0  # groups that were not heard
    stretches: list[Stretch] = field(default_factory=list)  # of them, since the last step
    is_partial: bool = field(init=False)  # False: everyone is heard in every round
    _rounds: int | None = field(init=False)  # of the crew; None: samplers make any number
    _lots: Lots | None = field(init=False)
    _draws: OrderedDict[tuple[str, int], frozenset[str]] = field(default_factory=OrderedDict)
    _draws_by_text: dict[str, frozenset[str]] = field(default_factory=dict)  # round -> own draw
    _place_of: dict[str, int] = field(init=False)  # in the crew file, of who samples
    _is_other: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        hear, others = self.config.crew.hear, self.config.others(self.me)
        self._is_other = frozenset(others)
        self.is_partial = hear is not None and hear < len(others)
        self._lots = Lots(self.config) if self.is_partial else None
        self._rounds = None if self.config.has_roles else self.config.crew.rounds
        self._place_of = {name: place for place, name in enumerate(self.config.authors)}

    def of(self, round: int) -> list[str]:
        """Who is heard in a round, in the crew file's order."""
        if not self.is_partial:
            return self.config.authors
        return sorted(self._heard_by(self.me, round), key=self._place_of.__getitem__)

    def hears(self, sender: str, round: int) -> bool:
        return not self.is_partial or sender in self._heard_by(self.me, round)

    def is_always_heard(self, sender: str) -> bool:
        return not self.is_partial or sender not in self._is_other

    def is_heard_by(self, other: str, round: int) -> bool:
        """Whether this learner's own groups of a round reach another."""
        return not self.is_partial or self.me in self._heard_by(other, round)

    def last_rounds(self) -> dict[str, int]:
        """Of everyone who is heard at all: the last round in which it is."""
        last: dict[str, int] = {}
        for round in reversed(range(self.config.crew.rounds)):
            for name in self.of(round):
                last.setdefault(name, round)
        return last

    def passes_by(self, id: str, position: int, after: int) -> bool:
        """Whether the record of an id is a group that is not heard; it is counted then.

        What can be no group of the crew's is left to admission. `after`: the last position that was
        read before. What stands between was not even sent here, and is counted, too.
        """
        passed = not self.may_matter(id)
        last = position if passed else position - 1
        if after < last:
            self._count(after + 1, last)
        return passed

    def _count(self, first: int, last: int) -> None:
        self.passed_by += last + 1 - first
        newest = self.stretches[-1] if self.stretches else None
        if newest and newest.last == first - 1:
            self.stretches[-1] = Stretch(newest.first, last)
        elif len(self.stretches) < MAX_STRETCHES:
            self.stretches.append(Stretch(first, last))

    def may_matter(self, id: str) -> bool:
        """Whether the record of an id is to be looked at."""
        if not self.is_partial:
            return True
        sender, *place = id.split(".", 2)
        number = place[0] if place else ""
        known = self._draws_by_text.get(number)  # asked of every record, and nearly always there
        if known is not None:
            return sender in known
        round = _round_of(number)
        if round is None or (self._rounds is not None and round >= self._rounds):
            return True
        if len(self._draws_by_text) >= MOST_TEXTS:
            self._draws_by_text.clear()
        self._draws_by_text[number] = self._heard_by(self.me, round)
        return self.hears(sender, round)

    def _heard_by(self, learner: str, round: int) -> frozenset[str]:
        key = (learner, round)
        if key not in self._draws:
            assert self._lots
            student_of = self.config.student_of
            members = self._lots.heard_by(learner, round)
            others = [name for name in members if student_of(name) != learner]
            self._draws[key] = frozenset(others[: self.config.crew.hear]).union(self._own(learner))
            if len(self._draws) > MOST_DRAWS:
                self._draws.popitem(last=False)
        return self._draws[key]

    def _own(self, learner: str) -> list[str]:
        """Who samples with a learner's weights."""
        if not self.config.has_roles:
            return [learner]
        return [name for name in self._place_of if self.config.student_of(name) == learner]
