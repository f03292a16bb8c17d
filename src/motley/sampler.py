"""The sampler half of every peer, and Sampler, a participant that has no other: it samples with a
learner's newest weights that reached it.

| half | consumes | produces | waits for |
|---|---|---|---|
| `SamplerHalf` | a round's problems, an engine | groups in the outbox | nothing |
| `Sampler` | its learner's weights | the same | the first weights; under "pace", its learner |
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import msgspec

from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig
from motley.engines import Completion, Engine
from motley.exchange import Entry, Log, LogError, Mark, Outbox
from motley.exchange.blobs import Blobs
from motley.network import Weather
from motley.policies import Policy
from motley.policies.following import Follower
from motley.records import HUB, Backlog, Group, Origin, Problem, Rollout, Weights
from motley.tasks import Task, assign
from motley.trust import MAX_REWARD, Admission, Rules


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


class Drawn(NamedTuple):
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
    # of the weights the engine has, which the policy's may be ahead of
    version: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = self.policy.version

    def refresh(self) -> None:
        """Have the engine take the policy's present weights."""
        self.engine.refresh()
        self.version = self.policy.version

    def problems(self, peer: str, round: int) -> list[Problem]:
        """What a peer must answer in a round."""
        if peer not in self.config.authors:
            return []
        name = "" if self.config.crew.layout == "horizontal" else peer
        return assign(self.task, self.config.crew.seed, name, round, self.config.problems_per_peer)

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups in the outbox.

        What was sampled before a crash is not sampled again.
        """
        known = self.sampled_in(self.sampled_rounds)
        if known:
            self.sampled_rounds += 1
            return known
        return self.keep(self.draw())

    def sampled_in(self, round: int) -> Sampled | None:
        """What the outbox knows of a round that was sampled before."""
        note = self.outbox.note_of(Mark("round", round))
        return (
            None
            if note is None
            else msgspec.structs.replace(msgspec.msgpack.decode(note, type=Sampled), fresh=False)
        )

    def draw(self) -> Drawn:
        """Sample the next round. Nothing is kept yet."""
        asked = self.ask()
        return self.drawn(asked, self.answers(asked))

    def ask(self) -> Asked:
        """The next round."""
        problems = self.problems(self.me.name, self.sampled_rounds)
        return Asked(
            self.sampled_rounds,
            problems,
            [self.policy.prompts.ids(p) for p in problems],
            self.version,
        )

    def answers(self, asked: Asked) -> list[list[Completion]]:
        """What the engine says.

        The one part of a round that may run in another thread: it touches nothing but the engine.
        """
        seed = _seed(self.config.crew.seed, self.me.name, asked.round)
        return self.engine.sample(
            asked.prompts, self.config.rollouts_per_group, self.config.sampling, seed
        )

    def drawn(self, asked: Asked, answers: Sequence[Sequence[Completion]]) -> Drawn:
        """The answers with their rewards, as groups."""
        size, rollouts = self.config.rollouts_per_group, self._rollouts(asked, answers)
        groups = [
            self._group(asked, slot, rollouts[slot * size : (slot + 1) * size])
            for slot in range(len(asked.problems))
        ]
        reward = sum(r.reward for r in rollouts) / len(rollouts)
        return Drawn(
            asked.round,
            groups,
            Sampled(sum(len(r.tokens) for r in rollouts), reward, asked.version),
        )

    def keep(self, drawn: Drawn) -> Sampled:
        """Put a round's groups in the outbox; from here on they cannot be lost."""
        unknown = [group for group in drawn.groups if not self.on_log(group)]
        due_s = self.weather.sent(str(drawn.round), self.clock.now_s())
        note = msgspec.msgpack.encode(drawn.sampled)
        self.outbox.put(unknown, Mark("round", drawn.round), note, due_s=due_s)
        self.sampled_rounds = drawn.round + 1
        return drawn.sampled

    def _rollouts(self, asked: Asked, answers: Sequence[Sequence[Completion]]) -> list[Rollout]:
        flat = [
            (problem, c)
            for problem, samples in zip(asked.problems, answers, strict=True)
            for c in samples
        ]
        if not all(math.isfinite(logprob) for _, c in flat for logprob in c.logprobs):
            raise FloatingPointError(
                f"{self.me.name} samples with log-probs that are no numbers at version "
                f"{asked.version}: its lr was too high for "
                "its weights. Lower it; if the newest checkpoint has them already, delete it, and "
                "go on from the one before"
            )
        rewards = self.task.score(
            [p for p, _ in flat], self.policy.vocabulary.decode_all(c.tokens for _, c in flat)
        )
        strange = [r for r in rewards if not abs(r) <= MAX_REWARD]
        if strange:
            raise ValueError(
                f"the task gave a reward of {strange[0]} in round {asked.round}; expected a "
                f"number of at most {MAX_REWARD:g} in size"
            )
        return [
            Rollout(tokens=c.tokens, logprobs=c.logprobs, reward=reward, ending=c.ending)
            for (_, c), reward in zip(flat, rewards, strict=True)
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
        max_tokens=config.sampling.max_tokens,
        rounds=None if config.has_roles else config.crew.rounds,
        learners=frozenset(p.name for p in config.peer if p.role == "learner"),
    )


Fetch = Callable[[], dict[str, bytes | None]]


