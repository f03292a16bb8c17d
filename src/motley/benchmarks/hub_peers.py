"""Many real peers in one process, for the benchmark of a hub.

Each joins as anyone does, with a key, a connection, an outbox, a journal and checkpoints of its
own, and takes part on a thread of its own. The process can be killed at any moment: what it has to
say stands in a file, line by line.

FOLDER/PEER/      a peer's run folder
FOLDER/go         is there: everyone has joined who is to come at first, take part
FOLDER/over       is there: everyone is done; it holds the log's last position
"""

from __future__ import annotations

import multiprocessing
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from nats.aio.client import Client

from motley.distributed.join import join
from motley.distributed.learner import LearnerRole
from motley.distributed.participant import Participant
from motley.exchange import Entry, Log, LogError
from motley.exchange.nats.log import NatsLog
from motley.files import append
from motley.peers.peer import Peer
from motley.trust.admitted import GroupPlace

T = TypeVar("T")

LOOK_S = 0.05
SAMPLE_S = 1.0
JOIN_TRIES = 5
KINDS = ("turn", "nats", "presence", "courier")  # threads of a peer, by how their names begin
REST = "rest"  # of a process's threads
_TCP_BYTES = struct.Struct("QQ")  # sent and confirmed, received
_TCP_BYTES_AT = 120  # in Linux's tcp_info


class PeerSample(msgspec.Struct, frozen=True):
    """Of a peer that takes part, at a moment."""

    at_s: float
    cursor: int
    rounds: int
    sent_bytes: int  # on its connection; 0 where the system does not tell
    received_bytes: int
    received_messages: int


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a peer, by its own state, when it is done."""

    peer: str
    rounds: int
    published: int  # records in its chain
    unsent: int
    cursor: int  # how far it has read
    heard: int  # groups on the log up to there that it is to hear
    missed: int  # those of them that it has not taken in
    refused: int  # records that it did not take, such as one that came twice
    passed_by: int  # groups that it is not to hear, as it counted them
    passed_by_twice: int  # more than the log has of them; below 0: fewer
    round_s: list[float]  # of each round that this process saw


class Sample(msgspec.Struct, frozen=True):
    """Of a process, at a moment: what it has used so far, and where its peers are."""

    cpu_s: dict[str, float]  # by kind of thread
    joined: int
    done: list[str]  # who has taken its last step
    peers: dict[str, PeerSample]


class HostJob(msgspec.Struct, frozen=True, kw_only=True):
    """Of one process."""

    url: str
    crew: str
    folder: Path
    told: Path  # where it writes what it has to say
    invitations: dict[str, str]
    leave_after: dict[str, int]  # peer -> rounds


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a process has to say, one of these at a time."""

    sample: Sample | None = None
    account: Account | None = None
    error: str = ""


def host(job: HostJob) -> None:
    """A process's life: everyone joins, takes part and gives account."""
    torch.set_num_threads(1)
    hosted = [Hosted(job, name) for name in job.invitations]
    # Elsewhere no two peers train in threads of one process, and native code need not bear it. A
    # model's first weights are drawn globally, too.
    turns = Turnstile(threading.Lock(), threading.Lock())
    threads = [
        threading.Thread(target=one.live, args=(turns,), name=f"turn {one.name}", daemon=True)
        for one in hosted
    ]
    for thread in threads:
        thread.start()
    parent = multiprocessing.parent_process()
    while any(thread.is_alive() for thread in threads) and not (parent and not parent.is_alive()):
        _tell(job, Line(sample=_sample(hosted)))
        for thread in threads:
            thread.join(SAMPLE_S / len(threads))
    _tell(job, Line(sample=_sample(hosted)))


def _tell(job: HostJob, line: Line) -> None:
    append(job.told, msgspec.json.encode(line) + b"\n")


class Turnstile(NamedTuple):
    """Lets one peer of a process pass at a time."""

    joining: threading.Lock
    computing: threading.Lock

    def guard(self, peer: Peer) -> None:
        """Have a peer sample and learn while no other does."""
        for part, name in ((peer.half.engine, "sample"), (peer.learner, "step")):
            setattr(part, name, self._alone(getattr(part, name)))

    def _alone(self, work: Callable[..., T]) -> Callable[..., T]:
        def alone(*args: object, **named: object) -> T:
            with self.computing:
                return work(*args, **named)

        return alone


