"""Prefixes: from which beginnings of others' successes a peer samples its own continuations.

Owns how long a prefix is, which a peer takes in its next round, and what follows from how its
continuations came out. Knows no engine and no log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from motley.records import Branch

QUEUED_FOLD = 8  # as many problems wait at most as this many rounds take


class Continued(NamedTuple):
    """A problem that the receiver failed, and a success on it.

    Of prefixes of `low` tokens every own continuation failed, of those of `high` every one
    succeeded: 0 tokens and all of them at first.
    """

    problem: str
    round: int  # in which the receiver had it,
    slot: int  # and where
    tokens: tuple[int, ...]  # of the success, without its end token
    low: int
    high: int
    sent: int = 0  # tokens of the prefix whose continuations are on their way; 0: none are


class TriedPrefix(NamedTuple):
    """How the continuations of a prefix came out."""

    problem: str
    length: int  # of the prefix
    succeeded: int
    failed: int


class PrefixChoice(Protocol):
    """How long a prefix is; `Drawn` or `Bisected`."""

    def length(self, one: Continued, seed: int) -> int:
        """From 1 token to all but one."""
        ...

    def after(self, one: Continued, outcome: TriedPrefix) -> Continued | None:
        """The same as it is to go on; None: it is done."""
        ...


@dataclass(frozen=True, slots=True)
class DrawnPrefix:
    """Any length, each as likely, once for each problem."""

    def length(self, one: Continued, seed: int) -> int:
        digest = hashlib.sha256(f"prefix/{seed}/{one.problem}/{one.round}".encode()).digest()
        return 1 + int.from_bytes(digest[:8], "big") % (len(one.tokens) - 1)

    def after(self, one: Continued, outcome: TriedPrefix) -> Continued | None:
        return None


@dataclass(frozen=True, slots=True)
class BisectedPrefix:
    """The middle of what is open, round after round, until some continuations succeed and some
    fail.
    """

    def length(self, one: Continued, seed: int) -> int:
        return (one.low + one.high) // 2

    def after(self, one: Continued, outcome: TriedPrefix) -> Continued | None:
        if outcome.succeeded and outcome.failed:
            return None
        low = max(one.low, outcome.length) if not outcome.succeeded else one.low
        high = min(one.high, outcome.length) if outcome.succeeded else one.high
        return one._replace(low=low, high=high, sent=0) if high - low > 1 else None


PREFIXES: dict[str, PrefixChoice] = {"drawn": DrawnPrefix(), "bisected": BisectedPrefix()}


class PrefixState(msgspec.Struct, frozen=True, kw_only=True):
    """In a checkpoint."""

    waiting: list[Continued] = []


@dataclass(slots=True)
class PrefixQueue:
    """What a peer is to continue: the oldest first."""

    choice: PrefixChoice
    most: int  # in a round
    seed: int  # the crew's
    _waiting: dict[str, Continued] = field(default_factory=dict)  # by problem

    def add(self, one: Continued) -> None:
        """Have a success continued, unless one on the same problem is, or it is too short."""
        if len(one.tokens) > 1 and one.problem not in self._waiting:
            self._waiting[one.problem] = one
        while len(self._waiting) > QUEUED_FOLD * self.most:
            del self._waiting[next(iter(self._waiting))]

    def due(self) -> list[Branch]:
        """What to continue in the next round."""
        ready = [one for one in self._waiting.values() if not one.sent]
        return [
            Branch(round=one.round, slot=one.slot, prefix=one.tokens[: self._length(one)])
            for one in ready[: self.most]
        ]

    def took(self, branches: Sequence[tuple[int, int, int]]) -> None:
        """These were sampled: round and slot of the problem, and the length of the prefix."""
        sent = {(round, slot): length for round, slot, length in branches}
        for problem, one in self._waiting.items():
            length = self._length(one)
            # after a crash the outcome may be known before the round is looked at again
            if sent.get((one.round, one.slot)) == length:
                self._waiting[problem] = one._replace(sent=length)

    def learned(self, outcomes: Sequence[TriedPrefix]) -> None:
        for outcome in outcomes:
            one = self._waiting.get(outcome.problem)
            if one is None:
                continue
            after = self.choice.after(one, outcome)
            if after is None:
                del self._waiting[outcome.problem]
            else:
                self._waiting[outcome.problem] = after

    def _length(self, one: Continued) -> int:
        return self.choice.length(one, self.seed)

    # For checkpoints

    def state(self) -> PrefixState:
        return PrefixState(waiting=list(self._waiting.values()))

    def load_state(self, state: PrefixState) -> None:
        self._waiting = {one.problem: one for one in state.waiting}
