"""The vocabulary of a pretrained model as a reader of logs needs it: the bytes and names of tokens.

Tokenizers take torch and half a gigabyte. A process that has not loaded them asks a short-lived
one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec

from motley.spelling import Spelling

if TYPE_CHECKING:
    from motley.models.vocabulary import Vocabulary

ASK_S = 300.0  # for a tokenizer to be read


class ToldVocabulary(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    fingerprint: str
    size: int
    table: bytes  # an encoded Spelling
    names: dict[int, str]  # of tokens that stand for no text

    @cached_property
    def spelling(self) -> Spelling:
        return Spelling.decode(self.table)

    def decode(self, ids: Sequence[int]) -> str:
        """As who has nothing but the table reads it; a token without text shows as its name."""
        table = self.spelling.token_bytes
        parts = [(table[id] if id < len(table) else None) or self._shown(id) for id in ids]
        return b"".join(parts).decode(errors="replace")

    def name_of(self, id: int) -> str | None:
        return self.names.get(id)

    def _shown(self, id: int) -> bytes:
        return self.names.get(id, f"<{id}>").encode()


def vocabulary_of(model: str) -> Vocabulary | ToldVocabulary | None:
    """None where the model is another machine's. Takes seconds."""
    if "torch" in sys.modules:
        return _read(model)
    command = [sys.executable, "-m", "motley.archive.vocabularies", model]
    offline = os.environ | {"HF_HUB_OFFLINE": "1"}  # who reads a log fetches no model
    try:
        done = subprocess.run(command, capture_output=True, timeout=ASK_S, check=True, env=offline)
        return msgspec.json.decode(done.stdout.splitlines()[-1], type=ToldVocabulary | None)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return _read(model)  # its tokens have no bytes of their own: it takes the tokenizer


def _read(model: str) -> Vocabulary | None:
    from motley.models.sources import find, read_shape, read_tokenizer
    from motley.models.vocabulary import Vocabulary

    try:
        source = find(model)
        size = read_shape(source).get_text_config().vocab_size
        return Vocabulary(read_tokenizer(source), size=size)
    except (ValueError, OSError):
        return None


def told(known: Vocabulary) -> ToldVocabulary:
    """NoSpellingError where the bytes of its tokens cannot be told."""
    table = known.spelling.token_bytes
    names = {
        id: known.name_of(id) for id in range(known.size) if id >= len(table) or table[id] is None
    }
    return ToldVocabulary(
        fingerprint=known.fingerprint,
        size=known.size,
        table=known.spelling.encode(),
        names={id: name for id, name in names.items() if name is not None},
    )


if __name__ == "__main__":
    found = _read(sys.argv[1])
    print(msgspec.json.encode(found and told(found)).decode())
