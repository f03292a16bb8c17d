"""Translator: groups of other vocabularies, in the tokens of a receiver.

The bytes of a completion are cut by the receiver's own tokenizer, and the sender's log-probs are
laid on the new tokens, span by span. So all that comes behind sees the receiver's tokens; only what
compares log-probs has to know the spans (`learning/readings.py`).

Knows a vocabulary, prompts and the bounds of what a stranger may make of its table. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from motley.learning.readings import (
    BySpans,
    NotCut,
    Reading,
    ReadRollout,
    RolloutSpans,
    TextOnly,
)
from motley.models.prompts import Prompts
from motley.records import Group, Problem
from motley.spelling import Pair, Spelling, StableCuts

FOLD_TOKENS = 8  # of a completion, times max_tokens: a longer cut is not learned from
MOST_PAIRS = 64  # senders' tables that are kept ready
MOST_KNOWN = 4096  # short answers that are remembered: many come again from round to round
SHORT = 32  # tokens, the sender's and the receiver's together


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

    table: str  # fingerprint of the sender's
    tokens: tuple[int, ...]
    canonical: bool
    end: int | None  # token of the receiver's; None: it did not end

    @property
    def spelled(self) -> tuple[int, ...]:
        return self.tokens if self.end is None else self.tokens[:-1]


class _Shares(NamedTuple):
    """Whose log-probs go where. `ab`, `5`, end as `a`, `b`, `5`, end: sent 1, 1, 1, cut 2, 1, 1."""

    sent: list[int]  # tokens of the sender's
    cut: list[int]  # tokens of the receiver's, that have their sum in equal parts


class _Recut(NamedTuple):
    """A completion in the receiver's tokens, its end token with them; none: there is no fit cut."""

    tokens: tuple[int, ...]
    read: ReadRollout
    shares: _Shares


_NOT_CUT = _Recut((), NotCut(), _Shares([], []))
_Recuts = dict[_Completion, _Recut | None]  # None: not text, also without its end token


@dataclass(slots=True)
class Translator:
    prompts: Prompts
    max_tokens: int  # of the sender's, in a completion
    max_positions: int  # of the receiver's model
    took_s: float = 0.0  # in all, as who asks keeps count
    _pairs: dict[str, Pair] = field(default_factory=dict)  # by the fingerprint of a table
    _known: _Recuts = field(default_factory=dict)  # short answers

    def translate(self, group: Group, problem: Problem, spelling: Spelling) -> Translation:
        """Read a group of a sender with this table."""
        (made,) = self.translate_all([ForeignGroup(group, problem, spelling)])
        return made

    def translate_all(self, asked: Sequence[ForeignGroup]) -> list[Translation]:
        """The same of many, which costs little more than of one."""
        if not asked:  # then the receiver's own tokens need not be bytes
            return []
        wanted = [self._completions(one) for one in asked]
        recuts = self._recuts(
            {each: one.spelling for one, row in zip(asked, wanted, strict=True) for each in row}
        )
        rows = [
            self._kept(one.problem, [recuts[each] for each in row])
            for one, row in zip(asked, wanted, strict=True)
        ]
        logprobs = iter(
            _laid(
                [
                    (one.group.rollouts[number].logprobs, recut)
                    for one, row in zip(asked, rows, strict=True)
                    for number, recut in row.items()
                ]
            )
        )
        return [self._read(one, row, logprobs) for one, row in zip(asked, rows, strict=True)]

    def _completions(self, asked: ForeignGroup) -> list[_Completion]:
        end, table = self.prompts.end_id(asked.problem), asked.spelling.fingerprint
        return [
            _Completion(table, r.tokens, r.canonical, end if r.ending == "stop" else None)
            for r in asked.group.rollouts
        ]

    def _kept(self, problem: Problem, row: Sequence[_Recut | None]) -> dict[int, _Recut]:
        """Those of a group that are text, by their number, as far as they fit behind the prompt."""
        room = self.max_positions - len(self.prompts.ids(problem))
        kept = {
            number: one if len(one.tokens) <= room else _NOT_CUT
            for number, one in enumerate(row)
            if one is not None
        }
        return kept if len(kept) >= min(2, len(row)) else {}

    def _read(
        self, asked: ForeignGroup, kept: dict[int, _Recut], logprobs: Iterator[tuple[float, ...]]
    ) -> Translation:
        """`logprobs`: on the tokens of what is kept, and of the groups behind."""
        group = asked.group
        rollouts = tuple(
            msgspec.structs.replace(
                group.rollouts[number], tokens=one.tokens, logprobs=next(logprobs)
            )
            for number, one in kept.items()
        )
        reading = Reading(
            group,
            self._pair(asked.spelling),
            tuple(kept),
            tuple(one.read for one in kept.values()),
            self.max_tokens,
        )
        return Translation(msgspec.structs.replace(group, rollouts=rollouts), reading)

    def _recuts(self, wanted: dict[_Completion, Spelling]) -> _Recuts:
        """What was not met before is cut and aligned, and remembered if it is short."""
        recuts = {one: self._known[one] for one in wanted if one in self._known}
        fresh = {one: spelling for one, spelling in wanted.items() if one not in recuts}
        for one, recut in self._fresh(fresh).items():
            recuts[one] = recut
            if len(one.tokens) + len(recut.tokens if recut else ()) <= SHORT:
                if len(self._known) >= MOST_KNOWN:
                    self._known.clear()
                self._known[one] = recut
        return recuts

    def _fresh(self, wanted: dict[_Completion, Spelling]) -> _Recuts:
        each = list(wanted)
        texts = [spelling.read(one.spelled, self.max_tokens) for one, spelling in wanted.items()]
        cuts = self._cut(each, texts)
        recuts: _Recuts = {}
        compared: dict[str, list[int]] = {}  # by table, their numbers
        for number, (one, cut) in enumerate(zip(each, cuts, strict=True)):
            if cut and one.canonical:
                compared.setdefault(one.table, []).append(number)
            elif cut:
                recuts[one] = _Recut(cut, TextOnly(), _Shares([len(one.tokens)], [len(cut)]))
            else:
                recuts[one] = None if texts[number] is None else _NOT_CUT
        for numbers in compared.values():
            pair = self._pair(wanted[each[numbers[0]]])
            some = [_Cut(each[n], texts[n] or b"", cuts[n]) for n in numbers]
            for its, (spans, shares) in zip(some, _aligned(some, pair), strict=True):
                read = self._by_spans(spans, its.tokens, len(its.text))
                recuts[its.sent] = _Recut(its.tokens, read, shares)
        return recuts

    def _cut(
        self, wanted: Sequence[_Completion], texts: Sequence[bytes | None]
    ) -> list[tuple[int, ...]]:
        """Tokens of the receiver's, its end token with them; none where there is no fit cut."""
        each = list(dict.fromkeys(text for text in texts if text is not None))
        known = dict(zip(each, self.prompts.vocabulary.cut_all(each), strict=True))
        cuts: list[tuple[int, ...]] = []
        for one, text in zip(wanted, texts, strict=True):
            cut = None if text is None else known[text]
            ends = () if one.end is None else (one.end,)
            tokens = cut + ends if isinstance(cut, tuple) else ()
            cuts.append(tokens if len(tokens) <= FOLD_TOKENS * self.max_tokens else ())
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


