"""Spelling: the table id -> bytes of a vocabulary, and its bytes on a record.

It is what a receiver needs of a sender's vocabulary, and all that a sender says of it. It knows no
tokenizer: how one becomes a table is in motley.models. What is decoded is a stranger's, and bounded
before it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

MAX_TOKENS = 2**20  # rows of a vocabulary: four times the largest in use
MAX_TOKEN_BYTES = 2**11  # of one token: twice the longest in use, GLM's 1024 spaces
MAX_TOTAL_BYTES = 2**22  # of all: with the lengths it fits a record's body (8 MiB)
FOLD_BYTES = 64  # of an answer, for each token that one may have: with more it is not read

_COUNT_BYTES = 4
_LENGTH_BYTES = 2
MAX_ENCODED_BYTES = _COUNT_BYTES + _LENGTH_BYTES * MAX_TOKENS + MAX_TOTAL_BYTES


class SpellingError(ValueError):
    """A table that is none, or is beyond the limits."""


class UnspelledError(ValueError):
    """A token that stands for no text. `id` says which."""

    def __init__(self, id: int, num_tokens: int) -> None:
        super().__init__(
            f"token {id} stands for no text; expected one of the {num_tokens} of the table that "
            "does: leave out end, special and padding tokens"
        )
        self.id = id


@dataclass(frozen=True)
class Spelling:
    """The bytes of each token; None where it stands for no text: a special token, one that is not
    used, a row that only fills up the model's matrix.

    >>> Spelling((None, b"a", b" b", b"\\xc3")).bytes_of([1, 2])
    b'a b'

    A token may be part of a character, so only whole texts are sure to be UTF-8.
    `fingerprint` follows from the bytes: nobody can publish another table under it. Rows without
    text at the end do not count, since models of one tokenizer have more or fewer of them.
    """

    token_bytes: tuple[bytes | None, ...] = field(repr=False)
    fingerprint: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        sizes = [len(token) for token in self.token_bytes if token is not None]
        if 0 in sizes:
            raise SpellingError(
                f"token {self.token_bytes.index(b'')} has no bytes; expected None where a token "
                "stands for no text: write None for it"
            )
        _check_sizes(len(self.token_bytes), max(sizes, default=0), sum(sizes))
        digest = hashlib.sha256(_encoded(_without_fill(self.token_bytes)))
        object.__setattr__(self, "fingerprint", digest.hexdigest()[:16])

    def __len__(self) -> int:
        return len(self.token_bytes)

    @cached_property
    def length_V(self) -> NDArray[np.int64]:
        """How many bytes each token has; 0 where it stands for no text."""
        lengths = (0 if token is None else len(token) for token in self.token_bytes)
        return np.fromiter(lengths, np.int64, len(self.token_bytes))

    def bytes_of(self, ids: Iterable[int]) -> bytes:
        """What the tokens spell, one behind the other."""
        return b"".join(self.pieces(ids))

    def read(self, ids: Sequence[int], max_tokens: int) -> bytes | None:
        """What a stranger's answer spells, of at most so many tokens.

        None if one of them stands for no text, or if it is longer than an answer is: a table may
        have 2 KiB for every token, and all that is computed of a text costs its reader.
        """
        try:
            pieces = self.pieces(ids)
        except UnspelledError:
            return None
        is_short = sum(map(len, pieces)) <= FOLD_BYTES * max_tokens
        return b"".join(pieces) if is_short else None

    def text_of(self, ids: Iterable[int]) -> str:
        """What a reward function is given, wherever the table is known: a byte that is no part of a
        character is U+FFFD.
        """
        return self.bytes_of(ids).decode(errors="replace")

    def lengths_of(self, ids: Iterable[int]) -> list[int]:
        """How many bytes each token has."""
        return [len(token) for token in self.pieces(ids)]

    def pieces(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes of each token."""
        ids, table = tuple(ids), self.token_bytes
        if not ids:
            return []
        if min(ids) >= 0 and max(ids) < len(table):
            found = list(map(table.__getitem__, ids))
            if all(found):
                return cast(list[bytes], found)
        wrong = next(id for id in ids if not 0 <= id < len(table) or table[id] is None)
        raise UnspelledError(wrong, len(table))

    def encode(self) -> bytes:
        """The table as bytes: how many tokens, all lengths, then all bytes.

        A length is two bytes, 0 for None. All low bytes come first: alike, they compress better.
        Who carries the table compresses it.
        """
        return _encoded(self.token_bytes)

    @staticmethod
    def decode(encoded: bytes) -> Spelling:
        """A stranger's table. Nothing is made of it before all lengths are checked."""
        count = int.from_bytes(encoded[:_COUNT_BYTES], "little")
        start = _COUNT_BYTES + _LENGTH_BYTES * count
        if count > MAX_TOKENS or len(encoded) < start:
            raise SpellingError(
                f"a table of {len(encoded)} bytes says that it has {count} tokens; expected at "
                f"most {MAX_TOKENS}, and two bytes for the length of each: ask its sender for it "
                "again"
            )
        planes = np.frombuffer(encoded, np.uint8, _LENGTH_BYTES * count, _COUNT_BYTES)
        length_V = planes.reshape(_LENGTH_BYTES, count).T.copy().view("<u2").ravel()
        total = int(length_V.sum(dtype=np.int64))
        if total != len(encoded) - start:
            raise SpellingError(
                f"the tokens of a table have {total} bytes by their lengths; expected the "
                f"{len(encoded) - start} that follow: ask its sender for it again"
            )
        _check_sizes(count, int(length_V.max(initial=0)), total)
        lengths = length_V.tolist()
        starts = accumulate(lengths, initial=start)
        return Spelling(
            tuple(
                encoded[begin : begin + length] or None
                for begin, length in zip(starts, lengths, strict=False)  # one start too many
            )
        )


def _without_fill(token_bytes: tuple[bytes | None, ...]) -> tuple[bytes | None, ...]:
    end = len(token_bytes)
    while end and token_bytes[end - 1] is None:
        end -= 1
    return token_bytes[:end]


def _check_sizes(count: int, longest: int, total: int) -> None:
    if count > MAX_TOKENS or longest > MAX_TOKEN_BYTES or total > MAX_TOTAL_BYTES:
        raise SpellingError(
            f"a vocabulary has {count} tokens of {total} bytes in all, the longest of {longest}; "
            f"expected at most {MAX_TOKENS}, {MAX_TOTAL_BYTES} and {MAX_TOKEN_BYTES}: use a model "
            "with a smaller vocabulary"
        )


def _encoded(token_bytes: tuple[bytes | None, ...]) -> bytes:
    lengths = [0 if token is None else len(token) for token in token_bytes]
    planes = np.asarray(lengths, "<u2").view(np.uint8).reshape(-1, _LENGTH_BYTES).T.tobytes()
    count = len(token_bytes).to_bytes(_COUNT_BYTES, "little")
    return b"".join((count, planes, *(token for token in token_bytes if token is not None)))
