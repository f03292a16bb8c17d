"""Real servers for tests: on this machine, on free ports, gone when the test is over.

And waiting without sleeping longer than needed.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

from nats.aio.client import Client

from fakes import identity
from hubs import PATIENCE_S
from motley.exchange import Entry, LogError
from motley.exchange.nats.accounts import User, invited_user, peer_user
from motley.exchange.nats.blobs import NatsBlobs, create_bucket
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.log import NatsLog, create_stream
from motley.exchange.nats.presence import create_presence
from motley.exchange.nats.server import Server, _binary, free_port
from motley.records import HUB
from motley.trust import Identity

CREW = "crew"
T = TypeVar("T")


def eventually(find: Callable[[], T], within_s: float = PATIENCE_S) -> T:
    """The first answer that is true."""
    stop = time.monotonic() + within_s
    while not (found := find()):
        assert time.monotonic() < stop, f"not within {within_s} s"
        time.sleep(0.005)
    return found


def read_all(log: NatsLog) -> list[Entry]:
    found: list[Entry] = []
    while page := log.read(found[-1].position if found else 0):
        found += page
    return found


def refused(log: NatsLog, id: str) -> bool:
    """Whether this user may not write; other faults pass while the server takes in new rights."""
    try:
        log.append([(id, b"x")])
    except LogError as error:
        return "permissions violation" in str(error)
    return False


def in_time(work: Callable[[], T]) -> T:
    """Do it in another thread, and see that it ends."""
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - for who waits
            future.set_exception(error)

    threading.Thread(target=do, daemon=True).start()  # one that hangs does not hold up the rest
    return future.result(PATIENCE_S)


class Net:
    """A hub's server with peers a and b, and who is connected to it."""

    def __init__(self, folder: Path, certificate: tuple[Path, Path] | None = None) -> None:
        self.server = Server(CREW, folder, "127.0.0.1", free_port(), certificate)
        self.url = f"{'tls' if certificate else 'nats'}://127.0.0.1:{self.server.port}"
        self.users = [peer_user(CREW, peer, identity(peer).nkey) for peer in ("a", "b")]
        self.learners: list[str] = []  # with a bucket
        self.vacant = [
            *(peer_user(CREW, peer, "") for peer in ("a", "b", "c")),
            *(peer_user(CREW, "e", "", learner=True), peer_user(CREW, "f", "", follows="e")),
            invited_user(CREW, "c", ""),
        ]
        self.connections: list[Connection] = []

    def start(self, *others: User) -> Net:
        self.admit(*others)
        self.server.start()
        create_stream(self.connect(HUB), CREW)
        create_presence(self.connections[0], CREW)
        for learner in self.learners:
            create_bucket(self.connections[0], CREW, learner)
        return self

    def follow(self, followed: dict[str, str]) -> Net:
        """Before the start: samplers that follow learners, instead of a and b."""
        self.learners = sorted(set(followed.values()))
        self.users = [
            *(peer_user(CREW, name, identity(name).nkey, learner=True) for name in self.learners),
            *(
                peer_user(CREW, name, identity(name).nkey, follows=learner)
                for name, learner in followed.items()
            ),
        ]
        return self

    def admit(self, *others: User) -> None:
        """Write who may come in; for a running server, `reload` makes it count.

        All that ever come have their accounts from the start.
        """
        users = {user.account: user for user in (*self.vacant, *self.users, *others)}
        self.server.configure(identity(HUB).nkey, list(users.values()), [*self.learners, "e"])

    def connect(
        self,
        name: str,
        key: Identity | None = None,
        certificate: str = "",
        patience_s: float = 10.0,
    ) -> Connection:
        made = Connection(
            Login(self.url, name, (key or identity(name)).nkey_seed, certificate), patience_s
        )
        self.connections.append(made)
        return made

    def log(self, name: str) -> NatsLog:
        return NatsLog(self.connect(name), CREW)

    def blobs(self, name: str, learner: str) -> NatsBlobs:
        return NatsBlobs(self.connect(name), CREW, learner)

    def kill(self) -> None:
        """Kill -9, and see that it is dead and everyone has noticed."""
        self.server.kill()
        eventually(lambda: not self.server.alive())
        for connection in self.connections:
            eventually(lambda connection=connection: connection.trouble)

    def restart(self) -> None:
        assert not self.server.start()
        self.all_back()
        if self.connections and self.connections[0].login.name == HUB:
            create_presence(self.connections[0], CREW)  # as a hub does

    def all_back(self) -> None:
        for connection in self.connections:
            eventually(lambda connection=connection: not connection.trouble)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        self.server.stop()


