"""A record as bytes: schema, signature, and one zstd frame around the body. docs/protocol.md has it
byte by byte.

Decoding goes from cheap to dear so that a reader can stop early: `unpack` (sizes, decompression),
`Header` (who and what), `content` (tokens, log-probs, rewards). Each refuses with a WireError; what
a signature is worth is not known here.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec
import zstandard

from motley.exchange.frames import FrameError, decompressed
from motley.exchange.sections import (
    WireError,
    decode_sections,
    encode_sections,
    fits_rounding,
    varint_bytes,
    varints,
)
from motley.records import (
    HUB,
    NO_BASE,
    Backlog,
    Blob,
    Charter,
    Content,
    Convention,
    Group,
    Origin,
    Precision,
    Roster,
    Sampling,
    Stamp,
    Weights,
)

SCHEMA = 2
SIGNATURE_BYTES = 64
MAX_RECORD_BYTES = 4 * 2**20
MAX_BODY_BYTES = 8 * 2**20
MAX_BLOBS = 4096  # of one version

_SIGNED_PREFIX = b"motley record 2\n"
_HEAD_BYTES = 1 + SIGNATURE_BYTES
_WORTH_BLOCKS_BYTES = 1024  # of a body: below, a block's own tables cost more than they bring


class Sealed(NamedTuple):
    """A record taken apart, its signature not yet checked."""

    signature: bytes
    body: bytes

    @property
    def signed(self) -> bytes:
        """The bytes the signature is over."""
        return _SIGNED_PREFIX + self.body

    @property
    def hash(self) -> bytes:
        """What the publisher's next record calls `previous`: independent of how the body was
        compressed.
        """
        return hashlib.sha256(self.body).digest()


# Encoding


def pack(signature: bytes, *parts: bytes) -> bytes:
    """A record of a body, whole or in parts.

    Each part is a block of the frame, with statistics of its own: ids and log-probs differ.
    """
    body = b"".join(parts)
    *first, last = parts if len(body) >= _WORTH_BLOCKS_BYTES else [body]
    compressor = zstandard.ZstdCompressor(level=9, write_checksum=False).compressobj(size=len(body))
    blocks = [
        compressor.compress(part) + compressor.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for part in first
    ]
    record = b"".join(
        (bytes([SCHEMA]), signature, *blocks, compressor.compress(last), compressor.flush())
    )
    if len(record) > MAX_RECORD_BYTES or len(body) > MAX_BODY_BYTES:
        raise ValueError(
            f"a record of {len(record)} bytes ({len(body)} uncompressed) is over the log's limit "
            f"({MAX_RECORD_BYTES}, {MAX_BODY_BYTES}); "
            "use a smaller group_size or max_tokens"
        )
    return record


def encode(content: Content, stamp: Stamp, lossless: bool = False) -> bytes:
    """The body of a record.

    Log-probs are rounded to 1/1700 unless `lossless`, or one of them would not fit.
    """
    return b"".join(encode_parts(content, stamp, lossless))


def encode_parts(content: Content, stamp: Stamp, lossless: bool = False) -> list[bytes]:
    """The body, cut where one kind of bytes ends and another begins."""
    if not isinstance(content, Group):
        return [_with_length(_header_encoder.encode(_plain_header(content, stamp)))]
    lossless = lossless or not fits_rounding(content.rollouts)
    first, *rest = encode_sections(content.id, content.rollouts, lossless)
    return [
        _with_length(_header_encoder.encode(_group_header(content, stamp, lossless))) + first,
        *rest,
    ]


# Decoding


def unpack(record: bytes) -> Sealed:
    """Check sizes and decompress, in bounded memory."""
    if len(record) > MAX_RECORD_BYTES:
        raise WireError(
            "size", f"record has {len(record)} bytes; at most {MAX_RECORD_BYTES} are read"
        )
    if not record or record[0] != SCHEMA:
        raise WireError(
            "schema",
            f"record has schema {record[0] if record else 'none'}; this reader knows {SCHEMA}",
        )
    if len(record) <= _HEAD_BYTES:
        raise WireError(
            "truncated", f"record has {len(record)} bytes, too few for a signature and a body"
        )
    try:
        return Sealed(record[1:_HEAD_BYTES], decompressed(record[_HEAD_BYTES:], MAX_BODY_BYTES))
    except FrameError as error:
        raise WireError(error.fault, f"body {error}") from None


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a body: who publishes what, where in its chain. `content` decodes the rest."""

    stamp: Stamp
    crew: str
    id: str
    _fields: _GroupHeader | _WeightsHeader | _CharterHeader | _RosterHeader
    _rest: memoryview

    @property
    def sender(self) -> str:
        return self._fields.peer if isinstance(self._fields, _GroupHeader | _WeightsHeader) else HUB

    @property
    def is_of_hub(self) -> bool:
        """Whether only a hub may publish such a record."""
        return isinstance(self._fields, _CharterHeader | _RosterHeader)

    @staticmethod
    def of(body: bytes) -> Header:
        length, start = varints(body, 0, 1)
        rest = memoryview(body)[start:]
        if length[0] > len(rest):
            raise WireError("truncated", f"header declares {length[0]} bytes of {len(rest)}")
        try:
            fields = _header_decoder.decode(rest[: length[0]])
        except (
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:  # msgspec raises the last two as they are
            raise WireError("malformed", f"header: {error}") from None
        stamp = Stamp(key=fields.key, counter=fields.counter, previous=fields.previous)
        return Header(stamp, fields.crew, fields.id, fields, rest[length[0] :])

    def content(self) -> Content:
        try:
            return self._fields.content(bytes(self._rest))
        except (ValueError, OverflowError) as error:
            raise (
                error
                if isinstance(error, WireError)
                else WireError("malformed", f"record: {error}")
            ) from None


def decode(body: bytes) -> tuple[Stamp, Content]:
    """A whole body, unchecked."""
    header = Header.of(body)
    return header.stamp, header.content()


# Headers: MessagePack arrays, in this order of fields


_Filled = TypeVar("_Filled", bound=msgspec.Struct)
_BlobTable = tuple[tuple[bytes, int, int], ...]  # hash, compressed and uncompressed size


class _Head(msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True):
    key: bytes
    counter: int
    previous: bytes
    crew: str

    def __post_init__(self) -> None:
        if len(self.key) != 32 or len(self.previous) != 32 or not 0 <= self.counter < 2**63:
            raise ValueError("key and previous have 32 bytes, counter is not negative")


class _GroupHeader(_Head, frozen=True, kw_only=True, tag="group"):
    peer: str
    round: int
    slot: int
    problem: str
    created_s: float
    model: str
    vocabulary: str
    version: int
    temperature: float
    top_k: int
    top_p: float
    max_tokens: int
    logprobs: Convention
    num_rollouts: int
    lossless: bool

    @property
    def id(self) -> str:
        return f"{self.peer}.{self.round}.{self.slot}"

    def content(self, sections: bytes) -> Group:
        if not math.isfinite(self.created_s):
            raise WireError("malformed", f"created_s is {self.created_s}")
        origin = _filled(Origin, self, sampling=_filled(Sampling, self))
        rollouts = decode_sections(sections, self.num_rollouts, self.lossless)
        return _filled(Group, self, origin=origin, rollouts=rollouts)


class _WeightsHeader(_Head, frozen=True, kw_only=True, tag="weights"):
    peer: str
    version: int
    precision: Precision
    base: int
    base_state: bytes
    state: bytes
    blobs: _BlobTable
    frozen: _BlobTable
    waiting: tuple[tuple[str, int], ...]
    oldest_s: float
    created_s: float

    @property
    def id(self) -> str:
        return f"{self.peer}.weights.{self.version}"

    def content(self, sections: bytes) -> Weights:
        _check_nothing_behind(sections)
        if not (0 <= self.version < 2**63 and NO_BASE <= self.base < self.version):
            raise WireError("malformed", f"weights of version {self.version} on base {self.base}")
        if any(count < 0 for _, count in self.waiting):
            raise WireError("malformed", "a backlog of fewer than no groups")
        if len(self.state) != 32 or len(self.base_state) != (0 if self.base == NO_BASE else 32):
            raise WireError(
                "malformed",
                "a hash of weights does not have 32 bytes, or a base is named without its hash",
            )
        if not (math.isfinite(self.created_s) and 0 <= self.oldest_s < math.inf):
            raise WireError(
                "malformed", f"created_s is {self.created_s} and oldest_s {self.oldest_s}"
            )
        return _filled(
            Weights,
            self,
            blobs=_blobs(self.blobs),
            frozen=_blobs(self.frozen),
            backlog=_filled(Backlog, self),
        )


def _blobs(table: _BlobTable) -> tuple[Blob, ...]:
    if len(table) > MAX_BLOBS or any(
        len(name) != 32 or not (0 <= size < 2**40 and 0 <= raw < 2**40) for name, size, raw in table
    ):
        raise WireError(
            "malformed",
            f"{len(table)} blobs; at most {MAX_BLOBS}, each with a hash of 32 bytes and two "
            "sizes, are read",
        )
    return tuple(
        Blob(sha256=name.hex(), num_bytes=size, raw_bytes=raw) for name, size, raw in table
    )


class _CharterHeader(_Head, frozen=True, kw_only=True, tag="charter"):
    config: str
    task: str

    @property
    def id(self) -> str:
        return self.content(b"").id

    def content(self, sections: bytes) -> Charter:
        _check_nothing_behind(sections)
        return _filled(Charter, self)


class _RosterHeader(_Head, frozen=True, kw_only=True, tag="roster"):
    number: int
    keys: dict[str, bytes]
    revoked: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.content(b"").id

    def content(self, sections: bytes) -> Roster:
        _check_nothing_behind(sections)
        if any(len(key) != 32 for key in self.keys.values()):
            raise WireError("malformed", "a key of the roster does not have 32 bytes")
        return _filled(Roster, self)


def _check_nothing_behind(sections: bytes) -> None:
    if sections:
        raise WireError(
            "malformed", f"{len(sections)} bytes behind the header of a record that has no sections"
        )


_header_encoder = msgspec.msgpack.Encoder(order="sorted")
_header_decoder = msgspec.msgpack.Decoder(
    _GroupHeader | _WeightsHeader | _CharterHeader | _RosterHeader
)


def _group_header(group: Group, stamp: Stamp, lossless: bool) -> _GroupHeader:
    origin, sampling = group.origin, group.origin.sampling
    return _filled(
        _GroupHeader,
        stamp,
        group,
        origin,
        sampling,
        num_rollouts=len(group.rollouts),
        lossless=lossless,
    )


def _plain_header(
    content: Weights | Charter | Roster, stamp: Stamp
) -> _WeightsHeader | _CharterHeader | _RosterHeader:
    if isinstance(content, Weights):
        return _filled(
            _WeightsHeader,
            stamp,
            content,
            content.backlog,
            blobs=_table(content.blobs),
            frozen=_table(content.frozen),
        )
    if isinstance(content, Charter):
        return _filled(_CharterHeader, stamp, content)
    return _filled(_RosterHeader, stamp, content)


def _table(blobs: tuple[Blob, ...]) -> _BlobTable:
    return tuple((bytes.fromhex(b.sha256), b.num_bytes, b.raw_bytes) for b in blobs)


def _filled(kind: type[_Filled], *sources: msgspec.Struct, **others: object) -> _Filled:
    """A struct whose fields are those of the same name of the sources, but for `others`.

    So a header names its fields once, where their order on the wire is.
    """
    fields = {
        name: getattr(source, name)
        for source in sources
        for name in source.__struct_fields__
        if name in kind.__struct_fields__
    }
    return kind(**fields | others)


def _with_length(header: bytes) -> bytes:
    return varint_bytes([len(header)]) + header
