"""Rescue: a likelihood step on a peer's success, beside whatever row the crew learns by.

    loss = -reduce(lambda·w_t·R_t),  R_t = exp(lp_t - sg(lp_t))
    w_t = 1, or gamma·p_t/(p_t + gamma)^2 where gamma > 0

lambda stands as the advantage of such sequences (`Terms.with_lessons`), which are foreign ones.
"""

from __future__ import annotations

from motley.objectives.importance import Uplifting
from motley.objectives.objective import Objective


def rescue_of(row: Objective, gamma: float) -> Objective:
    """The row of rescued sequences: they are reduced like all others of the step."""
    return Objective(weight=Uplifting(gamma=gamma), reduction=row.reduction)
