"""What a learner remembers of rewards: everybody's by kind of problem, and everybody's of late.

Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from motley.learning.select import Candidate

NUM_BATCHES = 5  # HACPO's K
LEAST_MEAN = 1e-8  # whoever never succeeds has this much success; none must divide by zero
OWN = ""  # no peer has this name


@dataclass(slots=True)
class Success:
    """Running mean rewards per kind of problem: the receiver's own, and each sender's."""

    memory: float
    by_kind: dict[str, float] = field(default_factory=dict)
    of_others: dict[str, dict[str, float]] = field(default_factory=dict)  # by sender, then kind

    def update(self, candidates: Sequence[Candidate]) -> None:
        rewards: dict[tuple[str, str], list[float]] = {}
        for candidate in (c for c in candidates if not c.group.branch):
            rewards.setdefault((_sender(candidate), candidate.problem.kind), []).extend(
                r.reward for r in candidate.group.rollouts
            )
        for (sender, kind), values in rewards.items():
            means = self.by_kind if sender == OWN else self.of_others.setdefault(sender, {})
            now = sum(values) / len(values)
            means[kind] = self.memory * means.get(kind, now) + (1 - self.memory) * now

    def restore(self, own: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> None:
        self.by_kind = dict(own)
        self.of_others = {sender: dict(means) for sender, means in others.items()}

    def of(self, kind: str) -> float:
        return self.by_kind.get(kind, 0.0)

    def lead(self, candidate: Candidate) -> float:
        """How much better its sender is at this kind, as a share of what the sender has: 0 to 1."""
        kind, own = candidate.problem.kind, self.of(candidate.problem.kind)
        theirs = self.of_others.get(_sender(candidate), {}).get(kind, own)
        if theirs <= own:
            return 0.0
        return min(1.0, (theirs - own) / theirs) if theirs > 0 else 1.0


@dataclass(slots=True)
class Skills:
    """Mean rewards of everyone's newest batches: by sender, and all own ones together."""

    means: dict[str, list[float]] = field(default_factory=dict)  # oldest first

    def update(self, candidates: Sequence[Candidate]) -> None:
        """A sender's batch is what this step takes of it."""
        rewards: dict[str, list[float]] = {}
        for candidate in (c for c in candidates if not c.group.branch):
            rewards.setdefault(_sender(candidate), []).extend(
                r.reward for r in candidate.group.rollouts
            )
        for sender, values in rewards.items():
            newest = [*self.means.get(sender, []), sum(values) / len(values)]
            self.means[sender] = newest[-NUM_BATCHES:]

    def of(self, candidate: Candidate) -> float:
        """The skill of its sender as a multiple of the own; 1 where either is not known."""
        theirs, own = self.means.get(_sender(candidate)), self.means.get(OWN)
        return _skill(theirs) / _skill(own) if theirs and own else 1.0


def _sender(candidate: Candidate) -> str:
    return OWN if candidate.own else candidate.group.origin.peer


def _skill(means: Sequence[float]) -> float:
    return max(LEAST_MEAN, sum(means) / len(means))
