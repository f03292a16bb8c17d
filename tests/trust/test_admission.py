from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from fakes import PROBLEM, entry, identity, rollout, sealed_record
from fakes import group as any_group
from fuzz import FIELDS, put_together, take_apart, varint
from motley.exchange import Entry, encode, unpack
from motley.exchange.log import tagged
from motley.exchange.wire import MAX_BODY_BYTES, MAX_RECORD_BYTES
from motley.models.tiny import tiny_vocabulary
from motley.records import (
    HUB,
    NO_BASE,
    Backlog,
    Charter,
    Group,
    Problem,
    Rollout,
    Roster,
    Sampling,
    Stamp,
    Weights,
)
from motley.trust import Admission, AdmissionState, Admitted, RefusedRecord, Rules, known
from motley.trust.admission import MAX_IN_A_ROW, MAX_KEPT, READ_ONE_IN
from motley.trust.chain import MAX_MISSING
from motley.trust.copies import Copies, Marked

VOCABULARY = tiny_vocabulary()
OTHER = Problem(kind="sort", prompt="sort 21=", answer="12")
RULES = Rules(
    crew="crew",
    vocabulary=VOCABULARY.fingerprint,
    vocabulary_size=VOCABULARY.size,
    end_ids=VOCABULARY.end_ids,
    rollouts_per_group=2,
    sampling=Sampling(max_tokens=4),
    slots=2,
    rounds=10,
    steps=10,
)
A, B, C, OUTSIDER = (identity(name) for name in ("a", "b", "c", "outsider"))
HUB_KEY = identity(HUB)
UNSCORABLE = 13
LAST_VERSION = RULES.steps
RIGHT, WRONG = rollout([11, 12, 1], reward=1.0), rollout([12, 1], reward=0.0)


def assigned(peer: str, round: int) -> list[Problem]:
    """PROBLEM at slot 0 and another at slot 1; in odd rounds the other way round."""
    return [PROBLEM, OTHER] if round % 2 == 0 else [OTHER, PROBLEM]


def score(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
    """1 for what begins with token 11; it fails on token 13."""
    if any(UNSCORABLE in made.tokens for made in rollouts):
        raise ZeroDivisionError("no such answer")
    return [float(made.tokens[0] == 11) for made in rollouts]


def group(**fields: Any) -> Group:
    return any_group(**{"sampling": RULES.sampling, "rollouts": [RIGHT, WRONG]} | fields)


def with_rollout(**fields: Any) -> Group:
    """A group whose second rollout is at fault."""
    return group(rollouts=[RIGHT, msgspec.structs.replace(WRONG, **fields)])


def from_origin(**fields: Any) -> Group:
    made = group()
    return msgspec.structs.replace(made, origin=msgspec.structs.replace(made.origin, **fields))


def roster(number: int = 0, revoked: Sequence[str] = ("c",), **keys: Any) -> Roster:
    found = {"a": A, "b": B} | keys
    return Roster(
        crew="crew",
        number=number,
        keys={name: key.public for name, key in found.items()},
        revoked=tuple(revoked),
    )


FIRST_ROSTER = entry(roster(), HUB_KEY)


def admission() -> Admission:
    """After the first record of the log, a roster: a and b are on it, c is shut out."""
    gate = Admission(RULES, HUB_KEY.public, assigned, score)
    assert gate.admit(FIRST_ROSTER) == roster()
    assert gate.refused == Counter()
    return gate


def refusal(gate: Admission, *entries: Entry) -> tuple[str, str]:
    """Who the last of some records is counted under, and why; those before it must be taken in."""
    for one in entries[:-1]:
        gate.admit(one)
        assert gate.refused == Counter()
    refused = gate.admit(entries[-1])
    assert isinstance(refused, RefusedRecord)
    assert gate.refused.total() == 1
    ((sender, reason),) = gate.refused
    assert refused is gate.kept[-1]
    assert (refused.position, refused.sender, refused.reason) == (
        entries[-1].position,
        sender,
        reason,
    )
    assert refused.detail
    return sender, reason


def json_copy(state: AdmissionState) -> AdmissionState:
    return msgspec.json.decode(msgspec.json.encode(state), type=AdmissionState)


def under(id: str, record: bytes) -> Entry:
    return Entry(7, id, record)


def signed(body: bytes, id: str = "a.0.0") -> Entry:
    """A body that a signed, whatever it is."""
    return under(id, sealed_record(body, A))


def with_field(name: str, value: Any) -> Entry:
    header, sections = take_apart(encode(group(), Stamp(key=A.public)))
    header[FIELDS.index(name)] = value
    return signed(put_together(header, sections))


# What is admitted


def test_a_good_group_is_admitted_with_its_problem_and_hash() -> None:
    gate = admission()
    first = entry(group(), A)
    cases = [
        (first, group(), PROBLEM),
        (
            entry(group(peer="b", slot=1, problem=OTHER), B),
            group(peer="b", slot=1, problem=OTHER),
            OTHER,
        ),
        (entry(group(round=3, slot=1), A, 1, first), group(round=3, slot=1), PROBLEM),
    ]
    for one, made, problem in cases:
        assert gate.admit(one) == Admitted(made, problem, unpack(one.record).hash)
        assert known(one) == (made, unpack(one.record).hash)
    assert gate.refused == Counter()
    assert not gate.kept


def test_a_charter_is_taken_in_and_changes_nobodys_standing() -> None:
    gate = Admission(RULES, HUB_KEY.public, assigned, score)
    charter = entry(Charter(crew="crew", config="", task="t"), HUB_KEY)
    assert gate.admit(charter) == Charter(crew="crew", config="", task="t")
    assert gate.admit(entry(roster(), HUB_KEY, 1, charter)) == roster()
    assert isinstance(gate.admit(entry(group(), A)), Admitted)
    assert gate.refused == Counter()


def test_before_any_roster_nobody_is_admitted() -> None:
    gate = Admission(RULES, HUB_KEY.public, assigned, score)
    assert refusal(gate, entry(group(), A)) == ("unknown", "sender")


@pytest.mark.parametrize("claimed", [0.0, 1.0, 1e6])
def test_where_a_reward_takes_too_long_to_find_the_senders_word_does_not_count(
    claimed: float,
) -> None:
    gate = admission()
    gate.score = lambda problem, rollouts: [1.0, math.nan]
    made = entry(group(rollouts=[RIGHT, rewarded(claimed)]), A)
    assert refusal(gate, made) == ("a", "undecided")
    assert [(r.signed, "rollout 1 takes longer" in r.detail) for r in gate.kept] == [(True, True)]


def test_a_reward_that_is_false_beside_one_that_takes_too_long_is_called_so() -> None:
    gate = admission()
    gate.score = lambda problem, rollouts: [0.0, math.nan]
    gate.chains.clear()
    assert refusal(gate, entry(group(round=4), A)) == ("a", "reward")


def rewarded(reward: float) -> Rollout:
    return msgspec.structs.replace(WRONG, reward=reward)


def test_without_a_score_rewards_are_taken_on_trust() -> None:
    gate = admission()
    gate.score = None
    assert isinstance(
        gate.admit(entry(with_rollout(reward=0.5, tokens=(UNSCORABLE, 1)), A)), Admitted
    )


def test_a_reward_may_differ_by_the_rounding_of_float32() -> None:
    gate = admission()
    gate.score = lambda problem, rollouts: [0.1, 123456.789]
    rounded = entry(group(rollouts=[rollout(reward=0.1), rollout(reward=123456.789)]), A)
    assert isinstance(gate.admit(rounded), Admitted)


def test_lossless_groups_are_held_to_the_same_rules() -> None:
    gate = admission()
    first = entry(with_rollout(logprobs=(-33.0, 0.0009)), A)
    assert isinstance(gate.admit(first), Admitted)
    assert refusal(
        gate, entry(with_rollout(logprobs=(-33.5, 0.0)), A, 1, first, lossless=True)
    ) == ("a", "logprob")


# Refused before it is read

RECORD = entry(group(), A).record
FRAME = RECORD[65:]
BOMB = RECORD[:65] + zstandard.ZstdCompressor().compress(bytes(2**20))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        pytest.param(bytes(MAX_RECORD_BYTES + 1), "size", id="too large"),
        pytest.param(b"", "schema", id="empty"),
        pytest.param(b"\x01" + RECORD[1:], "schema", id="an older schema"),
        pytest.param(b"\x03" + RECORD[1:], "schema", id="a later schema"),
        pytest.param(RECORD[:65], "truncated", id="no body"),
        pytest.param(b"\x02abc", "truncated", id="no signature"),
        pytest.param(RECORD[:-1], "corrupt", id="cut"),
        pytest.param(RECORD + b"\x00", "corrupt", id="a byte too many"),
        pytest.param(RECORD[:65] + b"no frame", "corrupt", id="no frame"),
        pytest.param(
            RECORD[:65] + zstandard.ZstdCompressor().compress(bytes(MAX_BODY_BYTES + 1)),
            "inflated",
            id="a bomb",
        ),
        pytest.param(
            RECORD[:65] + zstandard.ZstdCompressor(write_content_size=False).compress(bytes(9)),
            "undeclared",
            id="no size",
        ),
        pytest.param(
            RECORD[:65] + zstandard.ZstdCompressor().compress(b""), "truncated", id="an empty body"
        ),
        pytest.param(
            RECORD[:65] + zstandard.ZstdCompressor().compress(bytes(100)), "malformed", id="zeros"
        ),
    ],
)
@pytest.mark.parametrize(
    ("id", "sender"),
    [("a.0.0", "a"), ("hub.roster.1", "hub"), ("hub.charter", "hub")],
)
def test_bytes_that_are_no_record_are_counted_under_the_name_they_stand_under(
    id: str, sender: str, record: bytes, reason: str
) -> None:
    assert refusal(admission(), under(id, record)) == (sender, reason)


