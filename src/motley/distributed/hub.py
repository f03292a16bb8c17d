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
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from motley.clock import Clock, Deadline, RealClock
from motley.config import CrewConfig, config_text, may_become, parse_config
from motley.distributed.desk import Desk
from motley.distributed.register import (
    DAY_S,
    INVITE_DAYS,
    Answer,
    HubState,
    Order,
    Place,
    Register,
    Say,
    hub_login,
    read_state,
)
from motley.distributed.watch import DiskWatch, QuotaWatch, limit_log
from motley.exchange import LogError, Mark, Outbox, Signer
from motley.exchange.nats.blobs import create_bucket
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import NatsLog
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Presence, create_presence
from motley.exchange.nats.server import Server
from motley.files import hold
from motley.trust import nkey_of
from motley.trust.invitation import Enrolment

START_S = 30.0
SAID_AGAIN_S = 60.0
CALM_S = 0.5  # after a new configuration: answers get lost while the server takes it in


@dataclass(frozen=True, slots=True)
class Office:
    """Where a hub is asked, and what it sees from there: open while it is connected."""

    connection: Connection
    requests: Connection
    log: NatsLog
    presence: Presence
    asked: Desk

    def close(self) -> None:
        self.presence.stop()
        self.requests.close()
        self.connection.close()


