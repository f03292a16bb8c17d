"""Spans: the parts of a text whose log-probs two vocabularies can compare.

Each vocabulary cuts a text its own way. A span runs from one stable cut to the next, and log-probs
are summed over it. A cut is stable if it can be told without a look at what follows: no suffix of
the text so far is a proper beginning of a token, so no token of any continuation crosses it.
docs/methods.md says why nothing less will do.

Owns where spans begin and end. Knows bytes and indices: no tokenizer, no tensor, no ratio's use.

Axes: B completions, T tokens of one side, N bytes, S spans; all completions one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from motley.spelling.table import Spelling

Bytes = NDArray[np.uint8]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Codes = NDArray[np.uint64]  # up to eight bytes as one number

WINDOW = 8  # bytes looked back at; as many as a code holds
# Tokenizers split off the last of several spaces if no space follows, so the cut of what stands
# before it hangs on that. Behind common spaces tokens go on anyway; behind these few do.
RARE_SPACES = "\x0b\x0c\x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class UnlikeTextsError(ValueError):
    """Two sides that do not spell one text."""


@dataclass(frozen=True)
class StableCuts:
    """After which bytes of a text no token of one vocabulary can go on.

    Tokens `a`, `b`, `c`, `ab`, `5`, `b5`: in "ab5c5" the cuts after 5, c and 5 are stable. Those
    after `a` and `b` are not, since `ab` and `b5` can cross them.

    A beginning of a token counts only if it has no other as its suffix. That leaves few: of most
    tables single bytes and parts of characters. Of one longer than eight bytes the last eight are
    kept. So a stable cut may be missed there, and none is ever found that is not stable. Behind
    RARE_SPACES none is stable either.
    """

    opening: Bools  # (256,): the byte begins a token of several bytes
    inside: Bools  # (256,): other bytes that some token goes on behind; all else is stable
    longer: tuple[Codes, ...]  # beginnings of 2, 3, ..., 8 bytes up to such a byte, each sorted

    @staticmethod
    def of(tokens: Iterable[bytes | None]) -> StableCuts:
        """Of the tokens of a vocabulary; None: a token without text."""
        several = [token for token in tokens if token is not None and len(token) > 1]
        several += [space.encode() + b"?" for space in RARE_SPACES]
        text_N = np.frombuffer(b"".join(several), np.uint8)
        length_V = np.array([len(token) for token in several], np.int64)
        place_N = _within(length_V)  # of the byte in its token
        opening = np.zeros(256, np.bool_)
        opening[text_N[place_N == 0]] = True
        inner = (place_N > 0) & (place_N < np.repeat(length_V, length_V) - 1)
        end_E = np.flatnonzero(inner & ~opening[text_N])  # where beginnings end
        inside = np.zeros(256, np.bool_)
        inside[text_N[end_E]] = True
        longer: list[Codes] = []
        for size in range(2, WINDOW + 1):
            known = ~_ends_on(text_N, end_E, place_N[end_E] + 1, longer)
            end_E = end_E[known]
            exact = place_N[end_E] + 1 == size
            here = exact if size < WINDOW else np.ones_like(exact)
            longer.append(np.unique(_codes(text_N, end_E[here], size)))
        return StableCuts(opening, inside, tuple(longer))

    def both(self, other: StableCuts) -> StableCuts:
        """After which bytes no token of either vocabulary can go on. What one of them judges by a
        byte alone needs no more bytes of the other.
        """
        opening = self.opening | other.opening
        inside = (self.inside | other.inside) & ~opening
        longer = zip(self.longer, other.longer, strict=True)
        return StableCuts(opening, inside, tuple(np.union1d(*codes) for codes in longer))

    def after(self, text_N: Bytes, size_B: Ints) -> Bools:
        """For each byte of the texts, whether the cut behind it is stable."""
        stable_N = ~self.opening[text_N]
        place_C = np.flatnonzero(self.inside[text_N])  # to be judged by more bytes than one
        behind_C = _within(size_B)[place_C] + 1
        stable_N[place_C] = ~_ends_on(text_N, place_C, behind_C, self.longer)
        return stable_N


def _within(size_B: Ints) -> Ints:
    """Places in each of several rows: sizes 2, 3 -> 0, 1, 0, 1, 2."""
    starts_B = np.cumsum(size_B) - size_B
    return np.arange(int(size_B.sum()), dtype=np.int64) - np.repeat(starts_B, size_B)


def _codes(text_N: Bytes, end_E: Ints, size: int) -> Codes:
    """The `size` bytes up to each end as one number."""
    codes = np.zeros(len(end_E), np.uint64)
    for back in range(size):
        codes |= text_N[end_E - back].astype(np.uint64) << np.uint64(8 * back)
    return codes


def _ends_on(text_N: Bytes, end_E: Ints, behind_E: Ints, longer: Sequence[Codes]) -> Bools:
    """Whether one of the beginnings ends at each place, within the `behind` bytes up to it."""
    found_E = np.zeros(len(end_E), np.bool_)
    left, looked = np.arange(len(end_E)), text_N[end_E].astype(np.uint64)
    for size, codes in enumerate(longer, start=2):
        reached = behind_E[left] >= size
        left, looked = left[reached], looked[reached]
        if not len(left):
            break
        byte = text_N[end_E[left] - size + 1].astype(np.uint64)
        looked |= byte << np.uint64(8 * (size - 1))
        if len(codes):
            is_one = codes[np.minimum(np.searchsorted(codes, looked), len(codes) - 1)] == looked
            found_E[left[is_one]] = True
            left, looked = left[~is_one], looked[~is_one]
    return found_E


@dataclass(frozen=True)
class Tokenized:
    """How one vocabulary cuts the texts of several completions.

    "ab", ended, as `a`, `b` and an end token: text b"ab", length_T 1, 1, 0, count_B 3.
    """

    text: bytes  # of all completions
    length_T: Ints  # bytes of each token; 0: an end token
    count_B: Ints  # tokens of each completion

    def __post_init__(self) -> None:
        assert self.count_B.sum() == len(self.length_T)
        assert self.length_T.sum() == len(self.text)
        num_ends = len(self.length_T) - np.count_nonzero(self.length_T)
        ends_last = num_ends == np.count_nonzero(self.ended_B)
        assert ends_last, "an end token is the last of its completion"

    @staticmethod
    def of(
        spelling: Spelling,
        completions: Sequence[Sequence[int]],
        ended: Sequence[bool],
        text: bytes | None = None,
    ) -> Tokenized:
        """`ended`: whether the last token of a completion is its end token. `text`: of all, where
        it is known.
        """
        count_B = np.array([len(tokens) for tokens in completions], np.int64)
        spelled = (t[:-1] if end else t for t, end in zip(completions, ended, strict=True))
        ids = list(chain.from_iterable(spelled))
        if text is None:
            text = spelling.bytes_of(ids)
        has_text_T = np.ones(int(count_B.sum()), np.bool_)
        has_text_T[np.cumsum(count_B)[np.array(ended, np.bool_)] - 1] = False
        length_T = np.zeros(len(has_text_T), np.int64)
        length_T[has_text_T] = spelling.length_V[np.array(ids, np.int64)]
        return Tokenized(text, length_T, count_B)

    @cached_property
    def end_B(self) -> Ints:
        """Where the text of each completion ends."""
        total = np.zeros(len(self.length_T) + 1, np.int64)
        np.cumsum(self.length_T, out=total[1:])
        ends: Ints = total[np.cumsum(self.count_B)]
        return ends

    @cached_property
    def ended_B(self) -> Bools:
        """Which completions have an end token."""
        ended_B = self.count_B > 0
        ended_B[ended_B] = self.length_T[np.cumsum(self.count_B)[ended_B] - 1] == 0
        return ended_B

    def slots(self) -> Ints:
        """Where each token ends, if each text has one more slot behind it, for the end token."""
        left_B: Ints = np.cumsum(~self.ended_B) - ~self.ended_B  # slots before that no token has
        return np.cumsum(np.maximum(self.length_T, 1)) - 1 + np.repeat(left_B, self.count_B)


@dataclass(frozen=True)
class Tokenwise:
    """One vocabulary on both sides: each token is a span, and nothing is to be done."""

    def log_ratios(self, sent_T: Floats, scored_T: Floats) -> Floats:
        return scored_T - sent_T


@dataclass(frozen=True)
class Aligned:
    """The spans of several completions between two vocabularies, in the order of the text."""

    sender_T: Ints  # the span of each of the sender's tokens
    receiver_T: Ints  # the span of each of the receiver's tokens
    count_B: Ints  # spans of each completion
    closed_S: Bools  # not: the completion was cut by length inside of the span

    def log_ratios(self, sent_T: Floats, scored_T: Floats) -> Floats:
        """Of each span: the receiver's log-probs less the sender's."""
        num = len(self.closed_S)
        scored_S = np.bincount(self.receiver_T, scored_T, minlength=num)
        return np.subtract(scored_S, np.bincount(self.sender_T, sent_T, minlength=num), dtype=float)

    def wagers(self, sent_T: Floats, scored_T: Floats) -> Floats:
        """The same for who bets on them: a span that never closed pays nothing, -inf.

        To leave it out instead would be to bet on what closed only, with hindsight.
        """
        return np.where(self.closed_S, self.log_ratios(sent_T, scored_T), -np.inf)

    def num_sent(self) -> Ints:
        """The sender's tokens in each span."""
        return np.bincount(self.sender_T, minlength=len(self.closed_S))

    def num_scored(self) -> Ints:
        """The receiver's tokens in each span."""
        return np.bincount(self.receiver_T, minlength=len(self.closed_S))


