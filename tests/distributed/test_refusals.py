from __future__ import annotations

from motley.clock import VirtualClock
from motley.distributed.refusals import AT_A_TIME_S, MOST_SAID, Refusals


def test_a_flood_of_refusals_is_said_once_in_a_while_and_counted() -> None:
    said: list[str] = []
    clock = VirtualClock()
    clock.sleep_s(1)
    refusals = Refusals(said.append, clock)
    for number in range(1000):
        refusals.tell(f"refused {number}")
    assert said == [f"refused {number}" for number in range(MOST_SAID)]

    clock.sleep_s(AT_A_TIME_S + 1)
    refusals.look()
    refusals.tell("refused for another reason")
    clock.sleep_s(AT_A_TIME_S + 1)
    refusals.look()
    left = f"{1000 - MOST_SAID} more requests were refused in a minute"
    assert said[MOST_SAID:] == [left, "refused for another reason"]


def test_what_a_stranger_asks_is_said_without_what_a_terminal_obeys() -> None:
    said: list[str] = []
    Refusals(said.append, VirtualClock()).tell("the request is for \x1b[2J\x9b1m\nall is well/a")
    assert said == ["the request is for \\x1b[2J\\x9b1m all is well/a"]


def test_what_a_stranger_asks_is_said_in_short() -> None:
    said: list[str] = []
    Refusals(said.append, VirtualClock()).tell("x" * 4000)
    assert len(said[0]) < 500
