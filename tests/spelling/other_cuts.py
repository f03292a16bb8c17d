"""Spans closed by other rules than that of stable cuts, to show what becomes of ratios then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from motley.spelling.spans import Aligned, Bools, Bytes, Ints, StableCuts, Tokenized, align

from .chains import END, Samples

# the text, where the tokens of each side end, whether the text ended -> where spans close
Rule = Callable[[bytes, set[int], set[int], bool], set[int]]


@dataclass(frozen=True)
class Told(StableCuts):
    """Cuts by another rule than ours, to see what becomes of ratios then."""

    told_N: Bools

    def after(self, text_N: Bytes, size_B: Ints) -> Bools:
        return self.told_N


def by_rule(samples: Samples, rule: Rule) -> Aligned:
    """Spans closed where the rule says: bytes -> ends of both sides' tokens -> closing places."""
    told: list[bool] = []
    for sent, scored in zip(samples.sent, samples.scored, strict=True):
        text = b"".join(sent)
        ends = [set(np.cumsum([len(t) for t in side]).tolist()) for side in (sent, scored)]
        closing = rule(text, ends[0], ends[1], END in sent)
        told += [place in closing for place in range(1, len(text) + 1)]
    sides = [cut_of(samples.sent), cut_of(samples.scored)]
    empty = StableCuts.of(())
    cuts = Told(empty.opening, empty.inside, empty.longer, np.array(told, np.bool_))
    return align(sides[0], sides[1], [cuts])


def cut_of(completions: list[list[bytes]]) -> Tokenized:
    lengths = [len(token) for tokens in completions for token in tokens]
    counts = [len(tokens) for tokens in completions]
    text = b"".join(b"".join(tokens) for tokens in completions)
    return Tokenized(text, np.array(lengths, np.int64), np.array(counts, np.int64))


def every_common_cut(text: bytes, sent: set[int], scored: set[int], ended: bool) -> set[int]:
    return sent & scored


def before_a_space(text: bytes, sent: set[int], scored: set[int], ended: bool) -> set[int]:
    return {i for i in sent & scored if text[i : i + 1] == b" "}


def only_the_end(text: bytes, sent: set[int], scored: set[int], ended: bool) -> set[int]:
    return {len(text)} if ended else set()
