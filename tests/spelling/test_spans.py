from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motley.spelling import Spelling, UnspelledError
from motley.spelling.spans import (
    Pair,
    StableCuts,
    Tokenized,
    Tokenwise,
    UnlikeTextsError,
    align,
)

BYTES = [bytes([byte]) for byte in range(256)]
END = 256
CHARACTERS = st.text(st.sampled_from("ab5 é中🎉"), max_size=12) | st.text(max_size=12)


@dataclass
class Case:
    """Completions, cut by two vocabularies in any way that they allow."""

    pair: Pair
    texts: list[bytes]
    sent: list[list[int]]
    scored: list[list[int]]
    ended: list[bool]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    texts = [text.encode() for text in draw(st.lists(CHARACTERS, max_size=4))]
    ended = [draw(st.booleans()) for _ in texts]
    # cut by length: wherever, in the middle of a character too
    texts = [
        text if end else text[: draw(st.integers(0, len(text)))]
        for text, end in zip(texts, ended, strict=True)
    ]
    all_bytes = b"".join(texts)
    sides = [_vocabulary(draw, all_bytes) for _ in range(2)]
    completions = [
        [_tokens(draw, side, text, end) for text, end in zip(texts, ended, strict=True)]
        for side in sides
    ]
    spellings = [Spelling((*BYTES, None, *side)) for side in sides]
    return Case(Pair.of(*spellings), texts, completions[0], completions[1], ended)


def _vocabulary(draw: st.DrawFn, text: bytes) -> list[bytes]:
    """Parts of the text of 2 to 5 bytes."""
    places = draw(st.lists(st.tuples(st.integers(0, len(text)), st.integers(2, 5)), max_size=6))
    found = {text[start : start + size] for start, size in places}
    return sorted(token for token in found if len(token) > 1)


def _tokens(draw: st.DrawFn, longer: list[bytes], text: bytes, ended: bool) -> list[int]:
    tokens, place = [], 0
    while place < len(text):
        fit = [i for i, token in enumerate(longer) if text.startswith(token, place)]
        chosen = draw(st.sampled_from([-1, *fit]))
        tokens.append(text[place] if chosen < 0 else END + 1 + chosen)
        place += 1 if chosen < 0 else len(longer[chosen])
    return [*tokens, END] if ended else tokens


def pieces(spelling: Spelling, tokens: list[list[int]]) -> list[bytes]:
    return [spelling.token_bytes[t] or b"" for completion in tokens for t in completion]


@pytest.mark.slow
@given(case=cases())
def test_spans_tile_the_bytes_alike_on_both_sides(case: Case) -> None:
    spans = case.pair.align(case.sent, case.scored, case.ended)
    sides = [
        (case.pair.sender, case.sent, spans.sender_T),
        (case.pair.receiver, case.scored, spans.receiver_T),
    ]
    spelled = []
    for spelling, tokens, span_T in sides:
        text_S = [b""] * len(spans.closed_S)
        for piece, span in zip(pieces(spelling, tokens), span_T, strict=True):
            text_S[span] += piece
        spelled.append(text_S)
    assert spelled[0] == spelled[1]
    bounds = np.cumsum([0, *spans.count_B]).tolist()
    joined = [b"".join(spelled[0][a:b]) for a, b in itertools.pairwise(bounds)]
    assert joined == case.texts


@pytest.mark.slow
@given(case=cases())
def test_order_is_kept_and_no_span_is_without_tokens(case: Case) -> None:
    spans = case.pair.align(case.sent, case.scored, case.ended)
    everything = np.arange(len(spans.closed_S))
    for span_T in (spans.sender_T, spans.receiver_T):
        assert (np.diff(span_T) >= 0).all()
        assert (np.unique(span_T) == everything).all()
    of_B = np.repeat(np.arange(len(case.texts)), spans.count_B)
    owner_T = np.repeat(np.arange(len(case.sent)), [len(tokens) for tokens in case.sent])
    assert (of_B[spans.sender_T] == owner_T).all()


@pytest.mark.slow
@given(case=cases())
def test_spans_close_at_stable_cuts_and_at_the_end_only(case: Case) -> None:
    spans = case.pair.align(case.sent, case.scored, case.ended)
    expected = []
    for text, ended in zip(case.texts, case.ended, strict=True):
        stable = case.pair.stable(text)
        expected += [True] * int(stable.sum())
        if ended:
            expected.append(True)
        elif text and not stable[-1]:
            expected.append(False)
    assert spans.closed_S.tolist() == expected


