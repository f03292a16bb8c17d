from __future__ import annotations

import random

from motley.sim.events import Events


class Diary:
    """What happened, and when."""

    def __init__(self) -> None:
        self.events, self.lines = Events(), []

    def plan(self, when_s: float, word: str) -> None:
        self.events.at(when_s, lambda: self.note(word))

    def note(self, word: str) -> None:
        self.lines.append((self.events.clock.now_s(), word))

    def live(self) -> list[tuple[float, str]]:
        while self.events.happen():
            pass
        return self.lines


def test_things_happen_when_they_are_planned_and_not_when_they_were_written_down() -> None:
    diary = Diary()
    for when_s, word in ((3.0, "c"), (1.0, "a"), (2.0, "b")):
        diary.plan(when_s, word)
    assert diary.events.clock.now_s() == 0.0
    assert diary.live() == [(1.0, "a"), (2.0, "b"), (3.0, "c")]
    assert diary.events.clock.now_s() == 3.0


def test_at_one_moment_things_happen_in_the_order_they_were_planned() -> None:
    diary = Diary()
    for number in range(20):
        diary.plan(5.0, str(number))
    assert [word for _, word in diary.live()] == [str(number) for number in range(20)]


def test_one_thing_happens_at_a_time_and_in_the_end_nothing() -> None:
    diary = Diary()
    assert not diary.events.happen()
    diary.plan(1.0, "a")
    diary.plan(1.0, "b")
    assert diary.events.happen()
    assert diary.lines == [(1.0, "a")]
    assert diary.events.happen()
    assert not diary.events.happen()
    assert diary.events.clock.now_s() == 1.0


def test_what_is_planned_for_the_past_happens_now_behind_what_is_due() -> None:
    diary = Diary()

    def late() -> None:
        diary.note("late")
        diary.plan(2.0, "planned for the past")
        diary.events.after(0.0, lambda: diary.note("at once"))
        diary.events.after(1.0, lambda: diary.note("later"))

    diary.events.at(10.0, late)
    diary.plan(10.0, "beside it")
    assert diary.live() == [
        (10.0, "late"),
        (10.0, "beside it"),
        (10.0, "planned for the past"),
        (10.0, "at once"),
        (11.0, "later"),
    ]


def test_time_never_goes_back_whatever_is_planned() -> None:
    rng, diary = random.Random(0), Diary()

    def more(depth: int) -> None:
        diary.note(str(depth))
        for _ in range(rng.randrange(3) if depth < 7 else 0):
            diary.events.at(rng.uniform(0, 20), lambda: more(depth + 1))

    for _ in range(10):
        diary.events.at(rng.uniform(0, 10), lambda: more(0))
    moments = [at_s for at_s, _ in diary.live()]
    assert moments == sorted(moments)
    assert len(moments) > 50
