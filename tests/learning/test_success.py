"""What a learner remembers of rewards."""

from __future__ import annotations

import pytest

from fakes import candidate, group, rollout, tiny_policy
from motley.config import Learning
from motley.learning.learner import Learner
from motley.learning.select import Candidate
from motley.learning.success import Skills, Success
from motley.objectives import objective

from .test_learner import groups


def test_success_is_a_running_mean_of_own_rewards_by_kind() -> None:
    success = Success(memory=0.9)
    assert success.of("sort") == 0.0
    success.update(groups([[1.0, 1.0], [0.0, 0.5]]))  # the second is its own
    assert success.of("sort") == pytest.approx(0.25)
    success.update(groups([[0.0, 0.0], [1.0, 1.0]]))
    assert success.of("sort") == pytest.approx(0.9 * 0.25 + 0.1 * 1.0)
    assert success.of("sum") == 0.0


def of_sender(peer: str, *rewards: float) -> Candidate:
    rollouts = [rollout([3, 4], reward, -0.5) for reward in rewards]
    return candidate(group(peer=peer, rollouts=rollouts), own=peer in ("me", "my_sampler"))


def test_a_skill_is_the_mean_of_the_last_five_batches_over_the_own() -> None:
    skills = Skills()
    them, me = of_sender("other", 1.0), of_sender("me", 1.0)
    assert skills.of(them) == 1.0  # nobody is known
    skills.update([of_sender("other", 1.0, 0.0)])
    assert skills.of(them) == 1.0  # nor is the receiver
    skills.update([of_sender("me", 0.0, 0.25), of_sender("other", 1.0)])
    assert skills.of(them) == pytest.approx(0.75 / 0.125)
    assert skills.of(me) == 1.0
    for _ in range(4):
        skills.update([of_sender("other", 0.5)])
    # 0.5 has left the window, and the receiver has had one batch
    assert skills.means == {"other": [1.0, 0.5, 0.5, 0.5, 0.5], "": [0.125]}
    assert skills.of(them) == pytest.approx(0.6 / 0.125)


def test_all_that_is_own_has_one_skill() -> None:
    skills = Skills()
    skills.update([of_sender("me", 1.0), of_sender("my_sampler", 0.0), of_sender("b", 0.5)])
    assert skills.means == {"": [0.5], "b": [0.5]}
    assert skills.of(of_sender("my_sampler", 1.0)) == 1.0


def test_whoever_never_succeeds_divides_nothing_by_zero() -> None:
    skills = Skills()
    skills.update([of_sender("me", 0.0), of_sender("b", 0.0), of_sender("c", -3.0, 1.0)])
    assert skills.of(of_sender("b", 0.0)) == skills.of(of_sender("c", 0.0)) == 1.0
    skills.update([of_sender("b", 1.0)])
    assert skills.of(of_sender("b", 0.0)) == pytest.approx(0.5e8)


def test_a_learner_hands_skills_to_its_row() -> None:
    learner = Learner(tiny_policy(), objective("hacpo"), Learning(), lr=1e-3)
    learner.step(groups([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]))
    assert learner.skills.means == {"other": [0.75], "": [0.25]}
    plan = learner._plan(groups([[1.0, 0.0], [1.0, 0.0]]), lambda *_: None)
    assert plan.batch.samples.skill_B.tolist() == pytest.approx([3.0, 3.0, 1.0, 1.0])
    # the baseline of the foreign group is a third of its mean, so its success stands out more
    assert plan.terms.advantage_B.tolist() == pytest.approx(
        [3 * (1 - 1 / 6) * 1.414, -3 / 6 * 1.414, 0.5 * 1.414, -0.5 * 1.414], rel=1e-3
    )


def test_the_first_of_several_steps_takes_more_of_others_than_the_last() -> None:
    learner = Learner(
        tiny_policy(), objective("hacpo"), Learning(epochs=3, groups_per_step=1), lr=1e-3
    )
    seen: list[int] = []
    backward = learner._backward

    def noted(plan, *rest, **more):  # type: ignore[no-untyped-def]
        seen.append(plan.num_taken)
        return backward(plan, *rest, **more)

    learner._backward = noted  # type: ignore[method-assign]
    learner.step(groups([[1.0, 0.0], [1.0, 0.0]]))
    assert seen == [0, 0, 1, 2, 3, 4, 5]
