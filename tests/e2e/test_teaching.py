"""Whole crews that learn from each other's successes: what a run leaves on disk, and that stopped
and resumed anywhere it is the same.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

import motley.runs.folder
from chaos import disturbed_run, metrics_faults, weights
from fakes import FixedClock, spread_crew
from motley.config import Churn, CrewConfig
from motley.learning.fates import read_fates
from motley.learning.select import Candidate
from motley.learning.waiting import Take
from motley.peers.peer import Peer
from motley.records import Group
from motley.runs.local import LocalCrew
from motley.runs.metrics import LearnerLine, learner_lines, read_metrics
from motley.tasks import load_task
from sim.crews import simulated

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


def branches(crew: LocalCrew) -> list[Group]:
    return [group for group in groups(crew) if group.branch]


@pytest.mark.parametrize("choice", ["drawn", "bisected"])
def test_a_crew_continues_successes_where_it_failed(choice: str, folder: Path) -> None:
    config = teaching_crew(folder, f'branch = "{choice}"', rounds=8)
    crew = run(config, folder / "run")
    made = branches(crew)
    assert len(made) > 4
    by_place = {(g.origin.peer, g.round, g.slot): g for g in groups(crew) if not g.branch}
    vocabulary = crew.peers[0].learner.policy.vocabulary
    for group in made:
        author = group.origin.peer
        failed = by_place[author, *group.place]
        assert failed.problem == group.problem
        assert failed.round < group.round
        assert max(r.reward for r in failed.rollouts) < 1.6
        # the prefix is that of a success of the other peer on the same problem
        (other,) = {"full0", "full1"} - {author}
        theirs = by_place[other, *group.place]
        assert theirs.problem == group.problem
        assert any(
            r.reward >= 1.6 - 1e-6 and r.tokens[: len(group.prefix)] == group.prefix
            for r in theirs.rollouts
        )
        for rollout in group.rollouts:
            whole = group.prefix + rollout.tokens
            text = vocabulary.decode_all([whole])[0]
            assert len(whole) <= 16
            assert rollout.reward == pytest.approx(
                (len(set(text)) + (len(text) % 2 == 0)) / 10, abs=1e-6
            )
            assert (rollout.ending == "stop") == (whole[-1] in vocabulary.end_ids)


def test_branches_enter_the_steps_of_their_author_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, Candidate]] = []
    step = Peer.step

    def noting(self: Peer, chosen: Take, *args: Any, **how: Any) -> Any:
        taken.extend((self.me.name, c) for c in chosen.groups)
        return step(self, chosen, *args, **how)

    monkeypatch.setattr(Peer, "step", noting)
    crew = run(teaching_crew(folder, 'branch = "bisected"', rounds=8), folder / "run")
    learned = [(name, c) for name, c in taken if c.group.branch]
    assert all(c.own and c.group.origin.peer == name for name, c in learned)
    # each once, in the round in which it was sampled
    assert sorted(c.group.id for _, c in learned) == sorted(g.id for g in branches(crew))
    assert all(c.group.origin.version == c.group.round for _, c in learned)
    assert not any(peer.waiting.dropped or peer.admission.refused for peer in crew.peers)
    lines = [line for line in learner_lines(read_metrics(folder / "run")) if line.round]
    sampled = Counter((g.origin.peer, g.round + 1) for g in branches(crew))
    for line in lines:
        assert line.met is not None
        assert (line.met.branches or 0) == sampled[line.peer, line.round]
        assert line.num_sequences == 16 + 2 * (line.met.branches or 0)


@pytest.mark.parametrize("pace", ["lockstep", "async"])
@pytest.mark.parametrize("layout", ["vertical", "horizontal"])
def test_a_crew_that_branches_stopped_in_the_middle_and_resumed_ends_the_same(
    layout: str, pace: str, folder: Path
) -> None:
    config = teaching_crew(
        folder,
        'branch = "bisected"\nrescue = 0.5',
        layout=layout,
        pace=pace,
        rounds=7,
        group_size=4 if layout == "horizontal" else 2,
    )
    whole = run(config, folder / "whole")
    assert branches(whole)
    stopped = LocalCrew.start(config, folder / "stopped")
    for _ in zip(range(3 if pace == "lockstep" else 4), stopped.rounds(), strict=False):
        pass
    assert any(
        one.low > 0 or one.high < len(one.tokens)
        for peer in stopped.peers
        for one in peer.state().prefixes.waiting
    )
    assert_same_run(finish(LocalCrew.resume(folder / "stopped")), whole)
    assert metrics(folder / "stopped") == metrics(folder / "whole")


def test_the_running_success_of_a_peer_does_not_count_branches(folder: Path) -> None:
    config = teaching_crew(folder, 'branch = "drawn"', learning="success_memory = 0.0")
    crew = run(config, folder / "run")
    last = [g for g in groups(crew) if g.round == 5 and not g.branch]
    task = load_task(config.crew.task, config.task)
    for peer in crew.peers:
        rewards: dict[str, list[float]] = {}
        for group in last:
            if group.origin.peer == peer.me.name:
                kind = peer.half.problem_of(group).kind
                rewards.setdefault(kind, []).extend(r.reward for r in group.rollouts)
        for kind, values in rewards.items():
            assert peer.learner.success.of(kind) == pytest.approx(sum(values) / len(values))
        assert {*rewards} <= {*task.kinds}


def test_a_crew_that_branches_and_is_killed_ends_as_if_nothing_had_happened(
    task: Path, tmp_path: Path
) -> None:
    """A process for each peer, at a hub; kill -9 at random moments."""
    config = teaching_crew(task, 'branch = "bisected"\nrescue = 0.5', rounds=16)
    # not in this process: conftest has it compute some products by other kernels than a user's
    reference, rng, killed = tmp_path / "undisturbed", random.Random(3), 0
    disturbed_run(config, reference, rng, 0, timeout_s=600)
    for number in range(10):
        folder = tmp_path / f"disturbed{number}"
        killed += disturbed_run(config, folder, rng, 3 - killed, timeout_s=600).total()
        for peer in config.peer:
            found = read_metrics(folder / peer.name)
            assert any(line.met and line.met.branches for line in learner_lines(found))
            expected = read_metrics(reference / peer.name)
            assert metrics_faults(config, peer.name, found, expected) == []
            assert weights(folder / peer.name, peer.name) == weights(
                reference / peer.name, peer.name
            )
        if killed >= 3:
            break
    assert killed >= 3


def test_a_simulated_crew_that_branches_is_the_same_every_time_and_outlives_a_crash(
    folder: Path,
) -> None:
    config = teaching_crew(folder, 'branch = "bisected"\nrescue = 0.5', pace="async", rounds=8)
    once, twice = (simulated(config, folder / name) for name in ("once", "twice"))
    assert metrics(once.folder) == metrics(twice.folder)
    assert any(line.met and line.met.branched for line in learner_lines(read_metrics(once.folder)))
    first, second = config.peer
    half_way_s = [line.time_s or 0.0 for line in read_metrics(once.folder)][8]
    churn = Churn(crashes=((half_way_s, half_way_s + 0.2),))
    crashing = msgspec.structs.replace(
        config, peer=(msgspec.structs.replace(first, churn=churn), second)
    )
    crew = simulated(crashing, folder / "crashed")
    for student in crew.students:
        assert student.peer.learned_rounds == 8
        assert not student.peer.admission.refused
