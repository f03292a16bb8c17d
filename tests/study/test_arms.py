from __future__ import annotations

import pytest

from motley.config import parse_config
from motley.study.arms import Arm, crews_of, parse_arm

CREW = parse_config(
    '[crew]\nname = "c"\ntask = "digits"\nrounds = 1\ngroup_size = 4\nproblems_per_round = '
    '4\nobjective = "gepo"\nvariant = "code"\n'
    '[objective]\nbeta = 0.1\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n[[peer]]\nname = '
    '"b"\nmodel = "tiny:1m"\n'
)


@pytest.mark.parametrize(
    ("text", "arm"),
    [
        ("ftis", Arm("ftis", "ftis", "", {})),
        ("uplift/relative", Arm("uplift/relative", "uplift", "relative", {})),
        (
            "uplift/relative:scale=1,g=1e1",
            Arm("uplift/relative:scale=1,g=1e1", "uplift", "relative", {"scale": 1.0, "g": 10.0}),
        ),
        ("ftis:kl_over=group", Arm("ftis:kl_over=group", "ftis", "", {"kl_over": "group"})),
    ],
)
def test_an_arm_is_an_objective_a_variant_and_settings(text: str, arm: Arm) -> None:
    assert parse_arm(text) == arm


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"arm 'ftis:g': 'g' is not key=value; write arms like uplift/relative:scale=1,g=10",
    ):
        parse_arm("ftis:g")


def test_an_arm_changes_the_objective_and_the_seed_only() -> None:
    (crew,) = crews_of(CREW, parse_arm("ftis:C=3"), seed=5)
    assert (crew.crew.objective, crew.crew.variant, crew.objective, crew.crew.seed) == (
        "ftis",
        "",
        {"C": 3.0},
        5,
    )
    assert (crew.peer, crew.crew.problems_per_round, crew.learning) == (CREW.peer, 4, CREW.learning)


def test_the_arm_alone_is_a_crew_per_peer_with_all_the_sampling() -> None:
    crews = crews_of(CREW, parse_arm("alone"), seed=2)
    assert [[p.name for p in crew.peer] for crew in crews] == [["a"], ["b"]]
    assert [(crew.problems_per_peer, crew.crew.seed, crew.objective) for crew in crews] == [
        (4, 2, {})
    ] * 2


def test_the_arm_alone_own_samples_what_a_crew_member_samples() -> None:
    crews = crews_of(CREW, parse_arm("alone/own"), seed=2)
    assert [[p.name for p in crew.peer] for crew in crews] == [["a"], ["b"]]
    assert [(c.problems_per_peer, c.rollouts_per_group) for c in crews] == [(2, 4)] * 2
    assert {crew.crew.objective for crew in crews} == {"alone"}


def test_other_variants_of_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="alone takes no variant but /own and no settings"):
        parse_arm("alone/all")
