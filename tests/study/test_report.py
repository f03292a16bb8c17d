from __future__ import annotations

import numpy as np
import pytest

from motley.study.outcomes import Outcome
from motley.study.report import StudyRow, glance, markdown, table
from motley.study.statistics import Estimate, bounded_interval


def outcome(
    arm: str, seed: int, end: tuple[float, float], peer: str = "p", start: float = 0.1
) -> Outcome:
    kinds = dict(zip(("sort", "sum"), end, strict=True))
    return Outcome(
        arm=arm,
        seed=seed,
        peer=peer,
        start={"sort": start, "sum": start},
        end=kinds,
        lowest=kinds,
        ood={"sort": 0.5, "sum": 0.7},
    )


ALONE = [(0.2, 0.4), (0.6, 0.6), (0.5, 0.1)]
CREW = [(0.5, 0.5), (0.9, 0.5), (0.6, 0.4)]
OUTCOMES = [outcome("alone", seed, end) for seed, end in enumerate(ALONE)] + [
    # In another order: pairs are made by seed, not by place.
    outcome("ftis", seed, CREW[seed])
    for seed in (2, 0, 1)
]


def line(lines: list[StudyRow], arm: str) -> StudyRow:
    return next(found for found in lines if found.arm == arm)


def test_a_row_has_means_of_every_kind_over_seeds() -> None:
    found = line(table(OUTCOMES, ["alone", "ftis"]), "ftis")
    assert found.by_kind["sort"].mean == pytest.approx(2 / 3)
    assert found.mean.mean == pytest.approx(np.mean(CREW))
    assert found.ood.mean == pytest.approx(0.6)


def test_rows_are_the_start_then_the_arms_of_each_peer() -> None:
    both = [
        *OUTCOMES,
        outcome("ftis", 0, (0.1, 0.1), peer="q"),
        outcome("alone", 0, (0.3, 0.3), peer="q"),
    ]
    lines = table(both, ["alone", "ftis"])
    assert [(found.peer, found.arm) for found in lines] == [
        (p, arm) for p in "pq" for arm in ("start", "alone", "ftis")
    ]
    assert line(lines, "start").mean == Estimate(*[pytest.approx(0.1)] * 3)


def test_the_table_as_markdown() -> None:
    rows = [
        [cell.strip() for cell in text.strip("|").split("|")]
        for text in markdown(table(OUTCOMES, ["alone", "ftis"])).splitlines()
    ]
    assert rows[0] == ["peer", "arm", "sort", "sum", "mean", "out of distribution"]
    assert {len(row) for row in rows} == {6}
    assert [row[1] for row in rows[2:]] == ["start", "alone", "ftis"]
    assert [row[-1] for row in rows[2:]] == ["", "0.60 ± 0.00", "0.60 ± 0.00"]


def test_a_glance_is_over_peers_then_seeds_and_the_own_kind_is_the_best_at_the_start() -> None:
    def outcome(
        seed: int,
        peer: str,
        start: dict[str, float],
        end: dict[str, float],
        lowest: dict[str, float],
    ) -> Outcome:
        return Outcome(
            arm="ftis", seed=seed, peer=peer, start=start, end=end, lowest=lowest, ood={}
        )

    outcomes = [
        outcome(0, "a", {"x": 0.9, "y": 0.1}, {"x": 0.8, "y": 0.4}, {"x": 0.6, "y": 0.1}),
        outcome(0, "b", {"x": 0.2, "y": 0.7}, {"x": 0.6, "y": 1.0}, {"x": 0.2, "y": 0.7}),
        outcome(1, "a", {"x": 0.9, "y": 0.1}, {"x": 1.0, "y": 0.6}, {"x": 0.8, "y": 0.1}),
        outcome(1, "b", {"x": 0.2, "y": 0.7}, {"x": 0.8, "y": 1.0}, {"x": 0.2, "y": 0.6}),
    ]
    (line,) = glance(outcomes, ["ftis"])
    assert line.own.mean == pytest.approx((0.9 + 1.0) / 2)
    assert line.others.mean == pytest.approx((0.5 + 0.7) / 2)
    assert line.mean.mean == pytest.approx((0.7 + 0.85) / 2)
    assert line.own == bounded_interval([0.9, 1.0], "accuracy")


def test_scores_outside_0_to_1_have_ordinary_intervals() -> None:
    rewards = [outcome("ftis", seed, (end, end)) for seed, end in enumerate((-3.0, 5.0, 1.0))]
    for measure in ("reward", "accuracy"):
        found = line(table(rewards, ["ftis"], measure), "ftis").mean
        assert found.high - found.mean == pytest.approx(found.mean - found.low)
