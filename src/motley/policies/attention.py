"""Attention over packed tokens: prompts among themselves, completions over their prompt and
themselves.

By torch's flash kernels where they run (`flash`); elsewhere over padded rows with masks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.policies.merged import Merged
from motley.policies.packed import Packed, Rows, bias_of
from motley.policies.support import runs_flash

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # that the flash kernels take; in eights


class PackedAttention:
    """Attention over one micro-batch. It keeps the masks that layers of one window share."""

    def __init__(self, packed: Packed | Merged) -> None:
        self._packed = packed
        self._biases: dict[int | None, tuple[Tensor | None, ...]] = {}

    def __call__(
        self,
        query_NHd: Tensor,
        key_NHd: Tensor,
        value_NHd: Tensor,
        scaling: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        """Prompts among themselves, causally; completions over their prompt and themselves.

        Back in packed order, [N, H, d].

        `window`: how many positions back a token sees, itself included; None: all.
        """
        packed = self._packed
        if (
            isinstance(packed, Packed)
            and query_NHd.shape[-1] == value_NHd.shape[-1]
            and flashes(value_NHd.dtype, value_NHd.shape[-1], value_NHd.device, packed, window)
        ):
            from motley.policies.flash import attend_by_flash

            query_NHd, key_NHd = (heads.to(value_NHd.dtype) for heads in (query_NHd, key_NHd))
            return attend_by_flash(query_NHd, key_NHd, value_NHd, packed, scaling)
        return self.by_rows(query_NHd, key_NHd, value_NHd, scaling, window)

    def by_rows(
        self,
        query_NHd: Tensor,
        key_NHd: Tensor,
        value_NHd: Tensor,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Over padded rows, with masks."""
        return torch.cat(
            [
                _attend(query_NHd, key_NHd, value_NHd, rows, bias_B1TK, scaling)
                for rows, bias_B1TK in zip(self._packed.rows, self._masks(window), strict=True)
            ]
        )

    def _masks(self, window: int | None) -> tuple[Tensor | None, ...]:
        """Of each part of the rows, made once for each window."""
        if _sees_all(self._packed, window):
            window = None
        if window not in self._biases:
            self._biases[window] = tuple(
                _bias(self._packed, rows, window) for rows in self._packed.rows
            )
        return self._biases[window]


def flashes(
    dtype: torch.dtype, head_dim: int, device: torch.device, packed: Packed, window: int | None
) -> bool:
    """Whether the flash kernels compute this attention."""
    return (
        dtype in HALF
        and head_dim % 8 == 0
        and head_dim <= LARGEST_HEAD
        and _sees_all(packed, window)
        and runs_flash(device)
    )


def _sees_all(packed: Packed | Merged, window: int | None) -> bool:
    return window is None or packed.longest <= window


def _attend(
    query_NHd: Tensor,
    key_NHd: Tensor,
    value_NHd: Tensor,
    rows: Rows,
    bias_B1TK: Tensor | None,
    scaling: float | None,
) -> Tensor:
    mixed_BHTd = F.scaled_dot_product_attention(
        _laid(query_NHd, rows.query_BT),
        _laid(key_NHd, rows.key_BK),
        _laid(value_NHd, rows.key_BK),
        attn_mask=None if bias_B1TK is None else bias_B1TK.to(query_NHd.dtype),
        is_causal=bias_B1TK is None,
        enable_gqa=query_NHd.shape[1] != key_NHd.shape[1],
        scale=scaling,
    )
    return mixed_BHTd.transpose(1, 2).flatten(0, 1).index_select(0, rows.flat)


def _bias(packed: Packed | Merged, rows: Rows, window: int | None) -> Tensor | None:
    if window is None or rows.key_BK.shape[1] <= window:
        return rows.bias_B1TK
    far_BTK = ~_near(packed, rows.query_BT, rows.key_BK, window)
    if rows.bias_B1TK is not None:
        return rows.bias_B1TK.masked_fill(far_BTK[:, None], -torch.inf)
    ahead_TT = torch.ones(far_BTK.shape[1:], dtype=torch.bool, device=far_BTK.device).triu(1)
    return bias_of(~(far_BTK | ahead_TT))


def _near(packed: Packed | Merged, query_BT: Tensor, key_BK: Tensor, window: int) -> Tensor:
    """[B, T, K], True where a key stands less than a window behind the query.

    Padding sees itself, so that no row is empty.
    """
    back_BTK = packed.position_N[query_BT][:, :, None] - packed.position_N[key_BK][:, None]
    return back_BTK < window


def _laid(heads_NHd: Tensor, index_BT: Tensor) -> Tensor:
    """Gather packed heads into [B, H, T, d]."""
    return (
        heads_NHd.index_select(0, index_BT.flatten()).unflatten(0, index_BT.shape).transpose(1, 2)
    )
