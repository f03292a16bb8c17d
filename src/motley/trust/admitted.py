"""AdmittedGroups: which groups were admitted already, so that none is admitted twice.

Whatever a log may show, a group is taken in once. Knows names and numbers of groups, nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.records import Group


class GroupPlace(NamedTuple):
    """Where a group belongs. There is one group in a place."""

    sender: str
    round: int
    slot: int

    @staticmethod
    def of(group: Group) -> GroupPlace:
        return GroupPlace(group.origin.peer, group.round, group.slot)


@dataclass(slots=True)
class AdmittedGroups:
    """Remembers whole rounds by their number, and of later rounds every slot.

    With two slots a round, after a.0.0, a.0.1 and a.1.1: `complete` is {a: 1}, and `beyond` holds
    (a, 1, 1).
    """

    num_slots: int  # groups of a peer in a round
    # per sender: every group of the rounds below has been admitted
    complete: Counter[str] = field(default_factory=Counter)
    beyond: set[GroupPlace] = field(default_factory=set)  # admitted of later rounds

    def add(self, group: Group) -> bool:
        """Take in a group, unless it is there; whether it is new."""
        if group in self:
            return False
        place = GroupPlace.of(group)
        self.beyond.add(place)
        while (whole := self._round(place.sender, self.complete[place.sender])) <= self.beyond:
            self.beyond -= whole
            self.complete[place.sender] += 1
        return True

    def __contains__(self, group: Group) -> bool:
        """Whether this very group, or another under its id, was admitted."""
        place = GroupPlace.of(group)
        return place.round < self.complete[place.sender] or place in self.beyond

    def _round(self, sender: str, round: int) -> set[GroupPlace]:
        return {GroupPlace(sender, round, slot) for slot in range(self.num_slots)}
