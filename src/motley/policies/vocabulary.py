"""Vocabulary: text to token ids and back, and the fingerprint by which peers know they speak the same ids."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD = "<pad>"
END = "<end>"
UNKNOWN = "<unknown>"


class Vocabulary:
    """A tokenizer with its end and padding ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.end_id = _id(tokenizer, END)
        self.pad_id = _id(tokenizer, PAD)
        self.size: int = tokenizer.get_vocab_size()
        table = json.dumps(sorted(tokenizer.get_vocab().items()), ensure_ascii=True)
        self.fingerprint: str = hashlib.sha256(table.encode()).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        unknown = self._tokenizer.token_to_id(UNKNOWN)
        if unknown in ids:
            raise ValueError(
                f"the vocabulary cannot spell {text!r}; tiny models know digits, the words of the digits task and +-*,<>= only"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        PreTrainedTokenizerFast(
            tokenizer_object=self._tokenizer,
            eos_token=END,
            pad_token=PAD,
            unk_token=UNKNOWN,
            clean_up_tokenization_spaces=False,
        ).save_pretrained(folder)


def _id(tokenizer: Tokenizer, token: str) -> int:
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the tokenizer has no {token} token; a vocabulary needs one to end and one to pad with")
    return found


def word_vocabulary(words: Sequence[str], symbols: str) -> Vocabulary:
    """One token per word and per symbol. A word is letters and the space after them."""
    tokens = [PAD, END, UNKNOWN, *words, *symbols]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[a-z]+ |[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, END, UNKNOWN])
    return Vocabulary(tokenizer)
