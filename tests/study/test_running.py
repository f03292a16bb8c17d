from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.config import CrewConfig, config_text, parse_config
from motley.study import running
from motley.study.arms import Arm, parse_arms
from motley.study.outcomes import Outcome, Spent, read_outcomes
from motley.study.processes import Job, Lost
from motley.study.running import Ended, Studied, folder_name, run_study

GAIN = {"alone": 0.0, "alone/own": -0.1, "ftis": 0.1, "best": 0.2}


def crew(name: str) -> CrewConfig:
    return parse_config(
        f'[crew]\nname = "{name}"\ntask = "digits"\nrounds = 4\ngroup_size = 4\n'
        'problems_per_round = 4\nobjective = "ftis"\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n'
        '[[peer]]\nname = "b"\nmodel = "tiny:1m"\n'
    )


class Fakes:
    """Runs that are made up at once, in this process."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, int]] = []
        self.warmed: list[str] = []
        self.die: Callable[[str, str, int], bool] = lambda crew, arm, seed: False

    def run(self, crew: Studied, arm: Arm, seed: int) -> tuple[Studied, list[Outcome]]:
        self.made.append((crew.name, arm.label, seed))
        weights = crew.folder / "runs" / folder_name(arm.label, seed) / crew.name / "checkpoints"
        weights.mkdir(parents=True)
        end = 0.5 + GAIN[arm.label] + 0.01 * ((seed + 3 * len(arm.label)) % 4)
        return crew, [
            Outcome(
                arm=arm.label,
                seed=seed,
                peer=peer.name,
                start={"x": 0.6},
                end={"x": end},
                lowest={"x": 0.55},
                ood={},
                spent=Spent(sampled=1000, own=500, foreign=500, seconds=1.0),
                made=arm.made,
            )
            for peer in crew.config.students
        ]

    def make_all(
        self, num: int, first: Sequence[Job[None]], then: Sequence[Job[Any]], kept: Any
    ) -> list[Lost]:
        self.warmed += [job.name for job in first]
        assert {name for job in then for name in job.needs} == {job.name for job in first}
        lost = []
        for job in then:
            crew, arm, seed = job.call.args  # type: ignore[attr-defined]
            if self.die(crew.name, arm.label, seed):
                lost.append(Lost(job.name, "its process was killed by SIGKILL"))
            else:
                kept(job.call())
        return lost


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    monkeypatch.setattr(running, "_run", found.run)
    monkeypatch.setattr(running, "make_all", found.make_all)
    return found


def studied(
    folder: Path, arms: str, seeds: int, *names: str
) -> tuple[Ended, list[tuple[int, int]]]:
    counted: list[tuple[int, int]] = []
    crews = [Studied(crew(name), folder / name) for name in names]
    progress = lambda done, total: counted.append((done, total))
    return run_study(crews, parse_arms(arms), range(seeds), 2, progress), counted


def test_crews_share_one_pool_and_keep_their_outcomes_apart(tmp_path: Path, fakes: Fakes) -> None:
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    assert counted == [(done, 8) for done in range(9)]
    # seed by seed, so that a study that is stopped has something of every crew
    assert [(name, seed) for name, _, seed in fakes.made[::2]] == [
        ("near", 0),
        ("far", 0),
        ("near", 1),
        ("far", 1),
    ]
    assert len(fakes.warmed) == len(set(fakes.warmed)) == 2 * 2 * 2
    for name in ("near", "far"):
        assert read_outcomes(tmp_path / name / "outcomes.jsonl") == ended.outcomes[name]
        assert (tmp_path / name / "crew.toml").exists()
    assert list(tmp_path.glob("*/runs/*/*/checkpoints")) == []  # once outcomes are kept


def test_a_study_goes_on_with_more_crews_arms_and_seeds(tmp_path: Path, fakes: Fakes) -> None:
    studied(tmp_path, "alone ftis", 1, "near")
    ended, counted = studied(tmp_path, "ftis alone", 2, "near", "far")
    assert counted[0] == (2, 8)
    assert len(fakes.made) == len(set(fakes.made)) == 8
    less, counted = studied(tmp_path, "ftis", 1, "far")
    assert (counted, {o.arm for o in less.outcomes["far"]}) == ([(1, 1)], {"ftis"})
    assert ended.lost == []


def test_a_run_that_died_is_named_the_others_go_on_and_it_is_made_again(
    tmp_path: Path, fakes: Fakes
) -> None:
    fakes.die = lambda crew, arm, seed: (crew, arm, seed) == ("far", "ftis", 0)
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    assert ended.lost == [Lost("crew far, arm ftis, seed 0", "its process was killed by SIGKILL")]
    assert counted[-1] == (7, 8)
    fakes.die = lambda crew, arm, seed: False
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    assert (counted, ended.lost) == ([(7, 8), (8, 8)], [])


def test_the_name_of_an_arm_cannot_come_to_mean_something_else(
    tmp_path: Path, fakes: Fakes
) -> None:
    ended, _ = studied(tmp_path, "best=ftis:C=3", 1, "near")
    assert {(o.arm, o.made) for o in ended.outcomes["near"]} == {("best", "ftis:C=3")}
    studied(tmp_path, "best=ftis:C=3", 1, "near")
    with pytest.raises(
        ValueError, match=r"arm best=topr: .*holds runs of best=ftis:C=3; choose an"
    ):
        studied(tmp_path, "best=topr", 1, "near")


def test_two_crews_of_one_name_are_refused(tmp_path: Path, fakes: Fakes) -> None:
    with pytest.raises(ValueError, match="different names; got near, near"):
        studied(tmp_path, "ftis", 1, "near", "near")


def test_folders_of_runs_are_short_and_differ() -> None:
    assert folder_name("uplift/relative:scale=1", 0) == "uplift-relative-scale=1-0"
    long = ["ftis:" + "x" * 100 + letter for letter in "ab"]
    assert len({folder_name(label, 0) for label in long}) == 2
    assert all(len(folder_name(label, 0)) < 100 for label in long)
    assert "/" not in folder_name('ftis:task.kinds=["a/b"]', 0)


# Command line


def motley(*arguments: object, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["study", *map(str, arguments)])
    assert result.exit_code == code, (result.output, result.stderr, result.exception)
    return result


def files(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / f"{name}.toml").write_text(config_text(crew(name)))
    return [folder / f"{name}.toml" for name in names]


ARMS = "alone alone/own best=ftis:C=3,crew.problems_per_round=8"


def test_several_crew_files_are_one_study(tmp_path: Path, fakes: Fakes) -> None:
    out = tmp_path / "out"
    two = files(tmp_path / "crews", "near", "far")
    result = motley(*two, "--arms", ARMS, "--seeds", 3, "--out", out)
    for text in ("## near", "## far", "## Over crews", "warning: 3 seeds"):
        assert text in result.stdout
    assert result.stdout.startswith((out / "table.md").read_text())
    assert "best = ftis:C=3,crew.problems_per_round=8" in (out / "report.html").read_text()
    assert len((out / "comparisons.csv").read_text().splitlines()) == 1 + 2 * 3 * 2 + 2
    # the folder of the files is the same study, and so is the folder of the study
    for folder in (tmp_path / "crews", out):
        again = json.loads(
            motley(folder, "--arms", ARMS, "--seeds", 3, "--out", out, "--json").stdout
        )
        assert sorted(again["crews"]) == ["far", "near"]
        assert [(one["arm"], one["opponent"]) for one in again["over_crews"]] == [
            ("best", "alone"),
            ("best", "alone/own"),
        ]
        assert again["lost"] == []
    assert len(fakes.made) == 2 * 3 * 3


def test_crews_drawn_by_a_seed_are_written_down_and_run(tmp_path: Path, fakes: Fakes) -> None:
    options = ["--drawn", 2, "--draw-seed", 7, "--arms", "alone ftis", "--seeds", 1]
    found = json.loads(
        motley(*options, "--set", "crew.rounds=3", "--out", tmp_path, "--json").stdout
    )
    written = sorted(path.parent.name for path in tmp_path.glob("*/crew.toml"))
    assert written == sorted(found["crews"]) == ["drawn_7_0", "drawn_7_1"]
    assert all("rounds = 3" in p.read_text() for p in tmp_path.glob("*/crew.toml"))
    one = tmp_path / "one"
    motley("--drawn", 1, "--arms", "ftis", "--seeds", 1, "--out", one)
    assert (one / "drawn_0_0" / "crew.toml").exists()


def test_seeds_begin_where_they_are_told_to(tmp_path: Path, fakes: Fakes) -> None:
    (file,) = files(tmp_path, "near")
    out = tmp_path / "out"
    motley(file, "--arms", "alone", "--seeds", 2, "--first-seed", 3, "--out", out)
    assert {one.seed for one in read_outcomes(out / "outcomes.jsonl")} == {3, 4}


def test_a_study_with_a_lost_run_reports_the_others_and_fails(tmp_path: Path, fakes: Fakes) -> None:
    (file,) = files(tmp_path, "near")
    fakes.die = lambda crew, arm, seed: seed == 0 and arm != "alone"
    command = [file, "--arms", "alone ftis", "--seeds", 3, "--out", tmp_path / "out"]
    result = motley(*command, "--json", code=2)
    assert json.loads(result.stdout)["lost"][0]["name"] == "crew near, arm ftis, seed 0"
    words = "error: 1 of 6 runs gave nothing: crew near, arm ftis, seed 0: its process was killed"
    assert words in result.stderr
    assert "2 seeds" in json.loads(result.stdout)["sentences"][0]
    fakes.die = lambda crew, arm, seed: True
    motley(file, "--arms", "topr", "--seeds", 1, "--out", tmp_path / "none", code=2)
    fakes.die = lambda crew, arm, seed: False
    assert "3 seeds" in json.loads(motley(*command, "--json").stdout)["sentences"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "there is no crew to study; give crew files, or --drawn 6"), (["."], "has no crew")],
)
def test_a_study_of_nothing_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in motley(*arguments, "--arms", "ftis", code=2).stderr