@dataclass(frozen=True)
class Pair:
    """A sender's vocabulary and another one, the receiver's."""

    sender: Spelling
    receiver: Spelling
    sender_cuts: StableCuts
    receiver_cuts: StableCuts

    @staticmethod
    def of(sender: Spelling, receiver: Spelling) -> Pair:
        cuts = [StableCuts.of(spelling.token_bytes) for spelling in (sender, receiver)]
        return Pair(sender, receiver, *cuts)

    @cached_property
    def cuts(self) -> StableCuts:
        """Those that are stable for both."""
        return self.sender_cuts.both(self.receiver_cuts)

    def stable(self, text: bytes) -> Bools:
        """After which bytes of a text neither vocabulary can have a token go on."""
        return _stable(text, np.array([len(text)]), [self.cuts])

    def align(
        self,
        sent: Sequence[Sequence[int]],
        scored: Sequence[Sequence[int]],
        ended: Sequence[bool],
        text: bytes | None = None,
    ) -> Aligned:
        """Completions as the sender's tokens and as the receiver's.

        Where a completion ended both have their end token. Where it did not, neither has.
        `text`: what both spell, if that is known.
        """
        sender = Tokenized.of(self.sender, sent, ended, text)
        receiver = Tokenized.of(self.receiver, scored, ended, text)
        return align(sender, receiver, [self.cuts])


