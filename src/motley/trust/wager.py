"""Wager: money put on a sender's word being wrong, by several bettors at once.

If the word is right no bettor can expect to gain, whenever one looks: the wealth of all of them
together passes 1/alpha with a probability of at most alpha, for ever (Ville's inequality). So a
wealth above that is evidence. Knows numbers only.

A part of the wealth is moved back to every bettor after each bet, so that a sender who begins to
lie after a thousand honest groups is found as well: what honest years cost a bettor is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# What a bettor puts at stake each time. None stakes all: it would be ruined for good.
STAKES = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
SHARED = 3e-4  # of the wealth that is dealt out anew after each bet
_LEAST = -700.0  # of a logarithm; exp of it is still a number


@dataclass(slots=True)
class Wager:
    """`tables` names what can be bet on. Half of the first wealth stays in the pocket."""

    tables: Sequence[str]
    logs: Floats = field(init=False)  # of the wealth of each bettor, the pocket first

    def __post_init__(self) -> None:
        self.logs = _first(len(self.tables))

    def bet(self, table: str, payoffs: Floats) -> None:
        """Settle bets that were open together, one after another.

        A payoff is not negative, and at most 1 on average if the sender's word is right.
        """
        start = 1 + self.tables.index(table) * len(STAKES)
        won = np.log1p(np.outer(STAKES, np.minimum(payoffs, 1e300) - 1)).sum(1)
        self.logs[start : start + len(STAKES)] += won
        total = self.log_wealth
        shared = np.log(SHARED) + total + _first(len(self.tables))
        self.logs = np.maximum(np.logaddexp(self.logs + np.log1p(-SHARED), shared), _LEAST)

    @property
    def log_wealth(self) -> float:
        """Natural logarithm; 0 at first."""
        return float(np.logaddexp.reduce(self.logs))


def _first(num_tables: int) -> Floats:
    bettors = num_tables * len(STAKES)
    return np.log(np.array([0.5, *[0.5 / bettors] * bettors]))
