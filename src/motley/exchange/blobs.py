"""Blobs: the bytes of weights on their way from a learner to its samplers, each under its own hash.

Knows bytes, not what they mean; a store is never believed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Protocol

_NAME = re.compile(r"[0-9a-f]{64}")


class Blobs(Protocol):
    """A learner's. It alone writes; a call that failed can be made again."""

    def put(self, name: str, content: bytes) -> None:
        """Store content under its sha256 in hex. A name that is there already is passed over."""
        ...

    def get(self, name: str, num_bytes: int) -> bytes | None:
        """The content with this sha256 and length; None if it is not there, or not whole.

        LogError if the store cannot be reached.
        """
        ...

    def keep_only(self, names: Collection[str]) -> None:
        """Delete every other blob, unless one is being put.

        What is left undeleted goes at the next call.
        """
        ...


class MemoryBlobs:
    """Of a crew that lives in one process."""

    def __init__(self) -> None:
        self._contents: dict[str, bytes] = {}

    def put(self, name: str, content: bytes) -> None:
        assert is_name(name), name
        self._contents.setdefault(name, content)

    def get(self, name: str, num_bytes: int) -> bytes | None:
        content = self._contents.get(name)
        return content if content is not None and is_content(content, name, num_bytes) else None

    def keep_only(self, names: Collection[str]) -> None:
        for name in self._contents.keys() - set(names):
            del self._contents[name]


def is_name(text: str) -> bool:
    """Whether a blob can have this name: a manifest may say anything."""
    return _NAME.fullmatch(text) is not None


def is_content(content: bytes, name: str, num_bytes: int) -> bool:
    return len(content) == num_bytes and hashlib.sha256(content).hexdigest() == name
