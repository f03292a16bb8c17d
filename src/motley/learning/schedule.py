"""Schedule: the learning rate of a round. A function of how many versions there are, and of nothing
that a checkpoint would have to hold.
"""

from __future__ import annotations

import math

from motley.config import Learning


def lr_at(rules: Learning, lr: float, rounds: int, version: int) -> float:
    """The rate of the step that makes version + 1, of a run of so many rounds.

    Over the first `warmup_rounds` it rises in equal steps to `lr`. From there to the last round it
    falls toward final_lr·lr, which the round behind the last would have.
    """
    if version < rules.warmup_rounds:
        return lr * (version + 1) / rules.warmup_rounds
    if rules.schedule == "constant":
        return lr
    passed = (version - rules.warmup_rounds) / max(1, rounds - rules.warmup_rounds)
    left = _LEFT[rules.schedule](min(1.0, passed))
    return lr * (rules.final_lr + (1 - rules.final_lr) * left)


_LEFT = {
    "linear": lambda passed: 1 - passed,
    "cosine": lambda passed: (1 + math.cos(math.pi * passed)) / 2,
}
