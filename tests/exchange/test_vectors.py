"""Records that every reader must read and every writer must write, byte for byte up to compression,
in vectors/.

    python tests/exchange/test_vectors.py

writes those of the present schema that are missing. What is there is never written again: a new
schema adds vectors. NAME.bin is a record; NAME.json is what must be read from it, bytes in hex. The
secret keys are of the tests only.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from motley.exchange import Header, Sealed, decode, encode, pack, unpack
from motley.exchange.wire import SCHEMA, encode_parts
from motley.records import (
    FIRST_PREVIOUS,
    NO_BASE,
    Backlog,
    Blob,
    Branch,
    Charter,
    Content,
    Group,
    Origin,
    Rollout,
    Roster,
    Sampling,
    Stamp,
    Table,
    Weights,
)
from motley.spelling import Spelling
from motley.trust import Identity, verifies

FOLDER = Path(__file__).parent / "vectors"
NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


class Case(NamedTuple):
    author: str
    content: Content
    lossless: bool = False


def author(name: str) -> Identity:
    return Identity.of(hashlib.sha256(f"motley test vector {name}".encode()).digest())


def group(peer: str, round: int, slot: int, rollouts: list[Rollout], **fields: Any) -> Group:
    sampling = fields.pop("sampling", Sampling(temperature=0.7, top_k=20, top_p=0.95, max_tokens=8))
    origin = Origin(
        peer=peer, model="llama-0.3m", vocabulary="9f86d081884c7d65", version=41, sampling=sampling
    )
    made = {"crew": "sums", "problem": "0123456789abcdef", "created_s": 1735689600.25} | fields
    return Group(round=round, slot=slot, origin=origin, rollouts=tuple(rollouts), **made)


def weights(
    peer: str,
    version: int,
    base: int = NO_BASE,
    base_state: bytes = b"",
    waiting: Any = (),
    oldest_s: float = 0.0,
) -> Weights:
    blobs = tuple(
        Blob(sha256=hashlib.sha256(bytes([n])).hexdigest(), num_bytes=300 * n, raw_bytes=2**20 * n)
        for n in (1, 2)
    )
    return Weights(
        crew="sums",
        peer=peer,
        version=version,
        precision="bfloat16",
        base=base,
        base_state=base_state,
        state=b"s" * 32,
        blobs=blobs,
        frozen=blobs[:1],
        backlog=Backlog(waiting=waiting, oldest_s=oldest_s),
        created_s=1735689600.5,
    )


def rollout(tokens: list[int], logprobs: list[float], reward: float, ending: Any) -> Rollout:
    return Rollout(tokens=tuple(tokens), logprobs=tuple(logprobs), reward=reward, ending=ending)


def cases() -> dict[str, Case]:
    """In the order of each author's chain."""
    keys = {name: author(name).public for name in ("ann", "bob", "größe")}
    ordinary = [
        rollout([11, 127, 128, 1], [-0.5, -1.2345678, -31.9995, -0.00001], 1.0, "stop"),
        rollout([16383, 16384, 128255], [0.0, -0.25, -7.77], -0.1, "length"),
        rollout([1], [-2.0], 0.0, "stop"),
    ]
    steps = [
        [0, 1, 2, 3, 255, 256, 65535],
        [65535, 32768] * 4,
        [0, 1] * 4,
        [],
        [4, 2, 3, 7, 1, 0, 512, 21845],
    ]
    runs = [rollout([9] * len(row), [-n / 1700 for n in row], 0.0, "length") for row in steps]
    exact = [
        rollout([5, 6, 1], [-0.1, -40.25, 0.0005], 0.333333333, "stop"),
        rollout([7], [-1e-9], 1e6, "length"),
    ]
    return {
        f"schema{SCHEMA}-charter": Case(
            "hub", Charter(crew="sums", config='[crew]\nname = "sums"\n', task="digits/5d41402a")
        ),
        f"schema{SCHEMA}-roster": Case(
            "hub", Roster(crew="sums", number=1, keys=keys, revoked=("eve", "mallory"))
        ),
        f"schema{SCHEMA}-group": Case("ann", group("ann", 0, 0, ordinary)),
        f"schema{SCHEMA}-lossless-by-range": Case("ann", group("ann", 0, 1, exact)),
        f"schema{SCHEMA}-lossless-by-choice": Case(
            "ann", group("ann", 300, 70000, ordinary), lossless=True
        ),
        f"schema{SCHEMA}-share": Case(
            "bob",
            group(
                "bob",
                2,
                1,
                [rollout([3, 1], [-0.5, -0.125], 1.0, "stop")],
                sampling=Sampling(max_tokens=2, logprobs="full"),
            ),
        ),
        f"schema{SCHEMA}-steps": Case("bob", group("bob", 3, 0, runs)),
        f"schema{SCHEMA}-weights-whole": Case("bob", weights("bob", 0)),
        f"schema{SCHEMA}-weights-change": Case(
            "bob",
            weights(
                "bob",
                300,
                base=299,
                base_state=b"b" * 32,
                waiting=(("ann", 12), ("größe", 0)),
                oldest_s=61.5,
            ),
        ),
        f"schema{SCHEMA}-unicode": Case(
            "größe",
            group(
                "größe",
                0,
                0,
                [rollout([0], [-0.5], 0.0, "length"), rollout([], [], 0.0, "length")],
                crew="日本 \x00\n",
                problem="",
            ),
        ),
        f"schema{SCHEMA}-branch": Case(
            "größe",
            group(
                "größe",
                4,
                2,
                [rollout([3, 1], [-0.5, -0.125], 1.0, "stop")],
                branch=Branch(round=3, slot=1, prefix=(11, 127, 128, 128255)),
            ),
        ),
        f"schema{SCHEMA}-table": Case(
            "ann",
            Table(
                crew="sums",
                peer="ann",
                vocabulary="9f86d081884c7d65",
                ends=(1, 300),
                encoded=Spelling(SPELLED).encode(),
            ),
        ),
        f"schema{SCHEMA}-not-canonical": Case(
            "ann",
            group(
                "ann",
                301,
                0,
                [
                    msgspec.structs.replace(one, canonical=canonical)
                    for one, canonical in zip(
                        [*ordinary, ordinary[1]], [True, False, False, True], strict=True
                    )
                ],
            ),
        ),
        f"schema{SCHEMA}-lots": Case(
            "hub",
            Charter(crew="sums", config="[crew]\nhear = 2\n", task="digits/5d41402a", lots=True),
        ),
    }


