"""tiny: small Llama-architecture models that share one vocabulary, for work on a CPU."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.models.named import HEAD_SIZE, MAX_POSITIONS, check_tiny
from motley.models.named import SHAPES as SHAPES
from motley.models.vocabulary import Vocabulary, word_vocabulary
from motley.tasks.digits import SYMBOLS, WORDS


def tiny_vocabulary() -> Vocabulary:
    return word_vocabulary(WORDS, SYMBOLS)


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
