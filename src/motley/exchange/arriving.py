"""A log as it is seen at the far end of a slow link: what was appended arrives later, in order. For whoever learns from groups."""

from __future__ import annotations

import math
from collections.abc import Sequence

from motley.clock import Clock
from motley.exchange.log import Entry, Log
from motley.network import Weather


class ArrivingLog:
    """A record's delay begins when this reader first could have seen it."""

    def __init__(self, log: Log, weather: Weather, clock: Clock) -> None:
        self._log, self._weather, self._clock = log, weather, clock
        self._arrives_s: dict[int, float] = {}  # position -> when it is here
        self.here = 0  # everything up to this position arrived before a restart

    @property
    def next_s(self) -> float:
        """When the next record arrives that is on its way; infinity if none is."""
        now_s = self._clock.now_s()
        return min((at_s for at_s in self._arrives_s.values() if at_s > now_s), default=math.inf)

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """At once: what is sent waits in its outbox for as long as its way takes."""
        self._log.append(records)

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        now_s = self._clock.now_s()
        self._arrives_s = {position: at_s for position, at_s in self._arrives_s.items() if position > after}
        found = self._log.read(after, limit, sender)
        last_s = 0.0
        for entry in found:
            if entry.position not in self._arrives_s:
                arrives_s = now_s if entry.position <= self.here else self._weather.fetched(entry.id, now_s)
                self._arrives_s[entry.position] = max(last_s, arrives_s)
            last_s = self._arrives_s[entry.position]
        return [entry for entry in found if self._arrives_s[entry.position] <= now_s]
