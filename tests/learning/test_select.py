from __future__ import annotations

from collections import Counter
from dataclasses import replace as replaced

import pytest
from msgspec.structs import replace

from fakes import candidate, group, rollout
from motley.config import Learning
from motley.learning.select import Candidate, Selection, select, stale_families


def waiting(*names: str, arrived: int = 0) -> list[Candidate]:
    """One candidate per letter: "me" is own, anything else foreign. Positions in order."""
    slots: Counter[str] = Counter()
    found = []
    for position, name in enumerate(names, 1):
        made = group(peer=name, slot=slots[name])
        slots[name] += 1
        found.append(candidate(made, own=name == "me", arrived=arrived, position=position))
    return found


def senders(candidates: list[Candidate]) -> list[str]:
    return [c.group.origin.peer for c in candidates]


def positions(candidates: list[Candidate]) -> list[int]:
    return [c.position for c in candidates]


def test_everything_is_taken_where_there_is_room() -> None:
    ready = waiting("me", "a", "b")
    assert select(ready, Learning(), most=3) == Selection(ready, [])


def test_the_first_are_taken_and_the_rest_wait() -> None:
    chosen = select(waiting("a", "b", "a", "c"), Learning(), most=2)
    assert (positions(chosen.take), positions(chosen.wait)) == ([1, 2], [3, 4])


@pytest.mark.parametrize(("most", "stale"), [(4, {"a", "me"}), (5, set()), (0, {"a", "me", "b"})])
def test_families_past_the_window_are_stale(most: int, stale: set[str]) -> None:
    ready = waiting("a", "me", arrived=2) + waiting("b", arrived=3)
    families = {c.family: c.group.origin.peer for c in ready}
    assert {families[f] for f in stale_families(ready, most, lambda c: c.age(7))} == stale


def test_a_family_is_as_old_as_its_newest_part() -> None:
    parts = [
        candidate(group(peer=peer), arrived=arrived, family="0.0")
        for peer, arrived in (("a", 0), ("b", 5))
    ]
    alone = [candidate(group(peer="c"), arrived=0, family="0.1")]
    assert stale_families(parts + alone, 2, lambda c: c.age(6)) == {"0.1"}


def test_no_sender_fills_more_than_its_quota() -> None:
    chosen = select(waiting("a", "a", "a", "b", "me", "me"), Learning(quota=1), most=9)
    assert senders(chosen.take) == ["a", "b", "me", "me"]
    assert senders(chosen.wait) == ["a", "a"]


@pytest.mark.parametrize(
    ("own_share", "num_own", "num_foreign", "expected_own", "expected_foreign"),
    [
        (0.5, 4, 8, 4, 4),
        (0.5, 2, 8, 2, 2),  # too few own: fewer foreign, so that the share holds
        (0.25, 4, 8, 4, 4),  # in turn, where it is more than the least share
        (0.25, 2, 8, 2, 6),
        (1.0, 4, 8, 4, 0),
        (0.0, 4, 8, 4, 4),
        (0.0, 0, 8, 0, 8),
        (0.5, 8, 1, 7, 1),  # room that no foreign group wants goes to own groups
        (0.75, 3, 8, 3, 1),
        (0.7, 8, 8, 6, 2),  # a sixth group, though .7 of 8 is nearer to five: it is a least share
    ],
)
def test_own_groups_keep_their_share(
    own_share: float, num_own: int, num_foreign: int, expected_own: int, expected_foreign: int
) -> None:
    ready = waiting(*["a"] * num_foreign, *["me"] * num_own)
    taken = Counter(c.own for c in select(ready, Learning(own_share=own_share), most=8).take)
    assert (taken[True], taken[False]) == (expected_own, expected_foreign)
    assert taken[True] >= own_share * taken.total()


