"""Rights: which keys may do what on a crew's servers, as the nodes of a cluster are told.

The hub signs them and keeps the newest on a stream of its own, which no peer's account sees. There
are no secrets among them.
"""

from __future__ import annotations

import msgspec
from nats.js.api import StorageType, StreamConfig

from motley.exchange import LogError
from motley.exchange.nats.accounts import User
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.names import Names
from motley.exchange.nats.stream import Outgoing, Stream, make_stream
from motley.exchange.wire import MAX_RECORD_BYTES
from motley.trust import Identity, verifies

_SIGNATURE_BYTES = 64


class Rights(msgspec.Struct, frozen=True, kw_only=True):
    hub: str  # the owner's nkey
    users: tuple[User, ...]
    learners: tuple[str, ...]  # who have buckets
    nodes: tuple[str, ...] = ()  # nkeys of the nodes on other machines

    def signed(self, crew: str, identity: Identity) -> bytes:
        content = msgspec.json.encode(self)
        return identity.sign(_message(crew, content)) + content

    @staticmethod
    def read(said: bytes, crew: str, hub: bytes) -> Rights:
        signature, content = said[:_SIGNATURE_BYTES], said[_SIGNATURE_BYTES:]
        if not verifies(hub, signature, _message(crew, content)):
            raise ValueError(
                f"the rights of crew {crew} are not signed by its hub; do not use them"
            )
        return msgspec.json.decode(content, type=Rights)


def _message(crew: str, content: bytes) -> bytes:
    return f"motley rights\n{crew}\n".encode() + content


class Board:
    """Where the newest rights are put up for the nodes on other machines, and read by them."""

    def __init__(self, connection: Connection, crew: str) -> None:
        self._crew, self._names = crew, Names(crew)
        self._stream = Stream(connection, self._names.rights_stream, "the rights", MAX_RECORD_BYTES)

    def put(self, rights: Rights, identity: Identity) -> None:
        content = rights.signed(self._crew, identity)
        for receipt in self._stream.write([Outgoing(self._names.rights, content, "rights")]):
            if receipt.error:
                raise LogError(f"the rights cannot be put up: {receipt.error.description}")

    def newest(self, hub: bytes) -> tuple[int, Rights] | None:
        """With a number that grows; None if there are none."""
        stored = self._stream.last(self._names.rights)
        return (stored.sequence, Rights.read(stored.content, self._crew, hub)) if stored else None


def create_board(connection: Connection, crew: str, replicas: int) -> None:
    names = Names(crew)
    config = StreamConfig(
        name=names.rights_stream,
        subjects=[names.rights],
        storage=StorageType.FILE,
        num_replicas=replicas,
        max_msgs_per_subject=1,
        allow_direct=True,
    )
    make_stream(connection, config)
