"""Waiting: the admitted groups that no step has taken yet.

Owns how old they are, which belong together, and which are dropped as too old or never whole. When
a step may take some of them is up to the crew's pace (`pace.py`). Knows no log and no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from motley.clock import Clock
from motley.config import CrewConfig, Learning
from motley.learning.select import Candidate, select, stale_families
from motley.records import Backlog

MADE_KEPT = 4096  # versions
MAX_LET_GO = 4096  # groups between two steps of which it is kept why they were dropped


@dataclass(frozen=True, slots=True)
class Wait:
    """There is not enough for a step yet."""


@dataclass(frozen=True, slots=True)
class Take:
    """What the next step learns from; empty: a round of which nothing may be taken."""

    groups: tuple[Candidate, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Where the groups stand in the log."""
        return tuple(c.position for c in self.groups)


@dataclass(frozen=True, slots=True)
class Round:
    """The turn for which a step is looked for."""

    number: int  # rounds learned from before it
    crewmates: Sequence[str]  # everyone who samples and whose groups count
    quorum: int  # peers without whose groups it does not go on
    closed: bool = False  # do with what is there, if it comes from a quorum


@dataclass(slots=True)
class StalenessWindow:
    """The staleness window: how old a group is on this learner's clock, and which are too old.

    In versions, or in seconds where the crew file says so.
    """

    rules: Learning
    clock: Clock
    version: int  # the newest made here
    # version -> when it was made, as far back as may be asked
    made_s: dict[int, float] = field(default_factory=dict)

    def made(self, version: int) -> None:
        """There is a new version from now on."""
        self.version = version
        self.made_s[version] = self.clock.now_s()
        if len(self.made_s) > MADE_KEPT:
            del self.made_s[min(self.made_s)]

    def stale_families(self, candidates: Sequence[Candidate]) -> set[str]:
        if self.rules.max_age_s:
            return stale_families(candidates, self.rules.max_age_s, self.age_s)
        return stale_families(candidates, self.rules.max_age, lambda c: c.age(self.version))

    def age_s(self, candidate: Candidate) -> float:
        """Count seconds: since own weights were superseded, since a foreign group came.

        Weights that nothing newer has replaced do not age: a crew that was silent for long must be
        able to go on.
        """
        if not candidate.own:
            return self.clock.now_s() - candidate.came_s
        if candidate.since >= self.version:
            return 0.0
        return self.clock.now_s() - self.made_s.get(candidate.since + 1, min(self.made_s.values()))


