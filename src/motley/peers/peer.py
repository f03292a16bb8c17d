"""Peer: a participant that learns.

Its sampler half puts groups in the outbox (`sampling.py`), its learner half takes them off the log.

| half | consumes | produces | waits for |
|---|---|---|---|
| sampler | problems, own weights | groups for the log | as the crew's pace says |
| learner | what is admitted, by that pace | a version, a report | the same (`learning/pace.py`) |

The role `learner` runs the second half only, and publishes its versions for the samplers that
follow it. Who delivers the outbox, waits, closes rounds and saves is up to whoever drives the peer:
`runs/local.py`, `distributed/` or `sim/`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import InitVar, dataclass, field

from motley.config import CrewConfig, PeerConfig
from motley.exchange import Entry, Log, LogError
from motley.learning.hearing import Hearing
from motley.learning.learner import Learner, StepReport
from motley.learning.pace import ROUNDS_AHEAD, Pace, Turns, pace_of
from motley.learning.select import Candidate
from motley.learning.waiting import Round, StalenessWindow, Take, Wait, Waiting
from motley.peers.arrivals import Arrival, EarlyGroup, EarlyGroups, EndsEarlyError
from motley.peers.publications import Publications
from motley.peers.reading import ReadingBudget
from motley.peers.rescoring import admission_of
from motley.peers.sampling import SamplerHalf
from motley.peers.scrutiny import Scrutiny, scrutiny_of
from motley.peers.state import (
    PeerState,
    Reader,
    candidates_of,
    check_dtype,
    go_on_from,
    heard_again,
    is_own,
    reader_of,
    refused_for_rewards,
    remembered_again,
    tables_again,
    waiting_again,
)
from motley.peers.teaching import Teaching, teaching_of
from motley.records import Roster
from motley.trust import (
    Admission,
    Admitted,
    AdmittedGroups,
    ReasonCount,
    RefusedRecord,
)
from motley.trust.admitted import GroupPlace
from motley.trust.steadiness import FOR_REWARDS


@dataclass(frozen=True, slots=True)
class Learned:
    """A round is over."""

    report: StepReport | None  # None: there was nothing to take


@dataclass(slots=True)
class Peer:
    half: SamplerHalf
    learner: Learner
    log: Log
    hub: InitVar[bytes]  # the key whose rosters count
    learned_rounds: int = 0
    cursor: int = 0
    pace: Pace = field(init=False)
    hearing: Hearing = field(init=False)
    waiting: Waiting = field(init=False)
    admission: Admission = field(init=False)
    admitted: AdmittedGroups = field(init=False)
    scrutiny: Scrutiny = field(init=False)
    teaching: Teaching = field(init=False)
    reader: Reader = field(init=False)
    arrived: list[tuple[Admitted, Arrival]] = field(default_factory=list)  # not waiting yet
    early: EarlyGroups = field(default_factory=EarlyGroups)
    missed: dict[str, int] = field(default_factory=dict)  # last round let go of, by sender
    weights: Publications | None = None  # of a learner, for its samplers

    def __post_init__(self, hub: bytes) -> None:
        half, policy = self.half, self.learner.policy
        self.pace = pace_of(self.config)
        window = StalenessWindow(self.config.learning, half.clock, policy.version)
        window.made(policy.version)
        self.waiting = Waiting(self.config, window, self.me.name)
        self.hearing = Hearing(self.config, self.me.name)
        always = self.hearing.is_always_heard
        self.admitted = AdmittedGroups(self.config.problems_per_peer, always)
        half.on_log = self.admitted.__contains__
        self.admission = admission_of(half, hub, always)
        self.reader = reader_of(half)
        self.scrutiny, self.teaching = scrutiny_of(half), teaching_of(self.reader)
        if self.me.role == "learner":
            self.weights = Publications(half, self.waiting)

    @property
    def config(self) -> CrewConfig:
        return self.half.config

    @property
    def me(self) -> PeerConfig:
        return self.half.me

    # Publishing

    def may_sample(self, replayed: bool = False) -> bool:
        """Whether it is time to sample the next round.

        `replayed`: the next step was taken before a crash.
        """
        unread = self.half.sampled_rounds - self.admitted.complete[self.me.name]
        turns = Turns(self.half.sampled_rounds, self.learned_rounds, replayed, max(0, unread))
        return (
            self.me.role != "learner"
            and turns.sampled < self.config.crew.rounds
            and self.pace.may_sample(self.me.name, turns, self.waiting)
        )

    def publish(self) -> None:
        """Bring the outbox to the log."""
        self.half.outbox.deliver(self.log)

    def publish_weights(self) -> None:
        """Put the present version in the outbox, if this is a learner and it is due."""
        if self.weights:
            self.weights.publish()

    # Receiving

    def receive(self, until: int | None = None) -> bool:
        """Read the log from where this peer left off, at most to a position; whether to its end.

        Admitted groups wait; others are counted. Only so much is read at a time: whoever writes
        faster than this peer reads does not keep it from learning.
        """
        is_end = self._read(until)
        _let_in(self)
        self.pace.shed(self.waiting, self._round())
        return is_end

    def _read(self, until: int | None) -> bool:
        budget = ReadingBudget()
        while entries := self.log.read(self.cursor):
            for entry in entries:
                if until is not None and entry.position > until:
                    return True
                if not self.hearing.passes_by(entry.id, entry.position, self.cursor):
                    _judge(self, entry)
                self.cursor = entry.position
                if budget.is_spent_on(entry):
                    return False
        return True

    def receive_all(self) -> None:
        """Read to the end of a log that nobody writes to meanwhile."""
        while not self.receive():
            pass

    def _take_in(self, entry: Entry, admitted: Admitted) -> None:
        group, version = admitted.group, self.learner.policy.version
        made_with, own = group.origin.version, is_own(group, self.half)
        if not self.admitted.add(group):
            self.admission.refuse(entry, "duplicate", f"{group.id} was admitted before")
        elif own and made_with > version and group.origin.peer != self.me.name:
            self.admission.refuse(
                entry,
                "version",
                f"sampled with version {made_with} of this learner, which has not made it",
            )
        elif group.branch and group.origin.peer != self.me.name:
            self.waiting.pass_by("another's branch", entry.position)
        elif not self.pace.wants(group, self.learned_rounds):
            self.waiting.drop_at_once(group.origin.peer, "late", entry.position)
        elif self.scrutiny.is_muted(group.origin.peer):
            self.waiting.drop_at_once(group.origin.peer, "muted", entry.position)
            _miss(self, group.origin.peer, group.round)
        else:
            now_s = self.half.clock.now_s()
            # Of versions that were lost with a folder, this peer's own groups are as a stranger's.
            since = made_with if own and made_with <= version else version
            arrival = Arrival(entry.position, since, now_s)
            if self.pace.is_early(group, self.learned_rounds):
                self.early.add([EarlyGroup(GroupPlace.of(group), arrival)])
            else:
                self.arrived.append((admitted, arrival))

    def let_go(self, senders: Collection[str], reason: str) -> None:
        """Learn from nothing more that these have sent, and count it under a reason."""
        if senders:
            _let_go(self, senders, reason)

    # Learning

    @property
    def senders(self) -> list[str]:
        """Everyone who samples and was not shut out; in lockstep, if it is heard in the round."""
        waits = self.pace.awaits_others
        names = self.hearing.of(self.learned_rounds) if waits else self.config.authors
        return [name for name in names if name not in self.admission.revoked]

    @property
    def crewmates(self) -> list[str]:
        """Those of them for whom a round waits, as all of it may still come."""
        return [n for n in self.senders if self.scrutiny.is_awaited(n) and not _misses(self, n)]

    def awaited(self) -> list[str]:
        """Whose groups of the present round are not all there; in async, nobody's."""
        return self.pace.awaited(self.waiting, self._round())

    def forgone(self) -> list[str]:
        """Whom of them it is no use to wait for: all came, and not all of it counts."""
        return [n for n in self.awaited() if self.admitted.is_whole(n, self.learned_rounds)]

    def _round(self, closed: bool = False) -> Round:
        there = self.crewmates
        return Round(self.learned_rounds, there, min(self.config.quorum, len(there)), closed)

    def learn(self, closed: bool = False) -> Learned | Wait:
        """Take one step if what it waits for is there."""
        chosen = self.choose(closed)
        return chosen if isinstance(chosen, Wait) else Learned(self.step(chosen))

    def choose(self, closed: bool = False, again: Sequence[int] = ()) -> Take | Wait:
        """What the next step learns from.

        `closed`: do with what is there of the round, or of a horizontal group, if it comes from a
        quorum of peers. `again`: positions that the same step took before a crash.
        """
        _call_up(self)
        waits = self.pace.awaits_others and not closed
        if waits and self.teaching.is_due(self.learned_rounds, self.admitted):
            return Wait()
        return self.pace.choose(self.waiting, self._round(closed), again)

    def step(self, chosen: Take, again: bool = False, refresh: bool = True) -> StepReport | None:
        """Learn from what was chosen; the round is over. None: nothing was to be taken of it.

        `again`: as before a crash, which says nothing of what has become stale since. `refresh`
        False: the engine keeps the weights of before, because it samples with them; `half.refresh`
        is then to follow.
        """
        self.learned_rounds += 1
        self.scrutiny.begin_round(self.learned_rounds)
        groups = self._heard(_readable(self, chosen.groups))
        if not groups:
            return None
        met = self.teaching.meet(groups, self.learner.policy.version)
        report = self.learner.step(
            self.teaching.learned(groups),
            withheld=self.scrutiny.withheld([*groups, *(one.candidate for one in met.lessons)]),
            audited=self.scrutiny.audited(groups),
            lessons=met.lessons,
        )
        report = self.teaching.told(report, met, groups)
        self.let_go(self.scrutiny.settle(groups, report, self.learned_rounds), "muted")
        if refresh:
            self.half.refresh()
        self.waiting.window.made(self.learner.policy.version)
        self.pace.settle(self.waiting, self._round(), replayed=again)
        return report

    def renumber(self, version: int) -> None:
        """Go on as this version: those before it are lost, and their numbers are taken."""
        self.learned_rounds += version - self.learner.policy.version
        self.learner.policy.version = version
        self.waiting.window.made(version)
        self.half.refresh()

    def _heard(self, groups: Sequence[Candidate]) -> list[Candidate]:
        """Judge senders by what is to be learned from; without those who are muted for it.

        Not when a group arrives: how early one came must not matter.
        """
        muted = self.scrutiny.hear(groups, self.learned_rounds)
        self.let_go(muted, "muted")
        return self.waiting.without(muted, groups)

    # State, for checkpoints

    def state(self) -> PeerState:
        return _state_of(self)

    def load_state(self, state: PeerState) -> None:
        learner, half, window = self.learner, self.half, self.waiting.window
        check_dtype(state, self.me.name, str(learner.policy.dtype))
        learner.policy.version = state.version
        learner.token_budget = self.config.learning.token_budget or state.token_budget
        learner.success.by_kind, learner.skills.means = dict(state.success), dict(state.skills)
        half.sampled_rounds, self.learned_rounds = state.sampled_rounds, state.learned_rounds
        self.cursor, self.hearing.passed_by = state.cursor, state.unheard
        half.tables.restore(tables_again(state.admission.tables, self.log))
        window.version, window.made_s = state.version, dict(state.made_s)
        self.waiting.restore(
            waiting_again(state.waiting, self.log, self.reader), ReasonCount.counter(state.dropped)
        )
        self.early.restore(state.early)
        self.missed = dict(state.missed)
        self.admitted.restore(state.complete, state.seen)
        self.admission.load_state(state.admission)
        heard = heard_again(state.scrutiny.heard, self.log, self.reader)
        self.scrutiny.load_state(state.scrutiny, heard)
        self.teaching.load_state(state, self.log)
        kept = remembered_again(state.memory, self.log, self.reader)
        learner.memory.load_state(state.memory, kept)
        self.let_go(self.admission.revoked, "revoked")
        if not self.config.crew.check_rewards:
            _trust_rewards(self)
        go_on_from(half.outbox, state.head)
        half.refresh()


