from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import threading
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from motley.cli import app
from motley.clock import VirtualClock
from motley.config import CrewConfig, config_text, parse_config, with_changes
from motley.files import hold
from motley.runs.metrics import LearnerLine
from motley.study import running
from motley.study.arms import Arm, parse_arms
from motley.study.holding import end_with_the_study
from motley.study.outcomes import Outcome, Spent, lines_lacking, read_outcomes
from motley.study.plans import EstimatorPlan
from motley.study.processes import Heard, Job, Lost, Tell
from motley.study.running import Ended, KeyedRun, Studied, Wanted, run_study
from motley.study.shared_gpu import SharedGpu

REAL_RUN = running._run
MOST_S = 120  # that a test waits for what never comes
GAIN = {"alone": 0.0, "alone/own": -0.1, "ftis": 0.1, "best": 0.2}


def crew(name: str) -> CrewConfig:
    return parse_config(
        f'[crew]\nname = "{name}"\ntask = "digits"\nrounds = 4\ngroup_size = 4\n'
        'problems_per_round = 4\nobjective = "ftis"\n[[peer]]\nname = "a"\nmodel = "tiny:1m"\n'
        "warm = { kinds = ['sort'], steps = 1 }\n"
        '[[peer]]\nname = "b"\nmodel = "tiny:1m"\nwarm = { kinds = ["sort"], steps = 1 }\n'
    )


class Fakes:
    """Runs that are made up at once, in this process."""

    def __init__(self) -> None:
        self.made: list[tuple[str, str, int]] = []
        self.warmed: list[str] = []
        self.die: Callable[[str, str, int], bool] = lambda crew, arm, seed: False

    def run(
        self, run: KeyedRun, arm: Arm, measured: EstimatorPlan | None, saved: bool, tell: Tell
    ) -> str:
        config = run.config
        self.made.append((config.crew.name, arm.label, config.crew.seed))
        tell(0.5)
        for large in ("checkpoints", "groups/traces/a"):
            (run.folder / large).mkdir(parents=True, exist_ok=True)
        (run.folder / "metrics.jsonl").touch()
        end = 0.5 + GAIN[arm.label] + 0.01 * ((config.crew.seed + 3 * len(arm.label)) % 4)
        outcomes = [
            Outcome(
                arm=arm.label,
                seed=config.crew.seed,
                peer=peer.name,
                start={"x": 0.6},
                end={"x": end},
                lowest={"x": 0.55},
                ood={},
                spent=Spent(sampled=1000, own=500, foreign=500, seconds=1.0),
                made=arm.made,
                key=run.key,
            )
            for peer in config.students
        ]
        run.path.unlink(missing_ok=True)
        running.keep(run.path, outcomes)
        return run.key

    def make_all(
        self,
        num: int,
        first: Sequence[Job[None]],
        then: Sequence[Job[str]],
        kept: Callable[[str], None],
        heard: Heard,
        gpu: SharedGpu | None,
    ) -> list[Lost]:
        self.warmed += [job.name for job in first]
        assert {name for job in then for name in job.needs} == {job.name for job in first}
        assert gpu is None  # tiny models compute on the CPU
        lost = []
        for job in then:
            run, arm, *_ = job.call.args  # type: ignore[attr-defined]
            if self.die(run.config.crew.name, arm.label, run.config.crew.seed):
                lost.append(Lost(job.name, "its process was killed by SIGKILL"))
            else:
                kept(job.call(partial(heard, job.name)))
        return lost


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    found = Fakes()
    monkeypatch.setattr(running, "_run", found.run)
    monkeypatch.setattr(running, "make_all", found.make_all)
    return found


def counting(
    crews: Sequence[Studied], arms: str, seeds: int
) -> tuple[Ended, list[tuple[float, int]]]:
    counted: list[tuple[float, int]] = []
    progress = lambda done, total: counted.append((done, total))
    each = [(arm, range(seeds)) for arm in parse_arms(arms)]
    return run_study(crews, each, 2, progress), counted


