"""ShownRun: a run as the page asks about it. Showcase: all that one page can show.

A run that is shown looks at its files on threads of its own, for a moment at a time. Questions go
first.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
from motley.dashboard.keeping import STOPPED, LogKeeper
from motley.dashboard.loading import NotReadyError
from motley.dashboard.log_view import GroupQuery, LogView
from motley.dashboard.metrics_view import MetricsView
from motley.dashboard.targets import REPORT, Target

Range = tuple[float, float]
SLICE_S = 0.03  # of looking at files
LIVE_S, OVER_S = 0.5, 2.0  # between looks
PATIENCE_S = 1.0  # of the thread, while one question follows another
LOAD_S = 3.0  # before the log is looked at: beside each other both would keep questions waiting
MOST_AWAKE = 6  # runs whose files are looked at


class QuestionsFirst:
    """Questions go before looks at files. A view answers while it is refreshed, but both would take
    from one processor.
    """

    def __init__(self) -> None:
        self._questions, self._fewer = 0, threading.Condition()

    @contextmanager
    def asking(self) -> Iterator[None]:
        with self._fewer:
            self._questions += 1
        try:
            yield
        finally:
            with self._fewer:
                self._questions -= 1
                self._fewer.notify_all()

    def wait(self) -> None:
        """Until nobody asks; not for ever, as one question may follow another."""
        with self._fewer:
            self._fewer.wait_for(lambda: self._questions == 0, PATIENCE_S)


@contextmanager
def _there() -> Iterator[None]:
    """What the view refuses of a place in the log is not there."""
    try:
        yield
    except ValueError as error:
        raise LookupError(str(error)) from None


class ShownRun:
    """The views of one run, and a thread for each that keeps it fresh."""

    def __init__(self, id: str, folder: Path, clock: Clock = RealClock()) -> None:
        self.id, self.folder, self._clock = id, folder, clock
        self._metrics, self._one_question = MetricsView(folder, clock), threading.Lock()
        self._log: LogView | None = None  # until there is one; it takes questions by itself
        self.questions = QuestionsFirst()
        self._keeper = LogKeeper(folder, clock)
        self._trouble: dict[str, str] = {}  # with files, by the thread that has it
        self._changes, self._stand = 0, self._stands()
        self._changing, self._closing = threading.Lock(), threading.Event()
        looks = {"watch": self._look_at_metrics, "rollouts": self._look_at_log}
        self._threads = [
            threading.Thread(target=self._look, args=(name, look), name=f"{name} {id}", daemon=True)
            for name, look in looks.items()
        ]
        self._take("watch", self._look_at_metrics)  # so that the first answer has something
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()
        for thread in self._threads:
            thread.join()
        self._keeper.close()

    # What the page asks

    @property
    def changes(self) -> tuple[int, Changed]:
        """How often something was new, and how things stand since."""
        return self._changes, self._stand[0]

    def crew(self, rounds: Range) -> Crew:
        newest = self._log.newest() if self._log else {}
        with self._one_question:
            crew = self._metrics.crew(rounds, newest)
        changed, notes = self._stands()
        every_note = [*crew.notes, *(note for note in notes if note not in crew.notes)]
        return msgspec.structs.replace(crew, notes=every_note, indexed=changed.indexed)

    def curves(self, keys: Sequence[str], points: int, rounds: Range, peer: str = "") -> Curves:
        with self._one_question:
            return self._metrics.curves(keys, points, rounds, peer)

    def trust(self) -> TrustView:
        faults = self._log.faults() if self._log else {}
        with self._one_question:
            return self._metrics.trust(faults)

    def groups(self, query: GroupQuery) -> GroupPage:
        if self._log is None:
            return GroupPage(groups=[], next=None, looked_at=0, total=0)
        return self._log.groups(query)

    def group(self, position: int, learner: str) -> GroupText:
        with _there():
            return self._logged.group(position, learner)

    def formula(self, position: int, number: int, learner: str, token: int) -> Formula:
        with _there():
            return self._logged.formula(position, number, learner, token)

    def discarded(self, learner: str, points: int) -> Discarded:
        if self._log is None:
            return Discarded(learner=learner, reasons=[], total=0)
        return self._log.discarded(learner, points)

    def histograms(self, learner: str, sender: str, rounds: Range) -> Histograms:
        if self._log is None:
            return Histograms(histograms=[])
        return self._log.histograms(learner, sender, rounds)

    def speed(self) -> Speed:
        return self._log.speed() if self._log else Speed(wires=[], records=0)

    @property
    def _logged(self) -> LogView:
        if self._log is None:
            raise NotReadyError(f"{self.id} has no log yet; ask again when it has")
        return self._log

    def _stands(self) -> tuple[Changed, list[str]]:
        """Where it stands, and what cannot be shown, and why."""
        metrics, log = self._metrics, self._log
        indexed = min(metrics.indexed, log.indexed if log else 1.0)
        kept = self._keeper.note
        # where all is over, nobody misses the hub
        kept = "" if metrics.is_over and kept == STOPPED else kept
        notes = [kept, *(log.notes if log else ()), *self._trouble.values()]
        changed = Changed(round=metrics.round, indexed=indexed, is_over=metrics.is_over)
        return changed, [note for note in notes if note]

    # The threads

    def _look(self, name: str, look: Callable[[], bool]) -> None:
        while not self._closing.is_set():
            self.questions.wait()
            is_new = self._take(name, look)
            if not is_new or self._stand[0].indexed == 1.0:
                self._closing.wait(OVER_S if self._stand[0].is_over else LIVE_S)

    def _take(self, name: str, look: Callable[[], bool]) -> bool:
        """Take one look; whether something was new."""
        is_new = False
        try:
            is_new = look()
            self._trouble.pop(name, None)
        except (OSError, ValueError) as error:
            self._trouble[name] = f"{self.folder} cannot be read further: {error}"
        with self._changing:
            before, self._stand = self._stand, self._stands()
            self._changes += is_new or self._stand != before
        return is_new

    def _look_at_metrics(self) -> bool:
        return self._metrics.refresh(SLICE_S)

    def _look_at_log(self) -> bool:
        if self._log is None and (archive := self._keeper.archive):
            self._log = LogView(archive, self._clock)
            self._log.load(LOAD_S)
        return self._log.refresh(SLICE_S) if self._log else False


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

    def check(self, id: str) -> None:
        """Refuse what is no run of this page."""
        self._target(id, "run")

    @contextmanager
    def asking(self, id: str) -> Iterator[ShownRun]:
        """A run, for one question."""
        with self.using(id) as run, run.questions.asking():
            yield run

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
