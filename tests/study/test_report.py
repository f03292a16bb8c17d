from __future__ import annotations

from math import isnan

import numpy as np
import pytest
from scipy import stats

from motley.study.outcomes import Outcome
from motley.study.report import StudyRow, comparisons, glance, markdown, table
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


def test_gains_are_paired_by_seed() -> None:
    found = line(table(OUTCOMES, ["alone", "ftis"]), "ftis")
    alone, crew = np.mean(ALONE, axis=1), np.mean(CREW, axis=1)
    assert found.gain.mean == pytest.approx(np.mean(crew - alone))
    assert found.p_value == pytest.approx(stats.ttest_rel(crew, alone).pvalue)
    paired = stats.ttest_rel(crew, alone).confidence_interval(0.95)
    assert found.gain.half_width == pytest.approx((paired.high - paired.low) / 2)
    assert found.by_kind["sort"].mean == pytest.approx(2 / 3)
    assert found.mean.mean == pytest.approx(np.mean(crew))
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


def test_without_an_arm_alone_there_is_no_gain() -> None:
    found = line(table([o for o in OUTCOMES if o.arm == "ftis"], ["ftis"]), "ftis")
    assert isnan(found.gain.mean)
    assert isnan(found.p_value)


def test_a_gain_that_is_the_same_on_every_seed_has_no_test() -> None:
    same = [
        outcome(arm, seed, (value, value))
        for seed in range(3)
        for arm, value in (("alone", 0.25), ("ftis", 0.5))
    ]
    found = line(table(same, ["alone", "ftis"]), "ftis")
    assert found.gain == Estimate(0.25, 0.25, 0.25)
    assert isnan(found.p_value)


def test_the_table_as_markdown() -> None:
    rows = [
        [cell.strip() for cell in text.strip("|").split("|")]
        for text in markdown(table(OUTCOMES, ["alone", "ftis"])).splitlines()
    ]
    assert rows[0] == [
        "peer",
        "arm",
        "sort",
        "sum",
        "mean",
        "against alone",
        "p",
        "out of distribution",
    ]
    assert {len(row) for row in rows} == {8}
    assert [row[1] for row in rows[2:]] == ["start", "alone", "ftis"]
    assert rows[3][5:7] == ["", ""]
    assert rows[4][5].startswith("+0.17 ± ")
    assert float(rows[4][6]) == pytest.approx(
        stats.ttest_rel(np.mean(CREW, axis=1), np.mean(ALONE, axis=1)).pvalue, abs=5e-4
    )


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
    assert line.fall.mean == pytest.approx((0.15 + 0.1) / 2)
    assert line.own == bounded_interval([0.9, 1.0], "accuracy")


def test_a_comparison_is_over_peers_and_paired_by_seed() -> None:
    second = [outcome("ftis", seed, (0.0, 0.0), peer="q") for seed in (1, 0)]
    alone = [outcome("alone", seed, (0.2, 0.2), peer="q") for seed in (0, 1)]
    (one,) = comparisons([*OUTCOMES, *second, *alone], ["alone", "ftis"])
    assert (one.first, one.second) == ("ftis", "alone")
    own = np.mean(CREW, axis=1) - np.mean(ALONE, axis=1)
    expected = [(own[0] - 0.2) / 2, (own[1] - 0.2) / 2, own[2]]
    assert one.differences == pytest.approx(expected)


def test_without_alone_arms_are_compared_with_the_first() -> None:
    arms = [outcome(arm, seed, (0.1 * n, 0.1)) for n, arm in enumerate("abc") for seed in (0, 1)]
    assert [(c.first, c.second) for c in comparisons(arms, ["b", "a", "c"])] == [
        ("a", "b"),
        ("c", "b"),
    ]


def test_scores_outside_0_to_1_have_ordinary_intervals() -> None:
    rewards = [outcome("ftis", seed, (end, end)) for seed, end in enumerate((-3.0, 5.0, 1.0))]
    for measure in ("reward", "accuracy"):
        found = line(table(rewards, ["ftis"], measure), "ftis").mean
        assert found.high - found.mean == pytest.approx(found.mean - found.low)


def test_arms_are_compared_with_both_opponents_if_both_were_run() -> None:
    arms = ["alone/own", "ftis", "alone"]
    every = [outcome(arm, seed, (0.1, 0.1)) for arm in arms for seed in (0, 1)]
    assert [(c.first, c.second) for c in comparisons(every, arms)] == [
        ("ftis", "alone"),
        ("ftis", "alone/own"),
    ]
