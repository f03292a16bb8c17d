"""LogView: a run's log as the page shows it: groups a page at a time, one group whole, what was not
learned from, and what the log is like by sender.

Reads by the indexes (records.py, fate_index.py) and decodes only what is shown. A question is
answered in about ANSWER_S: what would take longer is answered in part, with a cursor.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock

import numpy as np

from motley.archive import (
    Archive,
    LoggedRollout,
    RolloutFilter,
    RolloutReader,
    Seen,
    crew_of,
)
from motley.archive.rollouts import TRUNCATED
from motley.clock import Clock, Deadline, RealClock
from motley.dashboard.answers import (
    Discarded,
    Formula,
    GroupLine,
    GroupPage,
    GroupText,
    Histograms,
    RolloutDot,
    Speed,
)
from motley.dashboard.fate_index import FateIndex, FateTotals
from motley.dashboard.formulas import formula
from motley.dashboard.group_texts import GroupWriter
from motley.dashboard.loading import Loading, NotReadyError, students
from motley.dashboard.reasons import REFUSED
from motley.dashboard.records import GROUP, LogIndex, NewestGroup, RecordName, RecordReader
from motley.dashboard.sums import discarded, wires
from motley.dashboard.token_traces import TraceReader
from motley.exchange import LogError

ANSWER_S = 0.15  # before the answer is written; a page is to have it within 0.3
LOAD_S = 5.0  # that one group may wait for what is being loaded
SLICE_S = 0.01  # of a refresh, in which no question is answered
LOOK_BACK_S = 0.02  # of a refresh, for records that nobody asked for
MAX_LIMIT = 500
PROMPT_CHARACTERS = 200
EVERYTHING = (-math.inf, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupQuery:
    """Which groups are wanted: those with a rollout that is; what is left out wants all.

    `after`: the position behind which to begin; with `newest` the one before which, 0 for the end.
    """

    after: int = 0
    limit: int = 50
    newest: bool = False  # from the end of the log backwards
    sender: str = ""
    learner: str = ""  # whose fates count
    rounds: tuple[float, float] = EVERYTHING  # of the senders, from 1
    kind: str = ""
    rewards: tuple[float, float] = EVERYTHING
    text: str = ""  # in the prompt or a completion, in capitals or not
    fate: str = ""  # a part of one, or "truncated"

    @property
    def filter(self) -> RolloutFilter:
        return RolloutFilter(
            peer=self.learner,
            kind=self.kind,
            rewards=self.rewards,
            grep=re.compile(re.escape(self.text), re.IGNORECASE) if self.text else None,
            reason=self.fate,
        )

    @property
    def asks_of_rollouts(self) -> bool:
        return bool(self.kind or self.text) or self.rewards != EVERYTHING


class LogView:
    """Questions and `refresh` may come from different threads."""

    def __init__(self, archive: Archive, clock: Clock = RealClock()) -> None:
        self._archive, self._clock = archive, clock
        self._lock = RLock()
        self._index = LogIndex(archive.source)
        self._records = RecordReader(archive, self._index)
        self._fates = FateIndex(archive.folder)
        self._traces = TraceReader(archive.folder)
        self._config = crew_of(archive)
        self._totals = FateTotals(
            self._fates, self._config.rollouts_per_group if self._config else 1
        )
        self._loading = Loading(archive, self._config, self._fates)
        self._out_of_reach = ""
        self._works = deque([self._fates.read_on, self._totals.count_on, self._look_back])

    # What is new

    def load(self, seconds: float) -> None:
        """Have the task and the vocabularies read, which takes seconds; wait for it for so long."""
        self._loading.reader(seconds)

    def refresh(self, seconds: float = 0.2) -> bool:
        """Look at what the log and its fates have grown by, for about so long; True if something is
        new. The log goes first, as clicks lead there. What else there was no time for comes first
        in the next look. The first call has a thread load the task and the vocabularies, which
        takes seconds.
        """
        self._loading.begin()
        deadline = Deadline(self._clock, seconds)
        before = self._index.cuts, len(self._index)
        self._go_on(deadline, self._read_log)
        is_new = before != (self._index.cuts, len(self._index))
        for _ in range(len(self._works)):
            if deadline.passed:
                break
            work = self._works[0]
            self._works.rotate(-1)
            is_new |= self._go_on(deadline, work)
        return is_new

    def _go_on(self, deadline: Deadline, work: Callable[[Deadline], bool]) -> bool:
        """Work in slices, so that questions are answered in between; True if it did something."""
        did = False
        while True:
            with self._lock:
                did_now = work(Deadline(self._clock, SLICE_S))
            did = did or did_now
            if deadline.passed or not did_now:
                return did
            self._clock.sleep_s(0)

    def _read_log(self, deadline: Deadline) -> bool:
        is_more = False
        with self._reaching():
            while (is_more := self._index.read_on()) and not deadline.passed:
                pass
            self._out_of_reach = ""
        return is_more

    def _look_back(self, _: Deadline) -> bool:
        with self._reaching():
            self._records.look_back(Deadline(self._clock, LOOK_BACK_S))
        return False  # the rest is for another time: nobody asked for it

    @contextmanager
    def _reaching(self) -> Iterator[None]:
        try:
            yield
        except LogError as error:
            self._out_of_reach = f"the log is out of reach: {error}"

    @property
    def indexed(self) -> float:
        """0..1: how much of the log and of the fates was looked at."""
        path = self._archive.folder / "groups" / "log.bin"
        size = path.stat().st_size if path.is_file() else 2 * self._index.num_bytes
        of_log = 1.0 if self._index.is_whole else min(0.99, self._index.num_bytes / max(1, size))
        return (of_log + self._fates.share + self._totals.share) / 3

    @property
    def notes(self) -> list[str]:
        """What cannot be shown, and why."""
        found = [self._out_of_reach, *self._loading.notes]
        if self._fates.is_whole and not self._fates.learners:
            missing = self._archive.folder / "groups" / "fates.jsonl"
            found.append(f"what was learned from is not known: {missing} is not there")
        return [note for note in found if note]

    # Groups

    def groups(self, query: GroupQuery) -> GroupPage:
        """A page of groups, in the order of the log. Filters that need a group's content look at as
        many groups as there is time for; `next` then goes on where they stopped. So it does while
        the task and the vocabularies are being loaded: no group has been looked at then.
        """
        reader, wanted = self._loading.reader(ANSWER_S), query.filter
        if reader is None:
            total = self._index.num_groups
            return GroupPage(groups=[], next=query.after, looked_at=0, total=total)
        reader.check(wanted)
        with self._lock:
            deadline = Deadline(self._clock, ANSWER_S)
            lines: list[GroupLine] = []
            looked_at, last, limit = 0, query.after, max(1, min(query.limit, MAX_LIMIT))
            next_after: int | None = None
            for position in self._candidates(query):
                if len(lines) == limit or (looked_at and deadline.passed):
                    next_after = last
                    break
                looked_at, last = looked_at + 1, position
                line = self._line(position, query, wanted, reader)
                lines += [line] if line else []
            return GroupPage(
                groups=lines,
                next=next_after,
                looked_at=looked_at,
                total=self._index.num_groups,
            )

    def _candidates(self, query: GroupQuery) -> Iterator[int]:
        positions = self._index.groups(query.sender, query.rounds)
        if query.newest:
            end = np.searchsorted(positions, query.after) if query.after else len(positions)
            return map(int, reversed(positions[:end]))
        return map(int, positions[np.searchsorted(positions, query.after, "right") :])

    def _line(
        self, position: int, query: GroupQuery, wanted: RolloutFilter, reader: RolloutReader
    ) -> GroupLine | None:
        """None: it is not wanted."""
        if not self._may_have_fate(position, query):
            return None
        seen, named = self._records.look(position), self._index.place_of(position)
        if seen is None or named is None or query.sender not in ("", seen.sender):
            return None
        if seen.group is None:
            return _unreadable_line(seen, named) if _wants_unreadable(seen, query) else None
        rollouts = [*reader.of_group(seen, seen.group, with_text=bool(query.text))]
        if rollouts and not any(map(wanted.wants, rollouts)):
            return None
        return _group_line(seen, named, rollouts)

    def _may_have_fate(self, position: int, query: GroupQuery) -> bool:
        """Whether a look at the group itself is worth it, as far as its fates tell."""
        fate, fates = query.fate, self._fates
        if fate in ("", TRUNCATED) or not fates.learners or fate in REFUSED or REFUSED in fate:
            return True
        asked = [query.learner] if query.learner in fates.learners else fates.learners
        return any(fate in word for peer in asked for word in fates.words(peer, position))

    def group(self, position: int, learner: str = "") -> GroupText:
        """One group whole, with what every learner made of its tokens, or one of them."""
        with self._writing() as writer:
            seen, named = self._group_at(position)
            positions = self._index.groups()
            place = int(np.searchsorted(positions, position))
            before = int(positions[place - 1]) if place else None
            after = int(positions[place + 1]) if place + 1 < len(positions) else None
            return writer.text(seen, named, (before, after), learner)

    def formula(self, position: int, number: int, learner: str, token: int) -> Formula:
        """What a learner's step made of one token, line by line."""
        with self._writing() as writer:
            self._must_be_known(learner)
            facts = writer.facts(self._group_at(position)[0], number, learner, token)
        row = self._loading.row(LOAD_S)
        if row is None:
            raise NotReadyError(
                "the parts of the crew's objective are still being loaded; ask again in a moment"
            )
        return formula(row, facts)

    @contextmanager
    def _writing(self) -> Iterator[GroupWriter]:
        reader = self._loading.reader(LOAD_S)
        if reader is None:
            raise NotReadyError(
                "the task and the vocabularies of the crew are still being loaded; ask again in a "
                "moment"
            )
        with self._lock:
            yield GroupWriter(reader, self._fates, self._traces, self._vocabulary_of)

    def _group_at(self, position: int) -> tuple[Seen, RecordName]:
        named = self._index.place_of(position)
        seen = self._records.look(position) if named and named.kind == GROUP else None
        if named is None and not self._index.is_whole:
            raise NotReadyError(
                f"position {position} of the log is not looked at yet; ask again in a moment"
            )
        if named is None or seen is None:
            raise ValueError(
                f"there is no group at position {position} of the log; it has "
                f"{len(self._index)} records so far: choose one of the list of groups"
            )
        return seen, named

    def _vocabulary_of(self, peer: str) -> str:
        """By the newest group of a peer; nothing where it has none."""
        newest = self._records.newest(peer)
        return newest.vocabulary if newest else ""

    # Sums

    def newest(self) -> dict[str, NewestGroup]:
        """The newest sound group of each sender."""
        with self._lock:
            found = {name: self._records.newest(name) for name in self._index.names}
            return {name: newest for name, newest in found.items() if newest}

    def faults(self) -> dict[str, dict[str, int]]:
        """Sender -> fault -> records, of those that were examined so far: all that were shown, and
        as many others, from the newest on, as refreshes had time for.
        """
        with self._lock:
            return {sender: dict(counts) for sender, counts in self._records.faults.items()}

    def discarded(self, learner: str = "", points: int = 100) -> Discarded:
        """What became of rollouts, by reason, as far as the fates were counted."""
        with self._lock:
            self._must_be_known(learner)
            return discarded(self._totals, learner, points)

    def histograms(
        self, learner: str = "", sender: str = "", rounds: tuple[float, float] = EVERYTHING
    ) -> Histograms:
        """Ratios and weights of tokens, over at most thirty of the rounds that have traces."""
        with self._lock:
            self._must_be_known(learner)
            learners = [learner] if learner else sorted(self._fates.learners)
            deadline = Deadline(self._clock, ANSWER_S)
            return Histograms(
                histograms=self._traces.histograms(learners, sender, rounds, deadline)
            )

    def speed(self) -> Speed:
        """What the log is like, by sender."""
        with self._lock:
            found = wires(self._archive.folder, self._index, self._records, self._fates)
            return Speed(wires=found, records=len(self._index))

    def _must_be_known(self, learner: str) -> None:
        known = {*self._fates.learners, *students(self._config)}
        if learner and learner not in known:
            raise ValueError(
                f"{learner!r} learns nothing in this run; choose one of {', '.join(sorted(known))}"
            )


