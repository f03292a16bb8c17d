"""What a learner remembers of its own successes, and what a step is reminded of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import msgspec
import pytest

from fakes import candidate, group, rollout
from motley.learning.memory import MOST, MOST_OF_A_KIND, Memory, OwnSuccess
from motley.learning.select import Candidate
from motley.learning.success import Success
from motley.records import Branch, Problem


def answered(
    rewards: Sequence[float],
    slot: int = 0,
    peer: str = "me",
    kind: str = "sort",
    round: int = 0,
    position: int = 1,
) -> Candidate:
    problem = Problem(kind=kind, prompt=f"{kind} {slot}=", answer="1")
    rollouts = [rollout([3 + number, 4, 1], reward) for number, reward in enumerate(rewards)]
    made = group(peer=peer, round=round, slot=slot, rollouts=rollouts, problem=problem)
    return candidate(made, own=peer == "me", position=position, problem=problem)


def memory(seed: int = 0, all_kinds: bool = True, **success: float) -> Memory:
    """Of a receiver with these running mean rewards, by kind of problem."""
    return Memory(Success(0.9, dict(success)), seed, all_kinds)


def remembering(candidates: Sequence[Candidate], seed: int = 0) -> Memory:
    made = memory(seed)
    made.take_in(candidates)
    return made


def names(some: Iterable[OwnSuccess]) -> list[tuple[str, int]]:
    return [(one.candidate.group.id, one.number) for one in some]


def known(made: Memory) -> list[tuple[str, int]]:
    return sorted(names(one for some in made.by_kind.values() for one in some))


def foreign(num_rollouts: int) -> list[Candidate]:
    return [answered([0.0] * num_rollouts, peer="other")] if num_rollouts else []


# What is remembered


def test_what_beats_the_running_success_or_is_as_good_is_remembered_by_itself() -> None:
    made, mine = memory(sort=0.5), answered([1.0, 0.4, 0.6, 0.5], position=7)
    made.take_in([mine])
    found = {one.number: one for one in made.by_kind["sort"]}
    assert [*made.by_kind] == ["sort"]
    assert sorted(found) == [0, 2, 3]
    for number, one in found.items():
        assert one.rollout == mine.group.rollouts[number]
        assert one.candidate.group.rollouts == (one.rollout,)
        assert one.candidate.problem == mine.problem
        assert one.candidate.position == 7
    assert len(mine.group.rollouts) == 4


def test_a_reward_of_nothing_is_no_success_where_nothing_ever_succeeds() -> None:
    made = memory(sort=0.0, sum=-2.0)
    made.take_in([answered([0.0, 0.01]), answered([-2.0, -1.0, -3.0], slot=1, kind="sum")])
    assert known(made) == [("me.0.0", 1), ("me.0.1", 1)]


def test_success_is_that_on_the_same_kind_of_problem() -> None:
    made = memory(sort=0.9, sum=0.1)
    made.take_in([answered([0.5]), answered([0.5], slot=1, kind="sum")])
    assert {kind: names(some) for kind, some in made.by_kind.items()} == {"sum": [("me.0.1", 0)]}


def test_only_what_the_own_engine_answered_is_remembered() -> None:
    branch = msgspec.structs.replace(
        answered([1.0], slot=1).group, branch=Branch(round=0, slot=1, prefix=(5,))
    )
    made = memory()
    made.take_in(
        [
            answered([1.0], peer="other"),
            replace(answered([1.0], slot=1), group=branch),
            replace(answered([1.0], slot=2), stranger=True),  # of a sampler with the own weights
        ]
    )
    assert known(made) == []


def test_an_answer_without_tokens_is_not_remembered() -> None:
    mine = answered([1.0, 1.0])
    empty = msgspec.structs.replace(mine.group.rollouts[0], tokens=(), logprobs=())
    rollouts = (empty, mine.group.rollouts[1])
    made = memory()
    made.take_in([replace(mine, group=msgspec.structs.replace(mine.group, rollouts=rollouts))])
    assert known(made) == [("me.0.0", 1)]


# How many of them


MANY = [answered([1.0] * 8, slot=slot) for slot in range(64)]


def test_of_a_kind_so_many_are_remembered_whatever_the_order_in_which_they_came() -> None:
    made = remembering(MANY)
    assert len(known(made)) == MOST_OF_A_KIND == 256
    assert known(remembering(MANY[::-1])) == known(made)
    by_steps = memory()
    for one in MANY[::-1]:
        by_steps.take_in([one])
        assert len(known(by_steps)) <= MOST_OF_A_KIND
    assert known(by_steps) == known(made)


def test_the_first_success_is_as_likely_to_be_remembered_as_the_newest() -> None:
    made = memory()
    for one in MANY:
        made.take_in([one])
    early = {one.group.id for one in MANY[:32]}
    assert 96 < sum(id in early for id, _ in known(made)) < 160
    numbers = Counter(number for _, number in known(made))
    assert all(16 < numbers[number] < 48 for number in range(8)), "of every rollout alike"


def test_another_seed_remembers_others() -> None:
    assert known(remembering(MANY, seed=1)) != known(remembering(MANY))


def test_of_many_kinds_each_has_the_same_part_of_what_is_remembered() -> None:
    kinds = [f"kind{number}" for number in range(16)]
    made = remembering([answered([1.0] * 150, slot, kind=k) for slot, k in enumerate(kinds)])
    assert {kind: len(some) for kind, some in made.by_kind.items()} == dict.fromkeys(kinds, 128)
    assert MOST == 16 * 128


def test_a_new_kind_takes_room_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("motley.learning.memory.MOST", 12)
    made = memory()
    sizes = []
    for number in range(3):
        made.take_in([answered([1.0] * 20, number, kind=f"kind{number}")])
        sizes.append([len(some) for some in made.by_kind.values()])
    assert sizes == [[12], [6, 6], [4, 4, 4]]


# What a step is reminded of


@pytest.mark.parametrize("num_foreign", [0, 1, 2, 9, 10])
def test_a_step_is_reminded_of_one_success_for_every_two_foreign_rollouts(num_foreign: int) -> None:
    made, own = remembering(MANY), answered([1.0] * 6, slot=99)
    reminders = made.reminders([own, *foreign(num_foreign)], version=3)
    assert len(reminders) == len({*names(reminders)}) == num_foreign // 2
    assert {*names(reminders)} <= {*known(made)}


def test_the_foreign_rollouts_of_a_step_are_counted_over_its_groups() -> None:
    made = remembering(MANY)
    sampled = replace(answered([1.0] * 6, slot=99), stranger=True)  # own weights, another's engine
    step = [sampled, *(answered([0.0] * 3, slot, peer=f"p{slot}") for slot in range(3))]
    assert len(made.reminders(step, version=0)) == 4


def test_a_step_is_reminded_of_every_kind_alike_as_far_as_it_goes() -> None:
    made = remembering(
        [
            answered([1.0] * 100, 0, kind="much"),
            answered([1.0] * 2, 1, kind="little"),
            answered([1.0] * 50, 2, kind="more"),
        ]
    )
    for count in (1, 3, 6, 12, 13):
        reminders = made.reminders(foreign(2 * count), version=count)
        drawn = Counter(one.candidate.problem.kind for one in reminders)
        assert drawn.total() == count
        assert drawn["little"] <= 2
        assert abs(drawn["much"] - drawn["more"]) <= 1
        if count > 4:
            assert drawn["little"] == 2


def test_where_less_is_remembered_it_is_all_there_is() -> None:
    made = remembering([answered([1.0, 1.0, 0.0])])
    assert sorted(names(made.reminders(foreign(40), 0))) == [("me.0.0", 0), ("me.0.0", 1)]
    assert memory().reminders(foreign(40), 0) == []


def test_every_version_is_reminded_of_others_and_the_same_one_of_the_same() -> None:
    made = remembering(MANY)
    drawn = [tuple(names(made.reminders(foreign(32), version))) for version in range(8)]
    assert len({*drawn}) == 8
    assert len({one for some in drawn for one in some}) > 64
    assert drawn == [tuple(names(made.reminders(foreign(32), version))) for version in range(8)]
    assert names(remembering(MANY, seed=1).reminders(foreign(32), 0)) != [*drawn[0]]


def test_reminders_do_not_depend_on_the_order_in_which_kinds_and_groups_came() -> None:
    some = [*MANY[:4], *(answered([1.0] * 4, 80 + n, kind=f"kind{n}") for n in range(3))]
    first, second = remembering(some), remembering(some[::-1])
    for version in range(4):
        drawn = names(first.reminders(foreign(20), version))
        assert names(second.reminders(foreign(20), version)) == drawn


def test_what_would_be_no_success_by_now_is_left_out_and_not_forgotten() -> None:
    made = remembering([answered([0.5, 0.7, 0.9]), answered([0.5], 1, kind="sum")])
    made.success.by_kind["sort"] = 0.7
    expected = [("me.0.0", 1), ("me.0.0", 2), ("me.0.1", 0)]
    assert sorted(names(made.reminders(foreign(40), 0))) == expected
    made.success.by_kind["sort"] = 0.1
    assert len(made.reminders(foreign(40), 0)) == 4


def test_what_is_no_success_takes_no_place_of_what_is() -> None:
    made = remembering([answered([0.5] * 40), answered([1.0] * 4, slot=1)])
    made.success.by_kind["sort"] = 0.6
    assert {id for id, _ in names(made.reminders(foreign(8), 0))} == {"me.0.1"}
    assert len(made.reminders(foreign(8), 0)) == 4


@pytest.mark.parametrize(
    ("success", "count"),
    [
        (-1.0, 0),
        (0.0, 0),
        (0.5, 0),
        (0.51, 0),
        (0.625, 5),
        (0.75, 10),
        (0.99, 19),
        (1.0, 20),
        (3.0, 20),
    ],
)
def test_a_kind_is_held_as_far_as_more_than_half_of_it_is_solved(
    success: float, count: int
) -> None:
    made = memory(all_kinds=False, sort=success)
    best = max(1.0, success)  # a success, whatever the scale of rewards
    made.take_in([answered([best] * 30)])
    assert len(made.reminders(foreign(40), 0)) == count


def test_what_is_mastered_has_the_places_of_what_is_not() -> None:
    made = memory(all_kinds=False, sort=1.0, sum=0.4, chain=0.8)
    made.take_in(
        [
            answered([1.0] * 30, slot, kind=kind)
            for slot, kind in enumerate(("sort", "sum", "chain"))
        ]
    )
    drawn = Counter(one.candidate.problem.kind for one in made.reminders(foreign(40), 0))
    assert drawn == {"sort": 10, "chain": 10}
    few = Counter(one.candidate.problem.kind for one in made.reminders(foreign(4), 0))
    assert few == {"sort": 1, "chain": 1}


# Checkpoints


def test_what_is_remembered_comes_back_from_a_checkpoint() -> None:
    some = [
        replace(answered([1.0, 0.0, 1.0], slot=1, position=4), came_s=12.5, since=3),
        answered([0.0, 1.0], slot=2, position=9, kind="sum"),
    ]
    before = remembering(some)
    state = before.state()
    assert sorted((one.position, one.since, one.came_s, one.number) for one in state) == [
        (4, 3, 12.5, 0),
        (4, 3, 12.5, 2),
        (9, 0, 0.0, 1),
    ]
    by_position = {one.position: one for one in some}
    after = remembering(MANY)  # which is not what the checkpoint has
    after.load_state(state, [by_position[one.position] for one in state])
    assert after.by_kind == before.by_kind
    assert after.state() == state
    for version in range(3):
        assert after.reminders(foreign(4), version) == before.reminders(foreign(4), version)


def test_a_checkpoint_of_other_groups_is_refused() -> None:
    made = remembering([answered([1.0, 1.0])])
    with pytest.raises(ValueError, match="argument"):
        made.load_state(made.state(), [answered([1.0, 1.0])])
