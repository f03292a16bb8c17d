"""What a checkpoint holds of a peer beside its weights, and how what waited is read again.

Groups themselves are not in a checkpoint: the log has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from motley.clock import timed
from motley.exchange import Entry, Head, Log, Outbox, WireError
from motley.learning.meetings import MeetingsState, RememberedSolution
from motley.learning.memory import RememberedRollout
from motley.learning.prefixes import PrefixState
from motley.learning.readings import spelled
from motley.learning.select import Candidate
from motley.learning.translating import ForeignGroup, Translation, Translator
from motley.peers.arrivals import Arrival, EarlyGroup, read_again
from motley.peers.sampling import SamplerHalf
from motley.peers.scrutiny import HeardGroup, ScrutinyState
from motley.records import Group, Problem, Table
from motley.spelling import Spelling, Tokenwise
from motley.trust import (
    AdmissionState,
    Admitted,
    GroupPlace,
    ReasonCount,
    RefusedRecord,
    known,
    stamp_of,
)
from motley.trust.steadiness import FOR_REWARDS


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """A peer in a checkpoint, beside its weights.

    Random numbers need no state: every draw is seeded by (crew seed, peer, round).
    """

    version: int
    token_budget: int
    dtype: str
    sampled_rounds: int
    learned_rounds: int
    cursor: int
    waiting: list[Arrival]
    made_s: list[tuple[int, float]]  # version, when
    complete: dict[str, int]
    seen: list[GroupPlace]
    success: dict[str, float]
    dropped: list[ReasonCount]
    admission: AdmissionState
    head: tuple[int, str]  # of the outbox; hexadecimal
    scrutiny: ScrutinyState = ScrutinyState()
    # mean rewards of the newest batches of everyone, oldest first
    skills: dict[str, list[float]] = msgspec.field(default_factory=dict)
    meetings: MeetingsState = MeetingsState()
    prefixes: PrefixState = PrefixState()
    memory: list[RememberedRollout] = []
    unheard: int = 0
    early: list[EarlyGroup] = []
    missed: dict[str, int] = msgspec.field(default_factory=dict)


def check_dtype(state: PeerState, name: str, dtype: str) -> None:
    """Refuse to go on in another arithmetic than the checkpoint's."""
    if state.dtype != dtype:
        raise ValueError(
            f"peer {name} computed in {state.dtype} and now would in {dtype}; "
            f"set dtype = {state.dtype.removeprefix('torch.')!r} for it in the run's config.toml"
        )


def go_on_from(outbox: Outbox, head: tuple[int, str]) -> None:
    """An outbox that outlived the checkpoint is further; one without a file begins here."""
    counter, previous = head
    if counter > outbox.head.counter:
        outbox.head = Head(counter, bytes.fromhex(previous))


# Groups that wait


def is_own(group: Group, half: SamplerHalf) -> bool:
    """Whether a group was sampled with this peer's weights, of whatever version.

    By itself, or by a sampler that follows it.
    """
    return half.config.student_of(group.origin.peer) == half.me.name


@dataclass(frozen=True, slots=True)
class Reader:
    """What a peer reads groups by: its own half, and for other vocabularies a translator."""

    half: SamplerHalf
    translator: Translator

    def read_all(self, admitted: Sequence[Admitted]) -> list[Group | Translation]:
        """Groups as this peer learns from them, its judge's opinion with them."""
        asked = [
            ForeignGroup(a.group, a.problem, a.spelling) for a in admitted if a.spelling is not None
        ]
        translated, took_s = timed(partial(self.translator.translate_all, asked), self.half.clock)
        self.translator.took_s += took_s
        made = iter(translated)
        return [
            self.half.judged(one.problem, one.group)
            if one.spelling is None
            else self._judged(one.problem, next(made))
            for one in admitted
        ]

    def take_seconds(self) -> float:
        """What translating took since this was last asked."""
        took_s, self.translator.took_s = self.translator.took_s, 0.0
        return took_s

    def _judged(self, problem: Problem, made: Translation) -> Translation:
        judge = self.half.judge
        if judge is None or not made.group.rollouts:
            return made
        sent, sender = made.reading.sent.rollouts, made.reading.pair.sender
        texts = [
            spelled(sender, sent[number]).decode(errors="replace")
            for number in made.reading.number_R
        ]
        return made._replace(group=judge.judged(problem, made.group, texts))


def reader_of(half: SamplerHalf) -> Reader:
    """That of the peer which samples with this half."""
    policy, most = half.policy, half.config.sampling.max_tokens
    return Reader(half, Translator(policy.prompts, most, policy.max_positions))


