"""tiny: small Llama-architecture models for work on a CPU, with one of three small vocabularies."""

from __future__ import annotations

from functools import lru_cache

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from motley.models.named import HEAD_SIZE, MAX_POSITIONS, TINY, TINY_VOCABULARIES, TinyParts
from motley.models.named import SHAPES as SHAPES
from motley.models.vocabulary import Vocabulary, byte_vocabulary, word_vocabulary
from motley.tasks.digits import SYMBOLS, WORDS

PAIRS = tuple(f"{number:02d}" for number in range(100))


def tiny_vocabulary(kind: str = "words") -> Vocabulary:
    """Peers of one kind have the same ids in every run.

    "reverse 6604=" is `reverse `, `6`, `6`, `0`, `4`, `=` in words; `reverse `, `66`, `04`, `=` in
    pairs; and thirteen bytes in bytes, the only one that spells any text.
    """
    match kind:
        case "words":
            return word_vocabulary(WORDS, SYMBOLS)
        case "pairs":
            return word_vocabulary([*WORDS, *PAIRS], SYMBOLS, at_once="[0-9]{2}")
        case "bytes":
            return byte_vocabulary()
    raise AssertionError(kind)


@lru_cache(maxsize=1)
def tiny_vocabularies() -> tuple[Vocabulary, ...]:
    """All that tiny models have, for whoever knows a fingerprint only."""
    return tuple(map(tiny_vocabulary, TINY_VOCABULARIES))


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
