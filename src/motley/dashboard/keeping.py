"""LogKeeper: the log of a run for as long as a page is open.

A log that is a file is read where it is. One on a server is copied to a temporary file as it grows:
so the page goes on with what it has when the server stops, and nothing that the page does keeps a
hub from starting.
"""

from __future__ import annotations

import tempfile
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import IO

from motley.archive import Archive, hub_of, is_stopped, open_left, open_log
from motley.archive.reading import PAGE, WAIT_S
from motley.clock import Clock, RealClock
from motley.exchange import Entry, RecordHead
from motley.records import HUB

RETRY_S = 1.0
STOPPED = "the hub is not running: this is what its log has"
CLOSE_S = 2.0  # for a call over the network to come back


class LogCopy:
    """Records of a log in a file of ours, with their ids and positions in memory: a source for an
    Archive.
    """

    cuts = 0  # what it is a copy of is never cut

    def __init__(self, file: IO[bytes], clock: Clock = RealClock()) -> None:
        self._file, self._clock = file, clock
        self._ids = bytearray()  # one behind the other
        self._positions = array("q")
        # where each id and each record ends, behind a 0
        self._id_stops, self._stops = array("q", [0]), array("q", [0])
        self._of_hub: list[int] = []
        self._lock = threading.Lock()  # one thread adds, others read

    def add(self, entries: Iterable[Entry]) -> None:
        with self._lock:
            self._file.seek(self._stops[-1])
            for entry in entries:
                self._ids += entry.id.encode()
                self._file.write(entry.record)
                self._id_stops.append(len(self._ids))
                self._stops.append(self._stops[-1] + len(entry.record))
                self._positions.append(entry.position)
                if entry.id.startswith(f"{HUB}."):
                    self._of_hub.append(entry.position)

    def heads(self, after: int, limit: int = PAGE) -> list[RecordHead]:
        with self._lock:
            return [self._head(number) for number in self._numbers(after, limit)]

    def read(self, after: int, limit: int = PAGE) -> list[Entry]:
        with self._lock:
            numbers = self._numbers(after, limit)
            self._file.seek(self._stops[numbers.start])
            heads = map(self._head, numbers)
            return [Entry(h.position, h.id, self._file.read(h.num_bytes)) for h in heads]

    def _numbers(self, after: int, limit: int) -> range:
        first = bisect_right(self._positions, after)
        return range(first, min(first + limit, len(self._positions)))

    def _head(self, number: int) -> RecordHead:
        id = self._ids[self._id_stops[number] : self._id_stops[number + 1]].decode()
        num_bytes = self._stops[number + 1] - self._stops[number]
        return RecordHead(self._positions[number], id, num_bytes)

    def last(self) -> int:
        with self._lock:
            return self._positions[-1] if self._positions else 0

    def of_hub(self) -> list[Entry]:
        with self._lock:
            positions = [*self._of_hub]
        return [entry for position in positions for entry in self.read(position - 1, 1)]

    def wait(self, after: int) -> None:
        self._clock.sleep_s(WAIT_S)


class LogKeeper:
    """Opens the log of a folder as soon as there is one, and keeps it, on a thread of its own."""

    def __init__(self, folder: Path, clock: Clock = RealClock()) -> None:
        self._folder, self._clock = folder, clock
        self.archive: Archive | None = None  # until there is a log
        self.note = "there is no log yet: rollouts are shown when there is"
        self._closing = threading.Event()
        self._held = ExitStack()
        self._copy: LogCopy | None = None
        self._is_read_out = False  # of a hub that does not run: all that it left was copied
        self._thread = threading.Thread(target=self._keep, name=f"log {folder.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(CLOSE_S)
        self._held.close()

    def _keep(self) -> None:
        while not self._closing.is_set() and not (self.archive and self._copy is None):
            try:
                self._look()
            except (OSError, ValueError) as error:
                shown = "what came before is shown" if self.archive else "it is tried again"
                self.note = f"the log is out of reach: {error}; {shown}"
            self._closing.wait(RETRY_S)

    def _look(self) -> None:
        """Follow the log while it can be reached."""
        folder = self._folder
        if not (hub_of(folder) or (folder / "member.json").is_file()):
            if _size(folder / "groups" / "log.bin"):  # the charter is its first record
                archive = self._held.enter_context(open_log(folder))
                self.archive, self.note = archive, ""
            return
        if not is_stopped(folder):
            self._is_read_out = False
            self._follow(open_log(folder, may_start=False))
        elif not self._is_read_out:
            self._follow(open_left(folder), to_the_end=True)
            self._is_read_out = True
            self.note = STOPPED

    def _follow(self, opened: AbstractContextManager[Archive], to_the_end: bool = False) -> None:
        with opened as archive:
            if self._copy is None:
                made = tempfile.TemporaryFile(prefix="motley-log-")  # noqa: SIM115 - closed by `close`
                file = self._held.enter_context(made)
                self._copy = LogCopy(file, self._clock)
            while not self._closing.is_set():
                page = archive.source.read(self._copy.last())
                self._copy.add(page)
                if self.archive is None and page:
                    self.archive = replace(archive, source=self._copy)
                self.note = ""
                if not page and to_the_end:
                    return
                if not page:
                    archive.source.wait(self._copy.last())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
