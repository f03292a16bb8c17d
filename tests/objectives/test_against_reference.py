"""Every row and variant against an independent float64 reference: loss, gradient by finite
differences, filter and KL.
"""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from marks import slow
from motley.objectives import objective

from .cases import REGIMES, ROWS, flat, make_case, run
from .reference import ROWS as REFERENCE_ROWS
from .reference import Reference

# (name, variant, settings): the numbers a crew file may change, moved off their defaults.
TUNED: list[tuple[str, str, dict[str, float | str]]] = [
    ("ftis", "", {"C": 1.1, "g": 0.05}),
    ("ftis", "", {"kl": "k1", "g": 0.1}),
    ("ftis", "", {"kl_over": "group", "g": 0.3}),
    ("ftis", "code", {"g": 0.1}),
    ("ftis", "code", {"g": 0.02, "kl": "k1", "kl_over": "own"}),
    ("tis", "", {"C": 0.9}),
    ("grpo", "", {"clip_low": 0.1, "clip_high": 0.5}),
    ("grpo", "", {"beta": 0.1}),
    ("fvis", "", {"g": 0.1, "clip_low": 0.3, "clip_high": 0.1}),
    ("gepo", "", {"beta": 0.005}),
    ("gepo", "", {"beta": 0.05, "toward": "code"}),
    ("gepo", "", {"scope": "microbatch", "clip_low": 0.5}),
    ("gepo", "code", {"beta": 0.05}),
    ("gepo_plus", "", {"near": 0.2}),
    ("ds_gspo", "", {"mix": 0.3}),
    ("cispo", "", {"clip_high": 0.2}),
    ("gmpo", "", {"log_clip": 0.1, "dual_clip": 1.2}),
    ("grpo", "", {"dual_clip": 1.5, "beta": 0.1}),
    ("dr_grpo", "", {"beta": 0.1}),
    ("bnpo", "", {"beta": 0.1, "toward": "code"}),
    ("topr", "", {"beta": 0.1, "toward": "reference"}),
    ("sapo_swarm", "", {"beta": 0.1, "toward": "reference"}),
    ("ftis", "", {"beta": 0.1, "toward": "reference", "beta_times": "ratio"}),
    ("ftis", "code", {"beta": 0.1, "toward": "reference", "beta_times": "ratio"}),
    ("cispo", "", {"beta": 0.1, "beta_times": "ratio", "dual_clip": 1.5}),
    ("gspo", "", {"beta": 0.1, "toward": "reference", "beta_times": "ratio"}),
    ("gepo", "", {"beta": 0.1, "beta_times": "ratio"}),
    ("gepo_plus", "", {"beta": 0.1, "beta_times": "ratio", "near": 0.2}),
    ("ds_gspo", "", {"beta": 0.1, "beta_times": "ratio", "toward": "reference"}),
    ("gmpo", "", {"beta": 0.1, "beta_times": "ratio", "dual_clip": inf}),
    ("gspo", "", {"dual_clip": 1.1}),
    ("grpo", "", {"delta": 1.3}),
    ("grpo", "batch_std", {"clip_high": 0.5}),
    ("gspo", "", {"delta": 1.25, "dual_clip": 2.0}),
    ("gmpo", "", {"delta": 1.1}),
    ("dapo", "", {"clip_low": 0.1, "delta": 1.5}),
    ("tis", "token_mask", {"C": 1.1}),
    ("tis", "sequence", {"C": 0.8}),
    ("tis", "sequence_mask", {"C": 1.2}),
    ("sapo", "", {"tau_pos": 0.5, "tau_neg": 3.0}),
    ("rloo", "", {"clip_low": 0.5, "clip_high": 0.1}),
    ("reinforce_pp", "baseline", {"clip_low": 0.1}),
    ("dppo", "", {"mask_low": 0.01, "mask_high": 0.05, "tau": 0.1}),
    ("dppo", "", {"dual_clip": 1.2, "tau": 0.1}),
    ("m2po", "", {"budget": 0.5}),
    ("m2po", "", {"budget": 0.0, "dual_clip": 1.2}),
    ("vcpo", "", {"C": 1.1}),
    ("hacpo", "", {"cross_clip": 0.4, "alpha": 3.0}),
    ("hacpo", "", {"cross_clip": 1.0, "alpha": 0.0, "beta": 0.1}),
    ("hacpo", "", {"clip_low": 0.05, "clip_high": 0.05}),
    ("uplift", "shaped", {"gamma": 0.5}),
    ("uplift", "floored", {"gamma": 0.2}),
    ("uplift", "relative_capped", {"gamma": 0.05}),
    ("uplift", "floored", {"floor": 0.8, "C": 1.5, "g": 0.1}),
    ("uplift", "relative", {"scale": 0.7}),
    ("uplift", "sure", {"sure": 2.0, "gate": 0.5}),
    ("uplift", "floored", {"sure": 0.5}),
    ("uplift", "gated", {"gate": 0.5}),
    ("uplift", "floored", {"gate": 2.0}),
    ("uplift", "shaped", {"gate": 2.0}),
    ("uplift", "rehearsed", {"rehearse": 0.9}),
    ("uplift", "capped", {"foreign_cap": 0.1}),
    ("uplift", "relative_capped", {"foreign_cap": 0.3, "scale": 3.0, "rehearse": 0.1}),
]


