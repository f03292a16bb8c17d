"""Several optimiser steps from one batch: what each takes, what they compute, when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from fakes import reference_logp, tiny_policy
from motley.config import Learning, Trust
from motley.learning.inner import inner_parts
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate
from motley.learning.sequences import StepPlan, nothing_withheld
from motley.models.policy import Policy
from motley.objectives import LossBatch, LossOutput, Objective, objective

from .test_learner import FIRST_SCALE, MIXED, float16_policy, groups, rounding_gradients, weights
from .test_senders_of_a_step import crew, loud, poisoned

SPEAKING = [[1.0, 0.0, 0.3, 0.0]] * 7


def a_learner(
    row: Objective | str = "tis",
    policy: Policy | None = None,
    sgd: float = 0.0,
    trust: Trust = Trust(),
    seed: int = 0,
    **rules: Any,
) -> Learner:
    policy, row = policy or tiny_policy(), objective(row) if isinstance(row, str) else row
    learner = Learner(policy, row, Learning(**rules), 1e-3, trust, seed=seed)
    if sgd:
        learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=sgd)  # type: ignore[assignment]
    return learner


def learned(candidates: Sequence[Candidate], **how: Any) -> tuple[torch.Tensor, StepReport]:
    learner = a_learner(**how)
    report = learner.step(candidates)
    return weights(learner.policy), report


# What each step takes


def plan_of(candidates: Sequence[Candidate], learner: Learner | None = None) -> StepPlan:
    return (learner or a_learner())._plan(candidates, nothing_withheld)


def families(
    candidates: Sequence[Candidate], seed: int = 0, version: int = 0, **rules: Any
) -> list[list[str]]:
    """Of every step, the groups in it."""
    plan = plan_of(candidates)
    parts = inner_parts(plan, Learning(**rules), seed, version)
    return [
        list(dict.fromkeys(plan.batch.candidate_B[s.row].family for s in part.todo))
        for part in parts
    ]


def test_an_epoch_takes_every_speaking_group_once_in_steps_of_about_the_same_size() -> None:
    candidates = groups([*SPEAKING, [0.5] * 4])
    speaking = {c.family for c in candidates[:-1]}
    steps = families(candidates, epochs=2, groups_per_step=3)
    assert [len(step) for step in steps] == [3, 2, 2, 3, 2, 2]
    assert {f for step in steps[:3] for f in step} == {f for step in steps[3:] for f in step}
    assert {f for step in steps[:3] for f in step} == speaking
    assert steps[:3] != steps[3:], "every epoch has an order of its own"


def test_the_order_of_groups_is_that_of_the_seed_and_not_of_their_arrival() -> None:
    candidates = groups(SPEAKING)
    steps = families(candidates, groups_per_step=2, seed=5)
    assert families(candidates[::-1], groups_per_step=2, seed=5) == steps
    assert families(candidates, groups_per_step=2, seed=6) != steps
    assert families(candidates, groups_per_step=2, seed=5, version=1) != steps


def test_groups_stay_whole() -> None:
    plan = plan_of(groups(SPEAKING))
    for part in inner_parts(plan, Learning(groups_per_step=1), 0, 0):
        assert len(part.todo) == 4
        assert len({plan.batch.group_B[s.row] for s in part.todo}) == 1


@pytest.mark.parametrize("name", ["tis", "dr_grpo", "bnpo", "gepo", "ftis"])
def test_the_gradients_of_the_parts_add_up_to_that_of_the_batch(name: str) -> None:
    """By groups, as their losses are the larger the fewer groups they have."""
    learner = a_learner(name, grad_clip=1e9)
    gradient = lambda: torch.cat([p.grad.flatten() for _, p in learner.policy.trained()])  # type: ignore[union-attr]
    plan = plan_of(groups(SPEAKING), learner)
    learner._backward(plan)
    whole, total = gradient(), torch.zeros(())
    for part in inner_parts(plan, Learning(groups_per_step=3), 0, 0):
        share = torch.full((len(plan.batch.senders),), part.factor)
        learner._backward(replace(plan, todo=part.todo), share)
        total = total + gradient() / part.factor
    assert float(whole.norm()) > 1e-3
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-7)


# What they compute


def plain_tis(candidates: Sequence[Candidate], steps: Sequence[Sequence[str]], lr: float) -> Any:
    """min(p0/q, 2)·min(R·A, clip(R)·A), a group after the other, in plain torch and SGD."""
    policy = tiny_policy()
    scored = lambda c: [
        reference_logp(policy, policy.prompts.ids(c.problem), r.tokens) for r in c.group.rollouts
    ]
    start = {c.family: [lp.detach() for lp in scored(c)] for c in candidates}
    num_sequences = sum(len(c.group.rollouts) for c in candidates)
    num_speaking = len({f for step in steps for f in step})
    clipped = tokens = 0
    for step in steps:
        policy.model.zero_grad()
        loss = torch.zeros(())
        for c in (c for c in candidates if c.family in step):
            rewards = torch.tensor([r.reward for r in c.group.rollouts])
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for lp, lp0, A, r in zip(
                scored(c), start[c.family], advantages, c.group.rollouts, strict=True
            ):
                R, weight = (lp - lp0).exp(), (lp0 - torch.tensor(r.logprobs)).exp().clamp(max=2)
                value = torch.minimum(R * A, R.clamp(0.8, 1.2) * A)
                loss = loss - (weight * value).mean() / num_sequences
                clipped += int(((R.clamp(0.8, 1.2) * A) < (R * A)).sum())
                tokens += len(r.tokens)
        (loss * num_speaking / len(step)).backward()
        with torch.no_grad():
            for _, p in policy.trained():
                if p.grad is not None:
                    p -= lr * p.grad
    return weights(policy), clipped / tokens


@pytest.mark.slow
@pytest.mark.parametrize(("epochs", "per_step"), [(2, 0), (1, 2), (2, 4)])
def test_steps_of_a_round_against_a_plain_implementation(epochs: int, per_step: int) -> None:
    candidates, rules = groups(SPEAKING), {"epochs": epochs, "groups_per_step": per_step}
    steps = families(candidates, **rules)
    expected, clipped = plain_tis(candidates, steps, lr=0.5)
    got, report = learned(candidates, sgd=0.5, grad_clip=1e9, **rules)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    assert report.inner is not None
    assert report.inner.steps == len(steps)
    assert report.inner.clipped == pytest.approx(clipped, abs=2e-3)
    assert clipped > 0.05, "a clip that never binds would pass"


@pytest.mark.slow
def test_without_its_clip_a_round_goes_elsewhere() -> None:
    candidates, how = groups(SPEAKING), {"sgd": 0.5, "grad_clip": 1e9, "epochs": 4}
    free = objective("tis", settings={"clip_low": 1e9, "clip_high": 1e9})
    assert (learned(candidates, **how)[0] - learned(candidates, row=free, **how)[0]).norm() > 1e-2


@pytest.mark.parametrize("rules", [{"epochs": 1}, {"groups_per_step": 100}, {"inner_kl": 1e-9}])
def test_a_round_of_one_step_is_the_same_to_the_bit(rules: dict[str, Any]) -> None:
    expected, plain = learned(groups(MIXED), row="ftis")
    got, report = learned(groups(MIXED), row="ftis", **rules)
    assert torch.equal(got, expected)
    assert report == plain
    assert report.inner is None


def test_several_steps_make_one_version_and_are_the_same_every_time() -> None:
    learner = a_learner("ftis", epochs=2, groups_per_step=2)
    report = learner.step(groups(MIXED))
    assert learner.policy.version == 1
    assert report.inner is not None
    assert report.inner.steps == 4  # three groups speak
    assert {int(state["step"]) for state in learner.optimiser.state.values()} == {4}
    again = a_learner("ftis", epochs=2, groups_per_step=2)
    assert again.step(groups(MIXED)) == report
    assert torch.equal(weights(again.policy), weights(learner.policy))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [15, 40])
def test_the_token_budget_does_not_change_where_several_steps_lead(budget: int) -> None:
    how = {"row": "ftis", "sgd": 0.1, "epochs": 2, "groups_per_step": 2}
    whole, _ = learned(groups(MIXED), **how)
    cut, _ = learned(groups(MIXED), token_budget=budget, **how)
    assert (whole - cut).abs().max() < 1e-6


def test_what_is_reported_of_a_round_is_what_it_was_before_its_first_step() -> None:
    audited = frozenset(c.position for c in groups(MIXED))
    one = a_learner("ftis").step(groups(MIXED), audited=audited)
    several = a_learner("ftis", epochs=3).step(groups(MIXED), audited=audited)
    assert several.loss == pytest.approx(one.loss)
    assert several.num_scored == one.num_scored
    for peer, metrics in one.senders.items():
        for key in ("kl_k3", "weight", "clipped", "ess", "pull", "grad_scale", "entropy"):
            if (expected := metrics.number(key)) is None:  # of groups that are all silent
                assert several.senders[peer].number(key) is None
                continue
            assert several.senders[peer].number(key) == pytest.approx(expected, rel=1e-5, abs=1e-7)
    assert several.senders["other"].number("pull")
    assert several.log_ratios.keys() == one.log_ratios.keys() == audited
    for position, rows in one.log_ratios.items():
        for ours, theirs in zip(several.log_ratios[position], rows, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-6)


def test_a_silent_round_takes_no_step() -> None:
    learner = a_learner(epochs=3)
    report = learner.step(groups([[0.5] * 4, [1.0] * 4]))
    assert (learner.policy.version, report.inner, report.grad_norm) == (1, None, 0.0)
    assert not learner.optimiser.state


# When they end


@pytest.mark.slow
def test_a_round_ends_once_its_policy_is_too_far_from_where_it_began() -> None:
    how = {"sgd": 0.03, "grad_clip": 1e9}
    two, _ = learned(groups(SPEAKING), epochs=2, **how)
    far = learned(groups(SPEAKING), epochs=3, **how)[1].inner
    near = learned(groups(SPEAKING), epochs=2, **how)[1].inner
    assert far is not None
    assert near is not None
    assert 0 < near.kl < far.kl
    limit = (near.kl + far.kl) / 2
    got, report = learned(groups(SPEAKING), epochs=9, inner_kl=limit, **how)
    assert report.inner is not None
    assert report.inner.steps == 2
    assert report.inner.kl == pytest.approx(far.kl, rel=1e-4)
    assert torch.equal(got, two)


# Whom they hear


@pytest.mark.slow
@pytest.mark.parametrize("rules", [{"epochs": 2}, {"epochs": 2, "groups_per_step": 1}])
def test_several_steps_are_taken_without_who_makes_the_first_pass_infinite(
    rules: dict[str, Any],
) -> None:
    honest = crew("me", "a", "b")
    bad = poisoned(crew("", "", "", "x"), "x")[3:]
    expected, plain = learned(honest, **rules)
    got, report = learned([*honest, *bad], **rules)
    assert (report.blamed, plain.blamed) == (("x",), ())
    assert torch.equal(got, expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailsLater(Objective):
    """A stranger's sequences have no finite loss any more once the policy has moved."""

    def loss(self, batch: LossBatch) -> LossOutput:
        # not super(): a dataclass with slots is another class than the one this stands in
        output = Objective.loss(self, batch)
        moved_B = (batch.moved_BT.detach().abs() > 0).any(1) & batch.terms.stranger_B
        bad = torch.where(moved_B.any(), torch.nan, 0.0) if batch.logp_start_BT is not None else 0.0
        return replace(output, loss=output.loss + bad * batch.logp_BT.sum())


