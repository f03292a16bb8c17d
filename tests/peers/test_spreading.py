"""A learner and an engine over two devices: what they compute is what one device computes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from fakes import grouped_query_policy, lora_policy, tiny_policy
from learning.test_learner import MIXED, groups
from learning.test_senders_of_a_step import crew, poisoned
from motley.clock import RealClock
from motley.config import Learning, Teach, TrainPart, Trust
from motley.engines import Completion, torch_engine
from motley.learning.batches import ToScore, micro_batches
from motley.learning.checkpoint import load_training, save_training
from motley.learning.learner import Learner, StepReport
from motley.learning.sequences import nothing_withheld
from motley.models.policy import Policy
from motley.objectives import objective
from motley.peers import team as teams
from motley.peers.children import Children
from motley.peers.orders import DevicePart, FetchOrder
from motley.peers.parts import TeamPlan, open_part
from motley.peers.spreading import SpreadEngine, spread_learner
from motley.peers.team import Team
from motley.records import Sampling
from motley.weights.encoding import trained_state

pytestmark = pytest.mark.slow  # a process per device
CPU = torch.device("cpu")
RATE = 0.1  # of plain gradient descent


def last_layer() -> Policy:
    return tiny_policy(TrainPart(layers="last:1"))


def checkpointed() -> Policy:
    policy = tiny_policy()
    policy.gradient_checkpointing = True
    return policy


POLICIES = {
    "full": tiny_policy,
    "lora": lora_policy,
    "grouped": grouped_query_policy,
    "last layer": last_layer,
    "checkpointed": checkpointed,
}


def a_learner(
    kind: str = "full",
    row: str = "tis",
    variant: str = "",
    settings: dict[str, Any] | None = None,
    lr: float = 1e-3,
    **rules: Any,
) -> Learner:
    made = objective(row, variant, settings or {})
    return Learner(POLICIES[kind](), made, Learning(**rules), lr, Trust(), Teach(rescue=1.0))


@contextmanager
def spread(learner: Learner, kind: str = "full", size: int = 2) -> Iterator[Team]:
    team = spread_learner("ada", learner, size, POLICIES[kind])
    try:
        yield team
    finally:
        team.close()


def weights(learner: Learner) -> Tensor:
    learner.policy.fetch()
    return torch.cat([p.detach().flatten() for _, p in learner.policy.trained()])


@dataclass(frozen=True)
class PlainDescent:
    """Adam's first step has the same size for every gradient, however small, and would make a
    whole step of a rounding error.
    """

    def do(self, part: DevicePart) -> None:
        part.optimiser = torch.optim.SGD(part.parameters, lr=RATE)  # type: ignore[assignment]


@dataclass(frozen=True)
class Gradients:
    def do(self, part: DevicePart) -> Tensor:
        given: list[Any] = [p.grad for p in part.parameters if p.grad is not None]
        return torch.cat([gradient.full_tensor().flatten() for gradient in given])


def plain(learner: Learner, team: Team | None = None) -> None:
    if team is None:
        parameters = [p for _, p in learner.policy.trained()]
        learner.optimiser = torch.optim.SGD(parameters, lr=RATE)
    else:
        team.all_do(PlainDescent())


def assert_alike(one: StepReport, two: StepReport) -> None:
    assert two.loss == pytest.approx(one.loss, abs=1e-6)
    assert two.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)
    assert (two.num_scored, two.num_tokens, two.fates) == (
        one.num_scored,
        one.num_tokens,
        one.fates,
    )
    assert two.senders.keys() == one.senders.keys()
    for sender, metrics in one.senders.items():
        ours, theirs = (one.pull for one in (metrics, two.senders[sender]))
        assert isinstance(theirs, float) == isinstance(ours, float)
        assert not isinstance(ours, float) or theirs == pytest.approx(ours, rel=1e-5)


# Learning


@pytest.mark.parametrize("kind", POLICIES)
def test_gradients_and_steps_are_those_of_one_device(kind: str) -> None:
    candidates = groups(MIXED)
    alone, shared = (a_learner(kind, lr=RATE, token_budget=12, grad_clip=0.05) for _ in range(2))
    plan = alone._plan(candidates, nothing_withheld)
    with spread(shared, kind) as team:
        assert len(shared._micro_batches(plan.todo)) > 2, "several at a time, several times"
        for learner in (alone, shared):
            learner._backward(plan)
        parameters = [p for _, p in alone.policy.trained()]
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        assert float(gradient.norm()) == pytest.approx(0.05, rel=1e-3), "it was clipped"
        torch.testing.assert_close(team.all_do(Gradients())[0], gradient, rtol=0, atol=1e-6)
        plain(alone)
        plain(shared, team)
        before = weights(alone)
        for _ in range(3):
            assert_alike(alone.step(candidates), shared.step(candidates))
        assert float((weights(alone) - before).abs().max()) > 1e-4
        torch.testing.assert_close(weights(shared), weights(alone), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("row", "variant", "settings"),
    [
        ("gepo", "", {}),
        ("bnpo", "", {}),
        ("ftis", "code", {}),
        ("dr_grpo", "", {"beta": 0.5, "toward": "reference"}),
    ],
)
def test_what_couples_sequences_is_exact(row: str, variant: str, settings: dict[str, Any]) -> None:
    candidates = groups(MIXED)
    rules: dict[str, Any] = {"lr": RATE, "token_budget": 12, "epochs": 2, "groups_per_step": 2}
    alone, shared = (a_learner("full", row, variant, settings, **rules) for _ in range(2))
    with spread(shared) as team:
        plain(alone)
        plain(shared, team)
        for _ in range(2):
            one, two = alone.step(candidates), shared.step(candidates)
            assert_alike(one, two)
            assert one.inner
            assert two.inner
            assert two.inner.steps == one.inner.steps > 1
            assert two.reference_kl == (
                None if one.reference_kl is None else pytest.approx(one.reference_kl, abs=1e-6)
            )
        torch.testing.assert_close(weights(shared), weights(alone), rtol=0, atol=1e-6)


def test_who_has_no_micro_batch_adds_nothing() -> None:
    """One group for three devices."""
    alone, shared = a_learner(lr=RATE), a_learner(lr=RATE)
    with spread(shared, size=3) as team:
        plain(alone)
        plain(shared, team)
        one, two = (learner.step(groups(MIXED[:1])) for learner in (alone, shared))
        assert_alike(one, two)
        torch.testing.assert_close(weights(shared), weights(alone), rtol=0, atol=1e-6)


def test_a_stranger_whose_sequences_are_no_numbers_is_left_out_on_two_devices_too() -> None:
    candidates = poisoned(crew("a", "b", "c"), "b")
    alone, shared = a_learner(), a_learner()
    with spread(shared):
        one, two = (learner.step(candidates) for learner in (alone, shared))
        assert two.blamed == one.blamed == ("b",)
        assert_alike(one, two)


def test_adam_on_parts_is_adam_on_the_whole() -> None:
    """But for values whose gradient is hardly more than rounding."""
    candidates = groups(MIXED)
    alone, shared = (a_learner(weight_decay=0.1) for _ in range(2))
    with spread(shared) as team:
        for _ in range(3):
            assert_alike(alone.step(candidates), shared.step(candidates))
        away = (weights(shared) - weights(alone)).abs()
        assert float((away > 1e-6).float().mean()) < 1e-3
        assert float(away.max()) < 3 * 1e-3
        held = sum(
            moment.to_local().numel()
            for state in team.part.optimiser.state.values()
            for key, moment in state.items()
            if key == "exp_avg"
        )
        assert held < 0.55 * len(weights(alone)), "half of the moments are the other device's"


def test_a_step_without_a_rate_leaves_sampler_and_learner_alike() -> None:
    learner = a_learner(lr=0.0)
    before = weights(learner)
    with spread(learner) as team:
        engine = SpreadEngine(team)
        learner.step(groups(MIXED))
        engine.refresh()
        assert torch.equal(weights(learner), before)
        prompts = [(5, 6, 7), (8, 9), (4,)]
        made = engine.sample(prompts, 4, Sampling(max_tokens=8), seed=1)
        away = [
            abs(a - b)
            for prompt, row in zip(prompts, made, strict=True)
            for c in row
            for a, b in zip(scored(learner, prompt, c), c.logprobs, strict=True)
        ]
        assert len(away) > 20
        assert max(away) < 1e-3


def scored(learner: Learner, prompt: Sequence[int], completion: Completion) -> list[float]:
    """By the learner's own means."""
    sequence = ToScore(row=0, prompt=tuple(prompt), tokens=completion.tokens)
    (micro,) = micro_batches([sequence], 1 << 10, CPU)
    with torch.no_grad():
        return learner._score(micro.packed).logp_M.tolist()


