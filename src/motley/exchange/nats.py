"""The log on NATS JetStream. One subject per id, so that an id is written once for ever; readers hold their own cursor.

Reading is a batch of direct gets: nothing about a reader is kept on the server, and there is no consumer to recreate after a fault.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

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

MAX_FETCH_BYTES = 8 * 2**20  # of one read; the server cuts off a client that is sent far more than it takes
HEADERS_BYTES = 1024  # of a message, which the server counts with the record
MAX_FLIGHT_BYTES = 8 * 2**20  # of unconfirmed appends
TIMEOUT_S = 15.0
FLIGHT_S = 60.0
SILENCE_S = 3.0  # without an answer, of several that are due: it was lost, as when the server takes in a new configuration
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
        """The id of a subject; a subject that no id has stands for itself, and no record will fit it."""
        escaped = subject.removeprefix(f"{self._root}.log.")
        id = _unescaped(escaped)
        return id if _escaped(id) == escaped else f"={escaped}"

    @property
    def direct_get(self) -> str:
        return f"$JS.API.DIRECT.GET.{self.stream}"


class NatsLog:
    def __init__(self, connection: Connection, crew: str) -> None:
        self.connection = connection
        self._names = Names(crew)
        self._rung = threading.Event()
        connection.subscribe(self._names.bells, self._on_bell)
        connection.on_reconnect.append(self._rung.set)  # bells may have been missed

    def append(self, records: Sequence[tuple[str, bytes]]) -> None:
        for flight in _flights(records):
            self.connection.call(partial(self._publish_all, flight), FLIGHT_S)

    def read(self, after: int, limit: int = 1024) -> list[Entry]:
        return self.connection.call(partial(self._fetch, after, limit, ""), FLIGHT_S)

    def records_of(self, sender: str) -> list[Entry]:
        """Everything one sender has on the log."""
        found: list[Entry] = []
        while page := self.connection.call(partial(self._fetch, found[-1].position if found else 0, 1024, sender), FLIGHT_S):
            found += page
        return found

    def last_of(self, sender: str) -> Entry | None:
        """The newest record of one sender."""
        return self.connection.call(partial(self._fetch_last, sender), SILENCE_S)

    def wait(self, timeout_s: float) -> None:
        """Return when something came since the last wait, or after the timeout."""
        self._rung.wait(timeout_s)
        self._rung.clear()

    def _on_bell(self, message: Msg) -> None:
        self._rung.set()

    async def _publish_all(self, records: Sequence[tuple[str, bytes]], client: Client) -> None:
        if not client.is_connected:  # the client would buffer it, and time would run out here
            raise LogError(self.connection.trouble or f"not connected to {self.connection.login.url}")
        for id, record in records:
            most = min(MAX_RECORD_BYTES, client.max_payload - HEADERS_BYTES)  # a server of somebody else's may take less
            if len(record) > most:
                raise LogError(f"the log refuses {id}: it has {len(record)} bytes, and {most} is the most")
        headers = {"Nats-Expected-Last-Subject-Sequence": "0"}
        sent = [
            asyncio.ensure_future(client.request(self._names.record(id), record, FLIGHT_S, headers=dict(headers))) for id, record in records
        ]
        due = set(sent)
        try:
            while due:
                answered, due = await asyncio.wait(due, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED)
                if not answered:
                    raise LogError(f"{len(due)} of {len(sent)} records were not confirmed")
        finally:
            for request in due:
                request.cancel()
        for (id, _), answer in zip(records, (request.result() for request in sent), strict=True):
            error = msgspec.json.decode(answer.data).get("error") if answer.data else {"description": "no stream took it"}
            if error and error.get("err_code") not in _EXISTS:
                raise LogError(f"the log refuses {id}: {error.get('description')}")

    async def _fetch_last(self, sender: str, client: Client) -> Entry | None:
        async with self._asked(client, {"last_by_subj": self._names.records_of(sender)}) as replies:
            return self._entry(await replies.next_msg(SILENCE_S))

    async def _fetch(self, after: int, limit: int, sender: str, client: Client) -> list[Entry]:
        subject = self._names.records_of(sender) if sender else self._names.everything
        wanted = {"seq": after + 1, "batch": limit, "max_bytes": MAX_FETCH_BYTES, "next_by_subj": subject}
        found: list[Entry] = []
        async with self._asked(client, wanted) as replies:
            try:
                while entry := self._entry(await replies.next_msg(SILENCE_S)):
                    found.append(entry)
            except nats.errors.TimeoutError:
                if not found:
                    raise
        return found  # in order and without gaps, so far

    @asynccontextmanager
    async def _asked(self, client: Client, wanted: dict[str, Any]) -> AsyncIterator[Subscription]:
        """The replies to a direct get. Not a request of the client's, which takes a record's own Status header for the server's word."""
        if not client.is_connected:
            raise LogError(self.connection.trouble or f"not connected to {self.connection.login.url}")
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        try:
            await client.publish(self._names.direct_get, msgspec.json.encode(wanted), reply=inbox)
            yield replies
        finally:
            await replies.unsubscribe()

    def _entry(self, message: Msg) -> Entry | None:
        """A record, or None at the end. A record may bring a Status of its own: only the server's word comes without a sequence."""
        headers = message.headers or {}
        if "Nats-Sequence" in headers:
            return Entry(int(headers["Nats-Sequence"]), self._names.id_of(headers["Nats-Subject"]), message.data)
        if headers.get("Status") not in ("204", "404"):  # end of batch; nothing there
            raise LogError(f"the log cannot be read: {headers.get('Status', '')} {headers.get('Description', '')}".strip())
        return None


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

    async def work(client: Client) -> None:
        stream = client.jetstream(timeout=TIMEOUT_S)
        try:
            await stream.stream_info(names.stream)
        except NotFoundError:
            await stream.add_stream(config)

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
    return ".".join("".join(chr(b) if _PLAIN.match(bytes([b])) else f"={b:02X}" for b in part.encode()) or "=" for part in id.split("."))


def _unescaped(subject: str) -> str:
    plain = lambda part: re.sub(rb"=([0-9A-F]{2})", lambda m: bytes([int(m[1], 16)]), b"" if part == "=" else part.encode())
    return ".".join(plain(part).decode(errors="replace") for part in subject.split("."))
