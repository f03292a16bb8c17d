from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy import stats

from fakes import (
    POLICIES,
    grouped_query_policy,
    lora_policy,
    reference_distribution,
    reference_logp,
    tiny_policy,
)
from motley.compute.scoring import score
from motley.config import Lora, TrainPart
from motley.engines import Completion, TorchEngine
from motley.engines.sampling import draw
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy
from motley.records import Sampling

PROMPTS = [(5, 12, 13, 14), (6, 20), (9,), (7, 15, 15, 16, 17, 27)]
LONG = Sampling(max_tokens=12)


def samples(
    policy: Policy, sampling: Sampling = LONG, num_samples: int = 4, seed: int = 0
) -> list[tuple[tuple[int, ...], Completion]]:
    made = TorchEngine(policy).sample(PROMPTS, num_samples, sampling, seed)
    return [
        (prompt, completion)
        for prompt, row in zip(PROMPTS, made, strict=True)
        for completion in row
    ]


def truncated(logp_TV: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Each row cut to its top k, renormalised, then to the fewest that together have top_p,
    renormalised: in float64, token by token.
    """
    rows = []
    for row in logp_TV.double().exp().numpy():
        order = np.argsort(-row, kind="stable")[: top_k or len(row)]
        share = row[order] / row[order].sum()
        kept = order[: int(np.searchsorted(np.cumsum(share), top_p)) + 1] if top_p < 1 else order
        rows.append(np.full(len(row), -np.inf))
        rows[-1][kept] = np.log(row[kept] / row[kept].sum())
    return torch.tensor(np.array(rows))


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("convention", ["sampled", "full"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 0, 1.0), (0.7, 5, 1.0), (1.3, 0, 0.8), (1.0, 6, 0.7)],
)
def test_logprobs_are_those_of_the_declared_convention(
    kind: str, convention: str, temperature: float, top_k: int, top_p: float
) -> None:
    policy = POLICIES[kind]()
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=6, logprobs=convention
    )
    with torch.no_grad():
        for prompt, completion in samples(policy, sampling, num_samples=2):
            expected_TV = reference_distribution(policy, prompt, completion.tokens, temperature)
            if convention == "sampled":
                expected_TV = truncated(expected_TV, top_k, top_p)
            expected = expected_TV.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected.float(), rtol=0, atol=5e-5
            )


def test_a_row_does_not_depend_on_the_other_prompts_of_its_batch() -> None:
    policy = grouped_query_policy()
    engine = TorchEngine(policy)
    together = engine.sample(PROMPTS, 3, LONG, seed=1)
    others = engine.sample([(9, 9, 9, 9, 9, 9, 9, 9), *PROMPTS[1:]], 3, LONG, seed=1)
    first_only = engine.sample(PROMPTS[:1], 3, LONG, seed=1)
    for made, expected in ((others[1:], together[1:]), (first_only, together[:1])):
        for row, expected_row in zip(made, expected, strict=True):
            assert [c.tokens for c in row] == [c.tokens for c in expected_row]
            for ours, theirs in zip(row, expected_row, strict=True):
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.slow
def test_samples_that_share_a_branch_or_a_batch_are_as_if_each_had_been_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every sample as a branch of its own, nothing shared and nothing cut, draws the same
    tokens.
    """
    policy = grouped_query_policy(seed=3)
    shared = samples(policy, num_samples=8)
    assert len({len(c.tokens) for _, c in shared}) > 3, (
        "samples must end at different steps for this to test anything"
    )
    engine = TorchEngine(policy)
    uniform_BT = torch.rand(
        len(shared),
        LONG.max_tokens,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float64,
    )
    for row, (prompt, completion) in enumerate(shared):
        monkeypatch.setattr(torch, "rand", lambda *_, row=row, **__: uniform_BT[row : row + 1])
        ((alone,),) = engine.sample([prompt], 1, LONG, seed=0)
        assert dataclasses.replace(alone, logprobs=completion.logprobs) == completion
        np.testing.assert_allclose(alone.logprobs, completion.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", POLICIES)
def test_greedy_is_the_argmax_rollout_of_transformers(kind: str) -> None:
    policy = POLICIES[kind]()
    with torch.no_grad():
        for prompt, completion in samples(
            policy, Sampling(temperature=0.0, max_tokens=8), num_samples=1
        ):
            tokens: list[int] = []
            while len(tokens) < 8 and policy.vocabulary.end_id not in tokens:
                logits = policy.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1]
                tokens.append(int(logits.argmax()))
            assert completion.tokens == tuple(tokens)
            np.testing.assert_allclose(
                completion.logprobs, reference_logp(policy, prompt, tokens).numpy(), atol=2e-5
            )


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 1.0), (0, 1.0, 0.5), (8, 0.9, 1.0)]
)
def test_tokens_are_drawn_as_often_as_their_probability_says(
    top_k: int, top_p: float, temperature: float
) -> None:
    policy = grouped_query_policy()
    sampling = Sampling(max_tokens=1, top_k=top_k, top_p=top_p, temperature=temperature)
    num_draws = 20_000
    (row,) = TorchEngine(policy).sample([(5, 12, 13)], num_draws, sampling, seed=7)
    with torch.no_grad():
        logp_TV = reference_distribution(policy, (5, 12, 13), (0,), temperature)
    expected_V = truncated(logp_TV, top_k, top_p)[0].exp().numpy() * num_draws
    found_V = np.bincount([c.tokens[0] for c in row], minlength=len(expected_V))
    assert found_V[expected_V == 0].sum() == 0
    common = expected_V >= 5
    rest = (found_V[~common].sum(), expected_V[~common].sum())
    found, expected = np.append(found_V[common], rest[0]), np.append(expected_V[common], rest[1])
    possible = expected > 0
    assert (
        stats.chisquare(found[possible], expected[possible] * found.sum() / expected.sum()).pvalue
        > 0.001
    )


