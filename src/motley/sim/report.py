"""What came of a simulated run, a row per peer. Reads metrics lines only."""

from __future__ import annotations

from pathlib import Path

from motley.metrics import LearnerLine, MetricsLine, SamplerLine, learner_lines, read_metrics

Cells = dict[str, str | int | float | None]  # column -> value


def summary(folder: Path) -> list[Cells]:
    lines = read_metrics(folder)
    return [
        _cells([line for line in lines if line.peer == peer])
        for peer in dict.fromkeys(line.peer for line in lines)
    ]


def ages_of(lines: list[LearnerLine]) -> list[tuple[int, int]]:
    """(age in versions, groups) of every step."""
    return [step for line in lines for step in (line.ages or {}).items()]


def num_dropped(lines: list[LearnerLine]) -> int:
    """A running total, which not every line has."""
    last = next((line.dropped for line in reversed(lines) if line.dropped is not None), {})
    return sum(count for reasons in last.values() for count in reasons.values())


def _cells(lines: list[MetricsLine]) -> Cells:
    learned = learner_lines(lines)
    ages = ages_of(learned)
    measured = [_mean(list(line.heldout.values())) for line in learned if line.heldout]
    taken = sum(count for _, count in ages)
    behind = [line.behind for line in lines if isinstance(line, SamplerLine)]
    return {
        "peer": lines[0].peer,
        "rounds": lines[-1].round,
        "hours": (lines[-1].time_s or 0.0) / 3600,
        "before": measured[0] if measured else None,
        "after": measured[-1] if measured else None,
        "groups": taken or None,
        "dropped": num_dropped(learned) if taken else None,
        "mean_age": sum(age * count for age, count in ages) / taken if taken else None,
        "max_age": max(age for age, _ in ages) if taken else None,
        "behind": _mean([versions for versions in behind if versions is not None]),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
