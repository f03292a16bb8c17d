from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from motley.learning import descent
from motley.learning.descent import (
    FIRST_SCALE,
    GROWS_AFTER,
    LossScale,
    adam,
    descend,
    optimiser_of,
)

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


# Weight decay


def trained() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (4,), (2, 2))
    ]


def walk(optimiser: torch.optim.Optimizer, parameters: list[nn.Parameter], steps: int = 5) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        descend(optimiser, torch.tensor(1.0))  # type: ignore[arg-type]


def test_matrices_decay_as_torchs_adamw_has_it_and_vectors_do_not() -> None:
    ours, theirs, plain = trained(), trained(), trained()
    walk(optimiser_of(ours, lr=0.1, weight_decay=0.3), ours)
    walk(torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.3), theirs)
    walk(adam(plain, lr=0.1), plain)
    for place in (0, 2):
        torch.testing.assert_close(ours[place], theirs[place])
        assert (ours[place] - plain[place]).abs().max() > 0.01
    torch.testing.assert_close(ours[1], plain[1])


def test_a_decay_is_decoupled_from_the_gradient() -> None:
    """p - lr·decay·p - lr·m/(sqrt(v) + eps), whose last term is lr·sign of the first gradient."""
    (matrix,) = [nn.Parameter(torch.tensor([[2.0, -4.0]]))]
    optimiser = optimiser_of([matrix], lr=0.1, weight_decay=0.5)
    matrix.grad = torch.tensor([[1.0, 100.0]])
    descend(optimiser, torch.tensor(1.0))
    expected = torch.tensor([[2.0 - 0.05 * 2 - 0.1, -4.0 + 0.05 * 4 - 0.1]])
    torch.testing.assert_close(matrix.detach(), expected)


def test_without_a_decay_it_is_the_same_adam_to_the_bit() -> None:
    ours, theirs = trained(), trained()
    walk(optimiser_of(ours, lr=0.1, weight_decay=0.0), ours)
    walk(adam(theirs, lr=0.1), theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_gradient_that_is_no_number_does_not_decay_anything_either() -> None:
    parameters = trained()
    optimiser = optimiser_of(parameters, lr=0.1, weight_decay=0.3)
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, math.nan)
    descend(optimiser, torch.tensor(math.nan))
    assert all(torch.equal(a, b) for a, b in zip(parameters, trained(), strict=True))
