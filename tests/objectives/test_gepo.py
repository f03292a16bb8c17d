"""GEPO's group expectation: its identities, its limits and its variance theorem."""

from __future__ import annotations

from math import exp, log

import numpy as np
import pytest
import torch

from motley.objectives import Objective, objective
from motley.objectives.advantages import Centred
from motley.objectives.ratios import GroupRatio, SequenceRatio, log_expectation
from motley.objectives.surrogates import ClippedRatio

from .cases import Case, batch_of, flat, make_case, run, samples_of, tiny


def one_group(q: np.ndarray, p: np.ndarray | None = None) -> Case:
    """One group of one-token completions with sampler probabilities q and learner probabilities p
    (q unless told).
    """
    return tiny(
        [float(i % 2) for i in range(len(q))],
        lp=np.log(q if p is None else p)[:, None],
        lq=np.log(q)[:, None],
    )


def group_weights(case: Case) -> np.ndarray:
    batch = batch_of(case, objective("gepo").prepare(samples_of(case)))
    return GroupRatio()(batch)[:, 0].detach().double().numpy()


def test_expectation_worked_out_by_hand() -> None:
    # Group 0: q = 1/2, 1/4: E = (1/4 + 1/16)/(3/4) = 5/12. Group 1: q = 1/8 alone: E = q.
    log_e_B = log_expectation(
        torch.tensor([log(0.5), log(0.25), log(0.125)]), torch.tensor([0, 0, 1])
    )
    assert log_e_B.exp().tolist() == pytest.approx([5 / 12, 5 / 12, 1 / 8])


def test_expectation_of_vanishing_probabilities_stays_exact() -> None:
    # Both 1e-300 times those of the hand-worked pair, which no float32 can hold outside log space.
    log_e_B = log_expectation(torch.tensor([log(0.5), log(0.25)]) - 690.0, torch.tensor([0, 0]))
    assert log_e_B.tolist() == pytest.approx([log(5 / 12) - 690.0] * 2)


def test_expectation_of_a_vanishing_group_stays_exact_beside_a_likely_one() -> None:
    # The hand-worked pair, and the same 1e-300 times less likely, in one batch.
    likely = torch.tensor([log(0.5), log(0.25)])
    log_e_B = log_expectation(torch.cat([likely, likely - 690.0]), torch.tensor([0, 0, 1, 1]))
    assert log_e_B.tolist() == pytest.approx([log(5 / 12)] * 2 + [log(5 / 12) - 690.0] * 2)


@pytest.mark.parametrize("seed", range(5))
def test_expectation_is_mean_times_one_plus_squared_variation(seed: int) -> None:
    q = np.random.default_rng(seed).beta(0.5, 2.0, size=12)
    m, cv = q.mean(), q.std() / q.mean()
    log_e_B = log_expectation(torch.tensor(np.log(q)), torch.zeros(12, dtype=torch.int64))
    assert log_e_B.exp().tolist() == pytest.approx([m * (1 + cv**2)] * 12)


@pytest.mark.parametrize("seed", range(5))
def test_own_rollouts_have_mean_weight_one_over_one_plus_squared_variation(seed: int) -> None:
    q = np.random.default_rng(seed).beta(0.5, 2.0, size=12) + 1e-6
    w = group_weights(one_group(q))
    assert w.mean() == pytest.approx(1 / (1 + (q.std() / q.mean()) ** 2), rel=1e-5)


def test_own_rollouts_have_weight_variance_at_most_a_quarter() -> None:
    rng = np.random.default_rng(0)
    variances = [
        group_weights(one_group(rng.beta(0.05, 1.0, size=16) + 1e-6)).var() for _ in range(50)
    ]
    assert max(variances) <= 0.25 + 1e-6
    # The bound is reached at variation 1: half the group at probability 2m, half near 0.
    assert group_weights(one_group(np.array([0.5, 1e-7] * 4))).var() == pytest.approx(
        0.25, abs=1e-5
    )


