"""A peer's devices as the processes that torchrun started, on one machine or on several.

Owns how the ranks find each other, and how they end. Rank 0 is the peer's own process. Every other
has two connections to it: one for orders, and one whose end is rank 0's end, and whose only message
is how that was. What ranks do meanwhile is in `parts`.

| rank 0 | the others end with |
|---|---|
| ends | 0 |
| fails | its reason, on one line, and an error |
| is killed, or its machine has gone | a line that says so, and an error |
"""

from __future__ import annotations

import hmac
import os
import secrets
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import torch
from torch.distributed.rendezvous import rendezvous

from motley.peers.parts import obey, one_line
from motley.peers.team import ENDING_S

RENDEZVOUS = "env://"  # torchrun's own
GATHERING_S = 600.0  # all begin at the same time; some machines are slow to import torch
HELLO_S, HELLO_BYTES = 10.0, 1024
KILLED = "it was killed, or its machine has gone"
KILLED_S = 1.0  # in which the system closes all that a killed process had open
# seconds and tries until a machine that says nothing has gone, where the system lets us choose
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Launched(NamedTuple):
    """What torchrun says of a process."""

    rank: int
    size: int
    local_rank: int  # among those of its machine
    on_one_machine: bool
    host: str  # of rank 0
    attempt: str  # torchrun may start all again

    @property
    def meeting(self) -> str:
        """The key, in torchrun's store, of where rank 0 is to be found."""
        return f"motley/meeting/{self.attempt}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launched | None:
        """None where torchrun did not start this process."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        if not all(name in environment for name in names):
            return None
        size = int(environment["WORLD_SIZE"])
        return cls(
            rank=int(environment["RANK"]),
            size=size,
            local_rank=int(environment["LOCAL_RANK"]),
            on_one_machine=environment.get("LOCAL_WORLD_SIZE") == str(size),
            host=environment["MASTER_ADDR"],
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


class RankStore(Protocol):
    """What of torch's store is used: values by key, for all ranks."""

    def set(self, key: str, value: str, /) -> Any: ...

    def get(self, key: str, /) -> bytes: ...

    def wait(self, keys: list[str], timeout: timedelta, /) -> Any: ...


class _Meeting(msgspec.Struct, frozen=True):
    """Where rank 0 is to be found. `key`: what shows that a caller has read this."""

    host: str
    port: int
    key: str


Line = Literal["orders", "life"]


class _Hello(msgspec.Struct, frozen=True):
    """The first that another rank says on a connection."""

    key: str
    rank: int
    local_rank: int
    line: Line


