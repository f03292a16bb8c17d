"""How fast a run goes and whether it still does: by when its lines came, while somebody looks, and
by what they say they took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

LATELY = 30  # changes of the round that are remembered
ROUNDS_TO_WAIT, LEAST_WAIT_S = 20, 120.0  # without a line, after which a run may have stopped


@dataclass(slots=True)
class Tempo:
    """When each round was first seen, on the clock of who looks."""

    seen: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=LATELY))

    def see(self, number: int, at_s: float) -> None:
        if self.seen and number < self.seen[-1][1]:
            self.seen.clear()  # the run was cut back
        if not self.seen or number > self.seen[-1][1]:
            self.seen.append((at_s, number))

    def seconds(self) -> float | None:
        """That a round takes lately. The first one seen may have been there for long."""
        watched = list(self.seen)[1:]
        if len(watched) < 2:
            return None
        (first_s, first), (last_s, last) = watched[0], watched[-1]
        return (last_s - first_s) / (last - first)


def told_seconds(took_s: Iterable[float], in_turn: bool) -> float | None:
    """What a round takes by its lines: peers of one process take turns, others do not."""
    each = list(took_s)
    if not each:
        return None
    return sum(each) if in_turn else max(each)


def is_silent(seconds: float | None, since_s: float) -> bool:
    """Whether nothing was written for so long that the run may have stopped."""
    return since_s > max(LEAST_WAIT_S, ROUNDS_TO_WAIT * (seconds or 0.0))
