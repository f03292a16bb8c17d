"""Memory: own successes of earlier steps, so that a learner can be held to what it could do.

Owns what is remembered and what a step is reminded of. Knows no model, no tensor and no log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from motley.learning.select import Candidate
from motley.learning.success import Success
from motley.records import Rollout

MOST_OF_A_KIND = 256  # rollouts
MOST = 2048  # of all kinds together, each alike
FOREIGN_TO_ONE = 2  # foreign rollouts of a step for each that it is reminded of


class OwnSuccess(NamedTuple):
    """An own success."""

    candidate: Candidate  # its group, without the other rollouts
    number: int  # in the group as it was sampled

    @property
    def rollout(self) -> Rollout:
        return self.candidate.group.rollouts[0]


class RememberedRollout(NamedTuple):
    """Where an own success is, in a checkpoint."""

    position: int  # in the log
    since: int  # see `Candidate`
    came_s: float
    number: int


@dataclass(slots=True)
class Memory:
    """By kind of problem, a part of all own successes so far that a hash has drawn: every one of
    them is as likely in it, the first as the newest.

    `success`: the receiver's own. Whatever beats it is a success.
    `all_kinds`: a step is reminded of each alike, not only of those that are mastered.
    """

    success: Success
    seed: int  # the crew's
    all_kinds: bool = False
    by_kind: dict[str, list[OwnSuccess]] = field(default_factory=dict)

    def remind(self, candidates: Sequence[Candidate], version: int) -> list[OwnSuccess]:
        """What a step from this version is reminded of; its own successes are for later ones."""
        reminders = self.reminders(candidates, version)
        self.take_in(candidates)
        return reminders

    def take_in(self, candidates: Sequence[Candidate]) -> None:
        """Remember the successes of a step, by its own engine alone."""
        for candidate in candidates:
            if candidate.own and not candidate.stranger and not candidate.group.branch:
                self._remember(candidate)
        most = min(MOST_OF_A_KIND, MOST // max(1, len(self.by_kind)))
        for kind, known in self.by_kind.items():
            self.by_kind[kind] = sorted(known, key=lambda one: self._lot("", one))[:most]

    def _remember(self, candidate: Candidate) -> None:
        for number, rollout in enumerate(candidate.group.rollouts):
            if rollout.tokens and self._is_success(candidate.problem.kind, rollout.reward):
                known = self.by_kind.setdefault(candidate.problem.kind, [])
                known.append(_kept(candidate, number))

    def _is_success(self, kind: str, reward: float) -> bool:
        usual = self.success.of(kind)
        return reward > usual or reward == usual > 0

    def reminders(self, candidates: Sequence[Candidate], version: int) -> list[OwnSuccess]:
        """What a step from this version is reminded of: of every kind as much, as far as it is
        mastered, by a lot.

        What would be no success by now is left out.
        """
        count = sum(len(c.group.rollouts) for c in candidates if not c.own) // FOREIGN_TO_ONE
        drawn = {
            kind: sorted(
                (one for one in known if self._is_success(kind, one.rollout.reward)),
                key=lambda one: self._lot(f"{version}/", one),
            )
            for kind, known in sorted(self.by_kind.items())
        }
        turns = [
            (turn, self._lot(f"{version}/", one), one)
            for kind, known in drawn.items()
            for turn, one in enumerate(known[: int(count * self._mastery(kind))])
        ]
        return [one for _, _, one in sorted(turns, key=lambda turn: turn[:2])[:count]]

    def _mastery(self, kind: str) -> float:
        """From 0, where half of a kind or less is solved, to 1, where all of it is.

        Where less is solved own samples differ, and what they say is not to be held up.
        """
        return 1.0 if self.all_kinds else min(1.0, max(0.0, 2 * self.success.of(kind) - 1))

    def _lot(self, what: str, one: OwnSuccess) -> bytes:
        text = f"{self.seed}/{what}{one.candidate.group.id}/{one.number}"
        return hashlib.sha256(text.encode()).digest()

    # For checkpoints

    def state(self) -> list[RememberedRollout]:
        return [
            RememberedRollout(c.position, c.since, c.came_s, number)
            for known in self.by_kind.values()
            for c, number in known
        ]

    def load_state(
        self, state: Sequence[RememberedRollout], candidates: Sequence[Candidate]
    ) -> None:
        """`candidates`: the groups that stand where the state says, in its order."""
        self.by_kind = {}
        for remembered, candidate in zip(state, candidates, strict=True):
            known = self.by_kind.setdefault(candidate.problem.kind, [])
            known.append(_kept(candidate, remembered.number))


def _kept(candidate: Candidate, number: int) -> OwnSuccess:
    group = candidate.group
    alone = msgspec.structs.replace(group, rollouts=(group.rollouts[number],))
    return OwnSuccess(replace(candidate, group=alone), number)
