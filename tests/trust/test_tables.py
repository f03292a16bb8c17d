"""Senders of another vocabulary: their tables, and groups that are read by them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from fakes import PROBLEM, entry, identity, rollout, sealed_record
from fakes import group as any_group
from motley.exchange import Entry, encode
from motley.exchange.headers import MAX_ENDS
from motley.exchange.log import tagged
from motley.exchange.wire import MAX_BODY_BYTES
from motley.models.tiny import tiny_vocabulary
from motley.records import HUB, Group, Problem, Rollout, Roster, Sampling, Stamp, Table
from motley.spelling import Spelling
from motley.spelling.table import MAX_ENCODED_BYTES, MAX_TOKEN_BYTES, MAX_TOKENS
from motley.trust import Admission, Admitted, RefusedRecord, Rules, Tables, known

VOCABULARY = tiny_vocabulary()
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
    learners=frozenset({"l"}),
    mixed=True,
)
A, B, L = (identity(name) for name in ("a", "b", "l"))
HUB_KEY = identity(HUB)

# a's tokens: far more than the reader has; 900 ends, 5 is special, 2 is half of a character
WORDS: list[bytes | None] = [None] * 1000
WORDS[1:9] = [b"1", b"\xc3", b"\xa9", b" 2", None, b"12", b"21", b"x" * 300]
SPELLING = Spelling(tuple(WORDS))
TABLE = Table(crew="crew", peer="a", vocabulary="other", ends=(900, 7), encoded=SPELLING.encode())
RIGHT, WRONG = rollout([1, 1, 900], reward=3.0), rollout([2, 3, 7], reward=1.0)


def assigned(peer: str, round: int) -> list[Problem]:
    return [PROBLEM, PROBLEM]


def score(problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
    return [float(made.tokens[0]) for made in rollouts]


def score_texts(problem: Problem, texts: Sequence[str]) -> list[float]:
    """3 for "11", else how many characters there are."""
    assert all(texts), "nobody can read it"
    return [3.0 if text == "11" else float(len(text)) for text in texts]


def admission(**rules: Any) -> Admission:
    gate = Admission(
        dataclasses.replace(RULES, **rules),
        HUB_KEY.public,
        assigned,
        score,
        score_texts=score_texts,
    )
    gate.admit(entry(roster(), HUB_KEY))
    return gate


def roster(number: int = 0, a: bytes = A.public) -> Roster:
    keys = {"a": a, "b": B.public, "l": L.public}
    return Roster(crew="crew", number=number, keys=keys)


def group(vocabulary: str = "other", **fields: Any) -> Group:
    made = {"sampling": RULES.sampling, "rollouts": [RIGHT, WRONG]} | fields
    return any_group(vocabulary=vocabulary, **made)


def told(gate: Admission, *entries: Entry) -> Any:
    """What became of the last of some records."""
    return [gate.admit(one) for one in entries][-1]


def refusal(gate: Admission, *entries: Entry) -> tuple[str, str]:
    """Why the last is refused; those before it must not be."""
    refused = told(gate, *entries)
    assert isinstance(refused, RefusedRecord)
    assert gate.refused == Counter({(refused.sender, refused.reason): 1})
    return refused.reason, refused.detail


def both(made: Group, table: Table = TABLE) -> tuple[Entry, Entry]:
    """A table, and a group behind it in the sender's chain."""
    first = entry(table, A, position=7)
    return first, entry(made, A, 1, first, position=8)


def test_a_group_of_another_vocabulary_is_admitted_with_what_its_tokens_stand_for() -> None:
    gate = admission()
    table, made = both(group())
    assert gate.admit(table) == TABLE
    verdict = gate.admit(made)
    assert isinstance(verdict, Admitted)
    assert verdict.spelling == SPELLING
    assert verdict.group == group()
    assert gate.refused == Counter()
    # and who has the reader's own vocabulary is read as ever
    own = group(VOCABULARY.fingerprint, peer="b", rollouts=[rollout([11, 12, 1], reward=11.0)] * 2)
    assert gate.admit(entry(own, B)) == Admitted(own, PROBLEM, known(entry(own, B))[1], None)


def test_without_a_table_before_it_another_vocabulary_is_refused() -> None:
    reason, detail = refusal(admission(), entry(group(), A))
    assert reason == "vocabulary"
    assert "no table of a's" in detail
    # a table that comes too late, or is of another vocabulary, changes nothing
    table, made = both(group())
    gate = admission()
    assert isinstance(gate.admit(made), RefusedRecord)
    assert gate.admit(table) == TABLE
    assert refusal(admission(), *both(group("third")))[0] == "vocabulary"