# No text, an end, one byte, a part of a character, spaces: and rows of nothing up to token 300.
SPELLED = (None, None, b"a", b"\xc3", b" " * 300, *(None for _ in range(296)))


def told(content: Content) -> Any:
    """A content as JSON has it, bytes in hex."""
    return json.loads(
        json.dumps(msgspec.to_builtins(content, builtin_types=(bytes,)), default=bytes.hex)
    )


def write_missing() -> None:
    heads: dict[str, Stamp] = {}
    for name, case in cases().items():
        identity = author(case.author)
        stamp = heads.get(case.author, Stamp(key=identity.public, previous=FIRST_PREVIOUS))
        parts = encode_parts(case.content, stamp, case.lossless)
        body = b"".join(parts)
        sealed = Sealed(identity.sign(Sealed(b"", body).signed), body)
        heads[case.author] = Stamp(
            key=identity.public, counter=stamp.counter + 1, previous=sealed.hash
        )
        if (FOLDER / f"{name}.bin").exists():
            continue
        expected = {
            "schema": SCHEMA,
            "secret": identity.secret.hex(),
            "signature": sealed.signature.hex(),
            "hash": sealed.hash.hex(),
            "body": body.hex(),
            "key": stamp.key.hex(),
            "counter": stamp.counter,
            "previous": stamp.previous.hex(),
            "id": case.content.id,
            "kind": type(case.content).__name__.lower(),
            "lossless": isinstance(case.content, Group)
            and encode(case.content, stamp, lossless=True) == body,
            "content": told(decode(body)[1]),
        }
        (FOLDER / f"{name}.bin").write_bytes(pack(sealed.signature, *parts))
        (FOLDER / f"{name}.json").write_text(
            json.dumps(expected, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        print(f"wrote {name}")


def vector(name: str) -> tuple[bytes, dict[str, Any]]:
    return (FOLDER / f"{name}.bin").read_bytes(), json.loads(
        (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    )


def test_every_case_of_this_schema_has_its_vector() -> None:
    assert set(cases()) <= set(NAMES)
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_is_read_as_it_was_written(name: str) -> None:
    record, expected = vector(name)
    assert record[0] == expected["schema"]
    sealed = unpack(record)
    assert (sealed.signature.hex(), sealed.body.hex(), sealed.hash.hex()) == (
        expected["signature"],
        expected["body"],
        expected["hash"],
    )
    header = Header.of(sealed.body)
    stamp, content = decode(sealed.body)
    assert stamp == header.stamp
    assert (stamp.key.hex(), stamp.counter, stamp.previous.hex()) == (
        expected["key"],
        expected["counter"],
        expected["previous"],
    )
    assert header.id == content.id == expected["id"]
    assert type(content).__name__.lower() == expected["kind"]
    assert told(content) == expected["content"]


@pytest.mark.parametrize("name", NAMES)
def test_a_vector_is_signed_by_its_key(name: str) -> None:
    record, expected = vector(name)
    sealed, identity = unpack(record), Identity.of(bytes.fromhex(expected["secret"]))
    assert identity.public.hex() == expected["key"]
    assert verifies(identity.public, sealed.signature, sealed.signed)
    assert identity.sign(sealed.signed) == sealed.signature


@pytest.mark.parametrize("name", [name for name in NAMES if vector(name)[1]["schema"] == SCHEMA])
def test_todays_encoder_writes_the_same_body(name: str) -> None:
    record, expected = vector(name)
    stamp, content = decode(unpack(record).body)
    assert encode(content, stamp, expected["lossless"]).hex() == expected["body"]
    if name in cases():  # what was given before any rounding is rounded to the same
        assert (
            encode(cases()[name].content, stamp, cases()[name].lossless).hex() == expected["body"]
        )


def test_vectors_of_one_author_are_a_chain() -> None:
    last: dict[str, dict[str, Any]] = {}
    for _, expected in sorted((vector(name) for name in NAMES), key=lambda v: v[1]["counter"]):
        before = last.get(expected["key"])
        assert expected["counter"] == (before["counter"] + 1 if before else 0)
        assert expected["previous"] == (before["hash"] if before else FIRST_PREVIOUS.hex())
        last[expected["key"]] = expected


def sections_of(name: str) -> bytes:
    body = unpack(vector(name)[0]).body
    length = body[0] & 127 | body[1] << 7
    return body[2 + length :]


def steps_in(lengths: bytes, content: bytes) -> list[int]:
    """Rounded log-probs, read bit by bit."""
    bits = iter([byte >> place & 1 for byte in content for place in range(8)])
    steps = [
        sum(next(bits) << place for place in range(length - 1)) + (1 << length - 1) if length else 0
        for length in lengths
    ]
    left = list(bits)
    assert len(left) < 8
    assert not any(left)
    return steps


def test_a_vector_is_read_as_the_protocol_describes_it() -> None:
    """The sections of an ordinary group, read with nothing but the standard library."""
    sections = sections_of("schema2-group")
    assert struct.unpack("<3f", sections[:12]) == struct.unpack(
        "<3f", struct.pack("<3f", 1.0, -0.1, 0.0)
    )
    assert sections[12:15] == bytes([0, 1, 0])
    assert sections[15:18] == bytes([4, 3, 1])
    assert sections[18:30] == bytes([11, 127, 0x80, 1, 1, 0xFF, 0x7F, 0x80, 0x80, 1, 0xFF, 0xE9])
    assert sections[30:32] == bytes([7, 1])
    steps = steps_in(sections[32:40], sections[40:])
    assert steps == [
        round(x * 1700) for x in (0.5, 1.2345678, 31.9995, 0.00001, 0.0, 0.25, 7.77, 2.0)
    ]


def test_a_vector_has_log_probs_of_every_shape() -> None:
    sections = sections_of("schema2-steps")
    assert sections[:25] == bytes(20) + b"\x01" * 5
    assert sections[25:30] == bytes([7, 8, 8, 0, 8])
    assert sections[30:61] == b"\x09" * 31
    steps = steps_in(sections[61:92], sections[92:])
    assert steps[:7] == [0, 1, 2, 3, 255, 256, 65535]
    assert steps[7:] == [65535, 32768] * 4 + [0, 1] * 4 + [4, 2, 3, 7, 1, 0, 512, 21845]


def test_the_worked_example_of_the_protocol_is_its_vector() -> None:
    text = (FOLDER.parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    lines = text.split("```")[1].strip().splitlines()
    example = bytearray()
    for line in lines:
        offset, dump = re.match(r"([0-9a-f]{4})  ((?:[0-9a-f]{2} ?)+)", line).groups()
        assert int(offset, 16) == len(example)
        example += bytes.fromhex(dump)
    record, expected = vector("schema2-share")
    assert example.hex() == expected["body"]
    words = " ".join(text.split())
    assert f"a frame of {len(record) - 65} bytes. This is the body, {len(example)} bytes:" in words
    assert f"`{expected['hash']}`" in text


if __name__ == "__main__":
    write_missing()
