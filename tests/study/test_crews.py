from __future__ import annotations

import pytest
from scipy import stats

from motley.study.crews import OverCrews, cells, over_crews
from motley.study.outcomes import Outcome
from motley.study.standings import below, said, standings

NOISE = (-0.01, 0.0, 0.01)


def crew(**gains: float) -> list[Outcome]:
    """`gains`: arm -> how far it ends above alone, on three seeds; with two peers."""
    return [
        Outcome(
            arm=arm,
            seed=seed,
            peer=peer,
            start={"x": 0.1},
            end={"x": 0.5 + gain + (arm != "alone") * NOISE[seed]},
            lowest={"x": 0.1},
            ood={},
        )
        for arm, gain in {"alone": 0.0, **gains}.items()
        for seed in range(3)
        for peer in "ab"
    ]


ARMS = ["alone", "ftis", "topr"]
CREWS = {
    "c1": standings(crew(ftis=0.1, topr=0.0), ARMS),
    "c2": standings(crew(ftis=0.2, topr=0.01), ARMS),
    "c3": standings(crew(ftis=-0.05, topr=0.02), ARMS),
    "c4": standings(crew(ftis=0.12, topr=-0.01), ARMS),
}


def found(arm: str) -> OverCrews:
    return next(one for one in over_crews(CREWS, ARMS) if one.arm == arm)


def test_crews_are_the_unit_whatever_their_seeds_and_peers() -> None:
    gains = [0.1, 0.2, -0.05, 0.12]
    one = found("ftis")
    assert list(one.by_crew.values()) == pytest.approx(gains)
    test = stats.ttest_1samp(gains, 0)
    assert one.over.p_value == pytest.approx(test.pvalue)
    low, high = test.confidence_interval(0.95)
    assert (one.over.difference.low, one.over.difference.high) == pytest.approx((low, high))
    assert one.over.holm_p == pytest.approx(min(1.0, 2 * test.pvalue))


def test_crews_that_end_below_outside_their_own_interval_are_named() -> None:
    one = found("ftis")
    assert (one.below, one.above) == (["c3"], ["c1", "c2", "c4"])
    assert "4 crews; about" in one.sentence
    assert one.sentence.endswith("; 1 of 4 below it outside their interval: c3; 3 above")
    other = found("topr")
    assert (other.below, other.above) == ([], [])
    assert other.sentence.endswith("; 0 of 4 below it outside their interval; 0 above")
    head, (first, _) = cells(over_crews(CREWS, ARMS))
    row = dict(zip(head, first, strict=True))
    assert (row["arm"], row["against"], row["crews"]) == ("ftis", "alone", "4")
    assert (row["crews below"], row["lowest"]) == ("1: c3", "-0.050 (c3)")


def test_an_arm_counts_in_the_crews_where_it_was_run() -> None:
    less = CREWS | {"c4": standings(crew(ftis=0.12), ["alone", "ftis"])}
    num = {one.arm: len(one.by_crew) for one in over_crews(less, ARMS)}
    assert num == {"ftis": 4, "topr": 3}


def test_a_crew_without_a_seed_of_both_is_left_out_and_named() -> None:
    lost = [o for o in crew(ftis=0.1) if (o.arm == "alone") == (o.seed == 0)]
    few = CREWS | {"c4": standings(lost, ["alone", "ftis"])}
    (one,) = [each for each in over_crews(few, ARMS) if each.arm == "ftis"]
    assert list(one.by_crew) == ["c1", "c2", "c3"]
    assert "3 crews; about" in one.sentence
    assert one.sentence.endswith("; no seed has runs of both in c4")
    rows = few["c4"]
    assert said(rows) == [
        f"undecided: {who}ftis against alone: no seed has runs of both"
        for who in ("", "a: ", "b: ")
    ]
    assert below(rows) == ["ftis: no seed has runs of it and of alone for every peer"]


def test_both_opponents_have_rows_of_their_own() -> None:
    both = {
        name: standings(
            [o for a, g in (("alone/own", -0.2), ("ftis", gain)) for o in crew(**{a: g})],
            ["alone", "alone/own", "ftis"],
        )
        for name, gain in (("c1", 0.1), ("c2", 0.2))
    }
    rows = over_crews(both, ["alone", "alone/own", "ftis"])
    assert [(one.arm, one.opponent) for one in rows] == [("ftis", "alone"), ("ftis", "alone/own")]
    assert list(rows[1].by_crew.values()) == pytest.approx([0.3, 0.4])
