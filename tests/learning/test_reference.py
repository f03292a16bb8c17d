"""A penalty toward the policy that a peer began with: what it is pulled to, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest
import torch

from fakes import grouped_query_policy, lora_policy, ragged_sequences, reference_logp, tiny_policy
from motley.compute.scoring import score
from motley.config import Learning, Lora, TrainPart
from motley.learning.batches import micro_batches
from motley.learning.learner import Learner
from motley.learning.reference import Reference
from motley.models.policy import Policy, frozen_copy
from motley.objectives import objective

from .test_learner import MIXED, groups, weights

BEGAN = {
    "full": tiny_policy,
    "lora": lambda: tiny_policy(TrainPart(lora=Lora(rank=4))),
    "an adapter that acts": lora_policy,
    "last": lambda: tiny_policy(TrainPart(layers="last:1")),
    "an untied head": grouped_query_policy,
}
PULL: dict[str, Any] = {"beta": 0.5, "toward": "reference"}


def a_learner(
    policy: Policy, settings: dict[str, Any], row: str = "dr_grpo", **rules: Any
) -> Learner:
    learner = Learner(policy, objective(row, settings=settings), Learning(**rules), lr=1e-3)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.3)  # type: ignore[assignment]
    return learner


def moved(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter += 0.05 * torch.randn(parameter.shape, generator=generator)


@torch.no_grad()
def distance(policy: Policy, other: Policy) -> float:
    """Mean distance of log-probs over what is learned from, in nat."""
    rollouts = [
        (policy.prompts.ids(c.problem), r.tokens) for c in groups(MIXED) for r in c.group.rollouts
    ]
    ours, theirs = (torch.cat([reference_logp(p, *r) for r in rollouts]) for p in (policy, other))
    return float((ours - theirs).abs().mean())


@pytest.mark.parametrize("kind", BEGAN)
def test_the_pull_is_that_of_a_plain_implementation(kind: str) -> None:
    """Equal rewards leave the penalty alone: (beta / (B·max_len)) sum of exp(x) - 1 - x."""
    candidates = groups([[1.0] * 3, [0.0] * 3])
    began, policy = BEGAN[kind](), BEGAN[kind]()
    learner = a_learner(policy, PULL | {"dual_clip": inf}, grad_clip=1e9)
    moved(policy)
    before = {name: p.detach().clone() for name, p in policy.trained()}
    total, far = torch.zeros(()), torch.zeros(())
    for c in candidates:
        for r in c.group.rollouts:
            prompt = policy.prompts.ids(c.problem)
            ref = reference_logp(began, prompt, r.tokens).detach()
            x = ref - reference_logp(policy, prompt, r.tokens)
            total = total + (x.exp() - 1 - x).sum()
            far = torch.maximum(far, x.detach().abs().max())
    most = max(c.group.origin.sampling.max_tokens for c in candidates)
    loss = 0.5 * total / (6 * most)
    expected = torch.autograd.grad(loss, [p for _, p in policy.trained()], allow_unused=True)
    report = learner.step(candidates)
    assert report.loss == pytest.approx(float(loss.detach()), rel=1e-4)
    num_tokens = sum(len(r.tokens) for c in candidates for r in c.group.rollouts)
    assert report.reference_kl == pytest.approx(float(total.detach()) / num_tokens, rel=1e-4)
    assert far > 0.05, "a policy that never left would pass"
    for (name, after), gradient in zip(policy.trained(), expected, strict=True):
        step = torch.zeros_like(after) if gradient is None else -0.3 * gradient
        torch.testing.assert_close(after.detach() - before[name], step, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("kind", BEGAN)
def test_a_peer_that_has_not_moved_is_not_pulled(kind: str) -> None:
    policy = BEGAN[kind]()
    before = weights(policy)
    report = a_learner(policy, PULL).step(groups([[1.0] * 3, [0.0] * 3]))
    assert (report.grad_norm, report.reference_kl) == (0.0, 0.0)
    assert report.num_scored == 6, "nothing is silent where there is a penalty"
    assert torch.equal(weights(policy), before)


@pytest.mark.slow
def test_the_pull_leads_back_to_where_the_peer_began() -> None:
    policy = tiny_policy()
    learner = a_learner(policy, {"beta": 0.2, "toward": "reference", "dual_clip": inf})
    moved(policy)
    candidates = groups([[1.0] * 3, [0.0] * 3])
    apart = [learner.step(candidates).reference_kl or 0.0 for _ in range(8)]
    assert apart == sorted(apart, reverse=True)
    assert apart[-1] < apart[0] / 4


class Counted:
    """A score that tells how often it was asked."""

    holds = False

    def __init__(self, score: Any) -> None:
        self._score, self.asked = score, 0

    def __call__(self, packed: Any) -> Any:
        self.asked += 1
        return self._score(packed)


@pytest.mark.slow
def test_several_steps_of_a_round_are_pulled_to_where_the_run_began_and_ask_it_once() -> None:
    ends = {}
    for beta in (0.0, 2.0):
        policy = tiny_policy()
        learner = a_learner(policy, PULL | {"beta": beta}, "tis", epochs=3, groups_per_step=2)
        counted = Counted(learner._reference._score)
        if beta:
            learner._reference._score = counted  # type: ignore[assignment]
        moved(policy)
        for _ in range(2):
            report = learner.step(groups(MIXED))
            assert report.inner is not None
        ends[beta] = distance(policy, tiny_policy())
    assert ends[2.0] < 0.9 * ends[0.0]
    # all five groups speak under a penalty, in three steps of each of three epochs
    assert report.inner.steps == 9
    assert counted.asked == 2


@pytest.mark.parametrize("row", ["m2po", "vcpo"])
def test_a_row_that_looks_at_its_batch_first_asks_the_reference_once(row: str) -> None:
    ends = {}
    for beta in (0.5, 1e-9):
        policy = tiny_policy()
        learner = a_learner(policy, PULL | {"beta": beta}, row)
        counted = Counted(learner._reference._score)
        learner._reference._score = counted  # type: ignore[assignment]
        moved(policy)
        report = learner.step(groups(MIXED))
        ends[beta] = weights(policy)
        assert counted.asked == 1
        assert report.reference_kl > 0.01
    assert (ends[0.5] - ends[1e-9]).norm() > 1e-4  # vcpo lowers its learning rate


def test_a_round_of_one_step_is_the_same_to_the_bit_with_a_reference() -> None:
    ends = []
    for rules in ({}, {"groups_per_step": 100}):
        policy = tiny_policy()
        learner = a_learner(policy, PULL, "ftis", **rules)
        moved(policy)
        learner.step(groups(MIXED))
        ends.append(weights(policy))
    assert torch.equal(*ends)


@pytest.mark.parametrize("budget", [15, 40])
def test_the_token_budget_does_not_change_the_pull(budget: int) -> None:
    ends = []
    for rules in ({}, {"token_budget": budget}):
        policy = tiny_policy()
        learner = a_learner(policy, PULL, "bnpo", **rules)
        moved(policy)
        learner.step(groups(MIXED))
        ends.append(weights(policy))
    assert (ends[0] - ends[1]).abs().max() < 1e-6


def test_who_does_not_ask_for_a_reference_holds_none() -> None:
    for settings in ({}, {"toward": "reference"}, {"beta": 0.1}):
        learner = a_learner(tiny_policy(), settings)
        assert learner._reference._score is None
        assert learner.step(groups(MIXED)).reference_kl is None
    assert a_learner(tiny_policy(), PULL)._reference._score is not None


def test_a_frozen_copy_shares_what_does_not_train_and_stays_what_it_was() -> None:
    for train, shares in ((TrainPart(lora=Lora(rank=4)), True), ("full", False)):
        policy = tiny_policy(train)
        copied = frozen_copy(policy)
        theirs = dict(copied.model.named_parameters())
        before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
        shared = {name for name, p in policy.model.named_parameters() if theirs[name] is p}
        assert shared == {n for n, p in policy.model.named_parameters() if not p.requires_grad}
        assert bool(shared) == shares
        moved(policy)
        assert not any(p.requires_grad for p in theirs.values())
        assert all(torch.equal(theirs[name], value) for name, value in before.items())


@pytest.mark.slow
def test_a_frozen_copy_in_a_half_type_gives_the_same_log_probs() -> None:
    for make in (tiny_policy, grouped_query_policy, lora_policy):
        policy = replace(make(), dtype=torch.bfloat16)
        copied = frozen_copy(policy)
        (micro,) = micro_batches(ragged_sequences(), 1 << 12, policy.device)
        with torch.no_grad():
            ours, theirs = (score(p, micro.packed).logp_M for p in (policy, copied))
        assert torch.equal(ours, theirs)
        if make is not lora_policy:
            sizes = [p.dtype for n, p in copied.model.named_parameters() if "proj" in n]
            assert set(sizes) == {torch.bfloat16}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_on_a_gpu_the_pull_is_that_of_the_cpu(kind: str, dtype: torch.dtype) -> None:
    """With graphs from the third round on."""
    ours, theirs = replace(BEGAN[kind](), dtype=dtype), BEGAN[kind]()
    ours.model.cuda()
    learners = [a_learner(p, PULL | {"beta": 0.2, "dual_clip": inf}) for p in (ours, theirs)]
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for (_, p), (_, other) in zip(ours.trained(), theirs.trained(), strict=True):
            drift = 0.05 * torch.randn(p.shape, generator=generator)
            p += drift.to(p.device)
            other += drift
    for _ in range(5):
        on_gpu, on_cpu = (one.step(groups([[1.0] * 3, [0.0] * 3])) for one in learners)
        assert on_gpu.reference_kl == pytest.approx(on_cpu.reference_kl, rel=0.05, abs=2e-3)
    assert on_cpu.reference_kl > 0.01


def test_a_reference_that_memory_does_not_hold_is_refused_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(policy: Policy) -> Policy:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("motley.learning.reference.frozen_copy", full)
    with pytest.raises(ValueError, match=r"one more copy of what trains; train = \{ lora"):
        a_learner(tiny_policy(), PULL)


def test_a_reference_is_the_policy_before_its_first_step() -> None:
    policy = tiny_policy()
    policy.version = 3
    Reference(policy, is_needed=False)
    with pytest.raises(AssertionError, match="before its first step"):
        Reference(policy, is_needed=True)
