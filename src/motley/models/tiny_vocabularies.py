"""The vocabularies of tiny models. Imports without torch, for those who only read."""

from __future__ import annotations

from functools import lru_cache

from motley.models.named import TINY_VOCABULARIES
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
