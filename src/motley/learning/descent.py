"""What every training step shares: Adam, with or without decay, and the loss scale that keeps the
gradients of float16 arithmetic inside float16's range.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

FIRST_SCALE = 2.0**15
GROWS_AFTER = 200  # steps
FUSED = ("cpu", "cuda")


class Optimiser(Protocol):
    """What a learner and a checkpoint ask of one."""

    param_groups: list[dict[str, Any]]
    defaults: dict[str, Any]

    @property
    def state(self) -> Any:
        """By parameter, what it remembers of it."""
        ...

    def zero_grad(self) -> None: ...

    def step(self) -> Any: ...


class OptimiserRules(NamedTuple):
    """What `optimiser_of` is told beside parameters."""

    lr: float
    weight_decay: float


def adam(parameters: Iterable[Tensor], lr: float) -> torch.optim.Adam:
    """In one pass over the values, where torch has it.

    It takes them as they lie in memory, so gradients and moments must lie alike.
    """
    trained = list(parameters)
    return torch.optim.Adam(
        trained,
        lr=lr,
        fused=_fused(trained),
    )


def optimiser_of(parameters: Sequence[Tensor], lr: float, weight_decay: float) -> torch.optim.Adam:
    """Adam; with a decay AdamW, whose decay is not part of the gradient.

    Vectors do not decay: norms and biases are no sizes that could be too large.
    """
    if not weight_decay:
        return adam(parameters, lr)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=lr, fused=_fused(parameters)
    )


def _fused(parameters: Sequence[Tensor]) -> bool | None:
    return all(p.device.type in FUSED and p.is_contiguous() for p in parameters) or None


def descend(optimiser: Optimiser, norm: Tensor) -> None:
    """Step along the gradient, unless its norm is no number.

    A GPU finds that out for itself: nobody waits for it.
    """
    if norm.is_cuda and all(group.get("fused") for group in optimiser.param_groups):
        # where it is 1, torch's fused Adam changes nothing
        cast(Any, optimiser).found_inf = (~norm.isfinite()).float()
    elif not norm.isfinite():
        return
    optimiser.step()


class LossScale:
    """A power of two that losses are multiplied with and gradients divided by; 1, and no other,
    unless the arithmetic is float16.

    Where a gradient does not fit float16 all the same, `shrink` it and take the backward pass
    again. It is not in checkpoints: a resumed run finds it again in a few backward passes, and a
    power of two changes of a gradient only what float16 rounds to zero.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._scales = dtype == torch.float16
        self.value = FIRST_SCALE if self._scales else 1.0
        self._good = 0

    def backward(self, value: Tensor, dloss: Tensor | None = None) -> None:
        """Backward from a loss, or from values with the loss's gradient with respect to them."""
        (value * self.value if self._scales else value).backward(dloss)

    def backward_all(self, values: Sequence[Tensor], dlosses: Sequence[Tensor]) -> None:
        """The same from values of several micro-batches."""
        for value, dloss in zip(values, dlosses, strict=True):
            self.backward(value, dloss)

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Take the scale out of the gradients, and clip them; their norm before that."""
        given = [p.grad for p in parameters if p.grad is not None]
        if self._scales and given:
            torch._foreach_mul_(given, 1 / self.value)
        return clip_grad_norm_(parameters, limit)

    def shrink(self) -> bool:
        """After a gradient that is no number: whether a smaller scale is worth another try."""
        if not self._scales or self.value <= 1:
            return False
        self.value, self._good = self.value / 2, 0
        return True

    def grow(self) -> None:
        """After a step: twice the scale, once so many went well."""
        self._good += 1
        if self._scales and self._good == GROWS_AFTER:
            self.value, self._good = self.value * 2, 0