def failing_later(name: str) -> Objective:
    row = objective(name)
    return FailsLater(**{key: getattr(row, key) for key in Objective.__dataclass_fields__})


def test_who_makes_a_later_step_infinite_is_left_out_of_the_rest() -> None:
    policy = tiny_policy()
    learner = a_learner(failing_later("nois"), policy, epochs=3)
    report = learner.step(crew("me", "x"))
    assert report.blamed == ("x",)
    assert report.inner is not None
    assert report.inner.steps == 3
    assert policy.version == 1
    assert bool(weights(policy).isfinite().all())
    both, _ = learned(crew("me", "x"), row="nois", epochs=3)
    assert not torch.equal(weights(policy), both)


@pytest.mark.parametrize("rules", [{"epochs": 2}, {"groups_per_step": 1, "epochs": 2}])
def test_a_loud_stranger_is_bounded_in_every_step(rules: dict[str, Any]) -> None:
    """By what it would pull in the whole batch, also where it is alone in a step."""
    candidates, trust = [*crew("me", "a", "b"), loud("x", 3)], Trust(grad_share=2)
    one = learned(candidates, row="dr_grpo", trust=trust)[1].senders["x"]
    learner = a_learner("dr_grpo", trust=trust, **rules)
    seen: list[torch.Tensor] = []
    backward = learner._backward
    learner._backward = lambda plan, scale_S=None, learns=True: (  # type: ignore[method-assign]
        seen.append(scale_S), backward(plan, scale_S, learns))[1]  # fmt: skip
    report = learner.step(candidates)
    assert report.senders["x"].grad_scale == pytest.approx(one.grad_scale, rel=1e-4)
    number = plan_of(candidates).batch.senders.index("x")
    factor = 4 if "groups_per_step" in rules else 1
    assert len(seen) == 1 + 2 * factor
    for scale_S in seen[1:]:
        assert float(scale_S[number]) == pytest.approx(factor * one.grad_scale, rel=1e-4)


