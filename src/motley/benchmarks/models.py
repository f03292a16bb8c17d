"""What is measured: models, and prompts of an exact number of tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.config import PeerConfig
from motley.models.devices import choose_device, choose_dtype
from motley.models.opening import initial_policy, is_tiny
from motley.models.policy import Policy
from motley.models.precision import fits_float16
from motley.models.vocabulary import Vocabulary

SMOLLM2 = "smollm2-135m"
RANDOM_360M = "random-360m"  # SmolLM2-360M's shape and vocabulary with random weights
SHAPE_360M = {
    "hidden_size": 960,
    "num_hidden_layers": 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "intermediate_size": 2560,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DIGITS = tuple("0123456789")  # a token each, in tiny models
COMMON = (
    "the of and to in is that it was for on are as with they at be this from have or by one had "
    "not but what all were when we there "
    "can an your which their said if do will each about how up out them then she many some so "
    "these would other into has more two "
    "like see time could no make than first been its who now people made over did down only way "
    "find use may water long little "
    "very after words called just where most know house world year work school number city river "
    "story money"
)
WORDS = tuple(f" {word}" for word in COMMON.split())


def build(model: str, device: str = "cpu", dtype: str = "auto") -> Policy:
    """A policy that shares nothing with any other, and whose answers never end: all lengths are the
    asked ones, for it and its rivals.
    """
    original = _original(model)
    place = choose_device(device, is_tiny(model))
    own = copy.deepcopy(original.base).to(place)
    return endless(
        replace(
            original,
            model=own,
            dtype=choose_dtype(dtype, place, is_tiny(model), lambda: fits_float16(own)),
        )
    )


@lru_cache(maxsize=2)
def _original(model: str) -> Policy:
    """On the CPU, read once."""
    if model != RANDOM_360M:
        return initial_policy(PeerConfig(name="bench", model=model, device="cpu"), seed=0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        random_weights = LlamaForCausalLM(LlamaConfig(**SHAPE_360M)).float()
    return replace(_original(SMOLLM2), model=random_weights)


def endless(policy: Policy) -> Policy:
    """The same policy with a vocabulary in which nothing ends an answer."""
    vocabulary = copy.copy(policy.vocabulary)
    vocabulary.end_ids = ()
    return replace(policy, vocabulary=vocabulary)


@dataclass(frozen=True, slots=True)
class Texts:
    """Random words, each a token of its own, as text and as ids."""

    texts: list[str]
    ids: list[tuple[int, ...]]

    @classmethod
    def draw(cls, vocabulary: Vocabulary, count: int, length: int, seed: int = 0) -> Texts:
        tokens = _single_tokens(vocabulary)
        rng = random.Random(seed)
        rows = [rng.choices(list(tokens), k=length) for _ in range(count)]
        return cls(
            ["".join(row) for row in rows], [tuple(tokens[word] for word in row) for row in rows]
        )


def _single_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Words that stay one token each wherever they stand, and their ids."""
    words = WORDS if vocabulary.size > len(WORDS) * 10 else DIGITS
    together = vocabulary.encode("".join(words))
    if len(together) != len(words):
        raise ValueError(
            f"the benchmark's {len(words)} words are {len(together)} tokens of this vocabulary; "
            "measure another model"
        )
    return dict(zip(words, together, strict=True))


def num_parameters(policy: Policy) -> int:
    """A tied head counts once: embeddings are only looked up."""
    return sum(p.numel() for p in policy.model.parameters())


def cache_bytes(policy: Policy) -> int:
    """Keys and values of one token, in the dtype of the arithmetic."""
    config = policy.config
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    values: int = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    return values * policy.dtype.itemsize


def flat(prompts: Sequence[Sequence[int]], num_samples: int) -> list[Sequence[int]]:
    """A row per sample."""
    return [prompt for prompt in prompts for _ in range(num_samples)]
