"""Files that survive a crash: synced, replaced whole, and held by one process at a time; and where
what can be made again is kept. What a disk refuses, or has spoilt, is said with file and remedy.
"""

from __future__ import annotations

import importlib
import itertools
import os
import secrets
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")
WINDOWS = os.name == "nt"
LOOK_EVERY_S = 0.5  # whether a file is still held


class DiskError(OSError):
    """What a disk does not take: which file, why, how much room there is, and the remedy."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Write something to a file, with an error that says what to do."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error.strerror or str(error)) from error


def disk_error(path: Path, why: str) -> DiskError:
    there = next(folder for folder in path.absolute().parents if folder.exists())
    free_mib = shutil.disk_usage(there).free >> 20
    return DiskError(
        f"{path} could not be written: {why}; {free_mib} MiB are free there. Make room, or let it "
        "be written to, and start again in the same way: what was kept so far is whole"
    )


def read_json(path: Path, kind: type[T], remedy: str) -> T:
    """What a JSON file holds; an error names the file, what is wrong with it and the remedy."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); {remedy}") from None


def cache_folder() -> Path:
    """Models that were fetched, warm starts that were made, what was tried; deleting it costs time
    only.
    """
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
        partial.replace(path)


def sync(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    if WINDOWS and path.is_dir():
        return  # a folder cannot be opened there, and needs no syncing
    descriptor = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that at any moment either the old content is there or the new."""
    # a name of its own: whoever else writes the same file now writes another part
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    with writing(path):
        try:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)


def append(path: Path, content: bytes, synced: bool = False) -> None:
    """Write behind what a file has; `synced`: have it on the disk before going on."""
    with writing(path), path.open("ab") as file:
        file.write(content)
        file.flush()
        if synced:
            os.fsync(file.fileno())


def drop_unfinished_line(path: Path) -> None:
    """Cut off a last line that a kill cut short: the next would be written into it."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        os.truncate(path, content.rfind(b"\n") + 1)


def hold(path: Path) -> int | None:
    """Hold a file until the descriptor is closed; None if another process holds it.

    It may be closed by this process or by one that inherits it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if _lock(descriptor):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


@contextmanager
def held(
    path: Path, sleep_s: Callable[[float], None], waits: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Hold a file, as soon as no other process does. `waits` is called once if one does."""
    if (descriptor := hold(path)) is None:
        waits()
        while (descriptor := hold(path)) is None:
            sleep_s(LOOK_EVERY_S)
    try:
        yield
    finally:
        os.close(descriptor)


class NoLocksError(ValueError):
    """The system knows no file locks."""


class _HeldHere:
    """Files that this process holds as often as it likes, and none that it forks."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._descriptors: dict[tuple[int, int], int] = {}  # by device and inode
        self._times: Counter[tuple[int, int]] = Counter()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    @contextmanager
    def hold(self, path: Path) -> Iterator[bool]:
        """False if another process holds it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        found = os.fstat(descriptor)
        file = (found.st_dev, found.st_ino)
        try:
            with self._changing:
                known = file in self._descriptors
                ours = known or _lock(descriptor)
                if ours:
                    self._descriptors.setdefault(file, descriptor)
                    self._times[file] += 1
        except BaseException:
            os.close(descriptor)
            raise
        if known or not ours:
            os.close(descriptor)
        try:
            yield ours
        finally:
            if ours:
                self._let_go(file)

    def _let_go(self, file: tuple[int, int]) -> None:
        with self._changing:
            if file in self._descriptors:  # not in a child that was forked meanwhile
                self._times[file] -= 1
                if not self._times[file]:
                    os.close(self._descriptors.pop(file))

    def _forget(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        self._times.clear()
        self._changing = threading.Lock()  # a thread that is not here may have had it


held_here = _HeldHere().hold


def _lock(descriptor: int) -> bool:
    """Lock an open file in the way of the system; False if another process has it locked."""
    try:
        import fcntl
    except ImportError:
        return _lock_on_windows(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # either word for "somebody has it"
        return False
    return True


def _lock_on_windows(descriptor: int) -> bool:
    try:
        locking: Any = importlib.import_module("msvcrt")
    except ImportError:
        raise NoLocksError(
            "this system has no file locks (neither fcntl nor msvcrt), so that one folder could be "
            "used twice at once; run motley on Linux, macOS or Windows"
        ) from None
    try:
        locking.locking(descriptor, locking.LK_NBLCK, 1)
    except OSError:
        return False
    return True


@contextmanager
def new_run_folder(name: str) -> Iterator[Path]:
    """The next free one under runs/, made at once, so that nobody who starts now takes it too.

    It is gone again if nothing was put into it.
    """
    try:
        Path("runs").mkdir(exist_ok=True)
    except FileExistsError:
        raise ValueError(
            "runs is no folder, and leads to none; delete it, or mount the disk it is on, or "
            "choose a folder (--out, or folder= in Python)"
        ) from None
    folder = next(filter(_made, (Path("runs") / f"{name}-{n:03d}" for n in itertools.count(1))))
    try:
        yield folder
    finally:
        with suppress(OSError):  # it holds a run
            folder.rmdir()


def _made(folder: Path) -> bool:
    """Make a folder; False if it is there."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True
