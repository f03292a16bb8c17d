"""Tokens that stand behind the same tokens, computed once, against all of them computed."""

from __future__ import annotations

import pytest
import torch

from architectures import ARCHITECTURES, own_code_policy
from fakes import POLICIES, ragged_sequences
from motley.compute import scoring, shared_prefixes
from motley.compute.packed import Packed
from motley.compute.shared_prefixes import Merged
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy

CPU = torch.device("cpu")
EVERYTHING = 10**6


def packed(*sequences: tuple[tuple[int, ...], tuple[int, ...]]) -> Packed:
    (micro,) = micro_batches(
        [ToScore(row=i, prompt=p, tokens=t) for i, (p, t) in enumerate(sequences)], EVERYTHING, CPU
    )
    return micro.packed


def alike(seed: int = 0) -> list[ToScore]:
    """Completions over so few tokens that many begin alike, and some are the same."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda length: tuple(torch.randint(5, 7, (length,), generator=generator).tolist())
    prompts = [draw(length) for length in (2, 3, 5, 7)]
    return [
        ToScore(row=row, prompt=prompts[row % 4], tokens=draw(1 + row % 7)) for row in range(40)
    ]


def scored(policy: Policy, batch: Packed) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.model.zero_grad()
    logp_M = scoring.score(policy, batch).logp_M
    (logp_M * torch.linspace(-1, 1, len(logp_M))).sum().backward()
    return logp_M.detach(), {
        name: p.grad.clone() for name, p in policy.trained() if p.grad is not None
    }


def test_what_completions_begin_with_alike_is_there_once() -> None:
    found = Merged.of(
        packed(
            ((9, 8), (5, 6, 7, 1)), ((9, 8), (5, 6, 8, 1)), ((9, 8), (5, 6, 7, 1)), ((9, 8), (6, 1))
        )
    )
    assert found.token_N.tolist() == [9, 8, 5, 6, 7, 8, 6]
    assert found.position_N.tolist() == [0, 1, 2, 3, 4, 4, 2]
    assert found.predictor_M.tolist() == [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 6]


def test_completions_of_different_prompts_are_not_merged() -> None:
    found = Merged.of(packed(((9, 8), (5, 6, 1)), ((9, 7), (5, 6, 1))))
    # their prompts are where they are alike
    assert sorted(found.token_N.tolist()) == [5, 5, 6, 6, 7, 8, 9]


def test_a_long_prompt_keeps_all_prompts_in_rows_of_their_own() -> None:
    """A mask over rows of several would be as wide as the longest."""
    long = tuple(range(5, 25)) * 4
    prompts, _ = Merged.of(packed(((9, 8), (5, 6, 1)), ((9, 7), (5, 6, 1)), (long, (5, 6, 1)))).rows
    assert prompts.bias_B1TK is None
    assert prompts.query_BT.shape == (3, len(long))


def test_the_same_long_completion_is_there_once() -> None:
    long = tuple(range(5, 25)) * 4
    assert len(Merged.of(packed(((9, 8), long), ((9, 8), long))).token_N) == 2 + len(long) - 1


@pytest.mark.parametrize("row_tokens", [1, 4, 9, 64])
@pytest.mark.parametrize("kind", POLICIES)
def test_merging_changes_neither_logprobs_nor_gradients(
    kind: str, row_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = POLICIES[kind]()
    (micro,) = micro_batches(alike() + ragged_sequences(), EVERYTHING, CPU)
    monkeypatch.setattr(shared_prefixes, "ROW_TOKENS", row_tokens)
    assert len(Merged.of(micro.packed).token_N) < len(micro.packed.token_N) or row_tokens == 1
    logp_M, gradient = scored(policy, micro.packed)
    monkeypatch.setattr(scoring.Merged, "of", lambda packed: packed)
    expected_M, expected = scored(policy, micro.packed)
    torch.testing.assert_close(logp_M, expected_M, rtol=0, atol=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(
            gradient[name], value, rtol=1e-4, atol=2e-5 * float(value.abs().max())
        )


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_merging_changes_no_logprobs_of_other_architectures(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = own_code_policy(kind, "full")
    (micro,) = micro_batches(alike(), EVERYTHING, CPU)
    logp_M, _ = scored(policy, micro.packed)
    monkeypatch.setattr(scoring.Merged, "of", lambda packed: packed)
    torch.testing.assert_close(logp_M, scored(policy, micro.packed)[0], rtol=0, atol=1e-4)


def test_completions_of_one_token_have_no_rows() -> None:
    assert len(Merged.of(packed(((9, 8), (5,)), ((9, 8), (6,)))).rows) == 1
    assert len(Merged.of(packed(((9, 8), (5,)), ((9, 7), (6, 1)))).rows) == 2
