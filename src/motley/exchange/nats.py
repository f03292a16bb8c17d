"""A crew's names on NATS JetStream, its streams, and its log: one subject per id, so that an id is
written once for ever.

Reading is a batch of direct gets from the reader's own cursor: nothing about a reader is kept on
the server, and there is no consumer to recreate after a fault.
"""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import DiscardPolicy, RePublish, StorageType, StreamConfig
from nats.js.errors import NotFoundError

from motley.exchange.connection import Connection
from motley.exchange.log import Entry, LogError
from motley.exchange.wire import MAX_RECORD_BYTES

# of one read; the server cuts off a client that is sent far more than it takes
MAX_FETCH_BYTES = 8 * 2**20
HEADERS_BYTES = 1024  # of a message, which the server counts with its content
MAX_FLIGHT_BYTES = 8 * 2**20  # of unconfirmed messages
TIMEOUT_S = 15.0
FLIGHT_S = 60.0
# without an answer, of several that are due: it was lost, as when the server takes in a new
# configuration
SILENCE_S = 3.0
_EXISTS = {10071, 10077}  # wrong last sequence of the subject; most messages per subject reached


class Names:
    """Every subject of a crew, and its stream."""

    def __init__(self, crew: str) -> None:
        self.stream = f"motley-{crew}"
        self._root = f"motley.{crew}"
        self.everything = f"{self._root}.log.>"
        self.bells = f"{self._root}.bell.>"
        self.presences = f"{self._root}.presence.*"
        self.control = f"{self._root}.control"

    def record(self, id: str) -> str:
        return f"{self._root}.log.{_escaped(id)}"

    def records_of(self, peer: str) -> str:
        return f"{self._root}.log.{peer}.>"

    def presence(self, peer: str) -> str:
        return f"{self._root}.presence.{peer}"

    def enrolment(self, peer: str) -> str:
        return f"{self._root}.enrol.{peer}"

    def id_of(self, subject: str) -> str:
        """The id of a subject; one that no id has stands for itself, and fits no record."""
        escaped = subject.removeprefix(f"{self._root}.log.")
        id = _unescaped(escaped)
        return id if _escaped(id) == escaped else f"={escaped}"

    def bucket(self, learner: str) -> Bucket:
        return Bucket(f"{self.stream}-{learner}")

    @property
    def direct_get(self) -> str:
        return direct_get(self.stream)


