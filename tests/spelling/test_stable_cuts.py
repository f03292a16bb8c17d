from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from motley.spelling.spans import StableCuts

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


@settings(max_examples=60, deadline=None)
@given(words=WORDS, text=st.text("abc", min_size=1, max_size=5).map(str.encode))
def test_a_cut_is_stable_if_and_only_if_no_token_of_any_continuation_crosses_it(
    words: list[bytes], text: bytes
) -> None:
    tokens = [*SINGLE, *words]
    expected = [never_crossed(tokens, text, place) for place in range(1, len(text) + 1)]
    assert stable(tokens, text) == expected


@settings(max_examples=60, deadline=None)
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


def test_a_long_beginning_closes_what_ends_like_it() -> None:
    token = b"x123456789"
    assert stable([token], b"x12345678") == [False] * 9
    # only the last eight bytes of the beginning are compared
    assert by_beginnings([token], b"y12345678")[-1]
    assert stable([token], b"y12345678")[-1] is False
    assert stable([token], b"y1234567")[-1]


@given(words=st.lists(st.binary(min_size=1, max_size=6), max_size=30), text=st.binary(max_size=60))
def test_a_byte_that_is_only_ever_the_last_of_a_token_is_always_a_stable_cut(
    words: list[bytes], text: bytes
) -> None:
    inside = {byte for token in words for byte in token[:-1]}
    for byte, found in zip(text, stable(words, text), strict=True):
        assert found or byte in inside


@given(
    words=st.lists(st.text("ab5", min_size=2, max_size=5).map(str.encode), max_size=8),
    texts=st.lists(st.text("ab5", max_size=8).map(str.encode), max_size=6),
)
def test_texts_are_judged_each_by_itself(words: list[bytes], texts: list[bytes]) -> None:
    sizes = np.array([len(text) for text in texts], np.int64)
    joined = StableCuts.of(words).after(np.frombuffer(b"".join(texts), np.uint8), sizes)
    assert joined.tolist() == [s for text in texts for s in stable(words, text)]


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


def test_tokens_without_text_are_passed_over() -> None:
    text = np.frombuffer(b"a5", np.uint8)
    found = StableCuts.of([None, b"a5", None]).after(text, np.array([2]))
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("tokens", [[], [b"a"], [None]], ids=["none", "one byte", "no text"])
def test_where_no_token_has_two_bytes_every_cut_is_stable(tokens: list[bytes | None]) -> None:
    assert StableCuts.of(tokens).after(np.frombuffer(b"ab", np.uint8), np.array([2])).all()
