"""Looking rows up and changing their settings; what a wrong name or value is told."""

from __future__ import annotations

from math import inf

import pytest

from motley.objectives import OBJECTIVES, VARIANTS, Objective, objective
from motley.objectives.importance import Truncated

from .cases import ROW_IDS, ROWS

EVERY_ROW = {
    "beta": 0.0,
    "toward": "sampler",
    "beta_times": "one",
    "dual_clip": 3.0,
    "keep": 0.0,
    "held": "mastered",
}
FILTER = {"g": 50.0, "kl": "k3", "kl_over": "own"}
CLIP = {"clip_low": 0.2, "clip_high": 0.2}
RATIO = CLIP | {"delta": inf}
UPLIFT = {"floor": 1.0, "C": 1.0, "gamma": 0.0, "gate": 0.0, "sure": 0.0} | FILTER | EVERY_ROW

SETTINGS: dict[tuple[str, str], dict[str, float | str]] = {
    ("alone", ""): CLIP | EVERY_ROW,
    ("nois", ""): CLIP | EVERY_ROW,
    ("grpo", ""): RATIO | EVERY_ROW,
    ("tis", ""): {"C": 2.0} | CLIP | EVERY_ROW,
    ("ftis", ""): {"C": 2.0} | FILTER | CLIP | EVERY_ROW,
    ("fnois", ""): FILTER | CLIP | EVERY_ROW,
    ("fvis", ""): FILTER | RATIO | EVERY_ROW,
    ("dr_grpo", ""): RATIO | EVERY_ROW,
    ("bnpo", ""): RATIO | EVERY_ROW,
    ("gspo", ""): RATIO | EVERY_ROW,
    ("gepo", ""): {"scope": "group"} | RATIO | EVERY_ROW,
    ("gepo_plus", ""): {"near": 0.002} | RATIO | EVERY_ROW,
    ("ds_gspo", ""): {"mix": 0.005} | RATIO | EVERY_ROW,
    ("cispo", ""): {"clip_high": 4.0} | EVERY_ROW,
    ("topr", ""): EVERY_ROW,
    ("gmpo", ""): {"log_clip": 0.4, "delta": inf} | EVERY_ROW,
    ("uplift", ""): UPLIFT,
    ("sapo_swarm", ""): CLIP | EVERY_ROW,
    ("ftis", "code"): {"C": 2.0} | FILTER | CLIP | EVERY_ROW | {"kl_over": "group"},
    ("gepo", "code"): {"scope": "microbatch"} | RATIO | EVERY_ROW | {"toward": "code"},
    ("topr", "filtered"): FILTER | EVERY_ROW,
    ("uplift", "relative"): UPLIFT | {"scale": 2.0},
    ("uplift", "rehearsed"): UPLIFT | {"rehearse": 0.3},
    ("uplift", "both"): UPLIFT | {"scale": 1.0, "rehearse": 0.3},
    ("uplift", "kept"): UPLIFT | {"scale": 1.0, "rehearse": 0.3, "keep": 16.0},
    ("uplift", "sure"): UPLIFT | {"scale": 1.0, "rehearse": 0.3, "keep": 16.0, "sure": 1.0},
    ("uplift", "gated"): UPLIFT | {"scale": 1.0, "rehearse": 0.3, "keep": 16.0, "gate": 8.0},
    ("uplift", "relative_rehearsed"): UPLIFT | {"scale": 1.0, "rehearse": 0.3},
    ("uplift", "floored"): UPLIFT | {"floor": 0.3, "C": 2.0},
    ("uplift", "shaped"): UPLIFT | {"gamma": 0.1},
    ("uplift", "relative_shaped"): UPLIFT | {"scale": 2.0, "gamma": 0.1},
    ("uplift", "relative_rehearsed_shaped"): UPLIFT | {"scale": 1.0, "rehearse": 0.3, "gamma": 0.1},
    ("uplift", "capped"): UPLIFT | {"foreign_cap": 0.5},
    ("uplift", "relative_capped"): UPLIFT | {"scale": 2.0, "rehearse": 0.3, "foreign_cap": 0.5},
}
for _name in ("grpo", "fvis", "dr_grpo", "bnpo", "gspo", "gepo", "gepo_plus", "ds_gspo", "gmpo"):
    SETTINGS[(_name, "published")] = SETTINGS[(_name, "")] | {"dual_clip": inf}

