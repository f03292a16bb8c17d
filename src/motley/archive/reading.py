"""Archive: a log that is open for reading, from a file or from a server, a page at a time.

Knows whose key counts, not who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from motley.archive.examine import Examiner, Seen
from motley.clock import Clock, Deadline, RealClock
from motley.config import parse_config, read_config
from motley.exchange import Entry, LogError, LogFile, RecordHead
from motley.records import HUB, Charter

if TYPE_CHECKING:
    from motley.exchange.nats.log import NatsLog

PAGE = 1024  # records of one read
WAIT_S = 0.5
POLL_S = 0.1  # between looks at a file

Say = Callable[[str], None]


class RecordSource(Protocol):
    @property
    def cuts(self) -> int:
        """How often the log was found shorter than before: positions may stand for others since."""
        ...

    def read(self, after: int, limit: int = PAGE) -> list[Entry]: ...

    def heads(self, after: int, limit: int = PAGE) -> list[RecordHead]:
        """Of what `read` would give."""
        ...

    def last(self) -> int:
        """The position of the newest record."""
        ...

    def of_hub(self) -> list[Entry]:
        """The charter and every roster."""
        ...

    def wait(self, after: int) -> None:
        """Return when there may be something behind a position, or after a while."""
        ...


class FileSource:
    """The file of a memory log. Holds no record: see exchange/log_file.py."""

    def __init__(self, path: Path, clock: Clock = RealClock()) -> None:
        self._file, self._clock = LogFile(path, kept=HUB), clock

    @property
    def cuts(self) -> int:
        return self._file.cuts

    def read(self, after: int, limit: int = PAGE) -> list[Entry]:
        return self._file.read(after, limit)

    def heads(self, after: int, limit: int = PAGE) -> list[RecordHead]:
        return self._file.heads(after, limit)

    def last(self) -> int:
        return self._file.last()

    def of_hub(self) -> list[Entry]:
        self._file.last()
        return [entry for n in self._file.kept for entry in self._file.read(n - 1, 1)]

    def wait(self, after: int) -> None:
        deadline = Deadline(self._clock, WAIT_S)
        while not deadline.passed and not self._file.has_changed():
            self._clock.sleep_s(POLL_S)


class StreamSource:
    """A log on a NATS server, where nothing is ever taken back."""

    cuts = 0

    def __init__(self, log: NatsLog) -> None:
        self._log = log

    def read(self, after: int, limit: int = PAGE) -> list[Entry]:
        return self._log.read(after, limit)

    def heads(self, after: int, limit: int = PAGE) -> list[RecordHead]:
        return [RecordHead(e.position, e.id, len(e.record)) for e in self.read(after, limit)]

    def last(self) -> int:
        # the newest record may carry headers that make its answer look like the server's own
        with suppress(LogError):
            newest = self._log.newest()
            return newest.position if newest else 0
        position = 0
        while page := self.read(position):
            position = page[-1].position
        return position

    def of_hub(self) -> list[Entry]:
        return self._log.records_of(HUB)

    def wait(self, after: int) -> None:
        connection = self._log.connection
        if connection.shut_out:
            raise ValueError(
                f"{connection.login.url} does not know the key of {connection.login.name} any more"
            )
        self._log.wait(WAIT_S)


@dataclass(frozen=True, slots=True)
class Archive:
    folder: Path
    crew: str
    hub: bytes  # the key whose charter and rosters count
    source: RecordSource
    clock: Clock = RealClock()

    def charter(self) -> Charter | None:
        """It is the first record of a log; only where it is not there all is looked through."""
        first = self.examiner()
        for entry in self.source.read(0, 1):
            first.look(entry)
        return first.charter or self._examiner(self.source.last()).charter

    def examiner(self) -> Examiner:
        """One that has seen nothing yet."""
        return Examiner(self.crew, self.hub, self.rounds)

    def rounds(self) -> int:
        """How many the crew has by now, as the folder says; 0 where it does not."""
        for name in ("config.toml", "hub.json"):
            path = self.folder / name
            with suppress(OSError):
                return _rounds_in(path, path.stat().st_mtime_ns)
        return 0

    def records(self, after: int = 0, with_tables: bool = False) -> Iterator[Seen]:
        """Everything behind a position up to the newest there is now. `with_tables`: groups are
        read by tables that stand before it, too, which takes to read all that does.
        """
        last = self.source.last()
        examiner = self._examiner(after, with_tables)
        while after < last and (page := self.source.read(after)):
            yield from (examiner.look(entry) for entry in page if entry.position <= last)
            after = page[-1].position

    def entries(self) -> list[Entry]:
        """Every record as it stands there now, unexamined."""
        entries: list[Entry] = []
        while page := self.source.read(entries[-1].position if entries else 0):
            entries += page
        return entries

    def follow(self, after: int | None = None, say: Say = lambda text: None) -> Iterator[Seen]:
        """Everything behind a position, or from this call on, and then whatever is appended, for
        ever. Out of reach of the log it waits.

        A run that is resumed cuts its file and appends the same records again: they are not shown
        twice.
        """
        after = self.source.last() if after is None else after
        return self._follow(after, self._examiner(after), say)

    def _follow(self, after: int, examiner: Examiner, say: Say) -> Iterator[Seen]:
        said = False
        while True:
            page: list[Entry] = []
            try:
                page, said = self.source.read(after), False
            except LogError as error:
                if not said:
                    say(f"the log is out of reach ({error}); waiting for it")
                said = True
                # a bell that rang before would end the log's own wait at once
                self.clock.sleep_s(WAIT_S)
            yield from map(examiner.look, page)
            if page:
                after = page[-1].position
            else:
                self.source.wait(after)

    def _examiner(self, position: int, with_tables: bool = False) -> Examiner:
        """One that has seen what the hub said up to a position."""
        examiner = self.examiner()
        said = self.source.of_hub()
        for entry in sorted([*said, *self._tables(position)]) if with_tables else said:
            if entry.position <= position:
                examiner.look(entry)
        return examiner

    def _tables(self, position: int) -> Iterator[Entry]:
        """What stands up to a position under the ids of tables."""
        after = 0
        while after < position and (page := self.source.read(after)):
            yield from (entry for entry in page if entry.id.split(".")[1:2] == ["table"])
            after = page[-1].position


class _KeptByHub(msgspec.Struct):
    """What a hub.json has of the crew as it goes on."""

    config: str


@lru_cache(maxsize=8)
def _rounds_in(path: Path, changed_ns: int) -> int:
    """Of the crew that a file has; 0 where it cannot be read. `changed_ns`: when it was written."""
    with suppress(ValueError, OSError, msgspec.DecodeError):
        if path.name == "config.toml":
            return read_config(path).crew.rounds
        kept = msgspec.json.decode(path.read_bytes(), type=_KeptByHub)
        return parse_config(kept.config, source=str(path)).crew.rounds
    return 0
