from __future__ import annotations

import time

import pytest

from motley.clock import Deadline, RealClock, VirtualClock, timed


def test_virtual_time_begins_at_zero_and_passes_only_when_told() -> None:
    clock = VirtualClock()
    assert [clock.now_s(), clock.now_s()] == [0.0, 0.0]
    clock.advance(2.5)
    clock.advance(2.5)  # several things may happen at one moment
    assert clock.now_s() == 2.5
    clock.advance(1e9)
    assert clock.now_s() == 1e9


def test_virtual_time_does_not_go_back() -> None:
    clock = VirtualClock()
    clock.advance(5.0)
    with pytest.raises(AssertionError, match=r"4\.9 is before 5\.0"):
        clock.advance(4.9)
    assert clock.now_s() == 5.0


@pytest.mark.parametrize("moment", [float("nan")])
def test_virtual_time_does_not_go_nowhere(moment: float) -> None:
    with pytest.raises(AssertionError):
        VirtualClock().advance(moment)


def test_two_simulations_have_two_clocks() -> None:
    first, second = VirtualClock(), VirtualClock()
    first.advance(3.0)
    assert second.now_s() == 0.0


def test_the_real_clock_is_the_machines() -> None:
    before = time.time()
    assert before <= RealClock().now_s() <= time.time()


def test_the_real_clock_sleeps_and_what_has_elapsed_grows() -> None:
    clock = RealClock()
    before_s = clock.elapsed_s()
    clock.sleep_s(0.01)
    assert clock.elapsed_s() >= before_s + 0.01


def test_sleeping_on_virtual_time_takes_none() -> None:
    clock = VirtualClock()
    clock.sleep_s(1800.0)
    assert (clock.now_s(), clock.elapsed_s()) == (1800.0, 1800.0)


def test_a_deadline_has_passed_when_more_than_its_seconds_have() -> None:
    clock = VirtualClock()
    clock.advance(5.0)
    deadline = Deadline(clock, 2.0)
    for now_s, passed in ((5.0, False), (7.0, False), (7.1, True), (100.0, True)):
        clock.advance(now_s)
        assert deadline.passed == passed


def test_a_deadline_does_not_mind_a_clock_that_is_set() -> None:
    class Set(VirtualClock):
        def now_s(self) -> float:
            return super().now_s() - 1e6

    clock = Set()
    deadline = Deadline(clock, 1.0)
    clock.sleep_s(1.5)
    assert deadline.passed


def test_work_is_timed_by_the_clock_that_is_given() -> None:
    clock = VirtualClock()

    def work() -> str:
        clock.sleep_s(3.0)
        return "done"

    assert timed(work, clock) == ("done", 3.0)
