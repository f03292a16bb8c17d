from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.spelling.spans import RARE_SPACES, StableCuts

LETTERS = b"abc"
SINGLE = [bytes([letter]) for letter in LETTERS]
WORDS = st.lists(st.text("abc", min_size=2, max_size=4).map(str.encode), max_size=5, unique=True)


def stable(tokens: list[bytes], text: bytes) -> list[bool]:
    found = StableCuts.of(tokens).after(np.frombuffer(text, np.uint8), np.array([len(text)]))
    return [bool(s) for s in found]


def cuts_of(tokens: list[bytes], text: bytes) -> Iterator[set[int]]:
    """Where the tokens end, for every way to make the text of them."""
    if not text:
        yield set()
    for token in tokens:
        if text.startswith(token):
            for rest in cuts_of(tokens, text[len(token) :]):
                yield {len(token), *(len(token) + end for end in rest)}


def never_crossed(tokens: list[bytes], text: bytes, place: int) -> bool:
    """By definition: however the text goes on, and however that is cut, a token ends there."""
    longest = max(map(len, tokens))
    behind = (bytes(b) for n in range(longest) for b in itertools.product(LETTERS, repeat=n))
    return all(place in ends for more in behind for ends in cuts_of(tokens, text[:place] + more))


def by_beginnings(tokens: list[bytes], text: bytes) -> list[bool]:
    """No suffix of the text so far is a proper beginning of a token."""
    begun = {token[:size] for token in tokens for size in range(1, len(token))}
    return [
        not any(text[start:end] in begun for start in range(end)) for end in range(1, len(text) + 1)
    ]


@settings(max_examples=60)
@given(words=WORDS, text=st.text("abc", min_size=1, max_size=5).map(str.encode))
def test_a_cut_is_stable_if_and_only_if_no_token_of_any_continuation_crosses_it(
    words: list[bytes], text: bytes
) -> None:
    tokens = [*SINGLE, *words]
    expected = [never_crossed(tokens, text, place) for place in range(1, len(text) + 1)]
    assert stable(tokens, text) == expected


@settings(max_examples=60)
@given(words=WORDS.filter(bool), text=st.text("abc", min_size=1, max_size=5).map(str.encode))
def test_nothing_crosses_a_stable_cut_where_letters_are_no_tokens(
    words: list[bytes], text: bytes
) -> None:
    for place, safe in enumerate(stable(words, text), start=1):
        assert not safe or never_crossed(words, text, place)


@given(
    words=st.lists(st.text("ab5", min_size=2, max_size=9).map(str.encode), max_size=12),
    text=st.text("ab5", max_size=40).map(str.encode),
)
def test_beginnings_of_up_to_eight_bytes_are_told_exactly(words: list[bytes], text: bytes) -> None:
    assert stable(words, text) == by_beginnings(words, text)


@pytest.mark.slow
@given(
    words=st.lists(st.text("ab5", min_size=2, max_size=30).map(str.encode), max_size=4),
    text=st.text("ab5", max_size=60).map(str.encode),
)
def test_of_longer_beginnings_a_cut_may_be_missed_but_none_is_wrong(
    words: list[bytes], text: bytes
) -> None:
    texts = [text, *words, b"".join(words)]
    for each in texts:
        for ours, exact in zip(stable(words, each), by_beginnings(words, each), strict=True):
            assert exact or not ours


@given(
    one=st.lists(st.text("ab5", min_size=2, max_size=9).map(str.encode), max_size=8),
    other=st.lists(st.text("ab5", min_size=2, max_size=9).map(str.encode), max_size=8),
    text=st.text("ab5", max_size=40).map(str.encode),
)
def test_the_cuts_of_two_are_those_that_are_stable_for_both(
    one: list[bytes], other: list[bytes], text: bytes
) -> None:
    cuts = StableCuts.of(one).both(StableCuts.of(other))
    together = cuts.after(np.frombuffer(text, np.uint8), np.array([len(text)]))
    each = zip(stable(one, text), stable(other, text), strict=True)
    assert together.tolist() == [a and b for a, b in each]


def test_a_long_beginning_closes_what_ends_like_it() -> None:
    token = b"x123456789"
    assert stable([token], b"x12345678") == [False] * 9
    # only the last eight bytes of the beginning are compared
    assert by_beginnings([token], b"y12345678")[-1]
    assert stable([token], b"y12345678")[-1] is False
    assert stable([token], b"y1234567")[-1]


