from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import group, identity, rollout, sealed_record
from fuzz import FIELDS, put_together, take_apart, varint
from motley.exchange import Header, Sealed, WireError, decode, encode, pack, unpack
from motley.exchange.headers import MAX_BLOBS
from motley.exchange.sections import (
    LEAST_LOGPROB,
    MAX_ROLLOUTS,
    MAX_TOKENS,
    MOST_LOGPROB,
    STEPS_PER_NAT,
)
from motley.exchange.wire import (
    MAX_BODY_BYTES,
    MAX_RECORD_BYTES,
    SIGNATURE_BYTES,
    encode_parts,
)
from motley.records import (
    NO_BASE,
    Backlog,
    Blob,
    Charter,
    Content,
    Group,
    Rollout,
    Roster,
    Sampling,
    Stamp,
    Weights,
)
from motley.trust import verifies

AUTHOR = identity("author")
STAMP = Stamp(key=AUTHOR.public, counter=12, previous=bytes(range(32)))
GROUP = group(
    peer="größe",
    round=7,
    slot=3,
    rollouts=[
        rollout([3, 4, 1], reward=0.125),
        rollout([27, 300, 70_000], reward=-2.5, logprob=-0.75),
    ],
    sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9, logprobs="full"),
)
CHARTER = Charter(crew="crew", config='[crew]\nname = "größe"\n', task="t")
ROSTER = Roster(crew="crew", number=3, keys={"b": bytes(32), "a": AUTHOR.public}, revoked=("c",))
BODY = encode(GROUP, STAMP)
RECORD = pack(AUTHOR.sign(Sealed(b"", BODY).signed), *encode_parts(GROUP, STAMP))
HEADER, SECTIONS = take_apart(BODY)


def refused(record: bytes) -> str:
    """The reason, at whichever depth a record is refused."""
    with pytest.raises(WireError) as caught:
        decode(unpack(record).body)
    assert str(caught.value)
    return caught.value.reason


def refused_body(body: bytes) -> str:
    return refused(pack(bytes(SIGNATURE_BYTES), body))


def lossless(body: bytes) -> bool:
    return take_apart(body)[0][FIELDS.index("lossless")]


def with_logprobs(*logprobs: float) -> Group:
    return group(
        rollouts=[
            Rollout(tokens=(5,) * len(logprobs), logprobs=logprobs, reward=0.0, ending="length")
        ]
    )


def logprobs_of(body: bytes) -> list[float]:
    content = decode(body)[1]
    assert isinstance(content, Group)
    return [logprob for rollout in content.rollouts for logprob in rollout.logprobs]


# What comes back


@pytest.mark.parametrize(
    "content",
    [GROUP, CHARTER, ROSTER, Roster(crew="", number=0, keys={})],
    ids=["group", "charter", "roster", "empty"],
)
def test_what_float32_and_the_step_can_hold_comes_back_exactly(content: Content) -> None:
    sealed = unpack(sealed_record(encode(content, STAMP), AUTHOR))
    assert decode(sealed.body) == (STAMP, content)
    assert verifies(AUTHOR.public, sealed.signature, sealed.signed)


@pytest.mark.parametrize("content", [GROUP, CHARTER, ROSTER])
def test_the_head_is_read_without_the_rest(content: Content) -> None:
    header = Header.of(encode(content, STAMP))
    assert (header.stamp, header.crew, header.id) == (STAMP, content.crew, content.id)
    assert header.sender == content.id.split(".")[0]


FLOATS32 = st.floats(width=32)
TOKENS = st.integers(0, 2**35 - 1)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(TOKENS, FLOATS32), max_size=5),
            FLOATS32,
            st.sampled_from(["stop", "length"]),
        ),
        max_size=4,
    )
)
def test_a_lossless_group_comes_back_to_the_last_bit_of_float32(parts: list[Any]) -> None:
    made = [
        Rollout(
            tokens=tuple(t for t, _ in p),
            logprobs=tuple(x for _, x in p),
            reward=reward,
            ending=end,
        )
        for p, reward, end in parts
    ]
    sent = msgspec.structs.replace(GROUP, rollouts=tuple(made))
    found = decode(encode(sent, STAMP, lossless=True))[1]
    assert repr(found) == repr(sent)  # in which NaN equals itself, and -0.0 not 0.0


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.floats(LEAST_LOGPROB, MOST_LOGPROB), min_size=1, max_size=8), st.floats(-1e6, 1e6)
)
def test_rounded_logprobs_are_off_by_half_a_step_at_most_and_all_else_is_exact(
    logprobs: list[float], reward: float
) -> None:
    sent = msgspec.structs.replace(with_logprobs(*logprobs).rollouts[0], reward=reward)
    body = encode(group(rollouts=[sent, rollout()]), STAMP)
    assert not lossless(body)
    content = decode(body)[1]
    assert isinstance(content, Group)
    found = content.rollouts[0]
    for before, after in zip(logprobs, found.logprobs, strict=True):
        assert abs(after - before) <= 0.5 / STEPS_PER_NAT + 1e-12
        assert abs(math.expm1(after - before)) <= 2.95e-4
        assert after <= 0
    assert (found.tokens, found.ending, content.rollouts[1]) == (
        sent.tokens,
        sent.ending,
        rollout(),
    )
    assert found.reward == float(np.float32(reward))


