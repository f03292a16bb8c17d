"""Groups of continuations, as others read them: what of them is held to the rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from fakes import entry, rollout, sealed_record
from motley.exchange import Entry, decode, encode
from motley.records import Branch, Group, Problem, Rollout, Stamp
from motley.trust import Admission, Admitted, AdmittedGroups, RefusedRecord, Rules
from motley.trust.admitted import MOST_BRANCHES

from .test_admission import FIRST_ROSTER, HUB_KEY, OTHER, PROBLEM, RULES, A, assigned, group

BRANCHING = dataclasses.replace(RULES, met_slots=1, branches=2)


def ended(tokens: list[int], reward: float = 0.0) -> Rollout:
    stopped = tokens[-1] in RULES.end_ids
    made = rollout(tokens, reward=reward)
    return msgspec.structs.replace(made, ending="stop" if stopped else "length")


# of four tokens one is a prefix: what did not stop has three
ENDS = [ended([12, 1], reward=1.0), ended([12, 12, 12])]


def branch(prefix: tuple[int, ...] = (11,), at: tuple[int, int] = (2, 0), **fields: Any) -> Group:
    """Continuations on the problem of round 2, in round 3."""
    made = group(**{"round": 3, "slot": 2, "rollouts": ENDS} | fields)
    met_round, slot = at
    return msgspec.structs.replace(made, branch=Branch(round=met_round, slot=slot, prefix=prefix))


def admission(rules: Rules = BRANCHING, me: str = "me") -> Admission:
    def score(problem: Problem, rollouts: Any) -> list[float]:
        raise AssertionError("nobody scores what it does not learn from")

    gate = Admission(rules, HUB_KEY.public, assigned, score, me)
    gate.admit(FIRST_ROSTER)
    return gate


def refusal(content: Group, rules: Rules = BRANCHING) -> str:
    verdict = admission(rules).admit(entry(content, A))
    assert isinstance(verdict, RefusedRecord), verdict
    assert verdict.detail
    return verdict.reason


def test_a_branch_comes_back_from_its_bytes() -> None:
    made = branch(prefix=(11, 3, 9))
    assert decode(encode(made, Stamp(key=A.public)))[1] == made
    assert made.prefix == (11, 3, 9)
    assert made.place == (2, 0)
    assert (group(round=3, slot=1).place, group().prefix) == ((3, 1), ())


def test_a_group_without_a_prefix_has_the_bytes_it_always_had() -> None:
    """So old logs are read, and hashes of records do not change."""
    body = encode(group(), Stamp(key=A.public))
    assert b"group" in body[:12]
    assert b"branch" in encode(branch(), Stamp(key=A.public))[:12]


def test_a_branch_is_admitted_and_its_rewards_are_nobody_elses() -> None:
    verdict = admission().admit(entry(branch(), A))
    assert isinstance(verdict, Admitted)
    assert (verdict.group, verdict.problem) == (branch(), PROBLEM)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (branch(prefix=()), "prefix"),
        (branch(prefix=(11, 11, 11, 11)), "prefix"),  # leaves no room for a token
        (branch(prefix=(11,) * 300), "prefix"),
        (branch(prefix=(RULES.vocabulary_size,)), "prefix"),
        (branch(prefix=(-1,)), "prefix"),
        (branch(prefix=RULES.end_ids[:1]), "prefix"),  # it would have ended there
        (branch(slot=1), "assignment"),  # is a problem's
        (branch(slot=4), "assignment"),  # more than the crew allows in a round
        (branch(at=(3, 0)), "assignment"),  # nobody has failed it yet
        (branch(at=(-1, 0)), "assignment"),
        (branch(at=(2, 1)), "assignment"),  # is not met by all
        (branch(at=(2, -1)), "assignment"),
        (branch(problem=OTHER), "assignment"),  # was not given in that round
        (branch(rollouts=[ENDS[0], ended([12] * 4)]), "length"),  # with the prefix too long
        (branch(rollouts=[ENDS[0], ended([12] * 2)]), "ending"),  # has not used up its room
        (branch(rollouts=[ENDS[0], ended([12, RULES.vocabulary_size, 12])]), "token"),
        (branch(rollouts=ENDS[:1]), "group_size"),
        (group(round=3, slot=2), "assignment"),  # no continuations in their slot
    ],
)
def test_a_hostile_branch_is_refused_with_a_reason(content: Group, reason: str) -> None:
    assert refusal(content) == reason


def test_a_crew_that_does_not_branch_has_no_branches() -> None:
    assert refusal(branch(), RULES) == "assignment"
    assert refusal(branch(slot=1), RULES) == "assignment"


def test_a_long_prefix_is_refused_before_it_is_read_whole() -> None:
    assert refusal(branch(prefix=(2**20,) * 5000)) in ("size", "inflated")


def test_a_branch_is_admitted_once_however_late_it_comes() -> None:
    admitted = AdmittedGroups(num_slots=2)
    for round in range(4):
        for slot in range(2):
            assert admitted.add(group(round=round, slot=slot))
    assert admitted.complete["a"] == 4
    late = branch(slot=3)
    assert late not in admitted
    assert admitted.add(late)
    assert not admitted.add(late)
    assert admitted.add(branch(slot=2))
    again = AdmittedGroups(num_slots=2)
    again.restore(admitted.complete, admitted.beyond)
    assert late in again
    assert again.beyond == admitted.beyond


def test_no_more_branches_are_remembered_than_so_many_and_older_ones_count_as_seen() -> None:
    admitted = AdmittedGroups(num_slots=2)
    for round in range(MOST_BRANCHES + 10):
        assert admitted.add(branch(round=round))
    assert len(admitted.beyond) == MOST_BRANCHES
    assert not admitted.add(branch(round=3))
    assert admitted.complete["a"] == 0


@pytest.mark.slow
def test_any_entry_with_a_branch_is_judged_and_never_raises() -> None:
    body = encode(branch(), Stamp(key=A.public))
    for place in range(len(body)):
        for value in (0, 1, 127, 128, 255):
            changed = body[:place] + bytes([value]) + body[place + 1 :]

            admission().admit(Entry(7, "a.3.2", sealed_record(changed, A)))
