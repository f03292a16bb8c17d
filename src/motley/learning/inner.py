"""Inner steps: several optimiser steps from one batch. Which sequences each takes, when they end,
and how far they came.

Knows no model; how a gradient is made, stepped along and blamed is the learner's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from motley.config import Learning
from motley.learning.batches import MicroBatch, ToScore
from motley.learning.blame import Blame
from motley.learning.descent import LossScale
from motley.learning.notes import Note
from motley.learning.sequences import StepPlan, unscored
from motley.learning.shares import Gradient, Scored
from motley.objectives import Objective


class Part(NamedTuple):
    """What one step of a round takes."""

    todo: list[ToScore]
    # the loss of the part is this many times its share in the loss of the batch: all groups that
    # speak, by those of the part
    factor: float


def inner_parts(plan: StepPlan, rules: Learning, seed: int, version: int) -> list[Part]:
    """Cut a batch into steps by whole groups, in another order in every epoch.

    Of as few steps as `groups_per_step` allows, alike in size; each has its share of what is kept.
    The order is that of a hash of the crew's seed, the version, the epoch and the group: for
    everyone the same, however groups came.
    """
    *taken, kept = plan.by_objective()
    groups: dict[int, list[ToScore]] = {}
    for sequence in chain.from_iterable(taken):
        groups.setdefault(plan.batch.group_B[sequence.row], []).append(sequence)
    num_steps = -(-len(groups) // (rules.groups_per_step or max(1, len(groups))))
    if num_steps < 2:
        return [Part(plan.todo, 1.0)] * (rules.epochs if plan.todo else 0)
    parts = []
    for epoch in range(rules.epochs):
        draws = {
            group: _draw(f"{seed}/{version}/{epoch}/{_family(plan, members)}")
            for group, members in groups.items()
        }
        order = sorted(groups, key=lambda group: draws[group])
        for step, chosen in enumerate(np.array_split(np.array(order), num_steps)):
            todo = [sequence for group in chosen.tolist() for sequence in groups[group]]
            parts.append(Part(todo + kept[step::num_steps], len(groups) / len(chosen)))
    return parts


def _family(plan: StepPlan, members: Sequence[ToScore]) -> str:
    return plan.batch.candidate_B[members[0].row].family


def _draw(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def with_start(plan: StepPlan, scored: Sequence[Scored]) -> StepPlan:
    """The same, with what the round decides by: log-probs of the learner as it begins, and of the
    reference.
    """
    start: dict[int, NDArray[np.float32]] = {}
    for one in scored:
        start |= _by_row(one.micro, one.logp_BT)
    return replace(plan, start=start, ref=_references(scored))


def _references(scored: Sequence[Scored]) -> dict[int, NDArray[np.float32]]:
    ref: dict[int, NDArray[np.float32]] = {}
    for one in scored:
        ref |= {} if one.ref_BT is None else _by_row(one.micro, one.ref_BT)
    return ref


def _by_row(micro: MicroBatch, logp_BT: Tensor) -> dict[int, NDArray[np.float32]]:
    table, lengths = logp_BT.float().cpu().numpy(), micro.mask_BT.sum(1).tolist()
    return {
        row: table[place, :length]
        for place, (row, length) in enumerate(zip(micro.row_B.tolist(), lengths, strict=True))
    }


def settled(plan: StepPlan, objective: Objective, scored: Sequence[Scored]) -> StepPlan:
    """The same, with what the row decides from the learner's log-probs of all that it scores."""
    batches = [unscored(plan, one.micro).known(logp_learner_BT=one.logp_BT) for one in scored]
    terms = objective.settle(plan.terms, batches)
    return replace(plan, terms=terms, ref=_references(scored))


@dataclass(frozen=True, slots=True, kw_only=True)
class InnerReport:
    """What a round's steps came to; docs/metrics.md has the formulas."""

    steps: int = 0
    norm: float = 0.0  # the largest of a gradient
    clipped: float = 0.0
    kl: float = 0.0


class InnerTally:
    """Adds up what steps of a round report."""

    def __init__(self) -> None:
        self.steps = 0
        self.kl = 0.0  # in the newest pass
        self._norm = self._clipped = self._tokens = 0.0

    def look(self, notes: Sequence[Note]) -> None:
        """Before a step is taken."""
        clipped, divergence, tokens = torch.stack([one.moved_K for one in notes]).sum(0).tolist()
        self.kl = divergence / tokens
        self._clipped += clipped
        self._tokens += tokens

    def took(self, norm: float) -> None:
        self.steps += 1
        self._norm = max(self._norm, norm)

    def report(self) -> InnerReport:
        clipped = self._clipped / max(1.0, self._tokens)
        return InnerReport(steps=self.steps, norm=self._norm, clipped=clipped, kl=self.kl)


@dataclass(frozen=True, slots=True)
class Walk:
    """The steps of a round, by the learner's own means."""

    backward: Callable[[StepPlan, Tensor], Gradient]
    descend: Callable[[Tensor], None]
    blame: Callable[[StepPlan, Callable[[str], StepPlan]], Blame]
    scale: LossScale
    tally: InnerTally

    def __call__(
        self, plan: StepPlan, parts: Sequence[Part], scale_S: Tensor, most_kl: float
    ) -> set[str] | None:
        """Who had to be left out on the way; None where the first step is not finite.

        `scale_S`: what to leave of each sender's part, in every step.
        """
        blamed: set[str] = set()
        waiting = [*reversed(parts)]
        while waiting:
            here = replace(plan, todo=waiting[-1].todo, num_taken=self.tally.steps).without(blamed)
            before = self.scale.value
            made = self._finite(here, scale_S * waiting[-1].factor)
            if made is None and not self.tally.steps:
                return None
            if made is None:  # the same once more, without them
                blamed |= {*self.blame(here, here.of).senders}
                self.scale.value = before
                continue
            waiting.pop()
            if not here.todo:
                continue
            self.tally.look(made.notes)
            if 0 < most_kl < self.tally.kl:
                break
            self.descend(made.norm)
            self.scale.grow()
            self.tally.took(float(made.norm))
        return blamed

    def _finite(self, plan: StepPlan, scale_S: Tensor) -> Gradient | None:
        """A gradient at a scale at which float16 holds it; None where it is no number."""
        made = self.backward(plan, scale_S)
        while not made.is_finite and math.isfinite(made.loss) and self.scale.shrink():
            made = self.backward(plan, scale_S)
        return made if made.is_finite else None
