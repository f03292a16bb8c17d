"""Sampler: who only samples, with its learner's newest weights that reached it.

Owns what of the log it reads, and weights on their way. It waits for the first weights; under
"pace", for its learner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from motley.config import PeerConfig
from motley.exchange import Entry, Log, LogError
from motley.exchange.blobs import Blobs
from motley.learning.pace import holds_up
from motley.peers.reading import ReadingBudget
from motley.peers.sampling import SamplerHalf, rules_of
from motley.records import HUB, Weights
from motley.trust import Admission
from motley.weights.follower import Follower

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
    """A participant without a learner half.

    It reads of the log what its hub and its learner wrote, and nothing else.
    """

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

    def receive(self) -> bool:
        """Take in what the learner and the hub have written since, in the log's order; whether that
        was all.

        The learner is read first: a roster that stands before one of its records is then there when
        the hub is read. Only so much is read at a time, as by a `Peer`.
        """
        budget, spent = ReadingBudget(), False
        while entries := [entry for publisher in self.cursors for entry in self._read(publisher)]:
            for entry in sorted(entries):
                verdict = self.admission.admit(entry)
                if isinstance(verdict, Weights):
                    self._note(verdict)
                spent = budget.is_spent_on(entry) or spent
            if spent:
                return False
        return True

    def _read(self, publisher: str) -> list[Entry]:
        entries = self.log.read(self.cursors[publisher], sender=publisher)
        if entries:
            self.cursors[publisher] = entries[-1].position
        return entries

    def _note(self, weights: Weights) -> None:
        self.known[weights.version] = weights
        if self.newest is None or weights.version > self.newest.version:
            self.newest = weights

    def renew(self) -> bool:
        """Load what has arrived, and send for what is newer; say whether weights were loaded.

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
        self.admission = Admission(rules_of(self.half), self.hub, self.half.problems, None)
        self.follower = Follower(self.half.policy)

    def may_sample(self) -> bool:
        """Once it has weights, always, unless its learner should catch up first.

        That is so with stale = "pace", while more waits than the window can use up.
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
