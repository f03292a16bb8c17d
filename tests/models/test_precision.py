from __future__ import annotations

from pathlib import Path

import pytest
import torch

from architectures import own_code_policy
from fakes import grouped_query_policy
from families import family_model
from motley.engines.trial import FEW, PROMPTS, own_code_engine
from motley.learning.fitting import check_supported
from motley.models.policy import Policy
from motley.models.precision import fits_float16
from motley.models.returning import check_returns
from motley.models.tiny import tiny_vocabulary
from motley.models.vocabulary import Vocabulary


def grown(policy: Policy, factor: float) -> Policy:
    """The same model with one product that is so many times larger, and taken back by the norm
    behind it.
    """
    with torch.no_grad():
        policy.base.model.layers[1].mlp.down_proj.weight.mul_(factor)
    return policy


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_an_ordinary_model_fits_float16(kind: str) -> None:
    assert fits_float16((grouped_query_policy() if kind == "llama" else own_code_policy(kind)).base)


def test_a_model_whose_values_come_near_the_end_of_float16_does_not() -> None:
    assert fits_float16(grown(grouped_query_policy(), 1e2).base)
    assert not fits_float16(grown(grouped_query_policy(), 1e6).base)


def test_a_model_that_computes_no_numbers_does_not() -> None:
    assert not fits_float16(grown(grouped_query_policy(), float("nan")).base)


def test_a_model_with_less_to_lose_in_bfloat16_does_not() -> None:
    """Values below what float16 holds: bfloat16 keeps them."""
    policy = grouped_query_policy()
    with torch.no_grad():
        for layer in policy.base.model.layers:
            layer.mlp.gate_proj.weight.mul_(1e-7)
            layer.mlp.down_proj.weight.mul_(1e8)
    assert not fits_float16(policy.base)


def test_it_leaves_no_hook_behind() -> None:
    policy = grouped_query_policy()
    fits_float16(policy.base)
    assert not any(part._forward_hooks for part in policy.base.modules())


def test_models_are_tried_by_tokens_that_were_trained(tmp_path: Path) -> None:
    """The first rows of a vocabulary are often reserved, and rounding is amplified there."""
    model = family_model("gpt2", sizes={"vocab_size": 320})
    policy = Policy(model, Vocabulary(tiny_vocabulary().tokenizer, size=320))
    seen: list[int] = []
    model.get_input_embeddings().register_forward_hook(
        lambda _, given, out: seen.extend(given[0].flatten().tolist())
    )
    check_supported(policy)
    check_returns(policy, tmp_path)
    own_code_engine(policy)
    drawn = 4 * FEW.max_tokens * len(PROMPTS)  # by the engine, from the model itself
    assert len(seen) > drawn, seen
    assert sum(id < 16 for id in seen) <= drawn
