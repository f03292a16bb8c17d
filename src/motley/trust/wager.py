"""Wager: money put on a sender's word being wrong, by several bettors at once.

If the word is right no bettor can expect to gain, whenever one looks: the wealth of all of them
together passes 1/alpha with a probability of at most alpha, for ever (Ville's inequality). So a
wealth above that is evidence. Knows numbers only.

A part of the wealth is moved back to every bettor after each bet, so that a sender who begins to
lie after a thousand honest groups is found as well: what honest years cost a bettor is forgotten.
Nothing moves between two wagers. They may be about the same tokens, and what one has won would come
to the other as a stake that knows the outcome.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# What a bettor puts at stake each time. None stakes all: it would be ruined for good.
STAKES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
SHARED = 3e-4  # of the wealth that is dealt out anew after each bet
_LEAST = -700.0  # of a logarithm; exp of it is still a number
_FIRST = np.log(np.array([0.5, *[0.5 / len(STAKES)] * len(STAKES)]))


@dataclass(slots=True)
class Wager:
    """Half of the first wealth stays in the pocket."""

    # of the wealth of each bettor, the pocket first
    logs: Floats = field(default_factory=_FIRST.copy)

    def bet(self, payoffs: Floats) -> None:
        """Settle bets that were open together, one after another.

        A payoff is not negative, and at most 1 on average if the sender's word is right.
        """
        won = np.log1p(np.outer(STAKES, np.minimum(payoffs, 1e300) - 1)).sum(1)
        self.logs[1:] += won
        shared = np.log(SHARED) + self.log_wealth + _FIRST
        self.logs = np.maximum(np.logaddexp(self.logs + np.log1p(-SHARED), shared), _LEAST)

    @property
    def log_wealth(self) -> float:
        """Natural logarithm; 0 at first."""
        return float(np.logaddexp.reduce(self.logs))