def agree(
    name: str,
    variant: str,
    settings: dict[str, float | str],
    regime: str,
    seed: int,
    atol: float = 1e-6,
) -> None:
    case = make_case(regime, seed)
    expected = Reference(case, name, variant, **settings)
    got = run(objective(name, variant, settings), case)
    gradient = flat(expected.gradient())
    assert got.loss == pytest.approx(expected.loss(case.lp), rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(
        flat(got.gradient), gradient, rtol=2e-5, atol=atol + 1e-8 * np.abs(gradient).max()
    )
    assert got.output.keep_B.tolist() == [expected.kept(i) for i in range(len(case))]
    np.testing.assert_allclose(
        got.output.kl_B.numpy(), [expected.kl(i) for i in range(len(case))], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(got.terms.advantage_B.numpy(), expected.A, rtol=1e-6, atol=1e-7)


def test_reference_covers_every_row_and_variant() -> None:
    assert set(REFERENCE_ROWS) == set(ROWS)


# A Beta density needs mean rewards in [0, 1], so bnpo stays out of the signed regime.
EVERYWHERE = [
    (name, variant, regime)
    for name, variant in ROWS
    for regime in REGIMES
    if (name, regime) != ("bnpo", "signed")
]


@pytest.mark.parametrize("seed", [0, slow(1)])
@pytest.mark.parametrize(("name", "variant", "regime"), EVERYWHERE)
def test_row_agrees_with_reference(name: str, variant: str, regime: str, seed: int) -> None:
    agree(name, variant, {}, regime, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant", "regime"), EVERYWHERE)
def test_row_agrees_with_reference_on_many_batches(name: str, variant: str, regime: str) -> None:
    """With those of the quick test at least 50 a row."""
    for seed in range(100, 112):
        agree(name, variant, {}, regime, seed)


PENALTIES: list[dict[str, float | str]] = [
    {"beta": 0.1, "toward": toward, "beta_times": times}
    for toward in ("sampler", "code", "reference")
    for times in ("one", "ratio")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), ROWS)
def test_row_with_any_penalty_agrees_with_reference(name: str, variant: str) -> None:
    """A ratio multiplies what float32 rounds off exp(x) - 1 - x."""
    for seed, settings in enumerate(PENALTIES):
        agree(name, variant, settings, "horizontal", seed, atol=1e-5)


@pytest.mark.parametrize("regime", [slow("near"), slow("apart"), "horizontal"])
@pytest.mark.parametrize(("name", "variant", "settings"), TUNED)
def test_tuned_row_agrees_with_reference(
    name: str, variant: str, settings: dict, regime: str
) -> None:
    agree(name, variant, settings, regime, seed=2)
