"""Journal: what each step was taken from, written before it is taken.

After a crash the same steps are taken again, from the same groups.

A line per step: the version it makes, how far the log had been read, whether the round was closed
early, and which records were used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from motley.files import append, replace
from motley.learning.select import Candidate


class WrittenStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it is written down before it is taken."""

    round: int  # learned rounds before it
    cursor: int
    closed: bool
    positions: tuple[int, ...]
    sha256: str  # of the hashes of the records, in the order they were used
    pardoned: tuple[str, ...] = ()  # before anything was received for it

    @staticmethod
    def of(
        round: int,
        cursor: int,
        closed: bool,
        chosen: Sequence[Candidate],
        pardoned: tuple[str, ...] = (),
    ) -> WrittenStep:
        digest = hashlib.sha256(b"".join(c.hash for c in chosen)).hexdigest()
        return WrittenStep(
            round=round,
            cursor=cursor,
            closed=closed,
            positions=tuple(c.position for c in chosen),
            sha256=digest,
            pardoned=pardoned,
        )


class Journal:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._steps = {step.round: step for step in _read(path)}
        self._rewrite()

    def of(self, round: int) -> WrittenStep | None:
        return self._steps.get(round)

    @property
    def reach(self) -> int:
        """The version that its steps lead to."""
        return max((round + 1 for round in self._steps), default=0)

    @property
    def cursor(self) -> int:
        """How far the log had been read when the last step was written down."""
        return max((step.cursor for step in self._steps.values()), default=0)

    def add(self, step: WrittenStep) -> None:
        """Write a step down for good.

        The same step again changes nothing; another for its round is an error.
        """
        known = self._steps.get(step.round)
        if known == step:
            return
        if known:
            raise ValueError(
                f"round {step.round} was learned from records {list(known.positions)} before the "
                "restart and would now be learned from "
                f"{list(step.positions)}; is it another log, or were files of this run changed?"
            )
        append(self._path, msgspec.json.encode(step) + b"\n", synced=True)
        self._steps[step.round] = step

    def forget_before(self, round: int) -> None:
        """Drop steps that every kept checkpoint already holds."""
        self._steps = {number: step for number, step in self._steps.items() if number >= round}
        self._rewrite()

    def forget_unreachable(self, round: int) -> int:
        """Drop steps that do not follow from this round, step by step; how many.

        Where one between is lost, those behind it were taken with weights that nobody has.
        """
        end = round
        while end in self._steps:
            end += 1
        before = len(self._steps)
        self._steps = {number: step for number, step in self._steps.items() if number < end}
        self._rewrite()
        return before - len(self._steps)

    def _rewrite(self) -> None:
        replace(
            self._path, b"".join(msgspec.json.encode(step) + b"\n" for step in self._steps.values())
        )


def _read(path: Path) -> list[WrittenStep]:
    # a last line without its end was never acted on
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    steps = []
    for number, line in enumerate(lines, 1):
        try:
            steps.append(msgspec.json.decode(line, type=WrittenStep))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError(
                f"line {number} of {path} is no step of a journal ({error}); put the file back "
                "from a copy, or delete it: then this peer goes on from its newest checkpoint, and "
                "learns once more, not bit for bit the same, what came after it"
            ) from None
    return steps
