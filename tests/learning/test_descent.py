from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from motley.learning import descent
from motley.learning.descent import FIRST_SCALE, GROWS_AFTER, LossScale, adam, descend

OTHERS = [torch.float32, torch.bfloat16]


def gradient_of(scale: LossScale, loss: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    parameter.grad = None
    scale.backward(loss)
    return parameter.grad


@pytest.mark.parametrize("dtype", OTHERS)
def test_other_arithmetic_than_float16_is_not_scaled(dtype: torch.dtype) -> None:
    scale, parameter = LossScale(dtype), nn.Parameter(torch.tensor([0.1, 0.7]))
    assert (
        gradient_of(scale, (parameter**3).sum(), parameter).tolist()
        == (3 * parameter.detach() ** 2).tolist()
    )
    for _ in range(3 * GROWS_AFTER):
        scale.grow()
    assert scale.value == 1
    assert not scale.shrink()


def test_a_scaled_gradient_is_the_same_when_the_scale_is_taken_out() -> None:
    scale, parameter, idle = (
        LossScale(torch.float16),
        nn.Parameter(torch.tensor([0.1, 0.7])),
        nn.Parameter(torch.ones(2)),
    )
    assert (
        gradient_of(scale, (parameter**3).sum(), parameter).tolist()
        == (FIRST_SCALE * 3 * parameter.detach() ** 2).tolist()
    )
    norm = scale.clip([parameter, idle], limit=10.0)
    torch.testing.assert_close(parameter.grad, 3 * parameter.detach() ** 2)
    assert float(norm) == pytest.approx(float((3 * parameter.detach() ** 2).norm()))
    assert idle.grad is None


def test_it_shrinks_to_one_and_no_further() -> None:
    scale = LossScale(torch.float16)
    assert [scale.shrink() for _ in range(16)] == [True] * 15 + [False]
    assert scale.value == 1


def test_it_doubles_after_many_good_steps_in_a_row() -> None:
    scale = LossScale(torch.float16)
    for _ in range(GROWS_AFTER - 1):
        scale.grow()
    assert scale.value == FIRST_SCALE
    scale.shrink()
    scale.grow()
    assert scale.value == FIRST_SCALE / 2  # counted from the start again
    for _ in range(GROWS_AFTER - 1):
        scale.grow()
    assert scale.value == FIRST_SCALE


def test_scales_are_powers_of_two() -> None:
    assert math.log2(descent.FIRST_SCALE) % 1 == 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adam_is_one_pass_over_the_values(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    parameter = nn.Parameter(torch.ones(3, device=device))
    optimiser = adam(iter([parameter]), lr=0.1)
    parameter.sum().backward()
    optimiser.step()
    assert optimiser.defaults["fused"]
    torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), 0.9))


ON_A_GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ],
)


@pytest.mark.parametrize("device", ["cpu", ON_A_GPU])
def test_a_gradient_that_is_no_number_changes_nothing(device: str) -> None:
    """And is not counted as a step, which Adam's corrections for its first steps would show."""
    norms = (1.0, math.nan, math.inf, 1.0)

    def after(norms: tuple[float, ...]) -> torch.Tensor:
        parameter = nn.Parameter(torch.tensor([0.1, 0.7], device=device))
        optimiser = adam([parameter], lr=0.1)
        for norm in norms:
            parameter.grad = torch.tensor([1.0, norm], device=device)
            descend(optimiser, torch.tensor(norm, device=device))
        return parameter.detach().cpu()

    assert after(norms).tolist() == after((1.0, 1.0)).tolist()
    assert after((math.nan,)).tolist() == torch.tensor([0.1, 0.7]).tolist()
