"""FateIndex: what learners made of groups, by offsets into the files that say so.

A line of a fates file is one step of one learner (learning/fates.py). The index holds whose step
it is, its round, how far the learner had read, and where the line stands: some thirty bytes. A
group is taken or let go by the first step that had read so far, or by a later one where the crew
is asynchronous; so a few lines are decoded to find it. FateTotals counts what all lines say, a
slice at a time.
"""

from __future__ import annotations

import re
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np

from motley.archive.rollouts import NOT_READ, WAITING, word_of
from motley.clock import Deadline
from motley.dashboard.columns import Column
from motley.learning.fates import UNHEARD, StepFates

LOOK_ON = 256  # steps that a group may wait for its own
BLOCK_BYTES = 2**20
KEPT_STEPS = 4096  # decoded
MAX_ROUND = 10**8

# Every line begins so: msgspec writes fields in their order.
_BEGIN = re.compile(rb'\{"round":(\d{1,9}),"peer":"([^"\\]*)","cursor":(\d{1,18})[,}]')


class _StepHead(msgspec.Struct):
    """The same where a line begins in another way."""

    round: int
    peer: str
    cursor: int


class _Learner:
    """The steps of one learner, in the order of its file."""

    def __init__(self) -> None:
        self.rounds, self.cursors = Column(np.int32), Column(np.int64)
        self.files, self.starts, self.sizes = Column(np.int16), Column(np.int64), Column(np.int32)

    @property
    def cursor(self) -> int:
        return int(self.cursors.values[-1])

    def add(self, heads: list[_StepHead], file: int, starts: list[int], sizes: list[int]) -> None:
        """Steps of one file, one behind the other."""
        known = self.cursor if len(self.cursors) else 0
        # a cursor never goes back; where a file says otherwise, bisection still finds its way
        self.cursors.extend(list(accumulate((h.cursor for h in heads), max, initial=known))[1:])
        self.rounds.extend([head.round for head in heads])
        self.files.extend([file] * len(heads))
        self.starts.extend(starts)
        self.sizes.extend(sizes)


@dataclass(slots=True)
class _FateFile:
    path: Path
    end: int = 0  # behind the last whole line known
    newest: int = 0  # where that line begins
    checksum: int = 0  # of it
    state: tuple[int, int, int] = (0, 0, 0)

    def state_now(self) -> tuple[int, int, int]:
        status = self.path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def goes_on(self) -> bool:
        """Whether what is known of it still stands there."""
        with self.path.open("rb") as file:
            file.seek(self.newest)
            return zlib.crc32(file.read(self.end - self.newest)) == self.checksum


class FateIndex:
    """Of all fates files of a run's folder. Answers as archive.rollouts.FateBook does."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.cuts = 0  # how often a file was found cut, and all was begun anew
        self._begin()

    def _begin(self) -> None:
        self._files: list[_FateFile] = []
        self._learners: dict[str, _Learner] = {}
        self.num_steps = 0
        self.is_whole = False
        self._step = lru_cache(maxsize=KEPT_STEPS)(self._decoded)

    @property
    def learners(self) -> Collection[str]:
        return self._learners

    @property
    def cursors(self) -> dict[str, int]:
        """How far each learner has read the log."""
        return {name: learner.cursor for name, learner in self._learners.items()}

    # Reading

    def read_on(self, deadline: Deadline) -> bool:
        """Take in lines that are new; True: there were some."""
        known = {file.path for file in self._files}
        found = [self._folder / "groups" / "fates.jsonl"]
        found += sorted(self._folder.glob("peers/*/groups/fates.jsonl"))
        self._files += [_FateFile(path) for path in found if path not in known and path.is_file()]
        if any(self._was_cut(file) for file in self._files):
            files = [_FateFile(file.path) for file in self._files]
            self._begin()
            self._files, self.cuts = files, self.cuts + 1
        before = self.num_steps
        self.is_whole = all(self._read_file(n, deadline) for n in range(len(self._files)))
        return self.num_steps > before

    def _was_cut(self, file: _FateFile) -> bool:
        state = file.state_now() if file.path.is_file() else (0, 0, 0)
        if state == file.state or not file.end:
            return False
        return state[1] < file.end or not file.goes_on()

    def _read_file(self, number: int, deadline: Deadline) -> bool:
        """False: there is more of it."""
        one = self._files[number]
        if not one.path.is_file():
            return True
        state = one.state_now()
        if state == one.state:
            return True
        with one.path.open("rb") as file:
            while True:  # at least once, however short the time is
                file.seek(one.end)
                block = _whole_lines(file.read(BLOCK_BYTES), file.readline)
                if not block:
                    one.state = state
                    return True
                self._add_lines(number, block)
                if deadline.passed:
                    return False

    def _add_lines(self, number: int, block: bytes) -> None:
        file = self._files[number]
        found: defaultdict[str, list[tuple[_StepHead, int, int]]] = defaultdict(list)
        lines = block.splitlines(keepends=True)
        for line in lines:
            head = _head(line)
            if head and 0 <= head.round <= MAX_ROUND:
                found[head.peer].append((head, file.end, len(line)))
            file.newest, file.end = file.end, file.end + len(line)
        file.checksum = zlib.crc32(lines[-1])
        for peer, steps in found.items():
            heads, starts, sizes = map(list, zip(*steps, strict=True))
            learner = self._learners.setdefault(peer, _Learner())
            learner.add(heads, number, starts, sizes)
            self.num_steps += len(steps)

    @property
    def share(self) -> float:
        """0..1: how much of the files was looked at."""
        return 1.0 if self.is_whole else 0.99 * _share([(f.path, f.end) for f in self._files])

    def files(self) -> list[tuple[Path, int]]:
        """Every file that was found, and how far it was read."""
        return [(file.path, file.end) for file in self._files]

    # Questions

    def of(self, position: int, number: int) -> dict[str, str]:
        """By learner, of one rollout of the group at a position."""
        return {peer: self._word(peer, position, number) for peer in self._learners}

    def step_of(self, peer: str, position: int) -> StepFates | None:
        """The step in which a learner took a group or let it go; None: none so far."""
        learner = self._learners.get(peer)
        if learner is None:
            return None
        first = bisect_left(learner.cursors.values, position)
        for number in range(first, min(first + LOOK_ON, len(learner.cursors))):
            step = self._step(peer, number)
            if position in step.groups or position in step.let_go or step.is_unheard(position):
                return step
        return None

    def words(self, peer: str, position: int) -> set[str]:
        """All fates that the rollouts of a group have by a learner."""
        step = self.step_of(peer, position)
        letters = step.groups.get(position, "") if step else ""
        if letters:
            return {word_of(letters, number) for number in range(len(letters))}
        return {self._word(peer, position, 0)}

    def _word(self, peer: str, position: int, number: int) -> str:
        step = self.step_of(peer, position)
        letters = step.groups.get(position, "") if step else ""
        if number < len(letters):
            return word_of(letters, number)
        if step and step.is_unheard(position):
            return UNHEARD
        otherwise = WAITING if position <= self._learners[peer].cursor else NOT_READ
        return step.let_go.get(position, otherwise) if step else otherwise

    def _decoded(self, peer: str, number: int) -> StepFates:
        learner = self._learners[peer]
        path = self._files[int(learner.files.values[number])].path
        try:
            with path.open("rb") as file:
                file.seek(int(learner.starts.values[number]))
                line = file.read(int(learner.sizes.values[number]))
            return msgspec.json.decode(line, type=StepFates)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            # the file was cut since; the next look at it begins anew
            return StepFates(round=0, peer=peer, cursor=0)


def _share(done: list[tuple[Path, int]]) -> float:
    size = sum(path.stat().st_size for path, _ in done if path.is_file())
    return min(1.0, sum(end for _, end in done) / max(1, size))


def _whole_lines(block: bytes, rest: Callable[[], bytes]) -> bytes:
    """A block up to its last line's end; one line that is longer than the block is read whole."""
    end = block.rfind(b"\n") + 1
    if end or not block:
        return block[:end]
    line = block + rest()
    return line if line.endswith(b"\n") else b""


