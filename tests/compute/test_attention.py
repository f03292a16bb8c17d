"""Attention by flash kernels against attention over padded rows with masks.

Without a GPU the kernels' contract is computed exactly.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compute.devices import needs_gpu, needs_interpreter
from fakes import ragged_sequences
from marks import slow
from motley.compute import attention, flash
from motley.compute.attention import PackedAttention
from motley.compute.fused import rotate
from motley.compute.layers import Heads, Rotation
from motley.compute.packed import Packed, Spans
from motley.learning.batches import ToScore, micro_batches

CPU = torch.device("cpu")
HEADS, KV_HEADS, SIZE = 4, 2, 8


def exact_varlen(
    query_NHd: Tensor,
    key_KHd: Tensor,
    value_KHd: Tensor,
    queries: Spans,
    keys: Spans,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """What `flash.varlen` promises, one stretch at a time, and differentiable."""
    outs, lses = [], []
    for number in range(len(queries.start_S) - 1):
        of_query, of_key = (
            slice(*spans.start_S[number : number + 2].tolist()) for spans in (queries, keys)
        )
        query, key, value = query_NHd[of_query], key_KHd[of_key], value_KHd[of_key]
        assert len(query) <= queries.longest
        assert len(key) <= keys.longest
        key, value = (
            heads.repeat_interleave(query.shape[1] // heads.shape[1], 1) for heads in (key, value)
        )
        score = torch.einsum("qhd,khd->hqk", query, key) * scaling
        if causal:
            assert len(query) == len(key)
            score = score.masked_fill(
                torch.ones(score.shape[1:], dtype=torch.bool).triu(1), float("-inf")
            )
        lses.append(score.logsumexp(-1))
        outs.append(torch.einsum("hqk,khd->qhd", score.softmax(-1), value))
    return torch.cat(outs).contiguous(), torch.cat(lses, 1)


def exact_varlen_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    queries: Spans,
    keys: Spans,
    scaling: float,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As the kernel does: softmax weights from the log-sum-exps it is given, their gradient by way
    of the output it is given.
    """
    dquery, dkey, dvalue = (torch.zeros_like(heads) for heads in (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    for number in range(len(queries.start_S) - 1):
        of_query, of_key = (
            slice(*spans.start_S[number : number + 2].tolist()) for spans in (queries, keys)
        )
        k, v = (heads[of_key].repeat_interleave(repeats, 1) for heads in (key, value))
        weight = (
            torch.einsum("qhd,khd->hqk", query[of_query], k) * scaling - lse[:, of_query, None]
        ).exp()
        if causal:
            weight = weight.tril()
        dweight = torch.einsum("qhd,khd->hqk", dout[of_query], v)
        delta = (dout[of_query] * out[of_query]).sum(-1).t()
        dscore = weight * (dweight - delta[..., None]) * scaling
        dquery[of_query] = torch.einsum("hqk,khd->qhd", dscore, k)
        dkey[of_key] = (
            torch.einsum("hqk,qhd->khd", dscore, query[of_query]).unflatten(1, (-1, repeats)).sum(2)
        )
        dvalue[of_key] = (
            torch.einsum("hqk,qhd->khd", weight, dout[of_query]).unflatten(1, (-1, repeats)).sum(2)
        )
    return dquery, dkey, dvalue


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "varlen", exact_varlen)
    monkeypatch.setattr(flash, "varlen_backward", exact_varlen_backward)


def of(*lengths: tuple[int, list[int]]) -> list[ToScore]:
    """Prompts of so many tokens with completions of so many."""
    rows = [(p, prompt, tokens) for p, (prompt, many) in enumerate(lengths) for tokens in many]
    return [
        ToScore(row=i, prompt=(p + 1,) * prompt, tokens=tuple(range(1, tokens + 1)))
        for i, (p, prompt, tokens) in enumerate(rows)
    ]


BATCHES = {
    "ragged": ragged_sequences(),
    "one": of((3, [4])),
    "some of one token": of((3, [1, 4, 1]), (2, [1, 1]), (5, [2, 6])),
    "only of one token": of((3, [1, 1]), (1, [1])),
    "single inputs": of((3, [2, 2]), (1, [1]), (4, [2])),
    "long": of((150, [200, 1, 70]), (10, [140]), (300, [3, 30, 1])),
}


def packed_of(kind: str, device: torch.device = CPU) -> Packed:
    (micro,) = micro_batches(BATCHES[kind], 10**6, device)
    return micro.packed.to(device)


def heads_of(packed: Packed, dtype: torch.dtype, size: int = SIZE, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values as parts of one tensor, as a layer has them."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(len(packed.token_N), HEADS + 2 * KV_HEADS, size, generator=generator).to(
        packed.token_N.device, dtype
    )
    return [part.detach().requires_grad_() for part in whole.split((HEADS, KV_HEADS, KV_HEADS), 1)]


def gradients(out: Tensor, heads: list[Tensor]) -> tuple[Tensor, ...]:
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5)).to(out)
    return torch.autograd.grad(out, heads, dout)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("scaling", [None, slow(0.4)])
@pytest.mark.parametrize("kind", BATCHES)
def test_two_parts_merged_are_the_attention_over_rows_with_masks(
    kind: str, scaling: float | None
) -> None:
    packed = packed_of(kind)
    heads = heads_of(packed, torch.float32)
    expected = PackedAttention(packed).by_rows(*heads, scaling, None)
    found = flash.attend_by_flash(*heads, packed, scaling)
    assert found.is_contiguous()
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    for mine, other in zip(gradients(found, heads), gradients(expected, heads), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-5)


