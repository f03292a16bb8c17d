"""The contract of the built-in engine, kept by the one for any architecture."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from architectures import ARCHITECTURES, TRAINS, own_code_policy, reference_policy, text_tokenizer
from engines.test_branches import LONG, PROMPTS, truncated
from fakes import (
    POLICIES,
    grouped_query_policy,
    reference_distribution,
    reference_logp,
    tiny_policy,
)
from marks import slow
from motley.compute.scoring import score
from motley.engines import Completion, PlainEngine, TorchEngine, torch_engine
from motley.engines.sampling import SampledRows
from motley.learning.batches import ToScore, micro_batches
from motley.models.policy import Policy
from motley.models.vocabulary import Vocabulary
from motley.records import Sampling

KINDS: dict[str, Callable[[], Policy]] = {
    kind: (lambda kind=kind: own_code_policy(kind)) for kind in ARCHITECTURES
} | {
    "qwen3 with lora": lambda: own_code_policy("qwen3", TRAINS["lora"]),
    "gpt2 with lora": lambda: own_code_policy("gpt2", TRAINS["lora"]),
}


def samples(
    policy: Policy, sampling: Sampling = LONG, num_samples: int = 4, seed: int = 0
) -> list[tuple[tuple[int, ...], Completion]]:
    made = PlainEngine(policy).sample(PROMPTS, num_samples, sampling, seed)
    return [
        (prompt, completion)
        for prompt, row in zip(PROMPTS, made, strict=True)
        for completion in row
    ]


KNOWN = [kind for kind in KINDS if not kind.startswith(("gpt2", "opt"))]


def test_the_fast_engine_is_for_decoders_it_knows_and_this_one_for_the_others() -> None:
    assert isinstance(torch_engine(tiny_policy()), TorchEngine)
    for name, kind in KINDS.items():
        assert type(torch_engine(kind())) is (TorchEngine if name in KNOWN else PlainEngine)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convention", ["sampled", "full"])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [slow(1.0, 0, 1.0), (0.7, 5, 1.0), slow(1.3, 0, 0.8), (1.0, 6, 0.7)],
)
def test_logprobs_are_those_of_the_declared_convention(
    kind: str, convention: str, temperature: float, top_k: int, top_p: float
) -> None:
    policy = KINDS[kind]()
    reference = reference_policy(policy)
    sampling = Sampling(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=6, logprobs=convention
    )
    with torch.no_grad():
        for prompt, completion in samples(policy, sampling, num_samples=2):
            expected_TV = reference_distribution(reference, prompt, completion.tokens, temperature)
            if convention == "sampled":
                expected_TV = truncated(expected_TV, top_k, top_p)
            expected = expected_TV.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected.float(), rtol=0, atol=5e-5
            )


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_the_trainer_computes(kind: str) -> None:
    policy = KINDS[kind]()
    made = samples(policy)
    sequences = [
        ToScore(row=i, prompt=prompt, tokens=completion.tokens)
        for i, (prompt, completion) in enumerate(made)
    ]
    with torch.no_grad():
        (micro,) = micro_batches(sequences, 10**6, torch.device("cpu"))
        table_BT = micro.unpack(score(policy, micro.packed).logp_M)
    for row_T, row in zip(table_BT, micro.row_B.tolist(), strict=True):
        logprobs = made[row][1].logprobs
        np.testing.assert_allclose(row_T[: len(logprobs)].numpy(), logprobs, atol=5e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma3", "mistral", "gpt2"])
def test_a_row_does_not_depend_on_the_other_prompts_of_its_batch(kind: str) -> None:
    engine = PlainEngine(own_code_policy(kind, seed=3))
    together = engine.sample(PROMPTS, 8, LONG, seed=1)
    assert len({len(c.tokens) for row in together for c in row}) > 2, (
        "samples must end at different steps for this to test anything"
    )
    others = engine.sample([(9, 9, 9, 9, 9, 9, 9, 9), *PROMPTS[1:]], 8, LONG, seed=1)
    first_only = engine.sample(PROMPTS[:1], 8, LONG, seed=1)
    for made, expected in ((others[1:], together[1:]), (first_only, together[:1])):
        for row, expected_row in zip(made, expected, strict=True):
            assert [c.tokens for c in row] == [c.tokens for c in expected_row]
            for ours, theirs in zip(row, expected_row, strict=True):
                np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", [*POLICIES, *KNOWN])
@pytest.mark.parametrize(
    "sampling", [LONG, Sampling(temperature=0.8, top_k=9, top_p=0.9, max_tokens=9)]
)
def test_on_a_known_decoder_both_engines_draw_the_same(kind: str, sampling: Sampling) -> None:
    policy = POLICIES[kind](seed=3) if kind in POLICIES else KINDS[kind]()
    fast, plain = (
        engine(policy).sample(PROMPTS, 6, sampling, seed=4) for engine in (TorchEngine, PlainEngine)
    )
    for ours, theirs in zip(
        [c for row in plain for c in row], [c for row in fast for c in row], strict=True
    ):
        assert (ours.tokens, ours.ending) == (theirs.tokens, theirs.ending)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=5e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_is_the_argmax_rollout_of_transformers(kind: str) -> None:
    policy = KINDS[kind]()
    reference = reference_policy(policy)
    with torch.no_grad():
        for prompt, completion in samples(
            policy, Sampling(temperature=0.0, max_tokens=8), num_samples=1
        ):
            tokens: list[int] = []
            while len(tokens) < 8 and policy.vocabulary.end_id not in tokens:
                tokens.append(
                    int(
                        reference.model(input_ids=torch.tensor([[*prompt, *tokens]]))
                        .logits[0, -1]
                        .argmax()
                    )
                )
            assert completion.tokens == tuple(tokens)
            np.testing.assert_allclose(
                completion.logprobs, reference_logp(reference, prompt, tokens).numpy(), atol=5e-5
            )


@pytest.mark.parametrize("engine", [PlainEngine, TorchEngine])
def test_any_of_several_end_ids_ends_a_completion(engine: type[PlainEngine | TorchEngine]) -> None:
    policy = grouped_query_policy(seed=3)
    tokenizer = policy.vocabulary.tokenizer
    ends = (policy.vocabulary.end_id, 9, 17, 20)
    policy = dataclasses.replace(policy, vocabulary=Vocabulary(tokenizer, ends=ends), prompts=None)
    made = [c for row in engine(policy).sample(PROMPTS, 40, LONG, seed=0) for c in row]
    assert {c.tokens[-1] for c in made if c.ending == "stop"} == set(ends)
    for completion in made:
        assert not set(completion.tokens[:-1]) & set(ends)
        if completion.ending == "length":
            assert len(completion.tokens) == LONG.max_tokens
            assert completion.tokens[-1] not in ends


def test_a_completion_that_ends_on_the_last_step_ended_by_itself() -> None:
    policy = own_code_policy("qwen2", seed=3)
    made = [c for _, c in samples(policy, Sampling(max_tokens=1), num_samples=200)]
    end = policy.vocabulary.end_id
    assert {c.ending for c in made if c.tokens == (end,)} == {"stop"}
    assert {c.ending for c in made if c.tokens != (end,)} == {"length"}


def test_the_same_seed_gives_the_same_completions_and_leaves_the_global_rng_alone() -> None:
    policy = own_code_policy("gemma3")
    before = torch.get_rng_state()
    assert samples(policy, seed=5) == samples(policy, seed=5)
    assert samples(policy, seed=5) != samples(policy, seed=6)
    assert torch.equal(torch.get_rng_state(), before)


def test_sampling_between_checkpointed_steps_changes_nothing() -> None:
    """Checkpointing needs transformers' training mode, in which a cache is not kept."""
    policy = own_code_policy("qwen3")
    before = samples(policy)
    policy.gradient_checkpointing = True
    (micro,) = micro_batches(
        [ToScore(row=0, prompt=(5, 6), tokens=(7, 8))], 100, torch.device("cpu")
    )
    score(policy, micro.packed).logp_M.sum().backward()
    assert samples(policy) == before


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_weights_that_were_refreshed_are_used(kind: str) -> None:
    policy = own_code_policy(kind)
    engine = PlainEngine(policy)
    before = engine.sample(PROMPTS, 2, LONG, seed=0)
    with torch.no_grad():
        for _, parameter in policy.trained():
            parameter.add_(
                0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
            )
    engine.refresh()
    after = engine.sample(PROMPTS, 2, LONG, seed=0)
    assert after != before
    with torch.no_grad():
        expected = reference_logp(reference_policy(policy), PROMPTS[0], after[0][0].tokens)
    np.testing.assert_allclose(after[0][0].logprobs, expected.numpy(), atol=5e-5)