def done(fetch: Fetch) -> Future[dict[str, bytes | None]]:
    """Fetch at once."""
    future: Future[dict[str, bytes | None]] = Future()
    try:
        future.set_result(fetch())
    except LogError as error:
        future.set_exception(error)
    return future


@dataclass(frozen=True, slots=True)
class Transfer:
    """Weights on their way to a sampler."""

    plan: list[Weights]
    arrives_s: float
    # of the blobs, by their hashes: the store may forget them before they arrive
    contents: Future[dict[str, bytes | None]]


@dataclass(slots=True)
class Sampler:
    """Reads of the log what its hub and its learner wrote, and nothing else."""

    half: SamplerHalf
    log: Log
    blobs: Blobs  # its learner's
    hub: bytes
    # who fetches, at once or beside the sampling
    submit: Callable[[Fetch], Future[dict[str, bytes | None]]] = done
    cursors: dict[str, int] = field(init=False)  # per publisher that it reads
    known: dict[int, Weights] = field(init=False)  # by version, as far as they may still be loaded
    newest: Weights | None = field(init=False)
    transfer: Transfer | None = field(init=False)
    failed: int = 0  # transfers whose blobs were missing, corrupt or wrong
    admission: Admission = field(init=False)
    follower: Follower = field(init=False)

    def __post_init__(self) -> None:
        self.forget()

    @property
    def me(self) -> PeerConfig:
        return self.half.me

    def receive(self) -> None:
        """Take in what the learner and the hub have written since, in the log's order.

        The learner is read first: a roster that stands before one of its records is then there when
        the hub is read.
        """
        while found := [entry for publisher in self.cursors for entry in self._read(publisher)]:
            for entry in sorted(found):
                admitted = self.admission.admit(entry)
                if isinstance(admitted, Weights):
                    self._note(admitted)

    def _read(self, publisher: str) -> list[Entry]:
        entries = self.log.read(self.cursors[publisher], sender=publisher)
        if entries:
            self.cursors[publisher] = entries[-1].position
        return entries

    def _note(self, found: Weights) -> None:
        self.known[found.version] = found
        if self.newest is None or found.version > self.newest.version:
            self.newest = found

    def renew(self) -> bool:
        """Load what has arrived, and send for what is newer; whether weights were loaded.

        One transfer at a time, always of the newest version there is when it begins.
        """
        now_s = self.half.clock.now_s()
        loaded = self._land(now_s)
        if self.transfer is None and (plan := self.follower.plan(list(self.known.values()))):
            arrives_s = self.half.weather.fetched(f"weights.{plan[-1].version}", now_s)
            self.transfer = Transfer(plan, arrives_s, self.submit(partial(self._fetched, plan)))
            loaded = self._land(now_s) or loaded
        return loaded

    def _land(self, now_s: float) -> bool:
        if (
            self.transfer is None
            or self.transfer.arrives_s > now_s
            or not self.transfer.contents.done()
        ):
            return False
        plan, fetched, self.transfer = self.transfer.plan, self.transfer.contents, None
        contents = fetched.result()
        if self.follower.apply(plan, lambda blob: contents.get(blob.sha256)) is not None:
            self.failed += 1
            return False
        self.known = {
            version: weights
            for version, weights in self.known.items()
            if version > self.follower.version
        }
        self.half.refresh()
        return True

    def _fetched(self, plan: Sequence[Weights]) -> dict[str, bytes | None]:
        return {
            blob.sha256: self.blobs.get(blob.sha256, blob.num_bytes)
            for blob in self.follower.blobs_of(plan)
        }

    def forget(self) -> None:
        """What a crash takes: the weights in memory and those on their way.

        The log and the blobs have them again.
        """
        self.cursors = dict.fromkeys((self.me.follows, HUB), 0)  # in this order: see `receive`
        self.known, self.newest, self.transfer = {}, None, None
        self.admission = Admission(
            rules_of(self.half.config, self.half.policy), self.hub, self.half.problems, None
        )
        self.follower = Follower(self.half.policy)

    def may_sample(self) -> bool:
        """Once it has weights, always; with stale = "pace", not while its learner has more to learn
        from than the window can use up.
        """
        if self.follower.version < 0 or self.newest is None:
            return False
        return self.half.config.learning.stale == "drop" or not holds_up(
            self.newest.backlog, self.me.name, self.half.config
        )

    @property
    def finished(self) -> bool:
        """Its learner has taken its last step, or was shut out."""
        if self.me.follows in self.admission.revoked:
            return True
        return self.newest is not None and self.newest.version >= self.half.config.crew.rounds


def holds_up(backlog: Backlog, author: str, config: CrewConfig) -> bool:
    """Whether so much waits for a learner that an author should.

    Never while the learner lacks a full step: that would be for ever.

    In a horizontal crew the author's own parts count: others may wait for those of a slower one,
    which must go on.
    """
    horizontal = config.crew.layout == "horizontal"
    waiting = sum(count for name, count in backlog.waiting if name == author or not horizontal)
    rules, per_step = config.learning, config.crew.problems_per_round
    if rules.max_age_s:
        return waiting >= per_step and backlog.oldest_s > rules.max_age_s
    return waiting > max(1, rules.max_age) * per_step


def _seed(crew_seed: int, peer: str, round: int) -> int:
    return int.from_bytes(
        hashlib.sha256(f"sample/{crew_seed}/{peer}/{round}".encode()).digest()[:7], "big"
    )