@pytest.mark.parametrize(
    ("id", "sender", "reason"),
    [
        ("c.0.0", "c", "revoked"),
        ("c.whatever", "c", "revoked"),
        ("eve.0.0", "unknown", "sender"),
        ("", "unknown", "sender"),
        (".0.0", "unknown", "sender"),
        ("a", "a", "subject"),
        ("a.0", "a", "subject"),
        ("a.0.0.0", "a", "subject"),
        ("a.00.0", "a", "subject"),
        ("a.+1.0", "a", "subject"),
        ("a.\u0661.0", "a", "subject"),
        ("a.0.0\n", "a", "subject"),
        ("a.1" + "0" * 10**4 + ".0", "a", "subject"),
        ("a.roster.1", "a", "subject"),
        ("hub.0.0", "hub", "subject"),
        ("hub.roster", "hub", "subject"),
        ("a.-1.0", "a", "assignment"),
        ("a.10.0", "a", "assignment"),
        ("a.0.2", "a", "assignment"),
        ("a.weights.0", "a", "role"),
    ],
)
def test_under_an_id_that_the_crew_cannot_have_nothing_is_read(
    id: str, sender: str, reason: str
) -> None:
    assert refusal(admission(), under(id, BOMB)) == (sender, reason)


def test_the_largest_honest_record_is_read_and_what_is_larger_is_not() -> None:
    """Log-probs that need four bytes and tokens that need two are the worst case of the crew."""
    rules = dataclasses.replace(RULES, vocabulary_size=2**14, sampling=Sampling(max_tokens=5000))
    gate = admission()
    gate.rules = rules
    rng = random.Random(0)
    made = group(
        sampling=rules.sampling,
        rollouts=[
            Rollout(
                tokens=tuple(rng.randrange(128, 2**14) for _ in range(5000)),
                logprobs=tuple(-rng.random() for _ in range(5000)),
                reward=0.0,
                ending="length",
            )
            for _ in range(2)
        ],
    )
    made = msgspec.structs.replace(
        made, origin=msgspec.structs.replace(made.origin, model="\U00020000" * 200)
    )
    largest = entry(made, A, lossless=True)
    limits = rules.group_limits
    assert isinstance(gate.admit(largest), Admitted)
    assert len(largest.record) > 0.75 * limits.record_bytes
    assert len(unpack(largest.record).body) > 0.9 * limits.body_bytes
    bodies = [rng.randbytes(limits.record_bytes), bytes(limits.body_bytes + 1)]
    records = [under("a.0.0", sealed_record(body, A)) for body in bodies]
    assert [gate.admit(one).reason for one in records] == ["size", "inflated"]


