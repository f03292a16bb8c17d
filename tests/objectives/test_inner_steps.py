"""Later steps of a round: every row against the float64 reference, with the policy moved away from
where the round began, so that clips bind.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from motley.objectives import LossBatch, LossOutput, objective

from . import reference
from .cases import REGIMES, ROWS, Case, batch_of, flat, make_case, prepared, run, samples_of, tiny
from .reference import STEP, Reference, clipped_unit, sequence_mean

pytestmark = pytest.mark.slow

# Rows whose ratio is to the start of the round, with their weight as it was there.
FROM_START = {
    ("alone", ""): sequence_mean(clipped_unit),
    ("nois", ""): sequence_mean(clipped_unit),
    ("fnois", ""): sequence_mean(clipped_unit),
    ("tis", ""): reference.ROWS[("tis", "")][2],
    ("ftis", ""): reference.ROWS[("ftis", "")][2],
    ("ftis", "code"): reference.ROWS[("ftis", "code")][2],
    ("tis", "token_mask"): reference.ROWS[("tis", "token_mask")][2],
    ("tis", "sequence"): reference.ROWS[("tis", "sequence")][2],
    ("tis", "sequence_mask"): reference.ROWS[("tis", "sequence_mask")][2],
    ("tis", "trl"): reference.ROWS[("tis", "trl")][2],
}


def clipped_swarm(b: Reference, i: int, lp: np.ndarray) -> float:
    speaking = [
        j for j in range(b.B) if len(set(reference.rewards_of_group(b.case, b.case.group[j]))) > 1
    ]
    if i not in speaking:
        return 0.0
    tokens = sum(len(b.lq[j]) for j in speaking)
    return -sum(clipped_unit(b, i, t, lp) for t in range(len(lp))) / tokens


FROM_START[("sapo_swarm", "")] = clipped_swarm


class Later(Reference):
    """A row in a later step: the filter as at the start, and under a stop-gradient the start where
    the row's ratio is to it, the present elsewhere.
    """

    def __init__(self, case: Case, now: list[np.ndarray], name: str, variant: str) -> None:
        super().__init__(case, name, variant)
        self.start, self.now = case.lp, now
        self._share = FROM_START.get((name, variant), self._share)
        # gepo_plus decides at the start which sequences are near
        begins = (name, variant) in FROM_START or name == "gepo_plus"
        self.fixed = self.start if begins else self.now

    def kl(self, i: int) -> float:
        present, self.fixed = self.fixed, self.start
        try:
            return super().kl(i)
        finally:
            self.fixed = present

    def gradient(self) -> list[np.ndarray]:
        rows = []
        for i in range(self.B):
            steps = np.eye(len(self.now[i])) * STEP
            rows.append(
                np.array(
                    [
                        (self.share(i, self.now[i] + s) - self.share(i, self.now[i] - s))
                        / (2 * STEP)
                        for s in steps
                    ]
                )
            )
        return rows


def moved(case: Case, by: float, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    drift = [rng.normal(0, by, len(row)) for row in case.lp]
    return [np.float32(row + d).astype(np.float64) for row, d in zip(case.lp, drift, strict=True)]


def later(
    name: str, variant: str, case: Case, now: list[np.ndarray], num_taken: int = 0
) -> tuple[float, list[np.ndarray], LossOutput]:
    row = objective(name, variant)
    terms = prepared(row, case)
    start_BT = batch_of(case, terms).logp_learner_BT.detach()
    batch = dataclasses.replace(
        batch_of(dataclasses.replace(case, lp=now), terms),
        logp_start_BT=start_BT,
        num_taken=num_taken,
    )
    output = row.loss(batch)
    assert not any(
        report.requires_grad for report in (output.weight_BT, output.free_BT, output.factor_BT)
    )
    output.loss.backward()
    grad_BT = batch.logp_learner_BT.grad
    gradient = [grad_BT[i, :n].double().numpy() for i, n in enumerate(case.lengths)]
    return float(output.loss.detach()), gradient, output


# A Beta density needs mean rewards in [0, 1], so bnpo stays out of the signed regime.
EVERYWHERE = [
    (name, variant, regime)
    for name, variant in ROWS
    for regime in REGIMES
    if (name, regime) != ("bnpo", "signed")
]


@pytest.mark.parametrize(("name", "variant", "regime"), EVERYWHERE)
def test_a_later_step_agrees_with_the_reference(name: str, variant: str, regime: str) -> None:
    case = make_case(regime, seed=3)
    now = moved(case, by=0.3, seed=4)
    expected = Later(case, now, name, variant)
    loss, gradient, output = later(name, variant, case, now)
    theirs = flat(expected.gradient())
    assert loss == pytest.approx(expected.loss(now), rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(
        flat(gradient), theirs, rtol=2e-5, atol=1e-6 + 1e-8 * np.abs(theirs).max()
    )
    assert output.keep_B.tolist() == [expected.kept(i) for i in range(len(case))]


@pytest.mark.parametrize("name", [name for name, variant in FROM_START if not variant])
def test_the_inner_clip_binds_where_it_should(name: str) -> None:
    case = make_case("near", seed=3)
    now = moved(case, by=0.3, seed=4)
    _, gradient, output = later(name, "", case, now)
    advantage = objective(name).prepare(samples_of(case)).advantage_B.tolist()
    num_clipped = 0
    for i, A in enumerate(advantage):
        ratio = np.exp(now[i] - case.lp[i])
        bound = (ratio > 1.2) if A > 0 else (ratio < 0.8) if A < 0 else np.zeros(len(ratio), bool)
        assert (gradient[i][bound] == 0).all()
        if A:
            factor = output.factor_BT[i, : len(ratio)].numpy()
            np.testing.assert_allclose(factor, np.where(bound, 0.0, ratio), rtol=1e-5)
        num_clipped += int(bound.sum())
    assert num_clipped > 5, "a clip that never binds would pass"


def test_an_inner_step_of_two_tokens_by_hand() -> None:
    """A = 0.7071 / (0.7071 + 1e-4) and its negative; weights min(rho, 2) are 2 and 0.5."""
    ln2 = float(np.log(2))
    case = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-1.0 - 3 * ln2], [-1.0 + ln2]])
    now = [np.array([-1.0 + np.log(1.5)]), np.array([-1.0 + np.log(1.1)])]
    loss, gradient, _ = later("tis", "", case, now)
    A = 0.5 / (0.5**0.5 + 1e-4)
    assert loss == pytest.approx(-(2 * 1.2 * A - 0.5 * 1.1 * A) / 2, rel=1e-5)
    assert gradient[0][0] == 0  # 1.5 is past the clip
    assert gradient[1][0] == pytest.approx(0.5 * 1.1 * A / 2, rel=1e-5)


@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_a_step_from_where_the_round_began_has_the_gradient_of_the_first(
    name: str, variant: str
) -> None:
    case = make_case("apart", seed=5)
    first = run(objective(name, variant), case)
    loss, gradient, output = later(name, variant, case, case.lp)
    assert loss == pytest.approx(first.loss, rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(flat(gradient), flat(first.gradient), rtol=1e-5, atol=1e-7)
    assert torch.equal(output.keep_B, first.output.keep_B)


def test_uplift_weighs_no_positive_more_than_once_however_far_a_round_goes() -> None:
    case = tiny([1.0, 0.0], lp=[[-5.0], [-1.0]], lq=[[-1.0], [-1.0]], own=[False, False])
    now = [np.array([-0.01]), np.array([-1.0])]
    _, _, output = later("uplift", "", case, now)
    assert float(output.weight_BT[0, 0]) == 1.0


def test_what_has_moved_is_zero_outside_the_mask_and_in_a_first_pass() -> None:
    case = make_case("near", seed=3)
    terms = objective("tis").prepare(samples_of(case))
    batch = batch_of(case, terms, extra=2, garbage=7.0)
    logp_BT = batch.logp_learner_BT.detach().requires_grad_()
    moved_BT = dataclasses.replace(batch, logp_learner_BT=logp_BT).moved_BT
    assert not moved_BT.any()
    # it has not moved yet, and any step would move it
    (gradient_BT,) = torch.autograd.grad(moved_BT.sum(), logp_BT)
    assert torch.equal(gradient_BT, batch.mask_BT.float())
    later: LossBatch = dataclasses.replace(batch, logp_start_BT=batch.logp_learner_BT.detach() - 1)
    assert torch.equal(later.moved_BT.detach() != 0, batch.mask_BT)


def test_hacpo_narrows_what_it_takes_of_others_with_every_step_of_a_round() -> None:
    # s = 0.5 of a foreign success; after u steps low is 0.2 + 0.025 u: 0.5 is in at 12, not at 13
    case = tiny([1.0, 0.0], lp=[[-1.0], [-1.0]], lq=[[-1.0], [-1.0]], own=[False, False])
    now = [np.array([-1.0 - float(np.log(1.99))]), np.array([-1.0])]
    weights = {
        taken: later("hacpo", "", case, now, taken)[2].weight_BT[:, 0].tolist()
        for taken in (0, 12, 13, 99)
    }
    # a sequence as likely as where it was made is always in
    assert weights == {
        0: pytest.approx([1.99**-2, 1.0]),
        12: pytest.approx([1.99**-2, 1.0]),
        13: [0.0, 1.0],
        99: [0.0, 1.0],
    }


def test_a_batch_of_which_nothing_is_said_has_taken_no_step() -> None:
    # s = 0.21 of a foreign success: after a step low would be 0.225
    case = tiny([1.0, 0.0], [[float(np.log(0.21))], [0.0]], [[0.0]] * 2, own=[False] * 2)
    assert float(run(objective("hacpo"), case).output.weight_BT[0, 0]) == pytest.approx(0.21**2)
