"""What a stranger reports, and what a learner finds impossible, stays bounded in every row."""

from __future__ import annotations

from itertools import product
from math import inf, log

import numpy as np
import pytest
import torch

from motley.objectives import VARIANTS, objective

from .cases import ROWS, Case, batch_of, flat, make_case, run, samples_of, tiny

BOUNDED = [row for row in ROWS if row[1] != "published"]
LEAST_REPORTED = -42.0  # about -(ln V + 30), the least that admission lets through
MOST_WEIGHT = 8.0  # vcpo's; cispo's is 5, the others' are at most 3


def hostile_case(own: bool = False) -> Case:
    """A group per pair of a learner's and a sampler's log-prob: a success and a failure with one
    such token between ordinary ones.
    """
    lp, lq = [], []
    for ours, theirs in product((-inf, -3e38, -500.0, -1.0, 0.0), (LEAST_REPORTED, -1.0, 1e-3)):
        lp += [[-1.0, ours, -1.0]] * 2
        lq += [[-1.0, theirs, -1.0]] * 2
    num = len(lp)
    return tiny(
        [1.0, 0.0] * (num // 2),
        lp,
        lq,
        group=[i // 2 for i in range(num)],
        own=[own] * num,
        ended=[False] * num,
    )


@pytest.mark.parametrize("times", ["one", "ratio"])
@pytest.mark.parametrize("beta", [0.0, 0.01])
@pytest.mark.parametrize(("name", "variant"), BOUNDED)
def test_whatever_a_stranger_reports_its_weight_is_bounded(
    name: str, variant: str, beta: float, times: str
) -> None:
    case = hostile_case()
    got = run(objective(name, variant, {"beta": beta, "beta_times": times}), case)
    assert np.isfinite(got.loss)
    assert np.isfinite(flat(got.gradient)).all()
    assert torch.isfinite(got.output.kl_B).all()
    assert float(got.output.weight_BT.max()) <= MOST_WEIGHT
    # of one token: its weight times A, and what a penalty adds, over at least one sequence; times
    # a ratio of 3 that is 3 (3 - 1) and 3 (3 - 1 - log 3)
    most = MOST_WEIGHT * float(got.terms.advantage_B.abs().max())
    most += beta * (3 if times == "one" else 9)
    assert np.abs(flat(got.gradient)).max() <= most


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_own_sequences_that_the_learner_now_finds_impossible_give_numbers(
    name: str, variant: str
) -> None:
    got = run(objective(name, variant), hostile_case(own=True))
    assert np.isfinite(got.loss)
    assert np.isfinite(flat(got.gradient)).all()


@pytest.mark.parametrize("name", [name for name, variant in ROWS if variant == "published"])
def test_a_strangers_failure_counts_at_most_three_times_unless_the_row_is_as_published(
    name: str,
) -> None:
    # a ratio of e^2, nearly 7, and one of e
    case = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-3.0], [-3.0]], own=[False, False])
    for variant, bounded in (("", True), ("published", False)):
        got = run(objective(name, variant), case)
        assert (np.abs(got.gradient[1]).max() == 0) == bounded
    near = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-2.0], [-2.0]], own=[False, False])
    assert np.abs(run(objective(name), near).gradient[1]).max() > 0
    own = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-3.0], [-3.0]], own=[True, True])
    assert run(objective(name), own).gradient[1] == pytest.approx(
        run(objective(name, "published"), own).gradient[1]
    )


def test_the_dual_clip_keeps_the_value_at_three_times_the_advantage() -> None:
    case = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-1.0], [-9.0]], own=[False, False])
    advantage = 0.5 / (0.5**0.5 + 1e-4)
    assert run(objective("grpo"), case).loss == pytest.approx(
        -(advantage - 3 * advantage) / 2, rel=1e-5
    )


