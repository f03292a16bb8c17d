"""Curves: the numbers of a run as rows of a table, of any run that has lines of metrics.

Finished, stopped, simulated or joined, and of several processes. Knows nobody who draws them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from motley.runs.metrics import LearnerLine, MetricsLine, read_metrics


class CurvePoint(NamedTuple):
    """One number of a metrics line.

    >>> CurvePoint(20, "small", "heldout/sort", 0.84)
    """

    round: int
    peer: str
    key: str  # the path of its key in the line; "heldout" and "ood" alone are means over kinds
    value: float


def run_lines(folder: Path) -> list[MetricsLine]:
    """The lines of a run, samplers' too, in the order of rounds.

    The peers of a crew of several processes have files of their own, which are further than what
    was put together of them if the crew was killed.
    """
    own = sorted((folder / "peers").glob("*/metrics.jsonl"))
    if not own:
        return read_metrics(folder)
    lines = [line for path in own for line in read_metrics(path.parent)]
    return sorted(lines, key=lambda line: line.round)


def curves(folder: Path) -> list[CurvePoint]:
    """Every number of a run, in the order of its lines."""
    return [
        CurvePoint(line.round, line.peer, key, value)
        for line in run_lines(folder)
        for key, value in numbers_of(line)
    ]


def numbers_of(line: MetricsLine) -> Iterator[tuple[str, float]]:
    """The numbers of a line by their path, and the mean over kinds of what was measured.

    >>> dict(numbers_of(LearnerLine(round=1, peer="small", heldout={"sort": 0.5, "sum": 1.0})))
    {'heldout/sort': 0.5, 'heldout/sum': 1.0, 'heldout': 0.75}
    """
    yield from leaves(msgspec.to_builtins(line))
    if isinstance(line, LearnerLine):
        for key, by_kind in (("heldout", line.heldout), ("ood", line.ood)):
            if by_kind:
                yield key, sum(by_kind.values()) / len(by_kind)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Numbers inside objects, by path; the round is the place of all of them."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if path or key != "round":
                yield from leaves(inner, f"{path}/{key}" if path else str(key))
    elif isinstance(value, int | float):
        yield path, float(value)
