"""A run's steps taken again from its log, with and without a sender."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes import spread_crew, write_task
from motley.archive import open_log
from motley.learning.checkpoint import checkpoints
from motley.models.policy import load_tensors
from motley.runs.local import LocalCrew
from motley.runs.metrics import learner_lines, read_metrics
from motley.runs.replay import KeptLog, Replay, Replayed, kept_rounds

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four rounds of a crew of three, with checkpoints of rounds 2 and 4."""
    write_task(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    config = spread_crew(tmp_path, ("full",) * 3, rounds=4, learning="checkpoint_every = 2")
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    return tmp_path / "run"


def replayed(run: Path, without: tuple[str, ...], after: int, out: Path) -> list[Replayed]:
    with open_log(run) as archive:
        log, hub = KeptLog(archive.entries()), archive.hub
    return Replay(run, log, hub, without, after, out).run()


def weights(folder: Path, peer: str) -> dict[str, torch.Tensor]:
    newest = checkpoints(folder / "checkpoints")[-1]
    return load_tensors(newest / peer / "model" / "model.safetensors")


def test_without_leaving_anybody_out_the_same_weights_come_out(run: Path, tmp_path: Path) -> None:
    for after in (0, 2):
        out = tmp_path / f"again-{after}"
        replayed(run, (), after, out)
        for peer in ("full0", "full1", "full2"):
            before, again = weights(run, peer), weights(out, peer)
            assert all(torch.equal(before[name], again[name]) for name in before)


def test_steps_taken_again_keep_the_same_successes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_task(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    row = {"objective": "uplift", "variant": "kept", "learning": "checkpoint_every = 2"}
    config = spread_crew(tmp_path, ("full",) * 2, rounds=4, **row)
    for _ in LocalCrew.start(config, tmp_path / "run").rounds():
        pass
    assert all(line.kept for line in learner_lines(read_metrics(tmp_path / "run"))[-2:])
    replayed(tmp_path / "run", (), 2, tmp_path / "again")
    for peer in ("full0", "full1"):
        before, again = weights(tmp_path / "run", peer), weights(tmp_path / "again", peer)
        assert all(torch.equal(before[name], again[name]) for name in before)


def test_a_peer_that_is_left_out_has_no_part_in_any_step(run: Path, tmp_path: Path) -> None:
    outcomes = replayed(run, ("full2",), 2, tmp_path / "out")
    assert [(o.peer, o.rounds, o.left_out) for o in outcomes] == [
        ("full0", 2, 4),
        ("full1", 2, 4),
        ("full2", 2, 0),
    ]
    lines = learner_lines(read_metrics(tmp_path / "out"))
    for line in lines:
        assert line.senders is not None
        assert ("full2" in line.senders) == (line.peer == "full2")
    before, after = weights(run, "full0"), weights(tmp_path / "out", "full0")
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_a_replayed_run_can_be_gone_on_from(run: Path, tmp_path: Path) -> None:
    replayed(run, ("full2",), 2, tmp_path / "out")
    crew = LocalCrew.resume(tmp_path / "out")
    assert crew.finished_rounds == 4
    assert crew.peers[0].scrutiny.is_muted("full2")
    assert not crew.peers[2].scrutiny.standing.muted


def test_only_kept_rounds_and_known_peers_can_be_asked_for(run: Path, tmp_path: Path) -> None:
    assert kept_rounds(run) == [2, 4]
    with pytest.raises(ValueError, match="no checkpoint of round 3; choose one of 0, 2, 4"):
        replayed(run, ("full2",), 3, tmp_path / "out")
    with pytest.raises(ValueError, match="no peer 'nobody'"):
        replayed(run, ("nobody",), 2, tmp_path / "out")
    with pytest.raises(ValueError, match="is not empty"):
        replayed(run, ("full2",), 2, run)
    assert not (tmp_path / "out").exists()
