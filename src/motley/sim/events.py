"""What happens when, on virtual time.

No thread, no sleep; two things due at one moment happen in the order they were planned.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from motley.clock import VirtualClock


class Events:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Plan something.

        What is already due happens at once, behind what was planned before it.
        """
        heapq.heappush(self._planned, (max(when_s, self.clock.now_s()), next(self._number), what))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        self.at(self.clock.now_s() + seconds, what)

    def happen(self) -> bool:
        """Let the next thing happen; False if nothing is planned."""
        if not self._planned:
            return False
        when_s, _, what = heapq.heappop(self._planned)
        self.clock.advance(when_s)
        what()
        return True
