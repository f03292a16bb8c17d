"""Values worked out by hand, on one pair of sequences.

    sequence 0: reward 1, q = (1/2, 1/2),      p = (3/4, 1/10),      rho = (1.5, 0.2)
    sequence 1: reward 0, q = (1/4, 1/4, 1/4), p = (1/8, 3/4, 1/4),  rho = (0.5, 3, 1)

Standardised advantages are +a and -a with a = 0.5 / (sqrt(0.5) + 1e-4) = 0.7070068; centred ones
are +0.5 and -0.5. There are 2 sequences of 2 and 3 tokens, 5 tokens in all; the sampling limit is
10; both end with an end token. KL_i (exp(-d) - 1 + d): tokens 0.072132, 2.390562 and 0.306853,
0.431946, 0; means 1.231347 and 0.246266.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import exp, inf, log, prod, sqrt

import pytest

from motley.objectives import objective

from .cases import flat, run, tiny

a = 0.5 / (sqrt(0.5) + 1e-4)

PAIR = tiny(
    [1.0, 0.0],
    lp=[[log(0.75), log(0.1)], [log(0.125), log(0.75), log(0.25)]],
    lq=[[log(0.5)] * 2, [log(0.25)] * 3],
    max_length=10,
)

GOLDEN = [
    # Value -(a - a)/2; gradient -A/(2·2) and -A/(2·3).
    ("alone", "", {}, 0.0, [-a / 4, -a / 4], [a / 6, a / 6, a / 6]),
    ("nois", "", {}, 0.0, [-a / 4, -a / 4], [a / 6, a / 6, a / 6]),
    # A > 0: min(1.5, 1.2) is clipped, min(0.2, 0.8) is not: mean 0.7. A < 0: max(0.5, 0.8) is
    # clipped, 3 and 1 are not: 4.8/3.
    ("grpo", "", {}, (1.6 - 0.7) * a / 2, [0, -0.2 * a / 4], [0, 3 * a / 6, a / 6]),
    # Weights (1.5, 0.2) and (0.5, 2, 1).
    (
        "tis",
        "",
        {},
        (3.5 / 3 - 0.85) * a / 2,
        [-1.5 * a / 4, -0.2 * a / 4],
        [0.5 * a / 6, 2 * a / 6, a / 6],
    ),
    (
        "ftis",
        "",
        {},
        (3.5 / 3 - 0.85) * a / 2,
        [-1.5 * a / 4, -0.2 * a / 4],
        [0.5 * a / 6, 2 * a / 6, a / 6],
    ),
    # KL_1 = 0.2463 >= g drops sequence 1, which stays in the denominator; KL_0 = 1.23 does not drop
    # a positive.
    ("ftis", "", {"g": 0.2}, -0.85 * a / 2, [-1.5 * a / 4, -0.2 * a / 4], [0, 0, 0]),
    ("fnois", "", {"g": 0.2}, -a / 2, [-a / 4, -a / 4], [0, 0, 0]),
    ("fvis", "", {"g": 0.2}, -0.7 * a / 2, [0, -0.2 * a / 4], [0, 0, 0]),
    # k1: mean(-d) = -(ln 0.5 + ln 3)/3 = -0.135 is under any positive g.
    ("fnois", "", {"g": 0.2, "kl": "k1"}, 0.0, [-a / 4, -a / 4], [a / 6, a / 6, a / 6]),
    # A = ±0.5, no end token: weights (1.5) and (0.5, 2); means 0.75 and -0.625 over two survivors
    # of one pair.
    ("ftis", "code", {}, -(0.75 - 0.625) / 2, [-0.75 / 2, 0], [0.25 / 4, 1.0 / 4, 0]),
    # KL_1 = (0.306853 + 0.431946)/2 = 0.3694 over the group's longest length, which is 2 without
    # its end token: one survivor.
    ("ftis", "code", {"g": 0.3}, -0.75, [-0.75, 0], [0, 0, 0]),
    # A = ±0.5, sum over tokens / (2·10).
    ("dr_grpo", "", {}, (4.8 - 1.4) * 0.5 / 20, [0, -0.1 / 20], [0, 1.5 / 20, 0.5 / 20]),
    # One group: variance 0, alpha = beta = 1, density 1, so A = ±0.5; sum over tokens / 5.
    ("bnpo", "", {}, (4.8 - 1.4) * 0.5 / 5, [0, -0.1 / 5], [0, 1.5 / 5, 0.5 / 5]),
    # s = sqrt(1.5·0.2) = 0.5477226 and (0.5·3·1)^(1/3) = 1.1447142, both unclipped on the side that
    # counts.
    (
        "gspo",
        "",
        {},
        (1.1447142 - 0.5477226) * a / 2,
        [-0.5477226 * a / 4] * 2,
        [1.1447142 * a / 6] * 3,
    ),
    # E = (0.25 + 0.0625)/0.75 = 0.4166667; geometric means of p are 0.2738613 and 0.2861786: w =
    # 0.6572671 and 0.6868285. A > 0 keeps w; A < 0 takes 0.8, without gradient.
    ("gepo", "", {}, (0.8 - 0.6572671) * 0.5 / 2, [-0.6572671 * 0.5 / 4] * 2, [0, 0, 0]),
    ("gepo", "code", {}, (0.8 - 0.6572671) * 0.5 / 2, [-0.6572671 * 0.5 / 4] * 2, [0, 0, 0]),
    # exp(d) - 1 - d: tokens 0.094535, 0.809438 and 0.193147, 0.901388, 0; means 0.4519865,
    # 0.364845. Gradient (rho - 1)/(2|a|).
    (
        "gepo",
        "",
        {"beta": 0.1},
        0.0356832 + 0.1 * (0.4519865 + 0.364845) / 2,
        [-0.0821584 + 0.1 * 0.5 / 4, -0.0821584 - 0.1 * 0.8 / 4],
        [-0.1 * 0.5 / 6, 0.1 * 2 / 6, 0],
    ),
    # The other direction: means 1.231347 and 0.246266; gradient (1 - 1/rho)/(2|a|).
    (
        "gepo",
        "code",
        {"beta": 0.1},
        0.0356832 + 0.1 * (1.231347 + 0.246266) / 2,
        [-0.0821584 + 0.1 / 3 / 4, -0.0821584 - 0.1 * 4 / 4],
        [-0.1 / 6, 0.1 * 2 / 3 / 6, 0],
    ),
    # Neither KL (1.231, 0.246) is under 0.002: as gepo. Under near = 0.3 sequence 1 takes its own
    # ratio, 1.1447142.
    ("gepo_plus", "", {}, 0.0356832, [-0.0821584] * 2, [0, 0, 0]),
    (
        "gepo_plus",
        "",
        {"near": 0.3},
        (1.1447142 - 0.6572671) * 0.5 / 2,
        [-0.0821584] * 2,
        [1.1447142 * 0.5 / 6] * 3,
    ),
    # 0.2738613/(0.995·0.5 + 0.005·0.2738613) = 0.5489641 and 0.2861786/(0.995·0.25 +
    # 0.005·0.2861786) = 1.1438867.
    (
        "ds_gspo",
        "",
        {},
        (1.1438867 - 0.5489641) * 0.5 / 2,
        [-0.5489641 * 0.5 / 4] * 2,
        [1.1438867 * 0.5 / 6] * 3,
    ),
    # rho·log p: 1.5 ln 0.75 + 0.2 ln 0.1 = -0.8920401; 0.5 ln 0.125 + 3 ln 0.75 + ln 0.25 =
    # -3.2890613; / 5 tokens.
    (
        "cispo",
        "",
        {},
        -(3.2890613 - 0.8920401) * a / 5,
        [-1.5 * a / 5, -0.2 * a / 5],
        [0.5 * a / 5, 3 * a / 5, a / 5],
    ),
    # With rho clipped at 1.2: 1.2 ln 0.75 + 0.2 ln 0.1 = -0.8057355; 0.5 ln 0.125 + 1.2 ln 0.75 +
    # ln 0.25 = -2.7712337.
    (
        "cispo",
        "",
        {"clip_high": 0.2},
        -(2.7712337 - 0.8057355) * a / 5,
        [-1.2 * a / 5, -0.2 * a / 5],
        [0.5 * a / 5, 1.2 * a / 5, a / 5],
    ),
    # Product of ratios of sequence 1 is 1.5, clipped to 1: log p of the sequences is ln 0.075 and
    # ln 0.0234375.
    ("topr", "", {}, (log(0.075) - log(0.0234375)) * -0.5 / 2, [-0.25] * 2, [0.25] * 3),
    ("topr", "filtered", {"g": 0.2}, log(0.075) * -0.5 / 2, [-0.25] * 2, [0, 0, 0]),
    # A > 0: sqrt(e^0.4·0.2) = 0.5462278, token 0 clipped. A < 0: (e^-0.4·3·1)^(1/3) = 1.2622178,
    # token 0 clipped.
    (
        "gmpo",
        "",
        {},
        (1.2622178 - 0.5462278) * a / 2,
        [0, -0.5462278 * a / 4],
        [0, 1.2622178 * a / 6, 1.2622178 * a / 6],
    ),
    # A > 0: weight 1. A < 0: (0.5, 1, 1).
    ("uplift", "", {}, (2.5 / 3 - 1) * a / 2, [-a / 4] * 2, [0.5 * a / 6, a / 6, a / 6]),
    ("uplift", "", {"g": 0.2}, -a / 2, [-a / 4] * 2, [0, 0, 0]),
    # A > 0: clamp(rho, 0.3, 2) = (1.5, 0.3).
    (
        "uplift",
        "floored",
        {},
        (2.5 / 3 - 0.9) * a / 2,
        [-1.5 * a / 4, -0.3 * a / 4],
        [0.5 * a / 6, a / 6, a / 6],
    ),
    ("sapo_swarm", "", {}, a / 5, [-a / 5] * 2, [a / 5] * 3),
    # grpo with rho up to 1.28, over 5 tokens: (1.28 + 0.2) a - (0.8 + 3 + 1) a.
    ("dapo", "", {}, (4.8 - 1.48) * a / 5, [0, -0.2 * a / 5], [0, 3 * a / 5, a / 5]),
    # With A < 0 rho counts as at most 2, and then has no gradient: 0.8 + 2 + 1.
    ("grpo", "", {"delta": 2.0}, (3.8 / 3 - 0.7) * a / 2, [0, -0.2 * a / 4], [0, 0, a / 6]),
    # One group, so its std is the batch's.
    ("grpo", "batch_std", {}, (1.6 - 0.7) * a / 2, [0, -0.2 * a / 4], [0, 3 * a / 6, a / 6]),
    # Weights (1.5, 0.2) and (0.5, 0, 1): 3 is above 2.5.
    (
        "tis",
        "token_mask",
        {"C": 2.5},
        (0.5 - 0.85) * a / 2,
        [-1.5 * a / 4, -0.2 * a / 4],
        [0.5 * a / 6, 0, a / 6],
    ),
    # Products 1.5·0.2 = 0.3 and 0.5·3·1 = 1.5.
    ("tis", "sequence", {}, 1.2 * a / 2, [-0.3 * a / 4] * 2, [1.5 * a / 6] * 3),
    ("tis", "sequence", {"C": 1.0}, 0.7 * a / 2, [-0.3 * a / 4] * 2, [a / 6] * 3),
    ("tis", "sequence_mask", {}, 1.2 * a / 2, [-0.3 * a / 4] * 2, [1.5 * a / 6] * 3),
    ("tis", "sequence_mask", {"C": 1.0}, -0.3 * a / 2, [-0.3 * a / 4] * 2, [0] * 3),
    ("tis", "trl", {}, 3.9 * a / 5, [-0.3 * a / 5] * 2, [1.5 * a / 5] * 3),
    # Sequence 0, tau = 1: sigmoid(0.5) = 0.6224593 and sigmoid(-0.8) = 0.3100255; 4 g (1 - g) rho =
    # 1.4100223 and 0.1711278. Sequence 1, tau = 1.05: sigmoid(-0.525) = 0.3716840, sigmoid(2.1) =
    # 0.8909032 and 1/2; 4 g (1 - g) rho = 0.4670699, 1.1663365 and 1.
    (
        "sapo",
        "",
        {},
        (4 / 1.05 * 1.7625870 / 3 - 4 * 0.9324848 / 2) * a / 2,
        [-1.4100223 * a / 4, -0.1711278 * a / 4],
        [0.4670699 * a / 6, 1.1663365 * a / 6, a / 6],
    ),
    # A = r - the other's: 1 and -1. Products 0.3 and 1.5, unclipped on the side that counts.
    ("rloo", "", {}, (1.5 - 0.3) / 2, [-0.15] * 2, [0.75] * 3),
    # 2 tokens of reward 1, 3 of 0: mean 0.4, variance 1.2/4 = 0.3: A = 1.0954451 and -0.7302967.
    (
        "reinforce_pp",
        "",
        {},
        (4.8 * 0.7302967 - 1.4 * 1.0954451) / 5,
        [0, -0.2 * 1.0954451 / 5],
        [0, 3 * 0.7302967 / 5, 0.7302967 / 5],
    ),
    # r - 1/2 is as far from its mean over tokens.
    (
        "reinforce_pp",
        "baseline",
        {},
        (4.8 * 0.7302967 - 1.4 * 1.0954451) / 5,
        [0, -0.2 * 1.0954451 / 5],
        [0, 3 * 0.7302967 / 5, 0.7302967 / 5],
    ),
    # p - q: 0.25 is above 0.2, -0.4 is not; with A < 0: -0.125, 0.5 and 0 are at least -0.2. A =
    # ±0.5: 0.1 - 2.25 without the squares, which are ln^2 of 1.5, 0.2, 0.5 and 3, 4.4422046 in all.
    (
        "dppo",
        "",
        {},
        (2.25 - 0.1 + 0.001 * 4.4422046) / 5,
        [0.002 * 0.4054651 / 5, (-0.1 - 0.002 * 1.6094379) / 5],
        [(0.25 - 0.002 * 0.6931472) / 5, (1.5 + 0.002 * 1.0986123) / 5, 0.1],
    ),
    ("dppo", "", {"mask_low": 0.1, "tau": 0.0}, (2 - 0.1) / 5, [0, -0.02], [0, 0.3, 0.1]),
    # Pushed out: rho 1.5 with A > 0 (ln^2 = 0.1644) and 0.5 with A < 0 (0.4805); none fits 0.04.
    ("m2po", "", {}, (4 - 0.2) * a / 5, [0, -0.2 * a / 5], [0, 3 * a / 5, a / 5]),
    # 0.1644 fits into 0.2, both have a mean of 0.3224
    ("m2po", "", {"budget": 0.2}, 2.3 * a / 5, [-0.3 * a, -0.2 * a / 5], [0, 3 * a / 5, a / 5]),
    ("m2po", "", {"budget": 0.33}, 2.8 * a / 5, [-0.3 * a, -0.2 * a / 5], [a / 10, 0.6 * a, a / 5]),
    ("vcpo", "", {}, 1.2 * a / 2, [-0.3 * a / 4] * 2, [1.5 * a / 6] * 3),
    # Own sequences, all as good as the receiver: gspo.
    (
        "hacpo",
        "",
        {},
        (1.1447142 - 0.5477226) * a / 2,
        [-0.5477226 * a / 4] * 2,
        [1.1447142 * a / 6] * 3,
    ),
]


@pytest.mark.parametrize(
    ("name", "variant", "settings", "loss", "gradient_0", "gradient_1"), GOLDEN
)
def test_value_and_gradient_worked_out_by_hand(
    name: str,
    variant: str,
    settings: dict,
    loss: float,
    gradient_0: list[float],
    gradient_1: list[float],
) -> None:
    got = run(objective(name, variant, settings), PAIR)
    assert got.loss == pytest.approx(loss, rel=2e-6, abs=2e-7)
    assert got.gradient[0] == pytest.approx(gradient_0, rel=2e-6, abs=2e-7)
    assert got.gradient[1] == pytest.approx(gradient_1, rel=2e-6, abs=2e-7)


def test_kl_is_measured_by_every_row_and_by_the_code_over_the_longest_length() -> None:
    assert run(objective("nois"), PAIR).output.kl_B.tolist() == pytest.approx(
        [1.231347, 0.246266], abs=1e-6
    )
    assert run(objective("ftis"), PAIR).output.kl_B.tolist() == pytest.approx(
        [1.231347, 0.246266], abs=1e-6
    )
    # Without end tokens (0.072132)/2 and (0.306853 + 0.431946)/2.
    assert run(objective("ftis", "code"), PAIR).output.kl_B.tolist() == pytest.approx(
        [0.036066, 0.369400], abs=1e-6
    )
    # mean(-d): -(ln 1.5 + ln 0.2)/2 and -(ln 0.5 + ln 3)/3.
    k1 = run(objective("ftis", settings={"kl": "k1"}), PAIR).output.kl_B.tolist()
    assert k1 == pytest.approx([0.601986, -0.135155], abs=1e-6)


def test_topr_weighs_negatives_by_the_product_of_their_ratios() -> None:
    # rho = (0.5, 0.8): the product is 0.4, not a mean. A = ±0.5, B = 2: gradient 0.4·0.5/2.
    case = tiny([1.0, 0.0], lp=[[-1.0], [log(0.25), log(0.4)]], lq=[[-1.5], [log(0.5), log(0.5)]])
    got = run(objective("topr"), case)
    assert got.gradient[0] == pytest.approx([-0.25])
    assert got.gradient[1] == pytest.approx([0.1, 0.1])
    assert got.output.weight_BT[1].tolist() == pytest.approx([0.4, 0.4])


def test_sapo_swarm_leaves_silent_groups_out_of_the_denominator() -> None:
    # The pair's 5 tokens count; the 4 tokens of two equal rewards do not.
    case = tiny(
        [1.0, 0.0, 1.0, 1.0],
        lp=[[-1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0], [-1.0, -1.0, -1.0]],
        lq=[[-1.0, -1.0], [-1.0, -1.0, -1.0], [-1.0], [-1.0, -1.0, -1.0]],
        group=[0, 0, 1, 1],
    )
    assert run(objective("sapo_swarm"), case).gradient[0] == pytest.approx([-a / 5] * 2)
    assert run(objective("sapo_swarm"), case).terms.num_sequences == 2
    # bnpo's token mean counts all nine; group means are 1/2 and 1: see test_advantages for the
    # factor.
    assert run(objective("bnpo"), case).terms.num_tokens == 9


def test_sapo_swarm_counts_groups_whose_rewards_hardly_differ() -> None:
    # std = 1e-5/sqrt(2): |A| = 5e-6/(1e-4 + 7e-6) = 0.047 each.
    case = tiny([0.5, 0.50001, 1.0], lp=[[-1.0]] * 3, lq=[[-1.0]] * 3, group=[0, 0, 1])
    assert run(objective("sapo_swarm"), case).terms.num_sequences == 2


def test_sapo_swarm_of_silent_groups_only_is_zero_not_nan() -> None:
    case = tiny([1.0, 1.0], lp=[[-1.0], [-2.0]], lq=[[-1.5], [-1.0]])
    got = run(objective("sapo_swarm"), case)
    assert (got.loss, got.terms.num_sequences, got.terms.num_tokens) == (0.0, 0, 0)


def test_ftis_code_averages_survivors_within_each_pair_then_pairs() -> None:
    # Five sequences of one group: pairs (0,1), (2,3), (4). A = r - 0.4 = .6, -.4, -.4, -.4, .6. One
    # token each, not ended. KL of log ratio -2 is e^2 - 3 = 4.389 >= g = 4: drops sequence 1 and 2;
    # sequence 4 is positive and stays.
    case = tiny(
        [1.0, 0.0, 0.0, 0.0, 1.0],
        lp=[[-1.0], [-3.0], [-3.0], [-1.0], [-3.0]],
        lq=[[-1.0]] * 5,
        ended=[False] * 5,
    )
    got = run(objective("ftis", "code", {"g": 4.0}), case)
    w = 0.1353353  # exp(-2)
    assert got.output.keep_B.tolist() == [True, False, False, True, True]
    assert got.loss == pytest.approx(-(0.6 - 0.4 + 0.6 * w) / 3, rel=1e-5)
    assert [float(g[0]) for g in got.gradient] == pytest.approx(
        [-0.2, 0, 0, 0.4 / 3, -0.6 * w / 3], rel=1e-5
    )


def test_penalty_of_sapo_swarm_is_a_mean_over_the_tokens_it_sums() -> None:
    # A speaking pair of 1 and 2 tokens with d = ln 2, exp(d) - 1 - d = 0.3068528; a silent pair of
    # 2 and 3 tokens with d = 0. The mean over all 8 tokens, silent ones too.
    lq = [[log(0.25)], [log(0.25)] * 2, [log(0.5)] * 2, [log(0.5)] * 3]
    lp = [[log(0.5)] * len(row) for row in lq]
    case = tiny([1.0, 0.0, 1.0, 1.0], lp=lp, lq=lq, group=[0, 0, 1, 1])
    plain = run(objective("sapo_swarm"), case)
    got = run(objective("sapo_swarm", settings={"beta": 1.0}), case)
    assert got.loss - plain.loss == pytest.approx(3 * (1 - log(2)) / 8, rel=1e-5)


# What a token of either sequence of the pair counts: they have 2 and 3 tokens, the limit is 10.
OVER = [
    ("grpo", "", [1 / 4, 1 / 6]),  # 1/(B |a|)
    ("gspo", "", [1 / 4, 1 / 6]),
    ("topr", "", [1 / 2, 1 / 2]),  # 1/B
    ("dr_grpo", "", [1 / 20, 1 / 20]),  # 1/(B max_len)
    ("bnpo", "", [1 / 5, 1 / 5]),  # 1/tokens
    ("cispo", "", [1 / 5, 1 / 5]),
    ("sapo_swarm", "", [1 / 5, 1 / 5]),
    ("ftis", "code", [1 / 2, 1 / 4]),  # one pair; 1 and 2 tokens without the end
]


@pytest.mark.parametrize(("name", "variant", "share"), OVER)
def test_penalty_is_reduced_as_its_row_is(name: str, variant: str, share: list[float]) -> None:
    # toward the sampler: the gradient of a token is its share times rho - 1
    plain = run(objective(name, variant), PAIR)
    got = run(objective(name, variant, {"beta": 0.1}), PAIR)
    rho = [[1.5, 0.2], [0.5, 3.0, 1.0]]
    for i, ratios in enumerate(rho):
        added = [0.1 * share[i] * (r - 1) for r in ratios]
        if variant == "code":
            added[-1] = 0.0
        assert got.gradient[i] - plain.gradient[i] == pytest.approx(added, abs=2e-7)
    value = [[r - 1 - log(r) for r in ratios] for ratios in rho]
    if variant == "code":
        value = [tokens[:-1] for tokens in value]
    total = sum(share[i] * sum(tokens) for i, tokens in enumerate(value))
    assert got.loss - plain.loss == pytest.approx(0.1 * total, rel=1e-5)


def test_penalty_toward_the_reference_by_hand() -> None:
    # p = 1/2, reference 1/4 and 1: x = -ln 2 and ln 2, exp(x) - 1 - x = 0.1931472 and 0.3068528,
    # gradient (1 - exp(x))/2 = 1/4 and -1/2. q = 1/2 says nothing.
    half = [[log(0.5)], [log(0.5)]]
    case = tiny([1.0, 1.0], lp=half, lq=half, ref=[[log(0.25)], [0.0]])
    settings = {"beta": 1.0, "toward": "reference"}
    got = run(objective("grpo", settings=settings), case)
    assert got.loss == pytest.approx((0.1931472 + 0.3068528) / 2, rel=1e-5)
    assert flat(got.gradient) == pytest.approx([0.25, -0.5], rel=1e-5)


def test_penalty_toward_a_reference_that_finds_a_token_impossible_is_a_number() -> None:
    # its log-prob counts as -10000: exp(x) - 1 - x = 10000 + ln p - 1, gradient 1
    case = tiny([1.0], lp=[[-2.0]], lq=[[-2.0]], ref=[[-inf]])
    got = run(objective("grpo", settings={"beta": 1.0, "toward": "reference"}), case)
    assert got.loss == pytest.approx(10000 - 2 - 1)
    assert got.gradient[0] == pytest.approx([1.0])


def test_penalty_of_a_row_that_skips_the_silent_is_a_mean_over_all_sequences() -> None:
    # two that speak and one that does not, each with d = ln 2: a third of 3 (1 - ln 2), not a half
    half, quarter = [[log(0.5)]] * 3, [[log(0.25)]] * 3
    case = tiny([1.0, 0.0, 1.0], lp=half, lq=quarter, group=[0, 0, 1])
    row = replace(objective("nois"), skip_silent=True)
    plain, got = run(row, case), run(row.with_settings({"beta": 1.0}), case)
    assert got.loss - plain.loss == pytest.approx(1 - log(2), rel=1e-5)


def test_penalty_of_a_span_counts_once_toward_its_sampler_and_by_token_toward_the_reference() -> (
    None
):
    # p = 1/2 and q = 1/4 for the span of two tokens: d = ln 2, over two tokens; the reference is
    # ln 2 below at each of them, exp(x) - 1 - x = ln 2 - 1/2
    share = log(0.5) / 2
    case = tiny([1.0], [[share] * 2], [[log(0.25) / 2] * 2], ref=[[share - log(2)] * 2])
    case = replace(case, spans=[[2]], open=[False])
    for toward, expected in (("sampler", (1 - log(2)) / 2), ("reference", log(2) - 0.5)):
        row = objective("nois", settings={"beta": 1.0, "toward": toward})
        assert run(row, case).loss == pytest.approx(expected, rel=1e-5)


def test_penalty_times_the_ratio_by_hand() -> None:
    # The same with q = 1/4, so rho = 2, which has a gradient too:
    # d/dlog p of rho k3 = rho (k3 + 1 - exp(x)).
    half, quarter = [[log(0.5)]] * 2, [[log(0.25)]] * 2
    case = tiny([1.0, 1.0], lp=half, lq=quarter, ref=[[log(0.25)], [0.0]])
    settings = {"beta": 1.0, "toward": "reference", "beta_times": "ratio"}
    got = run(objective("nois", settings=settings), case)
    assert got.loss == pytest.approx(0.1931472 + 0.3068528, rel=1e-5)
    assert flat(got.gradient) == pytest.approx([0.1931472 + 0.5, 0.3068528 - 1], rel=1e-5)


EXACT_P, EXACT_Q, EXACT_REF = (0.5, 0.3, 0.2), (0.2, 0.2, 0.6), (0.3, 0.6, 0.1)


def expected_penalty(name: str, toward: str, times: str, length: int) -> float:
    """Over all answers of some tokens that q may sample."""
    row = objective(name, settings={"beta": 1.0, "toward": toward, "beta_times": times})
    total = 0.0
    for answer in product(range(3), repeat=length):
        logs = [[[log(of[token]) for token in answer]] * 2 for of in (EXACT_P, EXACT_Q, EXACT_REF)]
        same = tiny([1.0, 1.0], lp=logs[0], lq=logs[1], ref=logs[2])  # A = 0: the penalty is all
        total += prod(EXACT_Q[token] for token in answer) * run(row, same).loss
    return total


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * log(a / b) for a, b in zip(p, q, strict=True))


def test_what_a_penalty_is_unbiased_for_depends_on_the_ratio() -> None:
    p, q, ref = EXACT_P, EXACT_Q, EXACT_REF
    is_unbiased = [
        ("grpo", "sampler", "one", kl(q, p)),
        ("grpo", "reference", "ratio", kl(p, ref)),
        ("grpo", "code", "ratio", kl(p, q)),
        ("rloo", "reference", "ratio", kl(p, ref)),
        ("rloo", "code", "ratio", kl(p, q)),
    ]
    for name, toward, times, expected in is_unbiased:
        assert expected_penalty(name, toward, times, 2) == pytest.approx(expected, rel=1e-5)
    for name, toward, expected in [
        ("grpo", "sampler", kl(q, p)),
        ("gspo", "reference", kl(p, ref)),
        ("gspo", "code", kl(p, q)),
    ]:
        assert expected_penalty(name, toward, "ratio", 2) != pytest.approx(expected, rel=0.02)
    # of one token s is the token's ratio
    assert expected_penalty("gspo", "reference", "ratio", 1) == pytest.approx(kl(p, ref), rel=1e-5)


def test_a_penalty_toward_the_reference_has_no_meaning_without_its_log_probs() -> None:
    row = objective("grpo", settings={"beta": 1.0, "toward": "reference"})
    with pytest.raises(AssertionError, match=r"^a penalty toward the reference needs its log-prob"):
        run(row, PAIR)


def test_a_sequence_that_the_filter_drops_still_pays_its_penalty() -> None:
    # KL of log ratio -2 is e^2 - 3 = 4.389 >= g = 4: the filter drops the failure. Its gradient is
    # that of the penalty alone, (exp(d) - 1)/2. The penalty of both is (e^-2 + 1)/2.
    case = tiny([1.0, 0.0], lp=[[-1.0], [-3.0]], lq=[[-1.0], [-1.0]])
    plain = run(objective("fnois", settings={"g": 4.0}), case)
    got = run(objective("fnois", settings={"g": 4.0, "beta": 1.0}), case)
    assert got.output.keep_B.tolist() == [True, False]
    assert plain.gradient[1] == pytest.approx([0.0])
    assert got.gradient[1] == pytest.approx([(exp(-2) - 1) / 2], rel=1e-5)
    assert got.loss - plain.loss == pytest.approx((exp(-2) + 1) / 2, rel=1e-5)


def test_hacpo_of_a_foreign_pair_by_hand() -> None:
    # A sender twice as good: the baseline is mean(r/2) = 1/4, so A = 2·(3/4, -1/4)/(sqrt(1/2)). The
    # success has s = 0.5477226, inside 0.2..1: it weighs s^2. The failure has s = 1.1447142, not
    # in it: its value counts as at 1, without gradient.
    case = replace(PAIR, own=[False, False], skill=[2.0, 2.0])
    got = run(objective("hacpo"), case)
    unit = 1 / (sqrt(0.5) + 1e-4)
    assert got.terms.advantage_B.tolist() == pytest.approx([1.5 * unit, -0.5 * unit], rel=1e-6)
    assert got.loss == pytest.approx(-(0.3 * 1.5 - 0.5) * unit / 2, rel=1e-5)
    assert got.gradient[0] == pytest.approx([-0.3 * 1.5 * unit / 4] * 2, rel=1e-5)
    assert got.gradient[1] == pytest.approx([0, 0, 0])
    # alpha = 3: s^4 = 0.09; a clip of 0.4 leaves 0.6..1, which s is not in
    assert run(objective("hacpo", settings={"alpha": 3.0}), case).gradient[0] == pytest.approx(
        [-0.09 * 1.5 * unit / 4] * 2, rel=1e-5
    )
    assert run(objective("hacpo", settings={"cross_clip": 0.4}), case).gradient[0].tolist() == [
        0,
        0,
    ]
