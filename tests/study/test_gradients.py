"""Gradients at a checkpoint: what a step leaves behind, projections, and a whole run measured."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fakes import candidate, group, reference_logp, rollout, spread_crew, tiny_policy, write_task
from motley.cli import app
from motley.learning.select import Candidate
from motley.objectives import Objective, objective
from motley.records import Problem
from motley.runs.local import LocalCrew
from motley.study import gradients
from motley.study.estimators import read_estimators
from motley.study.gradients import (
    REFERENCE,
    Probe,
    ProbeSize,
    measure,
    measure_if_due,
    rows_of,
    vector_of,
)
from motley.study.plans import EstimatorPlan

REWARDS = [[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]


def made(own: bool) -> list[Candidate]:
    """Two groups of three completions, of 1 to 3 tokens."""
    tokens = [(11, 12, 1), (13, 1), (1,)]
    found = []
    for slot, rewards in enumerate(REWARDS):
        problem = Problem(kind="sort", prompt=f"sort {10 + slot}=", answer="01")
        rollouts = [
            rollout(some, reward, -1.0) for some, reward in zip(tokens, rewards, strict=True)
        ]
        one = group(peer="me" if own else "other", slot=slot, rollouts=rollouts, problem=problem)
        found.append(candidate(one, own=own, position=slot, problem=problem))
    return found


def probe(senders: dict[str, list[list[Candidate]]]) -> Probe:
    config = spread_crew(Path("nowhere"))
    return Probe(config, 0, "me", tiny_policy(), senders)


def by_hand(measured: Probe) -> torch.Tensor:
    """Minus the mean over sequences of (r - mean of the others) · the sum of log-probs."""
    policy = measured.policy
    total = torch.zeros(())
    for one, rewards in zip(made(own=True), REWARDS, strict=True):
        prompt = policy.prompts.ids(one.problem)
        for number, answer in enumerate(one.group.rollouts):
            others = [r for place, r in enumerate(rewards) if place != number]
            advantage = rewards[number] - sum(others) / len(others)
            total = total - advantage * reference_logp(policy, prompt, answer.tokens).sum() / 6
    parameters = [p for _, p in policy.trained()]
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(total, parameters)])


def test_a_step_leaves_its_gradient_and_changes_no_weight() -> None:
    one = probe({"me": [made(own=True)] * 4})
    before = [p.detach().clone() for _, p in one.policy.trained()]
    vectors, heard = one.gradients(
        "r", one.learner(REFERENCE), one.senders["me"], lambda what: None
    )
    assert np.allclose(vectors[0], by_hand(one).numpy(), rtol=1e-3, atol=1e-6)
    assert np.abs(vectors[0]).max() > 1e-3
    assert (vectors[0] == vectors[3]).all()
    assert len(heard) == 4
    assert one.policy.version == 0
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, one.policy.trained(), strict=True))


def test_a_large_gradient_is_not_clipped() -> None:
    one = probe({"me": [made(own=True)]})
    learner = one.learner(REFERENCE)
    (small,), _ = one.gradients("r", learner, one.senders["me"], lambda what: None)
    with torch.no_grad():
        for _, parameter in one.policy.trained():
            parameter.mul_(2)
    (large,), _ = one.gradients("r", learner, one.senders["me"], lambda what: None)
    assert np.linalg.norm(large) > max(2.0, float(np.linalg.norm(small)))


@pytest.mark.slow
def test_rows_are_measured_on_every_senders_samples_and_own_come_first() -> None:
    senders = {"me": [made(own=True)] * 4, "other": [made(own=False)] * 4}
    steps: list[str] = []
    lines = probe(senders).lines({"nois": objective("nois"), "tis": objective("tis")}, steps.append)
    assert [(one.row, one.sender) for one in lines] == [
        ("nois", "me"), ("nois", "other"), ("tis", "me"), ("tis", "other"),
    ]  # fmt: skip
    assert len(steps) == 4 * (1 + 2 * 2)
    # the reported log-probs are of no policy, so that only rows without a ratio take them alike
    assert lines[0].bias == pytest.approx(lines[1].bias, abs=1e-4)
    assert lines[0].ess == pytest.approx(1)
    assert lines[3].weight != pytest.approx(1, abs=0.05)


def test_a_projection_keeps_lengths_and_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(300, 40), (1,), (7, 11), (5000,)]

    def held(of: list[torch.Tensor]) -> list[torch.Tensor]:
        parameters = [torch.zeros_like(g).requires_grad_() for g in of]
        for parameter, g in zip(parameters, of, strict=True):
            parameter.grad = g
        return parameters

    first = [torch.randn(shape, generator=generator) for shape in shapes]
    second = [a + torch.randn(a.shape, generator=generator) for a in first]
    a, b = vector_of(held(first)), vector_of(held(second))
    assert len(a) == 300 * 40 + 1 + 77 + 5000
    monkeypatch.setattr(gradients, "MOST_EXACT", 100)
    monkeypatch.setattr(gradients, "PROJECTED", 1999)
    monkeypatch.setattr(gradients, "CHUNK", 3 * 1999)
    x, y = vector_of(held(first)), vector_of(held(second))
    assert len(x) == 1999
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    assert x @ y == pytest.approx(a @ b, abs=3 * lengths / 1999**0.5)
    assert (x == vector_of(held(first))).all()
    # it is linear, so that a mean of projections is that of the mean
    both = vector_of(held([p + q for p, q in zip(first, second, strict=True)]))
    assert np.allclose(both, x + y, atol=1e-3)


def test_what_trains_without_a_gradient_counts_zero() -> None:
    assert vector_of([torch.ones(3, requires_grad=True)]).tolist() == [0, 0, 0]


def test_rows_are_read_as_arms_are_written() -> None:
    assert list(rows_of("tis:C=4 mine=uplift/relative")) == ["tis:C=4", "mine"]
    assert rows_of("tis:C=4")["tis:C=4"] == objective("tis", settings={"C": 4.0})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("tis:learning.epochs=2", "settings of the objective only"),
        ("gepo:beta=0.1,toward=reference", "pulls toward the policy it began with"),
        ("tiss", "is not known"),
    ],
)
def test_rows_that_cannot_be_measured_are_refused(rows: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        rows_of(rows)


def test_too_few_batches_are_refused() -> None:
    with pytest.raises(
        ValueError, match="batches=3 say nothing of their own error; use at least 4"
    ):
        ProbeSize(3)


# A run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        write_task(folder)
        crew = LocalCrew.start(spread_crew(folder, ("full", "lora"), rounds=2), folder / "run")
        for _ in crew.rounds():
            pass
        yield folder / "run"


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.slow
def test_a_run_is_measured_at_a_checkpoint_and_only_read(run: Path) -> None:
    before = contents(run)
    rows: dict[str, Objective] = rows_of("nois tis ftis:g=0.001")
    lines = measure(run, 2, rows, ProbeSize(6, 3))
    assert contents(run) == before
    assert measure(run, 2, rows, ProbeSize(6, 3)) == lines
    found = {(one.receiver, one.sender, one.row): one for one in lines}
    assert len(found) == len(lines) == 2 * 2 * 3
    for peer in ("full0", "lora1"):
        own = {row: found[peer, peer, row] for row in ("nois", "tis")}
        assert own["nois"].ess == pytest.approx(1)
        assert own["tis"].variance == pytest.approx(own["nois"].variance, rel=0.01)
    crossed = found["full0", "lora1", "ftis:g=0.001"]
    assert crossed.ess is not None
    assert crossed.ess < 1
    assert crossed.groups == 3
    assert crossed.values > found["lora1", "full0", "tis"].values
    assert measure(run, 0, rows_of("nois"), ProbeSize(4, 2)) != lines


@pytest.mark.slow
def test_a_run_on_its_way_is_measured_once_where_it_is_due(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run")
    asked = EstimatorPlan(arm="ftis", rows="tis", batches=4, groups=2)
    for number in (0, 1, 2):
        measure_if_due(tmp_path / "run", asked, number)
    lines = read_estimators(tmp_path / "run")
    assert {one.round for one in lines} == {0, 2}
    monkeypatch.setattr(gradients, "measure", None)  # nobody calls it again
    measure_if_due(tmp_path / "run", asked, 2)


@pytest.mark.slow
def test_senders_of_another_vocabulary_are_read_as_a_step_reads_them(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        write_task(tmp_path)
        config = spread_crew(tmp_path, rounds=1)
        models = ("tiny:0.3m/words", "tiny:0.3m/bytes")
        peers = tuple(
            msgspec.structs.replace(peer, model=model)
            for peer, model in zip(config.peer, models, strict=True)
        )
        config = msgspec.structs.replace(config, peer=peers)
        LocalCrew.start(config, tmp_path / "run")
        lines = measure(tmp_path / "run", 0, rows_of("nois tis"), ProbeSize(4, 3))
    found = {(one.receiver, one.sender, one.row): one for one in lines}
    assert len(found) == 2 * 2 * 2
    assert found["full0", "full0", "tis"].weight == pytest.approx(1, abs=1e-3)
    # words can be spelled in bytes; bytes at random are no text, so that nothing is learned of them
    spelled, lost = found["full1", "full0", "tis"], found["full0", "full1", "tis"]
    assert spelled.weight is not None
    assert 0 < spelled.weight < 2
    assert (lost.bias, lost.weight) == (1, None)


@pytest.mark.slow
def test_the_command_prints_a_table_keeps_its_numbers_and_says_what_noise_hides(run: Path) -> None:
    words = ["bench", "estimators", str(run), "--rows", "tis", "--batches", "4", "--groups", "2"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.splitlines()[0])["rows"]
    assert [(row["round"], row["receiver"]) for row in rows] == [
        (number, peer) for number in (0, 2) for peer in ("full0", "full0", "lora1", "lora1")
    ]
    assert len(read_estimators(run)) == 8
    (run / "estimators.jsonl").unlink()


@pytest.mark.slow
def test_a_checkpoint_that_is_not_kept_is_refused_with_those_that_are(run: Path) -> None:
    done = CliRunner().invoke(app, ["bench", "estimators", str(run), "--round", "7"])
    assert done.exit_code == 2
    assert "no checkpoint of round 7; it has those of 0, 2 (0 is the beginning)" in done.output


@pytest.mark.slow
def test_a_run_without_its_weights_is_refused(run: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(run, bare)
    shutil.rmtree(bare / "start")
    done = CliRunner().invoke(app, ["bench", "estimators", str(bare), "--round", "2"])
    assert done.exit_code == 2
    assert "has no weights of full0 any more" in done.output
