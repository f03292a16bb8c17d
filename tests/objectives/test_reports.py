"""What an objective says it did: the weight before the filter, what the filter kept, and which
sequences are silent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from marks import slow
from motley.objectives import Objective, objective

from .cases import ROW_IDS, ROWS, Case, Result, cases_of, flat, make_case, run, samples_of, tiny

DENOMINATORS = {
    "dr_grpo": "constant",
    "bnpo": "tokens",
    "cispo": "tokens",
    "sapo_swarm": "speaking",
    "topr": "sequences",
    "dapo": "tokens",
    "reinforce_pp": "tokens",
    "m2po": "tokens",
    "dppo": "speaking",
    "rloo": "sequences",
}
# reinforce_pp subtracts one mean from all: nobody's advantage is zero but by chance
WITH_SILENCE = [row for row in ROWS if row[0] != "reinforce_pp"]


def denominator(name: str, variant: str, case: Case, got: Result, i: int) -> float:
    """What divides weight·A·grad log p of a token of sequence i."""
    if (name, variant) == ("ftis", "code"):
        pair = got.terms.pair_B == got.terms.pair_B[i]
        survivors = int(got.output.keep_B[pair].sum())
        return got.terms.num_pairs * max(1, survivors) * max(1, case.lengths[i] - case.ended[i])
    silent = [
        p
        for p in set(case.group)
        if len({r for r, q in zip(case.reward, case.group, strict=True) if q == p}) == 1
    ]
    return {
        "constant": len(case) * case.max_length,
        "tokens": sum(case.lengths),
        "speaking": sum(
            n for n, p in zip(case.lengths, case.group, strict=True) if p not in silent
        ),
        "sequences": len(case),
        "each": len(case) * case.lengths[i],
    }["tokens" if variant == "trl" else DENOMINATORS.get(name, "each")]


def weight_explains_gradient(name: str, variant: str, case: Case) -> None:
    # the squared log ratio of dppo has a gradient of its own
    settings = {"tau": 0.0} if name == "dppo" else {}
    got = run(objective(name, variant, settings), case)
    for i, n in enumerate(case.lengths):
        weight_T = got.output.weight_BT[i, :n].double().numpy()
        kept = float(got.output.keep_B[i])
        expected = (
            -kept
            * weight_T
            * float(got.terms.advantage_B[i])
            / denominator(name, variant, case, got, i)
        )
        np.testing.assert_allclose(
            got.gradient[i], expected, rtol=1e-5, atol=1e-8, err_msg=f"sequence {i}"
        )


@pytest.mark.parametrize("regime", [slow("near"), slow("apart"), slow("far"), "horizontal"])
@pytest.mark.parametrize(("name", "variant"), [row for row in ROWS if row != ("gmpo", "")])
def test_reported_weight_is_the_factor_in_the_gradient(
    name: str, variant: str, regime: str
) -> None:
    weight_explains_gradient(name, variant, make_case(regime, 0))


@pytest.mark.parametrize("regime", ["near", "apart", "far", "horizontal"])
def test_gmpo_reports_weight_zero_where_it_clips(regime: str) -> None:
    weight_explains_gradient("gmpo", "", make_case(regime, 7))


def test_gmpo_reports_its_ratio_where_nothing_is_clipped() -> None:
    case = make_case("near", 7)
    weight_explains_gradient(
        "gmpo",
        "",
        replace(
            case, lp=[q + np.clip(p - q, -0.3, 0.3) for p, q in zip(case.lp, case.lq, strict=True)]
        ),
    )


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_reports_carry_no_gradient(name: str, variant: str) -> None:
    output = run(objective(name, variant), make_case("apart", 7)).output
    assert not output.weight_BT.requires_grad
    assert not output.kl_B.requires_grad
    assert output.keep_B.dtype == torch.bool


@pytest.mark.parametrize("name", ["ftis", "fnois", "fvis", "uplift"])
def test_dropped_sequences_report_their_weight_and_have_no_gradient(name: str) -> None:
    case = make_case("far", 0)
    got, unfiltered = (
        run(objective(name), case),
        run(objective(name, settings={"g": float("inf")}), case),
    )
    dropped = [i for i in range(len(case)) if not got.output.keep_B[i]]
    assert 0 < len(dropped) < len(case)
    assert torch.equal(got.output.weight_BT, unfiltered.output.weight_BT)
    assert max(np.abs(got.gradient[i]).max() for i in dropped) == 0
    assert max(np.abs(unfiltered.gradient[i]).max() for i in dropped) > 1e-3


def test_weight_of_a_zero_advantage_is_that_of_its_side() -> None:
    # topr counts A = 0 with the positives (weight 1), uplift with the negatives (min(rho, 1)). rho
    # = 1/2, A = 1/2, -1/2, 0.
    case = tiny([1.0, 0.0, 0.5], lp=[[np.log(0.25)]] * 3, lq=[[np.log(0.5)]] * 3)
    assert run(objective("topr"), case).output.weight_BT[:, 0].tolist() == pytest.approx(
        [1.0, 0.5, 1.0]
    )
    assert run(objective("uplift"), case).output.weight_BT[:, 0].tolist() == pytest.approx(
        [1.0, 0.5, 0.5]
    )


def test_dppo_and_sapo_report_a_zero_advantage_as_a_failure() -> None:
    # p - q = 0.6 is above 0.2, which a success may not be; rho = 3
    case = tiny([1.0, 0.0, 0.5], lp=[[np.log(0.9)]] * 3, lq=[[np.log(0.3)]] * 3)
    weight_B = run(objective("dppo"), case).output.weight_BT[:, 0]
    assert weight_B.tolist() == pytest.approx([0.0, 3.0, 3.0])
    success, failure, zero = run(objective("sapo"), case).output.weight_BT[:, 0].tolist()
    assert success != failure == zero


# Silent sequences: no advantage, no penalty.


@pytest.mark.parametrize(
    ("name", "variant"), [row for row in WITH_SILENCE if row != ("ftis", "code")]
)
def test_silent_marks_exactly_the_zero_advantages(name: str, variant: str) -> None:
    row = objective(name, variant)
    terms = row.prepare(samples_of(make_case("apart", 8)))
    expected = [a == 0 for a in terms.advantage_B.tolist()]
    assert row.silent(terms).tolist() == expected
    assert 0 < sum(expected) < len(expected)


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_the_smallest_advantage_is_not_silent(name: str, variant: str) -> None:
    row = objective(name, variant)
    terms = row.prepare(samples_of(tiny([0.0] * 6, lp=[[-1.0]] * 6, lq=[[-1.0]] * 6)))
    faint = replace(terms, advantage_B=torch.tensor([1e-7, -1e-7, 1e-30, -1e-30, 0.0, 0.0]))
    assert row.silent(faint).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_nothing_is_silent_under_a_penalty(name: str, variant: str) -> None:
    row = objective(name, variant, {"beta": 0.005})
    terms = row.prepare(samples_of(make_case("apart", 8)))
    assert row.silent(terms).tolist() == [False] * 25
    assert row.silent(terms).dtype == torch.bool


def leaving_silent_out_changes_nothing(row: Objective, case: Case) -> None:
    silent_B = row.silent(row.prepare(samples_of(case)))
    speaking = [i for i in range(len(case)) if not silent_B[i]]
    assert 0 < len(speaking) < len(case)
    whole, part = run(row, case), run(row, case, cuts=[speaking[:5], speaking[5:]])
    assert part.loss == pytest.approx(whole.loss, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(flat(part.gradient), flat(whole.gradient), rtol=1e-5, atol=1e-7)


# The expectation of gepo's release is over whatever shares the micro-batch, silent sequences too.
@pytest.mark.parametrize(
    ("name", "variant"),
    [row for row in WITH_SILENCE if row not in (("gepo", "code"), ("ftis", "code"))],
)
def test_leaving_silent_sequences_out_changes_nothing(name: str, variant: str) -> None:
    leaving_silent_out_changes_nothing(objective(name, variant), make_case("apart", 8))


def test_what_is_silent_in_the_ftis_code_has_no_advantage() -> None:
    row = objective("ftis", "code")
    terms = row.prepare(samples_of(make_case("apart", 8)))
    silent_B = row.silent(terms)
    assert bool((terms.advantage_B[silent_B] == 0).all())
    assert silent_B[:7].all(), "an all-correct and an all-wrong group are silent"


def test_leaving_silent_pairs_of_the_ftis_code_out_changes_nothing() -> None:
    # Binary rewards: a sequence is silent only where its whole group is.
    case = tiny(
        [1.0, 0.0, 1.0, 1.0],
        lp=[[-1.0]] * 4,
        lq=[[-1.2]] * 4,
        group=[0, 0, 1, 1],
        ended=[False] * 4,
    )
    row = objective("ftis", "code")
    assert row.silent(row.prepare(samples_of(case))).tolist() == [False, False, True, True]
    assert flat(run(row, case, cuts=[[0, 1]]).gradient) == pytest.approx(
        flat(run(row, case).gradient)
    )


def test_leaving_a_silent_half_of_a_pair_out_changes_nothing() -> None:
    # A = -0.5, 0, 0.5, 0: with its neighbour the pair's mean divides by two survivors.
    case = tiny([0.0, 0.5, 1.0, 0.5], lp=[[-1.0]] * 4, lq=[[-1.2]] * 4, ended=[False] * 4)
    row = objective("ftis", "code")
    silent_B = row.silent(row.prepare(samples_of(case)))
    speaking = [i for i in range(4) if not silent_B[i]]
    assert flat(run(row, case, cuts=[speaking]).gradient) == pytest.approx(
        flat(run(row, case).gradient)
    )


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_reports_are_detached(name: str, variant: str) -> None:
    output = run(objective(name, variant), make_case("far", 0)).output
    assert output.loss.requires_grad
    reports = (output.weight_BT, output.free_BT, output.factor_BT, output.keep_B, output.kl_B)
    assert not any(report.requires_grad for report in reports)


def token_ratio(case: Case, i: int) -> np.ndarray:
    return np.exp(np.minimum(case.lp[i] - case.lq[i], 60))


def sequence_ratio(case: Case, i: int) -> np.ndarray:
    return np.full(case.lengths[i], np.exp(np.mean(case.lp[i] - case.lq[i])))


def product_ratio(case: Case, i: int) -> np.ndarray:
    return np.full(case.lengths[i], np.exp(min(60.0, float(np.sum(case.lp[i] - case.lq[i])))))


def group_ratio(case: Case, i: int) -> np.ndarray:
    q = np.exp([np.mean(case.lq[j]) for j in range(len(case)) if case.group[j] == case.group[i]])
    return np.full(case.lengths[i], np.exp(np.mean(case.lp[i])) / ((q**2).sum() / q.sum()))


FREE = {
    "alone": lambda case, i: np.ones(case.lengths[i]),
    "nois": lambda case, i: np.ones(case.lengths[i]),
    "fnois": lambda case, i: np.ones(case.lengths[i]),
    "grpo": token_ratio,
    "fvis": token_ratio,
    "tis": token_ratio,
    "ftis": token_ratio,
    "cispo": token_ratio,
    "uplift": token_ratio,
    "gspo": sequence_ratio,
    "gmpo": sequence_ratio,
    "gepo": group_ratio,
    "topr": product_ratio,
}


@pytest.mark.parametrize("regime", ["near", "apart", "horizontal"])
@pytest.mark.parametrize("name", FREE)
def test_the_free_weight_is_the_methods_ratio_before_any_bound(name: str, regime: str) -> None:
    case = make_case(regime, 3)
    output = run(objective(name), case).output
    assert not output.free_BT.requires_grad
    for i, n in enumerate(case.lengths):
        np.testing.assert_allclose(
            output.free_BT[i, :n].double().numpy(), FREE[name](case, i), rtol=2e-5
        )
        assert not output.free_BT[i, n:].any()
