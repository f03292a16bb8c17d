"""Each kernel and its gradient against a few lines of torch in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from compute.devices import DEVICES
from motley.compute import fused, kernels
from motley.compute.layers import Norm, Rotation

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random(
    *shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_same(
    ours: Callable[..., Sequence[Tensor]],
    theirs: Callable[..., Sequence[Tensor]],
    *given: Tensor,
    close: float,
    outputs: int | None = None,
) -> None:
    """Outputs and gradients of a sum in which every value has a weight of its own; of as many
    outputs as said.
    """
    found, expected = [], []
    for function, kept, exact in ((ours, found, False), (theirs, expected, True)):
        leaves = [one.detach().double() if exact else one.detach().clone() for one in given]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        made = list(function(*leaves))[:outputs]
        weights = [
            random(*one.shape, device=str(one.device), seed=9 + i) for i, one in enumerate(made)
        ]
        total = sum(
            (one.double() * weight).sum() for one, weight in zip(made, weights, strict=True)
        )
        kept += [*made, *torch.autograd.grad(total, leaves)]
    for i, (mine, other) in enumerate(zip(found, expected, strict=True)):
        scale = float(other.detach().abs().max())
        assert scale > 0.01
        torch.testing.assert_close(
            mine.double(),
            other.double(),
            rtol=0,
            atol=close * max(1, scale),
            msg=lambda m, i=i: f"{i}: {m}",
        )


@pytest.mark.parametrize("outputs", [2, 1])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_add_norm(
    device: str,
    dtype: torch.dtype,
    behind: bool,
    rows: int,
    outputs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    hidden, x = (
        random(rows, 48, device=device),
        random(rows, 48, dtype=dtype, device=device, seed=1),
    )
    weights = [random(48, device=device, seed=2), random(48, device=device, seed=3)]

    def ours(hidden: Tensor, x: Tensor, weight: Tensor, *after: Tensor) -> Sequence[Tensor]:
        return reversed(
            fused.add_norm(
                hidden, x, Norm(*after, 1.0, 1e-3) if behind else None, Norm(weight, 1.0, 1e-2)
            )
        )

    def theirs(hidden: Tensor, x: Tensor, weight: Tensor, *after: Tensor) -> Sequence[Tensor]:
        total = hidden + (
            F.rms_norm(x, (48,), *[1 + one for one in after], eps=1e-3) if behind else x
        )
        return F.rms_norm(total, (48,), 1 + weight, eps=1e-2), total

    assert_same(
        ours, theirs, hidden, x, *weights[: 1 + behind], close=3 * CLOSE[dtype], outputs=outputs
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_norm_keeps_the_hidden_state_in_float32(device: str) -> None:
    hidden, x = (
        random(3, 48, device=device),
        random(3, 48, dtype=torch.bfloat16, device=device, seed=1),
    )
    total, normed = fused.add_norm(
        hidden, x, None, Norm(random(48, device=device, seed=2), 0.0, 1e-5)
    )
    assert (total.dtype, normed.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(total, hidden + x.float())


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("size", [40, 1500])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gated(device: str, dtype: torch.dtype, size: int, activation: str) -> None:
    def theirs(gate_up: Tensor) -> Sequence[Tensor]:
        gate, up = gate_up.chunk(2, 1)
        return [(F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up]

    gate_up = 2 * random(3, 2 * size, dtype=dtype, device=device)
    assert_same(
        lambda gate_up: [fused.gated(gate_up, activation)], theirs, gate_up, close=CLOSE[dtype]
    )


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_gated_with_the_product_behind_it(device: str, dtype: torch.dtype, activation: str) -> None:
    def theirs(gate_up: Tensor, weight: Tensor) -> Sequence[Tensor]:
        gate, up = gate_up.chunk(2, 1)
        return [
            F.linear(
                (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up,
                weight,
            )
        ]

    given = (
        random(6, 80, dtype=dtype, device=device),
        random(16, 40, dtype=dtype, device=device, seed=1),
    )
    assert_same(
        lambda gate_up, weight: [fused._GatedLinear.apply(gate_up, weight, activation)],
        theirs,
        *given,
        close=CLOSE[dtype],
    )


@pytest.mark.parametrize("device", DEVICES)
def test_the_activation_is_rounded_before_it_is_multiplied_as_the_plain_forward_does(
    device: str,
) -> None:
    # bfloat16 is cut off, not rounded, by the interpreter
    gate_up = 2 * random(9, 600, dtype=torch.float16, device=device)
    gate, up = gate_up.chunk(2, 1)
    found, expected = fused.gated(gate_up, "silu"), F.silu(gate) * up
    assert float((found != expected).float().mean()) < 0.01  # where the last bit of float32 decides
    assert float(((F.silu(gate.float()) * up.float()).half() != expected).float().mean()) > 0.05


@pytest.mark.parametrize(("heads", "rotated", "size"), [(4, 3, 8), (20, 19, 16), (3, 2, 12)])
@pytest.mark.parametrize("given", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_rotate(
    device: str, dtype: torch.dtype, given: torch.dtype, heads: int, rotated: int, size: int
) -> None:
    angle = random(5, size // 2, device=device, seed=4).repeat(1, 2)
    cos, sin = 1.3 * angle.cos(), 1.3 * angle.sin()  # YaRN stretches them

    def theirs(values: Tensor) -> Sequence[Tensor]:
        first, second = values[:, :rotated].chunk(2, -1)
        c, s = (one[:, None, : size // 2].double() for one in (cos, sin))
        return [
            torch.cat(
                [
                    torch.cat([first * c - second * s, second * c + first * s], -1),
                    values[:, rotated:],
                ],
                1,
            )
        ]

    values = random(5, heads, size, dtype=given, device=device)
    assert_same(
        lambda values: [fused.rotate(values, Rotation(cos, sin), rotated, dtype)],
        theirs,
        values,
        close=max(CLOSE[dtype], CLOSE[given]),
    )
    assert fused.rotate(values, Rotation(cos, sin), rotated, dtype).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("device", DEVICES)
def test_merging_two_attentions_is_attending_to_both_sets_of_keys(
    device: str, dtype: torch.dtype
) -> None:
    queries, rows, heads, size = 7, 4, 17, 24
    score, other = (3 * random(heads, queries, 5, device=device, seed=i) for i in (0, 1))
    value, other_value = (
        random(heads, 5, size, dtype=dtype, device=device, seed=i) for i in (2, 3)
    )
    out = (score.softmax(-1) @ value.float()).transpose(0, 1).to(dtype).contiguous()
    before, lse = out.clone(), score.logsumexp(-1)
    part = (other.softmax(-1) @ other_value.float()).transpose(0, 1)[-rows:].to(dtype).contiguous()
    lse = kernels.merge(out, lse, part, other.logsumexp(-1)[:, -rows:].contiguous())
    both = torch.cat([score, other], -1)[:, -rows:]
    expected = (both.softmax(-1) @ torch.cat([value, other_value], 1).float()).transpose(0, 1)
    torch.testing.assert_close(out[-rows:].float(), expected, rtol=0, atol=CLOSE[dtype])
    torch.testing.assert_close(lse[:, -rows:], both.logsumexp(-1), rtol=0, atol=2e-6)
    assert torch.equal(out[:-rows], before[:-rows])


@pytest.mark.parametrize("vocabulary", [11, 5000])
@pytest.mark.parametrize("device", DEVICES)
def test_score(device: str, vocabulary: int) -> None:
    logits, temperature = (
        4 * random(6, vocabulary, device=device) + 30,
        torch.tensor([1.0, 0.5, 1.6, 1.0, 0.7, 2.0], device=device),
    )
    target = torch.tensor([0, vocabulary - 1, 3, 4, 5, 6], device=device)
    dlogp = random(6, device=device, seed=1)
    exact = logits.double().requires_grad_()
    logp = torch.log_softmax(exact / temperature[:, None].double(), -1)
    expected = logp.gather(1, target[:, None]).squeeze(1)
    found = kernels.score(logits, target, temperature)
    torch.testing.assert_close(found.logp_M.double(), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        found.entropy_M.double(), -(logp.exp() * logp).sum(-1), rtol=0, atol=5e-5
    )
    (gradient,) = torch.autograd.grad(expected, exact, dlogp.double())
    for dtype in DTYPES:
        ours = kernels.score_backward(logits, target, temperature, found.lse_M, dlogp, dtype)
        assert ours.dtype == dtype
        torch.testing.assert_close(
            ours.double(),
            gradient,
            rtol=0,
            atol=max(2e-5, CLOSE[dtype] * float(gradient.abs().max())),
        )


@pytest.mark.parametrize("device", DEVICES)
def test_logits_that_are_no_numbers_give_none(device: str) -> None:
    logits = random(2, 50, device=device)
    logits[1, 7] = float("nan")
    found = kernels.score(logits, torch.tensor([3, 3], device=device), torch.ones(2, device=device))
    assert found.logp_M.isfinite().tolist() == [True, False]
