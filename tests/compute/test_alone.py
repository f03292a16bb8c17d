"""Models that packing would compute wrongly: their sequences are scored one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fakes import reference_logp
from families import family_model
from motley.compute import scoring
from motley.compute.alone import looks_ahead
from motley.compute.scoring import score
from motley.learning.batches import ToScore, micro_batches
from motley.learning.fitting import check_supported
from motley.models.policy import Policy
from motley.models.tiny import tiny_vocabulary

# a state of its own; a cap on attention; a sink; logits that are scaled; positions by its own mask
FAMILIES = ["jamba", "mamba2", "gemma2", "gpt_oss", "granite", "bloom"]


def policy_of(kind: str, **sizes: object) -> Policy:
    return Policy(family_model(kind, sizes=sizes), tiny_vocabulary())


def ragged() -> list[ToScore]:
    """Prompts of several lengths, some with several completions, some of those of one token."""
    rows = [
        ((5, 6, 7), (3, 4, 10, 8, 9, 1)),
        ((5, 6, 7), (3, 11)),
        ((5, 6, 7), (1,)),
        ((8, 9, 4, 10, 11), (5, 4, 12)),
        ((2,), (5,)),
    ]
    return [
        ToScore(row=number, prompt=prompt, tokens=tokens, temperature=1.0 + number / 4)
        for number, (prompt, tokens) in enumerate(rows)
    ]


def scored(policy: Policy, sequences: Sequence[ToScore], budget: int = 1 << 10) -> list[Tensor]:
    logp: dict[int, Tensor] = {}
    for micro in micro_batches(sequences, budget, policy.device):
        logp_BT = micro.unpack(score(policy, micro.packed).logp_M)
        for logp_T, row in zip(logp_BT, micro.row_B.tolist(), strict=True):
            logp[row] = logp_T[: len(sequences[row].tokens)]
    return [logp[row] for row in range(len(sequences))]


def gradients(policy: Policy, logp: list[Tensor]) -> dict[str, Tensor]:
    policy.model.zero_grad(set_to_none=True)
    torch.cat(logp).sum().backward()
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAMILIES)
def test_they_get_the_logprobs_and_gradients_of_single_sequences(kind: str) -> None:
    policy, sequences = policy_of(kind), ragged()
    reference = Policy(copy.deepcopy(policy.base).eval(), policy.vocabulary)
    reference.base.set_attn_implementation("eager")
    check_supported(policy)
    assert policy.one_by_one
    expected = [reference_logp(reference, s.prompt, s.tokens, s.temperature) for s in sequences]
    for budget in (1 << 10, 7):
        found = scored(policy, sequences, budget)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    ours, theirs = gradients(policy, found), gradients(reference, expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_sequence_does_not_change_what_is_said_of_another() -> None:
    """Packed, the state of a Jamba would leak from one into the next."""
    policy, sequences = policy_of("jamba"), ragged()
    check_supported(policy)
    together = scored(policy, sequences)
    for sequence, expected in zip(sequences, together, strict=True):
        (alone,) = scored(
            policy,
            [
                ToScore(
                    row=0,
                    prompt=sequence.prompt,
                    tokens=sequence.tokens,
                    temperature=sequence.temperature,
                )
            ],
        )
        assert torch.equal(alone, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jamba", "mamba2", "granite"])
def test_fresh_weights_do_not_hide_that_packing_is_wrong(kind: str) -> None:
    """With them all tokens are about as likely, whatever is computed."""
    policy = policy_of(kind, initializer_range=0.005)
    check_supported(policy)
    assert policy.one_by_one


def test_entropies_are_those_of_the_distributions() -> None:
    policy = policy_of("granite")
    policy.one_by_one = True
    (micro,) = micro_batches([ToScore(row=0, prompt=(5, 6), tokens=(7, 8))], 64, policy.device)
    found = score(policy, micro.packed)
    logits_TV = policy.base(input_ids=torch.tensor([[5, 6, 7]])).logits[0, 1:]
    expected = torch.distributions.Categorical(logits=logits_TV).entropy()
    torch.testing.assert_close(found.entropy_M, expected)
    assert not found.entropy_M.requires_grad


@pytest.mark.slow
def test_models_that_are_computed_rightly_stay_packed() -> None:
    for kind in ("llama", "gpt_neox", "mixtral", "mistral", "olmo3"):
        policy = policy_of(kind)
        check_supported(policy)
        assert not policy.one_by_one, kind


@pytest.mark.slow
def test_a_window_that_attention_is_not_told_is_not_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would show in sequences longer than the window only."""
    right = scoring._attention
    monkeypatch.setattr(
        scoring,
        "_attention",
        lambda *given, sliding_window=None, **named: right(*given, **named),
    )
    for kind, alone in (("mixtral", True), ("gpt_neox", False)):
        policy = policy_of(kind, **({"sliding_window": 32} if alone else {}))
        check_supported(policy)
        assert policy.one_by_one == alone


@pytest.mark.slow
def test_a_model_that_looks_ahead_is_refused() -> None:
    policy = policy_of("xlnet")
    policy.base.eval()
    assert looks_ahead(policy)
    with pytest.raises(
        ValueError, match="what it says of a token depends on the tokens behind it; models like"
    ):
        check_supported(policy)
    assert not looks_ahead(policy_of("llama"))


def test_a_model_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="'reformer' is not supported: its code does not run here"):
        check_supported(policy_of("reformer"))
