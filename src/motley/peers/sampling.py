"""SamplerHalf: what every peer that samples has: a round's problems in, groups in the outbox out.

Owns which problems a peer answers and how groups are made of the answers. It waits for nothing, and
knows neither who learns from the groups nor where the weights come from.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from motley.clock import Clock, timed
from motley.config import CrewConfig, PeerConfig
from motley.engines import Completion, Engine
from motley.engines.judge import Judge
from motley.exchange import Mark, Outbox
from motley.files import disk_error
from motley.links import Weather
from motley.models.policy import Policy
from motley.records import Group, Origin, Problem, Rollout
from motley.tasks import Scorer, Task, assign, decided
from motley.tasks.scoring import Promise
from motley.trust import MAX_REWARD, Rules


class Sampled(msgspec.Struct, frozen=True):
    """What the sampler half did in one round."""

    num_tokens: int
    reward: float  # mean
    version: int = 0  # of the weights
    fresh: bool = True  # not found in the outbox after a crash


class Asked(NamedTuple):
    """A round's problems, as they are put to the engine."""

    round: int
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    version: int  # of the weights that answer


class Answered(NamedTuple):
    """A round's answers, whose rewards are on their way."""

    asked: Asked
    answers: Sequence[Sequence[Completion]]
    rewards_PG: Promise


class DrawnRound(NamedTuple):
    """A round's groups, not yet in the outbox."""

    round: int
    groups: list[Group]
    sampled: Sampled