# Sampling


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_tokens_are_those_of_one_device_also_after_a_step(kind: str) -> None:
    learner = a_learner(kind, lr=1e-2)
    sampling, prompts = Sampling(max_tokens=10), [(5, 6, 7), (8, 9), (4,), (10, 3)]
    with spread(learner, kind) as team:
        engine = SpreadEngine(team)
        before = engine.sample(prompts, 3, sampling, seed=7)
        learner.step(groups(MIXED))
        assert engine.sample(prompts, 3, sampling, seed=7) == before, "with the weights of before"
        engine.refresh()
        learner.policy.fetch()
        one = torch_engine(learner.policy)
        for some in (prompts, prompts[:3], prompts[:1]):
            theirs = engine.sample(some, 3, sampling, seed=7)
            ours = one.sample(some, 3, sampling, seed=7)
            assert [[c.tokens for c in row] for row in theirs] == [
                [c.tokens for c in row] for row in ours
            ]
        assert theirs != before[:1]


# Keeping


@pytest.mark.parametrize("kind", ["full", "lora", "last layer"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_checkpoint_goes_on_with_another_number_of_devices(
    kind: str, before: int, after: int, tmp_path: Path
) -> None:
    candidates = groups(MIXED)
    straight = a_learner(kind)
    for _ in range(2):
        straight.step(candidates)

    def goes_on(learner: Learner, size: int, write: bool) -> None:
        team = spread_learner("ada", learner, size, POLICIES[kind]) if size > 1 else None
        try:
            if not write:
                load_training(learner.policy, learner.optimiser, tmp_path / "saved")
            learner.step(candidates)
            if write:
                save_training(learner.policy, learner.optimiser, tmp_path / "saved")
            learner.policy.fetch()
        finally:
            if team:
                team.close()

    first, second = a_learner(kind), a_learner(kind)
    goes_on(first, before, write=True)
    plain_folder = a_learner(kind)
    plain_folder.step(candidates)
    save_training(plain_folder.policy, plain_folder.optimiser, tmp_path / "alone")
    assert files_in(tmp_path / "saved") == files_in(tmp_path / "alone")
    goes_on(second, after, write=False)
    own, theirs = (
        torch.cat([p.detach().flatten() for _, p in learner.policy.trained()])
        for learner in (second, straight)
    )
    assert float(((own - theirs).abs() > 1e-6).float().mean()) < 1e-3


def files_in(folder: Path) -> list[Path]:
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


def test_what_is_published_is_what_was_learned() -> None:
    alone, shared = a_learner(), a_learner()
    with spread(shared):
        for learner in (alone, shared):
            learner.step(groups(MIXED))
        one, two = (trained_state(learner.policy, "float32") for learner in (alone, shared))
        assert one.keys() == two.keys()
        away = max(float((one[name] - two[name]).abs().max()) for name in one)
        assert away < 2e-3
        assert any(not torch.equal(one[n], p.detach()) for n, p in tiny_policy().trained())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path) -> None:
    learner = a_learner()
    with spread(learner):
        with torch.no_grad():
            next(p for _, p in learner.policy.trained()).fill_(float("nan"))
        assert learner.policy.remote
        learner.policy.remote.push()
        with pytest.raises(FloatingPointError, match="no numbers"):
            save_training(learner.policy, learner.optimiser, tmp_path / "saved")


# Losing a device


def test_a_device_that_is_killed_ends_the_peer_with_a_sentence() -> None:
    learner = a_learner()
    with spread(learner) as team:
        learner.step(groups(MIXED))
        assert isinstance(team.others, Children)
        os.kill(team.others.devices[0].process.pid or 0, signal.SIGKILL)
        with pytest.raises(ValueError, match=r"device 1 was killed by signal 9.*--resume"):
            learner.step(groups(MIXED))


def test_a_device_that_fails_says_why() -> None:
    learner = a_learner()
    with pytest.raises(ValueError, match="peer ada: its device 1 failed: no such model"):
        spread_learner("ada", learner, 2, no_model)


def no_model() -> Policy:
    raise ValueError("no such model")


def test_where_ended_devices_met_others_meet_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's store keeps where ended ranks were. Rank 0 comes last, so that the other would
    find an old one there.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, wait_for_workers=False)
    monkeypatch.setattr(Children, "rendezvous", f"tcp://127.0.0.1:{store.port}")
    with spread(a_learner()):
        pass
    clock = RealClock()

    def open_late(policy: Policy, plan: TeamPlan, rank: int) -> DevicePart:
        clock.sleep_s(1.0)
        return open_part(policy, plan, rank)

    monkeypatch.setattr(teams, "open_part", open_late)
    learner = a_learner()
    with spread(learner):
        learner.step(groups(MIXED))


# Another device's model


def another_seed() -> Policy:
    return tiny_policy(TrainPart(layers="last:1"), seed=1)


def test_all_values_come_from_the_peer() -> None:
    """Frozen ones, too: another machine has no run folder, and so no warm start."""
    learner = a_learner("last layer")
    team = spread_learner("ada", learner, 2, another_seed)
    try:
        for name, value in learner.policy.model.named_parameters():
            assert torch.equal(team.all_do(FetchOrder(name))[0], value), name
    finally:
        team.close()


def test_another_model_under_the_same_name_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"ada: its device 1 has another model: .* put the same model on that"
    ):
        spread_learner("ada", a_learner(), 2, grouped_query_policy)
