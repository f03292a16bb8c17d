"""Triton kernels of a training step: what lies between the matrix products, forward and backward.

Arithmetic is in float32 whatever the tensors hold. Nothing is added up by atomics, so that the same
step gives the same numbers. They run on CPU tensors too, slowly, under TRITON_INTERPRET=1: so they
are tested where there is no GPU. Their gradients are tied in by `fused`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from motley.compute.layers import Norm

PROGRAMS = 2048  # of a backward norm: each adds up the scale's gradient over its rows
HEADS_AT_ONCE = 16
COLUMNS_AT_ONCE = 1024
LOGITS_AT_ONCE = 4096  # of a row


class Normed(NamedTuple):
    """What a norm computed, and what its gradient needs."""

    sum_ND: Tensor  # float32
    normed_ND: Tensor
    inverse_N: Tensor  # 1 / rms of a row of the sum
    behind_N: Tensor | None  # 1 / rms of a row of what was added


def add_norm(hidden_ND: Tensor, x_ND: Tensor, behind: Norm | None, norm: Norm) -> Normed:
    """sum = hidden + x, or hidden + behind(x); normed = norm(sum), in the dtype of x."""
    rows, size = hidden_ND.shape
    per_row = lambda: torch.empty(rows, dtype=torch.float32, device=x_ND.device)
    made = Normed(
        torch.empty_like(hidden_ND),
        torch.empty_like(x_ND),
        per_row(),
        None if behind is None else per_row(),
    )
    scale_D = norm.scale
    _add_norm[(rows,)](
        hidden_ND,
        x_ND,
        scale_D if behind is None else behind.scale,
        scale_D,
        made.sum_ND,
        made.normed_ND,
        made.inverse_N,
        made.inverse_N if made.behind_N is None else made.behind_N,
        size,
        0.0 if behind is None else behind.eps,
        norm.eps,
        BEHIND=behind is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_warps(size),
    )
    return made


@triton.jit
def _add_norm(
    hidden,
    x,
    behind,
    scale,
    total,
    normed,
    inverse,
    behind_inverse,
    size,
    behind_eps,
    eps,
    BEHIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0)
    row = index.to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    real = place < size
    value = tl.load(hidden + row + place, mask=real, other=0.0)
    added = tl.load(x + row + place, mask=real, other=0.0).to(tl.float32)
    if BEHIND:
        added_inverse = 1.0 / tl.sqrt(tl.sum(added * added, 0) / size + behind_eps)
        tl.store(behind_inverse + index, added_inverse)
        added = added * added_inverse * tl.load(behind + place, mask=real, other=0.0)
    value = value + added
    tl.store(total + row + place, value, mask=real)
    value_inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    tl.store(inverse + index, value_inverse)
    out = value * value_inverse * tl.load(scale + place, mask=real, other=0.0)
    tl.store(normed + row + place, out.to(normed.dtype.element_ty), mask=real)


class NormGradients(NamedTuple):
    hidden_ND: Tensor
    x_ND: Tensor
    scale_D: Tensor
    behind_D: Tensor | None


def add_norm_backward(
    dsum_ND: Tensor | None,
    dnormed_ND: Tensor,
    made: Normed,
    x_ND: Tensor | None,
    behind: Norm | None,
    norm: Norm,
) -> NormGradients:
    """From the gradients of the sum (None: zero) and of what was normed.

    `x_ND` is read only where a norm is behind it.
    """
    rows, size = dnormed_ND.shape
    programs = min(rows, PROGRAMS)
    dhidden_ND, dx_ND = torch.empty_like(made.sum_ND), torch.empty_like(dnormed_ND)
    dscale_PD = torch.empty(programs, size, dtype=torch.float32, device=dx_ND.device)
    dbehind_PD = None if behind is None else torch.empty_like(dscale_PD)
    scale_D = norm.scale
    _add_norm_backward[(programs,)](
        made.sum_ND if dsum_ND is None else dsum_ND,
        dnormed_ND,
        made.sum_ND,
        made.inverse_N,
        scale_D,
        dnormed_ND if x_ND is None else x_ND,
        made.inverse_N if made.behind_N is None else made.behind_N,
        scale_D if behind is None else behind.scale,
        dhidden_ND,
        dx_ND,
        dscale_PD,
        dscale_PD if dbehind_PD is None else dbehind_PD,
        rows,
        triton.cdiv(rows, programs),
        size,
        ADDS=dsum_ND is not None,
        BEHIND=behind is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=_warps(size),
    )
    return NormGradients(
        dhidden_ND, dx_ND, dscale_PD.sum(0), None if dbehind_PD is None else dbehind_PD.sum(0)
    )


@triton.jit(do_not_specialize=["rows", "rows_each"])
def _add_norm_backward(
    dtotal,
    dnormed,
    total,
    inverse,
    scale,
    x,
    behind_inverse,
    behind,
    dhidden,
    dx,
    dscale,
    dbehind,
    rows,
    rows_each,
    size,
    ADDS: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < size
    weight = tl.load(scale + place, mask=inside, other=0.0)
    behind_weight = tl.load(behind + place, mask=inside, other=0.0)
    weight_sum = tl.zeros([BLOCK], dtype=tl.float32)
    behind_sum = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(rows_each):
        index = program * rows_each + i
        real = place < tl.where(index < rows, size, 0)
        index = tl.minimum(index, rows - 1)
        row = index.to(tl.int64) * size
        value = tl.load(total + row + place, mask=real, other=0.0)
        given = tl.load(dnormed + row + place, mask=real, other=0.0).to(tl.float32)
        rate = tl.load(inverse + index)
        value = value * rate
        weight_sum += given * value
        given = given * weight
        gradient = rate * (given - value * (tl.sum(given * value, 0) / size))
        if ADDS:
            gradient += tl.load(dtotal + row + place, mask=real, other=0.0)
        tl.store(dhidden + row + place, gradient, mask=real)
        if BEHIND:
            added = tl.load(x + row + place, mask=real, other=0.0).to(tl.float32)
            rate = tl.load(behind_inverse + index)
            added = added * rate
            behind_sum += gradient * added
            gradient = gradient * behind_weight
            gradient = rate * (gradient - added * (tl.sum(gradient * added, 0) / size))
        tl.store(dx + row + place, gradient.to(dx.dtype.element_ty), mask=real)
    partial = program.to(tl.int64) * size
    tl.store(dscale + partial + place, weight_sum, mask=inside)
    if BEHIND:
        tl.store(dbehind + partial + place, behind_sum, mask=inside)


def gated(gate_up_NI: Tensor, activation: str) -> Tensor:
    """act(gate)·up, where gate_up has the gates and then the ups of a row. act is rounded first, as
    the plain forward does.
    """
    rows, size = len(gate_up_NI), gate_up_NI.shape[1] // 2
    out_NI = gate_up_NI.new_empty(rows, size)
    block, grid = _cut(rows, size, COLUMNS_AT_ONCE)
    _gated[grid](gate_up_NI, out_NI, size, SILU=activation == "silu", BLOCK=block, num_warps=4)
    return out_NI


@triton.jit
def gate_exponent(gate, SILU: tl.constexpr):
    """f in act(x) = x·sigmoid(f(x)).

    GELU's tanh form: (1 + tanh(y)) / 2 = sigmoid(2y), y = sqrt(2 / pi)·(x + 0.044715·x^3).
    """
    return gate if SILU else 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)


@triton.jit
def _gated(gate_up, out, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    gate = tl.load(gate_up + row * 2 * size + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + place, mask=real, other=0.0).to(tl.float32)
    acted = (gate * tl.sigmoid(gate_exponent(gate, SILU))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + place, (acted * up).to(out.dtype.element_ty), mask=real)


def gated_backward(gate_up_NI: Tensor, dout_NI: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """The gradient of gate_up, and act(gate)·up once more."""
    rows, size = dout_NI.shape
    dgate_up_NI, out_NI = torch.empty_like(gate_up_NI), torch.empty_like(dout_NI)
    block, grid = _cut(rows, size, COLUMNS_AT_ONCE)
    _gated_backward[grid](
        gate_up_NI,
        dout_NI,
        dgate_up_NI,
        out_NI,
        size,
        SILU=activation == "silu",
        BLOCK=block,
        num_warps=4,
    )
    return dgate_up_NI, out_NI


@triton.jit
def _gated_backward(gate_up, dout, dgate_up, out, size, SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    gate = tl.load(gate_up + row * 2 * size + place, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + place, mask=real, other=0.0).to(tl.float32)
    given = tl.load(dout + row * size + place, mask=real, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate_exponent(gate, SILU))
    rise = 1.0 if SILU else 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)  # of gate_exponent
    slope = share + gate * share * (1.0 - share) * rise
    acted = (gate * share).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + place, (acted * up).to(out.dtype.element_ty), mask=real)
    tl.store(
        dgate_up + row * 2 * size + place,
        (given * up * slope).to(dgate_up.dtype.element_ty),
        mask=real,
    )
    tl.store(
        dgate_up + row * 2 * size + size + place,
        (given * acted).to(dgate_up.dtype.element_ty),
        mask=real,
    )


def rotate(
    heads_NHd: Tensor,
    cos_Nd: Tensor,
    sin_Nd: Tensor,
    rotated: int,
    dtype: torch.dtype,
    back: bool = False,
) -> Tensor:
    """Rotary position embedding of the first `rotated` heads, halves convention; the others as they
    are. `back`: transposed.
    """
    rows, heads, size = heads_NHd.shape
    out_NHd = torch.empty(rows, heads, size, dtype=dtype, device=heads_NHd.device)
    _rotate[(rows, triton.cdiv(heads, HEADS_AT_ONCE))](
        heads_NHd,
        cos_Nd,
        sin_Nd,
        out_NHd,
        rotated,
        heads,
        size,
        cos_Nd.stride(0),
        BACK=back,
        HEADS=min(HEADS_AT_ONCE, triton.next_power_of_2(heads)),
        BLOCK=triton.next_power_of_2(size // 2),
        num_warps=4,
    )
    return out_NHd


@triton.jit
def _rotate(
    values,
    cos,
    sin,
    out,
    rotated,
    heads,
    size,
    stride,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    place = tl.arange(0, BLOCK)[None, :]
    real = (head < heads) & (place < size // 2)
    at = row * heads * size + head * size + place
    first = tl.load(values + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(values + at + size // 2, mask=real, other=0.0).to(tl.float32)
    turns = real & (head < rotated)
    c = tl.load(cos + row * stride + place + 0 * head, mask=turns, other=1.0)
    s = tl.load(sin + row * stride + place + 0 * head, mask=turns, other=0.0)
    if BACK:
        s = -s
    tl.store(out + at, (first * c - second * s).to(out.dtype.element_ty), mask=real)
    tl.store(out + at + size // 2, (second * c + first * s).to(out.dtype.element_ty), mask=real)


def merge(out_NHd: Tensor, lse_HN: Tensor, other_MHd: Tensor, other_lse_HM: Tensor) -> Tensor:
    """Into the last M of N queries' attention, in place, that of the same queries over other keys,
    by their log-sum-exps; the merged ones.

    Those are written to a place of their own: threads that share a row each read its old one, and
    at a time of their own.
    """
    rows, heads, size = other_MHd.shape
    merged_HN = lse_HN.clone()
    _merge[(rows, triton.cdiv(heads, HEADS_AT_ONCE))](
        out_NHd,
        lse_HN,
        merged_HN,
        other_MHd,
        other_lse_HM,
        len(out_NHd),
        rows,
        heads,
        size,
        HEADS=min(HEADS_AT_ONCE, triton.next_power_of_2(heads)),
        BLOCK=triton.next_power_of_2(size),
        num_warps=4,
    )
    return merged_HN


@triton.jit(do_not_specialize=["queries", "rows"])
def _merge(
    out,
    lse,
    merged_lse,
    other,
    other_lse,
    queries,
    rows,
    heads,
    size,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    known = head < heads
    query = queries - rows + index
    mine = tl.load(lse + head * queries + query, mask=known, other=0.0)
    theirs = tl.load(other_lse + head * rows + index, mask=known, other=0.0)
    most = tl.maximum(mine, theirs)
    together = most + tl.log(tl.exp(mine - most) + tl.exp(theirs - most))
    tl.store(merged_lse + head * queries + query, together, mask=known)
    my_share, their_share = tl.exp(mine - together), tl.exp(theirs - together)
    place = head[:, None] * size + tl.arange(0, BLOCK)[None, :]
    real = known[:, None] & (tl.arange(0, BLOCK)[None, :] < size)
    first = tl.load(out + query * heads * size + place, mask=real, other=0.0).to(tl.float32)
    second = tl.load(other + index * heads * size + place, mask=real, other=0.0).to(tl.float32)
    mixed = first * my_share[:, None] + second * their_share[:, None]
    tl.store(out + query * heads * size + place, mixed.to(out.dtype.element_ty), mask=real)


class TokenScores(NamedTuple):
    logp_M: Tensor
    entropy_M: Tensor
    lse_M: Tensor  # of the logits over their temperature


def score(logits_MV: Tensor, target_M: Tensor, temperature_M: Tensor) -> TokenScores:
    """In one pass over float32 logits."""
    rows, size = logits_MV.shape
    scores = TokenScores(*torch.empty(3, rows, dtype=torch.float32, device=logits_MV.device))
    block, _ = _cut(rows, size, LOGITS_AT_ONCE)
    _score[(rows,)](logits_MV, target_M, temperature_M, *scores, size, BLOCK=block, num_warps=8)
    return scores


@triton.jit
def _score(logits, target, temperature, logp, entropy, lse, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    logits += row.to(tl.int64) * size
    heat = tl.load(temperature + row)
    most = float("-inf")
    total = 0.0  # of exp(x - most)
    moment = 0.0  # of x·exp(x - most)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        real = place < size
        x = tl.load(logits + place, mask=real, other=float("-inf")) / heat
        peak = tl.maximum(most, tl.max(x, 0))
        weight = tl.exp(x - peak)
        shrink = tl.exp(most - peak)
        total = total * shrink + tl.sum(weight, 0)
        moment = moment * shrink + tl.sum(tl.where(real, x, 0.0) * weight, 0)
        most = peak
    whole = most + tl.log(total)
    tl.store(lse + row, whole)
    tl.store(entropy + row, whole - moment / total)
    tl.store(logp + row, tl.load(logits + tl.load(target + row)) / heat - whole)


def score_backward(
    logits_MV: Tensor,
    target_M: Tensor,
    temperature_M: Tensor,
    lse_M: Tensor,
    dlogp_M: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits: dlogp·(onehot - p) / temperature."""
    rows, size = logits_MV.shape
    dlogits_MV = torch.empty(rows, size, dtype=dtype, device=logits_MV.device)
    block, grid = _cut(rows, size, LOGITS_AT_ONCE)
    _score_backward[grid](
        logits_MV,
        target_M,
        temperature_M,
        lse_M,
        dlogp_M,
        dlogits_MV,
        size,
        BLOCK=block,
        num_warps=8,
    )
    return dlogits_MV


@triton.jit
def _score_backward(logits, target, temperature, lse, dlogp, dlogits, size, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = place < size
    heat = tl.load(temperature + row)
    at = row.to(tl.int64) * size + place
    share = tl.exp(tl.load(logits + at, mask=real, other=float("-inf")) / heat - tl.load(lse + row))
    hit = (place == tl.load(target + row)).to(tl.float32)
    tl.store(
        dlogits + at,
        (tl.load(dlogp + row) * (hit - share) / heat).to(dlogits.dtype.element_ty),
        mask=real,
    )


def _cut(rows: int, size: int, most: int) -> tuple[int, tuple[int, int]]:
    """Columns of a block, at most so many, and the grid of all blocks of all rows."""
    block = min(most, triton.next_power_of_2(size))
    return block, (rows, triton.cdiv(size, block))


def _warps(size: int) -> int:
    return 4 if size <= 1024 else 8 if size <= 4096 else 16
