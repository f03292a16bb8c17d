"""Attacks that publish honest answers and lie about them, or publish more than is theirs.

Success is the share of honest answers that are wrong, where harm is what is wanted; or the share of
what honest peers learn from that is the liar's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from motley.attacks.attack import Attack, Cast, Evidence, Scene, Stage
from motley.attacks.composing import composed, spelled, wrong_texts
from motley.records import Group, Rollout
from motley.trust.rules import LOGPROB_RANGE

HARM = "the share of honest answers that are wrong"
TAKEN = "its share of all groups that honest peers learn from"


def with_rollouts(group: Group, rollouts: Sequence[Rollout]) -> Group:
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


@dataclass(frozen=True, slots=True)
class ShiftedLogprobs:
    """Log-probs moved by so many nats at every token: below 0 they are under-reported."""

    name: str
    nats: float
    cast: Cast = Cast()

    @property
    def wants(self) -> str:
        way = "under" if self.nats < 0 else "over"
        return f"log-probs {way}-reported by {abs(self.nats):g} nats a token: {HARM}"

    def mount(self, stage: Stage) -> ShiftedLogprobs:
        return self

    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        return [
            with_rollouts(group, [self._shifted(r) for r in group.rollouts]) for group in groups
        ]

    def _shifted(self, rollout: Rollout) -> Rollout:
        least = LOGPROB_RANGE[0]
        moved = tuple(min(0.0, max(least, q + self.nats)) for q in rollout.logprobs)
        return msgspec.structs.replace(rollout, logprobs=moved)

    def success(self, evidence: Evidence) -> float:
        return 1 - evidence.accuracy


@dataclass(frozen=True, slots=True)
class ForgedRewards:
    """Right answers are said to be wrong, and wrong ones right."""

    name: str = "rewards"
    wants: str = f"rewards turned round: {HARM}"
    cast: Cast = Cast()

    def mount(self, stage: Stage) -> ForgedRewards:
        return self

    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        return [
            with_rollouts(
                group,
                [msgspec.structs.replace(r, reward=1.0 - r.reward) for r in group.rollouts],
            )
            for group in groups
        ]

    def success(self, evidence: Evidence) -> float:
        return 1 - evidence.accuracy


@dataclass(frozen=True, slots=True)
class ClaimedSampling:
    """Another temperature or truncation than was used, which readers compute ratios with."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    cast: Cast = Cast()

    @property
    def wants(self) -> str:
        cut = f" and top_k {self.top_k}" if self.top_k else ""
        return f"a temperature of {self.temperature:g}{cut} is claimed: {HARM}"

    def mount(self, stage: Stage) -> ClaimedSampling:
        return self

    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        return [self._claiming(group) for group in groups]

    def _claiming(self, group: Group) -> Group:
        sampling = msgspec.structs.replace(
            group.origin.sampling, temperature=self.temperature, top_k=self.top_k
        )
        origin = msgspec.structs.replace(group.origin, sampling=sampling)
        return msgspec.structs.replace(group, origin=origin)

    def success(self, evidence: Evidence) -> float:
        return 1 - evidence.accuracy


@dataclass(frozen=True, slots=True)
class CopiedRollouts:
    """Nothing of its own: others' answers to the same problem, or one of its own again and again.

    In a vertical crew nobody else has its problems.
    """

    name: str = "copies"
    wants: str = f"credit for copied rollouts: {TAKEN}"
    cast: Cast = Cast()

    def mount(self, stage: Stage) -> CopiedRollouts:
        return self

    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        others = {
            made.problem: made.rollouts
            for made in scene.records()
            if made.origin.peer not in scene.accomplices
        }
        return [self._copied(group, others.get(group.problem, ())) for group in groups]

    def _copied(self, group: Group, others: tuple[Rollout, ...]) -> Group:
        size = len(group.rollouts)
        if others:
            return with_rollouts(group, [others[i % len(others)] for i in range(size)])
        best = max(group.rollouts, key=lambda rollout: rollout.reward)
        worst = min(group.rollouts, key=lambda rollout: rollout.reward)
        return with_rollouts(group, [best] * (size - 1) + [worst])

    def success(self, evidence: Evidence) -> float:
        return evidence.taken


@dataclass(frozen=True, slots=True)
class StaleFlood:
    """Groups of many later rounds at once, all said to be of an old version."""

    name: str = "flood"
    rounds: int = 16  # at a time
    cast: Cast = Cast()

    @property
    def wants(self) -> str:
        return f"{self.rounds} rounds of old groups at a time: {TAKEN}"

    def mount(self, stage: Stage) -> MountedFlood:
        return MountedFlood(stage, self.rounds)


@dataclass(frozen=True, slots=True)
class MountedFlood:
    stage: Stage
    rounds: int

    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        last = min(scene.round + self.rounds, self.stage.config.crew.rounds)
        return [
            self._of_round(group, number, scene)
            for number in range(scene.round, last)
            for group in groups
        ]

    def _of_round(self, group: Group, number: int, scene: Scene) -> Group:
        """The same place in another round, with its right answer and wrong ones."""
        problem, size = scene.problems(number)[group.slot], len(group.rollouts)
        texts = [self.stage.task.target(problem), *wrong_texts(self.stage, problem, size - 1)]
        tokens = [spelled(self.stage, problem, texts[i % len(texts)]) for i in range(size)]
        rollouts = composed(self.stage, scene, problem, tokens, "own")
        origin = msgspec.structs.replace(group.origin, version=0)
        return msgspec.structs.replace(
            group, problem=problem.id, round=number, origin=origin, rollouts=tuple(rollouts)
        )

    def success(self, evidence: Evidence) -> float:
        return evidence.taken


LYING: tuple[Attack, ...] = (
    ForgedRewards(),
    ShiftedLogprobs("under-0.05", -0.05),
    ShiftedLogprobs("under-0.5", -0.5),
    ShiftedLogprobs("under-5", -5.0),
    ShiftedLogprobs("over-1", 1.0),
    ClaimedSampling("cold", temperature=0.01),
    ClaimedSampling("hot", temperature=10.0),
    ClaimedSampling("top-k", top_k=1),
    CopiedRollouts(),
    StaleFlood(),
)
