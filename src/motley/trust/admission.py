"""Admission: the one boundary where a peer's bad record becomes a named, counted refusal instead of an exception.

Cheap checks first. Knows records and assignments; knows no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from motley.exchange import WireError, decode
from motley.records import Group, Problem, Rollout

LOGPROB_RANGE = (-64.0, 1e-3)
MAX_ROUND = 2**31
MAX_REWARD = 1e6  # far inside float32, in which advantages are computed

Assignment = Callable[[str, int], list[Problem]]  # (peer, round) -> the problems it must answer


@dataclass(frozen=True, slots=True)
class Rules:
    """What every group of a crew must meet."""

    crew: str
    peers: frozenset[str]
    vocabulary: str
    vocabulary_size: int
    end_id: int
    rollouts_per_group: int
    max_tokens: int


@dataclass(slots=True)
class Admission:
    rules: Rules
    assignment: Assignment
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, reason) -> count

    def admit(self, record: bytes) -> tuple[Group, Problem] | None:
        """The group and its problem, or None and a count of why not."""
        try:
            group = decode(record)
        except WireError as error:
            self.refused["unknown", error.reason] += 1
            return None
        sender = group.origin.peer if group.origin.peer in self.rules.peers else "unknown"
        reason = self._fault(group)
        if reason:
            self.refused[sender, reason] += 1
            return None
        return group, self.assignment(group.origin.peer, group.round)[group.slot]

    def _fault(self, group: Group) -> str:
        rules = self.rules
        if group.crew != rules.crew:
            return "crew"
        if group.origin.peer not in rules.peers:
            return "sender"
        if group.origin.vocabulary != rules.vocabulary:
            return "vocabulary"
        sampling = group.origin.sampling
        if sampling.temperature == 0 or sampling.max_tokens != rules.max_tokens:
            return "sampling"
        if len(group.rollouts) != rules.rollouts_per_group:
            return "group_size"
        if not 0 <= group.round < MAX_ROUND:
            return "assignment"
        problems = self.assignment(group.origin.peer, group.round)
        if not 0 <= group.slot < len(problems) or problems[group.slot].id != group.problem:
            return "assignment"
        return next((fault for rollout in group.rollouts if (fault := self._rollout_fault(rollout))), "")

    def _rollout_fault(self, rollout: Rollout) -> str:
        if not 1 <= len(rollout.tokens) <= self.rules.max_tokens:
            return "length"
        if len(rollout.logprobs) != len(rollout.tokens):
            return "shape"
        if not all(0 <= token < self.rules.vocabulary_size for token in rollout.tokens):
            return "token"
        ends = [token == self.rules.end_id for token in rollout.tokens]
        if any(ends[:-1]) or ends[-1] != (rollout.ending == "stop"):
            return "ending"
        low, high = LOGPROB_RANGE
        if not all(low <= logprob <= high for logprob in rollout.logprobs):  # NaN fails both
            return "logprob"
        return "" if abs(rollout.reward) <= MAX_REWARD else "reward"  # NaN fails
