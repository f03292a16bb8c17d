"""The rollouts of a run as people read them: prompt, completion, reward, and for every learner what
became of it.

The log says what was sampled, groups/fates.jsonl what was made of it. What nobody wrote down is
called "not recorded". Streams: a run of any size is read a page at a time.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from motley.archive.examine import Seen
from motley.archive.opening import find_log, open_log
from motley.archive.reading import Archive
from motley.archive.tables import ProblemOf, crew_of, problems_of
from motley.archive.texts import LogTexts
from motley.learning.fates import (
    BLAMED,
    FILTERED,
    LEARNED,
    NOT_CUT,
    RESCUED,
    SILENT,
    TEXT_ONLY,
    UNHEARD,
    UNREAD,
    WITHHELD,
    StepFates,
    read_fates,
)
from motley.records import Ending, Group

WORDS = {
    LEARNED: "learned",
    SILENT: "silent group",
    FILTERED: "filtered",
    WITHHELD: "withheld in part",
    BLAMED: "not finite",
    RESCUED: "learned as a rescue",
    TEXT_ONLY: "text only",
    NOT_CUT: "not cut",
    UNREAD: "unreadable",
}
QUIET = {SILENT, TEXT_ONLY, NOT_CUT, UNREAD}  # all that a silent group may have
NO_ADVANTAGE = "no advantage"  # as good as its group is on average, which is not silent
TRUNCATED = "truncated"  # not a fate: such a rollout may be learned from
NOT_RECORDED = "not recorded"
WAITING, NOT_READ = "waiting", "not read yet"


class LoggedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One completion. What cannot be had on this machine is None."""

    position: int  # of its group in the log
    round: int  # its sender's, from 1 as in metrics.jsonl
    sender: str
    version: int  # of the weights that sampled it
    slot: int  # of its problem in the round
    number: int  # in its group
    problem: str  # the id
    kind: str | None
    prompt: str | None
    answer: str | None
    completion: str | None
    num_tokens: int
    reward: float | None  # None: not a number
    ending: Ending
    fates: dict[str, str]  # learner -> "learned", or why not


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFilter:
    """Which rollouts are wanted; what is left out wants all."""

    peer: str = ""  # whose fates count
    sender: str = ""
    rounds: tuple[float, float] = (-math.inf, math.inf)
    kind: str = ""
    rewards: tuple[float, float] = (-math.inf, math.inf)
    grep: re.Pattern[str] | None = None  # in the prompt or the completion
    reason: str = ""  # a part of a fate, or "truncated"

    def wants_group(self, group: Group, sender: str) -> bool:
        low, high = self.rounds
        return self.sender in ("", sender) and low <= group.round + 1 <= high

    def wants(self, rollout: LoggedRollout) -> bool:
        low, high = self.rewards
        any_reward = low == -math.inf and high == math.inf
        return (
            self.kind in ("", rollout.kind)
            and (any_reward or (rollout.reward is not None and low <= rollout.reward <= high))
            and self._matches(rollout)
            and self._has_reason(rollout)
        )

    def _matches(self, rollout: LoggedRollout) -> bool:
        texts = (rollout.prompt or "", rollout.completion or "")
        return self.grep is None or any(map(self.grep.search, texts))

    def _has_reason(self, rollout: LoggedRollout) -> bool:
        if self.reason == TRUNCATED:
            return rollout.ending != "stop"
        fates = rollout.fates
        asked = [fates[self.peer]] if self.peer in fates else fates.values()
        return not self.reason or any(self.reason in fate for fate in asked)


def read_range(text: str, name: str) -> tuple[float, float]:
    """Both ends count: "3" is 3 alone, "3..7", "..7" up to it, "3.." from it on."""
    first, dots, last = text.partition("..")
    try:
        low = float(first) if first else -math.inf
        high = float(last) if last else math.inf
    except ValueError:
        low, high = math.inf, -math.inf
    if not text or math.isnan(low) or math.isnan(high) or low > high:
        raise ValueError(f"{name} {text!r} is no range; expected such as 3, 3..7, ..7 or 3..")
    return (low, high) if dots else (low, low)


class Fates(Protocol):
    """What learners made of groups, wherever it is kept."""

    @property
    def learners(self) -> Collection[str]:
        """Those who wrote down what they made of groups."""
        ...

    def of(self, position: int, number: int) -> dict[str, str]:
        """By learner, of one rollout of the group at a position."""
        ...


