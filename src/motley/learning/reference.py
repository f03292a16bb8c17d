"""Reference: log-probs of the policy that a peer began with, for penalties that pull toward it.

Knows no objective's formula. Where none asks, it holds nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from motley.compute.graphs import Score, scorer
from motley.learning.sequences import StepPlan, Unscored
from motley.models.devices import is_out_of_memory
from motley.models.policy import Policy, frozen_copy


class Reference:
    def __init__(self, policy: Policy, is_needed: bool) -> None:
        """`policy`: as the peer began, before a checkpoint is loaded into it."""
        assert not (is_needed and policy.version), "a reference is the policy before its first step"
        self._score: Score | None = scorer(_copied(policy)) if is_needed else None

    @torch.no_grad()
    def known(self, plan: StepPlan, one: Unscored) -> Unscored:
        """A micro-batch with the reference's log-probs; those that the round knows stay."""
        if self._score is None or plan.ref:
            return one
        ref_BT = one.micro.unpack(self._score(one.micro.packed).logp_M)
        return one._replace(known=partial(one.known, logp_ref_BT=ref_BT))

    def known_all(self, plan: StepPlan, some: Sequence[Unscored]) -> list[Unscored]:
        return [self.known(plan, one) for one in some]


def _copied(policy: Policy) -> Policy:
    try:
        return frozen_copy(policy)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise ValueError(
            'out of memory with a reference (toward = "reference"), which is one more copy of what '
            "trains; train = { lora = { rank = 16 } } for the peer has next to none, or set "
            'toward = "sampler" under [objective]'
        ) from error
