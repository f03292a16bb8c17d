"""Bias and variance of gradients, against a policy of two tokens of which all is known exactly."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from motley.objectives import LossBatch, Objective, Samples
from motley.objectives.advantages import Centred
from motley.objectives.importance import Truncated
from motley.objectives.surrogates import InnerClip
from motley.study.estimators import (
    EstimatorLine,
    Vectors,
    between,
    compare,
    estimators_of,
    keep_estimators,
    noisy,
    read_estimators,
)
from motley.study.gradients import REFERENCE
from motley.study.outcomes import StudyRun
from motley.study.plans import EstimatorPlan

G = 4  # completions of a group
P = np.array([0.3, 0.7])  # the receiver's policy: token 0 has reward 1, token 1 has 0
Q = np.array([0.1, 0.9])  # the sender's
POLICIES = {"P": P, "Q": Q}
TRUTH = P[0] * P[1]  # |d E[r] / d logit| of either logit


def tis(C: float) -> Objective:
    return Objective(advantage=Centred(), weight=Truncated(C), surrogate=InnerClip())


def gradient(row: Objective, token_B: np.ndarray, sampler: np.ndarray) -> np.ndarray:
    """Of the loss with respect to both logits: a group of G sequences of one token."""
    token = torch.from_numpy(token_B)
    ones = torch.ones(len(token), dtype=torch.bool)
    logq_B = torch.from_numpy(np.log(sampler)).float()[token]
    samples = Samples(
        reward_B=(token == 0).float(),
        group_B=torch.zeros_like(token),
        sender_B=torch.zeros_like(token),
        own_B=ones,
        stranger_B=~ones,
        success_B=torch.zeros(len(token)),
        skill_B=torch.ones(len(token)),
        length_B=torch.ones_like(token),
        ended_B=ones,
        logq_mean_B=logq_B,
        max_length=1,
    )
    logits = torch.from_numpy(np.log(P)).float().requires_grad_()
    batch = LossBatch(
        logp_learner_BT=logits.log_softmax(0)[token][:, None],
        logp_sampler_BT=logq_B[:, None],
        mask_BT=ones[:, None],
        ended_B=ones,
        terms=row.prepare(samples),
    )
    row.loss(batch).loss.backward()
    assert logits.grad is not None
    return logits.grad.numpy()


def drawn(policy: np.ndarray, batches: int, groups: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [(rng.random(groups * G) > policy[0]).astype(np.int64) for _ in range(batches)]


@cache
def table(row: Objective, of: str) -> Vectors:
    """The gradient of every group there can be: token i of group number n is bit i of n."""
    groups = [np.array([n >> i & 1 for i in range(G)]) for n in range(2**G)]
    return np.stack([gradient(row, some, POLICIES[of]) for some in groups])


def vectors(row: Objective, tokens: list[np.ndarray], of: str) -> Vectors:
    """A step's gradient is the mean over its groups."""
    numbers = [some.reshape(-1, G) @ (1 << np.arange(G)) for some in tokens]
    return np.stack([table(row, of)[some].mean(0) for some in numbers])


def exact(row: Objective, of: str) -> tuple[np.ndarray, float]:
    """Mean and summed variance of a group's gradient, over every group there can be."""
    chance = np.array([np.prod(POLICIES[of][list(some)]) for some in product((0, 1), repeat=G)])
    all_of_them = table(row, of).astype(np.float64)
    # `product` counts from the other end, and a group has no order
    mean = chance @ all_of_them
    return mean, float(chance @ (all_of_them**2).sum(1) - mean @ mean)


def closed_form_bias(C: float) -> float:
    """With w = min(p/q, C), E g is q0·q1·(w0·p1 + w1·p0) / (p0·p1·min(1, C)) times that on own
    samples.
    """
    w = np.minimum(P / Q, C)
    return float(abs(Q[0] * Q[1] * (w[0] * P[1] + w[1] * P[0]) / (P[0] * P[1] * min(1, C)) - 1))


