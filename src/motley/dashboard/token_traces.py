"""What steps made of tokens, as the page gets it: traces of one rollout, and histograms of many."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from motley.clock import Deadline
from motley.dashboard.answers import Histogram
from motley.learning.traces import RolloutTrace, StepTrace, read_trace, traced_rounds

KEPT_STEPS = 16  # decoded
KEPT_COUNTS = 4096  # steps whose histograms are kept
MAX_ROUNDS = 30  # of one histogram
NUM_BINS = 60
EDGES = np.linspace(-4, 4, NUM_BINS + 1)  # of log10
DIGITS = 5


def numbers(value_N: NDArray[Any]) -> list[float | None]:
    """As JSON has them: to five digits, None where they are not finite."""
    value_N = np.asarray(value_N, np.float64)
    finite_N = np.isfinite(value_N)
    with np.errstate(divide="ignore", invalid="ignore"):
        size_N = np.where(finite_N & (value_N != 0), np.floor(np.log10(np.abs(value_N))), 0)
    scale_N = 10.0 ** (DIGITS - 1 - size_N)
    rounded = (np.round(np.where(finite_N, value_N, 0) * scale_N) / scale_N).tolist()
    return [one if fine else None for one, fine in zip(rounded, finite_N.tolist(), strict=True)]


class TraceReader:
    """Traces of a run's folder. What was read is kept; what was not there is looked for again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._step = lru_cache(maxsize=KEPT_STEPS)(self._read)
        self._counts = lru_cache(maxsize=KEPT_COUNTS)(self._counted)

    def of(self, learner: str, round: int, position: int, number: int) -> RolloutTrace | None:
        """What a learner's step made of one rollout; of a lesson where it was nothing else."""
        step = self.step(learner, round)
        found = [
            one
            for one in (step.rollouts if step else ())
            if (one.position, one.number) == (position, number)
        ]
        return min(found, key=lambda one: one.is_lesson) if found else None

    def step(self, learner: str, round: int) -> StepTrace | None:
        try:
            return self._step(learner, round)
        except LookupError:
            return None

    def _read(self, learner: str, round: int) -> StepTrace:
        trace = read_trace(self._folder, learner, round)
        if trace is None:
            raise LookupError(round)
        return trace

    # Histograms

    def histograms(
        self, learners: Sequence[str], sender: str, rounds: tuple[float, float], deadline: Deadline
    ) -> list[Histogram]:
        """Of every learner and sender, over some of the rounds that have traces."""
        each = max(2, MAX_ROUNDS // max(1, len(learners)))
        return [
            histogram
            for learner in learners
            for histogram in self._of_learner(learner, sender, rounds, each, deadline)
        ]

    def _of_learner(
        self,
        learner: str,
        sender: str,
        rounds: tuple[float, float],
        most: int,
        deadline: Deadline,
    ) -> list[Histogram]:
        there = [n for n in traced_rounds(self._folder, learner) if rounds[0] <= n <= rounds[1]]
        chosen = [there[n] for n in spread(len(there), most)]
        sums: dict[str, NDArray[np.int64]] = {}
        counted: list[int] = []
        for round in reversed(chosen):  # the newest tell most
            if counted and deadline.passed:
                break
            counted.append(round)
            for name, counts in self._counts(learner, round).items():
                if sender in ("", name):
                    sums[name] = sums.get(name, np.zeros_like(counts)) + counts
        left = len(chosen) - len(counted)
        return [_histogram(name, learner, sums[name], counted, left) for name in sorted(sums)]

    def _counted(self, learner: str, round: int) -> dict[str, NDArray[np.int64]]:
        """Sender -> a row of tokens before and one after, those of weight 0 at the end."""
        step = read_trace(self._folder, learner, round)
        counts: dict[str, NDArray[np.int64]] = {}
        for one in step.rollouts if step else ():
            counts.setdefault(one.sender, np.zeros((2, NUM_BINS + 1), np.int64))
            counts[one.sender] += _bins(one)
        return counts


def _bins(trace: RolloutTrace) -> NDArray[np.int64]:
    weight_T = np.asarray(trace.weight if trace.kept else np.zeros_like(trace.weight), np.float64)
    used_T = np.isfinite(weight_T) & (weight_T > 0)
    before, after = np.zeros(NUM_BINS + 1, np.int64), np.zeros(NUM_BINS + 1, np.int64)
    log_ratio_T = np.nan_to_num(np.asarray(trace.log_ratio, np.float64)) / math.log(10)
    before[:NUM_BINS] = _binned(log_ratio_T)
    after[:NUM_BINS] = _binned(np.log10(weight_T[used_T]))
    after[NUM_BINS] = (~used_T).sum()
    return np.stack([before, after])


def _binned(value_T: NDArray[np.float64]) -> NDArray[np.int64]:
    """What is outside counts at the ends."""
    return np.histogram(value_T.clip(EDGES[0], EDGES[-1]), EDGES)[0]


def _histogram(
    sender: str, learner: str, counts: NDArray[np.int64], rounds: Sequence[int], left: int
) -> Histogram:
    before, after = counts
    return Histogram(
        sender=sender,
        learner=learner,
        edges=[round(float(edge), 6) for edge in EDGES],
        before=before[:NUM_BINS].tolist(),
        after=after[:NUM_BINS].tolist(),
        zero=int(after[NUM_BINS]),
        rounds=(min(rounds), max(rounds)),
        num_tokens=int(before.sum()),
        left=left,
    )


def spread(count: int, most: int) -> list[int]:
    """At most so many of 0..count-1, evenly chosen, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return sorted({round(n * (count - 1) / (most - 1)) for n in range(most)})