def _judge(peer: Peer, entry: Entry) -> None:
    """Take a record in, or count why not."""
    verdict = peer.admission.admit(entry)
    if isinstance(verdict, Admitted):
        peer._take_in(entry, verdict)
    elif isinstance(verdict, RefusedRecord):
        _let_in(peer)
        peer.admitted.refuse(verdict.id, verdict.signed)
        peer.let_go(peer.scrutiny.refused(verdict, peer.learned_rounds), "muted")
    elif isinstance(verdict, Roster):
        _let_in(peer)
        peer.let_go(peer.admission.revoked, "revoked")


def _let_in(peer: Peer) -> None:
    """Have groups wait that have come: together, since to read them one by one costs more."""
    arrived, peer.arrived = peer.arrived, []
    for candidate in candidates_of(arrived, peer.reader):
        peer.waiting.add(candidate)


def _let_go(peer: Peer, senders: Collection[str], reason: str) -> None:
    for c in peer.waiting:
        if c.group.origin.peer in senders:
            _miss(peer, c.group.origin.peer, c.group.round)
    peer.waiting.drop(lambda c: c.group.origin.peer in senders, reason)
    for place, arrival in peer.early.take_from(senders):
        peer.waiting.drop_at_once(place.sender, reason, arrival.position)
        _miss(peer, place.sender, place.round)
    peer.teaching.leave_out(senders)