@pytest.mark.slow
@settings(max_examples=100)
@given(st.lists(st.floats(LEAST_LOGPROB, MOST_LOGPROB), min_size=1, max_size=8))
def test_what_was_rounded_once_is_not_rounded_again(logprobs: list[float]) -> None:
    once = encode(with_logprobs(*logprobs), STAMP)
    assert encode(decode(once)[1], STAMP) == once


@pytest.mark.parametrize("logprob", [LEAST_LOGPROB, MOST_LOGPROB, 0.0, -1 / STEPS_PER_NAT])
def test_the_ends_of_the_range_are_rounded(logprob: float) -> None:
    body = encode(with_logprobs(-1.0, logprob), STAMP)
    assert not lossless(body)
    assert logprobs_of(body) == [-1.0, min(logprob, 0.0) if logprob != MOST_LOGPROB else 0.0]


@pytest.mark.parametrize(
    "logprob",
    [
        math.nextafter(LEAST_LOGPROB, -40),
        math.nextafter(MOST_LOGPROB, 1),
        -40.0,
        0.25,
        -1e30,
        math.inf,
        -math.inf,
        math.nan,
    ],
)
def test_one_logprob_beyond_the_range_makes_the_group_lossless(logprob: float) -> None:
    body = encode(with_logprobs(-0.1, logprob), STAMP)
    assert lossless(body)
    np.testing.assert_array_equal(logprobs_of(body), np.float32([-0.1, logprob]).astype(float))


# Bytes


def test_the_same_content_is_always_the_same_bytes() -> None:
    for content in (GROUP, CHARTER, ROSTER):
        body = encode(content, STAMP)
        assert encode(decode(body)[1], STAMP) == body
        assert sealed_record(body, AUTHOR) == sealed_record(body, AUTHOR)
    swapped = msgspec.structs.replace(ROSTER, keys=dict(reversed(ROSTER.keys.items())))
    assert encode(swapped, STAMP) == encode(ROSTER, STAMP)


@pytest.mark.parametrize("level", [-5, 1, 3, 9, 19])
def test_signature_and_hash_do_not_depend_on_how_a_body_was_compressed(level: int) -> None:
    other = RECORD[: 1 + SIGNATURE_BYTES] + zstandard.ZstdCompressor(
        level=level, write_checksum=True
    ).compress(BODY)
    assert other != RECORD
    assert unpack(other) == unpack(RECORD)
    assert unpack(other).hash == unpack(RECORD).hash
    assert verifies(AUTHOR.public, unpack(other).signature, unpack(other).signed)


def test_another_body_has_another_hash_and_the_signature_does_not_count_in_it() -> None:
    hashes = {
        Sealed(b"", encode(GROUP, msgspec.structs.replace(STAMP, counter=counter))).hash
        for counter in range(5)
    }
    assert len(hashes) == 5
    assert Sealed(b"one", BODY).hash == Sealed(b"two", BODY).hash


def test_what_would_be_too_large_to_read_is_not_packed() -> None:
    with pytest.raises(ValueError, match="smaller group_size"):
        pack(bytes(SIGNATURE_BYTES), bytes(MAX_BODY_BYTES + 1))
    with pytest.raises(ValueError, match="smaller group_size"):
        pack(bytes(SIGNATURE_BYTES), np.random.default_rng(0).bytes(MAX_RECORD_BYTES))
    assert len(unpack(pack(bytes(SIGNATURE_BYTES), bytes(MAX_BODY_BYTES))).body) == MAX_BODY_BYTES


# Records that are refused


def test_a_record_over_the_limit_is_refused_for_its_size() -> None:
    assert refused(RECORD + bytes(MAX_RECORD_BYTES)) == "size"
    assert refused(bytes(MAX_RECORD_BYTES + 1)) == "size"


@pytest.mark.parametrize(
    "record",
    [b"", b"\x00", b"\x01" + RECORD[1:], b"\x03" + RECORD[1:], b"\xff" * 400],
    ids=["empty", "0", "1", "3", "255"],
)
def test_another_schema_is_refused_by_name(record: bytes) -> None:
    with pytest.raises(WireError, match="this reader knows 2"):
        unpack(record)
    assert refused(record) == "schema"


def test_cut_anywhere_a_record_is_refused() -> None:
    reasons = [refused(RECORD[:length]) for length in range(len(RECORD))]
    assert reasons[0] == "schema"
    assert set(reasons[1 : 2 + SIGNATURE_BYTES]) == {"truncated"}
    assert set(reasons[2 + SIGNATURE_BYTES :]) == {"corrupt"}


