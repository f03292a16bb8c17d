"""A record as bytes: schema, signature, and one zstd frame around the body. docs/protocol.md has it
byte by byte.

Decoding goes from cheap to dear so that a reader can stop early: `unpack` (sizes, decompression),
`Header` (who and what), `arrays` (tokens, log-probs, rewards), `content`. Each refuses with a
WireError what is beyond the reader's `Limits`; what a signature is worth is not known here.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import zstandard

from motley.exchange.frames import FrameError, decompressed
from motley.exchange.headers import (
    AnyHeader,
    CharterHeader,
    GroupHeader,
    RosterHeader,
    decode_header,
    encode_header,
)
from motley.exchange.sections import (
    MAX_TOKENS,
    RolloutArrays,
    WireError,
    decode_sections,
    encode_sections,
    varint,
    varint_bytes,
)
from motley.records import HUB, Content, Group, Stamp

SCHEMA = 2
SIGNATURE_BYTES = 64
MAX_RECORD_BYTES = 4 * 2**20
MAX_BODY_BYTES = 8 * 2**20

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


@dataclass(frozen=True, slots=True)
class Limits:
    """How large a record may be that a reader takes apart. What nobody says is the log's own."""

    record_bytes: int = MAX_RECORD_BYTES
    body_bytes: int = MAX_BODY_BYTES
    header_bytes: int = MAX_BODY_BYTES
    rollout_tokens: int = MAX_TOKENS


NO_CREWS = Limits()  # where no crew sets closer ones


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
        return [_with_length(encode_header(content, stamp, lossless))]
    made = encode_sections(content.id, content.rollouts, lossless)
    first, *rest = made.parts
    return [_with_length(encode_header(content, stamp, made.lossless)) + first, *rest]


def _with_length(header: bytes) -> bytes:
    return varint_bytes([len(header)]) + header


# Decoding


def unpack(record: bytes, limits: Limits = NO_CREWS) -> Sealed:
    """Check sizes and decompress, in bounded memory."""
    if len(record) > limits.record_bytes:
        raise WireError(
            "size", f"record has {len(record)} bytes; at most {limits.record_bytes} are read"
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
        return Sealed(record[1:_HEAD_BYTES], decompressed(record[_HEAD_BYTES:], limits.body_bytes))
    except FrameError as error:
        raise WireError(error.fault, f"body {error}") from None


@dataclass(frozen=True, slots=True)
class Header:
    """The head of a body: who publishes what, where in its chain. `content` decodes the rest."""

    stamp: Stamp
    crew: str
    id: str
    fields: AnyHeader
    _rest: bytes

    @property
    def sender(self) -> str:
        return HUB if isinstance(self.fields, CharterHeader | RosterHeader) else self.fields.peer

    @property
    def is_of_hub(self) -> bool:
        """Whether only a hub may publish such a record."""
        return isinstance(self.fields, CharterHeader | RosterHeader)

    @staticmethod
    def of(body: bytes, limits: Limits = NO_CREWS) -> Header:
        length, start = varint(body)
        stop = start + length
        if stop > len(body):
            raise WireError("truncated", f"header declares {stop - start} bytes of {len(body)}")
        if stop - start > limits.header_bytes:
            raise WireError(
                "size", f"header has {stop - start} bytes; at most {limits.header_bytes} are read"
            )
        fields = decode_header(memoryview(body)[start:stop])
        stamp = Stamp(key=fields.key, counter=fields.counter, previous=fields.previous)
        return Header(stamp, fields.crew, fields.id, fields, body[stop:])

    def arrays(self, limits: Limits = NO_CREWS) -> RolloutArrays:
        """A group's rollouts, as they stand in the record."""
        assert isinstance(self.fields, GroupHeader)
        return decode_sections(
            self._rest, self.fields.num_rollouts, self.fields.lossless, limits.rollout_tokens
        )

    def content(self) -> Content:
        if isinstance(self.fields, GroupHeader):
            return self.fields.group(self.fields.origin(), self.arrays())
        if self._rest:
            raise WireError(
                "malformed",
                f"{len(self._rest)} bytes behind the header of a record that has no sections",
            )
        return self.fields.content()


def decode(body: bytes) -> tuple[Stamp, Content]:
    """A whole body, unchecked."""
    header = Header.of(body)
    return header.stamp, header.content()
