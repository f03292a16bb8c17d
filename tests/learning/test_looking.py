"""Rows that look at their batch before the first step: the bound and the rate are what a plain
computation has, however a step is cut.
"""

from __future__ import annotations

import math

import pytest
import torch

from fakes import reference_logp, tiny_policy
from motley.config import Learning
from motley.learning.learner import Learner
from motley.learning.select import Candidate
from motley.learning.sequences import nothing_withheld
from motley.models.policy import Policy
from motley.objectives import objective

from .test_learner import MIXED, groups, weights
from .test_senders_of_a_step import crew, poisoned

BUDGET = 4.0


def a_learner(name: str, policy: Policy, **rules: int) -> Learner:
    settings = {"budget": BUDGET} if name == "m2po" else {}
    return Learner(policy, objective(name, settings=settings), Learning(**rules), lr=0.01)


def log_ratios(policy: Policy, candidates: list[Candidate]) -> list[tuple[float, list[float]]]:
    """The centred reward of every rollout, and the log ratios of its tokens."""
    found = []
    for candidate in candidates:
        rollouts = candidate.group.rollouts
        mean = sum(r.reward for r in rollouts) / len(rollouts)
        prompt = policy.prompts.ids(candidate.problem)
        for r in rollouts:
            logp = reference_logp(policy, prompt, r.tokens)
            ratios = [p - q for p, q in zip(logp.tolist(), r.logprobs, strict=True)]
            found.append((r.reward - mean, ratios))
    return found


@pytest.mark.parametrize("budget", [0, 20])
def test_the_bound_on_squares_is_of_the_whole_batch_at_the_present_weights(budget: int) -> None:
    policy, candidates = tiny_policy(), groups(MIXED)
    squares = sorted(
        d * d for A, ratios in log_ratios(policy, candidates) for d in ratios if d * A > 0
    )
    while sum(squares) / len(squares) > BUDGET:
        squares.pop()  # the largest
    plan = a_learner("m2po", policy, token_budget=budget)._plan(candidates, nothing_withheld)
    assert plan.terms.most_square == pytest.approx(squares[-1], rel=1e-4)


def test_the_rate_of_a_step_is_scaled_by_the_effective_samples_of_its_batch() -> None:
    policy, candidates = tiny_policy(), groups(MIXED)
    products = [
        min(8.0, math.exp(sum(ratios))) for A, ratios in log_ratios(policy, candidates) if A
    ]
    ess = sum(products) ** 2 / sum(w * w for w in products)
    learner = a_learner("vcpo", policy)
    report = learner.step(candidates)
    assert report.lr == pytest.approx(0.01 * math.sqrt(ess / len(products)), rel=1e-5)
    assert report.lr < 0.009
    assert [group["lr"] for group in learner.optimiser.param_groups] == [report.lr]
    # the next batch has a rate of its own, and a silent one the full
    assert learner.step(groups([[1.0, 1.0]])).lr == 0.01


@pytest.mark.parametrize("name", ["m2po", "vcpo"])
def test_the_token_budget_does_not_change_where_a_step_leads(name: str) -> None:
    whole, cut = tiny_policy(), tiny_policy()
    for policy, budget in ((whole, 0), (cut, 20)):
        learner = a_learner(name, policy, token_budget=budget)
        learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.01)
        learner.step(groups(MIXED))
    torch.testing.assert_close(weights(whole), weights(cut), rtol=0, atol=1e-6)
    assert (weights(whole) - weights(tiny_policy())).abs().max() > 5e-5


@pytest.mark.parametrize("name", ["m2po", "vcpo"])
def test_several_steps_have_what_the_round_began_with(name: str) -> None:
    policy = tiny_policy()
    one = a_learner(name, tiny_policy()).step(groups(MIXED))
    several = a_learner(name, policy, epochs=2, groups_per_step=2).step(groups(MIXED))
    assert several.lr == one.lr
    assert several.inner is not None
    assert several.inner.steps > 2
    assert policy.version == 1


# these two also judge every sequence by the rewards of all
@pytest.mark.slow
@pytest.mark.parametrize("name", ["m2po", "vcpo", "hacpo", "reinforce_pp"])
def test_a_step_that_one_sender_makes_infinite_is_decided_without_it(name: str) -> None:
    honest, policy, clean = crew("me", "a", "b"), tiny_policy(), tiny_policy()
    expected = a_learner(name, clean).step(honest)
    bad = poisoned(crew("", "", "", "x"), "x")[3:]
    report = a_learner(name, policy).step([*honest, *bad])
    assert report.blamed == ("x",)
    assert (report.lr, report.loss) == (expected.lr, expected.loss)
    assert torch.equal(weights(policy), weights(clean))
