"""Tables: what the tokens of each sender stand for, by its own word.

Owns whose table counts: the first that a key signed, for ever. What is in it is the sender's claim,
and bounded before it is read. Knows no tokenizer: how bytes become a reader's tokens is not known
here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from motley.records import Table
from motley.spelling import Spelling, SpellingError
from motley.trust.rules import Refusal, Rules

MAX_NAME_CHARACTERS = 200  # of a vocabulary


@dataclass(frozen=True, slots=True)
class SenderTable:
    """The vocabulary of a sender, as it published it."""

    vocabulary: str
    ends: tuple[int, ...]
    spelling: Spelling
    position: int  # of its record in the log
    digest: bytes  # of all it says

    def rules(self, rules: Rules) -> Rules:
        """What its sender's groups must meet."""
        return rules.with_vocabulary(self.vocabulary, len(self.spelling), self.ends)


@dataclass(slots=True)
class Tables:
    """By key: one per key, and who comes with a new key begins anew.

    Equal tables are held once. A table has at most 2^20 tokens and 4 MiB of bytes, so that one is
    at most some 60 MB in memory, whoever made it.
    """

    _of_key: dict[bytes, SenderTable] = field(default_factory=dict)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def of(self, key: bytes, vocabulary: str = "") -> SenderTable | None:
        """The table of a key, if it is of that vocabulary; without one named, of whatever."""
        table = self._of_key.get(key)
        return table if table and vocabulary in ("", table.vocabulary) else None

    def add(self, key: bytes, table: Table, position: int) -> None:
        """Take in a table, or refuse it by name. The same again changes nothing."""
        digest = _digest(table)
        known = self._of_key.get(key)
        if known and known.digest != digest:
            raise Refusal(
                "table",
                f"{table.peer} has another table at position {known.position} of the log; "
                "expected one of each key: a peer whose vocabulary changes must be invited anew",
            )
        if known is None:
            spelling = self._shared(digest) or _spelling(table)
            _check_ends(table, len(spelling))
            self._of_key[key] = SenderTable(
                table.vocabulary, table.ends, spelling, position, digest
            )

    def _shared(self, digest: bytes) -> Spelling | None:
        return next((one.spelling for one in self._of_key.values() if one.digest == digest), None)

    # For checkpoints, which hold positions: the log has the tables

    @property
    def positions(self) -> list[int]:
        return sorted(table.position for table in self._of_key.values())

    def restore(self, tables: Iterable[tuple[bytes, Table, int]]) -> None:
        """Hold these, each with its key and position, and no others."""
        self._of_key.clear()
        for key, table, position in tables:
            self.add(key, table, position)


def _digest(table: Table) -> bytes:
    said = msgspec.msgpack.encode((table.vocabulary, table.ends, table.encoded))
    return hashlib.sha256(said).digest()


def _spelling(table: Table) -> Spelling:
    if len(table.vocabulary) > MAX_NAME_CHARACTERS or not table.vocabulary.isprintable():
        raise Refusal(
            "table",
            f"vocabulary {table.vocabulary[:80]!r} is not printable, or longer than "
            f"{MAX_NAME_CHARACTERS} characters",
        )
    try:
        return Spelling.decode(table.encoded)
    except SpellingError as error:
        raise Refusal("table", str(error)) from None


def _check_ends(table: Table, size: int) -> None:
    if max(table.ends) >= size or len(set(table.ends)) < len(table.ends):
        raise Refusal(
            "table",
            f"an end token of {table.peer} is none of the {size} of its table, or is named twice",
        )
