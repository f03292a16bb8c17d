"""Orders of a hub's owner, from another process: to the running hub, or to one that is stopped."""

from __future__ import annotations

from pathlib import Path

import msgspec

from motley.clock import Clock, Deadline, RealClock
from motley.distributed.hub import Hub, HubRunsError
from motley.distributed.register import Answer, HubState, Order, hub_login, invitations, read_state
from motley.exchange import LogError
from motley.exchange.nats.connection import Connection, Login, NotAdmittedError
from motley.exchange.nats.names import Names
from motley.trust import Identity

RIGHTS_S = 10.0


def give_order(folder: Path, order: Order, clock: Clock = RealClock()) -> str:
    """Have a hub revoke or invite: the running one, or the stopped one for when it runs next."""
    state = read_state(folder)
    try:
        answer = _ask_running_hub(folder, state, order, clock)
    except LogError as error:
        try:
            return _order_while_stopped(folder, state, order, clock)
        except HubRunsError:
            raise ValueError(
                f"the hub in {folder} is running and did not take the order: {error}; try again"
            ) from None
    if answer.error:
        raise ValueError(answer.error)
    return _outcome(folder, read_state(folder), order)


def _outcome(folder: Path, state: HubState, order: Order) -> str:
    """What came of an order; an invitation is read from the folder, and never travels."""
    peer = order.peer
    if order.what == "pardon":
        return f"{peer} may write again"
    if peer in state.invited:
        return invitations(state, Identity.kept_at(folder / "hub.key").public)[peer]
    return f"{peer} is shut out; invite it anew with: motley hub ... --invite {peer}"


def _ask_running_hub(folder: Path, state: HubState, order: Order, clock: Clock) -> Answer:
    identity = Identity.kept_at(folder / "hub.key")
    order = order.by(state, identity)
    connection = _admitted(hub_login(folder, state), clock)
    try:
        subject, content = Names(state.crew).control, msgspec.msgpack.encode(order)
        reply = connection.call(lambda client: client.request(subject, content, 10))
    finally:
        connection.close()
    return msgspec.msgpack.decode(reply.data, type=Answer)


def _admitted(login: Login, clock: Clock) -> Connection:
    """A server that takes in new rights may not know even its hub, for a moment."""
    deadline = Deadline(clock, RIGHTS_S)
    while True:
        try:
            return Connection(login, patience_s=1, clock=clock)
        except NotAdmittedError:
            if deadline.passed:
                raise
        clock.sleep_s(0.1)


def _order_while_stopped(folder: Path, state: HubState, order: Order, clock: Clock) -> str:
    hub = Hub(folder, state, lambda text: None, clock)
    # a server that outlived its hub has peers on it
    runs_on = hub.servers.any_alive
    try:
        hub.start()
        hub.carry_out(order)
        return _outcome(folder, hub.register.state, order)
    finally:
        hub.close(stop_server=not runs_on)
