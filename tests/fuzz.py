"""Fuzzing of admission: change valid records at random, feed them to `Admission.admit`, expect a
named refusal or a sound group.

    python tests/fuzz.py --records 1000000 [--seed 0] [--json]

Two kinds of change. Of a record's bytes, as a broken line or a stranger would: what is admitted
then must be exactly what was signed. Of what is inside it, signed again with its author's key, as a
dishonest peer would: these reach the decoder and every later check, and what is admitted must keep
the crew's rules, written down here a second time. A failure is an exception, an admitted group that
breaks either promise, a record that is counted other than once, or memory that grows. Exit status 1
on any.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import itertools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import zstandard
from nacl.signing import SigningKey

from motley.exchange import Entry, Sealed, encode, pack, unpack
from motley.exchange.wire import encode_parts
from motley.records import (
    Backlog,
    Blob,
    Charter,
    Content,
    Group,
    Origin,
    Problem,
    Rollout,
    Roster,
    Sampling,
    Stamp,
    Table,
    Weights,
)
from motley.spelling import Spelling
from motley.trust import MAX_REWARD, Admission, Admitted, Rules, Tables

# The header of a group, in its order on the wire.
FIELDS = [
    "tag", "key", "counter", "previous", "crew", "peer", "round", "slot", "problem", "created_s",
    "model", "vocabulary", "version", "temperature", "top_k", "top_p", "max_tokens", "logprobs",
    "num_rollouts", "lossless",
]  # fmt: skip

RULES = Rules(
    crew="crew",
    vocabulary="v",
    vocabulary_size=32,
    end_ids=(1,),
    rollouts_per_group=2,
    sampling=Sampling(max_tokens=8),
    slots=2,
    rounds=4,
    steps=4,
    learners=frozenset({"l"}),
    mixed=True,
)
PROBLEMS = [Problem(prompt="reverse 12=", answer="21"), Problem(prompt="sort 21=", answer="12")]
AUTHORS = {
    name: SigningKey(hashlib.sha256(name.encode()).digest())
    for name in ("a", "f", "größe", "gone", "hub", "l")
}
KEYS = {name: bytes(key.verify_key) for name, key in AUTHORS.items()}
ROSTER = {name: KEYS[name] for name in ("a", "f", "größe", "l")}
# f has a vocabulary of its own: token 1 ends, token 2 is special, token 3 is right
FOREIGN = Spelling((None, None, None, *(b"%d" % number for number in range(3, 16))))
TABLE = Table(crew="crew", peer="f", vocabulary="w", ends=(1,), encoded=FOREIGN.encode())
STRANGE = [
    None, True, -1, 0, 1, 2, 255, 4095, 4097, 2**31, 2**63 - 1, 2**63, 2**64 - 1,
    0.0, 0.5, -1.5, 1e300, math.nan, math.inf, -math.inf,
    "", "a", "a.0", "hub", "hub.roster.0", "größe", "crew", "\x00", "x" * 300, "stop", "full",
    b"", b"x", bytes(32), KEYS["hub"], KEYS["a"],
    [], [1], [[[]]], {}, {"a": bytes(32)}, {"a": b""}, ["a"], [""],
]  # fmt: skip
# Of a group's header: at the edge of what the crew allows, and beyond it.
EDGES: dict[str, list[Any]] = {
    "counter": [0, 1, 4095, 4096, 4097, 2**63 - 1],
    "crew": ["crew", "crew2", "x" * 4000],
    "round": [0, 2, 3, 4, 2**31 - 1, 2**31, -1],
    "slot": [0, 1, 2, -1, 2**63],
    "problem": [PROBLEMS[0].id, PROBLEMS[1].id, "", "x" * 3000],
    "created_s": [0.0, 0, -0.0, 2.0**33, 2.0**33 + 2, -1e-9, 1e300, math.inf, math.nan],
    "model": ["", "m" * 200, "m" * 201, "\u2028", "\n", "m" * 5000],
    "vocabulary": ["v", "w", "", "v" * 3000],
    "version": [0, 4, 5, -1, 2**31, 2**64 - 1],
    "temperature": [1.0, 1, 1.0 + 2**-52, 1e-40, 5e-324, 0.0, 10.0, 10.1, math.nan],
    "top_k": [0, 1, 32, -1, 2**63],
    "top_p": [1.0, 1, 1 - 2**-53, 1e-300, 0.0],
    "max_tokens": [8, 7, 9, 1, 0, 2**63],
    "logprobs": ["sampled", "full", "", "x"],
    "num_rollouts": [2, 1, 3, 0, -1, 2**14, 2**63],
    "lossless": [True, False],
}
FAMILIAR = [
    Rollout(tokens=tokens, logprobs=(-6.0,) * 8, reward=float(tokens[0] == 3), ending="length")
    for tokens in ((3, 4, 5, 6, 7, 8, 9, 10), (4, 4, 4, 4, 4, 4, 4, 4), (9, 8, 7, 6, 5, 4, 3, 2))
]
PLACES = [
    "", ".", "0", "0.0", "0.0.0", "00.0", "0.00", "+1.0", "-1.0", "1e3.0", "٣.0", "4.0", "0.2",
    "9" * 30 + ".0", "weights.0", "weights.5", "weights.x", "charter", "roster.0", "0.0\n",
    "table", "table.0", "table." + "0" * 16, "tables",
    "\x00.0",
]  # fmt: skip
MEMORY_MAY_GROW_BYTES = 32 * 2**20
KEPT_FAILURES = 5


class Base(NamedTuple):
    """A valid record and what is in it."""

    author: str
    content: Content
    record: bytes
    body: bytes
    header: list[Any]
    sections: bytes

    @property
    def id(self) -> str:
        return self.content.id


class Mutant(NamedTuple):
    kind: str
    entry: Entry
    signed: bool  # by its author, after the change


@dataclass(slots=True)
class Result:
    records: int = 0
    elapsed_s: float = 0.0
    memory_growth_bytes: int = 0
    # a refusal's reason, "admitted" or "hub"
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    admitted_by_kind: Counter[str] = field(default_factory=Counter)
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.num_failures += 1
        if len(self.failures) < KEPT_FAILURES:
            self.failures.append(what)


# Bodies, taken apart and put together


def varint(number: int) -> bytes:
    found = bytearray()
    while number >= 128:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def take_apart(body: bytes) -> tuple[list[Any], bytes]:
    """The header's array, and the sections behind it."""
    length = shift = start = 0
    while True:
        byte = body[start]
        length |= (byte & 127) << shift
        start, shift = start + 1, shift + 7
        if byte < 128:
            return msgspec.msgpack.decode(body[start : start + length]), body[start + length :]


