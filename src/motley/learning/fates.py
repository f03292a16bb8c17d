"""What became of every group that a learner read since its last step, rollout by rollout.

A table beside the metrics, for people who ask why a sample was not learned from
(`archive/rollouts.py`). Training never reads it. Imports without torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

import msgspec

from motley.files import append, drop_unfinished_line, replace
from motley.learning.hearing import Stretch

# of a rollout of a group that a step took
LEARNED, SILENT, FILTERED, WITHHELD, BLAMED = "l", "s", "f", "w", "b"
UNHEARD = "unheard"  # of a group that its learner did not hear
RESCUED = "r"  # its success was taken, whatever the objective made of it
# the same where its sender has another vocabulary (learning/readings.py)
TEXT_ONLY, NOT_CUT, UNREAD = "t", "u", "x"


class StepFates(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One step of one learner: a line of RUN/groups/fates.jsonl.

    >>> StepFates(round=3, peer="small", cursor=41, groups={38: "llsf"}, let_go={40: "stale"})
    """

    round: int
    peer: str
    cursor: int  # how far the log was read
    groups: dict[int, str] = {}  # position of a group that was taken -> a letter per rollout
    # position of one that was not -> why; "refused: reward" where admission did not let it in
    let_go: dict[int, str] = {}
    # first and last position of those that stand together and were not heard (`hear` of [crew])
    unheard: list[Stretch] = []

    def is_unheard(self, position: int) -> bool:
        place = bisect_right(self.unheard, position, key=lambda stretch: stretch.first)
        return place > 0 and position <= self.unheard[place - 1].last

    @property
    def num_unheard(self) -> int:
        return sum(stretch.last - stretch.first + 1 for stretch in self.unheard)


def with_rescue(fates: dict[int, str], position: int, number: int) -> dict[int, str]:
    """The same where a rollout was rescued; of a group of an earlier step that is not told."""
    letters = fates.get(position)
    if letters is None:
        return fates
    return fates | {position: letters[:number] + RESCUED + letters[number + 1 :]}


class FateFile:
    """As many steps as there are: about a byte per rollout, and ten per group."""

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_unfinished_line(path)

    def write(self, fates: StepFates) -> None:
        append(self._path, msgspec.json.encode(fates) + b"\n")

    def cut(self, peer: str, round: int) -> None:
        """Take back what a peer wrote after a checkpoint of this round: it is written again."""
        kept = [f for f in read_fates(self._path) if f.peer != peer or f.round <= round]
        replace(self._path, b"".join(msgspec.json.encode(f) + b"\n" for f in kept))


def read_fates(path: Path) -> Iterator[StepFates]:
    """Every whole line; one that a kill cut short says nothing."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                yield msgspec.json.decode(line, type=StepFates)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
