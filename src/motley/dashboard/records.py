"""LogIndex: what every record of a log is, by its id alone; RecordReader: one record of it at a
time, examined.

An index has some twenty bytes per record and reads no record of a file. Whose key counts where is
known from what the hub said and from the tables of senders, which the index finds; so a single
record can be examined without those before it.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.archive import UNKNOWN, Archive, Examiner, Seen
from motley.archive.reading import RecordSource
from motley.clock import Deadline
from motley.dashboard.columns import Column
from motley.exchange import Entry, RecordHead
from motley.records import HUB

GROUP, TABLE, WEIGHTS, OF_HUB, OTHER = range(5)  # what a record is, by its id
STEP = 2048  # records of one read
MAX_NAMES = 4096  # senders: a stranger may call itself what it likes, and often
MAX_TABLES = 8  # of a name that are examined
KEPT_TOKENS = 400_000  # of the records that were examined last
TRIES = 8  # records of a sender to look through for a sound one


class NewestGroup(msgspec.Struct, frozen=True):
    """The newest sound group of a sender, as it says itself."""

    model: str
    vocabulary: str
    version: int
    created_s: float


class RecordName(NamedTuple):
    """What an id says."""

    sender: str
    kind: int
    round: int = -1  # as in ids: from 0
    slot: int = -1


# a third part is the tag of a record whose id was taken (exchange/log.py)
_GROUP_ID = re.compile(r"([^.]*)\.([0-9]{1,9})\.([0-9]{1,9})(?:\.[^.]*)?", re.DOTALL)
_OTHERS = {"table": TABLE, "weights": WEIGHTS}


def read_id(id: str) -> RecordName:
    """What an id says; numbers of more than nine digits are no round's and no slot's.

    >>> read_id("small.3.0")
    RecordName(sender='small', kind=0, round=3, slot=0)
    """
    match = _GROUP_ID.fullmatch(id)
    if match and match[1] != HUB:
        return RecordName(match[1], GROUP, int(match[2]), int(match[3]))
    name, *rest = id.split(".", 2)
    return RecordName(name, OF_HUB if name == HUB else _OTHERS.get(rest[0] if rest else "", OTHER))


class LogIndex:
    """One row per record, in the order of the log. What a row says is a stranger's word."""

    def __init__(self, source: RecordSource) -> None:
        self._source, self._cuts = source, source.cuts
        self._begin()

    def _begin(self) -> None:
        self._position, self._sender = Column(np.int64), Column(np.int32)
        self._round, self._slot = Column(np.int32), Column(np.int32)
        self._kind, self._bytes = Column(np.uint8), Column(np.uint32)
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}  # name -> its place in `names`
        self.telling: list[int] = []  # positions of what the hub said, and of tables
        self._num_tables: Counter[str] = Counter()
        self.num_groups = self.num_bytes = 0
        self.is_whole = False  # up to the end that was there at the last look

    def __len__(self) -> int:
        return len(self._position)

    @property
    def last(self) -> int:
        """The position of the newest record known."""
        return int(self._position.values[-1]) if len(self) else 0

    def read_on(self) -> bool:
        """Take in the next records; False: there are none. A log that was cut is begun anew."""
        heads = self._source.heads(self.last, STEP)
        if self._source.cuts != self._cuts:
            self._cuts = self._source.cuts
            self._begin()
            heads = self._source.heads(0, STEP)
        self._add(heads)
        self.is_whole = len(heads) < STEP
        return bool(heads)

    @property
    def cuts(self) -> int:
        """How often all was begun anew."""
        return self._cuts

    def _add(self, heads: list[RecordHead]) -> None:
        said = [read_id(head.id) for head in heads]
        self.num_groups += sum(one.kind == GROUP for one in said)
        self.num_bytes += sum(head.num_bytes for head in heads)
        self._position.extend([head.position for head in heads])
        self._bytes.extend([head.num_bytes for head in heads])
        self._sender.extend([self._number(one.sender) for one in said])
        self._kind.extend([one.kind for one in said])
        self._round.extend([one.round for one in said])
        self._slot.extend([one.slot for one in said])
        for head, one in zip(heads, said, strict=True):
            if one.kind == OF_HUB or (one.kind == TABLE and self._counts(one.sender)):
                self.telling.append(head.position)

    def _counts(self, sender: str) -> bool:
        """Whether a table of a sender is examined: a stranger may send any number of them."""
        self._num_tables[sender] += 1
        return self._num_tables[sender] <= MAX_TABLES

    def _number(self, name: str) -> int:
        number = self._numbers.get(name, len(self.names))
        if number == len(self.names) < MAX_NAMES:
            self._numbers[name] = number
            self.names.append(name)
        return number

    # Questions

    def groups(
        self, sender: str = "", rounds: tuple[float, float] = (-np.inf, np.inf)
    ) -> NDArray[np.int64]:
        """Positions of all groups, or of those of a sender in rounds that count from 1."""
        wanted = self._kind.values == GROUP
        if sender and sender != UNKNOWN:
            wanted = wanted & (self._sender.values == self._numbers.get(sender, -1))
        if rounds != (-np.inf, np.inf):
            round_R = self._round.values + 1.0
            wanted = wanted & (rounds[0] <= round_R) & (round_R <= rounds[1])
        positions: NDArray[np.int64] = self._position.values[wanted]
        return positions

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Sender -> how many groups it sent, and the bytes of all its records."""
        sender_R, room = self._sender.values, MAX_NAMES + 1
        groups = np.bincount(sender_R[self._kind.values == GROUP], minlength=room)
        sizes = np.bincount(sender_R, weights=self._bytes.values, minlength=room)
        return {name: (int(groups[n]), int(sizes[n])) for n, name in enumerate(self.names)}

    def behind(self, position: int) -> dict[str, int]:
        """Sender -> its records behind a position."""
        first = int(np.searchsorted(self._position.values, position, "right"))
        counts = np.bincount(self._sender.values[first:], minlength=len(self.names))
        return {name: int(counts[n]) for n, name in enumerate(self.names)}

    def place_of(self, position: int) -> RecordName | None:
        """What the id of the record at a position says; None: there is none."""
        row = bisect_left(self._position.values, position)
        if row >= len(self) or self._position.values[row] != position:
            return None
        number, kind, round, slot = (
            int(column.values[row])
            for column in (self._sender, self._kind, self._round, self._slot)
        )
        name = self.names[number] if number < len(self.names) else UNKNOWN
        return RecordName(name, kind, round, slot)


@dataclass(frozen=True, slots=True)
class _Roster:
    """Whose key counts from a position on."""

    keys: dict[str, bytes]
    revoked: frozenset[str]


class RecordReader:
    """Examines single records, whoever was examined before. What was examined is counted once."""

    def __init__(self, archive: Archive, index: LogIndex) -> None:
        self._archive, self._index = archive, index
        self._begin()

    def _begin(self) -> None:
        self._cuts = self._index.cuts
        self._teller = self._archive.examiner()
        self._told = 0  # of `telling`
        self._since: list[int] = []  # positions of rosters
        self._rosters: list[_Roster] = []
        self._kept: OrderedDict[int, Seen] = OrderedDict()
        self._kept_tokens = 0
        self._looked_at = bytearray(1)  # by position: 1 if it was examined
        self.faults: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def look(self, position: int) -> Seen | None:
        """The record at a position; None: there is none."""
        self._hear()
        seen = self._kept.get(position)
        if seen is None:
            seen = self._examined(position)
            if seen:
                self._keep(seen)
        else:
            self._kept.move_to_end(position)
        return seen

    def newest(self, sender: str) -> NewestGroup | None:
        """What the newest sound group of a sender says of it."""
        for position in reversed(self._index.groups(sender)[-TRIES:].tolist()):
            seen = self.look(position)
            if seen and seen.group and not seen.fault and seen.sender == sender:
                origin = seen.group.origin
                return NewestGroup(
                    origin.model, origin.vocabulary, origin.version, seen.group.created_s
                )
        return None

    def look_back(self, deadline: Deadline) -> bool:
        """Examine what nobody asked for yet, the newest first; False: there is nothing left."""
        self._hear()
        self._make_room(self._index.last)
        end = self._index.last + 1
        while not deadline.passed and (end := self._looked_at.rfind(0, 1, end)) > 0:
            self._examined(end)
            self._looked_at[end] = 1  # also where there is none
        return end > 0

    def _make_room(self, position: int) -> None:
        self._looked_at.extend(bytes(max(0, position + 1 - len(self._looked_at))))

    def _examined(self, position: int) -> Seen | None:
        entry = self._entry(position)
        if entry is None:
            return None
        seen = self._examiner(position).look(entry)
        self._make_room(position)
        if seen.fault and not self._looked_at[position]:
            self.faults[seen.sender][seen.fault] += 1
        self._looked_at[position] = 1
        return seen

    def _entry(self, position: int) -> Entry | None:
        if position < 1:
            return None
        page = self._archive.source.read(position - 1, 1)
        return page[0] if page and page[0].position == position else None

    def _hear(self) -> None:
        """Take in what the hub and the senders' tables said since."""
        if self._cuts != self._index.cuts:
            self._begin()
        for position in self._index.telling[self._told :]:
            entry = self._entry(position)
            before = self._teller.keys, self._teller.revoked
            if entry:
                self._teller.look(entry)
            if (self._teller.keys, self._teller.revoked) != before:
                self._since.append(position)
                self._rosters.append(_Roster(self._teller.keys, self._teller.revoked))
        self._told = len(self._index.telling)

    def _examiner(self, position: int) -> Examiner:
        """One that knows what counts at a position."""
        number = bisect_left(self._since, position)
        roster = self._rosters[number - 1] if number else _Roster({}, frozenset())
        examiner = self._archive.examiner()
        examiner.keys, examiner.revoked = roster.keys, roster.revoked
        examiner.rules, examiner.tables = self._teller.rules, self._teller.tables
        return examiner

    def _keep(self, seen: Seen) -> None:
        self._kept[seen.position] = seen
        self._kept_tokens += _weight(seen)
        while self._kept_tokens > KEPT_TOKENS and len(self._kept) > 1:
            _, oldest = self._kept.popitem(last=False)
            self._kept_tokens -= _weight(oldest)


def _weight(seen: Seen) -> int:
    return 100 + seen.num_tokens
