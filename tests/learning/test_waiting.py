from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fakes import candidate, group, spread_crew
from motley.clock import VirtualClock
from motley.config import Learning
from motley.learning.select import Candidate
from motley.learning.waiting import MADE_KEPT, Round, StalenessWindow, Take, Wait, Waiting
from motley.records import Backlog

THREE = ("a", "b", "c")


def window(learning: Learning = Learning(), **at_s: float) -> StalenessWindow:
    """After versions 0, 1, ... made at these seconds."""
    clock = VirtualClock()
    made = StalenessWindow(learning, clock, version=-1)
    for version, now_s in enumerate(at_s.values()):
        clock.advance(now_s)
        made.made(version)
    return made


def waiting(folder: Path, *candidates: Candidate, learning: str = "", **crew: Any) -> Waiting:
    config = spread_crew(folder, ("full", "full", "full"), learning, **crew)
    made = Waiting(config, window(config.learning, first=0.0), config.peer[0].name)
    for one in candidates:
        made.add(one)
    return made


def part(peer: str, family: str = "0.0", position: int = 1, since: int = 0) -> Candidate:
    round, slot = map(int, family.split("."))
    made = group(peer=peer, round=round, slot=slot)
    return candidate(made, family=family, position=position, arrived=since)


def ids(candidates: Iterable[Candidate]) -> list[str]:
    return [c.group.id for c in candidates]


# Age


def test_own_weights_age_from_when_they_were_superseded() -> None:
    ages = window(first=0.0, second=10.0, third=25.0)
    ages.clock.advance(40.0)
    own = lambda since: candidate(group(), own=True, arrived=since)
    assert [ages.age_s(own(since)) for since in (0, 1, 2)] == [30.0, 15.0, 0.0]


def test_foreign_groups_age_from_when_they_came() -> None:
    ages = window(first=0.0, second=10.0)
    ages.clock.advance(40.0)
    assert ages.age_s(replace(candidate(group(), arrived=1), came_s=38.5)) == 1.5


def test_weights_older_than_is_remembered_are_as_old_as_the_oldest_known() -> None:
    ages = window(first=0.0)
    for version in range(1, MADE_KEPT + 10):
        ages.clock.advance(float(version))
        ages.made(version)
    assert (len(ages.made_s), min(ages.made_s), ages.version) == (MADE_KEPT, 10, MADE_KEPT + 9)
    assert ages.age_s(candidate(group(), own=True, arrived=2)) == MADE_KEPT + 9 - 10.0


@pytest.mark.parametrize(
    ("learning", "stale"),
    [
        (Learning(max_age=1), {"0.0"}),
        (Learning(max_age=2), set()),
        (Learning(max_age=0, max_age_s=25.0), {"0.1"}),
        (Learning(max_age=0, max_age_s=35.0), set()),
    ],
)
def test_the_window_is_in_versions_or_in_seconds(learning: Learning, stale: set[str]) -> None:
    ages = window(learning, first=0.0, second=10.0, third=25.0)
    ages.clock.advance(30.0)
    old = replace(part("a", "0.0", since=0), came_s=20.0)
    long_here = replace(part("a", "0.1", since=1), came_s=0.0)
    assert ages.stale_families([old, long_here]) == stale


def test_the_backlog_counts_authors_and_names_the_oldest(tmp_path: Path) -> None:
    made = waiting(tmp_path)
    assert made.backlog == Backlog(waiting=(), oldest_s=0.0)
    for peer, came_s in (("b", 4.0), ("a", 1.5), ("b", 3.0)):
        made.add(replace(part(peer), came_s=came_s))
    made.window.clock.advance(5.0)
    assert made.backlog == Backlog(waiting=(("a", 1), ("b", 2)), oldest_s=3.5)


# What belongs together


