"""Pardons: whom the owner of a peer wants heard again, on the way from one process to another.

A file per name in the peer's folder. A pardon takes effect between two rounds and is then part of
the journal, so that a restart takes the same steps.
"""

from __future__ import annotations

from pathlib import Path

from motley.files import replace


class Pardons:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / "pardons"

    def ask(self, name: str) -> None:
        """Ask the running peer, or the next one that runs, to hear a sender again."""
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(self._folder / name, b"")

    @property
    def asked(self) -> tuple[str, ...]:
        if not self._folder.is_dir():
            return ()
        names = [path.name for path in self._folder.iterdir() if path.is_file()]
        return tuple(sorted(name for name in names if not name.startswith(".")))

    def done(self, names: tuple[str, ...]) -> None:
        for name in names:
            (self._folder / name).unlink(missing_ok=True)
