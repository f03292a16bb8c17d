"""Log-probs by kernels, in chunks, against the plain projection in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from compute.devices import DEVICES
from motley.compute import logprobs
from motley.compute.logprobs import score_hidden

ROWS, SIZE, VOCABULARY = 11, 16, 40
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Given:
    """Hidden states and a head whose values a half type holds exactly, so that only what is
    computed from them is rounded.
    """

    def __init__(self, dtype: torch.dtype, device: str, trains: bool = True) -> None:
        generator = torch.Generator().manual_seed(0)
        values = lambda *shape: (
            torch.randn(shape, generator=generator).to(torch.bfloat16).to(device)
        )
        self.hidden_MD = values(ROWS, SIZE).to(dtype).requires_grad_()
        self.head = nn.Linear(SIZE, VOCABULARY, bias=False, device=device)
        self.head.weight.data = values(VOCABULARY, SIZE).float()
        self.head.requires_grad_(trains)
        self.packed = SimpleNamespace(
            target_M=torch.arange(ROWS, device=device) * 3 + 1,
            temperature_M=torch.linspace(0.5, 1.5, ROWS, device=device),
        )
        self.dlogp_M = values(ROWS).float()

    def plain(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        hidden_MD = self.hidden_MD.detach().float().requires_grad_()
        return self.results(
            *(
                getattr(score_hidden(hidden_MD, self.head, self.packed), n)
                for n in ("logp_M", "entropy_M")
            ),
            hidden_MD,
        )

    def by_kernels(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        found = logprobs._Score.apply(
            self.hidden_MD, self.head.weight, self.packed.target_M, self.packed.temperature_M
        )
        return self.results(*found, self.hidden_MD)

    def results(
        self, logp_M: Tensor, entropy_M: Tensor, hidden_MD: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        assert not entropy_M.requires_grad
        leaves = [hidden_MD, *([self.head.weight] if self.head.weight.requires_grad else [])]
        return logp_M.detach(), entropy_M, list(torch.autograd.grad(logp_M, leaves, self.dlogp_M))


@pytest.mark.parametrize("at_once", [1, 3 * VOCABULARY, 2**26])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_give_the_plain_logprobs_entropies_and_gradients(
    device: str, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("a GPU's products of half types into float32 take half types")
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE_GPU", at_once)
    given = Given(dtype, device)
    logp, entropy, gradients = given.plain()
    our_logp, our_entropy, ours = given.by_kernels()
    torch.testing.assert_close(our_logp, logp, rtol=0, atol=2e-5)
    torch.testing.assert_close(our_entropy, entropy, rtol=0, atol=2e-5)
    assert [one.dtype for one in ours] == [dtype, torch.float32]
    for mine, other in zip(ours, gradients, strict=True):
        torch.testing.assert_close(
            mine.float(), other, rtol=0, atol=CLOSE[dtype] * float(other.abs().max())
        )


@pytest.mark.parametrize("device", DEVICES)
def test_a_frozen_head_gets_no_gradient_and_costs_none(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the gradient of a frozen head was computed")

    given = Given(torch.float16, device, trains=False)
    _, _, (expected,) = given.plain()
    monkeypatch.setattr(logprobs, "_add_product", refuse)
    _, _, (found,) = given.by_kernels()
    torch.testing.assert_close(
        found.float(), expected, rtol=0, atol=4e-3 * float(expected.abs().max())
    )


@pytest.mark.parametrize("device", DEVICES)
def test_neither_direction_holds_more_logits_than_said(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, sizes, product = 4 * VOCABULARY + 5, [], logprobs._product
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE_GPU", at_once)
    monkeypatch.setattr(
        logprobs, "_product", lambda a, b: sizes.append(len(a) * b.shape[1]) or product(a, b)
    )
    Given(torch.float16, device).by_kernels()
    assert sizes == 2 * [4 * VOCABULARY, 4 * VOCABULARY, 3 * VOCABULARY]


def test_chunks_of_many_rows_are_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE_GPU", 300 * 10)
    assert [len(rows) for (rows,) in logprobs._chunks(10, torch.zeros(700))] == [256, 256, 188]
    assert [len(rows) for (rows,) in logprobs._chunks(30, torch.zeros(150))] == [100, 50]


@pytest.mark.parametrize("device", DEVICES)
def test_hidden_states_in_a_half_type_are_scored_by_kernels_unless_the_head_has_a_bias(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = Given(torch.float16, device)
    plain = given.plain()[0]
    assert (
        score_hidden(given.hidden_MD, given.head, given.packed).logp_M.grad_fn.name()
        == "_ScoreBackward"
    )
    given.head.bias = nn.Parameter(torch.zeros(VOCABULARY, device=device))
    biased = score_hidden(given.hidden_MD, given.head, given.packed).logp_M
    assert biased.grad_fn.name() != "_ScoreBackward"
    torch.testing.assert_close(biased, plain)
