"""What is remembered of a peer's metrics lines, and the numbers that are drawn from them.

Owns no judgement: what they show to be wrong is in `signs.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from motley.config import CrewConfig
from motley.learning.senders import SenderMetrics
from motley.runs.metrics import ByKind, Counts, LearnerLine
from motley.tasks import Measure

WINDOW = 5  # steps in a row; all of them in a shorter run
STANDSTILL = 4  # evaluations that are equal


@dataclass(frozen=True, slots=True)
class Expected:
    """What a crew file says of a peer's lines."""

    window: int
    others: tuple[str, ...]  # who else samples
    hears_all: bool  # in every round
    mine: frozenset[str]  # who samples with this peer's weights
    lr: float
    max_tokens: int
    truncates: bool  # own samples are drawn from less than what the learner computes
    num_problems: int  # held-out, per kind

    @staticmethod
    def of(config: CrewConfig, peer: str) -> Expected:
        me = config.named(peer)
        return Expected(
            window=max(2, min(WINDOW, config.crew.rounds)),
            # nothing of others is wanted where own groups are to be everything
            others=tuple(n for n in config.authors if n != peer and _takes_others(config)),
            hears_all=config.num_heard(peer) == len(config.authors),
            mine=frozenset(n for n in config.authors if config.student_of(n) == peer),
            lr=me.lr or config.learning.lr,
            max_tokens=config.sampling.max_tokens,
            truncates=config.sampling.raises_logprobs,
            num_problems=config.evaluate.problems,
        )


def _takes_others(config: CrewConfig) -> bool:
    return config.learning.own_share < 1 and config.crew.objective != "alone"


class Evaluation(NamedTuple):
    heldout: ByKind
    num_steps: int  # with a gradient, before it

    @property
    def mean(self) -> float:
        return sum(self.heldout.values()) / len(self.heldout)


@dataclass(slots=True)
class History:
    """What is remembered of one peer's lines: as much as the signs need, however long the run."""

    expected: Expected
    measure: Measure = "accuracy"
    steps: deque[LearnerLine] = field(init=False)  # the newest
    first_rewards: list[float] = field(default_factory=list)  # means over own samples
    first_entropies: list[float] = field(default_factory=list)  # the same
    first_kl: dict[str, list[float]] = field(default_factory=dict)
    num_steps: int = 0
    num_moved: int = 0  # steps with a gradient
    idle: list[LearnerLine] = field(default_factory=list)  # the newest in a row without a step
    heard: set[str] = field(default_factory=set)
    first: Evaluation | None = None
    evaluations: deque[Evaluation] = field(default_factory=lambda: deque(maxlen=STANDSTILL))
    said: set[tuple[str, str]] = field(default_factory=set)  # (sign, sender or nobody)

    def __post_init__(self) -> None:
        self.steps = deque(maxlen=self.expected.window)

    @property
    def newest(self) -> LearnerLine:
        return self.steps[-1]

    @property
    def is_full(self) -> bool:
        return len(self.steps) == self.expected.window

    @property
    def rounds(self) -> str:
        return f"in the last {self.expected.window} rounds"

    def add(self, line: LearnerLine) -> None:
        if line.measure:
            self.measure = line.measure
        if line.num_sequences:
            self._add_step(line)
        idle = [*self.idle, line] if line.round and not line.num_sequences else []
        self.idle = idle[-self.expected.window :]
        if line.heldout:
            evaluation = Evaluation(line.heldout, self.num_moved)
            self.first = self.first or evaluation
            self.evaluations.append(evaluation)

    def _add_step(self, line: LearnerLine) -> None:
        self.steps.append(line)
        self.num_steps += 1
        self.num_moved += bool(line.grad_norm)
        if len(self.first_rewards) < WINDOW:
            self.first_rewards.append(self.own_reward(line))
        entropy = finite(self.own_entropy(line))  # of a step where nothing of its own counts: none
        if entropy is not None and len(self.first_entropies) < WINDOW:
            self.first_entropies.append(entropy)
        for name, sender in senders_of(line):
            self.heard.add(name)
            kl = finite(sender.number("kl_k1"))
            first = self.first_kl.setdefault(name, [])
            if kl is not None and len(first) < WINDOW:
                first.append(kl)

    def mine_of(self, line: LearnerLine) -> list[SenderMetrics]:
        """What came of the peer's own weights; of a peer with no such samples, everything."""
        own = [s for name, s in senders_of(line) if name in self.expected.mine]
        return own or [s for _, s in senders_of(line)]

    def own_reward(self, line: LearnerLine) -> float:
        return mean_over_groups(self.mine_of(line), "reward")

    def own_entropy(self, line: LearnerLine) -> float:
        return mean_over_groups(self.mine_of(line), "entropy")

    def others_of(self, line: LearnerLine) -> set[str]:
        """Who else was learned from."""
        return {name for name, _ in senders_of(line)} - self.expected.mine

    def always(self, key: str, name: str, holds: Callable[[float], bool]) -> list[float]:
        """A sender's values in the window, if all of them are there and have a property."""
        values = [
            value
            for line in self.steps
            if (sender := (line.senders or {}).get(name))
            if (value := finite(sender.number(key))) is not None and holds(value)
        ]
        return values if self.is_full and len(values) == len(self.steps) else []

    def is_unheard(self, name: str) -> bool:
        return self.is_full and not any(name in (line.senders or {}) for line in self.steps)


# Numbers of a line


def finite(value: float | None) -> float | None:
    """A file has no number for what is not finite, and neither has this."""
    return value if value is not None and math.isfinite(value) else None


def senders_of(line: LearnerLine) -> Iterable[tuple[str, SenderMetrics]]:
    return (line.senders or {}).items()


def mean_over_groups(senders: list[SenderMetrics], key: str) -> float:
    pairs = [(v, s.groups) for s in senders if (v := finite(s.number(key))) is not None]
    groups = sum(count for _, count in pairs)
    return sum(value * count for value, count in pairs) / groups if groups else math.nan


def mean_of(values: list[float]) -> float:
    return sum(values) / len(values)


def total(counts: Counts | None, sender: str, besides: tuple[str, ...] = ()) -> dict[str, int]:
    reasons = (counts or {}).get(sender, {})
    return {reason: count for reason, count in reasons.items() if reason not in besides}