@pytest.mark.slow
@given(case=cases(), seed=st.integers(0, 9))
def test_sums_are_conserved(case: Case, seed: int) -> None:
    spans = case.pair.align(case.sent, case.scored, case.ended)
    rng = np.random.default_rng(seed)
    sent, scored = rng.normal(size=len(spans.sender_T)), rng.normal(size=len(spans.receiver_T))
    ratio_S = spans.log_ratios(sent, scored)
    assert ratio_S.sum() == pytest.approx(scored.sum() - sent.sum())
    by_hand = [
        scored[spans.receiver_T == span].sum() - sent[spans.sender_T == span].sum()
        for span in range(len(spans.closed_S))
    ]
    assert ratio_S == pytest.approx(np.array(by_hand))
    assert spans.num_sent().sum() == len(sent)


@pytest.mark.slow
@given(case=cases())
def test_completions_align_together_as_they_do_alone(case: Case) -> None:
    together = case.pair.align(case.sent, case.scored, case.ended)
    shift, sender_T, receiver_T = 0, [], []
    for sent, scored, ended in zip(case.sent, case.scored, case.ended, strict=True):
        alone = case.pair.align([sent], [scored], [ended])
        sender_T += (alone.sender_T + shift).tolist()
        receiver_T += (alone.receiver_T + shift).tolist()
        shift += len(alone.closed_S)
    assert together.sender_T.tolist() == sender_T
    assert together.receiver_T.tolist() == receiver_T


# By hand

LEFT = Spelling((b"a", b"b", b"5", b"ab", b"b5", None))
RIGHT = Spelling((b"a", b"b", b"5", b"a5", None))
PAIR = Pair.of(LEFT, RIGHT)


def test_an_end_token_behind_a_stable_cut_is_a_span_of_its_own() -> None:
    spans = PAIR.align([[3, 2, 5]], [[0, 1, 2, 4]], [True])  # ab 5 end; a b 5 end
    assert spans.sender_T.tolist() == [0, 0, 1]
    assert spans.receiver_T.tolist() == [0, 0, 0, 1]
    assert spans.closed_S.all()


def test_elsewhere_it_belongs_to_the_last_span() -> None:
    # ab end; a b end: behind b the sender might have had b5, and the end token says it had not
    spans = PAIR.align([[3, 5]], [[0, 1, 4]], [True])
    assert spans.sender_T.tolist() == [0, 0]
    assert spans.receiver_T.tolist() == [0, 0, 0]
    assert spans.closed_S.tolist() == [True]


def test_what_was_cut_by_length_is_not_closed() -> None:
    spans = PAIR.align([[3, 2, 0], [2]], [[0, 1, 2, 0], [2]], [False, False])
    assert spans.sender_T.tolist() == [0, 0, 1, 2]
    assert spans.count_B.tolist() == [2, 1]
    assert spans.closed_S.tolist() == [True, False, True]


def test_an_empty_completion_has_no_span_and_an_ended_one_has_its_end() -> None:
    spans = PAIR.align([[], [5], []], [[], [4], []], [False, True, False])
    assert spans.count_B.tolist() == [0, 1, 0]
    assert spans.sender_T.tolist() == [0]
    assert len(PAIR.align([], [], []).closed_S) == 0


def test_a_character_may_be_split_between_tokens_and_cut_in_two_by_length() -> None:
    left = Spelling((*BYTES, None, "a中".encode()[:3]))
    pair = Pair.of(left, Spelling((*BYTES, None)))
    spans = pair.align([[257, 0xAD], [257]], [list("a中".encode()), [*b"a\xe4\xb8"]], [False] * 2)
    # the sender's long token ends at the second byte of the character, and none can go on there
    assert spans.sender_T.tolist() == [0, 1, 2]
    assert spans.receiver_T.tolist() == [0, 0, 0, 1, 2, 2, 2]
    assert spans.closed_S.all()


def test_texts_that_differ_are_named() -> None:
    with pytest.raises(UnlikeTextsError, match=r"completion 1 differs from byte 1 on.*b'5'.*b'b'"):
        PAIR.align([[0], [3]], [[0], [0, 2]], [False, False])
    with pytest.raises(UnlikeTextsError, match="completion 0 differs from byte 1 on"):
        PAIR.align([[3]], [[0]], [False])


def test_an_end_token_on_one_side_is_named() -> None:
    sides = [
        Tokenized(b"a", np.array(lengths), np.array([len(lengths)])) for lengths in ([1, 0], [1])
    ]
    for sender, receiver, who in ((*sides, "sender"), (*reversed(sides), "receiver")):
        with pytest.raises(UnlikeTextsError, match=f"end token on the {who}'s side only"):
            align(sender, receiver, [StableCuts.of([])])


def test_a_special_token_within_a_completion_is_named() -> None:
    with pytest.raises(UnspelledError, match="token 5 stands for no text"):
        PAIR.align([[0, 5, 0]], [[0, 0]], [False])


def test_with_one_vocabulary_the_ratio_of_a_token_is_that_of_a_span() -> None:
    sent, scored = np.array([-1.0, -0.1]), np.array([-0.3, -0.7])
    assert (Tokenwise().log_ratios(sent, scored) == scored - sent).all()
