from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.config import CrewConfig, read_config
from motley.models import named
from motley.runs.checking import check_config
from motley.study.arms import crews_of
from motley.study.plans import Claim, Plan, plan_file, read_plan, shipped_plans, study_of
from motley.study.running import Ended, Studied
from study.test_running import files

PLAN = """\
name = "mine"
question = "Does it pay?"
crews = ["crews/near.toml", "crews/far.toml"]
quick = ["crews/near.toml"]
arms = ["alone", "best=ftis:C=3"]
seeds = 3
more_arms = ["tis"]
settings = ["crew.rounds=7"]

[[claim]]
text = "It pays"
arm = "best"
against = "alone"
is = "better"
"""
NAMES = [
    "delay",
    "ftis-ablation",
    "ftis-adapters",
    "ftis-expertise",
    "ftis-size",
    "ftis-threshold",
    "layouts",
    "sharing",
    "vocabularies",
]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    files(tmp_path / "crews", "near", "far")
    path = tmp_path / "plan_of_mine.toml"
    path.write_text(PLAN)
    return path


def refused(plan: Path, before: str, after: str) -> str:
    text = plan.read_text()
    assert before in text
    plan.write_text(text.replace(before, after))
    with pytest.raises(ValueError, match="study plan") as error:
        read_plan(plan)
    return str(error.value)


# Plans of one's own


def test_a_plan_says_which_crews_arms_and_seeds_are_run(plan: Path) -> None:
    study = study_of(plan)
    assert [config.crew.name for config in study.crews] == ["near", "far"]
    assert {config.crew.rounds for config in study.crews} == {7}
    assert [(arm.label, list(seeds)) for arm, seeds in study.arms] == [
        ("alone", [0, 1, 2]),
        ("best", [0, 1, 2]),
        ("tis", [0]),
    ]
    assert [(c.text, c.is_, c.on) for c in study.claims] == [("It pays", "better", "mean")]


def test_a_command_line_has_the_last_word(plan: Path) -> None:
    study = study_of(plan, quick=True, arms="best tis:C=9", seeds=1, first_seed=4)
    assert (study.name, [config.crew.name for config in study.crews]) == ("mine-quick", ["near"])
    assert [(arm.label, arm.text, list(seeds)) for arm, seeds in study.arms] == [
        ("best", "ftis:C=3", [4]),  # the plan's own, by its name
        ("tis:C=9", "tis:C=9", [4]),
    ]
    assert study.claims == []  # alone is not run
    assert {len(seeds) for _, seeds in study_of(plan, quick=True).arms} == {2}
    assert study_of(plan, settings=["crew.rounds=9"]).crews[0].crew.rounds == 9


def test_gradients_are_measured_of_an_arm_that_is_run_and_not_in_haste(plan: Path) -> None:
    plan.write_text(PLAN + '\n[estimators]\narm = "best"\nrows = "tis ftis"\n')
    asked = study_of(plan).measured
    assert asked
    assert (asked.arm, asked.seeds) == ("best", 1)
    assert study_of(plan, quick=True).measured is None
    assert study_of(plan, arms="alone").measured is None
    assert "[estimators] names arm 'bst'" in refused(
        plan, 'arm = "best"\nrows', 'arm = "bst"\nrows'
    )


