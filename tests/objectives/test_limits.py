"""The limits each method states: where two rows become one, and where a row becomes REINFORCE."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf, log

import numpy as np
import pytest
import torch

from motley.objectives import Objective, objective
from motley.objectives.advantages import Centred, LeaveOneOut
from motley.objectives.ratios import MAX_LOG_RATIO, SequenceRatio, bounded_exp
from motley.objectives.reductions import SequenceSum, TokenMean
from motley.objectives.surrogates import ClippedRatio, Reinforce

from .cases import ROW_IDS, ROWS, Case, cases_of, flat, make_case, run, tiny

UNCLIPPED = {"clip_low": 1.0, "clip_high": inf, "dual_clip": inf}
# nor shaping, which is another weight than the ratio's
WITHOUT_GROUP_WEIGHT = [row for row in ROWS if row[0] != "gepo" and "shaped" not in row[1]]
# reinforce_pp compares problems with each other
WITHOUT_REMEDY = [
    (name, v)
    for name, v in ROWS
    if not ("relative" in v or "rehearsed" in v or v in ("both", "kept", "sure", "gated"))
    and (name != "reinforce_pp" or v == "baseline")
]


def same_rows(one: Objective, other: Objective, case: Case, loss: bool = True) -> None:
    got, expected = run(one, case), run(other, case)
    assert np.abs(flat(expected.gradient)).max() > 1e-3, "nothing to compare"
    np.testing.assert_allclose(flat(got.gradient), flat(expected.gradient), rtol=1e-5, atol=1e-6)
    if loss:
        assert got.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)


def one_token(case: Case) -> Case:
    first = lambda rows: [row[:1] for row in rows]
    return replace(case, lp=first(case.lp), lq=first(case.lq), ref=first(case.ref))


def own_rollouts(case: Case) -> Case:
    return replace(case, lp=case.lq)


# Two rows become one.


def test_gspo_of_one_token_is_grpo() -> None:
    same_rows(objective("gspo"), objective("grpo"), one_token(make_case("horizontal", 0)))


def test_unclipped_gmpo_is_unclipped_gspo() -> None:
    same_rows(
        objective("gmpo", settings={"log_clip": inf}),
        objective("gspo", settings=UNCLIPPED),
        make_case("horizontal", 0),
    )


@pytest.mark.parametrize(
    ("filtered", "plain"), [("ftis", "tis"), ("fnois", "nois"), ("fvis", "grpo")]
)
def test_filter_that_never_fires_changes_nothing(filtered: str, plain: str) -> None:
    same_rows(objective(filtered, settings={"g": inf}), objective(plain), make_case("far", 0))


@pytest.mark.parametrize(
    ("filtered", "plain"), [("ftis", "tis"), ("fnois", "nois"), ("fvis", "grpo")]
)
def test_filter_that_always_fires_keeps_positives_only(filtered: str, plain: str) -> None:
    case = make_case("horizontal", 0)
    got = run(objective(filtered, settings={"g": -1.0}), case)
    expected = run(objective(plain), case)
    for i in range(len(case)):
        positive = float(expected.terms.advantage_B[i]) > 0
        assert got.gradient[i] == pytest.approx(
            expected.gradient[i] if positive else 0 * expected.gradient[i]
        )
        assert bool(got.output.keep_B[i]) == positive


def test_untruncated_tis_has_the_gradient_of_unclipped_grpo() -> None:
    same_rows(
        objective("tis", settings={"C": inf}),
        objective("grpo", settings=UNCLIPPED),
        make_case("horizontal", 0),
    )


def test_untruncated_tis_with_the_fvis_filter_has_the_gradient_of_unclipped_fvis() -> None:
    one, other = (
        objective("ftis", settings={"C": inf, "g": 0.5}),
        objective("fvis", settings={"g": 0.5} | UNCLIPPED),
    )
    same_rows(one, other, make_case("horizontal", 0))


def test_tis_truncated_at_zero_learns_nothing() -> None:
    assert (
        np.abs(
            flat(run(objective("tis", settings={"C": 0.0}), make_case("horizontal", 0)).gradient)
        ).max()
        == 0
    )


def test_uplift_without_floor_is_tis_on_positives() -> None:
    case = make_case("horizontal", 0)
    got, tis = (
        run(objective("uplift", settings={"floor": 0.0, "C": 2.0}), case),
        run(objective("tis"), case),
    )
    positive = [i for i in range(len(case)) if float(tis.terms.advantage_B[i]) > 0]
    assert len(positive) > 3
    for i in positive:
        assert got.gradient[i] == pytest.approx(tis.gradient[i])


def test_gepo_plus_is_gepo_when_nothing_is_near_and_centred_gspo_when_all_is() -> None:
    case = make_case("horizontal", 0)
    same_rows(objective("gepo_plus", settings={"near": 0.0}), objective("gepo"), case)
    same_rows(objective("gepo_plus", settings={"near": 0.0}), objective("gepo"), own_rollouts(case))
    centred_gspo = Objective(advantage=Centred(), surrogate=ClippedRatio(ratio=SequenceRatio()))
    same_rows(objective("gepo_plus", settings={"near": inf}), centred_gspo, case)


def test_ds_gspo_without_mixing_is_centred_gspo() -> None:
    centred_gspo = Objective(advantage=Centred(), surrogate=ClippedRatio(ratio=SequenceRatio()))
    without = objective("ds_gspo", settings={"mix": 0.0})
    same_rows(without, centred_gspo, make_case("horizontal", 0))


def test_ds_gspo_of_an_impossible_sample_stays_under_one_over_mix() -> None:
    # q = e^-40, p = 1: the plain ratio is e^40; with sg(p) in the denominator it is at most 1/0.005
    # = 200.
    case = tiny([0.0, 1.0], lp=[[0.0], [0.0]], lq=[[-40.0], [0.0]])
    assert float(run(objective("ds_gspo"), case).output.weight_BT[0, 0]) == pytest.approx(
        200.0, rel=1e-5
    )


def test_inner_clip_of_tis_acts_on_the_ratio_not_on_the_product() -> None:
    # One correct of 9: A = (8/9)/(1/3 + 1e-4) = 2.67, far over 1.2; a clip of R·A would kill this
    # gradient.
    case = tiny([1.0] + [0.0] * 8, lp=[[-1.0]] * 9, lq=[[-1.0]] * 9)
    assert run(objective("tis"), case).gradient[0] == pytest.approx([-(8 / 9) / (1 / 3 + 1e-4) / 9])


def test_dapo_with_equal_clips_is_grpo_over_tokens() -> None:
    over_tokens = replace(objective("grpo"), reduction=TokenMean())
    same_rows(objective("dapo", settings={"clip_high": 0.2}), over_tokens, make_case("apart", 0))


def test_a_delta_at_the_dual_clip_makes_everybody_a_stranger() -> None:
    case = replace(make_case("horizontal", 0), own=[True] * 25)
    one = run(objective("grpo", settings={"delta": 3.0}), case)
    assert one.loss != run(objective("grpo"), case).loss
    as_strangers = replace(case, own=[False] * 25)
    same_rows(objective("grpo", settings={"delta": 3.0}), objective("grpo"), as_strangers)
    assert one.loss == pytest.approx(run(objective("grpo"), as_strangers).loss)


def test_a_token_mask_that_never_fires_is_untruncated_tis() -> None:
    one = objective("tis", "token_mask", {"C": inf})
    same_rows(one, objective("tis", settings={"C": inf}), make_case("horizontal", 0))


@pytest.mark.parametrize("variant", ["token_mask", "sequence_mask"])
def test_a_mask_keeps_a_ratio_that_is_its_bound(variant: str) -> None:
    case = own_rollouts(make_case("horizontal", 0))
    same_rows(objective("tis", variant, {"C": 1.0}), objective("nois"), case)


@pytest.mark.parametrize(("variant", "token"), [("sequence", ""), ("sequence_mask", "token_mask")])
def test_of_one_token_a_sequences_weight_is_its_tokens(variant: str, token: str) -> None:
    case = one_token(make_case("horizontal", 0))
    same_rows(objective("tis", variant), objective("tis", token, {"C": 3.0}), case)


def test_sapo_of_large_ratios_fades_where_grpo_stops() -> None:
    # rho: e^-9, 1, 2, e^2, e^9
    lp = [[-10.0], [-1.0], [log(2) - 1], [1.0], [8.0]]
    case = tiny([1.0] * 5 + [0.0] * 5, lp * 2, [[-1.0]] * 10)
    weight_B = run(objective("sapo"), case).output.weight_BT[:, 0]
    assert weight_B[:5].tolist() == pytest.approx(
        [0.7865 * exp(-9), 1.0, 1.57290, 0.0495, 0], rel=2e-3
    )
    assert float(weight_B.max()) < 1.6


def test_rloo_of_one_token_is_grpo_with_its_advantage() -> None:
    grpo = replace(objective("grpo"), advantage=LeaveOneOut())
    same_rows(objective("rloo"), grpo, one_token(make_case("apart", 0)))


def test_batch_std_of_a_batch_of_one_group_is_grpo() -> None:
    case = make_case("apart", 0)
    case = case.take([i for i in range(len(case)) if case.group[i] == 5])
    same_rows(objective("grpo", "batch_std"), objective("grpo"), case)


def test_dppo_without_mask_and_squares_is_an_unclipped_ratio() -> None:
    settings = {"mask_low": inf, "mask_high": inf, "tau": 0.0, "dual_clip": inf}
    other = replace(
        objective("grpo", settings=UNCLIPPED),
        advantage=Centred(),
        reduction=TokenMean(),
        skip_silent=True,
    )
    same_rows(objective("dppo", settings=settings), other, make_case("horizontal", 0))


def test_dppo_keeps_what_has_not_moved_whatever_its_mask() -> None:
    case = own_rollouts(make_case("horizontal", 0))
    one = objective("dppo", settings={"mask_low": 0.0, "mask_high": 0.0})
    same_rows(one, objective("dppo"), case)


@pytest.mark.parametrize("name", ["grpo", "gmpo"])
def test_a_failure_whose_ratio_is_at_delta_is_bounded(name: str) -> None:
    case = own_rollouts(make_case("horizontal", 0))
    got = run(objective(name, settings={"delta": 1.0}), case)
    for i, n in enumerate(case.lengths):
        expected = 0.0 if float(got.terms.advantage_B[i]) < 0 else 1.0
        assert got.output.weight_BT[i, :n].tolist() == [expected] * n


def test_m2po_with_any_budget_is_an_unclipped_ratio() -> None:
    other = replace(objective("grpo", settings=UNCLIPPED), reduction=TokenMean())
    one = objective("m2po", settings={"budget": inf, "dual_clip": inf})
    same_rows(one, other, make_case("horizontal", 0))


def test_hacpo_of_own_sequences_is_gspo() -> None:
    case = replace(make_case("horizontal", 0), own=[True] * 25)
    same_rows(objective("hacpo"), objective("gspo"), case)


# REINFORCE.


@pytest.mark.parametrize("regime", ["near", "apart"])
@pytest.mark.parametrize(("name", "variant"), cases_of(WITHOUT_GROUP_WEIGHT))
def test_own_rollouts_give_the_reinforce_gradient(name: str, variant: str, regime: str) -> None:
    row = objective(name, variant)
    case = own_rollouts(make_case(regime, 1))
    reduction = SequenceSum() if name == "rloo" else row.reduction  # its ratio is a product
    plain = replace(
        row,
        surrogate=Reinforce(),
        reduction=reduction,
        weight=objective("nois").weight,
        filter=objective("nois").filter,
    )
    got, expected = run(row, case), run(plain, case)
    np.testing.assert_allclose(flat(got.gradient), flat(expected.gradient), rtol=1e-5, atol=1e-7)
    assert np.abs(flat(got.gradient)).max() > 1e-3
    assert got.output.keep_B.all()
    assert got.output.kl_B.abs().max() == 0


@pytest.mark.parametrize(("name", "variant"), WITHOUT_REMEDY)
def test_equal_rewards_give_zero_gradient(name: str, variant: str) -> None:
    case = make_case("horizontal", 2)
    case = replace(case, reward=[[0.0, 1.0, 0.25, 0.7][p % 4] for p in case.group])
    assert np.abs(flat(run(objective(name, variant), case).gradient)).max() == 0


# Which side is clipped, and what is dropped.


def test_gmpo_clips_only_where_clipping_is_pessimistic() -> None:
    # Positives may not be rewarded past e^0.4; a positive grown unlikely keeps its small ratio.
    # Negatives the other way round.
    case = tiny(
        [1.0, 1.0, 0.0, 0.0],
        lp=[[-1.0], [-3.0], [-1.0], [-3.0]],
        lq=[[-2.0]] * 4,
    )
    got = run(objective("gmpo"), case)
    advantage = 0.5 / ((1 / 3) ** 0.5 + 1e-4)
    assert got.loss == pytest.approx(
        -(exp(0.4) + exp(-1) - exp(1) - exp(-0.4)) * advantage / 4, rel=1e-5
    )
    assert [float(g[0]) for g in got.gradient] == pytest.approx(
        [0, -exp(-1) * advantage / 4, exp(1) * advantage / 4, 0], rel=1e-5
    )


def one_unlikely_token(less_likely: float, length: int = 200) -> Case:
    """Four foreign sequences, the last two of which hold one token exp(less_likely) times less
    likely here; A: -, +, -, +.
    """
    lq = [[-1.0] * length] * 4
    lp = [[-1.0] * length] * 2 + [[-1.0] * (length - 1) + [-1.0 - less_likely]] * 2
    return tiny([0.0, 1.0, 0.0, 1.0], lp, lq, own=[False] * 4)


@pytest.mark.parametrize(
    ("less_likely", "kept"), [(9.0, True), (9.2, True), (9.25, False), (12.0, False)]
)
def test_ftis_filter_fires_at_one_token_in_200_ten_thousand_times_less_likely(
    less_likely: float, kept: bool
) -> None:
    # (e^9.2 - 1 - 9.2)/200 = 49.4 and (e^9.25 - 1 - 9.25)/200 = 52.0, around g = 50.
    got = run(objective("ftis"), one_unlikely_token(less_likely))
    assert got.output.keep_B.tolist() == [True, True, kept, True]
    assert (np.abs(got.gradient[2]).max() > 0) == kept
    assert np.abs(got.gradient[3]).max() > 0


@pytest.mark.parametrize("less_likely", [9.25, 12.0, 1000.0])
def test_k1_with_the_g_of_k3_never_fires(less_likely: float) -> None:
    assert run(
        objective("ftis", settings={"kl": "k1"}), one_unlikely_token(less_likely)
    ).output.keep_B.all()


def test_k1_with_its_own_g_fires() -> None:
    # One token of 10 at 12 nats: mean(-d) = 1.2.
    got = run(
        objective("ftis", settings={"kl": "k1", "g": 1.0}), one_unlikely_token(12.0, length=10)
    )
    assert got.output.keep_B.tolist() == [True, True, False, True]
    assert got.output.kl_B.tolist() == pytest.approx([0, 0, 1.2, 1.2])


def test_filter_drops_at_exactly_g_and_drops_zero_advantages() -> None:
    # -d = 1 for all; A: 0.5, -0.5, 0.
    case = tiny([1.0, 0.0, 0.5], lp=[[-2.0]] * 3, lq=[[-1.0]] * 3)
    assert run(
        objective("fnois", settings={"kl": "k1", "g": 1.0}), case
    ).output.keep_B.tolist() == [True, False, False]
    assert run(objective("fnois", settings={"kl": "k1", "g": 1.0001}), case).output.keep_B.all()


def test_uplift_learns_a_foreign_success_that_ftis_throws_away() -> None:
    # A foreign positive 1e-9 times as likely here: F-TIS weighs it 1e-9, uplift 1. The unlikely
    # negative weighs 1e-3 in both.
    case = tiny([1.0, 0.0], lp=[[log(1e-9)], [log(1e-3)]], lq=[[0.0], [0.0]], own=[False, False])
    uplift, ftis = (
        run(objective("uplift", settings={"g": inf}), case),
        run(objective("ftis", settings={"g": inf}), case),
    )
    assert uplift.output.weight_BT[:, 0].tolist() == pytest.approx([1.0, 1e-3], rel=1e-4)
    assert ftis.output.weight_BT[:, 0].tolist() == pytest.approx([1e-9, 1e-3], rel=1e-4)
    assert ftis.gradient[0] == pytest.approx(1e-9 * uplift.gradient[0], rel=1e-4)


# Numbers stay finite.


@pytest.mark.parametrize(("name", "variant"), cases_of(ROWS), ids=ROW_IDS)
def test_extreme_log_ratios_stay_finite(name: str, variant: str) -> None:
    case = tiny(
        [1.0, 0.0, 1.0, 0.0],
        lp=[[-500.0, -1.0], [-500.0, -1.0], [-1.0, -1.0], [-1.0, -1.0]],
        lq=[[-1.0, -1.0], [-1.0, -1.0], [-500.0, -1.0], [-500.0, -1.0]],
    )
    got = run(objective(name, variant, {"beta": 0.01}), case)
    assert np.isfinite(got.loss)
    assert np.isfinite(flat(got.gradient)).all()
    assert torch.isfinite(got.output.weight_BT).all()
    assert torch.isfinite(got.output.kl_B).all()


def test_exponent_is_bounded_above_only() -> None:
    value = bounded_exp(torch.tensor([100.0, 60.0, 59.0, 1.0, -100.0], dtype=torch.float64))
    assert value.tolist() == pytest.approx([exp(60), exp(60), exp(59), exp(1), exp(-100)])
    assert MAX_LOG_RATIO == 60
