"""Meetings: problems that all peers answer, and what comes of those the receiver failed and a peer
solved.

Owns what a success and a failure is, and what is remembered where the two are steps apart. Which
groups a step takes is not decided here. Knows no model and no log.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from motley.learning.select import Candidate

MOST_REMEMBERED = 1024  # problems; the newest
ROUNDING = 1e-6  # relative above 1: rewards travel as float32


class Attempt(NamedTuple):
    """How the receiver's own group on a problem came out."""

    problem: str
    round: int  # of the group
    slot: int
    version: int  # from which the step was taken that saw it
    solved: bool


class Solved(NamedTuple):
    """A foreign group with a success on a problem."""

    candidate: Candidate
    version: int


class Lesson(NamedTuple):
    """A peer's success on a problem that the receiver failed."""

    candidate: Candidate
    number: int  # of the rollout in its group
    attempt: Attempt

    @property
    def sender(self) -> str:
        return self.candidate.group.origin.peer

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.candidate.group.rollouts[self.number].tokens


class RememberedSolution(NamedTuple):
    """Where the group of a success is, in a checkpoint."""

    position: int  # in the log
    since: int  # see `Candidate`
    came_s: float
    version: int


class MeetingsState(msgspec.Struct, frozen=True, kw_only=True):
    """In a checkpoint. Groups are read again from the log."""

    attempts: list[Attempt] = []
    successes: list[RememberedSolution] = []


@dataclass(frozen=True, slots=True)
class Met:
    """What a step's groups showed."""

    problems: int  # met problems of which an own group was taken
    failed: int  # of them, without an own success
    lessons: list[Lesson]


@dataclass(slots=True)
class Meetings:
    """`window`: versions for which the one half of a meeting waits for the other."""

    num_met: int  # slots of a round that everyone has
    least_success: float
    seed: int  # the crew's
    window: int = 0
    _attempts: dict[str, Attempt] = field(default_factory=dict)  # by problem, oldest first
    _successes: dict[str, list[Solved]] = field(default_factory=dict)

    def meet(self, taken: Sequence[Candidate], version: int) -> Met:
        """Take in the groups of a step from this version, and give the lessons that are due.

        Nothing comes of a problem of which an own rollout is a success. A lesson is given once.
        """
        met = [c for c in taken if c.group.slot < self.num_met]
        attempts = self._attempted([c for c in met if c.own], version)
        for candidate in met:
            if not candidate.own and self.successes_of(candidate):
                others = self._successes.setdefault(candidate.problem.id, [])
                others.append(Solved(candidate, version))
        lessons = [
            self._lesson(attempt, self._successes.pop(problem))
            for problem, attempt in list(self._attempts.items())
            if not attempt.solved and problem in self._successes
        ]
        for lesson in lessons:
            del self._attempts[lesson.attempt.problem]
        self._forget(version)
        return Met(len(attempts), sum(not a.solved for a in attempts), lessons)

    def successes_of(self, candidate: Candidate) -> list[int]:
        """The numbers of its rollouts that are successes, and have tokens to learn."""
        return [
            number
            for number, rollout in enumerate(candidate.group.rollouts)
            if rollout.tokens
            and rollout.reward >= self.least_success - ROUNDING * max(1.0, abs(self.least_success))
        ]

    def leave_out(self, senders: Iterable[str]) -> None:
        """Forget what these sent."""
        gone = set(senders)
        kept = {
            problem: [s for s in successes if s.candidate.group.origin.peer not in gone]
            for problem, successes in self._successes.items()
        }
        self._successes = {problem: successes for problem, successes in kept.items() if successes}

    def _attempted(self, own: Sequence[Candidate], version: int) -> list[Attempt]:
        """One attempt for each problem, solved where any of its groups has a success."""
        attempts: dict[str, Attempt] = {}
        for c in own:
            problem = c.problem.id
            before = attempts.get(problem)
            solved = bool(self.successes_of(c)) or (before is not None and before.solved)
            attempts[problem] = Attempt(problem, c.group.round, c.group.slot, version, solved)
        for problem, attempt in attempts.items():
            self._attempts.pop(problem, None)  # the newest come last
            self._attempts[problem] = attempt
        return list(attempts.values())

    def _lesson(self, attempt: Attempt, successes: Sequence[Solved]) -> Lesson:
        """One success, by a lot: first among the senders, so that nobody gains by many."""
        lot = lambda what: hashlib.sha256(f"{self.seed}/{attempt.problem}/{what}".encode()).digest()
        candidate = min(
            (s.candidate for s in successes), key=lambda c: (lot(c.group.origin.peer), c.group.id)
        )
        number = min(self.successes_of(candidate), key=lambda n: lot(f"{candidate.group.id}/{n}"))
        return Lesson(candidate, number, attempt)

    def _forget(self, version: int) -> None:
        """Let go of what has waited for the window, and of the oldest beyond the limit."""
        oldest = version - self.window
        attempts = [a for a in self._attempts.values() if a.version > oldest]
        successes = {
            problem: fresh
            for problem, ones in self._successes.items()
            if (fresh := [s for s in ones if s.version > oldest])
        }
        self._attempts = {a.problem: a for a in attempts[-MOST_REMEMBERED:]}
        self._successes = dict(list(successes.items())[-MOST_REMEMBERED:])

    # For checkpoints

    def state(self) -> MeetingsState:
        return MeetingsState(
            attempts=list(self._attempts.values()),
            successes=[
                RememberedSolution(
                    s.candidate.position, s.candidate.since, s.candidate.came_s, s[1]
                )
                for successes in self._successes.values()
                for s in successes
            ],
        )

    def load_state(self, state: MeetingsState, candidates: Sequence[Candidate]) -> None:
        """`candidates`: the groups that stand where the state says, in its order."""
        self._attempts = {attempt.problem: attempt for attempt in state.attempts}
        self._successes = {}
        for remembered, candidate in zip(state.successes, candidates, strict=True):
            successes = self._successes.setdefault(candidate.problem.id, [])
            successes.append(Solved(candidate, remembered.version))