def test_files_of_settings_are_named_from_where_the_command_is_given(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (here / "model").mkdir(parents=True)
    (here / "p.jsonl").touch()
    monkeypatch.chdir(here)
    settings = [
        "peer.a.model=model",
        "peer.b.model=some/hub-id",
        "crew.task=gsm8k",
        "task={}",
        "task.file=p.jsonl",
        'task.ood=["p.jsonl", "elsewhere.jsonl"]',
    ]
    config = study_of(plan, quick=True, settings=settings).crews[0]
    assert [peer.model for peer in config.peer] == [str(here / "model"), "some/hub-id"]
    assert config.task["file"] == str(here / "p.jsonl")
    assert config.task["ood"] == [str(here / "p.jsonl"), str(tmp_path / "crews/elsewhere.jsonl")]


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('name = "mine"', 'name = "a/b"', "study name 'a/b' must be letters"),
        ("seeds = 3", "seeds = 0", "seeds=0 runs nothing; use at least 1"),
        ("seeds = 3", "seed = 3", "unknown field `seed`"),
        ('arm = "best"', 'arm = "bst"', "which the plan does not run; did you mean best?"),
        ('is = "better"', 'is = "equivalent"', "needs a margin above 0, such as 0.03"),
        ('is = "better"', 'is = "worse"', "Invalid enum value 'worse'"),
        ('"alone", ', '"alone", "alone", ', "name at least one arm, none twice"),
        ('crews = ["crews/near.toml", "crews/far.toml"]', "crews = []", "has no crews"),
    ],
)
def test_a_wrong_plan_is_refused_in_one_line(
    plan: Path, before: str, after: str, words: str
) -> None:
    told = refused(plan, before, after)
    assert words in told
    assert "docs/studies.md" in told
    assert "\n" not in told


def test_a_crew_file_is_no_plan_and_an_unknown_name_is_guessed(plan: Path, tmp_path: Path) -> None:
    assert plan_file(str(plan)) == plan
    assert plan_file(str(tmp_path / "crews" / "near.toml")) is None
    assert plan_file(str(tmp_path / "crews")) is None
    assert plan_file("ftis-size") == shipped_plans()["ftis-size"]
    with pytest.raises(ValueError, match="no study 'ftis-sise'; did you mean ftis-size"):
        plan_file("ftis-sise")
    with pytest.raises(ValueError, match="no study 'xyz'; known: delay, ftis-ablation"):
        plan_file("xyz")


def test_the_plan_that_the_docs_explain_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    explained = page.split("### A plan, line by line")[1].split("    motley study mine.toml")[0]
    plan = msgspec.toml.decode(textwrap.dedent(explained), type=Plan)
    keys = set(re.findall(r"^    (\w+) = ", explained, re.MULTILINE))
    fields = {field.encode_name for kind in (Plan, Claim) for field in msgspec.structs.fields(kind)}
    assert fields - keys == {"claim", "estimators"}  # tables
    assert plan.claim[0].on == "every peer"


def test_the_docs_list_every_shipped_study() -> None:
    page = (Path(__file__).parents[2] / "docs" / "studies.md").read_text()
    for name in NAMES:
        plan = shipped(name)
        assert f"| `{name}` | {plan.question} | {plan.quick_time.split(' on ')[0]} |" in page


# The command


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[Studied]]:
    """What would be run, instead of running it."""
    found: list[list[Studied]] = []

    def run(crews: list[Studied], *_: Any) -> Ended:
        found.append(crews)
        return Ended({}, [], 0)

    monkeypatch.setattr("motley.study.running.run_study", run)
    return found


