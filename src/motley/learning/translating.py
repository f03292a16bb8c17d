"""Translator: groups of other vocabularies, in the tokens of a receiver.

The bytes of a completion are cut by the receiver's own tokenizer, and the sender's log-probs are
laid on the new tokens, span by span. So all that comes behind sees the receiver's tokens; only what
compares log-probs has to know the spans (`learning/readings.py`).

Knows a vocabulary, prompts and the bounds of what a stranger may make of its table. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.learning.readings import (
    FOLD_BYTES,
    BySpans,
    Ints,
    NotCut,
    Reading,
    ReadRollout,
    RolloutSpans,
    TextOnly,
)
from motley.models.prompts import Prompts
from motley.records import Group, Problem
from motley.spelling import Aligned, Pair, Spelling, StableCuts, UnspelledError

Bools = NDArray[np.bool_]

FOLD_TOKENS = 8  # of a completion, times max_tokens: a longer cut is not learned from
MOST_PAIRS = 64  # senders' tables that are kept ready


class Translation(NamedTuple):
    """A group in the receiver's tokens, and how it is to be read.

    What cannot be cut has no tokens. A group of which fewer than two completions are text has no
    rollouts: there is nothing to compare them with, but its sender did answer.
    """

    group: Group
    reading: Reading


class ForeignGroup(NamedTuple):
    """A group of a sender with this table, to be translated."""

    group: Group
    problem: Problem
    spelling: Spelling


class _Completion(NamedTuple):
    """What the cut and the spans of a rollout follow from. Short answers often are the same."""

    tokens: tuple[int, ...]
    canonical: bool
    ends: bool
    end: int  # token of the receiver's
    most: int  # tokens of the receiver's

    @property
    def spelled(self) -> tuple[int, ...]:
        return self.tokens[:-1] if self.ends else self.tokens


class _Translated(NamedTuple):
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    read: ReadRollout


@dataclass(slots=True)
class Translator:
    prompts: Prompts
    max_tokens: int  # of the sender's, in a completion
    max_positions: int  # of the receiver's model
    took_s: float = 0.0  # in all, as who asks keeps count
    _pairs: dict[str, Pair] = field(default_factory=dict)  # by the fingerprint of a table

    def translate(self, group: Group, problem: Problem, spelling: Spelling) -> Translation:
        """Read a group of a sender with this table."""
        (made,) = self.translate_all([ForeignGroup(group, problem, spelling)])
        return made

    def translate_all(self, asked: Sequence[ForeignGroup]) -> list[Translation]:
        """The same of many, which costs little more than of one."""
        by_table: dict[str, list[ForeignGroup]] = {}
        for one in asked:
            by_table.setdefault(one.spelling.fingerprint, []).append(one)
        made = {
            name: iter(self._translated(groups, self._pair(groups[0].spelling)))
            for name, groups in by_table.items()
        }
        return [
            self._read(one, list(islice(made[one.spelling.fingerprint], len(one.group.rollouts))))
            for one in asked
        ]

    def _completions(self, asked: ForeignGroup) -> list[_Completion]:
        prompts, problem = self.prompts, asked.problem
        end, room = prompts.end_id(problem), self.max_positions - len(prompts.ids(problem))
        most = min(FOLD_TOKENS * self.max_tokens, room)
        return [
            _Completion(r.tokens, r.canonical, r.ending == "stop", end, most)
            for r in asked.group.rollouts
        ]

    def _read(self, asked: ForeignGroup, row: Sequence[_Translated | None]) -> Translation:
        group = asked.group
        kept = [(number, one) for number, one in enumerate(row) if one is not None]
        if len(kept) < min(2, len(row)):
            kept = []
        rollouts = tuple(
            msgspec.structs.replace(
                group.rollouts[number], tokens=one.tokens, logprobs=one.logprobs
            )
            for number, one in kept
        )
        reading = Reading(
            group,
            self._pair(asked.spelling),
            tuple(number for number, _ in kept),
            tuple(one.read for _, one in kept),
            self.max_tokens,
        )
        return Translation(msgspec.structs.replace(group, rollouts=rollouts), reading)

    def _translated(self, asked: Sequence[ForeignGroup], pair: Pair) -> list[_Translated | None]:
        """The rollouts of groups of one table. None: not text, also without its end token."""
        place: dict[_Completion, int] = {}
        place_R = [place.setdefault(c, len(place)) for one in asked for c in self._completions(one)]
        sent_R = [rollout.logprobs for one in asked for rollout in one.group.rollouts]
        each = list(place)
        texts = _texts(each, pair.sender)
        cuts = self._cut(each, texts)
        reads: list[ReadRollout] = [TextOnly() if cut else NotCut() for cut in cuts]
        compared = [number for number, one in enumerate(each) if one.canonical and cuts[number]]
        laid: dict[int, tuple[float, ...]] = {}  # by the number of the rollout
        if compared:
            matched = _Matched.of([each[n] for n in compared], [cuts[n] for n in compared], pair)
            for number, spans in zip(compared, matched.spans(), strict=True):
                text = texts[number] or b""
                reads[number] = self._by_spans(spans, cuts[number], len(text))
            which = {number: row for row, number in enumerate(compared)}
            rows = [row for row, number in enumerate(place_R) if number in which]
            which_R = np.array([which[place_R[row]] for row in rows], np.int64)
            laid = dict(
                zip(rows, matched.laid([sent_R[row] for row in rows], which_R), strict=True)
            )
        return [
            None
            if texts[number] is None
            else _Translated(
                cuts[number], laid.get(row) or _evenly(sent_R[row], cuts[number]), reads[number]
            )
            for row, number in enumerate(place_R)
        ]

    def _cut(
        self, wanted: Sequence[_Completion], texts: Sequence[bytes | None]
    ) -> list[tuple[int, ...]]:
        """Tokens of the receiver's, its end token with them; none where there is no fit cut."""
        most = FOLD_BYTES * self.max_tokens
        each = list(dict.fromkeys(text for text in texts if text is not None and len(text) <= most))
        known = dict(zip(each, self.prompts.vocabulary.cut_all(each), strict=True))
        cuts: list[tuple[int, ...]] = []
        for one, text in zip(wanted, texts, strict=True):
            cut = None if text is None else known.get(text)
            tokens = cut + ((one.end,) if one.ends else ()) if isinstance(cut, tuple) else ()
            cuts.append(tokens if len(tokens) <= one.most else ())
        return cuts

    def _pair(self, spelling: Spelling) -> Pair:
        pair = self._pairs.get(spelling.fingerprint)
        if pair is None:
            own = next(iter(self._pairs.values()), None)
            receiver = self.prompts.vocabulary.spelling
            cuts = own.receiver_cuts if own else StableCuts.of(receiver.token_bytes)
            pair = Pair(spelling, receiver, StableCuts.of(spelling.token_bytes), cuts)
            while len(self._pairs) >= MOST_PAIRS:
                del self._pairs[next(iter(self._pairs))]
            self._pairs[spelling.fingerprint] = pair
        return pair

    def _by_spans(self, spans: RolloutSpans, tokens: Sequence[int], num_bytes: int) -> BySpans:
        closed = num_bytes if len(spans.start_S) > 1 else 0
        if closed and spans.is_open:
            last = tokens[int(spans.start_S[-1]) :]
            closed -= sum(self.prompts.vocabulary.spelling.lengths_of(last))
        return BySpans(spans, len(tokens), num_bytes, closed)