def studied(
    folder: Path, arms: str, seeds: int, *names: str
) -> tuple[Ended, list[tuple[float, int]]]:
    crews = [Studied(crew(name), folder / name, folder / "runs") for name in names]
    return counting(crews, arms, seeds)


def test_crews_share_one_pool_and_keep_their_outcomes_apart(tmp_path: Path, fakes: Fakes) -> None:
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    # of alone there is a run for each of two peers, and a run counts before it is over
    assert counted == [(half / 2, 12) for half in range(25)]
    # seed by seed, so that a study that is stopped has something of every crew
    assert [(name, seed) for name, _, seed in fakes.made if "alone" not in name] == [
        ("near", 0),
        ("far", 0),
        ("near", 1),
        ("far", 1),
    ]
    assert len(fakes.warmed) == len(set(fakes.warmed)) == 2 * 2 * 2
    for name in ("near", "far"):
        assert read_outcomes(tmp_path / name / "outcomes.jsonl") == ended.outcomes[name]
        assert (tmp_path / name / "crew.toml").exists()
    assert len(ended.runs) == len(list((tmp_path / "runs").iterdir())) == 12
    for large in ("checkpoints", "groups/traces"):
        assert list(tmp_path.glob(f"runs/*/{large}")) == []  # once outcomes are kept


def test_a_study_goes_on_with_more_crews_arms_and_seeds(tmp_path: Path, fakes: Fakes) -> None:
    studied(tmp_path, "alone ftis", 1, "near")
    ended, counted = studied(tmp_path, "ftis alone", 2, "near", "far")
    assert counted[0] == (3, 12)
    assert len(fakes.made) == len(set(fakes.made)) == 12
    less, counted = studied(tmp_path, "ftis", 1, "far")
    assert (counted, {o.arm for o in less.outcomes["far"]}) == ([(1, 1)], {"ftis"})
    assert ended.lost == []


def test_a_run_that_died_is_named_the_others_go_on_and_it_is_made_again(
    tmp_path: Path, fakes: Fakes
) -> None:
    fakes.die = lambda crew, arm, seed: (crew, arm, seed) == ("far", "ftis", 0)
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    assert ended.lost == [Lost("crew far, arm ftis, seed 0", "its process was killed by SIGKILL")]
    assert (counted[-1], ended.total) == ((11, 12), 12)
    fakes.die = lambda crew, arm, seed: False
    ended, counted = studied(tmp_path, "alone ftis", 2, "near", "far")
    assert (counted, ended.lost) == ([(11, 12), (11.5, 12), (12, 12)], [])


def test_the_same_run_is_made_once_whatever_it_is_called(tmp_path: Path, fakes: Fakes) -> None:
    """Under two names of one study, and in another study of the same folder."""
    ended, counted = studied(tmp_path, "ftis best=ftis", 1, "near")
    assert counted[-1] == (1, 1)
    assert [(o.arm, o.made) for o in ended.outcomes["near"]] == [
        ("ftis", ""),
        ("ftis", ""),
        ("best", "ftis"),
        ("best", "ftis"),
    ]
    other = Studied(crew("near"), tmp_path / "other" / "near", tmp_path / "runs")
    again, counted = counting([other], "alone ftis", 1)
    assert counted[0] == (1, 3)
    assert {o.arm for o in again.outcomes["near"]} == {"alone", "ftis"}
    assert [name for name, _, _ in fakes.made] == ["near", "near-alone-a", "near-alone-b"]