@pytest.mark.parametrize("name", [name for name, variant in ROWS if variant == "published"])
def test_delta_bounds_everybodys_failures_and_nothing_else(name: str) -> None:
    # ratios of e^2: with A < 0 that is past delta = 2, for own sequences too
    case = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-3.0], [-3.0]], own=[True, True])
    got, plain = run(objective(name, settings={"delta": 2.0}), case), run(objective(name), case)
    assert got.gradient[1].tolist() == [0]
    assert plain.gradient[1][0] != 0
    assert got.gradient[0] == pytest.approx(plain.gradient[0])
    near = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-1.5], [-1.5]], own=[True, False])
    got, plain = run(objective(name, settings={"delta": 2.0}), near), run(objective(name), near)
    assert flat(got.gradient).tolist() == flat(plain.gradient).tolist()


@pytest.mark.parametrize("name", ["dppo", "m2po"])
def test_a_stranger_gains_nothing_by_a_ratio_without_bound(name: str) -> None:
    """Rows in which a positive's ratio has no upper bound either."""
    # p = 0.1 and q = e^-42: p - q is small
    lp, lq = [[log(0.1)]] * 4, [[LEAST_REPORTED]] * 4
    settings = {"m2po": {"budget": 1e6}, "dppo": {"tau": 0.0}}[name]
    for own in (True, False):
        case = tiny([1.0, 1.0, 0.0, 0.0], lp, lq, own=[own] * 4)
        got = run(objective(name, settings=settings), case)
        assert (np.abs(flat(got.gradient)).max() > 1e6) == own
        assert (np.abs(flat(got.gradient)).max() == 0) == (not own)


def test_a_strangers_squared_log_ratio_pulls_no_harder_than_at_its_bound() -> None:
    for ours, theirs in ((-40.0, -1.0), (-1.0, -40.0)):
        for own in (True, False):
            case = tiny([1.0, 0.0], [[ours]] * 2, [[theirs]] * 2, own=[own] * 2)
            settings = {"tau": 1.0, "mask_low": 0.0, "mask_high": 0.0, "dual_clip": 3.0}
            got, without = (
                run(objective("dppo", settings=settings | {"tau": tau}), case) for tau in (1.0, 0.0)
            )
            pull = np.abs(flat(got.gradient) - flat(without.gradient)).max()
            assert pull == (pytest.approx(39, rel=1e-3) if own else 0)


@pytest.mark.parametrize("reported", [LEAST_REPORTED, 1e-3])
@pytest.mark.parametrize("name", ["gspo", "gepo", "gepo_plus", "ds_gspo"])
def test_what_one_author_of_a_group_reports_does_not_blow_up_the_others(
    name: str, reported: float
) -> None:
    # four honest sequences, p = q, and four of whoever reports what it likes
    lp = [[-1.0, -1.2], [-0.4, -0.8], [-2.0, -0.5], [-1.5, -1.0]]
    case = tiny(
        [1.0, 0.0, 1.0, 0.0] * 2,
        lp=lp * 2,
        lq=[*lp, *[[reported, reported]] * 4],
        own=[True, True] + [False] * 6,
    )
    weight_BT = run(objective(name), case).output.weight_BT
    assert float(weight_BT[:4].max()) <= 3.0


@pytest.mark.parametrize("impossible", [-inf, -3e38])
@pytest.mark.parametrize("kl", ["k3", "k1"])
@pytest.mark.parametrize("name", ["ftis", "fnois", "fvis", "uplift"])
def test_a_failure_that_the_learner_finds_impossible_is_dropped(
    name: str, kl: str, impossible: float
) -> None:
    lp = [[-1.0, impossible], [-1.0, impossible]]
    case = tiny([1.0, 0.0], lp, [[-1.0, -1.0]] * 2, own=[False, False])
    got = run(objective(name, settings={"kl": kl}), case)
    assert got.output.keep_B.tolist() == [True, False]
    assert float(got.output.kl_B.min()) > 50
    assert torch.isfinite(got.output.kl_B).all()
    assert np.isfinite(got.gradient[0]).all()
    assert got.gradient[1].tolist() == [0, 0]


