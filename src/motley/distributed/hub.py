"""Hub: what one machine does for a crew of many: runs the server, founds the log, admits peers by
invitation and shuts them out.

It owns no model and decides nothing about learning; peers go on without it as long as its server
lives.

HUB/hub.key         the key that signs the charter and the rosters
HUB/hub.json        who is invited, enrolled, shut out
HUB/outbox.sqlite   the hub's own records
HUB/server/         the server's configuration, certificate and data
"""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec
from nats.aio.msg import Msg

from motley.config import CrewConfig, config_text, parse_config
from motley.exchange import LogError, Mark, Outbox, Signer
from motley.exchange.connection import Connection, Login
from motley.exchange.nats import Names, NatsLog, create_stream
from motley.exchange.objects import create_bucket
from motley.exchange.presence import Presence
from motley.exchange.server import Server, User, fingerprint, invited_user, peer_user
from motley.files import hold, replace
from motley.records import HUB, Charter, Roster
from motley.tasks import load_task
from motley.trust import Identity, nkey_of, verifies
from motley.trust.invitation import Enrolment, Invitation

START_S = 30.0

Say = Callable[[str], None]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the crew's server is."""

    url: str  # what peers dial
    host: str = ""  # where our own server listens; nothing: the server is somebody else's
    port: int = 0
    certificate: tuple[str, str] | None = None
    pinned: bool = False  # peers trust this very certificate, not the public authorities


class HubState(msgspec.Struct, kw_only=True):
    crew: str
    config: str
    place: Place
    invited: dict[str, bytes] = {}  # peer -> secret of the invitation's key
    keys: dict[str, bytes] = {}  # peer -> its public key
    revoked: list[str] = []
    number: int = 0  # of the newest roster


class Order(msgspec.Struct, frozen=True):
    """What `motley hub --revoke` and `--invite` ask of the running hub, signed with its key."""

    what: Literal["revoke", "invite"]
    peer: str
    at_s: float = 0.0  # only ever grows, so that none is carried out twice
    signature: bytes = b""

    def signed(self, crew: str) -> bytes:
        return b"motley order\n" + msgspec.msgpack.encode([crew, self.what, self.peer, self.at_s])


class Answer(msgspec.Struct, frozen=True):
    error: str = ""