def bomb(**fields: Any) -> Entry:
    """A signed group of a million tokens in some hundred bytes."""
    header, _ = take_apart(encode(group(), Stamp(key=A.public)))
    for name, value in fields.items():
        header[FIELDS.index(name)] = value
    sections = bytes(10) + varint(2**19) * 2 + bytes(2 * 2**20)
    return signed(put_together(header, sections))


def test_a_million_tokens_in_a_few_bytes_are_refused_before_they_are_decompressed() -> None:
    one = bomb()
    assert len(one.record) < 1000
    assert refusal(admission(), one) == ("a", "inflated")


def test_counts_are_held_to_the_crews_before_what_they_count_is_decoded() -> None:
    gate = admission()
    gate.rules = dataclasses.replace(RULES, rollouts_per_group=2**14)  # which bounds the frame
    header, _ = take_apart(encode(group(), Stamp(key=A.public)))
    header[FIELDS.index("num_rollouts")] = 2**14
    cut = bytes(5 * 2**14) + b"\x01" * (2**14 - 1) + varint(5)  # no token follows
    assert refusal(gate, signed(put_together(header, cut))) == ("a", "length")
    gate = admission()
    header[FIELDS.index("num_rollouts")] = 3
    assert refusal(gate, signed(put_together(header, b""))) == ("a", "group_size")


def test_a_header_has_a_bounded_length() -> None:
    gate = admission()
    gate.rules = dataclasses.replace(RULES, rollouts_per_group=2**14)
    header, sections = take_apart(encode(group(), Stamp(key=A.public)))
    header[FIELDS.index("model")] = "x" * 4096
    assert refusal(gate, signed(put_together(header, sections))) == ("a", "size")


# Refused for who says it


@pytest.mark.parametrize(
    ("one", "sender", "reason"),
    [
        pytest.param(entry(group(crew="other"), A), "a", "crew", id="another crew"),
        pytest.param(under("a.0.1", RECORD), "a", "subject", id="under another id of its own"),
        pytest.param(under("b.0.0", RECORD), "b", "subject", id="under another's id"),
        pytest.param(under("a.0.0.", RECORD), "a", "subject", id="under a longer id"),
        pytest.param(entry(group(peer="eve"), OUTSIDER), "unknown", "sender", id="a stranger"),
        pytest.param(
            entry(group(peer=""), OUTSIDER), "unknown", "sender", id="a stranger without a name"
        ),
        pytest.param(
            entry(group(peer="a"), OUTSIDER), "a", "key", id="a stranger under a peer's name"
        ),
        pytest.param(entry(group(peer="a"), B), "a", "key", id="a peer under another's name"),
        pytest.param(entry(group(peer="c"), C), "c", "revoked", id="a peer that was shut out"),
        pytest.param(
            entry(group(peer="c"), OUTSIDER),
            "c",
            "revoked",
            id="a stranger under the name of one that was",
        ),
        pytest.param(entry(roster(1), A), "hub", "key", id="a peer's roster"),
        pytest.param(
            entry(Charter(crew="crew", config="", task=""), A), "hub", "key", id="a peer's charter"
        ),
        pytest.param(entry(roster(1), OUTSIDER), "hub", "key", id="a stranger's roster"),
        pytest.param(
            under("a.0.0", RECORD[:1] + bytes(64) + FRAME), "a", "signature", id="no signature"
        ),
        pytest.param(
            under("a.0.0", RECORD[:1] + entry(group(round=1), A).record[1:65] + FRAME),
            "a",
            "signature",
            id="of another record",
        ),
        pytest.param(
            under("a.0.0", sealed_record(encode(group(), Stamp(key=A.public)), OUTSIDER)),
            "a",
            "signature",
            id="a stranger's signature",
        ),
    ],
)
def test_who_says_it_is_checked_and_a_refusal_is_counted_under_the_subjects_name(
    one: Entry, sender: str, reason: str
) -> None:
    gate = admission()
    assert refusal(gate, one) == (sender, reason)
    # nothing of it stays, in the chain of a least of all
    assert isinstance(gate.admit(entry(group(), A)), Admitted)


@pytest.mark.parametrize("peer", ["a.b", "a.0", "a."])
def test_a_peer_cannot_speak_under_a_name_that_only_begins_with_its_own(peer: str) -> None:
    assert refusal(admission(), entry(group(peer=peer), A))[1] == "subject"


def test_a_hub_has_no_groups() -> None:
    assert refusal(admission(), entry(group(peer=HUB), HUB_KEY)) == (HUB, "subject")


# Refused for its place in the chain


def test_the_same_record_again_is_a_replay() -> None:
    assert refusal(admission(), entry(group(), A), entry(group(), A, position=2)) == ("a", "replay")


def copied(one: Entry, level: int = 1) -> Entry:
    """The same record as anybody can write it: compressed in another way, under its tag."""
    sealed = unpack(one.record)
    frame = zstandard.ZstdCompressor(level=level, write_checksum=True).compress(sealed.body)
    record = one.record[:1] + sealed.signature + frame
    assert record != one.record
    return Entry(one.position + 100, tagged(one.id, record), record)


def test_a_fork_is_held_against_its_sender_and_what_others_can_cause_is_not() -> None:
    gate, first = admission(), entry(group(), A)
    fork, gap = entry(group(round=2), A), entry(group(round=4), A, MAX_MISSING + 2)
    gate.admit(first)
    refused = [gate.admit(one) for one in (fork, copied(fork), copied(first), gap)]
    assert [(one.reason, one.signed) for one in refused if isinstance(one, RefusedRecord)] == [
        ("fork", True),
        ("replay", False),
        ("replay", False),
        ("gap", False),
    ]
    assert gate.signed_in_a_row == Counter(a=1)
    again = Admission(RULES, HUB_KEY.public, assigned, score)
    again.load_state(json_copy(gate.state()))
    for one in (fork, copied(fork, level=3)):
        found = again.admit(one)
        assert isinstance(found, RefusedRecord)
        assert (found.reason, found.signed) == ("replay", False)


def test_two_records_in_one_place_are_a_fork() -> None:
    first = entry(group(), A)
    assert refusal(admission(), first, entry(group(round=2), A)) == ("a", "fork")
    assert refusal(admission(), first, entry(group(round=2), A, 1, previous=bytes(32))) == (
        "a",
        "fork",
    )


def test_a_first_record_that_names_one_before_it_is_a_fork() -> None:
    assert refusal(admission(), entry(group(), A, previous=b"\x01" * 32)) == ("a", "fork")


