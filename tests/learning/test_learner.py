from __future__ import annotations

from dataclasses import dataclass
from dataclasses import replace as aged
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fakes import candidate, group, lora_policy, reference_logp, rollout, tiny_policy
from motley.compute import graphs
from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.scoring import score
from motley.config import Learning
from motley.learning.batches import micro_batches
from motley.learning.descent import FIRST_SCALE
from motley.learning.fitting import fitting_budget
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate
from motley.learning.senders import SenderMetrics
from motley.learning.sequences import nothing_withheld, unscored
from motley.models.policy import Policy
from motley.objectives import Objective, Terms, objective
from motley.records import Problem, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoresEverything(Objective):
    """The same objective that never spares itself the work of a silent sequence."""

    def silent(self, terms: Terms) -> torch.Tensor:
        return torch.zeros_like(terms.advantage_B, dtype=torch.bool)


def everything_of(row: Objective) -> Objective:
    return ScoresEverything(**{name: getattr(row, name) for name in Objective.__dataclass_fields__})


def groups(
    rewards: list[list[float]], seed: int = 0, sampling: Sampling = Sampling()
) -> list[Candidate]:
    """A group per list of rewards, of random completions of random lengths; every other group is
    the learner's own.
    """
    generator = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=generator))
    found = []
    for slot, group_rewards in enumerate(rewards):
        problem = Problem(kind="sort", prompt=f"sort {10 + slot}=", answer="01")
        rollouts = [
            rollout([number(3, 27) for _ in range(number(1, 5))], reward, -0.5 - 0.3 * number(0, 5))
            for reward in group_rewards
        ]
        made = group(
            peer="me" if slot % 2 else "other",
            slot=slot,
            rollouts=rollouts,
            problem=problem,
            sampling=sampling,
        )
        found.append(candidate(made, own=slot % 2 == 1, position=slot + 1, problem=problem))
    return found


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def step(
    row: Objective, candidates: list[Candidate], policy: Policy | None = None, **rules: float
) -> tuple[torch.Tensor, StepReport]:
    """The weights after one plain gradient step: Adam's first step has the same size for every
    gradient, however small, and would make a whole step of a rounding error.
    """
    policy = policy or tiny_policy()
    learner = Learner(policy, row, Learning(**rules), lr=1e-3)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.1)
    report = learner.step(candidates)
    return weights(policy), report


MIXED = [[1.0, 0.0, 0.0, 1.0], [0.0] * 4, [0.3, 0.2, 0.9, 0.1], [1.0] * 4, [0.0, 0.0, 1.0, 0.5]]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("ftis", ""),
        ("ftis", "code"),
        ("gepo", ""),
        ("dr_grpo", ""),
        ("cispo", ""),
        ("sapo_swarm", ""),
    ],
)
def test_skipping_silent_sequences_gives_the_same_weights_as_scoring_them(
    name: str, variant: str
) -> None:
    row, candidates = objective(name, variant), groups(MIXED)
    ours, skipped = step(row, candidates)
    theirs, scored = step(everything_of(row), candidates)
    assert skipped.num_scored < scored.num_scored == skipped.num_sequences == 20
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
    assert (ours - weights(tiny_policy())).abs().max() > 1e-4
    assert skipped.loss == pytest.approx(scored.loss, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_policy, lora_policy])
@pytest.mark.parametrize(
    ("name", "variant"), [("ftis", ""), ("ftis", "code"), ("bnpo", ""), ("gepo", ""), ("gspo", "")]
)
def test_the_token_budget_does_not_change_the_weights(
    name: str, variant: str, make: type[Policy]
) -> None:
    row, candidates = objective(name, variant), groups(MIXED)
    whole, report = step(row, candidates, make())
    for budget in (1, 15, 40):
        parts, cut = step(row, candidates, make(), token_budget=budget)
        assert (parts - whole).abs().max() < 1e-6
        assert cut.loss == pytest.approx(report.loss, abs=1e-6)
        assert cut.grad_norm == pytest.approx(report.grad_norm, rel=1e-4)


