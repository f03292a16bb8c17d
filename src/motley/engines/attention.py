"""Attention that only decoding needs: of one new token of each row, over kept keys and values.

Owns its Triton kernels, and what it keeps of the new token. Knows neither how logits come of it nor
how tokens are drawn. Sums and softmaxes are in float32.

The kernels run on CPU tensors too, slowly, under TRITON_INTERPRET=1: so they are tested where there
is no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from motley.compute.layers import Layer
from motley.engines.few_rows import SMALLEST_PRODUCT, early, follow, multiprocessors
from motley.engines.room import Room

# One program reads a row's keys block after block, which takes its time however idle the GPU is. So
# several share them, as long as a multiprocessor holds all of its programs at once. The larger a
# key, the more a program has on its way. Of 4, 7 and 14 with keys of 256 bytes four were the
# quickest on an H200; others were not measured.
HELD_BYTES = 1024  # of one key of each
MOST_STAGED = 512  # bytes of a key: shared memory holds no more of larger ones
LEAST_KEYS = 128  # of a share, before there is another; half as many where programs are few
FEW_PROGRAMS = 32
MOST_SHARES = 16
MOST_EARLY = 32  # lanes with which it starts early; with more that brings nothing
FACTS = tl.constexpr(8)  # numbers of a lane, of which five are used: one piece of memory has all


def look_up(row_B: Tensor, room: Room) -> Tensor:
    """[B, FACTS], int32: what each lane works for, once for all layers of a step.

    That is its row, the place of the row's newest token, the row's prompt, how long that is, and
    whether the row has ended. Lane b works for row `row_B[b]`, whose newest token is number
    `count_R[row]`, the first being 1.
    """
    fact_BF = torch.empty(len(row_B), FACTS.value, dtype=torch.int32, device=row_B.device)
    _look_up[(len(row_B),)](
        row_B, room.count_R, room.ended_R, room.prompt_R, room.length_P, fact_BF, num_warps=1
    )
    return fact_BF


@triton.jit
def _look_up(rows, counts, ended, prompt_of, lengths, facts):
    lane = tl.program_id(0)
    row = tl.load(rows + lane)
    prompt = tl.load(prompt_of + row)
    fact = facts + lane * FACTS
    tl.store(fact, row.to(tl.int32))
    tl.store(fact + 1, tl.load(counts + row).to(tl.int32) - 1)
    tl.store(fact + 2, prompt.to(tl.int32))
    tl.store(fact + 3, tl.load(lengths + prompt).to(tl.int32))
    tl.store(fact + 4, tl.load(ended + row).to(tl.int32))


def attend(qkv_BE: Tensor, fact_BF: Tensor, layer: Layer, room: Room) -> Tensor:
    """Rotate the new queries and keys, keep the new keys and values, and attend over the prompt's
    and the row's own, which stand in pages.

    `fact_BF`: what `look_up` says of the lanes. It may be read before the kernel in front has
    ended, so that one must not be `look_up`. Where lanes are few, several programs share a row's
    keys. For a row that has ended no kept key is read: nobody looks at what comes of it.
    """
    prompt_2PHTd, own_2GHTd = room.prompt_L2PHTd[layer.index], room.own_L2GHTd[layer.index]
    kv_heads, head_dim = prompt_2PHTd.shape[2], prompt_2PHTd.shape[4]
    heads = qkv_BE.shape[1] // head_dim - 2 * kv_heads
    cos_Td, sin_Td = room.rotations[layer.rotation]
    out_BHd = qkv_BE.new_empty(len(qkv_BE), heads, head_dim)
    longest = room.size.prompt_tokens + room.size.tokens
    if layer.window is not None:  # which begins and ends within a block
        longest = min(longest, layer.window + room.page)
    programs, key_bytes = len(qkv_BE) * kv_heads, qkv_BE.element_size() * head_dim
    shares = num_shares(programs, longest, key_bytes, qkv_BE.device)
    found = _place_for(shares, out_BHd)
    _attend[(len(qkv_BE), kv_heads, shares)](
        qkv_BE,
        out_BHd,
        *found,
        prompt_2PHTd,
        own_2GHTd,
        room.page_RJ,
        fact_BF,
        cos_Td,
        sin_Td,
        cos_Td if layer.query_norm is None else layer.query_norm.weight,
        cos_Td if layer.key_norm is None else layer.key_norm.weight,
        prompt_2PHTd.stride(0),
        prompt_2PHTd.shape[3],
        own_2GHTd.stride(0),
        own_2GHTd.shape[3],
        room.page_RJ.shape[1],
        layer.scaling,
        2**30 if layer.window is None else layer.window,
        0.0 if layer.query_norm is None else layer.query_norm.eps,
        shares,
        _least_blocks(programs, room.page),
        HEADS=heads,
        KV_HEADS=kv_heads,
        SIZE=head_dim,
        NORMED=layer.query_norm is not None,
        GROUP=max(SMALLEST_PRODUCT, triton.next_power_of_2(heads // kv_heads)),
        BLOCK=max(SMALLEST_PRODUCT, triton.next_power_of_2(head_dim)),
        KEYS=room.page,
        TURNS=room.takes_turns,
        SHARED=shares > 1,
        num_warps=1,
        num_stages=_stages(key_bytes, room.takes_turns),
        **early(qkv_BE.device, len(qkv_BE) <= MOST_EARLY),
    )
    if shares > 1:
        _join_shares(*found, out_BHd)
    return out_BHd.flatten(1)


def _least_blocks(programs: int, page: int) -> int:
    return max(1, LEAST_KEYS // (2 if programs <= FEW_PROGRAMS else 1) // page)


def _stages(key_bytes: int, takes_turns: bool) -> int:
    """So that two blocks are on their way while one is computed with, where shared memory holds
    them. Looking a page up takes two stages more.
    """
    if key_bytes > MOST_STAGED:
        return 1
    return 5 if takes_turns else 3


def num_shares(programs: int, longest: int, key_bytes: int, device: torch.device) -> int:
    """Into how many the keys of a row are dealt out, where so many programs would read all of a
    row's, of which there are at most `longest`.
    """
    held = max(1, HELD_BYTES // key_bytes) * multiprocessors(device)
    return max(1, min(held // programs, longest // LEAST_KEYS, MOST_SHARES))


def _place_for(shares: int, out_BHd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What each share finds: the highest score [B, H, S], the weight [B, H, S] and the mixed values
    [B, H, S, d], which one of no weight leaves as they are. One share needs none of it.
    """
    if shares == 1:
        return out_BHd, out_BHd, out_BHd
    lanes, heads, head_dim = out_BHd.shape
    mixed_BHSd = out_BHd.new_empty(lanes, heads, shares, head_dim, dtype=torch.float32)
    highest_BHS, weight_BHS = mixed_BHSd.new_empty(2, lanes, heads, shares)
    return highest_BHS, weight_BHS, mixed_BHSd


