from __future__ import annotations

from collections.abc import Callable
from math import isnan, nan

import numpy as np
import pytest
from scipy import stats

from motley.study.statistics import (
    ONE_TEST,
    Comparison,
    Estimate,
    bounded_interval,
    effect_size,
    equivalence_p,
    few_seeds_warning,
    holm,
    interval,
    not_worse_p,
    number,
    p_value_of,
    seeds_to_be_equivalent,
    seeds_to_tell,
    sentence,
    sentences,
)


@pytest.mark.parametrize(
    "values", [[0.1, 0.5], [0.3, 0.4, 0.9, 0.2, 0.35], list(np.linspace(0, 1, 12) ** 2)]
)
def test_the_interval_is_scipys_t_interval(values: list[float]) -> None:
    low, high = stats.t.interval(
        0.95, len(values) - 1, loc=np.mean(values), scale=stats.sem(values)
    )
    found = interval(values)
    assert (found.low, found.high) == pytest.approx((low, high))


def test_one_seed_has_no_interval() -> None:
    for found in (interval([0.25]), bounded_interval([0.25], "accuracy")):
        assert found.mean == 0.25
        assert isnan(found.low)
        assert str(found) == "0.25"
    assert str(interval([0.25, 0.25])) == "0.25 ± 0.00"


@pytest.mark.parametrize(
    "values",
    [
        [0.99, 1.0, 1.0, 1.0, 1.0],
        [0.0, 0.0, 0.03],
        [0.2, 0.9],
        [0.5, 0.6],
        [1e-12, 0.0],
        [0.0, 1.0],
    ],
)
def test_an_interval_of_accuracies_stays_in_0_to_1(values: list[float]) -> None:
    found = bounded_interval(values, "accuracy")
    assert 0 <= found.low < found.mean < found.high <= 1
    assert found.mean == pytest.approx(np.mean(values))


def test_an_interval_of_accuracies_is_the_t_interval_of_the_log_odds() -> None:
    values = [0.9, 0.95, 0.97, 0.99]
    mean, error = np.mean(values), stats.sem(values)
    centre = np.log(mean / (1 - mean))
    half = stats.t.ppf(0.975, 3) * error / (mean * (1 - mean))
    found = bounded_interval(values, "accuracy")
    odds = np.exp([centre - half, centre + half])
    assert [found.low, found.high] == pytest.approx(list(odds / (1 + odds)))


def test_where_all_seeds_are_right_the_interval_is_that_point() -> None:
    assert bounded_interval([1.0, 1.0, 1.0], "accuracy") == Estimate(1.0, 1.0, 1.0)
    assert bounded_interval([0.0, 0.0], "accuracy") == Estimate(0.0, 0.0, 0.0)


@pytest.mark.parametrize("values", [[-3.0, 2.0, 5.0], [0.5, 0.6, 1.2]])
def test_what_is_no_accuracy_has_the_ordinary_interval(values: list[float]) -> None:
    assert bounded_interval(values, "accuracy") == interval(values)
    assert bounded_interval([0.9, 0.99], "reward") == interval([0.9, 0.99])


def test_intervals_of_accuracies_hold_the_mean_more_often_than_plain_ones() -> None:
    """Seeds of a beta distribution near 1, each measured on 200 problems."""
    rng, mean = np.random.default_rng(0), 0.97
    studies = rng.binomial(200, rng.beta(69.6, 2.153, (600, 5))) / 200
    hits = {"accuracy": 0, "reward": 0}
    for values in studies:
        for measure in ("accuracy", "reward"):
            found = bounded_interval(list(values), measure)  # type: ignore[arg-type]
            hits[measure] += found.low <= mean <= found.high
    assert hits["accuracy"] / 600 == pytest.approx(0.95, abs=0.02)
    assert hits["reward"] < hits["accuracy"] - 10


# Equivalence and effect sizes

SMALL = (0.012, -0.008, 0.004, -0.002, 0.006)


