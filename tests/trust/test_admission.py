from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import PROBLEM, rollout
from fakes import group as any_group
from motley.exchange import encode
from motley.policies.tiny import tiny_vocabulary
from motley.records import Group, Problem, Sampling
from motley.trust import Admission, Rules

VOCABULARY = tiny_vocabulary()
OTHER = Problem(kind="sort", prompt="sort 21=", answer="12")
RULES = Rules(
    crew="crew",
    peers=frozenset({"a", "b"}),
    vocabulary=VOCABULARY.fingerprint,
    vocabulary_size=VOCABULARY.size,
    end_id=VOCABULARY.end_id,
    rollouts_per_group=2,
    max_tokens=4,
)


def group(**fields: Any) -> Group:
    return any_group(**{"sampling": Sampling(max_tokens=RULES.max_tokens)} | fields)


def admission() -> Admission:
    """Every peer is given PROBLEM at slot 0 and another at slot 1; in odd rounds the other way round."""
    return Admission(RULES, lambda peer, round: [PROBLEM, OTHER] if round % 2 == 0 else [OTHER, PROBLEM])


def with_rollout(**fields: Any) -> Group:
    """A group whose second rollout is at fault."""
    return group(rollouts=[rollout(), msgspec.structs.replace(rollout(), **fields)])


def test_a_good_group_is_admitted_with_its_problem() -> None:
    gate = admission()
    for made, problem in ((group(), PROBLEM), (group(slot=1, problem=OTHER, peer="b"), OTHER), (group(round=3, slot=1), PROBLEM)):
        assert gate.admit(encode(made)) == (made, problem)
    assert gate.refused == Counter()


@pytest.mark.parametrize(
    ("made", "sender", "reason"),
    [
        (group(crew="other"), "a", "crew"),
        (group(peer="stranger"), "unknown", "sender"),
        (group(vocabulary="other"), "a", "vocabulary"),
        (group(rollouts=[rollout()]), "a", "group_size"),
        (group(rollouts=[rollout()] * 3), "a", "group_size"),
        (group(round=-1), "a", "assignment"),
        (group(round=2**31), "a", "assignment"),
        (group(slot=2), "a", "assignment"),
        (group(slot=-1), "a", "assignment"),
        (group(slot=1), "a", "assignment"),
        (group(round=1), "a", "assignment"),
        (group(peer="b", problem=OTHER), "b", "assignment"),
        (with_rollout(tokens=(), logprobs=()), "a", "length"),
        (with_rollout(tokens=(5,) * 5, logprobs=(-1.0,) * 5), "a", "length"),
        (with_rollout(tokens=(5, 6)), "a", "shape"),
        (with_rollout(tokens=(5, 6, VOCABULARY.size)), "a", "token"),
        (with_rollout(tokens=(5, -1, 6)), "a", "token"),
        (with_rollout(logprobs=(-1.0, 0.1, -1.0)), "a", "logprob"),
        (with_rollout(logprobs=(-1.0, -65.0, -1.0)), "a", "logprob"),
        (with_rollout(logprobs=(-1.0, float("nan"), -1.0)), "a", "logprob"),
        (with_rollout(logprobs=(-1.0, float("-inf"), -1.0)), "a", "logprob"),
        (with_rollout(reward=float("nan")), "a", "reward"),
        (with_rollout(reward=float("inf")), "a", "reward"),
    ],
)
def test_every_fault_is_named_and_counted_under_its_sender(made: Group, sender: str, reason: str) -> None:
    gate = admission()
    record = encode(made)
    assert gate.admit(record) is None
    assert gate.admit(record) is None
    assert gate.refused == Counter({(sender, reason): 2})


@pytest.mark.parametrize(("record", "reason"), [(b"", "schema"), (b"\x07abc", "schema"), (b"\x01abc", "malformed")])
def test_bytes_that_are_no_group_are_counted_under_unknown(record: bytes, reason: str) -> None:
    gate = admission()
    assert gate.admit(record) is None
    assert gate.refused == Counter({("unknown", reason): 1})


def test_a_refusal_does_not_touch_the_next_record() -> None:
    gate = admission()
    gate.admit(b"noise")
    assert gate.admit(encode(group())) is not None
    assert gate.refused.total() == 1


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_random_bytes_are_refused_and_never_raise(noise: bytes, with_schema: bool) -> None:
    gate = admission()
    assert gate.admit(b"\x01" + noise if with_schema else noise) is None
    assert gate.refused.total() == 1


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5), st.just([]), st.just({}))
PLACES = ["crew", "problem", "round", "slot", "origin", "rollouts", "created_s"]


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(PLACES), VALUES, st.sampled_from(["tokens", "logprobs", "reward", "ending"]), VALUES)
def test_a_group_with_any_value_anywhere_never_raises(place: str, value: Any, part: str, other: Any) -> None:
    content = msgspec.to_builtins(group())
    content["rollouts"][0][part] = other
    content[place] = value
    gate = admission()
    admitted = gate.admit(b"\x01" + msgspec.msgpack.encode(content))
    assert (admitted is None) == (gate.refused.total() == 1)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_group_with_any_byte_changed_never_raises(data: st.DataObject) -> None:
    record = bytearray(encode(group()))
    record[data.draw(st.integers(0, len(record) - 1))] ^= data.draw(st.integers(1, 255))
    gate = admission()
    admitted = gate.admit(bytes(record))
    assert (admitted is None) == (gate.refused.total() == 1)


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(with_rollout(reward=1e39), id="a reward that is infinite in float32"),
        pytest.param(group(sampling=Sampling(temperature=0.0, max_tokens=4)), id="temperature 0, at which nothing can be scored"),
        pytest.param(group(sampling=Sampling(max_tokens=10**9)), id="a length limit that is not the crew's, which divides dr_grpo's loss"),
    ],
)
def test_what_would_poison_a_step_is_refused(made: Group) -> None:
    assert admission().admit(encode(made)) is None


@pytest.mark.parametrize("tokens", [(1, 12, 1), (11, 12, 13)], ids=["tokens behind the end token", "stopped without an end token"])
def test_an_ending_that_the_tokens_contradict_is_refused(tokens: tuple[int, ...]) -> None:
    assert admission().admit(encode(with_rollout(tokens=tokens))) is None
