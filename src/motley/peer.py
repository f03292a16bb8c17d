"""Peer: one participant. The sampler half puts groups in the outbox, the learner half takes them from the log; nothing else is shared.

| half | consumes | produces | waits for |
|---|---|---|---|
| sampler | the round's problems, own weights | groups for the log | nothing; with stale = "pace", for the learner to catch up |
| learner, lockstep | the groups of one round | a version, a report | every peer's groups of the round, or its close |
| learner, async | whatever is admitted and fresh | a version, a report | as many groups as a round of the crew has |

Who delivers the outbox, waits, closes rounds and saves is up to whoever drives the peer: `crew.py` or `member.py`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import msgspec

from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig
from motley.engines import Engine
from motley.exchange import Entry, Head, Log, Outbox, WireError
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate, select
from motley.records import Group, Origin, Problem, Rollout
from motley.tasks import Task, assign
from motley.trust import MAX_REWARD, Admission, Admitted, Rules, known


class Sampled(msgspec.Struct, frozen=True):
    """What the sampler half did in one round."""

    num_tokens: int
    reward: float  # mean
    fresh: bool = True  # not found in the outbox after a crash


@dataclass(slots=True)
class Peer:
    config: CrewConfig
    me: PeerConfig
    task: Task
    learner: Learner
    engine: Engine
    log: Log
    outbox: Outbox
    hub: bytes  # the key whose rosters count
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
            vocabulary=vocabulary.fingerprint,
            vocabulary_size=vocabulary.size,
            end_id=vocabulary.end_id,
            rollouts_per_group=self.config.rollouts_per_group,
            max_tokens=self.config.sampling.max_tokens,
            rounds=self.config.crew.rounds,
        )
        score = self._score if self.config.crew.check_rewards else None
        self.admission = Admission(rules, self.hub, lru_cache(maxsize=256)(self.problems), score)

    def problems(self, peer: str, round: int) -> list[Problem]:
        """What a peer must answer in a round."""
        name = "" if self.config.crew.layout == "horizontal" else peer
        return assign(self.task, self.config.crew.seed, name, round, self.config.problems_per_peer)

    def _score(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        return self.task.score([problem] * len(rollouts), [self.learner.policy.vocabulary.decode(r.tokens) for r in rollouts])

    # Sampler half

    def may_sample(self) -> bool:
        """With stale = "pace" the sampler waits while more is waiting than the staleness window can use up."""
        rules = self.config.learning
        if self.config.crew.pace == "lockstep" or rules.stale == "drop":
            return True
        return len(self.waiting) <= rules.max_age * self.config.crew.problems_per_round * self.config.authors_per_group

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups in the outbox. What was sampled before a crash is not sampled again."""
        sampled = self.sampled_in(self.sampled_rounds) or self._sample(self.sampled_rounds)
        self.sampled_rounds += 1
        return sampled

    def sampled_in(self, round: int) -> Sampled | None:
        """What the outbox knows of a round that was sampled before."""
        note = self.outbox.note_of(round)
        return None if note is None else msgspec.structs.replace(msgspec.msgpack.decode(note, type=Sampled), fresh=False)

    def publish(self) -> None:
        """Bring the outbox to the log."""
        self.outbox.deliver(self.log)

    def _sample(self, round: int) -> Sampled:
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
        groups = [
            Group(
                crew=self.config.crew.name,
                problem=problem.id,
                round=round,
                slot=slot,
                origin=origin,
                rollouts=tuple(rollouts[slot * size : (slot + 1) * size]),
                created_s=self.clock.now_s(),
            )
            for slot, problem in enumerate(problems)
        ]
        sampled = Sampled(sum(len(r.tokens) for r in rollouts), sum(rewards) / len(rewards))
        unknown = [group for group in groups if not self._has(group)]  # others are on the log, of an outbox that was lost
        self.outbox.put(unknown, round, msgspec.msgpack.encode(sampled))
        return sampled

    # Learner half

    def receive(self, until: int | None = None) -> None:
        """Read the log from where this peer left off, at most to a position; admitted groups wait, others are counted."""
        while entries := self.log.read(self.cursor):
            for entry in entries:
                if until is not None and entry.position > until:
                    return
                admitted = self.admission.admit(entry)
                if admitted:
                    self._take_in(entry, admitted)
                self.cursor = entry.position

    def _take_in(self, entry: Entry, admitted: Admitted) -> None:
        group = admitted.group
        if not self._is_new(group):
            self.admission.refuse(entry, "duplicate", f"{group.id} was admitted before")
        elif self.config.crew.pace == "lockstep" and group.round < self.learned_rounds:
            self.dropped[group.origin.peer, "late"] += 1
        else:
            self.waiting.append(self._candidate(entry.position, admitted, self.learner.policy.version))

    def _candidate(self, position: int, admitted: Admitted, arrived: int) -> Candidate:
        group = admitted.group
        horizontal = self.config.crew.layout == "horizontal"
        return Candidate(
            group=group,
            problem=admitted.problem,
            own=group.origin.peer == self.me.name,
            family=f"{group.round}.{group.slot}" if horizontal else group.id,
            arrived=arrived,
            position=position,
            hash=admitted.hash,
        )

    def _is_new(self, group: Group) -> bool:
        """Groups are admitted once, whatever a log may show."""
        if self._has(group):
            return False
        sender = group.origin.peer
        self.seen.add((sender, group.round, group.slot))
        while (whole := {(sender, self.complete[sender], slot) for slot in range(self.config.problems_per_peer)}) <= self.seen:
            self.seen -= whole
            self.complete[sender] += 1
        return True

    def _has(self, group: Group) -> bool:
        """Whether this very group, or another under its id, was admitted."""
        sender = group.origin.peer
        return group.round < self.complete[sender] or (sender, group.round, group.slot) in self.seen

    def learn(self, closed: bool = False) -> StepReport | None:
        """Take one step if what it waits for is there."""
        chosen = self.choose(closed)
        return None if chosen is None else self.step(chosen)

    def choose(self, closed: bool = False) -> list[Candidate] | None:
        """What the next step learns from; None: wait for more. Empty: a lockstep round of which nothing may be taken.

        `closed`: do with what is there of the round, or of a horizontal group, if it comes from a quorum of peers.
        """
        ready = self._ready(closed)
        if not ready:
            return None
        selection = select(ready, self.config.learning, self.learner.policy.version, self.config.crew.problems_per_round)
        self.dropped += selection.dropped
        used = {c.position for c in ready} - {c.position for c in selection.wait}
        self.waiting = [c for c in self.waiting if c.position not in used]
        if self.config.crew.pace == "lockstep":  # a round is over once learned from: what was not taken is not wanted later
            self._drop(lambda c: c.group.round <= self.learned_rounds, "not selected")
        if not selection.take and self.config.crew.pace == "async":  # nothing fresh, or no own group yet to go with the foreign ones
            return None
        return selection.take

    def step(self, chosen: list[Candidate]) -> StepReport | None:
        """Learn from what was chosen; the round is over."""
        self.learned_rounds += 1
        if not chosen:
            return None
        report = self.learner.step(chosen)
        self.engine.refresh()
        if self.config.crew.pace == "async" and self.config.learning.stale == "drop":
            self._drop_incomplete()
        return report

    def _drop(self, unwanted: Callable[[Candidate], bool], reason: str) -> None:
        gone = [c for c in self.waiting if unwanted(c)]
        self.dropped += Counter((c.group.origin.peer, reason) for c in gone)
        self.waiting = [c for c in self.waiting if not unwanted(c)]

    def _drop_incomplete(self) -> None:
        """A horizontal group that stayed without all its parts for the staleness window will not be whole any more."""
        newest: dict[str, int] = {}
        for c in self.waiting:
            newest[c.family] = max(c.arrived, newest.get(c.family, c.arrived))
        whole = {c.position for c in self._whole_families(closed=False)}
        oldest = self.learner.policy.version - self.config.learning.max_age
        self._drop(lambda c: c.position not in whole and newest[c.family] < oldest, "incomplete")

    @property
    def crewmates(self) -> list[str]:
        """Everyone whose groups count, self included."""
        return [p.name for p in self.config.peer if p.name not in self.admission.revoked]

    def awaited(self) -> list[str]:
        """In lockstep: whose groups of the present round are not all there."""
        there = Counter(c.group.origin.peer for c in self.waiting if c.group.round == self.learned_rounds)
        return [name for name in self.crewmates if there[name] < self.config.problems_per_peer]

    @property
    def _quorum(self) -> int:
        return min(self.config.quorum, len(self.crewmates))

    def _ready(self, closed: bool) -> list[Candidate]:
        groups = self._whole_families(closed)
        if self.config.crew.pace == "async":
            return groups if len({c.family for c in groups}) >= self.config.crew.problems_per_round else []
        # In lockstep nothing is stale: how early a crewmate's groups came must not matter.
        groups = [replace(c, arrived=self.learner.policy.version) for c in groups if c.group.round == self.learned_rounds]
        enough = not self.awaited() or (closed and len({c.group.origin.peer for c in groups}) >= self._quorum)
        return groups if enough else []

    def _whole_families(self, closed: bool) -> list[Candidate]:
        """In a horizontal crew a group waits until every author's part is there. Ordered by group, not by arrival."""
        whole = self.waiting
        if self.config.crew.layout == "horizontal":
            authors: dict[str, set[str]] = {}
            for c in self.waiting:
                authors.setdefault(c.family, set()).add(c.group.origin.peer)
            enough = (lambda found: len(found) >= self._quorum) if closed else set(self.crewmates).issubset
            whole = [c for c in self.waiting if enough(authors[c.family])]
        return sorted(whole, key=lambda c: (c.group.round, c.family, c.group.origin.peer))

    # State, for checkpoints. Random numbers need none: every draw is seeded by (crew seed, peer, round).

    def state(self) -> dict[str, Any]:
        head = self.outbox.head
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
            "admission": self.admission.state(),
            "head": [head.counter, head.previous.hex()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.learner.policy.version = state["version"]
        self.sampled_rounds, self.learned_rounds = state["sampled_rounds"], state["learned_rounds"]
        self.cursor = state["cursor"]
        self.learner.success.by_kind = dict(state["success"])
        self.waiting = self._waiting_again(dict(state["waiting"]))
        self.complete = Counter(state["complete"])
        self.seen = {(sender, round, slot) for sender, round, slot in state["seen"]}
        self.dropped = Counter({(sender, reason): count for sender, reason, count in state["dropped"]})
        self.admission.load_state(state["admission"])
        counter, previous = state["head"]
        if counter > self.outbox.head.counter:  # an outbox that outlived the checkpoint is further; one without a file begins here
            self.outbox.head = Head(counter, bytes.fromhex(previous))
        self.engine.refresh()

    def _waiting_again(self, arrived: dict[int, int]) -> list[Candidate]:
        found: list[Candidate] = []
        after = min(arrived, default=1) - 1
        while len(found) < len(arrived):
            entries = self.log.read(after)
            if not entries:
                raise ValueError(f"the log ends before position {max(arrived)}, which this peer had read; is it another log?")
            wanted = [entry for entry in entries if entry.position in arrived]
            found += [self._candidate(entry.position, self._known(entry), arrived[entry.position]) for entry in wanted]
            after = entries[-1].position
        return found

    def _known(self, entry: Entry) -> Admitted:
        """A group that was admitted before."""
        try:
            group, hash = known(entry)
            if isinstance(group, Group):
                return Admitted(group, self.problems(group.origin.peer, group.round)[group.slot], hash)
        except (WireError, IndexError):
            pass
        raise ValueError(f"the log has no group at position {entry.position}, where this peer had read one; is it another log?")


def _seed(crew_seed: int, peer: str, round: int) -> int:
    return int.from_bytes(hashlib.sha256(f"sample/{crew_seed}/{peer}/{round}".encode()).digest()[:7], "big")