def _group_line(seen: Seen, named: RecordName, rollouts: list[LoggedRollout]) -> GroupLine:
    assert seen.group
    prompt = rollouts[0].prompt if rollouts else None
    return GroupLine(
        position=seen.position,
        round=named.round + 1,
        slot=named.slot,
        sender=seen.sender,
        version=seen.group.origin.version,
        kind=rollouts[0].kind if rollouts else None,
        prompt=prompt[:PROMPT_CHARACTERS] if prompt else prompt,
        fault=seen.fault,
        rollouts=[
            RolloutDot(
                number=one.number,
                reward=one.reward,
                num_tokens=one.num_tokens,
                ending=one.ending,
                fates=one.fates,
            )
            for one in rollouts
        ],
    )


def _unreadable_line(seen: Seen, named: RecordName) -> GroupLine:
    """A record under the id of a group that cannot be read as one."""
    return GroupLine(
        position=seen.position,
        round=named.round + 1,
        slot=named.slot,
        sender=seen.sender,
        version=-1,
        kind=None,
        prompt=None,
        fault=seen.fault or "subject",
        rollouts=[],
    )


def _wants_unreadable(seen: Seen, query: GroupQuery) -> bool:
    return not query.asks_of_rollouts and query.fate in f"{REFUSED}{seen.fault or 'subject'}"
