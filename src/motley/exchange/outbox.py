"""Outbox: what this publisher has made and the log has not yet confirmed, in a file that survives a
crash at any moment.

It owns the publisher's chain (counter, hash of the record before) and signs: a record gets its
place in the chain, its signature and its line in the file in one transaction, so that nothing
sampled is lost, sent twice under two counters, or forked.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from motley.exchange.blobs import Blobs
from motley.exchange.log import Log
from motley.exchange.wire import Sealed, encode_parts, pack
from motley.records import FIRST_PREVIOUS, Content, Stamp

BATCH = 256  # records in flight at a time
SEALERS = 4  # threads that sign and compress,
WORTH_THREADS = 8  # from so many records on

_TABLES = """
CREATE TABLE IF NOT EXISTS head (
    one INTEGER PRIMARY KEY CHECK (one = 1), counter INTEGER NOT NULL, previous BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS unsent (
    counter INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, record BLOB NOT NULL, due_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS blobs (
    counter INTEGER NOT NULL, name TEXT NOT NULL, content BLOB NOT NULL, PRIMARY KEY (counter, name)
);
CREATE TABLE IF NOT EXISTS marks (
    kind TEXT NOT NULL, number INTEGER NOT NULL, note BLOB NOT NULL, PRIMARY KEY (kind, number)
);
"""

# A file of version 0.5 has bare numbers. The file itself says what they count: only a hub has a
# negative one, of its charter; only a round was put with a note that is not empty.
_NAME_NUMBERS = """
INSERT INTO marks SELECT
    CASE
        WHEN round < 0 THEN 'charter'
        WHEN (SELECT min(round) FROM rounds) < 0 THEN 'roster'
        WHEN length(note) = 0 THEN 'version'
        ELSE 'round'
    END,
    max(round, 0), note FROM rounds
"""


class OutboxError(OSError):
    """The outbox's file cannot be used: which, why, and what to do."""


class Signer(NamedTuple):
    """Who signs, as far as the exchange needs to know it."""

    public: bytes
    sign: Callable[[bytes], bytes]


class Mark(NamedTuple):
    """What records were put for, once: a sampled round, a sender's table, a learner's version, a
    hub's word.

    >>> Mark("round", 3), Mark("table"), Mark("version", 12), Mark("roster", 0), Mark("charter")
    """

    kind: Literal["round", "table", "version", "roster", "charter"]
    number: int = 0


class Head(NamedTuple):
    """The next record's place in the chain."""

    counter: int
    previous: bytes


class Outbox:
    def __init__(self, path: Path | None, signer: Signer, lossless: bool = False) -> None:
        """`path` None: no file, for a log that lives in the same process."""
        self._path, self._signer, self._lossless = path, signer, lossless
        with self._in_words():
            self._database = sqlite3.connect(
                path or ":memory:", check_same_thread=False, timeout=60
            )
            self._prepare()

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = FULL")
        with self._database:
            self._database.executescript(_TABLES)
            if "due_s" not in self._columns("unsent"):  # a file of version 0.2
                self._database.execute(
                    "ALTER TABLE unsent ADD COLUMN due_s REAL NOT NULL DEFAULT 0"
                )
            if self._columns("rounds"):
                self._database.execute(_NAME_NUMBERS)
                self._database.execute("DROP TABLE rounds")

    @contextmanager
    def _in_words(self) -> Iterator[None]:
        """SQLite's own words do not say which file, nor what to do."""
        try:
            yield
        except sqlite3.IntegrityError:  # no fault of the file's
            raise
        except sqlite3.Error as error:
            raise OutboxError(f"{self._path or 'the outbox'}: {error}; {_remedy(error)}") from None

    def _columns(self, table: str) -> set[str]:
        """Of a table; none if the file does not have it."""
        return {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}

    @property
    def path(self) -> Path | None:
        return self._path

    @property
    def key(self) -> bytes:
        """Whose records these are."""
        return self._signer.public

    def secret(self, purpose: bytes) -> bytes:
        """64 bytes that only the owner of the key can make, the same every time."""
        return self._signer.sign(b"motley secret\n" + purpose)

    def __len__(self) -> int:
        """How many records wait to be sent."""
        with self._in_words():
            num_unsent: int = self._database.execute("SELECT count(*) FROM unsent").fetchone()[0]
        return num_unsent

    @property
    def head(self) -> Head:
        row = self._database.execute("SELECT counter, previous FROM head").fetchone()
        return Head(*row) if row else Head(0, FIRST_PREVIOUS)

    @head.setter
    def head(self, head: Head) -> None:
        with self._database:
            self._set_head(head)

    def _set_head(self, head: Head) -> None:
        self._database.execute("INSERT OR REPLACE INTO head VALUES (1, ?, ?)", head)

    def put(
        self,
        contents: Sequence[Content],
        mark: Mark | None = None,
        note: bytes = b"",
        due_s: float = 0.0,
        blobs: Mapping[str, bytes] | None = None,
    ) -> None:
        """Chain, sign and keep records; with `mark`, once for it. All or nothing.

        `due_s`: not to be sent before. `blobs`: what must be in the store before the first of the
        records is on the log.
        """
        with self._in_words(), self._database:
            head = first = self.head
            bodies = []
            for content in contents:
                stamp = Stamp(key=self.key, counter=head.counter, previous=head.previous)
                bodies.append(encode_parts(content, stamp, self._lossless))
                head = Head(head.counter + 1, Sealed(b"", b"".join(bodies[-1])).hash)
            rows = enumerate(zip(contents, self._sealed(bodies), strict=True), first.counter)
            self._database.executemany(
                "INSERT INTO unsent VALUES (?, ?, ?, ?)",
                [(counter, content.id, record, due_s) for counter, (content, record) in rows],
            )
            self._set_head(head)
            self._database.executemany(
                "INSERT INTO blobs VALUES (?, ?, ?)",
                [(first.counter, *blob) for blob in (blobs or {}).items()],
            )
            if mark is not None:
                self._database.execute("INSERT INTO marks VALUES (?, ?, ?)", (*mark, note))

    def _sealed(self, bodies: Sequence[list[bytes]]) -> list[bytes]:
        """Records of these bodies. Both libraries at work let other threads run."""

        def seal(parts: list[bytes]) -> bytes:
            return pack(self._signer.sign(Sealed(b"", b"".join(parts)).signed), *parts)

        if len(bodies) < WORTH_THREADS:
            return [seal(parts) for parts in bodies]
        with ThreadPoolExecutor(SEALERS) as sealers:
            return list(sealers.map(seal, bodies))

    def note_of(self, mark: Mark) -> bytes | None:
        """What was noted when the mark was made; None if it was not."""
        row = self._database.execute(
            "SELECT note FROM marks WHERE kind = ? AND number = ?", mark
        ).fetchone()
        return row[0] if row else None

    @property
    def last_round(self) -> int:
        """The highest round that was marked; -1 before the first."""
        row = self._database.execute(
            "SELECT max(number) FROM marks WHERE kind = 'round'"
        ).fetchone()
        return -1 if row[0] is None else row[0]

    @property
    def due_s(self) -> float:
        """When the next record is to be sent; infinity if there is none."""
        with self._in_words():
            row = self._database.execute("SELECT min(due_s) FROM unsent").fetchone()
        return math.inf if row[0] is None else row[0]

    def deliver(self, log: Log, now_s: float = math.inf, blobs: Blobs | None = None) -> None:
        """Send what is due, in the order of the chain; what the log has confirmed is forgotten.

        LogError leaves the rest for later.
        """
        with self._in_words():
            while rows := self._due(now_s):
                counters = [(counter,) for counter, _, _ in rows]
                self._store_blobs(counters, blobs)
                log.append([(id, record) for _, id, record in rows])
                with self._database:
                    self._database.executemany("DELETE FROM unsent WHERE counter = ?", counters)
                    self._database.executemany("DELETE FROM blobs WHERE counter = ?", counters)

    def _due(self, now_s: float) -> list[tuple[int, str, bytes]]:
        query = "SELECT counter, id, record FROM unsent WHERE due_s <= ? ORDER BY counter LIMIT ?"
        return self._database.execute(query, (now_s, BATCH)).fetchall()

    def _store_blobs(self, counters: Sequence[tuple[int]], blobs: Blobs | None) -> None:
        for counter in counters:
            for name, content in self._database.execute(
                "SELECT name, content FROM blobs WHERE counter = ?", counter
            ):
                assert blobs, "weights were put in the outbox of a peer that has no store for them"
                blobs.put(name, content)

    def close(self) -> None:
        if hasattr(self, "_database"):  # else the file could not be opened
            self._database.close()

    def __del__(self) -> None:
        self.close()


def count_unsent(path: Path) -> int | None:
    """How many records wait in the outbox of another process; None where that cannot be told.

    The file is only read.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            count: int = database.execute("SELECT count(*) FROM unsent").fetchone()[0]
            return count
    except sqlite3.Error:
        return None


def _remedy(error: sqlite3.Error) -> str:
    if "full" in str(error):
        return "make room on that disk; nothing that was kept is lost"
    if "locked" in str(error):
        return "another process uses it; stop that one"
    return (
        "if the file is damaged, move it and its -wal and -shm away: what was sent is on the log, "
        "and a new outbox goes on behind it"
    )
