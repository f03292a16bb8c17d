"""The bytes of tokens, and where two cuts of one text agree. Knows no tokenizer and no tensor."""

from motley.spelling.spans import Aligned, Pair, StableCuts, Tokenwise, UnlikeTextsError
from motley.spelling.table import FOLD_BYTES, Spelling, SpellingError, UnspelledError

__all__ = [
    "FOLD_BYTES",
    "Aligned",
    "Pair",
    "Spelling",
    "SpellingError",
    "StableCuts",
    "Tokenwise",
    "UnlikeTextsError",
    "UnspelledError",
]