def candidates_of(admitted: Sequence[tuple[Admitted, Arrival]], reader: Reader) -> list[Candidate]:
    """Admitted groups, as they wait at this peer."""
    read = reader.read_all([one for one, _ in admitted])
    return [
        _candidate(one, its, arrival, reader.half)
        for one, (its, arrival) in zip(read, admitted, strict=True)
    ]


def _candidate(
    read: Group | Translation, admitted: Admitted, arrival: Arrival, half: SamplerHalf
) -> Candidate:
    """An admitted group, as it waits at this peer.

    One of a version that came after its arrival is of weights that were lost with a folder: it is
    learned from as a stranger's.
    """
    group, reading = read if isinstance(read, Translation) else (read, Tokenwise())
    horizontal = half.config.crew.layout == "horizontal"
    return Candidate(
        group=group,
        problem=admitted.problem,
        own=is_own(group, half) and group.origin.version <= arrival.since,
        stranger=group.origin.peer != half.me.name,
        family=f"{group.round}.{group.slot}" if horizontal and not group.branch else group.id,
        since=arrival.since,
        came_s=arrival.came_s,
        position=arrival.position,
        hash=admitted.hash,
        reading=reading,
    )


def refused_for_rewards(kept: Iterable[RefusedRecord], version: int, now_s: float) -> list[Arrival]:
    """Groups that were refused for nothing but their rewards, as if they came now."""
    return [Arrival(r.position, version, now_s) for r in kept if r.reason in FOR_REWARDS]


def waiting_again(arrivals: Sequence[Arrival], log: Log, reader: Reader) -> list[Candidate]:
    """Read the groups that waited when a checkpoint was saved."""
    by_position = {arrival.position: arrival for arrival in arrivals}
    read = [
        (_admitted_before(entry, reader.half), by_position[entry.position])
        for entry in read_again(log, by_position.keys())
    ]
    return candidates_of(read, reader)


def remembered_again(
    remembered: Sequence[RememberedRollout] | Sequence[RememberedSolution],
    log: Log,
    reader: Reader,
) -> list[Candidate]:
    """Read the groups of successes that a checkpoint remembers, one for each of these."""
    arrivals = [Arrival(one.position, one.since, one.came_s) for one in remembered]
    by_position = {c.position: c for c in waiting_again(arrivals, log, reader)}
    return [by_position[one.position] for one in remembered]


def heard_again(positions: Sequence[int], log: Log, reader: Reader) -> list[HeardGroup]:
    """Read the groups from which habits were learned when a checkpoint was saved."""
    entries = read_again(log, set(positions))
    admitted = {entry.position: _admitted_before(entry, reader.half) for entry in entries}
    heard = {position: _tokens_of(one, reader) for position, one in admitted.items()}
    return [
        HeardGroup(heard[position], admitted[position].problem, position) for position in positions
    ]


def _tokens_of(admitted: Admitted, reader: Reader) -> Group:
    """The group in the receiver's tokens."""
    if admitted.spelling is None:
        return admitted.group
    made = reader.translator.translate(admitted.group, admitted.problem, admitted.spelling)
    assert isinstance(made, Translation), "what was heard could be read"
    return made.group


def tables_again(positions: Sequence[int], log: Log) -> list[tuple[bytes, Table, int]]:
    """Read the tables that were known when a checkpoint was saved: key, table and position."""
    return [_table_before(entry) for entry in read_again(log, set(positions))]


def _table_before(entry: Entry) -> tuple[bytes, Table, int]:
    try:
        table, _ = known(entry)
        if isinstance(table, Table):
            return stamp_of(entry)[0].key, table, entry.position
    except WireError:
        pass
    raise ValueError(
        f"the log has no table at position {entry.position}, where this peer had read one; is it "
        "another log?"
    )


def _admitted_before(entry: Entry, half: SamplerHalf) -> Admitted:
    try:
        group, hash = known(entry)
        if isinstance(group, Group):
            return Admitted(group, half.problem_of(group), hash, _spelling(entry, group, half))
    except (WireError, IndexError):
        pass
    raise ValueError(
        f"the log has no group at position {entry.position}, where this peer had read one; is "
        "it another log?"
    )


def _spelling(entry: Entry, group: Group, half: SamplerHalf) -> Spelling | None:
    """What a group's tokens stand for, by its sender's table; None: it is of the own vocabulary."""
    if group.origin.vocabulary == half.policy.vocabulary.fingerprint:
        return None
    table = half.tables.of(stamp_of(entry)[0].key, group.origin.vocabulary)
    if table is None:
        raise ValueError(
            f"group {group.id} is of vocabulary {group.origin.vocabulary[:80]!r}, of which the log "
            "has no table by its sender; is it another log?"
        )
    return table.spelling