def _join_shares(
    highest_BHS: Tensor, weight_BHS: Tensor, mixed_BHSd: Tensor, out_BHd: Tensor
) -> None:
    lanes, heads, shares, head_dim = mixed_BHSd.shape
    _join[(lanes, heads)](
        highest_BHS,
        weight_BHS,
        mixed_BHSd,
        out_BHd,
        shares,
        SIZE=head_dim,
        SHARES=triton.next_power_of_2(shares),
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
        **early(out_BHd.device, len(out_BHd) <= MOST_EARLY),
    )


@triton.jit(do_not_specialize=["shares", "least"])
def _attend(
    qkv,
    out,
    highests,
    weights,
    mixes,
    prompts,
    own,
    pages,
    facts,
    cosines,
    sines,
    query_scale,
    key_scale,
    prompt_values,  # from a key to its value
    prompt_room,
    own_values,
    page_room,
    row_pages,
    scaling,
    window,
    eps,
    shares,
    least,  # blocks of a share
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    TURNS: tl.constexpr,  # whether pages are where the table says, and not in order
    SHARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    share = tl.program_id(2)
    # Looked up long before the kernel in front, so it is read without waiting.
    fact = facts + lane * FACTS
    row = tl.load(fact).to(tl.int64)
    newest = tl.load(fact + 1)
    prompt = tl.load(fact + 2).to(tl.int64)
    length = tl.load(fact + 3)
    has_ended = tl.load(fact + 4) != 0
    position = length + newest
    # Blocks of what is seen: of the prompt from `oldest` on, then of the row's own, by pages.
    oldest = tl.maximum(position + 1 - window, 0)
    own_oldest = tl.maximum(oldest - length, 0)
    own_begin = own_oldest // KEYS * KEYS
    prompt_blocks = tl.cdiv(tl.maximum(length - oldest, 0), KEYS)
    blocks = prompt_blocks + tl.cdiv(tl.maximum(newest - own_begin, 0), KEYS)
    blocks = tl.where(has_ended, 0, blocks)
    each = tl.maximum(tl.cdiv(blocks, shares), least) if SHARED else blocks
    since = share * each
    till = tl.minimum(since + each, blocks)
    prompt_keys = prompts + ((prompt * KV_HEADS + head) * prompt_room + oldest) * SIZE
    follow(EARLY)
    member = tl.arange(0, GROUP)
    in_group = member < HEADS // KV_HEADS
    at_head = lane * HEADS + head * (HEADS // KV_HEADS) + member
    if SHARED:
        at_share = at_head * shares + share
        if (share > 0) & (since >= till):  # nothing is left for it
            tl.store(highests + at_share, tl.full([GROUP], -1.0e30, tl.float32), mask=in_group)
            tl.store(weights + at_share, tl.zeros([GROUP], tl.float32), mask=in_group)
            return

    query, key, value = _new_token(
        qkv + lane * (HEADS + 2 * KV_HEADS) * SIZE,
        head,
        cosines + position * SIZE,
        sines + position * SIZE,
        query_scale,
        key_scale,
        eps,
        HEADS,
        KV_HEADS,
        SIZE,
        NORMED,
        GROUP,
        BLOCK,
    )
    place = tl.arange(0, BLOCK)
    real = place < SIZE
    is_member = in_group[:, None] & real[None, :]
    page = row * row_pages + newest // KEYS
    if TURNS:
        page = tl.load(pages + page).to(tl.int64)
    at_new = own + ((page * KV_HEADS + head) * page_room + newest % KEYS) * SIZE + place
    if share == 0:
        tl.store(at_new, key, mask=real)
        tl.store(at_new + own_values, value, mask=real)

    # A softmax that begins with the new key alone, or in a later share with none, and takes in the
    # others by blocks. Its exponentials are powers of two.
    sharpness = scaling * 1.4426950408889634
    first = tl.where(share == 0, 1.0, 0.0)
    highest = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * sharpness
    highest = tl.where(share == 0, highest, -1.0e30)
    weight = tl.zeros([GROUP], tl.float32) + first
    mixed = tl.zeros([GROUP, BLOCK], tl.float32) + value.to(tl.float32)[None, :] * first
    number = tl.arange(0, KEYS)
    at = number.to(tl.int64) * SIZE
    for block in range(since, till):
        is_prompt = block < prompt_blocks
        own_block = block - prompt_blocks
        start = tl.where(is_prompt, oldest + block * KEYS, own_begin + own_block * KEYS)
        page = row * row_pages + own_begin // KEYS + own_block
        if TURNS:
            page = tl.load(pages + page, mask=own_block >= 0, other=0).to(tl.int64)
        keys = tl.where(
            is_prompt,
            prompt_keys + block * KEYS * SIZE,
            own + (page * KV_HEADS + head) * page_room * SIZE,
        )
        values = keys + tl.where(is_prompt, prompt_values, own_values)
        seen = start + number >= tl.where(is_prompt, oldest, own_oldest)
        seen &= start + number < tl.where(is_prompt, length, newest)
        key_DK = tl.load(
            keys + at[None, :] + place[:, None], mask=seen[None, :] & real[:, None], other=0.0
        )
        value_KD = tl.load(
            values + at[:, None] + place[None, :], mask=seen[:, None] & real[None, :], other=0.0
        )
        score = tl.where(
            seen[None, :], tl.dot(query, key_DK, input_precision="ieee") * sharpness, -1.0e30
        )
        higher = tl.maximum(highest, tl.max(score, 1))
        chance = tl.exp2(score - higher[:, None])
        faded = tl.exp2(highest - higher)
        weight = weight * faded + tl.sum(chance, 1)
        mixed = mixed * faded[:, None] + tl.dot(
            chance.to(value_KD.dtype), value_KD, input_precision="ieee"
        )
        highest = higher

    at_out = out + at_head[:, None] * SIZE + place[None, :]
    if not SHARED:
        tl.store(at_out, (mixed / weight[:, None]).to(out.dtype.element_ty), mask=is_member)
    else:
        tl.store(highests + at_share, highest, mask=in_group)
        tl.store(weights + at_share, weight, mask=in_group)
        tl.store(mixes + at_share[:, None] * SIZE + place[None, :], mixed, mask=is_member)


@triton.jit
def _new_token(
    line,
    head,
    cosines,
    sines,
    query_scale,
    key_scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The queries of a group of heads and their key, normed and rotated, and their value, of the
    token whose projections begin at `line`.

    Rotation as x·cos + swap(x)·sin, where swap exchanges the halves and the first half of sin is
    negative.
    """
    member = tl.arange(0, GROUP)
    place = tl.arange(0, BLOCK)
    real = place < SIZE
    swap = tl.where(place < SIZE // 2, place + SIZE // 2, place - SIZE // 2)
    cos = tl.load(cosines + place, mask=real, other=0.0)
    sin = tl.load(sines + place, mask=real, other=0.0)
    sin = tl.where(place < SIZE // 2, -sin, sin)

    is_member = (member < HEADS // KV_HEADS)[:, None] & real[None, :]
    at_query = line + (head * (HEADS // KV_HEADS) + member)[:, None] * SIZE
    query = tl.load(at_query + place[None, :], mask=is_member, other=0.0).to(tl.float32)
    query_swapped = tl.load(at_query + swap[None, :], mask=is_member, other=0.0).to(tl.float32)
    at_key = line + (HEADS + head) * SIZE
    key = tl.load(at_key + place, mask=real, other=0.0).to(tl.float32)
    key_swapped = tl.load(at_key + swap, mask=real, other=0.0).to(tl.float32)
    value = tl.load(line + (HEADS + KV_HEADS + head) * SIZE + place, mask=real, other=0.0)
    if NORMED:
        query_rms = 1.0 / tl.sqrt(tl.sum(query * query, 1) / SIZE + eps)[:, None]
        query = query * query_rms * tl.load(query_scale + place, mask=real, other=0.0)[None, :]
        query_swapped = (
            query_swapped * query_rms * tl.load(query_scale + swap, mask=real, other=0.0)[None, :]
        )
        key_rms = 1.0 / tl.sqrt(tl.sum(key * key, 0) / SIZE + eps)
        key = key * key_rms * tl.load(key_scale + place, mask=real, other=0.0)
        key_swapped = key_swapped * key_rms * tl.load(key_scale + swap, mask=real, other=0.0)
    kind = line.dtype.element_ty
    query = (query * cos[None, :] + query_swapped * sin[None, :]).to(kind)
    return query, (key * cos + key_swapped * sin).to(kind), value


@triton.jit(do_not_specialize=["shares"])
def _join(
    highests,
    weights,
    mixes,
    out,
    shares,
    SIZE: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One head of one lane: what its shares found, as one softmax."""
    follow(EARLY)
    at_head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    share = tl.arange(0, SHARES)
    at_share = at_head * shares + share
    place = tl.arange(0, BLOCK)
    real = place < SIZE
    highest = tl.load(highests + at_share, mask=share < shares, other=-1.0e30)
    found = tl.load(weights + at_share, mask=share < shares, other=0.0)
    mixed = tl.load(
        mixes + at_share[:, None] * SIZE + place[None, :],
        mask=(share < shares)[:, None] & real[None, :],
        other=0.0,
    )
    faded = tl.exp2(highest - tl.max(highest, 0))
    mixed = tl.where((found != 0.0)[:, None], mixed, 0.0)  # of no weight: not written
    weight = tl.sum(found * faded, 0)
    joined = tl.sum(mixed * faded[:, None], 0) / weight
    tl.store(out + at_head * SIZE + place, joined.to(out.dtype.element_ty), mask=real)
