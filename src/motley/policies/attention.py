"""Attention over packed tokens: prompts among themselves, completions over their prompt and themselves.

By torch's flash kernels where they run (`flash`); elsewhere over padded rows with masks.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from motley.policies.hardware import runs_flash
from motley.policies.packed import Packed

HALF = (torch.float16, torch.bfloat16)
LARGEST_HEAD = 256  # that the flash kernels take; in eights


def attend(
    query_NHd: Tensor,
    key_NHd: Tensor,
    value_NHd: Tensor,
    packed: Packed,
    scaling: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Prompts among themselves, causally; completions over their prompt and themselves. Back in packed order, [N, H, d].

    `window`: how many positions back a token sees, itself included; None: all.
    """
    if query_NHd.shape[-1] == value_NHd.shape[-1] and flashes(value_NHd.dtype, value_NHd.shape[-1], value_NHd.device, packed, window):
        from motley.policies.flash import attend_by_flash

        return attend_by_flash(query_NHd.to(value_NHd.dtype), key_NHd.to(value_NHd.dtype), value_NHd, packed, scaling)
    return attend_by_rows(query_NHd, key_NHd, value_NHd, packed, scaling, None if _sees_all(packed, window) else window)


def flashes(dtype: torch.dtype, head_dim: int, device: torch.device, packed: Packed, window: int | None) -> bool:
    """Whether the flash kernels compute this attention."""
    return dtype in HALF and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD and _sees_all(packed, window) and runs_flash(device)


def _sees_all(packed: Packed, window: int | None) -> bool:
    return window is None or packed.longest <= window


def attend_by_rows(
    query_NHd: Tensor, key_NHd: Tensor, value_NHd: Tensor, packed: Packed, scaling: float | None, window: int | None
) -> Tensor:
    grouped = query_NHd.shape[1] != key_NHd.shape[1]
    rows = packed.rows
    prompts = rows.prompt_PT
    near_PTT = None if window is None or prompts.shape[1] <= window else _near(packed, prompts, prompts, window)
    if near_PTT is not None:
        near_PTT = near_PTT & torch.ones(prompts.shape[1], prompts.shape[1], dtype=torch.bool, device=prompts.device).tril()
    mixed = F.scaled_dot_product_attention(
        _rows(query_NHd, prompts),
        _rows(key_NHd, prompts),
        _rows(value_NHd, prompts),
        attn_mask=None if near_PTT is None else near_PTT[:, None],
        is_causal=near_PTT is None,
        enable_gqa=grouped,
        scale=scaling,
    )
    outputs = [mixed.transpose(1, 2).flatten(0, 1).index_select(0, rows.prompt_flat)]
    if rows.row_BT.shape[1]:
        visible = rows.visible_B1TK
        if window is not None and rows.key_BK.shape[1] > window:
            visible = visible & _near(packed, rows.row_BT, rows.key_BK, window)[:, None]
        mixed = F.scaled_dot_product_attention(
            _rows(query_NHd, rows.row_BT),
            _rows(key_NHd, rows.key_BK),
            _rows(value_NHd, rows.key_BK),
            attn_mask=visible,
            enable_gqa=grouped,
            scale=scaling,
        )
        outputs.append(mixed.transpose(1, 2).flatten(0, 1).index_select(0, rows.row_flat))
    return torch.cat(outputs)


def _near(packed: Packed, query_BT: Tensor, key_BK: Tensor, window: int) -> Tensor:
    """[B, T, K], True where a key stands less than a window behind the query. Padding sees itself, so that no row is empty."""
    back_BTK = packed.position_N[query_BT][:, :, None] - packed.position_N[key_BK][:, None]
    return back_BTK < window


def _rows(heads_NHd: Tensor, index_BT: Tensor) -> Tensor:
    """Gather packed heads into [B, H, T, d]."""
    return heads_NHd.index_select(0, index_BT.flatten()).unflatten(0, index_BT.shape).transpose(1, 2)
