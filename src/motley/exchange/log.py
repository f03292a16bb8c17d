"""Log: a crew's append-only record of groups, in one total order.

Two operations; knows bytes, not what they mean.
"""

from __future__ import annotations

import hashlib
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


def tagged(id: str, record: bytes) -> str:
    """Where a record stands if somebody else took its id first.

    Nobody can take that, too, before the record is known.
    """
    return f"{id}.{hashlib.sha256(record).hexdigest()[:16]}"


def stands_under(entry_id: str, id: str, record: bytes) -> bool:
    """Whether a record with this id can stand there: under the id, or the id with its own tag."""
    return entry_id in (id, tagged(id, record))


class Log(Protocol):
    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        """Add records under their ids, in order.

        A record that is there already, for ever, is passed over. Where strangers can take an id
        first, the record stands under its id and its tag instead.
        """
        ...

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        """Up to `limit` records behind position `after`, oldest first; 0 is before the first.

        Positions only grow. `sender`: only its.
        """
        ...
