"""The log that a hub left behind: read from a copy of its server's files, so that nothing is held
and the hub can start at any moment.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlparse

from motley.archive.opening import hub_of, must_exist
from motley.archive.reading import Archive, StreamSource
from motley.exchange import LogError
from motley.trust import Identity

NEAR = "127.0.0.1"


def is_stopped(folder: Path) -> bool:
    """Whether the log of a folder is on a server of its hub's own that does not answer."""
    from motley.distributed.register import hub_login, read_state

    hub = hub_of(folder)
    if hub is None or not (state := read_state(hub)).place.host:
        return False
    place = urlparse(hub_login(hub, state).url)
    try:  # by its port: looking at its lock would hold that for a moment
        socket.create_connection((place.hostname or NEAR, place.port or 0), timeout=1).close()
    except OSError:
        return True
    return False


@contextmanager
def open_left(folder: Path) -> Iterator[Archive]:
    """The log of a hub that does not run, for the time of a `with`."""
    from motley.distributed.register import read_state
    from motley.exchange.nats.connection import Connection, Login
    from motley.exchange.nats.log import NatsLog
    from motley.exchange.nats.server import Server, free_port
    from motley.records import HUB

    hub = hub_of(folder)
    assert hub, f"{folder} has no hub"
    crew, files = read_state(hub).crew, hub / "server" / "jetstream"
    if not files.is_dir():
        raise ValueError(f"{files} is not there: the hub has never run; start it with motley hub")
    key = must_exist(hub / "hub.key", "give the folder that motley hub printed")
    identity = Identity.kept_at(key)
    with tempfile.TemporaryDirectory(prefix="motley-log-") as name:
        copied, port = Path(name) / "server", free_port()
        try:
            shutil.copytree(files, copied / "jetstream")
        except shutil.Error:
            raise LogError(f"the files of {hub} changed while they were read") from None
        if not is_stopped(folder):
            raise LogError(f"the hub of {hub} has just started")
        server = Server(crew, copied, NEAR, port)
        server.configure(identity.nkey, [])
        server.start()
        try:
            login = Login(f"nats://{NEAR}:{port}", HUB, identity.nkey_seed)
            with closing(Connection(login)) as connection:
                yield Archive(
                    folder, crew, identity.public, StreamSource(NatsLog(connection, crew))
                )
        finally:
            server.stop()
