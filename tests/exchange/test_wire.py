from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fakes import group, rollout
from motley.exchange import WireError, decode, encode
from motley.records import Group, Sampling

GROUP = group(
    peer="größe",
    round=7,
    slot=3,
    rollouts=[rollout([3, 4, 1], reward=0.1), rollout([27], reward=-2.5, logprob=-1e-7)],
    sampling=Sampling(temperature=0.7, top_k=5, top_p=0.9, logprobs="full"),
)


def test_a_group_comes_back_exactly() -> None:
    assert decode(encode(GROUP)) == GROUP


def test_the_same_group_is_always_the_same_bytes() -> None:
    assert encode(GROUP) == encode(decode(encode(GROUP)))


@pytest.mark.parametrize("record", [b"", b"\x00", b"\x02" + encode(GROUP)[1:], b"\xff" * 40])
def test_another_schema_is_refused_by_name(record: bytes) -> None:
    with pytest.raises(WireError, match="this reader knows 1") as caught:
        decode(record)
    assert caught.value.reason == "schema"


def changed(**fields: Any) -> bytes:
    """The group's bytes with some fields, at any depth, of the wrong kind."""
    content = msgspec.to_builtins(GROUP)
    for path, value in fields.items():
        *parents, last = path.split("__")
        target = content
        for key in parents:
            target = target[int(key) if key.isdigit() else key]
        target.pop(last) if value is KeyError else target.__setitem__(last, value)
    return b"\x01" + msgspec.msgpack.encode(content)


@pytest.mark.parametrize(
    "record",
    [
        b"\x01",
        encode(GROUP)[:-1],
        encode(GROUP) + b"\x00",
        b"\x01" + msgspec.msgpack.encode([1, 2]),
        b"\x01" + msgspec.json.encode(GROUP),
        changed(round="seven"),
        changed(round=1.5),
        changed(problem=KeyError),
        changed(rollouts={}),
        changed(rollouts__0__tokens="345"),
        changed(rollouts__0__tokens=[1.5]),
        changed(rollouts__0__logprobs=[None]),
        changed(rollouts__0__ending="bored"),
        changed(origin__sampling__temperature=-1.0),
        changed(origin__sampling__logprobs="guessed"),
        changed(origin__sampling__surprise=1),
        changed(origin=None),
    ],
)
def test_what_is_not_a_group_is_refused_by_name(record: bytes) -> None:
    with pytest.raises(WireError, match="record is not a group") as caught:
        decode(record)
    assert caught.value.reason == "malformed"


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(encode(group(crew="crew")).replace(b"\xa4crew\xa4crew", b"\xa4crew\xa4\xe3rew"), id="text that is not UTF-8"),
        pytest.param(b"\x01\x88" + encode(GROUP)[2:] + b"\xa1z" + b"\x91" * 10_000 + b"\x00", id="an unknown field nested too deep"),
    ],
)
def test_bytes_that_msgspec_has_other_words_for_are_refused_too(record: bytes) -> None:
    with pytest.raises(WireError) as caught:
        decode(record)
    assert caught.value.reason == "malformed"


def test_cut_anywhere_it_is_refused() -> None:
    record = encode(GROUP)
    for length in range(len(record)):
        with pytest.raises(WireError):
            decode(record[:length])
    assert isinstance(decode(record), Group)
