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
