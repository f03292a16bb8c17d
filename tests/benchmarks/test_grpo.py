from __future__ import annotations

from typing import Any

import huggingface_hub.constants
import pytest
import torch

from fakes import tiny_policy
from motley.benchmarks import grpo
from motley.benchmarks.grpo import (
    OurStep,
    StepWork,
    TrlSetup,
    candidates,
    checksum,
    our_cost,
    trl_cost,
)
from motley.benchmarks.models import Texts, build
from motley.benchmarks.timing import LEARNER_WARMS
from motley.engines import Completion
from motley.records import Problem, Sampling

MODEL = "tiny:0.3m"


def work(max_tokens: int = 5) -> StepWork:
    return StepWork(
        texts=Texts.draw(build(MODEL).vocabulary, 3, 6).texts,
        num_samples=4,
        max_tokens=max_tokens,
    )


def test_our_step_trains_every_sequence_and_samples_with_the_new_weights() -> None:
    policy = build(MODEL)
    before = policy.base.get_input_embeddings().weight.detach().clone()
    step = OurStep(policy, work())
    step()
    assert step.num_trained == 12
    assert policy.version == 1
    assert not torch.equal(policy.base.get_input_embeddings().weight, before)
    refreshed: list[int] = []
    step._engine.refresh = lambda: refreshed.append(policy.version)  # type: ignore[method-assign]
    step()
    assert refreshed == [2]


def test_our_cost_leaves_the_first_steps_out() -> None:
    policy = build(MODEL)
    found = our_cost(policy, work(), repeats=2)
    assert policy.version == LEARNER_WARMS + 2
    assert found.num_trained == 12
    assert 0 < found.sampling_s < found.step.seconds


def test_rewards_differ_so_that_nothing_is_silent() -> None:
    policy, sampling = build(MODEL), Sampling(max_tokens=2)
    made = [
        [Completion((11, 12), (-1.0, -1.0), "length"), Completion((11, 13), (-1.0, -1.0), "length")]
    ]
    (candidate,) = candidates(policy, [Problem(prompt="1")], made, sampling)
    assert [r.reward for r in candidate.group.rollouts] == [
        checksum("", policy.vocabulary.decode(c.tokens)) for c in made[0]
    ]
    assert len({r.reward for r in candidate.group.rollouts}) == 2
    assert all(0 <= r.reward < 1 for r in candidate.group.rollouts)


@pytest.mark.slow
def test_trl_does_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    scored: list[dict[str, Any]] = []

    def noted(
        prompts: list[str],
        completions: list[str],
        completion_ids: list[list[int]],
        **others: object,
    ) -> list[float]:
        scored.append(
            {
                "prompts": prompts,
                "ids": completion_ids,
                "telemetry": not huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY,
            }
        )
        return [checksum("", text) for text in completions]

    monkeypatch.setattr(grpo, "_reward_of_all", lambda reward: noted)
    policy, asked, turns = build(MODEL), work(), []
    before = policy.base.get_input_embeddings().weight.detach().clone()
    telemetry = huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
    found = trl_cost(policy, asked, 2, TrlSetup(rows=6), between=lambda: turns.append(len(scored)))
    assert turns == [1, 2, 3]  # one sampling per optimiser step, although its micro-batches are two
    for step in scored:
        assert sorted(step["prompts"]) == sorted(asked.texts * 4)
        assert {len(ids) for ids in step["ids"]} == {5}
        assert not step["telemetry"]
    assert telemetry == huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY
    assert not torch.equal(policy.base.get_input_embeddings().weight, before)
    assert found.seconds > 0


@pytest.mark.slow
def test_completions_of_trl_may_end_where_ours_may(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    lengths: set[int] = set()

    def noted(
        completions: list[str], completion_ids: list[list[int]], **others: object
    ) -> list[float]:
        lengths.update(map(len, completion_ids))
        return [checksum("", text) for text in completions]

    monkeypatch.setattr(grpo, "_reward_of_all", lambda reward: noted)
    texts = Texts.draw(build(MODEL).vocabulary, 30, 6).texts
    trl_cost(
        tiny_policy(), StepWork(texts=texts, num_samples=8, max_tokens=8, may_end=True), repeats=1
    )
    assert max(lengths) == 8
    assert min(lengths) < 8


@pytest.mark.slow
def test_a_micro_batch_that_does_not_divide_the_step_is_refused() -> None:
    pytest.importorskip("trl")
    with pytest.raises(ValueError, match="trl_rows=5 does not divide the 12 completions"):
        trl_cost(build(MODEL), work(), 1, TrlSetup(rows=5))
