"""What every training step shares: the optimiser, with or without decay, and the loss scale that
keeps the gradients of float16 arithmetic inside float16's range.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from motley.config import Optimizer
from motley.learning.lean import BLOCK, LeanAdam

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Upkeep:
    """How an optimiser keeps what it remembers."""

    kind: Optimizer = "adamw"
    offload: bool = False  # in the CPU's memory
    seed: int = 0  # of what is rounded by chance


def optimiser_of(
    parameters: Sequence[Tensor], lr: float, weight_decay: float, upkeep: Upkeep = Upkeep()
) -> torch.optim.Optimizer:
    """Adam; with a decay AdamW, whose decay is not part of the gradient.

    Vectors do not decay: norms and biases are no sizes that could be too large.
    """
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if upkeep.kind == "adafactor":
        return torch.optim.Adafactor(groups, lr=lr)
    in_8_bits = upkeep.kind == "adamw8bit"
    if in_8_bits or upkeep.offload or any(p.dtype != torch.float32 for p in parameters):
        return LeanAdam(groups, lr, in_8_bits=in_8_bits, offload=upkeep.offload, seed=upkeep.seed)
    if not weight_decay:
        return adam(parameters, lr)
    return torch.optim.AdamW(groups, lr=lr, fused=_fused(parameters))


def moment_bytes(shapes: Iterable[tuple[int, ...]], upkeep: Upkeep) -> int:
    """What an optimiser remembers of values of these shapes, on their device."""
    if upkeep.offload:
        return 0
    each = {"adamw": _two_full, "adamw8bit": _two_codes, "adafactor": _rows_and_columns}
    return sum(each[upkeep.kind](shape) for shape in shapes)


def _two_full(shape: tuple[int, ...]) -> int:
    return 8 * math.prod(shape)


def _two_codes(shape: tuple[int, ...]) -> int:
    return 2 * (math.prod(shape) + 4 * -(-math.prod(shape) // BLOCK))


def _rows_and_columns(shape: tuple[int, ...]) -> int:
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * math.prod(shape[:-2]) * (shape[-2] + shape[-1])


def kind_of(optimiser: Optimiser) -> Optimizer:
    """What a crew file calls it."""
    if isinstance(optimiser, torch.optim.Adafactor):
        return "adafactor"
    return "adamw8bit" if isinstance(optimiser, LeanAdam) and optimiser.in_8_bits else "adamw"


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
