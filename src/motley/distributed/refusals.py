"""Refusals: what a hub's owner is told of requests that came to nothing. Knows no request."""

from __future__ import annotations

from motley.clock import Clock, Deadline
from motley.distributed.register import Say
from motley.trust import visible

AT_A_TIME_S = 60.0
MOST_SAID = 30  # in that time: who has an invitation can ask without end
MOST_LETTERS = 400  # of a line, which quotes what was asked


class Refusals:
    def __init__(self, say: Say, clock: Clock) -> None:
        self._say, self._clock = say, clock
        self._over = Deadline(clock, 0.0)  # when to begin to count anew
        self._count = 0

    def tell(self, words: str) -> None:
        """Say why a request was refused; of a flood of them the first, and then how many."""
        self.look()
        self._count += 1
        if self._count <= MOST_SAID:
            line = visible(words).replace("\n", " ")
            self._say(line if len(line) <= MOST_LETTERS else f"{line[:MOST_LETTERS]}...")

    def look(self) -> None:
        """Say what was left unsaid, when its time is over."""
        if not self._over.passed:
            return
        if self._count > MOST_SAID:
            self._say(f"{self._count - MOST_SAID} more requests were refused in a minute")
        self._over, self._count = Deadline(self._clock, AT_A_TIME_S), 0
