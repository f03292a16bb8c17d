"""What one sender can do to a step: blamed, bounded, withheld from, listened to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from fakes import candidate, group, lora_policy, reference_logp, rollout, tiny_policy
from motley.compute import graphs
from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.scoring import score
from motley.config import Learning, Trust
from motley.learning.descent import FIRST_SCALE
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate
from motley.learning.shares import Pulls, scales
from motley.models.policy import Policy
from motley.objectives import objective
from motley.records import Problem

FREE = Trust(grad_share=0)


def of(
    peer: str, rewards: list[float], seed: int = 0, times: int = 1, family: str = ""
) -> Candidate:
    """A group of random completions; "me" is the learner's own."""
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))
    problem = Problem(kind="sort", prompt=f"sort {10 + seed}=", answer="01")
    rollouts = [
        rollout([number(3, 27) for _ in range(number(2, 5))], reward, -0.5 - 0.3 * number(0, 5))
        for reward in rewards
    ]
    made = group(peer=peer, slot=seed, rollouts=rollouts, problem=problem)
    return candidate(
        made, own=peer == "me", position=seed + 1, problem=problem, family=family or made.id
    )


def crew(*peers: str) -> list[Candidate]:
    return [of(peer, [1.0, 0.0, 0.3, 0.0], seed) for seed, peer in enumerate(peers)]


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def step(
    candidates: list[Candidate],
    policy: Policy | None = None,
    trust: Trust = Trust(),
    row: str = "nois",
    budget: int = 0,
    **hooks: Any,
) -> tuple[torch.Tensor, StepReport]:
    policy = policy or tiny_policy()
    learner = Learner(policy, objective(row), Learning(token_budget=budget), 1e-3, trust)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.1)
    report = learner.step(candidates, **hooks)
    return weights(policy), report


# A step that is not finite


def poisoned(candidates: list[Candidate], peer: str) -> list[Candidate]:
    """One sender's with a reward that is no number: it stands for what gets past admission."""
    return [
        changed(
            c,
            group=replace(
                c.group,
                rollouts=(replace(c.group.rollouts[0], reward=float("nan")), *c.group.rollouts[1:]),
            ),
        )
        if c.group.origin.peer == peer
        else c
        for c in candidates
    ]


@pytest.mark.parametrize("trust", [Trust(), FREE])
def test_a_step_that_one_sender_makes_infinite_is_taken_without_it(trust: Trust) -> None:
    honest = crew("me", "a", "b")
    expected, plain = step(honest, trust=trust)
    got, report = step([*honest, *poisoned(crew("", "", "", "x"), "x")[3:]], trust=trust)
    assert report.blamed == ("x",)
    assert plain.blamed == ()
    assert torch.equal(got, expected)
    assert (report.grad_norm, report.loss, report.num_sequences) == (
        plain.grad_norm,
        plain.loss,
        12,
    )
    assert report.senders == plain.senders
    assert report.ages == plain.ages


def test_several_that_are_not_finite_are_all_left_out() -> None:
    honest = crew("me", "a")
    bad = poisoned(poisoned(crew("", "", "x", "y"), "x"), "y")[2:]
    got, report = step([*bad, *honest])
    assert report.blamed == ("x", "y")
    assert torch.equal(got, step(honest)[0])


def test_parts_of_a_shared_group_are_valued_without_whom_is_blamed() -> None:
    parts = [of(peer, [1.0, 0.0], seed=0, family="0.0") for peer in ("me", "a")]
    rich = poisoned([of("x", [1e6, 0.0], seed=0, family="0.0")], "x")
    got, report = step([*parts, *rich])
    assert report.blamed == ("x",)
    assert torch.equal(got, step(parts)[0])


def test_where_nobody_else_is_left_only_the_version_changes() -> None:
    policy = tiny_policy()
    before = weights(policy)
    got, report = step(poisoned(crew("x"), "x"), policy)
    assert torch.equal(got, before)
    assert (policy.version, report.blamed, report.num_sequences) == (1, ("x",), 0)


