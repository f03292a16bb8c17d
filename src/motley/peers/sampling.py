"""SamplerHalf: what every peer that samples has: a round's problems in, groups in the outbox out.

Owns which problems a peer answers and how groups are made of the answers. It waits for nothing, and
knows neither who learns from the groups nor where the weights come from.
"""

from __future__ import annotations

import hashlib
import math
import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from motley.clock import Clock, timed
from motley.config import CrewConfig, PeerConfig
from motley.engines import Completion, Engine
from motley.engines.judge import Judge
from motley.exchange import Mark, Outbox
from motley.files import disk_error
from motley.learning.prefixes import PrefixQueue
from motley.links import Weather
from motley.models.policy import Policy
from motley.models.vocabulary import Vocabulary
from motley.records import Branch, Group, Origin, Problem, Rollout, Table
from motley.tasks import Scorer, Task, assign, decided
from motley.tasks.scoring import Promise
from motley.trust import MAX_REWARD, Rules, Tables


class SampledBranches(msgspec.Struct, frozen=True, kw_only=True):
    """What of a round was continued from others' successes."""

    places: tuple[tuple[int, int, int], ...]  # round and slot of a problem, length of the prefix
    num_tokens: int
    reward: float  # mean, of prefixes with their continuations


class Sampled(msgspec.Struct, frozen=True):
    """What the sampler half did in one round."""

    num_tokens: int  # with those of branches
    reward: float  # mean, of whole answers
    version: int = 0  # of the weights
    fresh: bool = True  # not found in the outbox after a crash
    branches: SampledBranches | None = None


class Asked(NamedTuple):
    """A round's problems, as they are put to the engine."""

    round: int
    problems: list[Problem]
    prompts: list[tuple[int, ...]]
    version: int  # of the weights that answer
    branches: Sequence[Branch] = ()  # of the last of the problems, whose prompts have the prefixes

    @property
    def branch_of(self) -> list[Branch | None]:
        """For each problem."""
        return [*[None] * (len(self.problems) - len(self.branches)), *self.branches]


