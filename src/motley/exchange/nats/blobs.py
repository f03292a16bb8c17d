"""A learner's blobs in NATS's own Object Store, so that its tools read them, too.

Owns the store's layout; knows no manifest.

A meta says `deleted` until all chunks are there: so a put that was interrupted is known. What is
deleted makes room by a message with a roll-up in its place, which needs no right but that to write,
and vanishes by itself.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime

import msgspec
from nats.js.api import DiscardPolicy, StorageType, StreamConfig

from motley.clock import Clock, Deadline
from motley.exchange.blobs import is_content, is_name
from motley.exchange.log import LogError
from motley.exchange.nats.connection import Connection
from motley.exchange.nats.log import LAG_S, LAST_LOOK_S, MAX_FLIGHT_BYTES
from motley.exchange.nats.names import Names
from motley.exchange.nats.stream import (
    HEADERS_BYTES,
    MAX_FETCH_BYTES,
    Outgoing,
    Receipt,
    Stored,
    Stream,
    make_stream,
)

CHUNK_BYTES = 2**20
MAX_MESSAGES = 2**17  # in a bucket: chunks and metas of 100 GiB, and what is left of many deltas
SILENCE_S = 10.0  # a chunk takes that long at 840 kbit/s
# of what is under way together; pings wait behind it, and two without an answer end the connection
QUICK_S, SLOW_S = 2.0, 5.0

_IN_PLACE = {"Nats-Rollup": "sub"}  # of all that is under the subject
_VANISHING = {**_IN_PLACE, "Nats-TTL": "1s"}


class Options(msgspec.Struct, frozen=True):
    max_chunk_size: int = CHUNK_BYTES


class Info(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The meta of a blob, with the store's own field names."""

    name: str
    bucket: str
    nuid: str  # names the chunks: the blob's own name, or nothing if there are none any more
    size: int
    mtime: str
    chunks: int
    digest: str = ""
    deleted: bool = False
    options: Options | None = None


