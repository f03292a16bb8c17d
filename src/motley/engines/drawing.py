"""Drawing the next token of rows by Triton kernels, and writing it down in their room.

Owns which token a random number stands for, and what a row keeps of it. Knows neither the model
that made the logits nor graphs. Sums are in float32. `sampling.draw` says the same by torch's own
means, and tests hold both together.

The kernels run on CPU tensors too, slowly, under TRITON_INTERPRET=1: so they are tested where there
is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from motley.engines.room import Room
from motley.records import Sampling

# A lane's logits are read in blocks, by a program each: one program for all of them takes its time
# however idle the GPU is.
LOGITS_OF_A_BLOCK = 2048
LOGITS_AT_ONCE = 4096  # where one program reads all of a lane's, block after block
CUTS = 26  # halvings of the interval of a row's logits: as fine as float32 tells them apart


def draw(
    room: Room,
    logits_RV: Tensor,
    source_B: Tensor,
    row_B: Tensor,
    sampling: Sampling,
    is_end_V: Tensor,
) -> None:
    """Draw as `sampling.draw`, but of equally likely tokens at a truncation's edge all stay. Then
    write down what was drawn.

    Lane b draws for row `row_B[b]` from logits `source_B[b]`, by the row's random number of place
    `count_R[row]`, or its last. Of a row that has ended only `last_R` changes, so many lanes may
    work for one that has.
    """
    lanes, size = len(source_B), logits_RV.shape[1]
    block = min(LOGITS_OF_A_BLOCK, triton.next_power_of_2(size))
    blocks = triton.cdiv(size, block)
    sharpness = 1.0 / (sampling.temperature or 1.0)
    truncated = sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)
    least_B = torch.empty(lanes, device=logits_RV.device)
    if truncated:
        _find_least(logits_RV, source_B, sampling, sharpness, least_B)
    # of each block: the largest logit, and sums of exponentials of what stays and what does not
    highest_BK, weight_BK, cut_BK = torch.empty(3, lanes, blocks, device=logits_RV.device)
    given = (logits_RV, source_B, least_B, highest_BK, weight_BK, cut_BK)
    how = {"TRUNCATED": truncated, "FULL": sampling.logprobs == "full", "BLOCK": block}
    _weigh[(lanes, blocks)](*given, size, sharpness, **how, num_warps=4)
    _pick[(lanes,)](
        *given,
        row_B,
        room.uniform_RT,
        is_end_V,
        room.token_RT,
        room.logp_RT,
        room.last_R,
        room.count_R,
        room.limit_R,
        room.ended_R,
        size,
        room.size.tokens,
        sharpness,
        GREEDY=sampling.temperature == 0,
        BLOCKS=triton.next_power_of_2(blocks),
        **how,
        num_warps=4,
    )


def _find_least(
    logits_RV: Tensor, source_B: Tensor, sampling: Sampling, sharpness: float, least_B: Tensor
) -> None:
    size = logits_RV.shape[1]
    _least[(len(source_B),)](
        logits_RV,
        source_B,
        least_B,
        size,
        sharpness,
        sampling.top_k or size,
        sampling.top_p,
        CUTS=CUTS,
        BLOCK=min(LOGITS_AT_ONCE, triton.next_power_of_2(size)),
        num_warps=8,
    )


@triton.jit
def _least(
    logits, source, leasts, size, sharpness, top_k, top_p, CUTS: tl.constexpr, BLOCK: tl.constexpr
):
    """The least logit that stays: at least the top k, and of those the fewest with probability
    top_p. Found by halving an interval.
    """
    lane = tl.program_id(0)
    line = logits + tl.load(source + lane).to(tl.int64) * size
    place = tl.arange(0, BLOCK)
    highest = -1.0e30
    lowest = 1.0e30
    for start in range(0, size, BLOCK):
        value = tl.load(line + start + place, mask=start + place < size, other=-float("inf"))
        highest = tl.maximum(highest, tl.max(value, 0))
        lowest = tl.minimum(lowest, tl.min(tl.where(value > -1.0e30, value, 1.0e30), 0))
    least = lowest
    above = highest
    for _ in range(CUTS if top_k < size else 0):
        middle = (least + above) * 0.5
        counted = tl.zeros([BLOCK], tl.int32)  # summed once: threads wait for it
        for start in range(0, size, BLOCK):
            value = tl.load(line + start + place, mask=start + place < size, other=-float("inf"))
            counted += (value >= middle).to(tl.int32)
        count = tl.sum(counted, 0)
        least = tl.where(count >= top_k, middle, least)
        above = tl.where(count >= top_k, above, middle)
    weighed = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        value = tl.load(line + start + place, mask=start + place < size, other=-float("inf"))
        weighed += tl.where(value >= least, tl.exp((value - highest) * sharpness), 0.0)
    kept = tl.sum(weighed, 0)
    above = highest
    for _ in range(CUTS if top_p < 1.0 else 0):
        middle = (least + above) * 0.5
        weighed = tl.zeros([BLOCK], tl.float32)
        for start in range(0, size, BLOCK):
            value = tl.load(line + start + place, mask=start + place < size, other=-float("inf"))
            weighed += tl.where(value >= middle, tl.exp((value - highest) * sharpness), 0.0)
        enough = tl.sum(weighed, 0) >= top_p * kept
        least = tl.where(enough, middle, least)
        above = tl.where(enough, above, middle)
    tl.store(leasts + lane, least)


@triton.jit
def _weigh(
    logits,
    source,
    leasts,
    highests,
    weights,
    cuts,
    size,
    sharpness,
    TRUNCATED: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of a lane's logits: the largest, and sums of exponentials that begin at it."""
    lane = tl.program_id(0)
    block = tl.program_id(1)
    line = logits + tl.load(source + lane).to(tl.int64) * size
    least = tl.load(leasts + lane) if TRUNCATED else -float("inf")
    place = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(line + place, mask=place < size, other=-float("inf"))
    highest = tl.maximum(tl.max(value, 0), -1.0e30)
    chance = tl.exp((value - highest) * sharpness)
    at_block = lane * tl.num_programs(1) + block
    tl.store(highests + at_block, highest)
    tl.store(weights + at_block, tl.sum(tl.where(value >= least, chance, 0.0), 0))
    if TRUNCATED and FULL:
        tl.store(cuts + at_block, tl.sum(tl.where(value >= least, 0.0, chance), 0))


