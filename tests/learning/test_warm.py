from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from architectures import write_model
from fakes import tiny_policy
from marks import slow
from motley.compute.graphs import scorer
from motley.config import PeerConfig, Prompt, Warm
from motley.learning import warm as warm_module
from motley.learning.descent import LossScale, adam
from motley.learning.warm import check_warm, expected_accuracy, warm_start
from motley.models.opening import initial_policy
from motley.models.policy import Policy
from motley.tasks import Task, draw_problems, load_task, own_task

WARM = Warm(accuracy={"compare": 0.3}, batch=16, lr=3e-3)
TASK = load_task("digits", {"kinds": ["compare", "sort"], "levels": [2]})


def weights(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in policy.model.parameters()])


def start(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm: Warm = WARM,
    seed: int = 0,
    task: Task = TASK,
) -> tuple[Policy, list[int]]:
    """A warm policy, and the steps at which progress was reported: none where it came from the
    cache.
    """
    monkeypatch.setenv("MOTLEY_CACHE", str(cache))
    policy, steps = tiny_policy(seed=seed), []
    warm_start(policy, task, warm, seed, lambda step, accuracy: steps.append(step))
    return policy, steps


@pytest.mark.slow
def test_a_warm_start_stops_once_every_target_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path))
    policy, seen = tiny_policy(), []
    warm_start(policy, TASK, WARM, 0, lambda step, accuracy: seen.append(accuracy["compare"]))
    assert all(accuracy < 0.3 for accuracy in seen[:-1])
    assert seen[-1] >= 0.3
    fresh = draw_problems(
        load_task("digits", {"kinds": ["compare"], "levels": [2]}), "fresh", "train", 60
    )
    assert expected_accuracy(policy, fresh)["compare"] > 0.2


@pytest.mark.slow
def test_a_warm_start_is_deterministic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, steps = start(tmp_path / "one", monkeypatch)
    second, again = start(tmp_path / "two", monkeypatch)
    assert torch.equal(weights(first), weights(second))
    assert steps == again != []


@pytest.mark.slow
def test_the_same_recipe_comes_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, steps = start(tmp_path, monkeypatch)
    second, again = start(tmp_path, monkeypatch)
    assert steps
    assert again == []
    assert torch.equal(weights(first), weights(second))
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


@pytest.mark.slow
def test_another_recipe_does_not_come_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(tmp_path, monkeypatch)
    for changed in (
        {"seed": 1},
        {"task": load_task("digits", {"kinds": ["compare", "sort"], "levels": [3]})},
        {"warm": Warm(accuracy={"compare": 0.25}, batch=16, lr=3e-3)},
    ):
        assert start(tmp_path, monkeypatch, **changed)[1] != [], changed


def test_targets_out_of_reach_are_an_error_with_what_was_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError,
        match=(
            r"did not reach its targets in max_steps=2: compare 0\.\d\d of 0\.99; lower the "
            r"targets or raise"
        ),
    ):
        start(tmp_path, monkeypatch, Warm(accuracy={"compare": 0.99}, max_steps=2, batch=4))
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_a_kind_the_task_does_not_have_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        ValueError, match="warm names kinds the task does not have: spell; it has compare, sort"
    ):
        start(tmp_path, monkeypatch, Warm(accuracy={"spell": 0.3}))


def test_problems_without_answers_are_not_taught() -> None:
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1) if n < 9 else ""} for n in range(20)]
    task = own_task(rows, rewards=lambda completions: [0.0] * len(completions))
    with pytest.raises(ValueError, match=r"warm teaches the answers .* '\d+\+1=' has none"):
        check_warm(task, Warm(accuracy={"all": 0.5}))


@pytest.mark.slow
def test_a_number_of_steps_is_taken_whatever_is_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = Warm(kinds=("compare",), steps=4, batch=8, lr=3e-3)
    policy, steps = start(tmp_path, monkeypatch, warm)
    assert steps == [0, 3, 4]
    again, cached = start(tmp_path, monkeypatch, warm)
    assert cached == []
    assert torch.equal(weights(policy), weights(again))
    longer, _ = start(tmp_path, monkeypatch, Warm(kinds=("compare",), steps=5, batch=8, lr=3e-3))
    assert not torch.equal(weights(policy), weights(longer))


@pytest.mark.slow
def test_steps_train_on_the_kinds_named_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = draw_problems(TASK, "fresh", "train", 60)
    before = expected_accuracy(tiny_policy(), fresh)
    policy, _ = start(tmp_path, monkeypatch, Warm(kinds=("compare",), steps=20, batch=16, lr=3e-3))
    after = expected_accuracy(policy, fresh)
    assert after["compare"] > before["compare"] + 0.1
    assert after["sort"] < 0.05
    with pytest.raises(ValueError, match="warm names kinds the task does not have: spell"):
        start(tmp_path, monkeypatch, Warm(kinds=("sort", "spell"), steps=2))


def files(cache: Path) -> int:
    return len(list(cache.rglob("*.safetensors")))


