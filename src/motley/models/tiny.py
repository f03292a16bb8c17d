"""tiny: small Llama-architecture models for work on a CPU, with one of three small vocabularies."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.models.named import HEAD_SIZE, MAX_POSITIONS, TINY, TinyParts
from motley.models.named import SHAPES as SHAPES
from motley.models.tiny_vocabularies import tiny_vocabulary as tiny_vocabulary


def tiny_model(name: str, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model of the family, such as "1m" or "1m/bytes"; the same seed gives
    the same weights.
    """
    parts = TinyParts.of(f"{TINY}{name}")
    hidden, layers, feed_forward = SHAPES[parts.shape]
    vocabulary = tiny_vocabulary(parts.vocabulary)
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