class Hub:
    def __init__(self, folder: Path, state: HubState, say: Say) -> None:
        self.folder, self.state, self._say = folder, state, say
        lock = hold(folder / "hub.lock")
        if lock is None:
            raise ValueError(
                f"a hub is already running in {folder}; stop it first, or choose another folder "
                "with --out"
            )
        self._lock = lock
        self.identity = Identity.kept_at(folder / "hub.key")
        self._names = Names(state.crew)
        self._asked: queue.Queue[Msg] = queue.Queue()
        self._ordered_at_s = time.time()  # older orders are somebody's copies
        place = state.place
        certificate = (
            (Path(place.certificate[0]), Path(place.certificate[1])) if place.certificate else None
        )
        self.server = (
            Server(state.crew, folder / "server", place.host, place.port, certificate)
            if place.host
            else None
        )

    @classmethod
    def open(
        cls, config: CrewConfig, folder: Path, place: Place, say: Say = lambda text: None
    ) -> Hub:
        """The hub of a folder: as it was left, or new with an invitation for every peer."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "hub.json"
        if path.exists():
            state = read_state(folder)
            if parse_config(state.config) != config:
                raise ValueError(
                    f"{folder} holds the hub of a crew with other settings; choose another folder "
                    "with --out, or delete it"
                )
            moved, state.place = state.place != place, place
        else:
            moved = False
            invited = {peer.name: Identity.new().secret for peer in config.peer}
            state = HubState(
                crew=config.crew.name, config=config_text(config), place=place, invited=invited
            )
        hub = cls(folder, state, say)
        hub._keep()
        if moved and hub.server:
            hub.server.stop()  # one left running listens where the last hub was
        return hub

    # Life

    def start(self) -> None:
        """Bring up the server, the stream, the charter and the roster.

        What is there already stays.
        """
        self._outbox = Outbox(
            self.folder / "outbox.sqlite", Signer(self.identity.public, self.identity.sign)
        )
        stop = time.monotonic() + START_S
        while True:
            if self.server:
                self.server.configure(
                    self.identity.nkey, self._users() if self._settled else [], self._learners()
                )
                if self.server.start():
                    self._say(f"took over the server at {self.state.place.url}")
            try:
                self._open()
                break
            except LogError:  # a server just taken over may be dying
                if time.monotonic() > stop:
                    raise
        if self._outbox.note_of(Mark("charter")) is None:
            config = parse_config(self.state.config)
            task = load_task(config.crew.task, config.task).fingerprint
            self._outbox.put(
                [Charter(crew=self.state.crew, config=self.state.config, task=task)],
                Mark("charter"),
            )
        self._settle()

    def _open(self) -> None:
        with ExitStack() as undo:
            self.connection = Connection(hub_login(self.folder, self.state))
            undo.callback(self.connection.close)
            create_stream(self.connection, self.state.crew)
            for learner in self._learners():
                create_bucket(self.connection, self.state.crew, learner)
            self.log = NatsLog(self.connection, self.state.crew)
            self.presence = Presence(self.connection, self.state.crew, self._verify)
            self.connection.subscribe(self._names.enrolment("*"), self._asked.put)
            self.connection.subscribe(self._names.control, self._asked.put)
            undo.pop_all()

    def tick(self, timeout_s: float = 0.2) -> None:
        """Answer who asks, and bring the server back if it died."""
        try:
            message = self._asked.get(timeout=timeout_s)
        except queue.Empty:
            pass
        else:
            try:
                answer = self._answer(message)
                self.connection.publish(message.reply, msgspec.msgpack.encode(answer))
            except LogError as error:
                self._say(f"could not answer: {error}; who asked will ask again")
        if self.server and not self.server.alive():
            self._say("the server died; starting it again")
            try:
                self.server.start()
            except ValueError as error:  # something took its port for a moment, perhaps
                self._say(str(error))
                time.sleep(timeout_s)
        if not self._settled and not self.connection.trouble:
            self._settle()

    def close(self, stop_server: bool = True) -> None:
        if hasattr(self, "connection"):
            self.connection.close()
            self._outbox.close()
        if self.server and stop_server:
            self.server.stop()
        os.close(self._lock)

    # Who may take part

    def invitations(self) -> dict[str, str]:
        return invitations(self.state, self.identity.public)

    def revoke(self, peer: str) -> None:
        """Shut a peer out: its records from here on are refused by all, and its connection is
        closed.
        """
        self._must_know(peer)
        if peer not in self.state.keys and peer not in self.state.invited:
            raise ValueError(f"{peer} is shut out already")
        self.state.keys.pop(peer, None)
        self.state.invited.pop(peer, None)
        self.state.revoked = sorted({*self.state.revoked, peer})
        self._changed()

    def invite(self, peer: str) -> None:
        """Invite a peer anew, which has lost its key or was shut out.

        Its old key stops counting when the new one is brought.
        """
        self._must_know(peer)
        self.state.invited[peer] = Identity.new().secret
        self._keep()
        if self._settled:
            self._reload()

    def _verify(self, peer: str, signature: bytes, message: bytes) -> bool:
        return peer in self.state.keys and verifies(self.state.keys[peer], signature, message)

    def _must_know(self, peer: str) -> None:
        known = [p.name for p in parse_config(self.state.config).peer]
        if peer not in known:
            raise ValueError(f"the crew has no peer {peer!r}; it has {', '.join(known)}")

    def _answer(self, message: Msg) -> Answer:
        try:
            if message.subject == self._names.control:
                return self._carry_out(msgspec.msgpack.decode(message.data, type=Order))
            return self._enrol(
                msgspec.msgpack.decode(message.data, type=Enrolment), message.subject
            )
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            self._say(f"refused a request on {message.subject}: {error}")
            return Answer(error=str(error))

    def _carry_out(self, asked: Order) -> Answer:
        if (
            not verifies(self.identity.public, asked.signature, asked.signed(self.state.crew))
            or asked.at_s <= self._ordered_at_s
        ):
            raise ValueError("an order that the hub's owner did not give, or gave before")
        self._ordered_at_s = asked.at_s
        if asked.what == "revoke":
            self.revoke(asked.peer)
        else:
            self.invite(asked.peer)
        return Answer()

    def _enrol(self, asked: Enrolment, subject: str) -> Answer:
        if subject != self._names.enrolment(asked.peer) or asked.crew != self.state.crew:
            raise ValueError(f"the request is for {asked.crew}/{asked.peer} and came by {subject}")
        if self.state.keys.get(asked.peer) == asked.key:
            return Answer()  # asked again, because our first answer was lost
        secret = self.state.invited.get(asked.peer)
        if secret is None or not asked.is_of(Identity.of(secret).public):
            raise ValueError(
                f"the invitation of {asked.peer} is not open: it was used, or replaced by a newer "
                "one"
            )
        invited = [Identity.of(secret).public for secret in self.state.invited.values()]
        if asked.key in [*self.state.keys.values(), *invited, self.identity.public]:
            raise ValueError(
                f"the key that {asked.peer} brings is in use already; each peer needs its own"
            )
        del self.state.invited[asked.peer]
        self.state.keys[asked.peer] = asked.key
        self.state.revoked = [peer for peer in self.state.revoked if peer != asked.peer]
        self._changed()
        self._say(f"{asked.peer} has joined with key {nkey_of(asked.key)}")
        return Answer()

    def _changed(self) -> None:
        self.state.number += 1
        self._keep()
        self._settle()

    @property
    def _settled(self) -> bool:
        """Whether everyone can know the present roster."""
        return (
            self._outbox.note_of(Mark("roster", self.state.number)) is not None
            and len(self._outbox) == 0
        )

    def _settle(self) -> None:
        """Publish the roster, once per number, and only then let the server follow it: a record
        ahead of its roster is lost for good.
        """
        state = self.state
        if self._outbox.note_of(Mark("roster", state.number)) is None:
            roster = Roster(
                crew=state.crew,
                number=state.number,
                keys=dict(state.keys),
                revoked=tuple(state.revoked),
            )
            self._outbox.put([roster], Mark("roster", state.number))
        try:
            self._outbox.deliver(self.log)
        except LogError as error:
            self._say(f"a roster waits to be sent: {error}")
        else:
            self._reload()

    def _reload(self) -> None:
        if self.server:
            self.server.configure(self.identity.nkey, self._users(), self._learners())
            if self.server.alive():
                self.server.reload()

    def _users(self) -> list[User]:
        crew = self.state.crew
        invited = [
            invited_user(crew, peer, Identity.of(secret).nkey)
            for peer, secret in self.state.invited.items()
        ]
        learners, follows = (
            self._learners(),
            {peer.name: peer.follows for peer in parse_config(self.state.config).peer},
        )
        enrolled = [
            peer_user(
                crew, peer, nkey_of(key), learner=peer in learners, follows=follows.get(peer, "")
            )
            for peer, key in self.state.keys.items()
        ]
        return [*invited, *enrolled]

    def _learners(self) -> list[str]:
        return [
            peer.name for peer in parse_config(self.state.config).peer if peer.role == "learner"
        ]

    def _keep(self) -> None:
        replace(self.folder / "hub.json", msgspec.json.encode(self.state), mode=0o600)


def read_state(folder: Path) -> HubState:
    try:
        return msgspec.json.decode((folder / "hub.json").read_bytes(), type=HubState)
    except (OSError, msgspec.DecodeError) as error:
        raise ValueError(
            f"{folder} is not the folder of a hub: {error}; give the one that motley hub printed"
        ) from None


def hub_login(folder: Path, state: HubState) -> Login:
    """How the hub's owner dials its server, from the same machine."""
    identity = Identity.kept_at(folder / "hub.key")
    certificate = fingerprint(Path(state.place.certificate[0])) if state.place.certificate else ""
    url = state.place.url
    if state.place.host:
        near = "127.0.0.1" if state.place.host == "0.0.0.0" else state.place.host
        url = f"{'tls' if certificate else 'nats'}://{near}:{state.place.port}"
    return Login(url, HUB, identity.nkey_seed, certificate)