def test_pairs_of_odd_groups_that_share_a_prompt_are_not_parted() -> None:
    pair = [
        ("a", groups([[1.0, 0.2, 0.5]], seed=1)[0]),
        ("b", groups([[0.1, 0.9, 0.3]], seed=2)[0]),
    ]
    candidates = [
        candidate(
            replace(c.group, origin=replace(c.group.origin, peer=peer)),
            problem=c.problem,
            position=position,
        )
        for position, (peer, c) in enumerate(pair)
    ]
    whole, _ = step(objective("ftis", "code"), candidates)
    parts, _ = step(objective("ftis", "code"), candidates, token_budget=1)
    assert (parts - whole).abs().max() < 1e-6


def test_a_step_of_silent_groups_changes_nothing_but_the_version() -> None:
    policy = tiny_policy()
    before = weights(policy)
    learner = Learner(policy, objective("ftis"), Learning(), lr=1e-3)
    report = learner.step(groups([[1.0] * 4, [0.0] * 4]))
    assert torch.equal(weights(policy), before)
    assert (
        policy.version,
        report.num_scored,
        report.num_tokens,
        report.loss,
        report.grad_norm,
    ) == (1, 0, 0, 0.0, 0.0)
    assert not learner.optimiser.state


def test_steps_make_good_completions_likelier_and_bad_ones_less_likely() -> None:
    policy = tiny_policy()
    learner = Learner(policy, objective("nois"), Learning(), lr=1e-3)
    candidates = groups([[1.0, 0.0, 0.0, 0.0]])
    prompt = policy.vocabulary.encode(candidates[0].problem.prompt)
    logp = lambda: [
        float(reference_logp(policy, prompt, r.tokens).sum().detach())
        for r in candidates[0].group.rollouts
    ]
    before = logp()
    for _ in range(5):
        learner.step(candidates)
    change = [now - then for now, then in zip(logp(), before, strict=True)]
    assert change[0] > 0.1
    assert sum(change[1:]) < -0.1
    assert policy.version == 5


def test_a_gradient_that_is_not_a_number_stops_before_the_weights_change() -> None:
    policy = tiny_policy()
    before = weights(policy)
    words = (
        r"gradient norm is nan at version 0; nothing was changed by this step\. The peer's own "
        r"sequences make it so: lower lr; a run goes on"
    )
    with pytest.raises(FloatingPointError, match=words):
        Learner(policy, objective("ftis"), Learning(), lr=1e-3).step(
            groups([[1.0, 0.0], [1.0, float("nan"), 0.0, 0.0]])
        )
    assert torch.equal(weights(policy), before)
    assert policy.version == 0


def test_the_gradient_is_clipped_to_its_limit() -> None:
    policy, limit = tiny_policy(), 1e-3
    report = Learner(policy, objective("nois"), Learning(grad_clip=limit), lr=1e-3).step(
        groups(MIXED)
    )
    assert report.grad_norm > limit
    norm = torch.sqrt(sum((p.grad**2).sum() for _, p in policy.trained()))
    assert float(norm) == pytest.approx(limit, rel=1e-3)


def test_parts_of_one_problem_share_their_statistics() -> None:
    """Two halves of a horizontal group, each without spread of its own, differ from each other."""
    problem = Problem(kind="sort", prompt="sort 21=", answer="12")
    halves = [
        group(
            peer=peer,
            rollouts=[rollout(reward=reward), rollout([12, 1], reward=reward)],
            problem=problem,
        )
        for peer, reward in (("a", 1.0), ("b", 0.0))
    ]
    apart = [candidate(half, problem=problem, position=i) for i, half in enumerate(halves)]
    together = [
        candidate(half, problem=problem, position=i, family="0.0") for i, half in enumerate(halves)
    ]
    assert step(objective("ftis"), apart)[1].num_scored == 0
    assert step(objective("ftis"), together)[1].num_scored == 4


def test_completions_are_scored_at_the_temperature_of_their_record() -> None:
    cold = step(objective("tis"), groups(MIXED, sampling=Sampling(temperature=0.5)))[1]
    warm = step(objective("tis"), groups(MIXED))[1]
    assert cold.senders["other"].entropy < warm.senders["other"].entropy - 0.05