@dataclass(slots=True)
class Hosted:
    """One of a process's peers."""

    job: HostJob
    name: str
    participant: Participant | None = None
    takes_part: bool = False
    is_done: bool = False
    ended_s: list[float] = field(default_factory=list)  # when a round was over, the go before

    def live(self, turns: Turnstile) -> None:
        try:
            with turns.joining:
                self.participant = self._join()
            turns.guard(self.peer)
            go = self.job.folder / "go"
            if not go.exists():  # who waits without a roster can tell nobody's presence
                self.participant.station.joining.patiently(self.peer.receive)
            _wait_for(go)
            self._take_part(self.participant)
        except Exception as error:  # noqa: BLE001 - a thread's error ends nothing by itself: it is told
            _tell(self.job, Line(error=f"{self.name}: {type(error).__name__}: {error}"))

    def _join(self) -> Participant:
        """On a busy machine a hub may not answer in time: then its owner says the line again."""
        job, left = self.job, JOIN_TRIES
        while True:
            left -= 1
            try:
                return join(job.url, job.crew, job.invitations[self.name], job.folder / self.name)
            except (ValueError, LogError):
                if not left:
                    raise

    def _take_part(self, participant: Participant) -> None:
        most = self.job.leave_after.get(self.name)
        self.takes_part = True
        self.ended_s.append(time.monotonic())
        for line in participant.rounds():
            if isinstance(line, str):
                continue
            self.ended_s.append(time.monotonic())
            if most is not None and participant.finished_rounds >= most:
                break
        peer, station = self.peer, participant.station
        log = NatsLog(station.log.connection, station.config.crew.name)  # all of it
        self.takes_part, self.is_done = False, True
        if participant.finished:
            _wait_for(self.job.folder / "over")
            _read_to_the_end(peer)
            end = int((self.job.folder / "over").read_text())
        else:
            participant.save()
            station.courier.close()  # with what is still to be sent
            end = peer.cursor
        unsent = len(station.outbox)
        account = station.joining.patiently(
            lambda: account_of(peer, log, end, self.round_s, unsent)
        )
        participant.close()
        _tell(self.job, Line(account=account))
        _wait_for(self.job.folder / "over")  # what its thread used counts to the end

    @property
    def peer(self) -> Peer:
        assert self.participant
        assert isinstance(self.participant.role, LearnerRole)
        return self.participant.role.peer

    @property
    def round_s(self) -> list[float]:
        pairs = zip(self.ended_s, self.ended_s[1:], strict=False)
        return [round(end_s - start_s, 3) for start_s, end_s in pairs]

    def sample(self) -> PeerSample:
        assert self.participant
        sent, received, messages = 0, 0, 0
        with suppress(LogError, TimeoutError):
            connection = self.participant.station.log.connection
            sent, received, messages = connection.call(_traffic, SAMPLE_S)
        peer, at_s = self.peer, time.monotonic()
        return PeerSample(at_s, peer.cursor, peer.learned_rounds, sent, received, messages)


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(LOOK_S)


def _read_to_the_end(peer: Peer) -> None:
    """Take in what came after the last round was learned from."""
    while True:
        with suppress(LogError):
            if peer.receive():
                return
        time.sleep(LOOK_S)


def account_of(peer: Peer, log: Log, end: int, round_s: list[float], unsent: int) -> Account:
    """Hold a peer's state against the log, up to where the peer has read it.

    `end`: its cursor, or behind it. What it is not sent does not move the cursor.
    """
    heard = missed = passed_by = 0
    whole: dict[tuple[str, int], bool] = {}
    for entry in _entries_to(log, end):
        place = GroupPlace.read(entry.id)
        if place is None:
            continue
        if not peer.hearing.may_matter(entry.id):
            passed_by += entry.position <= peer.cursor
            continue
        heard += 1
        key = place.sender, place.round
        if key not in whole:
            whole[key] = peer.admitted.is_whole(*key)
        missed += not whole[key]
    return Account(
        peer=peer.me.name,
        rounds=peer.learned_rounds,
        published=peer.half.outbox.head.counter,
        unsent=unsent,
        cursor=max(end, peer.cursor),
        heard=heard,
        missed=missed,
        refused=sum(peer.admission.refused.values()),
        passed_by=peer.hearing.passed_by,
        passed_by_twice=peer.hearing.passed_by - passed_by,
        round_s=round_s,
    )


def _entries_to(log: Log, position: int) -> Sequence[Entry]:
    entries: list[Entry] = []
    while page := log.read(entries[-1].position if entries else 0):
        entries += page
    return [entry for entry in entries if entry.position <= position]


async def _traffic(client: Client) -> tuple[int, int, int]:
    """Bytes sent and received by the client's present connection, and messages received."""
    messages: int = client.stats["in_msgs"]
    writer = getattr(client._transport, "_io_writer", None)
    if sys.platform != "linux" or writer is None:
        return 0, 0, messages
    information = writer.get_extra_info("socket").getsockopt(
        socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_BYTES_AT + _TCP_BYTES.size
    )
    sent, received = _TCP_BYTES.unpack_from(information, _TCP_BYTES_AT)
    return sent, received, messages


def _sample(hosted: Sequence[Hosted]) -> Sample:
    there = [one for one in hosted if one.participant]
    peers = {one.name: one.sample() for one in there if one.takes_part}
    done = [one.name for one in there if one.is_done]
    return Sample(cpu_by_kind(), len(there), done, peers)


def cpu_by_kind() -> dict[str, float]:
    """The processor's time of this process's threads; what has ended is among the rest."""
    clock_of: Callable[[int], int] | None = getattr(time, "pthread_getcpuclockid", None)
    used = dict.fromkeys(KINDS, 0.0)
    for thread in threading.enumerate() if clock_of else ():
        kind = thread.name.split()[0]
        if clock_of and thread.ident and kind in used:
            with suppress(OSError):  # it has just ended
                used[kind] += time.clock_gettime(clock_of(thread.ident))
    used[REST] = max(0.0, time.process_time() - sum(used.values()))
    return {kind: round(used_s, 3) for kind, used_s in used.items()}