def order(folder: Path, what: Order) -> str:
    """Have a hub revoke or invite: the running one, or else the one in the folder for when it runs
    next.
    """
    state = read_state(folder)
    try:
        answer = _ask_running_hub(folder, state, what)
    except LogError:
        return _order_while_stopped(folder, state, what)
    if answer.error:
        raise ValueError(answer.error)
    return _done(folder, read_state(folder), what.peer)


def _done(folder: Path, state: HubState, peer: str) -> str:
    """What came of an order; an invitation is read from the folder, and never travels."""
    if peer in state.invited:
        return invitations(state, Identity.kept_at(folder / "hub.key").public)[peer]
    return f"{peer} is shut out; invite it anew with: motley hub ... --invite {peer}"


def invitations(state: HubState, hub: bytes) -> dict[str, str]:
    """Per peer with an open invitation, the line to paste on its machine."""
    pinned = state.place.pinned and state.place.certificate
    certificate = fingerprint(Path(pinned[0])) if pinned else ""
    start = f"motley join {state.place.url} --crew {state.crew} --invite "
    return {
        peer: start + Invitation(peer, secret, hub, certificate).text
        for peer, secret in state.invited.items()
    }


def _ask_running_hub(folder: Path, state: HubState, what: Order) -> Answer:
    identity = Identity.kept_at(folder / "hub.key")
    what = msgspec.structs.replace(what, at_s=time.time())
    what = msgspec.structs.replace(what, signature=identity.sign(what.signed(state.crew)))
    connection = Connection(hub_login(folder, state), patience_s=1)
    try:
        subject = Names(state.crew).control
        reply = connection.call(
            lambda client: client.request(subject, msgspec.msgpack.encode(what), 10)
        )
    finally:
        connection.close()
    return msgspec.msgpack.decode(reply.data, type=Answer)


def _order_while_stopped(folder: Path, state: HubState, what: Order) -> str:
    hub = Hub(folder, state, lambda text: None)
    # a server that outlived its hub has peers on it
    runs_on = hub.server is not None and hub.server.alive()
    hub.start()
    try:
        if what.what == "revoke":
            hub.revoke(what.peer)
        else:
            hub.invite(what.peer)
        return _done(folder, hub.state, what.peer)
    finally:
        hub.close(stop_server=not runs_on)