def test_weights_that_are_no_numbers_are_nobody_elses_fault() -> None:
    policy = tiny_policy()
    with torch.no_grad():
        next(p for _, p in policy.trained()).fill_(float("nan"))
    words = "own weights are no longer numbers: lower lr; a run goes on"
    with pytest.raises(FloatingPointError, match=words):
        step(crew("a", "b"), policy)


def test_what_every_sender_makes_infinite_is_the_models_own_fault() -> None:
    both = poisoned(poisoned(crew("a", "b"), "a"), "b")
    with pytest.raises(FloatingPointError, match="Every sender's sequences make it so"):
        step(both)


def overflowing(patch: pytest.MonkeyPatch, token: int) -> None:
    """Have the gradient of a token not fit float16 at any scale."""

    class Overflow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(factor)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * ctx.saved_tensors[0], None

    def limited(policy: Policy, packed: Packed, *_: object) -> Scores:
        scores = score(changed(policy, dtype=torch.float32), packed)
        factor = torch.where(packed.target_M == token, torch.inf, 1.0)
        return changed(scores, logp_M=Overflow.apply(scores.logp_M, factor))

    patch.setattr(graphs, "score", limited)


@pytest.mark.slow
def test_a_sender_that_float16_does_not_hold_leaves_the_scale_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    overflowing(monkeypatch, token=2)
    policy = changed(tiny_policy(), dtype=torch.float16)
    learner = Learner(policy, objective("nois"), Learning(), lr=1e-3)
    bad = candidate(group(peer="x", slot=9, rollouts=[rollout([2, 1], 1.0), rollout([5, 1], 0.0)]))
    report = learner.step([*crew("me", "a"), bad])
    assert report.blamed == ("x",)
    assert learner.scale.value == FIRST_SCALE


# How much of a gradient may be one sender's


def loud(peer: str, seed: int, rewards: float = 50.0) -> Candidate:
    return of(peer, [rewards, 0.0, 0.0, 0.0], seed)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_policy, lora_policy])
def test_where_nobody_is_loud_the_sum_is_the_plain_one(make: Callable[[], Policy]) -> None:
    candidates = crew("me", "a", "b", "a", "c")
    got, report = step(candidates, make(), Trust(), budget=30)
    expected, plain = step(candidates, make(), FREE, budget=30)
    assert (got - expected).abs().max() < 1e-7
    assert (got - weights(make())).abs().max() > 1e-4
    assert report.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5)
    assert report.loss == pytest.approx(plain.loss, abs=1e-6)
    assert {m.grad_scale for m in report.senders.values()} == {1.0}


def gradient(candidates: list[Candidate], trust: Trust = FREE) -> torch.Tensor:
    """What a step without any bound adds to the weights, in steps of SGD; nothing is clipped."""
    policy = tiny_policy()
    before = weights(policy)
    learner = Learner(policy, objective("dr_grpo"), Learning(grad_clip=1e9), 1e-3, trust)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=1.0)
    learner.step(candidates)
    return weights(policy) - before


def alone(candidates: list[Candidate], peer: str) -> torch.Tensor:
    """A sender's part of it: the others' rewards are made equal, so that they are silent."""
    return gradient(
        [
            c if c.group.origin.peer == peer
            else changed(
                c,
                group=replace(
                    c.group, rollouts=tuple(replace(r, reward=0.0) for r in c.group.rollouts)
                ),
            )
            for c in candidates
        ]
    )  # fmt: skip


def test_a_loud_stranger_is_scaled_down_to_its_share_and_the_others_are_not() -> None:
    candidates = [*crew("me", "a", "b"), loud("x", 3)]
    parts = {peer: alone(candidates, peer) for peer in ("me", "a", "b", "x")}
    norm = {peer: float(part.norm()) for peer, part in parts.items()}
    assert norm["x"] > 4 * max(norm["me"], norm["a"], norm["b"])
    _, report = step(candidates, trust=Trust(grad_share=2), row="dr_grpo")
    pull = {peer: m.pull for peer, m in report.senders.items()}
    scale = 2 * max(pull["me"], pull["a"], pull["b"]) / pull["x"]
    assert report.senders["x"].grad_scale == pytest.approx(scale, rel=1e-4)
    assert [report.senders[peer].grad_scale for peer in ("me", "a", "b")] == [1, 1, 1]
    expected = parts["me"] + parts["a"] + parts["b"] + scale * parts["x"]
    got = gradient(candidates, Trust(grad_share=2))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert float((gradient(candidates) - expected).norm()) > norm["me"]


