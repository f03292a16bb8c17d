"""Time as an argument. Everything that stamps goes through a Clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since some fixed moment."""
        ...


class RealClock:
    """The machine's clock."""

    def now_s(self) -> float:
        return time.time()


class VirtualClock:
    """Seconds since the start of a simulation. Time passes when somebody says so."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        return self._now_s

    def advance(self, to_s: float) -> None:
        assert to_s >= self._now_s, f"time goes forward only: {to_s} is before {self._now_s}"
        self._now_s = to_s
