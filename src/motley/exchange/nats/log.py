"""A crew's log on NATS JetStream: one subject per id, so that an id is written once for ever."""

from __future__ import annotations

from collections.abc import Sequence
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


class NatsLog:
    def __init__(self, connection: Connection, crew: str) -> None:
        self.connection = connection
        self._names = Names(crew)
        self._stream = Stream(connection, self._names.stream, "the log", MAX_RECORD_BYTES)
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
            [Outgoing(self._names.record(id), record, id, headers) for id, record in flight]
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
        clock, subjects = self.connection.clock, [self._names.record(one.id) for one in refused]
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
        subject = self._names.records_of(sender) if sender else self._names.everything
        found = self._stream.read(subject, after, limit)
        newest = found[-1].sequence if found else after
        self._known[subject] = max(newest, self._known.get(subject, 0))
        return [self._entry(stored) for stored in found]

    def records_of(self, sender: str) -> list[Entry]:
        """Everything one sender has on the log."""
        entries: list[Entry] = []
        while page := self.read(entries[-1].position if entries else 0, sender=sender):
            entries += page
        return entries

    def last_of(self, sender: str) -> Entry | None:
        """The newest record of one sender."""
        stored = self._stream.last(self._names.records_of(sender))
        return self._entry(stored) if stored else None

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
        for subject, known in (self._known or {self._names.everything: 0}).items():
            with suppress(LogError):  # it is known to be away, and may come back while we wait
                if found := self._stream.read(subject, known, limit=1, max_bytes=1):
                    self._known[subject] = found[-1].sequence
                    return True
        return False

    def _entry(self, stored: Stored) -> Entry:
        return Entry(stored.sequence, self._names.id_of(stored.subject), stored.content)


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
        subjects=[names.everything],
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