def test_a_bounded_step_is_one_step() -> None:
    policy = tiny_policy()
    learner = Learner(policy, objective("dr_grpo"), Learning(), 1e-3, Trust(grad_share=2))
    report = learner.step([*crew("me", "a", "b"), loud("x", 3)])
    assert report.senders["x"].grad_scale < 1
    assert policy.version == 1
    assert {int(state["step"]) for state in learner.optimiser.state.values()} == {1}


def test_a_pull_is_the_gradient_at_the_logits_within_a_factor_of_root_two() -> None:
    generator = torch.Generator().manual_seed(0)
    logit_BTV = (3 * torch.randn(6, 5, 8, generator=generator)).requires_grad_()
    token_BT = torch.randint(8, (6, 5), generator=generator)
    mask_BT = torch.arange(5) < torch.tensor([5, 1, 3, 5, 2, 4])[:, None]
    dloss_BT = torch.randn(6, 5, generator=generator)
    sender_B = torch.tensor([0, 2, 2, 0, 2, 0])
    logp_BT = logit_BTV.log_softmax(-1).gather(-1, token_BT[..., None]).squeeze(-1)
    (logp_BT * dloss_BT)[mask_BT].sum().backward()
    dloss_BT[~mask_BT] = torch.nan  # which is nobody's
    pulls = Pulls(3, torch.device("cpu"))
    for rows in ([0, 1, 2], [3, 4, 5]):
        pulls.add(sender_B[rows], dloss_BT[rows], logp_BT[rows].detach(), mask_BT[rows])
    for sender, pull in enumerate(pulls.norm_S.tolist()):
        exact = float(logit_BTV.grad[sender_B == sender].norm())
        assert pull <= exact <= 2**0.5 * pull


def test_what_a_learner_is_sure_of_pulls_little_and_what_it_never_says_fully() -> None:
    pulls = Pulls(2, torch.device("cpu"))
    logp_BT = torch.tensor([[0.999], [0.0]]).log()
    pulls.add(torch.tensor([0, 1]), torch.full((2, 1), -2.0), logp_BT, torch.ones(2, 1).bool())
    assert pulls.norm_S.tolist() == pytest.approx([0.002, 2.0], rel=1e-3)


def test_a_learners_own_gradient_is_never_scaled() -> None:
    candidates = [loud("me", 0), *crew("", "a", "b")[1:]]
    policy = tiny_policy()
    learner = Learner(policy, objective("dr_grpo"), Learning(), 1e-3, Trust(grad_share=1))
    report = learner.step(candidates)
    pull = {peer: m.pull for peer, m in report.senders.items()}
    assert pull["me"] > 4 * max(pull["a"], pull["b"])
    assert report.senders["me"].grad_scale == 1


def test_bounds_on_the_pulls_of_senders_by_hand() -> None:
    pull_S = torch.tensor([1.0, 0.0, 2.0, 30.0, 100.0])
    stranger_S = torch.tensor([False, True, True, True, True])
    # strangers that speak: 2, 30, 100; the median is 30
    assert scales(pull_S, stranger_S, 2.0).tolist() == pytest.approx([1, 1, 1, 1, 60 / 100])
    # of two the smaller, unless the own is larger
    two_S = torch.tensor([False, True, True])
    assert scales(torch.tensor([1.0, 2.0, 16.0]), two_S, 4.0).tolist() == [1, 1, 0.5]
    assert scales(torch.tensor([3.0, 2.0, 16.0]), two_S, 4.0).tolist() == [1, 1, 0.75]
    assert scales(pull_S, ~stranger_S, 4.0).tolist() == [1, 1, 1, 1, 1]
    assert scales(torch.zeros(2), torch.ones(2, dtype=torch.bool), 4.0).tolist() == [1, 1]


def test_a_crew_of_two_is_not_bounded_however_little_its_own_gradient_is() -> None:
    pulls, two = torch.tensor([0.01, 50.0]), torch.tensor([False, True])
    assert scales(pulls, two, 4.0).tolist() == [1, 1]


