"""Sequences of another vocabulary: every row by spans, beside own sequences by tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from marks import slow
from motley.objectives import objective

from .cases import (
    REGIMES,
    ROWS,
    Case,
    batch_of,
    cases_of,
    flat,
    make_case,
    prepared,
    run,
    span_table,
    spanned,
    tiny,
)
from .reference import Reference

# A Beta density needs mean rewards in [0, 1].
EVERYWHERE = [
    (*row, regime) for row in ROWS for regime in REGIMES if (row[0], regime) != ("bnpo", "signed")
]
PENALTIES: list[dict[str, float | str]] = [
    {"beta": 0.1, "toward": toward, "beta_times": times}
    for toward in ("sampler", "code", "reference")
    for times in ("one", "ratio")
]


def agree(
    name: str, variant: str, settings: dict, case: Case, rtol: float = 2e-5, atol: float = 1e-6
) -> None:
    if name == "hacpo":  # a ratio of exactly 1 is where its window ends: no difference tells
        case = replace(case, open=[False] * len(case))
    expected = Reference(case, name, variant, **settings)
    got = run(objective(name, variant, settings), case)
    gradient = flat(expected.gradient())
    assert got.loss == pytest.approx(expected.loss(case.lp), rel=rtol, abs=1e-5)
    atol += 1e-7 * np.abs(gradient).max()
    np.testing.assert_allclose(flat(got.gradient), gradient, rtol=rtol, atol=atol)
    assert got.output.keep_B.tolist() == [expected.kept(i) for i in range(len(case))]
    kls = [expected.kl(i) for i in range(len(case))]
    np.testing.assert_allclose(got.output.kl_B.numpy(), kls, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS))
@pytest.mark.parametrize("settings", [{}, *map(slow, PENALTIES[::5])])
def test_spans_of_one_token_change_nothing(name: str, variant: str, settings: dict) -> None:
    for regime in ("apart", "horizontal"):
        case = make_case(regime, 5)
        each = replace(case, spans=[[1] * n for n in case.lengths], open=[False] * len(case))
        row = objective(name, variant, settings)
        plain, by_spans = run(row, case), run(row, each)
        assert plain.loss == by_spans.loss
        np.testing.assert_array_equal(flat(plain.gradient), flat(by_spans.gradient))
        for key in ("weight_BT", "free_BT", "factor_BT", "keep_B", "kl_B"):
            assert torch.equal(getattr(plain.output, key), getattr(by_spans.output, key))
        assert plain.terms.most_square == by_spans.terms.most_square
        assert plain.terms.lr_scale == by_spans.terms.lr_scale


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_row_agrees_with_reference(name: str, variant: str) -> None:
    agree(name, variant, {}, spanned(make_case("horizontal", 0), 0))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "regime"), EVERYWHERE)
def test_row_agrees_with_reference_on_many_batches(name: str, variant: str, regime: str) -> None:
    for seed in (0, *range(200, 210)):
        agree(name, variant, {}, spanned(make_case(regime, seed), seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_row_with_any_penalty_agrees_with_reference(name: str, variant: str) -> None:
    for seed, settings in enumerate(PENALTIES):
        case = spanned(make_case("horizontal", seed), seed)
        agree(name, variant, settings, case, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS))
def test_how_log_probs_are_laid_inside_a_span_does_not_matter(name: str, variant: str) -> None:
    case = spanned(make_case("apart", 3), 3)
    if name == "ftis" and variant == "code":  # what is laid on the end token goes with it
        case = replace(case, ended=[False] * len(case))
    evenly = []
    for lq, sizes in zip(case.lq, case.spans, strict=True):
        parts = np.split(lq, np.cumsum(sizes)[:-1]) if sizes else []
        evenly.append(np.concatenate([np.full(len(p), p.mean()) for p in parts]) if parts else lq)
    row = objective(name, variant)
    got, other = run(row, case), run(row, replace(case, lq=evenly))
    assert got.loss == pytest.approx(other.loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(flat(got.gradient), flat(other.gradient), rtol=1e-4, atol=1e-6)


# rows that see nothing but d of a token, over a number of tokens that is the batch's
BY_RATIO = ["dr_grpo", "bnpo", "cispo", "dapo", "reinforce_pp", "dppo", "m2po"]


@pytest.mark.parametrize("name", BY_RATIO)
def test_a_span_pulls_on_all_its_tokens_as_a_token_of_the_same_log_probs(name: str) -> None:
    """The gradient of each token is that of the one token that the whole span would be."""
    case = spanned(make_case("apart", 4), 4)
    case = replace(case, open=[False] * len(case), own=[False] * len(case))
    case = replace(case, spans=[s or [n] for s, n in zip(case.spans, case.lengths, strict=True)])
    joined = replace(case, lp=_joined(case.lp, case), lq=_joined(case.lq, case), spans=[], ref=[])
    row = objective(name)
    got, whole = run(row, case), _with_terms(row, joined, prepared(row, case))
    for tokens, spans, sizes in zip(got.gradient, whole, case.spans, strict=True):
        np.testing.assert_allclose(tokens, np.repeat(spans, sizes), rtol=1e-4, atol=1e-6)


def _joined(rows: list[np.ndarray], case: Case) -> list[np.ndarray]:
    starts = [np.cumsum([0, *sizes[:-1]]) for sizes in case.spans]
    return [np.add.reduceat(row, start) for row, start in zip(rows, starts, strict=True)]


def _with_terms(row, case: Case, terms) -> list[np.ndarray]:
    batch = batch_of(case, terms)
    row.loss(batch).loss.backward()
    grad_BT = batch.logp_learner_BT.grad.double().numpy()
    return [grad_BT[i, :n] for i, n in enumerate(case.lengths)]


def test_a_span_that_was_cut_by_length_counts_at_most_as_much_as_an_own_token() -> None:
    # the sender gives "ab" 1/4, the learner 1: no honest ratio of what never closed
    case = tiny([1.0, 0.0], [[-0.1, 0.0]] * 2, [[-0.7, -0.7]] * 2, own=[False] * 2)
    case = replace(case, spans=[[2], [2]], open=[True, False])
    row = objective("tis", settings={"C": 10.0})
    weight_BT = run(row, case).output.weight_BT
    assert weight_BT[0].tolist() == [1.0, 1.0]
    assert weight_BT[1].tolist() == pytest.approx([np.exp(1.3)] * 2)
    # one that the learner finds less likely than its sender still counts less
    less = replace(case, lp=[np.array([-1.0, -1.0])] * 2)
    assert run(row, less).output.weight_BT[0].tolist() == pytest.approx([np.exp(-0.6)] * 2)


def test_a_sequence_counts_its_open_span_at_most_as_one() -> None:
    case = tiny([1.0, 0.0], [[-1.0, 0.0, 0.0]] * 2, [[-0.5, -1.0, -2.0]] * 2, own=[False] * 2)
    case = replace(case, spans=[[1, 2]] * 2, open=[True, False])
    row = objective("tis", "sequence", {"C": 100.0})
    weight_BT = run(row, case).output.weight_BT
    assert weight_BT[:, 0].tolist() == pytest.approx([np.exp(-0.5), np.exp(2.5)])


def test_sums_over_spans_are_exact_however_long_they_are() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3, 7, 8, 9, 200):
        case = tiny([1.0], [rng.normal(size=300)], [rng.normal(size=300)])
        sizes = [size] * (300 // size) + ([300 % size] if 300 % size else [])
        table = span_table(replace(case, spans=[sizes], open=[False]), 300)
        value_BT = torch.tensor(rng.normal(size=(1, 300)))
        expected = np.add.reduceat(value_BT.numpy()[0], np.cumsum([0, *sizes[:-1]]))
        np.testing.assert_allclose(
            table.total(value_BT).numpy()[0], np.repeat(expected, sizes), rtol=1e-12
        )


def test_a_span_counts_once_in_the_second_moment_that_a_batch_allows() -> None:
    # squares of spans: .01, .09 and .25, on average .117; by tokens it would be .13
    lp = [[-0.9, -1.0, -1.0, -0.7, -1.0, -0.5]]
    case = tiny([1.0, 0.0], lp * 2, [[-1.0] * 6] * 2, own=[False] * 2)
    case = replace(case, spans=[[1, 3, 2]] * 2, open=[False] * 2)
    row = objective("m2po", settings={"budget": 0.12})
    assert prepared(row, case).most_square == pytest.approx(0.25, rel=1e-4)
    below = objective("m2po", settings={"budget": 0.11})
    assert prepared(below, case).most_square == pytest.approx(0.09, rel=1e-4)
