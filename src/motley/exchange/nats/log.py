"""A crew's log on NATS JetStream: one subject per id, so that an id is written once for ever.

Where learners hear some of a crew only, groups stand in lots. Then a reader gets the lot that it
listens to, its own groups and what the hub says, in the log's order. Nothing else is sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from motley.clock import Deadline
from motley.exchange.log import Entry, LogError, tagged
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.exchange.nats.stream import (
    HEADERS_BYTES,
    ApiError,
    Outgoing,
    Stored,
    Stream,
    make_stream,
)
from motley.exchange.wire import MAX_RECORD_BYTES
from motley.records import HUB

MAX_FLIGHT_BYTES = 8 * 2**20  # of unconfirmed messages
# between two looks at the log while waiting: from the first on twice as long each time
FIRST_LOOK_S, LAST_LOOK_S = 0.02, 0.25
_NOT_STORED = 10077
# wrong last sequence of the subject; and the same while a cluster has another write of it under way
_EXISTS = {10071, 10164, _NOT_STORED}
LAG_S = 5.0  # by which a cluster's other servers may be behind the one that leads


class Refused(NamedTuple):
    """A record that the server did not take."""

    id: str
    record: bytes
    error: ApiError

    @property
    def for_want_of_room(self) -> bool:
        """Otherwise something stands in its place."""
        return self.error.err_code == _NOT_STORED and "per subject" not in self.error.description


LotOf = Callable[[str], int | None]  # of an id; None: it stands in none


class Listening(NamedTuple):
    """What somebody reads of a log whose groups stand in lots."""

    me: str
    lot: int
    tables: bool  # whether to read vocabularies, too


class NatsLog:
    def __init__(
        self,
        connection: Connection,
        crew: str,
        lot_of: LotOf | None = None,
        listening: Listening | None = None,
    ) -> None:
        """`lot_of`: where groups stand in lots. `listening`: without it everything is read. Only
        where the log is on one server: of several, one may be behind another, and what was read
        under two subjects could not be put in order.
        """
        self.connection, self._lot_of = connection, lot_of
        self._names = names = Names(crew)
        self._stream = Stream(connection, self._names.stream, "the log", MAX_RECORD_BYTES)
        # what is read here, where it is not one sender's
        self._heard = [names.everything]
        if listening:
            rest = names.in_no_lot if listening.tables else names.records_of(HUB)
            self._heard = [names.groups_in(listening.lot), names.groups_of(listening.me), rest]
        # per subject that is read here: up to where it is known
        self._known: dict[str, int] = {}
        self._look_s = FIRST_LOOK_S

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for flight in _flights(records):
            elsewhere = [(tagged(id, record), record) for id, record in self._unwritten(flight)]
            for id, _ in self._unwritten(elsewhere):
                raise LogError(f"the log refuses {id}: another record stands there")

    def _unwritten(self, flight: Sequence[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        """Write a flight; those under whose id something else stands.

        Where anybody may write, somebody else can have been there first.
        """
        refused = self._refused(flight) if flight else []
        found = self._standing(refused)
        for one, stored in zip(refused, found, strict=True):
            if stored is None:
                raise LogError(
                    f"the log refuses {one.id}: it has no room for it"
                    if one.for_want_of_room
                    else f"{one.id} is not confirmed: the server that leads the log has another "
                    "write of it under way"
                )
        pairs = zip(refused, found, strict=True)
        return [
            (one.id, one.record) for one, stored in pairs if stored and stored.content != one.record
        ]

    def _refused(self, flight: Sequence[tuple[str, bytes]]) -> list[Refused]:
        """Write a flight; those whose subject the server did not take it for."""
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        receipts = self._stream.write(
            [Outgoing(self._subject(id), record, id, headers) for id, record in flight]
        )
        for (id, _), receipt in zip(flight, receipts, strict=True):
            if receipt.error and receipt.error.err_code not in _EXISTS:
                raise LogError(f"the log refuses {id}: {receipt.error.description}")
        return [
            Refused(*one, receipt.error)
            for one, receipt in zip(flight, receipts, strict=True)
            if receipt.error
        ]

    def _standing(self, refused: Sequence[Refused]) -> list[Stored | None]:
        """What stands in the places of what was refused.

        In a cluster the server that leads refuses, and any answers: that one may have it a moment
        later.
        """
        clock, subjects = self.connection.clock, [self._subject(one.id) for one in refused]
        deadline = Deadline(clock, LAG_S)
        while True:
            found = self._stream.last_of_each(subjects)
            late = any(
                stored is None and not one.for_want_of_room
                for one, stored in zip(refused, found, strict=True)
            )
            if not late or deadline.passed:
                return found
            clock.sleep_s(FIRST_LOOK_S)

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        """`sender`: its records that stand in no lot."""
        subjects = [self._names.records_of(sender)] if sender else self._heard
        found = self._in_order(subjects, after, limit)
        newest = found[-1].sequence if found else after
        for subject in subjects:
            self._known[subject] = max(newest, self._known.get(subject, 0))
        return [self._entry(stored) for stored in found]

    def _in_order(self, subjects: Sequence[str], after: int, limit: int) -> list[Stored]:
        """The first messages of several subjects, in order and without gaps.

        Up to where each of them was read: what stands before a message was there before it. So a
        subject that had nothing is looked at once more.
        """
        pages = [self._stream.read(subject, after, limit) for subject in subjects]
        if len(subjects) == 1 or not any(pages):
            return pages[0]
        empty = [subject for subject, page in zip(subjects, pages, strict=True) if not page]
        pages += [self._stream.read(subject, after, limit) for subject in empty]
        newest = min(page[-1].sequence for page in pages if page)
        found = {one.sequence: one for page in pages for one in page if one.sequence <= newest}
        return [found[sequence] for sequence in sorted(found)]

    def records_of(self, sender: str) -> list[Entry]:
        """Everything one sender has on the log."""
        entries: list[Entry] = []
        for subject in self._subjects_of(sender):
            found: list[Stored] = []
            while page := self._stream.read(subject, found[-1].sequence if found else 0):
                found += page
            entries += map(self._entry, found)
        return sorted(entries)

    def last_of(self, sender: str) -> Entry | None:
        """The newest record of one sender."""
        lasts = map(self._stream.last, self._subjects_of(sender))
        return max((self._entry(stored) for stored in lasts if stored), default=None)

    def newest(self) -> Entry | None:
        """The newest record of all."""
        stored = self._stream.last(self._names.everything)
        return self._entry(stored) if stored else None

    def _subjects_of(self, sender: str) -> list[str]:
        in_lots = [self._names.groups_of(sender)] if self._lot_of and sender != HUB else []
        return [self._names.records_of(sender), *in_lots]

    def _subject(self, id: str) -> str:
        return self._names.record(id, self._lot_of(id) if self._lot_of else None)

    def wait(self, timeout_s: float) -> None:
        """Return when something came of what is read here, or after the timeout.

        By asking: a server that told everyone of every record would let a peer that writes many
        drown the others in them.
        """
        clock = self.connection.clock
        stop_s = clock.elapsed_s() + timeout_s
        while not self._has_news():
            left_s = stop_s - clock.elapsed_s()
            if left_s <= 0:
                return
            clock.sleep_s(min(self._look_s, left_s))
            self._look_s = min(2 * self._look_s, LAST_LOOK_S)
        self._look_s = FIRST_LOOK_S

    def _has_news(self) -> bool:
        for subject, known in (self._known or dict.fromkeys(self._heard, 0)).items():
            with suppress(LogError):  # it is known to be away, and may come back while we wait
                if found := self._stream.read(subject, known, limit=1, max_bytes=1):
                    self._known[subject] = found[-1].sequence
                    return True
        return False

    def _entry(self, stored: Stored) -> Entry:
        """What stands in another lot than its own is under no id of a record's."""
        id = self._names.id_of(stored.subject)
        if self._lot_of and not id.startswith("=") and self._subject(id) != stored.subject:
            id = f"={id}"
        return Entry(stored.sequence, id, stored.content)


def create_stream(
    connection: Connection,
    crew: str,
    room_bytes: int = 0,
    max_record_bytes: int = MAX_RECORD_BYTES,
    replicas: int = 1,
) -> None:
    """Make the crew's stream, or give the one that is there these limits.

    Nothing on it can be deleted or written twice. `room_bytes`: for how much more than is there
    now; 0: without a limit. `replicas`: on how many servers of a cluster it is.
    """
    names = Names(crew)
    config = StreamConfig(
        name=names.stream,
        subjects=[*names.stored],
        storage=StorageType.FILE,
        num_replicas=replicas,
        max_bytes=room_bytes or -1,
        max_msg_size=max_record_bytes + HEADERS_BYTES,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
    )
    make_stream(connection, config, grows=True)


def _flights(records: Sequence[tuple[str, bytes]]) -> list[list[tuple[str, bytes]]]:
    flights: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for id, record in records:
        if flights[-1] and size + len(record) > MAX_FLIGHT_BYTES:
            flights.append([])
            size = 0
        flights[-1].append((id, record))
        size += len(record)
    return flights if records else []
