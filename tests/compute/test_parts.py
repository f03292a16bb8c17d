"""Gradients that are written out, against autograd's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from motley.compute.parts import rms_norm, rotate


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).requires_grad_()


@pytest.mark.parametrize("shape", [(5, 8), (4, 3, 6)])
def test_rms_norm_is_that_of_torch_and_so_is_its_gradient(shape: tuple[int, ...]) -> None:
    x, scale = normal(*shape), normal(shape[-1], seed=1)
    torch.testing.assert_close(rms_norm(x, scale, 1e-3), F.rms_norm(x, shape[-1:], scale, 1e-3))
    assert torch.autograd.gradcheck(lambda x, scale: rms_norm(x, scale, 1e-3), (x, scale))


def test_a_frozen_norm_gets_no_gradient() -> None:
    x, scale = normal(5, 8), normal(8, seed=1).detach()
    assert torch.autograd.gradcheck(lambda x: rms_norm(x, scale, 1e-3), (x,))


def test_rotation_turns_halves_against_each_other() -> None:
    heads, angle = normal(5, 3, 8), normal(5, 1, 4, seed=1).detach()
    cos, sin = (torch.cat([part, part], -1) for part in (angle.cos(), angle.sin()))
    first, second = heads.chunk(2, -1)
    expected = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
    torch.testing.assert_close(rotate(heads, cos, sin), expected)
    assert torch.autograd.gradcheck(lambda heads: rotate(heads, cos, sin), (heads,))
