"""Room: keys and values of prompts and of rows, and where each row stands.

Those of a row stand in pages. Where there are pages for all, each row has its own in order. Where
there are not, `Pages` hands them out, and rows take turns.

Owns the tensors that an engine's graphs read and write, so graphs live as long as it does. Knows
neither how tokens are computed nor how they are drawn.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from motley.compute.decoder import Decoder
from motley.compute.layers import Rotation
from motley.engines.sampling import PromptIds

# of the rows that must have room at once: fewer are sampled in parts, with fewer prompts at a time
LEAST_SHARE = 1 / 8
PAGE = 32  # tokens of a row whose keys and values stand together; a kernel reads as many at once


def pages_of(tokens: int) -> int:
    """How many so many tokens of a row take."""
    return -(-tokens // PAGE)


class RoomSize(NamedTuple):
    """What there must be room for."""

    prompts: int
    prompt_tokens: int
    rows: int
    tokens: int

    def holds(self, other: RoomSize) -> bool:
        return all(mine >= its for mine, its in zip(self, other, strict=True))

    @property
    def row_pages(self) -> int:
        """Of a row that has all its tokens."""
        return pages_of(self.tokens)

    @property
    def all_pages(self) -> int:
        """So many that no row ever waits for one. A row beyond the others is nobody's."""
        return (self.rows + 1) * self.row_pages

    @property
    def page_tokens(self) -> int:
        return min(PAGE, self.tokens)


def pages_that_fit(
    size: RoomSize, token_bytes: int, expected: float, kept: float, free: float
) -> int:
    """Pages for all rows, or as many as memory holds.

    `expected`: pages of a row at its end. `kept`: bytes that may be kept between calls; more are
    taken of what is `free` only where that is expected not to do.
    """
    page_bytes = size.page_tokens * token_bytes
    prompt_bytes = size.prompts * size.prompt_tokens * token_bytes
    few = min(kept, free)
    wanted = size.rows * expected * page_bytes + prompt_bytes
    most = few if wanted <= few else free
    there = int(min((most - prompt_bytes) / page_bytes, size.all_pages))
    least = min(size.row_pages + 1, size.all_pages)
    if size.rows > 1 and there < max(least, LEAST_SHARE * size.rows * expected):
        raise torch.OutOfMemoryError(
            f"out of memory: {size.prompts} prompts leave room for {max(there, 0)} pages"
        )
    return max(there, least)


class Room:
    """The last row is nobody's: idle lanes work for it. So is the last page."""

    def __init__(
        self,
        size: RoomSize,
        num_pages: int,
        decoder: Decoder,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.size, self.page = size, PAGE
        self.takes_turns = num_pages < size.all_pages
        layers, heads, head_dim = len(decoder.layers), decoder.heads.keys, decoder.heads.size
        rows = size.rows + 1
        empty = partial(torch.empty, device=device)
        self.prompt_L2PHTd = empty(
            layers, 2, size.prompts, heads, size.prompt_tokens, head_dim, dtype=dtype
        )
        self.own_L2GHTd = empty(
            layers, 2, num_pages, heads, size.page_tokens, head_dim, dtype=dtype
        )
        self.page_RJ = torch.full(
            (rows, size.row_pages), num_pages - 1, dtype=torch.int32, device=device
        )
        self.length_P = torch.ones(size.prompts, dtype=torch.int64, device=device)
        self.prompt_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.count_R = torch.ones(rows, dtype=torch.int64, device=device)  # tokens drawn
        self.ended_R = torch.ones(rows, dtype=torch.bool, device=device)
        self.limit_R = torch.zeros(rows, dtype=torch.int64, device=device)  # of its tokens
        self.last_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.uniform_RT = torch.zeros(rows, size.tokens, dtype=torch.float64, device=device)
        self.token_RT = torch.zeros(rows, size.tokens, dtype=torch.int64, device=device)
        self.logp_RT = torch.zeros(rows, size.tokens, device=device)
        with torch.no_grad():
            rotations = decoder.rotations(
                torch.arange(size.prompt_tokens + size.tokens, device=device)
            )
        self.rotations = {
            name: Rotation(cos.contiguous(), sin.contiguous())
            for name, (cos, sin) in rotations.items()
        }

    @property
    def nbytes(self) -> int:
        return self.own_L2GHTd.nbytes + self.prompt_L2PHTd.nbytes

    def place(self, prompts: PromptIds, uniform_BT: Tensor, limit_B: Tensor) -> None:
        """Rows of new prompts, equally many of each, before their first token."""
        device, rows = uniform_BT.device, len(uniform_BT)
        self.length_P[: len(prompts)] = torch.tensor([len(p) for p in prompts], device=device)
        self.prompt_R[:rows] = torch.arange(rows, device=device) // (rows // len(prompts))
        self.limit_R[:rows] = limit_B
        self.uniform_RT[:rows, : uniform_BT.shape[1]] = uniform_BT
        self.begin(slice(rows))

    def hand_out(self, rows: int, tokens: int) -> bool:
        """Give these rows pages for so many tokens each, in order, if there are enough."""
        count = pages_of(tokens)
        if self.takes_turns and rows * count < self.own_L2GHTd.shape[2]:
            device = self.page_RJ.device
            in_order = torch.arange(rows * count, dtype=torch.int32, device=device)
            self.page_RJ[:rows, :count] = in_order.view(rows, count)
            return True
        return not self.takes_turns

    def begin(self, rows: slice | Tensor) -> None:
        """These rows, at their first token, or at it again."""
        self.count_R[rows] = 0
        self.ended_R[rows] = False
