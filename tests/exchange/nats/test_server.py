from __future__ import annotations

import asyncio
import datetime
import json
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Event, Thread
from typing import Any, Self

import nats.errors
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from nats.aio.client import Client
from nats.aio.msg import Msg

from fakes import identity
from hubs import PATIENCE_S
from motley.clock import VirtualClock
from motley.exchange import Entry, LogError
from motley.exchange.nats.accounts import invited_user, peer_user
from motley.exchange.nats.connection import Connection, Login, NotAdmittedError
from motley.exchange.nats.log import NatsLog
from motley.exchange.nats.names import Names
from motley.exchange.nats.server import Server, fingerprint, free_port, self_signed
from motley.records import HUB

from ..nats_server import CREW, Net, eventually, in_time, settle

NAMES = Names(CREW)


# Life


def is_up(server: Server) -> bool:
    try:
        socket.create_connection((server.host, server.port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(CREW, tmp_path / "server", "127.0.0.1", free_port())
    made.configure(identity(HUB).nkey, [])
    yield made
    made.stop()


def test_a_server_starts_and_stops(server: Server) -> None:
    assert not server.alive()
    assert server.start() is False
    assert server.alive()
    assert is_up(server)
    server.stop()
    assert not server.alive()
    assert not is_up(server)
    server.stop()
    assert server.start() is False


def test_only_its_owner_may_read_the_configuration(server: Server) -> None:
    assert stat.S_IMODE((server.folder / "server.json").stat().st_mode) == 0o600


def test_a_second_start_takes_the_running_server_over(server: Server) -> None:
    server.start()
    other = Server(CREW, server.folder, server.host, server.port)
    assert other.start() is True
    assert other.alive()
    other.stop()
    assert not other.alive()
    assert not server.alive()


START = """
import sys, time
from pathlib import Path
from motley.exchange.nats.server import Server
server = Server(sys.argv[1], Path(sys.argv[2]), "127.0.0.1", int(sys.argv[3]))
print(server.start(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_a_server_outlives_who_started_it_and_is_taken_over_with_its_connections(
    tmp_path: Path,
) -> None:
    net = Net(tmp_path / "server")
    net.admit()
    command = [sys.executable, "-c", START, CREW, str(net.server.folder), str(net.server.port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        assert starter.stdout.readline() == "False\n"
        hub = net.connect(HUB)
        starter.send_signal(signal.SIGKILL)
    try:
        assert net.server.alive()
        newcomer = peer_user(CREW, "c", identity("c").nkey)
        net.admit(newcomer)
        assert net.server.start() is True
        eventually(lambda: admitted(net, "c"))
        assert hub.trouble == ""
        assert num_reconnects(hub) == 0
    finally:
        net.close()
    assert not net.server.alive()
    assert not is_up(net.server)


def test_a_server_that_was_killed_is_started_again_not_taken_over(server: Server) -> None:
    server.start()
    server.kill()
    eventually(lambda: not server.alive())
    assert server.start() is False
    assert is_up(server)


def test_a_server_that_dies_with_much_to_say_is_noticed(server: Server) -> None:
    server.start()
    with ExitStack() as held:
        for _ in range(200):  # each has a part in what it says
            address = (server.host, server.port)
            held.enter_context(socket.create_connection(address, timeout=PATIENCE_S))
        server.kill(signal.SIGQUIT)
        eventually(lambda: not server.alive())
    assert "goroutine" in (server.folder / "server.err").read_text()
    assert server.start() is False
    assert is_up(server)


def test_a_port_in_use_is_an_error_with_a_remedy(server: Server) -> None:
    with socket.socket() as other:
        other.bind((server.host, server.port))
        other.listen()
        with pytest.raises(ValueError, match=rf"127\.0\.0\.1:{server.port}.*choose another --port"):
            server.start()
    assert not server.alive()


def test_a_server_that_cannot_start_says_why(server: Server) -> None:
    (server.folder / "server.json").write_text('{"no_such_key": 1}')
    with pytest.raises(ValueError, match=r"did not start on .*no_such_key"):
        server.start()
    assert not server.alive()


def test_a_free_port_can_be_listened_on() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))


# Who is let in


def admitted(net: Net, name: str) -> bool:
    try:
        net.connect(name, patience_s=1)
    except NotAdmittedError:
        return False
    return True


def num_reconnects(connection: Connection) -> int:
    return connection._client.stats["reconnects"]


def test_an_unknown_key_is_not_admitted_and_hears_so_at_once(net: Net) -> None:
    with pytest.raises(NotAdmittedError, match=f"{net.url} does not know the key of stranger"):
        in_time(lambda: net.connect("stranger", patience_s=10 * PATIENCE_S))
    with pytest.raises(NotAdmittedError):
        net.connect("a", key=identity("stranger"))
    with pytest.raises(NotAdmittedError):
        Connection(Login(net.url, "a"))


def test_a_refusal_counts_though_the_attempt_fails_at_the_same_moment(net: Net) -> None:
    connection = net.connect("a")

    async def refused() -> None:
        await connection._on_error(nats.errors.Error("nats: 'Authorization Violation'"))
        raise nats.errors.NoServersError

    with pytest.raises(NotAdmittedError):
        connection._run(connection._unless_refused(refused()), 5)


@pytest.mark.slow
def test_where_nobody_listens_a_connection_fails_after_its_patience() -> None:
    clock = SteppingClock(0.1)
    with pytest.raises(
        LogError,
        match=r"cannot reach nats://127\.0\.0\.1:\d+: .*Connect call failed.*is the hub running",
    ):
        Connection(
            Login(f"nats://127.0.0.1:{free_port()}", "a", identity("a").nkey_seed),
            patience_s=0.5,
            clock=clock,
        )
    assert clock.now_s() > 0.5


class SteppingClock(VirtualClock):
    """So many seconds pass between two looks at it."""

    def __init__(self, step_s: float) -> None:
        super().__init__()
        self._step_s = step_s

    def elapsed_s(self) -> float:
        self.sleep_s(self._step_s)
        return super().elapsed_s()


@pytest.mark.slow
def test_a_connection_waits_for_a_server_that_comes_up_in_time(tmp_path: Path) -> None:
    net = Net(tmp_path / "server")
    net.admit()
    command = [sys.executable, "-c", START, CREW, str(net.server.folder), str(net.server.port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as starter:
        try:
            assert net.connect("a", patience_s=PATIENCE_S).trouble == ""
        finally:
            starter.kill()
            net.close()


def test_reloading_lets_peers_in_and_shuts_them_out_without_disturbing_others(net: Net) -> None:
    hub, a, b = net.connect(HUB), net.log("a"), net.log("b")
    net.admit(peer_user(CREW, "c", identity("c").nkey))
    net.server.reload()
    eventually(lambda: admitted(net, "c"))
    net.users = [user for user in net.users if user.nkey != identity("b").nkey]
    net.admit()
    net.server.reload()
    eventually(lambda: b.connection.shut_out)
    for call in (lambda: b.read(0), lambda: b.append([("b.0.0", b"x")])):
        with pytest.raises(LogError, match=f"no connection to {net.url} .*Authorization Violation"):
            call()
    assert not admitted(net, "b")
    eventually(lambda: not admitted(net, "c"))
    assert hub.trouble == a.connection.trouble == ""
    assert num_reconnects(hub) == num_reconnects(a.connection) == 0
    eventually(lambda: appended(a, "a.0.0"))


def appended(log: NatsLog, id: str) -> bool:
    """A record, or its answer, may be lost while the server takes in a configuration."""
    try:
        log.append([(id, b"x")])
    except LogError:
        return False
    return True


# Rights


def refused(connection: Connection, work: Callable[[Client], Coroutine[Any, Any, Any]]) -> str:
    """What the server says to something that it answers with nothing else."""
    client, said = connection._client, []
    usual = client._error_cb

    async def listen(error: Exception) -> None:
        said.append(str(error))

    async def work_and_hear(client: Client) -> None:
        await work(client)
        await settle(client)

    client._error_cb = listen
    try:
        connection.call(work_and_hear)
    finally:
        client._error_cb = usual
    return "; ".join(said)


def publish(connection: Connection, subject: str, content: bytes = b"", reply: str = "") -> str:
    """Send; what the server says against it."""
    return refused(connection, lambda client: client.publish(subject, content, reply))


def subscribe(connection: Connection, subject: str, queue: str = "") -> str:
    return refused(connection, lambda client: client.subscribe(subject, queue))


COMMANDS = {
    "$JS.API.STREAM.DELETE.motley-crew": {},
    "$JS.API.STREAM.PURGE.motley-crew": {},
    "$JS.API.STREAM.MSG.DELETE.motley-crew": {"seq": 1},
    "$JS.API.STREAM.UPDATE.motley-crew": {
        "name": "motley-crew",
        "subjects": ["motley.crew.log.>"],
        "storage": "file",
        "max_msgs_per_subject": 1,
        "discard": "new",
        "discard_new_per_subject": True,
        "max_msgs": 1000,
        "allow_direct": True,
    },
    "$JS.API.STREAM.CREATE.other": {"name": "other", "subjects": ["other.>"]},
    "$JS.API.CONSUMER.CREATE.motley-crew.spy": {
        "stream_name": "motley-crew",
        "config": {"name": "spy", "ack_policy": "none"},
    },
    "$JS.API.CONSUMER.CREATE.motley-crew": {
        "stream_name": "motley-crew",
        "config": {"deliver_subject": "motley.crew.bell.spy", "ack_policy": "none"},
    },
    "$JS.API.CONSUMER.DURABLE.CREATE.motley-crew.spy": {
        "stream_name": "motley-crew",
        "config": {"durable_name": "spy", "ack_policy": "explicit"},
    },
    "$JS.API.STREAM.SNAPSHOT.motley-crew": {"deliver_subject": "motley.crew.bell.spy"},
    "$JS.API.STREAM.INFO.motley-crew": {},
    "$JS.API.INFO": {},
    "$SYS.REQ.SERVER.PING": {},
    "$SYS.REQ.USER.INFO": {},
}
OTHERS_SUBJECTS = [
    "motley.crew.log.b.0.0",
    "motley.crew.log.hub.roster.9",
    "motley.crew.log.ab.0",
    "motley.crew.log.a",
    "motley.crew.log.a.0",
    "motley.crew.log.a.0.0.0.0",
    "motley.crew.log",
    "motley.other.log.a.0",
    "motley.crew.bell.a.0",
    "motley.crew.presence.b",
    "motley.crew.presence.hub",
    "motley.crew.enrol.a",
    "motley.crew.enrol.b",
    "motley.crew.control",
    "_INBOX.b.guess",
    "_INBOX.hub.guess",
    "_R_.guess",
]
NOT_TO_BE_HEARD = [
    ">",
    "*.>",
    "motley.>",
    "motley.crew.>",
    "motley.crew.log.>",
    "motley.crew.log.a.>",
    "motley.crew.log.b.>",
    "motley.crew.bell.>",
    "motley.crew.presence.*",
    "motley.crew.presence.b",
    "motley.crew.enrol.*",
    "motley.crew.control",
    "_INBOX.>",
    "_INBOX.*.>",
    "_INBOX.b.>",
    "_INBOX.hub.>",
    "_INBOX.ab.>",
    "_INBOX.invited-b.>",
    "$JS.>",
    "$JS.API.DIRECT.GET.motley-crew",
    "$SYS.>",
    "_R_.>",
]


class Watch:
    """What the hub sees of the server: its streams, all that is on the log, and what arrives for
    the hub itself.
    """

    def __init__(self, net: Net) -> None:
        self.log = net.log(HUB)
        self.heard: list[str] = []
        for subject in (NAMES.enrolment("*"), NAMES.control):
            self.log.connection.subscribe(
                subject, lambda message: self.heard.append(message.subject)
            )
        self.log.connection.call(settle)

    def streams(self) -> list[Any]:
        async def work(client: Client) -> list[Any]:
            found = await client.jetstream().streams_info()
            return [
                (
                    info.config.as_dict(),
                    info.state.messages,
                    info.state.last_seq,
                    info.state.consumer_count,
                )
                for info in found
                if info.config.name != NAMES.presence_stream  # which changes all the time
            ]

        return self.log.connection.call(work)

    def all(self) -> tuple[list[Any], list[Entry], list[str]]:
        return self.streams(), self.log.read(0), self.heard


@pytest.fixture
def watch(net: Net) -> Watch:
    made = Watch(net)
    made.log.append([("hub.charter", b"the charter"), ("b.0.1", b"of b")])
    return made


def test_a_peer_writes_under_its_own_name_only(net: Net, watch: Watch) -> None:
    before = watch.all()
    a = net.log("a")
    for subject in [*OTHERS_SUBJECTS, *COMMANDS]:
        said = publish(a.connection, subject, json.dumps(COMMANDS.get(subject, {})).encode())
        assert "permissions violation for publish" in said, subject
    for id in ("b.0.0", "b.table", "hub.roster.9"):
        with pytest.raises(LogError, match="permissions violation"):
            a.append([(id, b"forged")])
    assert watch.all() == before
    a.append([("a.table", b"mine"), ("a.0.0", b"mine")])
    assert watch.log.read(0)[len(before[1]) :] == [
        Entry(3, "a.table", b"mine"),
        Entry(4, "a.0.0", b"mine"),
    ]


def test_a_peer_hears_its_own_answers_and_nothing_else(net: Net) -> None:
    a = net.connect("a")
    for subject in NOT_TO_BE_HEARD:
        for queue in ("", "all"):
            assert "permissions violation for subscription" in subscribe(a, subject, queue), subject
    assert subscribe(a, "_INBOX.a.>") == ""


@pytest.mark.slow
def test_nothing_can_be_done_by_having_the_server_answer_to_a_forbidden_subject(
    net: Net, watch: Watch
) -> None:
    """The server answers on any reply subject, and the content of the answer can be any record of
    one's own.
    """
    a = net.log("a")
    # that one is refused
    targets = [*COMMANDS, *(subject for subject in OTHERS_SUBJECTS if subject != "_R_.guess")]
    a.append(
        [
            (f"a.0.{number}", json.dumps(COMMANDS.get(target, {})).encode())
            for number, target in enumerate(targets)
        ]
    )
    before = watch.all()
    first = before[1][-1].position - len(targets) + 1
    for number, target in enumerate(targets):
        for wanted in (
            {"seq": first + number},
            {"seq": first + number, "batch": 3},
            {"last_by_subj": NAMES.record(f"a.0.{number}")},
            {},
        ):
            publish(a.connection, NAMES.direct_get, json.dumps(wanted).encode(), reply=target)
        publish(
            a.connection,
            NAMES.presence("a"),
            json.dumps(COMMANDS.get(target, {})).encode(),
            reply=target,
        )
        publish(a.connection, NAMES.record("a.0.0"), b"there already", reply=target)
    assert a.read(0) == before[1]
    assert watch.all() == before
    for number, target in enumerate(targets):
        publish(
            a.connection,
            NAMES.record(f"a.1.{number}"),
            json.dumps(COMMANDS.get(target, {})).encode(),
            reply=target,
        )
    a.append([("a.2.0", b"behind all of it")])
    streams, entries, heard = watch.all()
    assert [entry.id for entry in entries[len(before[1]) :]] == [
        *(f"a.1.{number}" for number in range(len(targets))),
        "a.2.0",
    ]
    assert [(config, consumers) for config, _, _, consumers in streams] == [
        (config, consumers) for config, _, _, consumers in before[0]
    ]
    assert heard == []


ACTING_HEADERS = {
    "roll up everything": {"Nats-Rollup": "all"},
    "roll up the subject": {"Nats-Rollup": "sub"},
    "vanish": {"Nats-TTL": "1s"},
    "write later": {
        "Nats-Schedule": "@at 2020-01-01T00:00:00Z",
        "Nats-Schedule-Target": "motley.crew.log.b.9.9",
    },
    "count": {"Nats-Incr": "+1"},
    "batch": {"Nats-Batch-Id": "x", "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1"},
    **{
        f"trace to {target}": {"Nats-Trace-Dest": target}
        for target in ("motley.crew.log.b.9.9", "motley.crew.control", *COMMANDS)
    },
    "trace only": {"Nats-Trace-Dest": "motley.crew.log.b.9.9", "Nats-Trace-Only": "true"},
}


def test_no_header_of_a_record_does_more_than_write_it(net: Net, watch: Watch) -> None:
    a = net.log("a")
    a.append([("a.0.0", b"of a")])
    (before, *_), entries, _ = watch.all()
    for number, headers in enumerate(ACTING_HEADERS.values()):
        refused(
            a.connection,
            lambda client, headers=headers: client.publish(
                "motley.crew.log.a.0.0", b"again", headers=headers
            ),
        )
        record = f"motley.crew.log.a.1.{number}"
        refused(
            a.connection,
            lambda client, record=record, headers=headers: client.publish(
                record, b"new", headers=headers
            ),
        )
    a.append([("a.2.0", b"behind all of it")])
    (after, *more), found, heard = watch.all()
    assert found[: len(entries)] == entries
    assert {entry.id.split(".")[0] for entry in found[len(entries) :]} == {"a"}
    assert (after[0], after[3], more, heard) == (before[0], before[3], [], [])


def test_an_invitations_key_can_enrol_and_nothing_else(net: Net, watch: Watch) -> None:
    watch.log.append([("a.0.0", b"of a")])
    before = watch.all()
    net.admit(invited_user(CREW, "c", identity("guest").nkey))
    net.server.reload()
    eventually(lambda: any_connection(net, "invited-c", "guest"))
    guest = net.connections[-1]
    for subject in [
        *OTHERS_SUBJECTS,
        *COMMANDS,
        NAMES.direct_get,
        "motley.crew.log.c.0.0",
        "motley.crew.presence.c",
    ]:
        assert "permissions violation for publish" in publish(guest, subject), subject
    for subject in [
        *NOT_TO_BE_HEARD,
        "_INBOX.a.>",
        "_INBOX.c.>",
    ]:
        assert "permissions violation for subscription" in subscribe(guest, subject), subject
    assert watch.all() == before

    answering = net.connect(HUB)

    def answer(message: Msg) -> None:
        answering._loop.create_task(message.respond(b"answer to " + message.data))

    answering.subscribe(NAMES.enrolment("*"), answer)
    answering.call(settle)

    def asked() -> bytes:
        """Answers can get lost while the server takes in its new configuration."""
        with suppress(LogError):
            return guest.call(lambda client: client.request(NAMES.enrolment("c"), b"c", 2)).data
        return b""

    assert eventually(asked) == b"answer to c"
    eventually(lambda: len(watch.heard) > 0)
    asked_before = len(watch.heard)
    for target in ("motley.crew.control", "motley.crew.log.c.0.0", *COMMANDS):
        publish(guest, NAMES.enrolment("c"), b"{}", reply=target)
    eventually(lambda: len(watch.heard) == asked_before + 2 + len(COMMANDS))
    assert watch.all()[:2] == before[:2]
    assert set(watch.heard) == {NAMES.enrolment("c")}


def any_connection(net: Net, name: str, key: str) -> bool:
    try:
        net.connect(name, identity(key))
    except NotAdmittedError:
        return False
    return True


# TLS


@pytest.fixture
def secure(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path / "server", self_signed(tmp_path / "tls", "127.0.0.1"))
    made.admit()
    made.server.start()
    yield made
    made.close()


def pinned(net: Net) -> str:
    assert net.server.certificate
    return fingerprint(net.server.certificate[0])


def test_a_self_signed_certificate_is_made_once_and_its_key_is_the_owners(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path / "tls", "example.org")
    content = certificate.read_bytes()
    assert self_signed(tmp_path / "tls", "example.org") == (certificate, key)
    assert certificate.read_bytes() == content
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(bytes.fromhex(fingerprint(certificate))) == 32


def test_with_the_certificates_fingerprint_everything_works(secure: Net) -> None:
    for name in (HUB, "a"):
        assert secure.connect(name, certificate=pinned(secure)).trouble == ""
    with pytest.raises(NotAdmittedError):
        secure.connect("stranger", certificate=pinned(secure))
    secure.kill()
    secure.restart()


def test_another_fingerprint_is_refused_and_both_are_named(secure: Net) -> None:
    wrong = "ab" * 32
    with pytest.raises(
        LogError,
        match=f"sha256 {pinned(secure)}, and the invitation names {wrong}; .*ask the hub's owner",
    ):
        in_time(lambda: secure.connect("a", certificate=wrong, patience_s=10 * PATIENCE_S))


@pytest.mark.slow
def test_without_a_fingerprint_only_public_authorities_count(secure: Net) -> None:
    with pytest.raises(LogError, match=r"cannot reach tls://.*certificate"):
        secure.connect("a", patience_s=0)


@pytest.mark.slow
def test_without_tls_a_server_with_tls_is_out_of_reach(secure: Net) -> None:
    with pytest.raises(LogError, match=r"cannot reach nats://"):
        Connection(
            Login(secure.url.replace("tls:", "nats:"), "a", identity("a").nkey_seed), patience_s=0.5
        )


def test_what_begins_while_a_connection_is_closed_is_ended_too(net: Net) -> None:
    connection = net.connect("a")
    loop, begun = connection._loop, Event()

    async def lingers() -> None:
        try:
            begun.set()
            await asyncio.sleep(PATIENCE_S)
        finally:
            asyncio.ensure_future(asyncio.sleep(PATIENCE_S))  # noqa: RUF006 - nobody keeps it

    asyncio.run_coroutine_threadsafe(lingers(), loop)
    assert begun.wait(PATIENCE_S)
    connection.close()
    assert loop.is_closed()
    assert not asyncio.all_tasks(loop)


class NoNats(StreamRequestHandler):
    """Says something else, and waits for the caller to go."""

    def handle(self) -> None:
        self.wfile.write(b"HELLO\r\n")
        self.rfile.read()


@pytest.mark.slow
def test_an_attempt_that_failed_leaves_no_socket_open() -> None:
    with ThreadingTCPServer(("127.0.0.1", 0), NoNats) as other:
        other.block_on_close = True  # until every caller has gone
        thread = Thread(target=other.serve_forever, daemon=True)
        thread.start()
        url = f"nats://127.0.0.1:{other.server_address[1]}"
        with pytest.raises(LogError, match="cannot reach"):
            Connection(Login(url, "a", identity("a").nkey_seed), patience_s=1)  # several attempts
        in_time(other.shutdown)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


class Busy(ThreadingTCPServer):
    """A server in name, which hangs up on its first callers after so many answers each."""

    def __init__(self, patience: list[int]) -> None:
        super().__init__(("127.0.0.1", 0), Impatient)
        self.daemon_threads = True
        self.patience = iter(patience)

    def __enter__(self) -> Self:
        Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)

    @property
    def login(self) -> Login:
        return Login(f"nats://127.0.0.1:{self.server_address[1]}", "a")


class Impatient(StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Busy)
        left = next(self.server.patience, None)
        self.wfile.write(b'INFO {"server_id": "busy", "max_payload": 1024}\r\n')
        with suppress(OSError):
            for line in self.rfile:
                if left == 0:
                    return
                if line.startswith(b"PING"):
                    self.wfile.write(b"PONG\r\n")
                    left = left and left - 1


@pytest.mark.slow
def test_who_is_hung_up_on_while_it_comes_in_tries_again() -> None:
    with Busy([0, 1]) as busy:
        connection = Connection(busy.login, patience_s=PATIENCE_S)
        assert next(busy.patience, None) is None
        assert connection.trouble == ""
        connection.close()


@pytest.mark.slow
def test_a_server_that_always_hangs_up_is_out_of_reach() -> None:
    with Busy([1] * 100) as busy, pytest.raises(LogError, match=r"cannot reach nats://.*EOF"):
        Connection(busy.login, patience_s=0.1)


@pytest.mark.slow
def test_with_tls_a_server_without_it_is_out_of_reach(net: Net) -> None:
    with pytest.raises(LogError, match=r"cannot reach tls://"):
        Connection(
            Login(net.url.replace("nats:", "tls:"), "a", identity("a").nkey_seed, "ab" * 32),
            patience_s=0.5,
        )


def issue(
    subject: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    """A certificate by an authority, or with its own key that of the authority."""
    now = datetime.datetime.now(datetime.UTC)
    names = [
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        for name in ("authority", subject)
    ]
    builder = x509.CertificateBuilder(
        names[0], names[1], key.public_key(), x509.random_serial_number()
    )
    builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
        now + datetime.timedelta(days=1)
    )
    builder = builder.add_extension(
        x509.BasicConstraints(ca=key is by, path_length=None), critical=True
    )
    return builder.sign(by, hashes.SHA256())


def write_certificates(path: Path, *certificates: x509.Certificate) -> Path:
    path.write_bytes(b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates))
    return path


def test_an_issued_certificate_can_be_pinned_too(tmp_path: Path) -> None:
    """The hub dials its own server so, whoever issued its certificate."""
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    certificate = write_certificates(tmp_path / "hub.pem", issue("hub", key, authority))
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (tmp_path / "hub.key").write_bytes(secret)
    net = Net(tmp_path / "server", (certificate, tmp_path / "hub.key"))
    net.admit()
    try:
        net.server.start()
        assert net.connect("a", certificate=fingerprint(certificate), patience_s=0).trouble == ""
    finally:
        net.close()


def test_the_fingerprint_of_a_file_with_a_chain_is_that_of_its_first_certificate(
    tmp_path: Path,
) -> None:
    authority, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    certificates = (issue("h" * length, key, authority) for length in range(1, 60))
    made = next(
        one for one in certificates if len(one.public_bytes(serialization.Encoding.DER)) % 3 == 0
    )
    chain = write_certificates(
        tmp_path / "chain.pem", made, issue("authority", authority, authority)
    )
    assert fingerprint(chain) == made.fingerprint(hashes.SHA256()).hex()


def test_a_pinned_certificate_holds_under_the_stricter_rules_of_later_pythons(
    secure: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = ssl.create_default_context

    def strict(**options: Any) -> ssl.SSLContext:
        context = usual(**options)
        # the default from 3.13 on
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN | ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    assert secure.connect("a", certificate=pinned(secure), patience_s=0).trouble == ""


def test_no_server_of_these_tests_is_left_behind(tmp_path: Path) -> None:
    net = Net(tmp_path / "server").start()
    pid = net.server._pid()
    net.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
