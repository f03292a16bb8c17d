"""AdmittedGroups: which groups were admitted already, so that none is admitted twice.

Whatever a log may show, a group is taken in once. Knows names and numbers of groups, nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.records import Group

MOST_BEYOND = 2**14  # groups of one sender that are remembered one by one
MOST_BRANCHES = 1024  # the same of continuations


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

    Slots behind those of problems are of continuations, of which a round may have any number: of
    each sender the newest are remembered, and older ones are taken for admitted.

    With two slots a round, after a.0.0, a.0.1 and a.1.1: `complete` is {a: 1}, and `beyond` holds
    (a, 1, 1). Of a sender that leaves rounds out for ever, the older half of what is beyond is in
    time taken for whole.
    """

    num_slots: int  # groups of a peer in a round
    # per sender: every group of the rounds below has been admitted, or comes too late
    complete: Counter[str] = field(default_factory=Counter)
    _beyond: defaultdict[str, set[GroupPlace]] = field(default_factory=lambda: defaultdict(set))
    _branches: defaultdict[str, set[GroupPlace]] = field(default_factory=lambda: defaultdict(set))

    @property
    def beyond(self) -> set[GroupPlace]:
        """What was admitted of later rounds, and of continuations."""
        kept = (*self._beyond.values(), *self._branches.values())
        return {place for places in kept for place in places}

    def restore(self, complete: Mapping[str, int], beyond: Iterable[GroupPlace]) -> None:
        """Go on from a checkpoint."""
        self.complete = Counter(complete)
        self._beyond.clear()
        self._branches.clear()
        for place in beyond:
            held = self._branches if place.slot >= self.num_slots else self._beyond
            held[place.sender].add(place)

    def add(self, group: Group) -> bool:
        """Take in a group, unless it is there; whether it is new."""
        if group in self:
            return False
        place = GroupPlace.of(group)
        if place.slot >= self.num_slots:
            self._add_branch(place)
            return True
        beyond = self._beyond[place.sender]
        beyond.add(place)
        if len(beyond) > MOST_BEYOND:
            self._take_for_whole(place.sender)
        while (whole := self._round(place.sender, self.complete[place.sender])) <= beyond:
            beyond -= whole
            self.complete[place.sender] += 1
        return True

    def __contains__(self, group: Group) -> bool:
        """Whether this very group, or another under its id, was admitted."""
        place = GroupPlace.of(group)
        if place.slot >= self.num_slots:
            branches = self._branches[place.sender]
            is_old = len(branches) == MOST_BRANCHES and place < min(branches)
            return is_old or place in branches
        return place.round < self.complete[place.sender] or place in self._beyond[place.sender]

    def _add_branch(self, place: GroupPlace) -> None:
        branches = self._branches[place.sender]
        branches.add(place)
        if len(branches) > MOST_BRANCHES:
            branches.remove(min(branches))

    def _round(self, sender: str, round: int) -> set[GroupPlace]:
        return {GroupPlace(sender, round, slot) for slot in range(self.num_slots)}

    def _take_for_whole(self, sender: str) -> None:
        """Give up the rounds that the older half of what is beyond lies behind."""
        beyond = self._beyond[sender]
        middle = sorted(beyond)[len(beyond) // 2].round
        self.complete[sender] = middle
        beyond.difference_update([place for place in beyond if place.round < middle])