class Answered(NamedTuple):
    """A round's answers, whose rewards are on their way."""

    asked: Asked
    answers: Sequence[Sequence[Completion]]
    rewards_PG: Promise
    num_cut: int = 0  # tokens that branches had beyond their room


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
    prefixes: PrefixQueue | None = None  # of others' successes that it continues
    # Whether vocabularies of the crew may differ: then a table goes out before the first group, and
    # what is scored are the bytes of the tokens, which everyone can read.
    mixed: bool = False
    tables: Tables = field(default_factory=Tables)  # those known here, its own among them
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

    def problem_of(self, group: Group) -> Problem:
        """What a group answers; IndexError where its author was not given such a problem."""
        round, slot = group.place
        return self.problems(group.origin.peer, round)[slot]

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups in the outbox.

        What was sampled before a crash is not sampled again.
        """
        known = self.sampled_in(self.sampled_rounds)
        if known is None:
            return self.keep(self.draw())
        self.sampled_rounds += 1
        return self._taken(known)

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
        return self.drawn(self.begin())

    def begin(self) -> Answered:
        """Answer the next round's problems.

        Rewards are computed beside what is done until `drawn`.
        """
        return self.answered(self.ask())

    def ask(self) -> Asked:
        """The next round."""
        problems = self.problems(self.me.name, self.sampled_rounds)
        branches = self.prefixes.due() if self.prefixes else []
        problems += [self.problems(self.me.name, b.round)[b.slot] for b in branches]
        asked = Asked(self.sampled_rounds, problems, [], self.version, branches)
        prompts = [
            (*self.policy.prompts.ids(problem), *(branch.prefix if branch else ()))
            for problem, branch in zip(problems, asked.branch_of, strict=True)
        ]
        return asked._replace(prompts=prompts)

    def answered(self, asked: Asked) -> Answered:
        """What the engine says.

        The one part of a round that may run in another thread: it touches nothing but the engine,
        and has rewards computed.
        """
        seed = _seed(self.config.crew.seed, self.me.name, asked.round)
        # an engine waits for its GPU, and prompts can be spelled meanwhile
        threading.Thread(target=self._look_ahead, args=(asked.round + 1,), daemon=True).start()
        sampling = self.config.sampling
        made = self.engine.sample(asked.prompts, self.config.rollouts_per_group, sampling, seed)
        befores = [branch.prefix if branch else () for branch in asked.branch_of]
        answers = [
            [_within(completion, sampling.max_tokens - len(before)) for completion in row]
            for row, before in zip(made, befores, strict=True)
        ]
        whole = (
            (*before, *c.tokens) for row, before in zip(answers, befores, strict=True) for c in row
        )
        texts = iter(self.texts(whole))
        texts_PG = [[next(texts) for _ in row] for row in answers]
        num_cut = _num_tokens(made) - _num_tokens(answers)
        return Answered(asked, answers, self.scorer.begin(asked.problems, texts_PG), num_cut)

    def texts(self, completions: Iterable[Sequence[int]]) -> list[str]:
        """What a reward function is given for completions of this vocabulary."""
        vocabulary = self.policy.vocabulary
        return (vocabulary.read_all if self.mixed else vocabulary.decode_all)(completions)

    def _look_ahead(self, round: int) -> None:
        """Have the prompts of a round known before it begins. What fails then fails again there."""
        with suppress(Exception):
            for problem in self.problems(self.me.name, round):
                self.policy.prompts.ids(problem)

    def drawn(self, answered: Answered) -> DrawnRound:
        """The answers with their rewards, as groups."""
        asked, answers = answered.asked, answered.answers
        self._check_logprobs(asked, answers)
        rewards_PG, self.reward_s = timed(answered.rewards_PG, self.clock)
        groups = [
            self._group(asked, slot, self._rollouts(asked, slot, row, rewards))
            for slot, (row, rewards) in enumerate(zip(answers, rewards_PG, strict=True))
        ]
        whole = [rollout for group in groups if not group.branch for rollout in group.rollouts]
        sampled = Sampled(
            _num_tokens(answers) + answered.num_cut,
            _mean_reward(whole),
            asked.version,
            branches=_branches([g for g in groups if g.branch], answered.num_cut),
        )
        return DrawnRound(asked.round, groups, sampled)

    def keep(self, drawn: DrawnRound) -> Sampled:
        """Put a round's groups in the outbox; from here on they cannot be lost."""
        unknown = [group for group in drawn.groups if not self.on_log(group)]
        due_s = self.weather.sent(str(drawn.round), self.clock.now_s())
        note = msgspec.msgpack.encode(drawn.sampled)
        try:
            self._put_table()
            self.outbox.put(unknown, Mark("round", drawn.round), note, due_s=due_s)
        except sqlite3.OperationalError as error:
            path = self.outbox.path
            assert path, "only a file can be full"
            raise disk_error(path, str(error)) from error
        self.sampled_rounds = drawn.round + 1
        return self._taken(drawn.sampled)

    def _put_table(self) -> None:
        """Put the vocabulary's table in the outbox, once.

        It is due at once: groups of another round may be on the log before those of this one.
        """
        mark = Mark("table")
        known = self.outbox.key in self.tables or self.outbox.note_of(mark) is not None
        if self.mixed and not known:
            crew, vocabulary = self.config.crew.name, self.policy.vocabulary
            self.outbox.put([_table_of(crew, self.me.name, vocabulary)], mark)

    def _taken(self, sampled: Sampled) -> Sampled:
        if self.prefixes and sampled.branches:
            self.prefixes.took(sampled.branches.places)
        return sampled

    def judged(self, problem: Problem, group: Group) -> Group:
        """A group as this peer learns from it: with its judge's opinion, if it has one."""
        if self.judge is None:
            return group
        whole = ((*group.prefix, *r.tokens) for r in group.rollouts)
        return self.judge.judged(problem, group, self.texts(whole))

    def _check_logprobs(self, asked: Asked, answers: Sequence[Sequence[Completion]]) -> None:
        # a sum is finite where its parts are: one question for a completion, not one for a token
        if not all(math.isfinite(sum(c.logprobs)) for row in answers for c in row):
            student = self.config.student_of(self.me.name)
            if student != self.me.name:
                raise FloatingPointError(
                    f"{self.me.name} samples with log-probs that are no numbers: it has version "
                    f"{asked.version} of {student}'s weights, which are too large. Nothing is "
                    f"wrong here: ask who runs {student}"
                )
            raise FloatingPointError(
                f"{self.me.name} samples with log-probs that are no numbers at version "
                f"{asked.version}: its lr was too high for "
                "its weights. Lower it; if the newest checkpoint has them already, delete it, and "
                "go on from the one before"
            )

    def _rollouts(
        self, asked: Asked, slot: int, answers: Sequence[Completion], rewards: Sequence[float]
    ) -> list[Rollout]:
        known = decided(rewards)
        strange = [r for r in known if not abs(r) <= MAX_REWARD]
        if strange:
            raise ValueError(
                f"the task gave a reward of {strange[0]} in round {asked.round}; expected a "
                f"number of at most {MAX_REWARD:g} in size"
            )
        return [
            Rollout(
                tokens=c.tokens,
                logprobs=c.logprobs,
                reward=reward,
                ending=c.ending,
                canonical=canonical,
            )
            for c, reward, canonical in zip(
                answers, known, self._canonical(asked, slot, answers), strict=True
            )
        ]

    def _canonical(self, asked: Asked, slot: int, answers: Sequence[Completion]) -> list[bool]:
        """Which answers a reader of another vocabulary can compare log-probs of."""
        if not self.mixed or asked.branch_of[slot]:  # of branches nobody else learns
            return [True] * len(answers)
        return _canonical(self.policy, asked.problems[slot], answers)

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
            branch=asked.branch_of[slot],
        )


