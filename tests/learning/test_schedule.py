"""The learning rate of every round: closed forms, torch's own schedulers, and nothing to save."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch.optim import lr_scheduler

from motley.config import Learning
from motley.learning.schedule import lr_at


def rates(rounds: int, lr: float = 0.5, **rules: object) -> list[float]:
    return [lr_at(Learning(**rules), lr, rounds, version) for version in range(rounds)]  # type: ignore[arg-type]


def test_a_constant_rate_is_exactly_that() -> None:
    assert rates(3, lr=0.1) == [0.1, 0.1, 0.1]


def test_a_warm_up_rises_in_equal_steps_and_is_over_with_its_last_round() -> None:
    assert rates(6, lr=0.8, warmup_rounds=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8])


def test_a_linear_rate_by_hand() -> None:
    assert rates(4, lr=1.0, schedule="linear") == pytest.approx([1, 0.75, 0.5, 0.25])
    falls = rates(4, lr=1.0, schedule="linear", final_lr=0.2)
    assert falls == pytest.approx([1, 0.8, 0.6, 0.4])


def test_a_cosine_by_hand() -> None:
    root = math.sqrt(0.5)
    assert rates(4, lr=2.0, schedule="cosine") == pytest.approx([2, 1 + root, 1, 1 - root])


def test_behind_the_last_round_the_rate_stays_where_it_ends() -> None:
    rules = Learning(schedule="cosine", final_lr=0.25)
    assert lr_at(rules, 1.0, 4, 4) == pytest.approx(0.25)
    assert lr_at(rules, 1.0, 4, 9) == pytest.approx(0.25)


def torch_rates(make: object, rounds: int) -> list[float]:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    scheduler = make(optimiser)  # type: ignore[operator]
    found = []
    for _ in range(rounds):
        found.append(scheduler.get_last_lr()[0])
        optimiser.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    return found


@pytest.mark.parametrize("final", [0.0, 0.1])
@pytest.mark.parametrize("warm", [0, 3])
def test_the_rates_are_those_of_torchs_own_schedulers(final: float, warm: int) -> None:
    rounds = 11

    def with_warm_up(falls: object) -> object:
        def make(optimiser: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
            then = falls(optimiser)  # type: ignore[operator]
            if not warm:
                return then
            first = lr_scheduler.LinearLR(optimiser, 1 / warm, 1.0, total_iters=warm - 1)
            return lr_scheduler.SequentialLR(optimiser, [first, then], [warm])

        return make

    linear = with_warm_up(lambda o: lr_scheduler.LinearLR(o, 1.0, final, rounds - warm))
    cosine = with_warm_up(
        lambda o: lr_scheduler.CosineAnnealingLR(o, rounds - warm, eta_min=final * 0.5)
    )
    rules = {"warmup_rounds": warm, "final_lr": final}
    assert rates(rounds, schedule="linear", **rules) == pytest.approx(torch_rates(linear, rounds))
    assert rates(rounds, schedule="cosine", **rules) == pytest.approx(torch_rates(cosine, rounds))