def test_cut_anywhere_a_body_is_refused() -> None:
    reasons = [refused_body(BODY[:length]) for length in range(len(BODY))]
    assert set(reasons) == {"truncated"}


@pytest.mark.slow
def test_with_any_bit_flipped_a_record_is_refused_or_does_not_verify_or_has_the_same_body() -> None:
    outcomes = Counter(outcome_of_flip(bit) for bit in range(8 * len(RECORD)))
    assert set(outcomes) <= {"schema", "corrupt", "undeclared", "inflated", "signature", "same"}
    assert outcomes["schema"] == 8
    assert outcomes["signature"] >= 8 * SIGNATURE_BYTES
    assert outcomes["same"] < 8  # bits of the frame's head that mean nothing to a decompressor


def outcome_of_flip(bit: int) -> str:
    changed = bytearray(RECORD)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        sealed = unpack(bytes(changed))
    except WireError as error:
        return error.reason
    if sealed == unpack(RECORD):
        return "same"
    return "verified" if verifies(AUTHOR.public, sealed.signature, sealed.signed) else "signature"


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(RECORD[65:] + b"\x00", id="a byte behind it"),
        pytest.param(RECORD[65:] * 2, id="twice"),
        pytest.param(b"\x00" + RECORD[65:], id="a byte before it"),
        pytest.param(
            b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + RECORD[65:], id="a skippable frame before it"
        ),
        pytest.param(
            RECORD[65:] + b"\x50\x2a\x4d\x18\x00\x00\x00\x00", id="a skippable frame behind it"
        ),
        pytest.param(
            zstandard.ZstdCompressor(write_checksum=True).compress(BODY)[:-1] + b"\x00",
            id="a wrong checksum",
        ),
        pytest.param(BODY, id="not compressed"),
    ],
)
def test_a_frame_that_is_not_just_one_whole_frame_is_corrupt(frame: bytes) -> None:
    assert refused(RECORD[:65] + frame) == "corrupt"


def test_a_frame_without_its_size_is_undeclared() -> None:
    frame = zstandard.ZstdCompressor(write_content_size=False).compress(BODY)
    assert refused(RECORD[:65] + frame) == "undeclared"


def zeros_frame(count: int, declared: int | None) -> bytes:
    """A zstd frame of so many zeros in runs of 128 KiB, four bytes each, with a declaration that
    need not be true.
    """
    runs, rest = divmod(count, 2**17)
    blocks = b"".join(
        (size << 3 | 1 << 1).to_bytes(3, "little") + b"\x00" for size in [2**17] * runs + [rest]
    )
    last = b"\x01\x00\x00"  # an empty raw block
    head = b"\x00\x58" if declared is None else b"\xe0" + declared.to_bytes(8, "little")
    return b"\x28\xb5\x2f\xfd" + head + blocks + last


@pytest.mark.parametrize(
    ("count", "declared", "reason"),
    [
        (2**30, 2**30, "inflated"),
        (2**30, 2**64 - 3, "inflated"),
        (MAX_BODY_BYTES + 1, MAX_BODY_BYTES + 1, "inflated"),
        (100, MAX_BODY_BYTES + 1, "inflated"),
        (2**30, None, "undeclared"),
        (2**30, MAX_BODY_BYTES, "corrupt"),
        (2**30, 100, "corrupt"),
        (100, MAX_BODY_BYTES, "corrupt"),
        (100, 99, "corrupt"),
        (100, 101, "corrupt"),
        (MAX_BODY_BYTES, MAX_BODY_BYTES, "malformed"),
    ],
)
def test_bombs_and_lying_declarations_are_refused(
    count: int, declared: int | None, reason: str
) -> None:
    assert refused(RECORD[:65] + zeros_frame(count, declared)) == reason


# Headers that are refused


def with_field(name: str, value: Any) -> bytes:
    header = list(HEADER)
    header[FIELDS.index(name)] = value
    return put_together(header, SECTIONS)


