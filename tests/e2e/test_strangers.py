"""Crews on a hub with a member that has a valid key and means ill: the others end their rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from e2e.test_participants import Cheat, House, HouseOf, house_of, quick
from fakes import spread_crew
from motley.config import CrewConfig
from motley.records import Group

__all__ = ["house_of", "quick"]  # fixtures

pytestmark = [
    pytest.mark.slow,  # whole crews, each with a server
    pytest.mark.filterwarnings("ignore:unclosed <StreamWriter"),
]

HONEST = ("full0", "full1", "last2")
STRANGER = "full3"


def crew(task: Path, **settings: Any) -> CrewConfig:
    return spread_crew(
        task,
        ("full", "full", "last", "full"),
        **({"rounds": 4, "deadline_s": 0.5, "group_size": 4} | settings),
    )


def good_groups(house: House, name: str, round: int) -> list[Group]:
    """What a member would publish of a round that nobody has begun."""
    half = house.peer(name).half
    before, half.sampled_rounds = half.sampled_rounds, round
    groups = half.draw().groups
    half.sampled_rounds = before
    return groups


def publish(house: House, *rounds: int) -> None:
    """Have the stranger join, put good groups of these rounds on the log, and fall silent."""
    house.join(STRANGER)
    made = [group for round in rounds for group in good_groups(house, STRANGER, round)]
    cheat = Cheat(house, STRANGER)
    for group in made:
        cheat.put(group)


@pytest.mark.parametrize("rounds", [(2,), (3,), (1, 2, 3), (0, 1, 2, 3)])
def test_good_groups_of_later_rounds_stop_nobody(
    rounds: tuple[int, ...], task: Path, house_of: HouseOf
) -> None:
    house = house_of(crew(task))
    publish(house, *rounds)
    house.join(*HONEST)
    house.finish(*HONEST)
    for name in HONEST:
        assert [line.round for line in house.lines[name]] == [1, 2, 3, 4]
        assert {group.round for group in house.groups(name)} == {0, 1, 2, 3}
        assert not house.peer(name).admission.refused


def test_in_an_async_crew_with_a_deadline_nobody_stops_sampling(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(crew(task, pace="async"))
    publish(house, 3)
    house.join(*HONEST)
    house.until(
        lambda: all({g.round for g in house.groups(n)} == {0, 1, 2, 3} for n in HONEST), *HONEST
    )


def test_to_shut_a_stranger_out_frees_a_crew_that_waits_for_it_also_after_a_restart(
    task: Path, house_of: HouseOf
) -> None:
    """And a member whose state says that it has sampled a round which nobody has."""
    house = house_of(crew(task, deadline_s=0.0))
    publish(house, 2)
    house.join(*HONEST)
    house.peer("full0").half.sampled_rounds = 1
    house.until(
        lambda: all(name in house.said[n][-1] for n in HONEST for name in [STRANGER]), *HONEST
    )
    for name in HONEST:
        house.members[name].save()
        house.leave(name)
    house.revoke(STRANGER)
    house.join(*HONEST)
    house.finish(*HONEST)
    for name in HONEST:
        assert [line.round for line in house.lines[name]] == [1, 2, 3, 4]
        assert all(set(line.senders) == set(HONEST) for line in house.lines[name])


def test_what_a_member_sent_before_it_was_shut_out_counts_no_more(
    task: Path, house_of: HouseOf
) -> None:
    house = house_of(crew(task, deadline_s=0.0))
    publish(house, 0)
    house.join(*HONEST)
    house.until(
        lambda: all(house.peer(name).awaited() == ["full1", "last2"] for name in ("full0",)),
        "full0",
    )
    house.revoke(STRANGER)
    house.until(lambda: STRANGER in house.peer("full0").admission.revoked, "full0")
    house.finish(*HONEST)
    assert set(house.lines["full0"][0].senders) == set(HONEST)
    assert house.lines["full0"][-1].dropped == {STRANGER: {"revoked": 2}}
