"""Hub: what one machine does for a crew of many: runs the server, founds the log, admits peers by
invitation and shuts them out.

It owns no model and decides nothing about learning; peers go on without it as long as its server
lives.

HUB/hub.key         the key that signs the charter and the rosters
HUB/hub.json        who is invited, enrolled, shut out
HUB/outbox.sqlite   the hub's own records
HUB/server/         the server's configuration, certificate and data
HUB/server-2/ ...   of a cluster's other nodes on this machine
HUB/nodes/          what lets a cluster's nodes know each other; what to bring to other machines
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
from nats.aio.msg import Msg

from motley.clock import Clock, Deadline, RealClock
from motley.config import CrewConfig, config_text, may_become, parse_config
from motley.distributed.nodes import FarNodes, NodesWatch
from motley.distributed.office import Office
from motley.distributed.refusals import Refusals
from motley.distributed.register import (
    DAY_S,
    INVITE_DAYS,
    Answer,
    HubState,
    Order,
    Place,
    Register,
    Say,
    read_state,
)
from motley.distributed.servers import Servers
from motley.distributed.watch import DiskWatch, QuotaWatch, limit_log
from motley.exchange import LogError, Mark, Outbox, Signer
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import create_presence
from motley.exchange.nats.server import Server
from motley.files import hold
from motley.trust import nkey_of
from motley.trust.invitation import Enrolment

START_S = 30.0
CLUSTER_START_S = 120.0  # until its nodes have chosen who leads
SAID_AGAIN_S = 60.0
RETRY_S = 0.25
CALM_S = 0.5  # after a new configuration: answers get lost while the server takes it in


class HubRunsError(ValueError):
    """Another process runs this hub."""


class Hub:
    def __init__(self, folder: Path, state: HubState, say: Say, clock: Clock = RealClock()) -> None:
        self.folder, self._say, self._clock = folder, say, clock
        self._lock = _hold(folder)
        self.register = Register(folder, state, clock)
        identity = self.register.identity
        self.outbox = Outbox(folder / "outbox.sqlite", Signer(identity.public, identity.sign))
        self.servers = Servers.of(state, folder, say, clock)
        self.far_nodes = FarNodes(folder, self.register)
        self.nodes = NodesWatch(state.crew, state.place.nodes, say, clock)
        self._names = Names(state.crew)
        self._office: Office | None = None  # before the start
        self._quotas = QuotaWatch(self.register, say, clock)
        self._disks = [DiskWatch(server, say, clock) for server in self.servers.all]
        self._calm = self._again = Deadline(clock, 0.0)
        self._complaint, self._refusals = "", Refusals(say, clock)
        self._returned = threading.Event()  # the connection was lost, and is back
        self._new: list[Enrolment] = []  # whose keys no roster has yet

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
            _check_crew(folder, parse_config(state.config), config, may_change)
            _check_place(folder, state, place)
            moved, state.place = state.place != place, place
            state.config = config_text(config)
        else:
            expires_s = clock.now_s() + invite_days * DAY_S if invite_days else 0.0
            state = HubState.new(config, place, expires_s)
        hub = cls(folder, state, say, clock)
        hub.register.keep()
        if moved:
            hub.servers.stop()  # one left running listens where the last hub was
        return hub

    @property
    def server(self) -> Server | None:
        """The hub's own, or its first; None where it uses somebody else's."""
        return self.servers.first

    @property
    def office(self) -> Office:
        assert self._office, "the hub was not started"
        return self._office

    # Life

    def start(self) -> None:
        """Bring up the server, the stream, the charter and the roster.

        What is there already stays.
        """
        is_cluster = self.servers.num_nodes > 1
        deadline = Deadline(self._clock, CLUSTER_START_S if is_cluster else START_S)
        self._start_server()
        while self._office is None:
            try:
                self._office = Office.open(self.folder, self.register, self._clock)
            except LogError as error:
                if self.servers.any_elsewhere:  # somebody has yet to start those
                    self._complain(f"waiting for nodes on other machines: {error}")
                elif deadline.passed:
                    raise
                if is_cluster:
                    self.servers.revive(RETRY_S)
                    self._clock.sleep_s(RETRY_S)
                else:  # a server just taken over may be dying
                    self._start_server()
        self._office.connection.on_reconnect.append(self._returned.set)
        if self.outbox.note_of(Mark("charter")) is None:
            self.outbox.put([self.register.charter()], Mark("charter"))
        self._settle()

    def _start_server(self) -> None:
        if self.servers:
            rights = self.far_nodes.rights
            if not self._settled:
                users = tuple(replace(user, nkey="") for user in rights.users)
                rights = msgspec.structs.replace(rights, users=users)
            self.servers.configure(rights)
            if self.servers.start():
                self._say(f"took over the server at {self.register.state.place.url}")

    def tick(self, timeout_s: float = 0.2) -> None:
        """Answer who asks, and bring the server back if it died."""
        self._reply(self.office.asked.all(timeout_s))
        self._refusals.look()
        self.servers.revive(timeout_s)
        if self._returned.is_set():
            self._found_presence()
        self._look_around()
        if not self._settled and not self.office.connection.trouble:
            self._settle()

    def _look_around(self) -> None:
        """See that nobody writes too much, and that there is room to write."""
        if not self.servers:
            return  # nothing can be done about a server of somebody else's
        self.nodes.look(self.office.connection)
        self.far_nodes.deliver(self.office.connection)
        try:
            for disk in self._disks:
                disk.look()
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
            state = self.register.state
            create_presence(self.office.connection, state.crew, state.place.replicas)
        except LogError as error:
            self._complain(f"who is there cannot be heard: {error}; trying again")
            self._returned.set()

    def close(self, stop_server: bool = True) -> None:
        if self._office:
            self._office.close()
        self.outbox.close()
        if stop_server:
            self.servers.stop()
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
            if self._settled:
                self._reload()
        else:
            self.invite(order.peer, order.days)

    def _reply(self, messages: Sequence[Msg]) -> None:
        """Answer all. Who joins beside others is on one roster with them."""
        answers = [self._answer(message) for message in messages]
        if self._new:
            self._settle()
            for asked in self._new:
                if self.register.state.keys.get(asked.peer) == asked.key:  # not shut out meanwhile
                    self._say(f"{asked.peer} has joined with key {nkey_of(asked.key)}")
            self._new.clear()
        for message, answer in zip(messages, answers, strict=True):
            try:
                self.office.connection.publish(message.reply, msgspec.msgpack.encode(answer))
            except LogError as error:
                self._refusals.tell(f"could not answer: {error}; who asked will ask again")

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
            self._refusals.tell(f"refused a request on {message.subject}: {error}")
            return Answer(error=str(error))
        return Answer()

    def _enrol(self, asked: Enrolment, subject: str) -> None:
        if subject != self._names.enrolment(asked.peer) or asked.crew != self.register.state.crew:
            raise ValueError(f"the request is for {asked.crew}/{asked.peer} and came by {subject}")
        if self.register.enrol(asked):
            # what was written with another key does not count
            self.register.state.forgiven[asked.peer] = self._quotas.scales.records[asked.peer]
            self._new.append(asked)

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
        # the log cannot be reached, this disk is full, or a file of the server's is torn
        except (OSError, ValueError) as error:
            self._complain(f"a roster waits to be sent: {error}")

    def _reload(self) -> None:
        if self.servers:
            self.servers.configure(self.far_nodes.rights)
            self.servers.reload()
            self.far_nodes.tell(self.far_nodes.rights)
            self._calm = Deadline(self._clock, CALM_S)


def check_stopped(folder: Path) -> None:
    """HubRunsError if a process runs the hub of this folder, if it is one."""
    if (folder / "hub.json").exists():
        os.close(_hold(folder))


def _hold(folder: Path) -> int:
    if (lock := hold(folder / "hub.lock")) is None:
        raise HubRunsError(
            f"a hub is already running in {folder}; stop it first, or choose another folder with "
            "--out"
        )
    return lock


def _check_crew(folder: Path, before: CrewConfig, config: CrewConfig, may_change: bool) -> None:
    if before != config and not (may_change and may_become(before, config)):
        raise ValueError(
            f"{folder} holds the hub of a crew with other settings; choose another folder with "
            "--out, or delete it"
        )


def _check_place(folder: Path, state: HubState, place: Place) -> None:
    _check_nodes(folder, state.place, place)
    # readers of one lot put records in order, which they can where one server has them all
    if state.lots and place.replicas > 1:
        raise ValueError(
            f"{folder} holds the log of a crew whose groups stand in lots, on one server, and "
            f"--replicas {place.replicas} is asked for; leave it out, or choose another folder "
            "with --out"
        )


def _check_nodes(folder: Path, before: Place, place: Place) -> None:
    """A server that becomes a node, or is one no more, would throw away what it has."""
    if place.host and before.host and len(before.nodes) != len(place.nodes):
        raise ValueError(
            f"{folder} holds a log on {len(before.nodes) or 1} servers, and "
            f"{len(place.nodes) or 1} are asked for; say --replicas as before, or "
            "choose another folder with --out"
        )
