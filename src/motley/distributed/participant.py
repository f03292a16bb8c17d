"""Participant: who takes part from a process of its own. Its role says what it does with its turns.

| part | is |
|---|---|
| `Station` | what everyone has at a hub: outbox and courier, presence, run folder |
| `Role` | who learns (`learner.py`), or only samples (`sampler.py`) |
| `Participant` | the two together, turn after turn; knows neither model nor engine |
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from motley.clock import Clock
from motley.config import CrewConfig, PeerConfig
from motley.distributed.enrolment import Joining
from motley.distributed.register import Say
from motley.exchange import Entry, Head, Header, LogError, Outbox, Signer, WireError, unpack
from motley.exchange.blobs import Blobs
from motley.exchange.courier import Courier
from motley.exchange.nats.blobs import NatsBlobs
from motley.exchange.nats.log import NatsLog
from motley.exchange.nats.presence import Beat, Presence, State, Voice, begin_session
from motley.learning.pace import pace_of
from motley.peers.sampling import SamplerHalf
from motley.runs.conformance import check_engine
from motley.runs.folder import Run
from motley.runs.metrics import MetricsLine
from motley.trust import Admission, stamp_of, verifies

WAIT_S = 0.25  # at most, before looking again
# In a large crew something new is always there: for each of its peers, between two looks.
APART_S = 0.0025
MANY_PEERS = 50


class Mended(NamedTuple):
    """What the log has of this peer."""

    last: Entry  # of its chain
    forgotten: frozenset[str]  # ids that are on the log, and that the outbox may not know


class Role(Protocol):
    @property
    def finished(self) -> bool: ...

    @property
    def finished_rounds(self) -> int: ...

    def turn(self) -> MetricsLine | None:
        """Do what there is to do; the metrics line of a round that was finished."""
        ...

    def waits_for(self) -> str:
        """In words."""
        ...

    @property
    def stuck(self) -> str:
        """Why what it waits for can never come; empty if it may."""
        ...

    def last_lines(self) -> Iterator[MetricsLine]:
        """What there is to say when everything is over."""
        ...

    def save(self) -> None: ...


class Witness:
    """Tells whether a beat of presence is its peer's, once there is somebody who reads rosters."""

    def __init__(self) -> None:
        self._admission: Admission | None = None

    def rely_on(self, admission: Admission) -> None:
        self._admission = admission

    def is_shut_out(self, peer: str) -> bool:
        return self._admission is not None and peer in self._admission.revoked

    def verify(self, peer: str, signature: bytes, message: bytes) -> bool:
        keys = self._admission.keys if self._admission else {}
        return peer in keys and verifies(keys[peer], signature, message)


@dataclass(frozen=True, slots=True)
class Station:
    joining: Joining
    config: CrewConfig
    me: PeerConfig
    log: NatsLog
    run: Run
    witness: Witness
    presence: Presence
    outbox: Outbox
    blobs: Blobs | None  # a learner's own
    courier: Courier  # who is started when there is a role

    @property
    def folder(self) -> Path:
        return self.joining.folder

    @property
    def say(self) -> Say:
        return self.joining.say

    @property
    def clock(self) -> Clock:
        return self.joining.clock

    def tell(self, state: State, rounds: int) -> None:
        """Have everyone know what this participant does, after so many rounds."""
        self.presence.say(self.beat(state, rounds))

    def beat(self, state: State, rounds: int) -> Beat:
        return Beat(state, rounds, len(self.outbox))

    def may_sample_unheard(self) -> bool:
        """Whether to sample without the hub: as far as the staleness window will take it."""
        rounds = pace_of(self.config).rounds_unheard
        return len(self.outbox) < self.config.problems_per_peer * rounds

    def check_engine(self, half: SamplerHalf) -> None:
        away = check_engine(half)
        self.say(
            f"engine against trainer: log-probs differ by {away.mean:.1e} on average, by "
            f"{away.rare:.1e} in one token of a hundred"
        )
        if away.fault:
            raise ValueError(
                f"the engine of {self.me.name} {away.fault} from its trainer (mean "
                f"{away.mean:.1e}, 99th percentile {away.rare:.1e}): "
                "its importance ratios would be wrong for everyone, so it does not join; see "
                "motley check"
            )

    def mend_outbox(self) -> Mended | None:
        """Go on behind the last record the log has of this peer; None if it has none.

        An outbox that was lost, or is an older copy, must not begin the chain anew: a second record
        of a place is a fork, which counts against its sender.
        """
        patiently, name = self.joining.patiently, self.me.name
        newest = patiently(lambda: self.log.last_of(name))
        if newest is None:
            return None
        # Delayed deliveries overtake each other, and others may write under this name where a
        # server lets anybody: the newest on the log need not be the last of the chain.
        # A copy of an older record stands under a tag, its own id being taken.
        in_order = (
            self.config.weather(name).link.instant
            and self._is_mine(newest)
            and Header.of(unpack(newest.record).body).id == newest.id
        )
        if in_order and stamp_of(newest)[0].counter < self.outbox.head.counter:
            return Mended(newest, frozenset())
        mine = [*filter(self._is_mine, patiently(lambda: self.log.records_of(name)))]
        if not mine:
            return None
        last = max(mine, key=lambda entry: stamp_of(entry)[0].counter)
        stamp, hash = stamp_of(last)
        if stamp.counter < self.outbox.head.counter:
            return Mended(last, frozenset())
        self.say(f"the outbox was lost; going on behind record {stamp.counter} of the log")
        self.outbox.head = Head(stamp.counter + 1, hash)
        return Mended(last, frozenset(entry.id for entry in mine))

    def _is_mine(self, entry: Entry) -> bool:
        """Signed with the present key.

        Under another, or on a server that lets anybody write, it says nothing of this outbox.
        """
        try:
            stamp, _ = stamp_of(entry)
            sealed = unpack(entry.record)
        except WireError:
            return False
        return stamp.key == self.outbox.key and verifies(stamp.key, sealed.signature, sealed.signed)


