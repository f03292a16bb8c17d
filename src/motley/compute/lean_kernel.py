"""A step of AdamW with moments in 8 bits as one Triton kernel: each value is read and written once.

Arithmetic is in float32 whatever the tensors hold. Blocks of values share a scale, their largest
magnitude. A code is the number of a level, a share of that. Levels are even in their logarithm, so
that the level below a value is found without a table. What is rounded becomes one of its two
neighbours by chance, right on average.

A value's dice follow from the seed and its place alone. The kernel runs on CPU tensors too, slowly,
under TRITON_INTERPRET=1: so it is tested where there is no GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCKS_AT_ONCE = 4  # of a program, one for each of its warps


class Rates(NamedTuple):
    """What a step multiplies by; the same for all values of a parameter."""

    first: float  # what a first moment keeps of itself
    second: float
    length: float  # of a step: the learning rate, corrected for moments that began as zeros
    root: float  # the same correction, of a second moment's root
    eps: float
    decay: float


class Coded(NamedTuple):
    """A moment of all values of a parameter."""

    code_N: Tensor  # uint8
    scale_B: Tensor  # float32; the last block may have fewer values
    octaves: int  # that the levels reach down


def step(
    value_N: Tensor,
    gradient_N: Tensor,
    moments: tuple[Coded, Coded],
    rates: Rates,
    *,
    block: int,
    seed: int,
) -> None:
    """Of float32 or bfloat16 values, in place. All that is given lies in a row.

    `block`: values that share a scale. The codes of a first moment are of both signs about a zero;
    those of a second have no zero.
    """
    first, second = moments
    blocks = len(first.scale_B)
    with torch.cuda.device_of(value_N):
        _step[(triton.cdiv(blocks, BLOCKS_AT_ONCE),)](
            value_N,
            gradient_N,
            first.code_N,
            first.scale_B,
            second.code_N,
            second.scale_B,
            len(value_N),
            blocks,
            seed,
            *rates,
            1 - rates.first,
            1 - rates.second,
            OCTAVES_SIGNED=first.octaves,
            OCTAVES=second.octaves,
            ROWS=BLOCKS_AT_ONCE,
            BLOCK=block,
            num_warps=BLOCKS_AT_ONCE,
        )


@triton.jit(do_not_specialize=["blocks", "seed"])
def _step(
    values,
    gradients,
    first_codes,
    first_scales,
    second_codes,
    second_scales,
    size,
    blocks,
    seed,
    first_rate,
    second_rate,
    length,
    root,
    eps,
    decay,
    first_rest,  # 1 - rate, which float32 would round
    second_rest,
    OCTAVES_SIGNED: tl.constexpr,
    OCTAVES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * ROWS
    row = begin + tl.arange(0, ROWS)
    known = row < blocks
    start = begin * BLOCK
    place = tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = place < size - start

    # Past the end stand zeros, and second moments of the lowest level: no block's largest. A scale
    # is written by whoever has heard from all that read it, since a block's largest needs them.
    value = tl.load(values + start + place, mask=real, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + start + place, mask=real, other=0.0).to(tl.float32)
    code = tl.load(first_codes + start + place, mask=real, other=127).to(tl.float32) - 127.0
    first = _signed(code, 127, OCTAVES_SIGNED / 126)
    first *= tl.load(first_scales + row, mask=known, other=0.0)[:, None]
    code = tl.load(second_codes + start + place, mask=real, other=0).to(tl.float32)
    second = _level(code, 255, OCTAVES / 255)
    second *= tl.load(second_scales + row, mask=known, other=0.0)[:, None]

    first = first_rate * first + first_rest * gradient
    second = second_rate * second + second_rest * gradient * gradient
    value -= decay * value
    value -= length * first / (tl.sqrt(second) * root + eps)

    draw, other_draw, noise = _dice(seed, start, ROWS, BLOCK)
    magnitude = tl.abs(first)
    scale = tl.max(magnitude, 1)
    number = _drawn(magnitude, scale[:, None], draw, 127, OCTAVES_SIGNED / 126, True)
    code = 127 + tl.where(first < 0, -number, number)
    tl.store(first_codes + start + place, code.to(tl.uint8), mask=real)
    tl.store(first_scales + row, scale, mask=known)
    scale = tl.max(second, 1)
    code = _drawn(second, scale[:, None], other_draw, 255, OCTAVES / 255, False)
    tl.store(second_codes + start + place, code.to(tl.uint8), mask=real)
    tl.store(second_scales + row, scale, mask=known)

    if values.dtype.element_ty == tl.bfloat16:
        # a bfloat16 is a float32 without its last 16 bits; a random number is added to those
        bits = value.to(tl.uint32, bitcast=True) + noise
        value = (bits & 0xFFFF0000).to(tl.float32, bitcast=True)
    tl.store(values + start + place, value.to(values.dtype.element_ty), mask=real)


@triton.jit
def _dice(seed, start, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """24 bits for either moment, and 16 for the value.

    Philox gives 32 bits to each of four values. Moments begin with different halves of them, and
    the value itself takes what decides least in both.
    """
    quarter = tl.arange(0, ROWS)[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
    a, b, c, d = tl.randint4x(seed, start // 4 + quarter)
    dice = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return dice >> 8, ((dice & 0xFFFF) << 8) | (dice >> 24), ((dice >> 8) & 0xFF00) | (dice & 0xFF)


@triton.jit
def _level(number, TOP: tl.constexpr, STEP: tl.constexpr):
    """The share of the scale that a level is: 1 at the top, and `STEP` octaves apart."""
    return tl.exp2((number - TOP) * STEP)


@triton.jit
def _signed(code, TOP: tl.constexpr, STEP: tl.constexpr):
    """The same of codes of both signs about a zero."""
    share = tl.where(code == 0, 0.0, _level(tl.abs(code), TOP, STEP))
    return tl.where(code < 0, -share, share)


@triton.jit
def _drawn(magnitude, scale, draw, TOP: tl.constexpr, STEP: tl.constexpr, FROM_ZERO: tl.constexpr):
    """The number of one of the two levels beside a magnitude, the nearer the likelier.

    `draw`: 24 random bits. `FROM_ZERO`: whether level 0 is zero. A logarithm that is rounded past a
    level does no harm: the share is then not between the two, and the one it is next to is certain.
    """
    share = magnitude * (1.0 / tl.maximum(scale, 1.1754943508222875e-38))  # float32's least
    least: tl.constexpr = 2.0 ** ((0.5 - TOP) * STEP)  # number 0, as all that is less
    number = (tl.log2(tl.maximum(share, least)) * (1.0 / STEP) + TOP).to(tl.int32)
    level = _level(number.to(tl.float32), TOP, STEP)
    low = tl.where(number > 0, level, 0.0) if FROM_ZERO else level
    width = level * 2.0**STEP - low if FROM_ZERO else level * (2.0**STEP - 1)
    rises = draw.to(tl.float32) * (width * 2.0**-24) < share - low
    return tl.minimum(number + rises.to(tl.int32), TOP)
