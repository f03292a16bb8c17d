"""Log: a crew's append-only record of groups, in one total order. Two operations; knows bytes, not what they mean."""

from __future__ import annotations

from typing import Protocol


class Log(Protocol):
    def append(self, id: str, record: bytes) -> None:
        """Add a record. The same id again, for ever, changes nothing."""
        ...

    def read(self, after: int, limit: int = 1024) -> list[tuple[int, bytes]]:
        """Up to `limit` records behind position `after`, oldest first; 0 is before the first. Positions only grow."""
        ...
