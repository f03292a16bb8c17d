"""The bytes of tokens, and where two cuts of one text agree. Knows no tokenizer and no tensor."""

from motley.spelling.spans import Aligned, Pair, StableCuts, Tokenwise, UnlikeTextsError
from motley.spelling.table import Spelling, SpellingError, UnspelledError

__all__ = [
    "Aligned",
    "Pair",
    "Spelling",
    "SpellingError",
    "StableCuts",
    "Tokenwise",
    "UnlikeTextsError",
    "UnspelledError",
]
