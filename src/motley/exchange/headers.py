"""Headers of records: MessagePack arrays. Owns which field stands where, and what of it is out of
range whatever the crew. What a crew allows is not known here.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from motley.exchange.sections import RolloutArrays, WireError
from motley.records import (
    NO_BASE,
    Backlog,
    Blob,
    Branch,
    Charter,
    Content,
    Convention,
    Group,
    Origin,
    Precision,
    Roster,
    Sampling,
    Stamp,
    Table,
    Weights,
)

MAX_BLOBS = 4096  # of one version
MAX_WAITING = 2**14  # authors in a learner's backlog
MAX_ENDS = 2**18  # tokens of a table that end an answer


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


class GroupHeader(_Head, frozen=True, kw_only=True, tag="group"):
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

    @property
    def num_before(self) -> int:
        """Tokens between the prompt and every rollout."""
        return 0

    def origin(self) -> Origin:
        """Who made the group, with what."""
        if not math.isfinite(self.created_s):
            raise WireError("malformed", f"created_s is {self.created_s}")
        try:
            sampling = Sampling(
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                max_tokens=self.max_tokens,
                logprobs=self.logprobs,
            )
            return Origin(
                peer=self.peer,
                model=self.model,
                vocabulary=self.vocabulary,
                version=self.version,
                sampling=sampling,
            )
        except ValueError as error:
            raise WireError("malformed", f"sampling: {error}") from None

    def group(self, origin: Origin, arrays: RolloutArrays) -> Group:
        return _filled(Group, self, origin=origin, rollouts=arrays.rollouts())


class BranchHeader(GroupHeader, frozen=True, kw_only=True, tag="branch"):
    """A group of continuations: a group's fields, then where they begin."""

    met_round: int
    met_slot: int
    prefix: tuple[int, ...]

    @property
    def num_before(self) -> int:
        return len(self.prefix)

    def group(self, origin: Origin, arrays: RolloutArrays) -> Group:
        branch = Branch(round=self.met_round, slot=self.met_slot, prefix=self.prefix)
        return _filled(Group, self, origin=origin, rollouts=arrays.rollouts(), branch=branch)


class TableHeader(_Head, frozen=True, kw_only=True, tag="table"):
    peer: str
    vocabulary: str
    ends: tuple[int, ...]
    encoded: bytes

    @property
    def id(self) -> str:
        return f"{self.peer}.table"

    def content(self) -> Table:
        if not 0 < len(self.ends) <= MAX_ENDS or not all(0 <= end < 2**35 for end in self.ends):
            raise WireError(
                "malformed",
                f"a table with {len(self.ends)} end tokens, or with one that is no token; expected "
                f"1 to {MAX_ENDS}, each from 0 to 2^35",
            )
        return _filled(Table, self)


class WeightsHeader(_Head, frozen=True, kw_only=True, tag="weights"):
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

    def content(self) -> Weights:
        if not (0 <= self.version < 2**63 and NO_BASE <= self.base < self.version):
            raise WireError("malformed", f"weights of version {self.version} on base {self.base}")
        if len(self.waiting) > MAX_WAITING or any(count < 0 for _, count in self.waiting):
            raise WireError(
                "malformed",
                f"a backlog of {len(self.waiting)} authors, or of fewer than no groups; at most "
                f"{MAX_WAITING} authors are read",
            )
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


class CharterHeader(_Head, frozen=True, kw_only=True, tag="charter"):
    config: str
    task: str

    @property
    def id(self) -> str:
        return self.content().id

    def content(self) -> Charter:
        return _filled(Charter, self)


class LotsHeader(CharterHeader, frozen=True, kw_only=True, tag="lots"):
    """A charter of a crew whose groups stand in lots: the same fields."""

    def content(self) -> Charter:
        return _filled(Charter, self, lots=True)


class RosterHeader(_Head, frozen=True, kw_only=True, tag="roster"):
    number: int
    keys: dict[str, bytes]
    revoked: tuple[str, ...]

    @property
    def id(self) -> str:
        return self.content().id

    def content(self) -> Roster:
        if any(len(key) != 32 for key in self.keys.values()):
            raise WireError("malformed", "a key of the roster does not have 32 bytes")
        return _filled(Roster, self)


OfHub = CharterHeader | LotsHeader | RosterHeader
AnyHeader = GroupHeader | BranchHeader | TableHeader | WeightsHeader | OfHub

_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(AnyHeader)


def encode_header(content: Content, stamp: Stamp, lossless: bool) -> bytes:
    """`lossless`: how a group's log-probs are encoded behind it."""
    return _encoder.encode(
        _group_header(content, stamp, lossless)
        if isinstance(content, Group)
        else _plain_header(content, stamp)
    )


def decode_header(content: memoryview) -> AnyHeader:
    try:
        return _decoder.decode(content)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # msgspec raises the last two as they are
        raise WireError("malformed", f"header: {error}") from None


def _group_header(group: Group, stamp: Stamp, lossless: bool) -> GroupHeader:
    sources = (stamp, group, group.origin, group.origin.sampling)
    sizes = {"num_rollouts": len(group.rollouts), "lossless": lossless}
    if group.branch is None:
        return _filled(GroupHeader, *sources, **sizes)
    place = {"met_round": group.branch.round, "met_slot": group.branch.slot}
    return _filled(BranchHeader, *sources, **sizes, **place, prefix=group.branch.prefix)


def _plain_header(
    content: Table | Weights | Charter | Roster, stamp: Stamp
) -> TableHeader | WeightsHeader | OfHub:
    if isinstance(content, Weights):
        return _filled(
            WeightsHeader,
            stamp,
            content,
            content.backlog,
            blobs=_blob_table(content.blobs),
            frozen=_blob_table(content.frozen),
        )
    if isinstance(content, Table):
        return _filled(TableHeader, stamp, content)
    if isinstance(content, Charter):
        return _filled(LotsHeader if content.lots else CharterHeader, stamp, content)
    return _filled(RosterHeader, stamp, content)


def _blob_table(blobs: tuple[Blob, ...]) -> _BlobTable:
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