def test_the_first_step_of_a_bounded_round_is_the_bounded_step() -> None:
    candidates = [*crew("me", "a", "b"), loud("x", 3)]
    how: dict[str, Any] = {"row": "dr_grpo", "trust": Trust(grad_share=2), "sgd": 0.1}
    one, _ = learned(candidates, **how)
    first, report = learned(candidates, epochs=2, inner_kl=1e-12, **how)
    assert report.inner is not None
    assert report.inner.steps == 1
    torch.testing.assert_close(first, one, rtol=0, atol=1e-7)


def test_steps_that_float16_does_not_hold_are_made_again_at_a_smaller_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exact, _ = learned(groups(MIXED), row="ftis", epochs=3, sgd=0.1)
    rounding_gradients(monkeypatch, factor=2.0**11)
    learner = a_learner("ftis", float16_policy(), epochs=3, sgd=0.1)
    report = learner.step(groups(MIXED))
    assert learner.scale.value < FIRST_SCALE
    assert report.inner is not None
    assert report.inner.steps == 3
    torch.testing.assert_close(weights(learner.policy), exact, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_gradient_that_fits_at_no_scale_stops_a_round_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = float16_policy()
    before = weights(policy)
    rounding_gradients(monkeypatch, factor=1e9)
    with pytest.raises(FloatingPointError, match="nothing was changed by this step"):
        a_learner("ftis", policy, epochs=2).step(groups([[0.0] * 4, *MIXED]))
    assert torch.equal(weights(policy), before)
    assert policy.version == 0


# The rate


def test_a_round_has_the_rate_of_its_schedule_and_so_have_all_its_steps() -> None:
    policy = tiny_policy()
    rules = Learning(schedule="linear", epochs=2)
    learner = Learner(policy, objective("tis"), rules, lr=0.01, rounds=4)
    assert [learner.step(groups(MIXED)).lr for _ in range(4)] == pytest.approx(
        [0.01, 0.0075, 0.005, 0.0025]
    )
    assert [group["lr"] for group in learner.optimiser.param_groups] == pytest.approx([0.0025])


def test_a_learner_that_begins_at_a_later_version_has_the_rate_of_that() -> None:
    policy = tiny_policy()
    policy.version = 3
    learner = Learner(policy, objective("tis"), Learning(schedule="linear"), lr=0.01, rounds=4)
    assert learner.step(groups(MIXED)).lr == pytest.approx(0.0025)


def test_weights_decay_and_norms_do_not() -> None:
    """The gradient is nearly nothing, so what is left is the decay."""
    policy = tiny_policy()
    learner = Learner(
        policy, objective("tis"), Learning(weight_decay=0.5, grad_clip=1e-12), lr=1e-2
    )
    before = {name: p.detach().clone() for name, p in policy.trained()}
    learner.step(groups(MIXED))
    for name, p in policy.trained():
        shrunk = before[name] * (1 - 0.5e-2) if p.dim() >= 2 else before[name]
        torch.testing.assert_close(p.detach(), shrunk, rtol=0, atol=2e-4)
    assert {p.dim() for _, p in policy.trained()} == {1, 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_several_steps_go_where_the_cpus_go(dtype: torch.dtype) -> None:
    """With graphs from the second round on, which the pass before the first step does not use."""
    ours, theirs = replace(tiny_policy(), dtype=dtype), tiny_policy()
    ours.model.cuda()
    learners = [
        a_learner("ftis", policy, sgd=0.1, epochs=2, groups_per_step=2) for policy in (ours, theirs)
    ]
    for _ in range(4):
        on_gpu, on_cpu = (learner.step(groups(MIXED)) for learner in learners)
        assert on_gpu.inner is not None
        assert on_cpu.inner is not None
        assert on_gpu.inner.steps == on_cpu.inner.steps == 4
        assert on_gpu.inner.kl == pytest.approx(on_cpu.inner.kl, rel=0.2, abs=1e-3)
    start = weights(tiny_policy())
    went, expected = weights(ours).cpu() - start, weights(theirs) - start
    close = {torch.float32: 0.999, torch.bfloat16: 0.9, torch.float16: 0.98}[dtype]
    assert torch.cosine_similarity(went, expected, 0) > close