SOME_BYTES = st.lists(st.sampled_from(b"ab5 \xc3\xa9\xff\x00"), max_size=40).map(bytes)


@pytest.mark.slow
@given(words=st.lists(SOME_BYTES.map(lambda b: b[:6]).filter(bool), max_size=30), text=SOME_BYTES)
def test_a_byte_that_is_only_ever_the_last_of_a_token_is_always_a_stable_cut(
    words: list[bytes], text: bytes
) -> None:
    inside = {byte for token in words for byte in token[:-1]}
    for byte, found in zip(text, stable(words, text), strict=True):
        assert found or byte in inside


@pytest.mark.slow
@given(
    words=st.lists(st.text("ab5", min_size=2, max_size=5).map(str.encode), max_size=8),
    texts=st.lists(st.text("ab5", max_size=8).map(str.encode), max_size=6),
)
def test_texts_are_judged_each_by_itself(words: list[bytes], texts: list[bytes]) -> None:
    sizes = np.array([len(text) for text in texts], np.int64)
    joined = StableCuts.of(words).after(np.frombuffer(b"".join(texts), np.uint8), sizes)
    assert joined.tolist() == [s for text in texts for s in stable(words, text)]


def merged(merges: list[tuple[bytes, bytes]], text: bytes) -> list[bytes]:
    """Byte pair encoding: the earliest merge first, from the left."""
    tokens = [bytes([byte]) for byte in text]
    while True:
        pairs = list(itertools.pairwise(tokens))
        ranks = [merges.index(pair) for pair in pairs if pair in merges]
        if not ranks:
            return tokens
        place = pairs.index(merges[min(ranks)])
        tokens[place : place + 2] = [b"".join(pairs[place])]


@pytest.mark.slow
@given(
    choices=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8),
    text=st.text("abc5", max_size=20).map(str.encode),
)
def test_byte_pairs_are_merged_within_stable_cuts_as_they_are_without(
    choices: list[tuple[int, int]], text: bytes
) -> None:
    tokens, merges = [*SINGLE, b"5"], []
    for left, right in choices:
        pair = (tokens[left % len(tokens)], tokens[right % len(tokens)])
        if b"5" not in pair[0] and b"".join(pair) not in tokens:
            merges.append(pair)
            tokens.append(b"".join(pair))
    ends = [place + 1 for place, safe in enumerate(stable(tokens, text)) if safe]
    parts = [text[a:b] for a, b in itertools.pairwise([0, *ends, len(text)])]
    assert merged(merges, text) == [token for part in parts for token in merged(merges, part)]


def test_digits_close_spans_and_letters_do_not() -> None:
    tokens = [b"a", b"b", b"c", b"ab", b"5", b"b5"]
    assert stable(tokens, b"ab5c5") == [False, False, True, True, True]


def test_numbers_of_several_digits_close_nothing() -> None:
    tokens = [b"%d" % number for number in range(1000)]
    assert not any(stable(tokens, b"1234567"))


def test_a_character_is_closed_by_its_last_byte_only() -> None:
    # both characters are tokens of two bytes; the second may go on
    tokens = ["é".encode(), "è".encode(), "èa".encode()]
    assert stable(tokens, "éè".encode()) == [False, True, False, False]


def test_behind_a_rare_space_no_cut_is_stable() -> None:
    # Qwen 2.5 makes other tokens of " \u2005" where a letter follows
    for space in RARE_SPACES:
        assert space.isspace()
        assert not any(stable([b"a"], space.encode())[-1:])
    assert stable([b"a"], " \n\r\ta€".encode()) == [True] * 5 + [False, True, True]


def test_tokens_without_text_are_passed_over() -> None:
    text = np.frombuffer(b"a5", np.uint8)
    found = StableCuts.of([None, b"a5", None]).after(text, np.array([2]))
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("tokens", [[], [b"a"], [None]], ids=["none", "one byte", "no text"])
def test_where_no_token_has_two_bytes_every_cut_is_stable(tokens: list[bytes | None]) -> None:
    assert StableCuts.of(tokens).after(np.frombuffer(b"ab", np.uint8), np.array([2])).all()
