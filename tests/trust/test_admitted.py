from __future__ import annotations

import random
from collections import Counter

from fakes import group
from motley.trust import AdmittedGroups, GroupPlace
from motley.trust.admitted import MOST_BEYOND


def test_a_group_is_new_once() -> None:
    admitted = AdmittedGroups(num_slots=2)
    for made in (group(), group(slot=1), group(peer="b"), group(round=3)):
        assert made not in admitted
        assert admitted.add(made)
        assert made in admitted
        assert not admitted.add(made)


def test_another_group_in_the_same_place_is_not_new() -> None:
    admitted = AdmittedGroups(num_slots=2)
    assert admitted.add(group(crew="one"))
    assert not admitted.add(group(crew="two"))


def test_whole_rounds_are_remembered_by_their_number_alone() -> None:
    admitted = AdmittedGroups(num_slots=2)
    for made in (group(), group(slot=1), group(round=1, slot=1), group(round=2)):
        admitted.add(made)
    assert admitted.complete == Counter({"a": 1})
    assert admitted.beyond == {GroupPlace("a", 1, 1), GroupPlace("a", 2, 0)}
    admitted.add(group(round=1))
    assert (admitted.complete, admitted.beyond) == (Counter({"a": 2}), {GroupPlace("a", 2, 0)})


def test_a_place_that_was_passed_over_is_not_waited_for() -> None:
    admitted = AdmittedGroups(num_slots=2)
    admitted.add(group())
    assert not admitted.is_whole("a", 0)
    assert admitted.pass_over(GroupPlace("a", 0, 1))
    assert admitted.is_whole("a", 0)
    assert admitted.complete == Counter({"a": 1})
    assert not admitted.add(group(slot=1))


def test_the_place_of_a_group_is_read_from_the_id_of_its_record() -> None:
    assert GroupPlace.read("a.3.1") == GroupPlace("a", 3, 1)
    assert GroupPlace.read("a.3.1.0123456789abcdef") == GroupPlace("a", 3, 1)
    for other in ("a.weights.3", "hub.charter", "hub.roster.0", "a.3", "a", "a.-1.0", ""):
        assert GroupPlace.read(other) is None


def test_in_whatever_order_groups_come_nothing_is_left_to_remember_in_the_end() -> None:
    rng = random.Random(0)
    groups = [
        group(peer=peer, round=round, slot=slot)
        for peer in "ab"
        for round in range(5)
        for slot in range(3)
    ]
    rng.shuffle(groups)
    admitted = AdmittedGroups(num_slots=3)
    assert all(admitted.add(made) for made in groups)
    assert not any(admitted.add(made) for made in groups)
    assert (admitted.complete, admitted.beyond) == (Counter({"a": 5, "b": 5}), set())


def test_a_sender_that_leaves_rounds_out_is_remembered_in_bounded_memory() -> None:
    admitted = AdmittedGroups(num_slots=2)
    others = group(peer="b", round=5)
    assert admitted.add(others)
    for round in range(1, 2 * MOST_BEYOND):
        assert admitted.add(group(round=round, vocabulary="v"))
    assert len(admitted.beyond) <= MOST_BEYOND + 1
    newest, left_out = group(round=2 * MOST_BEYOND - 1), group(round=0)
    assert newest in admitted
    assert left_out in admitted  # it comes too late
    assert group(round=2 * MOST_BEYOND) not in admitted
    assert others in admitted
    assert group(peer="b", round=4) not in admitted


def test_what_was_admitted_is_known_again_after_a_checkpoint() -> None:
    admitted, again = AdmittedGroups(num_slots=2), AdmittedGroups(num_slots=2)
    for made in (group(), group(slot=1), group(round=1, slot=1), group(peer="b", round=2)):
        admitted.add(made)
    again.restore(dict(admitted.complete), sorted(admitted.beyond))
    assert again == admitted