class _Cut(NamedTuple):
    """A completion that is compared, its text, and the receiver's tokens."""

    sent: _Completion
    text: bytes
    tokens: tuple[int, ...]


def _aligned(each: Sequence[_Cut], pair: Pair) -> Iterator[tuple[RolloutSpans, _Shares]]:
    """The spans of completions of one table, and the shares: as the spans, but that the end token
    has its own.
    """
    ended = [one.sent.end is not None for one in each]
    cut = [one.tokens for one in each]
    text = b"".join(one.text for one in each)
    aligned = pair.align([one.sent.tokens for one in each], cut, ended, text)
    num_sent_S, num_cut_S = aligned.num_sent(), aligned.num_scored()
    begin_B = np.cumsum([0, *map(len, cut[:-1])])
    start_S = np.cumsum(num_cut_S) - num_cut_S - np.repeat(begin_B, aligned.count_B)
    sizes = num_sent_S.tolist(), num_cut_S.tolist()
    closed = aligned.closed_S.tolist()
    bounds = pairwise([0, *np.cumsum(aligned.count_B).tolist()])
    for has_end, (begin, end) in zip(ended, bounds, strict=True):
        shares = _Shares(*(size[begin:end] for size in sizes))
        if has_end:
            for share in shares:
                share[-1] -= 1
                share.append(1)
        # copied: what is remembered must not keep the arrays of all
        start, num_sent = start_S[begin:end].copy(), num_sent_S[begin:end].copy()
        yield RolloutSpans(start, num_sent, not closed[end - 1]), shares


def _laid(asked: Sequence[tuple[tuple[float, ...], _Recut]]) -> list[tuple[float, ...]]:
    """The sender's log-probs on the receiver's tokens, evenly in each share. Sums are kept, up to
    the rounding of float64.
    """
    sent_S = np.fromiter(chain.from_iterable(recut.shares.sent for _, recut in asked), np.int64)
    cut_S = np.fromiter(chain.from_iterable(recut.shares.cut for _, recut in asked), np.int64)
    logq_T = np.fromiter(
        chain.from_iterable(logprobs for logprobs, recut in asked if recut.tokens), np.float64
    )
    total_S = np.bincount(np.repeat(np.arange(len(sent_S)), sent_S), logq_T, len(sent_S))
    share_T = np.repeat(total_S / np.maximum(1, cut_S), cut_S).tolist()
    ends = accumulate(len(recut.tokens) for _, recut in asked)
    return [tuple(share_T[start:end]) for start, end in pairwise(chain([0], ends))]
