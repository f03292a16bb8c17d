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
    without_end,
)
from motley.models.prompts import Prompts
from motley.records import Group, Problem, Rollout
from motley.spelling import Aligned, Pair, Spelling, StableCuts, UnspelledError

FOLD_TOKENS = 8  # of a completion, times max_tokens: a longer cut is not learned from
MOST_PAIRS = 64  # senders' tables that are kept ready


class Translation(NamedTuple):
    """A group in the receiver's tokens, and how it is to be read.

    What cannot be cut has no tokens.
    """

    group: Group
    reading: Reading


class Unread(NamedTuple):
    """A group of which too little can be read, and why."""

    why: str


class _Texts(NamedTuple):
    """What could be read of a group."""

    number_R: list[int]
    rollouts: list[Rollout]
    text_R: list[bytes]


@dataclass(slots=True)
class Translator:
    prompts: Prompts
    max_tokens: int  # of the sender's, in a completion
    max_positions: int  # of the receiver's model
    _pairs: dict[str, Pair] = field(default_factory=dict)  # by the fingerprint of a table

    def translate(self, group: Group, problem: Problem, spelling: Spelling) -> Translation | Unread:
        """Read a group of a sender with this table."""
        texts = _readable(group, spelling)
        if len(texts.rollouts) < min(2, len(group.rollouts)):
            return Unread(
                f"{len(texts.rollouts)} of {len(group.rollouts)} completions are text; expected 2 "
                "or more without a special token inside"
            )
        tokens_R = self._cut(texts, problem)
        compared = [
            place
            for place, (rollout, tokens) in enumerate(zip(texts.rollouts, tokens_R, strict=True))
            if rollout.canonical and tokens
        ]
        pair = self._pair(spelling)
        rollouts, reads = _as_text(texts, tokens_R), _unspanned(texts, tokens_R)
        if compared:
            sent = [texts.rollouts[place] for place in compared]
            cut = [tokens_R[place] for place in compared]
            aligned = pair.align([r.tokens for r in sent], cut, [r.ending == "stop" for r in sent])
            laid = _laid(sent, cut, aligned)
            spans = _spans(aligned, [len(tokens) for tokens in cut])
            for place, logprobs, one in zip(compared, laid, spans, strict=True):
                rollouts[place] = msgspec.structs.replace(rollouts[place], logprobs=logprobs)
                reads[place] = self._by_spans(
                    texts.number_R[place], one, tokens_R[place], texts.text_R[place]
                )
        translated = msgspec.structs.replace(group, rollouts=tuple(rollouts))
        return Translation(translated, Reading(group, pair, tuple(reads), self.max_tokens))

    def _cut(self, texts: _Texts, problem: Problem) -> list[tuple[int, ...]]:
        """Tokens of the receiver's, its end token with them; none where there is no fit cut."""
        room = self.max_positions - len(self.prompts.ids(problem))
        most = min(FOLD_TOKENS * self.max_tokens, room)
        short = [len(text) <= FOLD_BYTES * self.max_tokens for text in texts.text_R]
        cuts = iter(
            self.prompts.vocabulary.cut_all(
                [text for text, fits in zip(texts.text_R, short, strict=True) if fits]
            )
        )
        end = self.prompts.end_id(problem)
        made: list[tuple[int, ...]] = []
        for rollout, fits in zip(texts.rollouts, short, strict=True):
            cut = next(cuts) if fits else None
            if not isinstance(cut, tuple):
                made.append(())
                continue
            tokens = (*cut, end) if rollout.ending == "stop" else cut
            made.append(tokens if len(tokens) <= most else ())
        return made

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

    def _by_spans(
        self, number: int, spans: RolloutSpans, tokens: Sequence[int], text: bytes
    ) -> BySpans:
        closed = 0
        if len(spans.start_S) > 1:
            last = tokens[int(spans.start_S[-1]) :]
            left = self.prompts.vocabulary.spelling.lengths_of(last) if spans.is_open else []
            closed = len(text) - sum(left)
        return BySpans(number, spans, len(text), closed)


def _readable(group: Group, spelling: Spelling) -> _Texts:
    """The rollouts that are text but for their end token."""
    texts = _Texts([], [], [])
    for number, rollout in enumerate(group.rollouts):
        try:
            text = spelling.bytes_of(without_end(rollout))
        except UnspelledError:
            continue
        texts.number_R.append(number)
        texts.rollouts.append(rollout)
        texts.text_R.append(text)
    return texts


def _as_text(texts: _Texts, tokens_R: Sequence[tuple[int, ...]]) -> list[Rollout]:
    """With the receiver's tokens; the sum of the sender's log-probs is spread over all of them."""
    return [
        msgspec.structs.replace(
            rollout,
            tokens=tokens,
            logprobs=(sum(rollout.logprobs) / len(tokens),) * len(tokens) if tokens else (),
        )
        for rollout, tokens in zip(texts.rollouts, tokens_R, strict=True)
    ]


def _unspanned(texts: _Texts, tokens_R: Sequence[tuple[int, ...]]) -> list[ReadRollout]:
    return [
        TextOnly(number) if tokens else NotCut(number)
        for number, tokens in zip(texts.number_R, tokens_R, strict=True)
    ]


def _laid(
    sent: Sequence[Rollout], cut: Sequence[tuple[int, ...]], spans: Aligned
) -> list[tuple[float, ...]]:
    """The sender's log-probs on the receiver's tokens: in each span evenly, that of the end on the
    end. Sums over spans are kept, up to the rounding of float64.
    """
    ended = np.array([rollout.ending == "stop" for rollout in sent])
    logq_T = np.fromiter(chain.from_iterable(r.logprobs for r in sent), np.float64)
    sent_T = 2 * spans.sender_T + _is_end([len(r.tokens) for r in sent], ended)
    cut_T = 2 * spans.receiver_T + _is_end([len(tokens) for tokens in cut], ended)
    total = np.bincount(sent_T, logq_T)
    share_T = (total / np.maximum(1, np.bincount(cut_T, minlength=len(total))))[cut_T]
    ends = np.cumsum([len(tokens) for tokens in cut])[:-1]
    return [tuple(part.tolist()) for part in np.split(share_T, ends)]


def _is_end(lengths: Sequence[int], ended: np.ndarray) -> Ints:
    mask = np.zeros(sum(lengths), np.int64)
    mask[np.cumsum(lengths) - 1] = ended
    return mask


def _spans(spans: Aligned, lengths: Sequence[int]) -> list[RolloutSpans]:
    first_S = np.flatnonzero(np.diff(spans.receiver_T, prepend=-1))
    ends_R = np.cumsum(spans.count_B)
    begins_R = np.cumsum(lengths) - lengths
    num_sent_S = spans.num_sent()
    return [
        RolloutSpans(
            first_S[end - count : end] - begin,
            num_sent_S[end - count : end],
            not spans.closed_S[end - 1],
        )
        for end, count, begin in zip(
            ends_R.tolist(), spans.count_B.tolist(), begins_R.tolist(), strict=True
        )
    ]
