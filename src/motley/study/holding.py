"""Whose a run is while it is made: one process's at a time, and of none that nobody waits for.

Knows nothing of what a run is.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path

from motley.clock import Clock
from motley.files import held

logger = logging.getLogger(__name__)


@contextmanager
def held_alone(folder: Path, clock: Clock) -> Iterator[None]:
    """Be the only process that writes into a folder. Another one that does is waited for.

    Its lock lies beside it as FOLDER.lock, and stays: to delete one that another waits for would
    let two in.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f"{folder.name}.lock")
    words = "%s is being made by another process; waiting for it"
    with held(lock, clock.sleep_s, lambda: logger.warning(words, folder)):
        yield


@cache  # one thread of a process is enough
def end_with_the_study() -> None:
    """From now on this process ends when the one that started it does, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()


def _end_after(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)  # a run that is stopped goes on from its checkpoint