def test_a_table_counts_for_who_signed_it_alone() -> None:
    gate = admission()
    gate.admit(entry(TABLE, A))
    assert refusal(gate, entry(group(peer="b"), B))[0] == "vocabulary"
    of_another = Entry(1, "b.table", entry(TABLE, A).record)
    assert refusal(admission(), of_another)[0] == "subject"
    forged = msgspec.structs.replace(TABLE, peer="b")
    assert refusal(admission(), entry(forged, A))[0] == "key"


def test_a_crew_of_one_vocabulary_takes_no_table_and_no_other_vocabulary() -> None:
    assert refusal(admission(mixed=False), entry(TABLE, A))[0] == "table"
    reason, detail = refusal(admission(mixed=False), entry(group(), A))
    assert (reason, "the crew's" in detail) == ("vocabulary", True)


def test_who_publishes_no_groups_publishes_no_table() -> None:
    table = msgspec.structs.replace(TABLE, peer="l")
    assert refusal(admission(), entry(table, L))[0] == "role"


def changed(**fields: Any) -> Table:
    return msgspec.structs.replace(TABLE, **fields)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(changed(vocabulary="third"), id="of another name"),
        pytest.param(changed(ends=(900,)), id="with other ends"),
        pytest.param(changed(encoded=Spelling((b"1", b"2")).encode(), ends=(1,)), id="other bytes"),
    ],
)
def test_a_second_table_is_refused_and_the_first_one_stays(other: Table) -> None:
    gate, (first, made) = admission(), both(group())
    second = entry(other, A, 2, made, position=9)
    under_tag = second._replace(id=tagged("a.table", second.record))
    reason, detail = refusal(gate, first, made, under_tag)
    assert reason == "table"
    assert "position 7" in detail
    verdict = gate.admit(entry(group(round=1), A, 3, second, position=10))
    assert isinstance(verdict, Admitted)
    assert verdict.spelling == SPELLING


def test_the_same_table_again_is_taken_for_the_first() -> None:
    gate, first = admission(), entry(TABLE, A, position=7)
    gate.admit(first)
    again = entry(TABLE, A, 1, first, position=9)
    assert gate.admit(again._replace(id=tagged("a.table", again.record))) == TABLE
    assert gate.tables.positions == [7]


def test_who_has_a_new_key_has_a_new_table() -> None:
    gate, new = admission(), identity("a, again")
    gate.admit(entry(TABLE, A, position=7))
    gate.admit(entry(roster(1, new.public), HUB_KEY, 1, entry(roster(), HUB_KEY)))
    assert refusal(gate, entry(group(), new))[0] == "vocabulary"
    other = changed(vocabulary="third", encoded=Spelling((None, b"1", None)).encode(), ends=(2,))
    gate = admission()
    gate.admit(entry(roster(1, new.public), HUB_KEY, 1, entry(roster(), HUB_KEY)))
    table = entry(other, new, position=9)
    made = group("third", rollouts=[rollout([1, 1, 2], reward=3.0), rollout([1, 2], reward=1.0)])
    verdict = told(gate, table, entry(made, new, 1, table))
    assert isinstance(verdict, Admitted)
    assert verdict.spelling == Spelling((None, b"1", None))


def with_bytes(encoded: bytes) -> Table:
    return changed(encoded=encoded, ends=(0,))


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        pytest.param(with_bytes(b""), "table", id="nothing"),
        pytest.param(with_bytes(bytes(4)), "table", id="no tokens"),
        pytest.param(with_bytes((2**20 + 1).to_bytes(4, "little")), "table", id="too many tokens"),
        pytest.param(with_bytes(b"\xff" * 4 + bytes(100)), "table", id="more tokens than bytes"),
        pytest.param(with_bytes(b"\1\0\0\0\2\0a"), "table", id="lengths beyond its bytes"),
        pytest.param(with_bytes(b"\1\0\0\0\1\0ab"), "table", id="bytes beyond its lengths"),
        pytest.param(with_bytes(b"\1\0\0\0\1\x10" + b"a" * 4097), "table", id="a huge token"),
        pytest.param(changed(vocabulary="v" * 201), "table", id="a long name"),
        pytest.param(changed(vocabulary="\n"), "table", id="an unprintable name"),
        pytest.param(changed(ends=(1000,)), "table", id="an end that is no token"),
        pytest.param(changed(ends=(7, 7)), "table", id="an end twice"),
        pytest.param(changed(ends=()), "malformed", id="no end"),
        pytest.param(changed(ends=(-1,)), "malformed", id="an end below zero"),
        pytest.param(changed(ends=tuple(range(MAX_ENDS + 1))), "malformed", id="too many ends"),
    ],
)
def test_a_bad_table_is_refused_by_name_and_changes_nothing(table: Table, reason: str) -> None:
    gate = admission()
    assert refusal(gate, entry(table, A))[0] == reason
    assert A.public not in gate.tables
    # its sender may still have a right one
    assert gate.admit(entry(TABLE, A, 1, entry(table, A))) == TABLE