def _miss(peer: Peer, sender: str, round: int) -> None:
    """Know that something of a sender's round is let go, which never comes again."""
    peer.missed[sender] = max(round, peer.missed.get(sender, round))


def _misses(peer: Peer, sender: str) -> bool:
    """Whether something of the present round was let go."""
    return peer.pace.awaits_others and peer.missed.get(sender, -1) >= peer.learned_rounds


def _call_up(peer: Peer) -> None:
    """Have groups wait whose rounds are near by now: read again from where they stand."""
    near = peer.learned_rounds + ROUNDS_AHEAD
    if arrivals := peer.early.near(near):
        try:
            called = waiting_again(arrivals, peer.log, peer.reader)
        except EndsEarlyError as error:  # on its way to this replica
            raise LogError(str(error)) from None
        for candidate in called:
            peer.waiting.add(candidate)
        peer.early.forget(near)


def _readable(peer: Peer, groups: Sequence[Candidate]) -> list[Candidate]:
    """Without those of another vocabulary of which too little is text.

    Not when they arrive: a round waits for its groups, and they have come.
    """
    for candidate in groups:
        if not candidate.group.rollouts:
            sender = candidate.group.origin.peer
            peer.scrutiny.forgo(candidate)
            peer.waiting.drop_at_once(sender, "unread", candidate.position)
    return [candidate for candidate in groups if candidate.group.rollouts]