class Hub:
    def __init__(self, folder: Path, state: HubState, say: Say, clock: Clock = RealClock()) -> None:
        self.folder, self._say, self._clock = folder, say, clock
        lock = hold(folder / "hub.lock")
        if lock is None:
            raise ValueError(
                f"a hub is already running in {folder}; stop it first, or choose another folder "
                "with --out"
            )
        self._lock = lock
        self.register = Register(folder, state, clock)
        identity = self.register.identity
        self.outbox = Outbox(folder / "outbox.sqlite", Signer(identity.public, identity.sign))
        self.server = _server_of(state, folder / "server", clock)
        self._names = Names(state.crew)
        self._office: Office | None = None  # before the start
        self._quotas = QuotaWatch(self.register, say, clock)
        self._disk = DiskWatch(self.server, say, clock) if self.server else None
        self._calm = self._again = Deadline(clock, 0.0)
        self._complaint = ""
        self._returned = threading.Event()  # the connection was lost, and is back

    @classmethod
    def open(
        cls,
        config: CrewConfig,
        folder: Path,
        place: Place,
        say: Say = lambda text: None,
        clock: Clock = RealClock(),
        invite_days: float = INVITE_DAYS,
        may_change: bool = False,
    ) -> Hub:
        """The hub of a folder: as it was left, or new with an invitation for every peer.

        `invite_days` 0: they have no end. `may_change`: everyone hears of other rounds and the like
        from whoever opens it; its charter stays.
        """
        folder.mkdir(parents=True, exist_ok=True)
        moved = False
        if (folder / "hub.json").exists():
            state = read_state(folder)
            before = parse_config(state.config)
            if before != config and not (may_change and may_become(before, config)):
                raise ValueError(
                    f"{folder} holds the hub of a crew with other settings; choose another folder "
                    "with --out, or delete it"
                )
            moved, state.place = state.place != place, place
            state.config = config_text(config)
        else:
            expires_s = clock.now_s() + invite_days * DAY_S if invite_days else 0.0
            state = HubState.new(config, place, expires_s)
        hub = cls(folder, state, say, clock)
        hub.register.keep()
        if moved and hub.server:
            hub.server.stop()  # one left running listens where the last hub was
        return hub

    @property
    def office(self) -> Office:
        assert self._office, "the hub was not started"
        return self._office

    # Life

    def start(self) -> None:
        """Bring up the server, the stream, the charter and the roster.

        What is there already stays.
        """
        deadline = Deadline(self._clock, START_S)
        while self._office is None:
            self._start_server()
            try:
                self._office = self._open_office()
            except LogError:  # a server just taken over may be dying
                if deadline.passed:
                    raise
        if self.outbox.note_of(Mark("charter")) is None:
            self.outbox.put([self.register.charter()], Mark("charter"))
        self._settle()

    def _start_server(self) -> None:
        if self.server:
            users = self.register.users()
            if not self._settled:
                users = [replace(user, nkey="") for user in users]
            self.server.configure(self.register.identity.nkey, users, self.register.learners)
            if self.server.start():
                self._say(f"took over the server at {self.register.state.place.url}")

    def _open_office(self) -> Office:
        crew, asked = self.register.state.crew, Desk()
        with ExitStack() as undo:
            login = hub_login(self.folder, self.register.state)
            connection = Connection(login, clock=self._clock)
            undo.callback(connection.close)
            # A way of its own: a flood of requests must not cut off what the hub itself says.
            requests = Connection(login, clock=self._clock)
            undo.callback(requests.close)
            limit_log(connection, self.register)
            for learner in self.register.learners:
                create_bucket(connection, crew, learner, self.register.quotas.store_bytes)
            create_presence(connection, crew)
            connection.on_reconnect.append(self._returned.set)
            log = NatsLog(connection, crew)
            requests.subscribe(self._names.enrolment("*"), asked.put)
            requests.subscribe(self._names.control, asked.put)
            presence = Presence(connection, crew, self.register.verify)
            undo.pop_all()
        return Office(connection, requests, log, presence, asked)

    def tick(self, timeout_s: float = 0.2) -> None:
        """Answer who asks, and bring the server back if it died."""
        if message := self.office.asked.next(timeout_s):
            self._reply(message)
        if self.server and not self.server.alive():
            self._say("the server died; starting it again")
            try:
                self.server.start()
            except ValueError as error:  # something took its port for a moment, perhaps
                self._say(str(error))
                self._clock.sleep_s(timeout_s)
        if self._returned.is_set():
            self._found_presence()
        self._look_around()
        if not self._settled and not self.office.connection.trouble:
            self._settle()

    def _look_around(self) -> None:
        """See that nobody writes too much, and that there is room to write."""
        if self._disk is None:
            return  # nothing can be done about a server of somebody else's
        try:
            self._disk.look()
            calm = self._calm.passed and not self.office.connection.trouble
            if calm and self._quotas.look(self.office.log):
                self._reload()
        except (OSError, ValueError) as error:
            self._complain(str(error))

    def _complain(self, words: str) -> None:
        """Say what is wrong, and not again and again."""
        if words != self._complaint or self._again.passed:
            self._complaint, self._again = words, Deadline(self._clock, SAID_AGAIN_S)
            self._say(words)

    def _found_presence(self) -> None:
        """A server that was started anew has lost what it kept in memory."""
        self._returned.clear()
        try:
            create_presence(self.office.connection, self.register.state.crew)
        except LogError as error:
            self._complain(f"who is there cannot be heard: {error}; trying again")
            self._returned.set()

    def close(self, stop_server: bool = True) -> None:
        if self._office:
            self._office.close()
        self.outbox.close()
        if self.server and stop_server:
            self.server.stop()
        os.close(self._lock)

    # Who may take part

    def revoke(self, peer: str) -> None:
        """Shut a peer out: all refuse its records from here on, and its connection is closed."""
        self.register.revoke(peer)
        if not self.office.connection.trouble:  # what it wrote must not leave others without room
            with suppress(LogError):
                limit_log(self.office.connection, self.register)
        self._settle()

    def invite(self, peer: str, days: float = INVITE_DAYS) -> None:
        """Invite a peer anew, which has lost its key or was shut out.

        Its old key stops counting when the new one is brought.
        """
        self.register.invite(peer, days)
        if self._settled:
            self._reload()

    def carry_out(self, order: Order) -> None:
        if order.what == "revoke":
            self.revoke(order.peer)
        elif order.what == "pardon":
            self._quotas.pardon(order.peer, self.office.log)
            self._reload()
        else:
            self.invite(order.peer, order.days)

    def _reply(self, message: Msg) -> None:
        try:
            answer = msgspec.msgpack.encode(self._answer(message))
            self.office.connection.publish(message.reply, answer)
        except LogError as error:
            self._say(f"could not answer: {error}; who asked will ask again")

    def _answer(self, message: Msg) -> Answer:
        try:
            if message.subject == self._names.control:
                order = msgspec.msgpack.decode(message.data, type=Order)
                self.register.check(order)
                self.carry_out(order)
            else:
                enrolment = msgspec.msgpack.decode(message.data, type=Enrolment)
                self._enrol(enrolment, message.subject)
        except (ValueError, OSError, msgspec.DecodeError, RecursionError) as error:
            self._say(f"refused a request on {message.subject}: {error}")
            return Answer(error=str(error))
        return Answer()

    def _enrol(self, asked: Enrolment, subject: str) -> None:
        crew = self.register.state.crew
        if subject != self._names.enrolment(asked.peer) or asked.crew != crew:
            raise ValueError(f"the request is for {asked.crew}/{asked.peer} and came by {subject}")
        if self.register.enrol(asked):
            # what was written with another key does not count
            self.register.state.forgiven[asked.peer] = self._quotas.scales.records[asked.peer]
            self._settle()
            self._say(f"{asked.peer} has joined with key {nkey_of(asked.key)}")

    # What follows from the register

    @property
    def _settled(self) -> bool:
        """Whether everyone can know the present roster."""
        present = Mark("roster", self.register.state.number)
        return self.outbox.note_of(present) is not None and len(self.outbox) == 0

    def _settle(self) -> None:
        """Publish the roster, once per number, and only then let the server follow it: a record
        ahead of its roster is lost for good.
        """
        present = Mark("roster", self.register.state.number)
        try:
            if self.outbox.note_of(present) is None:
                self.outbox.put([self.register.roster()], present)
            self.outbox.deliver(self.office.log)
            self._reload()
        except OSError as error:  # the log cannot be reached, or this disk is full
            self._complain(f"a roster waits to be sent: {error}")

    def _reload(self) -> None:
        if self.server:
            register = self.register
            self.server.configure(register.identity.nkey, register.users(), register.learners)
            if self.server.alive():
                self.server.reload()
            self._calm = Deadline(self._clock, CALM_S)


def _server_of(state: HubState, folder: Path, clock: Clock) -> Server | None:
    """The hub's own server; None where it uses somebody else's."""
    place = state.place
    if not place.host:
        return None
    pair = (Path(place.certificate[0]), Path(place.certificate[1])) if place.certificate else None
    return Server(state.crew, folder, place.host, place.port, pair, clock)
