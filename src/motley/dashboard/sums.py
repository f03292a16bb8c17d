"""What a whole log sums to: what was not learned from, and what senders and learners do to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from motley.dashboard.answers import Discarded, Point, Reason, Wire
from motley.dashboard.fate_index import FateIndex, FateTotals
from motley.dashboard.reasons import fate_words
from motley.dashboard.records import LogIndex, RecordReader
from motley.exchange import count_unsent

SAMPLED = 4  # groups of a sender by which its bytes per token are told


def discarded(totals: FateTotals, learner: str, points: int) -> Discarded:
    """What became of rollouts, the most frequent first."""
    sums: dict[str, NDArray[np.int64]] = {}
    for fate, column in totals.of(learner):
        have = sums.get(fate, np.zeros(0, np.int64))
        size = max(len(have), len(column))
        sums[fate] = _padded(have, size) + _padded(column.values, size)
    num_rounds = max(map(len, sums.values()), default=0)
    every = max(1, math.ceil((num_rounds - 1) / max(1, points)))  # there is no round 0
    reasons = [
        Reason(
            reason=fate,
            words=fate_words(fate),
            count=int(count_R.sum()),
            points=_points(_padded(count_R, num_rounds), every),
        )
        for fate, count_R in sums.items()
    ]
    return Discarded(
        learner=learner,
        reasons=sorted(reasons, key=lambda one: -one.count),
        total=sum(one.count for one in reasons),
    )


def _padded(value_N: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    return np.concatenate([value_N, np.zeros(size - len(value_N), np.int64)])


def _points(count_R: NDArray[np.int64], every: int) -> list[Point]:
    """Sums over so many rounds each, at the first of them."""
    of_rounds = count_R[1:]
    return [
        (float(first + 1), float(of_rounds[first : first + every].sum()))
        for first in range(0, len(of_rounds), every)
    ]


def wires(folder: Path, index: LogIndex, records: RecordReader, fates: FateIndex) -> list[Wire]:
    """A row for every sender that ever sent a group."""
    unsent = _outboxes(folder)
    lags = {learner: index.behind(cursor) for learner, cursor in fates.cursors.items()}
    return [
        Wire(
            sender=name,
            groups=groups,
            num_bytes=num_bytes,
            bytes_per_token=_bytes_per_token(index, records, name),
            outbox=unsent.get(name),
            lag={learner: behind.get(name, 0) for learner, behind in lags.items()},
        )
        for name, (groups, num_bytes) in index.sizes().items()
        if groups
    ]


def _bytes_per_token(index: LogIndex, records: RecordReader, sender: str) -> float | None:
    newest: Sequence[int] = index.groups(sender)[-SAMPLED:].tolist()
    seen = [one for one in map(records.look, newest) if one and not one.fault]
    num_tokens = sum(one.num_tokens for one in seen)
    return sum(one.num_bytes for one in seen) / num_tokens if num_tokens else None


class _Member(msgspec.Struct):
    """Whose folder it is, by its member.json."""

    peer: str = ""


def _outboxes(folder: Path) -> dict[str, int]:
    """Peer -> records that wait in its outbox, of those whose folder is here."""
    found: dict[str, int] = {}
    for path in (folder / "groups" / "outbox.sqlite", *folder.glob("peers/*/groups/outbox.sqlite")):
        count = count_unsent(path) if path.is_file() else None
        if count is not None:
            found[_owner(path.parent.parent)] = count
    return found


def _owner(folder: Path) -> str:
    try:
        return msgspec.json.decode((folder / "member.json").read_bytes(), type=_Member).peer
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return folder.name
