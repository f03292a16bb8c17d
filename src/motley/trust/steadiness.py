"""Steadiness: whether a reward that differs is a sender's doing, or the reward function's.

A reader that finds another reward than the sender claims computes one of its own groups anew. If
that differs too, nobody lies: the function gives another number each time, every peer would refuse
every other, and no round could go on. Own groups only: a stranger could make an answer whose reward
is never the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from motley.records import Group, Problem, Rollout

REWARD_TOLERANCE = 1e-5  # relative above 1: rewards travel as float32
# reasons for which a group is refused that is right but for its rewards
UNLIKE = frozenset({"reward", "unscorable"})  # which another machine, or another time, may explain
FOR_REWARDS = UNLIKE | {"undecided"}

Score = Callable[[Problem, Sequence[Rollout]], list[float]]


class UnsteadyRewardError(ValueError):
    """Rewards of this crew cannot be computed again."""


class Differing(NamedTuple):
    """A rollout whose reward comes out differently."""

    number: int  # in its group
    rollout: Rollout
    right: float  # as it was computed here


def first_differing(rollouts: Sequence[Rollout], rights: Sequence[float]) -> Differing | None:
    """The first rollout that claims another reward. One that is no number could not be found."""
    for number, (rollout, right) in enumerate(zip(rollouts, rights, strict=True)):
        away = abs(rollout.reward - right)
        if not math.isnan(right) and not away <= REWARD_TOLERANCE * max(1.0, abs(right)):
            return Differing(number, rollout, right)
    return None


@dataclass(slots=True)
class Steadiness:
    score: Score  # computes anew, whatever is remembered
    shown: Callable[[Rollout], str]
    _own: tuple[Problem, Group] | None = None  # the newest, until it was computed anew
    _blame: Callable[[], None] | None = None  # what to say of others, if own rewards are steady

    def own(self, problem: Problem, group: Group) -> None:
        """A group of this reader's own, with the rewards that it found."""
        self._own = (problem, group)
        self._ask()

    def doubt(self, blame: Callable[[], None]) -> None:
        """A reward of somebody else's differs. An error if this reader's own do, too.

        `blame`: called if they do not, once there is one to ask.
        """
        self._blame = self._blame or blame
        self._ask()

    def _ask(self) -> None:
        if self._blame is None or self._own is None:
            return
        (problem, group), blame = self._own, self._blame
        self._own = self._blame = None
        differing = first_differing(group.rollouts, self.score(problem, group.rollouts))
        if differing:
            raise UnsteadyRewardError(
                f"the reward function gives another number each time: {differing.rollout.reward}, "
                f"then {differing.right}, for {self.shown(differing.rollout)}. Peers compute each "
                "other's rewards again, and would refuse every group; set crew.check_rewards = "
                "false to take rewards on trust, or make the function steady. The run can be "
                "resumed with either"
            )
        blame()
