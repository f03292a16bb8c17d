"""What was made of a large file, kept in the cache under a hash of that file's content.

Whatever stops the making, there is a whole folder or none. Several processes that want the same one
make it once: the others wait. Knows nothing of what is made.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from motley.clock import Clock, RealClock
from motley.files import cache_folder, held

# a line for each that is made: `motley -q` turns it off
saying = logging.getLogger("motley.kept")


def kept_folder(
    file: Path,
    recipe: str,
    make: Callable[[Path], None],
    clock: Clock = RealClock(),
) -> Path | None:
    """The folder that was made of a file, or is made now; None if it cannot be kept.

    `recipe`: by what it is made; another one makes another folder.
    """
    folder = cache_folder() / "models" / f"{file.stem}-{_digest(file, recipe)}"
    if folder.exists():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with held(folder.with_name(f".{folder.name}.lock"), clock.sleep_s):
            if not folder.exists():  # otherwise another process made it
                _clear(folder)
                _make(file, folder, make, clock)
    except OSError as error:
        saying.warning(
            "%s cannot be kept as %s (%s), so that it is read anew each time; make room there, or "
            "name another folder by MOTLEY_CACHE",
            *(file, folder, error.strerror or error),
        )
        return None
    return folder


def _make(file: Path, folder: Path, make: Callable[[Path], None], clock: Clock) -> None:
    began_s = clock.elapsed_s()
    saying.warning(
        "%s is turned into %s, once: this takes a minute or more, and from then on it opens at "
        "once",
        *(file, folder),
    )
    make(folder)
    size_mb = sum(part.stat().st_size for part in folder.rglob("*") if part.is_file()) / 1e6
    saying.warning(
        "%s: done after %.0f s, %.0f MB", file.name, clock.elapsed_s() - began_s, size_mb
    )


def _clear(folder: Path) -> None:
    """Remove what a killed process left; nobody else makes this folder now."""
    for left in folder.parent.glob(f".{folder.name}.*"):
        if left.is_dir():
            shutil.rmtree(left)


def _digest(file: Path, recipe: str) -> str:
    status = file.stat()
    content = _content_digest(file, status.st_size, status.st_mtime_ns)
    return hashlib.sha256(f"{recipe}/{content}".encode()).hexdigest()[:24]


@lru_cache(maxsize=64)
def _content_digest(file: Path, size: int, changed_ns: int) -> str:
    """`size`, `changed_ns`: a file that has not changed is hashed once in a process."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
