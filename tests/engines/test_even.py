"""Sampling from models that carry a state: without padding, by the log-probs of their forward."""

from __future__ import annotations

import pytest
import torch

from fakes import reference_logp, tiny_policy
from families import family_model
from motley.engines import Engine, PlainEngine, TorchEngine, torch_engine
from motley.engines.even import EvenEngine
from motley.engines.trial import own_code_engine
from motley.models.policy import Policy
from motley.models.tiny import tiny_vocabulary
from motley.records import Sampling

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 4, 3), (8,)]
SAMPLING = Sampling(max_tokens=6, temperature=0.8)


def policy_of(kind: str) -> Policy:
    return Policy(family_model(kind), tiny_vocabulary())


def assert_own_logprobs(engine: Engine, policy: Policy) -> None:
    made = engine.sample(PROMPTS, 4, SAMPLING, seed=3)
    assert len({one.tokens for one in made[0]}) > 1
    for prompt, row in zip(PROMPTS, made, strict=True):
        for one in row:
            expected = reference_logp(policy, prompt, one.tokens, SAMPLING.temperature)
            torch.testing.assert_close(
                torch.tensor(one.logprobs), expected.detach(), rtol=0, atol=1e-4
            )
            assert one.ending == ("stop" if one.tokens[-1] == 1 else "length")
            assert 1 not in one.tokens[:-1]


@pytest.mark.parametrize("caches", [True, False])
@pytest.mark.parametrize("kind", ["jamba", "mamba", "falcon_h1"])
def test_its_logprobs_are_those_of_the_model(kind: str, caches: bool) -> None:
    policy = policy_of(kind)
    policy.one_by_one = True
    assert_own_logprobs(EvenEngine(policy, caches), policy)


@pytest.mark.parametrize("caches", [True, False])
def test_samples_end_with_the_end_token(caches: bool) -> None:
    policy = policy_of("jamba")
    policy.one_by_one = True
    made = EvenEngine(policy, caches).sample(PROMPTS, 16, SAMPLING, seed=3)
    assert len({len(one.tokens) for row in made for one in row}) > 3


def test_a_cache_changes_no_token() -> None:
    policy = policy_of("jamba")
    policy.one_by_one = True
    found = [
        [
            [one.tokens for one in row]
            for row in EvenEngine(policy, caches).sample(PROMPTS, 4, SAMPLING, 5)
        ]
        for caches in (True, False)
    ]
    assert found[0] == found[1]


def test_a_sample_does_not_depend_on_the_other_prompts() -> None:
    policy = policy_of("jamba")
    policy.one_by_one = True
    engine = EvenEngine(policy, caches=True)
    both = engine.sample(PROMPTS[:2], 4, SAMPLING, seed=5)
    assert engine.sample(PROMPTS[:1], 4, SAMPLING, seed=5)[0] == both[0]


# Which engine


@pytest.mark.parametrize(
    ("kind", "engine"),
    [
        ("gpt_neox", PlainEngine),
        ("granite", PlainEngine),
        ("gemma2", PlainEngine),
        ("jamba", EvenEngine),
        ("minimax", EvenEngine),
    ],
)
def test_the_fastest_engine_that_is_right_is_taken(kind: str, engine: type[Engine]) -> None:
    """Whoever opens it: `motley eval` does without a learner, which would have looked before."""
    policy = policy_of(kind)
    chosen = torch_engine(policy)
    assert type(chosen) is engine
    assert_own_logprobs(chosen, policy)


def test_a_model_of_ours_that_is_computed_alone_is_sampled_by_its_own_code() -> None:
    policy = tiny_policy()
    assert isinstance(torch_engine(policy), TorchEngine)
    policy.one_by_one = True
    assert type(torch_engine(policy)) is PlainEngine


def test_a_model_from_which_no_engine_samples_is_refused() -> None:
    policy = policy_of("xlnet")
    with pytest.raises(
        ValueError, match=r"'xlnet' is not supported: no engine samples from it \(.*\); use another"
    ):
        own_code_engine(policy)
