from __future__ import annotations

import re

import pytest

from motley.config import parse_config
from motley.study.arms import Arm, crews_of, parse_arm, parse_arms

CREW = parse_config(
    '[crew]\nname = "c"\ntask = "digits"\nrounds = 1\ngroup_size = 4\nproblems_per_round = '
    '4\nobjective = "gepo"\nvariant = "code"\n'
    '[objective]\nbeta = 0.1\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n[[peer]]\nname = '
    '"b"\nmodel = "tiny:1m"\n'
)


def arm(text: str, objective: str, variant: str = "", **settings: float | str) -> Arm:
    return Arm(text, objective, variant, settings, (), text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("ftis", arm("ftis", "ftis")),
        ("uplift/relative", arm("uplift/relative", "uplift", "relative")),
        (
            "uplift/relative:scale=1,g=1e1",
            arm("uplift/relative:scale=1,g=1e1", "uplift", "relative", scale=1.0, g=10.0),
        ),
        ("ftis:kl_over=group", arm("ftis:kl_over=group", "ftis", kl_over="group")),
        (
            "best=uplift/relative:g=2,crew.rounds=3",
            Arm(
                "best",
                "uplift",
                "relative",
                {"g": 2.0},
                ("crew.rounds=3",),
                "uplift/relative:g=2,crew.rounds=3",
            ),
        ),
    ],
)
def test_an_arm_is_an_objective_a_variant_and_settings(text: str, found: Arm) -> None:
    assert parse_arm(text) == found


def test_a_setting_without_a_value_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"^arm 'ftis:g': 'g' is not key=value; write arms like uplift/relative:scale=1,",
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


def test_an_arm_may_change_how_a_crew_learns() -> None:
    arm = parse_arm("ftis:C=3,learning.epochs=4,learning.schedule=cosine,learning.lr=1e-4")
    (crew,) = crews_of(CREW, arm, seed=0)
    assert crew.objective == {"C": 3.0}
    rules = crew.learning
    assert (rules.epochs, rules.schedule, rules.lr) == (4, "cosine", 1e-4)
    assert rules.grad_clip == CREW.learning.grad_clip
    alone = crews_of(CREW, parse_arm("alone:learning.groups_per_step=2"), seed=0)
    assert [crew.learning.groups_per_step for crew in alone] == [2, 2]
    with pytest.raises(ValueError, match="no settings but those of the crew file's tables"):
        parse_arm("alone:g=2")


@pytest.mark.parametrize(
    ("setting", "words"),
    [("epoch=2", "unknown field `epoch`"), ("epochs=0", "epochs=0"), ("epochs=x", "int")],
)
def test_a_key_that_learning_does_not_have_is_refused(setting: str, words: str) -> None:
    with pytest.raises(ValueError, match=rf"^arm 'ftis:learning.{setting}'.*{words}.*crew_file"):
        crews_of(CREW, parse_arm(f"ftis:learning.{setting}"), seed=0)


def test_the_arm_alone_own_samples_what_a_crew_member_samples() -> None:
    crews = crews_of(CREW, parse_arm("alone/own"), seed=2)
    assert [[p.name for p in crew.peer] for crew in crews] == [["a"], ["b"]]
    assert [(c.problems_per_peer, c.rollouts_per_group) for c in crews] == [(2, 4)] * 2
    assert {crew.crew.objective for crew in crews} == {"alone"}


def test_other_variants_of_alone_are_refused() -> None:
    with pytest.raises(ValueError, match="alone takes no variant but /own and no settings"):
        parse_arm("alone/all")


def test_an_arm_may_change_any_table_of_the_crew_file() -> None:
    text = (
        "ftis:C=3,crew.problems_per_round=8,crew.layout=horizontal,sampling.temperature=0.9,"
        'task.kinds=["sort","sum"],peer.*.model=tiny:2m,peer.b.lora={rank=4,alpha=8},'
        "evaluate.every=2"
    )
    arm = parse_arm(text.replace("peer.b.lora={rank=4,alpha=8},", ""))
    (crew,) = crews_of(CREW, arm, seed=1)
    assert (crew.crew.problems_per_round, crew.crew.layout) == (8, "horizontal")
    assert crew.task == {"kinds": ["sort", "sum"]}
    assert [peer.model for peer in crew.peer] == ["tiny:2m"] * 2
    assert (crew.sampling.temperature, crew.evaluate.every) == (0.9, 2)
    assert (crew.objective, crew.crew.seed) == ({"C": 3.0}, 1)
    assert "peer.b.lora={rank=4,alpha=8}" in parse_arm(text).changes


def test_alone_is_compared_under_the_same_changes_of_the_crew() -> None:
    crews = crews_of(CREW, parse_arm("alone:crew.problems_per_round=8"), seed=0)
    assert [crew.problems_per_peer for crew in crews] == [8, 8]
    crews = crews_of(CREW, parse_arm("alone/own:crew.problems_per_round=8"), seed=0)
    assert [crew.problems_per_peer for crew in crews] == [4, 4]
    crews = crews_of(CREW, parse_arm("alone/own:crew.layout=horizontal"), seed=0)
    assert [(crew.problems_per_peer, crew.rollouts_per_group) for crew in crews] == [(4, 2)] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ftis:crew.seed=3", "crew.seed is not an arm's to set; --seeds"),
        ("ftis:crew.objective=topr", "crew.objective is not an arm's to set; an arm begins with"),
        ("a|b=ftis", r"its name 'a\|b' may have letters, digits"),
        ("=ftis", "its name '' may have letters"),
        ("alone=ftis", "nothing else may have its name"),
        ("alone/own=alone", "nothing else may have its name"),
        ("alone:objective.g=2", "no settings but those of the crew file's tables"),
    ],
)
def test_what_an_arm_cannot_say_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"^arm '{re.escape(text)}': .*{words}"):
        parse_arm(text)


@pytest.mark.parametrize("setting", ["crew.layuot=vertical", "teech.rescue=1", "learning.=2"])
def test_a_table_or_key_that_the_crew_file_does_not_have_is_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=r"^arm 'x': .*; docs/crew_file.md has the keys"):
        crews_of(CREW, parse_arm(f"x=ftis:{setting}"), seed=0)


def test_alone_with_other_settings_may_be_what_arms_are_compared_with() -> None:
    arms = parse_arms("alone=alone:learning.lr=1e-4 ftis")
    assert [arm.label for arm in arms] == ["alone", "ftis"]
    assert crews_of(CREW, arms[0], 0)[0].learning.lr == 1e-4


def test_alone_with_teachers_is_a_crew_and_no_opponent() -> None:
    arm = parse_arm("rescue=alone:teach.rescue=1,crew.meet=0.25")
    assert not arm.is_alone
    assert parse_arm("alone:crew.rounds=3").is_alone
    for text in ("alone=alone:teach.rescue=1", "alone/own:teach.rescue=1"):
        with pytest.raises(ValueError, match="alone"):
            parse_arm(text)