@pytest.mark.slow
def test_the_largest_table_is_read_and_a_larger_record_is_not_decompressed() -> None:
    words = (b"a" * MAX_TOKEN_BYTES,) * 2048
    full = Spelling((*words, *(None for _ in range(MAX_TOKENS - len(words)))))
    encoded = full.encode()
    assert len(encoded) == MAX_ENCODED_BYTES
    gate = admission()
    assert isinstance(gate.admit(entry(changed(encoded=encoded), A)), Table)
    body = encode(TABLE, Stamp(key=A.public)) + bytes(MAX_BODY_BYTES - 4096)
    bomb = Entry(1, "a.table", sealed_record(body, A))
    assert refusal(admission(), bomb)[0] == "inflated"


@pytest.mark.parametrize(
    ("rollouts", "reason"),
    [
        pytest.param([RIGHT, rollout([1, 1000, 900])], "token", id="a token beyond the table"),
        pytest.param([RIGHT, rollout([900, 1, 900])], "ending", id="two ends"),
        pytest.param([RIGHT, rollout([1, 1])], "ending", id="no end"),
        pytest.param([RIGHT, rollout([1, 900], logprob=-38.0)], "logprob", id="a log-prob"),
        pytest.param([RIGHT, rollout([1, 900], reward=2.0)], "reward", id="another reward"),
    ],
)
def test_rollouts_are_held_to_their_senders_own_vocabulary(
    rollouts: list[Rollout], reason: str
) -> None:
    assert refusal(admission(), *both(group(rollouts=rollouts)))[0] == reason


def test_the_surprise_that_is_taken_is_that_of_the_senders_vocabulary() -> None:
    """ln 1000 + 30 = 36.9 nats, and of the reader's 28 tokens 33.3."""
    far = msgspec.structs.replace(RIGHT, logprobs=(-36.0, -0.1, -0.1))
    assert isinstance(told(admission(), *both(group(rollouts=[far, WRONG]))), Admitted)


def test_rewards_are_computed_from_the_bytes() -> None:
    """A character may be in two tokens, and what ended an answer is no part of it."""
    seen: list[str] = []
    gate = admission()
    gate.score_texts = lambda problem, texts: seen.extend(texts) or score_texts(problem, texts)  # type: ignore[func-returns-value]
    torn = rollout([1, 2, 900], reward=2.0)
    table, made = both(group(rollouts=[rollout([2, 3, 900], reward=1.0), torn]))
    assert isinstance(told(gate, table, made), Admitted)
    assert seen == ["é", "1\ufffd"]


def test_an_answer_longer_than_any_is_not_scored() -> None:
    """A token of the table has 300 bytes; an answer has at most 64 for each of four tokens."""
    assert RULES.max_tokens == 4
    seen: list[str] = []
    gate = admission()
    gate.score_texts = lambda problem, texts: seen.extend(texts) or score_texts(problem, texts)  # type: ignore[func-returns-value]
    huge = rollout([8, 900], reward=77.0)
    assert isinstance(told(gate, *both(group(rollouts=[huge, RIGHT]))), Admitted)
    assert seen == ["11"]


def test_what_nobody_can_read_is_not_compared() -> None:
    """A special token inside stands for no text."""
    unread = [rollout([1, 5, 900], reward=77.0), rollout([5, 900], reward=-77.0)]
    verdict = told(admission(), *both(group(rollouts=unread)))
    assert isinstance(verdict, Admitted)
    reason, detail = refusal(
        admission(), *both(group(rollouts=[unread[0], rollout([1, 900], reward=0.5)]))
    )
    assert reason == "reward"
    assert detail.startswith("rollout 1 ")


def test_equal_tables_are_held_once_and_read_again_from_their_places() -> None:
    tables, again = Tables(), Tables()
    tables.add(A.public, TABLE, 7)
    tables.add(B.public, changed(peer="b"), 9)
    first, second = tables.of(A.public), tables.of(B.public, "other")
    assert first
    assert second
    assert first.spelling is second.spelling
    assert tables.of(A.public, "third") is None
    again.add(L.public, TABLE, 1)
    again.restore([(A.public, TABLE, 7), (B.public, changed(peer="b"), 9)])
    assert again.positions == tables.positions == [7, 9]
    assert L.public not in again


def test_a_checkpoint_says_where_tables_stand_and_nothing_where_there_are_none() -> None:
    gate = admission()
    assert b"tables" not in msgspec.json.encode(gate.state())
    gate.admit(entry(TABLE, A, position=7))
    assert gate.state().tables == [7]