SETTINGS |= {
    ("hacpo", ""): {"most_skill": 10.0}
    | RATIO
    | {"cross_clip": 0.8, "cross_step": 0.025, "alpha": 1.0}
    | EVERY_ROW,
    ("grpo", "batch_std"): RATIO | EVERY_ROW,
    ("tis", "token_mask"): {"C": 3.0} | CLIP | EVERY_ROW,
    ("tis", "sequence"): {"C": 3.0} | CLIP | EVERY_ROW,
    ("tis", "sequence_mask"): {"C": 3.0} | CLIP | EVERY_ROW,
    ("tis", "trl"): {"C": 3.0} | CLIP | EVERY_ROW,
    ("dapo", ""): RATIO | {"clip_high": 0.28} | EVERY_ROW,
    ("sapo", ""): {"tau_pos": 1.0, "tau_neg": 1.05} | EVERY_ROW,
    ("rloo", ""): RATIO | EVERY_ROW,
    ("reinforce_pp", ""): {"baseline": "none"} | RATIO | EVERY_ROW,
    ("reinforce_pp", "baseline"): {"baseline": "group"} | RATIO | EVERY_ROW,
    ("dppo", ""): {"mask_low": 0.2, "mask_high": 0.2, "tau": 1e-3} | EVERY_ROW,
    ("m2po", ""): {"budget": 0.04} | EVERY_ROW,
    ("vcpo", ""): {"C": 8.0, "base_ess": 1.0, "ess": "truncated"} | EVERY_ROW,
}
for _name in ("dapo", "rloo", "reinforce_pp"):
    SETTINGS[(_name, "published")] = SETTINGS[(_name, "")] | {"dual_clip": inf}


@pytest.mark.parametrize(("name", "variant"), ROWS, ids=ROW_IDS)
def test_row_lists_exactly_its_settings_and_their_values(name: str, variant: str) -> None:
    assert objective(name, variant).settings() == SETTINGS[(name, variant)]


@pytest.mark.parametrize(("name", "variant"), ROWS, ids=ROW_IDS)
def test_every_listed_number_can_be_set_and_nothing_else_moves(name: str, variant: str) -> None:
    before = objective(name, variant).settings()
    for setting, value in before.items():
        if not isinstance(value, str):
            # a cap must stay above the floor, a bound on a ratio above 1
            new = 9.0 if setting in ("C", "delta", "dual_clip", "most_skill") else 0.125
            after = objective(name, variant, {setting: new}).settings()
            assert after == before | {setting: new}


@pytest.mark.parametrize(
    ("name", "setting", "choices"),
    [
        ("ftis", "kl", ("k3", "k1")),
        ("ftis", "kl_over", ("own", "group")),
        ("gepo", "scope", ("group", "microbatch")),
        ("gepo", "toward", ("sampler", "code", "reference")),
        ("gepo", "beta_times", ("one", "ratio")),
        ("reinforce_pp", "baseline", ("none", "group")),
        ("vcpo", "ess", ("truncated", "free")),
    ],
)
def test_every_choice_can_be_set(name: str, setting: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert objective(name, settings={setting: choice}).settings()[setting] == choice


@pytest.mark.parametrize(
    ("beta", "toward", "needs"),
    [
        (0.5, "reference", True),
        (0.0, "reference", False),
        (0.5, "sampler", False),
        (0.5, "code", False),
        (0.0, "sampler", False),
    ],
)
def test_only_a_penalty_toward_it_needs_a_reference(beta: float, toward: str, needs: bool) -> None:
    row = objective("grpo", settings={"beta": beta, "toward": toward})
    assert row.penalty.needs_reference == needs


def test_changing_a_row_leaves_the_table_as_it_was() -> None:
    assert objective("ftis", settings={"g": 10.0}).filter.g == 10.0
    assert OBJECTIVES["ftis"].filter.g == 50.0
    assert objective("ftis") == OBJECTIVES["ftis"]


def test_a_variant_is_looked_up_under_its_row() -> None:
    assert objective("ftis", "code") == VARIANTS["ftis"]["code"]
    assert not objective("ftis", "code").end_token
    assert objective("ftis").end_token


def test_settings_of_a_row_made_by_hand() -> None:
    assert Objective(weight=Truncated(C=3.0)).settings() == {"C": 3.0} | EVERY_ROW


def test_whole_numbers_are_numbers() -> None:
    assert objective("ftis", settings={"g": 10}).filter.g == 10


def test_unknown_objective_is_told_the_known_ones() -> None:
    with pytest.raises(
        ValueError,
        match=r"^objective 'vis' is not known; choose one of alone, nois, .*, sapo_swarm$",
    ):
        objective("vis")


def test_a_row_and_its_variant_in_one_word_are_told_apart() -> None:
    with pytest.raises(ValueError, match=r"write objective = 'uplift' and variant = 'kept'$"):
        objective("uplift/kept")
    with pytest.raises(ValueError, match=r"^objective 'vis/kept' is not known; choose one of"):
        objective("vis/kept")


def test_unknown_variant_is_told_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^objective 'ftis' has no variant 'paper'; it has code$"):
        objective("ftis", "paper")
    with pytest.raises(ValueError, match=r"^objective 'nois' has no variant 'code'; it has none$"):
        objective("nois", "code")
    with pytest.raises(ValueError, match=r"has no variant 'x'; it has both, kept, sure, gated, "):
        objective("uplift", "x")


def test_setting_of_another_row_is_told_those_of_this_one() -> None:
    expected = (
        r"^objective setting 'foreign' is not used by this objective; it uses C, beta, beta_times, "
        r"clip_high, clip_low, dual_clip, held, keep, toward$"
    )
    with pytest.raises(ValueError, match=expected):
        objective("tis", settings={"foreign": 1.0})


def test_misspelt_setting_is_told_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"clip_low, delta, dual_clip, held, keep, toward; did you mean clip_high\?$",
    ):
        objective("grpo", settings={"clip_hi": 0.3})


