"""A stream on a NATS server as those see it who write to it and read it.

Reading is a batch of direct gets from the reader's own cursor: nothing about a reader is kept on
the server, and there is no consumer to recreate after a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js.api import StreamConfig
from nats.js.errors import NotFoundError

from motley.exchange.log import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import direct_get

# of one read; the server cuts off a client that is sent far more than it takes
MAX_FETCH_BYTES = 8 * 2**20
HEADERS_BYTES = 1024  # of a message, which the server counts with its content
TIMEOUT_S = 15.0
FLIGHT_S = 60.0
ANSWER_S = 5.0  # of a cluster
# without an answer, of several that are due: it was lost, as when the server takes in a new
# configuration
SILENCE_S = 3.0
MOST_DOUBLINGS = 3  # of it, while one read after another gets no answer
MOST_ASKED = 16  # at a time: each waits for its answer with a subscription of its own


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


@dataclass(slots=True)
class Stream:
    """A stream as those see it who write to it and read it."""

    connection: Connection
    name: str
    called: str  # in what it says to people
    max_bytes: int  # of a message's content
    silence_s: float = field(default_factory=lambda: SILENCE_S)
    # Reads in a row without an answer. Each is waited for twice as long: who asks again while the
    # first answer is on its way makes the server send both, and is later still.
    _unanswered: int = 0

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

    def last_among(self, subjects: Sequence[str]) -> list[Stored]:
        """The newest message of those subjects that have one; asked for all at once."""
        wanted = {"multi_last": list(subjects), "batch": len(subjects)}
        return self.connection.call(partial(self._fetch, wanted), FLIGHT_S)

    def last_of_each(self, subjects: Sequence[str]) -> list[Stored | None]:
        """The newest message of every subject, in their order."""
        found: list[Stored | None] = []
        for start in range(0, len(subjects), MOST_ASKED):
            some = subjects[start : start + MOST_ASKED]
            found += self.connection.call(partial(self._fetch_last_of_each, some), FLIGHT_S)
        return found

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
            # each is looked at, or asyncio complains of those that were not
            failed = [error for one in set(sent) - due if (error := one.exception())]
        if any(isinstance(error, nats.errors.NoRespondersError) for error in failed):
            raise LogError(self._nobody("takes what is written to"))
        return [_receipt(request.result()) for request in sent]

    def _nobody(self, does: str) -> str:
        return (
            f"nobody {does} {self.called}: the server is starting, or too few servers of a cluster "
            "run or they are choosing who leads"
        )

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

    async def _fetch_last_of_each(
        self, subjects: Sequence[str], client: Client
    ) -> list[Stored | None]:
        return await asyncio.gather(*(self._fetch_last(subject, client) for subject in subjects))

    async def _fetch(self, wanted: dict[str, Any], client: Client) -> list[Stored]:
        page: list[Stored] = []
        async with self._asked(client, wanted) as replies:
            patience_s = self.silence_s * 2 ** min(self._unanswered, MOST_DOUBLINGS)
            try:
                while stored := self._stored(await replies.next_msg(patience_s)):
                    page.append(stored)
            except nats.errors.TimeoutError:
                if not page:
                    self._unanswered += 1
                    raise
            self._unanswered = 0
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
            subject = direct_get(self.name, self.connection.login.domain)
            await client.publish(subject, msgspec.json.encode(wanted), reply=inbox)
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
        if headers.get("Status") == "503":
            raise LogError(self._nobody("answers for"))
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


def make_stream(connection: Connection, config: StreamConfig, grows: bool = False) -> None:
    """Make a stream; one that is there already gets these limits, and keeps what is in it.

    `grows`: `max_bytes` is meant besides what is there.
    """
    name = config.name
    assert name

    async def work(client: Client) -> None:
        # a cluster that chooses who leads may not answer at all: then it is asked again
        alone = len(connection.login.urls) == 1
        streams = client.jetstream(timeout=TIMEOUT_S if alone else ANSWER_S)
        try:
            info = await streams.stream_info(name)
        except NotFoundError:
            await streams.add_stream(config)
            return
        there, most = info.config, config.max_bytes or -1
        limited = there.evolve(
            max_bytes=most + info.state.bytes if grows and most > 0 else most,
            max_msgs=config.max_msgs or -1,
            max_msg_size=config.max_msg_size or -1,
            republish=config.republish,
            num_replicas=max(config.num_replicas or 1, there.num_replicas or 1),
        )
        if limited != there:
            await streams.update_stream(limited)

    connection.call(work, TIMEOUT_S)