def take_station(
    joining: Joining, config: CrewConfig, log: NatsLog, held: ExitStack, mixed: bool = False
) -> Station:
    """Be there, and have an outbox. `held`: what to give back in the end, or if this fails."""
    membership, identity, clock = joining.membership, joining.identity, joining.clock
    me, crew = config.named(membership.peer), config.crew
    signer = Signer(identity.public, identity.sign)
    session = begin_session(joining.folder / "session", clock)
    voice = Voice(me.name, identity.sign, session)
    run = Run(config, joining.folder, clock, started_s=membership.joined_s, mixed=mixed)
    witness = Witness()
    presence = Presence(log.connection, crew.name, witness.verify, voice)
    held.callback(presence.stop)
    open_outbox = partial(_open_outbox, joining.folder / "groups", signer, crew.lossless)
    outbox = open_outbox()
    held.callback(outbox.close)
    blobs = NatsBlobs(log.connection, crew.name, me.name) if me.role == "learner" else None
    courier = Courier(open_outbox, log, blobs, clock)
    return Station(joining, config, me, log, run, witness, presence, outbox, blobs, courier)


def _open_outbox(folder: Path, signer: Signer, lossless: bool) -> Outbox:
    path = folder / "outbox.sqlite"
    try:
        return Outbox(path, signer, lossless)
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} cannot be read or written ({error}); if its disk is full, make room. Else put "
            f"it back from a copy, or delete it with the {path.name}-* beside it: then this peer "
            "goes on behind what the log has of it"
        ) from None


def apart_s(num_peers: int) -> float:
    """How long who waits looks away, so that looks do not grow with the square of the crew."""
    return APART_S * num_peers if num_peers >= MANY_PEERS else 0.0


class Participant:
    """`rounds()` takes part: it yields a metrics line per round, and words whenever it waits."""

    def __init__(self, station: Station, role: Role, held: ExitStack) -> None:
        self.station, self.role, self._held = station, role, held
        self._trouble = ""

    @property
    def finished(self) -> bool:
        return self.role.finished

    @property
    def finished_rounds(self) -> int:
        return self.role.finished_rounds

    @property
    def stuck(self) -> str:
        """Why nothing can come of waiting here. Strangers may be shut out; then it goes on."""
        return self.role.stuck

    def rounds(self) -> Iterator[MetricsLine | str]:
        role, station = self.role, self.station
        while not role.finished:
            try:
                line = role.turn()
                self._trouble = ""
            except LogError as error:
                line, self._trouble = None, str(error)
            if line is None:
                station.tell("waiting", role.finished_rounds)
                yield self.status
                station.clock.sleep_s(apart_s(len(station.config.peer)))
                station.log.wait(WAIT_S)
            else:
                yield line
        yield from role.last_lines()
        while len(station.outbox):  # others wait for these
            yield self.status
            station.clock.sleep_s(WAIT_S)

    @property
    def status(self) -> str:
        """What it waits for, in words."""
        connection, buffered = self.station.log.connection, len(self.station.outbox)
        kept = f"; {buffered} records wait to be sent" if buffered else ""
        # a server that is not the hub's own lets it in still
        revoked = not connection.trouble and self.station.witness.is_shut_out(self.station.me.name)
        if connection.shut_out or revoked:
            raise ValueError(
                "the hub has shut this peer out; what it has is saved, and the hub's owner can "
                "invite it anew"
            )
        return (
            connection.trouble
            or self.station.courier.trouble
            or self._trouble
            or self.role.waits_for()
        ) + kept

    def save(self) -> None:
        self.role.save()

    def close(self) -> None:
        self.station.courier.close()
        state: State = "finished" if self.role.finished else "left"
        self.station.presence.close(self.station.beat(state, self.role.finished_rounds))
        self._held.close()