class Window:
    """How many bytes are under way together: as many as the link moves in a few seconds."""

    def __init__(self, most: int, clock: Clock) -> None:
        self.num_bytes = CHUNK_BYTES
        self._most, self._clock = most, clock

    @contextmanager
    def measured(self) -> Iterator[None]:
        started_s = self._clock.elapsed_s()
        try:
            yield
        except LogError:
            self.num_bytes = CHUNK_BYTES
            raise
        took_s = self._clock.elapsed_s() - started_s
        if took_s < QUICK_S:
            self.num_bytes = min(2 * self.num_bytes, self._most)
        elif took_s > SLOW_S:
            self.num_bytes = max(self.num_bytes // 2, CHUNK_BYTES)


class NatsBlobs:
    def __init__(self, connection: Connection, crew: str, learner: str) -> None:
        self.connection = connection
        self._bucket = Names(crew).bucket(learner)
        self._stream = Stream(connection, self._bucket.stream, "the store", CHUNK_BYTES, SILENCE_S)
        self._up = Window(MAX_FLIGHT_BYTES, connection.clock)
        self._down = Window(MAX_FETCH_BYTES, connection.clock)
        self._writing = threading.Lock()

    def put(self, name: str, content: bytes) -> None:
        assert is_name(name), name
        with self._writing:
            info = self._info(name)
            if info and info.size == len(content):
                return
            begun = self._write([self._meta(self._deleted(name)), self._no_chunks(name)])
            self._write_chunks(name, content, begun[-1].seq)
            self._write([self._meta(self._whole(name, len(content)))])

    def get(self, name: str, num_bytes: int) -> bytes | None:
        info = self._info_in_time(name) if is_name(name) else None
        if info is None or info.size != num_bytes:
            return None
        content = self._read_chunks(name, num_bytes)
        return content if is_content(content, name, num_bytes) else None

    def keep_only(self, names: Collection[str]) -> None:
        # else another time: a blob on its way up may take minutes
        if self._writing.acquire(blocking=False):
            try:
                self._delete_all_but(names)
            finally:
                self._writing.release()

    def _delete_all_but(self, names: Collection[str]) -> None:
        for name in self._names() - set(names):
            half, gone = self._deleted(name), msgspec.structs.replace(self._deleted(name), nuid="")
            # In this order: whatever gets lost, a blob has no chunks that its meta does not own up
            # to.
            self._write([self._meta(half), self._no_chunks(name), self._meta(gone, _VANISHING)])

    # Metas

    def _info_in_time(self, name: str) -> Info | None:
        """Any server of a cluster answers, and may have a moment later what its record promises."""
        clock = self.connection.clock
        deadline = Deadline(clock, LAG_S if len(self.connection.login.urls) > 1 else 0.0)
        while (info := self._info(name)) is None and not deadline.passed:
            clock.sleep_s(LAST_LOOK_S)
        return info

    def _info(self, name: str) -> Info | None:
        stored = self._stream.last(self._bucket.meta_of(name))
        info = _decoded(stored.content) if stored else None
        return info if info and not info.deleted else None

    def _names(self) -> set[str]:
        """Of all blobs that may have chunks, those half put or half deleted among them."""
        names: set[str] = set()
        after = 0
        while page := self._stream.read(self._bucket.metas, after):
            names |= {
                info.nuid
                for info in (_decoded(stored.content) for stored in page)
                if info and is_name(info.nuid)
            }
            after = page[-1].sequence
        return names

    def _whole(self, name: str, num_bytes: int) -> Info:
        changed = datetime.fromtimestamp(self.connection.clock.now_s(), UTC)
        return Info(
            name=name,
            bucket=self._bucket.name,
            nuid=name,
            size=num_bytes,
            mtime=changed.isoformat(),
            chunks=-(-num_bytes // CHUNK_BYTES),
            digest=f"SHA-256={base64.urlsafe_b64encode(bytes.fromhex(name)).decode()}",
            options=Options(),
        )

    def _deleted(self, name: str) -> Info:
        return msgspec.structs.replace(self._whole(name, 0), digest="", deleted=True)

    def _meta(self, info: Info, headers: Mapping[str, str] = _IN_PLACE) -> Outgoing:
        return Outgoing(
            self._bucket.meta_of(info.name), msgspec.json.encode(info), info.name, headers
        )

    # Chunks

    def _no_chunks(self, name: str) -> Outgoing:
        return Outgoing(self._bucket.chunks_of(name), b"", name, _VANISHING)

    def _write_chunks(self, name: str, content: bytes, sequence: int) -> None:
        """Behind a sequence, with nothing in between.

        A dead process's last bytes can arrive late, and would spoil the blob.
        """
        offset = 0
        while offset < len(content):
            flight = range(offset, min(offset + self._up.num_bytes, len(content)), CHUNK_BYTES)
            with self._up.measured():
                receipts = self._write(
                    [
                        Outgoing(self._bucket.chunks_of(name), content[o : o + CHUNK_BYTES], name)
                        for o in flight
                    ]
                )
            if [receipt.seq for receipt in receipts] != list(
                range(sequence + 1, sequence + 1 + len(flight))
            ):
                raise LogError(
                    f"the store has something else between the chunks of {name}; put it again"
                )
            offset, sequence = flight[-1] + CHUNK_BYTES, receipts[-1].seq

    def _read_chunks(self, name: str, num_bytes: int) -> bytes:
        """As many as make up the bytes, or as there are; what is behind them is not looked at."""
        chunks, parts, missing = self._chunks(name), list[bytes](), num_bytes
        while missing > 0 and (chunk := next(chunks, None)) is not None:
            parts.append(chunk)
            missing -= len(chunk)
        return b"".join(parts)

    def _chunks(self, name: str) -> Iterator[bytes]:
        """Until a page has not one byte: a learner must not keep its samplers busy with nothing."""
        page = self._page(name, 0)
        while any(stored.content for stored in page):
            yield from (stored.content for stored in page)
            page = self._page(name, page[-1].sequence)

    def _page(self, name: str, after: int) -> list[Stored]:
        with self._down.measured():
            return self._stream.read(
                self._bucket.chunks_of(name), after, max_bytes=self._down.num_bytes
            )

    def _write(self, messages: Sequence[Outgoing]) -> list[Receipt]:
        receipts = self._stream.write(messages)
        for message, receipt in zip(messages, receipts, strict=True):
            if receipt.error:
                raise LogError(f"the store refuses {message.name}: {receipt.error.description}")
        return receipts


def create_bucket(
    connection: Connection, crew: str, learner: str, max_bytes: int = -1, replicas: int = 1
) -> None:
    """Make a learner's bucket, or give the one that is there these limits."""
    bucket = Names(crew).bucket(learner)
    config = StreamConfig(
        name=bucket.stream,
        subjects=[f"$O.{bucket.name}.C.>", f"$O.{bucket.name}.M.>"],
        storage=StorageType.FILE,
        num_replicas=replicas,
        max_bytes=max_bytes,
        max_msgs=MAX_MESSAGES,
        max_msg_size=CHUNK_BYTES + HEADERS_BYTES,
        discard=DiscardPolicy.NEW,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
    )
    make_stream(connection, config)


def _decoded(meta: bytes) -> Info | None:
    """None for what no store would have written."""
    try:
        return msgspec.json.decode(meta, type=Info)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
