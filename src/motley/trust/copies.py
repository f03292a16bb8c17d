"""Copies: the rollouts of earlier groups, so that nobody publishes them as its own.

Owns what of a rollout is remembered, and for how long. Two rollouts are the same if their tokens
and log-probs are. Knows nothing of who may publish what.
"""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from motley.exchange import RolloutArrays

# Of a rollout drawn from q, the chance to be one of R given ones is R q on average over what it
# could be, so that the product of 1 / (R^2 q) over all rollouts of a group that were there before
# is e at most on average: it reaches e^30 in one honest group of 10^12.
MOST_COINCIDENCE_NATS = 30.0
MOST_GROUPS = 1024  # remembered, shared among the senders, and
LEAST_GROUPS = 8  # of each, however many there are
_MARK_BYTES = 8


class GroupMarks(NamedTuple):
    """A group that was admitted, in a checkpoint: the marks of its rollouts, hexadecimal."""

    sender: str
    id: str
    marks: str


class _Remembered(NamedTuple):
    number: int  # in the order they were admitted
    sender: str
    id: str
    marks: tuple[bytes, ...]


class Marked(NamedTuple):
    """The rollouts of a group that is being judged."""

    marks: tuple[bytes, ...]
    nats: tuple[float, ...]  # how surprising it is to draw each again, beyond R^2 chances

    @staticmethod
    def of(problem: str, arrays: RolloutArrays) -> Marked:
        stops = arrays.stop_R.tolist()
        places = list(zip([0, *stops], stops, strict=False))
        tokens, logprobs = arrays.token_N.tobytes(), arrays.logprob_N.astype("<f8").tobytes()
        chances, named = 2 * math.log(len(places)), problem.encode()
        sum_R = np.add.reduceat(arrays.logprob_N, [start for start, _ in places], dtype=np.float64)
        return Marked(
            tuple(
                hashlib.blake2b(
                    named + tokens[8 * start : 8 * stop] + logprobs[8 * start : 8 * stop],
                    digest_size=_MARK_BYTES,
                ).digest()
                for start, stop in places
            ),
            tuple(np.maximum(-sum_R - chances, 0.0).tolist()),
        )

    def repeated_nats(self) -> list[float]:
        """Of those that the group itself has before."""
        if len(set(self.marks)) == len(self.marks):
            return []
        first = {mark: place for place, mark in reversed(list(enumerate(self.marks)))}
        return [
            nats
            for place, (mark, nats) in enumerate(zip(self.marks, self.nats, strict=True))
            if first[mark] < place
        ]


@dataclass(slots=True)
class Copies:
    """The newest groups of every sender, by their rollouts' marks."""

    _groups: defaultdict[str, deque[_Remembered]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    _holders: dict[bytes, list[_Remembered]] = field(default_factory=dict)  # by mark
    _number: int = 0

    def source_of(self, id: str, marked: Marked, passed_over: Callable[[str], bool]) -> str:
        """Which group had first what no chance can have drawn again; none: an empty id.

        `passed_over`: senders whose groups this one is not compared with. Nor is it with itself,
        should it come again.
        """
        if sum(marked.repeated_nats()) > MOST_COINCIDENCE_NATS:
            return id
        shared: defaultdict[_Remembered, float] = defaultdict(float)
        for mark, nats in zip(marked.marks, marked.nats, strict=True):
            for holder in self._holders.get(mark, ()):
                shared[holder] += nats
        for holder, total in shared.items():
            if total > MOST_COINCIDENCE_NATS and holder.id != id and not passed_over(holder.sender):
                return holder.id
        return ""

    def add(self, sender: str, id: str, marked: Marked, num_senders: int) -> None:
        """Remember a group; of this sender's, only the newest."""
        self._remember(sender, id, tuple(dict.fromkeys(marked.marks)))
        own = self._groups[sender]
        while len(own) > max(LEAST_GROUPS, MOST_GROUPS // max(1, num_senders)):
            self._forget(own.popleft())

    def _remember(self, sender: str, id: str, marks: tuple[bytes, ...]) -> None:
        remembered = _Remembered(self._number, sender, id, marks)
        self._number += 1
        self._groups[sender].append(remembered)
        for mark in marks:
            self._holders.setdefault(mark, []).append(remembered)

    def _forget(self, remembered: _Remembered) -> None:
        for mark in remembered.marks:
            holders = self._holders[mark]
            holders.remove(remembered)
            if not holders:
                del self._holders[mark]

    # For checkpoints

    def state(self) -> list[GroupMarks]:
        everything = sorted(group for own in self._groups.values() for group in own)
        return [
            GroupMarks(group.sender, group.id, b"".join(group.marks).hex()) for group in everything
        ]

    @staticmethod
    def from_state(state: Sequence[GroupMarks]) -> Copies:
        copies = Copies()
        for group in state:
            joined = bytes.fromhex(group.marks)
            places = range(0, len(joined), _MARK_BYTES)
            copies._remember(
                group.sender, group.id, tuple(joined[at : at + _MARK_BYTES] for at in places)
            )
        return copies
