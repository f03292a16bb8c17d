"""Shares: how much of a step's gradient is whose, and how much of it may be one stranger's.

Adds up gradients sender by sender, with one buffer beside the gradients themselves, and measures
each. Never waits for a GPU. Knows no sequence and no optimiser.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from motley.learning.notes import Note, Overheard


class Gradient(NamedTuple):
    """What backward passes over all micro-batches left behind, beside the gradient itself.

    A part is the gradient of one sender, or of all of them where they were not told apart.
    """

    norm: Tensor  # of the sum of the parts
    senders: list[list[int]]  # of each part
    norm_S: Tensor  # of each part
    scale_S: Tensor  # what may be left of each part
    loss_S: Tensor  # of each part
    notes: list[Note]
    heard: list[Overheard]

    @property
    def loss(self) -> float:
        return sum((float(note.loss) for note in self.notes), 0.0)

    @property
    def step_norm(self) -> Tensor:
        """The norm; no number where the gradient is not to be stepped along."""
        steps = (self.scale_S >= 1).all() & self.loss_S.isfinite().all()
        return torch.where(steps, self.norm, torch.nan)

    def by_sender(self, value_S: Tensor) -> dict[int, float]:
        """Values of the parts, where they are one sender's."""
        return {
            senders[0]: value
            for senders, value in zip(self.senders, value_S.tolist(), strict=True)
            if len(senders) == 1
        }


class Settled(NamedTuple):
    """A gradient was stepped along."""

    norm: float
    norm_of: dict[int, float]  # of each sender's part, as it came
    scale_of: dict[int, float]  # what was left of it


class GradientSum:
    """Takes one sender's gradient after the other from where backward passes leave them.

    `lent`: the tensors there are someone else's and will be used again.
    """

    def __init__(self, parameters: Sequence[Tensor], lent: bool) -> None:
        self._parameters, self._lent = parameters, lent
        self._sums: dict[int, Tensor] = {}  # by place among the parameters
        self.norms: list[Tensor] = []

    def take(self) -> None:
        """Add what the parameters hold, and leave them without a gradient."""
        given = {i: p.grad for i, p in enumerate(self._parameters) if p.grad is not None}
        self.norms.append(get_total_norm(given.values()))
        known = [i for i in given if i in self._sums]
        if known:
            torch._foreach_add_([self._sums[i] for i in known], [given[i] for i in known])
        for i in given.keys() - self._sums.keys():
            self._sums[i] = given[i].clone() if self._lent else given[i]
        for parameter in self._parameters:
            parameter.grad = None

    def give(self) -> None:
        """Leave the sum where an optimiser looks for it."""
        for i, total in self._sums.items():
            self._parameters[i].grad = total


def scales(norm_S: Tensor, stranger_S: Tensor, most: float) -> Tensor:
    """What is left of each sender's gradient, 1 or less: a stranger's norm may be `most` times the
    median of the strangers that speak, or of the own norm if that is more.

    Not of the own alone: whoever has learned its own part hardly has a gradient there, and is to
    learn from others all the same. Of two strangers the median is the smaller; one alone is not
    bounded.
    """
    speaks_S = stranger_S & (norm_S > 0)
    median = torch.where(speaks_S, norm_S, torch.nan).nanmedian()
    ordinary = torch.maximum(median, torch.where(stranger_S, 0.0, norm_S).max())
    return torch.where(speaks_S, (most * ordinary / norm_S).clamp(max=1), 1.0)
