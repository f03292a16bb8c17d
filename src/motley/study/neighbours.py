"""What other studies on this machine are about to take of the same GPU.

Each study says so in a file of its own, which it holds as long as it lives. Knows no GPU.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from motley.files import hold, replace


class Plans(msgspec.Struct, frozen=True, kw_only=True):
    """Of a study, while jobs of it go on."""

    free_at_first: int  # bytes, before the first job of any study that goes on
    needed: tuple[float | None, ...]  # of each job, at the most; None: nobody knows yet


class Neighbours:
    """The plans of all studies that share a GPU, this one's too, in a folder that they share."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: this study's, which no other that lives has."""
        self._folder = folder
        self._own = folder / f"{name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        self._held = hold(_lock_of(self._own))  # let go when this process ends, however it does

    def say(self, plans: Plans) -> None:
        replace(self._own, msgspec.json.encode(plans))

    def plans(self) -> Sequence[Plans]:
        """Of the others, as far as jobs of theirs go on."""
        return [plans for path in self._others() if (plans := _read(path)) and plans.needed]

    def _others(self) -> Iterator[Path]:
        for path in self._folder.glob("*.json"):
            if path == self._own:
                continue
            if (descriptor := hold(_lock_of(path))) is None:
                yield path
                continue
            path.unlink(missing_ok=True)  # whose study is over
            os.close(descriptor)


def neighbours_on(gpu: str) -> Neighbours:
    """`gpu`: a name that no other GPU of this machine has."""
    user = os.getuid() if hasattr(os, "getuid") else os.getlogin()
    return Neighbours(
        Path(tempfile.gettempdir()) / f"motley-studies-of-{user}" / gpu, str(os.getpid())
    )


def _lock_of(path: Path) -> Path:
    return path.with_suffix(".lock")


def _read(path: Path) -> Plans | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plans)
    except (OSError, msgspec.DecodeError):
        return None  # gone by now
