"""Watch: what a hub keeps an eye on while its own server runs: how much everyone writes on the log,
and whether the server's disk has room.
"""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from pathlib import Path

from motley.clock import Clock, Deadline
from motley.distributed.quota import Scales
from motley.distributed.register import Register, Say
from motley.exchange import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import NatsLog, create_stream
from motley.exchange.nats.server import Server

LOOK_S = 1.0  # between two looks at the disk
LOW_BYTES = 2**30  # below which the owner hears of it beforehand
ROOM_BYTES = 2**25  # that must be free before a server is started again that had none


def limit_log(connection: Connection, register: Register) -> None:
    """Make the log, with room for everyone's quota besides what is there.

    On a server of somebody else's nobody can be kept from writing: a limit would only help who
    wants the log full.
    """
    quotas, state = register.quotas, register.state
    room_bytes = quotas.room_bytes if state.place.host else 0
    create_stream(connection, state.crew, room_bytes, quotas.largest_bytes, state.place.replicas)


class QuotaWatch:
    """Counts what is on the log, and takes the right to write from who has written too much."""

    def __init__(self, register: Register, say: Say, clock: Clock) -> None:
        self.scales = Scales(register.quotas.sizes)
        self._register, self._say, self._clock = register, say, clock

    def look(self, log: NatsLog) -> bool:
        """Whether somebody lost the right to write, which the server must hear of."""
        try:
            self.scales.weigh(log, self._clock)
        except LogError:
            return False  # another time
        muted = self._register.mute(self.scales.records)
        if muted:
            with suppress(LogError):  # what they wrote must not leave others without room
                limit_log(log.connection, self._register)
        for peer in muted:
            self._say(
                f"{peer} has {self.scales.records[peer]} records on the log, more than it can "
                "need: it may not write any more; let it with: motley hub ... --pardon "
                f"{peer}, or shut it out with --revoke {peer}"
            )
        return bool(muted)

    def pardon(self, peer: str, log: NatsLog) -> None:
        """Let a peer write again: as much again as its quota."""
        self.scales.weigh(log, self._clock, math.inf)
        self._register.pardon(peer, self.scales.records[peer])
        limit_log(log.connection, self._register)


class DiskWatch:
    """Starts a server again that had no room to write, as soon as there is some.

    After a write that failed the server confirms none until then, and tells only its own log why.
    """

    def __init__(self, server: Server, say: Say, clock: Clock) -> None:
        self._server, self._say, self._clock = server, say, clock
        self._errors = ServerLog(server.folder / "server.log")
        self._next = Deadline(clock, 0.0)
        self._full = self._low = False

    def look(self) -> None:
        if not self._next.passed:
            return
        self._next = Deadline(self._clock, LOOK_S)
        free_bytes = shutil.disk_usage(self._server.folder).free
        words = f"{free_bytes / 2**20:.0f} MiB are free on the disk of {self._server.folder}"
        if self._errors.has_new() and not self._full:
            self._full = True
            self._say(
                f"the server could not write: {words}; make room, and it is started again by "
                "itself. Peers keep what they have to send"
            )
        if self._full and free_bytes >= ROOM_BYTES:
            self._restart(words)
        self._warn(free_bytes, words)

    def _restart(self, words: str) -> None:
        self._say(f"there is room again: {words}; starting the server anew")
        self._server.stop()
        self._server.start()
        self._full = False

    def _warn(self, free_bytes: int, words: str) -> None:
        low = free_bytes < LOW_BYTES
        if low and not self._low and not self._full:
            self._say(f"only {words}; when it is full, nobody can send anything")
        self._low = low


class ServerLog:
    """What a server says about writes that fail."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._num_read = path.stat().st_size if path.exists() else 0

    def has_new(self) -> bool:
        """Whether there was one since the last look."""
        if not self._path.exists():
            return False
        size = self._path.stat().st_size
        with self._path.open("rb") as file:
            file.seek(self._num_read if self._num_read <= size else 0)  # it begins anew when large
            lines = file.read()
            self._num_read = file.tell()
        return b"no space left" in lines or b"ritical write error" in lines