def rules_of(half: SamplerHalf) -> Rules:
    """What every record of the crew must meet, for a reader with this model's vocabulary."""
    own = half.policy.vocabulary
    rules = Rules.of(half.config, half.mixed)
    return rules.with_vocabulary(own.fingerprint, own.size, own.end_ids)


def _table_of(crew: str, peer: str, vocabulary: Vocabulary) -> Table:
    return Table(
        crew=crew,
        peer=peer,
        vocabulary=vocabulary.fingerprint,
        ends=vocabulary.end_ids,
        encoded=vocabulary.spelling.encode(),
    )


def _canonical(policy: Policy, problem: Problem, answers: Sequence[Completion]) -> list[bool]:
    """Whether the tokenizer makes these tokens of the text, and the end is the one that is taught:
    for a model with one end, another one is another event.
    """
    end = policy.prompts.end_id(problem)
    are_cut_so = policy.vocabulary.are_canonical([c.tokens for c in answers])
    return [
        is_cut_so and (c.ending == "length" or c.tokens[-1] == end)
        for is_cut_so, c in zip(are_cut_so, answers, strict=True)
    ]


def _within(completion: Completion, most: int) -> Completion:
    """As much of it as fits."""
    if len(completion.tokens) <= most:
        return completion
    return Completion(completion.tokens[:most], completion.logprobs[:most], "length")


def _num_tokens(answers: Sequence[Sequence[Completion]]) -> int:
    return sum(len(completion.tokens) for row in answers for completion in row)


def _mean_reward(rollouts: Sequence[Rollout]) -> float:
    return sum(r.reward for r in rollouts) / len(rollouts)


def _branches(groups: Sequence[Group], num_cut: int) -> SampledBranches | None:
    if not groups:
        return None
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return SampledBranches(
        places=tuple((*group.place, len(group.prefix)) for group in groups),
        num_tokens=sum(len(r.tokens) for r in rollouts) + num_cut,
        reward=_mean_reward(rollouts),
    )


def _seed(crew_seed: int, peer: str, round: int) -> int:
    return int.from_bytes(
        hashlib.sha256(f"sample/{crew_seed}/{peer}/{round}".encode()).digest()[:7], "big"
    )