@dataclass(slots=True)
class SamplerHalf:
    config: CrewConfig
    me: PeerConfig
    task: Task
    policy: Policy
    engine: Engine
    outbox: Outbox
    clock: Clock
    weather: Weather
    sampled_rounds: int = 0
    # whether a group is known to be there, of an outbox that was lost
    on_log: Callable[[Group], bool] = lambda group: False
    judge: Judge | None = None
    scorer: Scorer = field(default=None)  # type: ignore[assignment]  # of its own, if none is shared
    reward_s: float = 0.0  # for which the last round only waited for rewards
    # of the weights the engine has, which the policy's may be ahead of
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.policy.version
        self.scorer = self.scorer or Scorer(self.task)

    def refresh(self) -> None:
        """Have the engine take the policy's present weights."""
        self.engine.refresh()
        self.version = self.policy.version

    def problems(self, peer: str, round: int) -> list[Problem]:
        """What a peer must answer in a round."""
        if peer not in self.config.authors:
            return []
        config = self.config
        return assign(
            self.task, config.crew.seed, peer, round, config.problems_per_peer, config.num_met
        )

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups in the outbox.

        What was sampled before a crash is not sampled again.
        """
        return self.finish(self.begin())

    def begin(self) -> Answered | Sampled:
        """Answer the next round's problems, unless that was done before a crash.

        Rewards are computed beside what is done until `finish`.
        """
        known = self.sampled_in(self.sampled_rounds)
        return known if known else self.answered(self.ask())

    def finish(self, begun: Answered | Sampled) -> Sampled:
        """Put what was begun in the outbox."""
        if isinstance(begun, Sampled):
            self.sampled_rounds += 1
            return begun
        return self.keep(self.drawn(begun))

    def sampled_in(self, round: int) -> Sampled | None:
        """What the outbox knows of a round that was sampled before."""
        note = self.outbox.note_of(Mark("round", round))
        return (
            None
            if note is None
            else msgspec.structs.replace(msgspec.msgpack.decode(note, type=Sampled), fresh=False)
        )

    def draw(self) -> DrawnRound:
        """Sample the next round. Nothing is kept yet."""
        return self.drawn(self.answered(self.ask()))

    def ask(self) -> Asked:
        """The next round."""
        problems = self.problems(self.me.name, self.sampled_rounds)
        return Asked(
            self.sampled_rounds,
            problems,
            [self.policy.prompts.ids(p) for p in problems],
            self.version,
        )

    def answered(self, asked: Asked) -> Answered:
        """What the engine says.

        The one part of a round that may run in another thread: it touches nothing but the engine,
        and has rewards computed.
        """
        seed = _seed(self.config.crew.seed, self.me.name, asked.round)
        answers = self.engine.sample(
            asked.prompts, self.config.rollouts_per_group, self.config.sampling, seed
        )
        texts = iter(self.policy.vocabulary.decode_all(c.tokens for row in answers for c in row))
        texts_PG = [[next(texts) for _ in row] for row in answers]
        return Answered(asked, answers, self.scorer.begin(asked.problems, texts_PG))

    def drawn(self, answered: Answered) -> DrawnRound:
        """The answers with their rewards, as groups."""
        asked, answers = answered.asked, answered.answers
        self._check_logprobs(asked, answers)
        rewards_PG, self.reward_s = timed(answered.rewards_PG, self.clock)
        groups = [
            self._group(asked, slot, self._rollouts(asked, row, rewards))
            for slot, (row, rewards) in enumerate(zip(answers, rewards_PG, strict=True))
        ]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled = Sampled(
            sum(len(r.tokens) for r in rollouts),
            sum(r.reward for r in rollouts) / len(rollouts),
            asked.version,
        )
        return DrawnRound(asked.round, groups, sampled)

    def keep(self, drawn: DrawnRound) -> Sampled:
        """Put a round's groups in the outbox; from here on they cannot be lost."""
        unknown = [group for group in drawn.groups if not self.on_log(group)]
        due_s = self.weather.sent(str(drawn.round), self.clock.now_s())
        note = msgspec.msgpack.encode(drawn.sampled)
        try:
            self.outbox.put(unknown, Mark("round", drawn.round), note, due_s=due_s)
        except sqlite3.OperationalError as error:
            path = self.outbox.path
            assert path, "only a file can be full"
            raise disk_error(path, str(error)) from error
        self.sampled_rounds = drawn.round + 1
        return drawn.sampled

    def judged(self, problem: Problem, group: Group) -> Group:
        """A group as this peer learns from it: with its judge's opinion, if it has one."""
        if self.judge is None:
            return group
        texts = self.policy.vocabulary.decode_all(r.tokens for r in group.rollouts)
        return self.judge.judged(problem, group, texts)

    def _check_logprobs(self, asked: Asked, answers: Sequence[Sequence[Completion]]) -> None:
        # a sum is finite where its parts are: one question for a completion, not one for a token
        if not all(math.isfinite(sum(c.logprobs)) for row in answers for c in row):
            raise FloatingPointError(
                f"{self.me.name} samples with log-probs that are no numbers at version "
                f"{asked.version}: its lr was too high for "
                "its weights. Lower it; if the newest checkpoint has them already, delete it, and "
                "go on from the one before"
            )

    def _rollouts(
        self, asked: Asked, answers: Sequence[Completion], rewards: Sequence[float]
    ) -> list[Rollout]:
        known = decided(rewards)
        strange = [r for r in known if not abs(r) <= MAX_REWARD]
        if strange:
            raise ValueError(
                f"the task gave a reward of {strange[0]} in round {asked.round}; expected a "
                f"number of at most {MAX_REWARD:g} in size"
            )
        return [
            Rollout(tokens=c.tokens, logprobs=c.logprobs, reward=reward, ending=c.ending)
            for c, reward in zip(answers, known, strict=True)
        ]

    def _group(self, asked: Asked, slot: int, rollouts: Sequence[Rollout]) -> Group:
        policy = self.policy
        return Group(
            crew=self.config.crew.name,
            problem=asked.problems[slot].id,
            round=asked.round,
            slot=slot,
            origin=Origin(
                peer=self.me.name,
                model=policy.fingerprint,
                vocabulary=policy.vocabulary.fingerprint,
                version=asked.version,
                sampling=self.config.sampling,
            ),
            rollouts=tuple(rollouts),
            created_s=self.clock.now_s(),
        )


def rules_of(config: CrewConfig, policy: Policy) -> Rules:
    """What every record of the crew must meet, for a reader with this model's vocabulary."""
    vocabulary = policy.vocabulary
    return Rules(
        crew=config.crew.name,
        vocabulary=vocabulary.fingerprint,
        vocabulary_size=vocabulary.size,
        end_ids=vocabulary.end_ids,
        rollouts_per_group=config.rollouts_per_group,
        sampling=config.sampling,
        slots=config.problems_per_peer,
        rounds=None if config.has_roles else config.crew.rounds,
        steps=config.crew.rounds,
        learners=frozenset(p.name for p in config.peer if p.role == "learner"),
        students={p.name: config.student_of(p.name) for p in config.peer},
    )


def _seed(crew_seed: int, peer: str, round: int) -> int:
    return int.from_bytes(
        hashlib.sha256(f"sample/{crew_seed}/{peer}/{round}".encode()).digest()[:7], "big"
    )
