"""Files that survive a crash: synced, replaced whole, and held by one process at a time."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
    """Hold a file until the descriptor is closed, by this process or by one that inherits it; None if another holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
