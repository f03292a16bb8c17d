"""Advantages and the remedies that adjust them, by hand and against scipy; and what else the whole
batch decides.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import log, sqrt
from typing import Literal

import numpy as np
import pytest
import torch
from scipy import stats

from motley.objectives import Samples, Terms, objective
from motley.objectives.advantages import (
    BatchStandardised,
    BetaNormalised,
    BothBaselines,
    CapabilityAware,
    Centred,
    ForeignCap,
    LeaveOneOut,
    ReceiverRelative,
    Rehearsal,
    Standardised,
    Whitened,
)
from motley.objectives.beside import kept_of, rescue_of

from .cases import Case, batch_of, run, samples_of, tiny


def samples(
    reward: list[float],
    group: list[int],
    own: list[bool] | None = None,
    success: float | list[float] = 0.0,
    skill: list[float] | None = None,
) -> Samples:
    num = len(reward)
    return Samples(
        reward_B=torch.tensor(reward),
        group_B=torch.tensor(group),
        sender_B=torch.zeros(num, dtype=torch.int64),
        own_B=torch.tensor(own if own is not None else [True] * num),
        stranger_B=~torch.tensor(own if own is not None else [True] * num),
        success_B=torch.tensor(success if isinstance(success, list) else [success] * num),
        skill_B=torch.tensor(skill if skill is not None else [1.0] * num),
        length_B=torch.full((num,), 3),
        ended_B=torch.ones(num, dtype=torch.bool),
        logq_mean_B=torch.full((num,), -1.0),
        max_length=8,
    )


# Plain advantages.


def test_centred_by_hand() -> None:
    # Means 2/4, 3 and 0.5.
    got = Centred()(samples([1.0, 0.0, 0.0, 1.0, 3.0, 0.25, 0.75], [0, 0, 0, 0, 1, 2, 2]))
    assert got.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, 0.0, -0.25, 0.25])


def test_standardised_by_hand() -> None:
    # Group 0: mean 0.25, unbiased variance (0.75^2 + 3·0.25^2)/3 = 0.25, std 0.5. Group 1 is alone.
    # Group 2: std sqrt(0.125).
    got = Standardised()(samples([1.0, 0.0, 0.0, 0.0, 7.0, 0.25, 0.75], [0, 0, 0, 0, 1, 2, 2]))
    wide, narrow = 0.5 + 1e-4, sqrt(0.125) + 1e-4
    expected = [0.75 / wide, *[-0.25 / wide] * 3, 0.0, -0.25 / narrow, 0.25 / narrow]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_beta_normalised_against_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups, size = 8, 6
    reward_PG = (rng.random((num_groups, size)) < rng.beta(2.0, 3.0, num_groups)[:, None]).astype(
        float
    )
    mean_P = reward_PG.mean(1)
    mu, v = mean_P.mean(), mean_P.var(ddof=1)
    k = mu * (1 - mu) / v - 1
    alpha, beta = max(1.0, 1 + k * mu / 3), max(1.0, 1 + k * (1 - mu) / 3)
    assert alpha > 1
    assert beta > 1
    density_P = stats.beta.pdf(mean_P, alpha, beta)
    factor_P = np.minimum(1e6, 1 / np.maximum(density_P, 1e-12))
    expected_PG = (reward_PG - mean_P[:, None]) * factor_P[:, None]
    group = np.repeat(np.arange(num_groups), size).tolist()
    got = BetaNormalised()(samples(reward_PG.ravel().tolist(), group))
    np.testing.assert_allclose(got.numpy(), expected_PG.ravel(), rtol=1e-9)


def test_beta_normalised_of_equal_means_is_centred() -> None:
    # Variance 0: alpha = beta = 1, a flat density.
    got = BetaNormalised()(samples([1.0, 0.0, 0.0, 1.0], [0, 0, 1, 1]))
    assert got.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])


def test_beta_normalised_of_two_groups_by_hand() -> None:
    # Means 1/4 and 3/4: mu = 1/2, v = 1/8, k = 1, alpha = beta = 1 + 1/6.
    got = BetaNormalised()(samples([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0], [0] * 4 + [1] * 4))
    factor = 1 / stats.beta.pdf(0.25, 7 / 6, 7 / 6)
    expected = [0.75 * factor, *[-0.25 * factor] * 3, *[0.25 * factor] * 3, -0.75 * factor]
    assert got.tolist() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("num_groups", [9, 11, 18, 25])
def test_beta_normalised_of_equal_means_that_round_is_centred(num_groups: int) -> None:
    group = [p for p in range(num_groups) for _ in range(3)]
    got = BetaNormalised()(samples([1.0, 0.0, 0.0] * num_groups, group))
    assert got.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3] * num_groups)


def test_beta_normalised_of_means_spread_wider_than_any_beta_is_centred() -> None:
    # Means 1/8 and 7/8: mu(1-mu)/v - 1 = 0.25/0.28125 - 1 < 0, held at alpha = beta = 1.
    got = BetaNormalised()(samples([0.25, 0.0, 0.75, 1.0], [0, 0, 1, 1]))
    assert got.tolist() == pytest.approx([0.125, -0.125, -0.125, 0.125], rel=1e-9)


def test_beta_normalised_fits_means_whose_variance_is_over_its_bound_only() -> None:
    # Means 1/2 and 1/2 + d, variance d^2/2: 1.1e-10 is fitted, with a narrow and tall density at
    # both means; 0.8e-10 is taken for rounding.
    reward = lambda apart: [1.0, 0.0, 1.0, 2 * apart]
    fitted = BetaNormalised()(samples(reward(1.5e-5), [0, 0, 1, 1]))
    assert fitted.abs().max() < 1e-3
    flat = BetaNormalised()(samples(reward(1.3e-5), [0, 0, 1, 1]))
    assert flat.tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5], abs=1e-4)


def test_beta_normalised_factor_is_capped() -> None:
    # 20 groups of mean 1/2 and one of mean 0.0005, where the fitted density is under 1e-6.
    reward = [1.0, 0.0] * 20 + [0.001, 0.0]
    group = [p for p in range(21) for _ in range(2)]
    got = BetaNormalised()(samples(reward, group))
    assert got[-2:].tolist() == pytest.approx([500.0, -500.0], rel=1e-6)
    assert abs(float(got[0])) < 0.5


# Remedies: (samples, advantage) -> advantage.


def test_receiver_relative_by_hand() -> None:
    # Foreign, success 0.3: reward 1 gives 2·0.7 whatever its group says; 0.3 and under keep at most
    # 0. Own stays.
    given = torch.tensor([0.0, -0.4, 0.4, -0.2, 0.9], dtype=torch.float64)
    batch = samples(
        [1.0, 0.3, 0.1, 0.0, 1.0], [0, 0, 0, 1, 1], [False, False, False, False, True], success=0.3
    )
    assert ReceiverRelative()(batch, given).tolist() == pytest.approx([1.4, -0.4, 0.0, -0.2, 0.9])
    assert ReceiverRelative(scale=1.0)(batch, given)[0] == pytest.approx(0.7)


def test_receiver_relative_lets_the_best_teacher_speak_until_the_receiver_catches_up() -> None:
    row = objective("uplift", "relative")
    own_and_foreign = [True, True, False, False]
    for success, expected in [(0.0, 2.0), (0.75, 0.5), (1.0, 0.0)]:
        terms = row.prepare(samples([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], own_and_foreign, success))
        assert terms.advantage_B.tolist() == pytest.approx([0.0, 0.0, expected, expected])


def test_both_baselines_by_hand() -> None:
    # A foreign group with one success of four, std .5: A = (1 - .25)/.5 = 1.5, more than 1 - .2.
    # A foreign group all right: A = 0, less than 1 - .2. Own groups and failures stay.
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    batch = samples(rewards, [0] * 4 + [1] * 2 + [2] * 2, [False] * 6 + [True] * 2, success=0.2)
    given = Standardised()(batch)
    got = BothBaselines()(batch, given)
    assert got[:4].tolist() == given[:4].tolist()
    assert given[0].item() == pytest.approx(1.5, abs=1e-3)
    assert got[4:6].tolist() == pytest.approx([0.8, 0.8])
    assert got[6:].tolist() == given[6:].tolist()
    assert BothBaselines(scale=3.0)(batch, given)[0].item() == pytest.approx(2.4)


def test_both_baselines_silence_what_the_receiver_can_do_as_well() -> None:
    batch = samples([1.0, 0.0], [0, 0], [False, False], success=1.0)
    assert BothBaselines()(batch, Standardised()(batch))[0].item() == 0.0


def test_receiver_relative_gradient_by_hand() -> None:
    # A foreign all-correct pair against success 0.25: A = 2·0.75 at weight 1, one token each, B =
    # 2.
    case = tiny(
        [1.0, 1.0], lp=[[-9.0], [-3.0]], lq=[[-1.0], [-1.0]], own=[False, False], success=0.25
    )
    got = run(objective("uplift", "relative"), case)
    assert got.loss == pytest.approx(-1.5)
    assert [float(g[0]) for g in got.gradient] == pytest.approx([-0.75, -0.75])


def test_rehearsal_by_hand() -> None:
    # Solved own group: 0.3·r. Own all-wrong, own mixed, foreign solved: unchanged. A solved group
    # of one is solved.
    reward = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.5]
    own = [True, True, True, True, True, True, False, False, True]
    given = torch.tensor([0.0, 0.0, -0.1, -0.1, 0.6, -0.6, 0.2, 0.2, 0.0], dtype=torch.float64)
    got = Rehearsal()(samples(reward, [0, 0, 1, 1, 2, 2, 3, 3, 4], own), given)
    assert got.tolist() == pytest.approx([0.3, 0.3, -0.1, -0.1, 0.6, -0.6, 0.2, 0.2, 0.15])


@pytest.mark.parametrize("size", [3, 6, 7, 12])
def test_equal_fractions_are_equal_however_their_sum_rounds(size: int) -> None:
    for reward in (0.1, 0.3, 0.6, 0.7, 0.9):
        batch = samples([reward] * size, [0] * size)
        for advantage in (Centred(), Standardised(), BetaNormalised()):
            assert advantage(batch).abs().max() == 0
        assert Rehearsal()(batch, Centred()(batch)).tolist() == pytest.approx([0.3 * reward] * size)


def test_rehearsal_gradient_by_hand() -> None:
    case = tiny([1.0, 1.0], lp=[[-1.0], [-1.0]], lq=[[-1.0], [-1.0]])
    assert [
        float(g[0]) for g in run(objective("uplift", "rehearsed"), case).gradient
    ] == pytest.approx([-0.15, -0.15])


def test_foreign_cap_by_hand() -> None:
    # Own |A| sums to 1, foreign to 4, a share of 0.8. At 0.5 foreign may sum to 1: times 1/4. At
    # 0.2 to 1/4: times 1/16.
    batch = samples([0.0] * 4, [0, 0, 1, 1], [True, True, False, False])
    given = torch.tensor([0.5, -0.5, 3.0, -1.0], dtype=torch.float64)
    assert ForeignCap()(batch, given).tolist() == pytest.approx([0.5, -0.5, 0.75, -0.25])
    assert ForeignCap(foreign_cap=0.2)(batch, given).tolist() == pytest.approx(
        [0.5, -0.5, 3 / 16, -1 / 16]
    )


def test_foreign_cap_leaves_a_small_share_alone() -> None:
    # Foreign 1 of 1.5 is 2/3: under a cap of 0.7 unchanged, at exactly 2/3 unchanged, over 0.6 cut
    # to 0.6·0.5/0.4 = 0.75.
    batch = samples([0.0] * 2, [0, 1], [True, False])
    given = torch.tensor([-0.5, 1.0], dtype=torch.float64)
    assert ForeignCap(foreign_cap=0.7)(batch, given).tolist() == [-0.5, 1.0]
    assert ForeignCap(foreign_cap=0.6)(batch, given).tolist() == pytest.approx([-0.5, 0.75])


def test_foreign_cap_without_own_advantage_silences_the_foreign() -> None:
    batch = samples([0.0] * 2, [0, 1], [True, False])
    assert ForeignCap()(batch, torch.tensor([0.0, 2.0], dtype=torch.float64)).tolist() == [0.0, 0.0]
    assert ForeignCap()(batch, torch.tensor([0.0, 0.0], dtype=torch.float64)).tolist() == [0.0, 0.0]


def test_remedies_apply_in_order() -> None:
    # Own solved pair: rehearsed 0.3 each, 0.6 in all. Foreign solved pair, success 0: 2 each,
    # capped to 0.6 in all.
    terms = objective("uplift", "relative_capped").prepare(
        samples([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], [True, True, False, False])
    )
    assert terms.advantage_B.tolist() == pytest.approx([0.3, 0.3, 0.3, 0.3])
    terms = objective("uplift", "relative_rehearsed").prepare(
        samples([1.0, 1.0, 1.0, 1.0], [0, 0, 1, 1], [True, True, False, False], success=0.5)
    )
    assert terms.advantage_B.tolist() == pytest.approx([0.3, 0.3, 0.5, 0.5])


def test_floor_holds_positive_weights_up_and_never_negative_ones() -> None:
    # rho = 0.1 and 5 for a positive, the same for a negative.
    lp, lq = [[np.log(0.1), 0.0], [np.log(0.1), 0.0]], [[0.0, -np.log(5)], [0.0, -np.log(5)]]
    got = run(objective("uplift", "floored"), tiny([1.0, 0.0], lp, lq))
    assert got.output.weight_BT.flatten().tolist() == pytest.approx([0.3, 2.0, 0.1, 1.0])


# What else the whole batch decides.


def horizontal_case() -> Case:
    lq = [[-1.0] * n for n in (2, 5, 1, 3, 3, 4)]
    return tiny([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], lq, lq, group=[0, 0, 0, 1, 1, 2], max_length=20)


def test_pairs_longest_and_denominators_by_hand() -> None:
    terms = objective("ftis", "code").prepare(samples_of(horizontal_case()))
    assert terms.pair_B.tolist() == [0, 0, 1, 2, 2, 3]
    # all ended, and the code has no end tokens
    assert terms.group_longest_B.tolist() == [4, 4, 4, 2, 2, 3]
    with_end = objective("ftis").prepare(samples_of(horizontal_case()))
    assert with_end.group_longest_B.tolist() == [5, 5, 5, 3, 3, 4]
    assert (terms.num_sequences, terms.num_tokens, terms.num_pairs, terms.max_length) == (
        6,
        18,
        4,
        20,
    )


def test_taking_some_terms_keeps_the_denominators_of_the_whole_batch() -> None:
    terms = objective("ftis", "code").prepare(samples_of(horizontal_case()))
    some = terms.take(torch.tensor([4, 0]))
    assert some.advantage_B.tolist() == pytest.approx([0.5, 1 / 3])
    assert some.log_expectation_B.tolist() == pytest.approx([-1.0, -1.0])
    assert some.group_longest_B.tolist() == [2, 4]
    assert some.pair_B.tolist() == [2, 0]
    assert (some.num_sequences, some.num_tokens, some.num_pairs, some.max_length) == (6, 18, 4, 20)
    looked = replace(terms, most_square=0.25, lr_scale=0.5).take(torch.tensor([4, 0]))
    assert (looked.most_square, looked.lr_scale) == (0.25, 0.5)


def test_the_first_samples_are_those_of_a_batch_that_ends_there() -> None:
    case = horizontal_case()
    some = samples_of(case).first(4)
    expected = samples_of(case.take(range(4)))
    for field in fields(some):
        got, wanted = getattr(some, field.name), getattr(expected, field.name)
        assert torch.equal(torch.as_tensor(got), torch.as_tensor(wanted)), field.name


def test_a_lesson_is_a_group_by_itself_and_counts_in_the_denominators() -> None:
    case = replace(horizontal_case(), own=[True] * 4 + [False] * 2)
    both = samples_of(case)
    row = objective("ftis", "code")
    alone = row.prepare(both.first(4))
    assert alone.with_lessons(both.first(4), 0.5) is alone
    terms = alone.with_lessons(both, 0.5)
    assert terms.advantage_B.tolist() == [*alone.advantage_B.tolist(), 0.5, 0.5]
    assert terms.own_B.tolist() == case.own
    assert terms.stranger_B.tolist() == both.stranger_B.tolist()
    assert terms.log_expectation_B.tolist() == pytest.approx([-1.0] * 6)
    assert terms.group_longest_B.tolist() == [4, 4, 4, 2, 3, 4]
    assert terms.pair_B.tolist() == [0, 0, 1, 2, 3, 4]
    assert (terms.num_sequences, terms.num_tokens, terms.num_pairs) == (6, 18, 5)
    # a penalty is over what was sampled to be learned from
    assert (terms.num_penalised, terms.num_penalised_tokens) == (4, 11)
    assert terms.num_penalised_pairs == 3


def test_lessons_of_a_batch_without_other_sequences_are_all_that_counts() -> None:
    both = samples_of(horizontal_case())
    nothing = Terms.of_nothing(both.first(0))
    terms = nothing.with_lessons(both, 0.25)
    assert terms.advantage_B.tolist() == [0.25] * 6
    assert terms.advantage_B.dtype == torch.float32
    assert terms.own_B.tolist() == both.own_B.tolist()
    assert terms.stranger_B.tolist() == both.stranger_B.tolist()
    assert terms.log_expectation_B.tolist() == both.logq_mean_B.tolist()
    assert terms.group_longest_B.tolist() == both.length_B.tolist()
    assert terms.pair_B.tolist() == list(range(6))
    assert (terms.num_sequences, terms.num_tokens, terms.num_pairs, terms.max_length) == (
        6,
        18,
        6,
        20,
    )
    assert (terms.num_penalised, terms.num_penalised_tokens) == (0, 0)
    with pytest.raises(AssertionError):
        Terms.of_nothing(both)


@pytest.mark.parametrize("gamma", [0.0, 0.1])
def test_a_rescue_raises_the_likelihood_of_a_peers_success(gamma: float) -> None:
    # two lessons of one and two tokens at p = 1/10, whatever q: A = 1/2, and with gamma = p the
    # weight is 1/4; reduced as the row is
    case = tiny(
        [1.0, 1.0], lp=[[log(0.1)], [log(0.1)] * 2], lq=[[-9.0], [0.0] * 2], own=[False] * 2
    )
    terms = Terms.of_nothing(samples_of(case).first(0)).with_lessons(samples_of(case), 0.5)
    weight = 0.25 if gamma else 1.0
    for name, shares in (("grpo", [1 / 2, 1 / 4]), ("dapo", [1 / 3, 1 / 3])):
        batch = batch_of(case, terms)
        rescue_of(objective(name), gamma).loss(batch).loss.backward()
        for i, n in enumerate(case.lengths):
            got = batch.logp_learner_BT.grad[i, :n].tolist()
            assert got == pytest.approx([-0.5 * weight * shares[i]] * n, rel=1e-5)


def test_what_is_kept_is_pushed_up_where_it_has_fallen_and_nowhere_else() -> None:
    # of one token, which fell, and of three: as likely as it was, fallen, risen
    case = tiny([1.0, 1.0], lp=[[-2.0], [-1.0, -9.0, -0.5]], lq=[[-1.75], [-1.0, -1.0, -1.0]])
    terms = Terms.of_nothing(samples_of(case).first(0)).with_lessons(samples_of(case), 16.0)
    for name, shares in (("grpo", [1 / 2, 1 / 6]), ("dapo", [1 / 4, 1 / 4])):
        batch = batch_of(case, terms, extra=2, garbage=-7.0)
        output = kept_of(objective(name)).loss(batch)
        output.loss.backward()
        got = batch.logp_learner_BT.grad
        assert got[0].tolist() == pytest.approx([-16 * shares[0], 0, 0, 0, 0])
        assert got[1].tolist() == pytest.approx([0, -16 * shares[1], 0, 0, 0])
        assert float(output.loss.detach()) == pytest.approx(-16 * sum(shares))
        assert output.weight_BT[batch.mask_BT].tolist() == [1, 0, 1, 0]


@pytest.mark.parametrize("name", ["uplift", "dr_grpo", "topr", "bnpo"])
def test_only_its_reduction_is_taken_from_a_row_for_what_is_kept(name: str) -> None:
    row = objective(name, settings={"beta": 0.5, "keep": 2.0})
    kept = kept_of(row)
    assert kept.reduction == row.reduction
    assert (kept.penalty.beta, kept.keeping.keep, kept.adjust) == (0.0, 0.0, ())
    assert kept == kept_of(objective(name))


def test_terms_are_float32_though_worked_out_in_float64() -> None:
    terms = objective("tis").prepare(samples_of(horizontal_case()))
    assert terms.advantage_B.dtype == torch.float32
    third = [2 / 3, -1 / 3, -1 / 3]
    assert Centred()(samples([1.0, 0.0, 0.0], [0, 0, 0])).tolist() == pytest.approx(
        third, rel=1e-14
    )
    scale = 1 / (sqrt(1 / 3) + 1e-4)
    assert Standardised()(samples([1.0, 0.0, 0.0], [0, 0, 0])).tolist() == pytest.approx(
        [scale * a for a in third], rel=1e-14
    )


def test_samples_refuse_tensors_of_different_length() -> None:
    with pytest.raises(AssertionError, match=r"^per-sequence tensors differ in shape: \{"):
        Samples(
            reward_B=torch.zeros(3),
            group_B=torch.zeros(3, dtype=torch.int64),
            sender_B=torch.zeros(3, dtype=torch.int64),
            own_B=torch.ones(3, dtype=torch.bool),
            stranger_B=torch.zeros(3, dtype=torch.bool),
            success_B=torch.zeros(2),
            skill_B=torch.ones(3),
            length_B=torch.ones(3, dtype=torch.int64),
            ended_B=torch.ones(3, dtype=torch.bool),
            logq_mean_B=torch.zeros(3),
            max_length=4,
        )


def test_bnpo_takes_a_mean_reward_outside_0_and_1_as_the_nearer_of_the_two() -> None:
    """An admitted reward must not stop a step."""
    for outside, nearest in (([1.5, 1.5, 1.0, 0.0], 1.0), ([-9e5, -9e5, 1.0, 0.0], 0.0)):
        got = BetaNormalised()(samples(outside, [0, 0, 1, 1]))
        inside = BetaNormalised()(samples([nearest] * 2 + outside[2:], [0, 0, 1, 1]))
        assert got.tolist() == inside.tolist()
        assert got[2:].abs().min() > 0
    assert BetaNormalised()(samples([1.0, 1.0, 0.0, 0.0], [0, 0, 1, 1])).tolist() == [0, 0, 0, 0]


# Those of TRL and verl


def test_batch_standardised_divides_by_the_spread_of_all_rewards() -> None:
    # rewards 1, 0, 1, 1: means 1/2 and 1, std of all 1/2
    got = BatchStandardised()(samples([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]))
    unit = 1 / (0.5 + 1e-4)
    assert got.tolist() == pytest.approx([unit / 2, -unit / 2, 0, 0])
    assert BatchStandardised()(samples([1.0], [0])).tolist() == [0]


def test_leave_one_out_by_hand() -> None:
    got = LeaveOneOut()(samples([1.0, 0.0, 0.5, 3.0], [0, 0, 0, 1]))
    assert got.tolist() == pytest.approx([0.75, -0.75, 0.0, 0.0])


def test_leave_one_out_of_a_pair_is_the_difference() -> None:
    assert LeaveOneOut()(samples([1.0, 0.25], [0, 0])).tolist() == [0.75, -0.75]


def test_whitened_counts_a_reward_as_often_as_its_sequence_has_tokens() -> None:
    given = replace(
        samples([1.0, 0.0, 1.0], [0, 0, 1]), length_B=torch.tensor([1, 3, 4], dtype=torch.int64)
    )
    # five tokens of 1, three of 0: mean 5/8, variance (5·9 + 3·25)/64/7
    unit = 1 / sqrt(120 / 64 / 7 + 1e-8)
    assert Whitened()(given).tolist() == pytest.approx([unit * x for x in (3 / 8, -5 / 8, 3 / 8)])
    # r - mean is 1/2 once, -1/2 three times, 0 four times: mean -1/8, variance (25 + 27 + 4)/64/7
    unit = 1 / sqrt(56 / 64 / 7 + 1e-8)
    assert Whitened(baseline="group")(given).tolist() == pytest.approx(
        [unit * x for x in (5 / 8, -3 / 8, 1 / 8)]
    )


def test_whitened_rewards_of_two_tokens_by_hand() -> None:
    # 1/10000 from their mean, variance 2/10000^2: the epsilon of 1e-8 is half as much
    for scale, unit in ((1.0, 0.5 / sqrt(0.5 + 1e-8)), (2e-4, 1e-4 / sqrt(2e-8 + 1e-8))):
        two = replace(samples([scale, 0.0], [0, 0]), length_B=torch.tensor([1, 1]))
        assert Whitened()(two).tolist() == pytest.approx([unit, -unit], rel=1e-6)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_whitened_rewards_that_are_all_equal_are_zero(baseline: Literal["none", "group"]) -> None:
    assert Whitened(baseline)(samples([0.25] * 3, [0, 0, 1])).tolist() == [0] * 3
    one = replace(samples([1.0], [0]), length_B=torch.tensor([1]))
    assert Whitened(baseline)(one).tolist() == [0]


# HACPO's


def test_capability_aware_of_a_joint_group_by_hand() -> None:
    # own 1, 0; of a sender half as good 1, 0: the baseline is (1 + 0 + 2 + 0)/4 = 3/4
    got = CapabilityAware()(
        samples(
            [1.0, 0.0, 1.0, 0.0],
            [0] * 4,
            own=[True, True, False, False],
            skill=[1.0, 1.0, 0.5, 0.5],
        )
    )
    unit = 1 / (sqrt(1 / 3) + 1e-4)
    assert got.tolist() == pytest.approx([unit / 4, -3 * unit / 4, unit / 8, -3 * unit / 8])


def test_capability_aware_of_equals_is_standardised_in_either_layout() -> None:
    given = samples(
        [1.0, 0.0, 0.0, 1.0, 1.0, 0.0], [0, 0, 0, 1, 1, 1], own=[True] * 3 + [False] * 3
    )
    assert CapabilityAware()(given).tolist() == pytest.approx(Standardised()(given).tolist())
    mixed = samples([1.0, 0.0, 0.0, 1.0], [0] * 4, own=[True, False, True, False])
    assert CapabilityAware()(mixed).tolist() == pytest.approx(Standardised()(mixed).tolist())


def test_capability_aware_of_one_better_sender_raises_its_successes() -> None:
    """A vertical group: A = (o·r - mean(r)) / std."""
    got = CapabilityAware()(samples([1.0, 0.0], [0, 0], own=[False] * 2, skill=[4.0] * 2))
    unit = 1 / (sqrt(0.5) + 1e-4)
    assert got.tolist() == pytest.approx([3.5 * unit, -0.5 * unit])


def test_capability_aware_is_silent_where_rewards_are_equal() -> None:
    given = samples([1.0] * 4, [0, 0, 1, 1], own=[False] * 4, skill=[3.0, 0.2, 3.0, 3.0])
    assert CapabilityAware()(given).tolist() == [0] * 4


def test_capability_aware_takes_the_own_mean_where_its_baseline_is_above_every_reward() -> None:
    # (0 + 0 + 10 + 10 + 10)/5 = 6 is above 1: the own mean, 0
    worse = samples(
        [0.0, 0.0, 1.0, 1.0, 1.0],
        [0] * 5,
        own=[True] * 2 + [False] * 3,
        skill=[1.0] * 2 + [0.1] * 3,
    )
    unit = 1 / (sqrt(0.3) + 1e-4)
    assert CapabilityAware()(worse).tolist() == pytest.approx([0, 0, *[0.1 * unit] * 3])
    # without own sequences, the mean of all
    foreign = samples([0.0, 1.0, 1.0], [0] * 3, own=[False] * 3, skill=[0.1] * 3)
    unit = 0.1 / (sqrt(1 / 3) + 1e-4)
    assert CapabilityAware()(foreign).tolist() == pytest.approx([-2 * unit / 3, *[unit / 3] * 2])


def test_capability_aware_keeps_a_baseline_that_is_the_best_reward() -> None:
    # (2 + 0)/2 = 1 is not above 1
    given = samples([1.0, 0.0], [0, 0], own=[False] * 2, skill=[0.5] * 2)
    unit = 1 / (sqrt(0.5) + 1e-4)
    assert CapabilityAware()(given).tolist() == pytest.approx([0, -unit / 2])


def test_capability_aware_is_worked_out_in_float64() -> None:
    # the bound is 1/10 itself; in float32 it would be 1.5e-8 more
    given = samples([1.0, 0.0], [0, 0], own=[False] * 2, skill=[1e-9] * 2)
    unit = 0.1 / (sqrt(0.5) + 1e-4)
    assert CapabilityAware()(given).tolist() == pytest.approx([unit / 2, -unit / 2], rel=1e-12)


@pytest.mark.parametrize(("told", "held"), [(1e9, 10.0), (1e-9, 0.1)])
def test_capability_aware_holds_a_skill_within_its_bounds(told: float, held: float) -> None:
    def of(skill: float) -> list[float]:
        return CapabilityAware()(
            samples([1.0, 0.0], [0, 0], own=[False] * 2, skill=[skill] * 2)
        ).tolist()

    assert of(told) == pytest.approx(of(held), rel=1e-6)
