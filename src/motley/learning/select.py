"""Which admitted groups one step learns from. Plain functions of the waiting groups; no model, no clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from motley.config import Learning
from motley.records import Group, Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """An admitted group, waiting. `arrived` is the receiver's own version when it came: age is counted on that clock."""

    group: Group
    problem: Problem
    own: bool
    family: str  # groups of one family share their statistics: parts of one problem from several authors have the same
    arrived: int
    position: int  # in the log
    hash: bytes = b""  # of the record

    def age(self, version: int) -> int:
        return version - self.arrived


@dataclass(frozen=True, slots=True)
class Selection:
    """`take` trains now, `wait` may train later; what never will is counted in `dropped`, per (sender, reason)."""

    take: list[Candidate]
    wait: list[Candidate]
    dropped: Counter[tuple[str, str]]


def select(waiting: Sequence[Candidate], rules: Learning, version: int, most: int) -> Selection:
    """Take at most `most` families: fresh ones, oldest first, within the quota of each sender and the share kept for own groups.

    With `stale = "drop"` groups older than the window are dropped. With "pace" none is: the sampler half waits instead.
    """
    dropped: Counter[tuple[str, str]] = Counter()
    fresh = []
    completed: dict[str, int] = {}
    for candidate in waiting:
        completed[candidate.family] = max(candidate.arrived, completed.get(candidate.family, candidate.arrived))
    for candidate in waiting:
        # A family is as old as its newest part: it could not be used before that.
        if rules.stale == "drop" and version - completed[candidate.family] > rules.max_age:
            dropped[candidate.group.origin.peer, "stale"] += 1
        else:
            fresh.append(candidate)
    own = [c for c in fresh if c.own]
    foreign = _within_quota([c for c in fresh if not c.own], rules.quota)
    if rules.own_share:
        foreign = foreign[: _foreign_room(len(own), most, rules.own_share)]
    allowed = {id(c) for c in own + foreign}
    take = _first_families([c for c in fresh if id(c) in allowed], most)
    taken = {id(c) for c in take}
    return Selection(take, [c for c in fresh if id(c) not in taken], dropped)


def _first_families(candidates: list[Candidate], most: int) -> list[Candidate]:
    """Parts of one group are taken together or not at all."""
    families = list(dict.fromkeys(c.family for c in candidates))
    taken = set(families[:most])
    return [c for c in candidates if c.family in taken]


def _within_quota(foreign: list[Candidate], quota: int) -> list[Candidate]:
    if not quota:
        return foreign
    taken: Counter[str] = Counter()
    kept = []
    for candidate in foreign:
        taken[candidate.group.origin.peer] += 1
        if taken[candidate.group.origin.peer] <= quota:
            kept.append(candidate)
    return kept


def _foreign_room(num_own: int, most: int, own_share: float) -> int:
    """How many foreign groups fit so that own groups are at least their share of the step."""
    own = min(num_own, most)
    return min(most - math.ceil(own_share * most - 1e-9), int(own * (1 - own_share) / own_share + 1e-9))