def test_another_crew_of_the_same_name_makes_new_runs_and_keeps_the_old(
    tmp_path: Path, fakes: Fakes
) -> None:
    def of(config: CrewConfig) -> tuple[Ended, list[tuple[float, int]]]:
        return counting([Studied(config, tmp_path / "near", tmp_path / "runs")], "ftis", 1)

    of(crew("near"))
    changed = with_changes(crew("near"), ["learning.lr=1e-5"])
    assert of(changed)[1][0] == (0, 1)
    assert len(list((tmp_path / "runs").iterdir())) == 2
    assert of(crew("near"))[1] == [(1, 1)]
    # where it is computed, and how often it is saved, makes it no other run
    elsewhere = with_changes(crew("near"), ["peer.a.device=cpu", "learning.checkpoint_every=2"])
    assert of(elsewhere)[1] == [(1, 1)]


def test_arms_may_have_different_numbers_of_seeds(tmp_path: Path, fakes: Fakes) -> None:
    alone, ftis = parse_arms("alone/own ftis")
    crews = [Studied(crew("near"), tmp_path, tmp_path / "runs")]
    ended = run_study(crews, [(alone, range(3)), (ftis, range(1))], 2, lambda done, total: None)
    seeds = {(o.arm, o.seed) for o in ended.outcomes["near"]}
    assert seeds == {("alone/own", 0), ("alone/own", 1), ("alone/own", 2), ("ftis", 0)}


def test_outcomes_kept_by_names_of_arms_are_taken_over(tmp_path: Path, fakes: Fakes) -> None:
    """Those of version 0.5, whose runs have no keys."""
    studied(tmp_path, "best=ftis:C=3", 1, "near")
    path = tmp_path / "near" / "outcomes.jsonl"
    old = [msgspec.structs.replace(one, key="") for one in read_outcomes(path)]
    path.unlink()
    running.keep(path, old)
    shutil.rmtree(tmp_path / "runs")
    ended, counted = studied(tmp_path, "best=ftis:C=3 ftis", 1, "near")
    assert counted[0] == (0, 1)
    assert [o.arm for o in ended.outcomes["near"]] == ["best", "best", "ftis", "ftis"]
    with pytest.raises(
        ValueError, match=r"arm best=topr: .*holds runs of best=ftis:C=3; choose an"
    ):
        studied(tmp_path, "best=topr", 1, "near")
    other = Studied(
        with_changes(crew("near"), ["crew.rounds=5"]), tmp_path / "near", tmp_path / "runs"
    )
    with pytest.raises(ValueError, match="holds a study of another crew file"):
        counting([other], "ftis", 1)


def run_of(ended: Ended) -> Path:
    """The outcomes of the only run."""
    (run,) = ended.runs
    return run.folder / "outcomes.jsonl"


def spoilt(content: bytes, how: str) -> bytes:
    first, second = content.splitlines(keepends=True)
    return {
        "empty": b"",
        "torn": first + second[:-9],
        "of one peer": first,
        "of another run": content.replace(b'"key":"', b'"key":"0'),
    }[how]


@pytest.mark.parametrize("how", ["empty", "torn", "of one peer", "of another run"])
def test_a_run_whose_outcomes_are_not_whole_is_made_again(
    tmp_path: Path, fakes: Fakes, how: str
) -> None:
    ended, _ = studied(tmp_path, "ftis", 1, "near")
    path = run_of(ended)
    whole = path.read_bytes()
    path.write_bytes(spoilt(whole, how))
    shutil.rmtree(path.parent / "checkpoints", ignore_errors=True)
    shutil.rmtree(path.parent / "groups")
    again, counted = studied(tmp_path, "ftis", 1, "near")
    assert counted[0] == (0, 1)
    assert len(fakes.made) == 2
    assert again.outcomes == ended.outcomes
    assert path.read_bytes() == whole


def test_a_torn_last_line_of_a_studys_own_outcomes_does_not_stop_it(
    tmp_path: Path, fakes: Fakes
) -> None:
    studied(tmp_path, "ftis alone", 1, "near")
    path = tmp_path / "near" / "outcomes.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    studied(tmp_path, "ftis alone", 1, "near")
    assert path.read_bytes() == whole


