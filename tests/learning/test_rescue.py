"""A rescued sequence in a step: its gradient, and that nothing else of the step changes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fakes import candidate, group, rollout, tiny_policy
from motley.config import Learning, Teach, Trust
from motley.learning.learner import Learner, StepReport
from motley.learning.meetings import Attempt, Lesson
from motley.learning.select import Candidate
from motley.models.policy import Policy
from motley.objectives import OBJECTIVES, objective
from motley.records import Problem

PROBLEM = Problem(kind="sort", prompt="sort 41=", answer="14")


def of(peer: str, rewards: list[float], position: int) -> Candidate:
    rollouts = [
        rollout([5 + position + number, 6, 1], reward, -0.7)
        for number, reward in enumerate(rewards)
    ]
    made = group(peer=peer, rollouts=rollouts, problem=PROBLEM)
    return candidate(made, own=peer == "me", position=position, problem=PROBLEM)


def lesson_of(theirs: Candidate, number: int = 0) -> Lesson:
    return Lesson(theirs, number, Attempt(PROBLEM.id, 0, 0, 0, solved=False))


def stepped(
    taken: list[Candidate],
    lessons: list[Lesson],
    name: str = "alone",
    teach: Teach = Teach(rescue=1.0),
    policy: Policy | None = None,
    rules: Learning = Learning(grad_clip=1e9),
    **how: Any,
) -> tuple[torch.Tensor, StepReport]:
    """How far a plain gradient step goes, by its learning rate, which a row may change."""
    policy = policy or tiny_policy()
    learner = Learner(policy, objective(name), rules, 1.0, how.pop("trust", Trust()), teach)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for _, p in policy.trained()])
    report = learner.step(taken, lessons=lessons, **how)
    after = torch.cat([p.detach().flatten() for _, p in policy.trained()])
    return (after - before) / learner.optimiser.param_groups[0]["lr"], report


def likelihood_step(lesson: Lesson, gamma: float = 0.0, withheld: int = 0) -> torch.Tensor:
    """The gradient of the mean over tokens of w·log p, w without a gradient."""
    policy = tiny_policy()
    prompt = policy.prompts.ids(lesson.candidate.problem)
    ids = torch.tensor([[*prompt, *lesson.tokens]])
    logp = policy.model(ids).logits[0, :-1].log_softmax(-1)
    logp_T = logp.gather(1, ids[0, 1:, None])[len(prompt) - 1 :, 0]
    p_T = logp_T.detach().exp()
    weight_T = gamma * p_T / (p_T + gamma) ** 2 if gamma else torch.ones_like(p_T)
    weight_T[:withheld] = 0
    (weight_T * logp_T).mean().backward()
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in policy.trained()]
    )


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_a_rescued_sequence_is_lambda_times_the_mean_gradient_of_log_p(gamma: float) -> None:
    mine, theirs = of("me", [0, 0, 0], 1), of("other", [1, 0], 2)
    lesson = lesson_of(theirs)
    moved, report = stepped([mine], [lesson], teach=Teach(rescue=0.5, gamma=gamma))
    # the own group is silent, and is three of the four sequences that the step counts
    expected = 0.5 * likelihood_step(lesson, gamma) / 4
    assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-7)
    assert moved.abs().max() > 1e-4
    assert (report.num_sequences, report.num_scored, report.num_tokens) == (4, 1, 3)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_a_rescue_adds_the_same_to_the_step_of_every_row(name: str) -> None:
    """Up to the row's reduction; all else of the step is as it was."""
    mine, theirs = of("me", [1, 0, 0], 1), of("other", [1, 0, 0.5], 2)
    lesson = lesson_of(theirs)
    taught, report = stepped([mine, theirs], [lesson], name)
    plain, before = stepped([mine, theirs], [], name)
    # without the lesson there is a sequence less, of as many tokens as each of the others
    left = taught * 7 / 6 - plain
    scale = {"dr_grpo": 3 / 16, "topr": 3.0}.get(name, 1.0)
    expected = likelihood_step(lesson) * scale / 6
    assert torch.allclose(left, expected, rtol=1e-3, atol=1e-6)
    assert report.senders["other"].groups == before.senders["other"].groups == 1
    assert report.senders["other"].reward == before.senders["other"].reward


def test_a_step_may_consist_of_a_lesson_alone() -> None:
    lesson = lesson_of(of("other", [1, 0], 2))
    for name in ("alone", "bnpo"):
        moved, report = stepped([], [lesson], name)
        assert torch.allclose(moved, likelihood_step(lesson), rtol=1e-4, atol=1e-6)
        assert (report.num_sequences, report.senders) == (1, {})