def motley(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["study", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def test_studies_of_one_folder_share_their_runs(
    plan: Path, tmp_path: Path, asked: list[list[Studied]]
) -> None:
    out = tmp_path / "out"
    motley(plan, "--out", out)
    motley(plan, "--quick", "--out", out)
    full, quick = asked
    assert [c.folder for c in full] == [out / "mine" / "near", out / "mine" / "far"]
    assert [c.folder for c in quick] == [out / "mine-quick" / "near"]
    assert {c.runs for c in full + quick} == {out / "runs"}


def test_the_folder_of_a_study_is_enough_to_go_on_with_it(
    plan: Path, tmp_path: Path, asked: list[list[Studied]]
) -> None:
    motley(plan, "--out", tmp_path / "out", "--set", "learning.lr=1e-5")
    for one in asked[0]:  # as a study writes them
        one.folder.mkdir(parents=True, exist_ok=True)
        (one.folder / "crew.toml").write_text(msgspec.toml.encode(_plain(one.config)).decode())
    (tmp_path / "out").rename(tmp_path / "moved")
    motley(tmp_path / "moved" / "mine")
    assert asked[1] == [
        Studied(one.config, tmp_path / "moved" / "mine" / one.name, tmp_path / "moved" / "runs")
        for one in asked[0]
    ]
    kept = read_plan(tmp_path / "moved" / "mine" / "plan.toml")
    assert (kept.arms, kept.more_arms, kept.seeds) == (("alone", "best=ftis:C=3"), ("tis",), 3)


def test_runs_are_saved_unless_the_plan_or_the_command_says_otherwise(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[bool] = []

    def run(*given: Any) -> Ended:
        saved.append(given[-1])
        return Ended({}, [], 0)

    monkeypatch.setattr("motley.study.running.run_study", run)
    motley(plan, "--out", tmp_path / "out")
    motley(plan, "--unsaved", "--out", tmp_path / "other")
    assert read_plan(tmp_path / "other" / "mine" / "plan.toml").saved is False
    near = plan.parent / "crews" / "near.toml"
    motley(near, "--arms", "ftis", "--out", tmp_path / "crews")
    motley(near, "--arms", "ftis", "--unsaved", "--out", tmp_path / "crews")
    plan.write_text(f"saved = false\n{PLAN}")
    motley(plan, "--out", tmp_path / "out")
    assert saved == [True, False, True, False, False]


def _plain(config: CrewConfig) -> Any:
    from motley.config.reading import _without_none

    return _without_none(msgspec.to_builtins(config))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ftis-size", "delay"], "is a plan, which names its crews itself; give it alone"),
        (["--quick", "--drawn", "2", "--arms", "ftis"], "--quick is for plans"),
        (["CREW"], "crew files need --arms"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], words: str, plan: Path, asked: list[list[Studied]]
) -> None:
    near = str(plan.parent / "crews" / "near.toml")
    told = motley(*(near if one == "CREW" else one for one in arguments), code=2).stderr
    assert words in told
    assert asked == []


# Those that come with Motley


def test_shipped_studies_are_listed_with_what_they_ask() -> None:
    rows = json.loads(motley("--list", "--json").stdout)["rows"]
    assert [row["study"] for row in rows] == NAMES
    for row in rows:
        assert row["question"].endswith("?")
        assert "min" in row["quick"]
    assert "ftis-size" in motley("--list").stdout


def shipped(name: str) -> Plan:
    return read_plan(shipped_plans()[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_study_can_be_begun(name: str) -> None:
    """Its full crews need models and data; the tiny ones are checked whole, under every arm."""
    plan = shipped(name)
    assert plan.name == name
    assert plan.claim
    assert plan.seeds >= 3
    for config in study_of(shipped_plans()[name]).crews:
        assert config.crew.rounds >= 40
        assert config.evaluate.problems >= 300
        assert config.sampling.max_tokens <= 200
        assert config.learning.token_budget  # runs that share a GPU must not take all of it
    if name == "vocabularies" and not hasattr(named, "TINY_VOCABULARIES"):
        pytest.skip("tiny models have one vocabulary here")
    study = study_of(shipped_plans()[name], quick=True)
    for config in study.crews:
        for arm, _ in study.arms:
            for one in crews_of(config, arm, 0):
                check_config(one)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_shipped_study_claims_can_be_asked_of_its_crews(name: str) -> None:
    plan, folder = shipped(name), shipped_plans()[name].parent
    for files_of in (plan.crews, plan.quick):
        crews = {config.crew.name: config for config in (read_config(folder / f) for f in files_of)}
        peers = {peer.name for config in crews.values() for peer in config.students}
        for claim in plan.claim:
            assert claim.on in {"mean", "ood", "every peer", *peers}, claim
            for named_arm in (claim.arm, claim.against):
                _, _, where = named_arm.partition(" in ")
                assert not where or where in crews, claim


def test_arms_of_sharing_take_so_many_of_eight_groups() -> None:
    study = study_of(shipped_plans()["sharing"])
    shares = {}
    for arm, _ in study.arms:
        (config,) = crews_of(study.crews[0], arm, 0)
        shares[arm.label] = (config.problems_per_peer, 8 * config.learning.own_share)
    assert shares == {"8/0": (8, 8), "6/2": (6, 6), "4/4": (4, 4), "2/6": (2, 2)}


def with_claim(plan: Path, **said: str) -> None:
    """The plan with other words in its claim."""
    claim = {"text": "It pays", "arm": "best", "against": "alone", "is": "better"} | said
    lines = "".join(f'{key} = "{value}"\n' for key, value in claim.items())
    plan.write_text(PLAN.split("[[claim]]")[0] + "[[claim]]\n" + lines)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"on": "revers"}, "is on 'revers', which is no peer and no kind of near and far; did you"),
        ({"on": "c", "arm": "best in far"}, "is no peer and no kind of far; known: mean, ood, eve"),
        ({"arm": "best in fa"}, "crew 'fa', which the study does not have; did you mean far?"),
        ({"against": "alone in nowhere"}, "crew 'nowhere', which the study does not have; known"),
        ({"against": "best"}, "'best' against 'best': the same runs; name another arm"),
        ({"arm": "best in far", "against": "best"}, "the same runs; name another arm"),
    ],
)
def test_a_claim_about_what_is_not_there_is_refused(
    plan: Path, said: dict[str, str], words: str
) -> None:
    with_claim(plan, **said)
    with pytest.raises(ValueError, match=re.escape(words)):
        study_of(plan)