def test_the_reference_is_the_gradient_of_the_expected_reward() -> None:
    mean, _ = exact(REFERENCE, "P")
    assert mean == pytest.approx([-TRUTH, TRUTH], rel=1e-5)  # of a loss: it points down


@pytest.mark.slow
@pytest.mark.parametrize("C", [0.5, 1.0, 2.0])
def test_the_bias_of_truncated_weights_is_that_of_the_closed_form(C: float) -> None:
    own, theirs = drawn(P, 150, 8, seed=1), drawn(Q, 150, 8, seed=2)
    found = compare(
        vectors(tis(C), theirs, "Q"), vectors(tis(C), own, "P"), vectors(REFERENCE, own, "P")
    )
    assert found.bias.value == pytest.approx(closed_form_bias(C), abs=3 * found.bias.error)
    assert 0 < found.bias.error < 0.06
    assert found.cosine.value == pytest.approx(1, abs=0.05)


def test_the_exact_expectation_has_the_bias_of_the_closed_form() -> None:
    mean, _ = exact(tis(2.0), "Q")
    own, _ = exact(tis(2.0), "P")
    assert abs(mean[0] / own[0] - 1) == pytest.approx(closed_form_bias(2.0), rel=1e-4)
    assert closed_form_bias(2.0) > 0.2
    assert closed_form_bias(np.inf) == pytest.approx(0)


@pytest.mark.slow
def test_weights_without_a_bound_have_no_bias_and_more_variance() -> None:
    own, theirs = drawn(P, 150, 8, seed=3), drawn(Q, 150, 8, seed=4)
    reference = vectors(REFERENCE, own, "P")
    free = compare(vectors(tis(99), theirs, "Q"), vectors(tis(99), own, "P"), reference)
    held = compare(vectors(tis(1), theirs, "Q"), vectors(tis(1), own, "P"), reference)
    assert free.bias.value <= 3 * free.bias.error
    assert held.bias.value > free.bias.value
    assert held.variance < free.variance


@pytest.mark.slow
def test_the_variance_is_that_of_all_groups_there_can_be() -> None:
    own, theirs = drawn(P, 200, 2, seed=5), drawn(Q, 200, 2, seed=6)
    found = compare(
        vectors(tis(2.0), theirs, "Q"), vectors(tis(2.0), own, "P"), vectors(REFERENCE, own, "P")
    )
    mean, variance = exact(tis(2.0), "P")
    scale = TRUTH / abs(mean[0])  # Centred is short of the reference by 1 - 1/G
    assert scale == pytest.approx(G / (G - 1), rel=1e-4)
    expected = scale**2 * exact(tis(2.0), "Q")[1] / 2 / (2 * TRUTH**2)
    assert found.variance == pytest.approx(expected, rel=0.25)
    assert variance > 0


@pytest.mark.slow
def test_the_error_of_the_bias_is_as_large_as_it_varies() -> None:
    found = []
    for seed in range(20):
        own, theirs = drawn(P, 40, 8, seed=100 + seed), drawn(Q, 40, 8, seed=200 + seed)
        reference = vectors(REFERENCE, own, "P")
        one = compare(vectors(tis(1), theirs, "Q"), vectors(tis(1), own, "P"), reference)
        found.append(one.squared_bias)
    spread = np.std([one.value for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.5)


def test_products_between_batches_leave_out_those_of_a_batch_with_itself() -> None:
    assert between(np.array([[5.0, 1.0], [3.0, 7.0]])) == 2.0


def test_what_nothing_is_left_of_has_bias_1_and_no_direction() -> None:
    own = vectors(REFERENCE, drawn(P, 50, 8, seed=7), "P")
    found = compare(np.zeros_like(own), own, own)
    assert found.bias.value == pytest.approx(1)
    assert np.isnan(found.cosine.value)
    assert found.variance == 0


def test_a_reference_that_is_only_noise_says_nothing() -> None:
    noise = np.array([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.1], [-1.0, 0.0]], np.float32)
    assert np.isnan(compare(noise, noise, noise).bias.value)


# Files and the report


