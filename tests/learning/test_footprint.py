"""The formulas of a footprint against what tensors really take, on small models."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from learning.live import Live
from marks import slow
from motley.compute.decoder import Decoder
from motley.compute.scoring import score
from motley.config import Lora, TrainPart
from motley.engines.branches import TorchEngine
from motley.engines.snapshot import Snapshot
from motley.learning.batches import ToScore, micro_batches
from motley.learning.footprint import (
    Arithmetic,
    EngineShape,
    Footprint,
    MemorySettings,
    StepShape,
    footprint,
    kept_bytes,
    logprob_bytes,
    rounded_bytes,
    shape_of,
    snapshot_bytes,
)
from motley.models.devices import spare_onednn
from motley.models.policy import Policy, choose_trained, with_trained_part
from motley.models.sources import empty_model
from motley.models.tiny import tiny_vocabulary
from motley.records import Sampling

CPU = torch.device("cpu")
FLOAT32 = Arithmetic(4, fused=False)
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 192,
    "vocab_size": 200,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}
TRAINS: dict[str, str | TrainPart] = {
    "full": "full",
    "lora": TrainPart(lora=Lora(rank=8)),
    "queries": TrainPart(lora=Lora(rank=8, targets=("q_proj", "v_proj"))),
    "layers": TrainPart(layers="last:2"),
    "four bits": TrainPart(lora=Lora(rank=8, bits=4)),
}
SHORT = StepShape(prompts=4, group=4, prompt_tokens=32, tokens=32, token_budget=1 << 20)
SMALL = StepShape(prompts=2, group=4, prompt_tokens=16, tokens=16, token_budget=1 << 20)
LONG = StepShape(prompts=2, group=4, prompt_tokens=100, tokens=40, token_budget=1 << 20)


def config_of(family: str, **sizes: Any) -> PretrainedConfig:
    return FAMILIES[family][0](**SIZES | sizes)


def a_policy(
    family: str = "llama",
    train: str = "full",
    dtype: torch.dtype = torch.float32,
    checkpointed: bool = False,
    **sizes: Any,
) -> Policy:
    spare_onednn(dtype, "cpu")
    torch.manual_seed(0)
    model = FAMILIES[family][1](config_of(family, **sizes)).float()
    policy = Policy(model, tiny_vocabulary(), dtype=dtype, gradient_checkpointing=checkpointed)
    return with_trained_part(policy, TRAINS[train], seed=0)


def sequences(step: StepShape) -> list[ToScore]:
    """None of which begin alike."""
    rng = random.Random(0)
    ids = lambda count: tuple(rng.randrange(SIZES["vocab_size"]) for _ in range(count))
    return [
        ToScore(row=number * step.group + member, prompt=prompt, tokens=ids(step.tokens))
        for number, prompt in enumerate(ids(step.prompt_tokens) for _ in range(step.prompts))
        for member in range(step.group)
    ]


def measured(policy: Policy, step: StepShape) -> tuple[int, int]:
    """Bytes kept behind the forward pass, and at the fullest moment of both passes."""
    (micro,) = micro_batches(sequences(step), step.token_budget, CPU)
    assert len(micro.packed.token_N) == step.packed_tokens
    with Live(policy.model.parameters()) as live:
        scores = score(policy, micro.packed)
        kept = live.now
        scores.logp_M.sum().backward()
    return kept, live.peak


def predicted(policy: Policy, step: StepShape) -> Footprint:
    settings = MemorySettings(checkpointed=policy.gradient_checkpointing)
    arithmetic = Arithmetic(policy.dtype.itemsize, fused=False)
    return footprint(shape_of(policy.model, policy.config), arithmetic, settings, step, None)


@pytest.mark.parametrize(
    ("family", "train", "dtype", "step"),
    [
        ("llama", "full", torch.float32, LONG),
        ("llama", "lora", torch.float32, SHORT),
        ("llama", "queries", torch.float32, LONG),
        ("llama", "layers", torch.float32, LONG),
        ("llama", "four bits", torch.float32, SHORT),
        slow("llama", "four bits", torch.bfloat16, SHORT),
        slow("llama", "full", torch.bfloat16, SHORT),
        slow("llama", "lora", torch.bfloat16, SHORT),
        ("qwen2", "full", torch.float32, LONG),
        ("qwen3", "full", torch.float32, LONG),
        ("gemma3", "full", torch.float32, SHORT),
    ],
)
def test_what_a_step_keeps_is_what_tensors_take(
    family: str, train: str, dtype: torch.dtype, step: StepShape
) -> None:
    policy = a_policy(family, train, dtype)
    kept, peak = measured(policy, step)
    shape, arithmetic = shape_of(policy.model, policy.config), Arithmetic(dtype.itemsize, False)
    parts = predicted(policy, step)
    own = kept_bytes(shape, arithmetic, False, step) + rounded_bytes(
        shape, arithmetic, MemorySettings()
    )
    # behind the forward pass one table of logits is left, and no gradient
    left = own + logprob_bytes(replace(shape, head_trains=False), arithmetic, step)
    assert left - 4 * step.targets * shape.vocabulary == pytest.approx(kept, rel=0.1)
    learning = parts.of("learning") + parts["gradients"]
    assert learning == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
def test_recomputing_leaves_what_enters_a_layer_and_one_layer() -> None:
    policy = a_policy(checkpointed=True, num_hidden_layers=12, intermediate_size=96)
    _, peak = measured(policy, LONG)
    kept = a_policy(num_hidden_layers=12, intermediate_size=96)
    parts = predicted(policy, LONG)
    # the gradients of the first layers are not there yet when the last one's are made
    assert parts.of("learning") == pytest.approx(peak, rel=0.1)
    assert 3 * parts["activations"] < predicted(kept, LONG)["activations"]


@pytest.mark.parametrize("train", TRAINS)
def test_weights_gradients_and_moments_are_counted_to_the_byte(train: str) -> None:
    policy = a_policy(train=train, num_hidden_layers=2)
    measured(policy, SMALL)
    trained = [p for _, p in policy.trained()]
    adam = torch.optim.Adam(trained)
    adam.step()
    parts = predicted(policy, SMALL)
    assert parts["weights"] == sum(p.nbytes for p in policy.model.parameters())
    assert parts["gradients"] == sum(p.grad.nbytes for p in trained if p.grad is not None)
    moments = [state[key] for state in adam.state.values() for key in ("exp_avg", "exp_avg_sq")]
    assert parts["optimiser"] == sum(one.nbytes for one in moments)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train", TRAINS)
def test_a_model_without_values_has_the_shape_of_one_with_them(family: str, train: str) -> None:
    policy = a_policy(family, train)
    empty = choose_trained(empty_model(config_of(family)), TRAINS[train], seed=0)
    assert shape_of(empty, config_of(family)) == shape_of(policy.model, policy.config)


@pytest.mark.parametrize("train", ["full", "lora", "four bits"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engines_weights_are_what_its_snapshot_takes(train: str, dtype: torch.dtype) -> None:
    policy = a_policy(train=train, dtype=dtype)
    with Live(policy.model.parameters()) as live:
        snapshot = Snapshot.of(Decoder.of(policy.base), dtype, torch.float32)
        taken = live.now
    assert snapshot.layers
    shape = shape_of(policy.model, policy.config)
    assert snapshot_bytes(shape, Arithmetic(dtype.itemsize, False)) == pytest.approx(taken, rel=0.1)


@pytest.mark.slow
def test_keys_and_values_are_those_of_every_sample() -> None:
    policy = a_policy()
    engine = TorchEngine(policy)
    prompts = [tuple(range(3, 43)), tuple(range(5, 45))]
    weights = engine._weights
    there = [weights.embedding, weights.head, weights.norm.weight]
    for layer in weights.layers:
        there += [one.weight for (one,) in layer.projections]
        there += [layer.attention_norm.weight, layer.mlp_norm.weight]
    with Live([*policy.model.parameters(), *there]) as live:
        engine.sample(prompts, 8, Sampling(max_tokens=24), seed=0)
    asked = EngineShape(prompts=2, rows=16, prompt_tokens=40, tokens=24)
    shape = shape_of(policy.model, policy.config)
    parts = footprint(shape, FLOAT32, MemorySettings(), None, asked)
    assert parts.of("sampling") == pytest.approx(live.peak, rel=0.25)
    assert parts["keys and values"] > 0.5 * parts.of("sampling")


def test_a_micro_batch_holds_whole_groups_or_a_part_of_one() -> None:
    step = StepShape(prompts=64, group=8, prompt_tokens=96, tokens=128, token_budget=1 << 16)
    assert step.micro.prompts == 32  # not 58 and 6
    assert step.micro.packed_tokens <= 1 << 16
    few = replace(step, token_budget=600)
    assert (few.micro.prompts, few.micro.group) == (1, 2)
    for budget in (600, 1 << 12, 1 << 14):
        cut = micro_batches(sequences(replace(LONG, prompts=8)), budget, CPU)
        largest = max(len(micro.packed.token_N) for micro in cut)
        micro = replace(LONG, prompts=8, token_budget=budget).micro
        assert largest <= micro.packed_tokens * 1.5
        assert micro.packed_tokens <= max(budget, LONG.prompt_tokens + 2 * LONG.tokens)


def test_the_fullest_moment_is_the_larger_of_sampling_and_learning() -> None:
    shape = shape_of(empty_model(config_of("llama")), config_of("llama"))
    engine = EngineShape(prompts=64, rows=512, prompt_tokens=96, tokens=2048)
    both = footprint(shape, FLOAT32, MemorySettings(), SMALL, engine)
    assert both.of("sampling") > both.of("learning") > 0
    assert both.nbytes == both.of("always") + both.of("sampling")


@pytest.mark.parametrize(
    ("sizes", "gib"),
    [
        ((576, 30, 9, 3, 1536), 23.7),  # SmolLM2-135M
        ((960, 32, 15, 5, 2560), 43.4),  # random weights in the shape of SmolLM2-360M
    ],
)
def test_whole_steps_on_a_gpu_take_about_what_was_measured(
    sizes: tuple[int, ...], gib: float
) -> None:
    """`motley bench gpu` on an H200; the figures are in docs/performance.md."""
    hidden, layers, heads, keys, between = sizes
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=keys,
        intermediate_size=between,
        vocab_size=49152,
        tie_word_embeddings=True,
    )
    step = StepShape(prompts=64, group=8, prompt_tokens=96, tokens=128, token_budget=1 << 16)
    engine = EngineShape(prompts=64, rows=512, prompt_tokens=96, tokens=128)
    shape = shape_of(empty_model(config), config)
    taken = footprint(shape, Arithmetic(2, fused=True), MemorySettings(), step, engine)
    assert taken.nbytes / 2**30 == pytest.approx(gib, rel=0.1)
