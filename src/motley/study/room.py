"""Whether one more run fits on the GPU that runs share: by what is free, and by what those before
took. Knows nothing of what is run.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from functools import lru_cache

from motley.clock import Clock, RealClock

SETTLED_S = 60.0  # without growth: models are loaded, graphs captured, and a step was made
MARGIN = 1.2  # of what a run took: the next one may take a little more
NVML = "libnvidia-ml.so.1"  # comes with the driver, and needs no room on the GPU itself

logger = logging.getLogger(__name__)


class Room:
    """One run begins. Others follow once it has settled, as many as fit by what it took.

    What a run takes is the most that was ever in use, per run that was going on.
    """

    def __init__(self, free_bytes: Callable[[], int], clock: Clock = RealClock()) -> None:
        self._free_bytes, self._clock = free_bytes, clock
        self._at_first = free_bytes()
        self._per_run = 0.0
        self._grew_s = clock.elapsed_s()
        self._one_ended = False

    def look(self, running: int) -> None:
        """To be called every second or so, while `running` runs go on."""
        per_run = self._used(self._free_bytes()) / max(1, running)
        if per_run > self._per_run:
            self._per_run, self._grew_s = per_run, self._clock.elapsed_s()

    def began(self) -> None:
        self._grew_s = self._clock.elapsed_s()

    def ended(self) -> None:
        """A run is over, so that what one takes is known."""
        self._one_ended = True

    def fits_another(self, running: int) -> bool:
        """The first always does: it could not have more room."""
        if not running:
            return True
        self.look(running)
        settled = self._clock.elapsed_s() - self._grew_s >= SETTLED_S
        if not settled and not self._one_ended:
            return False
        free = self._free_bytes()
        # those that have just begun will take what they have not taken yet
        unclaimed = max(0.0, running * self._per_run - self._used(free))
        return free - unclaimed >= MARGIN * self._per_run

    def _used(self, free: int) -> int:
        return max(0, self._at_first - free)

    def text(self) -> str:
        gib = 2.0**30
        return (
            f"{self._free_bytes() / gib:.1f} GiB of the GPU were free, and a run takes up to "
            f"{self._per_run / gib:.1f}"
        )


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def gpu_room() -> Room | None:
    """Of the first GPU that may be used. None: nobody can say what is free, and a warning says so.

    The driver is asked: torch would take some of the GPU for the question alone.
    """
    try:
        free_gpu_bytes()
    except OSError as error:
        logger.warning("the GPU's free memory is not known (%s); --jobs alone limits runs", error)
        return None
    return Room(free_gpu_bytes)


def free_gpu_bytes() -> int:
    library, memory = _nvml(), _Memory()
    _check(library.nvmlDeviceGetMemoryInfo(_gpu(), ctypes.byref(memory)), "its memory")
    return int(memory.free)


@lru_cache
def _nvml() -> ctypes.CDLL:
    library = ctypes.CDLL(NVML)
    _check(library.nvmlInit_v2(), "the driver")
    return library


@lru_cache
def _gpu() -> ctypes.c_void_p:
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
    handle, library = ctypes.c_void_p(), _nvml()
    if first.isdecimal():
        error = library.nvmlDeviceGetHandleByIndex_v2(int(first), ctypes.byref(handle))
    else:
        error = library.nvmlDeviceGetHandleByUUID(first.encode(), ctypes.byref(handle))
    _check(error, f"GPU {first}")
    return handle


def _check(error: int, what: str) -> None:
    if error:
        raise OSError(f"{what} could not be asked: NVML error {error}")