def test_too_many_records_missing_are_a_gap() -> None:
    assert refusal(admission(), entry(group(), A, MAX_MISSING + 1)) == ("a", "gap")


def test_records_out_of_order_are_admitted_and_what_is_missing_is_known_meanwhile() -> None:
    gate = admission()
    chain = [entry(group(), A)]
    for round in range(1, 4):
        chain.append(entry(group(round=2 * round), A, round, chain[-1]))
    for number, missing in ((0, {}), (3, {"a": 2}), (1, {"a": 1}), (2, {})):
        assert isinstance(gate.admit(chain[number]), Admitted)
        assert gate.missing == missing
    assert gate.refused == Counter()


def test_the_chain_advances_over_an_authentic_record_that_is_refused() -> None:
    gate = admission()
    bad = entry(group(vocabulary="other"), A)
    assert refusal(gate, bad) == ("a", "vocabulary")
    assert isinstance(gate.admit(entry(group(round=2), A, 1, bad)), Admitted)
    assert gate.missing == {}


def test_chains_of_two_peers_have_nothing_to_do_with_each_other() -> None:
    gate = admission()
    first, second = entry(group(), A), entry(group(peer="b"), B)
    assert isinstance(gate.admit(first), Admitted)
    assert isinstance(gate.admit(second), Admitted)
    assert refusal(gate, entry(group(peer="b", round=2), B, 1, first)) == ("b", "fork")


# Refused for what it says


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (group(vocabulary="other"), "vocabulary"),
        (group(sampling=Sampling(temperature=0.0, max_tokens=4)), "sampling"),
        (group(sampling=Sampling(max_tokens=5)), "sampling"),
        (group(sampling=Sampling(max_tokens=10**9)), "sampling"),
        (group(sampling=Sampling(temperature=1e-40, max_tokens=4)), "sampling"),
        (group(sampling=Sampling(temperature=1 + 1e-12, max_tokens=4)), "sampling"),
        (group(sampling=Sampling(top_k=1, max_tokens=4)), "sampling"),
        (group(sampling=Sampling(top_p=0.999, max_tokens=4)), "sampling"),
        (group(sampling=Sampling(logprobs="full", max_tokens=4)), "sampling"),
        (from_origin(version=-1), "version"),
        (from_origin(version=LAST_VERSION + 1), "version"),
        (from_origin(version=2**40), "version"),
        (from_origin(model="m" * 201), "model"),
        (from_origin(model="a\nb"), "model"),
        (from_origin(model="\x1b[2J"), "model"),
        (msgspec.structs.replace(group(), created_s=-1.0), "time"),
        (msgspec.structs.replace(group(), created_s=2.0**33 + 1), "time"),
        (msgspec.structs.replace(group(), created_s=1e300), "time"),
        (msgspec.structs.replace(group(), problem="x" * 3000), "assignment"),
        (group(rollouts=[RIGHT]), "group_size"),
        (group(rollouts=[RIGHT] * 3), "group_size"),
        (with_rollout(tokens=(), logprobs=()), "length"),
        (with_rollout(tokens=(5,) * 5, logprobs=(-1.0,) * 5, ending="length"), "length"),
        (with_rollout(tokens=(VOCABULARY.size, 1)), "token"),
        (with_rollout(tokens=(2**35 - 1, 1)), "token"),
        (with_rollout(tokens=(1, 12)), "ending"),
        (with_rollout(tokens=(1, 1)), "ending"),
        (with_rollout(tokens=(12, 11)), "ending"),
        (with_rollout(tokens=(12, 1), ending="length"), "ending"),
        (with_rollout(tokens=(12, 11), ending="length"), "ending"),  # cut short
        (with_rollout(logprobs=(-1.0, 0.002)), "logprob"),
        (with_rollout(logprobs=(-1.0, -64.1)), "logprob"),
        (with_rollout(logprobs=(math.nan, -1.0)), "logprob"),
        (with_rollout(logprobs=(-math.inf, -1.0)), "logprob"),
        (with_rollout(logprobs=(math.inf, -1.0)), "logprob"),
        (with_rollout(reward=math.nan), "reward"),
        (with_rollout(reward=math.inf), "reward"),
        (with_rollout(reward=-1e30), "reward"),
        (with_rollout(reward=1e39), "reward"),
        (with_rollout(reward=1.1e6), "reward"),
        (with_rollout(reward=0.001), "reward"),
        (with_rollout(reward=1.0), "reward"),
        (with_rollout(tokens=(UNSCORABLE, 1)), "unscorable"),
        (group(round=-1), "assignment"),
        (group(round=RULES.rounds), "assignment"),
        (group(round=2**31), "assignment"),
        (group(slot=2), "assignment"),
        (group(slot=-1), "assignment"),
        (group(slot=1), "assignment"),
        (group(round=1), "assignment"),
        (group(problem=OTHER), "assignment"),
    ],
)
@pytest.mark.parametrize(("peer", "author"), [("a", A), ("b", B)])
def test_every_fault_of_a_group_is_named_and_counted_under_its_sender(
    peer: str, author: Any, made: Group, reason: str
) -> None:
    made = msgspec.structs.replace(made, origin=msgspec.structs.replace(made.origin, peer=peer))
    assert refusal(admission(), entry(made, author)) == (peer, reason)


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (with_field("created_s", math.nan), "malformed"),
        (with_field("temperature", 11.0), "malformed"),
        (with_field("top_p", -0.5), "malformed"),
        (with_field("num_rollouts", 10**9), "group_size"),
        (with_field("num_rollouts", -1), "group_size"),
        (with_field("lossless", True), "truncated"),
        (signed(encode(group(), Stamp(key=A.public)) + b"\x00"), "malformed"),
        (signed(encode(group(), Stamp(key=A.public))[:-1]), "truncated"),
        (signed(b"\x00"), "malformed"),
    ],
)
def test_a_signature_does_not_excuse_what_cannot_be_read(one: Entry, reason: str) -> None:
    assert refusal(admission(), one) == ("a", reason)


def test_a_reward_function_that_answers_too_few_times_is_unscorable() -> None:
    gate = admission()
    gate.score = lambda problem, rollouts: [1.0]
    assert refusal(gate, entry(group(), A)) == ("a", "unscorable")