@pytest.mark.parametrize("kind", ["qwen2", "gpt2"])
def test_what_does_not_fit_the_model_is_refused(kind: str) -> None:
    engine = PlainEngine(own_code_policy(kind))
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


def test_a_pad_token_that_is_also_the_end_token_does_not_disturb_short_prompts() -> None:
    policy = own_code_policy("qwen2")
    tokenizer = text_tokenizer()
    assert tokenizer.pad_token_id is None
    vocabulary = policy.vocabulary
    before = samples(policy)
    vocabulary.pad_id = vocabulary.end_id
    assert samples(policy) == before


def test_bfloat16_samples_report_what_a_bfloat16_trainer_computes() -> None:
    policy = dataclasses.replace(own_code_policy("qwen3"), dtype=torch.bfloat16)
    made = samples(policy, num_samples=2)
    sequences = [
        ToScore(row=i, prompt=prompt, tokens=completion.tokens)
        for i, (prompt, completion) in enumerate(made)
    ]
    with torch.no_grad():
        (micro,) = micro_batches(sequences, 10**6, torch.device("cpu"))
        table_BT = micro.unpack(score(policy, micro.packed).logp_M)
    differences = [
        (row_T[: len(made[row][1].logprobs)] - torch.tensor(made[row][1].logprobs)).abs()
        for row_T, row in zip(table_BT, micro.row_B.tolist(), strict=True)
    ]
    assert float(torch.cat(differences).mean()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("make", [TorchEngine, PlainEngine])
def test_what_memory_does_not_hold_at_once_is_sampled_in_parts(
    make: type[TorchEngine | PlainEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sampling = make(tiny_policy()), Sampling(max_tokens=5)
    prompts = [(5, 12), (5, 13, 14), (6, 12, 13, 14), (7, 15), (5, 11)]
    whole = engine.sample(prompts, 4, sampling, seed=3)
    most, most_rows, sizes = 2, 8, list[tuple[int, int]]()
    sample = engine._rows

    def small(
        sampling: Sampling, prompts: Sequence[Sequence[int]], uniform_BT: torch.Tensor
    ) -> SampledRows:
        if len(prompts) > most or len(uniform_BT) > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append((len(prompts), len(uniform_BT)))
        return sample(sampling, prompts, uniform_BT)

    monkeypatch.setattr(engine, "_rows", small, raising=True)
    with pytest.warns(
        UserWarning,
        match="memory does not hold (20|12) samples of 5 tokens at once; sampling in parts",
    ):
        parts = engine.sample(prompts, 4, sampling, seed=3)
    assert [[c.tokens for c in row] for row in parts] == [[c.tokens for c in row] for row in whole]
    assert sizes == [(2, 8), (1, 4), (2, 8)]
    sizes.clear()
    most_rows = 3
    with pytest.warns(UserWarning, match="memory does not hold"):
        parts = engine.sample(prompts, 4, sampling, seed=3)
    assert [[c.tokens for c in row] for row in parts] == [[c.tokens for c in row] for row in whole]
    assert sizes == [(1, 2)] * 10
    most = 0
    oom = pytest.raises(
        ValueError, match="out of memory with one sample of 5 tokens of a prompt of 2; lower"
    )
    with pytest.warns(UserWarning, match="memory does not hold"), oom:
        engine.sample(prompts, 4, sampling, seed=3)
