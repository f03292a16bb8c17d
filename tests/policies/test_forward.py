"""Packed scoring against transformers' own forward, one unpadded sequence at a time."""

from __future__ import annotations

import pytest
import torch

from fakes import POLICIES, ragged_sequences, reference_distribution, reference_logp, tiny_policy
from motley.learning.batches import ToScore, micro_batches
from motley.policies import Policy, forward
from motley.policies.forward import score

CPU = torch.device("cpu")
EVERYTHING = 10**6


def packed_logp(policy: Policy, sequences: list[ToScore], budget: int) -> list[torch.Tensor]:
    """Log-probs of each sequence, by row."""
    found: dict[int, torch.Tensor] = {}
    for micro in micro_batches(sequences, budget, CPU):
        table_BT = micro.unpack(score(policy, micro.packed).logp_M)
        for place, row in enumerate(micro.row_B.tolist()):
            found[row] = table_BT[place][micro.mask_BT[place]]
    return [found[row] for row in range(len(sequences))]


def gradients(policy: Policy, logp: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of a sum in which every token has a weight of its own, so that no mix-up cancels out."""
    policy.model.zero_grad()
    weight = [torch.linspace(-1, 1, len(values)) + row / 3 for row, values in enumerate(logp)]
    sum((w * values).sum() for w, values in zip(weight, logp, strict=True)).backward()
    return {name: p.grad.clone() for name, p in policy.trained()}


def assert_same_gradients(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=2e-5 * float(value.abs().max()), msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", POLICIES)
def test_logprobs_and_gradients_equal_those_of_single_sequences(kind: str) -> None:
    policy = POLICIES[kind]()
    sequences = ragged_sequences(temperatures=(1.0, 0.7, 1.6))
    expected = [reference_logp(policy, s.prompt, s.tokens, s.temperature) for s in sequences]
    expected_gradients = gradients(policy, expected)
    found = packed_logp(policy, sequences, EVERYTHING)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    assert_same_gradients(gradients(policy, found), expected_gradients)


@pytest.mark.parametrize("budget", [1, 7, 13, 40])
def test_the_token_budget_changes_neither_logprobs_nor_gradients(budget: int) -> None:
    policy = POLICIES["grouped"]()
    sequences = ragged_sequences()
    whole, parts = packed_logp(policy, sequences, EVERYTHING), packed_logp(policy, sequences, budget)
    assert len(micro_batches(sequences, budget, CPU)) > 1
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(policy, parts), gradients(policy, whole))


@pytest.mark.parametrize("logits_at_once", [1, 28, 100])
def test_the_vocabulary_in_chunks_changes_neither_logprobs_nor_gradients(logits_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tiny_policy()
    sequences = ragged_sequences(temperatures=(1.0, 0.5))
    whole = packed_logp(policy, sequences, EVERYTHING)
    expected = gradients(policy, whole)
    monkeypatch.setattr(forward, "LOGITS_AT_ONCE", logits_at_once)
    chunked = packed_logp(policy, sequences, EVERYTHING)
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(policy, chunked), expected)


def test_completions_of_one_token_are_predicted_by_the_prompt_alone() -> None:
    policy = tiny_policy()
    sequences = [ToScore(row=row, prompt=(5, 6, 7), tokens=(token,)) for row, token in enumerate((1, 12, 20))]
    for ours, s in zip(packed_logp(policy, sequences, EVERYTHING), sequences, strict=True):
        torch.testing.assert_close(ours, reference_logp(policy, s.prompt, s.tokens), rtol=0, atol=1e-5)


def test_entropy_is_that_of_the_distribution_at_the_records_temperature() -> None:
    policy = POLICIES["grouped"]()
    (micro,) = micro_batches(ragged_sequences(temperatures=(1.0, 0.6)), EVERYTHING, CPU)
    sequences = {s.row: s for s in ragged_sequences(temperatures=(1.0, 0.6))}
    scores = score(policy, micro.packed)
    entropy_BT = micro.unpack(scores.entropy_M)
    assert not scores.entropy_M.requires_grad
    for place, row in enumerate(micro.row_B.tolist()):
        s = sequences[row]
        distribution = torch.distributions.Categorical(logits=reference_distribution(policy, s.prompt, s.tokens, s.temperature))
        torch.testing.assert_close(entropy_BT[place, : len(s.tokens)], distribution.entropy(), rtol=0, atol=2e-5)


def test_frozen_parts_get_no_gradient() -> None:
    policy = POLICIES["lora"]()
    sequences = ragged_sequences()
    gradients(policy, packed_logp(policy, sequences, EVERYTHING))
    assert all(p.grad is None for name, p in policy.model.named_parameters() if "lora_" not in name)