@pytest.mark.parametrize("answer", [None, "1", [], 1j])
def test_a_reward_function_that_answers_no_number_is_unscorable(answer: Any) -> None:
    gate = admission()
    gate.score = lambda problem, rollouts: [answer, "no"]
    assert refusal(gate, entry(group(), A)) == ("a", "unscorable")


def test_an_answer_that_a_failing_reward_quotes_is_told_without_what_a_terminal_obeys(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answer = "\x1b]0;all is well\x07\x1b[2J\x9b1m\u202e"

    def strict(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        raise ValueError(f"this is no answer: {answer}\nexpected a number")

    gate = admission()
    gate.score = strict
    assert refusal(gate, entry(group(), A)) == ("a", "unscorable")
    (told,) = caplog.messages
    assert not set(answer) - set("0;all is well[2J1m]") & set(told)
    assert "this is no answer: \\x1b]0;all is well\\x07\\x1b[2J\\x9b1m\\u202e\n" in told


def test_a_panic_of_a_tokenizer_is_unscorable() -> None:
    class Panic(BaseException):
        """As Rust's come through to Python."""

    def panic(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        raise Panic("called unwrap on a None value")

    gate = admission()
    gate.score = panic
    assert refusal(gate, entry(group(), A)) == ("a", "unscorable")


# Log-probs that no sampler can report


def long_group(logprob: float, num_tokens: int = 40, sampling: Sampling = Sampling()) -> Group:
    """Two rollouts of the vocabulary's tokens in turn, one of them all of one log-prob."""
    sampling = msgspec.structs.replace(sampling, max_tokens=num_tokens)
    tokens = tuple(3 + place % (VOCABULARY.size - 3) for place in range(num_tokens))
    likely, unlikely = (
        Rollout(
            tokens=(*tokens[:-1], last), logprobs=(x,) * num_tokens, reward=0.0, ending="length"
        )
        for last, x in ((3, -0.1), (4, logprob))
    )
    return group(sampling=sampling, rollouts=[likely, unlikely])


def judged(made: Group, lossless: bool = False) -> str:
    gate = admission()
    gate.score = None
    gate.rules = dataclasses.replace(RULES, sampling=made.origin.sampling)
    verdict = gate.admit(entry(made, A, lossless=lossless))
    return verdict.reason if isinstance(verdict, RefusedRecord) else ""


UNIFORM = -math.log(VOCABULARY.size)


@pytest.mark.parametrize("lossless", [False, True])
def test_a_rollout_is_not_much_less_likely_than_tokens_drawn_evenly(lossless: bool) -> None:
    assert judged(long_group(UNIFORM), lossless) == ""
    assert judged(long_group(UNIFORM - 29.9 / 40), lossless) == ""
    assert judged(long_group(UNIFORM - 30.1 / 40), lossless) == "logprob"
    assert judged(long_group(-20.0), lossless) == "logprob"


def test_what_follows_does_not_excuse_an_impossible_beginning() -> None:
    made = long_group(-0.1)
    first, second = made.rollouts
    logprobs = (UNIFORM - 8,) * 4 + second.logprobs[4:]
    assert judged(msgspec.structs.replace(made, rollouts=(first, second))) == ""
    changed = msgspec.structs.replace(second, logprobs=logprobs)
    assert judged(msgspec.structs.replace(made, rollouts=(first, changed))) == "logprob"
    assert judged(msgspec.structs.replace(made, rollouts=(changed, first))) == "logprob"


def test_rounding_adds_up_against_nobody() -> None:
    """Tokens drawn evenly, of a rollout so long that half a step each would pass for a lie."""
    steps = math.ceil(-UNIFORM * 1700)
    assert judged(long_group(-(-UNIFORM + 0.49 / 1700), 120_000)) == ""
    assert judged(long_group(-(steps + 1) / 1700, 120_000)) == "logprob"


@pytest.mark.parametrize(
    ("sampling", "num_choices"),
    [
        (Sampling(top_k=4), 4),
        (Sampling(top_k=10**6), VOCABULARY.size),
        (Sampling(top_k=4, logprobs="full"), VOCABULARY.size),
        (Sampling(top_p=0.5), VOCABULARY.size),
    ],
)
def test_what_is_drawn_from_fewer_tokens_is_likelier(sampling: Sampling, num_choices: int) -> None:
    even = -math.log(num_choices)
    assert judged(long_group(even - 29.9 / 40, sampling=sampling)) == ""
    assert judged(long_group(even - 30.1 / 40, sampling=sampling)) == "logprob"


# Copies


def told(text: str, logprob: float = -1.0) -> Rollout:
    """An answer of twenty nats."""
    tokens = tuple(3 + ord(character) % 20 for character in text.ljust(20, "."))
    return Rollout(tokens=tokens, logprobs=(logprob,) * 20, reward=0.0, ending="length")


STORIES = tuple(told(text) for text in ("once upon", "a time there", "was a peer"))


def copies_admission(**fields: Any) -> Admission:
    rules = dataclasses.replace(
        RULES, sampling=Sampling(max_tokens=20), rollouts_per_group=3, **fields
    )
    gate = Admission(rules, HUB_KEY.public, lambda peer, round: [PROBLEM] * 2, None)
    gate.admit(FIRST_ROSTER)
    return gate


def told_by(peer: str, round: int, *rollouts: Rollout) -> Group:
    return group(peer=peer, round=round, rollouts=rollouts, sampling=Sampling(max_tokens=20))


def reasons(gate: Admission, *groups: Group) -> list[str]:
    """What becomes of groups of a and b, each in its author's chain."""
    last: dict[str, Entry] = {}
    found = []
    for made in groups:
        peer = made.origin.peer
        before = last.get(peer)
        counter = sum(g.origin.peer == peer for g in groups[: len(found)])
        last[peer] = entry(made, {"a": A, "b": B}[peer], counter, before or bytes(32))
        verdict = gate.admit(last[peer])
        found.append(verdict.reason if isinstance(verdict, RefusedRecord) else "")
    return found


NEW = tuple(told(text) for text in ("and another", "which found", "words of its own"))


def test_what_another_published_is_a_copy() -> None:
    original = told_by("a", 0, *STORIES)
    assert reasons(copies_admission(), original, told_by("b", 0, *STORIES)) == ["", "copied"]
    assert reasons(copies_admission(), original, told_by("b", 3, *STORIES)) == ["", "copied"]
    assert reasons(copies_admission(), original, told_by("a", 1, *STORIES)) == ["", "copied"]
    reordered = told_by("b", 0, STORIES[2], NEW[0], STORIES[0])
    assert reasons(copies_admission(), original, reordered) == ["", "copied"]


def test_what_chance_may_have_drawn_again_is_no_copy() -> None:
    original = told_by("a", 0, *STORIES)
    one = told_by("b", 0, STORIES[0], *NEW[:2])
    assert reasons(copies_admission(), original, one) == ["", ""]
    likely = [told(text, -0.25) for text in ("yes", "no", "perhaps")]
    assert reasons(copies_admission(), told_by("a", 0, *likely), told_by("b", 0, *likely)) == [
        "",
        "",
    ]
    # the parts are of two groups, and each may be chance
    parts = [told_by("a", 0, *STORIES), told_by("a", 1, *NEW)]
    mixed = told_by("b", 0, STORIES[0], NEW[0], told("its own"))
    assert reasons(copies_admission(), *parts, mixed) == ["", "", ""]


def test_a_rollout_many_times_in_one_group_is_a_copy() -> None:
    assert reasons(copies_admission(), told_by("a", 0, *[STORIES[0]] * 3)) == ["copied"]
    assert reasons(copies_admission(), told_by("a", 0, STORIES[0], *STORIES[:2])) == [""]


def test_samplers_of_one_learner_are_not_compared() -> None:
    """They have the same weights and public seeds: one could foretell what the other will say."""
    original = told_by("a", 0, *STORIES)
    gate = copies_admission(students={"a": "l", "b": "l"})
    assert reasons(gate, original, told_by("b", 0, *STORIES)) == ["", ""]
    gate = copies_admission(students={"a": "l", "b": "k"})
    assert reasons(gate, original, told_by("b", 0, *STORIES)) == ["", "copied"]


def test_copies_are_known_again_after_a_checkpoint() -> None:
    gate = copies_admission()
    assert reasons(gate, told_by("a", 0, *STORIES)) == [""]
    again = copies_admission()
    again.load_state(json_copy(gate.state()))
    assert again.state() == gate.state()
    assert reasons(again, told_by("b", 0, *STORIES)) == ["copied"]


def test_what_is_remembered_for_copies_is_bounded_per_sender() -> None:
    copies = Copies()
    marked = lambda number: Marked((number.to_bytes(8, "big"),) * 2, (100.0, 0.0))
    copies.add("a", "a.0.0", marked(10**9), num_senders=2)
    for number in range(3000):
        copies.add("b", f"b.{number}.0", marked(number), num_senders=2)
    assert len(copies.state()) == 1 + 512
    anyone = lambda sender: False
    assert copies.source_of("c.0.0", marked(10**9), anyone) == "a.0.0"  # whatever b wrote since
    assert copies.source_of("c.0.0", marked(2999), anyone) == "b.2999.0"
    assert copies.source_of("b.2999.0", marked(2999), anyone) == ""  # it is the same group
    assert copies.source_of("c.0.0", marked(2999 - 512), anyone) == ""


# Rosters


def hub_says(*contents: Roster) -> list[Entry]:
    """A hub's records behind the first roster."""
    chain = [FIRST_ROSTER]
    for counter, content in enumerate(contents, 1):
        chain.append(entry(content, HUB_KEY, counter, chain[-1]))
    return chain[1:]


def test_a_roster_changes_who_is_admitted_from_there_on() -> None:
    gate = admission()
    mine = entry(group(peer="d"), identity("d"))
    assert refusal(gate, mine) == ("unknown", "sender")
    (added,) = hub_says(roster(1, d=identity("d")))
    assert gate.admit(added) == roster(1, d=identity("d"))
    assert isinstance(gate.admit(mine), Admitted)
    assert isinstance(gate.admit(entry(group(), A)), Admitted)
    assert gate.refused.total() == 1


def test_a_roster_that_leaves_a_peer_out_ends_its_part() -> None:
    gate = admission()
    only_a = Roster(crew="crew", number=1, keys={"a": A.public})
    gate.admit(hub_says(only_a)[0])
    assert refusal(gate, entry(group(peer="b"), B)) == ("unknown", "sender")


def test_a_peer_shut_out_comes_back_with_a_new_key_and_a_new_chain_only() -> None:
    gate = admission()
    new = identity("a's new key")
    out, back = hub_says(roster(1, revoked=("c", "a")), roster(2, a=new))
    first = entry(group(), A)
    assert isinstance(gate.admit(first), Admitted)
    assert gate.admit(out) == roster(1, revoked=("c", "a"))
    second = entry(group(round=2), A, 1, first)
    assert isinstance(gate.admit(second), RefusedRecord)
    assert gate.refused == Counter({("a", "revoked"): 1})
    assert gate.admit(back) == roster(2, a=new)
    assert isinstance(gate.admit(second), RefusedRecord)
    assert gate.refused == Counter({("a", "revoked"): 1, ("a", "key"): 1})
    assert isinstance(gate.admit(entry(group(round=2), new)), Admitted)
    assert gate.refused.total() == 2


def test_an_old_roster_cannot_be_played_again() -> None:
    gate = admission()
    (out,) = hub_says(roster(1, revoked=("a",)))
    gate.admit(out)
    assert refusal(gate, FIRST_ROSTER) == (HUB, "replay")
    assert gate.revoked == {"a"}


def test_an_older_roster_that_comes_late_does_not_undo_a_newer_one() -> None:
    gate = admission()
    older, newer = hub_says(roster(1), roster(2, revoked=("a",)))
    for one in (newer, older):
        assert isinstance(gate.admit(one), Roster)
    assert gate.refused == Counter()
    assert refusal(gate, entry(group(), A)) == ("a", "revoked")


def test_a_roster_that_cannot_be_read_changes_nothing() -> None:
    gate = admission()
    header, sections = take_apart(unpack(hub_says(roster(1, revoked=("a",)))[0].record).body)
    header[FIELDS.index("crew") + 2] = {"a": b"short"}
    bad = Entry(3, "hub.roster.1", sealed_record(put_together(header, sections), HUB_KEY))
    assert refusal(gate, bad) == (HUB, "malformed")
    assert isinstance(gate.admit(entry(group(), A)), Admitted)


# Counts


def test_a_refusal_does_not_touch_the_next_record() -> None:
    gate = admission()
    gate.admit(under("a.0.0", b"noise"))
    assert isinstance(gate.admit(entry(group(), A)), Admitted)
    assert gate.refused.total() == 1


def test_what_is_told_of_a_refused_record_moves_no_terminal() -> None:
    gate = admission()
    gate.admit(Entry(0, "a.0.0\x1b[2J\n", b"noise"))
    gate.refuse(Entry(1, "a.0.0", b""), "malformed", "header: '\x1b]0;title\x07\nround 3: run'")
    for kept in gate.kept:
        assert (kept.id + kept.detail).isprintable(), kept
    assert len(gate.kept) == 2


def test_refusals_are_all_counted_and_the_newest_kept() -> None:
    gate = admission()
    for position in range(MAX_KEPT + 50):
        gate.admit(Entry(position, f"a.{position}" + "x" * 1000, b"noise"))
        gate.admit(Entry(position, f"stranger{position}.0.0", b"\x02noise"))
    assert gate.refused == Counter(
        {("a", "subject"): MAX_KEPT + 50, ("unknown", "sender"): MAX_KEPT + 50}
    )
    assert len(gate.kept) == MAX_KEPT == 256
    assert [kept.position for kept in gate.kept] == [
        p for p in range(MAX_KEPT // 2 + 50, MAX_KEPT + 50) for _ in range(2)
    ]
    assert all(len(kept.id) <= 200 and len(kept.detail) <= 500 for kept in gate.kept)


def test_a_refusals_text_is_bounded_however_long_what_it_quotes() -> None:
    gate = admission()
    for made in (group(crew="x" * 3000), group(vocabulary="x" * 3000)):
        gate.admit(entry(made, A))
    gate.admit(entry(group(peer="y" * 10**5), OUTSIDER))
    gate.admit(entry(Charter(crew="z" * 10**5, config="", task=""), A))
    gate.admit(under("a." + "0" * 10**5, b""))
    assert [kept.reason for kept in gate.kept] == [
        "crew",
        "vocabulary",
        "sender",
        "crew",
        "subject",
    ]
    assert all(len(kept.detail) <= 500 and len(kept.id) <= 200 for kept in gate.kept)


def test_of_a_sender_refused_a_thousand_times_in_a_row_one_record_in_sixteen_is_read() -> None:
    scored = 0

    def counting(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        nonlocal scored
        scored += 1
        return score(problem, rollouts)

    gate = Admission(LEARNERS, HUB_KEY.public, assigned, counting)
    gate.admit(FIRST_ROSTER)
    gate.in_a_row["a"] = gate.signed_in_a_row["a"] = MAX_IN_A_ROW - 3
    lie = with_rollout(reward=0.5)
    last = entry(lie, A)
    gate.admit(last)
    for round in range(1, 163):
        last = entry(msgspec.structs.replace(lie, round=2 * round), A, round, last)
        gate.admit(last)
    assert gate.refused == Counter({("a", "reward"): 13, ("a", "flood"): 150})
    assert (scored, gate.missing, len(gate.kept)) == (13, {}, 3)
    # what others did is still there to look at, and the sender has its way back
    assert gate.admit(under("b.0.0", b"noise")) is gate.kept[-1]
    found = []
    for round in range(163, 183):
        last = entry(group(round=2 * round), A, round, last)
        found.append(isinstance(gate.admit(last), Admitted))
    assert found == [False] * found.index(True) + [True] * (20 - found.index(True))
    assert found.index(True) <= READ_ONE_IN


def test_a_new_key_is_not_answerable_for_what_the_old_one_signed() -> None:
    gate = admission()
    gate.in_a_row["a"] = gate.signed_in_a_row["a"] = MAX_IN_A_ROW + 1
    new = identity("a's new key")
    assert isinstance(gate.admit(hub_says(roster(1, a=new))[0]), Roster)
    assert isinstance(gate.admit(entry(group(), new)), Admitted)


def test_what_others_write_under_a_name_does_not_count_against_it() -> None:
    gate = admission()
    for position in range(2 * MAX_IN_A_ROW):
        gate.admit(Entry(position, "a.0.0", b"noise"))
        gate.admit(Entry(position, "hub.roster.9", b"noise"))
    assert gate.signed_in_a_row == Counter()
    assert isinstance(gate.admit(entry(group(), A)), Admitted)
    assert gate.admit(hub_says(roster(1))[0]) == roster(1)


# State


def story() -> list[Entry]:
    """Records good and bad, out of order, with a roster in the middle."""
    mine = [entry(group(), A)]
    for counter in range(1, 8):
        mine.append(entry(group(round=counter, slot=counter % 2), A, counter, mine[-1]))
    theirs = [entry(group(peer="b", vocabulary="other"), B)]
    theirs.append(entry(group(peer="b", round=2), B, 1, theirs[-1]))
    out, back = hub_says(roster(1, revoked=("b",)), roster(2, a=A, b=identity("new b")))
    noise = under("a.9.1", b"noise")
    order = [
        mine[0],
        noise,
        mine[3],
        theirs[0],
        mine[2],
        mine[2],
        out,
        theirs[1],
        mine[5],
        back,
        theirs[1],
        mine[1],
        mine[4],
        mine[7],
        mine[6],
    ]
    return [one._replace(position=position) for position, one in enumerate(order)]


@pytest.mark.parametrize("stop", range(16))
def test_an_admission_goes_on_from_its_state_as_if_nothing_had_been(stop: int) -> None:
    entries = story()
    whole = admission()
    expected = [whole.admit(one) for one in entries]
    first = admission()
    found = [first.admit(one) for one in entries[:stop]]
    second = Admission(RULES, HUB_KEY.public, assigned, score)
    second.load_state(json_copy(first.state()))
    assert second.state() == first.state()
    found += [second.admit(one) for one in entries[stop:]]
    assert found == expected
    assert second.state() == whole.state()
    assert (second.refused, list(second.kept)) == (whole.refused, list(whole.kept))
    assert sum(isinstance(one, Admitted) for one in found) == 8
    assert set(whole.refused) == {
        ("a", "schema"),
        ("a", "replay"),
        ("b", "vocabulary"),
        ("b", "revoked"),
        ("b", "key"),
    }


# Anything


@settings(max_examples=100)
@given(
    st.binary(max_size=200),
    st.sampled_from([b"", b"\x02", RECORD[:65], RECORD[:75]]),
    st.text(max_size=9),
)
def test_random_bytes_are_refused_and_never_raise(noise: bytes, start: bytes, id: str) -> None:
    gate = admission()
    assert isinstance(gate.admit(under(id, start + noise)), RefusedRecord)
    assert gate.refused.total() == 1


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=33),
    st.just([]),
    st.just({}),
)


@settings(max_examples=200)
@given(st.sampled_from(FIELDS), VALUES, st.sampled_from(FIELDS), VALUES)
def test_a_signed_group_with_any_value_anywhere_never_raises(
    first: str, value: Any, second: str, other: Any
) -> None:
    header, sections = take_apart(encode(group(), Stamp(key=A.public)))
    header[FIELDS.index(first)], header[FIELDS.index(second)] = value, other
    id = "{}.{}.{}".format(*(header[FIELDS.index(name)] for name in ("peer", "round", "slot")))
    gate = admission()
    verdict = gate.admit(signed(put_together(header, sections), id))
    assert isinstance(verdict, Admitted if gate.refused.total() == 0 else RefusedRecord)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_a_signed_body_with_any_byte_changed_never_raises(data: st.DataObject) -> None:
    body = bytearray(encode(group(), Stamp(key=A.public)))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    gate = admission()
    verdict = gate.admit(signed(bytes(body)))
    assert isinstance(verdict, Admitted if gate.refused.total() == 0 else RefusedRecord)


# Learners' weights

LEARNERS = dataclasses.replace(RULES, learners=frozenset({"b", "c"}), rounds=None)


def weights(peer: str = "b", version: int = 3, **fields: Any) -> Weights:
    return Weights(
        **{
            "crew": "crew",
            "peer": peer,
            "version": version,
            "precision": "bfloat16",
            "base": NO_BASE,
            "base_state": b"",
            "state": bytes(32),
            "blobs": (),
            "frozen": (),
            "backlog": Backlog(waiting=(), oldest_s=0.0),
            "created_s": 0.0,
        }
        | fields
    )


def learners_admission() -> Admission:
    """b learns and c, which is shut out, did; a samples."""
    gate = Admission(
        LEARNERS,
        HUB_KEY.public,
        lambda peer, round: [] if peer == "b" else assigned(peer, round),
        score,
    )
    assert gate.admit(FIRST_ROSTER) == roster()
    return gate


def test_a_learners_weights_are_given_back_and_take_their_place_in_its_chain() -> None:
    gate = learners_admission()
    first = entry(weights(version=0), B)
    second = entry(weights(version=1, base=0, base_state=bytes(32)), B, 1, first)
    assert gate.admit(first) == weights(version=0)
    assert gate.admit(second) == weights(version=1, base=0, base_state=bytes(32))
    assert (gate.refused, gate.missing) == (Counter(), {})
    assert refusal(gate, entry(weights(version=2), B, 1, first)) == ("b", "fork")


@pytest.mark.parametrize(
    ("one", "sender", "reason"),
    [
        pytest.param(entry(weights("a"), A), "a", "role", id="one who samples"),
        pytest.param(entry(weights("a"), B), "a", "role", id="a learner under another's name"),
        pytest.param(
            entry(weights("b"), A), "b", "key", id="one who samples under a learner's name"
        ),
        pytest.param(
            entry(weights("b"), OUTSIDER), "b", "key", id="a stranger under a learner's name"
        ),
        pytest.param(entry(weights("eve"), OUTSIDER), "unknown", "sender", id="a stranger"),
        pytest.param(entry(weights("c"), C), "c", "revoked", id="a learner that was shut out"),
        pytest.param(entry(weights(HUB), HUB_KEY), HUB, "subject", id="the hub"),
        pytest.param(entry(weights(crew="other"), B), "b", "crew", id="of another crew"),
        pytest.param(
            under("b.weights.4", entry(weights(), B).record),
            "b",
            "subject",
            id="under another version's id",
        ),
        pytest.param(
            under("b.3.0", entry(weights(), B).record), "b", "subject", id="under a group's id"
        ),
        pytest.param(
            under("b.weights.3", sealed_record(encode(weights(), Stamp(key=B.public)), A)),
            "b",
            "signature",
            id="signed by another",
        ),
        pytest.param(entry(weights(state=bytes(31)), B), "b", "malformed", id="a hash cut short"),
        pytest.param(
            entry(weights(version=11), B), "b", "version", id="more steps than the crew has"
        ),
        pytest.param(entry(weights(created_s=1e10), B), "b", "time", id="of a far day"),
    ],
)
def test_weights_are_refused_from_anyone_but_a_learner(
    one: Entry, sender: str, reason: str
) -> None:
    assert refusal(learners_admission(), one) == (sender, reason)


def test_a_crew_without_roles_has_no_weights() -> None:
    assert refusal(admission(), entry(weights("a"), A)) == ("a", "role")


def test_the_chain_goes_on_behind_weights_that_are_not_read() -> None:
    gate = learners_admission()
    bad = entry(weights("a"), A)
    assert refusal(gate, bad) == ("a", "role")
    assert isinstance(gate.admit(entry(group(), A, 1, bad)), Admitted)
    assert gate.missing == {"a": 1}


def test_a_learner_that_was_given_no_problems_has_no_groups() -> None:
    assert refusal(learners_admission(), entry(group(peer="b"), B)) == ("b", "assignment")


@pytest.mark.parametrize(
    ("round", "taken"),
    [(RULES.rounds, True), (10**6, True), (2**31 - 2, True), (2**31, False), (-2, False)],
)
def test_samplers_go_on_for_as_long_as_their_learner_does(round: int, taken: bool) -> None:
    gate = learners_admission()
    assert isinstance(gate.admit(entry(group(round=round), A)), Admitted) == taken
    assert gate.refused == (Counter() if taken else Counter({("a", "assignment"): 1}))


def test_refused_weights_survive_a_checkpoint() -> None:
    gate = learners_admission()
    assert isinstance(gate.admit(entry(weights("a"), A)), RefusedRecord)
    again = learners_admission()
    again.load_state(json_copy(gate.state()))
    assert again.refused == Counter({("a", "role"): 1})
    assert (again.kept[-1].id, again.kept[-1].reason) == ("a.weights.3", "role")