@dataclass(frozen=True, slots=True)
class RankDevice:
    local_rank: int
    orders: Connection
    life: Connection

    def how_ended(self) -> str:
        return "has gone" if self.life.poll() else ""


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ranks but the first, as that one sees them."""

    launched: Launched
    devices: list[RankDevice]

    @property
    def rendezvous(self) -> str:
        return RENDEZVOUS

    @property
    def threads(self) -> int:
        """Of each: torchrun has shared them out."""
        return torch.get_num_threads()

    def check(self, peer: str, devices: int) -> None:
        if devices != self.launched.size:
            raise ValueError(
                f"peer {peer}: devices={devices}, and torchrun started {self.launched.size} "
                f"processes; start {devices}, or give --devices {self.launched.size}"
            )

    def places(self, peer: str, first: torch.device) -> tuple[torch.device, ...]:
        """The device of every rank: the GPU of its LOCAL_RANK, or the CPU."""
        if first.type != "cuda":
            return (first,) * self.launched.size
        own = self.launched.local_rank
        if first.index not in (None, own):
            raise ValueError(
                f"peer {peer}: device={str(first)!r}, and under torchrun rank 0 computes on the "
                f"GPU of its LOCAL_RANK, cuda:{own}; use cuda, and CUDA_VISIBLE_DEVICES to choose"
            )
        local_ranks = [own, *(device.local_rank for device in self.devices)]
        return tuple(torch.device("cuda", number) for number in local_ranks)

    def let_go(self) -> None:
        """They wait for how the peer ends, see `gathered`."""

    def say_farewell(self, words: str) -> None:
        """`words`: why the peer failed; empty if it did not."""
        for device in self.devices:
            with suppress(OSError):
                device.life.send_bytes(words.encode())
            device.life.close()
            device.orders.close()


# Rank 0


@contextmanager
def gathered(launched: Launched | None) -> Iterator[Ranks | None]:
    """The other ranks, who are told in the end how it went; None without torchrun."""
    if launched is None:
        yield None
        return
    store = _store()  # kept until the end: without an agent of torchrun's it serves the others
    ranks = gather(launched, store)
    try:
        yield ranks
    except BaseException as error:
        ranks.say_farewell(one_line(error))
        raise
    ranks.say_farewell("")


def gather(launched: Launched, store: RankStore) -> Ranks:
    """Have all other ranks call. `store`: that of all ranks, where they learn whom to call."""
    wanted: list[tuple[int, Line]] = [
        (rank, line) for rank in range(1, launched.size) for line in ("orders", "life")
    ]
    here = "127.0.0.1" if launched.on_one_machine else launched.host
    calls: dict[tuple[int, Line], Connection] = {}
    local_ranks: dict[int, int] = {}
    with closing(_server(launched)) as server, ExitStack() as failing:
        place = _Meeting(here, server.getsockname()[1], secrets.token_hex(32))
        store.set(launched.meeting, msgspec.json.encode(place).decode())
        while len(calls) < len(wanted):
            connection = _accepted(server, launched, {rank for rank, _ in calls})
            hello = _hello(connection, place.key)
            if hello is None or (hello.rank, hello.line) not in wanted:
                connection.close()
                continue
            failing.callback(connection.close)
            calls[hello.rank, hello.line] = connection
            local_ranks[hello.rank] = hello.local_rank
        failing.pop_all()
    devices = [
        RankDevice(local_ranks[rank], calls[rank, "orders"], calls[rank, "life"])
        for rank in range(1, launched.size)
    ]
    return Ranks(launched, devices)


def _server(launched: Launched) -> socket.socket:
    if launched.on_one_machine:
        server = socket.create_server(("127.0.0.1", 0), backlog=2 * launched.size)
    elif socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=2 * launched.size
        )
    else:
        server = socket.create_server(("", 0), backlog=2 * launched.size)
    server.settimeout(GATHERING_S)
    return server


def _accepted(server: socket.socket, launched: Launched, came: set[int]) -> Connection:
    try:
        accepted, _ = server.accept()
    except TimeoutError:
        missing = sorted({*range(1, launched.size)} - came)
        raise ValueError(
            f"torchrun says that there are {launched.size} processes, and those of ranks "
            f"{missing} have not called {launched.host} within {GATHERING_S:.0f} s; start the same "
            "command on every machine, and let them reach each other"
        ) from None
    return _tuned(accepted)


def _hello(connection: Connection, key: str) -> _Hello | None:
    """None: a stranger."""
    try:
        if not connection.poll(HELLO_S):
            return None
        _set_patience(connection, HELLO_S)
        hello = msgspec.json.decode(connection.recv_bytes(HELLO_BYTES), type=_Hello)
        _set_patience(connection, 0.0)
    except (EOFError, OSError, msgspec.MsgspecError):
        return None
    return hello if hmac.compare_digest(hello.key.encode(), key.encode()) else None


def _set_patience(connection: Connection, seconds: float) -> None:
    """How long a read waits for the next byte; 0: for ever.

    Polling is not enough: whoever sends one byte of a message would be waited for.
    """
    if os.name == "nt":  # whose handles of sockets are no files
        return
    timeval = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)


# The others


def follow(launched: Launched) -> None:
    """The life of a rank but the first. Raises a ValueError with the reason where rank 0 fails."""
    orders, life = call(launched, _store())
    for number in (signal.SIGINT, signal.SIGTERM):  # everyone is told; the peer saves first
        signal.signal(number, signal.SIG_IGN)
    left = threading.Event()
    threading.Thread(target=_end_anyway, args=(launched, life, left), daemon=True).start()
    serve(launched, orders, life)
    left.set()
    if words := _farewell(life):
        raise ValueError(_ends_with(launched, words))


def serve(launched: Launched, orders: Connection, life: Connection) -> None:
    """Obey; raises a ValueError with the reason where that fails."""
    try:
        obey(orders)
    except ValueError:
        # whoever computes with a rank 0 that is killed fails, too, and may notice that first
        if life.poll(KILLED_S) and _farewell(life) == KILLED:
            raise ValueError(_ends_with(launched, KILLED)) from None
        raise


def call(launched: Launched, store: RankStore) -> tuple[Connection, Connection]:
    """Connections to rank 0: for orders, and for life."""
    store.wait([launched.meeting], timedelta(seconds=GATHERING_S))
    place = msgspec.json.decode(store.get(launched.meeting), type=_Meeting)
    return _called(launched, place, "orders"), _called(launched, place, "life")


def _called(launched: Launched, place: _Meeting, line: Line) -> Connection:
    connection = _tuned(socket.create_connection((place.host, place.port), timeout=GATHERING_S))
    hello = _Hello(place.key, launched.rank, launched.local_rank, line)
    connection.send_bytes(msgspec.json.encode(hello))
    return connection


def _farewell(life: Connection) -> str:
    """How rank 0 ended: empty if well. Waits for it."""
    try:
        return life.recv_bytes().decode()
    except (EOFError, OSError):
        return KILLED


def _ends_with(launched: Launched, words: str) -> str:
    return f"rank {launched.rank} ends, since rank 0 failed: {words}"


def _end_anyway(launched: Launched, life: Connection, left: threading.Event) -> None:
    """End this process where rank 0 has ended and it does not notice, as with nccl on GPUs."""
    wait([life])
    if not left.wait(ENDING_S):
        sys.stderr.write(f"error: {_ends_with(launched, _farewell(life) or 'it left early')}\n")
        sys.stderr.flush()
        os._exit(2)


# Both


def _store() -> RankStore:
    """Torchrun's own, which all ranks reach."""
    store: RankStore
    store, _, _ = next(rendezvous(RENDEZVOUS, timeout=timedelta(seconds=GATHERING_S)))
    return store


def _tuned(one: socket.socket) -> Connection:
    one.settimeout(None)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # an order waits for its answer
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            one.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(one.detach())
