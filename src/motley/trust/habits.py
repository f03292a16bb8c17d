"""Habits: what one sender keeps saying, whatever the problem, and nobody else says.

A skill shows in answers, which differ from problem to problem. A plant shows in phrases (runs of
one to three tokens) and lengths that come back in problem after problem. One sender's word is not
enough to make a habit of: tokens of a phrase that neither the receiver itself nor two other senders
use (one, where there is but one other) are withheld, which means that nothing pushes them up. They
are still pushed down where they fail.

What stands in the problem or in its answer is no habit. Knows tokens, not what they spell.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motley.records import Rollout

WINDOW = 48  # groups of a sender
LONGEST = 3  # tokens of a phrase
LEAST_RATE = 0.1  # of a sender's groups: what comes more rarely is no habit
TIMES = 4.0  # as often as with others
LEAST_GROUPS = 4  # of a sender, before it can vouch for a phrase
TIMES_LONGER = 2.0  # than others' long answers
LONG = 0.9  # quantile

Ids = NDArray[np.uint64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Heard:
    """A group, as far as it matters here."""

    phrases: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(slots=True)
class _Window:
    """The newest groups of one sender."""

    groups: deque[_Heard] = field(default_factory=deque)
    counts: Counter[int] = field(default_factory=Counter)  # phrase -> groups it is in

    def add(self, heard: _Heard) -> None:
        self.groups.append(heard)
        self.counts.update(heard.phrases)
        if len(self.groups) > WINDOW:
            self._forget(self.groups.popleft())

    def _forget(self, gone: _Heard) -> None:
        """In the time that one group takes, not all of them: this is done for every group."""
        counts = self.counts
        for phrase in gone.phrases:
            left = counts[phrase] - 1
            if left:
                counts[phrase] = left
            else:
                del counts[phrase]

    def most(self, phrase: int) -> float:
        """How often at most it uses a phrase, for all that is known."""
        return (self.counts[phrase] + 1) / (len(self.groups) + 1)

    def long_answer(self) -> float:
        return float(np.quantile([n for heard in self.groups for n in heard.lengths], LONG))


@dataclass(slots=True)
class Habits:
    me: str  # the receiver, whose own groups are heard too
    # senders whose groups are remembered, those heard last; 0: all. In a large crew of which few
    # are heard at a time, both memory and the time that a question takes depend on it.
    most_senders: int = 0
    _windows: dict[str, _Window] = field(default_factory=dict)

    def hear(self, sender: str, rollouts: Sequence[Rollout], familiar: Sequence[int]) -> str:
        """Take in a group; whose groups are forgotten for it, if anybody's.

        `familiar`: tokens of the problem and of its answer.
        """
        said = phrases_of([r.tokens for r in rollouts])
        phrases = said - phrases_of([familiar])
        window = self._windows.setdefault(sender, _Window())
        window.add(_Heard(tuple(phrases), tuple(len(r.tokens) for r in rollouts)))
        return self._forget_longest_unheard(sender) if self.most_senders else ""

    def _forget_longest_unheard(self, newest: str) -> str:
        self._windows[newest] = self._windows.pop(newest)  # last in the order
        if len(self._windows) <= self.most_senders:
            return ""
        gone = next(name for name in self._windows if name != self.me)
        del self._windows[gone]
        return gone

    def of(self, sender: str) -> SenderHabits:
        """What a sender alone does, as things stand."""
        window, witnesses = self._windows.get(sender), self._witnesses(sender)
        if window is None or not witnesses.any:
            return SenderHabits(frozenset(), None)
        num_groups = len(window.groups)
        alone = frozenset(
            phrase
            for phrase, count in window.counts.items()
            if count >= max(2, LEAST_RATE * num_groups)
            and count / num_groups > TIMES * witnesses.usual(partial(_Window.most, phrase=phrase))
        )
        return SenderHabits(alone, TIMES_LONGER * witnesses.usual(_Window.long_answer))

    def _witnesses(self, sender: str) -> _Witnesses:
        """Who has said enough to tell whether something is common."""
        known = {
            name: window
            for name, window in self._windows.items()
            if len(window.groups) >= LEAST_GROUPS and name != sender
        }
        return _Witnesses(known.pop(self.me, None), list(known.values()))


class _Witnesses(NamedTuple):
    own: _Window | None  # the receiver's
    others: list[_Window]

    @property
    def any(self) -> bool:
        return self.own is not None or bool(self.others)

    def usual(self, measure: Callable[[_Window], float]) -> float:
        """As much as the receiver does it, or two others do; one, where there is but one."""
        own = 0.0 if self.own is None else measure(self.own)
        return max(own, *heapq.nlargest(2, map(measure, self.others))[-1:], 0.0)


@dataclass(frozen=True, slots=True)
class SenderHabits:
    phrases: frozenset[int]
    longest: float | None  # an answer that others would give; None: not known

    @property
    def is_plain(self) -> bool:
        return not self.phrases and self.longest is None

    def withheld(self, tokens: Sequence[int], familiar: Sequence[int]) -> Mask | None:
        """Which tokens of a completion are not to be pushed up; None: all may be."""
        mask = np.zeros(len(tokens), dtype=np.bool_)
        if self.longest is not None:
            mask[int(self.longest) :] = True
        if self.phrases:
            unfamiliar = self.phrases - phrases_of([familiar])
            for length in range(1, LONGEST + 1):
                for start, phrase in enumerate(_runs(tokens, length)):
                    if phrase in unfamiliar:
                        mask[start : start + length] = True
        return mask if mask.any() else None


def phrases_of(texts: Sequence[Sequence[int]]) -> set[int]:
    """Every run of one to three tokens in some texts, as numbers."""
    texts = list(dict.fromkeys(map(tuple, texts)))  # many answers are the same
    lengths = np.array([len(tokens) for tokens in texts])
    joined = [token for tokens in texts for token in tokens]
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(joined))  # to a text's end
    return {
        phrase
        for length in range(1, LONGEST + 1)
        for phrase in _hashed(joined, length)[left[: len(joined) - length + 1] >= length].tolist()
    }


_MIX = np.uint64(0x9E3779B97F4A7C15)
_BEGIN = [np.uint64(length * 0xD6E8FEB86659FD93 % 2**64) for length in range(LONGEST + 1)]


def _runs(tokens: Sequence[int], length: int) -> list[int]:
    return _hashed(tokens, length).tolist()


def _hashed(tokens: Sequence[int], length: int) -> Ids:
    ids: Ids = np.asarray(tokens, dtype=np.uint64)
    if len(ids) < length:
        return ids[:0]
    hashed = np.full(len(ids) - length + 1, _BEGIN[length], dtype=np.uint64)
    for offset in range(length):
        hashed = (hashed ^ ids[offset : len(ids) - length + 1 + offset]) * _MIX
        hashed ^= hashed >> np.uint64(29)
    return hashed
