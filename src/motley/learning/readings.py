"""Readings: how a receiver reads a group of another vocabulary, rollout by rollout.

Owns what of such a rollout can be compared, learned from, or only counted, and what is told of it.
Knows spans and bytes; knows no tokenizer and no tensor. How a reading is made is in
`learning/translating.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from motley.learning.fates import NOT_CUT, TEXT_ONLY, UNREAD
from motley.records import Group, Rollout
from motley.spelling import FOLD_BYTES, Pair, Spelling, UnspelledError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RolloutSpans:
    """The spans of one completion, by the receiver's tokens.

    "a5b" and its end as `a`, `5`, `b`, end, with a stable cut behind `5`: start_S 0, 2.
    """

    start_S: Ints  # the first of the receiver's tokens
    num_sent_S: Ints  # the sender's tokens
    is_open: bool  # the last was cut by length before it closed

    def sums(self, value_T: Floats) -> Floats:
        """The sum over each span."""
        return np.add.reduceat(value_T, self.start_S)

    def wagers(self, log_ratio_S: Floats) -> Floats:
        """What is bet on: a span that never closed pays nothing, -inf."""
        return np.append(log_ratio_S[:-1], -np.inf) if self.is_open else log_ratio_S


@dataclass(frozen=True, slots=True)
class BySpans:
    """A rollout that the objective learns from, span by span."""

    spans: RolloutSpans
    num_tokens: int  # the receiver's
    num_bytes: int
    num_closed_bytes: int  # in spans that closed, unless one span is all there is


@dataclass(frozen=True, slots=True)
class TextOnly:
    """Its sender's tokens are not those that its text is cut into, so no ratio of it is honest.

    It counts in its group's baseline, and can be a lesson or a prefix.
    """


@dataclass(frozen=True, slots=True)
class NotCut:
    """The receiver has no tokens for it, or too many. It counts in its group's baseline."""


ReadRollout = BySpans | TextOnly | NotCut


class ReadingCounts(NamedTuple):
    """What a sender's metrics tell of a reading."""

    sent: int  # rollouts
    text_only: int
    uncut: int  # with those that could not be read at all
    num_tokens: int  # the receiver's, of rollouts by spans
    num_spans: int
    num_bytes: int
    num_closed_bytes: int


@dataclass(frozen=True, slots=True)
class Reading:
    """A group as it was sent, and how each rollout is read that could be read at all.

    The others have a token inside that stands for no text, or are longer than an answer can be.
    They were left out before anything was computed.
    """

    sent: Group
    pair: Pair
    number_R: tuple[int, ...]  # of those rollouts, in the group as it was sent
    rollouts: tuple[ReadRollout, ...]  # one for each of the translated group
    max_tokens: int

    def spans_of(self, number: int) -> RolloutSpans | None:
        read = self.rollouts[number]
        return read.spans if isinstance(read, BySpans) else None

    def sent_letters(self, letters: str) -> str:
        """A letter for each rollout as it was sent, from those of the translated ones."""
        written = [UNREAD] * len(self.sent.rollouts)
        for number, letter in zip(self.number_R, letters, strict=True):
            written[number] = letter
        return "".join(written)

    def letter_of(self, number: int, otherwise: str) -> str:
        """What became of a rollout that is not learned from for what it is."""
        match self.rollouts[number]:
            case TextOnly():
                return TEXT_ONLY
            case NotCut():
                return NOT_CUT
            case _:
                return otherwise

    def num_forgone(self) -> int:
        """Spans, as far as they can be told, of rollouts that nobody bets on once they are seen."""
        reads = zip(self.number_R, self.rollouts, strict=True)
        compared = {number for number, read in reads if isinstance(read, BySpans)}
        gone = [r for number, r in enumerate(self.sent.rollouts) if number not in compared]
        return sum(self._num_spans(spelled(self.pair.sender, rollout)) for rollout in gone)

    def _num_spans(self, text: bytes) -> int:
        """At most so many; of a text beyond all bounds, one for each byte there."""
        looked_at = text[: FOLD_BYTES * self.max_tokens]
        return int(self.pair.stable(looked_at).sum()) + len(text) - len(looked_at) + 1

    def counts(self) -> ReadingCounts:
        by_spans = [read for read in self.rollouts if isinstance(read, BySpans)]
        text_only = sum(isinstance(read, TextOnly) for read in self.rollouts)
        sent = len(self.sent.rollouts)
        return ReadingCounts(
            sent=sent,
            text_only=text_only,
            uncut=sent - text_only - len(by_spans),
            num_tokens=sum(read.num_tokens for read in by_spans),
            num_spans=sum(len(read.spans.start_S) for read in by_spans),
            num_bytes=sum(read.num_bytes for read in by_spans),
            num_closed_bytes=sum(read.num_closed_bytes for read in by_spans),
        )


def spelled(spelling: Spelling, rollout: Rollout) -> bytes:
    """The text of a rollout, up to the first token that stands for none."""
    tokens = rollout.tokens[:-1] if rollout.ending == "stop" else rollout.tokens
    while True:
        try:
            return spelling.bytes_of(tokens)
        except UnspelledError as error:
            tokens = tokens[: tokens.index(error.id)]
