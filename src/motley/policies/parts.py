"""The norm and the rotation of a layer with their gradients written out.

Autograd would make many more passes over memory. Knows no layer and no model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    """x / rms(x) · scale, over the last dimension."""
    y: Tensor = _RmsNorm.apply(x, scale, eps)
    return y


def rotate(heads_NHd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
    """Rotary position embedding: of halves (x1, x2), (x1·cos - x2·sin, x2·cos + x1·sin)."""
    rotated_NHd: Tensor = _Rotate.apply(heads_NHd, cos_N1d, sin_N1d)
    return rotated_NHd


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        per_rms = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True)
            .square_()
            .div_(x.shape[-1])
            .add_(eps)
            .rsqrt_()
        )
        ctx.save_for_backward(x, scale, per_rms)
        return (x * per_rms).mul_(scale)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale, per_rms = ctx.saved_tensors
        normed = x * per_rms
        along = dy * normed
        mean = (along @ scale).div_(x.shape[-1]).unsqueeze_(-1)
        dscale = along.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return (
            torch.mul(dy, scale, out=along).addcmul_(normed, mean, value=-1).mul_(per_rms),
            dscale,
            None,
        )


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads_NHd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor) -> Tensor:
        ctx.save_for_backward(cos_N1d, sin_N1d)
        return _turned(heads_NHd, cos_N1d, sin_N1d, 1)

    @staticmethod
    def backward(ctx: Any, drotated_NHd: Tensor) -> tuple[Tensor, None, None]:
        cos_N1d, sin_N1d = ctx.saved_tensors
        return _turned(drotated_NHd, cos_N1d, sin_N1d, -1), None, None


def _turned(heads_NHd: Tensor, cos_N1d: Tensor, sin_N1d: Tensor, direction: int) -> Tensor:
    half = heads_NHd.shape[-1] // 2
    sin = sin_N1d[..., :half]
    turned_NHd = heads_NHd * cos_N1d
    turned_NHd[..., :half].addcmul_(heads_NHd[..., half:], sin, value=-direction)
    turned_NHd[..., half:].addcmul_(heads_NHd[..., :half], sin, value=direction)
    return turned_NHd
