"""Files that survive a crash: synced, replaced whole, and held by one process at a time; and where
what can be made again is kept.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_folder() -> Path:
    """Models that were fetched and warm starts that were made; deleting it costs time only."""
    return Path(os.environ.get("MOTLEY_CACHE") or Path.home() / ".cache" / "motley")


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place to write a file or folder at.

    It gets its name when all of it is written, and is gone if that fails.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as there:
        partial = Path(there) / path.name
        yield partial
        for written in [*partial.rglob("*"), partial] if partial.is_dir() else [partial]:
            sync(written)
        partial.rename(path)


def sync(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that at any moment either the old content is there or the new."""
    partial = path.with_name(f".{path.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.rename(path)
    sync(path.parent)


def hold(path: Path) -> int | None:
    """Hold a file until the descriptor is closed; None if another process holds it.

    It may be closed by this process or by one that inherits it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