@dataclass(slots=True)
class Waiting:
    """Iterates over what waits, in the order it was added."""

    config: CrewConfig
    window: StalenessWindow
    me: str  # who learns from it
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)  # (sender, reason) -> count
    let_go: dict[int, str] = field(default_factory=dict)  # position -> reason, since the last step
    per_step: int = field(init=False)  # problems
    own_per_step: int = field(init=False)  # of them sampled by this learner; 0: by anybody
    _sender_share: float = field(init=False)
    _candidates: list[Candidate] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_step = self.config.problems_per_step(self.me)
        self.own_per_step = own_per_step(self.config, self.me)
        self._sender_share = self.config.sender_share(self.me)

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._candidates)

    def __len__(self) -> int:
        return len(self._candidates)

    def add(self, candidate: Candidate) -> None:
        self._candidates.append(candidate)

    def restore(self, candidates: Sequence[Candidate], dropped: Counter[tuple[str, str]]) -> None:
        """Go on from a checkpoint."""
        self._candidates, self.dropped = list(candidates), dropped

    @property
    def backlog(self) -> Backlog:
        """What samplers are told of how much waits."""
        return Backlog(
            waiting=tuple(sorted(self.authors.items())),
            oldest_s=max(0.0, max(map(self.window.age_s, self), default=0.0)),
        )

    @property
    def authors(self) -> Counter[str]:
        """How many answers wait of each; continuations wait for nobody."""
        return Counter(c.group.origin.peer for c in self if not c.group.branch)

    @property
    def num_own(self) -> int:
        """How many answers wait that were sampled with own weights."""
        return sum(c.own and not c.group.branch for c in self)

    # Taking

    def take(self, ready: Sequence[Candidate], own_most: int = 0) -> tuple[Candidate, ...]:
        """Select from what is ready by the crew's rules; what is selected waits no longer.

        `own_most`: see `select`.
        """
        crew = self.config.crew
        # a horizontal crew shares every group evenly
        share = 1.0 if crew.layout == "horizontal" else self._sender_share
        # own continuations come beside: they take no place of anybody's answers
        beside = [c for c in ready if c.group.branch]
        answers = [c for c in ready if not c.group.branch]
        selection = select(answers, self.config.learning, self.per_step, share, own_most)
        if not selection.take:
            return ()
        used = {c.position for c in ready} - {c.position for c in selection.wait}
        self._keep(lambda c: c.position not in used)
        return (*selection.take, *beside)

    def take_again(self, positions: Sequence[int]) -> Wait | Take:
        """Take what the same step took before a crash, as far as it is there."""
        wanted = set(positions)
        there = {c.position: c for c in self if c.position in wanted}
        self._keep(lambda c: c.position not in there)
        taken = tuple(there[position] for position in positions if position in there)
        return Take(taken) if taken else Wait()

    def whole_families(self, round: Round) -> list[Candidate]:
        """Give the groups that have all their parts, ordered by group, not by arrival.

        In a horizontal crew a group waits until every author's part is there, or, once the round is
        closed, those of a quorum.
        """
        whole = self._candidates
        if self.config.crew.layout == "horizontal":
            authors: dict[str, set[str]] = {}
            for c in self:
                authors.setdefault(c.family, set()).add(c.group.origin.peer)
            enough = (
                (lambda there: len(there) >= round.quorum)
                if round.closed
                else set(round.crewmates).issubset
            )
            whole = [c for c in self if c.group.branch or enough(authors[c.family])]
        return sorted(whole, key=lambda c: (c.group.round, c.family, c.group.origin.peer))

    # Dropping

    def drop(self, unwanted: Callable[[Candidate], bool], reason: str) -> None:
        """Let go of groups, and count them under a reason."""
        for candidate in filter(unwanted, self):
            self.drop_at_once(candidate.group.origin.peer, reason, candidate.position)
        self._keep(lambda c: not unwanted(c))

    def drop_at_once(self, sender: str, reason: str, position: int) -> None:
        """Count a group that does not wait at all: its round is over, or its sender is muted."""
        self.dropped[sender, reason] += 1
        self.pass_by(reason, position)

    def pass_by(self, reason: str, position: int) -> None:
        """Say why a group is not learned from; nothing is lost with it."""
        if len(self.let_go) < MAX_LET_GO:
            self.let_go[position] = reason

    def without(self, muted: Sequence[str], taken: Sequence[Candidate]) -> list[Candidate]:
        """What a step takes, but for what is of these senders."""
        for candidate in taken:
            if candidate.group.origin.peer in muted and len(self.let_go) < MAX_LET_GO:
                self.let_go[candidate.position] = "muted"
        return [c for c in taken if c.group.origin.peer not in muted]

    def drop_stale(self, round: Round) -> None:
        """Let go of whole families that are past the staleness window."""
        whole = self.whole_families(round)
        stale = self.window.stale_families(whole)
        if stale:
            positions = {c.position for c in whole if c.family in stale}
            self.drop(lambda c: c.position in positions, "stale")

    def drop_incomplete(self, round: Round) -> None:
        """Let go of horizontal groups that will not be whole any more.

        They stayed without some of their parts for the staleness window.
        """
        whole = {c.position for c in self.whole_families(round)}
        stale = self.window.stale_families([c for c in self if c.position not in whole])
        self.drop(lambda c: c.position not in whole and c.family in stale, "incomplete")

    def _keep(self, wanted: Callable[[Candidate], bool]) -> None:
        self._candidates = [c for c in self if wanted(c)]


def own_per_step(config: CrewConfig, learner: str) -> int:
    """How many problems of an asynchronous step a learner samples itself: its share of a round.

    0: a step takes whatever has come. So it is for a role that only learns, and in a horizontal
    crew, where everyone has a part of every group.
    """
    samples = config.named(learner).role == "peer" and config.crew.layout == "vertical"
    return config.problems_per_peer if samples else 0
