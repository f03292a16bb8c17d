"""What is measured: models, and prompts of an exact number of tokens."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from motley.benchmarks.setups import Setup
from motley.config import AUTO, Learning, PeerConfig, Prompt
from motley.learning.fitting import must_recompute
from motley.models.devices import choose_device, choose_dtype
from motley.models.opening import initial_policy, is_tiny, vocabulary_of
from motley.models.policy import Policy, with_masters, with_trained_part
from motley.models.precision import fits_float16
from motley.models.vocabulary import Vocabulary

SMOLLM2 = "smollm2-135m"
RANDOM_360M = "random-360m"
# Random weights in the shape of a known model, which speak a borrowed vocabulary. An id that it has
# no word for reads as nothing, to us and to rivals.
SHAPES: dict[str, PretrainedConfig] = {
    # SmolLM2-360M
    RANDOM_360M: LlamaConfig(
        hidden_size=960,
        num_hidden_layers=32,
        num_attention_heads=15,
        num_key_value_heads=5,
        intermediate_size=2560,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    ),
    # SmolLM2-1.7B with 20 of its 24 layers: 1.44 billion values
    "random-1.4b": LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=20,
        num_attention_heads=32,
        num_key_value_heads=32,
        intermediate_size=8192,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 130000.0},
        tie_word_embeddings=True,
    ),
    # Qwen2.5-1.5B
    "random-1.5b": Qwen2Config(
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        intermediate_size=8960,
        vocab_size=151936,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=True,
    ),
    # Qwen2.5-7B
    "random-7b": Qwen2Config(
        hidden_size=3584,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        intermediate_size=18944,
        vocab_size=152064,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
        tie_word_embeddings=False,
    ),
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


def build(
    model: str, device: str = "cpu", setup: Setup = Setup(), vocabulary: str = SMOLLM2
) -> Policy:
    """A policy that shares nothing with any other, and whose answers never end: all lengths are the
    asked ones, for it and its rivals.

    `vocabulary`: the model whose words a random one speaks.
    """
    place = choose_device(device, is_tiny(model))
    if model in SHAPES:
        words = words_of(model, vocabulary)
        opened = Policy(_random_model(model, place, setup), words)
    else:
        original = _original(model)
        opened = replace(original, model=copy.deepcopy(original.base).to(place))
    own = opened.base
    dtype = choose_dtype(setup.peer.dtype, place, is_tiny(model), lambda: fits_float16(own))
    return endless(_learning(replace(opened, dtype=dtype), setup))


def _learning(policy: Policy, setup: Setup) -> Policy:
    """What trains chosen, and kept as the setup says."""
    policy = with_masters(with_trained_part(policy, setup.train, seed=0), setup.masters)
    wanted, rules = setup.peer.gradient_checkpointing, Learning(token_budget=setup.token_budget)
    recomputes = must_recompute(policy, setup.upkeep, rules) if wanted == AUTO else wanted is True
    return replace(policy, gradient_checkpointing=recomputes)


@lru_cache(maxsize=2)
def _original(model: str) -> Policy:
    """On the CPU, read once."""
    return initial_policy(PeerConfig(name="bench", model=model, device="cpu"), seed=0)


def _random_model(model: str, place: torch.device, setup: Setup) -> PreTrainedModel:
    """The same at every call, made where it will be: a large one is never on the CPU, and not in
    float32 if it is not kept so.
    """
    dtype = torch.bfloat16 if setup.keeps_half else torch.float32
    devices = [place] if place.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(place):
        torch.manual_seed(0)
        made: PreTrainedModel = AutoModelForCausalLM.from_config(
            copy.deepcopy(SHAPES[model]), dtype=dtype
        )
    if setup.keeps_half:
        _widen(made, keeps_ends=setup.lora is None)
    return made


def _widen(model: PreTrainedModel, keeps_ends: bool) -> None:
    """To float32 what is kept so beside bfloat16 matrices: vectors, and beside an adapter also
    embeddings and the head.
    """
    ends = {id(part.weight) for part in _ends(model)}
    for parameter in model.parameters():
        if parameter.dim() < 2 or (id(parameter) in ends and not keeps_ends):
            parameter.data = parameter.data.float()


def _ends(model: PreTrainedModel) -> list[nn.Module]:
    return [model.get_input_embeddings(), model.get_output_embeddings()]


def words_of(model: str, vocabulary: str = SMOLLM2) -> Vocabulary:
    """What a model speaks; a random one the vocabulary of another."""
    if model in SHAPES and vocabulary in SHAPES:
        raise ValueError(
            f"--vocabulary {vocabulary} has no words of its own; name a model that has, such as "
            f"{SMOLLM2} or its folder"
        )
    return vocabulary_of(vocabulary if model in SHAPES else model, Prompt())


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
