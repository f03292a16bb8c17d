"""Crews that are over early: in one process, in several, simulated; resumed; and their best."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import motley.runs.folder
from fakes import FixedClock, spread_crew
from motley.cli import app
from motley.config import CrewConfig, Evaluate, config_text
from motley.distributed.processes import ProcessCrew
from motley.peers.peer import Peer
from motley.reports.export import export_model
from motley.runs.building import trained_policies
from motley.runs.folder import Run
from motley.runs.lines import Accuracies
from motley.runs.local import LocalCrew
from motley.runs.metrics import read_metrics
from motley.sim.simulation import SimCrew

pytestmark = pytest.mark.slow  # whole crews

# After round 4 neither has done better for two evaluations.
VALUES = {"full0": [0.1, 0.5, 0.4, 0.5, 0.3, 0.9], "lora1": [0.1, 0.2, 0.3, 0.3, 0.1, 0.9]}


def config_of(folder: Path, rules: Evaluate, **crew: object) -> CrewConfig:
    config = spread_crew(
        folder, ("full", "lora"), rounds=5, learning="checkpoint_every = 3", **crew
    )
    return msgspec.structs.replace(config, evaluate=rules)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out values by round, whatever is learned."""

    def measured(run: Run, peer: Peer) -> Accuracies:
        return Accuracies({"spread": VALUES[peer.me.name][peer.learned_rounds]}, None, [])

    monkeypatch.setattr(Run, "accuracies", measured)
    monkeypatch.setattr(motley.runs.folder, "RealClock", FixedClock)


RULES = Evaluate(every=1, problems=2, stop_after=2)


def weights(crew: LocalCrew) -> dict[str, list[torch.Tensor]]:
    return {
        p.me.name: [t.detach().clone() for _, t in p.learner.policy.trained()] for p in crew.peers
    }


def finish(crew: LocalCrew) -> list[dict[str, list[torch.Tensor]]]:
    return [weights(crew) for _ in crew.rounds()]


@pytest.mark.usefixtures("scripted")
def test_a_crew_ends_when_none_of_its_peers_does_better(folder: Path) -> None:
    crew = LocalCrew.start(config_of(folder, RULES), folder / "run")
    after = finish(crew)
    assert (len(after), crew.finished_rounds, crew.finished) == (4, 4, True)
    assert "lora1 was no better than the 0.3 of round 2 in 2 evaluations" in crew.stopped
    assert max(line.round for line in read_metrics(crew.folder)) == 4
    assert (crew.folder / "checkpoints" / "round-000004").exists()
    best = {p.name: [f.name for f in p.iterdir()] for p in (crew.folder / "best").iterdir()}
    assert best == {"full0": ["round-000001"], "lora1": ["round-000002"]}
    for name, policy in trained_policies(crew.folder, best=True).items():
        expected = after[{"full0": 0, "lora1": 1}[name]][name]
        assert all(torch.equal(p, e) for (_, p), e in zip(policy.trained(), expected, strict=True))


@pytest.mark.usefixtures("scripted")
def test_a_crew_that_stopped_stays_stopped_and_one_killed_before_stops_the_same(
    folder: Path,
) -> None:
    config = config_of(folder, RULES)
    whole = LocalCrew.start(config, folder / "whole")
    last = finish(whole)[-1]
    again = LocalCrew.resume(whole.folder)
    assert finish(again) == []
    assert again.stopped == whole.stopped
    killed = LocalCrew.start(config, folder / "killed")
    rounds = killed.rounds()
    for _ in range(4 - 1):
        next(rounds)
    rounds.close()
    resumed = LocalCrew.resume(killed.folder)
    (end,) = finish(resumed)
    assert resumed.stopped == whole.stopped
    assert all(torch.equal(a, b) for n in end for a, b in zip(end[n], last[n], strict=True))
    timeless = lambda crew: [
        msgspec.structs.replace(line, timing=None) for line in read_metrics(crew.folder)
    ]
    assert timeless(resumed) == timeless(whole)


@pytest.mark.usefixtures("scripted")
def test_a_value_that_is_enough_ends_a_crew(folder: Path) -> None:
    rules = Evaluate(every=1, problems=2, stop_at=0.3)
    crew = LocalCrew.start(config_of(folder, rules), folder / "run")
    assert len(finish(crew)) == 2
    assert "full0 had 0.5 on held-out problems after round 1 (stop_at = 0.3)" in crew.stopped


@pytest.mark.usefixtures("scripted")
def test_without_a_rule_a_crew_trains_to_its_last_round_and_keeps_no_best(folder: Path) -> None:
    crew = LocalCrew.start(config_of(folder, Evaluate(every=1, problems=2)), folder / "run")
    assert len(finish(crew)) == 5
    assert crew.stopped == ""
    assert not (crew.folder / "best").exists()


@pytest.mark.usefixtures("scripted")
def test_the_command_says_why_it_is_over_and_others_take_the_best(folder: Path) -> None:
    (folder / "crew.toml").write_text(config_text(config_of(folder, RULES)))
    run = str(folder / "run")
    invoke = lambda *words: CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    trained = invoke("train", str(folder / "crew.toml"), "--out", run)
    assert trained.exit_code == 0, trained.output
    assert "over after round 4 of 5: full0 was no better than the 0.5 of round 1" in trained.output
    again = invoke("train", "--resume", run)
    assert again.exit_code == 0, again.output
    assert "over after round 4 of 5" in again.output
    out = export_model(Path(run), "full0", folder / "exported", best=True)
    assert "after round 1 of 5" in (out / "README.md").read_text()
    ours = trained_policies(Path(run), best=True)["full0"].base.state_dict()
    theirs = export_model(Path(run), "full0", folder / "newest")
    best = AutoModelForCausalLM.from_pretrained(out).state_dict()
    newest = AutoModelForCausalLM.from_pretrained(theirs).state_dict()
    assert all(torch.equal(best[name], value) for name, value in ours.items())
    assert not all(torch.equal(newest[name], value) for name, value in ours.items())
    measured = invoke("eval", run, "--best", "--problems", "2", "--samples", "1", "--json")
    assert measured.exit_code == 0, measured.output
    refused = invoke("eval", "tiny:0.3m", "--best")
    assert "no run folder" in refused.output


@pytest.mark.usefixtures("scripted")
def test_a_simulated_crew_ends_too(folder: Path) -> None:
    crew = SimCrew(config_of(folder, RULES), folder / "run")
    for _ in crew.rounds():
        pass
    assert crew.finished_rounds == 4
    assert (crew.folder / "best" / "lora1" / "round-000002" / "model").exists()


@pytest.fixture
def one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one thread for every child, as here


@pytest.mark.usefixtures("one_core")
def test_a_crew_of_several_processes_ends_and_is_not_started_again(folder: Path) -> None:
    rules = Evaluate(every=1, problems=2, stop_at=-1e6)  # what they are before training
    crew = ProcessCrew.start(config_of(folder, rules, processes=True), folder / "run")
    assert not crew.finished
    for _ in crew.gather():
        pass
    lines = [lines for lines in crew.rounds() if lines]
    assert crew.finished_rounds == 0
    assert crew.finished
    assert [line.peer for line in lines[0]] == ["full0", "lora1"]
    own = crew.folder / "peers" / "lora1" / "best" / "lora1"
    assert [path.name[:6] for path in own.iterdir()] == ["round-"]
    again = ProcessCrew.resume(crew.folder)
    assert again.stopped == crew.stopped
    assert list(again.gather()) == []
    assert list(again.rounds()) == []
    assert not again._children