def test_to_look_at_a_part_of_a_study_keeps_the_outcomes_of_the_rest(
    tmp_path: Path, fakes: Fakes
) -> None:
    studied(tmp_path, "alone ftis best=ftis:C=3", 2, "near")
    path = tmp_path / "near" / "outcomes.jsonl"
    every = lambda: sorted((o.arm, o.seed, o.peer) for o in read_outcomes(path))
    before = every()
    part, _ = studied(tmp_path, "ftis", 1, "near")
    assert {(o.arm, o.seed) for o in part.outcomes["near"]} == {("ftis", 0)}
    assert every() == before
    # but what another crew file came to is no part of this one
    changed = with_changes(crew("near"), ["learning.lr=1e-5"])
    counting([Studied(changed, tmp_path / "near", tmp_path / "runs")], "ftis", 1)
    assert every() == [("ftis", 0, "a"), ("ftis", 0, "b")]


@pytest.mark.parametrize(
    ("arms", "words"),
    [
        ("ftis far=ftis:task.kinds=['sort']", "arm far is measured in accuracy on heldout sort"),
        ("alone=alone:task.kinds=['sort'] ftis", "and arm alone in accuracy on heldout sort"),
        ("ftis few=ftis:evaluate.problems=1", "few is measured on 6 problems, and arm ftis on 384"),
        ("ftis long=ftis:task.levels=[5]", "on 384 problems, and arm ftis on 384, of which 0 are"),
    ],
)
def test_arms_that_are_measured_on_other_problems_are_refused_before_the_first_run(
    tmp_path: Path, fakes: Fakes, arms: str, words: str
) -> None:
    with pytest.raises(ValueError, match=r"so that their means cannot be compared; leave") as error:
        studied(tmp_path, arms, 1, "near")
    assert words in str(error.value)
    assert fakes.made == []
    assert not (tmp_path / "near").exists()


def test_arms_may_set_of_the_task_what_leaves_its_problems_alone(
    tmp_path: Path, fakes: Fakes
) -> None:
    studied(tmp_path, "ftis best=ftis:task.levels=[4]", 1, "near")
    assert len(fakes.made) == 2


def lines(rounds: Sequence[int], evaluated: Sequence[int]) -> list[LearnerLine]:
    return [
        LearnerLine(round=number, peer=peer, heldout={"x": 0.5} if number in evaluated else None)
        for number in rounds
        for peer in "ab"
    ]


@pytest.mark.parametrize(
    ("made", "lacking"),
    [
        (lines(range(5), (0, 2, 4)), ""),
        (lines((0, 1, 3, 4), (0, 4)), "a's round 2"),
        (lines((1, 2, 4), (4,)), "a's rounds 0, 3"),
        (lines(range(4), (0, 3)), "a's round 4"),
        (lines(range(5), (0, 2)), "a's evaluation after round 4"),
        (lines(range(5), (4,)), "a's evaluation after round 0, 2"),
        (lines(range(5), (0, 2, 4))[:-1], "b's round 4"),
    ],
)
def test_a_run_whose_lines_are_not_all_there_is_not_told_of(
    made: list[LearnerLine], lacking: str
) -> None:
    config = with_changes(crew("near"), ["evaluate.every=2"])
    assert lines_lacking(config, made) == lacking


# Two studies at once


def the_run(folder: Path) -> tuple[KeyedRun, Arm]:
    (arm,) = parse_arms("ftis")
    (run,) = Wanted.of(Studied(crew("near"), folder / "near", folder / "runs"), arm, 0).runs
    return run, arm


def unheard(share: float) -> None:
    pass


def test_a_run_is_held_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, arm = the_run(tmp_path)
    lock = run.folder.with_name(f"{run.folder.name}.lock")
    held: list[bool] = []

    def train(run: KeyedRun, measured: None, saved: bool, tell: Tell) -> None:
        shutil.rmtree(run.folder, ignore_errors=True)
        held.append(hold(lock) is None)
        run.folder.mkdir()

    monkeypatch.setattr(running, "_train", train)
    monkeypatch.setattr(running, "_keep_outcomes", lambda run, arm: None)
    assert running._run(run, arm, None, True, unheard) == run.key
    assert held == [True]
    descriptor = hold(lock)  # free again
    assert descriptor is not None
    os.close(descriptor)


