"""AdmittedGroups: which groups were admitted already, so that none is admitted twice.

Whatever a log may show, a group is taken in once. One that was refused is passed over: an id is
written once, so it will not come again. Knows names and numbers of groups, nothing else.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.records import Group

MOST_BEYOND = 2**14  # groups of one sender that are remembered one by one
MOST_BRANCHES = 1024  # the same of continuations
MOST_SPARSE = 1024  # the same of a sender that is heard in some rounds only


class GroupPlace(NamedTuple):
    """Where a group belongs. There is one group in a place."""

    sender: str
    round: int
    slot: int

    @staticmethod
    def of(group: Group) -> GroupPlace:
        return GroupPlace(group.origin.peer, group.round, group.slot)

    @staticmethod
    def read(id: str) -> GroupPlace | None:
        """The place of a group by the id of its record, tagged or not; None of other records."""
        sender, *numbers = id.split(".")
        if len(numbers) < 2 or not all(n.isascii() and n.isdigit() for n in numbers[:2]):
            return None
        return GroupPlace(sender, int(numbers[0]), int(numbers[1]))


@dataclass(slots=True)
class AdmittedGroups:
    """Remembers whole rounds by their number, and of later rounds every slot.

    Slots behind those of problems are of continuations, of which a round may have any number: of
    each sender the newest are remembered, and older ones are taken for admitted.

    With two slots a round, after a.0.0, a.0.1 and a.1.1: `complete` is {a: 1}, and `beyond` holds
    (a, 1, 1). Of a sender that leaves rounds out for ever, the older half of what is beyond is in
    time taken for whole. Of a sender that is heard in some rounds only no round is whole by number:
    its newest groups are remembered as continuations are.
    """

    num_slots: int  # groups of a peer in a round
    is_always_heard: Callable[[str], bool] = lambda sender: True
    # per sender: every group of the rounds below has been admitted or passed over, or is too late
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
        return self.pass_over(GroupPlace.of(group))

    def pass_over(self, place: GroupPlace) -> bool:
        """Take a place for filled; whether that is news."""
        if self._has(place):
            return False
        if place.slot >= self.num_slots:
            _add_newest(self._branches[place.sender], place, MOST_BRANCHES)
            return True
        beyond = self._beyond[place.sender]
        if not self.is_always_heard(place.sender):
            _add_newest(beyond, place, MOST_SPARSE)
            return True
        beyond.add(place)
        if len(beyond) > MOST_BEYOND:
            self._take_for_whole(place.sender)
        while len(beyond) >= self.num_slots and self._is_there(place.sender, beyond):
            beyond -= self._round(place.sender, self.complete[place.sender])
            self.complete[place.sender] += 1
        return True

    def refuse(self, id: str, signed: bool) -> None:
        """A record does not count. If its sender signed it, no other comes in its place."""
        if signed and (place := GroupPlace.read(id)):
            self.pass_over(place)

    def __contains__(self, group: Group) -> bool:
        """Whether this very group, or another under its id, was admitted."""
        return self._has(GroupPlace.of(group))

    def is_whole(self, sender: str, round: int) -> bool:
        """Whether nothing of a sender's round is to come any more."""
        return all(map(self._has, self._round(sender, round)))

    def has_branches(self, sender: str, round: int, count: int) -> bool:
        """Whether the continuations of a sender's round came, of which there are so many."""
        slots = range(self.num_slots, self.num_slots + count)
        return all(self._has(GroupPlace(sender, round, slot)) for slot in slots)

    def _has(self, place: GroupPlace) -> bool:
        if place.slot >= self.num_slots:
            return _has_newest(self._branches[place.sender], place, MOST_BRANCHES)
        beyond = self._beyond[place.sender]
        if not self.is_always_heard(place.sender):
            return _has_newest(beyond, place, MOST_SPARSE)
        return place.round < self.complete[place.sender] or place in beyond

    def _is_there(self, sender: str, beyond: set[GroupPlace]) -> bool:
        """Whether the first round that was not whole is so now."""
        return self._round(sender, self.complete[sender]) <= beyond

    def _round(self, sender: str, round: int) -> set[GroupPlace]:
        return {GroupPlace(sender, round, slot) for slot in range(self.num_slots)}

    def _take_for_whole(self, sender: str) -> None:
        """Give up the rounds that the older half of what is beyond lies behind."""
        beyond = self._beyond[sender]
        middle = sorted(beyond)[len(beyond) // 2].round
        self.complete[sender] = middle
        beyond.difference_update([place for place in beyond if place.round < middle])


def _add_newest(places: set[GroupPlace], place: GroupPlace, most: int) -> None:
    """Remember a place, and of more than so many only the newest."""
    places.add(place)
    if len(places) > most:
        places.remove(min(places))


def _has_newest(places: set[GroupPlace], place: GroupPlace, most: int) -> bool:
    """Whether a place is there, or older than what is remembered."""
    return place in places or (len(places) == most and place < min(places))
