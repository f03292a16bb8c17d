"""Chain: what a publisher's records say of their order. A fork, a gap or a replay shows.

Every record has a counter and the hash of the record before it. Records may come out of order (a
lost one is sent again behind later ones): those passed over are missing until they come, and then
must have the hash their successor named.

Who hears a publisher in some rounds only passes most of its records by. Its `SparseChain` holds a
record to those neighbours that were read. It cannot tell what is missing.

Only the holder of the key can sign a fork. Anybody who may write can copy one, or any other record,
and delays make gaps: a replay and a gap say nothing of the publisher.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from motley.records import FIRST_PREVIOUS, Stamp

MAX_MISSING = 4096
REMEMBERED = 256  # hashes kept to tell a replay from a fork
REMEMBERED_FORKS = 256  # hashes of forks
REMEMBERED_SPARSELY = 64  # the same, and of hashes that a successor named


class ChainState(msgspec.Struct, frozen=True, kw_only=True):
    """A chain in a checkpoint; hashes are hexadecimal."""

    next: int
    head: str
    missing: list[tuple[int, str]]  # counter, hash
    recent: list[tuple[int, str]]
    forks: list[str] = []


@dataclass(slots=True)
class Forks:
    """Records that were refused as forks, the newest by their hashes.

    So one that is copied is a replay, and counts once.
    """

    _known: dict[bytes, None] = field(default_factory=dict)

    def name(self, hash: bytes) -> str:
        """What a record is that contradicts its chain: a fork, or one that was seen before."""
        if hash in self._known:
            return "replay"
        self._known[hash] = None
        if len(self._known) > REMEMBERED_FORKS:
            del self._known[next(iter(self._known))]
        return "fork"

    def state(self) -> list[str]:
        return [hash.hex() for hash in self._known]

    @staticmethod
    def from_state(state: list[str]) -> Forks:
        return Forks(dict.fromkeys(map(bytes.fromhex, state)))


@dataclass(slots=True)
class Chain:
    next: int = 0
    head: bytes = FIRST_PREVIOUS
    # counter -> the hash it must have, b"" if not known yet
    missing: dict[int, bytes] = field(default_factory=dict)
    recent: dict[int, bytes] = field(default_factory=dict)  # counter -> hash, the newest ones
    forks: Forks = field(default_factory=Forks)
    # of the recent ones: whose successor is missing, and a heap that has all others
    _held: set[int] = field(init=False, compare=False)
    _settled: list[int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self._held = {known for known in self.recent if known + 1 in self.missing}
        self._settled = sorted(self.recent.keys() - self._held)

    def add(self, stamp: Stamp, hash: bytes) -> str:
        """Take in the next record; the name of what is wrong with its place, or nothing."""
        if stamp.counter >= self.next:
            return self._extend(stamp, hash)
        if stamp.counter in self.missing:
            return self._fill(stamp, hash)
        return self.forks.name(hash) if self.recent.get(stamp.counter, hash) != hash else "replay"

    def _extend(self, stamp: Stamp, hash: bytes) -> str:
        passed_over = stamp.counter - self.next
        if len(self.missing) + passed_over > MAX_MISSING:
            return "gap"
        if passed_over == 0 and stamp.previous != self.head:
            return self.forks.name(hash)
        if passed_over:
            self.missing |= dict.fromkeys(range(self.next, stamp.counter), b"")
            self.missing[stamp.counter - 1] = stamp.previous
            if self.next - 1 in self.recent:
                self._held.add(self.next - 1)
        self.next, self.head = stamp.counter + 1, hash
        self._remember(stamp.counter, hash)
        return ""

    def _fill(self, stamp: Stamp, hash: bytes) -> str:
        if self.missing[stamp.counter] not in (b"", hash):
            return self.forks.name(hash)
        before = stamp.counter - 1
        if before in self.missing:
            self.missing[before] = stamp.previous
        elif (
            self.recent.get(before, stamp.previous) if before >= 0 else FIRST_PREVIOUS
        ) != stamp.previous:
            return self.forks.name(hash)
        del self.missing[stamp.counter]
        if before in self._held:
            self._held.remove(before)
            heappush(self._settled, before)
        self._remember(stamp.counter, hash)
        return ""

    def _remember(self, counter: int, hash: bytes) -> None:
        """Keep the newest, and what a missing record will have to name."""
        self.recent[counter] = hash
        if counter + 1 in self.missing:
            self._held.add(counter)
        else:
            heappush(self._settled, counter)
        while len(self.recent) - len(self._held) > REMEMBERED:
            oldest = heappop(self._settled)
            if oldest not in self._held:  # those come back when their successor comes
                self.recent.pop(oldest, None)

    # For checkpoints

    def state(self) -> ChainState:
        return ChainState(
            next=self.next,
            head=self.head.hex(),
            missing=_hexadecimal(self.missing),
            recent=_hexadecimal(self.recent),
            forks=self.forks.state(),
        )

    @staticmethod
    def from_state(state: ChainState) -> Chain:
        return Chain(
            state.next,
            bytes.fromhex(state.head),
            {counter: bytes.fromhex(hash) for counter, hash in state.missing},
            {counter: bytes.fromhex(hash) for counter, hash in state.recent},
            Forks.from_state(state.forks),
        )


@dataclass(slots=True)
class SparseChain:
    """Of a publisher most of whose records are passed by unread: a hole says nothing."""

    recent: dict[int, bytes] = field(default_factory=dict)  # counter -> hash, the newest ones
    named: dict[int, bytes] = field(default_factory=dict)  # of unread ones: as a successor has it
    forks: Forks = field(default_factory=Forks)

    def add(self, stamp: Stamp, hash: bytes) -> str:
        """Take in a record; the name of what is wrong with its place, or nothing."""
        counter, before = stamp.counter, stamp.counter - 1
        if counter in self.recent:
            return "replay" if self.recent[counter] == hash else self.forks.name(hash)
        if self.named.get(counter, hash) != hash:
            return self.forks.name(hash)
        first = FIRST_PREVIOUS if counter == 0 else stamp.previous
        if self.recent.get(before, first) != stamp.previous:
            return self.forks.name(hash)
        self.named.pop(counter, None)
        if counter and before not in self.recent:
            self.named[before] = stamp.previous
        self.recent[counter] = hash
        for kept in (self.recent, self.named):
            if len(kept) > REMEMBERED_SPARSELY:
                del kept[min(kept)]
        return ""

    # For checkpoints

    def state(self) -> ChainState:
        newest = max(self.recent, default=-1)
        return ChainState(
            next=newest + 1,
            head=self.recent.get(newest, FIRST_PREVIOUS).hex(),
            missing=_hexadecimal(self.named),
            recent=_hexadecimal(self.recent),
            forks=self.forks.state(),
        )

    @staticmethod
    def from_state(state: ChainState) -> SparseChain:
        return SparseChain(
            {counter: bytes.fromhex(hash) for counter, hash in state.recent},
            {counter: bytes.fromhex(hash) for counter, hash in state.missing},
            Forks.from_state(state.forks),
        )


def _hexadecimal(hashes: dict[int, bytes]) -> list[tuple[int, str]]:
    return [(counter, hash.hex()) for counter, hash in sorted(hashes.items())]
