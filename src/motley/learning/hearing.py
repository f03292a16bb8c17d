"""Hearing: whose groups of a round a learner takes in, where the crew file says `hear = N`.

It hears itself, everyone who samples with its weights, and N others, drawn anew for every round. A
draw follows from the crew file, the learner and the round alone. So anyone can make it again, and
no sender can choose who hears it. What is not heard is passed by on its id: it is not decoded, not
admitted and not remembered, only counted. Knows ids of records, and nothing that stands in one.

A draw costs N hashes, however large the crew is.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.config import CrewConfig

MOST_ROUND_DIGITS = 10  # of an id: none of a crew's rounds has more
MAX_STRETCHES = 4096  # between two steps
MOST_DRAWS = 256  # remembered
MOST_TEXTS = 16  # rounds as ids have them, the same


class Stretch(NamedTuple):
    """Groups that stand one behind another in the log, the last included."""

    first: int
    last: int


def drawn(seed: int, learner: str, round: int, others: Sequence[str], count: int) -> list[str]:
    """Whom of the others a learner hears in a round.

    Each hash names a place in the list, and who was named before is passed over.
    """
    heard: dict[str, None] = {}
    number = 0
    while len(heard) < min(count, len(others)):
        lot = hashlib.sha256(f"{seed}/{learner}/{round}/{number}".encode()).digest()
        heard[others[int.from_bytes(lot, "big") % len(others)]] = None
        number += 1
    return list(heard)


@dataclass(slots=True)
class Hearing:
    config: CrewConfig
    me: str
    passed_by: int = 0  # groups that were not heard
    stretches: list[Stretch] = field(default_factory=list)  # of them, since the last step
    is_partial: bool = field(init=False)  # False: everyone is heard in every round
    _rounds: int | None = field(init=False)  # of the crew; None: samplers make any number
    _draws: OrderedDict[tuple[str, int], frozenset[str]] = field(default_factory=OrderedDict)
    _draws_by_text: dict[str, frozenset[str]] = field(default_factory=dict)  # round -> own draw
    _place_of: dict[str, int] = field(init=False)  # in the crew file, of who samples
    _others: list[str] = field(init=False)
    _is_other: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        hear, self._others = self.config.crew.hear, self.config.others(self.me)
        self._is_other = frozenset(self._others)
        self.is_partial = hear is not None and hear < len(self._others)
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

    def passes_by(self, id: str, position: int) -> bool:
        """Whether the record of an id is a group that is not heard; it is counted then.

        What can be no group of the crew's is left to admission.
        """
        if self.may_matter(id):
            return False
        self.passed_by += 1
        newest = self.stretches[-1] if self.stretches else None
        if newest and newest.last == position - 1:
            self.stretches[-1] = Stretch(newest.first, position)
        elif len(self.stretches) < MAX_STRETCHES:
            self.stretches.append(Stretch(position, position))
        return True

    def may_matter(self, id: str) -> bool:
        """Whether the record of an id is to be looked at."""
        if not self.is_partial:
            return True
        sender, *place = id.split(".", 2)
        number = place[0] if place else ""
        known = self._draws_by_text.get(number)  # asked of every record, and nearly always there
        if known is not None:
            return sender in known
        if not (number.isascii() and number.isdigit()) or len(number) > MOST_ROUND_DIGITS:
            return True
        round = int(number)
        if self._rounds is not None and round >= self._rounds:
            return True
        if len(self._draws_by_text) >= MOST_TEXTS:
            self._draws_by_text.clear()
        self._draws_by_text[number] = self._heard_by(self.me, round)
        return self.hears(sender, round)

    def _heard_by(self, learner: str, round: int) -> frozenset[str]:
        key = (learner, round)
        if key not in self._draws:
            crew = self.config.crew
            others = self._others if learner == self.me else self.config.others(learner)
            assert crew.hear is not None
            heard = drawn(crew.seed, learner, round, others, crew.hear)
            self._draws[key] = frozenset(heard).union(self._own(learner, others))
            if len(self._draws) > MOST_DRAWS:
                self._draws.popitem(last=False)
        return self._draws[key]

    def _own(self, learner: str, others: Sequence[str]) -> list[str]:
        """Who samples with a learner's weights."""
        if len(others) == len(self._place_of) - 1 and learner in self._place_of:
            return [learner]
        return [name for name in self._place_of if self.config.student_of(name) == learner]
