from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from motley.metrics import LearnerLine, SamplerLine, append_lines
from motley.sim.report import summary


def line(peer: str, round: int, time_s: float, **fields: Any) -> LearnerLine:
    return LearnerLine(peer=peer, round=round, time_s=time_s, **fields)


def batch(round: int, time_s: float, behind: int) -> SamplerLine:
    return SamplerLine(
        peer="s",
        round=round,
        time_s=time_s,
        behind=behind,
        version=7,
        reward=0.5,
        sampled_tokens=9,
    )


def test_a_row_sums_up_what_a_peer_did(tmp_path: Path) -> None:
    lines = [
        line("l", 0, 0.0, heldout={"sort": 0.25, "reverse": 0.75}),
        batch(1, 30.0, behind=0),
        line("l", 1, 60.0, ages={0: 3, 2: 1}, dropped={}),
        batch(2, 1800.0, behind=3),
        line(
            "l",
            2,
            7200.0,
            ages={10: 4},
            dropped={"s": {"stale": 2, "late": 1}, "t": {"stale": 4}},
            heldout={"sort": 0.5, "reverse": 1.0},
        ),
    ]
    append_lines(tmp_path / "metrics.jsonl", lines)
    learner, sampler = summary(tmp_path)
    assert learner == {
        "peer": "l",
        "rounds": 2,
        "hours": 2.0,
        "before": 0.5,
        "after": 0.75,
        "groups": 8,
        "dropped": 7,  # the count goes on from line to line: the last has them all
        "mean_age": pytest.approx((0 * 3 + 2 + 40) / 8),
        "max_age": 10,
        "behind": None,
    }
    assert (sampler["peer"], sampler["rounds"], sampler["hours"], sampler["behind"]) == (
        "s",
        2,
        0.5,
        1.5,
    )
    assert all(
        sampler[key] is None
        for key in ("before", "after", "groups", "dropped", "mean_age", "max_age")
    )


def test_a_peer_that_never_learned_has_a_row_too(tmp_path: Path) -> None:
    append_lines(
        tmp_path / "metrics.jsonl",
        [line("l", 0, 0.0, heldout={"sort": 0.5}), line("l", 4, 9.0, heldout={"sort": 0.25})],
    )
    (row,) = summary(tmp_path)
    assert (row["before"], row["after"], row["groups"], row["mean_age"]) == (0.5, 0.25, None, None)


def test_what_was_dropped_is_told_also_where_a_peer_ended_early(tmp_path: Path) -> None:
    lines = [
        line("l", 0, 0.0, heldout={"sort": 0.5}),
        line("l", 1, 60.0, ages={0: 4}, dropped={"s": {"stale": 2}}),
        line("l", 9, 61.0, heldout={"sort": 0.5}, version=1),  # as SimCrew._end_early writes it
    ]
    append_lines(tmp_path / "metrics.jsonl", lines)
    assert summary(tmp_path)[0]["dropped"] == 2