def put_together(header: Any, sections: bytes) -> bytes:
    encoded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return varint(len(encoded)) + encoded + sections


def id_of(header: Sequence[Any], otherwise: str) -> str:
    """Where a record with this header would stand."""
    if not isinstance(header, list) or not header:
        return otherwise
    if header[0] == "group" and len(header) > 7:
        return f"{header[5]}.{header[6]}.{header[7]}"
    if header[0] == "weights" and len(header) > 6:
        return f"{header[5]}.weights.{header[6]}"
    if header[0] == "table" and len(header) > 5:
        return f"{header[5]}.table"
    if header[0] == "roster" and len(header) > 5:
        return f"hub.roster.{header[5]}"
    return otherwise


# The crew under test


def assigned(peer: str, round: int) -> list[Problem]:
    return PROBLEMS if round % 2 == 0 else PROBLEMS[::-1]


def score(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
    if any(31 in rollout.tokens for rollout in rollouts):
        raise ZeroDivisionError("a reward function that fails on what it does not know")
    return [float(rollout.tokens[0] == 3) for rollout in rollouts]


def score_texts(problem: Problem, texts: Sequence[str]) -> list[float]:
    if any("15" in text for text in texts):
        raise ZeroDivisionError("a reward function that fails on what it does not know")
    return [float(text.startswith("3")) for text in texts]


def admission(with_table: bool = True) -> Admission:
    """`with_table`: f's is on the log already."""
    tables = Tables()
    if with_table:
        tables.add(KEYS["f"], TABLE, 1)
    return Admission(
        RULES,
        KEYS["hub"],
        assigned,
        score,
        score_texts=score_texts,
        tables=tables,
        keys=dict(ROSTER),
        revoked=frozenset({"gone"}),
    )


def foreign_group(round: int, slot: int) -> Group:
    """Of f, in its own vocabulary."""
    made = group("f", round, slot, (-0.5, -1.0, -0.25, -2.0))
    first, second = made.rollouts
    return msgspec.structs.replace(
        made,
        origin=msgspec.structs.replace(made.origin, vocabulary="w"),
        rollouts=(
            msgspec.structs.replace(first, canonical=False),
            msgspec.structs.replace(second, tokens=(14, 4, 5, 6, 7, 8, 9, 10)),
        ),
    )


def group(peer: str, round: int, slot: int, logprobs: Sequence[float]) -> Group:
    rollouts = (
        Rollout(tokens=(3, 4, 5, 1), logprobs=tuple(logprobs), reward=1.0, ending="stop"),
        Rollout(
            tokens=(30, 4, 5, 6, 7, 8, 9, 10),
            logprobs=tuple(logprobs) * 2,
            reward=0.0,
            ending="length",
        ),
    )
    problem = assigned(peer, round)[slot]
    origin = Origin(peer=peer, model="m", vocabulary="v", version=3, sampling=RULES.sampling)
    return Group(
        crew="crew",
        problem=problem.id,
        round=round,
        slot=slot,
        origin=origin,
        rollouts=rollouts,
        created_s=1.5,
    )


WEIGHTS = Weights(
    crew="crew",
    peer="l",
    version=2,
    precision="bfloat16",
    base=1,
    base_state=bytes(32),
    state=bytes(range(32)),
    blobs=(Blob(sha256="ab" * 32, num_bytes=10, raw_bytes=25),),
    frozen=(),
    backlog=Backlog(waiting=(("a", 3),), oldest_s=1.5),
    created_s=1.5,
)


def bases() -> list[Base]:
    contents: list[tuple[str, Content]] = [
        ("a", group("a", 0, 0, (-0.5, -1.0, -0.25, -2.0))),
        ("a", group("a", 1, 1, (-0.1, -4.0, -0.3, 0.0009))),  # lossless
        ("größe", group("größe", 3, 0, (-5.0, -1e-7, -12.0, -0.7))),
        ("gone", group("gone", 0, 0, (-0.5, -1.0, -0.25, -2.0))),
        ("hub", Charter(crew="crew", config='[crew]\nname = "crew"\n', task="t")),
        ("hub", Roster(crew="crew", number=1, keys=ROSTER, revoked=("gone",))),
        ("l", WEIGHTS),
        ("f", TABLE),
        ("f", foreign_group(0, 1)),
    ]
    return [base(author, content) for author, content in contents]


def base(author: str, content: Content) -> Base:
    parts = encode_parts(content, Stamp(key=KEYS[author]))
    body = b"".join(parts)
    return Base(author, content, pack(sign(author, body), *parts), body, *take_apart(body))


def sign(author: str, body: bytes) -> bytes:
    return AUTHORS[author].sign(Sealed(b"", body).signed).signature


# Changes to bytes


def flip(rng: random.Random, content: bytes) -> bytes:
    found = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if found:
            found[rng.randrange(len(found))] ^= 1 << rng.randrange(8)
    return bytes(found)


def truncate(rng: random.Random, content: bytes) -> bytes:
    return content[: rng.randrange(len(content) + 1)]


def insert(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + rng.randbytes(rng.randrange(1, 9)) + content[place:]


def overwrite(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content) + 1)
    new = rng.randbytes(rng.randrange(1, 9))
    return content[:place] + new + content[place + len(new) :]


def remove(rng: random.Random, content: bytes) -> bytes:
    place = rng.randrange(len(content) + 1)
    return content[:place] + content[place + rng.randrange(1, 9) :]


def duplicate(rng: random.Random, content: bytes) -> bytes:
    start = rng.randrange(len(content) + 1)
    stop = rng.randrange(start, len(content) + 1)
    return content[:stop] + content[start:stop] + content[stop:]


BYTE_CHANGES: list[Callable[[random.Random, bytes], bytes]] = [
    flip,
    flip,
    truncate,
    insert,
    overwrite,
    remove,
    duplicate,
]


class Fuzzer:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bases = bases()
        self.bodies = {base.body for base in self.bases}
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._makers: list[Callable[[Base], Mutant]] = [
            self._bytes,
            self._frame,
            self._splice,
            self._noise,
        ]
        self._makers += 2 * [self._field] + [
            self._array,
            self._sections,
            self._steps,
            self._body,
            self._rollouts,
            self._value,
            self._lengths,
            self._bomb,
            self._again,
            self._id,
            self._table,
        ]

    def mutant(self) -> Mutant:
        return self.rng.choice(self._makers)(self.rng.choice(self.bases))

    # As a stranger would

    def _bytes(self, base: Base) -> Mutant:
        change = self.rng.choice(BYTE_CHANGES)
        return Mutant(
            f"record {change.__name__}", Entry(1, base.id, change(self.rng, base.record)), False
        )

    def _frame(self, base: Base) -> Mutant:
        """A changed body, compressed well, under the signature of the unchanged one."""
        body = self.rng.choice(BYTE_CHANGES)(self.rng, base.body)
        return Mutant(
            "unsigned body",
            Entry(1, base.id, base.record[:65] + self._compressor.compress(body)),
            False,
        )

    def _splice(self, base: Base) -> Mutant:
        other = self.rng.choice(self.bases).record
        place = self.rng.choice((1, 65, self.rng.randrange(len(base.record))))
        return Mutant(
            "splice",
            Entry(
                1,
                base.id,
                base.record[:place]
                + other[self.rng.choice((place, self.rng.randrange(len(other)))) :],
            ),
            False,
        )

    def _noise(self, base: Base) -> Mutant:
        start = base.record[: self.rng.choice((0, 1, 65, 69, 74))]
        return Mutant(
            "noise", Entry(1, base.id, start + self.rng.randbytes(self.rng.randrange(200))), False
        )

    # As a dishonest peer would

    def _signed(self, kind: str, base: Base, id: str, body: bytes) -> Mutant:
        record = b"\x02" + sign(base.author, body) + self._compressor.compress(body)
        return Mutant(kind, Entry(1, base.id if self.rng.random() < 0.1 else id, record), True)

    def _field(self, base: Base) -> Mutant:
        header = list(base.header)
        for _ in range(self.rng.choice((1, 1, 1, 2))):
            place = self.rng.randrange(len(header))
            header[place] = self._like(header[place])
        return self._signed(
            "header field", base, id_of(header, base.id), put_together(header, base.sections)
        )

    def _like(self, value: Any) -> Any:
        """Mostly a value that may pass for the old one, so that later checks are reached."""
        draw = self.rng.random()
        if draw < 0.4:
            return self.rng.choice(STRANGE)
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return min(max(0, value + self.rng.choice((-1, 1, 2, 4, 4096, 5000))), 2**64 - 1)
        if isinstance(value, float):
            return value + self.rng.choice((-0.5, 0.5, 100.0))
        if isinstance(value, str):
            return value + self.rng.choice(("", "x", ".", ".0", "é"))
        return flip(self.rng, value) if isinstance(value, bytes) else value

    def _array(self, base: Base) -> Mutant:
        """A header with fields more, fewer or elsewhere, or of changed bytes."""
        header: Any = list(base.header)
        place = self.rng.randrange(len(header))
        action = self.rng.randrange(5)
        if action == 0:
            del header[place]
        elif action == 1:
            header.insert(place, self.rng.choice(STRANGE))
        elif action == 2:
            self.rng.shuffle(header)
        elif action == 3:
            header = self.rng.choice(STRANGE)
        else:
            header = self.rng.choice(BYTE_CHANGES)(self.rng, msgspec.msgpack.encode(header))
        return self._signed(
            "header array", base, id_of(header, base.id), put_together(header, base.sections)
        )

    def _sections(self, base: Base) -> Mutant:
        header, sections = list(base.header), self.rng.choice(BYTE_CHANGES)(self.rng, base.sections)
        if header[0] == "group" and self.rng.random() < 0.2:
            header[-2] = self.rng.choice((0, 1, 2, 3, len(sections), 2**20))
        return self._signed("sections", base, base.id, put_together(header, sections))

    def _steps(self, base: Base) -> Mutant:
        """Rounded log-probs of other bit lengths, with about as many bits behind them as they ask
        for.
        """
        if not isinstance(base.content, Group) or base.header[-1]:
            return self._sections(base)
        count = sum(len(rollout.tokens) for rollout in base.content.rollouts)
        start = base.sections.rindex(bytes(base.content.rollouts[-1].tokens)) + len(
            base.content.rollouts[-1].tokens
        )
        most = self.rng.choice((0, 1, 2, 9, 16, 16, 16, 17, 255))
        lengths = bytes(
            self.rng.randrange(most + 1)
            for _ in range(count + self.rng.choice((-1, 0, 0, 0, 0, 1)))
        )
        num_bits = sum(max(0, length - 1) for length in lengths)
        bits = self.rng.randbytes(max(0, (num_bits + 7) // 8 + self.rng.choice((-1, 0, 0, 0, 1))))
        return self._signed(
            "log-prob bits",
            base,
            base.id,
            put_together(base.header, base.sections[:start] + lengths + bits),
        )

    def _body(self, base: Base) -> Mutant:
        body = self.rng.choice((base.body, self.rng.randbytes(self.rng.randrange(300))))
        return self._signed("body", base, base.id, self.rng.choice(BYTE_CHANGES)(self.rng, body))

    def _rollouts(self, base: Base) -> Mutant:
        """Well-formed, and with one strange rollout."""
        if not isinstance(base.content, Group):
            return self._sections(base)
        rollouts = list(base.content.rollouts)
        place = self.rng.randrange(2)
        rollouts[place] = self._rollout(rollouts[place])
        made = msgspec.structs.replace(
            base.content, rollouts=tuple(rollouts)[: self.rng.choice((2, 2, 2, 2, 1))]
        )
        body = encode(made, Stamp(key=KEYS[base.author]), lossless=self.rng.random() < 0.5)
        return self._signed("rollout", base, base.id, body)

    def _value(self, base: Base) -> Mutant:
        """One field of a group at the edge of what is allowed, or beyond it."""
        if not isinstance(base.content, Group):
            return self._field(base)
        header = list(base.header)
        name = self.rng.choice(list(EDGES))
        header[FIELDS.index(name)] = self.rng.choice(EDGES[name])
        return self._signed(
            "value", base, id_of(header, base.id), put_together(header, base.sections)
        )

    def _lengths(self, base: Base) -> Mutant:
        """Rollouts of any number, lengths and endings, with as many bytes behind them as they ask
        for, or not.
        """
        if not isinstance(base.content, Group):
            return self._sections(base)
        header = list(base.header)
        count = self.rng.choice((2, 2, 2, 0, 1, 3, 40))
        some = (0, 1, 7, 8, 8, 8, 9, 127, 128, 2**21, 2**34)
        lengths = [self.rng.choice(some) for _ in range(count)]
        total = min(sum(lengths), 4096)
        header[-2], header[-1] = count, self.rng.random() < 0.5
        tokens = bytes(self.rng.choice((1, 3, 3, 5, 31, 32)) for _ in range(total))
        logprobs = bytes(4 * total) if header[-1] else bytes(total)
        sections = (
            bytes(4 * count)
            + bytes(self.rng.choice((0, 1, 1, 2, 3, 4)) for _ in range(count))
            + b"".join(map(varint, lengths))
            + tokens
            + logprobs
        )
        return self._signed("lengths", base, base.id, put_together(header, sections))

    def _bomb(self, base: Base) -> Mutant:
        """A few bytes that declare, or decompress to, very many."""
        size = self.rng.choice((100, 4096, 4300, 4400, 2**14, 2**16))
        if self.rng.random() < 0.02:
            size = self.rng.choice((2**20, 2**23, 2**23 + 1))
        filling = self.rng.choice((bytes, self.rng.randbytes))(size)
        body = self.rng.choice((filling, (base.body + filling)[:size]))
        if self.rng.random() < 0.5:
            return self._signed("bomb", base, base.id, body)
        frame = bytearray(self._compressor.compress(body))
        frame[self.rng.randrange(4, 12)] ^= 1 << self.rng.randrange(8)  # what it declares
        return Mutant("bomb", Entry(1, base.id, base.record[:65] + bytes(frame)), False)

    def _again(self, base: Base) -> Mutant:
        """Rollouts of a few that everyone knows, each of many nats."""
        if not isinstance(base.content, Group):
            return self._field(base)
        rollouts = tuple(self.rng.choice(FAMILIAR) for _ in range(2))
        made = msgspec.structs.replace(base.content, rollouts=rollouts)
        return self._signed("again", base, base.id, encode(made, Stamp(key=KEYS[base.author])))

    def _table(self, base: Base) -> Mutant:
        """Another table of f's: with lengths that lie, other sizes, other ends."""
        rng, name = self.rng, self.rng.choice(("w", "w", "v", "x"))
        count, size = rng.choice((0, 1, 2, 16, 300, 2**20 + 1)), rng.choice((0, 1, 3, 2049))
        planes = [bytes([size >> shift & 255]) * min(count, 300) for shift in (0, 8)]
        made = count.to_bytes(4, "little") + b"".join(planes)
        made += bytes(max(0, min(count, 300) * size + rng.choice((-1, 0, 0, 1))))
        encoded = rng.choice((made, rng.choice(BYTE_CHANGES)(rng, TABLE.encoded)))
        ends = rng.choice(((1,), (), (0, 0), (0, 1), (299,), (2**34,), (-1,), (2**40,)))
        header = [*base_header("f"), "f", name, list(ends), encoded]
        return self._signed("table", self.bases[-2], "f.table", put_together(header, b""))

    def _id(self, base: Base) -> Mutant:
        """The record as it is, under a strange id."""
        name = base.id.split(".")[0]
        place = self.rng.choice(PLACES)
        id = self.rng.choice((f"{name}.{place}", f"{name}{place}", place, f"hub.{place}"))
        return Mutant("id", Entry(1, id, base.record), False)

    def _rollout(self, rollout: Rollout) -> Rollout:
        tokens, logprobs = list(rollout.tokens), list(rollout.logprobs)
        place, action = self.rng.randrange(len(tokens)), self.rng.randrange(5)
        if action == 0:
            count = self.rng.randrange(12)
            return msgspec.structs.replace(
                rollout, tokens=tuple((tokens * 3)[:count]), logprobs=tuple((logprobs * 3)[:count])
            )
        if action == 1:
            tokens[place] = self.rng.choice((0, 1, 2, 3, 31, 32, 127, 128, 2**31, 2**35 - 1))
        if action == 2:
            logprobs[place] = self.rng.choice(
                (
                    0.0,
                    0.5,
                    -32.0,
                    -38.55,
                    -38.56,
                    -63.9,
                    -65.0,
                    -1e30,
                    math.nan,
                    math.inf,
                    -math.inf,
                )
            )
        reward = (
            self.rng.choice((0.0, 1.0, 1 + 1e-6, -1.0, 1e30, math.nan, math.inf))
            if action == 3
            else rollout.reward
        )
        ending = self.rng.choice(("stop", "length")) if action == 4 else rollout.ending
        return Rollout(
            tokens=tuple(tokens),
            logprobs=tuple(logprobs),
            reward=reward,
            ending=ending,
            canonical=self.rng.random() < 0.5,
        )


def base_header(author: str) -> list[Any]:
    """What the header of every table begins with."""
    return ["table", KEYS[author], 0, bytes(32), "crew"]


# What must hold


def fault_of(
    mutant: Mutant, found: Admitted | None, counted: int, fuzzer: Fuzzer, gate: Admission
) -> str:
    """What is wrong with how a mutant was taken, or nothing."""
    if counted:
        return "" if counted == 1 and found is None else f"was counted {counted} times"
    if not mutant.signed:
        return (
            ""
            if unpack(mutant.entry.record).body in fuzzer.bodies
            else "was taken in, and is not what its author signed"
        )
    return (
        ""
        if found is None or keeps_rules(found, mutant.entry.id, gate)
        else f"was admitted, and breaks the crew's rules: {found.group}"
    )


def keeps_rules(found: Admitted, id: str, gate: Admission) -> bool:
    group, size, ends = found.group, RULES.vocabulary_size, RULES.end_ids
    if group.origin.vocabulary != RULES.vocabulary:
        table = gate.tables.of(KEYS[group.origin.peer], group.origin.vocabulary)
        if table is None or found.spelling is not table.spelling:
            return False
        size, ends = len(table.spelling), table.ends
    elif found.spelling is not None:
        return False
    return (
        group.crew == RULES.crew
        and group.origin.peer in ROSTER
        and group.id == id
        and group.problem == found.problem.id
        and 0 <= group.created_s <= 2**33
        and 0 <= group.round < 4
        and 0 <= group.origin.version <= 4
        and len(group.origin.model) <= 200
        and group.origin.model.isprintable()
        and group.origin.sampling == Sampling(max_tokens=8)
        and len(group.rollouts) == RULES.rollouts_per_group
        and all(keeps_rules_of_rollouts(r, size, ends) for r in group.rollouts)
        and (group.rollouts[0] != group.rollouts[1] or -sum(group.rollouts[0].logprobs) < 35)
    )


def keeps_rules_of_rollouts(rollout: Rollout, size: int, end_ids: Sequence[int]) -> bool:
    even = math.log(size)
    ends = [place for place, token in enumerate(rollout.tokens) if token in end_ids]
    so_far = list(itertools.accumulate(-logprob - even for logprob in rollout.logprobs))
    return (
        len(rollout.tokens) == len(rollout.logprobs)
        and 1 <= len(rollout.tokens) <= RULES.max_tokens
        and all(0 <= token < size for token in rollout.tokens)
        and all(-even - 30 <= logprob <= 1e-3 for logprob in rollout.logprobs)
        and max(so_far) < 30.01
        and (
            ends == [len(rollout.tokens) - 1]
            if rollout.ending == "stop"
            else not ends and len(rollout.tokens) == RULES.max_tokens
        )
        and abs(rollout.reward) <= MAX_REWARD
    )


def shown(entry: Entry) -> str:
    return f"{entry.id!r} {entry.record.hex()}"


def memory_bytes() -> int:
    """What this process holds now; 0 where the system does not say."""
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def fuzz(
    records: int, seed: int = 0, progress: Callable[[Result], None] = lambda result: None
) -> Result:
    """Feed mutants to an admission that is mostly fresh, sometimes used: chains and rosters then
    tell more apart.
    """
    fuzzer, result = Fuzzer(seed), Result()
    gate, begun_s, memory = admission(), time.monotonic(), 0
    for number in range(records):
        if number == records // 10:
            memory = memory_bytes()
        if fuzzer.rng.random() < 0.75:
            gate = admission(with_table=fuzzer.rng.random() < 0.75)
        mutant = fuzzer.mutant()
        before = gate.refused.total()
        try:
            verdict = gate.admit(mutant.entry)
        except Exception as error:  # noqa: BLE001 - which is what is looked for
            result.fail(f"{number} ({mutant.kind}) raised {error!r}: {shown(mutant.entry)}")
            gate = admission()
            continue
        counted = gate.refused.total() - before
        found = verdict if isinstance(verdict, Admitted) else None
        outcome = "admitted" if found else gate.kept[-1].reason if counted else "hub"
        result.outcomes[outcome] += 1
        result.kinds[mutant.kind] += 1
        result.admitted_by_kind[mutant.kind] += found is not None
        fault = fault_of(mutant, found, counted, fuzzer, gate)
        if fault:
            result.fail(f"{number} ({mutant.kind}) {fault}: {shown(mutant.entry)}")
        if number % 4096 == 0:
            result.records, result.elapsed_s = number, time.monotonic() - begun_s
            progress(result)
    result.records, result.elapsed_s = records, time.monotonic() - begun_s
    result.memory_growth_bytes = memory_bytes() - memory
    if result.memory_growth_bytes > MEMORY_MAY_GROW_BYTES:
        result.fail(f"memory grew by {result.memory_growth_bytes} bytes")
    return result


# The program


def show_progress(total: int) -> Callable[[Result], None]:
    shown_s = 0.0

    def show(result: Result) -> None:
        nonlocal shown_s
        if result.elapsed_s - shown_s < 5 or not result.records:
            return
        shown_s = result.elapsed_s
        left_s = result.elapsed_s / result.records * (total - result.records)
        rate = result.records / result.elapsed_s
        line = (
            f"{result.records:,} of {total:,}, {rate:,.0f} a second, {left_s:.0f} s left, "
            f"{result.num_failures} failures"
        )
        print(line, file=sys.stderr, flush=True)

    return show


def table(result: Result) -> str:
    lines = [
        f"{outcome:<12} {count:>10,} {count / result.records:>7.2%}"
        for outcome, count in result.outcomes.most_common()
    ]
    lines += [
        "",
        *(
            f"{kind:<18} {n:>10,} {result.admitted_by_kind[kind]:>10,} admitted"
            for kind, n in sorted(result.kinds.items())
        ),
    ]
    rate = result.records / result.elapsed_s
    lines += ["", f"{result.records:,} records in {result.elapsed_s:.0f} s ({rate:,.0f} a second)"]
    lines += [
        f"memory grew by {result.memory_growth_bytes / 2**20:.1f} MiB; {result.num_failures} "
        "failures",
        *result.failures,
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzz admission with changed records.")
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args()
    result = fuzz(arguments.records, arguments.seed, show_progress(arguments.records))
    print(json.dumps(msgspec.to_builtins(result)) if arguments.json else table(result))
    return 1 if result.num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