# Tokens that are withheld


def test_withheld_tokens_of_successes_have_no_part_in_the_gradient() -> None:
    candidates, asked = crew("me", "a"), []

    def withheld(one: Candidate, number: int) -> np.ndarray | None:
        asked.append((one.group.origin.peer, number))
        tokens = one.group.rollouts[number].tokens
        return np.arange(len(tokens)) < 1 if one.group.origin.peer == "a" else None

    plain, unheld = step(candidates)
    none, _ = step(candidates, withheld=lambda one, number: None)
    got, report = step(candidates, withheld=withheld)
    assert torch.equal(plain, none)
    assert (got - plain).abs().max() > 1e-4
    # only successes are asked for: the mean of 1, 0, .3, 0 is .325
    assert asked == [("me", 0), ("a", 0)]
    first = candidates[1].group.rollouts[0]
    assert report.senders["a"].withheld == pytest.approx(1 / len(first.tokens))
    assert (report.senders["me"].withheld, unheld.senders["a"].withheld) == (0, 0)


def test_withholding_every_token_of_the_successes_leaves_the_failures_alone() -> None:
    everything = lambda c, number: np.ones(len(c.group.rollouts[number].tokens), np.bool_)
    candidates = [of("a", [1.0, 0.0])]
    policy = tiny_policy()
    prompt = policy.vocabulary.encode(candidates[0].problem.prompt)
    failure = candidates[0].group.rollouts[1].tokens
    expected = torch.autograd.grad(
        reference_logp(policy, prompt, failure).mean(), [p for _, p in policy.trained()]
    )
    got, _ = step(candidates, withheld=everything)
    change = got - weights(policy)
    along = torch.cat([g.flatten() for g in expected])
    assert float(torch.cosine_similarity(change, -along, 0)) > 0.9999


# Candidates that are audited


def test_log_ratios_of_audited_candidates_are_reported_also_of_silent_ones() -> None:
    candidates = [*crew("me", "a"), of("b", [1.0, 1.0, 1.0], seed=2)]
    plain, without = step(candidates)
    got, report = step(candidates, audited=frozenset({2, 3}))
    assert torch.equal(got, plain)
    assert without.log_ratios == {}
    assert report.log_ratios.keys() == {2, 3}
    assert report.senders == without.senders
    assert (report.num_scored, report.num_tokens) == (without.num_scored, without.num_tokens)
    policy = tiny_policy()
    for one in candidates[1:]:
        prompt = policy.vocabulary.encode(one.problem.prompt)
        found = report.log_ratios[one.position]
        assert len(found) == len(one.group.rollouts)
        for made, log_ratio in zip(one.group.rollouts, found, strict=True):
            logp = reference_logp(policy, prompt, made.tokens).detach().double().numpy()
            assert log_ratio.dtype == np.float64
            np.testing.assert_allclose(log_ratio, logp - np.array(made.logprobs), atol=1e-5)


def test_a_step_of_silent_groups_can_be_listened_to() -> None:
    got, report = step([of("a", [1.0, 1.0])], audited=frozenset({1}))
    assert torch.equal(got, weights(tiny_policy()))
    assert [len(one) > 0 for one in report.log_ratios[1]] == [True, True]
    assert report.num_scored == 0


def test_a_pull_beyond_all_numbers_leaves_nothing_and_none_that_is_no_number_hides() -> None:
    stranger_S = torch.tensor([False, True, True, True])
    infinite_S = torch.tensor([1.0, 2.0, 2.0, torch.inf])
    assert scales(infinite_S, stranger_S, 4.0).tolist() == [1, 1, 1, 0]
    # the step itself is no number then, and somebody is blamed
    no_number_S = torch.tensor([1.0, 2.0, 2.0, torch.nan])
    assert scales(no_number_S, stranger_S, 4.0).tolist() == [1, 1, 1, 1]
    both_S = torch.tensor([torch.inf, 2.0, 2.0, torch.inf])
    assert scales(both_S, stranger_S, 4.0).tolist() == [1, 1, 1, 1]
