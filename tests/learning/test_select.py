from __future__ import annotations

from collections import Counter

import pytest

from fakes import candidate, group
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
        (0.25, 4, 8, 2, 6),
        (1.0, 4, 8, 4, 0),
        (0.0, 4, 8, 0, 8),
        (0.5, 8, 1, 7, 1),  # room that no foreign group wants goes to own groups
        (0.75, 3, 8, 3, 1),
        (0.3, 8, 8, 3, 5),  # a third group, though .3 of 8 is nearer to two: it is a least share
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
