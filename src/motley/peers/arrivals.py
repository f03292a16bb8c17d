"""Arrivals: what a peer keeps of groups that the log has, and how it reads these again.

A group whose round is far off is not held at all until then: only where it stands, so that a sender
which sends all its rounds at once takes no memory of its readers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.exchange import Entry, Log
from motley.trust.admitted import GroupPlace

MOST_BETWEEN = 64  # records that are read for nothing rather than asked for anew
MOST_AT_ONCE = 1024  # records in one answer of the log


class Arrival(NamedTuple):
    """When a group that waits came, by this peer's own count."""

    position: int  # in the log
    since: int  # see `Candidate`
    came_s: float


class EarlyGroup(NamedTuple):
    """A group that came long before its round."""

    place: GroupPlace
    arrival: Arrival


@dataclass(slots=True)
class EarlyGroups:
    """Admitted groups of rounds that are far off, left on the log until these are near."""

    _of_round: dict[int, list[EarlyGroup]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[EarlyGroup]:
        for number in sorted(self._of_round):
            yield from self._of_round[number]

    def __len__(self) -> int:
        return sum(map(len, self._of_round.values()))

    def restore(self, groups: Iterable[EarlyGroup]) -> None:
        """Go on from a checkpoint."""
        self._of_round.clear()
        self.add(groups)

    def add(self, groups: Iterable[EarlyGroup]) -> None:
        for group in groups:
            self._of_round.setdefault(group.place.round, []).append(group)

    def near(self, round: int) -> list[Arrival]:
        """Those of a round and before it."""
        return [
            early.arrival
            for number in sorted(self._of_round)
            if number <= round
            for early in self._of_round[number]
        ]

    def forget(self, round: int) -> None:
        """Those of a round and before it are held now."""
        for number in [number for number in self._of_round if number <= round]:
            del self._of_round[number]

    def take_from(self, senders: Collection[str]) -> list[EarlyGroup]:
        """Let go of what is of these senders."""
        gone = [early for early in self if early.place.sender in senders]
        if gone:
            self.restore([early for early in self if early.place.sender not in senders])
        return gone


class EndsEarlyError(ValueError):
    """The log ends before what was read of it: it is another, or a replica that lags behind."""


def read_again(log: Log, positions: Set[int]) -> list[Entry]:
    """The records that stand there, in their order."""
    entries: list[Entry] = []
    for first, last in _stretches(positions):
        after = first - 1
        while after < last:
            read = log.read(after, min(last - after, MOST_AT_ONCE))
            if not read:
                raise EndsEarlyError(
                    f"the log ends before position {last}, which this peer had read; is it "
                    "another log?"
                )
            after = read[-1].position
            # of a log that this peer is sent a part of, what is read may reach beyond the stretch
            entries += [e for e in read if e.position <= last and e.position in positions]
    if len(entries) < len(positions):
        gone = min(positions - {entry.position for entry in entries})
        raise ValueError(
            f"the log has no record at position {gone} any more, where this peer had read one; is "
            "it another log?"
        )
    return entries


def _stretches(positions: Iterable[int]) -> list[tuple[int, int]]:
    """First and last positions of what is read in one go."""
    stretches: list[tuple[int, int]] = []
    for position in sorted(positions):
        if stretches and position - stretches[-1][1] <= MOST_BETWEEN:
            stretches[-1] = (stretches[-1][0], position)
        else:
            stretches.append((position, position))
    return stretches
