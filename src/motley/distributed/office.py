"""Office: where a hub is asked, and what it sees from there: open while it is connected."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from motley.clock import Clock
from motley.distributed.desk import Desk
from motley.distributed.register import Register, hub_login
from motley.distributed.rights import create_board
from motley.distributed.watch import limit_log
from motley.exchange.nats.blobs import create_bucket
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import NatsLog
from motley.exchange.nats.names import Names
from motley.exchange.nats.presence import Presence, create_presence


@dataclass(frozen=True, slots=True)
class Office:
    connection: Connection
    requests: Connection
    log: NatsLog
    presence: Presence
    asked: Desk

    @staticmethod
    def open(folder: Path, register: Register, clock: Clock) -> Office:
        """Connect, and see that all streams of the crew are there."""
        state, asked = register.state, Desk()
        crew, replicas, names = state.crew, state.place.replicas, Names(state.crew)
        with ExitStack() as undo:
            login = hub_login(folder, state)
            connection = Connection(login, clock=clock)
            undo.callback(connection.close)
            # A way of its own: a flood of requests must not cut off what the hub itself says.
            requests = Connection(login, clock=clock)
            undo.callback(requests.close)
            limit_log(connection, register)
            for learner in register.learners:
                create_bucket(connection, crew, learner, register.quotas.store_bytes, replicas)
            create_presence(connection, crew, replicas)
            if any(not node.here for node in state.place.nodes):
                create_board(connection, crew, replicas)
            log = NatsLog(connection, crew)
            requests.subscribe(names.enrolment("*"), asked.put)
            requests.subscribe(names.control, asked.put)
            presence = Presence(connection, crew, register.verify)
            undo.pop_all()
        return Office(connection, requests, log, presence, asked)

    def close(self) -> None:
        self.presence.stop()
        self.requests.close()
        self.connection.close()
