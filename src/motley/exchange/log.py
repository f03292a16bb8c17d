"""Log: a crew's append-only record of groups, in one total order.

Two operations; knows bytes, not what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Entry(NamedTuple):
    """A record where it stands."""

    position: int
    id: str
    record: bytes


class LogError(OSError):
    """The log cannot be reached, or refuses: what, and since when.

    Nothing is lost by trying again.
    """


class Log(Protocol):
    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Add records under their ids, in order.

        An id that is there already, for ever, is passed over.
        """
        ...

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        """Up to `limit` records behind position `after`, oldest first; 0 is before the first.

        Positions only grow. `sender`: only its.
        """
        ...
