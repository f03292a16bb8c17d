"""Whole crews that learn from each other's successes: what a run leaves on disk, and that stopped
and resumed anywhere it is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import motley.runs.folder
from fakes import FixedClock, spread_crew
from motley.config import CrewConfig
from motley.learning.fates import read_fates
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, learner_lines, read_metrics

from .test_crew import assert_same_run, finish, groups, metrics, run

pytestmark = pytest.mark.slow  # whole crews


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(motley.runs.folder, "RealClock", FixedClock)
    return folder


def teaching_crew(folder: Path, teach: str, learning: str = "", **crew: Any) -> CrewConfig:
    """About one rollout in five has a reward of 1.6."""
    settings = {"rounds": 6, "group_size": 2, "problems_per_round": 8, "meet": 0.5} | crew
    tables = f"checkpoint_every = 2\n{learning}\n[teach]\nsuccess = 1.6\n{teach}"
    return spread_crew(folder, learning=tables, **settings)


def rescues(folder: Path) -> list[LearnerLine]:
    return [line for line in learner_lines(read_metrics(folder)) if line.met and line.met.rescued]


@pytest.mark.quick
def test_a_crew_rescues_where_one_failed_and_another_did_not(folder: Path) -> None:
    crew = run(teaching_crew(folder, "rescue = 1.0"), folder / "run")
    for round in range(6):
        here = [g for g in groups(crew) if g.round == round]
        problems = {g.problem for g in here if g.slot < 2}
        assert {g.problem for g in here if g.slot >= 2} & problems == set()
        assert len(problems) == 2
        solved = {
            (g.origin.peer, g.problem)
            for g in here
            if g.slot < 2 and any(r.reward >= 1.6 - 1e-6 for r in g.rollouts)
        }
        for line in learner_lines(read_metrics(folder / "run")):
            if line.round == round + 1:
                assert line.met is not None
                assert (line.met.problems, line.version) == (2, round + 1)
                mine = {problem for peer, problem in solved if peer == line.peer}
                theirs = {problem for peer, problem in solved if peer != line.peer}
                assert line.met.failed == 2 - len(mine)
                assert line.met.rescued == len(theirs - mine)
                assert line.num_sequences == 16 + line.met.rescued
    told = read_fates(folder / "run" / "groups" / "fates.jsonl")
    letters = [letter for fates in told for each in fates.groups.values() for letter in each]
    assert letters.count("r") == sum(line.met.rescued or 0 for line in rescues(folder / "run")) > 0


@pytest.mark.parametrize("pace", ["lockstep", "async"])
@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_crew_that_rescues_stopped_anywhere_and_resumed_ends_the_same(
    layout: str, pace: str, folder: Path
) -> None:
    group_size = 4 if layout == "horizontal" else 2
    config = teaching_crew(
        folder,
        "rescue = 0.5\ngamma = 0.1",
        layout=layout,
        pace=pace,
        group_size=group_size,
    )
    whole = run(config, folder / "whole")
    assert rescues(folder / "whole")
    stopped = LocalCrew.start(config, folder / "stopped")
    for _ in zip(range(3), stopped.rounds(), strict=False):
        pass
    assert_same_run(finish(LocalCrew.resume(folder / "stopped")), whole)
    assert metrics(folder / "stopped") == metrics(folder / "whole")


def test_with_the_objective_alone_others_teach_by_rescues_alone(folder: Path) -> None:
    config = teaching_crew(folder, "rescue = 1.0", objective="alone")
    run(config, folder / "run")
    lines = [line for line in learner_lines(read_metrics(folder / "run")) if line.round]
    assert {sender for line in lines for sender in line.senders or {}} == {"full0", "full1"}
    assert all([*(line.senders or {})] == [line.peer] for line in lines)
    assert {(line.num_sequences or 0) - (line.met.rescued or 0) for line in lines if line.met} == {
        8
    }
    assert rescues(folder / "run")