def _state_of(peer: Peer) -> PeerState:
    learner, head, window = peer.learner, peer.half.outbox.head, peer.waiting.window
    return PeerState(
        version=learner.policy.version,
        token_budget=learner.token_budget,
        dtype=str(learner.policy.dtype),
        sampled_rounds=peer.half.sampled_rounds,
        learned_rounds=peer.learned_rounds,
        cursor=peer.cursor,
        waiting=[Arrival(c.position, c.since, c.came_s) for c in peer.waiting],
        made_s=sorted(window.made_s.items()),
        complete=dict(peer.admitted.complete),
        seen=sorted(peer.admitted.beyond),
        success=learner.success.by_kind,
        dropped=ReasonCount.rows(peer.waiting.dropped),
        admission=peer.admission.state(),
        head=(head.counter, head.previous.hex()),
        scrutiny=peer.scrutiny.state(),
        meetings=peer.teaching.meetings.state(),
        prefixes=peer.teaching.prefixes,
        memory=learner.memory.state(),
        skills=learner.skills.means,
        unheard=peer.hearing.passed_by,
        early=list(peer.early),
        missed=peer.missed,
    )


def _trust_rewards(peer: Peer) -> None:
    """Take in what a crew had refused for its rewards before it was told to trust them.

    A lockstep round that could not go on for that goes on. Others have gone on without.
    """
    if not peer.pace.awaits_others:
        return
    standing, version = peer.scrutiny.standing, peer.learner.policy.version
    for name in [n for n, s in standing.muted.items() if s.reason in FOR_REWARDS]:
        peer.scrutiny.pardon(name)
    silenced = standing.muted.keys() | peer.admission.revoked
    kept = [record for record in peer.admission.kept if record.sender not in silenced]
    arrivals = refused_for_rewards(kept, version, peer.half.clock.now_s())
    there = {early.place for early in peer.early} | {GroupPlace.of(c.group) for c in peer.waiting}
    for c in waiting_again(arrivals, peer.log, peer.reader):
        place = GroupPlace.of(c.group)
        if place in there or not peer.pace.wants(c.group, peer.learned_rounds):
            continue
        there.add(place)
        if peer.pace.is_early(c.group, peer.learned_rounds):
            peer.early.add([EarlyGroup(place, Arrival(c.position, c.since, c.came_s))])
        else:
            peer.waiting.add(c)
