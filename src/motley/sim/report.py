"""What came of a simulated run, a row per peer. Reads metrics lines only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from motley.run import MetricsLine, read_metrics


def summary(folder: Path) -> list[dict[str, Any]]:
    lines = read_metrics(folder)
    return [
        _row([line for line in lines if line["peer"] == peer])
        for peer in dict.fromkeys(line["peer"] for line in lines)
    ]


def ages_of(lines: list[MetricsLine]) -> list[tuple[int, int]]:
    """(age in versions, groups) of every step."""
    return [(int(age), count) for line in lines for age, count in line.get("ages", {}).items()]


def num_dropped(lines: list[MetricsLine]) -> int:
    """A running total, which not every line has."""
    last: dict[str, dict[str, int]] = next(
        (line["dropped"] for line in reversed(lines) if "dropped" in line), {}
    )
    return sum(count for reasons in last.values() for count in reasons.values())


def _row(lines: list[MetricsLine]) -> dict[str, Any]:
    ages = ages_of(lines)
    measured = [_mean(list(line["heldout"].values())) for line in lines if "heldout" in line]
    taken = sum(count for _, count in ages)
    return {
        "peer": lines[0]["peer"],
        "rounds": lines[-1]["round"],
        "hours": lines[-1]["time_s"] / 3600,
        "before": measured[0] if measured else None,
        "after": measured[-1] if measured else None,
        "groups": taken or None,
        "dropped": num_dropped(lines) if taken else None,
        "mean_age": sum(age * count for age, count in ages) / taken if taken else None,
        "max_age": max(age for age, _ in ages) if taken else None,
        "behind": _mean([line["behind"] for line in lines if "behind" in line]),
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None
