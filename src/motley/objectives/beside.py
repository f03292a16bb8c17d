"""What a step makes likelier beside its objective, whatever row the crew learns by.

    loss = -reduce(lambda·w_t·R_t),  R_t = exp(lp_t - sg(lp_t))

Rescued, a peer's success: w_t = 1, or gamma·p_t/(p_t + gamma)^2 where gamma > 0. Kept, an own
success of an earlier step: w_t = 1 where it has become less likely, else 0.

lambda stands as the advantage of such sequences (`Terms.with_lessons`).
"""

from __future__ import annotations

from motley.objectives.importance import Fallen, Uplifting
from motley.objectives.objective import Objective


def rescue_of(row: Objective, gamma: float) -> Objective:
    """The row of rescued sequences: they are reduced like all others of the step."""
    return Objective(weight=Uplifting(gamma=gamma), reduction=row.reduction)


def kept_of(row: Objective) -> Objective:
    """The row of kept sequences: they are reduced like all others of the step."""
    return Objective(weight=Fallen(), reduction=row.reduction)