@pytest.mark.slow
def test_the_cache_knows_the_weights_a_warm_start_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same model, recipe and seed from other values is another warm start."""
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path))
    warm = Warm(kinds=("compare",), steps=2, batch=4)
    made = []
    for number, shift in enumerate((0.0, 1e-4, 0.0), start=1):
        policy = tiny_policy()
        with torch.no_grad():
            next(policy.model.parameters()).view(-1)[0] += shift
        warm_start(policy, TASK, warm, seed=0)
        made.append(weights(policy))
        assert files(tmp_path) == min(number, 2)
    assert torch.equal(made[0], made[2])
    assert not torch.equal(made[0], made[1])


@pytest.mark.slow
def test_the_cache_knows_how_problems_are_put(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    model = str(write_model(tmp_path / "model"))
    warm = Warm(kinds=("compare",), steps=1, batch=2)
    ways = [
        Prompt(),
        Prompt(template="{prompt} {answer}"),
        Prompt(system="Hm."),
        Prompt(shots=1),
        Prompt(style="chat"),
        Prompt(stop="\n"),
    ]
    for number, rules in enumerate(ways, start=1):
        policy = initial_policy(PeerConfig(name="a", model=model), 0, rules, TASK)
        warm_start(policy, TASK, warm, seed=0)
        assert files(tmp_path / "cache") == number, rules
    warm_start(
        initial_policy(PeerConfig(name="b", model=model), 0, ways[1], TASK), TASK, warm, seed=0
    )
    assert files(tmp_path / "cache") == len(ways)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", slow("gemma3"), slow("gpt2")])
def test_a_pretrained_model_is_warmed_from_its_own_weights(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTLEY_CACHE", str(tmp_path / "cache"))
    peer = PeerConfig(name="a", model=str(write_model(tmp_path / "model", kind)))
    fresh = [
        problem
        for problem in draw_problems(TASK, "fresh", "train", 40)
        if problem.kind == "compare"
    ]
    policy = initial_policy(peer, 0, Prompt(), TASK)
    before, reached = weights(policy), []
    warm_start(
        policy,
        TASK,
        Warm(kinds=("compare",), steps=30, batch=16, lr=1e-2),
        0,
        lambda step, accuracy: reached.append(accuracy),
    )
    assert (weights(policy) - before).abs().max() > 1e-3
    assert reached[-1]["compare"] > reached[0]["compare"] + 0.05
    assert (
        expected_accuracy(policy, fresh)["compare"]
        > expected_accuracy(initial_policy(peer, 0, Prompt(), TASK), fresh)["compare"] + 0.05
    )
    again = initial_policy(peer, 1, Prompt(), TASK)
    warm_start(
        again,
        TASK,
        Warm(kinds=("compare",), steps=30, batch=16, lr=1e-2),
        0,
        lambda *_: pytest.fail("must come from the cache"),
    )
    assert torch.equal(weights(again), weights(policy))
    policy.save(tmp_path / "warm")
    saved = initial_policy(PeerConfig(name="a", model=str(tmp_path / "warm")), 0, Prompt(), TASK)
    assert expected_accuracy(saved, fresh)["compare"] == pytest.approx(
        expected_accuracy(policy, fresh)["compare"], rel=1e-3
    )


@pytest.mark.parametrize(
    "until", [{"accuracy": {"compare": 0.9}}, {"kinds": ["compare"], "steps": 9}]
)
def test_a_warm_start_that_ends_in_no_numbers_is_an_error_and_not_cached(
    until: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("motley.config.peers.MOST_LR", math.inf)
    warm = msgspec.convert({**until, "lr": 1e30}, Warm)
    with pytest.raises(
        FloatingPointError, match=r"gradient norm of the warm start is (nan|inf); lower its lr"
    ):
        start(tmp_path, monkeypatch, warm)
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_torn_file_in_the_cache_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = start(tmp_path, monkeypatch)
    (kept,) = tmp_path.rglob("*.safetensors")
    kept.write_bytes(kept.read_bytes()[:1000])
    again, steps = start(tmp_path, monkeypatch)
    assert steps
    assert torch.equal(weights(first), weights(again))
    assert start(tmp_path, monkeypatch)[1] == []


@pytest.mark.parametrize("fits_at", [2.0**10, 0.5])
def test_in_float16_a_gradient_that_does_not_fit_is_made_again_at_a_smaller_scale(
    fits_at: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = warm_module._answers(tiny_policy(), draw_problems(TASK, "0", "train", 4))
    scale, policy = LossScale(torch.float16), tiny_policy()
    real, norms = warm_module._gradient_norm, []

    def overflowing(*given: Any) -> float:
        norms.append(real(*given) if scale.value <= fits_at else math.inf)
        return norms[-1]

    monkeypatch.setattr(warm_module, "_gradient_norm", overflowing)
    before = weights(policy)
    teaching = lambda policy, scale: warm_module._Teaching(
        policy, scorer(policy), adam(policy.model.parameters(), 1e-3), scale, 1000
    )
    take = lambda: warm_module._supervised_step(teaching(policy, scale), answers)
    if fits_at < 1:
        with pytest.raises(FloatingPointError, match="gradient norm of the warm start is inf"):
            take()
        assert torch.equal(weights(policy), before)
        return
    take()
    assert (len(norms), scale.value) == (6, 2.0**10)
    exact = tiny_policy()
    monkeypatch.undo()
    warm_module._supervised_step(teaching(exact, LossScale(torch.float32)), answers)
    torch.testing.assert_close(weights(policy), weights(exact), rtol=0, atol=1e-5)
    assert not torch.equal(weights(policy), before)