@pytest.mark.parametrize(
    "said", [{"on": "b"}, {"on": "sort"}, {"on": "ood"}, {"arm": "best in far"}]
)
def test_a_claim_about_a_peer_a_kind_or_a_crew_that_is_there_is_kept(
    plan: Path, said: dict[str, str]
) -> None:
    with_claim(plan, **said)
    assert len(study_of(plan).claims) == 1


def test_a_claim_out_of_distribution_needs_a_task_that_has_such_problems(
    plan: Path, tmp_path: Path
) -> None:
    rows = "".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(30))
    (tmp_path / "p.jsonl").write_text(rows)
    for name in ("near", "far"):
        path = tmp_path / "crews" / f"{name}.toml"
        path.write_text(path.read_text().replace('"digits"', '"file:../p.jsonl"'))
    with_claim(plan, on="mean")
    assert len(study_of(plan).claims) == 1
    with_claim(plan, on="ood")
    with pytest.raises(ValueError, match="the task of near and far has no problems out of distrib"):
        study_of(plan)


@pytest.mark.parametrize("name", ["mean", "ood"])
def test_a_claim_is_refused_where_a_peer_has_one_of_its_words_for_a_name(
    plan: Path, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "crews" / "near.toml"
    path.write_text(path.read_text().replace('name = "a"', f'name = "{name}"'))
    with_claim(plan, on="mean")
    with pytest.raises(ValueError, match=f"crew near has a peer '{name}', and a claim means"):
        study_of(plan)


def test_a_claim_about_what_quick_crews_lack_is_left_out(plan: Path) -> None:
    with_claim(plan, arm="best in far")
    assert len(study_of(plan).claims) == 1
    assert study_of(plan, quick=True).claims == []
    with_claim(plan, on="large")
    assert study_of(plan, quick=True).claims == []


@pytest.mark.parametrize("part", [["--arms", "alone"], ["--seeds", "1"], ["--first-seed", "7"]])
def test_to_look_at_a_part_of_a_study_leaves_its_plan_alone(
    plan: Path, tmp_path: Path, asked: list[list[Studied]], part: list[str]
) -> None:
    out = tmp_path / "out"
    motley(plan, "--out", out)
    for one in asked[0]:  # as a study writes them
        one.folder.mkdir(parents=True, exist_ok=True)
        (one.folder / "crew.toml").write_text(msgspec.toml.encode(_plain(one.config)).decode())
    whole = (out / "mine" / "plan.toml").read_bytes()
    motley(out / "mine", *part)
    motley(plan, "--out", out, *part)
    assert (out / "mine" / "plan.toml").read_bytes() == whole
    motley(plan, "--out", tmp_path / "new", *part)  # where nothing was begun it is the plan
    assert (tmp_path / "new" / "mine" / "plan.toml").read_bytes() != whole
