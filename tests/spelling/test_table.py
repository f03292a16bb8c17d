from __future__ import annotations

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from motley.spelling import Spelling, SpellingError, UnspelledError
from motley.spelling.table import MAX_TOKEN_BYTES, MAX_TOKENS, MAX_TOTAL_BYTES

TOKENS = st.lists(st.none() | st.binary(min_size=1, max_size=300), max_size=40)


def test_bytes_of_tokens_are_joined_even_within_a_character() -> None:
    spelling = Spelling((None, b"a", b"\xc3", b"\xa9", b" b"))
    assert spelling.bytes_of([1, 2, 3, 4]).decode() == "aé b"
    assert spelling.bytes_of([1, 2]) == b"a\xc3"
    assert spelling.lengths_of([1, 2, 3, 4]) == [1, 1, 1, 2]
    assert spelling.bytes_of([]) == b""


@pytest.mark.parametrize("id", [0, 5, -1], ids=["special", "beyond the table", "negative"])
def test_a_token_without_text_is_named(id: int) -> None:
    spelling = Spelling((None, b"a", b"b", b"c", b"d"))
    for ask in (spelling.bytes_of, spelling.lengths_of):
        with pytest.raises(UnspelledError, match=f"token {id} stands for no text") as caught:
            ask([1, id, 2])
        assert caught.value.id == id


@given(TOKENS)
def test_a_table_comes_back_as_it_was(tokens: list[bytes | None]) -> None:
    spelling = Spelling(tuple(tokens))
    again = Spelling.decode(spelling.encode())
    assert again == spelling
    assert again.fingerprint == spelling.fingerprint
    assert again.encode() == spelling.encode()


@given(TOKENS, TOKENS)
def test_tables_with_other_bytes_have_other_fingerprints(
    left: list[bytes | None], right: list[bytes | None]
) -> None:
    while left and left[-1] is None:
        left.pop()
    while right and right[-1] is None:
        right.pop()
    alike = Spelling(tuple(left)).fingerprint == Spelling(tuple(right)).fingerprint
    assert alike == (left == right)


def test_rows_that_fill_up_the_matrix_leave_the_fingerprint_as_it_is() -> None:
    bare, filled = Spelling((b"a", None, b"b")), Spelling((b"a", None, b"b", None, None))
    assert bare.fingerprint == filled.fingerprint
    assert bare != filled
    assert Spelling((b"a", b"b")).fingerprint != bare.fingerprint


@given(st.binary(max_size=400))
def test_any_bytes_are_a_table_or_refused(hostile: bytes) -> None:
    try:
        spelling = Spelling.decode(hostile)
    except SpellingError:
        return
    assert spelling.encode() == hostile


@pytest.mark.slow
@given(TOKENS, st.data())
def test_a_table_that_was_cut_or_went_on_is_refused(
    tokens: list[bytes | None], data: st.DataObject
) -> None:
    encoded = Spelling(tuple(tokens)).encode()
    cut = data.draw(st.integers(0, len(encoded) - 1))
    for bad in (encoded[:cut], encoded + b"x"):
        with pytest.raises(SpellingError):
            Spelling.decode(bad)


def of_lengths(*lengths: int) -> bytes:
    """A table whose tokens are zeros, as a stranger may write it."""
    low, high = bytes(n % 256 for n in lengths), bytes(n // 256 for n in lengths)
    return len(lengths).to_bytes(4, "little") + low + high + bytes(sum(lengths))


def test_tables_beyond_the_limits_are_refused() -> None:
    most = MAX_TOTAL_BYTES // MAX_TOKEN_BYTES
    assert len(Spelling.decode(of_lengths(*[MAX_TOKEN_BYTES] * most))) == most
    for bad in (
        of_lengths(MAX_TOKEN_BYTES + 1),
        of_lengths(*[MAX_TOKEN_BYTES] * most, 1),
        (MAX_TOKENS + 1).to_bytes(4, "little") + bytes(2 * MAX_TOKENS + 2),
        b"\xff\xff\xff\xff",
        b"",
    ):
        with pytest.raises(SpellingError, match="expected"):
            Spelling.decode(bad)
    for tokens in ((b"x" * (MAX_TOKEN_BYTES + 1),), (None,) * (MAX_TOKENS + 1)):
        with pytest.raises(SpellingError, match="use a model with a smaller vocabulary"):
            Spelling(tokens)


def test_a_token_without_bytes_is_none_and_nothing_else() -> None:
    with pytest.raises(SpellingError, match="token 1 has no bytes; expected None"):
        Spelling((b"a", b""))


def test_a_table_takes_two_bytes_a_token_beside_its_bytes_and_compresses() -> None:
    spelling = Spelling(tuple(b"%d" % i for i in range(10_000)))
    encoded = spelling.encode()
    assert len(encoded) == 4 + 2 * 10_000 + sum(map(len, map(str, range(10_000))))
    assert len(zstandard.compress(encoded)) < len(encoded) / 2
