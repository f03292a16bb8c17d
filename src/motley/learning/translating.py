"""Translator: groups of other vocabularies, in the tokens of a receiver.

The bytes of a completion are cut by the receiver's own tokenizer, and the sender's log-probs are
laid on the new tokens, span by span. So all that comes behind sees the receiver's tokens; only what
compares log-probs has to know the spans (`learning/readings.py`).

Knows a vocabulary, prompts and the bounds of what a stranger may make of its table. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import msgspec
import numpy as np

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
    """What the translation of a rollout follows from."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
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
        tables = {one.spelling.fingerprint: one.spelling for one in asked}
        places: dict[str, dict[_Completion, int]] = {name: {} for name in tables}
        rows = []  # where the completions of each group are among those of its table, each once
        for one in asked:
            place = places[one.spelling.fingerprint]
            rows.append([place.setdefault(c, len(place)) for c in self._completions(one)])
        pairs = {name: self._pair(spelling) for name, spelling in tables.items()}
        made = {name: self._translated(list(places[name]), pairs[name]) for name in tables}
        return [
            self._read(group, [made[spelling.fingerprint][place] for place in row], spelling)
            for (group, _, spelling), row in zip(asked, rows, strict=True)
        ]

    def _completions(self, asked: ForeignGroup) -> list[_Completion]:
        prompts, problem = self.prompts, asked.problem
        end, room = prompts.end_id(problem), self.max_positions - len(prompts.ids(problem))
        most = min(FOLD_TOKENS * self.max_tokens, room)
        return [
            _Completion(r.tokens, r.logprobs, r.canonical, r.ending == "stop", end, most)
            for r in asked.group.rollouts
        ]

    def _read(
        self, group: Group, row: Sequence[_Translated | None], spelling: Spelling
    ) -> Translation:
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
            self._pair(spelling),
            tuple(number for number, _ in kept),
            tuple(one.read for _, one in kept),
            self.max_tokens,
        )
        return Translation(msgspec.structs.replace(group, rollouts=rollouts), reading)

    def _translated(self, wanted: Sequence[_Completion], pair: Pair) -> list[_Translated | None]:
        """None: not text, also without its end token."""
        texts = _texts(wanted, pair.sender)
        cuts = self._cut(wanted, texts)
        made = [
            None
            if text is None
            else _Translated(cut, _evenly(one, cut), TextOnly() if cut else NotCut())
            for one, text, cut in zip(wanted, texts, cuts, strict=True)
        ]
        compared = [place for place, one in enumerate(wanted) if one.canonical and cuts[place]]
        if compared:
            sent, cut = [wanted[place] for place in compared], [cuts[place] for place in compared]
            aligned = pair.align([one.tokens for one in sent], cut, [one.ends for one in sent])
            laid = _laid(sent, cut, aligned)
            spans = _spans(aligned, [len(tokens) for tokens in cut])
            for place, logprobs, its in zip(compared, laid, spans, strict=True):
                read = self._by_spans(its, cuts[place], len(texts[place] or b""))
                made[place] = _Translated(cuts[place], logprobs, read)
        return made

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


def _evenly(one: _Completion, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """The sum of the sender's log-probs spread over all tokens."""
    return (sum(one.logprobs) / len(tokens),) * len(tokens) if tokens else ()


def _laid(
    sent: Sequence[_Completion], cut: Sequence[tuple[int, ...]], spans: Aligned
) -> list[tuple[float, ...]]:
    """The sender's log-probs on the receiver's tokens: in each span evenly, that of the end on the
    end. Sums over spans are kept, up to the rounding of float64.
    """
    ends = [one.ends for one in sent]
    logq_T = np.fromiter(chain.from_iterable(one.logprobs for one in sent), np.float64)
    sent_T = 2 * spans.sender_T + _is_end([len(one.tokens) for one in sent], ends)
    cut_T = 2 * spans.receiver_T + _is_end([len(tokens) for tokens in cut], ends)
    total = np.bincount(sent_T, logq_T)
    share_T = (total / np.maximum(1, np.bincount(cut_T, minlength=len(total))))[cut_T].tolist()
    laid, start = [], 0
    for tokens in cut:
        laid.append(tuple(share_T[start : start + len(tokens)]))
        start += len(tokens)
    return laid


def _is_end(lengths: Sequence[int], ends: Sequence[bool]) -> Ints:
    mask = np.zeros(sum(lengths), np.int64)
    mask[np.cumsum(lengths) - 1] = ends
    return mask


def _spans(spans: Aligned, lengths: Sequence[int]) -> list[RolloutSpans]:
    first_S = np.flatnonzero(np.diff(spans.receiver_T, prepend=-1))
    begin_B = np.cumsum(lengths) - lengths
    start_S = first_S - np.repeat(begin_B, spans.count_B)
    num_sent_S, closed_S = spans.num_sent(), spans.closed_S.tolist()
    made, begin = [], 0
    for end in np.cumsum(spans.count_B).tolist():
        made.append(RolloutSpans(start_S[begin:end], num_sent_S[begin:end], not closed_S[end - 1]))
        begin = end
    return made