def test_groups_come_in_the_order_of_rounds_and_not_of_arrival(tmp_path: Path) -> None:
    made = waiting(
        tmp_path, *(candidate(group(peer=p, round=r)) for p, r in (("b", 1), ("b", 0), ("a", 1)))
    )
    whole = made.whole_families(Round(0, THREE, quorum=2))
    assert ids(whole) == ["b.0.0", "a.1.0", "b.1.0"]
    assert ids(made) == ["b.1.0", "b.0.0", "a.1.0"]


def test_a_horizontal_group_is_whole_with_every_crewmates_part_or_when_closed_a_quorums(
    tmp_path: Path,
) -> None:
    made = waiting(
        tmp_path,
        *(part(peer, "0.0") for peer in "abc"),
        *(part(peer, "0.1") for peer in "ab"),
        part("a", "1.0"),
        layout="horizontal",
        group_size=6,
    )
    families = lambda round: Counter(c.family for c in made.whole_families(round))
    assert families(Round(0, THREE, quorum=2)) == {"0.0": 3}
    assert families(Round(0, ("a", "b"), quorum=2)) == {"0.0": 3, "0.1": 2}
    assert families(Round(0, THREE, quorum=2, closed=True)) == {"0.0": 3, "0.1": 2}
    assert families(Round(0, THREE, quorum=1, closed=True)) == {"0.0": 3, "0.1": 2, "1.0": 1}


# Taking and dropping


def test_what_is_taken_waits_no_longer(tmp_path: Path) -> None:
    groups = [candidate(group(slot=slot), True, position=slot + 1) for slot in range(8)]
    made = waiting(tmp_path, *groups)  # 6 a step
    assert made.take(groups) == tuple(groups[:6])
    assert list(made) == groups[6:]


def test_a_flood_takes_its_share_of_a_step_unless_the_crew_shares_every_group(
    tmp_path: Path,
) -> None:
    groups = [candidate(group(peer="x", slot=slot), position=slot + 1) for slot in range(8)]
    # three authors: two thirds of 6, twice an even share
    assert len(waiting(tmp_path, *groups).take(groups)) == 4
    config = waiting(tmp_path, layout="horizontal", group_size=6)
    assert len(config.take(groups)) == 6


def test_the_same_step_is_taken_again_in_its_order(tmp_path: Path) -> None:
    groups = [candidate(group(slot=slot), position=10 + slot) for slot in range(4)]
    made = waiting(tmp_path, *groups)
    assert made.take_again([12, 10]) == Take((groups[2], groups[0]))
    assert list(made) == [groups[1], groups[3]]
    assert made.take_again([12, 10]) == Wait()


def test_a_take_of_nothing_is_not_a_wait() -> None:
    assert Take(()) != Wait()
    assert Take(()).positions == ()


def test_what_is_dropped_is_counted_under_its_sender_and_reason(tmp_path: Path) -> None:
    made = waiting(tmp_path, part("a"), part("b"), part("b", "1.0"))
    made.drop(lambda c: c.group.origin.peer == "b", "stale")
    made.drop_at_once("c", "late", 9)
    assert ids(made) == ["a.0.0"]
    assert made.dropped == Counter({("b", "stale"): 2, ("c", "late"): 1})


def test_only_whole_groups_are_stale_and_only_others_incomplete(tmp_path: Path) -> None:
    groups = [part(peer, "0.0", position) for position, peer in enumerate("abc")]
    groups.append(part("a", "0.1", 4))
    settings = {"layout": "horizontal", "group_size": 6, "learning": "max_age = 1"}
    made, round = waiting(tmp_path, *groups, **settings), Round(0, THREE, quorum=2)
    made.window.made(1)
    made.drop_stale(round)
    made.drop_incomplete(round)
    assert len(made) == 4
    made.window.made(2)
    made.drop_incomplete(round)
    assert ids(made) == ["a.0.0", "b.0.0", "c.0.0"]
    made.drop_stale(round)
    assert ids(made) == []
    assert made.dropped == Counter(
        {("a", "incomplete"): 1, ("a", "stale"): 1, ("b", "stale"): 1, ("c", "stale"): 1}
    )
