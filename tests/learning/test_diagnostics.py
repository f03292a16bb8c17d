from __future__ import annotations

from math import exp, isclose

import msgspec
import numpy as np
import pytest
from scipy import stats

from motley.learning.diagnostics import (
    Row,
    ScoredRow,
    _order,
    _tau,
    effective_sample_size,
    flatness,
    sender_metrics,
)


@pytest.mark.parametrize("seed", range(8))
def test_kendall_tau_is_scipys_with_and_without_ties(seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = rng.integers(0, 2 + seed, 9).astype(float)
    second = rng.normal(size=9) if seed % 2 else rng.integers(0, 3, 9).astype(float)
    assert _tau(_order(first), _order(second)) == pytest.approx(
        stats.kendalltau(first, second).statistic, abs=1e-12
    )


def test_a_ranking_of_ties_agrees_with_nothing() -> None:
    assert _tau(_order(np.ones(4)), _order(np.arange(4.0))) is None
    assert _tau(_order(np.array([1.0])), _order(np.array([2.0]))) is None


def test_the_effective_sample_size_of_known_weights() -> None:
    assert effective_sample_size(np.full(7, 0.3)) == pytest.approx(1.0)
    assert effective_sample_size(np.array([1.0, 0.0, 0.0, 0.0])) == pytest.approx(1 / 4)
    assert effective_sample_size(np.array([1.0, 2.0])) == pytest.approx(9 / (2 * 5))
    assert effective_sample_size(np.zeros(3)) == 0.0


def scored(
    keep: bool,
    log_ratio: list[float],
    weight: list[float],
    free: list[float] | None = None,
    logq: float = -1.0,
) -> ScoredRow:
    return ScoredRow(
        keep=keep,
        kl=0.25,
        log_ratio=np.array(log_ratio),
        weight=np.array(weight),
        mean_weight=float(np.mean(weight)),
        free=np.array(weight if free is None else free),
        logq=logq,
        entropy=np.full(len(weight), 0.5),
        push=np.zeros(len(weight)),
    )


def row(
    sender: str,
    group: int,
    reward: float,
    advantage: float,
    scores: ScoredRow | None = None,
    age: int = 0,
) -> Row:
    tokens = len(scores.weight) if scores else 3
    return Row(
        sender=sender,
        group=group,
        reward=reward,
        advantage=advantage,
        num_tokens=tokens,
        truncated=reward < 0.5,
        age=age,
        scored=scores,
    )


ROWS = [
    row("a", 0, 1.0, 1.0, scored(True, [0.0, 0.2], [1.0, 1.0]), age=2),
    row("a", 0, 0.0, -1.0, scored(False, [-1.0], [0.4]), age=2),
    row("a", 1, 0.3, 0.0),
    row("b", 2, 0.0, 0.0),
]


def test_counts_and_means_are_over_every_row_of_a_sender() -> None:
    metrics = sender_metrics(ROWS)
    assert list(metrics) == ["a", "b"]
    assert metrics["a"].groups == 2
    assert metrics["a"].silent_groups == 1
    assert metrics["a"].reward == pytest.approx(1.3 / 3)
    assert metrics["a"].accuracy == pytest.approx(1 / 3)
    assert metrics["a"].tokens == pytest.approx((2 + 1 + 3) / 3)
    assert metrics["a"].truncated == pytest.approx(2 / 3)
    assert metrics["a"].age == pytest.approx(4 / 3)


def test_a_sender_of_silent_groups_has_no_ratios() -> None:
    assert msgspec.to_builtins(sender_metrics(ROWS)["b"]) == {
        "groups": 1, "reward": 0.0, "accuracy": 0.0, "tokens": 3.0, "truncated": 1.0, "age": 0.0,
        "silent_groups": 1, "sequences": 1
    }  # fmt: skip


def test_ratios_and_weights_are_over_the_scored_tokens() -> None:
    a = sender_metrics(ROWS)["a"]
    log_ratio = np.array([0.0, 0.2, -1.0])
    assert a.kl_k1 == pytest.approx(0.8 / 3)
    assert a.kl_k3 == pytest.approx(np.mean(np.exp(log_ratio) - 1 - log_ratio))
    assert a.kl_reverse == pytest.approx(
        np.mean(np.exp(log_ratio) * log_ratio - np.exp(log_ratio) + 1)
    )
    assert a.weight_var == pytest.approx(np.var([1.0, 1.0, 0.0]))
    assert isclose(a.ratio.mean, (1 + exp(0.2) + exp(-1)) / 3)
    assert isclose(a.ratio.max, exp(0.2))
    assert isclose(a.ratio.q50, 1.0)
    # A filtered sequence has weight zero in what was used.
    assert a.weight.mean == pytest.approx(2 / 3)
    assert a.ess == pytest.approx(4 / (3 * 2))
    assert (a.filtered_positive, a.filtered_negative) == (0.0, 1.0)
    assert a.entropy == pytest.approx(0.5)


def test_rank_agreement_is_seen_before_and_after_the_filter() -> None:
    rows = [
        row("a", 0, 1.0, 1.0, scored(True, [0.0], [1.0])),
        row("a", 0, 0.5, -0.2, scored(True, [0.0], [1.0])),
        row("a", 0, 0.0, -0.8, scored(False, [-3.0], [0.1])),
    ]
    a = sender_metrics(rows)["a"]
    # A·w: 1, -0.2, -0.08 before; 1, -0.2, 0 after: the lower two change places either way.
    assert a.tau_before == pytest.approx(stats.kendalltau([1, 0.5, 0], [1, -0.2, -0.08]).statistic)
    assert a.tau_after == pytest.approx(stats.kendalltau([1, 0.5, 0], [1, -0.2, 0]).statistic)
    assert a.tau_after == pytest.approx(1 / 3)


def test_what_a_bound_did_is_seen_against_the_free_weight() -> None:
    rows = [
        row("a", 0, 1.0, 1.0, scored(True, [1.0, 0.1], [2.0, 1.1], free=[2.7, 1.1])),
        row("a", 0, 0.0, -1.0, scored(False, [-1.0], [0.4], free=[0.4])),  # filtered, not clipped
    ]
    a = sender_metrics(rows)["a"]
    assert a.clipped == pytest.approx(1 / 3)
    assert a.free_weight.mean == pytest.approx(4.2 / 3)
    assert a.free_weight.var == pytest.approx(np.var([2.7, 1.1, 0.4]))


def test_the_estimation_error_compares_the_weights_used_with_the_learners_own_scores() -> None:
    rows = [
        row("a", 0, 1.0, 1.0, scored(True, [0.3, 0.4], [1.0, 2.0])),
        row("a", 0, 0.0, -1.0, scored(True, [-0.2], [0.5])),
        row("a", 1, 1.0, 0.5, scored(True, [0.0], [1.0])),
        row("a", 1, 0.0, -0.5, scored(False, [0.0], [1.0])),
    ]
    share = exp(0.7) / (exp(0.7) + exp(-0.2))
    first = abs((1.5 * 1 - 0.5) / 2 - (2 * share - 1))
    second = abs(0.5 / 2 - 0.0)  # without the filter it would be exact
    assert sender_metrics(rows)["a"].estimation_error == pytest.approx((first + second) / 2)


def test_flatness_is_one_over_one_plus_the_squared_variation_of_q() -> None:
    logq = np.log([0.2, 0.5, 0.9])
    q = np.exp(logq)
    assert flatness(logq) == pytest.approx(1 / (1 + np.var(q) / np.mean(q) ** 2))
    assert flatness(np.full(5, -700.0)) == pytest.approx(1.0)


def test_rounding_on_the_wire_does_not_reorder_a_group() -> None:
    weights = [1.0003, 0.9997, 1.0, 1.0002]  # own ones: they would be 1
    rewards = [1.0, 1.0, 0.0, 0.0]
    rows = [
        row("a", 0, reward, reward - 0.5, scored(True, [0.0], [weight]))
        for reward, weight in zip(rewards, weights, strict=True)
    ]
    metrics = sender_metrics(rows)["a"]
    assert (metrics.tau_before, metrics.tau_after) == (1.0, 1.0)


def test_rewards_that_hardly_differ_are_still_ranked() -> None:
    rows = [
        row("a", 0, reward, advantage, scored(True, [0.0], [1.0]))
        for reward, advantage in ((1.0, -1.0), (1.0001, 0.0), (1.0002, 1.0))
    ]
    assert sender_metrics(rows)["a"].tau_before == 1.0
