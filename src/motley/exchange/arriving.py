"""A log as it is seen at the far end of a slow link: what was appended arrives later, in order.

For whoever learns from groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from motley.clock import Clock
from motley.exchange.log import Entry, Log
from motley.links import Weather

MOST_PAGES = 16  # that are looked at in one go


class ArrivingLog:
    """A record's delay begins when this reader first could have seen it."""

    def __init__(self, log: Log, weather: Weather, clock: Clock) -> None:
        self._log, self._weather, self._clock = log, weather, clock
        self._arrives_s: dict[int, float] = {}  # position -> when it is here, of those on their way
        self._last_s = 0.0
        self._looked = 0  # up to which position records have been given their delay
        self.here = 0  # everything up to this position arrived before a restart

    @property
    def next_s(self) -> float:
        """When the next record arrives that is on its way; infinity if none is."""
        return min(self._arrives_s.values(), default=math.inf)

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """At once: what is sent waits in its outbox for as long as its way takes."""
        self._log.append(records)

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        now_s = self._clock.now_s()
        self._look(now_s)
        self._arrives_s = {
            position: at_s for position, at_s in self._arrives_s.items() if at_s > now_s
        }
        known = [
            entry
            for entry in self._log.read(after, limit, sender)
            if entry.position <= self._looked
        ]
        on_the_way = min(self._arrives_s, default=math.inf)
        return [entry for entry in known if entry.position < on_the_way]

    def _look(self, now_s: float) -> None:
        """Give every new record its time of arrival, none before those that stand before it.

        Of a flood, the first so many: the rest is seen at the next look.
        """
        self._looked = max(self._looked, self.here)
        for _ in range(MOST_PAGES):
            if not (found := self._log.read(self._looked)):
                return
            for entry in found:
                self._last_s = max(self._last_s, self._weather.fetched(entry.id, now_s))
                self._arrives_s[entry.position] = self._last_s
            self._looked = found[-1].position
