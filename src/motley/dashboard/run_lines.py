"""The metrics lines of a run folder, peer by peer: which files they stand in, and their numbers.

Each peer of a crew of several processes has a file of its own; RUN/metrics.jsonl, which is put
together of those who learn, is read where there are none. Decodes only lines that it is asked for,
and remembers what it decoded. Knows no crew file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from motley.clock import Clock
from motley.dashboard.lines import Ints, LineIndex, Lines
from motley.dashboard.numbers import BySender, read_numbers, without_senders

T = TypeVar("T")
Kept = dict[tuple[str, int, str], dict[int, BySender]]  # (file, times cut, key) -> by line
MOST_KEPT = 400_000  # numbers that are remembered
ABOUT_A_DICT = 4  # numbers that an answer takes at least, in memory
LEAST_S = 0.01  # to look at a file for


@dataclass(frozen=True, slots=True)
class PeerLines:
    """The lines of one peer in the order of rounds; of a round that was written twice, the last."""

    index: LineIndex
    lines: Lines  # of the whole file
    places: Ints  # of the peer's in them

    @property
    def round(self) -> Ints:
        return self.lines.round[self.places]

    @property
    def newest_round(self) -> int:
        return int(self.lines.round[self.places[-1]])

    @property
    def starts(self) -> list[int]:
        starts: list[int] = self.lines.start[self.places].tolist()
        return starts

    def __len__(self) -> int:
        return len(self.places)

    def where(self, chosen: np.ndarray) -> PeerLines:
        """Those that a mask or a list of numbers chooses."""
        return PeerLines(self.index, self.lines, self.places[chosen])

    def within(self, rounds: tuple[float, float]) -> PeerLines:
        return self.where((self.round >= rounds[0]) & (self.round <= rounds[1]))

    def marked(self, mark: int) -> PeerLines:
        return self.where((self.lines.marks[self.places] & mark) > 0)

    @property
    def steps(self) -> PeerLines:
        """Without what was measured before training."""
        return self.where(self.round > 0)

    def last(self, count: int = 1) -> PeerLines:
        return self.where(np.arange(len(self))[-count:])

    def spread(self, points: int) -> tuple[PeerLines, int]:
        """About so many of them, evenly over the rounds, the first and the newest among them; and
        how many rounds lie between two.

        Which they are does not change while a run grows, until it is so long that a step becomes
        longer: what was decoded is used again.
        """
        if len(self) <= points:
            return self, 1
        rounds = self.round
        every = _round_number((int(rounds[-1] - rounds[0]) + 1) / max(1, points - 1))
        _, first = np.unique(rounds // every, return_index=True)
        return self.where(np.unique([*first, len(rounds) - 1])), every

    def read(self) -> Iterator[bytes]:
        return self.index.read(self.lines, self.places)

    def decode(self, decoder: msgspec.json.Decoder[T]) -> Iterator[T]:
        """As a struct each, that knows no senders; what is none is left out."""
        for line in self.read():
            try:
                yield decoder.decode(without_senders(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue

    @property
    def num_bytes(self) -> int:
        return int(self.lines.length[self.places].sum())


def _round_number(least: float) -> int:
    """The first of 1, 2, 3, 4, 5, 6, 8, 10, 20, ... that is not less."""
    size = 1
    while True:
        for digit in (1, 2, 3, 4, 5, 6, 8):
            if digit * size >= least:
                return digit * size
        size *= 10


class RunLines:
    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self._indexes: dict[Path, LineIndex] = {}
        self._own: list[Path] = []  # files that count
        self._peers: dict[str, PeerLines] | None = None  # None: to be put together anew
        self._kept: Kept = {}
        self._num_kept = 0

    def refresh(self, seconds: float) -> bool:
        deadline_s = self._clock.elapsed_s() + seconds
        own = self.files()
        is_new = own != self._own
        self._own = own
        for path in own:
            index = self._indexes.setdefault(path, LineIndex(path, self._clock))
            left_s = max(LEAST_S, deadline_s - self._clock.elapsed_s())
            is_new |= index.refresh(left_s)
        if is_new:
            self._peers = None
        return is_new

    def files(self) -> list[Path]:
        own = sorted((self._folder / "peers").glob("*/metrics.jsonl"))
        return own or [self._folder / "metrics.jsonl"]

    @property
    def indexed(self) -> float:
        parts = [self._indexes[path] for path in self._own]
        num_bytes = sum(part.num_bytes for part in parts)
        seen = sum(part.indexed * part.num_bytes for part in parts)
        return seen / num_bytes if num_bytes else 1.0

    @property
    def peers(self) -> dict[str, PeerLines]:
        known = self._peers
        if known is None:
            known = {}
            for path in self._own:
                for name, lines in _by_peer(self._indexes[path]).items():
                    known.setdefault(name, lines)
            self._peers = known
        return known

    @staticmethod
    def written_s(lines: PeerLines) -> float:
        """When their file was last written to, in seconds since 1970."""
        path = lines.index.path
        return path.stat().st_mtime if path.exists() else 0.0

    def numbers(
        self, lines: PeerLines, keys: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, BySender]]]:
        """Round after round, what the lines have under each key."""
        source = (str(lines.index.path), lines.lines.times_cut)
        # what is kept is replaced when it is too much, and may be so meanwhile
        kept = [self._kept.setdefault((*source, key), {}) for key in keys]
        starts = lines.starts
        missing = [any(start not in values for values in kept) for start in starts]
        fresh = lines.where(np.array(missing, bool)).read() if any(missing) else iter(())
        for start, number, is_missing in zip(starts, lines.round.tolist(), missing, strict=True):
            if is_missing:
                found = read_numbers(next(fresh), keys)
                for key, values in zip(keys, kept, strict=True):
                    values[start] = found[key]
                    self._num_kept += len(found[key]) + ABOUT_A_DICT
            yield number, {key: values[start] for key, values in zip(keys, kept, strict=True)}
        if self._num_kept > MOST_KEPT:
            self._kept, self._num_kept = {}, 0


def _by_peer(index: LineIndex) -> dict[str, PeerLines]:
    lines = index.lines
    order = np.lexsort((lines.round, lines.peer))  # by peer, then round, then place in the file
    peer, number = lines.peer[order], lines.round[order]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (peer[1:] != peer[:-1]) | (number[1:] != number[:-1])
    order, peer = order[is_last], peer[is_last]
    edges = np.searchsorted(peer, np.arange(len(lines.names) + 1))
    return {
        name: PeerLines(index, lines, order[edges[place] : edges[place + 1]])
        for place, name in enumerate(lines.names)
    }