@pytest.mark.slow
@needs_interpreter
@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("kind", ["ragged", "only of one token", "single inputs"])
def test_with_the_rotation_in_it_it_is_the_same(kind: str) -> None:
    packed = packed_of(kind)
    whole = torch.cat(heads_of(packed, torch.float32), 1).detach().requires_grad_()
    angle = packed.position_N[:, None] / torch.logspace(0, 2, SIZE // 2)
    rotation = Rotation(*(table(torch.cat([angle, angle], 1)) for table in (torch.cos, torch.sin)))
    turned = rotate(whole, rotation, HEADS + KV_HEADS, torch.float32)
    expected = flash.attend_by_flash(*turned.split((HEADS, KV_HEADS, KV_HEADS), 1), packed, 0.4)
    heads = flash.TurnedHeads(Heads(HEADS, KV_HEADS, SIZE), rotation, torch.float32)
    found = flash.attend_turned(whole, heads, packed, 0.4)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(
        *(gradients(out, [whole])[0] for out in (found, expected)), rtol=0, atol=1e-5
    )


def test_spans_say_where_prompts_and_completions_stand() -> None:
    packed = packed_of("some of one token")  # shorter prompts first
    assert packed.own.start_S.tolist() == [0, 2, 5, 10, 10, 10, 10, 13, 13, 14, 19]
    assert packed.prompts.start_S.tolist() == [0, 2, 5, 10]
    assert packed.answers.start_S.tolist() == [0, 0, 3, 9]
    assert (packed.own.longest, packed.prompts.longest, packed.answers.longest, packed.longest) == (
        5,
        5,
        6,
        10,
    )
    assert (packed.own.total, packed.prompts.total, packed.answers.total) == (19, 10, 9)
    assert packed.own.start_S.dtype == torch.int32


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize(
    ("window", "dtype", "size", "runs", "by_flash"),
    [
        (None, torch.float16, 8, True, True),
        (11, torch.bfloat16, 8, True, True),  # as long as the longest prompt and completion
        (10, torch.bfloat16, 8, True, False),
        (None, torch.float32, 8, True, False),
        (None, torch.float16, 12, True, False),
        (None, torch.float16, 264, True, False),
        (None, torch.float16, 8, False, False),
    ],
)
def test_flash_is_used_where_it_computes_the_same(
    window: int | None,
    dtype: torch.dtype,
    size: int,
    runs: bool,
    by_flash: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed = packed_of("ragged")
    assert packed.longest == 11
    monkeypatch.setattr(attention, "runs_flash", lambda device: runs)
    asked = []
    monkeypatch.setattr(flash, "attend_by_flash", lambda *given: asked.append(given) or given[0])
    PackedAttention(packed)(*heads_of(packed, dtype, size), None, window)
    assert bool(asked) == by_flash


def test_layers_of_one_window_share_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for each part of the rows; a window as long as the longest row is none."""
    packed, windows, made = packed_of("ragged"), (3, None, 3, 5, 11, 5, 3), list[int | None]()
    heads = heads_of(packed, torch.float32)
    expected = [PackedAttention(packed)(*heads, None, window) for window in windows]
    bias = attention._bias
    monkeypatch.setattr(attention, "_bias", lambda *given: made.append(given[2]) or bias(*given))
    attend = PackedAttention(packed)
    found = [attend(*heads, None, window) for window in windows]
    assert all(map(torch.equal, found, expected))
    assert made == [3, 3, None, None, 5, 5]


# On a GPU


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("size", [8, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", BATCHES)
def test_flash_kernels_agree_with_exact_attention(kind: str, dtype: torch.dtype, size: int) -> None:
    packed = packed_of(kind, torch.device("cuda"))
    heads = heads_of(packed, dtype, size)
    wide = [one.detach().float().requires_grad_() for one in heads]
    expected = PackedAttention(packed).by_rows(*wide, None, None)
    found = PackedAttention(packed)(*heads)
    assert found.grad_fn.name() == "_FlashBackward"
    close = 4e-3 if dtype == torch.float16 else 3e-2
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=close)
    for mine, other in zip(gradients(found, heads), gradients(expected, wide), strict=True):
        torch.testing.assert_close(
            mine.float(), other, rtol=close, atol=close * max(1.0, float(other.abs().max()))
        )


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", BATCHES)
def test_the_kernels_keep_the_contract_that_other_tests_rely_on(kind: str) -> None:
    packed = packed_of(kind, torch.device("cuda"))
    own, prompts, answers, first = packed.own, packed.prompts, packed.answers, packed.prompts.total
    query, key, value = (one.detach() for one in heads_of(packed, torch.float16, 64))
    parts = [(query, key, value, own, own, True)]
    if answers.total:
        parts.append((query[first:], key[:first], value[:first], answers, prompts, False))
    for q, k, v, queries, keys, causal in parts:
        out, lse = flash.varlen(q, k, v, queries, keys, 0.1, causal)
        wide = [one.cpu().float() for one in (q, k, v)]
        expected = exact_varlen(*wide, queries.to(CPU), keys.to(CPU), 0.1, causal)
        torch.testing.assert_close(out.cpu().float(), expected[0], rtol=0, atol=4e-3)
        torch.testing.assert_close(lse.cpu(), expected[1], rtol=0, atol=4e-3)