def test_a_run_that_another_study_makes_is_waited_for_and_not_made_again(
    tmp_path: Path, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = running_run(monkeypatch)
    run, arm = the_run(tmp_path)
    run.folder.parent.mkdir()
    other = hold(run.folder.with_name(f"{run.folder.name}.lock"))
    assert other is not None

    class Clock(VirtualClock):
        def sleep_s(self, seconds: float) -> None:
            """Meanwhile the other study ends its run."""
            super().sleep_s(seconds)
            if self.now_s() > 3 * seconds:
                fakes.run(run, arm, None, True, unheard)
                os.close(other)

    assert REAL_RUN(run, arm, None, True, unheard, Clock()) == run.key
    assert made == []
    assert run.is_done


def running_run(monkeypatch: pytest.MonkeyPatch) -> list[KeyedRun]:
    """Runs that are really begun."""
    made: list[KeyedRun] = []
    monkeypatch.setattr(running, "_train", lambda run, *_: made.append(run))
    return made


def _wait_for_ever(pipe: Connection) -> None:
    end_with_the_study()
    pipe.send("began")
    threading.Event().wait(MOST_S)


def _begin_a_worker(pipe: Connection) -> None:
    worker = multiprocessing.get_context("spawn").Process(target=_wait_for_ever, args=(pipe,))
    worker.start()
    pipe.close()
    worker.join()


@pytest.mark.slow
def test_a_worker_ends_when_the_study_that_asked_for_it_is_killed() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    study = context.Process(target=_begin_a_worker, args=(there,))
    study.start()
    there.close()
    assert here.recv() == "began"
    study.kill()
    study.join()
    assert here.poll(MOST_S / 2)  # the worker's end closes with it
    with pytest.raises(EOFError):
        here.recv()


def test_two_crews_of_one_name_are_refused(tmp_path: Path, fakes: Fakes) -> None:
    with pytest.raises(ValueError, match="different names; got near, near"):
        studied(tmp_path, "ftis", 1, "near", "near")


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


@pytest.mark.slow
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
    assert len(fakes.made) == 2 * 3 * (2 + 2 + 1)


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


@pytest.mark.slow
def test_a_study_with_a_lost_run_reports_the_others_and_fails(tmp_path: Path, fakes: Fakes) -> None:
    (file,) = files(tmp_path, "near")
    fakes.die = lambda crew, arm, seed: seed == 0 and arm != "alone"
    command = [file, "--arms", "alone ftis", "--seeds", 3, "--out", tmp_path / "out"]
    result = motley(*command, "--json", code=2)
    assert json.loads(result.stdout)["lost"][0]["name"] == "crew near, arm ftis, seed 0"
    words = "error: 1 of 9 runs gave nothing: crew near, arm ftis, seed 0: its process was killed"
    assert words in result.stderr
    assert "2 seeds" in json.loads(result.stdout)["sentences"][0]
    fakes.die = lambda crew, arm, seed: True
    none = [file, "--arms", "topr", "--seeds", 1, "--out", tmp_path / "none"]
    motley(*none, code=2)
    found = json.loads(motley(*none, "--json", code=2).stdout)
    assert [one["name"] for one in found.pop("lost")] == ["crew near, arm topr, seed 0"]
    assert set(found) > {"judgements", "glance", "lines", "standings", "sentences", "below"}
    assert not any(found.values())
    fakes.die = lambda crew, arm, seed: False
    assert "3 seeds" in json.loads(motley(*command, "--json").stdout)["sentences"][0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "there is no crew to study; give the name of a study"), (["."], "has no crew")],
)
def test_a_study_of_nothing_is_refused(
    arguments: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in motley(*arguments, "--arms", "ftis", code=2).stderr