def hub_body(content: Content, place: int, value: Any) -> bytes:
    header, sections = take_apart(encode(content, STAMP))
    header[place] = value
    return put_together(header, sections)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tag", "grup"),
        ("tag", 1),
        ("key", bytes(31)),
        ("key", bytes(33)),
        ("key", "k" * 32),
        ("counter", -1),
        ("counter", 2**63),
        ("counter", 1.0),
        ("counter", None),
        ("previous", b""),
        ("crew", b"crew"),
        ("crew", None),
        ("peer", 5),
        ("round", 1.5),
        ("round", "seven"),
        ("round", True),
        ("problem", []),
        ("created_s", "now"),
        ("created_s", math.nan),
        ("created_s", math.inf),
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("logprobs", "guessed"),
        ("lossless", 1),
        ("lossless", None),
    ],
)
def test_a_field_of_a_wrong_kind_is_malformed(name: str, value: Any) -> None:
    assert refused_body(with_field(name, value)) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(put_together(HEADER[:-1], SECTIONS), id="a field too few"),
        pytest.param(put_together([*HEADER, 0], SECTIONS), id="a field too many"),
        pytest.param(
            put_together([*HEADER[:-1], False, {"a": 1}], SECTIONS), id="an unknown field"
        ),
        pytest.param(put_together([], SECTIONS), id="no field"),
        pytest.param(put_together(dict(zip(FIELDS, HEADER, strict=True)), SECTIONS), id="a map"),
        pytest.param(put_together(7, SECTIONS), id="a number"),
        pytest.param(put_together(b"", SECTIONS), id="nothing"),
        pytest.param(put_together(b"\xc1", SECTIONS), id="no MessagePack"),
        pytest.param(put_together(msgspec.json.encode(HEADER[4:]), SECTIONS), id="JSON"),
        pytest.param(
            put_together(msgspec.msgpack.encode(HEADER) + b"\x00", SECTIONS), id="a byte behind it"
        ),
        pytest.param(
            put_together(msgspec.msgpack.encode(HEADER)[:-1], SECTIONS), id="a byte too few"
        ),
        pytest.param(
            put_together(b"\xdd\xff\xff\xff\xff" + msgspec.msgpack.encode("group"), b""),
            id="four billion fields",
        ),
        pytest.param(
            put_together(
                msgspec.msgpack.encode(HEADER).replace(b"\xa4crew", b"\xa4\xe3rew"), SECTIONS
            ),
            id="text that is not UTF-8",
        ),
        pytest.param(
            put_together(
                msgspec.msgpack.encode(HEADER).replace(b"\xa5group", b"\xa5\xe3roup"), SECTIONS
            ),
            id="a tag that is not UTF-8",
        ),
        pytest.param(put_together(b"\x91" * 100_000 + b"\x00", SECTIONS), id="nested too deep"),
        pytest.param(
            put_together(
                msgspec.msgpack.encode([*HEADER, 0])[:-1] + b"\x91" * 100_000 + b"\x00", b""
            ),
            id="a field nested too deep",
        ),
        pytest.param(hub_body(ROSTER, 6, {"a": bytes(31)}), id="a roster's key of 31 bytes"),
        pytest.param(hub_body(ROSTER, 6, {1: bytes(32)}), id="a roster's name that is a number"),
        pytest.param(hub_body(ROSTER, 6, [["a", bytes(32)]]), id="a roster's keys as a list"),
        pytest.param(hub_body(ROSTER, 7, [1]), id="a revoked name that is a number"),
        pytest.param(hub_body(ROSTER, 7, [[[[]]]] * 3), id="revoked lists"),
        pytest.param(hub_body(CHARTER, 5, b"toml"), id="a charter's config as bytes"),
        pytest.param(b"\xff" * 5 + b"\x7f" + BODY, id="a header's length of six bytes"),
    ],
)
def test_a_header_that_is_none_is_malformed(body: bytes) -> None:
    assert refused_body(body) == "malformed"


@pytest.mark.parametrize("body", [b"", b"\x80", varint(10**6) + BODY, varint(2**35 - 1)])
def test_a_header_longer_than_its_body_is_truncated(body: bytes) -> None:
    assert refused_body(body) == "truncated"


@pytest.mark.parametrize("content", [CHARTER, ROSTER])
def test_bytes_behind_the_header_of_a_hub_record_are_malformed(content: Content) -> None:
    assert refused_body(encode(content, STAMP) + b"\x00") == "malformed"


# Sections that are refused

# Of two rollouts: rewards to 8, endings to 10, lengths to 12, tokens to 21, bit lengths to 27, and
# 60 bits in 8 bytes.
LONG_NUMBER = b"\x80" * 5 + b"\x00"


def with_bytes(start: int, stop: int, new: bytes) -> bytes:
    return SECTIONS[:start] + new + SECTIONS[stop:]


