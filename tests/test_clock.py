from __future__ import annotations

import time

import pytest

from motley.clock import RealClock, VirtualClock


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