@pytest.mark.parametrize(
    "rules",
    [Learning(), Learning(quota=1), Learning(own_share=0.4), Learning(quota=2, own_share=0.9)],
)
def test_every_group_is_taken_or_waits(rules: Learning) -> None:
    ready = waiting("a", "me", "a", "b", "a", "me", arrived=3) + waiting("c", "d", "e", arrived=5)
    chosen = select(ready, rules, most=4)
    assert len(chosen.take) <= 4
    assert len(chosen.take) + len(chosen.wait) == len(ready)
    assert {id(c) for c in chosen.take}.isdisjoint({id(c) for c in chosen.wait})


def test_newer_foreign_groups_do_not_push_out_older_own_ones() -> None:
    ready = waiting("me", "a", "me", "a", "a", "a")
    assert [c.own for c in select(ready, Learning(), most=4).take] == [True, False, True, False]


# What one sender may take of a step


def test_who_sends_much_takes_no_place_of_who_sends_little() -> None:
    ready = waiting(*["flood"] * 50, "me", "a", "b", "me", "a", "b")
    taken = select(ready, Learning(), most=6).take
    assert Counter(senders(taken)) == {"flood": 2, "me": 2, "a": 1, "b": 1}
    # each sender's first, in the order in which they waited
    assert positions(taken) == sorted(positions(taken))
    assert positions(taken)[:2] == [1, 2]
    more = select(waiting(*["flood"] * 50, *["me", "a"] * 3), Learning(), most=6)
    assert Counter(senders(more.take)) == {"flood": 2, "me": 2, "a": 2}


def test_an_even_crew_takes_what_it_would_without_turns() -> None:
    ready = waiting(*["a"] * 2, *["b"] * 2, *["me"] * 2, *["a"] * 2, *["b"] * 2, *["me"] * 2)
    assert positions(select(ready, Learning(), most=6).take) == [1, 2, 3, 4, 5, 6]


def test_parts_of_shared_groups_are_taken_in_their_order() -> None:
    parts = [
        candidate(group(peer=peer, slot=slot), family=f"0.{slot}", position=10 * slot + number)
        for slot in range(3)
        for number, peer in enumerate(("a", "b"))
    ]
    assert positions(select(parts, Learning(), most=2).take) == [0, 1, 10, 11]


def test_no_stranger_has_more_than_its_share_of_a_full_step() -> None:
    ready = waiting(*["flood"] * 50, "me", "a")
    chosen = select(ready, Learning(), most=8, share=0.5)
    assert Counter(senders(chosen.take)) == {"flood": 4, "me": 1, "a": 1}
    assert len(chosen.take) + len(chosen.wait) == len(ready)
    # its own are not bounded, and where nobody else sends there is a smaller step
    assert len(select(waiting(*["me"] * 9), Learning(), most=8, share=0.5).take) == 8
    assert len(select(waiting(*["a"] * 9), Learning(), most=8, share=0.5).take) == 4


def test_beside_a_share_of_own_groups_it_is_a_share_of_the_step_that_is_taken() -> None:
    ready = waiting(*["flood"] * 50, "me", "me", "me", "a")
    chosen = select(ready, Learning(), most=20, share=0.5, own_most=3)
    assert Counter(senders(chosen.take)) == {"flood": 4, "me": 3, "a": 1}
    chosen = select(ready, Learning(), most=20, share=0.75, own_most=1)
    assert Counter(senders(chosen.take)) == {"flood": 6, "me": 1, "a": 1}


def test_no_stranger_has_more_than_its_share_of_a_steps_tokens() -> None:
    ready = waiting("me", "me", "a", "a", "long", "long", "long")
    tokens = {"me": 3, "a": 3, "long": 20}
    ready = [
        replaced(
            c,
            group=replace(c.group, rollouts=(rollout([5] * tokens[c.group.origin.peer]),)),
        )
        for c in ready
    ]
    few = select(ready, Learning(), most=7, share=0.5).take
    assert Counter(senders(few)) == {"me": 2, "a": 2, "long": 1}  # one is always left
    assert len(select(ready, Learning(), most=7, share=0.8).take) == 6  # 40 of 52
