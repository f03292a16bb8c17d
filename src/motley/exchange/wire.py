"""A group as bytes: a schema version, then MessagePack. Decoding refuses what it does not know, by name."""

from __future__ import annotations

import msgspec

from motley.records import Group

SCHEMA = 1

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Group)


class WireError(ValueError):
    """Bytes that are not a group of a known schema. `reason` is one word to count by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def encode(group: Group) -> bytes:
    return bytes([SCHEMA]) + _encoder.encode(group)


def decode(record: bytes) -> Group:
    if not record or record[0] != SCHEMA:
        raise WireError("schema", f"record has schema {record[0] if record else 'none'}; this reader knows {SCHEMA}")
    try:
        return _decoder.decode(record[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:  # msgspec raises the last two as they are
        raise WireError("malformed", f"record is not a group: {error}") from None
