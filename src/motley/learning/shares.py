"""Shares: how hard each sender pulls in a step, and how much of it may be one stranger's.

Measured where a gradient enters the model, at its logits, so that one backward pass through the
model serves all senders. Never waits for a GPU. Knows no sequence and no optimiser.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from motley.learning.batches import MicroBatch
from motley.learning.notes import Note, Overheard


class Scored(NamedTuple):
    """Log-probs of a micro-batch before a round's first step."""

    micro: MicroBatch
    logp_BT: Tensor
    ref_BT: Tensor | None  # of the policy that the peer began with, where a penalty asks for it


class Gradient(NamedTuple):
    """What backward passes over all micro-batches left behind, beside the gradient itself."""

    norm: Tensor
    loss_is_finite: Tensor
    pull_S: Tensor  # of each sender
    scale_S: Tensor  # what may be left of each sender's part
    notes: list[Note]
    heard: list[Overheard]
    scored: list[Scored]  # where nothing was to be learned yet

    @property
    def is_finite(self) -> bool:
        return bool(self.norm.isfinite()) and math.isfinite(self.loss)

    @property
    def loss(self) -> float:
        return sum((float(note.loss) for note in self.notes), 0.0)

    @property
    def step_norm(self) -> Tensor:
        """The norm; no number where the gradient is not to be stepped along."""
        steps = (self.scale_S >= 1).all() & self.loss_is_finite
        return torch.where(steps, self.norm, torch.nan)


class Settled(NamedTuple):
    """A gradient was stepped along."""

    norm: float
    senders: list[tuple[float, float]]  # the pull of each as it came, and what was left of it


class Pulls:
    """Adds up the squared norm of each sender's part of the gradient with respect to the logits.

    Of a token of probability p that norm is |dloss/dlogp| times that of one_hot - softmax, which
    lies between 1 - p and sqrt(2) (1 - p). It is taken as 1 - p: the rest of the softmax is not
    known here.
    """

    def __init__(self, num_senders: int, device: torch.device) -> None:
        self._number_S = torch.arange(num_senders, device=device)
        self._square_S = torch.zeros(num_senders, device=device)

    def add(self, sender_B: Tensor, dloss_BT: Tensor, logp_BT: Tensor, mask_BT: Tensor) -> None:
        pull_BT = dloss_BT * torch.expm1(logp_BT)
        square_B = torch.where(mask_BT, pull_BT.square(), 0.0).sum(1)
        is_of_BS = sender_B[:, None] == self._number_S
        self._square_S += torch.where(is_of_BS, square_B[:, None], 0.0).sum(0)

    @property
    def norm_S(self) -> Tensor:
        return self._square_S.sqrt()


def scales(pull_S: Tensor, stranger_S: Tensor, most: float) -> Tensor:
    """What is left of each sender's gradient, 1 or less: a stranger's pull may be `most` times the
    median of the strangers that speak, or of the own pull if that is more.

    Not of the own alone: whoever has learned its own part hardly has a gradient there, and is to
    learn from others all the same. Of two strangers the median is the smaller; one alone is not
    bounded.
    """
    speaks_S = stranger_S & (pull_S > 0)
    median = torch.where(speaks_S, pull_S, torch.nan).nanmedian()
    own = torch.where(stranger_S, 0.0, pull_S).max()
    # where both are infinite, and where a pull is no number, the norm of the step will tell
    allowed_S = (most * torch.fmax(median, own) / pull_S).nan_to_num(nan=1.0, posinf=1.0)
    return torch.where(speaks_S, allowed_S.clamp(max=1), 1.0)