def test_frozen_parts_are_not_touched() -> None:
    policy = lora_policy()
    frozen = {
        name: p.detach().clone()
        for name, p in policy.model.named_parameters()
        if not p.requires_grad
    }
    Learner(policy, objective("ftis"), Learning(), lr=1e-2).step(groups(MIXED))
    assert frozen
    assert all(
        torch.equal(value, dict(policy.model.named_parameters())[name])
        for name, value in frozen.items()
    )


def test_ages_count_groups_by_how_many_versions_ago_they_began_to_age() -> None:
    policy = tiny_policy()
    policy.version = 7
    made = groups([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.5, 0.0]])
    since = [7, 3, 7, 0, 3]
    candidates = [aged(c, since=version) for c, version in zip(made, since, strict=True)]
    report = Learner(policy, objective("ftis"), Learning(), lr=1e-3).step(candidates)
    # on the version that learned, silent groups too
    assert list(report.ages.items()) == [(0, 2), (4, 2), (7, 1)]
    assert policy.version == 8
    other, me = report.senders["other"], report.senders["me"]
    assert other.age == pytest.approx((0 + 0 + 4) / 3)
    assert me.age == pytest.approx((4 + 7) / 2)


def test_parts_of_one_family_count_with_their_own_ages() -> None:
    halves = [
        candidate(group(peer=peer), family="0.0", arrived=version)
        for peer, version in (("a", 0), ("b", 2))
    ]
    policy = tiny_policy()
    policy.version = 2
    assert Learner(policy, objective("ftis"), Learning(), lr=1e-3).step(halves).ages == {0: 1, 2: 1}


# Out of memory


def out_of_memory(patch: pytest.MonkeyPatch, most_tokens: int) -> list[int]:
    """Have memory hold micro-batches of so many packed tokens; the sizes that were tried."""
    tried: list[int] = []

    def limited(policy: Policy, packed: Packed, *_: object) -> Scores:
        tried.append(len(packed.token_N))
        if len(packed.token_N) > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return score(policy, packed)

    patch.setattr(graphs, "score", limited)
    return tried


def a_learner(policy: Policy, budget: int) -> Learner:
    learner = Learner(policy, objective("ftis"), Learning(token_budget=budget), lr=1e-3)
    learner.optimiser = torch.optim.SGD([p for _, p in policy.trained()], lr=0.1)
    return learner


def test_out_of_memory_halves_the_budget_once_and_learns_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates, policy, from_the_start = groups(MIXED), tiny_policy(), tiny_policy()
    small = a_learner(from_the_start, 20)
    expected = small.step(candidates)
    tried = out_of_memory(monkeypatch, most_tokens=20)
    learner = a_learner(policy, 40)
    with pytest.warns(
        UserWarning,
        match=(
            r"out of memory with 40 tokens in a micro-batch; going on with 20\. .* set "
            r"learning\.token_budget = 20"
        ),
    ) as caught:
        report = learner.step(candidates)
    assert len(caught) == 1
    assert max(tried) > 20 >= max(tried[1:])
    torch.testing.assert_close(weights(policy), weights(from_the_start), rtol=0, atol=1e-7)
    assert (weights(policy) - weights(tiny_policy())).abs().max() > 1e-4
    assert report == expected
    assert learner.success.by_kind == small.success.by_kind
    assert (policy.version, learner.token_budget) == (1, 20)
    learner.step(candidates)  # and no further word
    assert policy.version == 2


def test_memory_that_runs_out_after_some_micro_batches_leaves_nothing_of_them_in_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates, policy, from_the_start = groups(MIXED), tiny_policy(), tiny_policy()
    a_learner(from_the_start, 10).step(candidates)
    calls = []

    def second_fails(policy: Policy, packed: Packed, *_: object) -> Scores:
        calls.append(packed)
        if len(calls) == 2:
            raise RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
            )
        return score(policy, packed)

    monkeypatch.setattr(graphs, "score", second_fails)
    with pytest.warns(UserWarning, match="going on with 10"):
        a_learner(policy, 20).step(candidates)
    torch.testing.assert_close(weights(policy), weights(from_the_start), rtol=0, atol=1e-7)