def test_the_sections_stand_in_their_order() -> None:
    assert np.frombuffer(SECTIONS[:8], "<f4").tolist() == [0.125, -2.5]
    assert SECTIONS[8:12] == b"\x00\x00\x03\x03"
    assert SECTIONS[12:21] == b"\x03\x04\x01\x1b" + varint(300) + varint(70_000)
    assert SECTIONS[21:27] == b"\x0b" * 6
    assert SECTIONS[27:] == section_of([1700] * 3 + [1275] * 3)[1]


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        pytest.param(SECTIONS + b"\x00", "malformed", id="a byte too many"),
        pytest.param(SECTIONS[:-1], "truncated", id="a byte too few"),
        pytest.param(SECTIONS * 2, "malformed", id="twice"),
        pytest.param(SECTIONS[:9], "truncated", id="an ending too few"),
        pytest.param(with_bytes(9, 10, b"\x04"), "malformed", id="an ending out of range"),
        pytest.param(with_bytes(10, 11, LONG_NUMBER), "malformed", id="a length of six bytes"),
        pytest.param(with_bytes(12, 13, LONG_NUMBER), "malformed", id="a token of six bytes"),
        pytest.param(with_bytes(10, 11, varint(25)), "truncated", id="a length too great"),
        pytest.param(with_bytes(10, 11, b"\x02"), "malformed", id="a length too small"),
        pytest.param(
            with_bytes(10, 11, varint(MAX_TOKENS)), "size", id="more tokens than are read"
        ),
        pytest.param(
            with_bytes(10, 12, varint(2**35 - 1) * 2), "size", id="tokens beyond all measure"
        ),
        pytest.param(
            with_bytes(10, 11, varint(MAX_TOKENS - 3)), "truncated", id="as many tokens as are read"
        ),
        pytest.param(SECTIONS[:11] + b"\x80", "truncated", id="a number without its end"),
        pytest.param(b"\x80", "truncated", id="a byte"),
        pytest.param(b"", "truncated", id="nothing"),
    ],
)
def test_sections_that_do_not_fit_their_header_are_refused(sections: bytes, reason: str) -> None:
    assert refused_body(put_together(HEADER, sections)) == reason


@pytest.mark.parametrize("count", [-1, len(SECTIONS) + 1, 2**31, 2**63, 2**64 - 1])
def test_more_rollouts_than_bytes_are_refused_before_any_is_read(count: int) -> None:
    assert refused_body(with_field("num_rollouts", count)) == "truncated"


@pytest.mark.parametrize(
    ("count", "reason"), [(0, "malformed"), (1, "malformed"), (3, "malformed"), (8, "truncated")]
)
def test_a_wrong_number_of_rollouts_is_refused(count: int, reason: str) -> None:
    assert refused_body(with_field("num_rollouts", count)) == reason


def test_a_group_of_more_rollouts_than_are_read_is_refused_for_its_size() -> None:
    def body(count: int) -> bytes:
        header = list(HEADER)
        header[FIELDS.index("num_rollouts")] = count
        return put_together(header, bytes(6 * count))  # of no token, each

    content = decode(body(MAX_ROLLOUTS))[1]
    assert isinstance(content, Group)
    assert len(content.rollouts) == MAX_ROLLOUTS
    assert refused_body(body(MAX_ROLLOUTS + 1)) == "size"


def test_rounded_logprobs_read_as_lossless_ones_are_refused() -> None:
    assert refused_body(with_field("lossless", True)) == "truncated"


def test_a_rollout_with_more_tokens_than_logprobs_is_not_encoded() -> None:
    shifted = [rollout([3, 4, 1]), rollout([5, 1])]
    shifted = [
        msgspec.structs.replace(shifted[0], logprobs=(-1.0, -2.0)),
        msgspec.structs.replace(shifted[1], logprobs=(-3.0, -4.0, -5.0)),
    ]
    with pytest.raises(ValueError, match="log"):
        encode(group(rollouts=shifted), STAMP)


# Rounded log-probs: bit lengths, and the bits below the leading ones


def section_of(steps: list[int]) -> tuple[bytes, bytes]:
    """Bit lengths and bits as the protocol has them, written down plainly."""
    bits = "".join(f"{step:b}"[:0:-1] for step in steps)
    rows = [bits[at : at + 8] for at in range(0, len(bits), 8)]
    return bytes(step.bit_length() for step in steps), bytes(int(row[::-1], 2) for row in rows)


def body_of(lengths: bytes, bits: bytes, num_tokens: int | None = None) -> bytes:
    """One rollout with these bytes as its log-probs."""
    count = len(lengths) if num_tokens is None else num_tokens
    header = list(HEADER)
    header[FIELDS.index("num_rollouts")] = 1
    return put_together(header, bytes(5) + varint(count) + b"\x05" * count + lengths + bits)


def steps_of(body: bytes) -> list[int]:
    found = [round(-logprob * STEPS_PER_NAT) for logprob in logprobs_of(body)]
    assert logprobs_of(body) == [-step / STEPS_PER_NAT for step in found]
    return found


def test_every_number_of_steps_comes_back() -> None:
    steps = list(range(2**16))
    body = encode(with_logprobs(*(-step / STEPS_PER_NAT for step in steps)), STAMP)
    assert not lossless(body)
    assert steps_of(body) == steps
    assert encode(decode(body)[1], STAMP) == body


