"""Packed scoring against transformers' own forward, one unpadded sequence at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from architectures import ARCHITECTURES, TRAINS, WINDOW, own_code_policy, reference_policy
from fakes import (
    POLICIES,
    four_bit_policy,
    ragged_sequences,
    reference_distribution,
    reference_logp,
    tiny_policy,
)
from motley.compute import layers, logprobs, scoring
from motley.compute.scoring import score
from motley.learning.batches import ToScore, micro_batches
from motley.models.four_bits import FourBitLinear
from motley.models.policy import Policy, with_trained_part

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


def assert_same_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.abs().max() > 0, name
        torch.testing.assert_close(
            found[name],
            value,
            rtol=1e-4,
            atol=2e-5 * float(value.abs().max()),
            msg=lambda m, n=name: f"{n}: {m}",
        )


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
    whole, parts = (
        packed_logp(policy, sequences, EVERYTHING),
        packed_logp(policy, sequences, budget),
    )
    assert len(micro_batches(sequences, budget, CPU)) > 1
    for ours, theirs in zip(parts, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(policy, parts), gradients(policy, whole))


@pytest.mark.parametrize("logits_at_once", [1, 28, 100])
def test_the_vocabulary_in_chunks_changes_neither_logprobs_nor_gradients(
    logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tiny_policy()
    sequences = ragged_sequences(temperatures=(1.0, 0.5))
    whole = packed_logp(policy, sequences, EVERYTHING)
    expected = gradients(policy, whole)
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", logits_at_once)
    chunked = packed_logp(policy, sequences, EVERYTHING)
    for ours, theirs in zip(chunked, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(policy, chunked), expected)


@pytest.mark.parametrize("logits_at_once", [1, 100, EVERYTHING])
@pytest.mark.parametrize("bias", [False, True])
def test_the_gradient_of_the_vocabulary_projection_is_autograds(
    bias: bool, logits_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "LOGITS_AT_ONCE", logits_at_once)
    (micro,) = micro_batches(ragged_sequences(temperatures=(1.0, 0.5)), EVERYTHING, CPU)
    target_M, temperature_M = micro.packed.target_M, micro.packed.temperature_M
    with torch.random.fork_rng():
        torch.manual_seed(0)
        hidden_MD, head = (
            torch.randn(len(target_M), 8, requires_grad=True),
            torch.nn.Linear(8, 40, bias=bias),
        )
        weight_M = torch.randn(len(target_M))
    leaves = [hidden_MD, *head.parameters()]
    logp_MV = torch.log_softmax(head(hidden_MD) / temperature_M[:, None], -1)
    expected_M = logp_MV.gather(1, target_M[:, None]).squeeze(1)
    scores = logprobs.score_hidden(hidden_MD, head, micro.packed)
    torch.testing.assert_close(scores.logp_M, expected_M)
    torch.testing.assert_close(scores.entropy_M, -(logp_MV.exp() * logp_MV).sum(-1).detach())
    for found, expected in zip(
        *(torch.autograd.grad(logp_M, leaves, weight_M) for logp_M in (scores.logp_M, expected_M)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_completions_of_one_token_are_predicted_by_the_prompt_alone() -> None:
    policy = tiny_policy()
    sequences = [
        ToScore(row=row, prompt=(5, 6, 7), tokens=(token,)) for row, token in enumerate((1, 12, 20))
    ]
    for ours, s in zip(packed_logp(policy, sequences, EVERYTHING), sequences, strict=True):
        torch.testing.assert_close(
            ours, reference_logp(policy, s.prompt, s.tokens), rtol=0, atol=1e-5
        )


def test_entropy_is_that_of_the_distribution_at_the_records_temperature() -> None:
    policy = POLICIES["grouped"]()
    (micro,) = micro_batches(ragged_sequences(temperatures=(1.0, 0.6)), EVERYTHING, CPU)
    sequences = {s.row: s for s in ragged_sequences(temperatures=(1.0, 0.6))}
    scores = score(policy, micro.packed)
    entropy_BT = micro.unpack(scores.entropy_M)
    assert not scores.entropy_M.requires_grad
    for place, row in enumerate(micro.row_B.tolist()):
        s = sequences[row]
        distribution = torch.distributions.Categorical(
            logits=reference_distribution(policy, s.prompt, s.tokens, s.temperature)
        )
        torch.testing.assert_close(
            entropy_BT[place, : len(s.tokens)], distribution.entropy(), rtol=0, atol=2e-5
        )


def test_the_padding_token_as_an_input_gets_the_gradient_that_transformers_gives_it() -> None:
    """A model may sample it; its row of the embeddings is then trained by the head that it is tied
    to only.
    """
    policy = tiny_policy()
    pad = policy.vocabulary.pad_id
    sequences = [ToScore(row=0, prompt=(5, 6), tokens=(7, pad, 8, pad, 9))]
    expected = gradients(policy, [reference_logp(policy, s.prompt, s.tokens) for s in sequences])
    assert_same_gradients(gradients(policy, packed_logp(policy, sequences, EVERYTHING)), expected)


def test_frozen_parts_get_no_gradient() -> None:
    policy = POLICIES["lora"]()
    sequences = ragged_sequences()
    gradients(policy, packed_logp(policy, sequences, EVERYTHING))
    assert all(p.grad is None for name, p in policy.model.named_parameters() if "lora_" not in name)


# Architectures that run by their own code


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("train", TRAINS)
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_other_architectures_get_the_logprobs_and_gradients_of_single_sequences(
    kind: str, train: str, checkpointing: bool
) -> None:
    policy = own_code_policy(kind, TRAINS[train])
    reference = reference_policy(policy)
    policy.gradient_checkpointing = checkpointing
    sequences = ragged_sequences(temperatures=(1.0, 0.7, 1.6))
    assert sum(len(s.prompt) + len(s.tokens) > WINDOW + 1 for s in sequences) > 5
    assert max(len(s.prompt) for s in sequences) > WINDOW
    expected = [reference_logp(reference, s.prompt, s.tokens, s.temperature) for s in sequences]
    for budget in (EVERYTHING, 13):
        found = packed_logp(policy, sequences, budget)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    expected_gradients, found_gradients = gradients(reference, expected), gradients(policy, found)
    assert found_gradients.keys() == expected_gradients.keys()
    for name, value in expected_gradients.items():
        torch.testing.assert_close(
            found_gradients[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert any(value.abs().max() > 1e-2 for value in expected_gradients.values())


@pytest.mark.parametrize("kind", POLICIES)
def test_gradient_checkpointing_changes_nothing_of_a_llama(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, sequences = POLICIES[kind](), ragged_sequences()
    expected = packed_logp(policy, sequences, EVERYTHING)
    expected_gradients = gradients(policy, expected)
    policy.gradient_checkpointing = True
    recomputed = []
    monkeypatch.setattr(
        layers, "checkpoint", lambda f, *given, **named: recomputed.append(f) or f(*given)
    )
    packed_logp(policy, sequences, EVERYTHING)
    names = [walked.__name__ for walked in recomputed]
    assert names == ["walk_layer"] * policy.config.num_hidden_layers
    monkeypatch.undo()
    found = packed_logp(policy, sequences, EVERYTHING)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)
    assert_same_gradients(gradients(policy, found), expected_gradients)


def test_checkpointing_other_architectures_keeps_less_for_the_backward_pass() -> None:
    policy, sequences = own_code_policy("qwen3"), ragged_sequences()
    kept = {}
    for policy.gradient_checkpointing in (False, True):
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: sizes.append(t.numel()) or t,  # noqa: B023
            lambda t: t,
        ):
            packed_logp(policy, sequences, EVERYTHING)
        kept[policy.gradient_checkpointing] = sum(sizes)
    assert kept[True] < kept[False] / 2


def test_checkpointing_can_be_taken_back() -> None:
    policy, sequences = own_code_policy("gemma3"), ragged_sequences()
    policy.gradient_checkpointing = True
    packed_logp(policy, sequences, EVERYTHING)
    policy.gradient_checkpointing = False
    packed_logp(policy, sequences, EVERYTHING)
    assert not policy.base.is_gradient_checkpointing
    assert not policy.base.training


def test_a_window_is_counted_in_positions_of_the_sequence_not_in_packed_places() -> None:
    """Changing a token that is out of sight changes nothing, one that is just in sight does."""
    policy = own_code_policy("mistral")
    # with more layers, what is out of sight is seen through others
    policy.base.model.layers = policy.base.model.layers[:1]
    logp = lambda first: packed_logp(
        policy, [ToScore(row=0, prompt=(*first, 7, 8, 9), tokens=(10,))], EVERYTHING
    )[0]
    assert torch.equal(logp((5, 6)), logp((11, 6)))
    assert not torch.equal(logp((5, 6)), logp((5, 11)))


def test_scoring_leaves_nothing_of_ours_in_a_saved_model(tmp_path: Path) -> None:
    policy = own_code_policy("qwen2")
    policy.gradient_checkpointing = True
    before = packed_logp(policy, ragged_sequences(), EVERYTHING)
    policy.save(tmp_path)
    assert scoring.ATTENTION not in (tmp_path / "config.json").read_text()
    loaded = Policy(AutoModelForCausalLM.from_pretrained(tmp_path), policy.vocabulary)
    for ours, theirs in zip(
        packed_logp(loaded, ragged_sequences(), EVERYTHING), before, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["qwen2", "gemma3", "gpt2"])
def test_bfloat16_arithmetic_stays_near_float32_and_hands_on_float32(kind: str) -> None:
    policy = own_code_policy(kind, TRAINS["lora"])
    sequences = ragged_sequences()
    with torch.no_grad():
        expected = packed_logp(policy, sequences, EVERYTHING)
        rough = with_trained_part(
            dataclasses.replace(own_code_policy(kind), dtype=torch.bfloat16), TRAINS["lora"], 0
        )
        rough.model.load_state_dict(policy.model.state_dict())
        found = packed_logp(rough, sequences, EVERYTHING)
    assert rough.base.get_output_embeddings().weight.dtype == torch.float32
    assert {
        p.dtype for n, p in rough.model.named_parameters() if n.endswith("base_layer.weight")
    } == {torch.bfloat16}
    difference = torch.cat([(a - b).abs() for a, b in zip(found, expected, strict=True)])
    assert found[0].dtype == torch.float32
    assert 0 < float(difference.mean()) < 0.2


def with_the_same_values(held: Policy) -> Policy:
    """A LoRA policy whose frozen weights are those that 4 bits left of them, in full."""
    full = four_bit_policy(bits=0)
    for name, part in held.base.named_modules():
        if isinstance(part, FourBitLinear):
            full.base.get_submodule(name).weight.data.copy_(part.four_bits.full(torch.float32))
    return full


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_base_in_four_bits_scores_exactly_as_one_with_its_values_in_full(
    checkpointed: bool,
) -> None:
    held = dataclasses.replace(four_bit_policy(), gradient_checkpointing=checkpointed)
    full, sequences = with_the_same_values(held), ragged_sequences()
    ours, theirs = (packed_logp(one, sequences, EVERYTHING) for one in (held, full))
    assert all(map(torch.equal, ours, theirs))
    unlike = packed_logp(four_bit_policy(bits=0), sequences, EVERYTHING)
    assert not torch.allclose(torch.cat(ours), torch.cat(unlike), atol=1e-2)
    found, expected = gradients(held, ours), gradients(full, theirs)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert found.keys() == expected.keys()


def test_no_layer_of_four_bits_is_in_full_when_a_pass_is_through() -> None:
    policy = four_bit_policy()
    sizes = {
        (part.out_features, part.in_features)
        for part in policy.base.modules()
        if isinstance(part, FourBitLinear)
    }
    own, kept = {p.data_ptr() for p in policy.model.parameters()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        logp = packed_logp(policy, ragged_sequences(), EVERYTHING)
    assert logp
    assert not [t.shape for t in kept if t.shape in sizes and t.data_ptr() not in own]
