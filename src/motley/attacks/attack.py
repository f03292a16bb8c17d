"""What an attack is: how a hostile peer turns its honest groups into what it publishes, and what it
wants of the honest peers.

| noun | is |
|---|---|
| `Stage` | what anyone knows of a crew: its file, its task, its vocabulary |
| `Attack` | an intention; `mount` tries it on a stage |
| `Mounted` | the attack on that stage: it forges groups, and says how far it came |
| `Scene` | what one hostile peer knows in one round |
| `Evidence` | what the honest peers do after the last round |

Knows no defence: an attack is the same whether or not a crew has any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from motley.config import CrewConfig
from motley.models.policy import Policy
from motley.models.prompts import Prompts
from motley.models.vocabulary import Vocabulary
from motley.records import Group, Problem
from motley.tasks import Task


class NotMountableError(ValueError):
    """An attack has no place on this crew. The message says what stood in its way."""


@dataclass(frozen=True, slots=True)
class Stage:
    config: CrewConfig
    task: Task
    prompts: Prompts

    @property
    def vocabulary(self) -> Vocabulary:
        return self.prompts.vocabulary

    @property
    def max_tokens(self) -> int:
        return self.config.sampling.max_tokens


@dataclass(frozen=True, slots=True)
class Scene:
    me: str
    accomplices: tuple[str, ...]  # itself among them
    round: int
    policy: Policy  # its own, which it does not train
    likeness: Policy  # a crewmate's model with its starting weights
    problems: Callable[[int], list[Problem]]  # what it is asked in a round
    records: Callable[[], list[Group]]  # everyone's groups of this round so far


@dataclass(frozen=True, slots=True)
class HonestAnswer:
    """One sampled answer of an honest peer."""

    problem: Problem
    tokens: tuple[int, ...]
    text: str
    reward: float


@dataclass(frozen=True, slots=True)
class Evidence:
    answers: dict[str, list[HonestAnswer]]  # by honest peer, to held-out problems
    taken: float  # the hostile senders' share of all groups that honest peers learned from
    ask: Callable[[str, Sequence[Problem]], list[HonestAnswer]]  # an honest peer, anything else

    @property
    def all(self) -> list[HonestAnswer]:
        return [answer for own in self.answers.values() for answer in own]

    @property
    def accuracy(self) -> float:
        return mean([answer.reward for answer in self.all])


class Mounted(Protocol):
    def forge(self, groups: Sequence[Group], scene: Scene) -> list[Group]:
        """What the hostile peer publishes instead of the honest groups of a round."""
        ...

    def success(self, evidence: Evidence) -> float:
        """How far the attack came; the same measure says how things are without it."""
        ...


class Attack(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def wants(self) -> str:
        """One sentence: what it wants, and how that is measured."""
        ...

    @property
    def cast(self) -> Cast: ...

    def mount(self, stage: Stage) -> Mounted:
        """NotMountableError where the crew leaves no room for it."""
        ...


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays in an attack."""

    hostile: int = 0  # peers; 0: as many as asked for
    peers: int = 0  # in the crew; 0: as many as the crew file has
    twin: bool = False  # the first hostile peer begins with the first honest one's weights


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
