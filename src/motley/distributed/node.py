"""Node: a server of a hub's cluster on a machine of its own, started from the file that the hub
wrote for it.

It knows no log and decides nothing: it runs its server, and follows the hub's word on who may do
what.

NODE/node.json     the hub's file, as it came last
NODE/rights.json   the newest word that was heard
NODE/server/       the server's configuration and data
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from motley.clock import Clock, Deadline, RealClock
from motley.distributed.nodes import NodeFile
from motley.distributed.register import Say
from motley.distributed.rights import Board, Rights
from motley.exchange import LogError
from motley.exchange.nats.cluster import Cluster, NodePass
from motley.exchange.nats.connection import Connection, Login
from motley.exchange.nats.server import Server
from motley.files import hold, read_json, replace

LOOK_S = 1.0  # between two looks for a newer word
OTHERS_S = 3.0  # how long others are sought before the own server starts
SAID_AGAIN_S = 60.0


class KnownRights(msgspec.Struct, frozen=True):
    """A hub's word, and its number, which grows; 0: that of the file."""

    number: int
    rights: Rights


class FarNode:
    def __init__(
        self,
        given: NodeFile,
        folder: Path,
        say: Say = lambda text: None,
        clock: Clock = RealClock(),
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        """`certificate`: what peers are shown here, instead of what the hub gave."""
        folder.mkdir(parents=True, exist_ok=True)
        lock = hold(folder / "node.lock")
        if lock is None:
            raise ValueError(f"a node is already running in {folder}; stop it first")
        self._lock, self._given, self._folder = lock, given, folder
        self._say, self._clock = say, clock
        me = given.me
        self.server = Server(
            given.crew,
            folder / "server",
            me.host,
            me.port,
            certificate or _shown(given, folder / "shown"),
            clock,
            Cluster(given.crew, me, given.nodes, _pass(given, folder / "pass")),
        )
        self._heard = _kept(given, folder)
        self._connection: Connection | None = None  # while nobody answers
        self._next = self._again = Deadline(clock, 0.0)
        self._complained = False  # since the hub was heard

    def start(self) -> None:
        """Hear what is new before anybody is let in, if another node can be asked."""
        with suppress(LogError), closing(self._connect(OTHERS_S)) as connection:
            self._hear(connection)
        self._configure()
        if self.server.start():
            self._say("took over the server that was left running")

    def tick(self, timeout_s: float = 0.2) -> None:
        """Bring the server back if it died, and follow the hub's word."""
        if not self.server.alive():
            self._say("the server died; starting it again")
            try:
                self.server.start()
            except ValueError as error:  # something took its port for a moment, perhaps
                self._say(str(error))
        if self._next.passed:
            self._next = Deadline(self._clock, LOOK_S)
            self._follow()
        self._clock.sleep_s(timeout_s)

    def close(self) -> None:
        if self._connection:
            self._connection.close()
        self.server.stop()
        os.close(self._lock)

    def _follow(self) -> None:
        try:
            self._connection = self._connection or self._connect(OTHERS_S)
            if self._hear(self._connection):
                self._configure()
                self.server.reload()
            if self._complained:
                self._complained = False
                self._say("the hub's word is heard again")
        except LogError as error:
            if self._connection and self._connection.shut_out:  # for good
                self._connection.close()
                self._connection = None
            if self._again.passed:
                self._again = Deadline(self._clock, SAID_AGAIN_S)
                self._complained = True
                self._say(f"the hub's word on who may come in cannot be heard: {error}")

    def _hear(self, connection: Connection) -> bool:
        """Whether there is a newer word. Another node may be behind, and say an older one."""
        newest = Board(connection, self._given.crew).newest(self._given.hub)
        if newest is None or newest[0] <= self._heard.number:
            return False
        self._heard = KnownRights(*newest)
        content = msgspec.json.encode(self._heard)
        replace(self._folder / "rights.json", content, mode=0o600)
        return True

    def _connect(self, patience_s: float) -> Connection:
        given = self._given
        return Connection(Login(given.url, "node", given.seed, given.pin), patience_s, self._clock)

    def _configure(self) -> None:
        rights = self._heard.rights
        self.server.configure(rights.hub, rights.users, rights.learners, rights.nodes)


def _kept(given: NodeFile, folder: Path) -> KnownRights:
    """The newest word that is here: of the file, if that is another than the last one."""
    path, content = folder / "node.json", msgspec.json.encode(given)
    is_other = not path.exists() or path.read_bytes() != content
    replace(path, content, mode=0o600)
    if is_other or not (folder / "rights.json").exists():
        (folder / "rights.json").unlink(missing_ok=True)
        return KnownRights(0, given.rights)
    return read_json(
        folder / "rights.json", KnownRights, "delete it: the hub's word is heard again"
    )


def _pass(given: NodeFile, folder: Path) -> NodePass:
    folder.mkdir(exist_ok=True)
    authority, certificate, key = (folder / name for name in ("authority.pem", "node.pem", "key"))
    replace(authority, given.authority.encode())
    replace(certificate, given.certificate.encode())
    replace(key, given.key.encode(), mode=0o600)
    return NodePass(authority, certificate, key, given.secret)


def _shown(given: NodeFile, folder: Path) -> tuple[Path, Path] | None:
    if given.shown is None:
        return None
    folder.mkdir(exist_ok=True)
    certificate, key = folder / "certificate.pem", folder / "certificate.key"
    replace(certificate, given.shown[0].encode())
    replace(key, given.shown[1].encode(), mode=0o600)
    return certificate, key
