"""What a learner remembers of rewards: its own by kind of problem, and everybody's of late.

Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from motley.learning.select import Candidate

NUM_BATCHES = 5  # HACPO's K
LEAST_MEAN = 1e-8  # whoever never succeeds has this much success; none must divide by zero
OWN = ""  # no peer has this name


@dataclass(slots=True)
class Success:
    """The receiver's running mean reward per kind of problem, from its own rollouts."""

    memory: float
    by_kind: dict[str, float] = field(default_factory=dict)

    def update(self, candidates: Sequence[Candidate]) -> None:
        rewards: dict[str, list[float]] = {}
        for candidate in (c for c in candidates if c.own and not c.group.branch):
            rewards.setdefault(candidate.problem.kind, []).extend(
                r.reward for r in candidate.group.rollouts
            )
        for kind, values in rewards.items():
            now = sum(values) / len(values)
            self.by_kind[kind] = self.memory * self.by_kind.get(kind, now) + (1 - self.memory) * now

    def of(self, kind: str) -> float:
        return self.by_kind.get(kind, 0.0)


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
