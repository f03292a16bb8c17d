"""What each peer of a crew reaches by itself: RUN/alone/PEER, and RUN/alone.json where that was
recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from motley.clock import Clock
from motley.dashboard.answers import Curve, Point
from motley.dashboard.run_lines import RunLines
from motley.runs.metrics import ByKind, mean


class _Recorded(msgspec.Struct, frozen=True):
    """The part of alone.json that is shown."""

    skills: dict[str, ByKind] = {}


class AloneRuns:
    def __init__(self, folder: Path, clock: Clock) -> None:
        self._folder, self._clock = folder, clock
        self.runs: dict[str, RunLines] = {}  # peer -> its own run
        self.skills: dict[str, ByKind] = {}  # peer -> held-out at the end
        self._time_ns = -1

    def refresh(self, seconds: float) -> bool:
        is_new = self._read_recorded()
        for path in sorted((self._folder / "alone").glob("*/metrics.jsonl")):
            run = self.runs.setdefault(path.parent.name, RunLines(path.parent, self._clock))
            is_new |= run.refresh(seconds)
        return is_new

    def levels(self, keys: Sequence[str], first: float, last: float) -> Iterator[Curve]:
        """A level line for what a peer reached, where only that is known."""
        for peer, by_kind in self.skills.items():
            if peer in self.runs or not by_kind:
                continue
            ends = {f"heldout.{kind}": value for kind, value in by_kind.items()}
            ends["heldout"] = mean(by_kind)
            for key in keys:
                if key in ends:
                    level: list[Point] = [(first, ends[key]), (last, ends[key])]
                    yield Curve(key=key, peer=peer, sender="", points=level, is_alone=True)

    def _read_recorded(self) -> bool:
        path = self._folder / "alone.json"
        changed_ns = path.stat().st_mtime_ns if path.is_file() else 0
        if changed_ns == self._time_ns:
            return False
        self._time_ns, self.skills = changed_ns, {}
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            self.skills = msgspec.json.decode(path.read_bytes(), type=_Recorded).skills
        return True