@pytest.mark.parametrize("margin", [0.005, 0.02, 0.1])
def test_equivalence_is_the_larger_p_of_scipys_two_one_sided_tests(margin: float) -> None:
    loss = stats.ttest_1samp(SMALL, -margin, alternative="greater").pvalue
    gain = stats.ttest_1samp(SMALL, margin, alternative="less").pvalue
    assert equivalence_p(SMALL, margin) == pytest.approx(max(loss, gain))
    assert not_worse_p(SMALL, margin) == pytest.approx(loss)
    # the same said by an interval: of 90 %, wholly inside the margin
    low, high = stats.ttest_1samp(SMALL, 0).confidence_interval(0.9)
    assert (equivalence_p(SMALL, margin) < 0.05) == (-margin < low and high < margin)


def test_two_arms_that_are_far_apart_are_equivalent_only_inside_a_margin_that_wide() -> None:
    assert equivalence_p((0.11, 0.13, 0.12), 0.03) > 0.99
    assert equivalence_p((0.11, 0.13, 0.12), 0.2) < 0.05


@pytest.mark.parametrize("test", [equivalence_p, not_worse_p])
def test_without_spread_nothing_is_equivalent(test: Callable[..., float]) -> None:
    assert isnan(test((0.1,), 0.5))
    assert isnan(test((0.1, 0.1), 0.5))


def test_a_test_can_be_against_another_difference_than_none() -> None:
    assert p_value_of(SMALL, 0.03) == pytest.approx(stats.ttest_1samp(SMALL, 0.03).pvalue)


def test_an_effect_size_is_unbiased_on_few_seeds() -> None:
    drawn = np.random.default_rng(2).normal(0.8, 1, (200_000, 5))
    plain = drawn.mean(1) / drawn.std(1, ddof=1)
    factor = effect_size(tuple(drawn[0])).mean / plain[0]
    assert np.mean(plain) > 0.98
    assert np.mean(factor * plain) == pytest.approx(0.8, abs=0.01)


@pytest.mark.parametrize("differences", [SMALL, (0.11, 0.13, 0.12), (-0.5, -0.51, -0.49, -0.5001)])
def test_the_interval_of_an_effect_size_is_of_the_noncentral_t(differences: tuple[float]) -> None:
    found, num = effect_size(differences), len(differences)
    t = stats.ttest_1samp(differences, 0).statistic
    unbiased = found.mean / (t / np.sqrt(num))
    for end, share in ((found.low, 0.975), (found.high, 0.025)):
        true = end / unbiased * np.sqrt(num)
        assert stats.nct.cdf(t, num - 1, true) == pytest.approx(share, abs=5e-4)
    assert found.low < found.mean < found.high


@pytest.mark.slow
def test_the_interval_of_an_effect_size_holds_it_in_95_of_100_studies() -> None:
    drawn = np.random.default_rng(3).normal(0.7, 1, (400, 5))
    found = [effect_size(tuple(some)) for some in drawn]
    factor = found[0].mean / (drawn[0].mean() / drawn[0].std(ddof=1))
    held = [one.low <= 0.7 * factor <= one.high for one in found]
    assert np.mean(held) == pytest.approx(0.95, abs=0.025)


def test_an_effect_has_no_size_on_two_seeds_or_without_spread() -> None:
    assert isnan(effect_size((0.1, 0.2)).mean)
    assert isnan(effect_size((0.1, 0.1, 0.1)).mean)


@pytest.mark.parametrize(("mean", "both"), [(0.0, True), (0.012, True), (0.012, False)])
def test_so_many_seeds_find_equivalence_four_times_in_five(mean: float, both: bool) -> None:
    shape = np.array([-1.0, 1.0, -1.0, 1.0])
    differences = mean + 0.04 * shape / np.std(shape, ddof=1)
    num = seeds_to_be_equivalent(tuple(differences), 0.03, both)
    assert num is not None
    drawn = np.random.default_rng(4).normal(mean, 0.04, (4000, num))
    loss = stats.ttest_1samp(drawn, -0.03, axis=1, alternative="greater").pvalue
    gain = stats.ttest_1samp(drawn, 0.03, axis=1, alternative="less").pvalue
    p = np.maximum(loss, gain) if both else loss
    assert np.mean(p < 0.05) == pytest.approx(0.82, abs=0.035)


