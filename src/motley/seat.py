"""Seat: what every participant in a process of its own has at a hub: its outbox and courier, its
presence, its run folder, its words of waiting. What it does with its turns is up to `member.py`
(who learns) and `sampler_member.py` (who only samples).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

from motley.config import CrewConfig
from motley.conformance import check_engine
from motley.exchange import Entry, Head, LogError, Outbox, Signer, WireError, unpack
from motley.exchange.blobs import Blobs
from motley.exchange.courier import Courier
from motley.exchange.nats import NatsLog
from motley.exchange.objects import NatsBlobs
from motley.exchange.presence import Beat, Presence, State, Voice
from motley.membership import Joining, patiently
from motley.run import MetricsLine, Run
from motley.sampler import SamplerHalf
from motley.trust import Admission, stamp_of, verifies

WAIT_S = 0.25  # at most, before looking again


class Seat:
    """`rounds()` takes part: it yields a metrics line per round, and in between, whenever it waits,
    a line of text that says for what.
    """

    def __init__(self, joining: Joining, config: CrewConfig, log: NatsLog, held: ExitStack) -> None:
        """`held`: what to give back in the end, or if this fails."""
        self.config, self.folder, self.log, self._say = config, joining.folder, log, joining.say
        self.me = config.named(joining.membership.peer)
        self._joining = joining
        self._admission: Admission | None = None  # whose roster says whose key counts
        self._run = Run(config, joining.folder, started_s=joining.membership.joined_s)
        voice = Voice(self.me.name, joining.identity.sign)
        self.presence = patiently(
            lambda: Presence(log.connection, config.crew.name, self._verify, voice), self._say
        )
        held.callback(self.presence.stop)
        self.outbox = self._open_outbox()
        held.callback(self.outbox.close)
        self._trouble = ""

    def _open_outbox(self) -> Outbox:
        signer = Signer(self._joining.identity.public, self._joining.identity.sign)
        return Outbox(self.folder / "groups" / "outbox.sqlite", signer, self.config.crew.lossless)

    def _start_courier(self, blobs: Blobs | None = None) -> None:
        self._courier = Courier(self._open_outbox, self.log, blobs)

    def _blobs_of(self, learner: str) -> Blobs:
        return NatsBlobs(self.log.connection, self.config.crew.name, learner)

    def rounds(self) -> Iterator[MetricsLine | str]:
        while not self.finished:
            try:
                line = self._turn()
                self._trouble = ""
            except LogError as error:
                line, self._trouble = None, str(error)
            if line is None:
                self._beat("waiting")
                yield self.status
                self.log.wait(WAIT_S)
            else:
                yield line
        yield from self._last_lines()
        while len(self.outbox):  # others wait for these
            yield self.status
            time.sleep(WAIT_S)

    @property
    def status(self) -> str:
        """What it waits for, in words."""
        buffered = len(self.outbox)
        kept = f"; {buffered} records wait to be sent" if buffered else ""
        if self.log.connection.shut_out:
            raise ValueError(
                "the hub has shut this peer out; what it has is saved, and the hub's owner can "
                "invite it anew"
            )
        return (
            self.log.connection.trouble
            or self._courier.trouble
            or self._trouble
            or self._waits_for()
        ) + kept

    def close(self) -> None:
        self._courier.close()
        state: State = "finished" if self.finished else "left"
        self.presence.close(Beat(state, self.finished_rounds, len(self.outbox)))
        self._held.close()

    def _beat(self, state: State) -> None:
        self.presence.say(Beat(state, self.finished_rounds, len(self.outbox)))

    def _verify(self, peer: str, signature: bytes, message: bytes) -> bool:
        """Whether a beat of presence is its peer's."""
        keys = self._admission.keys if self._admission else {}
        return peer in keys and verifies(keys[peer], signature, message)

    def _may_sample_unheard(self) -> bool:
        """Without the hub sampling goes on into the outbox, as far as the staleness window will
        still take it.
        """
        rounds = 1 if self.config.crew.pace == "lockstep" else max(1, self.config.learning.max_age)
        return len(self.outbox) < self.config.problems_per_peer * rounds

    def _check_engine(self, half: SamplerHalf) -> None:
        away = check_engine(half)
        self._say(
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

    def _mend_outbox(self) -> Entry | None:
        """A lost outbox must not begin the chain anew: go on behind the last record the log has of
        this peer, which is returned.
        """
        last = patiently(lambda: self.log.last_of(self.me.name), self._say)
        if last is None or not self._is_mine(last):
            return None
        if stamp_of(last)[0].counter < self.outbox.head.counter:
            return last
        # Delayed deliveries overtake each other: the newest on the log need not be the last of the
        # chain.
        mine = filter(
            self._is_mine, patiently(lambda: self.log.records_of(self.me.name), self._say)
        )
        last = max(mine, key=lambda entry: stamp_of(entry)[0].counter)
        stamp, hash = stamp_of(last)
        self._say(f"the outbox was lost; going on behind record {stamp.counter} of the log")
        self.outbox.head = Head(stamp.counter + 1, hash)
        return last

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

    # What a role decides

    _held: ExitStack

    @property
    def finished(self) -> bool:
        raise NotImplementedError

    @property
    def finished_rounds(self) -> int:
        raise NotImplementedError

    def save(self) -> None:
        raise NotImplementedError

    def _turn(self) -> MetricsLine | None:
        """Do what there is to do; the metrics line of a round that was finished."""
        raise NotImplementedError

    def _last_lines(self) -> Iterator[MetricsLine]:
        """What there is to say when everything is over."""
        yield from ()

    def _waits_for(self) -> str:
        raise NotImplementedError
