"""The log of a crew that lives in one process, with a file behind it where the run must be able to resume.

File: for each record a little-endian uint32 length of the id, one of the record, then both. A torn last entry is cut off on load.
"""

from __future__ import annotations

import struct
from pathlib import Path

_HEAD = struct.Struct("<II")


class MemoryLog:
    def __init__(self, path: Path | None = None) -> None:
        self._records: list[bytes] = []
        self._ids: set[str] = set()
        self._path = path
        if path is not None and path.exists():
            self._load(path)

    def __len__(self) -> int:
        """The position of the last record."""
        return len(self._records)

    def append(self, id: str, record: bytes) -> None:
        if id in self._ids:
            return
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(_entry(id, record))
        self._ids.add(id)
        self._records.append(record)

    def read(self, after: int, limit: int = 1024) -> list[tuple[int, bytes]]:
        return list(enumerate(self._records[after : after + limit], after + 1))

    def _load(self, path: Path) -> None:
        content, offset = path.read_bytes(), 0
        while offset + _HEAD.size <= len(content):
            id_size, record_size = _HEAD.unpack_from(content, offset)
            stop = offset + _HEAD.size + id_size + record_size
            if stop > len(content):
                break
            self._ids.add(content[offset + _HEAD.size : offset + _HEAD.size + id_size].decode())
            self._records.append(content[offset + _HEAD.size + id_size : stop])
            offset = stop
        if offset < len(content):
            with path.open("r+b") as file:
                file.truncate(offset)


def cut_log(path: Path, num_records: int) -> None:
    """Shorten a log's file to its first records: a run resumes from where its checkpoint was taken."""
    content, offset = path.read_bytes() if path.exists() else b"", 0
    for record in range(num_records):
        if offset + _HEAD.size > len(content):
            raise ValueError(f"{path} has {record} records, and the checkpoint was taken at {num_records}; resume from an older checkpoint")
        id_size, record_size = _HEAD.unpack_from(content, offset)
        offset += _HEAD.size + id_size + record_size
    if len(content) > offset:
        with path.open("r+b") as file:
            file.truncate(offset)


def _entry(id: str, record: bytes) -> bytes:
    return _HEAD.pack(len(id.encode()), len(record)) + id.encode() + record
