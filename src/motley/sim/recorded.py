"""Recorded peers: crewmates in a simulation whose records were made before it began.

A crew of a thousand is then as large for the log and for who reads it as a real one, at the cost of
the few peers that train. Recorded answers are a model's own, drawn for other problems: tokens and
log-probs of a group belong together, and its rewards are those of the problem it stands for. So
everyone admits them, and no audit finds fault with them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from motley.config import CrewConfig
from motley.engines import TorchEngine
from motley.engines.engine import Completion
from motley.exchange import MemoryLog
from motley.models.opening import initial_policy
from motley.peers.sampling import SamplerHalf
from motley.runs.local import one_process_outbox
from motley.sim.events import Events
from motley.tasks import Task, draw_problems

NUM_GROUPS = 256  # of answers that are drawn once, for all to publish
SPREAD_S = 1.0  # in which the recorded groups of a round come

Records = Sequence[tuple[str, bytes]]  # ids and records


class RecordedEngine:
    """Gives groups of answers that were drawn before, by the lot that a seed is."""

    keeps_snapshot = True

    def __init__(self, groups: Sequence[Sequence[Completion]]) -> None:
        self._groups = groups

    def refresh(self) -> None:
        """It has no weights."""

    def sample(
        self, prompts: Sequence[Sequence[int]], num_samples: int, sampling: object, seed: int
    ) -> list[list[Completion]]:
        rng = random.Random(seed)
        return [list(rng.choice(self._groups)[:num_samples]) for _ in prompts]


class Listener(Protocol):
    def news(self) -> None: ...


class Listened(Protocol):
    """A simulated crew, as recorded peers see it."""

    events: Events
    log: MemoryLog

    def listeners(self) -> Sequence[Listener]:
        """Who can use what is new on the log."""
        ...


@dataclass(slots=True)
class RecordedPeers:
    """What each of them publishes, round after round.

    `beside`: entered while the log is written and it is found out who listens, for those who
    measure what the others take.
    """

    records: dict[str, Sequence[Records]]
    beside: Callable[[], AbstractContextManager[object]] = nullcontext
    published: int = field(default=0, init=False)  # rounds that were planned

    def publish_next(self, crew: Listened) -> None:
        """Have the next round of everyone come, each at a moment of its own."""
        round = self.published
        self.published += 1
        for name, rounds in self.records.items():
            if round < len(rounds):
                wait_s = SPREAD_S * random.Random(f"recorded/{name}/{round}").random()
                crew.events.after(wait_s, partial(self._write, crew, rounds[round]))

    def _write(self, crew: Listened, records: Records) -> None:
        with self.beside():
            crew.log.append(records)
            listening = crew.listeners()
        for one in listening:
            one.news()


def record_peers(config: CrewConfig, task: Task, names: Collection[str]) -> RecordedPeers:
    """Make all records of some peers of a crew. The same seed gives the same bytes."""
    policy = initial_policy(config.named(min(names)), config.crew.seed, config.prompt, task)
    problems = draw_problems(task, f"recorded/{config.crew.seed}", "train", NUM_GROUPS)
    prompts = [policy.prompts.ids(problem) for problem in problems]
    groups = TorchEngine(policy).sample(
        prompts, config.rollouts_per_group, config.sampling, config.crew.seed
    )
    engine, clock = RecordedEngine(groups), Events().clock
    made: dict[str, Sequence[Records]] = {}
    for name in names:
        outbox = one_process_outbox(config, name)
        weather = config.weather(name)
        me = config.named(name)
        half = SamplerHalf(config, me, task, policy, engine, outbox, clock, weather)
        made[name] = [_round_of(half) for _ in range(config.crew.rounds)]
        outbox.close()
    return RecordedPeers(made)


def _round_of(half: SamplerHalf) -> Records:
    sent = MemoryLog()
    half.sample()
    half.outbox.deliver(sent)
    return [(entry.id, entry.record) for entry in sent.read(0)]
