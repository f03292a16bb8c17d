"""Connection: a NATS client on a thread of its own, for code that is not asynchronous.

Owns reconnecting, and what to say about it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlparse

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from motley.clock import Clock, Deadline, RealClock
from motley.exchange.log import LogError

# Said at every end of a TLS connection, about a return value of asyncio's own that has no effect.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received" not in record.getMessage())

RECONNECT_WAIT_S = 0.25
ENDING_S = 2.0  # for what is under way when a connection is closed
PING_S = 5  # two unanswered pings mean a dead connection that TCP has not noticed
_DOMAIN = re.compile("[A-Za-z0-9_-]+")

T = TypeVar("T")


class NotAdmittedError(LogError):
    """The server does not know this key."""


class HungUpError(LogError):
    """The server ended the connection; another try may be let in."""


class SturdyClient(Client):
    """nats-py stops reading for good at a message it cannot decode, and any peer can publish one.

    Here it is read as far as it goes.
    """

    def abandon(self) -> None:
        """Let go of the socket of an attempt that failed: nats-py leaves it open.

        Also of the one below TLS, which would wait for the word of a server that may be dead.
        """
        if self._transport is not None:
            self._transport.close()
            if bare := getattr(self._transport, "_bare_io_writer", None):
                bare.close()

    async def _connect_to_server(self, server: Any) -> None:
        """Dial, and let go of the one before, which may have failed half-way."""
        self.abandon()
        await super()._connect_to_server(server)

    async def _attempt_reconnect(self) -> None:
        with suppress(asyncio.InvalidStateError):  # closed meanwhile, and who waited has gone
            await super()._attempt_reconnect()

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        clean = lambda part: bytes(part).decode(errors="replace").encode() if part else part
        try:
            await super()._process_msg(sid, clean(subject), clean(reply), data, clean(headers))
        except Exception:  # noqa: BLE001 - whatever a stranger's message does to the client, the next one must be read
            with suppress(Exception):
                await super()._process_msg(sid, clean(subject), clean(reply), data, b"")


@dataclass(frozen=True, slots=True)
class Login:
    url: str  # nats://HOST:PORT or tls://HOST:PORT; of a cluster all, with commas between
    name: str  # in the server's logs, and of the inbox
    seed: str = field(default="", repr=False)  # nkey seed
    # sha256 of the server's certificate, in hex: then that one is trusted and no other
    certificate: str = ""

    @property
    def inbox(self) -> str:
        return f"_INBOX.{self.name}"

    @property
    def urls(self) -> list[str]:
        """Of every server, the one to be dialled first in front."""
        return urls_of(self.url)

    @property
    def secure(self) -> bool:
        return self.urls[0].startswith("tls:")

    @property
    def domain(self) -> str:
        """Of the streams, where they are on the other side of a leaf node; nothing if not."""
        return domain_of(self.url)


class Connection:
    def __init__(self, login: Login, patience_s: float = 10.0, clock: Clock = RealClock()) -> None:
        """Connect within `patience_s`, or LogError; later losses are repaired by themselves."""
        self.login, self.clock = login, clock
        self._client = SturdyClient()
        self._num_servers = len(login.urls)
        self._refused_by: set[str] = set()  # servers that do not know this key
        self._lost_at_s: float | None = None
        self._said = ""
        self._loop = asyncio.new_event_loop()
        # each hears of what the server refuses
        self._under_way: set[asyncio.Future[LogError]] = set()
        self._thread = threading.Thread(target=self._live, name=f"nats {login.name}", daemon=True)
        self._thread.start()
        self.on_reconnect: list[Callable[[], None]] = []
        try:
            self._run(self._connect(patience_s), patience_s + 15)
        except BaseException:
            self.close()
            raise

    # What callers see

    @property
    def trouble(self) -> str:
        """What is wrong with the connection, and since when; nothing if it is well."""
        if self._lost_at_s is None:
            return ""
        lost_s = self.clock.elapsed_s() - self._lost_at_s
        return (
            f"no connection to {self.login.url} for {lost_s:.0f} s "
            f"({self._said or 'closed by the server'})"
        )

    @property
    def shut_out(self) -> bool:
        """The server has stopped knowing this key, or never did.

        Of several most must say so: one that was away may not know a new key yet.
        """
        refused = "authorization violation" in self._said.lower()
        most = len(self._refused_by) > self._num_servers // 2
        return refused and (most or self._client.is_closed)

    @property
    def closed(self) -> bool:
        """By us, for good."""
        return self._loop.is_closed()

    def call(self, work: Callable[[Client], Coroutine[Any, Any, T]], timeout_s: float = 10.0) -> T:
        """Run a coroutine with the client; a failure of the network is a LogError in words."""
        if self._client.is_closed:
            raise LogError(
                f"the connection of {self.login.name} to {self.login.url} is closed "
                f"({self._said or 'by us'})"
            )
        try:
            return self._run(
                self._unless_refused(asyncio.wait_for(work(self._client), timeout_s)), timeout_s + 5
            )
        except (nats.errors.Error, TimeoutError, OSError) as error:
            if isinstance(error, LogError):
                raise
            if isinstance(error, nats.js.errors.APIError) and error.description:
                raise LogError(f"{self.login.url} refuses: {error.description}") from None
            raise LogError(
                self.trouble
                or f"{self.login.url} did not answer in {timeout_s:.0f} s ({_words(error)})"
            ) from None

    def subscribe(self, subject: str, receive: Callable[[Msg], None]) -> None:
        """Call `receive` with every message, on the connection's thread; outlasts reconnects."""

        async def work(client: Client) -> None:
            async def receive_soon(message: Msg) -> None:
                receive(message)

            await client.subscribe(subject, cb=receive_soon)
            await client.flush()  # from here on nothing is missed

        self.call(work)

    def publish(self, subject: str, content: bytes) -> None:
        """Send without an answer; lost if there is no connection."""

        async def work(client: Client) -> None:
            await client.publish(subject, content)

        if not self.trouble:
            self.call(work)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        if self._client.options:  # it began to connect, and has something to close
            # what was worth sending is acknowledged
            with suppress(nats.errors.Error, TimeoutError, OSError):
                self._run(self._client.close(), 5)
        with suppress(TimeoutError, OSError):
            self._run(self._end_tasks(), 5)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    # The client's side

    def _live(self) -> None:
        """The thread's life: until it is stopped, and nothing is left undone."""
        self._loop.run_forever()
        with suppress(TimeoutError):
            self._loop.run_until_complete(self._end_tasks())

    async def _end_tasks(self) -> None:
        """Also those that nats-py begins while its others end, as one that was reconnecting does:
        what is left behind fails when it is collected, at some other time.
        """
        self._client.abandon()
        me = asyncio.current_task()
        async with asyncio.timeout(ENDING_S):
            while others := asyncio.all_tasks(self._loop) - {me}:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        self._client.abandon()

    def _run(self, coroutine: Awaitable[T], timeout_s: float) -> T:
        async def awaited() -> T:
            return await coroutine

        try:
            return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result(timeout_s)
        except CancelledError:
            raise LogError(
                f"the connection of {self.login.name} to {self.login.url} was closed"
            ) from None

    async def _unless_refused(self, work: Awaitable[T]) -> T:
        """What the server refuses, it never answers: its word for it comes by another way, and ends
        the wait.
        """
        refused: asyncio.Future[LogError] = self._loop.create_future()
        self._under_way.add(refused)
        task = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {task, refused}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        self._under_way.discard(refused)
        # where both came, the refusal says why the work failed
        if task.done() and (not refused.done() or task.exception() is None):
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise refused.result()

    async def _connect(self, patience_s: float) -> None:
        deadline, num_tries = Deadline(self.clock, patience_s), 0
        while True:
            try:
                first = num_tries % self._num_servers
                num_tries += 1
                await self._unless_refused(self._connect_once(first))
                return
            except (nats.errors.Error, OSError, TimeoutError) as error:
                self._client.abandon()
                # one that takes in a new configuration hangs up on who is about to come in
                if isinstance(error, LogError) and not isinstance(error, HungUpError):
                    raise
                if deadline.passed and num_tries >= self._num_servers:
                    told = isinstance(error, (nats.errors.NoServersError, HungUpError))
                    why = self._said if told and self._said else _words(error)
                    raise LogError(
                        f"cannot reach {self.login.url}: {why}; is the hub running, and its port "
                        "open from here?"
                    ) from None
                await asyncio.sleep(RECONNECT_WAIT_S)

    async def _connect_once(self, first: int) -> None:
        """`first`: which server to dial before all others."""
        self._client = SturdyClient()
        urls = self.login.urls
        options: dict[str, Any] = {"nkeys_seed_str": self.login.seed} if self.login.seed else {}
        if self.login.secure:
            options |= {
                "tls": await asyncio.to_thread(_trusted, self.login),
                "tls_handshake_first": True,
            }
        await asyncio.wait_for(
            self._client.connect(
                [*urls[first:], *urls[:first]],
                name=self.login.name,
                inbox_prefix=self.login.inbox,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnect,
                reconnected_cb=self._on_reconnect,
                closed_cb=self._on_disconnect,
                connect_timeout=5,
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0,
                dont_randomize=True,
                ping_interval=PING_S,
                **options,
            ),
            10,
        )
        # nats-py takes a server that hangs up before it answers, as one may that takes in a new
        # configuration, for one that has let it in
        await self._client.flush()
        self._lost_at_s, self._said = None, ""  # of tries before
        # The first time it fails at once and says why; from here on it tries for ever.
        self._client.options |= {
            "allow_reconnect": True,
            "max_reconnect_attempts": -1,
            "reconnect_time_wait": RECONNECT_WAIT_S,
        }

    async def _on_error(self, error: Exception) -> None:
        self._said = _words(error)
        if "authorization violation" in self._said.lower():
            self._refused_by.add(self._dialled())
        refusal: LogError | None = None
        if self.shut_out:
            refusal = NotAdmittedError(
                f"{self.login.url} does not know the key of {self.login.name}"
            )
        elif "permissions violation" in self._said.lower():
            refusal = LogError(f"{self.login.url} refuses: {self._said}")
        if refusal:
            self._end_under_way(refusal)

    def _end_under_way(self, error: LogError) -> None:
        for waiting in self._under_way:
            if not waiting.done():
                waiting.set_result(error)

    async def _on_disconnect(self) -> None:
        if self._lost_at_s is None:
            self._lost_at_s = self.clock.elapsed_s()
        self._end_under_way(HungUpError(self.trouble))  # its answers will not come any more

    def _dialled(self) -> str:
        current = self._client._current_server
        return current.uri.netloc if current else ""

    async def _on_reconnect(self) -> None:
        self._refused_by.clear()
        for tell in self.on_reconnect:
            tell()
        self._lost_at_s, self._said = None, ""


