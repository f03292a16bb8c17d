"""ShownRun: a run as the page asks about it. Showcase: all that one page can show.

A run that is shown looks at its files on a thread of its own, a slice of a moment at a time.
Questions go before slices.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from motley.clock import Clock, RealClock
from motley.dashboard.answers import (
    Changed,
    Crew,
    Curves,
    Discarded,
    Formula,
    GroupPage,
    GroupText,
    Histograms,
    Served,
    Speed,
    TrustView,
)
from motley.dashboard.keeping import LogKeeper
from motley.dashboard.log_view import GroupQuery, LogView
from motley.dashboard.metrics_view import MetricsView
from motley.dashboard.targets import REPORT, Target

if TYPE_CHECKING:
    from motley.dashboard.records import NewestGroup

Range = tuple[float, float]
SLICE_S = 0.05  # of looking at files: a question may wait so long for each view
LIVE_S, OVER_S = 0.25, 2.0  # between looks
PATIENCE_S = 1.0  # of the thread, while one question follows another
MOST_AWAKE = 6  # runs whose files are looked at


class Turns:
    """Questions go before looks at files, and only one of either is under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._questions, self._fewer = 0, threading.Condition()

    @contextmanager
    def asking(self) -> Iterator[None]:
        with self._fewer:
            self._questions += 1
        try:
            with self._lock:
                yield
        finally:
            with self._fewer:
                self._questions -= 1
                self._fewer.notify_all()

    @contextmanager
    def looking(self) -> Iterator[None]:
        with self._fewer:
            self._fewer.wait_for(lambda: self._questions == 0, PATIENCE_S)
        with self._lock:
            yield


class ShownRun:
    """The views of one run, and the thread that keeps them fresh."""

    def __init__(self, id: str, folder: Path, clock: Clock = RealClock()) -> None:
        self.id, self.folder, self._clock = id, folder, clock
        self._metrics = MetricsView(folder, clock)
        self._log: LogView | None = None  # until there is a log
        self._keeper = LogKeeper(folder, clock)
        self._trouble = ""  # with files
        self._turns = Turns()
        self._changes, self._changed = 0, Changed(round=0, indexed=0.0, is_over=False)
        self._notes: list[str] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._look, name=f"watch {id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._keeper.close()

    # What the page asks

    @property
    def changes(self) -> tuple[int, Changed]:
        """How often something was new, and how things stand since."""
        return self._changes, self._changed

    def crew(self, rounds: Range) -> Crew:
        with self._turns.asking():
            newest: dict[str, NewestGroup] = self._log.newest() if self._log else {}
            crew = self._metrics.crew(rounds, newest)
            notes = [*crew.notes, *self._noted()]
            return msgspec.structs.replace(crew, notes=notes, indexed=self._indexed)

    def curves(self, keys: Sequence[str], points: int, rounds: Range) -> Curves:
        with self._turns.asking():
            return self._metrics.curves(keys, points, rounds)

    def trust(self) -> TrustView:
        with self._turns.asking():
            return self._metrics.trust(self._log.faults() if self._log else {})

    def groups(self, query: GroupQuery) -> GroupPage:
        with self._turns.asking():
            if self._log is None:
                return GroupPage(groups=[], next=None, looked_at=0, total=0)
            return self._log.groups(query)

    def group(self, position: int) -> GroupText:
        with self._turns.asking():
            return self._logged.group(position)

    def formula(self, position: int, number: int, learner: str, token: int) -> Formula:
        with self._turns.asking():
            return self._logged.formula(position, number, learner, token)

    def discarded(self, learner: str, points: int) -> Discarded:
        with self._turns.asking():
            if self._log is None:
                return Discarded(learner=learner, reasons=[], total=0)
            return self._log.discarded(learner, points)

    def histograms(self, learner: str, sender: str, rounds: Range) -> Histograms:
        with self._turns.asking():
            if self._log is None:
                return Histograms(histograms=[])
            return self._log.histograms(learner, sender, rounds)

    def speed(self) -> Speed:
        with self._turns.asking():
            return self._log.speed() if self._log else Speed(wires=[], records=0)

    @property
    def _logged(self) -> LogView:
        if self._log is None:
            raise LookupError(f"{self.id} has no log yet; ask again when it has")
        return self._log

    @property
    def _indexed(self) -> float:
        return min(self._metrics.indexed, self._log.indexed if self._log else 1.0)

    def _noted(self) -> list[str]:
        """What cannot be shown, and why."""
        return [note for note in (self._keeper.note, self._trouble) if note]

    # The thread

    def _look(self) -> None:
        while not self._closing.is_set():
            with self._turns.looking():
                is_new = self._refresh()
                self._settle(is_new)
            if not (is_new and self._changed.indexed < 1.0):
                self._closing.wait(OVER_S if self._changed.is_over else LIVE_S)

    def _refresh(self) -> bool:
        """Take in some of what is new; whether anything was."""
        try:
            if self._log is None and (archive := self._keeper.archive):
                self._log = LogView(archive, self._clock)
            is_new = self._metrics.refresh(SLICE_S)
            if self._log:
                is_new = self._log.refresh(SLICE_S) or is_new
        except (OSError, ValueError) as error:
            self._trouble = f"{self.folder} cannot be read further: {error}"
            return False
        self._trouble = ""
        return is_new

    def _settle(self, is_new: bool) -> None:
        """Count a change, if there is one."""
        before, noted = self._changed, self._notes
        self._changed = Changed(
            round=self._metrics.round, indexed=self._indexed, is_over=self._metrics.is_over
        )
        self._notes = self._noted()
        if is_new or self._changed != before or self._notes != noted:
            self._changes += 1


class Showcase:
    """What one page shows: runs and reports by their ids. A run is looked at from its first
    question on, and given up when others were asked about since.
    """

    def __init__(self, targets: Sequence[Target], clock: Clock = RealClock()) -> None:
        self._targets, self._clock = {target.id: target for target in targets}, clock
        self._awake: dict[str, ShownRun] = {}  # the least recently asked first
        self._users: Counter[str] = Counter()
        self._lock = threading.Lock()

    def served(self) -> list[Served]:
        return [target.served for target in self._targets.values()]

    @contextmanager
    def using(self, id: str) -> Iterator[ShownRun]:
        """A run, which stays awake for the time of a `with`."""
        target = self._target(id, "run")
        with self._lock:
            run = self._awake.pop(id, None) or ShownRun(id, target.folder, self._clock)
            self._awake[id] = run
            self._users[id] += 1
            tired = self._tired()
        for one in tired:
            one.close()
        try:
            yield run
        finally:
            with self._lock:
                self._users[id] -= 1

    def report(self, id: str) -> Path:
        return self._target(id, "report").folder / REPORT

    def close(self) -> None:
        with self._lock:
            awake, self._awake = self._awake, {}
        for run in awake.values():
            run.close()

    def _tired(self) -> list[ShownRun]:
        """Take those out that nobody uses, if more are awake than should be."""
        spare = [id for id in self._awake if not self._users[id]]
        excess = max(0, len(self._awake) - MOST_AWAKE)
        return [self._awake.pop(id) for id in spare[:excess]]

    def _target(self, id: str, kind: str) -> Target:
        target = self._targets.get(id)
        if target is None or target.kind != kind:
            known = [one.id for one in self._targets.values() if one.kind == kind]
            raise LookupError(
                f"this page has no {kind} {id[:80]!r}; it has {', '.join(known) or 'none'}"
            )
        return target
