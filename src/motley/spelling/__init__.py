"""The bytes of tokens, and where two cuts of one text agree. Knows no tokenizer and no tensor."""

from motley.spelling.table import Spelling, SpellingError, UnspelledError

__all__ = ["Spelling", "SpellingError", "UnspelledError"]