def _trusted(login: Login) -> ssl.SSLContext:
    """The public authorities, or with a fingerprint exactly the certificate that has it."""
    if not login.certificate:
        return ssl.create_default_context()
    url, shown = _shown(login.urls)
    fingerprint = hashlib.sha256(ssl.PEM_cert_to_DER_cert(shown)).hexdigest()
    if fingerprint != login.certificate:
        raise LogError(
            f"{url} shows a certificate with sha256 {fingerprint}, and the invitation names "
            f"{login.certificate}; somebody else may be answering: ask the hub's owner"
        )
    context = ssl.create_default_context(cadata=shown)
    # an issued one is enough by itself, too
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # the fingerprint names the very certificate
    return context


def _shown(urls: Sequence[str]) -> tuple[str, str]:
    """The first server that answers, and its certificate, which is that of all."""
    failed: list[OSError] = []
    for url in urls:
        place = urlparse(url)
        try:
            at = (place.hostname or "", place.port or 4222)
            return url, ssl.get_server_certificate(at, timeout=5)
        except OSError as error:
            failed.append(error)
    raise failed[0]


def urls_of(given: str) -> list[str]:
    """The servers of an address, which has commas between several."""
    domain_of(given)
    urls = [url.strip() for url in given.partition("?")[0].split(",") if url.strip()]
    if not urls or len({url.startswith("tls:") for url in urls}) != 1:
        raise ValueError(
            f"{given!r} is no address of a server; expected nats://HOST:PORT or tls://HOST:PORT, "
            "or several of one kind with commas between"
        )
    return urls


def domain_of(given: str) -> str:
    """What an address says behind its servers: ...?domain=NAME."""
    asked = given.partition("?")[2]
    domain = asked.removeprefix("domain=")
    if asked and (domain == asked or not _DOMAIN.fullmatch(domain)):
        raise ValueError(
            f"{given!r} has {asked!r} behind its question mark; expected domain=NAME, the domain "
            "of JetStream that the crew's server is in"
        )
    return domain


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
