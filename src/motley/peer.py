"""Peer: one participant. The sampler half puts groups on the log, the learner half takes them from it; the log is all they share.

| half | consumes | produces | waits for |
|---|---|---|---|
| sampler | the round's problems, own weights | groups on the log | nothing; with stale = "pace", for the learner to catch up |
| learner, lockstep | the groups of one round | a version, a report | every peer's groups of the round |
| learner, async | whatever is admitted and fresh | a version, a report | as many groups as a round of the crew has |
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig
from motley.engines import Engine
from motley.exchange import Log, encode
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate, select
from motley.records import Group, Origin, Problem, Rollout
from motley.tasks import Task, assign
from motley.trust import MAX_REWARD, Admission, Rules


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the sampler half did in one round."""

    num_tokens: int
    num_rollouts: int
    reward: float  # mean


@dataclass(slots=True)
class Peer:
    config: CrewConfig
    me: PeerConfig
    task: Task
    learner: Learner
    engine: Engine
    log: Log
    clock: Clock
    sampled_rounds: int = 0
    learned_rounds: int = 0
    cursor: int = 0
    waiting: list[Candidate] = field(default_factory=list)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    complete: Counter[str] = field(default_factory=Counter)  # per sender: every group of the rounds below has been admitted
    seen: set[tuple[str, int, int]] = field(default_factory=set)  # (sender, round, slot) admitted of later rounds
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        vocabulary = self.learner.policy.vocabulary
        rules = Rules(
            crew=self.config.crew.name,
            peers=frozenset(p.name for p in self.config.peer),
            vocabulary=vocabulary.fingerprint,
            vocabulary_size=vocabulary.size,
            end_id=vocabulary.end_id,
            rollouts_per_group=self.config.rollouts_per_group,
            max_tokens=self.config.sampling.max_tokens,
        )
        self.admission = Admission(rules, lru_cache(maxsize=256)(self.problems))

    def problems(self, peer: str, round: int) -> list[Problem]:
        """What a peer must answer in a round."""
        name = "" if self.config.crew.layout == "horizontal" else peer
        return assign(self.task, self.config.crew.seed, name, round, self.config.problems_per_peer)

    # Sampler half

    def may_sample(self) -> bool:
        """With stale = "pace" the sampler waits while more is waiting than the staleness window can use up."""
        rules = self.config.learning
        if self.config.crew.pace == "lockstep" or rules.stale == "drop":
            return True
        return len(self.waiting) <= rules.max_age * self._groups_per_step

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups on the log."""
        round = self.sampled_rounds
        policy, sampling = self.learner.policy, self.config.sampling
        problems = self.problems(self.me.name, round)
        prompts = [policy.vocabulary.encode(p.prompt) for p in problems]
        seed = _seed(self.config.crew.seed, self.me.name, round)
        completions = self.engine.sample(prompts, self.config.rollouts_per_group, sampling, seed)
        flat = [(problem, c) for problem, samples in zip(problems, completions, strict=True) for c in samples]
        rewards = self.task.score([p for p, _ in flat], [policy.vocabulary.decode(c.tokens) for _, c in flat])
        strange = [r for r in rewards if not abs(r) <= MAX_REWARD]
        if strange:
            raise ValueError(
                f"the task gave a reward of {strange[0]} in round {round}; expected a number of at most {MAX_REWARD:g} in size"
            )
        rollouts = [
            Rollout(tokens=c.tokens, logprobs=c.logprobs, reward=reward, ending=c.ending)
            for (_, c), reward in zip(flat, rewards, strict=True)
        ]
        origin = Origin(
            peer=self.me.name,
            model=policy.fingerprint,
            vocabulary=policy.vocabulary.fingerprint,
            version=policy.version,
            sampling=sampling,
        )
        size = self.config.rollouts_per_group
        for slot, problem in enumerate(problems):
            group = Group(
                crew=self.config.crew.name,
                problem=problem.id,
                round=round,
                slot=slot,
                origin=origin,
                rollouts=tuple(rollouts[slot * size : (slot + 1) * size]),
                created_s=self.clock.now_s(),
            )
            self.log.append(group.id, encode(group))
        self.sampled_rounds += 1
        return Sampled(sum(len(r.tokens) for r in rollouts), len(rollouts), sum(rewards) / len(rewards))

    # Learner half

    def receive(self) -> None:
        """Read the log from where this peer left off; admitted groups wait, others are counted."""
        while records := self.log.read(self.cursor):
            for position, record in records:
                self._take_in(position, record, arrived=self.learner.policy.version)
            self.cursor = records[-1][0]

    def _take_in(self, position: int, record: bytes, arrived: int) -> None:
        admitted = self.admission.admit(record)
        if admitted is None:
            return
        group, problem = admitted
        if not self._is_new(group):
            self.admission.refused[group.origin.peer, "duplicate"] += 1
            return
        horizontal = self.config.crew.layout == "horizontal"
        self.waiting.append(
            Candidate(
                group=group,
                problem=problem,
                own=group.origin.peer == self.me.name,
                family=f"{group.round}.{group.slot}" if horizontal else group.id,
                arrived=arrived,
                position=position,
            )
        )

    def _is_new(self, group: Group) -> bool:
        """Groups are admitted once, whatever id they stand under on the log."""
        sender, key = group.origin.peer, (group.origin.peer, group.round, group.slot)
        if group.round < self.complete[sender] or key in self.seen:
            return False
        self.seen.add(key)
        while (whole := {(sender, self.complete[sender], slot) for slot in range(self.config.problems_per_peer)}) <= self.seen:
            self.seen -= whole
            self.complete[sender] += 1
        return True

    def receive_and_learn(self) -> StepReport | None:
        self.receive()
        return self.learn()

    def learn(self) -> StepReport | None:
        """Take one step if what it waits for is there."""
        ready = self._ready()
        if not ready:
            return None
        selection = select(ready, self.config.learning, self.learner.policy.version, self._groups_per_step)
        self.dropped += selection.dropped
        gone = {c.position for c in ready} - {c.position for c in selection.wait}
        if self.config.crew.pace == "lockstep":  # a round is over once learned from: what was not taken is not wanted later
            self.dropped += Counter((c.group.origin.peer, "not selected") for c in selection.wait)
            gone = {c.position for c in ready}
        self.waiting = [c for c in self.waiting if c.position not in gone]
        if not selection.take:  # nothing fresh, or no own group yet to go with the foreign ones
            return None
        report = self.learner.step(selection.take)
        self.engine.refresh()
        self.learned_rounds += 1
        return report

    @property
    def _groups_per_step(self) -> int:
        """Groups of one round of the whole crew; in a horizontal crew every peer's part counts."""
        return self.config.crew.problems_per_round * self.config.authors_per_group

    def _ready(self) -> list[Candidate]:
        complete = self._complete_families()
        if self.config.crew.pace == "lockstep":
            complete = [c for c in complete if c.group.round == self.learned_rounds]
        return complete if len(complete) >= self._groups_per_step else []

    def _complete_families(self) -> list[Candidate]:
        """In a horizontal crew a group waits until every author's part is there. Ordered by group, not by arrival."""
        sizes = Counter(c.family for c in self.waiting)
        complete = [c for c in self.waiting if sizes[c.family] == self.config.authors_per_group]
        return sorted(complete, key=lambda c: (c.group.round, c.family, c.group.origin.peer))

    # State, for checkpoints. Random numbers need none: every draw is seeded by (crew seed, peer, round).

    def state(self) -> dict[str, Any]:
        return {
            "version": self.learner.policy.version,
            "sampled_rounds": self.sampled_rounds,
            "learned_rounds": self.learned_rounds,
            "cursor": self.cursor,
            "waiting": [[c.position, c.arrived] for c in self.waiting],
            "complete": dict(self.complete),
            "seen": sorted(self.seen),
            "success": self.learner.success.by_kind,
            "dropped": [[sender, reason, count] for (sender, reason), count in sorted(self.dropped.items())],
            "refused": [[sender, reason, count] for (sender, reason), count in sorted(self.admission.refused.items())],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.learner.policy.version = state["version"]
        self.sampled_rounds, self.learned_rounds = state["sampled_rounds"], state["learned_rounds"]
        self.cursor = state["cursor"]
        self.learner.success.by_kind = dict(state["success"])
        for position, arrived in state["waiting"]:
            ((_, record),) = self.log.read(position - 1, limit=1)
            self._take_in(position, record, arrived)
        self.complete = Counter(state["complete"])
        self.seen = {(sender, round, slot) for sender, round, slot in state["seen"]}
        self.dropped = Counter({(sender, reason): count for sender, reason, count in state["dropped"]})
        self.admission.refused = Counter({(sender, reason): count for sender, reason, count in state["refused"]})
        self.engine.refresh()


def _seed(crew_seed: int, peer: str, round: int) -> int:
    return int.from_bytes(hashlib.sha256(f"sample/{crew_seed}/{peer}/{round}".encode()).digest()[:7], "big")