@contextmanager
def open_server(folder: Path) -> Iterator[str]:
    """The url of a JetStream server that knows no users: everybody may do everything."""
    port = free_port()
    command = [
        _binary(),
        "--jetstream",
        "--store_dir",
        str(folder),
        "--addr",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield f"nats://127.0.0.1:{port}"
    finally:
        child.kill()
        child.wait()


class OpenServers:
    """Servers that know no users, each with settings of its own, by name."""

    def __init__(self, folder: Path, settings: dict[str, dict[str, Any]]) -> None:
        self._folder, self._settings = folder, settings
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str) -> None:
        settings = {"server_name": name, "host": "127.0.0.1"} | self._settings[name]
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(settings))
        self._children[name] = subprocess.Popen(
            [_binary(), "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def kill(self, name: str) -> None:
        child = self._children.pop(name)
        child.kill()
        child.wait()

    def __enter__(self) -> Self:
        self._folder.mkdir()
        for name in self._settings:
            self.start(name)
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._children):
            self.kill(name)


class Regions(OpenServers):
    """One server with the streams, in the domain `near`, and a leaf node of it far away."""

    def __init__(self, folder: Path) -> None:
        near, far, link = free_port(), free_port(), free_port()
        self.near = f"nats://127.0.0.1:{near}"
        self.far = f"nats://127.0.0.1:{far}?domain=near"
        store = {"store_dir": str(folder / "jetstream"), "domain": "near"}
        remote = {"url": f"nats-leaf://127.0.0.1:{link}"}
        super().__init__(
            folder,
            {
                "near": {
                    "port": near,
                    "jetstream": store,
                    "leafnodes": {"host": "127.0.0.1", "port": link},
                },
                "far": {"port": far, "leafnodes": {"remotes": [remote]}},
            },
        )


class OpenCluster(OpenServers):
    """Three servers of one cluster: one, two and three."""

    def __init__(self, folder: Path) -> None:
        ports = {name: (free_port(), free_port()) for name in ("one", "two", "three")}
        self.url = ",".join(f"nats://127.0.0.1:{port}" for port, _ in ports.values())
        routes = [f"nats-route://127.0.0.1:{route}" for _, route in ports.values()]
        super().__init__(
            folder,
            {
                name: {
                    "port": port,
                    "jetstream": {"store_dir": str(folder / name)},
                    "cluster": {"name": "open", "host": "127.0.0.1", "port": route}
                    | {"routes": routes},
                }
                for name, (port, route) in ports.items()
            },
        )


async def settle(client: Client) -> None:
    """Have the server read all that was sent.

    The first ping may overtake what the client still holds; the second cannot.
    """
    await client.flush()
    await client.flush()


def send_raw(connection: Connection, protocol: bytes) -> None:
    """Have the server read these bytes, which a well-behaved client would not send."""

    async def work(client: Client) -> None:
        await settle(client)
        assert client._transport
        client._transport.write(protocol)
        await client.flush()

    connection.call(work)


def raw_message(
    subject: str | bytes, headers: bytes, content: bytes = b"x", reply: str | bytes = b""
) -> bytes:
    subject, reply = (part.encode() if isinstance(part, str) else part for part in (subject, reply))
    return b"HPUB %s %s %d %d\r\n%s%s\r\n" % (
        subject,
        reply,
        len(headers),
        len(headers) + len(content),
        headers,
        content,
    )