STEPS = st.integers(0, 16).flatmap(lambda bits: st.integers(2**bits // 2, 2**bits - 1))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.lists(st.lists(STEPS, max_size=12), max_size=4))
def test_the_bits_of_a_group_are_one_row(parts: list[list[int]]) -> None:
    made = [with_logprobs(*(-step / STEPS_PER_NAT for step in part)).rollouts[0] for part in parts]
    steps = [step for part in parts for step in part]
    body = encode(msgspec.structs.replace(GROUP, rollouts=tuple(made)), STAMP)
    lengths, bits = section_of(steps)
    assert body.endswith(b"\x05" * len(steps) + lengths + bits)
    assert steps_of(body) == steps


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 1000])
@pytest.mark.parametrize(
    ("step", "num_bits"),
    [(0, 0), (1, 0), (2, 1), (3, 1), (255, 7), (256, 8), (511, 8), (512, 9), (65535, 15)],
)
def test_a_row_of_equal_steps_takes_no_byte_more_than_its_bits(
    step: int, num_bits: int, count: int
) -> None:
    lengths, bits = encode_parts(with_logprobs(*[-step / STEPS_PER_NAT] * count), STAMP)[2:]
    assert lengths == bytes([step.bit_length()]) * count
    assert len(bits) == -(-count * num_bits // 8)
    assert (lengths, bits) == section_of([step] * count)
    assert steps_of(body_of(lengths, bits)) == [step] * count


@pytest.mark.parametrize("rollouts", [0, 1, 3])
def test_rollouts_without_tokens_have_empty_log_probs(rollouts: int) -> None:
    sent = msgspec.structs.replace(GROUP, rollouts=(rollout([]),) * rollouts)
    parts = encode_parts(sent, STAMP)
    assert parts[1:] == [b"", b"", b""]
    record = pack(bytes(SIGNATURE_BYTES), *parts)
    assert decode(unpack(record).body) == (STAMP, sent)
    assert refused_body(b"".join(parts) + b"\x00") == "malformed"


@pytest.mark.parametrize(
    "steps", [[0], [1], [0, 1, 0], [2], [512], [65535] * 8, [0, 1, 2, 3, 255, 256, 65535], [7] * 12]
)
def test_bits_must_be_as_many_bytes_as_their_lengths_ask_for(steps: list[int]) -> None:
    lengths, bits = section_of(steps)
    assert steps_of(body_of(lengths, bits)) == steps
    for extra in (b"\x00", b"\xff", bytes(100)):
        assert refused_body(body_of(lengths, bits + extra)) == "malformed"
    for kept in range(len(bits)):
        assert refused_body(body_of(lengths, bits[:kept])) == "truncated"
    for kept in range(len(lengths)):
        assert refused_body(body_of(lengths[:kept], b"", len(lengths))) == "truncated"


@pytest.mark.parametrize("length", [17, 18, 32, 128, 255])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_more_than_sixteen_bits_are_malformed_however_many_bytes_follow(
    length: int, place: int
) -> None:
    lengths = bytearray(b"\x01\x02\x03")
    lengths[place] = length
    for count in (0, 1, (length + 9) // 8, 100):
        assert refused_body(body_of(bytes(lengths), bytes(count))) == "malformed"


@pytest.mark.parametrize("steps", [[2], [5], [300, 3], [65535]])
def test_bits_behind_the_last_one_are_not_read_and_count_in_the_hash(steps: list[int]) -> None:
    lengths, bits = section_of(steps)
    num_bits = sum(length - 1 for length in lengths)
    assert num_bits % 8
    plain = body_of(lengths, bits)
    padded = [
        body_of(lengths, bits[:-1] + bytes([bits[-1] | 1 << bit])) for bit in range(num_bits % 8, 8)
    ]
    for body in padded:
        assert decode(body) == decode(plain)
        assert steps_of(body) == steps
        assert encode(decode(body)[1], STAMP) == plain
    assert len({Sealed(b"", body).hash for body in [plain, *padded]}) == 1 + len(padded)


# Blocks


def num_blocks(record: bytes) -> int:
    frame, found = record[1 + SIGNATURE_BYTES :], 0
    at = zstandard.frame_header_size(frame)
    while at < len(frame):
        head = int.from_bytes(frame[at : at + 3], "little")
        at, found = at + 3 + (1 if head >> 1 & 3 == 1 else head >> 3), found + 1
        if head & 1:
            assert at == len(frame)
            return found
    raise AssertionError("no last block in the frame")


@pytest.mark.parametrize("lossless", [False, True])
def test_a_body_in_parts_is_the_same_record_as_in_one(lossless: bool) -> None:
    # small ones are one block whatever they are made of
    large = msgspec.structs.replace(GROUP, rollouts=GROUP.rollouts * 60)
    parts = encode_parts(large, STAMP, lossless)
    body = b"".join(parts)
    assert body == encode(large, STAMP, lossless)
    signature = AUTHOR.sign(Sealed(b"", body).signed)
    cuts = [[body], parts, [b"", *parts, b""], [bytes([byte]) for byte in body]]
    records = [pack(signature, *cut) for cut in cuts]
    assert len(set(records)) > 1
    assert {unpack(record) for record in records} == {Sealed(signature, body)}
    assert {unpack(record).hash for record in records} == {Sealed(b"", body).hash}
    assert num_blocks(records[0]) < num_blocks(records[1]) < num_blocks(records[3])
    assert num_blocks(records[1]) >= len(parts)


# Memory

MEASURE = """
import sys
from pathlib import Path
from motley.exchange import WireError, decode, unpack
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) // 1024
before = peak()
for path in sys.argv[1:]:
    try:
        decode(unpack(Path(path).read_bytes()).body)
    except WireError:
        pass
print(peak() - before)
"""


def mebibytes_to_read(records: list[bytes], folder: Path) -> int:
    """By how much a process of its own grows when it reads them."""
    paths = [folder / str(number) for number in range(len(records))]
    for path, record in zip(paths, records, strict=True):
        path.write_bytes(record)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, paths)],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_bombs_do_not_take_memory(tmp_path: Path) -> None:
    declared = [2**30, None, MAX_BODY_BYTES, 100, 2**64 - 3]
    bombs = [RECORD[:65] + zeros_frame(2**30, size) for size in declared] + [
        RECORD[:65] + zeros_frame(100, MAX_BODY_BYTES)
    ]
    assert all(len(bomb) < 2**16 for bomb in bombs)
    assert mebibytes_to_read(bombs, tmp_path) < 64


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_the_largest_groups_take_bounded_memory(tmp_path: Path) -> None:
    bits = b"\x10" * MAX_TOKENS + b"\xff" * (15 * MAX_TOKENS // 8)
    tokens = bytes(5) + varint(MAX_TOKENS) + (b"\xff" * 4 + b"\x7f") * MAX_TOKENS + bits
    empty = bytes(6 * MAX_ROLLOUTS)
    count = (MAX_BODY_BYTES - 300) // 6
    header = list(HEADER)
    header[FIELDS.index("num_rollouts")] = 1
    many = list(HEADER)
    many[FIELDS.index("num_rollouts")] = count
    most = list(HEADER)
    most[FIELDS.index("num_rollouts")] = MAX_ROLLOUTS
    bodies = [
        put_together(header, tokens),
        put_together(most, empty),
        put_together(many, bytes(6 * count)),
    ]
    assert len(logprobs_of(bodies[0])) == MAX_TOKENS
    assert (
        mebibytes_to_read([pack(bytes(SIGNATURE_BYTES), body) for body in bodies], tmp_path) < 384
    )


# Weights

HASHES = [bytes([number]) * 32 for number in range(1, 5)]
WEIGHTS = Weights(
    crew="crew",
    peer="größe",
    version=7,
    precision="bfloat16",
    base=6,
    base_state=HASHES[0],
    state=HASHES[1],
    blobs=(
        Blob(sha256=HASHES[2].hex(), num_bytes=10, raw_bytes=25),
        Blob(sha256=HASHES[3].hex(), num_bytes=2**40 - 1, raw_bytes=0),
    ),
    frozen=(Blob(sha256=HASHES[3].hex(), num_bytes=1, raw_bytes=2),),
    backlog=Backlog(waiting=(("s0", 9), ("s1", 3)), oldest_s=3.25),
    created_s=1234.5,
)
WHOLE = msgspec.structs.replace(
    WEIGHTS,
    version=0,
    base=NO_BASE,
    base_state=b"",
    precision="float32",
    frozen=(),
    backlog=Backlog(waiting=(), oldest_s=0.0),
)
WEIGHTS_FIELDS = [
    "tag", "key", "counter", "previous", "crew", "peer", "version", "precision",
    "base", "base_state", "state", "blobs", "frozen", "waiting", "oldest_s", "created_s",
]  # fmt: skip


def weights_body(content: Weights = WEIGHTS, **fields: Any) -> bytes:
    header, sections = take_apart(encode(content, STAMP))
    for name, value in fields.items():
        header[WEIGHTS_FIELDS.index(name)] = value
    return put_together(header, sections)


@pytest.mark.parametrize(
    "content",
    [
        WEIGHTS,
        WHOLE,
        msgspec.structs.replace(WEIGHTS, version=2**63 - 1, base=0),
        msgspec.structs.replace(WEIGHTS, blobs=()),  # nothing changed
        msgspec.structs.replace(WEIGHTS, blobs=WEIGHTS.frozen * MAX_BLOBS),
    ],
    ids=[
        "a change",
        "whole",
        "the last version there can be",
        "no blobs",
        "as many blobs as are read",
    ],
)
def test_weights_come_back_exactly(content: Weights) -> None:
    sealed = unpack(sealed_record(encode(content, STAMP), AUTHOR))
    assert decode(sealed.body) == (STAMP, content)
    assert verifies(AUTHOR.public, sealed.signature, sealed.signed)


def test_the_head_of_weights_is_read_without_the_rest() -> None:
    header = Header.of(encode(WEIGHTS, STAMP))
    assert (header.stamp, header.crew, header.id, header.sender) == (
        STAMP,
        "crew",
        "größe.weights.7",
        "größe",
    )
    assert not header.is_of_hub
    assert WEIGHTS.id == header.id


def test_the_fields_of_weights_stand_in_their_order() -> None:
    header, sections = take_apart(encode(WEIGHTS, STAMP))
    named = dict(zip(WEIGHTS_FIELDS, header, strict=True))
    assert named["tag"] == "weights"
    assert (named["peer"], named["version"], named["precision"], named["base"]) == (
        "größe",
        7,
        "bfloat16",
        6,
    )
    assert (named["base_state"], named["state"]) == (HASHES[0], HASHES[1])
    assert [list(blob) for blob in named["blobs"]] == [
        [HASHES[2], 10, 25],
        [HASHES[3], 2**40 - 1, 0],
    ]
    assert [list(blob) for blob in named["frozen"]] == [[HASHES[3], 1, 2]]
    assert (named["waiting"], named["oldest_s"], named["created_s"], sections) == (
        [["s0", 9], ["s1", 3]],
        3.25,
        1234.5,
        b"",
    )


def test_no_group_can_stand_under_the_id_of_weights() -> None:
    assert refused_body(with_field("round", "weights")) == "malformed"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tag", "wieghts"),
        ("key", bytes(31)),
        ("counter", -1),
        ("previous", bytes(33)),
        ("crew", None),
        ("peer", 5),
        ("peer", b"a"),
        ("version", -1),
        ("version", 6),  # the base's own
        ("version", 2**63),
        ("version", 2**64 - 1),
        ("version", 7.5),
        ("version", "7"),
        ("version", None),
        ("precision", "float16"),
        ("precision", 16),
        ("base", -2),
        ("base", 7),
        ("base", 8),
        ("base", -1),  # with the hash of one
        ("base", None),
        ("base_state", b""),
        ("base_state", bytes(31)),
        ("base_state", "x" * 32),
        ("state", b""),
        ("state", bytes(33)),
        ("state", None),
        ("blobs", None),
        ("blobs", [[bytes(31), 1, 1]]),
        ("blobs", [["0" * 64, 1, 1]]),
        ("blobs", [[HASHES[0], -1, 1]]),
        ("blobs", [[HASHES[0], 1, -1]]),
        ("blobs", [[HASHES[0], 2**40, 1]]),
        ("blobs", [[HASHES[0], 1, 2**40]]),
        ("blobs", [[HASHES[0], 1.5, 1]]),
        ("blobs", [[HASHES[0], 1]]),
        ("blobs", [[HASHES[0], 1, 1, 1]]),
        ("blobs", [HASHES[0]]),
        ("blobs", [[HASHES[0], 1, 1]] * (MAX_BLOBS + 1)),
        ("frozen", [[bytes(31), 1, 1]]),
        ("frozen", [[HASHES[0], 1, 2**40]]),
        ("frozen", [[HASHES[0], 1, 1]] * (MAX_BLOBS + 1)),
        ("frozen", {}),
        ("waiting", [["s0", -1]]),
        ("waiting", [["s0", 1.5]]),
        ("waiting", None),
        ("oldest_s", -0.5),
        ("oldest_s", math.nan),
        ("oldest_s", math.inf),
        ("oldest_s", "long"),
        ("created_s", math.nan),
        ("created_s", -math.inf),
        ("created_s", None),
    ],
)
def test_a_wrong_field_of_weights_is_malformed(name: str, value: Any) -> None:
    assert refused_body(weights_body(**{name: value})) == "malformed"


