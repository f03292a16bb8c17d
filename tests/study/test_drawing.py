"""Crews drawn by a seed."""

from __future__ import annotations

from motley.runs.checking import check_config
from motley.study.drawing import drawn_crews


def test_a_seed_gives_the_same_crews_whenever_they_are_drawn() -> None:
    assert drawn_crews(3, 5) == drawn_crews(3, 5)
    assert drawn_crews(3, 5) != drawn_crews(3, 6)


def test_more_crews_leave_the_first_as_they_are() -> None:
    assert drawn_crews(6, 5)[:2] == drawn_crews(2, 5)


def test_every_drawn_crew_can_be_run() -> None:
    crews = drawn_crews(6, 2)
    for config in crews:
        check_config(config)
    assert {len(config.peer) for config in crews} == {2, 3, 4}
