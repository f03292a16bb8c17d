"""tiny: small Llama-architecture models that share one vocabulary, for work on a CPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.models.vocabulary import Vocabulary, word_vocabulary
from motley.tasks.digits import SYMBOLS, WORDS

HEAD_SIZE = 32
MAX_POSITIONS = 64

# name -> (hidden size, layers, feed-forward size). About 0.3M, 1M and 4M parameters, and 1M deeper
# and narrower.
SHAPES: dict[str, tuple[int, int, int]] = {
    "0.3m": (96, 3, 256),
    "1m": (160, 4, 320),
    "4m": (256, 5, 704),
    "deep": (96, 10, 224),
}


def tiny_vocabulary() -> Vocabulary:
    return word_vocabulary(WORDS, SYMBOLS)


def check_tiny(name: str) -> None:
    if name not in SHAPES:
        raise ValueError(
            f"model 'tiny:{name}' is not known; use {', '.join('tiny:' + n for n in SHAPES)}"
        )


def tiny_model(name: str, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model of the family; the same seed gives the same weights."""
    check_tiny(name)
    hidden, layers, feed_forward = SHAPES[name]
    vocabulary = tiny_vocabulary()
    config = LlamaConfig(
        vocab_size=vocabulary.size,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=vocabulary.end_id,
        pad_token_id=vocabulary.pad_id,
        initializer_range=0.05,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).float()