def test_what_the_learner_finds_impossible_counts_as_e_to_the_minus_ten_thousand() -> None:
    case = tiny([1.0, 0.0], [[-1.0, -inf]] * 2, [[-1.0, -1.0]] * 2)
    kl_B = run(objective("ftis", settings={"kl": "k1"}), case).output.kl_B
    assert kl_B.tolist() == [9999 / 2] * 2


def test_a_log_prob_that_is_no_number_is_not_hidden() -> None:
    case = tiny([1.0, 0.0], [[float("nan")], [-1.0]], [[-1.0]] * 2)
    assert np.isnan(run(objective("nois"), case).loss)


@pytest.mark.parametrize("toward", ["sampler", "code", "reference"])
def test_the_penalty_of_a_stranger_has_no_gradient_beyond_its_bound(toward: str) -> None:
    far = -40.0 if toward == "sampler" else -1.0
    ours = -1.0 if toward == "sampler" else -40.0
    for own in (True, False):
        case = tiny([1.0, 1.0], [[ours]] * 2, [[far]] * 2, own=[own] * 2, ref=[[-1.0]] * 2)
        got = run(objective("nois", settings={"beta": 0.1, "toward": toward}), case)
        assert (np.abs(flat(got.gradient)).max() > 1e3) == own
    near = tiny([1.0, 1.0], [[-1.5]] * 2, [[-1.0]] * 2, own=[False] * 2)
    assert np.abs(run(objective("nois", settings={"beta": 0.1}), near).gradient[0]).max() > 0


# Tokens that are not to be made likelier.


def every_other(case: Case) -> torch.Tensor:
    return (torch.arange(max(case.lengths)) % 2 == 0).expand(len(case), -1)


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_a_withheld_token_is_not_pushed_up_and_nothing_else_changes(
    name: str, variant: str
) -> None:
    case = make_case("apart", 4)
    row = objective(name, variant)
    plain, got = run(row, case), run(row, case, withheld=every_other(case))
    held = 0
    for i, gradient in enumerate(got.gradient):
        expected = plain.gradient[i].copy()
        if float(got.terms.advantage_B[i]) > 0:
            held += int((expected[::2] != 0).sum())
            expected[::2] = 0
            assert not got.output.weight_BT[i, : case.lengths[i] : 2].any()
        else:
            assert torch.equal(got.output.weight_BT[i], plain.output.weight_BT[i])
        np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-9)
    assert held >= 1


def test_a_penalty_does_not_push_a_withheld_token_up_either() -> None:
    case = tiny([1.0, 1.0], [[-3.0, -3.0]] * 2, [[-1.0, -1.0]] * 2, own=[False] * 2)
    got = run(objective("nois", settings={"beta": 0.1}), case, withheld=every_other(case))
    assert [g.tolist()[0] for g in got.gradient] == [0, 0]
    assert max(g[1] for g in got.gradient) < 0  # the other token is


def test_withholding_nothing_changes_no_bit() -> None:
    case = make_case("far", 5)
    none = torch.zeros(len(case), max(case.lengths), dtype=torch.bool)
    row = objective("uplift")
    plain, got = run(row, case), run(row, case, withheld=none)
    assert plain.loss == got.loss
    assert flat(plain.gradient).tolist() == flat(got.gradient).tolist()


# The gate.


@pytest.mark.parametrize(
    ("success", "floor"),
    [(-1.0, 1.0), (0.0, 1.0), (0.5, 0.25), (0.9, 0.01), (1.0, 0.0), (2.0, 0.0)],
)
def test_the_gate_lets_foreign_successes_in_as_far_as_the_receiver_fails(
    success: float, floor: float
) -> None:
    ratios = [2.0, 0.5, 0.1, 1e-6]
    case = tiny(
        [1.0, 1.0, 0.0],
        lp=[[log(0.25 * x) for x in ratios]] * 3,
        lq=[[log(0.25)] * 4] * 3,
        own=[False, True, False],
        success=success,
    )
    row = objective("uplift", settings={"gate": 2.0, "g": inf})
    weight_BT = run(row, case).output.weight_BT
    expected = [max(min(x, 1.0), floor) for x in ratios]
    assert weight_BT[0].tolist() == pytest.approx(expected, rel=1e-4)
    assert weight_BT[1].tolist() == [1, 1, 1, 1]
    assert weight_BT[2].tolist() == pytest.approx([min(x, 1.0) for x in ratios], rel=1e-4)