def line(
    row: str = "tis", round: int = 0, sender: str = "deep", **others: float | None
) -> EstimatorLine:
    numbers: dict[str, float | None] = {
        "bias": 0.4, "bias_error": 0.1, "cosine": 0.9, "cosine_error": 0.05, "variance": 2.0,
        "ess": 0.8, "weight": 0.7, "reference_error": 0.2,
    }  # fmt: skip
    return EstimatorLine(
        round=round, receiver="small", sender=sender, row=row, batches=32, groups=16, values=1000,
        projected=0, **(numbers | others),
    )  # fmt: skip


def test_what_is_measured_again_counts_instead(tmp_path: Path) -> None:
    keep_estimators(tmp_path, [line(), line("ftis")])
    keep_estimators(tmp_path, [line(bias=0.5), line(round=20)])
    assert [(one.round, one.row, one.bias) for one in read_estimators(tmp_path)] == [
        (0, "ftis", 0.4), (0, "tis", 0.5), (20, "tis", 0.4),
    ]  # fmt: skip


def test_a_damaged_file_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "estimators.jsonl").write_text('{"round": 1}\n')
    with pytest.raises(ValueError, match=r"estimators.jsonl has a line that is no .*; delete"):
        read_estimators(tmp_path)


def test_a_run_that_was_not_measured_has_no_section(tmp_path: Path) -> None:
    assert estimators_of([StudyRun("pair", "ftis", 0, tmp_path)]) == []


def test_the_section_has_means_over_seeds_and_curves_of_others_samples(tmp_path: Path) -> None:
    runs = [StudyRun("pair", "ftis", seed, tmp_path / str(seed)) for seed in (0, 1)]
    for run, bias in zip(runs, (0.2, 0.4), strict=True):
        run.folder.mkdir()
        own = line(sender="small", bias=0.01)
        keep_estimators(run.folder, [line(bias=bias), line(round=20, bias=bias + 0.3), own])
    (section,) = estimators_of(runs)
    _, rows = section.table
    assert [row[:4] for row in rows] == [
        ["ftis", "0", "deep → small", "tis"],
        ["ftis", "0", "small → small", "tis"],
        ["ftis", "20", "deep → small", "tis"],
    ]
    assert rows[0][4].startswith("0.3 ±")
    (curve,) = section.curves["bias on others' samples: small"]
    assert (list(curve.x), list(curve.y)) == ([0, 20], pytest.approx([0.3, 0.6]))
    assert "32 batches of 16 groups" in section.text
    assert "exact" in section.text


def test_what_noise_hides_is_left_out_of_the_report(tmp_path: Path) -> None:
    keep_estimators(tmp_path, [line(), line(round=20, cosine=5.6, reference_error=0.9)])
    (section,) = estimators_of([StudyRun("pair", "ftis", 0, tmp_path)])
    _, rows = section.table
    assert [row[4:] for row in rows] == [
        ["0.4", "0.1", "0.9", "2", "0.8", "0.7"],
        ["", "", "", "", "0.8", "0.7"],
    ]
    (curve,) = section.curves["bias on others' samples: small"]
    assert list(curve.x) == [0]
    assert "Cells are empty where the reference is hardly larger" in section.text


def test_a_reference_that_noise_hides_is_named() -> None:
    assert noisy([line(), line(reference_error=0.9), line(reference_error=None)]) == [
        "small at round 0", "small at round 0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rounds", "every", "due"),
    [(40, 10, [0, 20, 40]), (40, 15, [0, 30, 40]), (3, 10, [0, 3]), (50, 13, [0, 26, 50])],
)
def test_a_run_is_measured_where_it_is_saved(rounds: int, every: int, due: list[int]) -> None:
    assert EstimatorPlan(arm="ftis", rows="tis").due(rounds, every) == due


@pytest.mark.parametrize("wrong", [{"batches": 3}, {"seeds": 0}])
def test_a_plan_that_would_measure_nothing_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"\[estimators\] .* use at least"):
        EstimatorPlan(arm="ftis", rows="tis", **wrong)
