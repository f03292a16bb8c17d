"""AdamW with less memory: what it rounds is right on average, and a step itself is torch's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fakes import lora_policy, ragged_sequences, tiny_policy
from marks import slow
from motley.compute.scoring import score
from motley.learning import lean
from motley.learning.batches import micro_batches
from motley.learning.checkpoint import OPTIMISER, load_training, save_training
from motley.learning.descent import Upkeep, adam, kind_of, moment_bytes, optimiser_of
from motley.learning.lean import BLOCK, LeanAdam, decoded, encoded, to_bfloat16
from motley.models.devices import spare_onednn
from motley.models.policy import Policy, with_masters

OFFLOADED = Upkeep(offload=True)
IN_8_BITS = Upkeep(kind="adamw8bit", seed=3)
FACTORED = Upkeep(kind="adafactor")


def dice(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def some_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    shapes = [(30, 40), (40,), (3, 700)]
    return [
        nn.Parameter(torch.randn(shape).to(dtype if len(shape) > 1 else torch.float32))
        for shape in shapes
    ]


def stepped(parameters: list[nn.Parameter], optimiser: torch.optim.Optimizer, steps: int) -> None:
    """Toward zero, from gradients of many sizes."""
    for number in range(steps):
        for place, parameter in enumerate(parameters):
            noise = torch.randn(parameter.shape, generator=dice(100 * number + place))
            parameter.grad = (parameter.detach().float() + 0.1 * noise).to(parameter.dtype)
        optimiser.step()


# A step


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_moments_off_the_gpu_step_to_the_last_bit_as_adam_does(weight_decay: float) -> None:
    ours, theirs = some_parameters(), some_parameters()
    stepped(ours, optimiser_of(ours, 1e-2, weight_decay, OFFLOADED), 5)
    stepped(theirs, optimiser_of(theirs, 1e-2, weight_decay), 5)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)


def test_values_are_stepped_in_parts_without_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = some_parameters(), some_parameters()
    stepped(whole, optimiser_of(whole, 1e-2, 0.0, OFFLOADED), 3)
    monkeypatch.setattr(lean, "AT_ONCE", BLOCK)
    stepped(parts, optimiser_of(parts, 1e-2, 0.0, OFFLOADED), 3)
    for one, other in zip(parts, whole, strict=True):
        assert torch.equal(one, other)


def test_a_parameter_that_does_not_lie_in_a_row_is_stepped_too() -> None:
    ours, theirs = (nn.Parameter(torch.arange(12.0).view(3, 4).t()) for _ in range(2))
    assert not ours.is_contiguous()
    stepped([ours], optimiser_of([ours], 1e-2, 0.0, OFFLOADED), 2)
    stepped([theirs], torch.optim.Adam([theirs], lr=1e-2), 2)
    torch.testing.assert_close(ours, theirs)


def test_8_bits_walk_beside_adam() -> None:
    ours, theirs, start = some_parameters(), some_parameters(), some_parameters()
    stepped(ours, optimiser_of(ours, 1e-2, 0.0, IN_8_BITS), 30)
    stepped(theirs, optimiser_of(theirs, 1e-2, 0.0), 30)
    for one, other, before in zip(ours, theirs, start, strict=True):
        way, apart = (other - before).norm(), (one - other).norm()
        assert apart < 0.05 * way
        assert not torch.equal(one, other)


def test_no_second_moment_is_rounded_to_zero_and_no_step_is_huge() -> None:
    """A value whose gradient is a billionth of its neighbour's would else be divided by nothing."""
    parameter = nn.Parameter(torch.zeros(BLOCK))
    optimiser = LeanAdam([parameter], 1.0, in_8_bits=True, offload=False, seed=0)
    for _ in range(5):
        parameter.grad = torch.full((BLOCK,), 1e-8)
        parameter.grad[0] = 10.0
        optimiser.step()
    assert parameter.abs().max() < 10


def test_a_seed_and_a_step_say_how_the_dice_fall() -> None:
    runs = []
    for seed in (1, 1, 2):
        parameters = some_parameters()
        stepped(parameters, optimiser_of(parameters, 1e-2, 0.0, replace(IN_8_BITS, seed=seed)), 3)
        runs.append(torch.cat([p.detach().flatten() for p in parameters]))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


# Rounding


@pytest.mark.parametrize("value", [1.0 + 2**-9, -3.14159, 1e-3, 7e-8, 12345.678])
def test_a_rounded_weight_is_right_on_average(value: float) -> None:
    many = to_bfloat16(torch.full((200_000,), value), dice()).float()
    nearest = torch.tensor(value).bfloat16().float()
    step = 2.0**-7 * abs(value)  # at least the distance of the two neighbours
    assert len(many.unique()) == 2
    assert (many - value).abs().max() <= step
    assert abs(float(many.double().mean()) - value) < step / 200
    assert abs(float(nearest) - value) > step / 200  # which rounding to the nearest is not


def test_a_weight_that_is_a_bfloat16_stays_as_it_is() -> None:
    value = torch.randn(1000, generator=dice()).bfloat16().float()
    assert torch.equal(to_bfloat16(value, dice(1)).float(), value)


@pytest.mark.slow
@pytest.mark.parametrize("name", lean.MOMENTS)
def test_a_code_is_right_on_average(name: str) -> None:
    levels = lean._levels(name, torch.device("cpu"))
    value = torch.logspace(-5, 0, BLOCK) * (1 if name == "exp_avg_sq" else -1)
    total = torch.zeros(BLOCK, dtype=torch.float64)
    roll = dice()
    for _ in range(1000):
        total += decoded(*encoded(value, levels, roll), levels)
    torch.testing.assert_close(total / 1000, value.double(), rtol=0.015, atol=0)