def test_a_foreign_success_counts_as_far_as_its_sender_was_sure() -> None:
    ratios, q = [0.5, 0.1, 1e-6], [0.9, 0.5, 0.01]
    case = tiny(
        [1.0, 1.0, 0.0],
        lp=[[log(x * y) for x, y in zip(ratios, q, strict=True)]] * 3,
        lq=[[log(x) for x in q]] * 3,
        own=[False, True, False],
    )
    for sure, floor in ((1.0, q), (0.5, [x**0.5 for x in q]), (8.0, [0.5, 0.1, 1e-6])):
        row = objective("uplift", settings={"g": inf, "sure": sure})
        weight_BT = run(row, case).output.weight_BT
        assert weight_BT[0].tolist() == pytest.approx(floor, rel=1e-4)
        assert weight_BT[1].tolist() == [1, 1, 1]  # own ones are as they were
        assert weight_BT[2].tolist() == pytest.approx(ratios, rel=1e-4)  # and so are failures


# LUFFY's shaping.


def test_shaping_weighs_foreign_successes_by_how_likely_they_are() -> None:
    p = [0.5, 0.1, 1e-6]
    case = tiny(
        [1.0, 1.0, 0.0],
        lp=[[log(x) for x in p]] * 3,
        lq=[[log(0.5)] * 3] * 3,
        own=[False, True, False],
    )
    weight_BT = run(objective("uplift", "shaped", {"g": inf}), case).output.weight_BT
    shaped = [0.1 * x / (x + 0.1) ** 2 for x in p]
    assert shaped[1] == pytest.approx(0.25)
    assert weight_BT[0].tolist() == pytest.approx(shaped, rel=1e-5)
    assert weight_BT[1].tolist() == [1, 1, 1]
    assert weight_BT[2].tolist() == pytest.approx([1, 0.2, 2e-6], rel=1e-5)


SHAPED = {"": "shaped", "relative": "relative_shaped"}
SHAPED["relative_rehearsed"] = "relative_rehearsed_shaped"


@pytest.mark.parametrize("variant", ["", *VARIANTS["uplift"]])
def test_shaping_composes_with_every_variant_of_uplift(variant: str) -> None:
    """It changes the weight of foreign positives and nothing else, and no advantage."""
    case = make_case("apart", 4)
    plain = run(objective("uplift", variant, {"gamma": 0.0}), case)
    row = objective("uplift", variant, {"gamma": 0.1})
    got = run(row, case)
    assert got.terms.advantage_B.tolist() == plain.terms.advantage_B.tolist()
    shaped = 0
    for i, own in enumerate(case.own):
        expected = plain.output.weight_BT[i, : case.lengths[i]].numpy()
        if not own and float(got.terms.advantage_B[i]) > 0:
            p = np.exp(case.lp[i])
            expected, shaped = 0.1 * p / (p + 0.1) ** 2, shaped + 1
        weight = got.output.weight_BT[i, : case.lengths[i]].numpy()
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
    assert shaped > 1
    if variant in SHAPED:
        assert row == objective("uplift", SHAPED[variant])


def test_a_group_is_paired_by_author() -> None:
    case = tiny([1.0, 0.0, 1.0, 0.0], [[-1.0]] * 4, [[-1.0]] * 4)
    samples = samples_of(case)
    row = objective("ftis", "code")
    assert row.prepare(samples).pair_B.tolist() == [0, 0, 1, 1]
    samples.sender_B.copy_(torch.tensor([0, 1, 1, 1]))
    assert row.prepare(samples).pair_B.tolist() == [0, 1, 1, 2]
    assert batch_of(case, row.prepare(samples)).terms.num_pairs == 3
