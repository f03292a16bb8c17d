"""The log that a hub left behind: read from a copy of its server's files, so that nothing is held
and the hub can start at any moment.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import ParseResult, urlparse

import msgspec

from motley.archive.opening import connected, hub_of, must_exist
from motley.archive.reading import Archive
from motley.clock import RealClock
from motley.exchange import LogError
from motley.trust import Identity

if TYPE_CHECKING:
    from motley.distributed.register import HubState

NEAR = "127.0.0.1"


def is_stopped(folder: Path) -> bool:
    """Whether the log of a folder is on a server of its hub's own that does not answer."""
    from motley.distributed.register import hub_login, read_state

    hub = hub_of(folder)
    if hub is None or not (state := read_state(hub)).place.host:
        return False
    # by their ports: looking at their locks would hold these for a moment
    return not any(_answers(urlparse(url)) for url in hub_login(hub, state).urls)


def _answers(place: ParseResult) -> bool:
    try:
        socket.create_connection((place.hostname or NEAR, place.port or 0), timeout=1).close()
    except OSError:
        return False
    return True


@contextmanager
def open_left(folder: Path) -> Iterator[Archive]:
    """The log of a hub that does not run, for the time of a `with`."""
    from motley.distributed.register import read_state
    from motley.exchange.nats.connection import Login
    from motley.records import HUB

    hub = hub_of(folder)
    assert hub, f"{folder} has no hub"
    state = read_state(hub)
    if not (files := hub / "server" / "jetstream").is_dir():
        raise ValueError(f"{files} is not there: the hub has never run; start it with motley hub")
    if any(not node.here for node in state.place.nodes):
        raise LogError(f"the log of {hub} is on other machines, too; start the hub and its nodes")
    key = must_exist(hub / "hub.key", "give the folder that motley hub printed")
    identity = Identity.kept_at(key)
    with tempfile.TemporaryDirectory(prefix="motley-log-") as name:
        try:
            for part in hub.glob("server*/jetstream"):
                shutil.copytree(part, Path(name) / part.relative_to(hub))
        except shutil.Error:
            raise LogError(f"the files of {hub} changed while they were read") from None
        if not is_stopped(folder):
            raise LogError(f"the hub of {hub} has just started")
        with (
            _copies(state, Path(name), identity.nkey) as url,
            connected(Login(url, HUB, identity.nkey_seed), state.crew, identity.public) as source,
        ):
            yield Archive(folder, state.crew, identity.public, source)


@contextmanager
def _copies(state: HubState, folder: Path, hub: str) -> Iterator[str]:
    """Servers of copied files, on other ports of this machine; their address."""
    from motley.distributed.register import Place
    from motley.distributed.rights import Rights
    from motley.distributed.servers import Servers
    from motley.exchange.nats.cluster import address_of
    from motley.exchange.nats.server import free_port

    nodes = tuple(
        msgspec.structs.replace(
            node, name=NEAR, host=NEAR, port=free_port(), route_port=free_port()
        )
        for node in state.place.nodes
    )
    port = nodes[0].port if nodes else free_port()
    url = address_of(nodes, "nats") if nodes else f"nats://{NEAR}:{port}"
    place = Place(url=url, host=NEAR, port=port, nodes=nodes)
    moved = msgspec.structs.replace(state, place=place)
    servers = Servers.of(moved, folder, lambda text: None, RealClock())
    servers.configure(Rights(hub=hub, users=(), learners=()))
    servers.start()
    try:
        yield url
    finally:
        servers.stop()
