from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes import tiny_policy
from motley.config import Warm
from motley.learning.warm import expected_accuracy, warm_start
from motley.policies import Policy
from motley.tasks import Task, draw_problems, load_task

WARM = Warm(accuracy={"compare": 0.3}, batch=16, lr=3e-3)
TASK = load_task("digits", {"kinds": ["compare", "sort"], "levels": [2]})


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def start(cache: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm = WARM, seed: int = 0, task: Task = TASK) -> tuple[Policy, list[int]]:
    """A warm policy, and the steps at which progress was reported: none where it came from the cache."""
    monkeypatch.setenv("MOTLEY_CACHE", str(cache))
    policy, steps = tiny_policy(seed=seed), []
    warm_start(policy, task, warm, seed, lambda step, accuracy: steps.append(step))
    return policy, steps


def test_a_warm_start_stops_once_every_target_is_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path))
    policy, seen = tiny_policy(), []
    warm_start(policy, TASK, WARM, 0, lambda step, accuracy: seen.append(accuracy["compare"]))
    assert all(accuracy < 0.3 for accuracy in seen[:-1])
    assert seen[-1] >= 0.3
    fresh = draw_problems(load_task("digits", {"kinds": ["compare"], "levels": [2]}), "fresh", "train", 60)
    assert expected_accuracy(policy, fresh)["compare"] > 0.2


def test_a_warm_start_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, steps = start(tmp_path / "one", monkeypatch)
    second, again = start(tmp_path / "two", monkeypatch)
    assert torch.equal(weights(first), weights(second))
    assert steps == again != []


def test_the_same_recipe_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, steps = start(tmp_path, monkeypatch)
    second, again = start(tmp_path, monkeypatch)
    assert steps
    assert again == []
    assert torch.equal(weights(first), weights(second))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


def test_another_recipe_does_not_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start(tmp_path, monkeypatch)
    for changed in (
        {"seed": 1},
        {"task": load_task("digits", {"kinds": ["compare", "sort"], "levels": [3]})},
        {"warm": Warm(accuracy={"compare": 0.25}, batch=16, lr=3e-3)},
    ):
        assert start(tmp_path, monkeypatch, **changed)[1] != [], changed


def test_targets_out_of_reach_are_an_error_with_what_was_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"did not reach its targets in max_steps=2: compare 0\.\d\d of 0\.99; lower the targets or raise"):
        start(tmp_path, monkeypatch, Warm(accuracy={"compare": 0.99}, max_steps=2, batch=4))
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_kind_the_task_does_not_have_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="warm names kinds the task does not have: spell; it has compare, sort"):
        start(tmp_path, monkeypatch, Warm(accuracy={"spell": 0.3}))