def _head(line: bytes) -> _StepHead | None:
    match = _BEGIN.match(line)
    if match:
        return _StepHead(int(match[1]), match[2].decode(errors="replace"), int(match[3]))
    try:
        return msgspec.json.decode(line, type=_StepHead)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


@lru_cache(maxsize=2**14)
def _counted(letters: str) -> tuple[tuple[str, int], ...]:
    return tuple(Counter(word_of(letters, n) for n in range(len(letters))).items())


@dataclass(slots=True)
class FateTotals:
    """How many rollouts had which fate, by learner and round.

    Of a group that was let go nobody says how many rollouts it has: it counts as one of a full
    group of the crew.
    """

    index: FateIndex
    group_size: int
    counts: defaultdict[tuple[str, str], Column] = field(
        default_factory=lambda: defaultdict(lambda: Column(np.int64))
    )
    _done: dict[Path, int] = field(default_factory=dict)  # bytes of each file
    _cuts: int = 0
    is_whole: bool = False

    def count_on(self, deadline: Deadline) -> bool:
        """Count lines that were not counted; True: there were some."""
        if self._cuts != self.index.cuts:
            self.counts.clear()
            self._done.clear()
            self._cuts = self.index.cuts
        before = dict(self._done)
        self.is_whole = all(self._count_file(*one, deadline) for one in self.index.files())
        return self._done != before

    def _count_file(self, path: Path, end: int, deadline: Deadline) -> bool:
        """False: there is more of it."""
        done = self._done.get(path, 0)
        if done == end or not path.is_file():
            return True
        with path.open("rb") as file:
            file.seek(done)
            while done < end:
                line = file.readline()
                self._count(line)
                done += len(line)
                if not line or deadline.passed:  # no line: it was cut, as the index will say
                    break
        self._done[path] = done
        return done == end

    @property
    def share(self) -> float:
        """0..1: how much of the files was counted."""
        return 1.0 if self.is_whole else 0.99 * _share([*self._done.items()])

    def of(self, learner: str = "") -> Iterator[tuple[str, Column]]:
        """Every fate with its counts by round; of all learners where none is named."""
        for (name, fate), column in sorted(self.counts.items(), key=lambda item: item[0]):
            if learner in ("", name):
                yield fate, column

    def _count(self, line: bytes) -> None:
        try:
            step = msgspec.json.decode(line, type=StepFates)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        found: Counter[str] = Counter()
        for letters, times in Counter(step.groups.values()).items():
            for fate, count in _counted(letters):
                found[fate] += count * times
        for why, times in Counter(step.let_go.values()).items():
            found[why] += self.group_size * times
        if step.unheard:
            found[UNHEARD] += self.group_size * step.num_unheard
        if 0 <= step.round <= MAX_ROUND:
            for fate, count in found.items():
                self.counts[step.peer, fate].add_at(step.round, count)
