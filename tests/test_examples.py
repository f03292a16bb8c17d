"""The readable loop stays short, runs, and computes what the package's `ftis` row computes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from motley.objectives import OBJECTIVES, LossBatch, Samples

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo_loop.py"
NUM_GROUPS, LENGTH = 5, 7


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpo_loop", EXAMPLE)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["grpo_loop"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_loop_fits_on_250_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 250


@pytest.fixture(scope="module")
def lines(loop: ModuleType) -> list[Any]:
    return loop.main(rounds=2, warm_success=0.02)


@pytest.mark.slow
def test_two_rounds_are_finite_and_move_both_models(loop: ModuleType, lines: list[Any]) -> None:
    assert [(line.round, line.peer) for line in lines] == [(2, name) for name in loop.MODELS]
    for line in lines:
        assert math.isfinite(line.loss)
        assert line.loss != 0, "every group was silent"
        assert 0 < line.reward < 1
        assert 0 < line.kept <= 1
        assert 0 < line.weight <= loop.C
        assert 0 <= line.heldout <= 1


@pytest.mark.slow
def test_same_seed_gives_the_same_lines(loop: ModuleType, lines: list[Any]) -> None:
    assert loop.main(rounds=2, warm_success=0.02) == lines


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_ftis_row(loop: ModuleType, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    num = NUM_GROUPS * loop.G
    reward_B = torch.randint(0, 2, (num,), generator=rng).float()
    reward_B[: loop.G] = 1.0  # a silent group
    length_B = torch.randint(1, LENGTH + 1, (num,), generator=rng)
    mask_BT = torch.arange(LENGTH) < length_B[:, None]
    logq_BT = -2 * torch.rand(num, LENGTH, generator=rng)
    drift_BT = 0.8 * torch.randn(num, LENGTH, generator=rng)
    # every third sequence holds a token that is all but impossible for the learner
    drift_BT[::3, 0] = -12.0
    logp_BT = (logq_BT + drift_BT).requires_grad_()

    row = OBJECTIVES["ftis"]
    terms = row.prepare(
        Samples(
            reward_B=reward_B,
            group_B=torch.arange(NUM_GROUPS).repeat_interleave(loop.G),
            sender_B=torch.ones(num, dtype=torch.int64),
            own_B=torch.zeros(num, dtype=torch.bool),
            stranger_B=torch.ones(num, dtype=torch.bool),
            success_B=torch.zeros(num),
            skill_B=torch.ones(num),
            length_B=length_B,
            ended_B=torch.ones(num, dtype=torch.bool),
            logq_mean_B=torch.where(mask_BT, logq_BT, 0.0).sum(1) / length_B,
            max_length=LENGTH,
        )
    )
    ended_B = torch.ones(num, dtype=torch.bool)
    output = row.loss(
        LossBatch(
            logp_learner_BT=logp_BT,
            logp_sampler_BT=logq_BT,
            mask_BT=mask_BT,
            ended_B=ended_B,
            terms=terms,
        )
    )
    (expected_BT,) = torch.autograd.grad(output.loss, logp_BT)

    advantage_B = loop.group_advantages(reward_B.view(NUM_GROUPS, loop.G))
    loss = loop.ftis_loss(logp_BT, logq_BT, mask_BT, advantage_B)
    (gradient_BT,) = torch.autograd.grad(loss, logp_BT)

    kept_B = loop.filter_keeps(logp_BT, logq_BT, mask_BT, advantage_B)
    assert 0 < int((~kept_B).sum()) < num, "the filter must drop some and keep some"
    assert bool((kept_B & (advantage_B > 0) & (drift_BT[:, 0] == -12)).any()), (
        "an unlikely positive must be there, and kept"
    )
    assert torch.equal(kept_B, output.keep_B)
    torch.testing.assert_close(loss, output.loss, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient_BT, expected_BT, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(
        torch.where(mask_BT, loop.truncated_weights(logp_BT, logq_BT), 0.0), output.weight_BT
    )


def test_constants_are_those_of_the_ftis_row(loop: ModuleType) -> None:
    settings = OBJECTIVES["ftis"].settings()
    assert (settings["C"], settings["g"]) == (loop.C, loop.KL_LIMIT)
