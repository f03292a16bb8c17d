from __future__ import annotations

import msgspec

from motley.trust.standing import Standing, StandingState


def struck(times: int, reason: str = "reward") -> Standing:
    standing = Standing(rounds=10)
    for _ in range(times):
        standing.strike("b", reason, now=5)
    return standing


def test_three_strikes_mute_a_sender_for_some_rounds() -> None:
    assert not struck(2).muted
    standing = struck(3)
    assert standing.muted["b"].reason == "reward"
    assert standing.begin_round(14) == []
    assert standing.begin_round(15) == ["b"]
    assert not standing.muted


def test_strikes_fade() -> None:
    standing = struck(2)
    for now in range(6, 30):
        standing.begin_round(now)
    assert not standing.strikes
    assert not standing.strike("b", "reward", now=30)


def test_the_second_sentence_is_twice_as_long() -> None:
    standing = struck(3)
    standing.begin_round(15)
    standing.mute("b", "log-probs under-reported", now=15)
    assert standing.muted["b"].until == 35


def test_nobody_waits_for_a_sender_that_was_muted_until_it_is_pardoned() -> None:
    standing = struck(3)
    standing.begin_round(15)
    assert not standing.is_awaited("b")
    standing.pardon("b")
    assert standing.is_awaited("b")
    assert not standing.muted


def test_a_sentence_of_no_rounds_mutes_nobody() -> None:
    standing = Standing(rounds=0)
    assert not any(standing.strike("b", "reward", now=0) for _ in range(9))
    assert standing.is_awaited("b")


def test_standing_goes_on_from_its_state() -> None:
    again = Standing(rounds=10)
    written = msgspec.json.encode(struck(3).state())
    again.load_state(msgspec.json.decode(written, type=StandingState))
    assert again == struck(3)
