"""Peer: a participant that learns.

Its sampler half puts groups in the outbox (`sampler.py`), its learner half takes them from the log.

| half | consumes | produces | waits for |
|---|---|---|---|
| sampler | problems, own weights | groups for the log | nothing; under "pace", for the learner |
| learner, lockstep | one round | a version, a report | the whole round, or its close |
| learner, async | what is admitted and fresh | a version, a report | a round's worth |

The role `learner` runs the second half only, and publishes its versions for the samplers that
follow it. Who delivers the outbox, waits, closes rounds and saves is up to whoever drives the peer:
`crew.py`, `distributed/` or `sim/`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig
from motley.engines import Engine
from motley.exchange import Entry, Head, Log, Mark, Outbox, WireError
from motley.learning.learner import Learner, StepReport
from motley.learning.select import Candidate, select, stale_families
from motley.network import Weather
from motley.policies.following import Publisher
from motley.records import Backlog, Group, Problem, Rollout
from motley.sampler import Sampled, SamplerHalf, holds_up, rules_of
from motley.tasks import Task
from motley.trust import Admission, Admitted, known

MADE_KEPT = 4096  # versions


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
    weather: Weather
    learned_rounds: int = 0
    cursor: int = 0
    waiting: list[Candidate] = field(default_factory=list)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    # per sender: every group of the rounds below has been admitted
    complete: Counter[str] = field(default_factory=Counter)
    # (sender, round, slot) admitted of later rounds
    seen: set[tuple[str, int, int]] = field(default_factory=set)
    # version -> when it was made, as far back as the window may ask
    made_s: dict[int, float] = field(default_factory=dict)
    published: int = -1  # the newest version known to be on the log
    half: SamplerHalf = field(init=False)
    admission: Admission = field(init=False)
    publisher: Publisher | None = None  # of a learner

    def __post_init__(self) -> None:
        policy = self.learner.policy
        self.half = SamplerHalf(
            self.config,
            self.me,
            self.task,
            policy,
            self.engine,
            self.outbox,
            self.clock,
            self.weather,
            on_log=self._has,
        )
        score = self._score if self.config.crew.check_rewards else None
        self.admission = Admission(
            rules_of(self.config, policy), self.hub, lru_cache(maxsize=256)(self.problems), score
        )
        if self.me.role == "learner":
            channel = self.config.weights
            self.publisher = Publisher(
                policy, channel.precision, channel.anchor_every, channel.deltas
            )
        self.made_s[policy.version] = self.clock.now_s()

    def problems(self, peer: str, round: int) -> list[Problem]:
        """What a peer must answer in a round."""
        return self.half.problems(peer, round)

    def _score(self, problem: Problem, rollouts: Sequence[Rollout]) -> list[float]:
        return self.task.score(
            [problem] * len(rollouts),
            self.learner.policy.vocabulary.decode_all(r.tokens for r in rollouts),
        )

    # Sampler half

    @property
    def sampled_rounds(self) -> int:
        return self.half.sampled_rounds

    @sampled_rounds.setter
    def sampled_rounds(self, rounds: int) -> None:
        self.half.sampled_rounds = rounds

    def may_sample(self) -> bool:
        """With stale = "pace" the sampler waits while more is waiting than the staleness window can
        use up.
        """
        if self.me.role == "learner":
            return False
        if self.config.crew.pace == "lockstep" or self.config.learning.stale == "drop":
            return True
        return not holds_up(self.backlog, self.me.name, self.config)

    def sample(self) -> Sampled:
        """Answer the next round's problems and put the groups in the outbox.

        What was sampled before a crash is not sampled again.
        """
        return self.half.sample()

    def sampled_in(self, round: int) -> Sampled | None:
        """What the outbox knows of a round that was sampled before."""
        return self.half.sampled_in(round)

    def publish(self) -> None:
        """Bring the outbox to the log."""
        self.outbox.deliver(self.log)

    # Learner half

    def receive(self, until: int | None = None) -> None:
        """Read the log from where this peer left off, at most to a position; admitted groups wait,
        others are counted.
        """
        while entries := self.log.read(self.cursor):
            for entry in entries:
                if until is not None and entry.position > until:
                    return
                admitted = self.admission.admit(entry)
                if isinstance(admitted, Admitted):
                    self._take_in(entry, admitted)
                self.cursor = entry.position

    def _take_in(self, entry: Entry, admitted: Admitted) -> None:
        group = admitted.group
        if not self._is_new(group):
            self.admission.refuse(entry, "duplicate", f"{group.id} was admitted before")
        elif self._is_own(group) and group.origin.version > self.learner.policy.version:
            self.admission.refuse(
                entry,
                "version",
                f"sampled with version {group.origin.version} of this learner, which has not "
                "made it",
            )
        elif self.config.crew.pace == "lockstep" and group.round < self.learned_rounds:
            self.dropped[group.origin.peer, "late"] += 1
        else:
            since = group.origin.version if self._is_own(group) else self.learner.policy.version
            self.waiting.append(
                self._candidate(entry.position, admitted, since, self.clock.now_s())
            )

    def _is_own(self, group: Group) -> bool:
        """Sampled with this learner's weights, of whatever version: by itself, or by a sampler that
        follows it.
        """
        return self.config.student_of(group.origin.peer) == self.me.name

    def _candidate(self, position: int, admitted: Admitted, since: int, came_s: float) -> Candidate:
        group = admitted.group
        horizontal = self.config.crew.layout == "horizontal"
        return Candidate(
            group=group,
            problem=admitted.problem,
            own=self._is_own(group),
            family=f"{group.round}.{group.slot}" if horizontal else group.id,
            since=since,
            came_s=came_s,
            position=position,
            hash=admitted.hash,
        )

    def _is_new(self, group: Group) -> bool:
        """Groups are admitted once, whatever a log may show."""
        if self._has(group):
            return False
        sender = group.origin.peer
        self.seen.add((sender, group.round, group.slot))
        while (
            whole := {
                (sender, self.complete[sender], slot)
                for slot in range(self.config.problems_per_peer)
            }
        ) <= self.seen:
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

    def choose(self, closed: bool = False, again: Sequence[int] = ()) -> list[Candidate] | None:
        """What the next step learns from; None: wait for more.

        Empty: a lockstep round of which nothing may be taken.

        `closed`: do with what is there of the round, or of a horizontal group, if it comes from a
        quorum of peers. `again`: positions that the same step took before a crash. They decide
        where the window is in seconds, which have passed since.
        """
        if again and self.config.learning.max_age_s:
            wanted = set(again)
            found = {c.position: c for c in self.waiting if c.position in wanted}
            self.waiting = [c for c in self.waiting if c.position not in found]
            return [found[position] for position in again if position in found] or None
        if self.config.crew.pace == "async" and self.config.learning.stale == "drop":
            self._drop_stale(closed)
        ready = self._ready(closed)
        if not ready:
            return None
        selection = select(ready, self.config.learning, self.config.crew.problems_per_round)
        used = {c.position for c in ready} - {c.position for c in selection.wait}
        self.waiting = [c for c in self.waiting if c.position not in used]
        # a round is over once learned from: what was not taken is not wanted later
        if self.config.crew.pace == "lockstep":
            self._drop(lambda c: c.group.round <= self.learned_rounds, "not selected")
        # no own group yet to go with the foreign ones
        if not selection.take and self.config.crew.pace == "async":
            return None
        return selection.take

    def step(
        self, chosen: list[Candidate], again: bool = False, refresh: bool = True
    ) -> StepReport | None:
        """Learn from what was chosen; the round is over.

        `again`: as before a crash, which says nothing of what has become stale since. `refresh`
        False: the engine keeps the weights of before, because it samples with them; `half.refresh`
        is then to follow.
        """
        self.learned_rounds += 1
        if not chosen:
            return None
        report = self.learner.step(chosen)
        if refresh:
            self.half.refresh()
        self.made_s[self.learner.policy.version] = self.clock.now_s()
        if len(self.made_s) > MADE_KEPT:
            del self.made_s[min(self.made_s)]
        if (
            self.config.crew.pace == "async"
            and self.config.learning.stale == "drop"
            and not (again and self.config.learning.max_age_s)
        ):
            self._drop_incomplete()
        return report

    def _drop(self, unwanted: Callable[[Candidate], bool], reason: str) -> None:
        gone = [c for c in self.waiting if unwanted(c)]
        self.dropped += Counter((c.group.origin.peer, reason) for c in gone)
        self.waiting = [c for c in self.waiting if not unwanted(c)]

    def _drop_stale(self, closed: bool) -> None:
        whole = self._whole_families(closed)
        gone = self._stale_families(whole)
        if gone:
            positions = {c.position for c in whole if c.family in gone}
            self._drop(lambda c: c.position in positions, "stale")

    def _drop_incomplete(self) -> None:
        """A horizontal group that stayed without all its parts for the staleness window will not be
        whole any more.
        """
        whole = {c.position for c in self._whole_families(closed=False)}
        gone = self._stale_families([c for c in self.waiting if c.position not in whole])
        self._drop(lambda c: c.position not in whole and c.family in gone, "incomplete")

    def _stale_families(self, candidates: Sequence[Candidate]) -> set[str]:
        rules = self.config.learning
        if rules.max_age_s:
            return stale_families(candidates, rules.max_age_s, self._age_s)
        return stale_families(
            candidates, rules.max_age, lambda c: c.age(self.learner.policy.version)
        )

    def _age_s(self, candidate: Candidate) -> float:
        """Seconds since a group's weights were superseded here, for own ones; since it came, for
        others.

        Weights that nothing newer has replaced do not age: a crew that was silent for long must be
        able to go on.
        """
        if not candidate.own:
            return self.clock.now_s() - candidate.came_s
        if candidate.since >= self.learner.policy.version:
            return 0.0
        return self.clock.now_s() - self.made_s.get(candidate.since + 1, min(self.made_s.values()))

    @property
    def backlog(self) -> Backlog:
        return Backlog(
            waiting=tuple(sorted(Counter(c.group.origin.peer for c in self.waiting).items())),
            oldest_s=max(0.0, max((self._age_s(c) for c in self.waiting), default=0.0)),
        )

    # Weights, for the samplers that follow a learner

    def publish_weights(self) -> None:
        """Put the present version in the outbox, if it is one to publish.

        One that was published before a crash is not again.

        While one is on its way the next ones are left out: samplers want the newest, not a queue of
        all. So it is asked again when the way is free: paced samplers wait for the news that there
        is little left to learn from.
        """
        version, last = self.learner.policy.version, self.config.crew.rounds
        if self.publisher is None or self.publisher.version == version:
            return
        if version != last and (version % self.config.weights.every or len(self.outbox)):
            return
        # also of one that is out already: the next change is against it
        made = self.publisher.make()
        if self.outbox.note_of(Mark("version", version)) is not None or version <= self.published:
            return
        now_s = self.clock.now_s()
        record = made.record(
            self.config.crew.name,
            self.me.name,
            version,
            self.config.weights.precision,
            self.backlog,
            now_s,
        )
        self.outbox.put(
            [record],
            Mark("version", version),
            due_s=self.weather.sent(f"weights.{version}", now_s),
            blobs=made.contents(),
        )

    @property
    def crewmates(self) -> list[str]:
        """Everyone who samples and whose groups count."""
        return [name for name in self.config.authors if name not in self.admission.revoked]

    def awaited(self) -> list[str]:
        """In lockstep: whose groups of the present round are not all there."""
        there = Counter(
            c.group.origin.peer for c in self.waiting if c.group.round == self.learned_rounds
        )
        return [name for name in self.crewmates if there[name] < self.config.problems_per_peer]

    @property
    def _quorum(self) -> int:
        return min(self.config.quorum, len(self.crewmates))

    def _ready(self, closed: bool) -> list[Candidate]:
        groups = self._whole_families(closed)
        if self.config.crew.pace == "async":
            enough = len({c.family for c in groups}) >= self.config.crew.problems_per_round
            return self._in_order(groups) if enough else []
        # In lockstep nothing is stale: how early a crewmate's groups came must not matter.
        groups = [
            replace(c, since=self.learner.policy.version)
            for c in groups
            if c.group.round == self.learned_rounds
        ]
        enough = not self.awaited() or (
            closed and len({c.group.origin.peer for c in groups}) >= self._quorum
        )
        return groups if enough else []

    def _in_order(self, groups: list[Candidate]) -> list[Candidate]:
        """Freshest first: what is left over ages and is dropped.

        With "pace" nothing is dropped, and the oldest go first.
        """
        if self.config.learning.stale == "pace":
            return groups
        newest: dict[str, int] = {}
        for c in groups:
            newest[c.family] = max(c.since, newest.get(c.family, c.since))
        return sorted(groups, key=lambda c: -newest[c.family])

    def _whole_families(self, closed: bool) -> list[Candidate]:
        """In a horizontal crew a group waits until every author's part is there.

        Ordered by group, not by arrival.
        """
        whole = self.waiting
        if self.config.crew.layout == "horizontal":
            authors: dict[str, set[str]] = {}
            for c in self.waiting:
                authors.setdefault(c.family, set()).add(c.group.origin.peer)
            enough = (
                (lambda found: len(found) >= self._quorum)
                if closed
                else set(self.crewmates).issubset
            )
            whole = [c for c in self.waiting if enough(authors[c.family])]
        return sorted(whole, key=lambda c: (c.group.round, c.family, c.group.origin.peer))

    # State, for checkpoints. Random numbers need none: every draw is seeded by (crew seed, peer,
    # round).

    def state(self) -> dict[str, Any]:
        head = self.outbox.head
        return {
            "version": self.learner.policy.version,
            "token_budget": self.learner.token_budget,
            "dtype": str(self.learner.policy.dtype),
            "sampled_rounds": self.sampled_rounds,
            "learned_rounds": self.learned_rounds,
            "cursor": self.cursor,
            "waiting": [[c.position, c.since, c.came_s] for c in self.waiting],
            "made_s": sorted(self.made_s.items()),
            "complete": dict(self.complete),
            "seen": sorted(self.seen),
            "success": self.learner.success.by_kind,
            "dropped": [
                [sender, reason, count] for (sender, reason), count in sorted(self.dropped.items())
            ],
            "admission": self.admission.state(),
            "head": [head.counter, head.previous.hex()],
        }

    def load_state(self, state: dict[str, Any]) -> None:
        policy = self.learner.policy
        if state["dtype"] != str(policy.dtype):
            raise ValueError(
                f"peer {self.me.name} computed in {state['dtype']} and now would in "
                f"{policy.dtype}; "
                f"set dtype = {state['dtype'].removeprefix('torch.')!r} for it in the run's "
                "config.toml"
            )
        policy.version = state["version"]
        if not self.config.learning.token_budget:
            self.learner.token_budget = state["token_budget"]
        self.sampled_rounds, self.learned_rounds = state["sampled_rounds"], state["learned_rounds"]
        self.cursor = state["cursor"]
        self.learner.success.by_kind = dict(state["success"])
        self.made_s = dict(state["made_s"])
        self.waiting = self._waiting_again(
            {position: (since, came_s) for position, since, came_s in state["waiting"]}
        )
        self.complete = Counter(state["complete"])
        self.seen = {(sender, round, slot) for sender, round, slot in state["seen"]}
        self.dropped = Counter(
            {(sender, reason): count for sender, reason, count in state["dropped"]}
        )
        self.admission.load_state(state["admission"])
        counter, previous = state["head"]
        # an outbox that outlived the checkpoint is further; one without a file begins here
        if counter > self.outbox.head.counter:
            self.outbox.head = Head(counter, bytes.fromhex(previous))
        self.half.refresh()

    def _waiting_again(self, since: dict[int, tuple[int, float]]) -> list[Candidate]:
        found: list[Candidate] = []
        after = min(since, default=1) - 1
        while len(found) < len(since):
            entries = self.log.read(after)
            if not entries:
                raise ValueError(
                    f"the log ends before position {max(since)}, which this peer had read; is it "
                    "another log?"
                )
            wanted = [entry for entry in entries if entry.position in since]
            found += [
                self._candidate(entry.position, self._known(entry), *since[entry.position])
                for entry in wanted
            ]
            after = entries[-1].position
        return found

    def _known(self, entry: Entry) -> Admitted:
        """A group that was admitted before."""
        try:
            group, hash = known(entry)
            if isinstance(group, Group):
                return Admitted(
                    group, self.problems(group.origin.peer, group.round)[group.slot], hash
                )
        except (WireError, IndexError):
            pass
        raise ValueError(
            f"the log has no group at position {entry.position}, where this peer had read one; is "
            "it another log?"
        )