def test_weights_without_a_base_have_no_hash_of_one() -> None:
    assert decode(weights_body(base=NO_BASE, base_state=b""))[1] == msgspec.structs.replace(
        WEIGHTS, base=NO_BASE, base_state=b""
    )
    assert refused_body(weights_body(WHOLE, base_state=HASHES[0])) == "malformed"


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(encode(WEIGHTS, STAMP) + b"\x00", id="bytes behind the header"),
        pytest.param(
            put_together(take_apart(encode(WEIGHTS, STAMP))[0][:-1], b""), id="a field too few"
        ),
        pytest.param(
            put_together([*take_apart(encode(WEIGHTS, STAMP))[0], 0], b""), id="a field too many"
        ),
        pytest.param(
            put_together(["group", *take_apart(encode(WEIGHTS, STAMP))[0][1:]], b""),
            id="under the tag of a group",
        ),
        pytest.param(
            put_together(["weights", *HEADER[1:]], SECTIONS), id="a group under the tag of weights"
        ),
    ],
)
def test_weights_that_are_none_are_malformed(body: bytes) -> None:
    assert refused_body(body) == "malformed"


def test_cut_anywhere_weights_are_refused() -> None:
    body = encode(WEIGHTS, STAMP)
    for length in range(len(body)):
        assert refused_body(body[:length]) in ("truncated", "malformed")
