"""Where the lines of a growing JSON-lines file are: their bytes, round, peer and a few marks.

Owns offsets and no values: who wants a number reads that line. A file of gigabytes is looked at a
piece at a time, the newest first and then pieces spread evenly over the rest, so that what is known
at any moment is of all of it. Knows no run folder.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import SEEK_END, FileIO
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.clock import Clock, RealClock

Ints = NDArray[np.int64]

PIECE_BYTES = 1 << 20  # looked at in one go
LINE_BYTES = 1 << 16  # most lines are shorter
TAIL_BYTES = 256  # compared to see whether a file was written again
MOST_ROUND = 1 << 40  # a larger one is no round

# What a line has, as bits of its marks.
HELDOUT, SUSPECTS, WARNINGS = 1, 2, 4
_MARKS = ((b'"heldout":{', HELDOUT), (b'"suspects":{', SUSPECTS), (b'"warnings":[', WARNINGS))

_HEAD = re.compile(rb'\{"round":(\d{1,12}),"peer":"([A-Za-z0-9_-]+)"')
_REFUSED = b',"refused":{'
_WAITING = re.compile(rb',"waiting":\d+\Z')


class _LineHead(msgspec.Struct):
    round: int
    peer: str


_head_decoder = msgspec.json.Decoder(_LineHead)


@dataclass(frozen=True, slots=True)
class Lines:
    """The lines that are known, in the order of the file; one entry of each array per line."""

    start: Ints  # its first byte
    length: Ints  # in bytes, without the end of line
    round: Ints
    peer: Ints  # place in `names`
    marks: NDArray[np.uint8]
    names: tuple[str, ...]
    times_cut: int  # how often what was known before was not there any more

    @staticmethod
    def none(times_cut: int = 0) -> Lines:
        empty = np.empty(0, np.int64)
        return Lines(empty, empty, empty, empty, np.empty(0, np.uint8), (), times_cut)

    def __len__(self) -> int:
        return len(self.start)


class LineIndex:
    def __init__(self, path: Path, clock: Clock = RealClock()) -> None:
        self.path, self._clock = path, clock
        self.lines = Lines.none()  # whole at any moment: replaced, never changed
        self._room = bytearray()  # for a piece; made once, since new memory is slow
        self._forget()

    def _forget(self) -> None:
        self._names: dict[str, int] = {}
        self._end = 0  # of the last whole line that was seen
        self._tail = b""  # what stands before it
        self._pieces: deque[tuple[int, int]] = deque()  # still to be looked at
        self._num_pending = 0  # bytes of them

    @property
    def indexed(self) -> float:
        """How much of the file was looked at, 0..1."""
        return 1 - self._num_pending / self._end if self._end else 1.0

    @property
    def num_bytes(self) -> int:
        """Of whole lines, known or not."""
        return self._end

    def refresh(self, seconds: float = 0.2) -> bool:
        """Look at what is new, for about so long; True if something is known that was not."""
        deadline_s = self._clock.elapsed_s() + seconds
        try:
            with self.path.open("rb", buffering=0) as file:
                was_cut = self._notice_cut(file)
                self._notice_growth(file)
                found = self._look(file, deadline_s)
        except FileNotFoundError:
            was_cut, found = bool(self._end), _Found()
            if was_cut:
                self._begin_anew()
        if found.start:
            self._take_in(found)
        return was_cut or bool(found.start)

    def read(self, lines: Lines, numbers: Iterable[int]) -> Iterator[bytes]:
        """The bytes of lines by their place in `lines`. Of a file that was cut meanwhile they are
        whatever stands there now, or nothing.
        """
        try:
            file = self.path.open("rb", buffering=0)
        except FileNotFoundError:
            yield from (b"" for _ in numbers)
            return
        with file:
            for number in numbers:
                file.seek(int(lines.start[number]))
                yield file.read(int(lines.length[number]))

    def _notice_cut(self, file: FileIO) -> bool:
        file.seek(self._end - len(self._tail))
        if file.read(len(self._tail)) == self._tail:
            return False
        self._begin_anew()
        return True

    def _begin_anew(self) -> None:
        self._forget()
        self.lines = Lines.none(self.lines.times_cut + 1)

    def _notice_growth(self, file: FileIO) -> None:
        """Plan to look at the whole lines behind those that were seen."""
        end = _end_of_lines(file, self._end)
        if end == self._end:
            return
        new = _spread(self._end, end)
        self._pieces.extendleft(reversed(new))  # what is new comes first
        self._num_pending += end - self._end
        self._end = end
        file.seek(max(0, end - TAIL_BYTES))
        self._tail = file.read(end - file.tell())

    def _look(self, file: FileIO, deadline_s: float) -> _Found:
        """At one piece at least."""
        found = _Found()
        while self._pieces:
            first, end = self._pieces.popleft()
            self._num_pending -= end - first
            begin = max(0, first - 1)
            num_read = self._read_piece(file, begin, end)
            self._look_at(num_read, begin, end, found)
            if self._clock.elapsed_s() >= deadline_s:
                break
        return found

    def _read_piece(self, file: FileIO, begin: int, end: int) -> int:
        """Read from `begin` to the end of the line that has the last byte before `end`, or more;
        how many bytes of the room that is.
        """
        more = LINE_BYTES
        while True:
            wanted = end - begin + more
            if len(self._room) < wanted:
                self._room = bytearray(wanted)
            file.seek(begin)
            with memoryview(self._room) as room:
                num_read = file.readinto(room[:wanted])
            if num_read < wanted or self._room.find(b"\n", end - begin - 1, num_read) >= 0:
                return num_read
            more *= 4

    def _look_at(self, num_read: int, offset: int, end: int, found: _Found) -> None:
        """Note the lines that begin in a piece. What was read begins at `offset`, one byte before
        it, and has the last of them whole.
        """
        content, names = self._room, self._names
        at = content.find(b"\n", 0, num_read) + 1 if offset else 0
        while offset + at < end:
            stop = content.find(b"\n", at, num_read)
            if stop < 0:
                return  # the file was cut just now
            head = _HEAD.match(content, at, stop)
            if head and content[stop - 1] == ord("}"):
                peer = names.setdefault(head[2].decode(), len(names))
                found.add(offset + at, stop - at, int(head[1]), peer, _marks(content, at, stop))
            else:
                self._note_other(found, content[at:stop], offset + at)
            at = stop + 1

    def _note_other(self, found: _Found, line: bytearray, start: int) -> None:
        """A line that was not written by Motley as it writes them; what is none is left out."""
        try:
            head = _head_decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if 0 <= head.round < MOST_ROUND:
            peer = self._names.setdefault(head.peer, len(self._names))
            # it may have any mark: look inside
            found.add(start, len(line), head.round, peer, HELDOUT | SUSPECTS | WARNINGS)

    def _take_in(self, found: _Found) -> None:
        known = self.lines
        start = np.append(known.start, found.start)
        order = np.argsort(start, kind="stable")
        self.lines = Lines(
            start[order],
            np.append(known.length, found.length)[order],
            np.append(known.round, found.round)[order],
            np.append(known.peer, found.peer)[order],
            np.append(known.marks, np.array(found.marks, np.uint8))[order],
            tuple(self._names),
            known.times_cut,
        )


class _Found:
    """Lines of one look, as lists of numbers that are let go when they are in arrays."""

    def __init__(self) -> None:
        self.start: list[int] = []
        self.length: list[int] = []
        self.round: list[int] = []
        self.peer: list[int] = []
        self.marks: list[int] = []

    def add(self, start: int, length: int, number: int, peer: int, marks: int) -> None:
        self.start.append(start)
        self.length.append(length)
        self.round.append(number)
        self.peer.append(peer)
        self.marks.append(marks)


def end_of_senders(content: bytes | bytearray, at: int, stop: int) -> int:
    """Where the keys behind `senders` begin, in the line from `at` to `stop`; -1: not known.

    Quotes inside texts are escaped, so that only a key can look like one. A sender may be called
    "refused"; the key of that name comes right behind the number of waiting groups.
    """
    behind = stop
    while (behind := content.rfind(_REFUSED, at, behind)) >= 0:
        if waiting := _WAITING.search(content, max(at, behind - 40), behind):
            return waiting.start()
    return -1


def _marks(content: bytearray, at: int, stop: int) -> int:
    """What a line has. All of it stands behind the senders, which are most of a line."""
    first = max(at, end_of_senders(content, at, stop))
    marks = 0
    for word, mark in _MARKS:
        if content.find(word, first, stop) >= 0:
            marks |= mark
    return marks


def _end_of_lines(file: FileIO, known: int) -> int:
    """Behind the last whole line of a file; `known` is behind one."""
    stop = file.seek(0, SEEK_END)
    while stop > known:
        first = max(known, stop - PIECE_BYTES)
        file.seek(first)
        place = file.read(stop - first).rfind(b"\n")
        if place >= 0:
            return first + place + 1
        stop = first
    return known


def _spread(first: int, end: int) -> list[tuple[int, int]]:
    """Pieces of a range: the last, the first, then each as far as can be from those before it."""
    edges = [*range(first, end, PIECE_BYTES), end]
    pieces = list(itertools.pairwise(edges))
    bits = len(pieces).bit_length()
    order = sorted(range(len(pieces) - 1), key=lambda place: f"{place:0{bits}b}"[::-1])
    return [pieces[-1], *(pieces[place] for place in order)]