def align(sender: Tokenized, receiver: Tokenized, cuts: Sequence[StableCuts]) -> Aligned:
    """The spans of completions that two vocabularies cut.

    An end token is one more symbol behind the text. So it closes a span; and it is a span by
    itself if the cut before it is stable.
    """
    check_texts(sender, receiver)
    ended_B = sender.ended_B
    last_B = sender.end_B + np.arange(len(ended_B))  # the slot of the end token
    start_B = np.zeros_like(last_B)
    start_B[1:] = last_B[:-1] + 1
    size_B = last_B - start_B
    closes = np.zeros(len(sender.text) + len(size_B), np.bool_)
    spelled = np.ones(len(closes), np.bool_)
    spelled[last_B] = False
    closes[spelled] = _stable(sender.text, size_B, cuts)
    open_B = ~ended_B & (size_B > 0) & ~closes[last_B - 1]
    closes[last_B] = ended_B | open_B
    total = np.zeros(len(closes) + 1, np.int64)
    np.cumsum(closes, out=total[1:])
    span = total[:-1]  # of each slot
    closed_S = np.ones(int(total[-1]), np.bool_)
    closed_S[span[last_B[open_B]]] = False
    return Aligned(
        span[sender.slots()],
        span[receiver.slots()],
        total[last_B + 1] - total[start_B],
        closed_S,
    )


def _stable(text: bytes, size_B: Ints, cuts: Sequence[StableCuts]) -> Bools:
    text_N = np.frombuffer(text, np.uint8)
    return np.logical_and.reduce([one.after(text_N, size_B) for one in cuts])


def check_texts(sender: Tokenized, receiver: Tokenized) -> None:
    """Both sides spell the same bytes and end alike."""
    if (
        sender.text == receiver.text
        and np.array_equal(sender.end_B, receiver.end_B)
        and np.array_equal(sender.ended_B, receiver.ended_B)
    ):
        return
    texts = zip(_texts(sender), _texts(receiver), sender.ended_B, receiver.ended_B, strict=True)
    for place, (sent, scored, sent_end, scored_end) in enumerate(texts):
        if sent_end != scored_end:
            raise UnlikeTextsError(
                f"completion {place} has an end token on the {'sender' if sent_end else 'receiver'}"
                "'s side only; expected it on both or on neither: encode it as it ended"
            )
        if sent != scored:
            differ = next(
                (i for i, pair in enumerate(zip(sent, scored, strict=False)) if pair[0] != pair[1]),
                min(len(sent), len(scored)),
            )
            raise UnlikeTextsError(
                f"completion {place} differs from byte {differ} on: the receiver has "
                f"{scored[differ : differ + 8]!r}, expected the sender's "
                f"{sent[differ : differ + 8]!r}: use it as text only"
            )


def _texts(cut: Tokenized) -> list[bytes]:
    ends = cut.end_B.tolist()
    return [cut.text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