def test_number_where_text_is_meant_and_text_where_a_number_is_meant() -> None:
    with pytest.raises(
        ValueError, match=r"^objective setting kl = 3: expected text, such as 'k3'$"
    ):
        objective("ftis", settings={"kl": 3})
    with pytest.raises(
        ValueError, match=r"^objective setting g = 'fifty': expected a number, such as 50.0$"
    ):
        objective("ftis", settings={"g": "fifty"})


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("ftis", "kl", "k2"),
        ("ftis", "kl_over", "batch"),
        ("gepo", "scope", "Group"),
        ("gepo", "toward", "learner"),
        ("gepo", "beta_times", "rho"),
        ("reinforce_pp", "baseline", "batch"),
        ("vcpo", "ess", "bounded"),
    ],
)
def test_unknown_choice_is_refused(name: str, setting: str, value: str) -> None:
    with pytest.raises(ValueError, match=setting):
        objective(name, settings={setting: value})


@pytest.mark.parametrize(
    ("name", "setting", "least"),
    [
        ("ftis", "g", -inf),
        ("ftis", "C", 0.0),
        ("grpo", "dual_clip", 1.0),
        ("grpo", "delta", 1.0),
        ("hacpo", "most_skill", 1.0),
        ("uplift", "keep", 0.0),
        ("sapo", "tau_pos", 0.01),
        ("sapo", "tau_neg", 0.01),
        ("vcpo", "base_ess", 0.01),
    ],
)
def test_the_least_of_a_setting_is_taken_and_no_less(name: str, setting: str, least: float) -> None:
    assert objective(name, settings={setting: least}).settings()[setting] == least
    if least > -inf:
        with pytest.raises(ValueError, match=f"expected a number of at least {least:g}, such as"):
            objective(name, settings={setting: least - 0.001})


def test_settings_out_of_range_are_refused() -> None:
    for name, settings, expected in (
        (
            "gepo",
            {"beta": -0.1},
            "objective setting beta = -0.1: expected a number of at least 0, such as 0.0",
        ),
        (
            "ftis",
            {"C": float("nan")},
            "objective setting C = nan: expected a number of at least 0, such as 2.0",
        ),
        (
            "grpo",
            {"dual_clip": 0.5},
            "objective setting dual_clip = 0.5: expected a number of at least 1, such as 3.0",
        ),
        ("ftis", {"kl": "k2"}, "objective setting kl = 'k2': expected one of k3, k1"),
        (
            "uplift",
            {"floor": 1.5},
            "objective setting floor = 1.5 is above C = 1.0; raise C or lower floor",
        ),
    ):
        with pytest.raises(ValueError, match="objective setting") as refused:
            objective(name, settings=settings)
        assert str(refused.value) == expected
    assert objective("uplift", settings={"floor": 1.0}).weight == OBJECTIVES["uplift"].weight
    assert objective("gepo", settings={"beta": 0.0}).penalty.beta == 0
    assert objective("ftis", settings={"g": -1.0}).filter.g == -1
