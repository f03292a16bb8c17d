"""What a process remembers of sections that it wrote or read. How they stand is in test_wire.py."""

from __future__ import annotations

import pytest

from fakes import rollout
from motley.exchange import WireError, sections
from motley.exchange.sections import decode_sections, encode_sections, varint_bytes
from motley.records import Rollout

ROLLOUTS = [rollout([3, 300, 1]), rollout([70_000, 1], reward=-2.5)]


@pytest.fixture(autouse=True)
def lately(monkeypatch: pytest.MonkeyPatch) -> sections._Lately:
    """Nothing is remembered yet."""
    monkeypatch.setattr(sections, "_lately", lately := sections._Lately())
    return lately


def written(rollouts: list[Rollout], lossless: bool = False) -> bytes:
    return b"".join(encode_sections("a.0.0", rollouts, lossless).parts)


def never_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*sections: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(sections._Lately, "find", lambda lately, key: lately._arrays.get(key))
    monkeypatch.setattr(sections, "_decoded", refuse)


@pytest.mark.parametrize("lossless", [False, True])
def test_what_was_written_here_is_not_decoded(
    lossless: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = written(ROLLOUTS, lossless)
    never_decode(monkeypatch)
    arrays = decode_sections(content, 2, lossless)
    assert [r.tokens for r in arrays.rollouts()] == [r.tokens for r in ROLLOUTS]
    assert [r.reward for r in arrays.rollouts()] == [r.reward for r in ROLLOUTS]


def test_what_was_read_once_is_not_decoded_again(
    lately: sections._Lately, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = written(ROLLOUTS)
    lately._arrays.clear()
    first = decode_sections(content, 2, False)
    never_decode(monkeypatch)
    assert decode_sections(content, 2, False) is first


def test_the_same_bytes_as_other_rollouts_are_read_anew() -> None:
    content = written(ROLLOUTS)
    with pytest.raises(WireError):
        decode_sections(content, 1, False)
    with pytest.raises(WireError):
        decode_sections(content, 2, True)


def test_a_known_rollout_is_still_too_long() -> None:
    content = written(ROLLOUTS)
    assert len(decode_sections(content, 2, False, rollout_tokens=3).token_N) == 5
    with pytest.raises(WireError, match="a rollout has 3 tokens; at most 2"):
        decode_sections(content, 2, False, rollout_tokens=2)


def test_nobody_can_change_what_others_hold() -> None:
    arrays = decode_sections(written(ROLLOUTS), 2, False)
    for array in (arrays.token_N, arrays.logprob_N, arrays.length_R, arrays.reward_R):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_the_oldest_are_forgotten(
    lately: sections._Lately, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [written([rollout([number, 1])]) for number in range(40)]
    monkeypatch.setattr(sections, "_MOST_LATELY_BYTES", 10 * len(contents[0]))
    lately._arrays.clear()
    lately._num_bytes = 0
    for content in (*contents, contents[-1]):
        decode_sections(content, 1, False)
    assert [content for content, *_ in lately._arrays] == contents[-10:]
    assert lately._num_bytes == 10 * len(contents[0])


@pytest.mark.parametrize("number", [-1, 2**35])
def test_a_number_beyond_a_varint_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"from 0 to 2.35; got {number}"):
        varint_bytes([5, number])


def test_varints_beyond_those_remembered_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = [0, 127, 128, 2**14 - 1, 2**14, 2**35 - 1]
    monkeypatch.setattr(sections, "_varints", known := sections._Varints())
    monkeypatch.setattr(sections, "_MOST_VARINTS", 2)
    made = varint_bytes(numbers)
    assert len(known) == 2
    assert made == varint_bytes(numbers)
    read, stop = sections.varints(made, 0, len(numbers))
    assert (read.tolist(), stop) == (numbers, len(made))