@dataclass(slots=True)
class FateBook:
    """What the learners of a folder made of the groups of a log, by position."""

    taken: dict[int, dict[str, str]] = field(default_factory=dict)  # learner -> letters
    let_go: dict[int, dict[str, str]] = field(default_factory=dict)  # learner -> why
    cursors: dict[str, int] = field(default_factory=dict)  # learner -> how far it read the log
    # learner -> steps in which groups were not heard, in the log's order
    unheard: dict[str, list[StepFates]] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> FateBook:
        book = FateBook()
        own = folder / "groups" / "fates.jsonl"
        for path in (own, *sorted(folder.glob("peers/*/groups/fates.jsonl"))):
            for step in read_fates(path):
                book.cursors[step.peer] = max(step.cursor, book.cursors.get(step.peer, 0))
                if step.unheard:
                    book.unheard.setdefault(step.peer, []).append(step)
                for position, letters in step.groups.items():
                    book.taken.setdefault(position, {})[step.peer] = letters
                for position, why in step.let_go.items():
                    book.let_go.setdefault(position, {})[step.peer] = why
        return book

    @property
    def learners(self) -> Collection[str]:
        return self.cursors

    def of(self, position: int, number: int) -> dict[str, str]:
        """By learner, of one rollout of the group at a position."""
        return {peer: self._word(peer, position, number) for peer in self.cursors}

    def _word(self, peer: str, position: int, number: int) -> str:
        letters = self.taken.get(position, {}).get(peer, "")
        if number < len(letters):
            return word_of(letters, number)
        why = self.let_go.get(position, {}).get(peer, "")
        if why or position > self.cursors[peer]:
            return why or NOT_READ
        return UNHEARD if self._is_unheard(peer, position) else WAITING

    def _is_unheard(self, peer: str, position: int) -> bool:
        steps = self.unheard.get(peer, [])
        place = bisect_left(steps, position, key=lambda step: step.cursor)
        return any(step.is_unheard(position) for step in steps[place : place + 1])


def word_of(letters: str, number: int) -> str:
    """What the letters of a group that was taken say of one of its rollouts."""
    alone = letters[number] == SILENT and not set(letters) <= QUIET
    return NO_ADVANTAGE if alone else WORDS.get(letters[number], NOT_RECORDED)


def problems_or_note(archive: Archive) -> tuple[ProblemOf, str]:
    """What each group is about; where the task cannot be had here, nothing, and why."""
    try:
        return problems_of(archive), ""
    except ValueError as error:
        why = f"without prompts and answers, as the task cannot be loaded: {error}"
        return lambda group: None, why


@dataclass(frozen=True, slots=True)
class RolloutReader:
    """Rollouts of an archive, with what is known of them on this machine."""

    archive: Archive
    problem_of: ProblemOf
    texts: LogTexts
    book: Fates
    learners: tuple[str, ...]
    note: str  # what cannot be shown, and why

    @staticmethod
    def of(archive: Archive) -> RolloutReader:
        config = crew_of(archive)
        problem_of, note = problems_or_note(archive)
        book = FateBook.read(archive.folder)
        students = tuple(peer.name for peer in config.students) if config else ()
        learners = tuple(name for name in students if name in book.learners) or students
        if not book.learners:
            missing = f"{archive.folder / 'groups' / 'fates.jsonl'} is not there"
            note = "; ".join(filter(None, (note, f"what was learned from is not known: {missing}")))
        return RolloutReader(archive, problem_of, LogTexts(config), book, learners, note)

    def rollouts(self, wanted: RolloutFilter = RolloutFilter()) -> Iterator[LoggedRollout]:
        """In the order of the log."""
        self.check(wanted)
        for seen in self.archive.records():
            if seen.group and wanted.wants_group(seen.group, seen.sender):
                yield from filter(wanted.wants, self.of_group(seen, seen.group))

    def check(self, wanted: RolloutFilter) -> None:
        """Refuse a filter by the fates of somebody whose fates are not known."""
        if wanted.peer and self.learners and wanted.peer not in self.learners:
            raise ValueError(
                f"{self.archive.folder} does not say what {wanted.peer!r} learned from; it has "
                f"{', '.join(self.learners)}. Who sampled is --sender"
            )

    def of_group(self, seen: Seen, group: Group, with_text: bool = True) -> Iterator[LoggedRollout]:
        """The rollouts of one group; `with_text`: what they say, which takes longest."""
        problem = self.problem_of(group)
        for number, rollout in enumerate(group.rollouts):
            fates = self.book.of(seen.position, number)
            if not fates:
                fates = dict.fromkeys(self.learners, NOT_RECORDED)
            if seen.fault:
                fates = dict.fromkeys(fates, f"refused: {seen.fault}")
            yield LoggedRollout(
                position=seen.position,
                round=group.round + 1,
                sender=seen.sender,
                version=group.origin.version,
                slot=group.slot,
                number=number,
                problem=group.problem,
                kind=problem.kind if problem else None,
                prompt=problem.prompt if problem else None,
                answer=problem.answer if problem else None,
                completion=self.texts.text(seen, rollout) if with_text else None,
                num_tokens=len(rollout.tokens),
                reward=rollout.reward if math.isfinite(rollout.reward) else None,
                ending=rollout.ending,
                fates=fates,
            )


def read_rollouts(
    run: str | Path,
    wanted: RolloutFilter = RolloutFilter(),
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[LoggedRollout]:
    """Rollouts of a run folder, a peer's or a hub's; `say` is told what cannot be shown."""
    with open_log(find_log(str(run))) as archive:
        reader = RolloutReader.of(archive)
        if reader.note:
            say(reader.note)
        yield from reader.rollouts(wanted)


def rollouts(run: str | Path) -> list[LoggedRollout]:
    """All rollouts of a run, as a table; `read_rollouts` reads one after the other."""
    return list(read_rollouts(run))
