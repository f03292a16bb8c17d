"""What must not change the loss: padding, the cut into micro-batches, the order of groups."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from motley.objectives import Objective, objective

from .cases import (
    ROW_IDS,
    ROWS,
    Case,
    Result,
    batch_of,
    cases_of,
    flat,
    make_case,
    prepared,
    run,
    samples_of,
    spanned,
)

# Their loss is a sum over sequences; the other two say that it is not.
CUT_ANYWHERE = [row for row in ROWS if row not in (("ftis", "code"), ("gepo", "code"))]


def same(got: Result, expected: Result) -> None:
    scale = float(np.abs(flat(expected.gradient)).max())
    assert got.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6 * max(1, scale))
    np.testing.assert_allclose(
        flat(got.gradient), flat(expected.gradient), rtol=1e-5, atol=1e-7 * scale
    )


def varied_case(name: str, seed: int) -> Case:
    return make_case("apart" if name == "bnpo" else "signed", seed)


def random_cut(num: int, seed: int) -> list[list[int]]:
    """Shuffled sequences, dealt into micro-batches of unequal size."""
    rng = np.random.default_rng(seed)
    bounds = np.sort(rng.choice(np.arange(1, num), 6, replace=False))
    return [part.tolist() for part in np.split(rng.permutation(num), bounds)]


@pytest.mark.parametrize("garbage", [-7.5, 300.0])
@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_padding_changes_nothing(name: str, variant: str, garbage: float) -> None:
    row = objective(name, variant, {"beta": 0.1})
    case = varied_case(name, seed=3)
    same(run(row, case, extra=3, garbage=garbage), run(row, case))


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_padding_reports_weight_zero(name: str, variant: str) -> None:
    case = varied_case(name, seed=3)
    weight_BT = run(objective(name, variant), case, extra=2, garbage=5.0).output.weight_BT
    for i, n in enumerate(case.lengths):
        assert weight_BT[i, n:].abs().sum() == 0
    assert weight_BT.abs().sum() > 0


def test_end_token_is_taken_away_once() -> None:
    case = make_case("apart", seed=3)
    batch = batch_of(case, objective("ftis", "code").prepare(samples_of(case)), extra=2)
    once = batch.without_end()
    expected = [n - ended for n, ended in zip(case.lengths, case.ended, strict=True)]
    assert once.mask_BT.sum(1).tolist() == expected
    assert once.without_end().mask_BT.sum(1).tolist() == expected
    assert [once.mask_BT[i, :n].all().item() for i, n in enumerate(expected)] == [True] * len(case)


@pytest.mark.parametrize(("name", "variant"), cases_of(CUT_ANYWHERE))
def test_any_cut_between_sequences_gives_the_same_loss_and_gradient(
    name: str, variant: str
) -> None:
    row = objective(name, variant, {"beta": 0.1})
    case = varied_case(name, seed=4)
    whole = run(row, case)
    same(run(row, case, cuts=random_cut(len(case), seed=0)), whole)
    same(run(row, case, cuts=[[i] for i in range(len(case))]), whole)


def test_ftis_code_may_be_cut_between_pairs() -> None:
    row: Objective = objective("ftis", "code", {"g": 0.5})
    case = make_case("apart", seed=4)
    # Groups start at 0, 4, 7, 11, 12, 14, 19; so these bounds part no pair.
    bounds = [0, 2, 6, 7, 9, 12, 16, 18, 19, 23, 25]
    cuts = [list(range(low, high)) for low, high in pairwise(bounds)]
    same(run(row, case, cuts=cuts), run(row, case))


def test_ftis_code_depends_on_a_cut_through_a_pair() -> None:
    row: Objective = objective("ftis", "code")
    case = make_case("apart", seed=4)
    cut = run(row, case, cuts=[[i] for i in range(len(case))])
    assert np.abs(flat(cut.gradient) - flat(run(row, case).gradient)).max() > 1e-3


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_order_of_groups_does_not_matter(name: str, variant: str) -> None:
    row = objective(name, variant, {"beta": 0.1})
    case = varied_case(name, seed=5)
    groups = np.random.default_rng(1).permutation(max(case.group) + 1)
    order = [i for p in groups for i in range(len(case)) if case.group[i] == p]
    assert order != sorted(order)
    moved = run(row, case.take(order))
    restored: list[np.ndarray] = [np.empty(0)] * len(case)
    for position, i in enumerate(order):
        restored[i] = moved.gradient[position]
    same(Result(moved.loss, restored, moved.output, moved.terms), run(row, case))


@pytest.mark.parametrize(("name", "variant"), cases_of(CUT_ANYWHERE))
def test_order_within_a_group_does_not_matter(name: str, variant: str) -> None:
    row = objective(name, variant)
    case = varied_case(name, seed=6)
    order = sorted(range(len(case)), key=lambda i: (case.group[i], -i))
    assert run(row, case.take(order)).loss == pytest.approx(run(row, case).loss, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("by_spans", [False, True])
def test_what_a_batch_says_of_its_tokens_is_zero_outside_the_mask(by_spans: bool) -> None:
    case = make_case("apart", seed=3)
    case = spanned(case, 3) if by_spans else case
    batch = batch_of(case, objective("grpo").prepare(samples_of(case)), extra=3, garbage=5.0)
    batch = replace(batch, logp_start_BT=batch.logp_learner_BT.detach() - 1)
    for table_BT in (
        batch.logp_BT,
        batch.compared_logp_BT,
        batch.moved_BT,
        batch.log_ratio_BT,
        batch.span_log_ratio_BT,
        batch.shared_log_ratio_BT,
        batch.ref_log_ratio_BT,
    ):
        assert not table_BT[~batch.mask_BT].any()
        assert table_BT[batch.mask_BT].any()


@pytest.mark.parametrize("garbage", [float("-inf"), float("nan")])
def test_padding_may_hold_numbers_that_are_not_finite(garbage: float) -> None:
    case = make_case("apart", seed=3)
    same(run(objective("tis"), case, extra=3, garbage=garbage), run(objective("tis"), case))


@pytest.mark.parametrize("garbage", [float("-inf"), float("nan")])
@pytest.mark.parametrize("name", ["grpo", "gspo", "gepo", "ds_gspo", "cispo", "topr", "gmpo"])
def test_padding_of_ratios_may_hold_numbers_that_are_not_finite(name: str, garbage: float) -> None:
    case = make_case("apart", seed=3)
    same(run(objective(name), case, extra=3, garbage=garbage), run(objective(name), case))


# The F-TIS code and the release of GEPO say that others of a micro-batch count.
@pytest.mark.parametrize(("name", "variant"), cases_of(CUT_ANYWHERE))
def test_a_sequence_without_a_token_adds_nothing_and_harms_nobody(name: str, variant: str) -> None:
    row, case = objective(name, variant), varied_case(name, seed=5)
    batch = batch_of(case, prepared(row, case))
    empty = 20
    mask_BT = batch.mask_BT.clone()
    mask_BT[empty] = False
    row.loss(batch).loss.backward()
    expected_BT = batch.logp_learner_BT.grad.clone()
    expected_BT[empty] = 0
    batch.logp_learner_BT.grad = None
    output = row.loss(replace(batch, mask_BT=mask_BT))
    output.loss.backward()
    assert torch.isfinite(output.loss)
    assert float(output.kl_B[empty]) == 0
    np.testing.assert_allclose(batch.logp_learner_BT.grad, expected_BT, rtol=1e-6, atol=1e-9)