def test_blocks_of_zeros_stay_zeros() -> None:
    levels = lean._levels("exp_avg_sq", torch.device("cpu"))
    code, scale = encoded(torch.zeros(3 * BLOCK - 5), levels, dice())
    assert (len(code), len(scale)) == (3 * BLOCK - 5, 3)
    assert not decoded(code, scale, levels).any()


def test_bfloat16_weights_move_by_steps_too_small_for_them() -> None:
    """1 + 1e-4 is 1 to the nearest bfloat16; by chance it is more, now and then."""
    parameter = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    optimiser = optimiser_of([parameter], 1e-4, 0.0)
    for _ in range(50):
        parameter.grad = -torch.ones_like(parameter)
        optimiser.step()
    assert float(parameter.detach().float().mean()) == pytest.approx(1 + 50e-4, rel=2e-4)


# What is kept


@pytest.mark.parametrize("upkeep", [Upkeep(), IN_8_BITS, FACTORED])
def test_what_is_remembered_is_counted_to_the_byte(upkeep: Upkeep) -> None:
    parameters = some_parameters()
    optimiser = optimiser_of(parameters, 1e-2, 0.0, upkeep)
    stepped(parameters, optimiser, 1)
    kept = sum(
        value.nbytes
        for state in optimiser.state.values()
        for key, value in state.items()
        if key != "step"
    )
    assert kept == moment_bytes([tuple(p.shape) for p in parameters], upkeep)
    assert moment_bytes([tuple(p.shape) for p in parameters], replace(upkeep, offload=True)) == 0


def trains(policy: Policy, optimiser: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimiser.zero_grad()
        for micro in micro_batches(ragged_sequences(), 1000, policy.device):
            (-score(policy, micro.packed).logp_M.mean()).backward()
        optimiser.step()


def bfloat16_policy() -> Policy:
    spare_onednn(torch.bfloat16, "cpu")
    return with_masters(replace(tiny_policy(), dtype=torch.bfloat16), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "upkeep"),
    [
        (tiny_policy, IN_8_BITS),
        (lora_policy, replace(IN_8_BITS, offload=True)),
        (tiny_policy, OFFLOADED),
        (tiny_policy, FACTORED),
        slow(bfloat16_policy, IN_8_BITS),
        slow(bfloat16_policy, Upkeep(seed=5)),
    ],
)
def test_training_goes_on_as_if_it_had_not_stopped(
    make: Callable[[], Policy], upkeep: Upkeep, tmp_path: Path
) -> None:
    start = lambda policy: optimiser_of([p for _, p in policy.trained()], 1e-2, 0.1, upkeep)
    policy, again = make(), make()
    optimiser, other = start(policy), start(again)
    trains(policy, optimiser, 2)
    save_training(policy, optimiser, tmp_path / "one")
    trains(policy, optimiser, 2)
    load_training(again, other, tmp_path / "one")
    trains(again, other, 2)
    assert_same(policy, again)


def assert_same(policy: Policy, again: Policy) -> None:
    for (name, ours), (_, theirs) in zip(policy.trained(), again.trained(), strict=True):
        assert torch.equal(ours, theirs), name


def test_moments_may_leave_the_gpu_when_a_run_goes_on(tmp_path: Path) -> None:
    policy, again = tiny_policy(), tiny_policy()
    optimiser = adam([p for _, p in policy.trained()], 1e-2)
    other = optimiser_of([p for _, p in again.trained()], 1e-2, 0.0, OFFLOADED)
    trains(policy, optimiser, 2)
    save_training(policy, optimiser, tmp_path / "one")
    load_training(again, other, tmp_path / "one")
    trains(policy, optimiser, 1)
    trains(again, other, 1)
    assert_same(policy, again)


@pytest.mark.parametrize(("saved", "other"), [(IN_8_BITS, Upkeep()), (Upkeep(), FACTORED)])
def test_another_optimizer_than_the_checkpoints_is_refused(
    saved: Upkeep, other: Upkeep, tmp_path: Path
) -> None:
    policy, again = tiny_policy(), tiny_policy()
    optimiser = optimiser_of([p for _, p in policy.trained()], 1e-2, 0.0, saved)
    trains(policy, optimiser, 1)
    save_training(policy, optimiser, tmp_path / "one")
    before = {name: p.detach().clone() for name, p in again.trained()}
    with pytest.raises(ValueError, match=f'go on with optimizer = "{saved.kind}"'):
        load_training(
            again, optimiser_of([p for _, p in again.trained()], 1e-2, 0.0, other), tmp_path / "one"
        )
    assert all(torch.equal(p, before[name]) for name, p in again.trained())


def test_adams_own_file_has_no_word_of_its_kind(tmp_path: Path) -> None:
    policy = tiny_policy()
    optimiser = adam([p for _, p in policy.trained()], 1e-2)
    trains(policy, optimiser, 1)
    save_training(policy, optimiser, tmp_path / "one")
    assert b"__metadata__" not in (tmp_path / "one" / OPTIMISER).read_bytes()[:4096]
    assert kind_of(optimiser) == "adamw"


def test_matrices_that_train_are_bfloat16_and_vectors_are_not() -> None:
    policy = bfloat16_policy()
    kinds = {p.dim(): p.dtype for _, p in policy.trained()}
    assert kinds == {1: torch.float32, 2: torch.bfloat16}


def test_policies_of_bfloat16_weights_come_back_to_the_bit(tmp_path: Path) -> None:
    policy, again = bfloat16_policy(), bfloat16_policy()
    trains(policy, optimiser_of([p for _, p in policy.trained()], 1e-2, 0.0), 1)
    policy.save(tmp_path / "model")
    again.load(tmp_path / "model")
    assert_same(policy, again)
