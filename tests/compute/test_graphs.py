"""Micro-batches filled up to the size of a graph, and graphs of their forward and backward pass,
against plain scoring.
"""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from compute.devices import INTERPRETED, needs_gpu
from compute.test_attention import BATCHES, exact, packed_of  # noqa: F401
from fakes import POLICIES, ragged_sequences, tiny_policy
from motley.compute import attention, fused, graphs
from motley.compute.decoder import Decoder
from motley.compute.graphs import CapturedScore, Size, padded, scorer
from motley.compute.logprobs import score_hidden
from motley.compute.packed import Packed
from motley.compute.scoring import score
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", BATCHES)
def test_filling_up_leaves_tokens_and_targets_where_they_can_be_found(kind: str) -> None:
    packed = packed_of(kind)
    size = Size.of(packed)
    full = padded(packed, size)
    assert (
        full.token_N[full.predictor_M][: len(packed.target_M)].tolist()
        == packed.token_N[packed.predictor_M].tolist()
    )
    assert (
        full.position_N[full.predictor_M][: len(packed.target_M)].tolist()
        == packed.position_N[packed.predictor_M].tolist()
    )
    assert len(full.token_N) == size.prompt_tokens + size.answer_tokens
    assert len(full.target_M) == len(full.predictor_M) == len(full.temperature_M) == size.targets
    for spans, count, total in (
        (full.own, size.prompts + size.rows, len(full.token_N)),
        (full.prompts, size.prompts, size.prompt_tokens),
        (full.answers, size.prompts, size.answer_tokens),
    ):
        assert len(spans.start_S) == count + 1
        assert (int(spans.start_S[-1]), spans.total) == (total, total)
        assert (
            0 <= int(spans.start_S.diff().min()) <= int(spans.start_S.diff().max()) <= spans.longest
        )
    assert Size.of(dataclasses.replace(packed, token_N=packed.token_N + 1)) == size


def test_sizes_are_few_and_hold_little_more() -> None:
    found = {graphs._up(number) for number in range(1000, 70_000)}
    assert len(found) < 60
    assert all(number <= graphs._up(number) <= number * 1.13 for number in range(1000, 70_000, 37))


@pytest.mark.slow
@pytest.mark.skipif(
    not INTERPRETED, reason="needs TRITON_INTERPRET=1, which a machine with a GPU does not set"
)
@pytest.mark.usefixtures("exact")
def test_filling_up_changes_neither_logprobs_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    monkeypatch.setattr(attention, "runs_flash", lambda device: True)
    monkeypatch.setattr(graphs, "FILLER", 3)
    monkeypatch.setattr(graphs, "_up", lambda number: -(-number // 11) * 11)
    policy = POLICIES["grouped"]()
    sequences = [s for s in ragged_sequences(temperatures=(1.0, 0.7)) if len(s.prompt) != 3][:3]
    (micro,) = micro_batches(
        [dataclasses.replace(s, row=i) for i, s in enumerate(sequences)], 10**6, CPU
    )
    packed, count = micro.packed, len(micro.packed.target_M)

    def result(packed: Packed) -> tuple[Tensor, list[Tensor]]:
        policy.model.zero_grad()
        hidden_ND = fused.fused_states(Decoder.of(policy.base), packed, torch.float32, False)
        logp_M = score_hidden(
            hidden_ND[packed.predictor_M], policy.base.get_output_embeddings(), packed
        ).logp_M[:count]
        (logp_M * torch.linspace(-1, 2, count)).sum().backward()
        return logp_M.detach(), [p.grad.clone() for p in policy.model.parameters()]

    size = Size.of(packed)
    assert size.prompt_tokens - packed.prompts.total > 3
    assert size.answer_tokens > packed.answers.total
    expected, found = result(packed), result(padded(packed, size))
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_on_a_cpu_there_are_no_graphs() -> None:
    assert not isinstance(scorer(tiny_policy()), CapturedScore)


# On a GPU


def on_gpu(dtype: torch.dtype, kind: str = "grouped") -> Policy:
    policy = POLICIES[kind]()
    policy.model.cuda()
    policy.dtype = dtype
    return policy


def batches(seed: int) -> list[ToScore]:
    """Of the same size, whatever the seed, with shared prompts and others."""
    generator = torch.Generator().manual_seed(seed)
    token = lambda count: tuple(torch.randint(3, 28, (count,), generator=generator).tolist())
    groups = [(token(9), [token(5 + (row + seed) % 4) for row in range(4)]) for _ in range(6)]
    rows = [(prompt, tokens) for prompt, answers in groups for tokens in answers] + [
        (token(4), token(7)) for _ in range(5)
    ]
    return [ToScore(row=i, prompt=prompt, tokens=tokens) for i, (prompt, tokens) in enumerate(rows)]


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("kind", ["grouped", "four bits"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_graphs_give_the_scores_and_gradients_of_plain_scoring(
    dtype: torch.dtype, kind: str
) -> None:
    policy = on_gpu(dtype, kind)
    other = dataclasses.replace(policy, model=copy.deepcopy(policy.model))
    captured_score = scorer(policy)
    assert isinstance(captured_score, CapturedScore)
    for step in range(4):
        policy.model.zero_grad()
        other.model.zero_grad()
        found = scores = None
        captured_score.begin()
        assert bool(captured_score._graphs) == (step > 0)
        for part in range(2):
            for way, model in (
                (captured_score, policy),
                (lambda packed: score(other, packed), other),
            ):
                (micro,) = micro_batches(batches(10 * step + part), 10**6, torch.device("cuda"))
                scores = way(micro.packed)
                (
                    scores.logp_M * torch.linspace(-1, 2, len(scores.logp_M), device="cuda")
                ).sum().backward()
                if model is policy:
                    found = scores
            torch.testing.assert_close(
                found.logp_M, scores.logp_M, rtol=0, atol=2e-2 if dtype == torch.bfloat16 else 4e-3
            )
            torch.testing.assert_close(
                found.entropy_M,
                scores.entropy_M,
                rtol=0,
                atol=2e-2 if dtype == torch.bfloat16 else 4e-3,
            )
        for (name, ours), (_, theirs) in zip(policy.trained(), other.trained(), strict=True):
            away = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
            assert float(away) < (0.05 if dtype == torch.bfloat16 else 0.01), (
                step,
                name,
                float(away),
            )
        with torch.no_grad():  # a step, the same for both
            for (_, ours), (_, theirs) in zip(policy.trained(), other.trained(), strict=True):
                ours.sub_(0.01 * theirs.grad)
                theirs.sub_(0.01 * theirs.grad)
    assert not captured_score._gave_up


@pytest.mark.gpu
@needs_gpu
def test_scores_that_later_ones_replaced_are_not_differentiated() -> None:
    policy = on_gpu(torch.float16)
    way = scorer(policy)
    (micro,) = micro_batches(batches(0), 10**6, torch.device("cuda"))
    for _ in range(2):
        way(micro.packed).logp_M.sum().backward()
    way.begin()
    first, _ = way(micro.packed), way(micro.packed)
    with pytest.raises(RuntimeError, match="differentiate scores before asking for the next"):
        first.logp_M.sum().backward()