class Bucket:
    """Every subject of a learner's blobs, as NATS's own Object Store has them, and their stream."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.stream = f"OBJ_{name}"
        self.chunks = self.chunks_of("*")
        self.metas = f"$O.{name}.M.*"
        self.direct_get = direct_get(self.stream)

    def chunks_of(self, blob: str) -> str:
        return f"$O.{self.name}.C.{blob}"

    def meta_of(self, blob: str) -> str:
        return f"$O.{self.name}.M.{base64.urlsafe_b64encode(blob.encode()).decode()}"


def direct_get(stream: str) -> str:
    return f"$JS.API.DIRECT.GET.{stream}"


class Outgoing(NamedTuple):
    """A message to be written, and the name by which to speak of it."""

    subject: str
    content: bytes
    name: str
    headers: Mapping[str, str] | None = None


class Stored(NamedTuple):
    """A message where it stands."""

    sequence: int
    subject: str
    content: bytes


class ApiError(msgspec.Struct, frozen=True):
    """Why the server refuses, in its own words."""

    err_code: int = 0
    description: str = ""


class Receipt(msgspec.Struct, frozen=True):
    """What the server says to a message."""

    seq: int = 0  # where the message stands
    error: ApiError | None = None


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as those see it who write to it and read it."""

    connection: Connection
    name: str
    called: str  # in what it says to people
    max_bytes: int  # of a message's content
    silence_s: float = SILENCE_S

    def write(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        """Publish all at once, in this order, and wait for every receipt, be it a refusal."""
        return self.connection.call(partial(self._publish_all, messages), FLIGHT_S)

    def read(
        self, subject: str, after: int = 0, limit: int = 1024, max_bytes: int = MAX_FETCH_BYTES
    ) -> list[Stored]:
        """The first messages behind a sequence whose subject fits.

        The last of them may go beyond `max_bytes`.
        """
        wanted = {"seq": after + 1, "batch": limit, "max_bytes": max_bytes, "next_by_subj": subject}
        return self.connection.call(partial(self._fetch, wanted), FLIGHT_S)

    def last(self, subject: str) -> Stored | None:
        """The newest message whose subject fits."""
        return self.connection.call(partial(self._fetch_last, subject), self.silence_s)

    async def _publish_all(self, messages: Sequence[Outgoing], client: Client) -> list[Receipt]:
        self._check_connected(client)  # the client would buffer it, and time would run out here
        for message in messages:
            self._check_size(message, client)
        sent = [
            asyncio.ensure_future(
                client.request(
                    m.subject, m.content, FLIGHT_S, headers=dict(m.headers) if m.headers else None
                )
            )
            for m in messages
        ]
        due = set(sent)
        try:
            while due:
                answered, due = await asyncio.wait(
                    due, timeout=self.silence_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not answered:
                    raise LogError(f"{len(due)} of {len(sent)} records were not confirmed")
        finally:
            for request in due:
                request.cancel()
        return [_receipt(request.result()) for request in sent]

    def _check_connected(self, client: Client) -> None:
        if not client.is_connected:
            raise LogError(
                self.connection.trouble or f"not connected to {self.connection.login.url}"
            )

    def _check_size(self, message: Outgoing, client: Client) -> None:
        # a server of somebody else's may take less
        taken = client.max_payload - (HEADERS_BYTES if message.headers else 0)
        most = min(self.max_bytes, taken)
        if len(message.content) > most:
            raise LogError(
                f"{self.called} refuses {message.name}: it has {len(message.content)} bytes, and "
                f"{most} is the most"
            )

    async def _fetch_last(self, subject: str, client: Client) -> Stored | None:
        async with self._asked(client, {"last_by_subj": subject}) as replies:
            return self._stored(await replies.next_msg(self.silence_s))

    async def _fetch(self, wanted: dict[str, Any], client: Client) -> list[Stored]:
        page: list[Stored] = []
        async with self._asked(client, wanted) as replies:
            try:
                while stored := self._stored(await replies.next_msg(self.silence_s)):
                    page.append(stored)
            except nats.errors.TimeoutError:
                if not page:
                    raise
        return page  # in order and without gaps, so far

    @asynccontextmanager
    async def _asked(self, client: Client, wanted: dict[str, Any]) -> AsyncIterator[Subscription]:
        """The replies to a direct get.

        A request of the client's would take a record's own Status header for the server's word.
        """
        self._check_connected(client)
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        try:
            await client.publish(direct_get(self.name), msgspec.json.encode(wanted), reply=inbox)
            yield replies
        finally:
            await replies.unsubscribe()

    def _stored(self, message: Msg) -> Stored | None:
        """A message, or None at the end.

        It may bring a Status of its own: only the server's word comes without a sequence.
        """
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            return Stored(int(headers["Nats-Sequence"]), headers["Nats-Subject"], message.data)
        if headers.get("Status") not in ("204", "404"):  # end of batch; nothing there
            raise LogError(
                f"{self.called} cannot be read: {headers.get('Status', '')} "
                f"{headers.get('Description', '')}".strip()
            )
        return None


def _receipt(message: Msg) -> Receipt:
    return (
        msgspec.json.decode(message.data, type=Receipt)
        if message.data
        else Receipt(error=ApiError(description="no stream took it"))
    )


class NatsLog:
    def __init__(self, connection: Connection, crew: str) -> None:
        self.connection = connection
        self._names = Names(crew)
        self._stream = Stream(connection, self._names.stream, "the log", MAX_RECORD_BYTES)
        self._rung = threading.Event()
        connection.subscribe(self._names.bells, self._on_bell)
        connection.on_reconnect.append(self._rung.set)  # bells may have been missed

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for flight in _flights(records):
            headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
            receipts = self._stream.write(
                [Outgoing(self._names.record(id), record, id, headers) for id, record in flight]
            )
            for (id, _), receipt in zip(flight, receipts, strict=True):
                if receipt.error and receipt.error.err_code not in _EXISTS:
                    raise LogError(f"the log refuses {id}: {receipt.error.description}")

    def read(self, after: int, limit: int = 1024, sender: str = "") -> list[Entry]:
        subject = self._names.records_of(sender) if sender else self._names.everything
        return [self._entry(stored) for stored in self._stream.read(subject, after, limit)]

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
        """Return when something came since the last wait, or after the timeout."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    def _on_bell(self, message: Msg) -> None:
        self._rung.set()

    def _entry(self, stored: Stored) -> Entry:
        return Entry(stored.sequence, self._names.id_of(stored.subject), stored.content)


def create_stream(connection: Connection, crew: str) -> None:
    """Make the crew's stream, if it is not there. Nothing on it can be deleted or written twice."""
    names = Names(crew)
    config = StreamConfig(
        name=names.stream,
        subjects=[names.everything],
        storage=StorageType.FILE,
        max_msg_size=MAX_RECORD_BYTES + HEADERS_BYTES,
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        discard_new_per_subject=True,
        deny_delete=True,
        deny_purge=True,
        allow_direct=True,
        republish=RePublish(src=names.everything, dest=names.bells, headers_only=True),
    )
    make_stream(connection, config)


def make_stream(connection: Connection, config: StreamConfig) -> None:
    """Make a stream, if it is not there."""
    name = config.name
    assert name

    async def work(client: Client) -> None:
        streams = client.jetstream(timeout=TIMEOUT_S)
        try:
            await streams.stream_info(name)
        except NotFoundError:
            await streams.add_stream(config)

    connection.call(work, TIMEOUT_S)


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


# Ids as subjects: parts between dots; what a subject may not hold is written =XX

_PLAIN = re.compile(rb"[A-Za-z0-9_-]")


def _escaped(id: str) -> str:
    return ".".join(
        "".join(chr(b) if _PLAIN.match(bytes([b])) else f"={b:02X}" for b in part.encode()) or "="
        for part in id.split(".")
    )


def _unescaped(subject: str) -> str:
    plain = lambda part: re.sub(
        rb"=([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), b"" if part == "=" else part.encode()
    )
    return ".".join(plain(part).decode(errors="replace") for part in subject.split("."))
