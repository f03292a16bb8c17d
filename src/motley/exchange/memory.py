"""The log of a crew that lives in one process, with a file behind it where the run must be able to
resume.

File: for each record a little-endian uint32 length of the id, one of the record, then both. A torn
last entry is cut off on load.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from motley.exchange.log import Entry

HEAD = struct.Struct("<II")


class MemoryLog:
    def __init__(self, path: Path | None = None) -> None:
        self._records: dict[str, bytes] = {}  # by id, in order
        self._ids: list[str] = []
        self._of_sender: defaultdict[str, list[int]] = defaultdict(list)  # positions
        self._path = path
        if path is not None and path.exists():
            self._load(path)

    @classmethod
    def copy_of(cls, path: Path) -> MemoryLog:
        """What a log's file holds at this moment.

        The file is left as it is: a run may be writing to it.
        """
        copy = cls()
        for id, record, _ in _entries(path.read_bytes()):
            copy._keep(id, record)
        return copy

    def __len__(self) -> int:
        """The position of the last record."""
        return len(self._records)

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for id, record in records:
            if id in self._records:
                continue
            if self._path is not None:
                with self._path.open("ab") as file:
                    file.write(_entry(id, record))
            self._keep(id, record)

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        positions: Sequence[int] = range(after + 1, len(self._ids) + 1)
        if sender:
            own = self._of_sender[sender]
            positions = own[bisect_right(own, after) :]
        return [self._entry(position) for position in positions[:limit]]

    def _entry(self, position: int) -> Entry:
        id = self._ids[position - 1]
        return Entry(position, id, self._records[id])

    def _keep(self, id: str, record: bytes) -> None:
        self._records[id] = record
        self._ids.append(id)
        self._of_sender[id.split(".", 1)[0]].append(len(self._ids))

    def _load(self, path: Path) -> None:
        whole = 0
        for id, record, stop in _entries(path.read_bytes()):
            self._keep(id, record)
            whole = stop
        os.truncate(path, whole)


def first_record(path: Path) -> bytes:
    """The record that a log's file begins with; nothing if it has none."""
    content = path.read_bytes() if path.exists() else b""
    return next((record for _, record, _ in _entries(content)), b"")


class ShortLogError(ValueError):
    """A log's file that has fewer whole records than when a checkpoint was taken."""

    def __init__(self, path: Path, num_whole: int, num_records: int) -> None:
        super().__init__(
            f"{path} has {num_whole} records that are whole, and had {num_records} when the newest "
            "checkpoint was taken"
        )
        self.num_whole = num_whole


def cut_log(path: Path, num_records: int) -> None:
    """Shorten a log's file to its first records, to resume from a checkpoint."""
    stops = [stop for _, _, stop in _entries(path.read_bytes())] if path.exists() else []
    if len(stops) < num_records:
        raise ShortLogError(path, len(stops), num_records)
    if path.exists():
        os.truncate(path, stops[num_records - 1] if num_records else 0)


def _entry(id: str, record: bytes) -> bytes:
    return HEAD.pack(len(id.encode()), len(record)) + id.encode() + record


def _entries(content: bytes) -> Iterator[tuple[str, bytes, int]]:
    """Every whole entry: id, record, and where it ends."""
    offset = 0
    while offset + HEAD.size <= len(content):
        id_size, record_size = HEAD.unpack_from(content, offset)
        middle = offset + HEAD.size + id_size
        if middle + record_size > len(content):
            return
        try:
            id = content[offset + HEAD.size : middle].decode()
        except UnicodeDecodeError:
            return  # spoilt: where the next one begins cannot be told
        yield id, content[middle : middle + record_size], middle + record_size
        offset = middle + record_size