@triton.jit
def _pick(
    logits,
    source,
    leasts,
    highests,
    weights,
    cuts,
    rows,
    uniform,
    is_end,
    tokens,
    logps,
    last,
    counts,
    limits,
    ended,
    size,
    row_tokens,
    sharpness,
    GREEDY: tl.constexpr,
    TRUNCATED: tl.constexpr,
    FULL: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """The token of one lane: the block that holds it, by what all weigh, then one look at that."""
    lane = tl.program_id(0)
    row = tl.load(rows + lane)
    count = tl.load(counts + row)
    limit = tl.load(limits + row)
    goes_on = tl.load(ended + row) == 0
    at = row * row_tokens + tl.minimum(count, row_tokens - 1)
    line = logits + tl.load(source + lane).to(tl.int64) * size
    least = tl.load(leasts + lane) if TRUNCATED else -float("inf")
    place = tl.arange(0, BLOCK)
    number = tl.arange(0, BLOCKS)
    blocks = tl.cdiv(size, BLOCK)
    real = number < blocks
    highest = tl.load(highests + lane * blocks + number, mask=real, other=-1.0e30)
    weight = tl.load(weights + lane * blocks + number, mask=real, other=0.0)
    top = tl.max(highest, 0)
    weight = weight * tl.exp((highest - top) * sharpness)
    total = tl.sum(weight, 0)
    if GREEDY:
        chosen = tl.min(tl.where(highest == top, number, BLOCKS - 1), 0)
    else:
        target = tl.load(uniform + at).to(tl.float32) * total
        chosen = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
        chosen = tl.minimum(chosen, tl.max(tl.where(weight > 0, number, 0), 0))
    value = tl.load(
        line + chosen * BLOCK + place, mask=chosen * BLOCK + place < size, other=-float("inf")
    )
    if GREEDY:
        index = tl.min(tl.where(value == top, place, BLOCK), 0)
        index = tl.where(index < BLOCK, index, 0)  # if no numbers
    else:
        chance = tl.where(value >= least, tl.exp((value - top) * sharpness), 0.0)
        before = tl.sum(tl.where(number < chosen, weight, 0.0), 0)
        index = tl.sum((before + tl.cumsum(chance, 0) <= target).to(tl.int32), 0)
        index = tl.minimum(index, tl.max(tl.where(chance > 0, place, 0), 0))
    token = chosen * BLOCK + index
    if TRUNCATED and FULL:
        cut = tl.load(cuts + lane * blocks + number, mask=real, other=0.0)
        total += tl.sum(cut * tl.exp((highest - top) * sharpness), 0)
    logp = (tl.load(line + token) - top) * sharpness - tl.log(total)
    tl.store(last + row, token.to(tl.int64))
    tl.store(tokens + at, token.to(tl.int64), mask=goes_on)
    tl.store(logps + at, logp, mask=goes_on)
    tl.store(counts + row, count + 1, mask=goes_on)
    ends = (count + 1 >= limit) | (tl.load(is_end + token) != 0)
    tl.store(ended + row, ends, mask=goes_on)
