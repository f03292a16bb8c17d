"""Products of few rows by kernels against sums in float64: under Triton's interpreter here, and on
a GPU where there is one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from compute.devices import DEVICES, needs_gpu
from marks import slow
from motley.compute.layers import Adapter, Norm, Projection
from motley.engines import few_rows
from motley.engines.few_rows import Cut

pytestmark = pytest.mark.parametrize("device", DEVICES)
# Triton's interpreter multiplies no bfloat16
each_half = pytest.mark.parametrize(
    "dtype",
    [torch.float16, pytest.param(torch.bfloat16, marks=[pytest.mark.gpu, needs_gpu])],
    ids=["float16", "bfloat16"],
)


def rows_of(rows: int, depth: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(rows + depth)
    return torch.randn(rows, depth, generator=generator).to(device, dtype)


def projection_of(
    width: int, depth: int, dtype: torch.dtype, device: str, bias: bool = False
) -> Projection:
    generator = torch.Generator().manual_seed(width)
    weight = torch.randn(width, depth, generator=generator).div(depth**0.5).to(device, dtype)
    added = torch.linspace(-1, 1, width).to(weight) if bias else None
    return Projection((weight,), added, (width,), ())


def exact(x_BK: Tensor, projection: Projection) -> Tensor:
    bias = None if projection.bias is None else projection.bias.double()
    return F.linear(x_BK.double(), projection.weight.double(), bias)


def assert_rounded(given: Tensor, expected: Tensor) -> None:
    """Rounded once: by half a step of the dtype, and what float32 sums are off."""
    step = torch.finfo(given.dtype).eps
    torch.testing.assert_close(given.double(), expected, rtol=0.51 * step, atol=4e-6)


# one row; a tail of columns and of depth; as many rows as there may be
@pytest.mark.parametrize(("rows", "width", "depth"), [(1, 40, 64), slow(5, 50, 200), (64, 16, 40)])
@each_half
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_the_sum_rounded_once(
    rows: int, width: int, depth: int, dtype: torch.dtype, bias: bool, device: str
) -> None:
    x_BK = rows_of(rows, depth, dtype, device)
    projection = projection_of(width, depth, dtype, device, bias)
    assert_rounded(few_rows.product(x_BK, projection), exact(x_BK, projection))


# a part without depth; the last part's tail
@pytest.mark.parametrize(("parts", "depth"), [(1, 64), (3, 64), (4, 104)])
def test_parts_add_up_to_the_product(parts: int, depth: int, device: str) -> None:
    x_BK = rows_of(6, depth, torch.float16, device)
    projection = projection_of(20, depth, torch.float16, device, bias=True)
    made_SBN = few_rows.parts_of_product(x_BK, projection, Cut(16, parts, 32, 4, 2, 0))
    assert made_SBN.shape == (parts, 6, 20)
    assert made_SBN.dtype == torch.float32
    torch.testing.assert_close(
        made_SBN.double().sum(0), exact(x_BK, projection), rtol=1e-6, atol=4e-6
    )


@pytest.mark.parametrize(("activation", "bias"), [("silu", False), ("gelu", False), ("silu", True)])
@each_half
def test_gates_are_those_of_the_products(
    activation: str, bias: bool, dtype: torch.dtype, device: str
) -> None:
    x_BK = rows_of(5, 72, dtype, device)
    projection = projection_of(80, 72, dtype, device, bias)
    gate, up = exact(x_BK, projection).to(dtype).chunk(2, 1)
    wide = gate.double()
    acted = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    expected = (acted.to(dtype).double() * up.double()).to(dtype)
    made = few_rows.gated_product(x_BK, projection, activation)
    # a gate or an up that lies at an edge may round to its neighbour
    close = torch.isclose(made.double(), expected.double(), rtol=0, atol=1e-6)
    assert close.double().mean() > 0.97
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(made, expected, rtol=4 * step, atol=1e-5)


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("size", [48, 128])
@each_half
def test_parts_are_added_and_normed(
    behind: bool, size: int, dtype: torch.dtype, device: str
) -> None:
    hidden_BD = rows_of(3, size, torch.float32, device)
    parts_SBD = rows_of(9, size, torch.float32, device).view(3, 3, size)
    norm = Norm(torch.linspace(0.5, 1.5, size).to(hidden_BD), 0.0, 1e-6)
    after = Norm(torch.linspace(-1, 1, size).to(hidden_BD), 0.0, 1e-5) if behind else None
    sum_BD, normed_BD = few_rows.add_norm(hidden_BD, parts_SBD, after, norm, dtype)
    added = parts_SBD.sum(0).to(dtype).float()
    expected = hidden_BD + (added if after is None else after(added))
    torch.testing.assert_close(sum_BD, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        normed_BD, norm(expected).to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6
    )


@pytest.mark.parametrize(("width", "depth"), [(576, 576), (1536, 8960), (2048, 8192), (960, 2560)])
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
def test_every_part_has_something_and_memory_holds_the_tiles(
    rows: int, width: int, depth: int, device: str
) -> None:
    place = torch.device(device)
    parted = few_rows.parted_cut(width, depth, rows, place)
    chunks = -(-depth // parted.depth)
    assert (parted.parts - 1) * -(-chunks // parted.parts) < chunks
    whole, gated = few_rows.whole_cut(width, place), few_rows.gated_cut(depth, rows, place)
    for cut, weights in ((parted, 1), (whole, 1), (gated, 2)):
        lines = max(few_rows.SMALLEST_PRODUCT, rows) + weights * cut.tile
        assert 2 * cut.stages * cut.depth * lines <= few_rows.MOST_SHARED


def test_only_products_that_it_can_make_are_made(device: str) -> None:
    x_BK = rows_of(4, 64, torch.float16, device)
    weight = projection_of(40, 64, torch.float16, device).weight
    one = Projection((weight,), None, (40,), ())
    made = few_rows.does(one, x_BK)
    assert made or device == "cuda"
    if not made:
        pytest.skip("this GPU makes none of them")
    assert not few_rows.does(one, x_BK.float())
    assert not few_rows.does(one, x_BK.repeat(17, 1))
    assert not few_rows.does(replace(one, weights=(weight, weight), sizes=(40, 40)), x_BK)
    assert not few_rows.does(replace(one, weights=(weight.float(),)), x_BK)
    assert not few_rows.does(replace(one, weights=(weight.T.contiguous().T,)), x_BK)
    assert not few_rows.does(replace(one, weights=(weight[:, :36].contiguous(),)), x_BK[:, :36])
    adapter = Adapter(weight[:2], weight[:, :2], 1.0)
    assert not few_rows.does(replace(one, adapters=((adapter,),)), x_BK)
