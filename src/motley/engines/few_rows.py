"""Products of few rows with weights, by Triton: what decoding takes where few rows are left.

There a step costs what it takes to read the weights, and what each kernel takes to start. So a
product is dealt out to as many programs as keep a GPU's memory busy, by columns and in depth, and
what lies behind it is done with it: gates at once, sums of its parts with the norm that follows.
Where the GPU can, a kernel starts while the one before it ends, and fetches its weights meanwhile.

Owns how such products are dealt out. Knows no layer's order. Sums are in float32 and rounded once,
to the dtype of the rows, as the trainer's are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.language.extra import cuda

from motley.compute.kernels import gate_exponent
from motley.compute.layers import Norm, Projection

# Up to here it pays, measured on an H200 with a model of 1.5B. More of either was not measured.
MOST_ROWS = 64
MOST_BYTES = 1 << 26  # of weights
MOST_SHARED = 200 << 10  # bytes that a program holds in its multiprocessor
SMALLEST_PRODUCT = 16  # rows and columns that tl.dot takes at least


@dataclass(frozen=True, slots=True)
class Cut:
    """How a product is dealt out to programs."""

    columns: int  # of a program
    parts: int  # of the depth, each a program's
    depth: int  # at once
    warps: int
    stages: int
    ahead: int  # of a line, which is fetched before the kernel in front has ended

    @property
    def tile(self) -> int:
        return max(SMALLEST_PRODUCT, triton.next_power_of_2(self.columns))

    @property
    def pieces(self) -> int:
        """Of a line's part that is fetched ahead: a thread each."""
        return min(max(1, 32 * self.warps // self.tile), max(1, self.ahead // 8))


@lru_cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start there before the one in front of it has ended."""
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
        and hasattr(cuda, "gdc_wait")
    )


@lru_cache
def _holds_tiles(device: torch.device) -> bool:
    """Whether a multiprocessor's memory holds what its programs read ahead."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return bool(max_shared_mem(index) >= MOST_SHARED)


def early(device: torch.device, pays: bool = True) -> dict[str, bool]:
    """What a kernel is launched with that calls `follow`."""
    if pays and starts_early(device):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def follow(EARLY: tl.constexpr):
    """Wait until all that came before is done and can be read; then let the next kernel start.

    What was made before the kernel in front of this one may be read without it.
    """
    if EARLY:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


def does(projection: Projection, x_BK: Tensor) -> bool:
    """Whether such a product is made here: of few rows, with one weight in full.

    On GPUs without an early start it was not measured. Off a GPU it is for tests: Triton's
    interpreter multiplies no bfloat16.
    """
    device = x_BK.device
    if device.type == "cuda":
        can = starts_early(device) and _holds_tiles(device) and x_BK.dtype != torch.float32
    else:
        can = x_BK.dtype == torch.float16
    whole = len(projection.weights) == 1 and not projection.in_four_bits
    if not can or not whole or any(projection.adapters) or len(x_BK) > MOST_ROWS:
        return False
    weight = projection.weight
    return (
        weight.dtype == x_BK.dtype
        and weight.is_contiguous()
        and weight.shape[1] % 8 == 0  # a line begins where it can be fetched
        and weight.nbytes <= MOST_BYTES
    )


def product(x_BK: Tensor, projection: Projection) -> Tensor:
    """[B, N], in the dtype of x."""
    width = len(projection.weight)
    out_BN = x_BK.new_empty(len(x_BK), width)
    _run(x_BK, projection, out_BN, width, whole_cut(width, x_BK.device))
    return out_BN


def gated_product(x_BK: Tensor, projection: Projection, activation: str) -> Tensor:
    """act(gate)·up [B, N] where the projection makes gates and then ups."""
    width = len(projection.weight) // 2
    out_BN = x_BK.new_empty(len(x_BK), width)
    cut = gated_cut(width, len(x_BK), x_BK.device)
    _run(x_BK, projection, out_BN, width, cut, activation)
    return out_BN


def parts_of_product(x_BK: Tensor, projection: Projection, cut: Cut | None = None) -> Tensor:
    """Float32 parts [S, B, N] whose sum is the product: `add_norm` adds them up."""
    width, depth = projection.weight.shape
    cut = cut or parted_cut(width, depth, len(x_BK), x_BK.device)
    out_SBN = torch.empty(cut.parts, len(x_BK), width, device=x_BK.device)
    _run(x_BK, projection, out_SBN, width, cut)
    return out_SBN


# These were the quickest of some dozens on an H200, with a model of 1.5B and 4, 32 and 64 rows.


def whole_cut(width: int, device: torch.device) -> Cut:
    """At least 16 columns, and no more programs than a GPU runs at once."""
    columns = 16 * triton.cdiv(width, 16 * 2 * multiprocessors(device))
    return Cut(columns, 1, 128, 4, 5, 512)


def gated_cut(width: int, rows: int, device: torch.device) -> Cut:
    """As many programs as a GPU runs at once: with one more a second round of them would begin."""
    if rows <= 16:
        return Cut(32 if width >= 32 * multiprocessors(device) else 16, 1, 64, 4, 5, 0)
    each = 2 if rows <= 32 else 1  # of a multiprocessor
    columns = triton.cdiv(width, each * multiprocessors(device))
    return Cut(min(max(columns, 16), 128), 1, 64, 4, 5, 0 if rows <= 32 else 512)


def parted_cut(width: int, depth: int, rows: int, device: torch.device) -> Cut:
    """A program for each multiprocessor, but no part so short that starting costs more than it."""
    programs, chunks = multiprocessors(device), triton.cdiv(depth, 128)
    most_parts = max(1, chunks // 3)
    wide = rows <= 32 and triton.cdiv(width, 128) * most_parts >= programs
    columns = 128 if wide else 64
    while columns > 16 and 2 * triton.cdiv(width, columns) * most_parts <= programs:
        columns //= 2
    parts = min(most_parts, max(1, programs // triton.cdiv(width, columns)))
    parts = triton.cdiv(chunks, triton.cdiv(chunks, parts))  # none is left without
    if depth <= 4096:
        return Cut(columns, parts, 128, 4, 3, 512)
    return Cut(columns, parts, 128, 4, 5 if wide else 4, 0 if wide else 512)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 132  # an H200's, for tests
    return torch.cuda.get_device_properties(device).multi_processor_count


def _run(
    x_BK: Tensor, projection: Projection, out: Tensor, width: int, cut: Cut, activation: str = ""
) -> None:
    rows, depth = x_BK.shape
    bias = projection.bias
    chunks = triton.cdiv(depth, cut.depth)
    _product[(triton.cdiv(width, cut.columns), cut.parts)](
        x_BK,
        projection.weight,
        projection.weight if bias is None else bias,
        out,
        rows,
        width,
        depth,
        triton.cdiv(chunks, cut.parts) * cut.depth,
        cut.columns,
        BIAS=bias is not None,
        GATED=activation != "",
        SILU=activation == "silu",
        ROWS=max(SMALLEST_PRODUCT, triton.next_power_of_2(rows)),
        COLUMNS=cut.tile,
        DEPTH=cut.depth,
        AHEAD=cut.ahead,
        PIECES=cut.pieces,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **early(x_BK.device),
    )


@triton.jit
def _product(
    x,
    weight,
    bias,
    out,
    rows,
    width,
    depth,
    depth_each,  # of a part
    columns_each,  # of a program
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    AHEAD: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    part = tl.program_id(1)
    place_c = tl.arange(0, COLUMNS)
    column = tl.program_id(0) * columns_each + place_c
    row = tl.arange(0, ROWS)
    place = tl.arange(0, DEPTH)
    is_row = row < rows
    is_column = (place_c < columns_each) & (column < width)
    begin = part * depth_each
    end = tl.minimum(begin + depth_each, depth)
    line = weight + column.to(tl.int64) * depth
    ups = line + width.to(tl.int64) * depth
    if EARLY and AHEAD > 0:
        till = tl.minimum(end, begin + AHEAD)
        _fetch_lines(weight, column, is_column, depth, begin, till, AHEAD // PIECES, PIECES)
        if GATED:
            _fetch_lines(
                weight, column + width, is_column, depth, begin, till, AHEAD // PIECES, PIECES
            )
    follow(EARLY)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, DEPTH):
        at = start + place
        real = at < end
        x_RK = tl.load(
            x + row[:, None] * depth + at[None, :], mask=is_row[:, None] & real[None, :], other=0.0
        )
        seen = real[:, None] & is_column[None, :]
        weight_KC = tl.load(line[None, :] + at[:, None], mask=seen, other=0.0)
        total = tl.dot(x_RK, weight_KC, total)
        if GATED:
            up_KC = tl.load(ups[None, :] + at[:, None], mask=seen, other=0.0)
            up = tl.dot(x_RK, up_KC, up)
    if BIAS:
        added = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        total += tl.where(part == 0, added, 0.0)[None, :]
        if GATED:
            added = tl.load(bias + width + column, mask=is_column, other=0.0).to(tl.float32)
            up += added[None, :]
    if GATED:
        kind = x.dtype.element_ty
        gate = total.to(kind).to(tl.float32)
        acted = gate * tl.sigmoid(gate_exponent(gate, SILU))
        total = acted.to(kind).to(tl.float32) * up.to(kind).to(tl.float32)
    at_out = out + (part * rows + row)[:, None] * width + column[None, :]
    tl.store(at_out, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _fetch_lines(weight, line, is_line, depth, begin, end, piece, PIECES: tl.constexpr):
    """These lines of the weight from begin to end, by as many threads as there are."""
    at = begin + tl.arange(0, PIECES) * piece
    size = tl.minimum(end - at, piece)
    is_there = is_line[:, None] & (size > 0)[None, :]
    start = weight + line[:, None].to(tl.int64) * depth + at[None, :]
    each = 2 * tl.broadcast_to(size[None, :], start.shape)
    fetch(tl.where(is_there, start, weight), tl.where(is_there, each, 16))


@triton.jit
def fetch(start, size):
    """Into the GPU's cache, so many bytes each: a multiple of 16."""
    tl.inline_asm_elementwise(
        "mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], $2;",
        "=r,l,r",
        [start, size],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def add_norm(
    hidden_BD: Tensor, parts_SBD: Tensor, behind: Norm | None, norm: Norm, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """hidden + the sum of the parts, or + behind(that sum), in float32; and its norm."""
    rows, size = hidden_BD.shape
    sum_BD, normed_BD = torch.empty_like(hidden_BD), hidden_BD.new_empty(rows, size, dtype=dtype)
    _add_norm[(rows,)](
        hidden_BD,
        parts_SBD,
        norm.scale if behind is None else behind.scale,
        norm.scale,
        sum_BD,
        normed_BD,
        rows,
        size,
        0.0 if behind is None else behind.eps,
        norm.eps,
        PARTS=len(parts_SBD),
        BEHIND=behind is not None,
        BLOCK=triton.next_power_of_2(size),
        num_warps=8 if size > 1024 else 4,
        **early(hidden_BD.device),
    )
    return sum_BD, normed_BD


@triton.jit
def _add_norm(
    hidden,
    parts,
    behind,
    scale,
    total,
    normed,
    rows,
    size,
    behind_eps,
    eps,
    PARTS: tl.constexpr,
    BEHIND: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    lane = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    real = place < size
    factor = tl.load(scale + place, mask=real, other=0.0)
    follow(EARLY)
    value = tl.load(hidden + lane * size + place, mask=real, other=0.0)
    added = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        added += tl.load(parts + (part * rows + lane) * size + place, mask=real, other=0.0)
    added = added.to(normed.dtype.element_ty).to(tl.float32)  # as the trainer rounds a product
    if BEHIND:
        inverse = 1.0 / tl.sqrt(tl.sum(added * added, 0) / size + behind_eps)
        added = added * inverse * tl.load(behind + place, mask=real, other=0.0)
    value = value + added
    tl.store(total + lane * size + place, value, mask=real)
    inverse = 1.0 / tl.sqrt(tl.sum(value * value, 0) / size + eps)
    out = value * inverse * factor
    tl.store(normed + lane * size + place, out.to(normed.dtype.element_ty), mask=real)