def test_group_of_one_has_the_sequence_ratio() -> None:
    case = tiny([1.0], lp=[[-1.0, -2.0]], lq=[[-1.5, -2.5]])
    assert group_weights(case) == pytest.approx([exp(0.5)])


def test_equal_sampler_probabilities_give_centred_gspo() -> None:
    lq = np.full((4, 1), -1.3)
    case = tiny([1.0, 0.0, 0.0, 1.0], lp=lq + np.array([[0.1], [0.5], [-0.5], [-0.1]]), lq=lq)
    centred_gspo = Objective(advantage=Centred(), surrogate=ClippedRatio(ratio=SequenceRatio()))
    got, expected = run(objective("gepo"), case), run(centred_gspo, case)
    assert got.loss == pytest.approx(expected.loss)
    assert flat(got.gradient) == pytest.approx(flat(expected.gradient))


def test_micro_batch_scope_of_single_sequences_is_centred_gspo() -> None:
    case = make_case("horizontal", 0)
    got = run(objective("gepo", "code"), case, cuts=[[i] for i in range(len(case))])
    expected = run(
        Objective(advantage=Centred(), surrogate=ClippedRatio(ratio=SequenceRatio())), case
    )
    assert got.loss == pytest.approx(expected.loss, rel=1e-5)
    np.testing.assert_allclose(flat(got.gradient), flat(expected.gradient), rtol=1e-5, atol=1e-7)
    assert abs(got.loss - run(objective("gepo", "code"), case).loss) > 1e-3, (
        "the release's loss depends on the cut"
    )


def test_expectation_does_not_depend_on_the_cut() -> None:
    case = make_case("horizontal", 0)
    terms = objective("gepo").prepare(samples_of(case))
    batch_of_one = batch_of(case.take([9]), terms.take(torch.tensor([9])))
    members = [i for i in range(len(case)) if case.group[i] == case.group[9]]
    q = np.array([exp(case.lq[i].mean()) for i in members])
    expected = exp(case.lp[9].mean()) / (np.sum(q * q) / np.sum(q))
    assert float(GroupRatio()(batch_of_one)[0, 0].detach()) == pytest.approx(expected, rel=1e-5)


def test_gradient_flows_through_the_learner_only() -> None:
    # Unclipped at p = q: A·w/(B·1) and nothing from the denominator, which would make the group's
    # gradient sum to zero.
    q = np.array([0.5, 0.4])
    case = tiny([1.0, 0.0], lp=np.log(q)[:, None], lq=np.log(q)[:, None])
    e = (0.25 + 0.16) / 0.9
    assert flat(run(objective("gepo"), case).gradient) == pytest.approx(
        [-0.5 * 0.5 / e / 2, 0.5 * 0.4 / e / 2], rel=1e-5
    )


@pytest.mark.parametrize("n", [2, 3, 5, 10])
def test_variance_falls_by_at_least_the_theorem(n: int) -> None:
    # Var_q[p/q] - Var_q[p/E_q q] >= exp(KL(p||q)) - (n^2 + 1) on n outcomes; E_q q = sum q^2 is E
    # of a group of all outcomes.
    rng = np.random.default_rng(n)
    binding = 0
    for _ in range(200):
        p, q = rng.dirichlet(np.full(n, 0.3)) + 1e-12, rng.dirichlet(np.full(n, 0.3)) + 1e-12
        p, q = p / p.sum(), q / q.sum()
        log_e_B = log_expectation(torch.tensor(np.log(q)), torch.zeros(n, dtype=torch.int64))
        group_weight = p / log_e_B.exp().numpy()
        sequence_variance = np.sum(p * p / q) - 1
        group_variance = np.sum(q * group_weight**2) - np.sum(q * group_weight) ** 2
        bound = exp(np.sum(p * np.log(p / q))) - (n**2 + 1)
        assert sequence_variance - group_variance >= bound - 1e-6 * abs(bound)
        binding += bound > 0
    assert binding > 0, "the bound says something only where KL(p||q) is large"
