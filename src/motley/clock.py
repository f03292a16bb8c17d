"""Time as an argument: whatever stamps, measures or waits does so by a Clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Two ways to read it, as a machine has two: `now_s` can be set back, `elapsed_s` cannot."""

    def now_s(self) -> float:
        """Seconds since some fixed moment: for stamps that others read."""
        ...

    def elapsed_s(self) -> float:
        """Seconds that only ever grow: for durations and deadlines of this process."""
        ...

    def sleep_s(self, seconds: float) -> None:
        """Return when so many seconds have passed."""
        ...


class RealClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()

    def elapsed_s(self) -> float:
        return time.monotonic()

    def sleep_s(self, seconds: float) -> None:
        time.sleep(seconds)


class VirtualClock:
    """Seconds since the start of a simulation. Time passes when somebody says so, or sleeps."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def elapsed_s(self) -> float:
        return self._now_s

    def sleep_s(self, seconds: float) -> None:
        self.advance(self._now_s + seconds)

    def advance(self, to_s: float) -> None:
        assert to_s >= self._now_s, f"time goes forward only: {to_s} is before {self._now_s}"
        self._now_s = to_s


class Deadline:
    """A moment that is still to come when it is made."""

    def __init__(self, clock: Clock, in_s: float) -> None:
        self._clock, self._at_s = clock, clock.elapsed_s() + in_s

    @property
    def passed(self) -> bool:
        return self._clock.elapsed_s() > self._at_s


def timed(work: Callable[[], T], clock: Clock) -> tuple[T, float]:
    """What the work gives, and the seconds it took."""
    start_s = clock.elapsed_s()
    return work(), clock.elapsed_s() - start_s