def test_out_of_memory_again_is_an_error_with_remedies_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates, policy = groups(MIXED), tiny_policy()
    before = weights(policy)
    out_of_memory(monkeypatch, most_tokens=5)
    learner = Learner(policy, objective("ftis"), Learning(token_budget=80), lr=1e-3)
    remedies = r"with 40 tokens in a micro-batch; set learning\.token_budget = 20 or lower"
    with (
        pytest.warns(UserWarning, match="going on with 40"),
        pytest.raises(ValueError, match=remedies),
    ):
        learner.step(candidates)
    assert torch.equal(weights(policy), before)
    assert policy.version == 0
    assert not learner.optimiser.state


def test_out_of_memory_in_a_later_step_is_not_halved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    candidates, policy = groups(MIXED), tiny_policy()
    learner = a_learner(policy, 40)
    out_of_memory(monkeypatch, most_tokens=20)
    with pytest.warns(UserWarning, match="going on with 20"):
        learner.step(candidates)
    after_one = weights(policy)
    out_of_memory(monkeypatch, most_tokens=5)
    with pytest.raises(
        ValueError,
        match=r"with 20 tokens in a micro-batch; set learning\.token_budget = 10",
    ):
        learner.step(candidates)
    assert torch.equal(weights(policy), after_one)
    assert policy.version == 1


def test_an_error_that_is_not_about_memory_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(policy: Policy, packed: Packed, *_: object) -> Scores:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(graphs, "score", broken)
    learner = a_learner(tiny_policy(), 80)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        learner.step(groups(MIXED))
    assert learner.token_budget == 80


def test_without_a_budget_in_the_crew_file_the_fitting_one_is_used() -> None:
    learner = Learner(tiny_policy(), objective("ftis"), Learning(), lr=1e-3)
    assert learner.token_budget == fitting_budget(learner.policy)


# float16


