from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from fakes import lora_policy, ragged_sequences, tiny_policy
from motley.compute.scoring import score
from motley.config import TrainPart
from motley.learning.batches import micro_batches
from motley.learning.checkpoint import (
    AnyState,
    CheckpointError,
    OtherStateError,
    checkpoints,
    load_manifest,
    load_newest,
    load_training,
    save_checkpoint,
    save_training,
)
from motley.learning.descent import adam
from motley.models.policy import Policy


def last_layer_policy(seed: int = 0) -> Policy:
    return tiny_policy(TrainPart(layers="last:1"), seed)


def write_text(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "text").write_text("content")


class Progress(msgspec.Struct):
    round: int | str
    peers: dict[str, dict[str, int]] = {}


def save(root: Path, round: int) -> Path:
    return save_checkpoint(root, round, Progress(round=round), write_text)


def test_the_state_comes_back(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 3, Progress(3, {"a": {"cursor": 7}}), write_text)
    assert checkpoints(tmp_path) == [folder]
    assert load_manifest(folder, Progress) == Progress(3, {"a": {"cursor": 7}})
    assert (folder / "a" / "text").read_text() == "content"


def test_two_are_kept(tmp_path: Path) -> None:
    made = [save(tmp_path, round) for round in (1, 2, 3, 10)]
    assert checkpoints(tmp_path) == made[-2:]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["round-000003", "round-000010"]


def test_saving_a_round_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = save_checkpoint(tmp_path, 1, Progress("again"), write_text)
    assert checkpoints(tmp_path) == [folder]
    assert load_manifest(folder, Progress) == Progress("again")


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    before = save(tmp_path, 1)

    def crash(folder: Path) -> None:
        write_text(folder)
        raise OSError("disk full")

    for round in (1, 2):
        with pytest.raises(
            OSError,
            match=(
                r"round-00000\d could not be written: disk full; the checkpoint before it is "
                r"whole; \d+ MiB are free there. Make room"
            ),
        ):
            save_checkpoint(tmp_path, round, Progress(round=round), crash)
        assert checkpoints(tmp_path) == [before]
        assert load_manifest(before, Progress) == Progress(1)
        # what was half written takes no room
        assert [path.name for path in tmp_path.iterdir()] == ["round-000001"]
    # What the crash left behind is in nobody's way.
    assert checkpoints(tmp_path) != [save(tmp_path, 2)]
    assert load_manifest(checkpoints(tmp_path)[-1], Progress) == Progress(2)


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "a" / "text").write_text("c0ntent")
    with pytest.raises(
        CheckpointError,
        match=(
            r"a/text is missing or changed since it was saved; delete .* to resume from the "
            r"checkpoint before it"
        ),
    ):
        load_manifest(folder, Progress)


def test_a_missing_file_or_manifest_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "a" / "text").unlink()
    with pytest.raises(CheckpointError, match="a/text is missing"):
        load_manifest(folder, Progress)
    (folder / "state.json.sha256").unlink()  # as version 0.5 wrote it
    (folder / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"no readable state\.json"):
        load_manifest(folder, Progress)
    (folder / "state.json").write_bytes(b'{"\xff": 1}')
    with pytest.raises(CheckpointError, match=r"no readable state\.json"):
        load_manifest(folder, Progress)
    with pytest.raises(CheckpointError, match=r"no readable state\.json"):
        load_manifest(tmp_path / "none", Progress)


def test_a_state_that_was_changed_and_can_still_be_read_is_noticed(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    state = folder / "state.json"
    state.write_bytes(state.read_bytes().replace(b'"round": 1', b'"round": 7'))
    with pytest.raises(CheckpointError, match=r"state\.json has changed since it was saved"):
        load_manifest(folder, Progress)
    (folder / "state.json.sha256").unlink()
    assert load_manifest(folder, Progress) == Progress(7)


def test_a_damaged_checkpoint_is_put_aside_for_the_one_before(tmp_path: Path) -> None:
    before, newest = save(tmp_path, 1), save(tmp_path, 2)
    (newest / "state.json").write_text("{")
    said: list[str] = []
    assert load_newest(tmp_path, Progress, said.append) == (before, Progress(1))
    assert said == [
        f"{newest}/state.json has changed since it was saved; it is now damaged-round-000002, "
        "going on from round-000001"
    ]
    assert checkpoints(tmp_path) == [before]
    (before / "a" / "text").write_text("")
    with pytest.raises(CheckpointError, match=r"no other checkpoint is left; put one back"):
        load_newest(tmp_path, Progress, said.append)
    with pytest.raises(CheckpointError, match=r"has no checkpoint; put one back"):
        load_newest(tmp_path / "none", Progress, said.append)


class Other(msgspec.Struct):
    time_s: float


def test_the_state_of_another_kind_of_run_is_told_from_a_spoilt_one(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(OtherStateError, match=r"missing required field `time_s`"):
        load_manifest(folder, Other)
    assert load_manifest(folder, AnyState) == AnyState(metrics_bytes=None)
    (folder / "state.json").write_text("{")
    with pytest.raises(CheckpointError) as spoilt:
        load_manifest(folder, Other)
    assert not isinstance(spoilt.value, OtherStateError)


def train(policy: Policy, optimiser: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimiser.zero_grad()
        for micro in micro_batches(ragged_sequences(), 1000, policy.device):
            (-score(policy, micro.packed).logp_M.mean()).backward()
        optimiser.step()


@pytest.mark.parametrize("make", [tiny_policy, lora_policy, last_layer_policy])
def test_training_goes_on_exactly_as_if_it_had_not_stopped(
    make: type[Policy], tmp_path: Path
) -> None:
    start = lambda policy: adam((p for _, p in policy.trained()), lr=1e-2)
    policy = make()
    optimiser = start(policy)
    train(policy, optimiser, 3)
    save_training(policy, optimiser, tmp_path / "one")
    train(policy, optimiser, 2)

    again = make()
    other = start(again)
    load_training(again, other, tmp_path / "one")
    assert int(next(iter(other.state.values()))["step"]) == 3
    train(again, other, 2)
    for (name, ours), (_, theirs) in zip(
        again.model.named_parameters(), policy.model.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_training_goes_on_on_a_gpu(tmp_path: Path) -> None:
    policy, again = tiny_policy(), tiny_policy()
    policy.model.cuda()
    again.model.cuda()
    optimiser, other = (adam((p for _, p in one.trained()), lr=1e-3) for one in (policy, again))
    train(policy, optimiser, 3)
    save_training(policy, optimiser, tmp_path / "one")
    train(policy, optimiser, 1)
    load_training(again, other, tmp_path / "one")
    train(again, other, 1)
    for (name, ours), (_, theirs) in zip(
        again.model.named_parameters(), policy.model.named_parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5, msg=name)


def test_an_optimiser_without_a_step_is_saved_too(tmp_path: Path) -> None:
    policy = tiny_policy()
    optimiser = torch.optim.Adam([p for _, p in policy.trained()], lr=1e-2)
    save_training(policy, optimiser, tmp_path / "one")
    load_training(policy, optimiser, tmp_path / "one")
    assert not optimiser.state
