"""LogFile: the file of a memory log as those read it who are not the run that writes it.

It holds where each record begins, not the records: a log of any size is read by seeking. What is
appended is found by walking on from the last known end. A run that is resumed cuts its file and
appends again; then the walk starts over.
"""

from __future__ import annotations

import os
import zlib
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from threading import RLock
from typing import BinaryIO, NamedTuple

from motley.exchange.log import Entry
from motley.exchange.memory import HEAD

BLOCK_BYTES = 2**20  # of one read; what of a record lies behind it is passed over
STEP = 4096  # records walked over at a time


class RecordHead(NamedTuple):
    """What can be told of a record without reading it."""

    position: int
    id: str
    num_bytes: int


_Frame = tuple[int, bytes, int, int]  # where it starts, id, bytes of the record, where it stops


class LogFile:
    """Positions count from 1, in the order of the file.

    `kept`: the name of one sender whose positions are kept, to be found at once.
    """

    def __init__(self, path: Path, kept: str = "") -> None:
        self._path, self._prefix = path, f"{kept}.".encode()
        self._lock = RLock()  # readers may be several threads
        self.cuts = 0  # how often the file was found cut, and begun anew
        self._begin()
        self._state = self._state_now()

    def _begin(self) -> None:
        self._starts = array("Q")  # by position
        self._end = 0  # behind the last whole record known
        self._newest = 0  # checksum of that record
        self.kept: list[int] = []

    def has_changed(self) -> bool:
        return self._state_now() != self._state

    def heads(self, after: int, limit: int = STEP) -> list[RecordHead]:
        """Of up to `limit` records behind a position."""
        with self._lock:
            self._check()
            self._walk_to(after)
            known = self._known(after, limit)
            if after > len(self._starts) or len(known) == limit:
                return known
            return known + self._walk_on(limit - len(known))

    def read(self, after: int, limit: int) -> list[Entry]:
        """Up to `limit` records behind a position."""
        with self._lock:
            self._check()
            self._walk_to(after + limit)
            heads = self._known(after, limit)
            with self._path.open("rb") as file:
                return [self._entry(file, head) for head in heads]

    def last(self) -> int:
        """The position of the newest record."""
        with self._lock:
            self._check()
            while self._walk_on(STEP):
                pass
            return len(self._starts)

    def _entry(self, file: BinaryIO, head: RecordHead) -> Entry:
        stop = self._stop_of(head.position)
        file.seek(stop - head.num_bytes)
        return Entry(head.position, head.id, file.read(head.num_bytes))

    def _stop_of(self, position: int) -> int:
        return self._starts[position] if position < len(self._starts) else self._end

    def _walk_to(self, position: int) -> None:
        while len(self._starts) < position and self._walk_on(STEP):
            pass

    def _known(self, after: int, limit: int) -> list[RecordHead]:
        """Of records that were walked over before."""
        count = min(limit, len(self._starts) - after)
        if count <= 0:
            return []
        start = self._starts[after]
        block = min(BLOCK_BYTES, self._stop_of(after + count) - start)
        with self._path.open("rb") as file:
            return _heads(after, islice(_frames(file, start, block), count))

    def _walk_on(self, limit: int) -> list[RecordHead]:
        """Of records that were not known before; they are from now on."""
        known = len(self._starts)
        with self._path.open("rb") as file:
            frames = list(islice(_frames(file, self._end, BLOCK_BYTES), limit))
            if frames:
                self._starts.extend([start for start, _, _, _ in frames])
                self._end = frames[-1][3]
                self._newest = self._checksum(file)
        own = (n for n, frame in enumerate(frames, known + 1) if frame[1].startswith(self._prefix))
        self.kept.extend(own)
        return _heads(known, frames)

    def _check(self) -> None:
        """Begin anew if the file is not what it was with something behind it."""
        state = self._state_now()
        if state == self._state:
            return
        self._state = state
        if self._starts and not self._goes_on(state[0]):
            self._begin()
            self.cuts += 1

    def _goes_on(self, size: int) -> bool:
        with self._path.open("rb") as file:
            return size >= self._end and self._checksum(file) == self._newest

    def _checksum(self, file: BinaryIO) -> int:
        """Of the newest record known, with its head: it is signed, so that no other is like it."""
        start = self._starts[-1]
        file.seek(start)
        return zlib.crc32(file.read(self._end - start))

    def _state_now(self) -> tuple[int, int]:
        status = self._path.stat()
        return status.st_size, status.st_mtime_ns


def _heads(after: int, frames: Iterable[_Frame]) -> list[RecordHead]:
    return [
        RecordHead(position, id.decode(errors="replace"), num_bytes)
        for position, (_, id, num_bytes, _) in enumerate(frames, after + 1)
    ]


def _frames(file: BinaryIO, offset: int, block_bytes: int) -> Iterator[_Frame]:
    """Every whole entry from an offset on, read in blocks."""
    size = os.fstat(file.fileno()).st_size
    while True:
        file.seek(offset)
        block, at = file.read(block_bytes), 0
        while at + HEAD.size <= len(block):
            id_size, num_bytes = HEAD.unpack_from(block, at)
            middle = at + HEAD.size + id_size
            if middle > len(block):
                break
            stop = middle + num_bytes
            if offset + stop > size:
                return
            yield offset + at, block[at + HEAD.size : middle], num_bytes, offset + stop
            at = stop
        if at == 0:  # the end, or what is no entry
            return
        offset += at
