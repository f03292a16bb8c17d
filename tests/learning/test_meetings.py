"""What peers meet on, and what comes of it, without a model."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fakes import candidate, group, rollout
from motley.learning.meetings import Meetings
from motley.learning.select import Candidate
from motley.records import Problem


def answered(
    peer: str, rewards: Sequence[float], slot: int = 0, round: int = 0, position: int = 1
) -> Candidate:
    """A peer's group on the problem of a slot and round that everyone has."""
    problem = Problem(prompt=f"{round}.{slot}=", answer="1")
    rollouts = [rollout([3 + number, 4, 1], reward) for number, reward in enumerate(rewards)]
    made = group(peer=peer, round=round, slot=slot, rollouts=rollouts, problem=problem)
    return candidate(made, own=peer == "me", position=position, problem=problem)


def meetings(num_met: int = 2, window: int = 0, success: float = 1.0) -> Meetings:
    return Meetings(num_met, success, seed=0, window=window)


def test_a_peers_success_on_a_failed_problem_is_a_lesson() -> None:
    met = meetings().meet([answered("me", [0, 0]), answered("other", [0, 1])], version=3)
    ((lesson),) = met.lessons
    assert (lesson.sender, lesson.number, lesson.tokens) == ("other", 1, (4, 4, 1))
    assert (lesson.attempt.round, lesson.attempt.slot) == (0, 0)
    assert (met.problems, met.failed) == (1, 1)


def test_nothing_is_learned_where_the_own_group_has_a_success() -> None:
    met = meetings().meet([answered("me", [0, 1]), answered("other", [1, 1])], version=0)
    assert (met.problems, met.failed, met.lessons) == (1, 0, [])


def test_nothing_is_learned_where_nobody_has_a_success() -> None:
    met = meetings().meet([answered("me", [0, 0]), answered("other", [0.5, 0.9])], version=0)
    assert (met.failed, met.lessons) == (1, [])


def test_what_a_success_is_can_be_said() -> None:
    groups = [answered("me", [-3, -2]), answered("other", [-3, -1])]
    assert meetings(success=-1.5).meet(groups, 0).lessons
    assert not meetings(success=-2.0).meet(groups, 0).lessons  # the own one is a success too
    assert not meetings(success=0.0).meet(groups, 0).lessons


def test_problems_that_are_not_met_teach_nothing() -> None:
    groups = [answered("me", [0, 0], slot=2), answered("other", [1, 1], slot=2)]
    assert meetings(num_met=2).meet(groups, 0).problems == 0
    assert len(meetings(num_met=3).meet(groups, 0).lessons) == 1


def test_there_is_one_lesson_a_problem_and_every_sender_has_the_same_chance_of_it() -> None:
    chosen = []
    for round in range(40):
        met = meetings().meet(
            [
                answered("me", [0, 0, 0], round=round),
                answered("often", [1, 1, 1], round=round),
                answered("once", [0, 0, 1], round=round),
            ],
            version=0,
        )
        (lesson,) = met.lessons
        chosen.append(lesson.sender)
    assert 10 <= chosen.count("once") <= 30


def test_which_lesson_it_is_does_not_depend_on_the_order_of_the_groups() -> None:
    for round in range(8):
        groups = [answered(peer, [peer != "me", 0], round=round) for peer in ("me", "a", "b", "c")]
        first, second = (meetings().meet(order, 0).lessons for order in (groups, groups[::-1]))
        assert first == second


def test_an_own_group_of_any_sampler_counts() -> None:
    """Of two own groups on a problem one success is enough."""
    mine = [answered("me", [0, 0]), answered("me", [1, 0])]
    assert not meetings().meet([*mine, answered("other", [1, 1])], 0).lessons
    assert not meetings().meet([*mine[::-1], answered("other", [1, 1])], 0).lessons


def test_the_two_halves_of_a_meeting_may_be_steps_apart_in_either_order() -> None:
    late = meetings(window=4)
    assert not late.meet([answered("me", [0, 0])], version=5).lessons
    assert len(late.meet([answered("other", [1, 0])], version=8).lessons) == 1
    early = meetings(window=4)
    assert not early.meet([answered("other", [1, 0])], version=5).lessons
    assert len(early.meet([answered("me", [0, 0])], version=8).lessons) == 1


def test_a_lesson_is_given_once() -> None:
    one = meetings(window=8)
    assert one.meet([answered("me", [0, 0]), answered("other", [1, 0])], version=0).lessons
    assert not one.meet([answered("third", [1, 0])], version=1).lessons


def test_what_has_waited_for_the_window_is_forgotten() -> None:
    for window in (0, 3):
        one = meetings(window=window)
        one.meet([answered("me", [0, 0])], version=5)
        one.meet([], version=5 + window)
        assert not one.state().attempts
        assert not one.meet([answered("other", [1, 0])], version=6 + window).lessons


@pytest.mark.slow
def test_no_more_than_so_many_problems_are_remembered() -> None:
    one = meetings(window=10**6)
    for round in range(1100):
        one.meet([answered("me", [0, 0], round=round)], version=round)
        one.meet([answered("other", [1, 0], slot=1, round=round)], version=round)
    assert len(one.state().attempts) == len(one.state().successes) == 1024
    assert one.state().attempts[0].round == 76


def test_what_a_muted_sender_sent_is_not_learned_from_later() -> None:
    one = meetings(window=4)
    one.meet([answered("other", [1, 0]), answered("third", [1, 0], slot=1)], version=0)
    one.leave_out(["other"])
    met = one.meet([answered("me", [0, 0]), answered("me", [0, 0], slot=1)], version=1)
    assert [lesson.sender for lesson in met.lessons] == ["third"]


def test_what_is_remembered_comes_back_from_a_checkpoint() -> None:
    before = meetings(window=4)
    waiting = answered("other", [1, 0], slot=1, position=7)
    before.meet([answered("me", [0, 0]), waiting], version=0)
    state = before.state()
    assert [success.position for success in state.successes] == [7]
    after = meetings(window=4)
    after.load_state(state, [waiting])
    assert after.state() == state
    for one in (before, after):
        assert [
            lesson.attempt.slot
            for lesson in one.meet(
                [answered("third", [0, 1]), answered("me", [0, 0], slot=1)], version=2
            ).lessons
        ] == [0, 1]