def test_rows_of_one_prompt_and_steps_of_one_row_draw_independently() -> None:
    logits_BV = torch.zeros(1, 10)
    (row,) = TorchEngine(tiny_policy()).sample([(5, 12)], 200, Sampling(max_tokens=2), seed=0)
    assert len({c.tokens for c in row}) > 100
    low, high = (
        draw(logits_BV, torch.tensor([0]), Sampling(), torch.tensor([u], dtype=torch.float64))[
            0
        ].item()
        for u in (0.0, 1 - 2**-53)
    )
    assert (low, high) == (0, 9)


def test_completions_stop_at_the_end_token_or_at_the_limit() -> None:
    policy = grouped_query_policy(seed=3)
    end = policy.vocabulary.end_id
    made = [completion for _, completion in samples(policy, num_samples=16)]
    assert {c.ending for c in made} == {"stop", "length"}
    for completion in made:
        if completion.ending == "stop":
            assert completion.tokens.index(end) == len(completion.tokens) - 1
        else:
            assert end not in completion.tokens
            assert len(completion.tokens) == LONG.max_tokens


@pytest.mark.slow
def test_a_completion_that_ends_on_the_last_step_ended_by_itself() -> None:
    made = [
        c for _, c in samples(grouped_query_policy(seed=3), Sampling(max_tokens=1), num_samples=200)
    ]
    end = tiny_policy().vocabulary.end_id
    assert {c.ending for c in made if c.tokens == (end,)} == {"stop"}
    assert {c.ending for c in made if c.tokens != (end,)} == {"length"}


def test_the_same_seed_gives_the_same_completions_and_leaves_the_global_rng_alone() -> None:
    policy = tiny_policy()
    before = torch.get_rng_state()
    assert samples(policy, seed=5) == samples(policy, seed=5)
    assert samples(policy, seed=5) != samples(policy, seed=6)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("make", [tiny_policy, lora_policy])
def test_weights_are_taken_at_refresh_and_only_then(make: type[Policy]) -> None:
    policy = make()
    engine = TorchEngine(policy)
    before = engine.sample(PROMPTS, 2, LONG, seed=0)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(0.05)
    assert engine.sample(PROMPTS, 2, LONG, seed=0) == before
    engine.refresh()
    after = engine.sample(PROMPTS, 2, LONG, seed=0)
    assert after != before
    with torch.no_grad():
        expected = reference_logp(policy, PROMPTS[0], after[0][0].tokens)
    np.testing.assert_allclose(after[0][0].logprobs, expected.numpy(), atol=5e-5)


def test_what_does_not_fit_the_model_is_refused() -> None:
    engine = TorchEngine(tiny_policy())
    with pytest.raises(
        ValueError,
        match=(
            "prompt of 60 tokens and max_tokens=5 do not fit the model's 64 positions; lower "
            "max_tokens"
        ),
    ):
        engine.sample([(5, 6), (5,) * 60], 1, Sampling(max_tokens=5), seed=0)
    (row,) = engine.sample([(5,) * 60], 1, Sampling(max_tokens=4), seed=0)
    assert 1 <= len(row[0].tokens) <= 4


@pytest.mark.slow
def test_a_small_adapter_is_not_lost_in_the_rounding_of_the_weights() -> None:
    """A step of 1e-3 is below what bfloat16 tells apart in many weights: merged, it would hardly
    act.
    """
    policy = tiny_policy(TrainPart(lora=Lora(rank=4)))
    policy.dtype = torch.bfloat16
    before, sampling = TorchEngine(policy), Sampling(max_tokens=4)
    with torch.no_grad():
        for name, parameter in policy.trained():
            if "lora_B" in name:
                parameter.fill_(1e-3)
    (changed,) = TorchEngine(policy).sample([(5, 12, 13)], 64, sampling, seed=0)
    (kept,) = before.sample([(5, 12, 13)], 64, sampling, seed=0)
    assert (
        max(
            abs(a.logprobs[0] - b.logprobs[0])
            for a, b in zip(changed, kept, strict=True)
            if a.tokens[0] == b.tokens[0]
        )
        > 1e-5
    )
    for completion in changed:
        (micro,) = micro_batches(
            [ToScore(row=0, prompt=(5, 12, 13), tokens=completion.tokens)], 64, policy.device
        )
        with torch.no_grad():
            assert torch.allclose(
                score(policy, micro.packed).logp_M, torch.tensor(completion.logprobs), atol=1e-5
            )
