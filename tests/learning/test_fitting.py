from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
)

from architectures import ARCHITECTURES, TRAINS, own_code_policy
from fakes import tiny_policy
from motley.compute.logprobs import Scores
from motley.compute.packed import Packed
from motley.compute.scoring import score
from motley.config import Learning
from motley.learning import fitting
from motley.learning.batches import ToScore
from motley.learning.descent import Upkeep
from motley.learning.fitting import (
    LEAST_TOKENS,
    MOST_TOKENS,
    check_supported,
    fitting_budget,
    halved,
    is_out_of_memory,
    must_recompute,
    too_large,
)
from motley.models.policy import Policy, with_trained_part
from motley.models.tiny import SHAPES, tiny_model, tiny_vocabulary

GIB = 2**30
LARGE = {
    "gpt2": {"n_embd": 512, "n_layer": 8},
    "gemma3": {
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "layer_types": ["full_attention"] * 8,
    },
    "others": {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8},
}


def large_policy(kind: str = "qwen2", checkpointing: bool = False) -> Policy:
    """More parameters than a tiny one, without their values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            ARCHITECTURES[kind](**LARGE.get(kind, LARGE["others"]))
        )
    policy = Policy(model, tiny_vocabulary(), gradient_checkpointing=checkpointing)
    assert sum(p.numel() for p in model.parameters()) > fitting.TINY_PARAMETERS
    return policy


def free(patch: pytest.MonkeyPatch, num_bytes: float) -> None:
    patch.setattr(fitting, "free_bytes", lambda device: num_bytes)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_bytes", [0, 2**50])
def test_a_tiny_model_has_the_same_budget_on_every_machine(
    name: str, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, num_bytes)
    assert fitting_budget(Policy(tiny_model(name, 0), tiny_vocabulary())) == 16384


@pytest.mark.parametrize("kind", ["qwen2", "gpt2", "gemma3"])
def test_the_budget_is_a_power_of_two_that_grows_with_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, budgets = large_policy(kind), []
    for num_bytes in (0, GIB / 2, 1 * GIB, 2 * GIB, 4 * GIB, 8 * GIB, 16 * GIB, 1000 * GIB):
        free(monkeypatch, num_bytes)
        budgets.append(fitting_budget(policy))
    assert all(math.log2(budget).is_integer() for budget in budgets)
    assert budgets == sorted(budgets)
    assert (budgets[0], budgets[-1]) == (LEAST_TOKENS, MOST_TOKENS)
    assert len(set(budgets)) >= 5


def test_the_budget_grows_with_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * GIB)
    plain, checkpointed = (
        fitting_budget(large_policy()),
        fitting_budget(large_policy(checkpointing=True)),
    )
    assert plain < checkpointed < MOST_TOKENS


def test_layers_are_recomputed_only_where_too_few_tokens_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, rules = large_policy(checkpointing=True), Learning()
    free(monkeypatch, 1000 * GIB)
    assert not must_recompute(policy, Upkeep(), rules)
    free(monkeypatch, 2 * GIB)
    assert fitting_budget(large_policy()) < fitting.ENOUGH_TOKENS
    assert must_recompute(policy, Upkeep(), rules)
    assert not must_recompute(policy, Upkeep(), Learning(token_budget=LEAST_TOKENS))
    assert policy.gradient_checkpointing  # which is the caller's to change


def test_the_budget_grows_where_the_optimiser_keeps_less(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = large_policy()
    trained = sum(p.numel() for _, p in policy.trained())
    # not quite enough for the second smallest
    room = 2 * LEAST_TOKENS * fitting._bytes_per_token(policy) / fitting.SHARE
    free(monkeypatch, 12 * trained + 0.99 * room)
    budgets = [
        fitting_budget(policy, upkeep)
        for upkeep in (Upkeep(), Upkeep(kind="adamw8bit"), Upkeep(offload=True))
    ]
    assert budgets[0] < budgets[1] <= budgets[2]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", ["qwen2", "llama with biases", "gpt2"])
def test_what_a_step_keeps_for_a_token_is_not_underestimated(
    kind: str, checkpointing: bool
) -> None:
    """Against what autograd really saves.

    The share of memory that is used leaves room for no more than this.
    """
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "max_position_embeddings": 300,
    }
    if kind == "gpt2":
        sizes = {"n_embd": 64, "n_layer": 6, "n_positions": 300}
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[kind](**sizes))
    policy = Policy(model, tiny_vocabulary(), gradient_checkpointing=checkpointing)
    row = tuple(3 + i % 20 for i in range(255))
    (micro,) = fitting.micro_batches(
        [ToScore(row=i, prompt=(5 + i,), tokens=row) for i in range(4)], 1 << 20, policy.device
    )
    saved: dict[int, int] = {}
    known = {p.data_ptr() for p in model.parameters()}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in known:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = score(policy, micro.packed)
    per_token = sum(saved.values()) / len(micro.packed.token_N)
    assert kept.logp_M.requires_grad
    assert per_token * fitting.SHARE < 0.6 * fitting._bytes_per_token(policy)


def test_free_memory_is_known_also_where_only_the_whole_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemFree: 10 kB\nMemAvailable: 300 kB\n")
    for path, free in ((tmp_path / "meminfo", 300 * 1024), (tmp_path / "none", whole)):
        monkeypatch.setattr(fitting, "MEMORY", path)
        assert fitting.free_bytes(torch.device("cpu")) == free


def test_a_probe_that_runs_out_of_memory_leaves_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(policy: Policy) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fitting, "TINY_PARAMETERS", 0)
    monkeypatch.setattr(fitting, "_bytes_per_token", full)
    assert fitting.fitting_budget(tiny_policy()) == fitting.LEAST_TOKENS


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (
            RuntimeError(
                "[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 9 bytes."
            ),
            True,
        ),
        (
            RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error: RuntimeError, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_real_allocation_that_is_too_large_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_halved_budget_is_said_with_the_setting_that_keeps_it() -> None:
    with pytest.warns(
        UserWarning,
        match=(
            r"out of memory with 4096 tokens in a micro-batch; going on with 2048\. .* "
            r"learning\.token_budget = 2048"
        ),
    ):
        assert halved(4096) == 2048


def test_the_last_word_on_memory_names_the_remedies() -> None:
    said = str(too_large(2048))
    for remedy in ("token_budget = 1024", "gradient_checkpointing = true", "lora", "max_tokens"):
        assert remedy in said


# Architectures


@pytest.mark.parametrize("train", TRAINS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_architectures_that_are_computed_rightly_pass(kind: str, train: str) -> None:
    check_supported(own_code_policy(kind, TRAINS[train]))


@pytest.mark.parametrize("kind", ["qwen3", "gpt2"])
@pytest.mark.parametrize("train", TRAINS)
def test_they_pass_in_bfloat16_and_with_checkpointing_too(kind: str, train: str) -> None:
    policy = dataclasses.replace(
        own_code_policy(kind), dtype=torch.bfloat16, gradient_checkpointing=True
    )
    check_supported(with_trained_part(policy, TRAINS[train], 0))


@pytest.mark.slow
def test_a_model_with_a_forward_of_ours_is_compared_with_its_own_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_supported(tiny_policy())
    right = fitting.score

    def wrong(policy: Policy, packed: Packed) -> Scores:
        scores = right(policy, packed)
        return dataclasses.replace(scores, logp_M=scores.logp_M - 0.1)

    monkeypatch.setattr(fitting, "score", wrong)
    with pytest.raises(
        ValueError,
        match=r"its log-probs differ by 0\.\d+ from those of its own forward; models like Llama",
    ):
        check_supported(tiny_policy())


def test_a_model_that_computes_no_numbers_is_refused() -> None:
    policy = own_code_policy("gpt2")
    with torch.no_grad():
        policy.base.transformer.wte.weight[4] = float("nan")
    with pytest.raises(
        ValueError, match=r"wte\.weight of the model holds numbers that are not fin"
    ):
        check_supported(policy)


def test_switched_off_gradients_are_said_so() -> None:
    for off in (torch.no_grad, torch.inference_mode):
        with (
            off(),
            pytest.raises(ValueError, match=r"switched off .*; train outside of torch\.no_"),
        ):
            check_supported(own_code_policy("gpt2"))