def _texts(wanted: Sequence[_Completion], spelling: Spelling) -> list[bytes | None]:
    texts: list[bytes | None] = []
    for one in wanted:
        try:
            texts.append(spelling.bytes_of(one.spelled))
        except UnspelledError:
            texts.append(None)
    return texts


def _evenly(logprobs: tuple[float, ...], tokens: tuple[int, ...]) -> tuple[float, ...]:
    """The sum of the sender's log-probs spread over all tokens."""
    return (sum(logprobs) / len(tokens),) * len(tokens) if tokens else ()


class _Matched(NamedTuple):
    """Completions as the sender's tokens and as the receiver's, and their spans."""

    aligned: Aligned
    ends_B: Bools
    sent_B: Ints  # tokens of the sender's
    cut_B: Ints  # tokens of the receiver's

    @staticmethod
    def of(sent: Sequence[_Completion], cut: Sequence[tuple[int, ...]], pair: Pair) -> _Matched:
        ends = [one.ends for one in sent]
        return _Matched(
            pair.align([one.tokens for one in sent], cut, ends),
            np.array(ends),
            np.array([len(one.tokens) for one in sent]),
            np.array([len(tokens) for tokens in cut]),
        )

    def laid(self, logprobs: Sequence[tuple[float, ...]], which_R: Ints) -> list[tuple[float, ...]]:
        """The sender's log-probs on the receiver's tokens: in each span evenly, that of the end on
        the end. Sums over spans are kept, up to the rounding of float64. `which`: the completion of
        each rollout.
        """
        spans = self.aligned.take(which_R, self.sent_B, self.cut_B)
        ends_R, cut_R = self.ends_B[which_R], self.cut_B[which_R]
        logq_T = np.fromiter(chain.from_iterable(logprobs), np.float64)
        sent_T = 2 * spans.sender_T + _is_end(self.sent_B[which_R], ends_R)
        cut_T = 2 * spans.receiver_T + _is_end(cut_R, ends_R)
        total = np.bincount(sent_T, logq_T)
        share_T = (total / np.maximum(1, np.bincount(cut_T, minlength=len(total))))[cut_T].tolist()
        ends = np.cumsum(cut_R).tolist()
        return [tuple(share_T[start:end]) for start, end in pairwise([0, *ends])]

    def spans(self) -> list[RolloutSpans]:
        aligned = self.aligned
        first_S = np.flatnonzero(np.diff(aligned.receiver_T, prepend=-1))
        begin_B = np.cumsum(self.cut_B) - self.cut_B
        start_S = first_S - np.repeat(begin_B, aligned.count_B)
        num_sent_S, closed_S = aligned.num_sent(), aligned.closed_S.tolist()
        return [
            RolloutSpans(start_S[begin:end], num_sent_S[begin:end], not closed_S[end - 1])
            for begin, end in pairwise([0, *np.cumsum(aligned.count_B).tolist()])
        ]


def _is_end(length_B: Ints, ends_B: Bools) -> Ints:
    mask = np.zeros(length_B.sum(), np.int64)
    mask[np.cumsum(length_B) - 1] = ends_B
    return mask