class InFloat16(torch.autograd.Function):
    """Passes a gradient on as float16 would hold it, `factor` times as large."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (gradient * ctx.factor).half().float() / ctx.factor, None


def rounding_gradients(patch: pytest.MonkeyPatch, factor: float) -> list[Packed]:
    """Have gradients pass through float16; what was scored."""
    scored: list[Packed] = []

    def rounded(policy: Policy, packed: Packed, *_: object) -> Scores:
        scored.append(packed)
        scores = score(aged(policy, dtype=torch.float32), packed)
        return aged(scores, logp_M=InFloat16.apply(scores.logp_M, factor))

    patch.setattr(graphs, "score", rounded)
    return scored


def without_gradients(report: StepReport) -> dict[str, SenderMetrics]:
    """Of the senders, what does not depend on the arithmetic."""
    return {
        name: replace(metrics, pull=None, grad_scale=None)
        for name, metrics in report.senders.items()
    }


def float16_policy() -> Policy:
    return aged(tiny_policy(), dtype=torch.float16)


def test_a_gradient_that_float16_does_not_hold_is_made_again_at_a_smaller_scale(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    candidates, policy, exact = groups(MIXED), float16_policy(), tiny_policy()
    expected = a_learner(exact, 10**6).step(candidates)
    scored = rounding_gradients(monkeypatch, factor=2.0**11)
    learner = a_learner(policy, 10**6)
    report = learner.step(candidates)
    assert len(scored) > 2
    assert learner.scale.value == FIRST_SCALE / 2 ** (len(scored) - 1)
    torch.testing.assert_close(weights(policy), weights(exact), rtol=0, atol=1e-6)
    assert (weights(policy) - weights(tiny_policy())).abs().max() > 1e-4
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3)
    assert (report.loss, policy.version) == (expected.loss, 1)
    assert without_gradients(report) == without_gradients(expected)
    tries = len(scored)
    learner.step(candidates)
    assert len(scored) - tries < tries  # the scale is kept, so that it has less far to go


@pytest.mark.parametrize(("dtype", "vanishes"), [(torch.float16, False), (torch.bfloat16, True)])
def test_a_small_gradient_vanishes_in_float16_unless_the_loss_is_scaled(
    dtype: torch.dtype, vanishes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounding_gradients(monkeypatch, factor=2.0**-22)
    report = a_learner(aged(tiny_policy(), dtype=dtype), 10**6).step(groups(MIXED))
    assert (report.grad_norm == 0) == vanishes


@pytest.mark.slow
def test_a_gradient_that_fits_at_no_scale_is_an_error_that_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = float16_policy()
    before, scored = weights(policy), rounding_gradients(monkeypatch, factor=1e9)
    learner = Learner(policy, objective("ftis"), Learning(), lr=1e-3)
    words = (
        "gradient norm is (nan|inf) at version 0; nothing was changed by this step.*lr, or set "
        "dtype = 'bfloat16' for the peer; a run goes on"
    )
    with pytest.raises(FloatingPointError, match=words):
        learner.step(groups([[0.0] * 4, *MIXED]))  # its own
    assert len(scored) == 17  # from 2^15 to 1, and to see whose fault it is
    assert torch.equal(weights(policy), before)
    assert not learner.optimiser.state
    assert policy.version == 0


def test_a_loss_that_is_no_number_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = rounding_gradients(monkeypatch, factor=1.0)
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        a_learner(float16_policy(), 10**6).step(groups([[0.0], [1.0, float("nan"), 0.0, 0.0]]))
    assert len(scored) == 2  # once more to see whose fault it is, not at each smaller scale


def test_the_clip_sees_the_gradient_without_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    rounding_gradients(monkeypatch, factor=1.0)
    policy = float16_policy()
    report = Learner(policy, objective("nois"), Learning(grad_clip=1e-3), lr=1e-3).step(
        groups(MIXED)
    )
    exact = Learner(tiny_policy(), objective("nois"), Learning(grad_clip=1e-3), lr=1e-3).step(
        groups(MIXED)
    )
    assert report.grad_norm == pytest.approx(exact.grad_norm, rel=1e-2)
    assert float(torch.sqrt(sum((p.grad**2).sum() for _, p in policy.trained()))) == pytest.approx(
        1e-3, rel=1e-3
    )


# On a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_a_gpu_a_step_goes_where_the_cpus_goes(dtype: torch.dtype) -> None:
    candidates, policy, exact = groups(MIXED), tiny_policy(), tiny_policy()
    policy.model.cuda()
    policy.dtype = dtype
    start, expected, report = (
        weights(exact),
        a_learner(exact, 30).step(candidates),
        a_learner(policy, 30).step(candidates),
    )
    ours, theirs = weights(policy).cpu() - start, weights(exact) - start
    close = {torch.float32: 0.9999, torch.bfloat16: 0.97, torch.float16: 0.998}[dtype]
    assert torch.cosine_similarity(ours, theirs, 0) > close
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)
    assert report.senders.keys() == expected.senders.keys()
    scored = [
        name for name, metrics in expected.senders.items() if metrics.number("entropy") is not None
    ]
    assert scored
    for name in scored:
        assert report.senders[name].entropy == pytest.approx(
            expected.senders[name].entropy, rel=0.02
        )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_on_a_gpu_a_step_waits_for_it_only_where_it_must() -> None:
    """While micro-batches are computed nothing is read back, with graphs or without."""
    policy = tiny_policy()
    policy.model.cuda()
    policy.dtype = torch.bfloat16
    learner, candidates = a_learner(policy, 10**6), groups(MIXED)
    for times in range(4):  # compiles, sees a size again, captures it, and replays it
        plan = learner._plan(candidates, nothing_withheld, frozenset())
        learner.optimiser.zero_grad()
        learner._score.begin()
        ready = [
            unscored(plan, micro)
            for micro in micro_batches(plan.batch.sequences, 10**6, policy.device)
        ]
        torch.cuda.set_sync_debug_mode("error" if times else "default")
        try:
            learner._launch(plan, ready, None)
        finally:
            torch.cuda.set_sync_debug_mode("default")