@pytest.mark.parametrize("name", [name for name, row in OBJECTIVES.items() if row.skip_silent])
def test_silent_groups_that_a_row_leaves_out_do_not_weaken_a_rescue(name: str) -> None:
    mine, lesson = of("me", [0, 0, 0], 1), lesson_of(of("other", [1, 0], 2))
    taught, report = stepped([mine], [lesson], name)
    assert torch.allclose(taught, likelihood_step(lesson), rtol=1e-4, atol=1e-6)
    assert (report.num_sequences, report.num_scored) == (4, 1)


def test_withheld_tokens_of_a_rescue_are_not_pushed_up() -> None:
    mine, theirs = of("me", [0, 0, 0], 1), of("other", [1, 0], 2)
    lesson = lesson_of(theirs)
    mask = lambda c, number: np.array([True, True, False]) if (c, number) == (theirs, 0) else None
    moved, _ = stepped([mine], [lesson], withheld=mask)
    expected = likelihood_step(lesson, withheld=2) / 4
    assert torch.allclose(moved, expected, rtol=1e-4, atol=1e-7)


def test_the_bound_on_strangers_holds_for_their_rescues() -> None:
    """Of two strangers the louder may pull so many times as hard as the other."""
    loud, quiet = of("loud", [1, 0], 2), of("quiet", [1, 0], 3)
    lessons = [lesson_of(loud), lesson_of(loud, 1), lesson_of(quiet)]
    trust = Trust(grad_share=1.0)
    free, _ = stepped([loud, quiet], lessons, trust=Trust(grad_share=0.0))
    bounded, report = stepped([loud, quiet], lessons, trust=trust)
    assert float(report.senders["loud"].grad_scale or 0) < 0.9
    assert bounded.norm() < free.norm()


def test_a_rescue_says_nothing_to_the_audit_of_its_sender() -> None:
    theirs = of("other", [1, 0], 2)
    _, report = stepped([theirs], [lesson_of(theirs)], audited=frozenset([2]))
    assert len(report.log_ratios[2]) == 2


@pytest.mark.parametrize("rules", [{"epochs": 2}, {"groups_per_step": 1}])
def test_rescues_take_part_in_several_steps_of_a_round(rules: dict[str, Any]) -> None:
    mine, theirs = of("me", [1, 0, 0], 1), of("other", [1, 0, 0.5], 2)
    learning = Learning(grad_clip=1e9, **rules)
    taught, report = stepped([mine], [lesson_of(theirs)], rules=learning)
    plain, _ = stepped([mine], [], rules=learning)
    assert report.inner is not None
    assert report.inner.steps == 2
    assert math.isfinite(report.loss)
    assert (taught - plain).abs().max() > 1e-3


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("name", ["m2po", "ftis"])
def test_a_penalty_toward_a_reference_leaves_rescues_alone(name: str, epochs: int) -> None:
    mine, theirs = of("me", [1, 0, 0], 1), of("other", [1, 0, 0.5], 2)
    row = objective(name, settings={"beta": 0.5, "toward": "reference"})
    moved = []
    for lessons in ([], [lesson_of(theirs)]):
        policy = tiny_policy()
        rules = Learning(grad_clip=1e9, epochs=epochs)
        learner = Learner(policy, row, rules, 1.0, teach=Teach(rescue=1.0))
        learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=1.0)
        before = torch.cat([p.detach().flatten().clone() for _, p in policy.trained()])
        report = learner.step([mine, theirs], lessons=lessons)
        moved.append(torch.cat([p.detach().flatten() for _, p in policy.trained()]) - before)
        assert report.reference_kl is not None
    if epochs == 1:  # the policy is where it began, and the penalty has no gradient yet
        left = moved[1] * 7 / 6 - moved[0]
        assert torch.allclose(left, likelihood_step(lesson_of(theirs)) / 6, rtol=1e-3, atol=1e-6)
    assert torch.isfinite(moved[1]).all()


@pytest.mark.parametrize(
    ("name", "variant"),
    [("ftis", ""), ("ftis", "code"), ("dapo", ""), ("dr_grpo", ""), ("topr", "")],
)
def test_a_penalty_is_as_large_with_rescues_as_without(name: str, variant: str) -> None:
    mine, theirs = of("me", [1, 0, 0], 1), of("other", [1, 0, 0.5], 2)

    def loss(beta: float, lessons: list[Lesson]) -> float:
        row = objective(name, variant, {"beta": beta})
        learner = Learner(tiny_policy(), row, Learning(), 1e-3, teach=Teach(rescue=1.0))
        return learner.step([mine, theirs], lessons=lessons).loss

    rescued = [lesson_of(theirs)] * 2
    alone, beside = (loss(0.5, some) - loss(0.0, some) for some in ([], rescued))
    assert alone > 0.01
    assert beside == pytest.approx(alone, rel=1e-4)