def test_no_number_of_seeds_makes_a_large_difference_equivalent() -> None:
    assert seeds_to_be_equivalent((0.11, 0.13, 0.12), 0.03) is None


# Sentences

CLEAR = Comparison("uplift", "alone", (0.11, 0.13, 0.12, 0.14, 0.10))
OPEN = Comparison("ftis", "alone", (0.10, -0.06, 0.05, -0.04, 0.08))


def test_a_decided_comparison_says_which_is_better_and_by_how_much() -> None:
    assert (
        sentence(CLEAR) == "uplift is better than alone by .120 (95 % .100 to .140), p < .001, 5 "
        "seeds"
    )
    worse = Comparison("ftis", "alone", tuple(-d for d in CLEAR.differences))
    assert sentence(worse).startswith("ftis is worse than alone by .120 (95 % .100 to .140)")


def test_an_undecided_comparison_says_how_many_seeds_would_decide_it() -> None:
    found = sentence(OPEN)
    p = stats.ttest_1samp(OPEN.differences, 0).pvalue
    assert found.startswith("undecided: ftis against alone, +.026 (95 % -.063 to +.115), ")
    assert f"p = {number(p)}, 5 seeds; about " in found
    assert found.endswith(
        f"about {seeds_to_tell(OPEN.differences, 0.0, ONE_TEST)} seeds would decide it"
    )


def test_so_many_seeds_find_the_difference_four_times_in_five() -> None:
    num = seeds_to_tell(OPEN.differences, 0.0, ONE_TEST)
    assert num is not None
    rng = np.random.default_rng(1)
    mean, spread = np.mean(OPEN.differences), np.std(OPEN.differences, ddof=1)
    drawn = rng.normal(mean, spread, (4000, num))
    share = np.mean(stats.ttest_1samp(drawn, 0, axis=1).pvalue < 0.05)
    assert share == pytest.approx(0.8, abs=0.03)


def test_a_difference_too_small_to_decide_names_no_number() -> None:
    tiny = Comparison("a", "b", (0.1, -0.1, 0.1, -0.1, 0.001))
    assert seeds_to_tell(tiny.differences, 0.0, ONE_TEST) is None
    assert "more than 200 seeds would be needed" in sentence(tiny)


def test_one_seed_and_equal_seeds_decide_nothing() -> None:
    assert sentence(Comparison("a", "b", (0.5,))) == (
        "undecided: a against b, +.500 on 1 seed; one seed decides nothing"
    )
    assert sentence(Comparison("a", "b", (0.25, 0.25, 0.25))) == (
        "undecided: a against b, +.250: all 3 seeds gave the same difference; without spread "
        "between seeds no test can be made"
    )


def test_holms_correction_is_the_textbooks() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    corrected = holm([0.02, nan, 0.9])
    assert corrected[0] == pytest.approx(0.04)
    assert isnan(corrected[1])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_a_decision_that_does_not_survive_many_comparisons_says_so() -> None:
    weak = Comparison("weak", "alone", (0.1, 0.02, 0.15, 0.01, 0.12))
    assert 0.01 < weak.p_value < 0.05
    assert "Holm" not in sentences([weak])[0]
    assert "not after Holm's correction" in sentences([weak] * 6)[0]


@pytest.mark.parametrize(
    ("seeds", "word"), [(1, "nothing here is decided"), (2, "2 seeds"), (4, "4 seeds"), (5, "")]
)
def test_few_seeds_are_warned_of(seeds: int, word: str) -> None:
    found = few_seeds_warning(seeds)
    assert word in found
    assert bool(found) == (seeds < 5)
